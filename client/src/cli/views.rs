//! Human-readable forms of domain types. JSON output serializes the domain types themselves.

use fdmap_client::grpc::PageSummary;
use fdmap_client::proto::{
    Backing, ChangedPages, Coverage, CoverageGap, PageAttributes, PageFlags, PageState, Provenance, Run,
    VariantArray as _,
};
use indicatif::HumanBytes;

/// Backing of a file.
pub(super) fn backing_text(backing: Backing) -> String {
    match backing {
        Backing::Shmem => "shmem".to_owned(),
        Backing::ShmemThp => "shmem, transparent huge pages".to_owned(),
        Backing::Hugetlb(bytes) => format!("hugetlb, {} pages", HumanBytes(bytes)),
    }
}

/// Provenance, in one line.
pub(super) fn provenance_text(p: &Provenance) -> String {
    let micros = p.end.monotonic_ns.saturating_sub(p.begin.monotonic_ns) / 1000;
    let mut text = format!("read by the {} probe in {micros} us", p.probe);
    let uncertainty = p.uncertainty;
    if p.exact() {
        text.push_str(", exact");
    }
    if uncertainty.unknown_pages > 0 {
        text.push_str(&format!("; {} pages with unknown state", uncertainty.unknown_pages));
    }
    if uncertainty.unsettled_leaves > 0 {
        text.push_str(&format!(
            "; {} leaves of 64 pages changed during the scan",
            uncertainty.unsettled_leaves
        ));
    }
    if uncertainty.swap_cache_undetermined_pages > 0 {
        text.push_str(&format!(
            "; {} swapped pages may be swap-cached",
            uncertainty.swap_cache_undetermined_pages
        ));
    }
    text
}

/// Known attributes of a page.
pub(super) fn attributes_text(a: &PageAttributes) -> String {
    let mut parts = Vec::new();
    parts.extend(a.order.map(|order| format!("order {order}")));
    parts.extend(a.map_count.map(|count| format!("mapped {count}")));
    if a.maybe_pinned == Some(true) {
        parts.push("maybe pinned".to_owned());
    }
    let flags = a.flags.map(|flags| flags.valid().names().collect::<Vec<_>>().join("+"));
    parts.extend(flags.filter(|names| !names.is_empty()));
    parts.join(", ")
}

/// Heading of the lines of [`run_text`].
pub(super) const RUN_HEADING: &str =
    "       first..end               pages  state       slots and attributes";

/// A run of page states, in one line.
pub(super) fn run_text(run: &Run) -> String {
    let slot = run.slot.map_or(String::new(), |slot| match run.range.len() {
        1 => format!("slot {slot}"),
        pages => format!("slots {slot}..{}", slot.offset() + pages),
    });
    let attributes = run.attributes.as_ref().map_or(String::new(), attributes_text);
    let line = format!(
        "{:>12}..{:<12} {:>10}  {:<11} {slot:<24} {attributes}",
        run.range.start(),
        run.range.end(),
        run.range.len(),
        run.state,
    );
    line.trim_end().to_owned()
}

/// Page counts to display: swap-cached pages only if they are distinguished, unknown pages only if there are any.
pub(super) fn summary_counts(summary: &PageSummary) -> impl Iterator<Item = (PageState, u64)> {
    let distinguished = summary.provenance.swap_cached_distinguished;
    let counts = PageState::VARIANTS.iter().map(|state| (*state, summary.count(*state)));
    counts.filter(move |(state, pages)| match state {
        PageState::SwapCached => distinguished,
        PageState::Unknown => *pages > 0,
        _ => true,
    })
}

/// Coverage and its gaps, one line each.
pub(super) fn coverage_lines(coverage: &Coverage) -> impl Iterator<Item = String> {
    let granularity = match coverage.granularity_pages {
        1 => String::new(),
        pages => format!(" (granularity: {pages} pages)"),
    };
    let head = match (coverage.exact, coverage.gaps.len()) {
        (true, _) => format!("coverage is exact{granularity}"),
        (false, 1) => format!("coverage has 1 gap{granularity}:"),
        (false, gaps) => format!("coverage has {gaps} gaps{granularity}:"),
    };
    std::iter::once(head).chain(coverage.gaps.iter().map(gap_text))
}

