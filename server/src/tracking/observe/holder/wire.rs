//! The protocol between the service and a holder. Both ends are the same program.
//!
//! The control socket (`SOCK_SEQPACKET`) carries [`Control`], with descriptors. A lane (`SOCK_STREAM`) carries one call at a time,
//! and its result: 8 bytes with the length of a message, to which the descriptors belong, and the message.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bytemuck::{Pod, Zeroable};
use fdmap_proto::units::{PageIndex, PageRange, PageSize, to_u64, to_usize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::{Errno, SyscallError, scm};
use prost::Message;

use super::call::{HarvestedMapping, HarvestedMappings, SpaceCall, SpaceResult};
use crate::random::random_id;
use crate::tracking::mapping::{MappedFile, MappingExtent, VmaExtent};

/// Names the descriptors of an address space in a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SpaceId(pub(super) u64);

impl SpaceId {
    /// A random id, so that a new holder knows each address space by the id that it had before.
    pub(super) fn draw() -> Self {
        random_id(|id| Some(Self(id)))
    }
}

/// The kernel queues so many bytes of a stream as a whole, or none.
const WHOLE_BYTES: usize = 4096;

/// The number of an answer that is neither yes (1) nor no (0).
const UNKNOWN: u32 = 2;

/// A message to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// With a userfaultfd, and then a pagemap and maps if they are known: holds them, instead of those of an earlier version.
    Hold(SpaceId, u64),
    /// With a userfaultfd, whose last copy may be this one, and pipes: closes the userfaultfd, and all descriptors of the address
    /// space, when the pipes have ended. True: the first pipe is closed after that instead, to acknowledge it.
    Release(SpaceId, bool),
    /// With a socket: makes the calls that arrive there.
    Lane,
    /// With a program: excludes its own calls from those that are counted, by this name.
    Exclude(u64),
    /// Ends when every userfaultfd that was released is closed, unless another message follows before.
    Quit,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Frame {
    kind: u64,
    id: u64,
    version: u64,
}

impl Control {
    pub(super) fn send(self, socket: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        let (kind, id, version) = match self {
            Self::Hold(SpaceId(id), version) => (1, id, version),
            Self::Release(SpaceId(id), acknowledged) => (2, id, acknowledged.into()),
            Self::Lane => (3, 0, 0),
            Self::Exclude(name) => (4, name, 0),
            Self::Quit => (5, 0, 0),
        };
        scm::send(socket, bytemuck::bytes_of(&Frame { kind, id, version }), fds)
    }

    /// Receives a message, and its descriptors; `None` if none is queued.
    ///
    /// # Errors
    /// `recvmsg`; `EPIPE` if the service has closed the socket, or sent no valid message.
    pub(super) fn receive(socket: BorrowedFd<'_>) -> Result<Option<(Self, Vec<OwnedFd>)>, SyscallError> {
        let mut frame = Frame::zeroed();
        let ended = || SyscallError { call: "recvmsg on the control socket".to_owned(), errno: Errno::EPIPE };
        let packet = match scm::receive(socket, bytemuck::bytes_of_mut(&mut frame)) {
            Err(SyscallError { errno: Errno::EAGAIN, .. }) => return Ok(None),
            received => received?.ok_or_else(ended)?,
        };
        let id = SpaceId(frame.id);
        let control = match frame.kind {
            1 => Self::Hold(id, frame.version),
            2 => Self::Release(id, frame.version != 0),
            3 => Self::Lane,
            4 => Self::Exclude(frame.id),
            5 => Self::Quit,
            _ => return Err(ended()),
        };
        Ok(Some((control, packet.descriptors)))
    }
}

/// Writes a message to a lane. Most are sent by one call, as the other end waits for the rest of one that has begun: a holder that is stopped
/// between two calls would delay it.
pub(super) fn write_frame(
    mut lane: &UnixStream,
    message: &impl Message,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = message.encode_to_vec();
    let frame = [&to_u64(bytes.len()).to_ne_bytes()[..], &bytes].concat();
    let (whole, rest) = frame.split_at(frame.len().min(WHOLE_BYTES));
    scm::send(lane.as_fd(), whole, fds)?;
    lane.write_all(rest)
}

/// Reads a message from a lane.
pub(super) fn read_frame<M: Message + Default>(mut lane: &UnixStream) -> io::Result<(M, Vec<OwnedFd>)> {
    let mut length = [0; 8];
    let packet = scm::receive(lane.as_fd(), &mut length)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    lane.read_exact(&mut length[packet.len..])?;
    let mut bytes = vec![0; to_usize(u64::from_ne_bytes(length))];
    lane.read_exact(&mut bytes)?;
    Ok((M::decode(&*bytes)?, packet.descriptors))
}

/// A [`SpaceCall`].
#[derive(Clone, PartialEq, Message)]
pub(super) struct CallMessage {
    #[prost(fixed64, tag = "1")]
    pub(super) id: u64,
    #[prost(uint32, tag = "2")]
    kind: u32,
    /// Device, inode, size of a page in bytes, 1 for hugetlb.
    #[prost(fixed64, repeated, tag = "3")]
    file: Vec<u64>,
    #[prost(message, repeated, tag = "4")]
    mappings: Vec<Words>,
    #[prost(message, optional, tag = "5")]
    ranges: Option<Words>,
    #[prost(uint32, tag = "6")]
    number: u32,
    /// Of the descriptors that the call needs.
    #[prost(fixed64, tag = "7")]
    pub(super) version: u64,
}

/// Numbers: start and end of ranges, or start, end and first page of extents.
#[derive(Clone, PartialEq, Message)]
struct Words {
    #[prost(fixed64, repeated, tag = "1")]
    words: Vec<u64>,
}

/// A [`SpaceResult`], or that a lane is ready.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ResultMessage {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(message, repeated, tag = "2")]
    lists: Vec<Words>,
    /// Of each mapping: the pages that are lost.
    #[prost(message, repeated, tag = "3")]
    lost: Vec<Words>,
    #[prost(message, optional, tag = "4")]
    written: Option<Words>,
    #[prost(uint32, tag = "5")]
    number: u32,
    #[prost(string, tag = "6")]
    call: String,
    #[prost(int32, tag = "7")]
    errno: i32,
}

