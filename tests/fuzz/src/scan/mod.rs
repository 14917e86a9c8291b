//! Requests about page states. The target validates each request and answers it from a snapshot with the code of the service,
//! and compares the answer with a list of single pages. It makes no system call.

mod check;
pub(crate) mod model;
mod requests;

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use fdmap_server::files::Limits;

use model::{Model, ModelDraft};
pub use requests::RequestDraft;

/// Limits that inputs can reach.
static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits {
    lookup_pages: 40,
    attribute_pages: 50_000,
    retain_for: std::time::Duration::from_secs(100),
    ..Limits::default()
});

/// A file, a later state of it, and a request.
#[derive(Arbitrary, Debug)]
pub struct Input {
    file: ModelDraft,
    request: RequestDraft,
    /// The later content of some blocks, for a Diff.
    later: ModelDraft,
    /// The first of these blocks, and their number.
    changed: (u8, u8),
}

/// Answers the request and checks the answer.
///
/// # Panics
/// If the answer is wrong.
pub fn run(input: Input) {
    let before = Model::new(input.file);
    match input.request {
        RequestDraft::Scan(scan) => check::scan(&before, &scan.request(&before)),
        RequestDraft::Lookup(lookup) => check::lookup(&before, &lookup.request(&before)),
        RequestDraft::Summary(summary) => check::summary(&before, &summary.request(&before)),
        RequestDraft::Diff(diff) => {
            let (after, scanned) = before.changed(input.later, input.changed);
            check::diff(&before, &after, scanned, &diff.request(&before));
        }
        RequestDraft::Bytes(rpc, bytes) => requests::decode(&before, rpc, &bytes),
    }
}
