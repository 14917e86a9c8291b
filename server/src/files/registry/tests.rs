use std::os::fd::AsFd;
use std::time::Duration;

use fdmap_proto::file::{Backing, Origin, Rights, Seal};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};

use super::super::service_file::InodeKey;
use super::index::Reservation;
use super::*;
use crate::probe::SyscallsProbe;
use crate::scan::PageStateReader;

pub(super) const MIB: u64 = 1 << 20;

fn limits() -> Limits {
    Limits { files_per_user: 3, bytes_per_user: 10 * MIB, file_bytes: 8 * MIB, ..Limits::default() }
}

pub(super) fn registry() -> Registry {
    Registry::new(
        PageStateReader::new(Arc::new(SyscallsProbe)),
        Arc::new(crate::tracking::EventSources::new(None, false, false).unwrap()),
        PageSize::new(4096).unwrap(),
        vec![2 * MIB],
        &Quotas::new(16),
        limits(),
        KeepPolicy::default(),
    )
}

/// A caller that is not an administrator.
pub(super) fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: Vec::new(), admin: false }
}

pub(super) fn spec(name: &str, size_bytes: u64) -> FileSpec {
    let (backing, seals) = (Backing::Shmem, Seals::default());
    FileSpec { name: name.to_owned(), size_bytes, backing, seals, access: None, lifetime: None }
}

pub(super) fn named(name: &str) -> FileName {
    FileName::Name(name.to_owned())
}

pub(super) fn owned(uid: u32, name: &str) -> FileName {
    FileName::Owned(OwnedName { name: name.to_owned(), uid })
}

#[test]
fn created_file_belongs_to_its_creator_alone() {
    let registry = registry();
    let file = registry.create(&user(1000), spec("ram", MIB + 1)).unwrap();
    let info = file.info(&user(1000)).unwrap();
    assert_eq!((info.size_bytes, info.pages, info.allocated_bytes), (MIB + 1, 257, 0));
    assert_eq!((info.access.uid, info.origin, info.caller_rights), (1000, Origin::Created, Rights::ALL));
    assert!(registry.find(&user(1000), &named("ram"), Right::Migrate).is_ok());
    assert!(registry.find(&user(1000), &FileName::Id(file.id()), Right::Inspect).is_ok());
    assert!(info.owned_by_caller && !file.info(&user(1001)).unwrap().owned_by_caller);
    assert_eq!(registry.list(&user(1001), None, 10).0.len(), 0);
}

#[test]
fn inode_is_accessible_to_the_service_only() {
    let registry = registry();
    let file = registry.create(&user(1000), spec("ram", MIB)).unwrap();
    let fd = file.open_for(&user(1000), false).unwrap();
    let stat = fd::stat(&fd).unwrap();
    assert_eq!(stat.st_mode & 0o777, 0o600);
    assert_eq!(stat.st_uid, nix::unistd::geteuid().as_raw());
    assert!(SharedMapping::shared(&fd, 0, 4096, true).is_err(), "a read-only descriptor maps read-only");
}

#[test]
fn invalid_names_and_sizes_are_rejected() {
    let registry = registry();
    let create = |spec| registry.create(&user(1000), spec).map(|_| ());
    create(spec("ram", MIB)).unwrap();
    let taken = create(spec("ram", MIB)).unwrap_err();
    assert_eq!(taken.to_string(), "user 1000 already has a file named \"ram\"");
    assert!(matches!(create(spec("", MIB)), Err(FileError::Name(_))));
    assert!(matches!(create(spec("none", 0)), Err(FileError::Size(_))));
    assert!(matches!(create(spec("large", 9 * MIB)), Err(FileError::Size(_))));
    let hugetlb = |page, size| FileSpec { backing: Backing::Hugetlb(page), ..spec("huge", size) };
    assert!(matches!(create(hugetlb(4 * MIB, 4 * MIB)), Err(FileError::NoHugetlb { .. })));
    assert!(matches!(create(hugetlb(2 * MIB, 3 * MIB)), Err(FileError::Size(_))));
}

