//! Kills a process at random moments while it writes a journal, and checks what the next process finds.

use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageIndex, low_u8};

use super::super::stamps::StampMap;
use super::tests::{PAGE, generation};
use super::*;

/// Environment variable of the child: paths of the journal and of the counters, and the kind of work.
const CHILD_VARIABLE: &str = "FDMAP_JOURNAL_OF_PARENT";
const KILLS: u32 = 200;
const FILE_PAGES: u64 = 5 * BLOCK_PAGES + 77;

/// The last generation that the child began, and the last that it completed, in a memfd that the parent maps.
fn counters(shared: &SharedMapping) -> (&AtomicU64, &AtomicU64) {
    let words = shared.atomic_u64s(0, 2);
    (&words[0], &words[1])
}

/// The ranges that the child stamps are a function of the generation, like everything else that it writes.
fn ranges_of(number: u64) -> Vec<PageRange> {
    let place = number.wrapping_mul(7919) % FILE_PAGES;
    let block = place / BLOCK_PAGES * BLOCK_PAGES;
    let pieces = |step, len| {
        (place % step..FILE_PAGES)
            .step_by(to_usize(step))
            .map(move |page| PageRange::at(PageIndex(page), len))
    };
    match number % 8 {
        0 => vec![PageRange::first(FILE_PAGES)],
        1 | 2 => vec![PageRange::at(PageIndex(block), BLOCK_PAGES)],
        3 => pieces(3, 1).collect(),
        4 => pieces(997, 20).collect(),
        5 => vec![
            PageRange::at(PageIndex(block), BLOCK_PAGES / 2),
            PageRange::at(PageIndex(block + BLOCK_PAGES / 2), BLOCK_PAGES),
        ],
        _ => vec![PageRange::at(PageIndex(place), 1)],
    }
}

fn stamp_of(number: u64) -> DirtyStamp {
    DirtyStamp::new(generation(number), number.is_multiple_of(3))
}

fn intent_of(number: u64) -> (PageRange, Generation) {
    (PageRange::at(PageIndex(number), number % 1000 + 1), generation(number))
}

fn header_of(number: u64) -> JournalHeader {
    let mut header = JournalHeader {
        open: generation(number),
        pages: number * 3,
        ctime: (number.cast_signed(), -number.cast_signed()),
        flags: !number,
        ..JournalHeader::default()
    };
    for nth in 0..64 {
        header.add_reply(CheckpointReply {
            idempotency_key: number + nth,
            generation: generation(number),
            unchanged: number.is_multiple_of(2),
        });
    }
    header
}

fn record_of(number: u64) -> Vec<u8> {
    vec![low_u8(number); to_usize(number % 20_000)]
}

/// The child process, not a test: writes until it is killed.
#[test]
fn child_that_writes_forever() {
    let Ok(place) = std::env::var(CHILD_VARIABLE) else { return };
    let open =
        |path: &str| OwnedFd::from(std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap());
    let [journal, shared, work] = place.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let shared = SharedMapping::shared(open(shared), 0, 4096, true).unwrap();
    let (begun, done) = counters(&shared);
    let (mut journal, _) = Journal::open(open(journal), PAGE).unwrap();
    for number in done.load(Ordering::SeqCst) + 1.. {
        begun.store(number, Ordering::SeqCst);
        let (range, generation) = intent_of(number);
        if work == "intents" {
            journal.intend(range, generation);
            done.store(number, Ordering::SeqCst);
            continue;
        }
        journal.write_header(&header_of(number));
        journal.write_record(&record_of(number)).unwrap();
        journal.intend(range, generation);
        journal.stamp_all(&ranges_of(number), stamp_of(number)).unwrap();
        done.store(number, Ordering::SeqCst);
        journal.settle();
    }
}

/// A journal that children write.
struct CrashBench {
    journal: Journal,
    counter_file: OwnedFd,
    shared: SharedMapping,
}

