//! Compares both probes with an oracle that knows the written pages, with real swap.

use fdmap_client::proto::{Backing, PageState};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{Page, ProbePair, in_state};
use fdmap_tests::swap::Swap;
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::FileCommand;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

/// The expected states of a file.
struct Oracle<'a> {
    what: String,
    /// For each page, whether it holds data.
    data: &'a [bool],
    swap: &'a Swap,
}

impl Oracle<'_> {
    /// Asserts that both probes report data exactly where it was written, and that each swapped page has its own slot
    /// within the swap area.
    fn check(&self, [xarray, syscalls]: &[Vec<Page>; 2]) {
        let what = &self.what;
        for (probe, pages) in [("xarray", xarray), ("syscalls", syscalls)] {
            let wrong: Vec<_> =
                (0..pages.len()).filter(|page| pages[*page].0.is_data() != self.data[*page]).collect();
            let lost: Vec<_> = wrong.iter().filter(|page| self.data[**page]).take(5).collect();
            assert!(lost.is_empty(), "{what}: {probe} reports pages of data as holes: {lost:?}");
            assert!(
                wrong.is_empty(),
                "{what}: {probe} reports holes as data: {:?}",
                &wrong[..wrong.len().min(5)]
            );
            assert!(in_state(pages, PageState::Unknown).is_empty(), "{what}: {probe} reports unknown pages");
        }
        let mut slots: Vec<_> = xarray
            .iter()
            .filter(|(state, _)| *state == PageState::Swapped)
            .map(|(_, slot)| slot.expect("the xarray probe reports slots"))
            .collect();
        let swapped = slots.len();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), swapped, "{what}: each page has its own slot");
        // Page 0 of an area is its header.
        let area = self.swap.pages();
        assert!(
            slots.iter().all(|slot| (1..area).contains(&slot.offset())),
            "{what}: all slots lie in the area"
        );
    }

    /// Asserts that both probes agree while nothing changes. A page that syscalls reports as resident may be reported
    /// as swapped by xarray: it can be in memory and in swap.
    fn check_agreement(&self, [xarray, syscalls]: &[Vec<Page>; 2]) {
        for (page, ((by_tree, _), (by_calls, _))) in xarray.iter().zip(syscalls).enumerate() {
            let agree = match by_calls {
                PageState::Swapped => *by_tree == PageState::Swapped,
                PageState::Resident => matches!(by_tree, PageState::Resident | PageState::Swapped),
                other => by_tree == other,
            };
            assert!(agree, "{}: page {page} is {by_tree} for xarray and {by_calls} for syscalls", self.what);
        }
    }
}

async fn check_write_punch_truncate_and_extend(both: &ProbePair, swap: &Swap, pages: u64, percent: u64) {
    let name = format!("oracle-{pages}-{percent}");
    let bytes = pages * PAGE;
    // The limit is a quarter of the file, but at least what an agent needs for itself.
    let cgroup = Cgroup::with_limit((bytes / 4).max(8 << 20)).unwrap();
    both.create(&name, bytes, Backing::Shmem).await.unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&both.xarray, &name).unwrap();

    let pattern = Pattern { seed: pages ^ percent, percent };
    agent.fill(pattern, 0, pages).unwrap();
    agent.file(FileCommand::PageOut).unwrap();
    let mut data: Vec<bool> = (0..pages).map(|page| pattern.has(page)).collect();
    let oracle = |what: &str, data: &[bool], states: [Vec<Page>; 2]| {
        let oracle = Oracle { what: format!("{name}, {what}"), data, swap };
        assert_eq!(states[0].len() as u64, states[1].len() as u64);
        oracle.check(&states);
        oracle.check_agreement(&states);
        in_state(&states[0], PageState::Swapped).len()
    };
    let swapped = oracle("written", &data, both.pages(&name).await.unwrap());
    if percent == 100 {
        assert!(swapped as u64 >= pages / 2, "{name}: only {swapped} of {pages} pages were swapped out");
    }

    // Punch a range that begins and ends within leaves.
    let (first, end) = (pages / 3, (pages * 2).div_ceil(3));
    agent.file(FileCommand::Punch((first..end).into())).unwrap();
    data[first as usize..end as usize].fill(false);
    oracle("punched", &data, both.pages(&name).await.unwrap());

    // Truncate within a page if possible, and extend again: the truncated part is a hole.
    let kept = pages.div_ceil(2);
    let cut = kept * PAGE - if pages > 1 { 100 } else { 0 };
    agent.file(FileCommand::Truncate(cut)).unwrap();
    data[kept as usize..].fill(false);
    let states = both.pages(&name).await.unwrap();
    assert_eq!(states[0].len() as u64, kept, "{name}: a partial last page counts as a page");
    oracle("cut", &data, states);
    agent.file(FileCommand::Truncate(bytes)).unwrap();
    oracle("grown", &data, both.pages(&name).await.unwrap());

    // New writes are reported, and the other pages keep their content.
    let again = Pattern { seed: 99, percent: 20 };
    agent.fill(again, first, end).unwrap();
    (first..end).filter(|page| again.has(*page)).for_each(|page| data[page as usize] = true);
    oracle("written again", &data, both.pages(&name).await.unwrap());
    assert_eq!(agent.wrong_pages(pattern, 0, first.min(kept)).unwrap(), 0);

    drop(agent);
    both.delete(&name).await.unwrap();
}

#[test]
async fn small_files_match_the_oracle() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let swap = require(Swap::make(256 << 20, fdmap_tests::swap::SwapKind::Any));
    for pages in [1, 63, 64, 65, 4096, 4097] {
        for percent in [0, 37, 50, 100] {
            check_write_punch_truncate_and_extend(&both, &swap, pages, percent).await;
        }
    }
}

#[test]
async fn gigabyte_file_under_swap_matches_the_oracle() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let swap = require(Swap::make(2 << 30, fdmap_tests::swap::SwapKind::Any));
    for percent in [0, 37, 50, 100] {
        check_write_punch_truncate_and_extend(&both, &swap, 1 << 18, percent).await;
    }
}
