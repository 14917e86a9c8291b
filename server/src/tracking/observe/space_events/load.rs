//! Loads the programs of `bpf/space_events.bpf.c`.

use fdmap_proto::units::{low_u32, to_u64};
use libbpf_rs::{Object, ObjectBuilder};

use crate::bpf::{LoadError, TraceError};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/space_events.bpf.o"));

/// Address spaces that can be followed at the same time.
pub(super) const MAX_SPACES: usize = 16384;

/// Size of the ring buffer in bytes: room for 2048 records.
pub(super) const GUARD_RING_BYTES: u64 = 64 << 10;

pub(super) fn load() -> Result<Object, TraceError> {
    let open = || -> Result<Object, libbpf_rs::Error> {
        let mut open = ObjectBuilder::default().name("fdmap_spaces")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("space_slots" | "followed_spaces") => {
                    map.set_max_entries(low_u32(to_u64(MAX_SPACES)))?;
                }
                Some("guard_records") => map.set_max_entries(low_u32(GUARD_RING_BYTES))?,
                _ => {}
            }
        }
        open.load()
    };
    Ok(open().map_err(LoadError::Libbpf)?)
}
