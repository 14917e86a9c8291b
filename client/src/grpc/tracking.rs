//! Writes: checkpoints, and what they rest on.

use std::time::{Duration, SystemTime};

use fdmap_proto::convert::{
    ConvertError, FileName, duration_from_wire, duration_to_wire, generation_from_wire, timestamp_from_wire,
};
use fdmap_proto::units::Generation;
use fdmap_proto::v1::watch_checkpoints_response::Event;
use fdmap_proto::{Coverage, CoveragePolicy, FileInfo, TrackedMapping, v1};
use tonic::Streaming;

use super::{Client, bounded, refusal};
use crate::{ClientError, Timeouts};

/// A generation of writes that was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The generation that was closed; if `unchanged`, the last one that was.
    pub generation: Generation,
    /// Nothing was written since that one was closed, so none was closed now.
    pub unchanged: bool,
    /// Pages in the closed generation that surely were written.
    pub observed_pages: u64,
    /// Pages that are told as written though nobody saw it.
    pub conservative_pages: u64,
    /// What that rests on.
    pub coverage: Coverage,
    /// How long it took inside the service.
    pub duration: Duration,
    /// When it was made.
    pub time: SystemTime,
}

/// Who writes to a file, and how much of that is observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileCoverage {
    /// What a checkpoint made now would rest on.
    pub coverage: Coverage,
    /// The mappings that are observed.
    pub mappings: Vec<TrackedMapping>,
    /// What a checkpoint does about writers that are not.
    pub policy: CoveragePolicy,
    /// The last closed generation; [`Generation::NONE`]: there is none.
    pub generation: Generation,
    /// The file was closed to further writers.
    pub writers_sealed: bool,
}

/// How many pages were written in a while.
#[derive(Clone, Debug, PartialEq)]
pub struct DirtyRate {
    /// What was measured, between two checkpoints.
    pub window: Duration,
    /// Pages that surely were written.
    pub observed_pages: u64,
    /// Pages that are told as written though nobody saw it.
    pub conservative_pages: u64,
    /// All of them, a second.
    pub pages_per_second: f64,
    /// The same in bytes.
    pub bytes_per_second: f64,
    /// What that rests on.
    pub coverage: Coverage,
    /// The generation that it ended with.
    pub generation: Generation,
}

/// What a [`CheckpointWatch`] tells.
#[derive(Clone, Debug, PartialEq)]
pub enum TrackingEvent {
    /// Somebody made a checkpoint.
    Checkpoint(CheckpointEvent),
    /// The file was deleted; nothing follows.
    Deleted,
    /// So many checkpoints were left out, since we read too slowly.
    Lost(u64),
}

/// A checkpoint that somebody made.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointEvent {
    /// The generation that it closed.
    pub generation: Generation,
    /// Pages in it that surely were written.
    pub observed_pages: u64,
    /// Pages that are told as written though nobody saw it.
    pub conservative_pages: u64,
    /// When it was made.
    pub time: SystemTime,
    /// Since the one before; `None` for the first.
    pub since_last: Option<Duration>,
    /// Pages of both kinds a second since the one before.
    pub pages_per_second: f64,
}

impl Client {
    /// Closes the open generation of writes to a file. `exact` looks at every page table even if nothing seems to have been
    /// written.
    ///
    /// Whoever cannot tell whether a checkpoint was made, as after [`ClientError::TimedOut`], asks again with the same
    /// `idempotency_key`: not 0, and drawn at random for each checkpoint that is wanted. A file of many mapped gigabytes takes
    /// tens of milliseconds, and its checkpoints wait for one another.
    ///
    /// # Errors
    /// [`ClientError`]; [`RefusalCode::FailedPrecondition`](crate::error::RefusalCode) where the file's policy refuses what
    /// is not observed.
    pub async fn checkpoint(
        &self,
        file: &FileName,
        force_scan: bool,
        idempotency_key: Option<u64>,
    ) -> Result<Checkpoint, ClientError> {
        let request = v1::CheckpointRequest {
            file: Some(file.clone().into()),
            force_scan,
            idempotency_key: idempotency_key.unwrap_or(0),
        };
        let answer = self.wait("Checkpoint", self.tracking.clone().checkpoint(request)).await?;
        Ok(Checkpoint {
            generation: generation_from_wire("generation", answer.generation)?,
            unchanged: answer.unchanged,
            observed_pages: answer.observed_pages,
            conservative_pages: answer.conservative_pages,
            coverage: coverage(answer.coverage)?,
            duration: duration_from_wire("duration", answer.duration)?,
            time: timestamp_from_wire("time", answer.time)?,
        })
    }

