use super::*;
use crate::audit::parse::FdInfo;
use crate::audit::procfs::LoopDevice;

fn process() -> ProcessInfo {
    ProcessInfo {
        pid: 7,
        wp_async: Ok(true),
        command: "vmm".to_owned(),
        pagemap: Ok(()),
        descriptors: Ok(vec![]),
        mappings: Ok(vec![]),
        seccomp: Some(0),
        loops: Ok(vec![]),
    }
}

fn descriptor(target: &str, flags: OFlag) -> ProcessDescriptor {
    let info = FdInfo { flags: flags.bits().cast_unsigned(), ..FdInfo::default() };
    ProcessDescriptor { number: 3, target: target.to_owned(), info: Some(info), probed: None }
}

fn ring(user_files: Option<u64>, user_buffers: Option<u64>) -> ProcessDescriptor {
    let ring = descriptor("anon_inode:[io_uring]", OFlag::O_RDWR);
    ProcessDescriptor { info: ring.info.map(|info| FdInfo { user_files, user_buffers, ..info }), ..ring }
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
fn observed(process: &ProcessInfo, name: &str) -> Observed {
    let checks = check_process(process);
    checks.iter().find(|check| check.name == name).unwrap().observed
}

#[track_caller]
fn with(descriptors: Vec<ProcessDescriptor>, name: &str) -> Observed {
    observed(&ProcessInfo { descriptors: Ok(descriptors), ..process() }, name)
}

#[test]
fn idle_process_passes_all_checks() {
    assert!(check_process(&process()).iter().all(|check| check.observed == Observed::Yes));
}

#[test]
fn unreadable_process_passes_no_check() {
    let refused = || "Permission denied".to_owned();
    let unreadable = ProcessInfo {
        pagemap: Err(refused()),
        descriptors: Err(refused()),
        mappings: Err(refused()),
        loops: Err(refused()),
        seccomp: None,
        ..process()
    };
    let of_process = |check: &&Check| !["kernel", "seccomp"].contains(&check.name);
    for check in check_process(&unreadable).iter().filter(of_process) {
        assert_ne!(check.observed, Observed::Yes, "{}", check.name);
    }
}

#[test]
fn kernel_without_asynchronous_write_protection_observes_no_writes() {
    let trials = [
        (Ok(true), Observed::Yes),
        (Ok(false), Observed::No),
        (Err("Operation not permitted".to_owned()), Observed::Unknown),
    ];
    for (wp_async, expected) in trials {
        let process = ProcessInfo { wp_async, ..process() };
        assert_eq!(observed(&process, "kernel"), expected);
        let checks = check_process(&process);
        let kernel = checks.iter().find(|check| check.name == "kernel").unwrap();
        assert!(kernel.reason.contains("Linux 6.7"), "{}", kernel.reason);
    }
}

#[test]
fn direct_io_is_recognized_by_descriptor_flags() {
    let direct = OFlag::O_DIRECT | OFlag::O_RDONLY;
    assert_eq!(with(vec![descriptor("/var/disk.img", direct)], "direct-io"), Observed::No);
    assert_eq!(
        with(vec![descriptor("pipe:[9]", direct), descriptor(RAM, direct)], "direct-io"),
        Observed::Yes
    );
    let closed = ProcessDescriptor { info: None, ..descriptor("/x", OFlag::O_RDONLY) };
    assert_eq!(with(vec![closed], "direct-io"), Observed::Unknown);
}

#[test]
fn rings_are_judged_by_their_registrations() {
    assert_eq!(with(vec![ring(Some(0), Some(0))], "io-uring"), Observed::Yes);
    assert_eq!(with(vec![ring(Some(0), Some(2)), ring(None, None)], "io-uring"), Observed::No);
    assert_eq!(with(vec![ring(Some(1), Some(0))], "io-uring"), Observed::Unknown);
    assert_eq!(with(vec![ring(None, None)], "io-uring"), Observed::Unknown);
    let closed = ProcessInfo { mappings: Ok(vec![mapping("anon_inode:[io_uring]")]), ..process() };
    assert_eq!(observed(&closed, "io-uring"), Observed::Unknown);
}

#[test]
fn aio_and_devices_are_not_observed() {
    let aio = ProcessInfo { mappings: Ok(vec![mapping("/[aio] (deleted)")]), ..process() };
    assert_eq!(observed(&aio, "native-aio"), Observed::No);
    assert_eq!(with(vec![descriptor("/dev/vfio/12", OFlag::O_RDWR)], "dma"), Observed::No);
}

#[test]
fn memfd_descriptors_are_unnotified_unless_open_made_them() {
    let probed = |probed| ProcessDescriptor { probed, ..descriptor(RAM, OFlag::O_RDWR) };
    assert_eq!(with(vec![probed(None)], "unnotified-descriptors"), Observed::Unknown);
    assert_eq!(with(vec![probed(Some(NotifyTrial::Notified))], "unnotified-descriptors"), Observed::Yes);
    assert_eq!(with(vec![probed(Some(NotifyTrial::WriteSealed))], "unnotified-descriptors"), Observed::Yes);
    let both = vec![probed(None), probed(Some(NotifyTrial::Unnotified))];
    assert_eq!(with(both, "unnotified-descriptors"), Observed::No);
    for flags in [OFlag::O_RDONLY, OFlag::O_WRONLY, OFlag::O_RDWR | OFlag::O_DIRECT, OFlag::O_PATH] {
        assert_eq!(with(vec![descriptor(RAM, flags)], "unnotified-descriptors"), Observed::Yes, "{flags:?}");
    }
    assert_eq!(with(vec![descriptor("/dev/shm/x", OFlag::O_RDWR)], "unnotified-descriptors"), Observed::Yes);
}

#[test]
fn other_userfaultfds_prevent_tracking() {
    let of = |entry: SmapsEntry, descriptors: Vec<ProcessDescriptor>| {
        let process = ProcessInfo { mappings: Ok(vec![entry]), descriptors: Ok(descriptors), ..process() };
        (observed(&process, "mappings"), observed(&process, "userfaultfd"))
    };
    let uffd = || vec![descriptor("anon_inode:[userfaultfd]", OFlag::O_RDWR)];
    let tracked = || SmapsEntry { write_protect: true, ..mapping(RAM) };
    assert_eq!(of(mapping(RAM), vec![]), (Observed::Yes, Observed::Yes));
    assert_eq!(of(mapping(RAM), uffd()), (Observed::Yes, Observed::Yes));
    assert_eq!(of(tracked(), vec![]), (Observed::Yes, Observed::Yes));
    assert_eq!(of(tracked(), uffd()).1, Observed::Unknown);
    assert_eq!(of(SmapsEntry { other_faults: true, ..mapping(RAM) }, uffd()).1, Observed::No);
    assert_eq!(of(SmapsEntry { other_faults: true, ..mapping("/var/x") }, uffd()).1, Observed::Yes);
    let entries = [
        mapping(RAM),
        mapping("/var/x"),
        SmapsEntry { shared: false, ..mapping(RAM) },
        SmapsEntry { may_write: false, ..mapping(RAM) },
        SmapsEntry { writable: false, ..mapping(RAM) },
    ];
    assert_eq!(writable_mappings(&entries).count(), 2, "mprotect could make one of them writable");
}

#[test]
fn seccomp_filter_is_unknown() {
    let mode = |seccomp| observed(&ProcessInfo { seccomp, ..process() }, "seccomp");
    assert_eq!((mode(None), mode(Some(1)), mode(Some(2))), (Observed::Yes, Observed::No, Observed::Unknown));
}

#[test]
fn loop_devices_are_matched_by_backing_name() {
    let device = |backing: &str| LoopDevice { name: "loop0".to_owned(), backing: backing.to_owned() };
    let of = |device, name| {
        observed(
            &ProcessInfo { loops: Ok(vec![device]), mappings: Ok(vec![mapping(name)]), ..process() },
            "loop-devices",
        )
    };
    assert_eq!(of(device(RAM), RAM), Observed::No);
    assert_eq!(of(device(RAM), "/memfd:other (deleted)"), Observed::Yes);
    assert_eq!(of(device("/var/x"), "/var/x"), Observed::Yes);
}

#[test]
fn long_lists_are_truncated() {
    let many = (0..9).map(|number| ProcessDescriptor { number, ..descriptor("/x", OFlag::O_DIRECT) });
    let process = ProcessInfo { descriptors: Ok(many.collect()), ..process() };
    let check = check_process(&process).into_iter().find(|check| check.name == "direct-io").unwrap();
    assert!(check.detail.ends_with("3 (/x) and 5 more"), "{}", check.detail);
}
