//! Dump: writes the content of files of the service to an image.
//!
//! ```text
//!   without a pause                       with a pause
//!
//!   round -> image in the store           round -> image pre-1        while the writers run
//!                                         ...      image pre-N
//!                                         pause the writers
//!                                         round -> image in the store, its parent is pre-N
//!                                         resume the writers
//!                                         complete the objects
//!
//!   a round:  checkpoint (generation g) -> changes since the parent's generation -> states of all pages
//!             -> plan: each page is read, is in the parent, or has no data -> content -> objects
//! ```
//!
//! The checkpoint comes first: a page that is written after it is in generation g + 1, and in the next incremental image. So an image has all
//! writes that ended before its checkpoint was called, and may have later ones.
//!
//! Refused: pages files with room for the pages that the last round changes. CRIU reads a pages file in page order, and a store of objects
//! only appends.

mod content;
mod counts;
mod pause;
mod plan;
mod round;
mod source;
mod target;
mod writer;

use std::sync::Arc;

use super::chain::ImageChain;
use super::chunks::Compression;
use super::error::ImageError;
use super::progress::Control;
use super::side_file::Consistency;
use super::store::ImageStore;
#[cfg(feature = "migration")]
pub(crate) use content::{ContentReader, Packed};
pub use counts::DumpCounts;
pub use pause::PauseMethod;
#[cfg(feature = "migration")]
pub(crate) use pause::Paused;
#[cfg(feature = "migration")]
pub(crate) use plan::{Base, Extent, batches, plan};
use round::Round;
pub use round::{DumpReport, FileReport};
pub use source::DumpSource;
#[cfg(feature = "migration")]
pub(crate) use source::Written;
use target::{PreImage, Target};

/// How files are dumped.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    /// Pages that did not change since this image are not stored again.
    pub parent: Option<Arc<dyn ImageStore>>,
    pub compression: Compression,
    /// Threads that read; at least 1.
    pub jobs: usize,
    /// Pauses the writers for the last round, so that all pages are those of one moment.
    pub pause: Option<PauseMethod>,
    /// Images that are written before the pause, each with the pages that changed since the one before.
    pub rounds: u32,
}

/// Dumps files into an empty store. Blocks; do not call it on a thread of an async runtime. After an error the store is empty again, and the
/// writers run.
///
/// # Errors
/// [`ImageError`]
pub fn dump(
    sources: &[DumpSource],
    store: &Arc<dyn ImageStore>,
    options: &DumpOptions,
    control: &Control,
) -> Result<DumpReport, ImageError> {
    for (number, source) in sources.iter().enumerate() {
        if sources[..number].iter().any(|other| other.info.id == source.info.id) {
            return Err(ImageError::Usage(format!("{source} is listed twice")));
        }
    }
    if let Some(parent) = &options.parent {
        // Before the work: that no link can lead there is known now.
        store.parent_link(&**parent)?;
    }
    let _target = Target::reserve(store)?;
    let mut parent = options.parent.as_ref().map(ImageChain::open).transpose()?;
    let mut link = options.parent.clone();
    let Some(method) = &options.pause else {
        let round =
            Round::begin(sources, store, parent.as_ref(), link.as_deref(), Consistency::PerPage, options);
        return Ok(round.copy(control)?.finish(control)?.0);
    };
    let mut images = Vec::new();
    let mut before = Vec::new();
    for number in 1..=options.rounds {
        let mut image = PreImage::create(&**store, format!("pre-{number}"))?;
        let child = Arc::clone(&image.target.store);
        let round =
            Round::begin(sources, &child, parent.as_ref(), link.as_deref(), Consistency::PerPage, options);
        let (report, objects) = round.copy(control)?.finish(control)?;
        before.push(report);
        image.objects = objects;
        images.push(image);
        parent = Some(ImageChain::open(&child)?);
        link = Some(child);
    }
    let paused = method.pause(control)?;
    let last =
        Round::begin(sources, store, parent.as_ref(), link.as_deref(), Consistency::PointInTime, options);
    let copied = last.copy(control);
    let duration = paused.resume()?;
    let (mut report, _) = copied?.finish(control)?;
    report.paused = Some(duration);
    report.before = before;
    images.iter_mut().for_each(PreImage::keep);
    Ok(report)
}
