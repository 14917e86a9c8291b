//! Children beyond the quota of their user.

use std::sync::Arc;
use std::time::Duration;

use super::super::Forks;
use super::tracked::Tracked;
use super::{program, serialized, until, userfaultfds_of};
use crate::tracking::Charge;
use crate::tracking::observe::fork_events::{ChildCharges, Fork, ForkEvents};

/// Permits two children.
#[derive(Debug, Default)]
struct TwoChildren(Arc<()>);

impl ChildCharges for TwoChildren {
    fn charge(&self) -> Option<Charge> {
        (Arc::strong_count(&self.0) <= 2).then(|| Arc::clone(&self.0) as Charge)
    }
}

#[test]
fn children_beyond_the_quota_are_lost_and_their_userfaultfds_closed() {
    let _serialized = serialized();
    let (tracked, uffd) = Tracked::start();
    let forks = Forks::start_as(program()).unwrap();
    let events = Arc::new(ForkEvents::default());
    let own = std::process::id();
    let before = userfaultfds_of(own);
    let _following = forks.follow(&uffd, events.sink(Arc::new(TwoChildren::default()))).unwrap();
    let fork = |count| {
        tracked.fork(count);
        assert!(forks.wait_for_events(Duration::from_secs(20)));
    };
    fork(50);
    let companion = forks.companion().unwrap();
    until("the userfaultfds of the others are closed", || {
        userfaultfds_of(own) <= before + 2 && userfaultfds_of(companion) == 1 + 2
    });
    let taken = events.take();
    let children = |forks: &[Fork]| forks.iter().map(|fork| fork.child.is_some()).collect::<Vec<_>>();
    assert_eq!(children(&taken), [true, true, false], "one entry stands for all lost children");
    fork(1);
    assert_eq!(children(&events.take()), [false]);
    // Children that are dropped no longer count.
    drop(taken);
    fork(3);
    assert_eq!(children(&events.take()), [true, true, false]);
    events.end();
}
