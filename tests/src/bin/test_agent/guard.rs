//! Guard regions: pages that no access may touch.

use crate::call::{Done, Place, advise, error_text};

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of asm-generic/mman-common.h.
const INSTALL: i32 = 102;
const REMOVE: i32 = 103;

/// Installs a guard region over some pages of a mapping, and removes it. `process`: by process_madvise on this process.
pub fn install_and_remove(place: Place, page: u64, pages: u64, process: bool) -> Done {
    if process {
        advise_process(place, page, pages)?;
    } else {
        advise(place, page, pages, INSTALL)?;
    }
    advise(place, page, pages, REMOVE)
}

fn advise_process(place: Place, page: u64, pages: u64) -> Done {
    let part = (page as usize * 4096, pages as usize * 4096);
    match place.mapping().process_advise(&[part], INSTALL).map_err(error_text)? {
        all if all == part.1 => Ok(()),
        some => Err(format!("process_madvise: {some} of {} bytes", part.1)),
    }
}