impl CallMessage {
    pub(super) fn new(SpaceId(id): SpaceId, version: u64, call: &SpaceCall) -> Self {
        let message = Self { id, version, ..Self::default() };
        match call {
            SpaceCall::Open { pid } => Self { kind: 1, number: *pid, ..message },
            SpaceCall::FindVmas { file, extents, registered } => {
                let mappings = vec![extent_words(extents)];
                Self { kind: 2, file: file_words(*file), mappings, number: (*registered).into(), ..message }
            }
            SpaceCall::FindWritable { file } => Self { kind: 3, file: file_words(*file), ..message },
            SpaceCall::Harvest { file, mappings, guarded } => {
                let mappings = mappings.iter().map(|extents| extent_words(extents)).collect();
                let ranges = Some(range_words(guarded));
                Self { kind: 4, file: file_words(*file), mappings, ranges, ..message }
            }
            SpaceCall::Register { ranges } => Self { kind: 5, ranges: Some(range_words(ranges)), ..message },
            SpaceCall::Unregister { ranges } => {
                Self { kind: 6, ranges: Some(range_words(ranges)), ..message }
            }
            SpaceCall::Unprotect { ranges } => Self { kind: 7, ranges: Some(range_words(ranges)), ..message },
            SpaceCall::IsAlive => Self { kind: 8, ..message },
        }
    }

    /// `None` if it is not what [`Self::new`] returned.
    pub(super) fn call(self) -> Option<SpaceCall> {
        let ranges = || self.ranges.as_ref().map(|words| ranges_of(&words.words)).unwrap_or_default();
        let mut mappings = self.mappings.iter().map(|words| extents_of(&words.words));
        let file = || file_of(&self.file);
        Some(match self.kind {
            1 => SpaceCall::Open { pid: self.number },
            2 => {
                let (extents, registered) = (mappings.next()?, self.number != 0);
                SpaceCall::FindVmas { file: file()?, extents, registered }
            }
            3 => SpaceCall::FindWritable { file: file()? },
            4 => SpaceCall::Harvest { file: file()?, mappings: mappings.collect(), guarded: ranges() },
            5 => SpaceCall::Register { ranges: ranges() },
            6 => SpaceCall::Unregister { ranges: ranges() },
            7 => SpaceCall::Unprotect { ranges: ranges() },
            8 => SpaceCall::IsAlive,
            _ => return None,
        })
    }
}

impl ResultMessage {
    /// The first message of a lane. `thread`: the thread that makes its calls; `counted`: why its calls are not excluded.
    pub(super) fn ready(thread: u32, counted: Option<Errno>) -> Self {
        Self { number: thread, errno: counted.map_or(0, |errno| errno as i32), ..Self::default() }
    }

    /// Instead of [`Self::ready`]: no thread can be started for the lane. No thread has the id 0.
    pub(super) fn no_thread() -> Self {
        Self::ready(0, None)
    }

