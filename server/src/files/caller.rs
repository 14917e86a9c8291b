//! Who asks, and what that one may do. Pure.

use fdmap_proto::file::{Access, Right, Rights};

/// Who asks, as the kernel or a certificate vouches for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
    /// Root or the service's own user: may do everything.
    pub admin: bool,
}

impl Caller {
    /// A caller on this host; `service_uid` is the service's own user.
    #[must_use]
    pub const fn new(uid: u32, gid: u32, groups: Vec<u32>, service_uid: u32) -> Self {
        Self { uid, gid, groups, admin: uid == 0 || uid == service_uid }
    }

    /// What the caller may do with a file. As with permission bits, the first class that fits decides.
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

    /// True if the caller may do `right`.
    #[must_use]
    pub fn may(&self, right: Right, access: &Access) -> bool {
        self.rights(access).contains(right)
    }

    /// True if the caller may change the access and delete the file.
    #[must_use]
    pub const fn owns(&self, access: &Access) -> bool {
        self.admin || self.uid == access.uid
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
    fn first_class_that_fits_decides() {
        assert!(caller(1000, 1, &[]).may(Right::Write, &ACCESS));
        assert!(caller(1001, 50, &[]).may(Right::Read, &ACCESS));
        assert!(!caller(1001, 50, &[]).may(Right::Write, &ACCESS));
        assert!(caller(1001, 1, &[7, 50]).may(Right::Inspect, &ACCESS), "supplementary groups count");
        assert!(!caller(1001, 1, &[7]).may(Right::Inspect, &ACCESS));
        let shut_out = Access::from_mode(1000, 50, 0o077);
        assert!(
            !caller(1000, 50, &[]).may(Right::Inspect, &shut_out),
            "the owner is not helped by the group"
        );
    }

    #[test]
    fn root_and_the_services_user_may_everything() {
        for uid in [0, 900] {
            assert_eq!(caller(uid, 1, &[]).rights(&ACCESS), Rights::ALL);
            assert!(caller(uid, 1, &[]).owns(&ACCESS));
        }
        assert!(caller(1000, 1, &[]).owns(&ACCESS));
        assert!(!caller(1001, 50, &[]).owns(&ACCESS));
    }
}
