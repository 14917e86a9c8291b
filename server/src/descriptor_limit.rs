//! The limit of the service's descriptors, and how many its clients may take.

use fdmap_proto::units::to_u64;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::files::Limits;
use crate::tracking::forks::MAX_UNFOLLOWED;
use crate::tracking::holder::MAX_CLOSING;

const DESCRIPTORS_PER_FILE: u64 = 3;
/// Also of a tracked child.
const DESCRIPTORS_PER_ADDRESS_SPACE: u64 = 3;
/// Of the runtime, the links to helpers, scanners, and connections whose user is not known yet. An estimate.
const OWN_DESCRIPTORS: u64 = 4096;

/// Raises the soft limit to the hard one: the usual soft limit of 1024 exists for programs that call select(2). Logs a warning if
/// clients may take more descriptors than that.
pub(crate) fn raise(limits: &Limits) {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map(|()| hard));
    match raised {
        Err(error) => tracing::warn!(%error, "cannot raise RLIMIT_NOFILE"),
        Ok(limit) => {
            let needed = of_all_users(limits);
            if limit < needed {
                tracing::warn!(
                    limit,
                    needed,
                    "clients within their limits may take more descriptors than RLIMIT_NOFILE, and then others get none: raise it (LimitNOFILE=), or lower the limits of users"
                );
            }
        }
    }
}

/// About as many descriptors as the service has when all users but root are at their limits. Pure.
fn of_all_users(limits: &Limits) -> u64 {
    let users = u64::from(limits.users_at_limit).saturating_mul(of_a_user(limits));
    users.saturating_add(OWN_DESCRIPTORS)
}

fn of_a_user(limits: &Limits) -> u64 {
    let Limits { files_per_user, tracked_per_user, tracked_children_per_user, sessions_per_user, .. } =
        *limits;
    let spaces = u64::from(tracked_per_user) + u64::from(tracked_children_per_user);
    DESCRIPTORS_PER_FILE * u64::from(files_per_user)
        + DESCRIPTORS_PER_ADDRESS_SPACE * spaces
        // As many that are no longer tracked, and have page tables left.
        + spaces
        // To the unix sockets, and over TCP.
        + 2 * u64::from(sessions_per_user)
        + u64::from(limits.shared_per_user)
        + to_u64(MAX_CLOSING + MAX_UNFOLLOWED)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `LimitNOFILE=` of the unit file.
    fn of_unit() -> u64 {
        let unit = include_str!("../fdmapd.service.in");
        let value = unit.lines().find_map(|line| line.strip_prefix("LimitNOFILE=")).unwrap();
        value.parse().unwrap()
    }

    #[test]
    fn unit_file_has_descriptors_for_all_users_at_their_limits() {
        let needed = of_all_users(&Limits::default());
        // The rest is for root's own.
        assert!(needed <= of_unit() / 4 * 3, "{needed}");
        // fs.nr_open is 1048576 by default; systemd sets no higher limit.
        assert!(of_unit() <= 1 << 20);
    }

    #[test]
    fn each_limit_counts() {
        let default = Limits::default();
        let more = |limits: Limits| of_a_user(&limits) - of_a_user(&default);
        assert_eq!(more(Limits { files_per_user: default.files_per_user + 1, ..default }), 3);
        assert_eq!(more(Limits { tracked_per_user: default.tracked_per_user + 1, ..default }), 4);
        let children = default.tracked_children_per_user + 1;
        assert_eq!(more(Limits { tracked_children_per_user: children, ..default }), 4);
        assert_eq!(more(Limits { sessions_per_user: default.sessions_per_user + 1, ..default }), 2);
        assert_eq!(more(Limits { shared_per_user: default.shared_per_user + 1, ..default }), 1);
        let users = Limits { users_at_limit: default.users_at_limit + 1, ..default };
        assert_eq!(of_all_users(&users) - of_all_users(&default), of_a_user(&default));
        let most = Limits { files_per_user: u32::MAX, users_at_limit: u32::MAX, ..default };
        assert_eq!(of_all_users(&most), u64::MAX);
    }
}
