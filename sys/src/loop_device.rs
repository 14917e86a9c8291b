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

/// Returns `st_dev` and `st_ino` of the backing file of the loop device `number`.
///
/// # Errors
/// `open`; `ioctl(LOOP_GET_STATUS64)`: `ENXIO` if the device is not attached to a file, `ENODEV` if `/dev/loopN` is another device.
pub fn backing_inode(number: u32) -> Result<(u64, u64), SyscallError> {
    let path = format!("/dev/loop{number}");
    let device = File::open(&path).call(|| format!("open of {path}"))?;
    let mut info = LoopInfo64::zeroed();
    // SAFETY: LOOP_GET_STATUS64 writes one struct loop_info64, the layout of `info`; the descriptor is open.
    let got = unsafe { nix::libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
    Errno::result(got).call(|| format!("ioctl(LOOP_GET_STATUS64) of {path}"))?;
    if info.number != number {
        return Err(Errno::ENODEV).call(|| format!("{path} is loop device {}", info.number));
    }
    Ok((info.device, info.inode))
}
