//! [`flag_set!`]: a `bitflags` type whose flags are the variants of an enum.

/// Defines a `bitflags` set with one flag per variant of an enum, and the conversions from variants.
macro_rules! flag_set {
    (
        $(#[$meta:meta])*
        $set:ident: $bits:ident of $element:ident { $($flag:ident = $value:literal => $variant:ident),+ $(,)? }
    ) => {
        bitflags::bitflags! {
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            pub struct $set: $bits {
                $(
                    #[doc = concat!("Contains [`", stringify!($element), "::", stringify!($variant), "`].")]
                    const $flag = $value;
                )+
            }
        }

        impl $set {
            /// The empty set.
            pub const NONE: Self = Self::empty();
            /// The set of all flags.
            pub const ALL: Self = Self::all();

            /// Returns the set with one element.
            #[must_use]
            pub const fn of(element: $element) -> Self {
                match element {
                    $($element::$variant => Self::$flag,)+
                }
            }

            /// Returns true if the set contains `element`.
            #[must_use]
            pub const fn has(self, element: $element) -> bool {
                self.contains(Self::of(element))
            }

            /// Iterates over the elements in declaration order. Unknown bits are skipped.
            pub fn elements(self) -> impl Iterator<Item = $element> {
                <$element as strum::VariantArray>::VARIANTS
                    .iter()
                    .copied()
                    .filter(move |element| self.has(*element))
            }
        }

        impl From<$element> for $set {
            fn from(element: $element) -> Self {
                Self::of(element)
            }
        }

        impl FromIterator<$element> for $set {
            fn from_iter<I: IntoIterator<Item = $element>>(elements: I) -> Self {
                elements.into_iter().map(Self::of).collect()
            }
        }

        impl serde::Serialize for $set {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_seq(self.elements())
            }
        }
    };
}

pub(crate) use flag_set;
