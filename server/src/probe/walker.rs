//! A loaded `walk_file` program (`bpf/page_state.bpf.c`) with its own maps.

use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use bytemuck::Zeroable as _;
use fdmap_proto::units::{PageRange, low_u32, to_u64};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::ObjectBuilder;

use super::interface::{ScanError, ScanTarget};
use crate::bpf::records::{AttributesRecord, NodeRecord, Status, WalkResult};
use crate::bpf::{LoadError, map_array, program_fd, run, status_text};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/page_state.bpf.o"));

/// Node records of one run: about a megabyte, which is still in the processor's cache when it is decoded.
pub(super) const MAX_NODES: usize = 1024;
/// Node records that are reserved for walking a single leaf again. One step of the program writes fewer.
pub(super) const MAX_REWALK_NODES: usize = 96;
/// Attributes records of one run: several blocks.
pub(super) const MAX_ATTRIBUTES: usize = 256;

#[derive(Debug)]
pub(super) struct Walker {
    walk_file: OwnedFd,
    /// [`NodeRecord`]s.
    pub(super) nodes: SharedMapping,
    /// [`AttributesRecord`]s.
    pub(super) attributes: SharedMapping,
    result: SharedMapping,
}

impl Walker {
    pub(super) fn load() -> Result<Self, LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("nodes") => map.set_max_entries(low_u32(to_u64(MAX_NODES + MAX_REWALK_NODES)))?,
                Some("attributes") => map.set_max_entries(low_u32(to_u64(MAX_ATTRIBUTES)))?,
                _ => {}
            }
        }
        let object = open.load()?;
        let nodes = map_array::<NodeRecord>(&object, "nodes", MAX_NODES + MAX_REWALK_NODES, false)?;
        let attributes = map_array::<AttributesRecord>(&object, "attributes", MAX_ATTRIBUTES, false)?;
        let result = map_array::<WalkResult>(&object, "result", 1, false)?;
        Ok(Self { walk_file: program_fd(&object, "walk_file")?, nodes, attributes, result })
    }

    /// Walks the leaves that contain `pages`. Writes the node records in `records` and the first `attributes`
    /// attributes records.
    pub(super) fn run(
        &self,
        target: &ScanTarget<'_>,
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
        run(self.walk_file.as_fd(), &mut arguments).map_err(|errno| ScanError::Run(errno.to_string()))?;
        let mut result = WalkResult::zeroed();
        let whole = self.result.read_at(0, bytemuck::bytes_of_mut(&mut result));
        debug_assert!(whole, "map_array checked that the map holds a result");
        if result.status == Status::FDMAP_STATUS_OK {
            Ok(result)
        } else {
            Err(ScanError::Walk { fd, why: status_text(result.status) })
        }
    }
}
