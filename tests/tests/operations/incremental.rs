//! A copy of a file that is kept from Checkpoint and Changes alone.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use fdmap_client::Client;
use fdmap_client::grpc::ChangesOptions;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_tests::test_agent::command::Span;
use fdmap_tests::tracked::PAGE;

const PAGE_BYTES: usize = 4096;

/// Counts of checkpoints and of reported pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub lists: u64,
    pub checkpoints: u64,
    /// Checkpoints with exact coverage after which no reported page was conservative.
    pub exact: u64,
    /// Pages that were reported.
    pub reported: u64,
    /// Reported pages in which the copy was equal to the file before.
    pub equal: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.lists += other.lists;
        self.checkpoints += other.checkpoints;
        self.exact += other.exact;
        self.reported += other.reported;
        self.equal += other.equal;
    }
}

/// The copy, and the operations since the last checkpoint.
pub struct IncrementalCopy {
    since: Generation,
    content: Vec<u8>,
    /// Pages that were written since the last checkpoint. `None` before the first one, when all pages count as written.
    written: Option<BTreeSet<u64>>,
    pub counts: Counts,
}

impl IncrementalCopy {
    pub fn new() -> Self {
        let counts = Counts { lists: 1, ..Counts::default() };
        Self { since: Generation::NONE, content: Vec::new(), written: None, counts }
    }

    /// Records that the content of these pages may have changed.
    pub fn record(&mut self, pages: Span) {
        if let Some(written) = &mut self.written {
            written.extend(pages.range());
        }
    }

    /// Updates the copy by what Changes returns, and compares it with the file.
    pub async fn checkpoint(
        &mut self,
        (client, name): (&Client, &FileName),
        file: &File,
        force: bool,
    ) -> Result<(), String> {
        let failed = |error| fdmap_client::proto::error_chain(&error);
        let made = client.checkpoint(name, force, None).await.map_err(failed)?;
        let options = ChangesOptions { since: self.since, ..ChangesOptions::default() };
        let changes = client.changes(name, options).await.map_err(failed)?.runs().await.map_err(failed)?;
        let bytes = file.metadata().map_err(|error| error.to_string())?.len();
        let mut now = vec![0; usize::try_from(bytes).unwrap()];
        file.read_exact_at(&mut now, 0).map_err(|error| error.to_string())?;
        self.content.resize(now.len(), 0);
        let mut unwritten = Vec::new();
        for run in &changes {
            for page in run.run.range.start().0..run.run.range.end().0.min(bytes / PAGE) {
                if self.copy_page(page, &now) {
                    self.counts.equal += 1;
                }
                self.counts.reported += 1;
                if !self.was_written(page, made.coverage.granularity_pages) {
                    unwritten.push(page);
                }
            }
        }
        self.counts.checkpoints += 1;
        self.assert_equal(&now)?;
        if made.coverage.exact && changes.iter().all(|run| !run.run.conservative) {
            self.counts.exact += 1;
            if !unwritten.is_empty() {
                let pages = shown(&unwritten);
                return Err(format!("coverage is exact, but no operation wrote the reported pages {pages}"));
            }
        }
        // A checkpoint that closes no generation leaves earlier operations in the open one.
        if made.generation != self.since {
            self.written = Some(BTreeSet::new());
            self.since = made.generation;
        }
        Ok(())
    }

    /// Copies a page. True if the copy was equal before.
    fn copy_page(&mut self, page: u64, now: &[u8]) -> bool {
        let at = usize::try_from(page).unwrap() * PAGE_BYTES;
        let (old, new) = (&mut self.content[at..at + PAGE_BYTES], &now[at..at + PAGE_BYTES]);
        let equal = *old == *new;
        old.copy_from_slice(new);
        equal
    }

    /// True if an operation wrote to the unit of `unit` pages that contains this page.
    fn was_written(&self, page: u64, unit: u64) -> bool {
        let first = page / unit * unit;
        self.written.as_ref().is_none_or(|written| written.range(first..first + unit).next().is_some())
    }

    fn assert_equal(&self, now: &[u8]) -> Result<(), String> {
        let pages = self.content.chunks(PAGE_BYTES).zip(now.chunks(PAGE_BYTES)).zip(0..);
        let stale: Vec<u64> = pages.filter(|((copy, file), _)| copy != file).map(|(_, page)| page).collect();
        match stale.as_slice() {
            [] => Ok(()),
            stale => Err(format!("the copy differs from the file in pages {}", shown(stale))),
        }
    }
}

/// The number of pages and the first of them.
fn shown(pages: &[u64]) -> String {
    const MAX_SHOWN: usize = 20;
    format!("{:?} ({} in all)", &pages[..pages.len().min(MAX_SHOWN)], pages.len())
}
