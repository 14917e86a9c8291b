//! Where an image is kept: a directory, or a prefix of the keys of an S3 bucket. Pure.

use std::fmt;
use std::path::{Path, PathBuf};

/// Start of the URL of a bucket.
const S3: &str = "s3://";
const FILE: &str = "file://";

/// Directory or URL of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageLocation {
    Directory(PathBuf),
    /// `s3://BUCKET/PREFIX`
    Bucket {
        bucket: String,
        /// Without slashes at its ends; may be empty.
        prefix: String,
    },
}

impl ImageLocation {
    /// Reads a path, or a URL with the scheme `file` or `s3`.
    ///
    /// # Errors
    /// The reason why a URL is invalid.
    pub fn parse(text: &Path) -> Result<Self, String> {
        let Some(url) = text.to_str().filter(|text| has_scheme(text)) else {
            return Ok(Self::Directory(text.to_owned()));
        };
        if let Some(path) = url.strip_prefix(FILE) {
            return match path.strip_prefix("localhost").unwrap_or(path) {
                path if path.starts_with('/') && !path.contains('%') => Ok(Self::Directory(path.into())),
                path if path.starts_with('/') => {
                    Err(format!("{url}: percent-encoding is not supported; give the path itself"))
                }
                _ => Err(format!("{url}: expected file:///PATH")),
            };
        }
        let Some(rest) = url.strip_prefix(S3) else {
            return Err(format!("{url}: expected a path, file:///PATH or s3://BUCKET/PREFIX"));
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_name) {
            return Err(format!("{url}: invalid bucket {bucket:?}"));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        let is_invalid = |part: &str| matches!(part, "" | "." | "..") || part.contains(char::is_control);
        if !prefix.is_empty() && prefix.split('/').any(is_invalid) {
            return Err(format!("{url}: invalid prefix {prefix:?}"));
        }
        Ok(Self::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for ImageLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Bucket { bucket, prefix } if prefix.is_empty() => write!(f, "{S3}{bucket}"),
            Self::Bucket { bucket, prefix } => write!(f, "{S3}{bucket}/{prefix}"),
        }
    }
}

/// True for text that starts as a URL does: letters, then `://`.
fn has_scheme(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty()
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
            && !scheme.starts_with('.')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ImageLocation, String> {
        ImageLocation::parse(Path::new(text))
    }

    #[test]
    fn paths_and_urls_are_distinguished() {
        let directory = |path: &str| ImageLocation::Directory(path.into());
        let bucket = |bucket: &str, prefix: &str| ImageLocation::Bucket {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        };
        for (text, expected) in [
            ("images/1", directory("images/1")),
            ("./s3://b", directory("./s3://b")),
            ("a/b://c", directory("a/b://c")),
            ("file:///var/images/1", directory("/var/images/1")),
            ("file://localhost/var", directory("/var")),
            ("s3://vm-images", bucket("vm-images", "")),
            ("s3://vm-images/", bucket("vm-images", "")),
            ("s3://b/a/b c/1/", bucket("b", "a/b c/1")),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_urls_are_refused_with_the_reason() {
        for (text, reason) in [
            ("gs://b/1", "gs://b/1: expected a path, file:///PATH or s3://BUCKET/PREFIX"),
            ("s3:///1", "s3:///1: invalid bucket \"\""),
            ("s3://user:key@host/1", "s3://user:key@host/1: invalid bucket \"user:key@host\""),
            ("s3://b//1", "s3://b//1: invalid prefix \"/1\""),
            ("s3://b/1/../2", "s3://b/1/../2: invalid prefix \"1/../2\""),
            ("file://host/1", "file://host/1: expected file:///PATH"),
            ("file:///a%20b", "file:///a%20b: percent-encoding is not supported; give the path itself"),
        ] {
            assert_eq!(parse(text), Err(reason.to_owned()), "{text}");
        }
    }

    #[test]
    fn location_is_printed_as_it_is_written() {
        for text in ["images/1", "s3://b", "s3://b/a/1"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }
}
