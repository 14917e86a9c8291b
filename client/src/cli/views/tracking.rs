//! Writes.

use fdmap_client::grpc::{Checkpoint, CheckpointEvent};
use fdmap_client::proto::state::PageAttributes;
use fdmap_client::proto::{ChangedPages, Coverage, CoverageGap, Cursor, Generation, TrackedMapping};
use serde::Serialize;

use super::{AttributesView, time};

/// What an answer about writes rests on.
#[derive(Serialize)]
pub struct CoverageView {
    exact: bool,
    tracked_mappings: u64,
    granularity_pages: u64,
    gaps: Vec<GapView>,
}

#[derive(Serialize)]
struct GapView {
    kind: &'static str,
    effect: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    range: Option<RangeView>,
    detail: String,
    remedy: String,
    first_generation: u64,
    /// Left out while it goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_generation: Option<u64>,
}

#[derive(Serialize)]
struct RangeView {
    start: u64,
    end: u64,
}

impl From<&CoverageGap> for GapView {
    fn from(gap: &CoverageGap) -> Self {
        Self {
            kind: gap.kind.name(),
            effect: gap.effect.name(),
            pid: gap.pid,
            range: gap.range.map(|range| RangeView { start: range.start().0, end: range.end().0 }),
            detail: gap.detail.clone(),
            remedy: gap.remedy.clone(),
            first_generation: gap.first.get(),
            last_generation: gap.last.map(Generation::get),
        }
    }
}

impl From<&Coverage> for CoverageView {
    fn from(coverage: &Coverage) -> Self {
        Self {
            exact: coverage.exact,
            tracked_mappings: coverage.tracked_mappings,
            granularity_pages: coverage.granularity_pages,
            gaps: coverage.gaps.iter().map(GapView::from).collect(),
        }
    }
}

/// What an answer rests on, in lines for people.
pub fn coverage_words(coverage: &Coverage) -> impl Iterator<Item = String> {
    let apart = match coverage.granularity_pages {
        1 => String::new(),
        pages => format!(" (writes are told apart by {pages} pages)"),
    };
    let head = match (coverage.exact, coverage.gaps.len()) {
        (true, _) => format!("every writer was observed exactly{apart}"),
        (false, 1) => format!("not exact, for one reason{apart}:"),
        (false, gaps) => format!("not exact, for {gaps} reasons{apart}:"),
    };
    std::iter::once(head).chain(coverage.gaps.iter().map(gap_words))
}

fn gap_words(gap: &CoverageGap) -> String {
    let pages = gap.range.map_or(String::new(), |range| format!(" of pages {range}"));
    let process = gap.pid.map_or(String::new(), |pid| format!(" of process {pid}"));
    let generations = match gap.last {
        None => format!("since generation {}", gap.first),
        Some(last) if last == gap.first => format!("in generation {last}"),
        Some(last) => format!("in generations {} to {last}", gap.first),
    };
    let effect = gap.effect;
    format!("  {}{process}{pages}, {generations}, {effect}: {}", gap.kind, gap.detail)
}

/// What would close the gaps, each once.
#[must_use]
pub fn gap_remedies(coverage: &Coverage) -> Vec<String> {
    let mut remedies = Vec::new();
    for gap in coverage.gaps.iter().filter(|gap| !gap.remedy.is_empty()) {
        let remedy = format!("{}: {}", gap.kind, gap.remedy);
        if !remedies.contains(&remedy) {
            remedies.push(remedy);
        }
    }
    remedies
}

/// A checkpoint that was made.
#[derive(Serialize)]
pub struct CheckpointView {
    generation: u64,
    unchanged: bool,
    observed_pages: u64,
    conservative_pages: u64,
    duration_ns: u128,
    time: String,
    coverage: CoverageView,
}

impl From<&Checkpoint> for CheckpointView {
    fn from(checkpoint: &Checkpoint) -> Self {
        Self {
            generation: checkpoint.generation.get(),
            unchanged: checkpoint.unchanged,
            observed_pages: checkpoint.observed_pages,
            conservative_pages: checkpoint.conservative_pages,
            duration_ns: checkpoint.duration.as_nanos(),
            time: time(checkpoint.time),
            coverage: CoverageView::from(&checkpoint.coverage),
        }
    }
}

/// A checkpoint that somebody made.
#[derive(Serialize)]
pub struct CheckpointEventView {
    generation: u64,
    observed_pages: u64,
    conservative_pages: u64,
    time: String,
    /// Left out for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    since_last_ns: Option<u128>,
    pages_per_second: f64,
}

impl From<&CheckpointEvent> for CheckpointEventView {
    fn from(made: &CheckpointEvent) -> Self {
        Self {
            generation: made.generation.get(),
            observed_pages: made.observed_pages,
            conservative_pages: made.conservative_pages,
            time: time(made.time),
            since_last_ns: made.since_last.map(|since| since.as_nanos()),
            pages_per_second: made.pages_per_second,
        }
    }
}

/// A mapping that is observed.
#[derive(Serialize)]
pub struct TrackedView {
    id: String,
    pid: u32,
    /// A number, as all places in memory: 64 bits.
    address: u64,
    length: u64,
    first_page: u64,
    inherited: bool,
}

