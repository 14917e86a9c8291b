//! The swap areas of the host, opened once and for as long as they do not change.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use fdmap_proto::{SwapArea, SwapSlot};
use fdmap_sys::SyscallError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::area::{AreaError, OpenArea};
use super::kernel_file::{self, PROC_SUPER_MAGIC};
use super::scratch::Scratch;

/// Swap areas, and whether any was switched on or off since this was created.
#[derive(Debug)]
pub(super) struct Areas {
    /// `/proc/swaps`: poll(2) reports an event once for this descriptor after each swapon(2) and swapoff(2).
    swaps: File,
    /// An event was reported.
    has_changed: Mutex<bool>,
    opened: OnceLock<Vec<(SwapArea, Result<OpenArea, AreaError>)>>,
}

impl Areas {
    /// Watches the areas from now on. They are opened later: what is found then is valid until an event.
    ///
    /// # Errors
    /// `open`, `fstatfs`; `EXDEV` if another file is mounted at `/proc/swaps`, which would raise no events.
    pub(super) fn watch() -> Result<Self, SyscallError> {
        let swaps = kernel_file::open("/proc/swaps", PROC_SUPER_MAGIC)?;
        Ok(Self { swaps, has_changed: Mutex::new(false), opened: OnceLock::new() })
    }

    /// Opens the areas, the first time. False if these are others than the first time. Areas that cannot be opened stay closed.
    pub(super) fn open(&self, areas: &[SwapArea], scratch: &mut Scratch) -> bool {
        let opened = self.opened.get_or_init(|| {
            let open = |area: &SwapArea| (area.clone(), OpenArea::open(area, scratch));
            areas.iter().map(open).collect()
        });
        opened.iter().map(|(area, _)| area).eq(areas)
    }

    /// The area of a slot, if it was opened.
    pub(super) fn of(&self, slot: SwapSlot) -> Option<&OpenArea> {
        let mut opened = self.opened.get()?.iter();
        opened.find(|(area, _)| area.swap_type == slot.swap_type())?.1.as_ref().ok()
    }

    /// Why an area cannot be read, for one of those.
    pub(super) fn refusal(&self) -> Option<&AreaError> {
        self.opened.get()?.iter().find_map(|(_, opened)| opened.as_ref().err())
    }

    /// True if an area was switched on or off since this was created, or if that is unknown.
    pub(super) fn have_changed(&self) -> bool {
        // No code panics with the lock held. It is held during the call: another thread must not take the event first.
        let mut has_changed = self.has_changed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut polled = [PollFd::new(self.swaps.as_fd(), PollFlags::POLLPRI)];
        let is_quiet = poll(&mut polled, PollTimeout::ZERO) == Ok(0);
        *has_changed |= !is_quiet;
        *has_changed
    }
}
