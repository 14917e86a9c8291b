//! The process to adopt, opened once and identified by a pidfd, and its threads.

// Other architectures adopt without tracking, and look at no threads.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use fdmap_sys::fd::{has_access_acl, stat};
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::pidfd::{self, PidFd};
#[cfg(target_arch = "x86_64")]
use fdmap_sys::ptrace::ProcessMemory;
use fdmap_sys::thread::{self, ThreadState};
use fdmap_sys::{Errno, SyscallError};

use super::AdoptError;
use crate::ClientError;

/// A process, with the address space that it had when it was opened.
#[derive(Debug)]
pub(super) struct Tracee {
    pub(super) pid: u32,
    pub(super) maps: Maps,
    pidfd: PidFd,
    #[cfg(target_arch = "x86_64")]
    memory: ProcessMemory,
}

/// Reading a process takes the right to trace it.
fn denied_or_failed(error: SyscallError) -> AdoptError {
    match error.errno {
        Errno::EACCES | Errno::EPERM => AdoptError::Denied(error),
        _ => error.into(),
    }
}

impl Tracee {
    /// Opens the process that has this pid now.
    pub(super) fn open(pid: u32) -> Result<Self, AdoptError> {
        let tracee = Self {
            pid,
            pidfd: pidfd::open(pid)?,
            maps: Maps::open(pid).map_err(denied_or_failed)?,
            #[cfg(target_arch = "x86_64")]
            memory: ProcessMemory::open(pid).map_err(denied_or_failed)?,
        };
        tracee.check_alive()?;
        Ok(tracee)
    }

    /// Fails if the process has exited. As long as this succeeds the pid was not reused: every lookup by pid until now was
    /// one of this process.
    pub(super) fn check_alive(&self) -> Result<(), AdoptError> {
        if self.pidfd.exited()? { Err(AdoptError::ProcessExited(self.pid)) } else { Ok(()) }
    }

    /// Duplicates one of the process's descriptors by pidfd_getfd(2).
    pub(super) fn take_descriptor(&self, number: i32) -> Result<OwnedFd, SyscallError> {
        self.pidfd.descriptor(number)
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn read_memory(&self, address: u64, out: &mut [u8]) -> Result<(), SyscallError> {
        self.memory.read(address, out)
    }

    /// The shared mappings of files. Inode number 0 is valid: the first System V segment of an IPC namespace has it.
    pub(super) fn shared_vmas(&self) -> Result<Vec<Vma>, SyscallError> {
        let mut vmas = self.maps.all()?;
        vmas.retain(|vma| vma.shared && (vma.device, vma.inode) != (0, 0));
        Ok(vmas)
    }

    /// True if the user of the process may write to a file, by its mode. If the file has an ACL, true for its owner only.
    pub(super) fn may_write(&self, file: BorrowedFd<'_>) -> Result<bool, AdoptError> {
        let (stat, acl) = (stat(file)?, has_access_acl(file)?);
        let path = PathBuf::from(format!("/proc/{}/status", self.pid));
        let status = fs::read_to_string(&path);
        let status = status.map_err(|error| ClientError::Path { what: "reading", path, error })?;
        self.check_alive()?;
        Ok(has_write_permission(&status, (stat.st_uid, stat.st_gid, stat.st_mode), acl))
    }

    /// Checks, without touching the process, whether system calls can be injected into it.
    pub(super) fn check_injectable(&self) -> Result<(), AdoptError> {
        let path = PathBuf::from(format!("/proc/{}/status", self.pid));
        let failed = |path, error| ClientError::Path { what: "reading", path, error };
        let status = fs::read_to_string(&path).map_err(|error| failed(path, error))?;
        let path = PathBuf::from(format!("/proc/{}/exe", self.pid));
        let mut head = [0; 5];
        let head = match fs::File::open(&path).and_then(|mut file| file.read_exact(&mut head)) {
            Ok(()) => Some(head),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(path, error).into()),
        };
        self.check_alive()?;
        match injection_obstacle(&status, head) {
            Some(obstacle) => Err(AdoptError::Untrackable(obstacle)),
            None => Ok(()),
        }
    }

    /// The threads and what they do.
    pub(super) fn threads(&self) -> Result<Vec<(u32, ThreadState)>, AdoptError> {
        Ok(thread::threads(self.pid)?)
    }

    /// True if the process has a thread of this number now, which has not exited.
    pub(super) fn has_thread(&self, tid: u32) -> Result<bool, AdoptError> {
        let exists = thread::is_alive(self.pid, tid);
        self.check_alive().map(|()| exists)
    }
}

/// True if a process with this `/proc/PID/status` may write to a file with this owner, group and mode. `acl`: the file has an ACL, whose
/// entries are not read.
fn has_write_permission(status: &str, (uid, gid, mode): (u32, u32, u32), acl: bool) -> bool {
    let numbers = |key: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.unwrap_or_default().split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    // Real, effective, saved set and file system id. A program that a user started with more rights, as by a set-user-ID bit, has
    // descriptors of that user: each of the ids must permit it.
    let (users, groups, supplementary) = (numbers("Uid"), numbers("Gid"), numbers("Groups"));
    let permits = |own: u32, group: u32| {
        let bit = if own == uid {
            0o200
        } else if acl {
            // The group bits are the mask of the ACL, and an entry for the user or a group of it precedes the other bits.
            0
        } else if group == gid || supplementary.contains(&gid) {
            0o020
        } else {
            0o002
        };
        own == 0 || mode & bit != 0
    };
    let (&[_, _, _, _], &[_, _, _, _]) = (&users[..], &groups[..]) else { return false };
    users.iter().all(|own| groups.iter().all(|group| permits(*own, *group)))
}

