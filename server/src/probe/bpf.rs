//! The loaded BPF programs and their maps.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use bytemuck::Zeroable as _;
use fdmap_proto::units::{PageRange, low_u32, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::{MapCore as _, Object, ObjectBuilder, PrintLevel, ProgramInput};
use nix::errno::Errno;

use super::record::{
    AttributesRecord, NodeRecord, STATUS_BAD_FD, STATUS_FAULT, STATUS_LAYOUT, STATUS_OK, WalkResult,
};
use super::{ScanError, Target};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/page_state.bpf.o"));

const PROGRAM: &str = "walk_file";

/// Records of one run: about a megabyte, so that they are still in the processor's cache when they are decoded.
pub(super) const NODES: usize = 1024;
/// Records kept apart for looking again at one leaf: more than a step of the program may write.
pub(super) const REWALK_NODES: usize = 96;
/// Attributes records of one run: some blocks' worth.
pub(super) const ATTRIBUTES: usize = 256;

/// Why the probe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// libbpf or the verifier said no.
    #[error("loading the BPF program: {0:#}")]
    Bpf(#[from] libbpf_rs::Error),
    /// The object does not have what it was compiled with.
    #[error("the BPF object has no {0} as it should be")]
    Missing(&'static str),
    /// A map could not be mapped.
    #[error("mapping the BPF maps")]
    Map(#[from] fdmap_sys::SyscallError),
    /// Its descriptor could not be duplicated.
    #[error("duplicating the descriptor of the BPF program")]
    Duplicate(#[source] std::io::Error),
}

/// Does `work` and gives what libbpf had to say meanwhile. Later messages go to the log.
pub(super) fn listening<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn take() -> Vec<String> {
        std::mem::take(&mut *SAID.lock().unwrap_or_else(PoisonError::into_inner))
    }
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, text| {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push(text.trim_end().to_owned());
    })));
    take();
    let done = work();
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, text| {
        tracing::warn!("libbpf: {}", text.trim_end());
    })));
    (done, take())
}

/// A loaded program with maps of its own.
#[derive(Debug)]
pub(super) struct Bpf {
    object: Object,
    /// [`NodeRecord`]s.
    pub(super) nodes: SharedMapping,
    /// [`AttributesRecord`]s.
    pub(super) attributes: SharedMapping,
    result: SharedMapping,
}

impl Bpf {
    pub(super) fn load() -> Result<Self, LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("nodes") => map.set_max_entries(low_u32(to_u64(NODES + REWALK_NODES)))?,
                Some("attributes") => map.set_max_entries(low_u32(to_u64(ATTRIBUTES)))?,
                _ => {}
            }
        }
        let object = open.load()?;
        let nodes = map_of::<NodeRecord>(&object, "nodes", NODES + REWALK_NODES, false)?;
        let attributes = map_of::<AttributesRecord>(&object, "attributes", ATTRIBUTES, false)?;
        let result = map_of::<WalkResult>(&object, "result", 1, false)?;
        if !object.progs().any(|program| program.name() == PROGRAM) {
            return Err(LoadError::Missing(PROGRAM));
        }
        Ok(Self { object, nodes, attributes, result })
    }

    /// Walks the leaves that hold `pages`, writing node records in `records` and attributes from the first one on.
    pub(super) fn run(
        &self,
        target: &Target<'_>,
        pages: PageRange,
        records: Range<usize>,
        attributes: usize,
    ) -> Result<WalkResult, ScanError> {
        let fd = target.fd.as_raw_fd();
        let mut arguments = [
            u64::from(fd.cast_unsigned()),
            pages.start().0,
            pages.end().0 - 1,
            to_u64(records.start),
            to_u64(records.end),
            to_u64(attributes),
        ];
        let input = ProgramInput {
            context_in: Some(bytemuck::bytes_of_mut(&mut arguments)),
            ..ProgramInput::default()
        };
        let program = self.object.progs_mut().find(|program| program.name() == PROGRAM);
        let program = program.ok_or_else(|| ScanError::Run(format!("the object has no {PROGRAM}")))?;
        program.test_run(input).map_err(|error| ScanError::Run(format!("{error:#}")))?;
        let mut result = WalkResult::zeroed();
        let whole = self.result.read_at(0, bytemuck::bytes_of_mut(&mut result));
        debug_assert!(whole, "the map is as large as the result, by map_of");
        if result.status == STATUS_OK {
            Ok(result)
        } else {
            Err(ScanError::Walk { fd, why: why(result.status) })
        }
    }
}

pub(crate) const fn why(status: u32) -> &'static str {
    match status {
        STATUS_BAD_FD => "no such descriptor",
        STATUS_FAULT => "the kernel's structures could not be read",
        STATUS_LAYOUT => "this kernel's structures are not as expected",
        _ => "unknown status",
    }
}

/// Maps a BPF array of `T`.
pub(crate) fn map_of<T>(
    object: &Object,
    name: &'static str,
    entries: usize,
    writable: bool,
) -> Result<SharedMapping, LoadError> {
    let map = object.maps().find(|map| map.name() == name).ok_or(LoadError::Missing(name))?;
    // The elements of an array map are padded to 8 bytes, which every record is a multiple of.
    if to_usize(u64::from(map.value_size())) != size_of::<T>() || !size_of::<T>().is_multiple_of(8) {
        return Err(LoadError::Missing(name));
    }
    Ok(SharedMapping::shared(map.as_fd(), 0, entries * size_of::<T>(), writable)?)
}

/// A descriptor of the program `name`, which lives on without its object.
pub(crate) fn program_of(object: &Object, name: &'static str) -> Result<OwnedFd, LoadError> {
    let program = object.progs().find(|program| program.name() == name).ok_or(LoadError::Missing(name))?;
    program.as_fd().try_clone_to_owned().map_err(LoadError::Duplicate)
}

/// Runs a raw tracepoint program with these arguments; gives what it returned.
pub(crate) fn run(program: BorrowedFd<'_>, arguments: &mut [u64]) -> Result<i32, ScanError> {
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: to_u64(size_of::<libbpf_sys::bpf_test_run_opts>()),
        ctx_in: arguments.as_ptr().cast(),
        ctx_size_in: low_u32(to_u64(size_of_val(arguments))),
        ..Default::default()
    };
    // SAFETY: options says its own size, and the context that it points to is borrowed until the call is over.
    let failed = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if failed == 0 {
        Ok(options.retval.cast_signed())
    } else {
        Err(ScanError::Run(Errno::from_raw(failed.saturating_neg()).to_string()))
    }
}
