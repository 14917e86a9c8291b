//! The text of an error of an object store. Pure.

use std::io::ErrorKind;

/// Longest text, characters: a store may answer with a whole page.
const MAX_CHARS: usize = 300;

/// Kind of an error.
pub(super) fn kind(error: &object_store::Error) -> ErrorKind {
    match error {
        object_store::Error::NotFound { .. } => ErrorKind::NotFound,
        object_store::Error::AlreadyExists { .. } => ErrorKind::AlreadyExists,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            ErrorKind::PermissionDenied
        }
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
            ErrorKind::Unsupported
        }
        // See `StoreError::is_transient`.
        error if is_transient(error) => ErrorKind::TimedOut,
        _ => ErrorKind::Other,
    }
}

/// True if the request may succeed when it is made again: it was not refused.
pub(super) fn is_transient(error: &object_store::Error) -> bool {
    let text = error.to_string();
    // Request Timeout and Too Many Requests. Refused lists have no kind of their own.
    let is_delayed = ["408", "429"].iter().any(|code| text.contains(&format!("status code: {code}")));
    matches!(error, object_store::Error::Generic { .. }) && (is_delayed || !text.contains("status code: 4"))
}

/// What the store answered, or why it did not, on one line.
pub(super) fn explain(error: &object_store::Error) -> String {
    if let object_store::Error::Precondition { .. } = error {
        return "the object was replaced since it was opened".to_owned();
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    condense(&text)
}

/// The code and message of a store's answer in a text, else the text without its start, which repeats the operation.
fn condense(text: &str) -> String {
    if let Some(code) = element(text, "Code") {
        return clip(&match element(text, "Message") {
            Some(message) => format!("{code}: {message}"),
            None => code.to_owned(),
        });
    }
    if text.contains("/latest/api/token") || text.contains("/latest/meta-data") {
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; this host has no instance role"
            .to_owned();
    }
    let answer = text.split_once(" - ").map_or(text, |(_, answer)| answer);
    clip(answer.trim_start_matches("Server returned non-2xx status code: ").trim_end_matches([':', ' ']))
}

/// Content of an XML element.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    (!content.is_empty()).then_some(content)
}

fn clip(text: &str) -> String {
    let printed: String =
        text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MAX_CHARS).collect();
    if printed.len() < text.len() { format!("{printed}...") } else { printed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_requests_are_final() {
        let generic =
            |text: &'static str| object_store::Error::Generic { store: "S3", source: text.to_owned().into() };
        assert!(is_transient(&generic("error reading a body from connection")));
        assert!(is_transient(&generic("Server returned non-2xx status code: 503 Slow Down: ")));
        assert!(is_transient(&generic("Server returned non-2xx status code: 429 Too Many Requests: ")));
        assert_eq!(kind(&generic("error reading a body from connection")), ErrorKind::TimedOut);
        let refused = generic("Server returned non-2xx status code: 404 Not Found: <Error>");
        assert!(!is_transient(&refused));
        assert_eq!(kind(&refused), ErrorKind::Other);
        let missing = object_store::Error::NotFound { path: "a".to_owned(), source: "none".into() };
        assert!(!is_transient(&missing));
    }

    #[test]
    fn answers_are_condensed() {
        let start = "Generic S3 error: Error performing GET http://127.0.0.1:1/b in 3ms, after 10 retries";
        for (text, expected) in [
            (
                "status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>The \
                 signature differs</Message><StringToSign>secret</StringToSign></Error>",
                "SignatureDoesNotMatch: The signature differs",
            ),
            ("<Error><Code>NoSuchBucket</Code></Error>", "NoSuchBucket"),
            ("a - Server returned non-2xx status code: 403 Forbidden: ", "403 Forbidden"),
            (&format!("{start} - HTTP error: error sending request"), "HTTP error: error sending request"),
            (
                "Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error",
                "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; this host has no instance role",
            ),
            ("two\nlines", "two lines"),
        ] {
            assert_eq!(condense(text), expected);
        }
        assert_eq!(condense(&"x".repeat(1000)), format!("{}...", "x".repeat(MAX_CHARS)));
    }
}
