//! A guest of an unpatched QEMU without KVM, under the shim: its program writes a selection of its pages, and its kernel others.

use fdmap_tests::guest::{Guest, Options, PageSelection, Wrapper};
use fdmap_tests::service::{Service, program};

use super::Workload;
use crate::BenchResult;

pub const NAME: &str = "guest";

struct QemuGuest(Guest);

/// Boots the guest.
///
/// # Errors
/// [`crate::BenchError`]
pub fn start(service: &Service) -> BenchResult<Box<dyn Workload>> {
    let fdmap = program("fdmap")?;
    let words = [
        fdmap.as_os_str(),
        "--runtime-dir".as_ref(),
        service.folder().as_os_str(),
        "exec".as_ref(),
        "--".as_ref(),
    ];
    let wrapper = Wrapper(words.into_iter().map(Into::into).collect());
    let guest = Guest::start(&Options { wrapper, ..Options::default() })?;
    Ok(Box::new(QemuGuest(guest)))
}

impl Workload for QemuGuest {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The name that QEMU gives to the memfd of the guest's memory.
    fn file(&self) -> &str {
        "memory-backend-memfd"
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.0.pid()]
    }

    /// Writes 1 % of the pages of the guest's program.
    fn write(&mut self, seed: u64) -> BenchResult<()> {
        self.0.write(PageSelection { seed, per_mille: 10 })?;
        Ok(())
    }
}
