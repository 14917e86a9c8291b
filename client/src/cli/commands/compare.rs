//! `fdmap compare`: pagemap against the page states of the files.

use std::process::ExitCode;

use fdmap_client::compare::{
    ComparedMapping, EntryKind, Matrix, MisreportedPage, PatchVerdict, compare as compare_pages,
};
use fdmap_client::proto::{PageState, VariantArray as _};
use serde_json::{Value, json};

use super::super::CliError;
use super::super::args::CompareArgs;
use super::super::output::{Output, progress, table};
use super::super::views::provenance_text;
use super::Context;

pub(super) async fn compare(context: &mut Context, args: &CompareArgs) -> Result<ExitCode, CliError> {
    if context.service.tcp().is_some() {
        return Err(CliError::Usage("compare is unavailable over TCP".to_owned()));
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
            "misreported_pages": matrix.misreported(),
            "patch_2021": patch_json(total_patch(&compared)),
        }))?;
    } else {
        print(&mut context.out, args.pid, &compared, &matrix)?;
    }
    Ok(if args.exit_code && matrix.misreported() > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn total_patch(compared: &[ComparedMapping]) -> PatchVerdict {
    compared.iter().fold(PatchVerdict::default(), |sum, one| sum.sum(one.comparison.patch))
}

fn print(out: &mut Output, pid: u32, compared: &[ComparedMapping], matrix: &Matrix) -> Result<(), CliError> {
    if compared.is_empty() {
        return out.line(format_args!("process {pid} maps none of the files"));
    }
    for ComparedMapping { mapping, file, comparison, provenance, past_end } in compared {
        let rights = if mapping.writable { "writable" } else { "read-only" };
        out.line(format_args!(
            "{:x}-{:x}  {}  pages {}  {rights}",
            mapping.start,
            mapping.end,
            file.caller_name(),
            mapping.pages
        ))?;
        if !mapping.shared {
            out.line("  private mapping: not compared")?;
            continue;
        }
        for page in &comparison.first_misreported {
            out.line(format_args!("  {}", misreported_text(page)))?;
        }
        if comparison.moving > 0 {
            out.line(format_args!(
                "  {} pages changed during the comparison: not compared",
                comparison.moving
            ))?;
        }
        if *past_end > 0 {
            out.line(format_args!("  {past_end} pages past the end of the file"))?;
        }
        if let Some(provenance) = provenance {
            out.line(format_args!("  {}", provenance_text(provenance)))?;
        }
    }
    out.line("")?;
    let states = PageState::VARIANTS.iter().copied().filter(|state| {
        *state != PageState::Unknown || EntryKind::ALL.iter().any(|entry| matrix.get(*entry, *state) > 0)
    });
    let states: Vec<_> = states.collect();
    let mut header = vec!["pagemap entry"];
    header.extend(states.iter().map(<&str>::from));
    let mut grid = table(&header, &(1..=states.len()).collect::<Vec<_>>());
    for entry in EntryKind::ALL {
        let mut row = vec![entry.name().to_owned()];
        row.extend(states.iter().map(|state| {
            let pages = matrix.get(entry, *state);
            let mark = if entry.misreports(*state) && pages > 0 { " !" } else { "  " };
            format!("{pages}{mark}")
        }));
        grid.add_row(row);
    }
    out.line(grid.trim_fmt())?;
    out.line("")?;
    out.line(format_args!(
        "pagemap misreports {} of {} pages (marked !)",
        matrix.misreported(),
        matrix.total()
    ))?;
    let patch = total_patch(compared);
    out.line(format_args!(
        "compared with the 2021 kernel patch: {} equal, {} different, {} undecided",
        patch.equal, patch.differ, patch.undecided
    ))
}

fn misreported_text(page: &MisreportedPage) -> String {
    let MisreportedPage { page, entry, state, slot, .. } = page;
    let slot = slot.map_or(String::new(), |slot| format!(" at slot {slot}"));
    format!(
        "page {page}: pagemap entry {} ({:#018x}), state {state}{slot}",
        EntryKind::of(*entry).name(),
        entry.0
    )
}

fn matrix_json(matrix: &Matrix) -> Value {
    let row = |entry| {
        let cell =
            |state: PageState| (state.to_string().replace('-', "_"), Value::from(matrix.get(entry, state)));
        Value::Object(PageState::VARIANTS.iter().copied().map(cell).collect())
    };
    Value::Object(EntryKind::ALL.into_iter().map(|entry| (entry.name().to_owned(), row(entry))).collect())
}

fn patch_json(patch: PatchVerdict) -> Value {
    json!({ "equal": patch.equal, "differ": patch.differ, "undecided": patch.undecided })
}

fn mapping_json(compared: &ComparedMapping) -> Value {
    let ComparedMapping { mapping, file, comparison, provenance, past_end } = compared;
    let misreported = |page: &MisreportedPage| {
        json!({
            "page": page.page,
            "virtual_page": page.virtual_page,
            "entry": format!("{:#018x}", page.entry.0),
            "kind": EntryKind::of(page.entry).name(),
            "state": page.state,
            "slot": page.slot,
        })
    };
    json!({
        "start": mapping.start,
        "end": mapping.end,
        "file": file.name,
        "uid": file.access.uid,
        "file_id": file.id,
        "pages": mapping.pages,
        "shared": mapping.shared,
        "writable": mapping.writable,
        "matrix": matrix_json(&comparison.matrix),
        "misreported_pages": comparison.matrix.misreported(),
        "moving_pages": comparison.moving,
        "past_end_pages": past_end,
        "patch_2021": patch_json(comparison.patch),
        "first_misreported": comparison.first_misreported.iter().map(misreported).collect::<Vec<_>>(),
        "provenance": provenance.as_ref(),
    })
}
