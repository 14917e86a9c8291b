//! Conversions between protobuf messages and domain types. A message with an invalid value is rejected with a
//! [`ConvertError`]; no value is guessed.

mod error;
mod files;
mod host;
mod pages;
mod swap;
mod time;
mod tracking;

pub use crate::attributes::AttributeSet;
pub use crate::file::FileName;
pub use error::ConvertError;
pub use files::{
    backing_from_wire, backing_to_wire, lifetime_from_wire, lifetime_to_wire, seals_from_wire, seals_to_wire,
};
pub use pages::{probe_from_wire, state_from_wire};
pub use time::{duration_from_wire, duration_to_wire, timestamp_from_wire, timestamp_to_wire};
pub use tracking::generation_from_wire;

/// Decodes an enum value. Rejects 0, which is "unspecified" in every enum.
fn known<T: TryFrom<i32>>(field: &'static str, value: i32) -> Result<T, ConvertError> {
    if value == 0 {
        return Err(ConvertError::UnknownEnum { field, value });
    }
    T::try_from(value).map_err(|_| ConvertError::UnknownEnum { field, value })
}

/// Maps the variants of a domain enum to the variants of the same name of a generated enum, and back. `UNSPECIFIED` and
/// unknown values are rejected.
macro_rules! wire_enum {
    ($domain:ty, $wire:ty, $field:literal, $decode:ident: $($variant:ident),+ $(,)?) => {
        impl From<$domain> for $wire {
            fn from(value: $domain) -> Self {
                match value {
                    $(<$domain>::$variant => Self::$variant,)+
                }
            }
        }

        fn $decode(value: i32) -> Result<$domain, ConvertError> {
            match known::<$wire>($field, value)? {
                $(<$wire>::$variant => Ok(<$domain>::$variant),)+
                <$wire>::Unspecified => Err(ConvertError::UnknownEnum { field: $field, value }),
            }
        }
    };
}

use wire_enum;

#[cfg(test)]
mod tests;
