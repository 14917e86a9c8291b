//! Loads the programs of `bpf/file_writes.bpf.c`.

use fdmap_proto::units::{low_u32, to_u64};
use libbpf_rs::btf::types::Typedef;
use libbpf_rs::{Btf, Object, ObjectBuilder};

use super::call_table::call_table;
use crate::bpf::{LoadError, TraceError};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/file_writes.bpf.o"));

/// Files that can be followed at the same time.
pub(super) const MAX_FILES: usize = 16384;
/// Size of the ring buffer in bytes: room for 128 Ki records.
pub(super) const RING_BYTES: u64 = 4 << 20;

/// Programs that observe io_uring, and the kernel's tracepoint type that each needs.
const IO_URING: [(&str, &str); 3] = [
    ("observe_request", "btf_trace_io_uring_submit_req"),
    ("on_completion", "btf_trace_io_uring_complete"),
    ("on_canceled_request", "btf_trace_io_uring_fail_link"),
];

/// Loads the programs. Also returns whether they observe io_uring.
pub(super) fn load() -> Result<(Object, bool), TraceError> {
    let btf = Btf::from_vmlinux().map_err(LoadError::Libbpf)?;
    let observes_io_uring =
        IO_URING.iter().all(|(_, needs)| btf.type_by_name::<Typedef<'_>>(needs).is_some());
    let open = || -> Result<Object, libbpf_rs::Error> {
        let mut open = ObjectBuilder::default().name("fdmap_writes")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("files" | "followed") => map.set_max_entries(low_u32(to_u64(MAX_FILES)))?,
                Some("records") => map.set_max_entries(low_u32(RING_BYTES))?,
                // The system call table is the only constant of the programs.
                Some(name) if name.ends_with(".rodata") => {
                    map.set_initial_value(bytemuck::cast_slice(&call_table()))?;
                }
                _ => {}
            }
        }
        for mut program in open.progs_mut() {
            if IO_URING.iter().any(|(name, _)| program.name() == *name) {
                program.set_autoload(observes_io_uring);
            }
        }
        open.load()
    };
    Ok((open().map_err(LoadError::Libbpf)?, observes_io_uring))
}
