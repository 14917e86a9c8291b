//! What is printed, as JSON for programs and in words for people.

mod tracking;

pub use tracking::{
    CHANGED_HEADING, ChangedView, CheckpointEventView, CheckpointView, CoverageView, CursorView, TrackedView,
    changed_words, coverage_words, gap_remedies,
};

use std::collections::BTreeMap;
use std::time::SystemTime;

use fdmap_client::grpc::{PageInfo, PageSummary};
use fdmap_client::proto::file::{Access, Backing, FileInfo, Rights};
use fdmap_client::proto::state::{Mappers, PageAttributes};
use fdmap_client::proto::{PageState, Provenance, Run, SwapSlot};
use indicatif::HumanBytes;
use serde::Serialize;

/// A file.
#[derive(Serialize)]
pub struct FileView {
    id: String,
    name: String,
    size_bytes: u64,
    pages: u64,
    backing: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    hugetlb_page_size: Option<u64>,
    seals: Vec<&'static str>,
    access: AccessView,
    device: u64,
    inode: u64,
    origin: &'static str,
    created: String,
    allocated_bytes: u64,
    caller_rights: Vec<&'static str>,
}

#[derive(Serialize)]
struct AccessView {
    uid: u32,
    gid: u32,
    owner: Vec<&'static str>,
    group: Vec<&'static str>,
    other: Vec<&'static str>,
}

fn right_names(rights: Rights) -> Vec<&'static str> {
    rights.iter().map(|right| right.name()).collect()
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_nanos(time).to_string()
}

impl From<&FileInfo> for FileView {
    fn from(file: &FileInfo) -> Self {
        let Access { uid, gid, owner, group, other } = file.access;
        Self {
            id: file.id.to_string(),
            name: file.name.clone(),
            size_bytes: file.size_bytes,
            pages: file.pages,
            backing: match file.backing {
                Backing::Shmem => "shmem",
                Backing::ShmemThp => "shmem-thp",
                Backing::Hugetlb(_) => "hugetlb",
            },
            hugetlb_page_size: match file.backing {
                Backing::Hugetlb(bytes) => Some(bytes),
                _ => None,
            },
            seals: file.seals.iter().map(|seal| seal.name()).collect(),
            access: AccessView {
                uid,
                gid,
                owner: right_names(owner),
                group: right_names(group),
                other: right_names(other),
            },
            device: file.device,
            inode: file.inode,
            origin: file.origin.name(),
            created: time(file.created),
            allocated_bytes: file.allocated_bytes,
            caller_rights: right_names(file.caller_rights),
        }
    }
}

/// What a file's pages are made of, for people.
#[must_use]
pub fn backing_words(backing: Backing) -> String {
    match backing {
        Backing::Shmem => "shmem".to_owned(),
        Backing::ShmemThp => "shmem, transparent huge pages".to_owned(),
        Backing::Hugetlb(bytes) => format!("hugetlb of {}", HumanBytes(bytes)),
    }
}

/// What an answer rests on.
#[derive(Serialize)]
pub struct ProvenanceView {
    probe: &'static str,
    begin_monotonic_ns: u64,
    end_monotonic_ns: u64,
    begin_time: String,
    end_time: String,
    exact: bool,
    unsettled_leaves: u64,
    unknown_pages: u64,
    swap_cached_distinguished: bool,
    swap_cache_undetermined: u64,
    instance: String,
}

impl From<&Provenance> for ProvenanceView {
    fn from(p: &Provenance) -> Self {
        Self {
            probe: p.probe.name(),
            begin_monotonic_ns: p.begin.monotonic_ns,
            end_monotonic_ns: p.end.monotonic_ns,
            begin_time: time(p.begin.wall),
            end_time: time(p.end.wall),
            exact: p.exact(),
            unsettled_leaves: p.uncertainty.unsettled_leaves,
            unknown_pages: p.uncertainty.unknown_pages,
            swap_cached_distinguished: p.swap_cached_distinguished,
            swap_cache_undetermined: p.uncertainty.swap_cache_undetermined,
            instance: format!("{:016x}", p.instance),
        }
    }
}

/// What an answer rests on, in a line for people.
#[must_use]
pub fn provenance_words(p: &Provenance) -> String {
    let micros = p.end.monotonic_ns.saturating_sub(p.begin.monotonic_ns) / 1000;
    let mut words = format!("read by the {} probe in {micros} us", p.probe);
    let uncertainty = p.uncertainty;
    if p.exact() {
        words.push_str(", exact");
    }
    if uncertainty.unknown_pages > 0 {
        words.push_str(&format!("; {} pages it cannot tell", uncertainty.unknown_pages));
    }
    if uncertainty.unsettled_leaves > 0 {
        words.push_str(&format!(
            "; {} leaves of 64 pages changed while they were read",
            uncertainty.unsettled_leaves
        ));
    }
    if uncertainty.swap_cache_undetermined > 0 {
        words
            .push_str(&format!("; {} swapped pages may be swap-cached", uncertainty.swap_cache_undetermined));
    }
    words
}

