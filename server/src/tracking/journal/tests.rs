use proptest::prelude::*;

use super::super::stamps::StampMap;
use super::super::stamps::tests::{any_ranges, any_stamp};
use super::*;
use fdmap_proto::units::PageIndex;

pub(super) const PAGE: PageSize = PageSize::new(4096).unwrap();

pub(super) fn generation(number: u64) -> Generation {
    Generation::new(number).unwrap()
}

/// A second descriptor of the journal, as the next process receives it.
fn passed_fd(journal: &Journal) -> OwnedFd {
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
    Stamp(Vec<PageRange>, DirtyStamp),
    Header(u64, i64),
    Record(usize, u8),
    Intend(u64, u64, u64),
    Settle,
    Reopen,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any_ranges(), any_stamp()).prop_map(|(ranges, stamp)| Step::Stamp(ranges, stamp)),
        1 => (0..1_u64 << 30, any::<i64>()).prop_map(|(open, second)| Step::Header(open, second)),
        1 => (0..5000_usize, any::<u8>()).prop_map(|(len, byte)| Step::Record(len, byte)),
        1 => (0..100_u64, 0..100_u64, 1..9_u64).prop_map(|(start, len, of)| Step::Intend(start, len, of)),
        1 => Just(Step::Settle),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn reopened_journal_has_all_that_was_written(steps in proptest::collection::vec(any_step(), 0..16)) {
        let mut journal = Journal::create("steps", PAGE).unwrap();
        let (mut stamps, mut header, mut record, mut intent) = (StampMap::default(), JournalHeader::default(), Vec::new(), None);
        for step in steps.into_iter().chain([Step::Reopen]) {
            match step {
                Step::Stamp(ranges, stamp) => {
                    journal.stamp_all(&ranges, stamp).unwrap();
                    stamps.stamp_all(&ranges, stamp);
                }
                Step::Header(open, second) => {
                    header.open = generation(open);
                    header.ctime.0 = second;
                    header.add_reply(CheckpointReply {
                        idempotency_key: open,
                        generation: header.open,
                        unchanged: second > 0,
                    });
                    journal.write_header(&header);
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
                    let (next, recovered) = Journal::open(passed_fd(&journal), PAGE).unwrap();
                    // So that no dense block is charged again.
                    let newest = DirtyStamp::new(Generation::MAX, false);
                    let uniform = |journal: &Journal| -> Vec<bool> {
                        (0..5).map(|block| journal.is_uniform_before(BlockIndex(block), newest)).collect()
                    };
                    prop_assert_eq!((next.dense(), uniform(&next)), (journal.dense(), uniform(&journal)));
                    prop_assert_eq!(next.dense(), to_u64(uniform(&next).iter().filter(|is| !**is).count()));
                    journal = next;
                    prop_assert_eq!(recovered.header, header);
                    prop_assert_eq!(&recovered.record, &record);
                    prop_assert_eq!(recovered.intent, intent);
                    assert_same(&recovered.stamps, &stamps, 4 * BLOCK_PAGES);
                }
            }
        }
    }

    /// Damage is refused or not noticed, but never causes a panic or a signal.
    #[test]
    fn damaged_journal_is_refused_or_read(
        scribbles in proptest::collection::vec(
            (prop_oneof![0_u64..0x5000, 0x10000_u64..0x10010, TABLE..TABLE + 64, ARRAYS..ARRAYS + 40_000], any::<[u8; 8]>()),
            1..12,
        ),
        dense in any::<bool>(),
    ) {
        let mut journal = Journal::create("scribbles", PAGE).unwrap();
        if dense {
            journal.stamp_all(&[PageRange::first(7)], DirtyStamp::new(generation(3), false)).unwrap();
        }
        for (offset, bytes) in scribbles {
            bytes_at(&journal, offset, &bytes);
        }
        if let Ok((mut next, _)) = Journal::open(passed_fd(&journal), PAGE) {
            let _ = next.stamp_all(&[PageRange::first(9000)], DirtyStamp::new(generation(9), true));
            next.write_header(&JournalHeader::default());
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
    assert!(matches!(refusal(file(ARRAYS, 2)), JournalError::BadMagic));
    assert!(matches!(refusal(file(7, 2)), JournalError::Length { bytes: 7, expected: 32 }));
    assert!(matches!(refusal(std::fs::File::open("/dev/zero").unwrap().into()), JournalError::NotMemfd));

    let short = file(ARRAYS - 1, 2);
    fd::write_at(short.as_fd(), 0, &layout::preamble(PAGE)).unwrap();
    assert!(matches!(refusal(short), JournalError::Length { expected: ARRAYS, .. }));
    let long = file(layout::MAX_BYTES + 1, 2);
    fd::write_at(long.as_fd(), 0, &layout::preamble(PAGE)).unwrap();
    assert!(matches!(refusal(long), JournalError::Length { expected: layout::MAX_BYTES, .. }));
}

#[test]
fn other_page_sizes_and_versions_are_refused() {
    let journal = Journal::create("others", PAGE).unwrap();
    let error = Journal::open(passed_fd(&journal), PageSize::new(65536).unwrap()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the journal has pages of 4096 bytes in blocks of 4096, this host has pages of 65536 bytes"
    );
    bytes_at(&journal, 8, &[2]);
    assert_eq!(
        refusal(passed_fd(&journal)).to_string(),
        "the journal has layout version 2, fdmapd supports version 1"
    );
}

#[test]
fn array_past_the_end_is_refused() {
    let journal = Journal::create("past", PAGE).unwrap();
    bytes_at(&journal, TABLE + 8 * 5, &BlockEntry::Dense.word().to_le_bytes());
    let error = refusal(passed_fd(&journal));
    assert!(matches!(error, JournalError::Length { bytes: ARRAYS, .. }), "{error}");
}

#[test]
fn block_beyond_the_table_is_out_of_range() {
    let mut journal = Journal::create("room", PAGE).unwrap();
    let last = BlockIndex(layout::MAX_BLOCKS - 1).first_page();
    let stamp = DirtyStamp::new(generation(1), true);
    journal.stamp_all(&[PageRange::at(last, 1)], stamp).unwrap();
    let (_, recovered) = Journal::open(passed_fd(&journal), PAGE).unwrap();
    assert_eq!(recovered.stamps.stamp_of(last), stamp);
    assert_eq!(recovered.stamps.stamp_of(last.plus(1)), DirtyStamp::NEVER);
    let error = journal.stamp_all(&[PageRange::at(last.plus(BLOCK_PAGES), 1)], stamp).unwrap_err();
    assert_eq!(error.to_string(), "block 4194304 exceeds the 4194304 blocks of a journal");
}

#[test]
fn oversized_record_leaves_the_old_one() {
    let mut journal = Journal::create("record", PAGE).unwrap();
    let longest = vec![9; MAX_RECORD_BYTES];
    journal.write_record(&longest).unwrap();
    assert!(matches!(
        journal.write_record(&[0; MAX_RECORD_BYTES + 1]),
        Err(JournalError::RecordTooLong(len)) if len == MAX_RECORD_BYTES + 1
    ));
    assert_eq!(Journal::open(passed_fd(&journal), PAGE).unwrap().1.record, longest);
}

#[test]
fn uniform_blocks_release_their_arrays() {
    let mut journal = Journal::create("memory", PAGE).unwrap();
    let few = journal.bytes_used().unwrap();
    assert!(few <= 24 << 10, "{few} bytes");
    let stamp = |number| DirtyStamp::new(generation(number), false);
    let odd: Vec<_> = (0..2 * BLOCK_PAGES).step_by(2).map(|page| PageRange::at(PageIndex(page), 1)).collect();
    journal.stamp_all(&odd, stamp(1)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096 + 2 * ARRAY_BYTES);

    journal.stamp_all(&[PageRange::first(BLOCK_PAGES)], stamp(2)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096 + ARRAY_BYTES);
    let even = odd.iter().map(|range| PageRange::at(range.start().plus(1), 1)).collect::<Vec<_>>();
    journal.stamp_all(&odd, stamp(3)).unwrap();
    journal.stamp_all(&even, stamp(3)).unwrap();
    assert_eq!(journal.bytes_used().unwrap(), few + 4096);
    let (_, recovered) = Journal::open(passed_fd(&journal), PAGE).unwrap();
    assert_eq!(recovered.stamps.count(generation(2), None, PageRange::first(1 << 20)).exact, 2 * BLOCK_PAGES);
}

#[test]
fn orphaned_arrays_are_released() {
    let mut journal = Journal::create("left", PAGE).unwrap();
    let stamp = DirtyStamp::new(generation(1), false);
    journal.stamp_all(&[PageRange::first(1), PageRange::at(PageIndex(9000), 1)], stamp).unwrap();
    let before = journal.bytes_used().unwrap();
    // The state of a process that was killed after it changed the entry and before it released the array.
    bytes_at(&journal, TABLE, &BlockEntry::Uniform(stamp).word().to_le_bytes());
    let (next, recovered) = Journal::open(passed_fd(&journal), PAGE).unwrap();
    assert_eq!(next.bytes_used().unwrap(), before - ARRAY_BYTES);
    assert_eq!(recovered.stamps.stamp_of(PageIndex(4095)), stamp);
    assert_eq!(recovered.stamps.stamp_of(PageIndex(9000)), stamp);
}

#[test]
fn journal_cannot_be_truncated() {
    let journal = Journal::create("cut", PAGE).unwrap();
    assert!(memfd::resize(journal.fd(), 4096).is_err());
}