/// Kills the child on drop.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl CrashBench {
    fn new() -> Self {
        let counter_file = memfd::create("counters", None).unwrap();
        memfd::resize(counter_file.as_fd(), 4096).unwrap();
        let shared = SharedMapping::shared(&counter_file, 0, 4096, true).unwrap();
        Self { journal: Journal::create("killed", PAGE).unwrap(), counter_file, shared }
    }

    /// Runs a child for a time that depends on `nth`, kills it, and opens the journal. Returns the last generation that
    /// the child began, the last that it completed, and the contents of the journal.
    fn run_and_kill(&self, work: &str, nth: u32) -> (u64, u64, RecoveredJournal) {
        let path = |fd: BorrowedFd<'_>| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let place = format!("{} {} {work}", path(self.journal.fd()), path(self.counter_file.as_fd()));
        let (begun, done) = counters(&self.shared);
        begun.store(0, Ordering::SeqCst);
        let child = KilledChild(
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "tracking::journal::crash::child_that_writes_forever"])
                .env(CHILD_VARIABLE, &place)
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let start = Instant::now();
        while begun.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "the child does not start");
            std::thread::sleep(Duration::from_micros(100));
        }
        // A generation takes microseconds to milliseconds, so the kill hits any point of the first few.
        std::thread::sleep(Duration::from_nanos(u64::from(nth.wrapping_mul(2_654_435_761)) % 6_000_000));
        drop(child);

        let (_, found) = Journal::open(self.journal.fd().try_clone_to_owned().unwrap(), PAGE).unwrap();
        let (begun, done) = (begun.load(Ordering::SeqCst), done.load(Ordering::SeqCst));
        assert!(begun == done || begun == done + 1, "the child began {begun} and completed {done}");
        (begun, done, found)
    }
}

#[test]
fn killed_process_leaves_all_completed_writes() {
    let bench = CrashBench::new();
    let (mut stamps, mut applied, mut unsettled) = (StampMap::default(), 0, 0);
    for nth in 0..KILLS {
        let (begun, done, found) = bench.run_and_kill("stamps", nth);
        for number in applied + 1..=done {
            stamps.stamp_all(&ranges_of(number), stamp_of(number));
        }
        applied = done;

        let open = found.header.open.get();
        assert!(open == begun || open + 1 == begun, "the header has {open}, the child began {begun}");
        assert_eq!(found.header, if open == 0 { JournalHeader::default() } else { header_of(open) });
        assert!(found.record == record_of(begun) || found.record == record_of(begun - 1));

        let mut next = stamps.clone();
        next.stamp_all(&ranges_of(begun), stamp_of(begun));
        let mut new_stamps = 0;
        for page in (0..FILE_PAGES + BLOCK_PAGES).map(PageIndex) {
            let got = found.stamps.stamp_of(page);
            let (old, new) = (stamps.stamp_of(page), next.stamp_of(page));
            assert!(got == old || got == new, "page {page} has {got:?}, neither {old:?} nor {new:?}");
            new_stamps += u64::from(got != old);
        }
        match found.intent {
            Some(intent) => assert!(intent == intent_of(begun) || intent == intent_of(done), "{intent:?}"),
            None => assert_eq!(new_stamps, 0, "stamps of {begun} without an intent"),
        }
        unsettled += u32::from(found.intent.is_some());
    }
    assert!(unsettled > 0, "no kill hit between intend and settle");
    assert!(applied > u64::from(KILLS), "{applied} generations");
}

/// The child only replaces intents, so that kills hit between the stores of one.
#[test]
fn killed_process_leaves_one_complete_intent() {
    let bench = CrashBench::new();
    for nth in 0..KILLS {
        let (begun, done, found) = bench.run_and_kill("intents", nth);
        match found.intent {
            Some(intent) => assert!(intent == intent_of(begun) || intent == intent_of(done), "{intent:?}"),
            None => assert_eq!(done, 0, "no intent, but {done} were recorded"),
        }
    }
}