fn gap_text(gap: &CoverageGap) -> String {
    let pages = gap.range.map_or(String::new(), |range| format!(" in pages {range}"));
    let process = gap.pid.map_or(String::new(), |pid| format!(" of process {pid}"));
    let generations = match gap.last {
        None => format!("since generation {}", gap.first),
        Some(last) if last == gap.first => format!("in generation {last}"),
        Some(last) => format!("in generations {} to {last}", gap.first),
    };
    format!("  {}{process}{pages}, {generations}, {}: {}", gap.kind, gap.effect, gap.detail)
}

/// Distinct remedies of the gaps.
pub(super) fn gap_remedies(coverage: &Coverage) -> Vec<String> {
    let mut remedies = Vec::new();
    for gap in coverage.gaps.iter().filter(|gap| !gap.remedy.is_empty()) {
        let remedy = format!("{}: {}", gap.kind, gap.remedy);
        if !remedies.contains(&remedy) {
            remedies.push(remedy);
        }
    }
    remedies
}

/// Heading of the lines of [`changed_text`].
pub(super) const CHANGED_HEADING: &str = "       first..end               pages  write         folio flags";

/// A run of changed pages, in one line.
pub(super) fn changed_text(pages: &ChangedPages) -> String {
    let range = pages.run.range;
    let write = if pages.run.conservative { "conservative" } else { "observed" };
    let flags = pages.attributes.as_ref().map_or(String::new(), write_flags_text);
    let line = format!("{:>12}..{:<12} {:>10}  {write:<13} {flags}", range.start(), range.end(), range.len());
    line.trim_end().to_owned()
}

/// Folio flags that relate to writes: dirty, writeback and referenced.
fn write_flags_text(attributes: &PageAttributes) -> String {
    const SHOWN: [PageFlags; 3] = [PageFlags::DIRTY, PageFlags::WRITEBACK, PageFlags::REFERENCED];
    let known = attributes.flags.filter(|flags| SHOWN.iter().any(|shown| flags.known.contains(*shown)));
    let Some(flags) = known else { return "unknown".to_owned() };
    let set = SHOWN.into_iter().filter(|shown| flags.valid().contains(*shown));
    let names: Vec<_> = set.flat_map(PageFlags::names).collect();
    if names.is_empty() { "none".to_owned() } else { names.join("+") }
}

#[cfg(test)]
mod tests {
    use fdmap_client::proto::attributes::KnownFlags;
    use fdmap_client::proto::{ChangedRun, Effect, GapKind, Generation, PageIndex, PageRange};

    use super::*;

    fn gap(pid: Option<u32>, last: Option<u64>) -> CoverageGap {
        CoverageGap {
            kind: GapKind::UntrackedMapping,
            effect: Effect::Conservative,
            pid,
            range: None,
            detail: "at 0x7f00".to_owned(),
            remedy: "track it".to_owned(),
            first: Generation::new(3).unwrap(),
            last: last.and_then(Generation::new),
        }
    }

    #[test]
    fn gap_lines_name_process_and_generations() {
        let gaps = vec![gap(Some(7), None), gap(None, Some(3)), gap(None, Some(5))];
        let coverage = Coverage { exact: false, gaps, tracked_mappings: 1, granularity_pages: 512 };
        let lines: Vec<_> = coverage_lines(&coverage).collect();
        assert_eq!(lines[0], "coverage has 3 gaps (granularity: 512 pages):");
        let first = "  untracked-mapping of process 7, since generation 3, conservative: at 0x7f00";
        assert_eq!(lines[1], first);
        assert!(lines[2].contains("in generation 3,") && lines[3].contains("in generations 3 to 5,"));
        assert_eq!(gap_remedies(&coverage), ["untracked-mapping: track it"]);
    }

    #[test]
    fn unknown_flags_are_not_shown_as_clear() {
        let text = |flags| write_flags_text(&PageAttributes { flags, ..PageAttributes::default() });
        let flags = |set, known| {
            let (set, known) = (PageFlags::from_bits_retain(set), PageFlags::from_bits_retain(known));
            Some(KnownFlags { set, known })
        };
        assert_eq!(text(None), "unknown");
        assert_eq!(text(flags(0, 1 << 5)), "unknown");
        assert_eq!(text(flags(0, 0x114)), "none");
        assert_eq!(text(flags(0x114, 0x114)), "dirty+writeback+referenced");
    }

    #[test]
    fn columns_of_changed_runs_align_with_their_heading() {
        let run = ChangedRun { range: PageRange::at(PageIndex(10), 5), conservative: true };
        let line = changed_text(&ChangedPages { run, attributes: None });
        assert_eq!(line, "          10..15                    5  conservative");
        assert_eq!(CHANGED_HEADING.find("write"), line.find("conservative"));
    }
}