/// Where a swapped page lies.
#[derive(Clone, Copy, Serialize)]
pub struct SlotView {
    #[serde(rename = "type")]
    swap_type: u8,
    offset: u64,
}

impl From<SwapSlot> for SlotView {
    fn from(slot: SwapSlot) -> Self {
        Self { swap_type: slot.swap_type(), offset: slot.offset() }
    }
}

/// Attributes; what is unknown is left out.
#[derive(Serialize)]
pub struct AttributesView {
    #[serde(skip_serializing_if = "Option::is_none")]
    order: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<Vec<&'static str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    map_count: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mappers: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    maybe_pinned: Option<bool>,
}

impl From<PageAttributes> for AttributesView {
    fn from(a: PageAttributes) -> Self {
        Self {
            order: a.order,
            flags: a.flags.map(|flags| flags.names().collect()),
            map_count: a.map_count,
            mappers: a.mappers.map(|mappers| match mappers {
                Mappers::None => "none",
                Mappers::One => "one",
                Mappers::Several => "several",
            }),
            maybe_pinned: a.maybe_pinned,
        }
    }
}

/// Attributes in words for people; what is unknown is left out.
#[must_use]
pub fn attribute_words(a: &PageAttributes) -> String {
    let mut words = Vec::new();
    words.extend(a.order.map(|order| format!("order {order}")));
    words.extend(a.map_count.map(|count| format!("mapped {count}")));
    if a.maybe_pinned == Some(true) {
        words.push("maybe pinned".to_owned());
    }
    words.extend(
        a.flags.map(|flags| flags.names().collect::<Vec<_>>().join("+")).filter(|names| !names.is_empty()),
    );
    words.join(", ")
}

/// A run of pages.
#[derive(Serialize)]
pub struct RunView {
    start: u64,
    end: u64,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<AttributesView>,
}

impl From<&Run> for RunView {
    fn from(run: &Run) -> Self {
        Self {
            start: run.range.start().0,
            end: run.range.end().0,
            state: run.state.name(),
            slot: run.slot.map(SlotView::from),
            attributes: run.attributes.map(AttributesView::from),
        }
    }
}

/// A run, as a line for people.
#[must_use]
pub fn run_words(run: &Run) -> String {
    let slot = run.slot.map_or(String::new(), |slot| match run.range.len() {
        1 => format!("slot {slot}"),
        pages => format!("slots {slot}..{}", slot.offset() + pages),
    });
    let attributes = run.attributes.as_ref().map_or(String::new(), attribute_words);
    let line = format!(
        "{:>12}..{:<12} {:>10}  {:<11} {slot:<24} {attributes}",
        run.range.start(),
        run.range.end(),
        run.range.len(),
        run.state,
    );
    line.trim_end().to_owned()
}

/// The heading of the lines of [`run_words`].
pub const RUN_HEADING: &str = "       first..end               pages  state       where";

/// One page.
#[derive(Serialize)]
pub struct PageView {
    page: u64,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<AttributesView>,
}

impl From<&PageInfo> for PageView {
    fn from(page: &PageInfo) -> Self {
        Self {
            page: page.page.0,
            state: page.state.name(),
            slot: page.slot.map(SlotView::from),
            attributes: page.attributes.map(AttributesView::from),
        }
    }
}

/// Counts of pages.
#[derive(Serialize)]
pub struct SummaryView {
    hole: u64,
    resident: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap_cached: Option<u64>,
    swapped: u64,
    unknown: u64,
    runs: u64,
    swap_types: BTreeMap<u32, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
}

impl From<&PageSummary> for SummaryView {
    fn from(summary: &PageSummary) -> Self {
        Self {
            hole: summary.hole,
            resident: summary.resident,
            swap_cached: summary.provenance.swap_cached_distinguished.then_some(summary.swap_cached),
            swapped: summary.swapped,
            unknown: summary.unknown,
            runs: summary.runs,
            swap_types: summary.swap_types.clone(),
            snapshot: summary.snapshot.map(|id| id.to_string()),
        }
    }
}

/// The counts of a summary that are worth a line.
pub fn summary_counts(summary: &PageSummary) -> impl Iterator<Item = (PageState, u64)> {
    let distinguish_swap_cached = summary.provenance.swap_cached_distinguished;
    [
        (PageState::Hole, summary.hole),
        (PageState::Resident, summary.resident),
        (PageState::SwapCached, summary.swap_cached),
        (PageState::Swapped, summary.swapped),
        (PageState::Unknown, summary.unknown),
    ]
    .into_iter()
    .filter(move |(state, pages)| match state {
        PageState::SwapCached => distinguish_swap_cached,
        PageState::Unknown => *pages > 0,
        _ => true,
    })
}
