//! Subordinate user ids: the ids that a user may use in user namespaces count for that user. See subuid(5).

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use std::time::SystemTime;

/// Where the ranges are.
const SUBUID: &str = "/etc/subuid";
const PASSWD: &str = "/etc/passwd";

/// The owners of subordinate user ids, by the files of this host.
#[derive(Debug, Default)]
pub struct SubordinateIds {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// When each file changed last, if it exists; `None`: they were not read.
    changed: Option<[Option<SystemTime>; 2]>,
    ranges: Vec<SubordinateRange>,
}

/// `count` ids from `first` on, which `owner` may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SubordinateRange {
    first: u32,
    count: u32,
    owner: u32,
}

impl SubordinateIds {
    /// The user who answers for the resources of `uid`: the owner of the subordinate range that contains it, or `uid` itself.
    #[must_use]
    pub fn owner_of(&self, uid: u32) -> u32 {
        // No code panics with the lock held.
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        owner_of(&known.ranges, uid)
    }

    /// Reads the files of the host, if they have changed. Where one does not exist, it is empty. Charges that exist keep their user.
    pub fn reload(&self) {
        let changed = Some([SUBUID, PASSWD].map(changed));
        let is_known = {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            known.changed == changed
        };
        if is_known {
            return;
        }
        // Where one cannot be read, the next call tries again.
        let (Ok(subuid), Ok(passwd)) = (read(SUBUID), read(PASSWD)) else { return };
        let ranges = parse(&subuid, &passwd);
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Known { changed, ranges };
    }
}

fn changed(path: &str) -> Option<SystemTime> {
    fs::metadata(Path::new(path)).and_then(|metadata| metadata.modified()).ok()
}

/// The text of a file, which may be in any encoding: only its numbers and the names of users matter.
fn read(path: &str) -> io::Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Pure.
fn owner_of(ranges: &[SubordinateRange], uid: u32) -> u32 {
    let contains =
        |range: &&SubordinateRange| uid.checked_sub(range.first).is_some_and(|at| at < range.count);
    ranges.iter().find(contains).map_or(uid, |range| range.owner)
}

/// The ranges of a subuid(5) file: `USER:FIRST:COUNT`, where USER is a name of passwd(5) or a number. The range of a user who is
/// unknown (or root, who is not limited) counts for its first id. Skips lines that are invalid. Pure.
fn parse(subuid: &str, passwd: &str) -> Vec<SubordinateRange> {
    let uid_of = |user: &str| {
        user.parse().ok().or_else(|| {
            passwd.lines().find_map(|line| {
                let mut fields = line.split(':');
                (fields.next() == Some(user)).then(|| fields.nth(1)?.parse().ok()).flatten()
            })
        })
    };
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let owner = uid_of(fields.next()?);
        let (first, count) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let owner = owner.filter(|owner| *owner != 0).unwrap_or(first);
        (first != 0).then_some(SubordinateRange { first, count, owner })
    };
    subuid.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD_TEXT: &str = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbroken\n";

    #[test]
    fn subordinate_ids_count_for_their_owner() {
        let ranges = parse("ann:100000:65536\n1001:165536:65536\n", PASSWD_TEXT);
        for (uid, owner) in [
            (0, 0),
            (1000, 1000),
            (99_999, 99_999),
            (100_000, 1000),
            (165_535, 1000),
            (165_536, 1001),
            (231_071, 1001),
            (231_072, 231_072),
            (u32::MAX, u32::MAX),
        ] {
            assert_eq!(owner_of(&ranges, uid), owner, "{uid}");
        }
    }

    #[test]
    fn invalid_lines_are_skipped() {
        for line in ["", ":", "ann", "ann:1", "ann:x:5", "ann:0:5", "ann:1:x"] {
            assert_eq!(parse(line, PASSWD_TEXT), [], "{line}");
        }
        // Of a user who is unknown here, and of root.
        let ranges = parse("absent:300000:9\nroot:400000:9", PASSWD_TEXT);
        assert_eq!(
            [300_005, 400_008, 400_009].map(|uid| owner_of(&ranges, uid)),
            [300_000, 400_000, 400_009]
        );
        // The last id of a range may be the largest number.
        let ranges = parse("ann:4294967290:4294967295", PASSWD_TEXT);
        assert_eq!(owner_of(&ranges, u32::MAX), 1000);
        assert_eq!(owner_of(&ranges, 5), 5);
    }

    #[test]
    fn files_of_the_host_are_read_again_only_after_a_change() {
        let ids = SubordinateIds::default();
        ids.reload();
        let before = ids.known.read().unwrap().changed;
        assert!(before.is_some(), "they were read, or do not exist");
        ids.reload();
        assert_eq!(ids.known.read().unwrap().changed, before);
        assert_eq!(ids.owner_of(0), 0);
    }
}
