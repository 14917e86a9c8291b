//! Parsers for files of `/proc/PID`. Pure.

use nix::fcntl::OFlag;

/// Fields of `/proc/PID/fdinfo/N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdInfo {
    /// The flags of the open file description, as in open(2).
    pub flags: u32,
    /// Files registered with an io_uring; `None` for other descriptors.
    pub user_files: Option<u64>,
    /// Buffers registered with an io_uring, and therefore pinned; `None` for other descriptors.
    pub user_buffers: Option<u64>,
}

impl FdInfo {
    /// `None` if `text` has no `flags` field.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let flags = u32::from_str_radix(field(text, "flags")?, 8).ok()?;
        let number = |key| field(text, key).and_then(|value| value.parse().ok());
        Some(Self { flags, user_files: number("UserFiles"), user_buffers: number("UserBufs") })
    }

    /// True if all bits of `flag` are set.
    #[must_use]
    pub fn has(self, flag: OFlag) -> bool {
        i32::try_from(self.flags).is_ok_and(|bits| bits & flag.bits() == flag.bits())
    }

    /// True if the description is open for writing.
    #[must_use]
    pub fn writable(self) -> bool {
        let Ok(bits) = i32::try_from(self.flags) else { return false };
        let mode = bits & OFlag::O_ACCMODE.bits();
        (mode == OFlag::O_WRONLY.bits() || mode == OFlag::O_RDWR.bits()) && !self.has(OFlag::O_PATH)
    }
}

/// `Seccomp` in `/proc/PID/status`: 0 is none, 1 strict mode, 2 filters. `None` on a kernel without seccomp.
#[must_use]
pub fn seccomp(status: &str) -> Option<u32> {
    field(status, "Seccomp")?.parse().ok()
}

fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    value.map(str::trim)
}

/// One mapping in `/proc/PID/smaps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmapsEntry {
    /// First address.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// `MAP_SHARED`.
    pub shared: bool,
    /// The mapping is writable now.
    pub writable: bool,
    /// mprotect(2) can make the mapping writable (`mw`).
    pub may_write: bool,
    /// Inode number; 0 without a file.
    pub inode: u64,
    /// Path or name of what is mapped; may be empty.
    pub name: String,
    /// Registered with a userfaultfd in write-protect mode (`uw`).
    pub write_protect: bool,
    /// Registered with a userfaultfd in missing or minor mode (`um`, `ui`).
    pub other_faults: bool,
}

impl SmapsEntry {
    /// True if the name is that of shared memory: a memfd, a file in /dev/shm, a System V segment, anonymous shared memory.
    #[must_use]
    pub fn is_shared_memory(&self) -> bool {
        const PREFIXES: [&str; 4] = ["/memfd:", "/dev/shm/", "/SYSV", "/anon_hugepage"];
        PREFIXES.iter().any(|prefix| self.name.starts_with(prefix)) || self.name == "/dev/zero (deleted)"
    }
}

/// Parses `/proc/PID/smaps`. `None` if `text` is in another format, or lacks `VmFlags`.
#[must_use]
pub fn smaps(text: &str) -> Option<Vec<SmapsEntry>> {
    let mut entries: Vec<SmapsEntry> = Vec::new();
    let mut flags_seen = 0;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let entry = entries.last_mut()?;
            let has = |flag| flags.split_ascii_whitespace().any(|set| set == flag);
            (entry.may_write, entry.write_protect) = (has("mw"), has("uw"));
            entry.other_faults = has("um") || has("ui");
            flags_seen += 1;
        } else if let Some(entry) = smaps_head(line) {
            entries.push(entry);
        } else if entries.is_empty() {
            return None;
        }
    }
    (flags_seen == entries.len()).then_some(entries)
}

/// Parses the first line of an entry, such as `7f00-7f10 rw-s 00000000 00:01 1049    /memfd:ram (deleted)`. `None` for the lines
/// that follow it.
fn smaps_head(line: &str) -> Option<SmapsEntry> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let permissions = words.next().filter(|permissions| permissions.len() == 4)?.as_bytes();
    let (shared, writable) = (permissions[3] == b's', permissions[1] == b'w');
    let inode = words.nth(2)?.parse().ok()?;
    let name = words.next().unwrap_or("").trim_start().to_owned();
    Some(SmapsEntry {
        start,
        end,
        shared,
        writable,
        may_write: false,
        inode,
        name,
        write_protect: false,
        other_faults: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
Rss:                   4 kB
VmFlags: rd wr mr mw me ac
7f8a286d3000-7f8a287d3000 r--s 00001000 00:01 8437619                    /memfd:guest ram (deleted)
Size:               1024 kB
ProtectionKey:         0
VmFlags: rd sh mr mw me ms uw
7f8a287d3000-7f8a287d4000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
VmFlags: rd wr sh mr mw me ms um
7f8a287d4000-7f8a287d5000 r--s 00000000 08:01 78 
VmFlags: rd sh mr me
";

    #[test]
    fn mappings_are_parsed_with_their_flags() {
        let all = smaps(SMAPS).unwrap();
        assert_eq!(all.len(), 4);
        assert!(!all[0].shared && all[0].writable && !all[0].is_shared_memory());
        let ram = &all[1];
        assert_eq!((ram.start, ram.end, ram.inode), (0x7f8a_286d_3000, 0x7f8a_287d_3000, 8_437_619));
        assert_eq!(ram.name, "/memfd:guest ram (deleted)");
        assert!(ram.shared && !ram.writable && ram.may_write && ram.is_shared_memory());
        assert!(ram.write_protect && !ram.other_faults);
        assert!(all[2].is_shared_memory() && all[2].other_faults && !all[2].write_protect);
        assert!(all[3].shared && !all[3].may_write && all[3].name.is_empty());
    }

    #[test]
    fn smaps_without_flags_is_refused() {
        let cut = SMAPS.rsplit_once("VmFlags").unwrap().0;
        assert_eq!(smaps(cut), None);
        assert_eq!(smaps("nonsense\n"), None);
        assert_eq!(smaps(""), Some(vec![]), "a process without mappings");
    }

    #[test]
    fn descriptor_flags_are_parsed() {
        let plain = FdInfo::parse("pos:\t0\nflags:\t02100002\nmnt_id:\t0\nino:\t8437619\n").unwrap();
        assert!(plain.writable() && !plain.has(OFlag::O_DIRECT) && plain.has(OFlag::O_CLOEXEC));
        assert_eq!((plain.user_files, plain.user_buffers), (None, None));
        let direct = FdInfo { flags: OFlag::O_DIRECT.bits().cast_unsigned(), ..plain };
        assert!(direct.has(OFlag::O_DIRECT) && !direct.writable(), "read-only");
        let path = FdInfo { flags: (OFlag::O_PATH | OFlag::O_RDWR).bits().cast_unsigned(), ..plain };
        assert!(!path.writable());
        let ring = "pos:\t0\nflags:\t02000002\nSqThread:\t-1\nUserFiles:\t3\nUserBufs:\t2\nPollList:\n";
        let ring = FdInfo::parse(ring).unwrap();
        assert_eq!((ring.user_files, ring.user_buffers), (Some(3), Some(2)));
        assert_eq!(FdInfo::parse("pos:\t0\n"), None);
        assert_eq!(FdInfo::parse("flags:\t9\n"), None, "not an octal number");
    }

    #[test]
    fn seccomp_mode_is_not_confused_with_the_filter_count() {
        assert_eq!(seccomp("Name:\tx\nSeccomp_filters:\t3\nSeccomp:\t2\n"), Some(2));
        assert_eq!(seccomp("Name:\tx\n"), None);
    }
}
