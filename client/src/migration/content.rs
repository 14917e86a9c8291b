//! The pages of a step, decoded: what a destination stores. For programs that check or replay steps.

use fdmap_proto::{PageRange, v1};
use tonic::Status;

use super::error::Rejected;
use super::message::Pages;

/// Pages of a step that are valid for a file.
#[derive(Debug)]
pub struct ReceivedPages {
    /// Pages with content, in ascending order.
    pub content: Vec<PageRange>,
    /// Their content, one page after the other.
    pub bytes: Vec<u8>,
    /// Pages that are zero, in ascending order.
    pub zero: Vec<PageRange>,
}

impl ReceivedPages {
    /// Decodes pages of a file of `file_pages` pages. Pure.
    ///
    /// # Errors
    /// INVALID_ARGUMENT, as the destination returns it.
    pub fn decode(message: v1::MigratedPages, file_pages: u64) -> Result<Self, Status> {
        let decoded = Pages::decode(message, file_pages);
        let Pages { content, bytes, zero, .. } = decoded.map_err(|Rejected(status)| status)?;
        Ok(Self { content, bytes, zero })
    }
}
