//! Measuring in pairs: what is compared runs by turns with what it is compared to, so that a machine that is slow for a
//! while is slow for both.

use std::time::Instant;

use fdmap_proto::units::to_f64;

use crate::{Bed, Measured, Way};

/// What came of measuring one way.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Which.
    pub way: Way,
    /// Nanoseconds for a page, or for a call: the median.
    pub ns: f64,
    /// The same of what it is compared to, in the same rounds.
    pub reference_ns: f64,
    /// How many times as fast: the median over the pairs.
    pub ratio: f64,
}

/// Measures each of `ways` by turns with `reference`, so many times.
///
/// # Errors
/// A way's.
pub fn measure(bed: &Bed, reference: Way, ways: &[Way], rounds: usize) -> Measured<Vec<Outcome>> {
    let mut times: Vec<Vec<[f64; 2]>> = vec![Vec::with_capacity(rounds); ways.len()];
    // Once around for the caches, and for memory that is kept for the next time.
    for way in ways {
        way.run(bed)?;
    }
    for _ in 0..rounds {
        for (way, times) in ways.iter().zip(&mut times) {
            times.push([time(bed, reference)?, time(bed, *way)?]);
        }
    }
    let outcome = |(way, times): (&Way, Vec<[f64; 2]>)| Outcome {
        way: *way,
        ns: median(times.iter().map(|[_, own]| *own)),
        reference_ns: median(times.iter().map(|[reference, _]| *reference)),
        ratio: median(times.iter().map(|[reference, own]| reference / own)),
    };
    Ok(ways.iter().zip(times).map(outcome).collect())
}

/// Nanoseconds of one run, for a page or a call.
fn time(bed: &Bed, way: Way) -> Measured<f64> {
    let count = way.count(bed.file()?.pages);
    let begin = Instant::now();
    way.run(bed)?;
    Ok(begin.elapsed().as_secs_f64() * 1e9 / to_f64(count))
}

/// The one in the middle, or of two the mean; NaN of none.
pub(crate) fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = numbers.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.get(half), sorted.len().is_multiple_of(2)) {
        (None, _) => f64::NAN,
        (Some(middle), false) => *middle,
        (Some(above), true) => f64::midpoint(sorted[half - 1], *above),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_in_the_middle() {
        assert!((median([3.0, 1.0, 2.0].into_iter()) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0, 2.0, 3.0].into_iter()) - 2.5).abs() < 1e-9);
        assert!(median(std::iter::empty()).is_nan());
    }
}
