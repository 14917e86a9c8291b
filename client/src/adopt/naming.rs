//! Names under which adopted files are registered. Pure.

use fdmap_proto::MAX_NAME_BYTES;
use fdmap_proto::file::{check_name, is_invisible};

/// Candidate names for a file, in order of preference: the name in `target`, which the kernel shows for the file (a memfd's
/// name, the last component of a path, a System V key); that name with the pid; that name with the pid and the inode number.
pub(super) fn candidates(target: &str, pid: u32, inode: u64) -> Vec<String> {
    let path = target.strip_suffix(" (deleted)").unwrap_or(target);
    let own = path.strip_prefix("/memfd:").unwrap_or_else(|| path.rsplit('/').next().unwrap_or(""));
    // A memfd's name may contain characters that a registered name may not.
    let own: String = own.chars().map(|c| if c == '/' || is_invisible(c) { '_' } else { c }).collect();
    let base = if own.is_empty() { "memory" } else { &own };
    // All anonymous shared memory is called /dev/zero.
    let anonymous = own.is_empty() || path == "/dev/zero";
    let with_pid = with_suffix(base, &format!("-{pid}"));
    let with_inode = with_suffix(base, &format!("-{pid}-{inode}"));
    let own = Some(with_suffix(base, "")).filter(|_| !anonymous);
    own.into_iter().chain([with_pid, with_inode]).filter(|name| check_name(name).is_ok()).collect()
}

/// `base` followed by `suffix`; `base` is cut to fit [`MAX_NAME_BYTES`].
fn with_suffix(base: &str, suffix: &str) -> String {
    let mut length = MAX_NAME_BYTES.saturating_sub(suffix.len()).min(base.len());
    while !base.is_char_boundary(length) {
        length -= 1;
    }
    format!("{}{suffix}", &base[..length])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first(target: &str) -> String {
        candidates(target, 7, 9).swap_remove(0)
    }

    #[test]
    fn own_name_is_preferred() {
        assert_eq!(candidates("/memfd:ram (deleted)", 7, 9), ["ram", "ram-7", "ram-7-9"]);
        assert_eq!(first("/dev/shm/mine"), "mine");
        assert_eq!(first("/SYSV0000002a (deleted)"), "SYSV0000002a");
        assert_eq!(first("/dev/zero (deleted)"), "zero-7");
        assert_eq!(first("/memfd: (deleted)"), "memory-7");
        assert_eq!(first("/memfd:a/b (deleted)"), "a_b");
    }

    proptest! {
        #[test]
        fn every_candidate_is_a_valid_name(target in "(/memfd:)?.{0,300}", pid: u32, inode: u64) {
            let names = candidates(&target, pid, inode);
            prop_assert!(names.len() >= 2);
            for name in names {
                prop_assert_eq!(check_name(&name), Ok(()));
            }
        }
    }
}
