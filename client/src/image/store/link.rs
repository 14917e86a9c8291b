//! The link from an image to its parent: a relative path in a directory tree, or among the keys of a bucket. Pure.

/// Longest link that is read, bytes.
pub const MAX_LINK_BYTES: u64 = 4096;

/// The path of `to` as seen from `from`. Both are paths from the root without `.` and `..`.
pub fn relative(from: &str, to: &str) -> String {
    let parts = |path| -> Vec<&str> { components(path).collect() };
    let (from, to) = (parts(from), parts(to));
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from[shared..].iter().map(|_| "..");
    let path: Vec<_> = up.chain(to[shared..].iter().copied()).collect();
    if path.is_empty() { ".".to_owned() } else { path.join("/") }
}

/// The path that `link` leads to from `from`, without slashes at its ends. `None`: it is not relative, or leaves the root.
#[cfg(any(feature = "object-store", test))]
pub fn resolve(from: &str, link: &str) -> Option<String> {
    if link.is_empty() || link.starts_with('/') || link.contains(char::is_control) {
        return None;
    }
    let mut path: Vec<&str> = components(from).collect();
    for part in components(link) {
        match part {
            "." => {}
            ".." => {
                path.pop()?;
            }
            part => path.push(part),
        }
    }
    Some(path.join("/"))
}

/// The link in the content of an object: one line. `None` if it is invalid.
pub fn from_content(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    let link = text.strip_suffix('\n').unwrap_or(text);
    (!link.is_empty() && !link.starts_with('/') && !link.contains(char::is_control)).then_some(link)
}

fn components(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_lead_from_one_image_to_the_other() {
        for (from, to, link) in [
            ("/a/b", "/a/c", "../c"),
            ("/a", "/a/b", "b"),
            ("/a/b", "/a", ".."),
            ("/a", "/a", "."),
            ("/a/b/c", "/d", "../../../d"),
            ("", "a/1", "a/1"),
            ("vm/2", "vm/1", "../1"),
        ] {
            assert_eq!(relative(from, to), link, "{from} {to}");
            assert_eq!(resolve(from, link).unwrap(), to.trim_matches('/'), "{from} {to}");
        }
    }

    #[test]
    fn links_out_of_the_root_are_refused() {
        for (from, link) in [("a", "../.."), ("a/b", "../../../c"), ("a", "/b"), ("a", ""), ("a", "b\0")] {
            assert_eq!(resolve(from, link), None, "{from} {link:?}");
        }
    }

    #[test]
    fn content_of_a_link_is_one_line() {
        for (content, link) in [("../1\n", Some("../1")), ("../1", Some("../1")), ("../1\n\n", None)] {
            assert_eq!(from_content(content.as_bytes()), link, "{content:?}");
        }
        for content in ["", "\n", "/1\n", "a\nb\n"] {
            assert_eq!(from_content(content.as_bytes()), None, "{content:?}");
        }
        assert_eq!(from_content(b"\xff"), None);
    }

    proptest! {
        #[test]
        fn each_link_leads_back(from in "([a-c]/){0,3}[a-c]", to in "([a-c]/){0,3}[a-c]") {
            let link = relative(&from, &to);
            prop_assert_eq!(resolve(&from, &link), Some(to));
        }
    }
}
