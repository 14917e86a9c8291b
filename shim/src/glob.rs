//! Patterns for names: `*` stands for any bytes, `?` for any one, all else for itself. Pure.

/// Patterns, of which one must fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns(Vec<Vec<u8>>);

impl Patterns {
    /// Parses a list with commas; empty words are left out.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let words = text.split(|byte| *byte == b',').filter(|word| !word.is_empty());
        Self(words.map(<[u8]>::to_vec).collect())
    }

    /// True if there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if one of them fits the whole name. Allocates nothing.
    #[must_use]
    pub fn fit(&self, name: &[u8]) -> bool {
        self.0.iter().any(|pattern| fits(pattern, name))
    }
}

/// Linear in practice: after a mismatch only the last `*` is tried with one byte more.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    let mut star = None;
    while read < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at + 1, read));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[read] => {
                at += 1;
                read += 1;
            }
            _ => {
                let Some((after, from)) = star else { return false };
                star = Some((after, from + 1));
                (at, read) = (after, from + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The obvious way, exponential in the number of stars.
    fn naive(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), None) => naive(rest, name),
            (Some((b'*', rest)), Some((_, tail))) => naive(rest, name) || naive(pattern, tail),
            (Some((byte, rest)), Some((first, tail))) => {
                (*byte == b'?' || byte == first) && naive(rest, tail)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn fits_what_the_obvious_way_fits(pattern in "[ab*?]{0,7}", name in "[ab]{0,8}") {
            prop_assert_eq!(fits(pattern.as_bytes(), name.as_bytes()), naive(pattern.as_bytes(), name.as_bytes()));
        }
    }

    #[test]
    fn one_of_several_patterns_is_enough() {
        let patterns = Patterns::parse(b"ram*,,vhost-?");
        assert!(patterns.fit(b"ram") && patterns.fit(b"ram0") && patterns.fit(b"vhost-1"));
        assert!(!patterns.fit(b"vhost-12") && !patterns.fit(b"my ram") && !patterns.fit(b""));
        assert!(!Patterns::default().fit(b"anything"));
        assert!(Patterns::parse(b"*").fit(b""));
    }
}
