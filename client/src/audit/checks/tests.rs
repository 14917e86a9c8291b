use super::*;
use crate::audit::parse::FdInfo;
use crate::audit::procfs::LoopDevice;

fn facts() -> Facts {
    Facts {
        pid: 7,
        command: "vmm".to_owned(),
        pagemap: Ok(()),
        descriptors: Ok(vec![]),
        mappings: Ok(vec![]),
        seccomp: Some(0),
        loops: Ok(vec![]),
    }
}

fn descriptor(target: &str, flags: OFlag) -> Descriptor {
    let info = FdInfo { flags: flags.bits().cast_unsigned(), ..FdInfo::default() };
    Descriptor { number: 3, target: target.to_owned(), info: Some(info), tried: None }
}

fn ring(user_files: Option<u64>, user_buffers: Option<u64>) -> Descriptor {
    let ring = descriptor("anon_inode:[io_uring]", OFlag::O_RDWR);
    Descriptor { info: ring.info.map(|info| FdInfo { user_files, user_buffers, ..info }), ..ring }
}

fn mapping(name: &str) -> SmapsEntry {
    SmapsEntry {
        start: 0x1000,
        end: 0x2000,
        shared: true,
        writable: true,
        may_write: true,
        inode: 9,
        name: name.to_owned(),
        write_protect: false,
        other_faults: false,
    }
}

const RAM: &str = "/memfd:ram (deleted)";

#[track_caller]
fn seen(facts: &Facts, name: &str) -> Seen {
    let findings = judge(facts);
    findings.iter().find(|finding| finding.name == name).unwrap().seen
}

#[track_caller]
fn with(descriptors: Vec<Descriptor>, name: &str) -> Seen {
    seen(&Facts { descriptors: Ok(descriptors), ..facts() }, name)
}

#[test]
fn process_that_does_nothing_is_seen() {
    assert!(judge(&facts()).iter().all(|finding| finding.seen == Seen::Yes));
}

#[test]
fn what_cannot_be_looked_at_is_never_told_as_seen() {
    let refused = || "Permission denied".to_owned();
    let blind = Facts {
        pagemap: Err(refused()),
        descriptors: Err(refused()),
        mappings: Err(refused()),
        loops: Err(refused()),
        seccomp: None,
        ..facts()
    };
    for finding in judge(&blind).iter().filter(|finding| finding.name != "seccomp") {
        assert_ne!(finding.seen, Seen::Yes, "{}", finding.name);
    }
}

#[test]
fn direct_io_is_told_by_flags_of_files() {
    let direct = OFlag::O_DIRECT | OFlag::O_RDONLY;
    assert_eq!(with(vec![descriptor("/var/disk.img", direct)], "direct-io"), Seen::No);
    assert_eq!(with(vec![descriptor("pipe:[9]", direct), descriptor(RAM, direct)], "direct-io"), Seen::Yes);
    let gone = Descriptor { info: None, ..descriptor("/x", OFlag::O_RDONLY) };
    assert_eq!(with(vec![gone], "direct-io"), Seen::Unknown);
}

#[test]
fn rings_are_told_by_what_is_registered() {
    assert_eq!(with(vec![ring(Some(0), Some(0))], "io-uring"), Seen::Yes);
    assert_eq!(with(vec![ring(Some(0), Some(2)), ring(None, None)], "io-uring"), Seen::No);
    assert_eq!(with(vec![ring(Some(1), Some(0))], "io-uring"), Seen::Unknown);
    assert_eq!(with(vec![ring(None, None)], "io-uring"), Seen::Unknown);
    let closed = Facts { mappings: Ok(vec![mapping("anon_inode:[io_uring]")]), ..facts() };
    assert_eq!(seen(&closed, "io-uring"), Seen::Unknown);
}

#[test]
fn aio_and_devices_are_not_seen() {
    let aio = Facts { mappings: Ok(vec![mapping("/[aio] (deleted)")]), ..facts() };
    assert_eq!(seen(&aio, "native-aio"), Seen::No);
    assert_eq!(with(vec![descriptor("/dev/vfio/12", OFlag::O_RDWR)], "dma"), Seen::No);
}

