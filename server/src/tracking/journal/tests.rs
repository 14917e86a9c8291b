use proptest::prelude::*;

use super::super::stamps::StampMap;
use super::super::stamps::tests::{any_ranges, any_stamp};
use super::*;
use fdmap_proto::units::PageIndex;

pub(super) const PAGE: PageSize = PageSize::new(4096).unwrap();

pub(super) fn generation(number: u64) -> Generation {
    Generation::new(number).unwrap()
}

/// A second descriptor of the journal, as the next process gets it.
fn passed_on(journal: &Journal) -> OwnedFd {
    journal.fd().try_clone_to_owned().unwrap()
}

fn bytes_at(journal: &Journal, offset: u64, bytes: &[u8]) {
    fd::write_at(journal.fd(), offset, bytes).unwrap();
}

fn refusal(file: OwnedFd) -> JournalError {
    Journal::open(file, PAGE).err().unwrap()
}

pub(super) fn assert_same(got: &StampMap, expected: &StampMap, pages: u64) {
    for page in (0..pages).map(PageIndex) {
        assert_eq!(got.stamp_of(page), expected.stamp_of(page), "page {page}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Stamp(Vec<PageRange>, PageStamp),
    Hot(u64, i64),
    Record(usize, u8),
    Intend(u64, u64, u64),
    Settle,
    Reopen,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any_ranges(), any_stamp()).prop_map(|(ranges, stamp)| Step::Stamp(ranges, stamp)),
        1 => (0..1_u64 << 30, any::<i64>()).prop_map(|(open, second)| Step::Hot(open, second)),
        1 => (0..5000_usize, any::<u8>()).prop_map(|(len, byte)| Step::Record(len, byte)),
        1 => (0..100_u64, 0..100_u64, 1..9_u64).prop_map(|(start, len, of)| Step::Intend(start, len, of)),
        1 => Just(Step::Settle),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn next_process_finds_what_was_written(steps in proptest::collection::vec(any_step(), 0..16)) {
        let mut journal = Journal::create("steps", PAGE).unwrap();
        let (mut stamps, mut hot, mut record, mut intent) = (StampMap::default(), Hot::default(), Vec::new(), None);
        for step in steps.into_iter().chain([Step::Reopen]) {
            match step {
                Step::Stamp(ranges, stamp) => {
                    journal.stamp_all(&ranges, stamp).unwrap();
                    stamps.stamp_all(&ranges, stamp);
                }
                Step::Hot(open, second) => {
                    hot.open = generation(open);
                    hot.ctime.0 = second;
                    hot.remember(Answered { request: open, generation: hot.open, unchanged: second > 0 });
                    journal.write_hot(&hot);
                }
                Step::Record(len, byte) => {
                    record = vec![byte; len];
                    journal.write_record(&record).unwrap();
                }
                Step::Intend(start, len, number) => {
                    let range = PageRange::at(PageIndex(start), len);
                    intent = Some((range, generation(number)));
                    journal.intend(range, generation(number));
                }
                Step::Settle => {
                    intent = None;
                    journal.settle();
                }
                Step::Reopen => {
                    let (next, recovered) = Journal::open(passed_on(&journal), PAGE).unwrap();
                    journal = next;
                    prop_assert_eq!(recovered.hot, hot);
                    prop_assert_eq!(&recovered.record, &record);
                    prop_assert_eq!(recovered.intent, intent);
                    assert_same(&recovered.stamps, &stamps, 4 * BLOCK_PAGES);
                }
            }
        }
    }

    /// Whatever lies in the file, it is refused or read, and nothing else happens.
    #[test]
    fn damage_is_told(
        scribbles in proptest::collection::vec(
            (prop_oneof![0_u64..0x5000, 0x10000_u64..0x10010, TABLE..TABLE + 64, ARRAYS..ARRAYS + 40_000], any::<[u8; 8]>()),
            1..12,
        ),
        dense in any::<bool>(),
    ) {
        let mut journal = Journal::create("scribbles", PAGE).unwrap();
        if dense {
            journal.stamp_all(&[PageRange::first(7)], PageStamp::new(generation(3), false)).unwrap();
        }
        for (offset, bytes) in scribbles {
            bytes_at(&journal, offset, &bytes);
        }
        if let Ok((mut next, _)) = Journal::open(passed_on(&journal), PAGE) {
            let _ = next.stamp_all(&[PageRange::first(9000)], PageStamp::new(generation(9), true));
            next.write_hot(&Hot::default());
        }
    }
}

#[test]
fn other_files_are_refused() {
    let file = |len: u64, seals: u32| {
        let file = memfd::create("other", None).unwrap();
        memfd::resize(file.as_fd(), len).unwrap();
        memfd::add_seals(file.as_fd(), seals).unwrap();
        file
    };
    assert!(matches!(refusal(file(ARRAYS, 0)), JournalError::Shrinkable(0)));
    assert!(matches!(refusal(file(ARRAYS, 2)), JournalError::Foreign));
    assert!(matches!(refusal(file(7, 2)), JournalError::Length { bytes: 7, expected: 32 }));
    assert!(matches!(refusal(std::fs::File::open("/dev/zero").unwrap().into()), JournalError::NotMemfd));

    let short = file(ARRAYS - 1, 2);
    fd::write_at(short.as_fd(), 0, &layout::head(PAGE)).unwrap();
    assert!(matches!(refusal(short), JournalError::Length { expected: ARRAYS, .. }));
    let long = file(layout::MOST_BYTES + 1, 2);
    fd::write_at(long.as_fd(), 0, &layout::head(PAGE)).unwrap();
    assert!(matches!(refusal(long), JournalError::Length { expected: layout::MOST_BYTES, .. }));
}

#[test]
fn journals_of_others_are_refused() {
    let journal = Journal::create("others", PAGE).unwrap();
    let error = Journal::open(passed_on(&journal), PageSize::new(65536).unwrap()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the journal is about pages of 4096 bytes in blocks of 4096, here they are of 65536 bytes"
    );
    bytes_at(&journal, 8, &[2]);
    assert_eq!(refusal(passed_on(&journal)).to_string(), "the journal has layout 2, this service reads 1");
}

#[test]
fn array_past_the_end_is_refused() {
    let journal = Journal::create("past", PAGE).unwrap();
    bytes_at(&journal, TABLE + 8 * 5, &Entry::Dense.word().to_le_bytes());
    let error = refusal(passed_on(&journal));
    assert!(matches!(error, JournalError::Length { bytes: ARRAYS, .. }), "{error}");
}

#[test]
fn last_block_has_room_and_the_next_has_not() {
    let mut journal = Journal::create("room", PAGE).unwrap();
    let last = BlockIndex(layout::MOST_BLOCKS - 1).first_page();
    let stamp = PageStamp::new(generation(1), true);
    journal.stamp_all(&[PageRange::at(last, 1)], stamp).unwrap();
    let (_, recovered) = Journal::open(passed_on(&journal), PAGE).unwrap();
    assert_eq!(recovered.stamps.stamp_of(last), stamp);
    assert_eq!(recovered.stamps.stamp_of(last.plus(1)), PageStamp::NEVER);
    let error = journal.stamp_all(&[PageRange::at(last.plus(BLOCK_PAGES), 1)], stamp).unwrap_err();
    assert_eq!(error.to_string(), "block 4194304 lies beyond the 4194304 that a journal has room for");
}

#[test]
fn too_long_a_record_leaves_the_last_one() {
    let mut journal = Journal::create("record", PAGE).unwrap();
    let longest = vec![9; MOST_RECORD_BYTES];
    journal.write_record(&longest).unwrap();
    assert!(matches!(
        journal.write_record(&[0; MOST_RECORD_BYTES + 1]),
        Err(JournalError::RecordTooLong(len)) if len == MOST_RECORD_BYTES + 1
    ));
    assert_eq!(Journal::open(passed_on(&journal), PAGE).unwrap().1.record, longest);
}

#[test]
fn memory_is_let_go_when_blocks_are_uniform_again() {
    let mut journal = Journal::create("memory", PAGE).unwrap();
    let few = journal.bytes_used().unwrap();
    assert!(few <= 24 << 10, "{few} bytes");
    let stamp = |number| PageStamp::new(generation(number), false);
    let odd: Vec<_> = (0..2 * BLOCK_PAGES).step_by(2).map(|page| PageRange::at(PageIndex(page), 1)).collect();
    journal.stamp_all(&odd, stamp(1)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096 + 2 * ARRAY_BYTES);

    journal.stamp_all(&[PageRange::first(BLOCK_PAGES)], stamp(2)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096 + ARRAY_BYTES);
    let even = odd.iter().map(|range| PageRange::at(range.start().plus(1), 1)).collect::<Vec<_>>();
    journal.stamp_all(&odd, stamp(3)).unwrap();
    journal.stamp_all(&even, stamp(3)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096);
    let (_, recovered) = Journal::open(passed_on(&journal), PAGE).unwrap();
    assert_eq!(recovered.stamps.count(generation(2), None, PageRange::first(1 << 20)).exact, 2 * BLOCK_PAGES);
}

#[test]
fn arrays_left_behind_are_let_go() {
    let mut journal = Journal::create("left", PAGE).unwrap();
    let stamp = PageStamp::new(generation(1), false);
    journal.stamp_all(&[PageRange::first(1), PageRange::at(PageIndex(9000), 1)], stamp).unwrap();
    let before = journal.bytes_used().unwrap();
    // As if killed between both steps.
    bytes_at(&journal, TABLE, &Entry::Uniform(stamp).word().to_le_bytes());
    let (next, recovered) = Journal::open(passed_on(&journal), PAGE).unwrap();
    assert_eq!(next.bytes_used().unwrap(), before - ARRAY_BYTES);
    assert_eq!(recovered.stamps.stamp_of(PageIndex(4095)), stamp);
    assert_eq!(recovered.stamps.stamp_of(PageIndex(9000)), stamp);
}

#[test]
fn journal_cannot_be_cut() {
    let journal = Journal::create("cut", PAGE).unwrap();
    assert!(memfd::resize(journal.fd(), 4096).is_err());
}
