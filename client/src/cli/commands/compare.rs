//! pagemap against the truth.

use std::process::ExitCode;

use fdmap_client::compare::{ComparedMapping, Entry, Matrix, PatchVerdict, Wrong, compare as compare_pages};
use fdmap_client::proto::PageState;
use serde_json::{Value, json};

use super::super::CliError;
use super::super::args::CompareArgs;
use super::super::output::{Output, progress, table};
use super::super::views::{ProvenanceView, SlotView, provenance_words};
use super::Context;

pub(super) async fn compare(context: &mut Context, args: &CompareArgs) -> Result<ExitCode, CliError> {
    if context.service.tcp().is_some() {
        return Err(CliError::Usage("a process of this host maps no files of another".to_owned()));
    }
    let client = context.client().await?;
    let page_size = client.host_info().await?.page_size;
    let files = match &args.file {
        Some(file) => vec![client.get(file).await?],
        None => client.list().await?,
    };
    let bar = progress(files.iter().map(|file| file.pages).sum(), "comparing");
    let compared =
        compare_pages(&client, args.pid, &files, page_size, args.first, |pages| bar.inc(pages)).await?;
    bar.finish_and_clear();
    let matrix = compared.iter().fold(Matrix::default(), |sum, one| sum.sum(&one.comparison.matrix));
    if context.out.json {
        let mappings: Vec<_> = compared.iter().map(mapping_json).collect();
        context.out.json_line(&json!({
            "pid": args.pid,
            "mappings": mappings,
            "matrix": matrix_json(&matrix),
            "wrong": matrix.wrong(),
            "patch_2021": patch_json(total_patch(&compared)),
        }))?;
    } else {
        print(&mut context.out, args.pid, &compared, &matrix)?;
    }
    Ok(if args.exit_code && matrix.wrong() > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn total_patch(compared: &[ComparedMapping]) -> PatchVerdict {
    compared.iter().fold(PatchVerdict::default(), |sum, one| sum.sum(one.comparison.patch))
}

fn print(out: &mut Output, pid: u32, compared: &[ComparedMapping], matrix: &Matrix) -> Result<(), CliError> {
    if compared.is_empty() {
        return out.line(format_args!("process {pid} maps none of these files"));
    }
    for ComparedMapping { mapping, file, comparison, provenance, past_end } in compared {
        let rights = if mapping.writable { "writable" } else { "read-only" };
        out.line(format_args!(
            "{:x}-{:x}  {}  pages {}  {rights}",
            mapping.start, mapping.end, file.name, mapping.pages
        ))?;
        if !mapping.shared {
            out.line("  private: its pages are its own once they are written, and are not compared")?;
            continue;
        }
        for wrong in &comparison.first_wrong {
            out.line(format_args!("  {}", wrong_words(wrong)))?;
        }
        if comparison.moving > 0 {
            out.line(format_args!(
                "  {} pages changed each time they were looked at: not judged",
                comparison.moving
            ))?;
        }
        if *past_end > 0 {
            out.line(format_args!("  {past_end} pages lie past the end of the file"))?;
        }
        if let Some(provenance) = provenance {
            out.line(format_args!("  {}", provenance_words(provenance)))?;
        }
    }
    out.line("")?;
    let states = PageState::ALL.into_iter().filter(|state| {
        *state != PageState::Unknown || Entry::ALL.iter().any(|entry| matrix.get(*entry, *state) > 0)
    });
    let states: Vec<_> = states.collect();
    let mut header = vec!["pagemap says"];
    header.extend(states.iter().map(|state| state.name()));
    let mut grid = table(&header, &(1..=states.len()).collect::<Vec<_>>());
    for entry in Entry::ALL {
        let mut row = vec![entry.name().to_owned()];
        row.extend(states.iter().map(|state| {
            let pages = matrix.get(entry, *state);
            let mark = if entry.is_wrong_about(*state) && pages > 0 { " !" } else { "  " };
            format!("{pages}{mark}")
        }));
        grid.add_row(row);
    }
    out.line(grid.trim_fmt())?;
    out.line("")?;
    out.line(format_args!("{} of {} pages are told wrongly (marked !)", matrix.wrong(), matrix.total()))?;
    let patch = total_patch(compared);
    out.line(format_args!(
        "as the patch of 2021 would tell them: {} yes, {} no, {} cannot be said",
        patch.equal, patch.differ, patch.undecided
    ))
}

fn wrong_words(wrong: &Wrong) -> String {
    let Wrong { page, entry, state, slot, .. } = wrong;
    let slot = slot.map_or(String::new(), |slot| format!(" at slot {slot}"));
    format!("page {page}: pagemap says {} ({:#018x}), it is {state}{slot}", Entry::of(*entry).name(), entry.0)
}

fn matrix_json(matrix: &Matrix) -> Value {
    let row = |entry| {
        let cell = |state: PageState| (state.name().replace('-', "_"), Value::from(matrix.get(entry, state)));
        Value::Object(PageState::ALL.into_iter().map(cell).collect())
    };
    Value::Object(Entry::ALL.into_iter().map(|entry| (entry.name().to_owned(), row(entry))).collect())
}

fn patch_json(patch: PatchVerdict) -> Value {
    json!({ "equal": patch.equal, "differ": patch.differ, "undecided": patch.undecided })
}

fn mapping_json(compared: &ComparedMapping) -> Value {
    let ComparedMapping { mapping, file, comparison, provenance, past_end } = compared;
    let wrong = |wrong: &Wrong| {
        json!({
            "page": wrong.page.0,
            "virtual_page": wrong.virtual_page,
            "entry": format!("{:#018x}", wrong.entry.0),
            "says": Entry::of(wrong.entry).name(),
            "state": wrong.state.name(),
            "slot": wrong.slot.map(SlotView::from),
        })
    };
    json!({
        "start": mapping.start,
        "end": mapping.end,
        "file": file.name,
        "file_id": file.id.to_string(),
        "pages": { "start": mapping.pages.start().0, "end": mapping.pages.end().0 },
        "shared": mapping.shared,
        "writable": mapping.writable,
        "matrix": matrix_json(&comparison.matrix),
        "wrong": comparison.matrix.wrong(),
        "moving": comparison.moving,
        "past_end": past_end,
        "patch_2021": patch_json(comparison.patch),
        "first_wrong": comparison.first_wrong.iter().map(wrong).collect::<Vec<_>>(),
        "provenance": provenance.as_ref().map(ProvenanceView::from),
    })
}
