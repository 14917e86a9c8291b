//! The journal header: the state that changes with every checkpoint. It is small and always written as a whole.

use fdmap_proto::units::{Generation, low_u32};

use super::layout::{HEADER_STRIDE, u64_at};

/// Number of checkpoint replies that the header keeps.
pub const MAX_REPLIES: usize = 64;
/// Size of the part before the replies, in bytes.
const FIXED_BYTES: usize = 40;
/// Size of a reply in bytes.
const REPLY_BYTES: usize = 16;
/// Size of an encoded [`JournalHeader`].
pub(super) const HEADER_BYTES: usize = FIXED_BYTES + MAX_REPLIES * REPLY_BYTES;

const _: () = assert!(fdmap_proto::units::to_u64(HEADER_BYTES) <= HEADER_STRIDE);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalHeader {
    /// The open generation; [`Generation::NONE`] in a new journal.
    pub open: Generation,
    /// The file's size in pages.
    pub pages: u64,
    /// The ctime of the inode, in seconds and nanoseconds.
    pub ctime: (i64, i64),
    /// Not interpreted by the journal.
    pub flags: u64,
    /// The last replies, the latest first.
    pub replies: [CheckpointReply; MAX_REPLIES],
}

/// The reply to a Checkpoint request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointReply {
    /// Idempotency key of the request; 0 if it had none.
    pub idempotency_key: u64,
    /// The generation that the checkpoint closed.
    pub generation: Generation,
    /// True if nothing was written in the generation.
    pub unchanged: bool,
}

impl Default for JournalHeader {
    fn default() -> Self {
        Self {
            open: Generation::NONE,
            pages: 0,
            ctime: (0, 0),
            flags: 0,
            replies: [CheckpointReply::default(); MAX_REPLIES],
        }
    }
}

impl JournalHeader {
    /// Replaces the oldest reply. Replies without an idempotency key are not kept.
    pub fn add_reply(&mut self, reply: CheckpointReply) {
        if reply.idempotency_key != 0 {
            self.replies.rotate_right(1);
            self.replies[0] = reply;
        }
    }

    /// The reply to the request with this idempotency key, if it is among the kept ones.
    #[must_use]
    pub fn reply_to(&self, key: u64) -> Option<CheckpointReply> {
        self.replies.iter().copied().find(|reply| key != 0 && reply.idempotency_key == key)
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let fixed = [
            self.open.get(),
            self.pages,
            self.ctime.0.cast_unsigned(),
            self.ctime.1.cast_unsigned(),
            self.flags,
        ];
        let replies = self.replies.iter().flat_map(|reply| {
            [reply.idempotency_key, reply.generation.get() | u64::from(reply.unchanged) << 32]
        });
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, value) in words.iter_mut().zip(fixed.into_iter().chain(replies)) {
            *word = value.to_le_bytes();
        }
        bytes
    }

    /// The error names the invalid field.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, &'static str> {
        let mut header = Self {
            open: Generation::new(u64_at(bytes, 0)).ok_or("open generation")?,
            pages: u64_at(bytes, 8),
            ctime: (u64_at(bytes, 16).cast_signed(), u64_at(bytes, 24).cast_signed()),
            flags: u64_at(bytes, 32),
            ..Self::default()
        };
        for (nth, reply) in header.replies.iter_mut().enumerate() {
            let at = FIXED_BYTES + nth * REPLY_BYTES;
            let word = u64_at(bytes, at + 8);
            reply.idempotency_key = u64_at(bytes, at);
            reply.generation = Generation::new(u64::from(low_u32(word))).ok_or("generation of a reply")?;
            reply.unchanged = match word >> 32 {
                0 => false,
                1 => true,
                _ => return Err("reply"),
            };
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_64_replies_are_kept() {
        let mut header =
            JournalHeader { open: Generation::FIRST, ctime: (-1, 999), ..JournalHeader::default() };
        for key in 0..=65 {
            let generation = Generation::new(key + 1).unwrap();
            header.add_reply(CheckpointReply { idempotency_key: key, generation, unchanged: key % 2 == 0 });
        }
        let decoded = JournalHeader::decode(&header.encode()).unwrap();
        assert_eq!(decoded, header);
        assert_eq!((decoded.reply_to(0), decoded.reply_to(1)), (None, None));
        for key in 2..=65 {
            let reply = decoded.reply_to(key).unwrap();
            assert_eq!((reply.generation.get(), reply.unchanged), (key + 1, key % 2 == 0));
        }
    }

    #[test]
    fn invalid_generations_are_refused() {
        for at in [4, FIXED_BYTES + 15] {
            let mut bytes = JournalHeader::default().encode();
            bytes[at] = 1;
            assert!(JournalHeader::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
