//! The content of a file, compared with an earlier copy of it.

use fdmap_client::proto::convert::FileName;
use fdmap_client::{FdpassClient, MappedFile};
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_sys::seek;
use fdmap_tests::no_lost_writes::pages::PageSet;

use crate::{BenchError, BenchResult};

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// A read-only mapping of a file, and a copy of its content. Reads through a mapping take no reference to the pages, as those by a
/// descriptor do for a while, which would make the pages conservative.
pub struct Content {
    mapping: MappedFile,
    /// Holes are zeros.
    copy: Vec<u8>,
    /// Bytes of a page.
    page: usize,
}

impl Content {
    /// Maps the file. The copy holds zeros at first.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn map(fdpass: &mut FdpassClient, name: &FileName) -> BenchResult<Self> {
        let mapping = fdpass.map(name, false)?;
        let (copy, page) = (vec![0; mapping.len()], to_usize(mapping.page_size().bytes()));
        Ok(Self { mapping, copy, page })
    }

    #[must_use]
    pub fn pages(&self) -> u64 {
        to_u64(self.copy.len() / self.page)
    }

    /// The pages whose content differs from the copy, which is updated. Holes are not read: that would fill them.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn changed_pages(&mut self) -> BenchResult<PageSet> {
        let mut changed = PageSet::of(self.pages());
        let (mut at, len) = (0, to_u64(self.copy.len()));
        while let Some(data) = seek::next_data(self.mapping.as_fd(), at)? {
            let hole = seek::next_hole(self.mapping.as_fd(), data)?.unwrap_or(len).min(len);
            self.update(to_usize(data)..to_usize(hole), &mut changed)?;
            at = hole;
            if at >= len {
                break;
            }
        }
        Ok(changed)
    }

    fn update(&mut self, bytes: std::ops::Range<usize>, changed: &mut PageSet) -> BenchResult<()> {
        let mut buffer = vec![0; CHUNK];
        for start in bytes.clone().step_by(CHUNK) {
            let now = &mut buffer[..CHUNK.min(bytes.end - start)];
            if !self.mapping.read_at(to_u64(start), now) {
                return Err(BenchError::Wrong(format!("the mapping has no byte {start}")));
            }
            for (nth, (now, old)) in
                now.chunks(self.page).zip(self.copy[start..].chunks_mut(self.page)).enumerate()
            {
                if now != old {
                    old.copy_from_slice(now);
                    changed.insert(to_u64(start / self.page + nth));
                }
            }
        }
        Ok(())
    }
}
