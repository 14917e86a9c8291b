//! Calls that attach a file permanently, which only those calls do that succeed.

use fdmap_sys::testing::fuse::Fuse;
use fdmap_sys::testing::mounts;
use nix::mount::{MntFlags, umount2};

use super::*;

#[test]
fn failed_ioctl_attaches_nothing_permanently() {
    let (bench, other) = (Bench::new(), file());
    let (device, file) = (other.as_fd(), bench.fd.as_fd());
    let calls: [&dyn Fn() -> Result<(), Errno>; 2] =
        [&|| calls::open_backing(device, file).map(drop), &|| calls::map_file(device, file)];
    for call in calls {
        assert_eq!(call(), Err(Errno::ENOTTY));
        let traced = bench.trace.drain(bench.followed);
        assert!(traced.attached, "it may have been attached for a while");
        assert_eq!((traced.permanently_attached, traced.ended), (false, vec![]));
    }
    assert!(!bench.trace.drain(bench.followed).attached);
}

/// In a thread of its own, with which its mount ends.
#[test]
fn file_behind_fuse_passthrough_is_written_for_ever() {
    std::thread::spawn(|| {
        mounts::make_private().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let fuse = match Fuse::mount(folder.path()) {
            Ok(fuse) => fuse,
            Err(error) => return eprintln!("not run: this host has no FUSE: {error}"),
        };
        let bench = Bench::new();
        match calls::open_backing(fuse.device(), bench.fd.as_fd()) {
            Ok(backing_id) => assert!(backing_id > 0),
            Err(errno) => return eprintln!("not run: this kernel has no FUSE passthrough: {errno}"),
        }
        for _ in 0..3 {
            assert!(bench.trace.drain(bench.followed).permanently_attached);
        }
        umount2(folder.path(), MntFlags::MNT_DETACH).unwrap();
    })
    .join()
    .unwrap();
}