/// Why no system call can be injected, by `/proc/PID/status` and the first bytes of the executable (`None`: there is none).
fn injection_obstacle(status: &str, executable: Option<[u8; 5]>) -> Option<String> {
    let field = |key: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        value.map(str::trim)
    };
    let obstacle = match (field("State"), field("TracerPid"), field("Seccomp"), executable) {
        (Some(state), ..) if state.starts_with(['Z', 'X']) => "it has exited",
        (_, Some(tracer), ..) if tracer != "0" => return Some(format!("process {tracer} traces it already")),
        (_, _, Some("1"), _) => "it runs in seccomp strict mode",
        (_, _, Some(mode), _) if mode != "0" => {
            "its seccomp filter could kill it for an injected system call"
        }
        (.., None) => "it is a kernel thread",
        // EI_CLASS of elf(5): 2 is ELFCLASS64.
        (.., Some([0x7f, b'E', b'L', b'F', 2])) => return None,
        (.., Some(_)) => "it is not a 64-bit program",
    };
    Some(obstacle.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_permission_is_that_of_the_first_class_that_matches() {
        let status = "Uid:\t1001\t1001\t1001\t1001\nGid:\t101\t101\t101\t101\nGroups:\t200 201 \n";
        for (owner, group, mode, permitted) in [
            (1001, 9, 0o600, true),
            (1001, 9, 0o477, false),
            (1000, 101, 0o020, true),
            (1000, 201, 0o020, true),
            (1000, 101, 0o602, false),
            (1000, 100, 0o002, true),
            (1000, 100, 0o770, false),
        ] {
            assert_eq!(
                has_write_permission(status, (owner, group, mode), false),
                permitted,
                "{owner} {group} {mode:o}"
            );
        }
        assert!(has_write_permission("Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n", (1, 1, 0), false));
        // With an ACL, the owner alone.
        assert!(has_write_permission(status, (1001, 9, 0o600), true));
        assert!(!has_write_permission(status, (1000, 101, 0o666), true));
        // Programs with a set-user-ID or set-group-ID bit.
        let of_root = "Uid:\t1000\t0\t0\t0\nGid:\t100\t100\t100\t100\n";
        assert!(
            !has_write_permission(of_root, (1, 1, 0o644), false)
                && has_write_permission(of_root, (1, 1, 0o646), false)
        );
        let of_group = "Uid:\t1000\t1000\t1000\t1000\nGid:\t100\t101\t101\t101\n";
        assert!(
            !has_write_permission(of_group, (1, 101, 0o664), false)
                && has_write_permission(of_group, (1, 101, 0o666), false)
        );
        assert!(!has_write_permission("", (0, 0, 0o770), false));
        assert!(!has_write_permission("Uid:\t0\t0\t0\t0\n", (1, 1, 0o777), false), "a line is missing");
    }

    const ELF64: [u8; 5] = [0x7f, b'E', b'L', b'F', 2];

    fn obstacle(status: &str, executable: Option<[u8; 5]>) -> String {
        injection_obstacle(status, executable).unwrap_or_default()
    }

    #[test]
    fn ordinary_process_is_injectable() {
        let status = "State:\tS (sleeping)\nTracerPid:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\n";
        assert_eq!(obstacle(status, Some(ELF64)), "");
        assert_eq!(obstacle("State:\tR (running)\n", Some(ELF64)), "", "a kernel without seccomp");
        assert!(Tracee::open(std::process::id()).unwrap().check_injectable().is_ok());
    }

    #[test]
    fn obstacles_to_injection_are_named() {
        assert!(obstacle("State:\tZ (zombie)\n", None).contains("exited"));
        let traced = obstacle("State:\tS\nTracerPid:\t12\nSeccomp:\t2\n", Some(ELF64));
        assert!(traced.contains("12 traces it already"));
        assert!(obstacle("Seccomp:\t2\n", Some(ELF64)).contains("filter"));
        assert!(obstacle("Seccomp:\t1\n", Some(ELF64)).contains("strict"));
        assert!(obstacle("State:\tI (idle)\n", None).contains("kernel"));
        let mut elf32 = ELF64;
        elf32[4] = 1;
        assert!(obstacle("State:\tS\n", Some(elf32)).contains("64-bit"));
        assert!(Tracee::open(0x7fff_fff0).is_err());
    }

    #[test]
    fn own_threads_are_found() {
        let own = std::process::id();
        let tracee = Tracee::open(own).unwrap();
        assert!(tracee.threads().unwrap().len() >= 2);
        assert!(tracee.has_thread(own).unwrap() && !tracee.has_thread(1).unwrap());
    }
}