#[test]
fn memfds_are_silent_unless_they_were_surely_opened() {
    let tried = |tried| Descriptor { tried, ..descriptor(RAM, OFlag::O_RDWR) };
    assert_eq!(with(vec![tried(None)], "unnotified-descriptors"), Seen::Unknown);
    assert_eq!(with(vec![tried(Some(Tried::Opened))], "unnotified-descriptors"), Seen::Yes);
    assert_eq!(with(vec![tried(Some(Tried::Sealed))], "unnotified-descriptors"), Seen::Yes);
    let both = vec![tried(None), tried(Some(Tried::Silent))];
    assert_eq!(with(both, "unnotified-descriptors"), Seen::No);
    for flags in [OFlag::O_RDONLY, OFlag::O_WRONLY, OFlag::O_RDWR | OFlag::O_DIRECT, OFlag::O_PATH] {
        assert_eq!(with(vec![descriptor(RAM, flags)], "unnotified-descriptors"), Seen::Yes, "{flags:?}");
    }
    assert_eq!(with(vec![descriptor("/dev/shm/x", OFlag::O_RDWR)], "unnotified-descriptors"), Seen::Yes);
}

#[test]
fn mappings_of_shared_memory_must_be_free_for_the_tracker() {
    let of = |entry: SmapsEntry, descriptors: Vec<Descriptor>| {
        let facts = Facts { mappings: Ok(vec![entry]), descriptors: Ok(descriptors), ..facts() };
        (seen(&facts, "mappings"), seen(&facts, "userfaultfd"))
    };
    let uffd = || vec![descriptor("anon_inode:[userfaultfd]", OFlag::O_RDWR)];
    let tracked = || SmapsEntry { write_protect: true, ..mapping(RAM) };
    assert_eq!(of(mapping(RAM), vec![]), (Seen::Yes, Seen::Yes));
    assert_eq!(of(mapping(RAM), uffd()), (Seen::Yes, Seen::Yes));
    assert_eq!(of(tracked(), vec![]), (Seen::Yes, Seen::Yes));
    assert_eq!(of(tracked(), uffd()).1, Seen::Unknown);
    assert_eq!(of(SmapsEntry { other_faults: true, ..mapping(RAM) }, uffd()).1, Seen::No);
    assert_eq!(of(SmapsEntry { other_faults: true, ..mapping("/var/x") }, uffd()).1, Seen::Yes);
    let entries = [
        mapping(RAM),
        mapping("/var/x"),
        SmapsEntry { shared: false, ..mapping(RAM) },
        SmapsEntry { may_write: false, ..mapping(RAM) },
        SmapsEntry { writable: false, ..mapping(RAM) },
    ];
    assert_eq!(writers(&entries).count(), 2, "what mprotect could make writable counts");
}

#[test]
fn filters_may_forbid_what_tracking_needs() {
    let mode = |seccomp| seen(&Facts { seccomp, ..facts() }, "seccomp");
    assert_eq!((mode(None), mode(Some(1)), mode(Some(2))), (Seen::Yes, Seen::No, Seen::Unknown));
}

#[test]
fn loop_devices_are_told_by_the_name_of_their_file() {
    let device = |backing: &str| LoopDevice { name: "loop0".to_owned(), backing: backing.to_owned() };
    let of = |device, name| {
        seen(&Facts { loops: Ok(vec![device]), mappings: Ok(vec![mapping(name)]), ..facts() }, "loop-devices")
    };
    assert_eq!(of(device(RAM), RAM), Seen::No);
    assert_eq!(of(device(RAM), "/memfd:other (deleted)"), Seen::Yes);
    assert_eq!(of(device("/var/x"), "/var/x"), Seen::Yes);
}

#[test]
fn long_lists_are_cut() {
    let many = (0..9).map(|number| Descriptor { number, ..descriptor("/x", OFlag::O_DIRECT) });
    let facts = Facts { descriptors: Ok(many.collect()), ..facts() };
    let finding = judge(&facts).into_iter().find(|finding| finding.name == "direct-io").unwrap();
    assert!(finding.detail.ends_with("3 (/x) and 5 more"), "{}", finding.detail);
}
