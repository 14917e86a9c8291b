//! Bounds how often an event that other processes cause is logged.
//!
//! [`LogLimit`] is for events that a client causes at will, such as refused connections: one line per second. [`Limited`] bounds all
//! lines of the log, each statement of the code apart, so that none can fill a disk. Both count what they omit, and log that count
//! with the next line that they permit.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Of events of one kind: so many at once, and afterwards one per interval.
#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    interval: Duration,
}

const ONE_PER_SECOND: Rate = Rate { burst: 1, interval: Duration::from_secs(1) };
/// Of the lines of one statement. A start logs several lines for each of some thousand stored files.
const PER_STATEMENT: Rate = Rate { burst: 4096, interval: Duration::from_millis(100) };

/// A bucket of permits. Pure.
#[derive(Debug, Default)]
struct Bucket {
    permits: u32,
    /// When the last permit was added; `None`: the bucket is full.
    refilled: Option<Instant>,
    /// Events without a permit since the last one with.
    omitted: u64,
}

impl Bucket {
    /// Counts an event. Returns how many were omitted before it if it is to be logged.
    fn permit(&mut self, rate: Rate, now: Instant) -> Option<u64> {
        let refilled = self.refilled.unwrap_or(now);
        let waited = now.saturating_duration_since(refilled);
        let intervals = waited.as_nanos() / rate.interval.as_nanos();
        let added = u32::try_from(intervals).unwrap_or(u32::MAX);
        self.permits = match self.refilled {
            None => rate.burst,
            Some(_) => self.permits.saturating_add(added).min(rate.burst),
        };
        self.refilled = Some(if self.permits == rate.burst {
            now
        } else {
            refilled + rate.interval.saturating_mul(added)
        });
        if self.permits == 0 {
            self.omitted += 1;
            return None;
        }
        self.permits -= 1;
        Some(std::mem::take(&mut self.omitted))
    }
}

/// One kind of line.
#[derive(Debug)]
pub(crate) struct LogLimit(Mutex<Bucket>);

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Bucket { permits: 0, refilled: None, omitted: 0 }))
    }

    /// Counts an event. Returns how many were omitted before it if it is to be logged.
    pub(crate) fn permit(&self) -> Option<u64> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).permit(ONE_PER_SECOND, Instant::now())
    }
}

/// Formats events like `F`, and omits those of a statement that logs too often. The next line of that statement follows a line with
/// the number of the omitted ones.
#[derive(Debug)]
pub struct Limited<F> {
    format: F,
    statements: Mutex<HashMap<Identifier, Bucket>>,
}

impl<F> Limited<F> {
    pub fn new(format: F) -> Self {
        Self { format, statements: Mutex::default() }
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        // FDMAPD_LOG requests the others.
        if *metadata.level() <= Level::INFO {
            // No code panics with the lock held.
            let mut statements = self.statements.lock().unwrap_or_else(PoisonError::into_inner);
            let permit =
                statements.entry(metadata.callsite()).or_default().permit(PER_STATEMENT, Instant::now());
            drop(statements);
            match permit {
                None => return Ok(()),
                Some(0) => {}
                Some(omitted) => writeln!(writer, "{omitted} lines like the next one were omitted")?,
            }
        }
        self.format.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_line_per_interval_counts_the_omitted_ones() {
        let (mut bucket, start) = (Bucket::default(), Instant::now());
        let mut at =
            |milliseconds| bucket.permit(ONE_PER_SECOND, start + Duration::from_millis(milliseconds));
        assert_eq!(at(0), Some(0));
        assert_eq!([at(0), at(1), at(999)], [None; 3]);
        assert_eq!(at(1000), Some(3));
        assert_eq!(at(5000), Some(0));
        assert_eq!(at(5001), None);
    }

    #[test]
    fn a_burst_is_permitted_again_after_a_pause() {
        let rate = Rate { burst: 3, interval: Duration::from_secs(1) };
        let (mut bucket, start) = (Bucket::default(), Instant::now());
        let mut at = |milliseconds| bucket.permit(rate, start + Duration::from_millis(milliseconds));
        assert_eq!([at(0), at(0), at(0), at(0)], [Some(0), Some(0), Some(0), None]);
        // Half an interval is not lost.
        assert_eq!([at(1500), at(1500), at(2000), at(2000)], [Some(1), None, Some(1), None]);
        assert_eq!([at(60_000), at(60_000), at(60_000), at(60_000)], [Some(1), Some(0), Some(0), None]);
    }

    /// Bytes that were written.
    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Of one statement.
    const LINE_COUNT: usize = 20_000;

    #[test]
    fn statement_that_logs_too_often_hides_no_line_of_others() {
        let output = Output::default();
        let written = output.clone();
        let subscriber = tracing_subscriber::fmt()
            .map_event_format(Limited::new)
            .with_max_level(Level::DEBUG)
            .with_writer(move || written.clone())
            .finish();
        let warn = |number| tracing::warn!(number, "often");
        tracing::subscriber::with_default(subscriber, || {
            (0..LINE_COUNT).for_each(warn);
            tracing::warn!("another one");
            (0..LINE_COUNT).for_each(|_| tracing::debug!("requested"));
            std::thread::sleep(PER_STATEMENT.interval);
            warn(LINE_COUNT);
        });
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
        // The loop may take some intervals.
        let often = count("often");
        assert!(often > PER_STATEMENT.burst as usize && often < LINE_COUNT / 2, "{often} lines");
        assert_eq!((count("another one"), count("requested")), (1, LINE_COUNT));
        let omitted =
            |line: &str| line.strip_suffix(" lines like the next one were omitted")?.parse::<usize>().ok();
        assert_eq!(often + text.lines().filter_map(omitted).sum::<usize>(), LINE_COUNT + 1);
    }
}
