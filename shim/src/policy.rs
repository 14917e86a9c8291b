//! Decisions of the interposed functions: serve the call, or bypass the shim for a reason. Pure.

use nix::libc;

use crate::config::Config;

/// What an interposed function does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Do the shim's work.
    Serve,
    /// Call only the libc function.
    Bypass(Reason),
}

/// Why a call bypasses the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The mapping has no file.
    Anonymous,
    /// Writes to the mapping do not reach the file.
    Private,
    /// The file is not a memfd.
    NotMemfd,
    /// The file is smaller than the configured minimum.
    TooSmall,
    /// The descriptor is not open for reading and writing.
    ReadOnly,
    /// No configured pattern matches the name.
    NameMismatch,
}

/// Decides from the mmap arguments whether to inspect the file of a new mapping.
pub const fn decide_mapping(flags: libc::c_int, fd: libc::c_int) -> Decision {
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 {
        return Decision::Bypass(Reason::Anonymous);
    }
    match flags & libc::MAP_TYPE {
        libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE => Decision::Serve,
        _ => Decision::Bypass(Reason::Private),
    }
}

/// Properties of a mapped file and its descriptor.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts<'a> {
    /// `st_mode`
    pub mode: u32,
    /// `st_nlink`
    pub links: u64,
    /// Size in bytes.
    pub size: u64,
    /// File status flags of the descriptor (`F_GETFL`).
    pub status_flags: libc::c_int,
    /// Target of `/proc/self/fd/N`.
    pub link_target: &'a [u8],
}

/// Decides whether to adopt the file of a new mapping.
pub fn decide_adoption(facts: &FileFacts<'_>, config: &Config) -> Decision {
    let Some(name) = memfd_name(facts) else { return Decision::Bypass(Reason::NotMemfd) };
    if facts.status_flags & libc::O_ACCMODE != libc::O_RDWR {
        return Decision::Bypass(Reason::ReadOnly);
    }
    if !config.adopt.matches(name) && !config.create.matches(name) {
        return Decision::Bypass(Reason::NameMismatch);
    }
    if facts.size < config.min_size && !config.create.matches(name) {
        return Decision::Bypass(Reason::TooSmall);
    }
    Decision::Serve
}

/// Returns the name passed to `memfd_create`; `None` if the file is not a memfd.
pub fn memfd_name<'a>(facts: &FileFacts<'a>) -> Option<&'a [u8]> {
    if facts.mode & libc::S_IFMT != libc::S_IFREG || facts.links != 0 {
        return None;
    }
    facts.link_target.strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")
}

/// Decides whether the service creates a memfd of this name.
pub fn decide_create(name: &[u8], config: &Config) -> Decision {
    if config.create.matches(name) { Decision::Serve } else { Decision::Bypass(Reason::NameMismatch) }
}

/// Returns the process of a pagemap path, as in the target of `/proc/self/fd/N`: `/proc/PID/pagemap` or `/proc/PID/task/TID/pagemap`.
pub fn pagemap_pid(link: &[u8]) -> Option<i32> {
    let inner = link.strip_prefix(b"/proc/")?.strip_suffix(b"/pagemap")?;
    let mut words = inner.split(|byte| *byte == b'/');
    let pid = parse_id(words.next()?)?;
    match (words.next(), words.next(), words.next()) {
        (None, ..) => Some(pid),
        (Some(b"task"), Some(thread), None) => parse_id(thread).map(|_| pid),
        _ => None,
    }
}

fn parse_id(word: &[u8]) -> Option<i32> {
    std::str::from_utf8(word).ok()?.parse().ok().filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::glob::Patterns;

    fn config() -> Config {
        Config {
            mode: crate::config::Mode::On,
            adopt: Patterns::parse(b"ram*"),
            create: Patterns::parse(b"made"),
            min_size: 4096,
            track: true,
            keep: false,
            policy: None,
        }
    }

    const RAM: FileFacts<'_> = FileFacts {
        mode: libc::S_IFREG | 0o777,
        links: 0,
        size: 8192,
        status_flags: libc::O_RDWR | libc::O_LARGEFILE,
        link_target: b"/memfd:ram0 (deleted)",
    };

    #[test]
    fn only_shared_file_mappings_are_served() {
        assert_eq!(decide_mapping(libc::MAP_SHARED, 3), Decision::Serve);
        assert_eq!(decide_mapping(libc::MAP_SHARED_VALIDATE | libc::MAP_FIXED, 0), Decision::Serve);
        assert_eq!(decide_mapping(libc::MAP_PRIVATE, 3), Decision::Bypass(Reason::Private));
        assert_eq!(decide_mapping(libc::MAP_SHARED, -1), Decision::Bypass(Reason::Anonymous));
        assert_eq!(
            decide_mapping(libc::MAP_SHARED | libc::MAP_ANONYMOUS, 3),
            Decision::Bypass(Reason::Anonymous)
        );
    }

    #[test]
    fn memfds_are_adopted_by_name_and_size() {
        let config = config();
        assert_eq!(decide_adoption(&RAM, &config), Decision::Serve);
        let bypassed = |facts| match decide_adoption(&facts, &config) {
            Decision::Bypass(reason) => reason,
            Decision::Serve => panic!("{facts:?} is adopted"),
        };
        assert_eq!(bypassed(FileFacts { size: 4095, ..RAM }), Reason::TooSmall);
        assert_eq!(bypassed(FileFacts { status_flags: libc::O_RDONLY, ..RAM }), Reason::ReadOnly);
        assert_eq!(bypassed(FileFacts { link_target: b"/memfd:rom (deleted)", ..RAM }), Reason::NameMismatch);
        assert_eq!(bypassed(FileFacts { link_target: b"/dev/shm/ram0 (deleted)", ..RAM }), Reason::NotMemfd);
        assert_eq!(bypassed(FileFacts { links: 1, ..RAM }), Reason::NotMemfd);
        assert_eq!(bypassed(FileFacts { mode: libc::S_IFCHR | 0o666, ..RAM }), Reason::NotMemfd);
        let created = FileFacts { link_target: b"/memfd:made (deleted)", size: 0, ..RAM };
        assert_eq!(
            decide_adoption(&created, &config),
            Decision::Serve,
            "a memfd created by the service is served at any size"
        );
    }

    #[test]
    fn pagemaps_are_recognised_by_their_path() {
        assert_eq!(pagemap_pid(b"/proc/77/pagemap"), Some(77));
        assert_eq!(pagemap_pid(b"/proc/77/task/78/pagemap"), Some(77));
        for other in [
            "/proc/self/pagemap",
            "/proc/77/maps",
            "/proc/0/pagemap",
            "/proc/77/task/pagemap",
            "/tmp/pagemap",
            "/proc/pagemap",
        ] {
            assert_eq!(pagemap_pid(other.as_bytes()), None, "{other}");
        }
    }
}