    /// The parameters of [`Self::ready`]; `None` after [`Self::no_thread`].
    pub(super) fn lane(&self) -> Option<(u32, Option<Errno>)> {
        let counted = (self.errno != 0).then(|| Errno::from_raw(self.errno));
        (self.number != 0).then_some((self.number, counted))
    }

    pub(super) fn new(result: SpaceResult) -> Self {
        match result {
            SpaceResult::Done => Self { kind: 1, ..Self::default() },
            SpaceResult::Vmas(lists) => {
                Self { kind: 2, lists: lists.iter().map(|vmas| vma_words(vmas)).collect(), ..Self::default() }
            }
            SpaceResult::Writable(ranges) => {
                Self { kind: 3, lists: vec![range_words(&ranges)], ..Self::default() }
            }
            SpaceResult::Harvested(HarvestedMappings { written, mappings }) => Self {
                kind: 4,
                written: Some(page_words(&written)),
                lists: mappings.iter().map(|mapping| extent_words(&mapping.mapped)).collect(),
                lost: mappings.iter().map(|mapping| page_words(&mapping.lost)).collect(),
                ..Self::default()
            },
            SpaceResult::Refused { at, error } => {
                Self { kind: 5, number: u32::try_from(at).unwrap_or(u32::MAX), ..Self::of_error(error) }
            }
            SpaceResult::Alive(alive) => {
                Self { kind: 6, number: alive.map_or(UNKNOWN, u32::from), ..Self::default() }
            }
            SpaceResult::Failed(error) => Self { kind: 7, ..Self::of_error(error) },
        }
    }

    fn of_error(SyscallError { call, errno }: SyscallError) -> Self {
        Self { call, errno: errno as i32, ..Self::default() }
    }

    /// `None` if it is not what [`Self::new`] returned.
    pub(super) fn result(self) -> Option<SpaceResult> {
        let mut lists = self.lists.iter();
        let error = || SyscallError { call: self.call.clone(), errno: Errno::from_raw(self.errno) };
        Some(match self.kind {
            1 => SpaceResult::Done,
            2 => SpaceResult::Vmas(lists.map(|words| vmas_of(&words.words)).collect()),
            3 => SpaceResult::Writable(ranges_of(&lists.next()?.words)),
            4 => {
                let mapping = |(mapped, lost): (&Words, &Words)| HarvestedMapping {
                    mapped: extents_of(&mapped.words),
                    lost: pages_of(&lost.words),
                };
                let mappings = lists.zip(&self.lost).map(mapping).collect();
                SpaceResult::Harvested(HarvestedMappings {
                    written: pages_of(&self.written?.words),
                    mappings,
                })
            }
            5 => SpaceResult::Refused { at: to_usize(self.number.into()), error: error() },
            6 => SpaceResult::Alive((self.number != UNKNOWN).then_some(self.number != 0)),
            7 => SpaceResult::Failed(error()),
            _ => return None,
        })
    }
}

fn file_words(file: MappedFile) -> Vec<u64> {
    vec![file.device, file.inode, file.page_size.bytes(), file.hugetlb.into()]
}

fn file_of(words: &[u64]) -> Option<MappedFile> {
    let &[device, inode, bytes, hugetlb] = words else { return None };
    Some(MappedFile { device, inode, page_size: PageSize::new(bytes)?, hugetlb: hugetlb != 0 })
}

fn range_words(ranges: &[AddressRange]) -> Words {
    Words { words: ranges.iter().flat_map(|range| [range.start, range.end]).collect() }
}

fn ranges_of(words: &[u64]) -> Vec<AddressRange> {
    let (pairs, _) = words.as_chunks();
    pairs.iter().map(|&[start, end]| AddressRange { start, end }).collect()
}

fn page_words(pages: &[PageRange]) -> Words {
    Words { words: pages.iter().flat_map(|pages| [pages.start().0, pages.len()]).collect() }
}

fn pages_of(words: &[u64]) -> Vec<PageRange> {
    let (pairs, _) = words.as_chunks();
    pairs.iter().map(|&[first, pages]| PageRange::at(PageIndex(first), pages)).collect()
}

fn extent_words(extents: &[MappingExtent]) -> Words {
    let words = |extent: &MappingExtent| [extent.range.start, extent.range.end, extent.first_page.0];
    Words { words: extents.iter().flat_map(words).collect() }
}

fn extents_of(words: &[u64]) -> Vec<MappingExtent> {
    let (triples, _) = words.as_chunks();
    let extent = |&[start, end, first]: &[u64; 3]| MappingExtent {
        range: AddressRange { start, end },
        first_page: PageIndex(first),
    };
    triples.iter().map(extent).collect()
}

