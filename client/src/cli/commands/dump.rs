//! `fdmap dump`.

use std::sync::Arc;

use fdmap_client::image::Control;
use fdmap_client::image::dump::{DumpCounts, DumpOptions, DumpReport, DumpSource, PauseMethod, dump};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::super::CliError;
use super::super::args::{DumpArgs, PauseArgs};
use super::super::output::table;
use super::Context;
use super::image_store::{self, NewStore};
use super::image_task::{elapsed_text, jobs, nanoseconds, watch};

pub(super) async fn run(context: &mut Context, args: DumpArgs) -> Result<(), CliError> {
    let client = context.client().await?;
    let mut fdpass = context.fdpass()?;
    let open = |file| DumpSource::open(&client, &mut fdpass, Handle::current(), file);
    let sources = args.files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let control = Arc::new(Control::default());
    let shared = Arc::clone(&control);
    let runtime = Handle::current();
    // It blocks in reads and writes. This thread drives its calls to the service and to object stores.
    let task = move || {
        let open = |location| image_store::open(location, &runtime, shared.cancellation());
        let parent = args.parent.as_ref().map(open).transpose()?;
        let target = NewStore::create(&args.image, &runtime, shared.cancellation())?;
        let options = DumpOptions {
            parent,
            compression: args.compress.compression(),
            jobs: jobs(args.jobs),
            rounds: args.pause.rounds,
            pause: pause_method(args.pause),
        };
        dump(&sources, &target.store, &options, &shared)
    };
    print(context, &watch(context, &control, || tokio::task::spawn_blocking(task)).await?)
}

fn pause_method(args: PauseArgs) -> Option<PauseMethod> {
    let PauseArgs { pause, resume, freeze_cgroup, .. } = args;
    match (pause, freeze_cgroup) {
        (Some(pause), _) => Some(PauseMethod::Commands { pause, resume }),
        (None, Some(path)) => Some(PauseMethod::Cgroup(path)),
        (None, None) => None,
    }
}

fn report(report: &DumpReport) -> Value {
    let files = report.files.iter().map(|file| {
        json!({
            "name": file.name,
            "shmid": file.shmid,
            "generation": file.generation,
            "exact": file.exact,
            "counts": file.counts,
        })
    });
    json!({
        "image": report.location,
        "consistency": report.consistency,
        "files": files.collect::<Vec<_>>(),
        "paused_ns": report.paused.map(nanoseconds),
        "slots_refused": report.slots_refused,
        "elapsed_ns": nanoseconds(report.elapsed),
        "before_pause": report.before.iter().map(self::report).collect::<Vec<_>>(),
    })
}

fn print(context: &mut Context, done: &DumpReport) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(&report(done));
    }
    let header =
        ["image", "file", "generation", "memory", "slots", "swapped in", "parent", "zero", "stored", "bytes"];
    let mut table = table(&header, &[2, 3, 4, 5, 6, 7, 8, 9]);
    for report in done.before.iter().chain([done]) {
        for file in &report.files {
            let DumpCounts { memory_pages, slot_pages, zero_slot_pages, swapped_in_pages, .. } = file.counts;
            table.add_row([
                report.location.clone(),
                file.name.clone(),
                file.generation.to_string(),
                memory_pages.to_string(),
                slot_pages.to_string(),
                swapped_in_pages.to_string(),
                file.counts.parent_pages.to_string(),
                (file.counts.zero_pages + zero_slot_pages).to_string(),
                file.counts.stored_pages.to_string(),
                HumanBytes(file.counts.stored_bytes).to_string(),
            ]);
        }
    }
    context.out.line(table.trim_fmt())?;
    for refused in done.before.iter().chain([done]).filter_map(|report| report.slots_refused.as_ref()).take(1)
    {
        context.out.line(format_args!("swapped pages were not read from their swap slots: {refused}"))?;
    }
    let time = elapsed_text(done.elapsed);
    let consistency = match done.paused {
        Some(paused) => {
            format!("{}, writers paused for {:.1} ms", done.consistency, 1e3 * paused.as_secs_f64())
        }
        None => format!(
            "{}: pages that were written meanwhile are in the next incremental image",
            done.consistency
        ),
    };
    context.out.line(format_args!("{time}, {consistency}"))
}
