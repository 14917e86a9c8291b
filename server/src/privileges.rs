//! Which capabilities the service keeps after its start.

use std::os::fd::AsFd as _;

use fdmap_sys::capabilities::{self, Capabilities};
use fdmap_sys::{SyscallError, memfd};

use crate::probe::Probe;
use crate::probe::capabilities::HostCapabilities;

/// What later work needs:
///
/// - `CHOWN`, `FOWNER`: take over and restore the inodes of adopted files.
/// - `DAC_READ_SEARCH`, `DAC_OVERRIDE`: read `/proc/PID` of clients; reopen the shared memory of other users that they pass.
/// - `SYS_PTRACE`: open maps and pagemaps of clients, and enable their fork events.
const KEPT: Capabilities = Capabilities::CHOWN
    .union(Capabilities::FOWNER)
    .union(Capabilities::DAC_READ_SEARCH)
    .union(Capabilities::DAC_OVERRIDE)
    .union(Capabilities::SYS_PTRACE);

/// They load BPF programs. Since Linux 5.19, descriptors suffice to run and attach loaded ones.
const BPF: Capabilities = Capabilities::BPF.union(Capabilities::PERFMON);

/// Gives up all other capabilities of this thread, and of threads that it starts. All BPF programs must be loaded, and files with
/// event groups opened. `binds_tcp`: a TCP address will be bound.
///
/// # Errors
/// `capget`, `capset`, `prctl`.
pub(crate) fn drop_unneeded(host: &HostCapabilities, binds_tcp: bool) -> Result<(), SyscallError> {
    let mut kept = KEPT;
    kept.set(BPF, !runs_programs_without_bpf(host));
    kept.set(Capabilities::NET_BIND_SERVICE, binds_tcp);
    capabilities::keep_only(kept)
}

/// Tries it in a thread, because capabilities cannot be regained.
fn runs_programs_without_bpf(host: &HostCapabilities) -> bool {
    let runs = |probe: &dyn Probe| {
        memfd::create("fdmap-trial", None).is_ok_and(|file| probe.writable_mappings(file.as_fd()).is_ok())
    };
    let try_all = || {
        let mut probes = host.probes.iter().filter_map(|tried| tried.outcome.as_deref().ok());
        capabilities::keep_only(KEPT).is_ok() && probes.all(runs)
    };
    std::thread::scope(|scope| scope.spawn(try_all).join().unwrap_or(false))
}
