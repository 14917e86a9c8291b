//! Each method in each condition, measured with criterion.

use std::process::ExitCode;
use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use fdmap_benches::settings::run;
use fdmap_benches::{BenchResult, Condition, Fixture, Method, Settings};

fn main() -> ExitCode {
    run(bench)
}

fn bench(settings: Settings) -> BenchResult<()> {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let mut fixture = Fixture::make(settings)?;
    for condition in Condition::ALL {
        fixture.enter(condition)?;
        let mut failed = None;
        let mut group = criterion.benchmark_group(condition.name());
        group.sampling_mode(SamplingMode::Flat);
        let pages = fixture.file()?.pages;
        for method in Method::WHOLE.into_iter().chain(Method::PAGES) {
            group.throughput(Throughput::Elements(method.count(pages)));
            group.bench_function(method.name(), |bencher| {
                bencher.iter(|| failed = method.run(&fixture).err());
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