impl From<&TrackedMapping> for TrackedView {
    fn from(mapping: &TrackedMapping) -> Self {
        Self {
            id: mapping.id.to_string(),
            pid: mapping.pid,
            address: mapping.address,
            length: mapping.length,
            first_page: mapping.first_page.0,
            inherited: mapping.inherited,
        }
    }
}

/// A cursor.
#[derive(Serialize)]
pub struct CursorView {
    name: String,
    generation: u64,
    /// Left out unless it has begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    until_generation: Option<u64>,
    uid: u32,
    created: String,
}

impl From<&Cursor> for CursorView {
    fn from(cursor: &Cursor) -> Self {
        Self {
            name: cursor.name.clone(),
            generation: cursor.generation.get(),
            until_generation: cursor.until_generation.map(Generation::get),
            uid: cursor.uid,
            created: time(cursor.created),
        }
    }
}

/// A run of written pages.
#[derive(Serialize)]
pub struct ChangedView {
    start: u64,
    end: u64,
    conservative: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<AttributesView>,
}

impl From<&ChangedPages> for ChangedView {
    fn from(pages: &ChangedPages) -> Self {
        Self {
            start: pages.run.range.start().0,
            end: pages.run.range.end().0,
            conservative: pages.run.conservative,
            attributes: pages.attributes.map(AttributesView::from),
        }
    }
}

/// A run of written pages, as a line for people.
#[must_use]
pub fn changed_words(pages: &ChangedPages) -> String {
    let range = pages.run.range;
    let known = if pages.run.conservative { "conservative" } else { "exact" };
    let flags = pages.attributes.as_ref().map_or(String::new(), flag_words);
    let line = format!("{:>12}..{:<12} {:>10}  {known:<13} {flags}", range.start(), range.end(), range.len());
    line.trim_end().to_owned()
}

/// The heading of the lines of [`changed_words`].
pub const CHANGED_HEADING: &str = "       first..end               pages  written       folio";

/// The flags of a folio that tell of writes: its own dirty, writeback and referenced.
fn flag_words(attributes: &PageAttributes) -> String {
    const TOLD: [(u32, &str); 3] = [(4, "dirty"), (8, "writeback"), (2, "referenced")];
    let known = attributes.flags.filter(|flags| TOLD.iter().any(|(bit, _)| flags.known >> bit & 1 == 1));
    let Some(flags) = known else { return "unknown".to_owned() };
    let set = flags.bits & flags.known;
    let names: Vec<_> = TOLD.iter().filter(|(bit, _)| set >> bit & 1 == 1).map(|(_, name)| *name).collect();
    if names.is_empty() { "no flag of these".to_owned() } else { names.join("+") }
}

#[cfg(test)]
mod tests {
    use fdmap_client::proto::state::PageFlags;
    use fdmap_client::proto::{ChangedRun, Effect, GapKind, PageIndex, PageRange};

    use super::*;

    fn gap(pid: Option<u32>, last: Option<u64>) -> CoverageGap {
        CoverageGap {
            kind: GapKind::UntrackedMapping,
            effect: Effect::Conservative,
            pid,
            range: None,
            detail: "at 0x7f00".to_owned(),
            remedy: "have it tracked".to_owned(),
            first: Generation::new(3).unwrap(),
            last: last.and_then(Generation::new),
        }
    }

    #[test]
    fn gaps_are_told_with_whom_and_when() {
        let gaps = vec![gap(Some(7), None), gap(None, Some(3)), gap(None, Some(5))];
        let coverage = Coverage { exact: false, gaps, tracked_mappings: 1, granularity_pages: 512 };
        let lines: Vec<_> = coverage_words(&coverage).collect();
        assert_eq!(lines[0], "not exact, for 3 reasons (writes are told apart by 512 pages):");
        let first = "  untracked-mapping of process 7, since generation 3, conservative: at 0x7f00";
        assert_eq!(lines[1], first);
        assert!(lines[2].contains("in generation 3,") && lines[3].contains("in generations 3 to 5,"));
        assert_eq!(gap_remedies(&coverage), ["untracked-mapping: have it tracked"]);
        let json = serde_json::to_value(CoverageView::from(&coverage)).unwrap();
        assert_eq!(json["gaps"][0]["kind"], "untracked-mapping");
        assert_eq!(json["gaps"][0]["pid"], 7);
        assert!(json["gaps"][0].get("last_generation").is_none());
    }

    #[test]
    fn unknown_flags_are_not_told_as_clear() {
        let words = |flags| flag_words(&PageAttributes { flags, ..PageAttributes::default() });
        assert_eq!(words(None), "unknown");
        assert_eq!(words(Some(PageFlags { bits: 0, known: 1 << 5 })), "unknown");
        assert_eq!(words(Some(PageFlags { bits: 0, known: 0x114 })), "no flag of these");
        assert_eq!(words(Some(PageFlags { bits: 0x114, known: 0x114 })), "dirty+writeback+referenced");
    }

    #[test]
    fn runs_stand_below_their_heading() {
        let run = ChangedRun { range: PageRange::at(PageIndex(10), 5), conservative: true };
        let line = changed_words(&ChangedPages { run, attributes: None });
        assert_eq!(line, "          10..15                    5  conservative");
        assert_eq!(CHANGED_HEADING.find("written"), line.find("conservative"));
    }
}
