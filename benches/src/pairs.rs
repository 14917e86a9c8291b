//! Paired measurements: each method runs interleaved with its reference, so that a temporarily slow machine slows both.

use std::time::Instant;

use fdmap_proto::units::to_f64;

use crate::{BenchResult, Fixture, Method};

/// Result of one method.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub method: Method,
    /// Median time in nanoseconds per page or per call.
    pub ns: f64,
    /// The same for the reference, in the same rounds.
    pub reference_ns: f64,
    /// Reference time divided by the method's time: the median over all pairs.
    pub ratio: f64,
}

/// Measures each of `methods` interleaved with `reference`, `rounds` times.
///
/// # Errors
/// Those of [`Method::run`].
pub fn measure(
    fixture: &Fixture,
    reference: Method,
    methods: &[Method],
    rounds: usize,
) -> BenchResult<Vec<Outcome>> {
    let mut times: Vec<Vec<[f64; 2]>> = vec![Vec::with_capacity(rounds); methods.len()];
    // One run to warm caches and allocators.
    for method in methods {
        method.run(fixture)?;
    }
    for _ in 0..rounds {
        for (method, times) in methods.iter().zip(&mut times) {
            times.push([time(fixture, reference)?, time(fixture, *method)?]);
        }
    }
    let outcome = |(method, times): (&Method, Vec<[f64; 2]>)| Outcome {
        method: *method,
        ns: median(times.iter().map(|[_, own]| *own)),
        reference_ns: median(times.iter().map(|[reference, _]| *reference)),
        ratio: median(times.iter().map(|[reference, own]| reference / own)),
    };
    Ok(methods.iter().zip(times).map(outcome).collect())
}

/// Time of one run in nanoseconds per page or per call.
fn time(fixture: &Fixture, method: Method) -> BenchResult<f64> {
    let count = method.count(fixture.file()?.pages);
    let begin = Instant::now();
    method.run(fixture)?;
    Ok(begin.elapsed().as_secs_f64() * 1e9 / to_f64(count))
}

/// Median; the mean of the two middle values of an even number, NaN for none.
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
    fn median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert!((median([3.0, 1.0, 2.0].into_iter()) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0, 2.0, 3.0].into_iter()) - 2.5).abs() < 1e-9);
        assert!(median(std::iter::empty()).is_nan());
    }
}
