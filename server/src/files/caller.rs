//! The identity of a caller and its rights to a file. Pure.

use fdmap_proto::file::{Access, Right, Rights};

/// The identity behind a request: peer credentials on a unix socket, a client certificate on TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
    /// The caller has all rights to all files: it is root or the user that the service runs as.
    pub admin: bool,
}

/// True for root and the user that the service runs as.
pub(super) fn is_administrator(uid: u32) -> bool {
    uid == 0 || uid == nix::unistd::Uid::effective().as_raw()
}

impl Caller {
    /// A caller on this host. `service_uid` is the user that the service runs as.
    #[must_use]
    pub const fn new(uid: u32, gid: u32, groups: Vec<u32>, service_uid: u32) -> Self {
        Self { uid, gid, groups, admin: uid == 0 || uid == service_uid }
    }

    /// The caller's rights to a file. As with permission bits, the first class that matches decides.
    #[must_use]
    pub fn rights(&self, access: &Access) -> Rights {
        if self.admin {
            Rights::ALL
        } else if self.uid == access.uid {
            access.owner
        } else if self.gid == access.gid || self.groups.contains(&access.gid) {
            access.group
        } else {
            access.other
        }
    }

    #[must_use]
    pub fn has(&self, right: Right, access: &Access) -> bool {
        self.rights(access).has(right)
    }

    /// True if the caller may change the access of the file and delete it.
    #[must_use]
    pub const fn owns(&self, access: &Access) -> bool {
        self.admin || self.uid == access.uid
    }

    /// True if the caller may learn that the file exists.
    #[must_use]
    pub fn knows(&self, access: &Access) -> bool {
        self.owns(access) || self.has(Right::Inspect, access)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCESS: Access = Access::from_mode(1000, 50, 0o640);

    fn caller(uid: u32, gid: u32, groups: &[u32]) -> Caller {
        Caller::new(uid, gid, groups.to_vec(), 900)
    }

    #[test]
    fn first_matching_class_decides() {
        assert!(caller(1000, 1, &[]).has(Right::Write, &ACCESS));
        assert!(caller(1001, 50, &[]).has(Right::Read, &ACCESS));
        assert!(!caller(1001, 50, &[]).has(Right::Write, &ACCESS));
        assert!(caller(1001, 1, &[7, 50]).has(Right::Inspect, &ACCESS), "supplementary groups count");
        assert!(!caller(1001, 1, &[7]).has(Right::Inspect, &ACCESS));
        let owner_excluded = Access::from_mode(1000, 50, 0o077);
        assert!(
            !caller(1000, 50, &[]).has(Right::Inspect, &owner_excluded),
            "group rights do not extend the owner's"
        );
    }

    #[test]
    fn root_and_the_service_user_have_all_rights() {
        for uid in [0, 900] {
            assert_eq!(caller(uid, 1, &[]).rights(&ACCESS), Rights::ALL);
            assert!(caller(uid, 1, &[]).owns(&ACCESS));
        }
        assert!(caller(1000, 1, &[]).owns(&ACCESS));
        assert!(!caller(1001, 50, &[]).owns(&ACCESS));
    }

    #[test]
    fn owner_and_inspectors_know_a_file() {
        let hidden = Access::from_mode(1000, 50, 0o030);
        assert!(caller(1000, 1, &[]).knows(&hidden), "an owner may change the rights");
        assert!(caller(1001, 50, &[]).knows(&ACCESS) && !caller(1001, 50, &[]).knows(&hidden));
        assert!(!caller(1001, 1, &[]).knows(&ACCESS));
    }
}
