//! Loop devices: the file behind one.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use bytemuck::{Pod, Zeroable};

use nix::errno::Errno;

use crate::error::{CallContext, SyscallError};

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u64; 8],
    crypt_name: [u64; 8],
    encrypt_key: [u64; 4],
    init: [u64; 2],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232);

/// `linux/loop.h`
const LOOP_GET_STATUS64: u64 = 0x4C05;

/// Returns `st_dev` and `st_ino` of the backing file of the loop device at `path`.
///
/// # Errors
/// `open`; `ioctl(LOOP_GET_STATUS64)`: `ENXIO` if the device is not attached to a file.
pub fn backing_inode(path: &str) -> Result<(u64, u64), SyscallError> {
    let device = File::open(path).call(|| format!("open of {path}"))?;
    let mut info = LoopInfo64::zeroed();
    // SAFETY: LOOP_GET_STATUS64 writes one struct loop_info64, the layout of `info`; the descriptor is open.
    let got = unsafe { nix::libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
    Errno::result(got).call(|| format!("ioctl(LOOP_GET_STATUS64) of {path}"))?;
    Ok((stat_device(info.device), info.inode))
}

/// Converts a device number from the kernel's `huge_encode_dev` encoding to glibc's; they differ for large minor numbers.
fn stat_device(kernel: u64) -> u64 {
    let major = (kernel & 0xf_ff00) >> 8;
    let minor = (kernel & 0xff) | ((kernel >> 12) & 0xf_ff00);
    nix::sys::stat::makedev(major, minor)
}