#[test]
fn limits_apply_to_users_and_not_to_administrators() {
    let registry = registry();
    let create = |caller: &Caller, name: &str, size| registry.create(caller, spec(name, size)).map(|_| ());
    create(&user(5), "a", 6 * MIB).unwrap();
    assert!(matches!(create(&user(5), "b", 6 * MIB), Err(FileError::Limit { .. })));
    create(&user(5), "b", MIB).unwrap();
    create(&user(5), "c", MIB).unwrap();
    assert!(matches!(create(&user(5), "d", MIB), Err(FileError::Limit { .. })));
    create(&user(6), "d", MIB).unwrap();
    registry.delete(&user(5), &named("a")).unwrap();
    create(&user(5), "e", 8 * MIB).unwrap();
    assert!(matches!(registry.resize(&user(5), &named("b"), 2 * MIB), Err(FileError::Limit { .. })));
    let root = Caller { admin: true, ..user(0) };
    (0..5).for_each(|i| create(&root, &format!("root{i}"), 8 * MIB).unwrap());
}

#[test]
fn seals_forbid_resizing_and_more_seals() {
    let registry = registry();
    let seals = [Seal::Grow].into_iter().collect();
    registry.create(&user(5), FileSpec { seals, ..spec("ram", 2 * MIB) }).unwrap();
    let resize = |bytes| registry.resize(&user(5), &named("ram"), bytes);
    assert!(matches!(resize(3 * MIB), Err(FileError::Sealed { seal: Seal::Grow, .. })));
    resize(MIB).unwrap();
    registry.seal(&user(5), &named("ram"), [Seal::Shrink, Seal::Seal].into_iter().collect()).unwrap();
    assert!(matches!(resize(4096), Err(FileError::Sealed { seal: Seal::Shrink, .. })));
    let more = registry.seal(&user(5), &named("ram"), [Seal::Write].into_iter().collect());
    assert!(matches!(more, Err(FileError::Sealed { seal: Seal::Seal, .. })));
}

/// Changes of a file that wait for another one need the right when their turn comes.
#[test]
fn changes_that_wait_fail_when_their_right_is_revoked() {
    let registry = registry();
    let others = |other| Access { other, ..Access::private(5, 5) };
    let file = registry
        .create(&user(5), FileSpec { access: Some(others(Rights::ALL)), ..spec("ram", MIB) })
        .unwrap();
    let id = FileName::Id(file.id());
    let change = |which: usize| match which {
        0 => registry.resize(&user(6), &id, 2 * MIB).map(drop),
        1 => registry.seal(&user(6), &id, [Seal::Grow].into_iter().collect()).map(drop),
        2 => registry.seal_writers(&user(6), &file),
        _ => registry.set_fence(&user(6), &file, "away".to_owned()),
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let turn = file.turn(&user(5), Right::Write, String::new).unwrap();
        let waiting = [0, 1, 2, 3].map(|which| scope.spawn(move || change(which)));
        std::thread::sleep(Duration::from_millis(50));
        registry.set_access(&user(5), &id, others(Rights::NONE)).unwrap();
        assert!(waiting.iter().all(|change| !change.is_finished()));
        drop(turn);
        waiting.into_iter().map(|change| change.join().unwrap()).collect()
    });
    assert!(
        results.iter().all(|result| matches!(result, Err(FileError::NotFound(_)))),
        "the caller may no longer know that the file exists: {results:?}"
    );
    let info = file.info(&user(5)).unwrap();
    assert_eq!((info.size_bytes, info.seals, info.fence), (MIB, Seals::default(), None));
}

#[test]
fn writable_mapping_prevents_the_write_seal() {
    let registry = registry();
    let file = registry.create(&user(5), spec("ram", MIB)).unwrap();
    let fd = file.open_for(&user(5), true).unwrap();
    let mapping = SharedMapping::shared(&fd, 0, 4096, true).unwrap();
    let seal = || registry.seal(&user(5), &named("ram"), [Seal::Write].into_iter().collect());
    assert!(matches!(seal(), Err(FileError::MappedWritable)));
    drop(mapping);
    seal().unwrap();
}

#[test]
fn only_an_administrator_changes_the_owner() {
    let registry = registry();
    registry.create(&user(5), spec("ram", 6 * MIB)).unwrap();
    let give = |caller: &Caller, uid, mode| {
        registry.set_access(caller, &owned(5, "ram"), Access::from_mode(uid, 1, mode))
    };
    assert!(matches!(give(&user(6), 6, 0o600), Err(FileError::NotFound(_))));
    give(&user(5), 5, 0o644).unwrap();
    assert!(matches!(give(&user(6), 6, 0o600), Err(FileError::NotOwner { .. })));
    assert!(matches!(give(&user(5), 6, 0o600), Err(FileError::GivingAway { uid: 5, owner: 6 })));
    let root = Caller { admin: true, ..user(0) };
    let given = give(&root, 6, 0o600).unwrap();
    assert!(registry.find(&user(5), &named("ram"), Right::Inspect).is_err());
    assert!(registry.find(&user(6), &named("ram"), Right::Inspect).is_ok());
    // A call of the former owner that has waited for the change.
    let late = given.set_access(&user(5), Access::private(5, 1), |_| unreachable!());
    assert!(matches!(late, Err(FileError::NotFound(_))), "it does not learn the new owner");
    assert_eq!(given.access().uid, 6);
    registry.create(&user(5), spec("other", 8 * MIB)).unwrap();
    let full = registry.create(&user(6), spec("third", 8 * MIB));
    let charged = matches!(full, Err(FileError::Limit { subject, .. }) if subject == "user 6 has");
    assert!(charged, "the new owner is charged for the file");
}

