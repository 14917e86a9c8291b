//! What changes with every checkpoint.

use fdmap_proto::units::{Generation, low_u32};

use super::layout::{HOT_STRIDE, u64_at};

/// Answers to checkpoints that are remembered.
pub const ANSWERS: usize = 64;
/// Bytes before the answers.
const FIXED: usize = 40;
/// Bytes of an answer.
const ANSWER: usize = 16;
/// Bytes of a [`Hot`] in the journal.
pub(super) const HOT_BYTES: usize = FIXED + ANSWERS * ANSWER;

const _: () = assert!(fdmap_proto::units::to_u64(HOT_BYTES) <= HOT_STRIDE);

/// What of a file's state changes with every checkpoint: small, and written whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hot {
    /// The open generation; [`Generation::NONE`] in a journal that was just made.
    pub open: Generation,
    /// The file's size in pages.
    pub pages: u64,
    /// When the inode was last changed, in seconds and nanoseconds.
    pub ctime: (i64, i64),
    /// Whatever its user keeps here.
    pub flags: u64,
    /// The answers that were given last, the latest one first.
    pub answered: [Answered; ANSWERS],
}

/// The answer to a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// The request's id; 0: there was none.
    pub request: u64,
    /// The generation that was told.
    pub generation: Generation,
    /// Nothing had been written.
    pub unchanged: bool,
}

impl Default for Hot {
    fn default() -> Self {
        Self {
            open: Generation::NONE,
            pages: 0,
            ctime: (0, 0),
            flags: 0,
            answered: [Answered::default(); ANSWERS],
        }
    }
}

impl Hot {
    /// Remembers an answer, in place of the one of 64 that is oldest. One to a request without id is not remembered.
    pub fn remember(&mut self, answer: Answered) {
        if answer.request != 0 {
            self.answered.rotate_right(1);
            self.answered[0] = answer;
        }
    }

    /// The answer to the request of this id, if it is one of the last 64.
    #[must_use]
    pub fn answer(&self, request: u64) -> Option<Answered> {
        self.answered.iter().copied().find(|answer| request != 0 && answer.request == request)
    }

    pub(super) fn encode(&self) -> [u8; HOT_BYTES] {
        let mut bytes = [0; HOT_BYTES];
        let fixed = [
            self.open.get(),
            self.pages,
            self.ctime.0.cast_unsigned(),
            self.ctime.1.cast_unsigned(),
            self.flags,
        ];
        let answers = self
            .answered
            .iter()
            .flat_map(|answer| [answer.request, answer.generation.get() | u64::from(answer.unchanged) << 32]);
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, value) in words.iter_mut().zip(fixed.into_iter().chain(answers)) {
            *word = value.to_le_bytes();
        }
        bytes
    }

    /// `Err` names what means nothing.
    pub(super) fn decode(bytes: &[u8; HOT_BYTES]) -> Result<Self, &'static str> {
        let mut hot = Self {
            open: Generation::new(u64_at(bytes, 0)).ok_or("the open generation")?,
            pages: u64_at(bytes, 8),
            ctime: (u64_at(bytes, 16).cast_signed(), u64_at(bytes, 24).cast_signed()),
            flags: u64_at(bytes, 32),
            ..Self::default()
        };
        for (nth, answer) in hot.answered.iter_mut().enumerate() {
            let at = FIXED + nth * ANSWER;
            let told = u64_at(bytes, at + 8);
            answer.request = u64_at(bytes, at);
            answer.generation =
                Generation::new(u64::from(low_u32(told))).ok_or("the generation of an answer")?;
            answer.unchanged = match told >> 32 {
                0 => false,
                1 => true,
                _ => return Err("an answer"),
            };
        }
        Ok(hot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_64_answers_are_remembered() {
        let mut hot = Hot { open: Generation::FIRST, ctime: (-1, 999), ..Hot::default() };
        for request in 0..=65 {
            let generation = Generation::new(request + 1).unwrap();
            hot.remember(Answered { request, generation, unchanged: request % 2 == 0 });
        }
        let decoded = Hot::decode(&hot.encode()).unwrap();
        assert_eq!(decoded, hot);
        assert_eq!((decoded.answer(0), decoded.answer(1)), (None, None));
        for request in 2..=65 {
            let answer = decoded.answer(request).unwrap();
            assert_eq!((answer.generation.get(), answer.unchanged), (request + 1, request % 2 == 0));
        }
    }

    #[test]
    fn what_no_service_wrote_is_refused() {
        for at in [4, FIXED + 15] {
            let mut bytes = Hot::default().encode();
            bytes[at] = 1;
            assert!(Hot::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
