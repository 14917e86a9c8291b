//! Each way in each condition, measured by criterion.

use std::process::ExitCode;
use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use fdmap_benches::settings::run;
use fdmap_benches::{Bed, Condition, Measured, Settings, Way};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> Measured<()> {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let mut bed = Bed::make(settings)?;
    for condition in Condition::ALL {
        bed.enter(condition)?;
        let mut failed = None;
        let mut group = criterion.benchmark_group(condition.name());
        group.sampling_mode(SamplingMode::Flat);
        let pages = bed.file()?.pages;
        for way in Way::WHOLE.into_iter().chain(Way::PAGES) {
            group.throughput(Throughput::Elements(way.count(pages)));
            group.bench_function(way.name(), |bencher| {
                bencher.iter(|| failed = way.run(&bed).err());
            });
            if let Some(error) = failed.take() {
                return Err(error);
            }
        }
        group.finish();
    }
    criterion.final_summary();
    Ok(())
}
