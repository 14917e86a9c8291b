//! The kernel objects behind descriptors of the service, by which a walk over the VMAs of a file identifies address spaces.

use std::os::fd::{AsFd as _, BorrowedFd};

use fdmap_sys::pagemap::Pagemap;

use super::address_space::SpaceIdentity;
use super::holder::HeldSpace;
use crate::log_limit::LogLimit;
use crate::probe::{KernelAddress, Probe, ScanError};

static UNKNOWN: LogLimit = LogLimit::new();

/// Finds kernel objects with a probe.
#[derive(Clone, Copy)]
pub(crate) struct KernelObjects<'a>(pub(super) &'a dyn Probe);

impl KernelObjects<'_> {
    /// The object behind a userfaultfd or a pagemap; `None` if it is unknown: then no mapping that a walk finds counts as tracked.
    pub(crate) fn behind(self, fd: BorrowedFd<'_>) -> Option<KernelAddress> {
        known(self.0.private_data(fd))
    }

    /// The identity of the address space with this pagemap, whose mappings are registered with this userfaultfd.
    pub(crate) fn identity(self, pagemap: &Pagemap, userfaultfd: &HeldSpace) -> SpaceIdentity {
        SpaceIdentity {
            mm: self.behind(pagemap.as_fd()),
            userfaultfd: userfaultfd.with(|own| self.behind(own.as_fd())).flatten(),
        }
    }

    /// True if the userfaultfd is of address space `mm`; `None`: unknown.
    pub(crate) fn is_userfaultfd_of(
        self,
        userfaultfd: &HeldSpace,
        mm: Option<KernelAddress>,
    ) -> Option<bool> {
        let own = userfaultfd.with(|own| known(self.0.userfaultfd_space(own.as_fd()))).flatten()?;
        Some(own == mm?)
    }
}

fn known(found: Result<Option<KernelAddress>, ScanError>) -> Option<KernelAddress> {
    found.unwrap_or_else(|error| {
        if let Some(omitted) = UNKNOWN.permit() {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(error, omitted, "kernel object of a descriptor is unknown");
        }
        None
    })
}
