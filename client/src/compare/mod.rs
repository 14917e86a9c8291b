//! Compares `/proc/PID/pagemap` of a process with the page states of the files that it maps.

mod matrix;
mod process;

pub use matrix::{Comparison, EntryKind, Matrix, MisreportedPage, PatchVerdict};
pub use process::{FileMapping, mappings_of};

use fdmap_proto::convert::FileName;
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{FileInfo, PageRange, PageSize, PagemapEntry, ProbeKind, Provenance, Run};
use fdmap_sys::pagemap::Pagemap;

use crate::grpc::ScanRequest;
use crate::{Client, ClientError};

/// Pages per comparison step.
const STEP_PAGES: u64 = 256 << 10;
/// Attempts per step while pages change between the two scans.
const MAX_ATTEMPTS: usize = 3;

/// Result for one mapping.
#[derive(Clone, Debug)]
pub struct ComparedMapping {
    /// Compared mapping.
    pub mapping: FileMapping,
    /// Mapped file.
    pub file: FileInfo,
    /// Result; empty for private mappings.
    pub comparison: Comparison,
    /// Provenance of the last scan; `None` for private mappings.
    pub provenance: Option<Provenance>,
    /// Mapped pages past the end of the file.
    pub past_end: u64,
}

/// Compares the mappings that process `pid` has of `files`. Lists the first `max_listed` misreported pages of each mapping.
/// Calls `progress` with the number of pages of each step.
///
/// # Errors
/// [`ClientError::Syscall`] if the process cannot be inspected; errors of [`Client::scan`].
pub async fn compare(
    client: &Client,
    pid: u32,
    files: &[FileInfo],
    page_size: PageSize,
    max_listed: usize,
    mut progress: impl FnMut(u64),
) -> Result<Vec<ComparedMapping>, ClientError> {
    let pagemap = Pagemap::open(Some(pid))?;
    let finds_swap_cached = client.host_info().await?.probe != ProbeKind::Syscalls;
    let mut compared = Vec::new();
    for mapping in mappings_of(pid, page_size)? {
        let Some(file) = files.iter().find(|file| (file.device, file.inode) == mapping.inode) else {
            continue;
        };
        let mut comparison = Comparison::new(max_listed, finds_swap_cached);
        let mut provenance = None;
        let pages = mapping.pages.intersect(PageRange::first(file.pages));
        if mapping.shared {
            let mut rest = pages;
            while !rest.is_empty() {
                let piece = PageRange::at(rest.start(), STEP_PAGES).intersect(rest);
                let step = ComparedFile { client, pagemap: &pagemap, mapping: &mapping, file, page_size };
                provenance = Some(step.compare(piece, &mut comparison).await?);
                progress(piece.len());
                rest = PageRange::new(piece.end(), rest.end()).unwrap_or_default();
            }
        }
        let past_end = mapping.pages.len() - pages.len();
        compared.push(ComparedMapping { mapping, file: file.clone(), comparison, provenance, past_end });
    }
    Ok(compared)
}

struct ComparedFile<'a> {
    client: &'a Client,
    pagemap: &'a Pagemap,
    mapping: &'a FileMapping,
    file: &'a FileInfo,
    page_size: PageSize,
}

impl ComparedFile<'_> {
    /// Compares one step. Scans the file before and after reading pagemap. If page states differ between the scans, repeats the
    /// step; pages that still differ after the last attempt are counted as moving and not compared.
    async fn compare(
        &self,
        piece: PageRange,
        comparison: &mut Comparison,
    ) -> Result<Provenance, ClientError> {
        let (mut before, _) = self.states(piece).await?;
        let mut attempt = 1;
        loop {
            let entries = self.entries(piece)?;
            let (after, provenance) = self.states(piece).await?;
            let moved = matrix::moved(&before, &after);
            if moved.is_empty() || attempt == MAX_ATTEMPTS {
                let first_virtual =
                    self.mapping.first_virtual_page + (piece.start().0 - self.mapping.pages.start().0);
                // A page table covers as many pages as a page holds 8-byte entries.
                let table_pages = self.page_size.bytes() / 8;
                comparison.add(piece, &after, &moved, &entries, first_virtual, table_pages);
                return Ok(provenance);
            }
            before = after;
            attempt += 1;
        }
    }

    async fn states(&self, piece: PageRange) -> Result<(Vec<Run>, Provenance), ClientError> {
        let options =
            ScanRequest { range: Some(piece), distinguish_swap_cached: true, ..ScanRequest::default() };
        let scan = self.client.scan(&FileName::Id(self.file.id), &options).await?;
        let provenance = scan.header().provenance;
        Ok((scan.runs().await?, provenance))
    }

    fn entries(&self, piece: PageRange) -> Result<Vec<PagemapEntry>, ClientError> {
        let first = self.mapping.first_virtual_page + (piece.start().0 - self.mapping.pages.start().0);
        let mut words = vec![0; to_usize(piece.len())];
        // The usual read size of pagemap readers.
        for (nth, chunk) in words.chunks_mut(1024).enumerate() {
            let got = self.pagemap.read(first + to_u64(nth) * 1024, chunk)?;
            if got < chunk.len() {
                return Err(ClientError::Unexpected("the process exited during the comparison"));
            }
        }
        Ok(words.into_iter().map(PagemapEntry).collect())
    }
}