fn vma_words(vmas: &[VmaExtent]) -> Words {
    let words = |VmaExtent { extent, vma }: &VmaExtent| {
        [extent.range.start, extent.range.end, extent.first_page.0, vma.start, vma.end]
    };
    Words { words: vmas.iter().flat_map(words).collect() }
}

fn vmas_of(words: &[u64]) -> Vec<VmaExtent> {
    let (parts, _) = words.as_chunks();
    let vma = |&[start, end, first, vma_start, vma_end]: &[u64; 5]| VmaExtent {
        extent: MappingExtent { range: AddressRange { start, end }, first_page: PageIndex(first) },
        vma: AddressRange { start: vma_start, end: vma_end },
    };
    parts.iter().map(vma).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: MappedFile = MappedFile {
        device: 7,
        inode: u64::MAX,
        page_size: match PageSize::new(4096) {
            Some(size) => size,
            None => panic!("4096 is a page size"),
        },
        hugetlb: true,
    };

    const fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    const fn extent(start: u64, end: u64, first: u64) -> MappingExtent {
        MappingExtent { range: range(start, end), first_page: PageIndex(first) }
    }

    #[test]
    fn message_of_any_length_arrives_with_its_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        for ranges in [0, 1, 100, 20_000] {
            let range = AddressRange { start: 4096, end: 8192 };
            let call = SpaceCall::Unregister { ranges: vec![range; ranges] };
            let sent = CallMessage::new(SpaceId(7), 9, &call);
            let (received, descriptors) = std::thread::scope(|scope| {
                scope.spawn(|| write_frame(&theirs, &sent, &[theirs.as_fd()]).unwrap());
                read_frame::<CallMessage>(&ours).unwrap()
            });
            assert_eq!((received.call(), descriptors.len()), (Some(call), 1), "{ranges} ranges");
        }
    }

    #[test]
    fn every_call_survives_its_encoding() {
        let extents = vec![extent(4096, 8192, 3), extent(1 << 47, 1 << 48, u64::MAX)];
        let ranges = vec![range(1, 2), range(3, u64::MAX)];
        for call in [
            SpaceCall::Open { pid: 77 },
            SpaceCall::FindVmas { file: FILE, extents: extents.clone(), registered: true },
            SpaceCall::FindVmas { file: FILE, extents: Vec::new(), registered: false },
            SpaceCall::FindWritable { file: FILE },
            SpaceCall::Harvest { file: FILE, mappings: vec![extents, Vec::new()], guarded: ranges.clone() },
            SpaceCall::Register { ranges: ranges.clone() },
            SpaceCall::Unregister { ranges: ranges.clone() },
            SpaceCall::Unprotect { ranges },
            SpaceCall::IsAlive,
        ] {
            let message = CallMessage::new(SpaceId(5), 9, &call);
            let decoded = CallMessage::decode(&*message.encode_to_vec()).unwrap();
            assert_eq!((decoded.id, decoded.version), (5, 9));
            assert_eq!(decoded.call(), Some(call));
        }
        assert_eq!(CallMessage::default().call(), None);
    }

    #[test]
    fn every_result_survives_its_encoding() {
        let pages = |first, pages| PageRange::at(PageIndex(first), pages);
        let error = || SyscallError { call: "ioctl".to_owned(), errno: Errno::EBUSY };
        let vma = VmaExtent { extent: extent(1, 2, 3), vma: range(0, 9) };
        let mapping = HarvestedMapping { mapped: vec![extent(1, 2, 3)], lost: vec![pages(8, 9)] };
        let mappings = vec![mapping, HarvestedMapping::default()];
        for result in [
            SpaceResult::Done,
            SpaceResult::Vmas(vec![vec![vma], Vec::new()]),
            SpaceResult::Writable(vec![range(5, 6)]),
            SpaceResult::Harvested(HarvestedMappings { written: vec![pages(0, 1), pages(4, 2)], mappings }),
            SpaceResult::Harvested(HarvestedMappings::default()),
            SpaceResult::Refused { at: 3, error: error() },
            SpaceResult::Alive(Some(true)),
            SpaceResult::Alive(Some(false)),
            SpaceResult::Alive(None),
            SpaceResult::Failed(error()),
        ] {
            let message = ResultMessage::new(result.clone());
            let decoded = ResultMessage::decode(&*message.encode_to_vec()).unwrap();
            assert_eq!(decoded.result(), Some(result));
        }
        let ready = ResultMessage::ready(1, Some(Errno::EPERM));
        assert_eq!((ready.lane(), ready.result()), (Some((1, Some(Errno::EPERM))), None));
        assert_eq!(ResultMessage::no_thread().lane(), None);
    }
}
