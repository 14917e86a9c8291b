//! Construction of shared snapshots: a memfd with the page states of a file, sealed against every change.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, Header};
use fdmap_proto::units::{PageRange, to_u64};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::mapping::IMMUTABLE_SEALS;
use fdmap_sys::{Errno, SyscallError, fd, memfd, ownership};

use crate::pages::{BlockRange, Snapshot, entries, state_words};

/// Pages of one write. A multiple of 4, because a byte of the states layout holds 4 pages.
const CHUNK_PAGES: u64 = 64 << 10;

/// A complete shared snapshot. Both descriptors are read-only.
#[derive(Debug)]
pub(super) struct SharedSnapshot {
    pub(super) client_fd: OwnedFd,
    /// Shows by a lease whether the client still has the snapshot.
    pub(super) service_fd: OwnedFd,
}

/// Writes the pages of `header` to a memfd and seals it. Returns `None` if `cancelled` returns true.
///
/// # Errors
/// `memfd_create`, `fchown`, `fchmod`, `ftruncate`, `pwrite`, `fcntl(F_ADD_SEALS)`, `open`.
pub(super) fn build(
    header: &Header,
    snapshot: &Snapshot,
    cancelled: impl Fn() -> bool,
) -> Result<Option<SharedSnapshot>, SyscallError> {
    let memfd = memfd::create("fdmap-snapshot", None)?;
    ownership::take(memfd.as_fd())?;
    let total = header.total_bytes().ok_or(Errno::EFBIG).call(|| format!("size of {}", header.range))?;
    // A new memfd reads as zeroes, which encode holes.
    memfd::resize(memfd.as_fd(), total)?;
    write_all(&memfd, &header.encode(), 0)?;
    let mut at = to_u64(HEADER_BYTES);
    let mut rest = header.range;
    let mut bytes = Vec::new();
    while !rest.is_empty() {
        if cancelled() {
            return Ok(None);
        }
        let now = PageRange::at(rest.start(), CHUNK_PAGES).intersect(rest);
        bytes.clear();
        if snapshot.range(BlockRange::around(now)).next().is_some() {
            match header.layout {
                BodyLayout::Entries => entries(snapshot, now, &mut bytes),
                BodyLayout::States => bytes = state_words(snapshot, now),
            }
            write_all(&memfd, &bytes, at)?;
        }
        at += header.layout.body_bytes(now.len()).unwrap_or(0);
        rest = PageRange::new(now.end(), rest.end()).unwrap_or_default();
    }
    memfd::add_seals(memfd.as_fd(), IMMUTABLE_SEALS | fdmap_proto::Seals::SEAL.bits())?;
    let service_fd = fd::reopen(memfd.as_fd(), false)?;
    let client_fd = fd::reopen(memfd.as_fd(), false)?;
    Ok(Some(SharedSnapshot { client_fd, service_fd }))
}

fn write_all(file: &OwnedFd, bytes: &[u8], offset: u64) -> Result<(), SyscallError> {
    let call = || format!("pwrite of {} bytes at {offset} of descriptor {}", bytes.len(), file.as_raw_fd());
    let mut done = 0;
    while done < bytes.len() {
        let at = i64::try_from(offset + to_u64(done)).map_err(|_| Errno::EFBIG).call(call)?;
        match nix::sys::uio::pwrite(file, &bytes[done..], at) {
            Err(Errno::EINTR) => {}
            Ok(0) => return Err(Errno::EIO).call(call),
            other => done += other.call(call)?,
        }
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests {
    use fdmap_proto::shared_snapshot::{entry_at, state_at};
    use fdmap_proto::units::{FileId, PageIndex, PageSize};
    use fdmap_proto::{PageState, PagemapEntry, ProbeKind, SwapSlot};
    use fdmap_sys::mapping::{SealedMapping, SharedMapping};

    use super::*;
    use crate::pages::oracle::{Page, snapshot};

    fn header(layout: BodyLayout, range: PageRange, snapshot: &Snapshot) -> Header {
        Header {
            layout,
            slots: true,
            page_size: PageSize::new(4096).unwrap(),
            range,
            file: FileId::new(7).unwrap(),
            file_pages: 200_000,
            provenance: snapshot.provenance(&[range], ProbeKind::Xarray, 3).unwrap(),
        }
    }

    #[test]
    fn snapshot_is_immutable_and_holds_every_page() {
        let file: Vec<Page> = (0..200_000_u64)
            .map(|page| match page % 5 {
                0 => (PageState::Hole, None),
                1 | 2 => (PageState::Resident, None),
                _ => (PageState::Swapped, SwapSlot::new(1, page + 1)),
            })
            .collect();
        let snapshot = snapshot(&file);
        let range = PageRange::new(PageIndex(3), PageIndex(199_998)).unwrap();
        for layout in [BodyLayout::Entries, BodyLayout::States] {
            let header = header(layout, range, &snapshot);
            let built = build(&header, &snapshot, || false).unwrap().unwrap();
            assert!(SharedMapping::shared(&built.client_fd, 0, 4096, true).is_err());
            let bytes = SealedMapping::map(built.client_fd.as_fd()).unwrap();
            assert_eq!(Header::decode(&bytes, bytes.len() as u64), Ok(header));
            let body = &bytes[HEADER_BYTES..];
            for nth in 0..range.len() {
                let (state, slot) = file[nth as usize + 3];
                match layout {
                    BodyLayout::Entries => {
                        assert_eq!(entry_at(body, nth), Some(PagemapEntry::encode(state, slot)));
                    }
                    BodyLayout::States => assert_eq!(state_at(body, nth), Some(state)),
                }
            }
        }
    }

    #[test]
    fn holes_take_no_memory() {
        let mut file: Vec<Page> = vec![(PageState::Hole, None); 400_000];
        file[300_000] = (PageState::Resident, None);
        let (snapshot, range) = (snapshot(&file), PageRange::first(400_000));
        for layout in [BodyLayout::Entries, BodyLayout::States] {
            let built = build(&header(layout, range, &snapshot), &snapshot, || false).unwrap().unwrap();
            let stat = fd::stat(&built.service_fd).unwrap();
            assert_eq!(
                stat.st_size.cast_unsigned(),
                HEADER_BYTES as u64 + layout.body_bytes(400_000).unwrap()
            );
            assert!(stat.st_blocks * 512 < 700 << 10, "{} bytes", stat.st_blocks * 512);
        }
    }

    #[test]
    fn cancelled_build_returns_none() {
        let snapshot = snapshot(&[(PageState::Resident, None)]);
        let header = header(BodyLayout::States, PageRange::first(1), &snapshot);
        assert!(build(&header, &snapshot, || true).unwrap().is_none());
    }
}
