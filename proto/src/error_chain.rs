//! The one way in which fdmap prints an error for people and logs.

use std::error::Error;

/// Formats an error and all its sources on one line, separated by `": "`.
///
/// Error types of this workspace never repeat a source in their own text, so the line has no duplicates.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let sources = std::iter::successors(error.source(), |error| (*error).source());
    sources.fold(error.to_string(), |line, source| line + ": " + &source.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("open {0}")]
    struct Outer(&'static str, #[source] std::io::Error);

    #[test]
    fn chain_lists_each_source_once_in_order() {
        let inner = std::io::Error::other("permission denied");
        assert_eq!(error_chain(&Outer("/run/fdmap", inner)), "open /run/fdmap: permission denied");
    }
}