#[test]
fn adopted_memfd_shares_its_inode_with_the_client() {
    let registry = registry();
    let memfd = memfd::create("client ram", None).unwrap();
    memfd::resize(memfd.as_fd(), MIB).unwrap();
    let file = registry.adopt(&user(5), memfd.as_fd(), String::new(), None, None).unwrap();
    assert_eq!((file.name(), file.info(&user(5)).unwrap().origin), ("client ram", Origin::Adopted));
    assert_eq!(file.inode().1, fd::stat(&memfd).unwrap().st_ino);
    let again = registry.adopt(&user(5), memfd.as_fd(), "another".to_owned(), None, None);
    let as_owner = again.err().unwrap().to_string();
    assert_eq!(as_owner, "the service already owns this inode as file \"client ram\" of user 5");
    let stranger = registry.adopt(&user(6), memfd.as_fd(), "client ram".to_owned(), None, None);
    assert_eq!(stranger.err().unwrap().to_string(), "the service already owns this inode");
}

#[test]
fn only_writable_shared_memory_is_adopted() {
    let registry = registry();
    let adopt = |fd: OwnedFd| registry.adopt(&user(5), fd.as_fd(), "x".to_owned(), None, None).map(|_| ());
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    assert!(matches!(adopt(pipe), Err(FileError::NotAdoptable(_))));
    let regular = tempfile::tempfile().unwrap();
    assert!(matches!(
        adopt(regular.into()),
        Err(FileError::NotAdoptable("it is neither a memfd nor other shared memory"))
    ));
    let memfd = memfd::create("x", None).unwrap();
    memfd::resize(memfd.as_fd(), MIB).unwrap();
    let read_only = fd::reopen(memfd.as_fd(), false).unwrap();
    assert!(
        matches!(adopt(read_only), Err(FileError::NotAdoptable(_))),
        "adoption must not add the write right"
    );
    memfd::resize(memfd.as_fd(), 9 * MIB).unwrap();
    assert!(matches!(adopt(memfd), Err(FileError::Size(_))));
}

#[test]
fn watcher_receives_every_event() {
    let registry = registry();
    let mut events = registry.watch();
    registry.create(&user(5), spec("ram", MIB)).unwrap();
    registry.resize(&user(5), &named("ram"), 2 * MIB).unwrap();
    registry.delete(&user(5), &named("ram")).unwrap();
    let kinds: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.kind).collect();
    assert_eq!(kinds, [FileEventKind::Created, FileEventKind::Changed, FileEventKind::Deleted]);
    assert!(matches!(registry.delete(&user(5), &named("ram")), Err(FileError::NotFound(_))));
}

#[test]
fn list_continues_after_the_last_name() {
    let registry = registry();
    ["a", "b", "c"].iter().for_each(|name| drop(registry.create(&user(5), spec(name, MIB)).unwrap()));
    let names =
        |files: &[Arc<ServiceFile>]| files.iter().map(|file| file.name().to_owned()).collect::<Vec<_>>();
    let (first, last) = registry.list(&user(5), None, 2);
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(last, Some(OwnedName { name: "b".to_owned(), uid: 5 }));
    let (rest, last) = registry.list(&user(5), last.as_ref(), 2);
    assert_eq!((names(&rest), last), (vec!["c".to_owned()], None));
}

