//! Glob patterns for memfd names: `*` matches any bytes, `?` one byte, every other byte itself. Pure.

/// A list of patterns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns(Vec<Vec<u8>>);

impl Patterns {
    /// Parses a comma-separated list; empty elements are ignored.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let words = text.split(|byte| *byte == b',').filter(|word| !word.is_empty());
        Self(words.map(<[u8]>::to_vec).collect())
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks whether a pattern matches the whole name. Does not allocate.
    #[must_use]
    pub fn matches(&self, name: &[u8]) -> bool {
        self.0.iter().any(|pattern| pattern_matches(pattern, name))
    }
}

/// Backtracks only to the last `*`, so the cost is linear for typical patterns.
fn pattern_matches(pattern: &[u8], name: &[u8]) -> bool {
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

    /// Recursive reference implementation, exponential in the number of stars.
    fn oracle(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), None) => oracle(rest, name),
            (Some((b'*', rest)), Some((_, tail))) => oracle(rest, name) || oracle(pattern, tail),
            (Some((byte, rest)), Some((first, tail))) => {
                (*byte == b'?' || byte == first) && oracle(rest, tail)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn pattern_matches_what_the_oracle_matches(pattern in "[ab*?]{0,7}", name in "[ab]{0,8}") {
            prop_assert_eq!(pattern_matches(pattern.as_bytes(), name.as_bytes()), oracle(pattern.as_bytes(), name.as_bytes()));
        }
    }

    #[test]
    fn name_matches_if_one_pattern_of_the_list_matches() {
        let patterns = Patterns::parse(b"ram*,,vhost-?");
        assert!(patterns.matches(b"ram") && patterns.matches(b"ram0") && patterns.matches(b"vhost-1"));
        assert!(!patterns.matches(b"vhost-12") && !patterns.matches(b"my ram") && !patterns.matches(b""));
        assert!(!Patterns::default().matches(b"anything"));
        assert!(Patterns::parse(b"*").matches(b""));
    }
}
