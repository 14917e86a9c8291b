//! How long calls take.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The durations of calls, by their names.
#[derive(Debug, Default)]
pub struct Latencies {
    by_call: BTreeMap<&'static str, Vec<Duration>>,
}

impl Latencies {
    /// Runs a call and records its duration, also if it fails.
    pub async fn of<T>(&mut self, name: &'static str, call: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let result = call.await;
        self.add(name, began.elapsed());
        result
    }

    /// The same for a call that blocks the thread.
    pub fn of_blocking<T>(&mut self, name: &'static str, call: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = call();
        self.add(name, began.elapsed());
        result
    }

    fn add(&mut self, name: &'static str, took: Duration) {
        self.by_call.entry(name).or_default().push(took);
    }

    /// Adds the calls of another client.
    pub fn append(&mut self, other: Self) {
        for (name, mut took) in other.by_call {
            self.by_call.entry(name).or_default().append(&mut took);
        }
    }

    /// Those of all calls.
    pub fn all(&self) -> Quantiles {
        Quantiles::of(self.by_call.values().flatten().copied().collect())
    }
}

impl fmt::Display for Latencies {
    /// A line for each name, and one for all calls.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, took) in &self.by_call {
            writeln!(out, "{name:12} {}", Quantiles::of(took.clone()))?;
        }
        write!(out, "{:12} {}", "all calls", self.all())
    }
}

/// Quantiles of durations.
#[derive(Clone, Copy, Debug)]
pub struct Quantiles {
    pub calls: usize,
    pub p50: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl Quantiles {
    fn of(mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        let calls = took.len();
        let at =
            |percent: usize| took.get(calls * percent / 100).or(took.last()).copied().unwrap_or_default();
        Self { calls, p50: at(50), p99: at(99), max: at(100) }
    }
}

impl fmt::Display for Quantiles {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { calls, p50, p99, max } = self;
        let millis = |took: &Duration| took.as_secs_f64() * 1e3;
        let (p50, p99, max) = (millis(p50), millis(p99), millis(max));
        write!(out, "{calls:8} calls, p50 {p50:.1} ms, p99 {p99:.1} ms, max {max:.1} ms")
    }
}
