//! Capabilities of this host. Each is determined by trying it, never by the kernel's version. A capability that cannot
//! be tried is unknown, not unavailable.

mod capability;
pub mod guard_trial;
mod memory;
mod references;
mod trial;
mod writes;

use std::os::fd::AsFd as _;
use std::sync::Arc;

use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::units::{PageSize, to_u64};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::{SyscallError, cachestat, memfd, ownership, scm};
use nix::unistd::{SysconfVar, sysconf};

use capability::capability_of;
pub use capability::{Availability, Capability};

use super::interface::Probe;
use super::registry::PROBES;
use super::select::TriedProbe;
use crate::confinement;
use crate::tracking::EventSources;
use fdmap_proto::error_chain;
use trial::TrialFile;

/// The capabilities of this host, and the probes that were tried on it.
pub struct HostCapabilities {
    /// In the order in which they were tried.
    pub capabilities: Vec<Capability>,
    /// Size of a base page.
    pub page_size: PageSize,
    /// hugetlb page sizes in bytes, in ascending order.
    pub hugetlb_page_sizes: Vec<u64>,
    /// The probes of the registry, in its order.
    pub probes: Vec<TriedProbe<Arc<dyn Probe>>>,
}

impl HostCapabilities {
    /// Tries every capability. Takes some tens of milliseconds, and removes everything that it creates. What traces
    /// system calls stays loaded in `event_sources`.
    ///
    /// # Errors
    /// The host cannot create a memfd, or has a page size that fdmap does not support.
    pub fn detect(event_sources: &EventSources) -> Result<Self, SyscallError> {
        let page_size = page_size()?;
        let file = TrialFile::create(page_size)?;
        let mut probes = Vec::new();
        let mut capabilities = Vec::new();
        for entry in PROBES {
            let outcome = (entry.load)().and_then(|probe| file.check_probe(&*probe).map(|()| probe));
            capabilities.push(capability_of(entry.capability, &outcome, entry.impact));
            probes.push(TriedProbe { kind: entry.kind, outcome });
        }
        let xarray = probes.iter().find(|tried| tried.kind == ProbeKind::Xarray);
        let xarray = xarray.and_then(|tried| tried.outcome.as_deref().ok());
        capabilities.push(capability_of(
            "page-attributes",
            &xarray
                .ok_or_else(|| "needs xarray-walk".to_owned())
                .and_then(|probe| file.check_attributes(probe)),
            "folio order, flags, map counts and pins",
        ));
        capabilities.extend(references::capabilities(xarray, page_size));
        capabilities.push(tried_by("compared with /proc/swaps", capability_of(
            "swap-slots",
            &xarray.ok_or_else(|| "needs xarray-walk".to_owned()).and_then(Probe::check_swap_slots),
            "dumps that read swapped pages from their swap slots; without it, they are swapped in and out again. Remedy: run fdmapd \
             with CAP_BPF and CAP_PERFMON on x86-64",
        )));
        capabilities.extend(writes::capabilities(page_size, event_sources));
        capabilities.push(capability_of(
            "cachestat",
            &try_cachestat(&file),
            "scans by the syscalls probe that wait for no process: it uses lseek, which waits while a process holds the lock of a file's inode",
        ));
        capabilities.push(capability_of(
            "seal-future-write",
            &try_future_write_seal().map_err(|e| error_chain(&e)),
            "writer-sealed files",
        ));
        capabilities.push(capability_of(
            "take-inodes",
            &try_take_ownership().map_err(|e| error_chain(&e)),
            "adopting memfds of other users",
        ));
        capabilities.push(capability_of(
            "refuse-descriptors",
            &try_refusing_descriptors().map_err(|e| error_chain(&e)),
            "gRPC connections without a copy in a receiver, which costs three descriptors for each",
        ));
        capabilities.extend([
            tried_by(IN_A_THREAD, capability_of(
                "helper-seccomp",
                &confinement::try_seccomp(),
                "confinement to few system calls of the processes that handle what clients pass",
            )),
            tried_by(IN_A_THREAD, capability_of(
                "helper-landlock",
                &confinement::try_landlock(),
                "a second barrier between these processes and files, TCP, abstract sockets and other processes",
            )),
        ]);
        let hugetlb_page_sizes = memory::hugetlb_page_sizes();
        capabilities.extend(memory::capabilities(&hugetlb_page_sizes));
        Ok(Self { capabilities, page_size, hugetlb_page_sizes, probes })
    }
}

/// A capability that was not tried on a file. `detail`: how it was tried.
fn tried_by(detail: &str, capability: Capability) -> Capability {
    match capability.availability {
        Availability::Available => Capability { detail: detail.to_owned(), ..capability },
        Availability::Unavailable | Availability::Unknown => capability,
    }
}

const IN_A_THREAD: &str = "tried in a thread of fdmapd";

fn page_size() -> Result<PageSize, SyscallError> {
    let call = || "sysconf(_SC_PAGE_SIZE)".to_owned();
    let bytes = sysconf(SysconfVar::PAGE_SIZE).call(call)?.unwrap_or(0);
    u64::try_from(bytes).ok().and_then(PageSize::new).ok_or(nix::errno::Errno::EINVAL).call(call)
}

fn try_cachestat(file: &TrialFile) -> Result<(), String> {
    let counts = cachestat::count(file.fd(), 0, 0).map_err(|error| error_chain(&error))?;
    let expected = trial::data_pages().count();
    if counts.cached == to_u64(expected) {
        Ok(())
    } else {
        Err(format!("counts {counts:?} for {expected} pages"))
    }
}

fn try_future_write_seal() -> Result<(), SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    memfd::add_seals(file.as_fd(), fdmap_proto::Seals::FUTURE_WRITE.bits())
}

fn try_refusing_descriptors() -> Result<(), SyscallError> {
    let (_one, other) = scm::socket_pair()?;
    scm::pass_descriptors(&other, false)
}

/// Tries to take an inode from another owner.
fn try_take_ownership() -> Result<(), SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    // The file must first belong to a user that fdmapd does not run as.
    let other = if nix::unistd::geteuid().as_raw() == 65534 { 65533 } else { 65534 };
    nix::unistd::fchown(&file, Some(nix::unistd::Uid::from_raw(other)), None)
        .call(|| format!("fchown of a trial file to user {other}"))?;
    ownership::take(file.as_fd()).map(drop)
}
