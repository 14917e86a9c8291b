//! Calls that wait for their turn, without a thread.

use std::time::Instant;

use fdmap_proto::units::FileId;

use super::list::{List, Listed};
use crate::log_limit::LogLimit;

static QUEUE: List<Call> = List::new();
static REPORTED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();

struct Call {
    user: Option<u32>,
    file: Option<FileId>,
}

/// A call that waits. Dropping it ends the wait.
pub(crate) struct Queued(Listed<Call>);

/// A call begins to wait. `user`: whose thread it needs; `None`: it needs none. `file`: the file that it works on alone.
pub(crate) fn queue(user: Option<u32>, file: Option<FileId>) -> Queued {
    Queued(QUEUE.add(Call { user, file }))
}

impl Drop for Queued {
    fn drop(&mut self) {
        if let Some(after) = self.0.slow()
            && let Some(omitted) = ENDED.permit()
        {
            let Call { user, file } = self.0.entry.value;
            let file = label(file);
            tracing::warn!(user, file, ?after, omitted, "a call waited for its turn");
        }
    }
}

/// Logs the oldest call that waits for long and was not logged yet.
pub(super) fn report() {
    let slow = QUEUE.slow_since(Instant::now());
    let Some(oldest) = slow.first() else { return };
    if REPORTED.permit().is_none() {
        return;
    }
    oldest.set_reported();
    let Call { user, file } = oldest.value;
    let (file, after, others) = (label(file), oldest.began.elapsed(), slow.len() - 1);
    tracing::warn!(user, file, ?after, others, "a call waits for its turn");
}

fn label(file: Option<FileId>) -> Option<String> {
    file.map(|id| format!("id:{id}"))
}
