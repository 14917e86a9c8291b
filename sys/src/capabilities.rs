//! Capabilities of the calling thread, and `no_new_privs`.
//!
//! The kernel keeps both per thread. Threads that the caller starts later have what it has then; those that run already keep
//! their own.

use bitflags::bitflags;
use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;

use crate::error::{CallContext, SyscallError};

bitflags! {
    /// A set of capabilities: bit n stands for the capability with number n (`linux/capability.h`), also if it has no name here.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Capabilities: u64 {
        const CHOWN = 1;
        const DAC_OVERRIDE = 1 << 1;
        const DAC_READ_SEARCH = 1 << 2;
        const FOWNER = 1 << 3;
        const SETPCAP = 1 << 8;
        const NET_BIND_SERVICE = 1 << 10;
        const SYS_PTRACE = 1 << 19;
        const SYS_ADMIN = 1 << 21;
        const PERFMON = 1 << 38;
        const BPF = 1 << 39;
        const _ = !0;
    }
}

/// The capability with the highest number that the kernel could have.
const MAX_CAPABILITIES: u32 = 64;

/// `struct __user_cap_header_struct` of linux/capability.h.
#[repr(C)]
struct Header {
    version: u32,
    pid: libc::c_int,
}

/// `struct __user_cap_data_struct`: 32 capabilities.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

impl Header {
    /// `_LINUX_CAPABILITY_VERSION_3`, which takes two [`Data`], of the calling thread.
    const OWN: Self = Self { version: 0x2008_0522, pid: 0 };
}

/// The permitted capabilities of the calling thread.
///
/// # Errors
/// `capget`.
pub fn permitted() -> Result<Capabilities, SyscallError> {
    let (mut header, mut data) = (Header::OWN, [Data::default(); 2]);
    // SAFETY: both pointers refer to writable structures of the layout that version 3 has.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, &raw mut data) };
    Errno::result(result).call(|| "capget".to_owned())?;
    let [low, high] = data.map(|data| u64::from(data.permitted));
    Ok(Capabilities::from_bits_retain(high << 32 | low))
}

/// Gives up all capabilities of the calling thread but `kept`, of those that it has: permitted, effective, inheritable and with
/// them ambient ones, and those of the bounding set if the thread has `CAP_SETPCAP`. Without that, [`forbid_new_privileges`] keeps
/// it from gaining any by execve(2).
///
/// # Errors
/// `capget`, `capset`, `prctl(PR_CAPBSET_DROP)`.
pub fn keep_only(kept: Capabilities) -> Result<(), SyscallError> {
    let permitted = permitted()?;
    if permitted.contains(Capabilities::SETPCAP) {
        for number in (0..MAX_CAPABILITIES).filter(|number| kept.bits() >> number & 1 == 0) {
            // SAFETY: the call takes integers and touches no memory.
            let dropped = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) };
            match Errno::result(dropped) {
                // The kernel has no capability with this number.
                Err(Errno::EINVAL) => break,
                dropped => drop(dropped.call(|| format!("prctl(PR_CAPBSET_DROP) of capability {number}"))?),
            }
        }
    }
    set(permitted & kept, permitted & kept, Capabilities::empty())
}

fn set(
    effective: Capabilities,
    permitted: Capabilities,
    inheritable: Capabilities,
) -> Result<(), SyscallError> {
    let word = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
    let data = [0, 32].map(|shift| Data {
        effective: word(effective.bits() >> shift),
        permitted: word(permitted.bits() >> shift),
        inheritable: word(inheritable.bits() >> shift),
    });
    let mut header = Header::OWN;
    // SAFETY: both pointers refer to structures of the layout that version 3 has; the kernel only reads `data`.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, &raw const data) };
    Errno::result(result).call(|| format!("capset to {:#x}", permitted.bits())).map(drop)
}

/// Lets the programs that this thread executes keep `kept`, of what it has, also under `no_new_privs` and for users other than root
/// (as ambient capabilities).
///
/// # Errors
/// `capget`, `capset`, `prctl(PR_CAP_AMBIENT_RAISE)`.
pub fn pass_on(kept: Capabilities) -> Result<(), SyscallError> {
    let permitted = permitted()?;
    let kept = permitted & kept;
    set(permitted, permitted, kept)?;
    for number in (0..MAX_CAPABILITIES).filter(|number| kept.bits() >> number & 1 == 1) {
        let raise = libc::PR_CAP_AMBIENT_RAISE.cast_unsigned();
        // SAFETY: the call takes integers and touches no memory.
        let raised = unsafe {
            libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::c_ulong::from(raise),
                libc::c_ulong::from(number),
                0_u64,
                0_u64,
            )
        };
        Errno::result(raised)
            .call(|| format!("prctl(PR_CAP_AMBIENT_RAISE) of capability {number}"))
            .map(drop)?;
    }
    Ok(())
}

/// Sets `no_new_privs` of the calling thread: no program that it executes has more privileges.
///
/// # Errors
/// `prctl(PR_SET_NO_NEW_PRIVS)`.
pub fn forbid_new_privileges() -> Result<(), SyscallError> {
    prctl::set_no_new_privs().call(|| "prctl(PR_SET_NO_NEW_PRIVS)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line NAME of `/proc/thread-self/status`.
    fn status(name: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap().trim().to_owned()
    }

    fn status_set(name: &str) -> Capabilities {
        Capabilities::from_bits_retain(u64::from_str_radix(&status(name), 16).unwrap())
    }

    #[test]
    fn programs_keep_the_capabilities_that_are_passed_on() {
        let before = permitted().unwrap();
        let passed = Capabilities::CHOWN | Capabilities::FOWNER;
        std::thread::spawn(move || {
            forbid_new_privileges().unwrap();
            pass_on(passed).unwrap();
            assert_eq!((permitted().unwrap(), status_set("CapEff")), (before, before));
            assert_eq!((status_set("CapInh"), status_set("CapAmb")), (before & passed, before & passed));
            keep_only(Capabilities::all()).unwrap();
            assert!(
                status_set("CapInh").is_empty() && status_set("CapAmb").is_empty(),
                "they are given up again"
            );
        })
        .join()
        .unwrap();
    }

    #[test]
    fn thread_keeps_the_named_capabilities_and_others_keep_all() {
        let before = permitted().unwrap();
        assert_eq!(before, status_set("CapPrm"));
        let named = Capabilities::CHOWN | Capabilities::BPF;
        std::thread::spawn(move || {
            forbid_new_privileges().unwrap();
            keep_only(named).unwrap();
            for name in ["CapPrm", "CapEff"] {
                assert_eq!(status_set(name), before & named, "{name}");
            }
            assert!(status_set("CapInh").is_empty() && status_set("CapAmb").is_empty());
            assert!(!before.contains(Capabilities::SETPCAP) || named.contains(status_set("CapBnd")));
            assert_eq!(status("NoNewPrivs"), "1");
            std::thread::spawn(move || assert_eq!(permitted().unwrap(), before & named)).join().unwrap();
            keep_only(Capabilities::all()).unwrap();
            assert_eq!(permitted().unwrap(), before & named, "no capability comes back");
        })
        .join()
        .unwrap();
        assert_eq!((permitted().unwrap(), status("NoNewPrivs").as_str()), (before, "0"));
    }
}
