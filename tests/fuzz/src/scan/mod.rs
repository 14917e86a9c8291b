//! Requests about pages: checked as the service checks them, answered from a snapshot as the service answers them, and each
//! answer compared with what a list of single pages says. Nothing here touches the kernel.

mod check;
mod model;
mod requests;

use arbitrary::Arbitrary;
use fdmap_server::files::Limits;

use model::{Model, ModelDraft};
pub use requests::Asked;

/// Bounds that inputs can reach.
const LIMITS: Limits = Limits {
    file_bytes: 1 << 62,
    bytes_per_user: 1 << 62,
    files_per_user: 1,
    sessions_per_user: 1,
    watches_per_user: 1,
    lookup_pages: 40,
    attribute_pages: 50_000,
    kept_per_user: 1,
    keep: std::time::Duration::from_secs(100),
    shared_bytes_per_user: 1,
    shared_per_user: 1,
};

/// A file, a later state of it, and one request.
#[derive(Arbitrary, Debug)]
pub struct Input {
    file: ModelDraft,
    asked: Asked,
    /// What some blocks of the file hold later, for a diff.
    later: ModelDraft,
    /// The first of these blocks and their number.
    changed: (u8, u8),
}

/// Answers the request and checks the answer.
///
/// # Panics
/// If it is wrong.
pub fn run(input: Input) {
    let before = Model::new(input.file);
    match input.asked {
        Asked::Scan(scan) => check::scan(&before, &scan.request(&before)),
        Asked::Lookup(lookup) => check::lookup(&before, &lookup.request(&before)),
        Asked::Summary(summary) => check::summary(&before, &summary.request(&before)),
        Asked::Diff(diff) => {
            let (after, read) = before.changed(input.later, input.changed);
            check::diff(&before, &after, read, &diff.request(&before));
        }
        Asked::Bytes(rpc, bytes) => requests::decoded(&before, rpc, &bytes),
    }
}
