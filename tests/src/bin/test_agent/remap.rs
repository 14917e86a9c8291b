//! Stores to mappings that are moved, shrunk, extended and duplicated by raw system calls, without the client library.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use fdmap_tests::no_lost_writes::log::Lane;
use fdmap_tests::no_lost_writes::method::Method;
use nix::libc;

use crate::Writer;
use crate::call::{Done, Place, READ_WRITE, map};
use crate::draw::Draw;
use crate::store::store;
use crate::writes::Origin;

/// How often a mapping is changed before it is given up for a new one: in each method once, beginning with the one that is 4.
const CHANGES: u32 = 11;
/// Stores after each change.
const STORES: u64 = 64;

/// The stores.
pub struct Remaps {
    /// Where new mappings come from, which are tracked at first; without it there is one for all time.
    pub origin: Option<Origin>,
    pub place: Option<Place>,
    /// How often the mapping is changed yet.
    pub left: u32,
}

/// Somewhere, of the same length.
fn elsewhere(place: Place) -> Done<usize> {
    map(None, place.len, 0, libc::PROT_NONE).map(|reserved| reserved.address)
}

/// `mremap` to somewhere else.
pub fn moved(place: Place) -> Done<Place> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    place.remap(place.len, place.len, flags, elsewhere(place)?)
}

/// `mremap` of the first `len` bytes to somewhere else; the others stay where they are.
pub fn part_moved(place: Place, len: usize) -> Done<(Place, Place)> {
    let first = Place { len, ..place };
    Ok((moved(first)?, Place { address: place.address + len, len: place.len - len }))
}

/// `mremap` to `len` bytes, less or more.
pub fn resized(place: Place, len: usize) -> Done<Place> {
    place.remap(place.len, len, libc::MREMAP_MAYMOVE, 0)
}

/// `mremap` of 0 bytes: a second mapping of the same pages; the first stays.
pub fn doubled(place: Place) -> Done<Place> {
    place.remap(0, place.len, libc::MREMAP_MAYMOVE, 0)
}

/// `mremap` with `MREMAP_DONTUNMAP`: a second mapping takes the page tables; the first stays, without any.
pub fn left_behind(place: Place) -> Done<Place> {
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
            (old, _) => old.ok_or("there is nothing to change")?,
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
            0 => moved(place)?,
            1 => {
                let half = resized(place, place.len / 2)?;
                write(half);
                resized(half, place.len)?
            }
            2 => {
                let second = doubled(place)?;
                write(second);
                write(place);
                second.unmap(0, second.len)?;
                place
            }
            3 => {
                let second = doubled(place)?;
                place.unmap(0, place.len)?;
                second
            }
            4 => {
                let second = left_behind(place)?;
                write(place);
                write(second);
                place.unmap(0, place.len)?;
                second
            }
            _ => {
                // Half of it elsewhere and back again. What it leaves keeps other threads from mapping anything there.
                let half = Place { len: place.len / 2, ..place };
                let away = left_behind(half)?;
                write(away);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                away.remap(away.len, away.len, flags, place.address)?;
                // One half is registered and one is not: they are two VMAs, which do not move as one.
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

/// Maps something else over a mapping, and gives it.
pub fn covered(place: Place, with: Option<BorrowedFd<'_>>) -> Done<Place> {
    map(with.map(|fd| (fd, 0)), place.len, place.address, READ_WRITE)
}

/// Stores to tracked mappings that end a moment later, by raw system calls that the library does not see.
pub struct Vanishing {
    pub origin: Origin,
    /// Of the same file.
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
            1 => covered(place, None)?.unmap(0, place.len),
            2 => {
                let same = covered(place, Some(self.fd.as_fd()))?;
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
