//! Charges a user for the messages that the service buffers: requests until their answers begin, and answers that the user has not read.
//!
//! A message beyond the limit is refused. Streams are limited by their number, and each may have one message in a buffer: further ones
//! count for a limit of their own, and wait. So unread streams refuse no call of their user, and unread calls stop no stream.

use std::sync::Arc;

use fdmap_proto::units::to_u64;

use crate::files::{Caller, FileError, Quota, QuotaPermit};
use crate::service::Service;

/// Size of the buffer that tonic begins a message with. It grows by doubling.
pub(super) const MIN_BUFFER_BYTES: usize = 8 << 10;

/// The user, and the quotas, that are charged for the messages of a connection.
#[derive(Debug)]
pub(super) struct Buffers {
    caller: Caller,
    calls: Arc<Quota>,
    streams: Arc<Quota>,
}

impl Buffers {
    pub(super) fn new(caller: Caller, service: &Service) -> Self {
        Self { caller, calls: Arc::clone(&service.buffered), streams: Arc::clone(&service.buffered_streams) }
    }

    /// Charges for a message of `bytes`, of any size if the user has no other one.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn charge(&self, bytes: usize) -> Result<QuotaPermit, FileError> {
        self.calls.acquire_at_most(&self.caller, buffer_bytes(bytes))
    }

    /// Charges for the answer of a call that begins, as far as it is small: so it is not refused when the call has taken effect.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn reserve(&self) -> Result<QuotaPermit, FileError> {
        self.charge(0)
    }

    /// Charges for a message that has grown to `bytes`, to any size if the user has no other one.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn charge_more(&self, charged: &mut QuotaPermit, bytes: usize) -> Result<(), FileError> {
        let bytes = buffer_bytes(bytes);
        if bytes <= charged.amount() { Ok(()) } else { charged.resize_at_most(bytes, self.caller.admin) }
    }

    /// Charges for a message of a stream, without regard to the limit.
    pub(super) fn charge_stream(&self, bytes: usize) -> Option<QuotaPermit> {
        // Never `None`: a charge without limit does not fail.
        self.streams.acquire_for(self.caller.uid, buffer_bytes(bytes), true).ok()
    }

    /// True if streams of the user have all that they may have together.
    pub(super) fn are_full_of_streams(&self) -> bool {
        self.streams.is_exhausted_for(&self.caller)
    }
}

/// The memory that a message of `bytes` takes.
fn buffer_bytes(bytes: usize) -> u64 {
    to_u64(bytes.max(MIN_BUFFER_BYTES).next_power_of_two())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::files::Quotas;

    /// Buffers of user 7, with two quotas.
    pub(in crate::rpc) fn buffers(of_calls: u64, of_streams: u64) -> Arc<Buffers> {
        let quotas = Quotas::new(16);
        Arc::new(Buffers {
            caller: Caller::new(7, 7, Vec::new(), 1),
            calls: quotas.quota("bytes of answers", of_calls),
            streams: quotas.quota("bytes of streams", of_streams),
        })
    }

    #[test]
    fn message_counts_as_large_as_its_buffer() {
        let sizes = [0, 1, 8192, 8193, 100_000].map(buffer_bytes);
        assert_eq!(sizes, [8192, 8192, 8192, 16384, 131_072]);
    }

    #[test]
    fn single_message_may_be_larger_than_the_limit() {
        let buffers = buffers(100_000, 0);
        let large = buffers.charge(1 << 20).unwrap();
        assert!(buffers.charge(1).is_err());
        drop(large);
        let mut grows = buffers.charge(1).unwrap();
        buffers.charge_more(&mut grows, 50_000).unwrap();
        assert_eq!(grows.amount(), 65_536);
        let other = buffers.reserve().unwrap();
        let error = buffers.charge_more(&mut grows, 70_000).unwrap_err().to_string();
        assert_eq!(error, "user 7 has 8192 bytes of answers; 100000 more would exceed the limit of 100000");
        drop(other);
        buffers.charge_more(&mut grows, 70_000).unwrap();
        assert_eq!(grows.amount(), 100_000);
    }
}
