//! Stores to mappings that are moved, shrunk, extended and duplicated by raw system calls, without the client library.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::no_lost_writes::method::Method;
use nix::libc;
use nix::sys::mman::ProtFlags;

use crate::Writer;
use crate::call::{Done, Place, READ_WRITE, error_text, map};
use crate::draw::Draw;
use crate::store::store;
use crate::writes::Origin;

/// Number of changes of a mapping before a new mapping replaces it.
const CHANGES: u32 = 11;
/// Stores after each change.
const STORES: u64 = 64;

/// Stores to one mapping, which changes after each batch.
pub struct Remaps {
    /// Creates new mappings, which are tracked at first. `None`: one mapping is used all the time.
    pub origin: Option<Origin>,
    pub place: Option<Place>,
    /// Changes left until a new mapping replaces this one.
    pub left: u32,
}

/// Reserves an address range of the same length.
fn reserve_range(place: Place) -> Done<usize> {
    map(None, place.len, ProtFlags::PROT_NONE).map(|reserved| reserved.address)
}

/// `mremap` to another address.
pub fn relocate(place: Place) -> Done<Place> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    place.remap(place.len, place.len, flags, reserve_range(place)?)
}

/// `mremap` of the first `len` bytes to another address. The rest stays where it is.
pub fn move_part(place: Place, len: usize) -> Done<(Place, Place)> {
    let first = Place { len, ..place };
    Ok((relocate(first)?, Place { address: place.address + len, len: place.len - len }))
}

/// `mremap` to `len` bytes, fewer or more.
pub fn resize(place: Place, len: usize) -> Done<Place> {
    place.remap(place.len, len, libc::MREMAP_MAYMOVE, 0)
}

/// `mremap` with an old length of 0: a second mapping of the same pages. The first mapping stays.
pub fn duplicate(place: Place) -> Done<Place> {
    let (start, len) = place.mapping().duplicate(0, place.len).map_err(error_text)?.into_raw();
    Ok(Place { address: start.expose_provenance(), len })
}

/// `mremap` with `MREMAP_DONTUNMAP`: a second mapping takes the page tables. The first mapping stays, without page
/// tables.
pub fn move_page_tables(place: Place) -> Done<Place> {
    place.remap(place.len, place.len, libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP, 0)
}

impl Writer for Remaps {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let place = match (self.place.take(), &self.origin) {
            (old, Some(origin)) if self.left == 0 => {
                if let Some(old) = old {
                    old.unmap(0, old.len)?;
                }
                self.left = CHANGES;
                origin.tracked()?
            }
            (old, _) => old.ok_or("no mapping to change")?,
        };
        self.left = self.left.wrapping_sub(1);
        let form = draw.below(if self.origin.is_some() { 6 } else { 5 });
        let mut write = |place: Place| {
            for _ in 0..STORES {
                store(place, draw.page() % place.pages(), draw.word(), Method::Remap, lane);
            }
        };
        write(place);
        self.place = Some(match form {
            0 => relocate(place)?,
            1 => {
                let half = resize(place, place.len / 2)?;
                write(half);
                resize(half, place.len)?
            }
            2 => {
                let second = duplicate(place)?;
                write(second);
                write(place);
                second.unmap(0, second.len)?;
                place
            }
            3 => {
                let second = duplicate(place)?;
                place.unmap(0, place.len)?;
                second
            }
            4 => {
                let second = move_page_tables(place)?;
                write(place);
                write(second);
                place.unmap(0, place.len)?;
                second
            }
            _ => {
                // Move one half away and back. The mapping that stays prevents other threads from mapping that range.
                let half = Place { len: place.len / 2, ..place };
                let moved_half = move_page_tables(half)?;
                write(moved_half);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                moved_half.remap(moved_half.len, moved_half.len, flags, place.address)?;
                // One half is registered and one is not. They are two VMAs, which cannot be moved by one call.
                self.left = 0;
                place
            }
        });
        if let Some(place) = self.place {
            write(place);
        }
        Ok(())
    }

    fn finish(&mut self, _: &mut Lane<'_>) -> Done {
        self.place.take().map_or(Ok(()), |place| place.unmap(0, place.len))
    }
}

/// Maps other memory over a mapping. Returns the new mapping.
pub fn map_over(place: Place, with: Option<BorrowedFd<'_>>) -> Done<Place> {
    let with = with.map(|fd| (fd, 0));
    place.mapping().replace(0, place.len, with, READ_WRITE).map(|()| place).map_err(error_text)
}

/// Stores to tracked mappings that soon end by raw system calls, without the library.
pub struct Vanishing {
    pub origin: Origin,
    /// A descriptor of the same file.
    pub fd: OwnedFd,
}

impl Writer for Vanishing {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let place = self.origin.tracked()?;
        let mut write = |place: Place, end: u64, draw: &mut Draw| {
            for _ in 0..STORES {
                store(place, draw.page() % end, draw.word(), Method::Vanish, lane);
            }
        };
        write(place, place.pages(), draw);
        match draw.below(4) {
            0 => place.unmap(0, place.len),
            1 => map_over(place, None)?.unmap(0, place.len),
            2 => {
                let same = map_over(place, Some(self.fd.as_fd()))?;
                write(same, same.pages(), draw);
                same.unmap(0, same.len)
            }
            _ => {
                place.unmap(place.len / 2, place.len)?;
                write(place, place.pages() / 2, draw);
                place.unmap(0, place.len / 2)
            }
        }
    }
}
