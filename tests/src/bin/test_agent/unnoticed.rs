//! A child that leaves no trace in its parent: its pid is chosen, so that the last pid of the host does not change, and its
//! parent ignores SIGCHLD, so that its page faults are not added to those of reaped children.

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, signal};

use crate::call::{Done, checked, error_text};

/// `struct clone_args` of linux/sched.h.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const _: () = assert!(size_of::<CloneArguments>() == 88);

/// Forks a child that writes one byte and exits, and waits for its end.
pub fn write_in_child(byte: *mut u8) -> Done {
    // SAFETY: the handler is SIG_IGN.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }.map_err(error_text)?;
    let pids = std::fs::read_to_string("/proc/sys/kernel/pid_max").map_err(error_text)?;
    let max: i32 = pids.trim().parse().map_err(error_text)?;
    for pid in (300..max).rev() {
        match clone_as(pid, byte) {
            Ok(pidfd) => return wait(&pidfd),
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(format!("clone3 with pid {pid}: {errno}")),
        }
    }
    Err("no pid is free".to_owned())
}

fn clone_as(pid: i32, byte: *mut u8) -> Result<OwnedFd, Errno> {
    let mut pidfd = -1_i32;
    let arguments = CloneArguments {
        flags: libc::CLONE_PIDFD as u64,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        exit_signal: libc::SIGCHLD as u64,
        set_tid: (&raw const pid).expose_provenance() as u64,
        set_tid_size: 1,
        ..CloneArguments::default()
    };
    // SAFETY: the child has a copy of the stack. It accesses one byte of a mapping, and calls _exit.
    let cloned =
        unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<CloneArguments>()) };
    if cloned == 0 {
        // SAFETY: the byte lies in a shared mapping of the agent, to which there are no references.
        unsafe { byte.write_volatile(0x5a) };
        // SAFETY: _exit takes an integer.
        unsafe { libc::_exit(0) };
    }
    Errno::result(cloned)?;
    // SAFETY: the kernel created this descriptor just now, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

fn wait(pidfd: &OwnedFd) -> Done {
    let polled = poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    polled.map_err(error_text).and_then(|ready| checked(ready.into(), || "poll".to_owned())).map(drop)
}
