//! What an interposed function does: the shim's work, or nothing but what it always did, and why. Pure.

use nix::libc;

use crate::config::Config;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The shim's work.
    Serve,
    /// The real function alone.
    Bypass(Reason),
}

/// Why nothing is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The mapping has no file.
    Anonymous,
    /// Writes to the mapping do not reach the file.
    Private,
    /// The file is none that could be a memfd.
    NoMemfd,
    /// It is smaller than is taken over.
    Small,
    /// It is not open for reading and writing.
    ReadOnly,
    /// Its name is not one that is taken over.
    Name,
}

/// Whether to look at the file of a new mapping.
pub const fn mapping(flags: libc::c_int, fd: libc::c_int) -> Decision {
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 {
        return Decision::Bypass(Reason::Anonymous);
    }
    match flags & libc::MAP_TYPE {
        libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE => Decision::Serve,
        _ => Decision::Bypass(Reason::Private),
    }
}

/// What is known of a file that was mapped.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// `st_mode`
    pub mode: u32,
    /// `st_nlink`
    pub links: u64,
    /// Bytes.
    pub size: u64,
    /// `O_RDONLY` and the like, of the descriptor.
    pub access: libc::c_int,
    /// What `/proc/self/fd` shows.
    pub link: &'a [u8],
}

/// Whether the file of a new mapping is taken over.
pub fn file(found: &Found<'_>, config: &Config) -> Decision {
    let Some(name) = memfd_name(found) else { return Decision::Bypass(Reason::NoMemfd) };
    if found.access & libc::O_ACCMODE != libc::O_RDWR {
        return Decision::Bypass(Reason::ReadOnly);
    }
    if !config.take.fit(name) && !config.make.fit(name) {
        return Decision::Bypass(Reason::Name);
    }
    if found.size < config.min_size && !config.make.fit(name) {
        return Decision::Bypass(Reason::Small);
    }
    Decision::Serve
}

/// The name that a memfd was made with.
pub fn memfd_name<'a>(found: &Found<'a>) -> Option<&'a [u8]> {
    if found.mode & libc::S_IFMT != libc::S_IFREG || found.links != 0 {
        return None;
    }
    found.link.strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")
}

/// Whether the service is to make a memfd.
pub fn memfd(name: &[u8], config: &Config) -> Decision {
    if config.make.fit(name) { Decision::Serve } else { Decision::Bypass(Reason::Name) }
}

/// The process whose page tables a path tells of, as `/proc/self/fd` shows it: `/proc/PID/pagemap` or
/// `/proc/PID/task/TID/pagemap`.
pub fn pagemap_of(link: &[u8]) -> Option<i32> {
    let inner = link.strip_prefix(b"/proc/")?.strip_suffix(b"/pagemap")?;
    let mut words = inner.split(|byte| *byte == b'/');
    let pid = number(words.next()?)?;
    match (words.next(), words.next(), words.next()) {
        (None, ..) => Some(pid),
        (Some(b"task"), Some(thread), None) => number(thread).map(|_| pid),
        _ => None,
    }
}

fn number(word: &[u8]) -> Option<i32> {
    std::str::from_utf8(word).ok()?.parse().ok().filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::glob::Patterns;

    fn config() -> Config {
        Config {
            mode: crate::config::Mode::On,
            take: Patterns::parse(b"ram*"),
            make: Patterns::parse(b"made"),
            min_size: 4096,
            track: true,
            keep: false,
            policy: None,
        }
    }

    const RAM: Found<'_> = Found {
        mode: libc::S_IFREG | 0o777,
        links: 0,
        size: 8192,
        access: libc::O_RDWR | libc::O_LARGEFILE,
        link: b"/memfd:ram0 (deleted)",
    };

    #[test]
    fn shared_mappings_of_files_are_looked_at_and_others_are_not() {
        assert_eq!(mapping(libc::MAP_SHARED, 3), Decision::Serve);
        assert_eq!(mapping(libc::MAP_SHARED_VALIDATE | libc::MAP_FIXED, 0), Decision::Serve);
        assert_eq!(mapping(libc::MAP_PRIVATE, 3), Decision::Bypass(Reason::Private));
        assert_eq!(mapping(libc::MAP_SHARED, -1), Decision::Bypass(Reason::Anonymous));
        assert_eq!(mapping(libc::MAP_SHARED | libc::MAP_ANONYMOUS, 3), Decision::Bypass(Reason::Anonymous));
    }

    #[test]
    fn memfds_are_taken_by_name_and_size() {
        let config = config();
        assert_eq!(file(&RAM, &config), Decision::Serve);
        let bypassed = |found| match file(&found, &config) {
            Decision::Bypass(reason) => reason,
            Decision::Serve => panic!("{found:?} is taken"),
        };
        assert_eq!(bypassed(Found { size: 4095, ..RAM }), Reason::Small);
        assert_eq!(bypassed(Found { access: libc::O_RDONLY, ..RAM }), Reason::ReadOnly);
        assert_eq!(bypassed(Found { link: b"/memfd:rom (deleted)", ..RAM }), Reason::Name);
        assert_eq!(bypassed(Found { link: b"/dev/shm/ram0 (deleted)", ..RAM }), Reason::NoMemfd);
        assert_eq!(bypassed(Found { links: 1, ..RAM }), Reason::NoMemfd);
        assert_eq!(bypassed(Found { mode: libc::S_IFCHR | 0o666, ..RAM }), Reason::NoMemfd);
        let made = Found { link: b"/memfd:made (deleted)", size: 0, ..RAM };
        assert_eq!(file(&made, &config), Decision::Serve, "what the service made is its own at any size");
    }

    #[test]
    fn pagemaps_are_told_by_their_path() {
        assert_eq!(pagemap_of(b"/proc/77/pagemap"), Some(77));
        assert_eq!(pagemap_of(b"/proc/77/task/78/pagemap"), Some(77));
        for other in [
            "/proc/self/pagemap",
            "/proc/77/maps",
            "/proc/0/pagemap",
            "/proc/77/task/pagemap",
            "/tmp/pagemap",
            "/proc/pagemap",
        ] {
            assert_eq!(pagemap_of(other.as_bytes()), None, "{other}");
        }
    }
}
