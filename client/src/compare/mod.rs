//! What `/proc/PID/pagemap` says of a process's mappings, set against what the service says of the files behind them.

mod matrix;
mod process;

pub use matrix::{Comparison, Entry, Matrix, PatchVerdict, Wrong};
pub use process::{FileMapping, mappings_of};

use fdmap_proto::convert::FileName;
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{FileInfo, PageRange, PageSize, PagemapEntry, Provenance, Run};
use fdmap_sys::pagemap::Pagemap;

use crate::grpc::{ScanEncoding, ScanRequest};
use crate::{Client, ClientError};

/// Pages compared at once.
const PIECE: u64 = 256 << 10;
/// Times that a piece is read again when pages moved while it was being read.
const ATTEMPTS: usize = 3;

/// One mapping, compared.
#[derive(Clone, Debug)]
pub struct ComparedMapping {
    /// The mapping.
    pub mapping: FileMapping,
    /// Its file.
    pub file: FileInfo,
    /// What came of it.
    pub comparison: Comparison,
    /// What the file's states of the last piece rest on.
    pub provenance: Option<Provenance>,
    /// Pages of the mapping that lie past the end of the file.
    pub past_end: u64,
}

/// Compares the mappings of process `pid` of `files`. Remembers the first `most_wrong` pages of each that pagemap tells
/// wrongly; `progress` is told of pages as they are done.
///
/// # Errors
/// [`ClientError`]
pub async fn compare(
    client: &Client,
    pid: u32,
    files: &[FileInfo],
    page_size: PageSize,
    most_wrong: usize,
    mut progress: impl FnMut(u64),
) -> Result<Vec<ComparedMapping>, ClientError> {
    let pagemap = Pagemap::open(Some(pid))?;
    let mut compared = Vec::new();
    for mapping in mappings_of(pid, page_size)? {
        let Some(file) = files.iter().find(|file| (file.device, file.inode) == mapping.inode) else {
            continue;
        };
        let mut comparison = Comparison::new(most_wrong);
        let mut provenance = None;
        let pages = mapping.pages.intersect(PageRange::first(file.pages));
        if mapping.shared {
            let mut rest = pages;
            while !rest.is_empty() {
                let piece = PageRange::at(rest.start(), PIECE).intersect(rest);
                let target = Target { client, pagemap: &pagemap, mapping: &mapping, file, page_size };
                provenance = Some(target.piece(piece, &mut comparison).await?);
                progress(piece.len());
                rest = PageRange::new(piece.end(), rest.end()).unwrap_or_default();
            }
        }
        let past_end = mapping.pages.len() - pages.len();
        compared.push(ComparedMapping { mapping, file: file.clone(), comparison, provenance, past_end });
    }
    Ok(compared)
}

struct Target<'a> {
    client: &'a Client,
    pagemap: &'a Pagemap,
    mapping: &'a FileMapping,
    file: &'a FileInfo,
    page_size: PageSize,
}

impl Target<'_> {
    /// Compares one piece: the file's states before and after the pagemap is read. Pages whose state changed in between
    /// are read again, and if they never rest, counted as moving and not judged.
    async fn piece(&self, piece: PageRange, comparison: &mut Comparison) -> Result<Provenance, ClientError> {
        let (mut before, _) = self.states(piece).await?;
        let mut attempt = 1;
        loop {
            let entries = self.entries(piece)?;
            let (after, provenance) = self.states(piece).await?;
            let moved = matrix::moved(&before, &after);
            if moved.is_empty() || attempt == ATTEMPTS {
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
        let options = ScanRequest {
            range: Some(piece),
            encoding: ScanEncoding::Runs,
            distinguish_swap_cached: true,
            ..ScanRequest::default()
        };
        let scan = self.client.scan(&FileName::Id(self.file.id), &options).await?;
        let provenance = scan.header().provenance;
        Ok((scan.runs().await?, provenance))
    }

    fn entries(&self, piece: PageRange) -> Result<Vec<PagemapEntry>, ClientError> {
        let first = self.mapping.first_virtual_page + (piece.start().0 - self.mapping.pages.start().0);
        let mut words = vec![0; to_usize(piece.len())];
        // As its users read it: a thousand entries at a time.
        for (nth, chunk) in words.chunks_mut(1024).enumerate() {
            let got = self.pagemap.read(first + to_u64(nth) * 1024, chunk)?;
            if got < chunk.len() {
                return Err(ClientError::Unexpected("the process ended while it was looked at"));
            }
        }
        Ok(words.into_iter().map(PagemapEntry).collect())
    }
}