    /// Who writes to a file, and how much of that is observed.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn coverage(&self, file: &FileName) -> Result<FileCoverage, ClientError> {
        let request = v1::GetCoverageRequest { file: Some(file.clone().into()) };
        let answer = self.wait("GetCoverage", self.tracking.clone().get_coverage(request)).await?;
        Ok(FileCoverage {
            coverage: coverage(answer.coverage)?,
            mappings: answer.mappings.into_iter().map(TrackedMapping::try_from).collect::<Result<_, _>>()?,
            policy: CoveragePolicy::from_wire(answer.policy)?,
            generation: generation_from_wire("generation", answer.generation)?,
            writers_sealed: answer.writers_sealed,
        })
    }

    /// Forbids new writable mappings of a file, writes through descriptors, and changes of its size. Whoever has it mapped
    /// goes on. It cannot be undone.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn seal_writers(&self, file: &FileName) -> Result<(FileInfo, Coverage), ClientError> {
        let request = v1::SealWritersRequest { file: Some(file.clone().into()) };
        let answer = self.wait("SealWriters", self.tracking.clone().seal_writers(request)).await?;
        let file = answer.file.ok_or(ConvertError::Missing("file"))?.try_into()?;
        Ok((file, coverage(answer.coverage)?))
    }

    /// Changes what checkpoints of a file do about writers that are not observed.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn set_coverage_policy(
        &self,
        file: &FileName,
        policy: CoveragePolicy,
    ) -> Result<(), ClientError> {
        let policy = v1::CoveragePolicy::from(policy).into();
        let request = v1::SetCoveragePolicyRequest { file: Some(file.clone().into()), policy };
        self.wait("SetCoveragePolicy", self.tracking.clone().set_coverage_policy(request)).await.map(|_| ())
    }

    /// How many pages of a file are written in `window`, 1 ms to 1 minute. Makes a checkpoint at both ends of it. The answer
    /// is waited for that much longer than other answers.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn dirty_rate(&self, file: &FileName, window: Duration) -> Result<DirtyRate, ClientError> {
        let request =
            v1::DirtyRateRequest { file: Some(file.clone().into()), window: Some(duration_to_wire(window)) };
        let timeouts = Timeouts { answer: self.timeouts.answer.saturating_add(window), ..self.timeouts };
        let answer = bounded("DirtyRate", timeouts, self.tracking.clone().dirty_rate(request)).await?;
        let answer = answer.into_inner();
        Ok(DirtyRate {
            window: duration_from_wire("window", answer.window)?,
            observed_pages: answer.observed_pages,
            conservative_pages: answer.conservative_pages,
            pages_per_second: rate(answer.pages_per_second)?,
            bytes_per_second: rate(answer.bytes_per_second)?,
            coverage: coverage(answer.coverage)?,
            generation: generation_from_wire("generation", answer.generation)?,
        })
    }

    /// Each checkpoint of a file as it is made, by whomever.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn watch_checkpoints(&self, file: &FileName) -> Result<CheckpointWatch, ClientError> {
        let request = v1::WatchCheckpointsRequest { file: Some(file.clone().into()) };
        let stream = self.wait("WatchCheckpoints", self.tracking.clone().watch_checkpoints(request)).await?;
        Ok(CheckpointWatch { stream, timeouts: self.timeouts })
    }
}

/// Checkpoints of a file as they are made.
#[derive(Debug)]
pub struct CheckpointWatch {
    stream: Streaming<v1::WatchCheckpointsResponse>,
    timeouts: Timeouts,
}

impl CheckpointWatch {
    /// The next checkpoint, however long it takes; `None` when the file is gone or the service stops. A service that is
    /// stuck is noticed by its silence to pings.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn next(&mut self) -> Result<Option<TrackingEvent>, ClientError> {
        let message = self.stream.message().await;
        let Some(message) = message.map_err(|status| refusal("Watch", self.timeouts, &status))? else {
            return Ok(None);
        };
        event(message).map(Some)
    }
}

fn event(message: v1::WatchCheckpointsResponse) -> Result<TrackingEvent, ClientError> {
    Ok(match message.event.ok_or(ConvertError::Missing("event"))? {
        Event::Checkpoint(made) => TrackingEvent::Checkpoint(CheckpointEvent {
            generation: generation_from_wire("generation", made.generation)?,
            observed_pages: made.observed_pages,
            conservative_pages: made.conservative_pages,
            time: timestamp_from_wire("time", made.time)?,
            since_last: made
                .since_last
                .map(|since| duration_from_wire("since_last", Some(since)))
                .transpose()?,
            pages_per_second: rate(made.pages_per_second)?,
        }),
        Event::Deleted(_) => TrackingEvent::Deleted,
        Event::Lost(lost) => TrackingEvent::Lost(lost),
    })
}

pub(super) fn coverage(coverage: Option<v1::Coverage>) -> Result<Coverage, ClientError> {
    Ok(coverage.ok_or(ConvertError::Missing("coverage"))?.try_into()?)
}

fn rate(rate: f64) -> Result<f64, ClientError> {
    if rate.is_finite() && rate >= 0.0 {
        Ok(rate)
    } else {
        Err(ClientError::Unexpected("a rate is no number of pages or bytes a second"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_checkpoint_has_none_before_it() {
        let made = v1::CheckpointEvent {
            generation: 1,
            observed_pages: 2,
            time: Some(prost_types::Timestamp::default()),
            ..Default::default()
        };
        let message = |made| v1::WatchCheckpointsResponse { event: Some(Event::Checkpoint(made)) };
        let TrackingEvent::Checkpoint(told) = event(message(made)).unwrap() else { panic!() };
        assert_eq!((told.since_last, told.observed_pages), (None, 2));
        let since_last = Some(prost_types::Duration { seconds: -1, nanos: 0 });
        assert!(event(message(v1::CheckpointEvent { since_last, ..made })).is_err());
        assert!(event(message(v1::CheckpointEvent { time: None, ..made })).is_err());
        assert!(event(message(v1::CheckpointEvent { pages_per_second: f64::NAN, ..made })).is_err());
    }

    #[test]
    fn rates_are_numbers() {
        assert_eq!(rate(1.5).unwrap(), 1.5);
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(rate(bad).is_err());
        }
    }
}