#[test]
fn failed_adoption_leaves_the_inode_unchanged() {
    let registry = registry();
    registry.create(&user(5), spec("taken", MIB)).unwrap();
    let memfd = memfd::create("client", None).unwrap();
    memfd::resize(memfd.as_fd(), MIB).unwrap();
    let mode = || fd::stat(&memfd).unwrap().st_mode & 0o777;
    let before = mode();
    assert_ne!(before, 0o600);
    let adopt =
        |name: &str, caller: &Caller| registry.adopt(caller, memfd.as_fd(), name.to_owned(), None, None);
    assert!(matches!(adopt("taken", &user(5)), Err(FileError::NameTaken(_))));
    // Reserved names and inodes count as taken.
    let stat = fd::stat(&memfd).unwrap();
    let inode = InodeKey { device: stat.st_dev, number: stat.st_ino, sysv: false };
    let name = OwnedName { name: "reserved".to_owned(), uid: 5 };
    let reservation = Reservation::new(&registry, &user(5), name.clone(), Some(inode)).unwrap();
    assert!(matches!(adopt("reserved", &user(5)), Err(FileError::NameTaken(_))));
    let as_owner = adopt("other", &user(5));
    assert!(matches!(as_owner, Err(FileError::AlreadyOwned(Some(reserved))) if reserved == name));
    assert!(matches!(adopt("other", &user(6)), Err(FileError::AlreadyOwned(None))));
    assert!(matches!(registry.create(&user(5), spec("reserved", MIB)), Err(FileError::NameTaken(_))));
    drop(reservation);
    (0..2).for_each(|i| drop(registry.create(&user(5), spec(&i.to_string(), MIB)).unwrap()));
    assert!(matches!(adopt("fourth", &user(5)), Err(FileError::Limit { .. })));
    assert_eq!(mode(), before);
    adopt("reserved", &user(6)).unwrap();
    assert_eq!(mode(), 0o600);
}

/// A file of `caller` with this lifetime.
fn with_lifetime(
    registry: &Registry,
    caller: &Caller,
    name: &str,
    lifetime: Option<Lifetime>,
) -> Result<Arc<ServiceFile>, FileError> {
    registry.create(caller, FileSpec { lifetime, ..spec(name, 1) })
}

#[test]
fn ephemeral_files_of_administrators_are_limited() {
    let registry = registry();
    let admin = Caller { admin: true, ..user(0) };
    let create = |name: &str, lifetime| with_lifetime(&registry, &admin, name, Some(lifetime));
    for nth in 0..5 {
        create(&format!("kept {nth}"), Lifetime::Kept).unwrap();
    }
    for nth in 0..3 {
        create(&format!("ephemeral {nth}"), Lifetime::Ephemeral).unwrap();
    }
    let refused = create("fourth", Lifetime::Ephemeral).map(|_| ()).unwrap_err();
    assert_eq!(refused.to_string(), "user 0 has 3 ephemeral files; 1 more would exceed the limit of 3");
    registry.delete(&admin, &named("ephemeral 0")).unwrap();
    create("fourth", Lifetime::Ephemeral).unwrap();
}

#[test]
fn owner_decides_about_the_default_lifetime_and_a_new_owner_does_not_change_it() {
    let registry = registry();
    let admin = Caller { admin: true, ..user(0) };
    let lifetime = |name: &str, caller: &Caller, access| {
        let file = registry.create(caller, FileSpec { access, ..spec(name, 1) }).unwrap();
        file.info(caller).unwrap().lifetime
    };
    assert_eq!(lifetime("own", &admin, None), Lifetime::Kept);
    assert_eq!(lifetime("of a user", &admin, Some(Access::private(5, 5))), Lifetime::Ephemeral);
    assert_eq!(lifetime("of its creator", &user(5), None), Lifetime::Ephemeral);
    for (name, from, owner, kept) in [("own", 0, 5, true), ("of a user", 5, 0, false)] {
        let owned = FileName::Owned(OwnedName { name: name.to_owned(), uid: from });
        let file = registry.set_access(&admin, &owned, Access::private(owner, 5)).unwrap();
        assert_eq!(file.lifetime() == Lifetime::Kept, kept, "{name}");
    }
    let refused = with_lifetime(&registry, &user(5), "kept", Some(Lifetime::Kept));
    assert!(matches!(refused, Err(FileError::Keep { uid: 5 })));
}

#[test]
fn file_with_unknown_users_stays() {
    let timeout = std::time::Duration::from_millis(1);
    let registry = Registry { limits: Limits { unused_file_timeout: timeout, ..limits() }, ..registry() };
    let sweep = super::super::EphemeralSweep::default();
    // The probe counts no users, and this program is no fdmapd that could search for them.
    with_lifetime(&registry, &user(5), "unknown", None).unwrap();
    std::thread::sleep(2 * timeout);
    for _ in 0..3 {
        assert!(sweep.sweep(&registry).is_empty(), "an unknown answer is a use");
    }
}
