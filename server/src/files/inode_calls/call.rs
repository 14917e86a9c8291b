//! Calls that change an inode, and their results, as they pass between the service and a helper. Pure.

use bytemuck::{Pod, Zeroable};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError};

/// What the service asks of a helper. Each but the last two comes with a descriptor of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InodeCall {
    /// Takes ownership of the inode. [`InodeCall::Keep`] must follow, or else the helper undoes it.
    Take,
    /// Undoes an earlier take.
    Restore(Ownership),
    /// Sets the size, in bytes.
    Resize(u64),
    /// Adds `F_SEAL_*` bits.
    AddSeals(u32),
    /// The take before it counts. Has no answer.
    Keep,
    /// The take before it does not count.
    Undo,
}

/// A helper's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    /// The ownership before the take.
    Taken(Ownership),
    Failed(SyscallError),
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawCall {
    /// A size or seals.
    number: u64,
    ownership: [u32; 3],
    kind: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RawAnswer {
    kind: u32,
    errno: i32,
    ownership: [u32; 3],
}

const TAKE: u32 = 1;
const RESTORE: u32 = 2;
const RESIZE: u32 = 3;
const ADD_SEALS: u32 = 4;
const KEEP: u32 = 5;
const UNDO: u32 = 6;

const DONE: u32 = 1;
const TAKEN: u32 = 2;
const FAILED: u32 = 3;

/// Length of an encoded call.
pub(super) const CALL_BYTES: usize = size_of::<RawCall>();
/// Text of a failed system call. A longer one is cut.
const MAX_TEXT_BYTES: usize = 200;
/// Longer than any answer.
pub(super) const MAX_ANSWER_BYTES: usize = size_of::<RawAnswer>() + MAX_TEXT_BYTES;

fn words(ownership: Ownership) -> [u32; 3] {
    ownership.parts().into()
}

const fn ownership([uid, gid, mode]: [u32; 3]) -> Ownership {
    Ownership::new(uid, gid, mode)
}

impl InodeCall {
    pub(super) fn encode(self) -> [u8; CALL_BYTES] {
        let none = [0; 3];
        let (kind, number, ownership) = match self {
            Self::Take => (TAKE, 0, none),
            Self::Restore(ownership) => (RESTORE, 0, words(ownership)),
            Self::Resize(bytes) => (RESIZE, bytes, none),
            Self::AddSeals(seals) => (ADD_SEALS, seals.into(), none),
            Self::Keep => (KEEP, 0, none),
            Self::Undo => (UNDO, 0, none),
        };
        bytemuck::cast(RawCall { number, ownership, kind })
    }

    /// `None` for bytes that are no call.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let RawCall { number, ownership: words, kind } = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        Some(match kind {
            TAKE => Self::Take,
            RESTORE => Self::Restore(ownership(words)),
            RESIZE => Self::Resize(number),
            ADD_SEALS => Self::AddSeals(u32::try_from(number).ok()?),
            KEEP => Self::Keep,
            UNDO => Self::Undo,
            _ => return None,
        })
    }
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let none = [0; 3];
        let (kind, errno, ownership, text) = match self {
            Self::Done => (DONE, 0, none, ""),
            Self::Taken(before) => (TAKEN, 0, words(*before), ""),
            Self::Failed(SyscallError { call, errno }) => (FAILED, *errno as i32, none, call.as_str()),
        };
        let text = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
        [bytemuck::bytes_of(&RawAnswer { kind, errno, ownership }), text.as_bytes()].concat()
    }

    /// `None` for bytes that are no answer.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (raw, text) = bytes.split_at_checked(size_of::<RawAnswer>())?;
        let RawAnswer { kind, errno, ownership: words } = bytemuck::try_pod_read_unaligned(raw).ok()?;
        Some(match kind {
            DONE => Self::Done,
            TAKEN => Self::Taken(ownership(words)),
            FAILED => {
                let call = String::from_utf8_lossy(text).into_owned();
                Self::Failed(SyscallError { call, errno: Errno::from_raw(errno) })
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ownerships() -> impl Strategy<Value = Ownership> {
        any::<(u32, u32, u32)>().prop_map(|(uid, gid, mode)| Ownership::new(uid, gid, mode))
    }

    fn calls() -> impl Strategy<Value = InodeCall> {
        prop_oneof![
            Just(InodeCall::Take),
            ownerships().prop_map(InodeCall::Restore),
            any::<u64>().prop_map(InodeCall::Resize),
            any::<u32>().prop_map(InodeCall::AddSeals),
            Just(InodeCall::Keep),
            Just(InodeCall::Undo),
        ]
    }

    fn answers() -> impl Strategy<Value = Answer> {
        let failed = |(errno, call)| Answer::Failed(SyscallError { call, errno: Errno::from_raw(errno) });
        prop_oneof![
            Just(Answer::Done),
            ownerships().prop_map(Answer::Taken),
            (1..100_i32, "[a-z ü]{0,100}").prop_map(failed),
        ]
    }

    proptest! {
        #[test]
        fn calls_are_decoded(call in calls()) {
            prop_assert_eq!(InodeCall::decode(&call.encode()), Some(call));
        }

        #[test]
        fn answers_are_decoded(answer in answers()) {
            let encoded = answer.encode();
            prop_assert!(encoded.len() <= MAX_ANSWER_BYTES);
            prop_assert_eq!(Answer::decode(&encoded), Some(answer));
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = (InodeCall::decode(&bytes), Answer::decode(&bytes));
        }
    }

    #[test]
    fn long_text_of_a_failure_is_cut() {
        let failed = Answer::Failed(SyscallError { call: "ü".repeat(500), errno: Errno::EPERM });
        let encoded = failed.encode();
        assert_eq!(encoded.len(), MAX_ANSWER_BYTES);
        let Some(Answer::Failed(error)) = Answer::decode(&encoded) else { panic!("not decoded") };
        assert_eq!((error.call, error.errno), ("ü".repeat(MAX_TEXT_BYTES / 2), Errno::EPERM));
    }
}
