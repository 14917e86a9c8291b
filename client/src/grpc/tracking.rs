//! Checkpoints, coverage and dirty rates.

use std::time::Duration;

use fdmap_proto::convert::{ConvertError, duration_to_wire};
use fdmap_proto::v1::watch_checkpoints_response::Event;
use fdmap_proto::{
    Checkpoint, CheckpointEvent, Coverage, CoveragePolicy, DirtyRate, FileCoverage, FileInfo, FileName, v1,
};
use tonic::Streaming;

use super::{Client, bounded, refusal};
use crate::{ClientError, Timeouts};

/// Event of a [`CheckpointWatch`].
#[derive(Clone, Debug, PartialEq)]
pub enum TrackingEvent {
    /// A checkpoint closed a generation.
    Checkpoint(CheckpointEvent),
    /// The file was deleted, or the caller lost the right to inspect it. No event follows.
    Deleted,
    /// This number of checkpoints was omitted because the client read too slowly.
    Lost(u64),
}

impl Client {
    /// Closes the open generation of writes. `force_scan` harvests every tracked mapping even if no write was observed.
    ///
    /// After a failure that leaves the outcome unknown, such as [`ClientError::TimedOut`], retry with the same
    /// `idempotency_key`: the retry returns the original result. Draw the key at random; it must not be 0. Checkpoints of one
    /// file run one after the other; each takes tens of milliseconds if many gigabytes are mapped.
    ///
    /// # Errors
    /// [`RefusalCode::FailedPrecondition`](crate::error::RefusalCode) if the coverage policy refuses unobserved writers;
    /// [`ClientError`] of the connection.
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
        let response = self.wait("Checkpoint", self.tracking.clone().checkpoint(request)).await?;
        Ok(response.try_into()?)
    }

    /// Returns the tracked mappings, and the coverage that a checkpoint taken now would have.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to inspect; [`ClientError`] of the connection.
    pub async fn coverage(&self, file: &FileName) -> Result<FileCoverage, ClientError> {
        let request = v1::GetCoverageRequest { file: Some(file.clone().into()) };
        let response = self.wait("GetCoverage", self.tracking.clone().get_coverage(request)).await?;
        Ok(response.try_into()?)
    }

    /// Seals a file against new writers: write(2), new writable mappings and size changes fail; existing mappings stay
    /// writable. Irreversible.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to write; [`ClientError`] of the connection.
    pub async fn seal_writers(&self, file: &FileName) -> Result<(FileInfo, Coverage), ClientError> {
        let request = v1::SealWritersRequest { file: Some(file.clone().into()) };
        let response = self.wait("SealWriters", self.tracking.clone().seal_writers(request)).await?;
        let file = response.file.ok_or(ConvertError::Missing("file"))?.try_into()?;
        let coverage = response.coverage.ok_or(ConvertError::Missing("coverage"))?.try_into()?;
        Ok((file, coverage))
    }

    /// Sets how checkpoints of a file treat unobserved writers.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to write; [`ClientError`] of the connection.
    pub async fn set_coverage_policy(
        &self,
        file: &FileName,
        policy: CoveragePolicy,
    ) -> Result<(), ClientError> {
        let policy = v1::CoveragePolicy::from(policy).into();
        let request = v1::SetCoveragePolicyRequest { file: Some(file.clone().into()), policy };
        self.wait("SetCoveragePolicy", self.tracking.clone().set_coverage_policy(request)).await.map(|_| ())
    }

    /// Measures the dirty page rate over `window`, 1 ms to 1 minute. Takes a checkpoint at the start and at the end. The
    /// answer timeout is extended by `window`.
    ///
    /// # Errors
    /// As [`Client::checkpoint`].
    pub async fn dirty_rate(&self, file: &FileName, window: Duration) -> Result<DirtyRate, ClientError> {
        let request =
            v1::DirtyRateRequest { file: Some(file.clone().into()), window: Some(duration_to_wire(window)) };
        let timeouts = Timeouts { answer: self.timeouts.answer.saturating_add(window), ..self.timeouts };
        let response = bounded("DirtyRate", timeouts, self.tracking.clone().dirty_rate(request)).await?;
        Ok(response.into_inner().try_into()?)
    }

    /// Streams the checkpoints of a file as any client takes them.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to inspect; [`ClientError`] of the connection.
    pub async fn watch_checkpoints(&self, file: &FileName) -> Result<CheckpointWatch, ClientError> {
        let request = v1::WatchCheckpointsRequest { file: Some(file.clone().into()) };
        let stream = self.wait("WatchCheckpoints", self.tracking.clone().watch_checkpoints(request)).await?;
        Ok(CheckpointWatch { stream })
    }
}

/// Stream of checkpoints.
#[derive(Debug)]
pub struct CheckpointWatch {
    stream: Streaming<v1::WatchCheckpointsResponse>,
}

impl CheckpointWatch {
    /// Waits without a timeout for the next event. Returns `None` when the stream ends. HTTP/2 pings detect a service that
    /// hangs.
    ///
    /// # Errors
    /// [`ClientError`] of the connection.
    pub async fn next(&mut self) -> Result<Option<TrackingEvent>, ClientError> {
        let message = self.stream.message().await;
        let Some(message) = message.map_err(|status| refusal(&status))? else {
            return Ok(None);
        };
        Ok(Some(match message.event.ok_or(ConvertError::Missing("event"))? {
            Event::Checkpoint(event) => TrackingEvent::Checkpoint(event.try_into()?),
            Event::Deleted(_) => TrackingEvent::Deleted,
            Event::Lost(checkpoints) => TrackingEvent::Lost(checkpoints),
        }))
    }
}
