//! Mappings of the program in the service: track, untrack and detach, and restoring all of them in a new session.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};

use fdmap_client::ClientError;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{ClientMapping, MappingId, PageIndex};
use fdmap_sys::memfd::{self, MemfdKind};
use fdmap_sys::process::open_own;
use fdmap_sys::uffd::Userfaultfd;

use crate::adoption::{SelectedMemfd, adopt, adopt_again, open_mapped_file};
use crate::descriptor::{duplicate, own_pid};
use crate::mapping_table::{self, ShimMapping};
use crate::memory::page_bytes;
use crate::session::{CallFailure, Shim, inode_name};

/// Maximum number of mappings in one request.
const MAX_MAPPINGS_PER_CALL: usize = 64;

/// Handles a new mapping of the program: adopts its file and tracks writes through it.
pub fn add_mapping(shim: &mut Shim, fd: i32, mapping: &ShimMapping) {
    let Some(memfd) = SelectedMemfd::inspect(shim, fd) else { return };
    let mut mapping = ShimMapping { device: memfd.device, inode: memfd.inode, ..*mapping };
    // Another thread may close the program's descriptor.
    let Some(own_fd) = duplicate(fd) else { return };
    // hugetlb mappings end at a huge page boundary.
    let page_size = match memfd::kind(own_fd.as_fd()) {
        Ok(Some(MemfdKind::Hugetlb(bytes))) => bytes,
        _ => page_bytes(),
    };
    mapping.range.end = mapping.range.start + mapping.range.len().next_multiple_of(page_size);
    let adopted = adopt(shim, own_fd.as_fd(), &memfd);
    drop(own_fd);
    // If the table is full the mapping stays untracked; the service reports its writes as conservative.
    let Some(slot) = mapping_table::add(&mapping) else { return };
    match adopted {
        Ok(()) if shim.config.track => track(shim, &[(slot, mapping)]),
        Ok(()) => {}
        Err(failure) => {
            let name = String::from_utf8_lossy(&memfd.name);
            shim.report_refusal(format_args!("cannot adopt memfd {name:?}"), &failure);
        }
    }
}

/// Tracks mappings of one file. A refused mapping that has an id stays tracked: the previous service process passed it on to the
/// new one.
fn track(shim: &mut Shim, mappings: &[(usize, ShimMapping)]) {
    track_or_adopt(shim, mappings, true);
}

/// `may_adopt`: adopt the file again if the service does not have it.
fn track_or_adopt(shim: &mut Shim, mappings: &[(usize, ShimMapping)], may_adopt: bool) {
    for chunk in mappings.chunks(MAX_MAPPINGS_PER_CALL) {
        let Some((_, first)) = chunk.first() else { return };
        let file = inode_name(first.device, first.inode);
        match request_tracking(shim, &file, chunk) {
            Ok(ids) => {
                for ((slot, _), id) in chunk.iter().zip(ids) {
                    mapping_table::set_id(*slot, Some(id));
                }
            }
            Err(failure)
                if may_adopt && failure.code() == Some(RefusalCode::NotFound) && adopt_again(shim, first) =>
            {
                track_or_adopt(shim, chunk, false);
            }
            Err(_) if chunk.iter().all(|(_, mapping)| mapping.id.is_some()) => {}
            // Retry one by one: a mapping that cannot be tracked must not affect the others.
            Err(CallFailure::Refused(_)) if chunk.len() > 1 => {
                for mapping in chunk {
                    track_or_adopt(shim, std::slice::from_ref(mapping), may_adopt);
                }
            }
            // The program registered the range with its own userfaultfd, which takes precedence.
            Err(failure) if failure.code() == Some(RefusalCode::FailedPrecondition) => {}
            Err(failure) => shim.report_refusal(format_args!("cannot track writes to {file}"), &failure),
        }
    }
}

fn request_tracking(
    shim: &mut Shim,
    file: &FileName,
    mappings: &[(usize, ShimMapping)],
) -> Result<Vec<MappingId>, CallFailure> {
    let mappings: Vec<_> = mappings.iter().map(|(_, mapping)| client_mapping(mapping)).collect();
    shim.call(|service| {
        let untrackable =
            |_| ClientError::Untrackable { file: file.to_string(), reason: "there is no userfaultfd" };
        let uffd = Userfaultfd::create().map_err(untrackable)?;
        let (pagemap, maps) = (open_own("pagemap")?, open_own("maps")?);
        let (pagemap, maps) = (pagemap.as_ref().map(File::as_fd), maps.as_ref().map(File::as_fd));
        service.track(file, uffd.as_fd(), pagemap, maps, &mappings)
    })
}

