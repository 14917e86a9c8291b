//! What shared memory is called. Pure.

use fdmap_proto::MAX_NAME_BYTES;
use fdmap_proto::file::check_name;

/// Names under which a file can be known to the service, the first one that is free to be taken: its own as the kernel shows
/// it in `target` (a memfd's, a file's of /dev/shm, a System V key), then one with the number of the process, then with its
/// inode's.
#[must_use]
pub fn candidates(target: &str, pid: u32, inode: u64) -> Vec<String> {
    let path = target.strip_suffix(" (deleted)").unwrap_or(target);
    let own = path.strip_prefix("/memfd:").unwrap_or_else(|| path.rsplit('/').next().unwrap_or(""));
    // What a file's name may not hold, a memfd's may.
    let own: String = own.chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).collect();
    let base = if own.is_empty() { "memory" } else { &own };
    // Anonymous memory has a name that says nothing.
    let anonymous = own.is_empty() || path == "/dev/zero";
    let with_pid = limited(base, &format!("-{pid}"));
    let with_inode = limited(base, &format!("-{pid}-{inode}"));
    let own = Some(limited(base, "")).filter(|_| !anonymous);
    own.into_iter().chain([with_pid, with_inode]).filter(|name| check_name(name).is_ok()).collect()
}

/// `base` and `suffix`, with as much of the former as a name may have.
fn limited(base: &str, suffix: &str) -> String {
    let mut room = MAX_NAME_BYTES.saturating_sub(suffix.len()).min(base.len());
    while !base.is_char_boundary(room) {
        room -= 1;
    }
    format!("{}{suffix}", &base[..room])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first(target: &str) -> String {
        candidates(target, 7, 9).swap_remove(0)
    }

    #[test]
    fn own_names_come_first() {
        assert_eq!(candidates("/memfd:ram (deleted)", 7, 9), ["ram", "ram-7", "ram-7-9"]);
        assert_eq!(first("/dev/shm/mine"), "mine");
        assert_eq!(first("/SYSV0000002a (deleted)"), "SYSV0000002a");
        assert_eq!(first("/dev/zero (deleted)"), "zero-7");
        assert_eq!(first("/memfd: (deleted)"), "memory-7");
        assert_eq!(first("/memfd:a/b (deleted)"), "a_b");
    }

    proptest! {
        #[test]
        fn every_name_is_one(target in "(/memfd:)?.{0,300}", pid: u32, inode: u64) {
            let names = candidates(&target, pid, inode);
            prop_assert!(names.len() >= 2);
            for name in names {
                prop_assert_eq!(check_name(&name), Ok(()));
            }
        }
    }
}
