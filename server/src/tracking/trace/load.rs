//! Loads and attaches the programs of `bpf/file_writes.bpf.c`.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_proto::units::{low_u32, to_u64};
use libbpf_rs::btf::types::Typedef;
use libbpf_rs::{Btf, Link, MapCore as _, Object, ObjectBuilder};

use super::TraceError;
use super::record::table;
use crate::probe::LoadError;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/file_writes.bpf.o"));

/// Files that can be followed at once.
pub(super) const FILES: usize = 16384;
/// Bytes of the ring buffer: 128 Ki records.
pub(super) const RING: u64 = 4 << 20;

/// Programs that show io_uring, and what the kernel must have for them.
const IO_URING: [(&str, &str); 2] =
    [("on_request", "btf_trace_io_uring_submit_req"), ("on_completion", "btf_trace_io_uring_complete")];

/// The loaded programs, and whether io_uring is among what they see.
pub(super) fn load() -> Result<(Object, bool), TraceError> {
    let btf = Btf::from_vmlinux().map_err(LoadError::Bpf)?;
    let sees_io_uring = IO_URING.iter().all(|(_, needs)| btf.type_by_name::<Typedef<'_>>(needs).is_some());
    let open = || -> Result<Object, libbpf_rs::Error> {
        let mut open = ObjectBuilder::default().name("fdmap_writes")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("files" | "followed") => map.set_max_entries(low_u32(to_u64(FILES)))?,
                Some("records") => map.set_max_entries(low_u32(RING))?,
                // The table is all that the programs have as a constant.
                Some(name) if name.ends_with(".rodata") => {
                    map.set_initial_value(bytemuck::bytes_of(&table()))?;
                }
                _ => {}
            }
        }
        for mut program in open.progs_mut() {
            if IO_URING.iter().any(|(name, _)| program.name() == *name) {
                program.set_autoload(sees_io_uring);
            }
        }
        open.load()
    };
    Ok((open().map_err(LoadError::Bpf)?, sees_io_uring))
}

/// A descriptor of the map `name`.
pub(super) fn descriptor_of(object: &Object, name: &'static str) -> Result<OwnedFd, TraceError> {
    let map = object.maps().find(|map| map.name() == name).ok_or(LoadError::Missing(name))?;
    Ok(map.as_fd().try_clone_to_owned().map_err(LoadError::Duplicate)?)
}

/// Attaches the programs that hang on something; they are detached when the links are dropped.
pub(super) fn attach(object: &Object) -> Result<Vec<Link>, TraceError> {
    let mut links = Vec::new();
    for program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        if name.starts_with("on_") && program.autoload() {
            links.push(program.attach().map_err(|error| TraceError::Attach { program: name, error })?);
        }
    }
    Ok(links)
}
