//! Checks whether fdmap is right, and measures how long it takes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::{ScanBatch, ScanEncoding, ScanRequest};
use fdmap_client::proto::units::{to_f64, to_u64};
use fdmap_client::proto::{PageIndex, PageRange, PageState, Run};
use fdmap_tests::HarnessResult;
use fdmap_tests::probe_pair::pages_of;
use fdmap_tests::service::named;

use crate::fixture::{FILE, Fixture};

/// Number of measurements of each kind.
const ROUNDS: usize = 9;

/// The answer of fdmap, checked.
pub(crate) struct Checked {
    /// Pages that were written.
    pub(crate) written: u64,
    /// Pages with data reported as holes or unknown, and holes reported as data.
    pub(crate) wrong: u64,
    /// Pages reported as swapped.
    pub(crate) swapped: u64,
    /// Number of different slots of the swapped pages, inside the area.
    pub(crate) slots: u64,
    /// Name of the area.
    pub(crate) area: String,
}

/// A way to read all of the file.
pub(crate) struct Timing {
    pub(crate) what: String,
    pub(crate) millis: f64,
    pub(crate) ns_a_page: f64,
}

impl Fixture {
    /// Compares the answer of fdmap with the written pages.
    pub(crate) async fn check(&self) -> HarnessResult<Checked> {
        let client = self.service().client().await?;
        let (pages, _) = pages_of(&client, FILE).await?;
        let wrong = (0..).zip(&pages).filter(|(page, (state, _))| {
            state.is_data() != self.has_data(*page) || *state == PageState::Unknown
        });
        let wrong = to_u64(wrong.count()) + self.pages().abs_diff(to_u64(pages.len()));
        let swapped = pages.iter().filter(|(state, _)| *state == PageState::Swapped);
        let slots: BTreeSet<_> = swapped
            .clone()
            .filter_map(|(_, slot)| *slot)
            .filter(|slot| slot.offset() < self.swap().pages())
            .collect();
        Ok(Checked {
            written: self.written(),
            wrong,
            swapped: to_u64(swapped.count()),
            slots: to_u64(slots.len()),
            area: self.swap().name(),
        })
    }

    /// Reads the whole file in several ways, interleaved.
    pub(crate) async fn timings(&self) -> HarnessResult<Vec<Timing>> {
        let client = self.service().client().await?;
        let mut took = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            self.pagemap()?;
            took[0].push(begun.elapsed());
            took[1].push(scan(&client, ScanEncoding::Auto).await?);
            took[2].push(scan(&client, ScanEncoding::Entries).await?);
        }
        let what = [
            format!("pagemap of process {}, 8 KiB at a time", self.pid()),
            "fdmap over gRPC, new scan, states and slots".to_owned(),
            "fdmap over gRPC, new scan, 64-bit entries".to_owned(),
        ];
        Ok(what.into_iter().zip(took).map(|(what, took)| self.timing(what, took)).collect())
    }

    fn timing(&self, what: String, mut took: Vec<Duration>) -> Timing {
        took.sort_unstable();
        let seconds = took[took.len() / 2].as_secs_f64();
        Timing { what, millis: seconds * 1e3, ns_a_page: seconds * 1e9 / to_f64(self.pages()) }
    }
}

/// Scans the whole file in its current state, and drops the answer.
async fn scan(client: &Client, encoding: ScanEncoding) -> HarnessResult<Duration> {
    let begun = Instant::now();
    let mut scan = client.scan(&named(FILE), &ScanRequest { encoding, ..ScanRequest::default() }).await?;
    while let Some(batch) = scan.next().await? {
        std::hint::black_box::<ScanBatch>(batch);
    }
    Ok(begun.elapsed())
}

/// Converts states to runs for the map.
pub(crate) fn runs(states: &[PageState]) -> Vec<Run> {
    let pieces = states.chunk_by(|one, next| one == next);
    let mut start = 0;
    pieces
        .map(|piece| {
            let range = PageRange::at(PageIndex(start), to_u64(piece.len()));
            start = range.end().0;
            Run { range, state: piece[0], slot: None, attributes: None }
        })
        .collect()
}
