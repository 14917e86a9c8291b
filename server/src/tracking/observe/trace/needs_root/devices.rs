//! Calls that attach a file permanently, which only those calls do that succeed.

use std::fs::File;
use std::io::{Read as _, Write as _};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

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

/// A FUSE file system that supports passthrough and answers nothing.
struct Fuse {
    device: File,
    folder: tempfile::TempDir,
}

impl Fuse {
    /// `None` if the kernel has no FUSE.
    fn mount() -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let folder = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let (source, flags) = (Some("fdmap-test"), MsFlags::MS_NODEV | MsFlags::MS_NOSUID);
        mount(source, folder.path(), Some("fuse"), flags, Some(options.as_str())).ok()?;
        let mut fuse = Self { device, folder };
        fuse.answer_init();
        Some(fuse)
    }

    /// FUSE_INIT with the flags FUSE_INIT_EXT and FUSE_PASSTHROUGH of linux/fuse.h.
    fn answer_init(&mut self) {
        let mut request = vec![0; 1 << 16];
        assert!(self.device.read(&mut request).unwrap() >= 40);
        // struct fuse_out_header: length, error, and the number of the request, which is at 8 of fuse_in_header.
        let mut reply = [0_u32; 20];
        (reply[0], reply[2], reply[3]) = (80, word(&request, 8), word(&request, 12));
        // struct fuse_init_out: major, minor, max_readahead, flags, 2 x u16, max_write, time_gran, 2 x u16, flags2,
        // max_stack_depth
        (reply[4], reply[5], reply[7]) = (7, 40, 1 << 30);
        (reply[9], reply[10], reply[12], reply[13]) = (4096, 1, 1 << 5, 1);
        let bytes: Vec<u8> = reply.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(self.device.write(&bytes).unwrap(), 80);
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

impl Drop for Fuse {
    fn drop(&mut self) {
        umount2(self.folder.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn file_behind_fuse_passthrough_is_written_for_ever() {
    let Some(fuse) = Fuse::mount() else {
        eprintln!("not run: this host has no FUSE");
        return;
    };
    let bench = Bench::new();
    match calls::open_backing(fuse.device.as_fd(), bench.fd.as_fd()) {
        Ok(backing_id) => assert!(backing_id > 0),
        Err(errno) => {
            eprintln!("not run: this kernel has no FUSE passthrough: {errno}");
            return;
        }
    }
    for _ in 0..3 {
        assert!(bench.trace.drain(bench.followed).permanently_attached);
    }
}