/// Tracks mappings of several files.
fn track_by_file(shim: &mut Shim, mappings: &[(usize, ShimMapping)]) {
    let mut mappings = mappings.to_vec();
    mappings.sort_by_key(|(_, mapping)| (mapping.device, mapping.inode));
    for of_file in mappings.chunk_by(|(_, a), (_, b)| (a.device, a.inode) == (b.device, b.inode)) {
        track(shim, of_file);
    }
}

/// Tracks the mappings in the table that have an id of `detached`, and `others`.
pub fn retrack(shim: &mut Shim, detached: &[ShimMapping], mut others: Vec<(usize, ShimMapping)>) {
    let pid = own_pid();
    for (slot, mapping) in mapping_table::all() {
        if mapping.pid == pid && mapping.id.is_some() && detached.iter().any(|old| old.id == mapping.id) {
            mapping_table::set_id(slot, None);
            others.push((slot, ShimMapping { id: None, ..mapping }));
        }
    }
    if shim.config.track {
        track_by_file(shim, &others);
    }
}

fn client_mapping(mapping: &ShimMapping) -> ClientMapping {
    ClientMapping {
        address: mapping.range.start,
        length_bytes: mapping.range.len(),
        first_page: PageIndex(mapping.offset / page_bytes()),
    }
}

/// Untracks mappings with a last harvest, before they are unmapped. They must be frozen.
pub fn untrack(shim: &mut Shim, mappings: &[ShimMapping]) {
    for_each_file(mappings, |file, ids| {
        // On failure the service reports all their pages as written.
        let _ = shim.call(|service| service.untrack(file, ids));
    });
}

/// Detaches mappings that the program keeps using; writes through them are not observed afterwards. Skips inherited mappings, whose
/// ids the service has changed in this process.
pub fn detach(shim: &mut Shim, mappings: &[ShimMapping]) {
    let pid = own_pid();
    let own: Vec<_> = mappings.iter().filter(|mapping| mapping.pid == pid).copied().collect();
    for_each_file(&own, |file, ids| {
        let _ = shim.call(|service| service.detach(None, file, ids));
    });
}

/// Detaches mappings inherited by fork. Their ids are unknown here, so all mappings of their files in this process are detached, and
/// the process's own mappings among them, except `mappings`, are tracked again.
pub fn detach_inherited(shim: &mut Shim, mappings: &[ShimMapping]) {
    let pid = own_pid();
    let mut files: Vec<_> = mappings
        .iter()
        .filter(|mapping| mapping.pid != pid)
        .map(|mapping| (mapping.device, mapping.inode))
        .collect();
    files.sort_unstable();
    files.dedup();
    for (device, inode) in files {
        let file = inode_name(device, inode);
        if shim.call(|service| service.detach(None, &file, &[])).is_ok() {
            let others = mapping_table::all().into_iter().map(|(_, mapping)| mapping);
            let others = others.filter(|mapping| (mapping.device, mapping.inode) == (device, inode));
            let others: Vec<_> = others.filter(|mapping| !mappings.contains(mapping)).collect();
            retrack(shim, &others, Vec::new());
        }
    }
}

fn for_each_file(mappings: &[ShimMapping], mut request: impl FnMut(&FileName, &[MappingId])) {
    let mut mappings: Vec<_> = mappings.iter().filter(|mapping| mapping.id.is_some()).collect();
    mappings.sort_by_key(|mapping| (mapping.device, mapping.inode));
    for of_file in mappings.chunk_by(|a, b| (a.device, a.inode) == (b.device, b.inode)) {
        let file = inode_name(of_file[0].device, of_file[0].inode);
        let ids: Vec<_> = of_file.iter().filter_map(|mapping| mapping.id).collect();
        for ids in ids.chunks(MAX_MAPPINGS_PER_CALL) {
            request(&file, ids);
        }
    }
}

/// Adopts the files of all mappings of this process and tracks the mappings, in a session with a service process that may know none
/// of them.
pub fn restore_session(shim: &mut Shim) {
    let pid = own_pid();
    let mut mappings: Vec<_> =
        mapping_table::all().into_iter().filter(|(_, mapping)| mapping.pid == pid).collect();
    mappings.sort_by_key(|(_, mapping)| (mapping.device, mapping.inode));
    for of_file in mappings.chunk_by(|(_, a), (_, b)| (a.device, a.inode) == (b.device, b.inode)) {
        let (_, first) = &of_file[0];
        let Some(fd) = open_mapped_file(first) else { continue };
        let Some(memfd) = SelectedMemfd::inspect(shim, fd.as_raw_fd()) else { continue };
        match adopt(shim, fd.as_fd(), &memfd) {
            Ok(()) if shim.config.track => track(shim, of_file),
            Ok(()) => {}
            Err(failure) => {
                let name = inode_name(first.device, first.inode);
                shim.report_refusal(format_args!("cannot adopt {name} again"), &failure);
            }
        }
    }
}
