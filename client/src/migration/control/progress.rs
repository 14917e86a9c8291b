//! The messages of a watch, and the statuses of an end. Pure.

use std::time::Duration;

use fdmap_proto::v1;
use tonic::Status;

use super::super::monitor::{MigrationEnd, MigrationMonitor, MigrationState};
use crate::image::Progress;

/// What a watch reports now.
pub(super) fn progress(
    state: &MigrationState,
    monitor: &MigrationMonitor,
    now: &Progress,
) -> v1::MigrationProgress {
    let (connected, reconnections) = monitor.connection();
    v1::MigrationProgress {
        state: state_to_wire(state).into(),
        reason: match state {
            MigrationState::Ended(end) => reason(end).to_owned(),
            _ => String::new(),
        },
        connected,
        reconnections,
        elapsed_ns: nanoseconds(monitor.begun.elapsed()),
        round: now.round,
        total_pages: now.total_pages,
        done_pages: now.done_pages,
        memory_pages: now.sources.memory_pages,
        swap_pages: now.sources.swap_pages,
        zero_pages: now.sources.zero_pages,
        skipped_pages: monitor.skipped_pages(),
        content_bytes: now.stored_bytes,
        round_elapsed_ns: nanoseconds(now.elapsed),
        pages_per_second: now.pages_per_second(),
        remaining_ns: now.remaining().map(nanoseconds),
        expected_downtime_ns: now.expected_downtime.map(nanoseconds),
    }
}

fn state_to_wire(state: &MigrationState) -> v1::MigrationState {
    match state {
        MigrationState::Connecting => v1::MigrationState::Connecting,
        MigrationState::Copying => v1::MigrationState::Copying,
        MigrationState::Ready => v1::MigrationState::Ready,
        MigrationState::Finalizing => v1::MigrationState::Finalizing,
        MigrationState::Committing => v1::MigrationState::Committing,
        MigrationState::Ended(end) => match **end {
            MigrationEnd::Completed { .. } => v1::MigrationState::Completed,
            MigrationEnd::Failed(_) => v1::MigrationState::Failed,
            MigrationEnd::Unknown(_) => v1::MigrationState::OutcomeUnknown,
        },
    }
}

fn reason(end: &MigrationEnd) -> &str {
    match end {
        MigrationEnd::Completed { .. } => "",
        MigrationEnd::Failed(reason) | MigrationEnd::Unknown(reason) => reason,
    }
}

/// The answer of Finalize.
pub(super) fn finalized(end: &MigrationEnd) -> Result<v1::FinalizeMigrationResponse, Status> {
    match end {
        MigrationEnd::Completed { file, downtime, exact } => Ok(v1::FinalizeMigrationResponse {
            file: Some(file.clone().into()),
            downtime_ns: nanoseconds(*downtime),
            exact: *exact,
        }),
        MigrationEnd::Failed(reason) => Err(Status::aborted(reason)),
        MigrationEnd::Unknown(reason) => Err(Status::unknown(reason)),
    }
}

/// The answer of Cancel.
pub(super) fn cancelled(end: &MigrationEnd) -> Result<v1::CancelMigrationResponse, Status> {
    match end {
        MigrationEnd::Completed { .. } => Err(Status::failed_precondition("the destination has the file")),
        MigrationEnd::Failed(_) => Ok(v1::CancelMigrationResponse {}),
        MigrationEnd::Unknown(reason) => Err(Status::unknown(reason)),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
