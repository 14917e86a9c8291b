use proptest::collection::vec;
use proptest::prelude::*;
use strum::VariantArray as _;

use super::*;

fn any_runs() -> impl Strategy<Value = (u64, Vec<Run>)> {
    let piece = (0_u64..3, 1_u64..100, 0_usize..5, 0_u64..1 << 40);
    (0_u64..1 << 40, vec(piece, 0..40)).prop_map(|(first, pieces)| {
        let mut next = first;
        let runs = pieces
            .into_iter()
            .map(|(skip, len, state, offset)| {
                let range = PageRange::at(PageIndex(next + skip), len);
                next = range.end().0;
                let state = PageState::VARIANTS[state];
                let slot = state.is_swapped().then(|| SwapSlot::new(2, offset).unwrap());
                Run { range, state, slot, attributes: None }
            })
            .collect();
        (first, runs)
    })
}

fn any_changed_pages() -> impl Strategy<Value = (u64, Vec<ChangedPages>)> {
    let piece = (0_u64..3, 1_u64..100, any::<bool>(), 0_u8..10);
    (0_u64..1 << 40, any::<bool>(), vec(piece, 0..40)).prop_map(|(first, with_attributes, pieces)| {
        let mut next = first;
        let pages = pieces
            .into_iter()
            .map(|(skip, len, conservative, order)| {
                let range = PageRange::at(PageIndex(next + skip), len);
                next = range.end().0;
                let attributes = PageAttributes { order: Some(order), ..Default::default() };
                let run = ChangedRun { range, conservative };
                ChangedPages { run, attributes: with_attributes.then_some(attributes) }
            })
            .collect();
        (first, pages)
    })
}

fn encode<B: ColumnBatch>(first: u64, runs: &[B::Run]) -> B {
    let mut columns = Columns::new(PageIndex(first));
    runs.iter().for_each(|run| columns.push(run));
    assert_eq!((columns.len(), columns.is_empty()), (runs.len(), runs.is_empty()));
    columns.finish()
}

fn ascending(ranges: &[PageRange]) -> bool {
    ranges.windows(2).all(|pair| pair[0].end() <= pair[1].start())
}

proptest! {
    #[test]
    fn encoded_runs_are_decoded((first, runs) in any_runs()) {
        prop_assert_eq!(decode(encode::<v1::RunBatch>(first, &runs)).unwrap(), runs);
    }

    #[test]
    fn encoded_differences_are_decoded((first, runs) in any_runs()) {
        let changes: Vec<_> = runs.iter().map(|run| Change {
            range: run.range, before: run.state, slot_before: run.slot,
            after: PageState::Resident, slot_after: None,
        }).collect();
        prop_assert_eq!(decode(encode::<v1::DiffBatch>(first, &changes)).unwrap(), changes);
    }

    #[test]
    fn encoded_changed_pages_are_decoded((first, pages) in any_changed_pages()) {
        prop_assert_eq!(decode(encode::<v1::ChangedRuns>(first, &pages)).unwrap(), pages);
    }

    #[test]
    fn arbitrary_run_batch_is_decoded_or_rejected(
        first in any::<u64>(), skips in vec(any::<u64>(), 0..4), lengths in vec(any::<u64>(), 0..4),
        states in vec(-1_i32..8, 0..4), slots in vec(any::<u64>(), 0..4),
    ) {
        let batch = v1::RunBatch { first_page: first, skips, lengths, states, slots, attributes: vec![] };
        if let Ok(runs) = decode(batch.clone()) {
            prop_assert_eq!(runs.len(), batch.lengths.len());
            prop_assert!(ascending(&runs.iter().map(|run| run.range).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn arbitrary_changed_runs_are_decoded_or_rejected(
        first_page in any::<u64>(), skips in vec(any::<u64>(), 0..4), lengths in vec(any::<u64>(), 0..4),
        conservative in vec(any::<bool>(), 0..4), attributes in 0_usize..4,
    ) {
        let attributes = vec![v1::PageAttributes::default(); attributes];
        let batch = v1::ChangedRuns { first_page, skips, lengths, conservative, attributes };
        if let Ok(changed) = decode(batch.clone()) {
            prop_assert_eq!(changed.len(), batch.lengths.len());
            prop_assert_eq!(changed.len(), batch.conservative.len());
            prop_assert!(ascending(&changed.iter().map(|pages| pages.run.range).collect::<Vec<_>>()));
        }
    }
}

#[test]
fn columns_of_different_lengths_are_rejected() {
    let whole =
        v1::ChangedRuns { skips: vec![0], lengths: vec![1], conservative: vec![true], ..Default::default() };
    assert_eq!(decode(whole.clone()).unwrap().len(), 1);
    for column in ["skips", "conservative", "attributes"] {
        let mut cut = whole.clone();
        match column {
            "skips" => cut.skips.clear(),
            "conservative" => cut.conservative.clear(),
            _ => cut.attributes = vec![v1::PageAttributes::default(); 2],
        }
        let error = decode(cut).unwrap_err();
        assert!(matches!(error, ConvertError::Columns { column: c, .. } if c == column), "{error}");
    }
}

#[test]
fn empty_and_overflowing_runs_are_rejected() {
    for (first_page, skip, length) in [(0, 0, 0), (u64::MAX, 1, 1), (0, 5, u64::MAX)] {
        let (skips, lengths, conservative) = (vec![skip], vec![length], vec![false]);
        let batch = v1::ChangedRuns { first_page, skips, lengths, conservative, attributes: vec![] };
        assert!(matches!(decode(batch), Err(ConvertError::Run { .. })));
    }
    let batch = v1::RunBatch { lengths: vec![0], states: vec![1], ..Default::default() };
    assert!(matches!(decode(batch), Err(ConvertError::Run { .. })));
}
