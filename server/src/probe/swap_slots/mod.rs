//! Finds out where the content of swap slots is: in the swap area, or nowhere, because the kernel marked the slot as zero. libbpf glue:
//! loads `swap_slots.bpf.c`, finds the kernel's swap areas, and runs the programs on demand. `text` and `areas` are pure. It refuses to
//! decide whether a device may be read: the client does.

mod areas;
mod text;

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use bytemuck::Zeroable as _;
use fdmap_proto::units::{low_u32, to_u64};
use fdmap_proto::{SlotContent, SwapArea, SwapSlot};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::{Object, ObjectBuilder};

use super::interface::{ScanError, SlotReading};
use super::pool::Pool;
use crate::bpf::records::{AreaRecord, RawSlotContent, SlotRecord, Status, SymbolRecord};
use crate::bpf::{LoadError, load_explained, loaded_or_logged, map_array, program_fd, run, status_text};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/swap_slots.bpf.o"));

/// Slots of one run, which takes less than a millisecond.
const MAX_SLOTS: usize = 512;
/// Swap types: `SWAP_TYPES` in `swap_slots.bpf.c`.
const TYPES: usize = 31;
/// Comparisons with `/proc/swaps`, which areas may join or leave in between.
const MAX_ATTEMPTS: usize = 3;

/// The loaded programs, or why they cannot be used.
#[derive(Debug)]
pub(super) struct SlotFinder {
    loaded: Result<Loaded, String>,
}

#[derive(Debug)]
struct Loaded {
    /// Address of the kernel's array of swap areas.
    swap_info: u64,
    readers: Pool<Reader>,
}

impl SlotFinder {
    /// Loads the programs for up to `max_readers` concurrent readers.
    pub(super) fn load(max_readers: usize) -> Self {
        let loaded = Self::try_load(max_readers);
        if let Err(error) = &loaded {
            tracing::warn!(error, "the kernel's swap areas cannot be read");
        }
        Self { loaded }
    }

    fn try_load(max_readers: usize) -> Result<Loaded, String> {
        if !cfg!(target_arch = "x86_64") {
            return Err("swap areas are found on x86-64 only".to_owned());
        }
        let (first, object) = load_explained(Reader::load).map_err(|refusal| refusal.to_string())?;
        let swap_info = find_swap_info(&object).map_err(|error| fdmap_proto::error_chain(&error))??;
        first.areas(swap_info).map_err(|error| fdmap_proto::error_chain(&error))??;
        let more = || loaded_or_logged(Reader::load()).map(|(reader, _)| reader);
        Ok(Loaded { swap_info, readers: Pool::new(first, max_readers, more) })
    }

    /// See [`super::Probe::slot_contents`].
    pub(super) fn slot_contents(&self, slots: &[SwapSlot]) -> Result<SlotReading, ScanError> {
        let Ok(Loaded { swap_info, readers }) = &self.loaded else { return Ok(SlotReading::unknown(slots)) };
        readers.with(|reader| {
            let areas = match reader.areas(*swap_info)? {
                Ok(areas) => areas,
                Err(reason) => {
                    tracing::debug!(reason, "the kernel's swap areas differ from /proc/swaps");
                    return Ok(SlotReading::unknown(slots));
                }
            };
            let mut contents = Vec::with_capacity(slots.len());
            for part in slots.chunks(MAX_SLOTS) {
                reader.contents(*swap_info, part, &mut contents)?;
            }
            Ok(SlotReading { areas, contents })
        })
    }

    /// See [`super::Probe::check_swap_slots`].
    pub(super) fn check(&self) -> Result<(), String> {
        let Loaded { swap_info, readers } = self.loaded.as_ref().map_err(String::clone)?;
        readers.with(|reader| {
            let read = |slots: &[SwapSlot]| reader.contents(*swap_info, slots, &mut Vec::new());
            // No swap type 30 exists: this runs the program, which checks the kernel's structures.
            read(SwapSlot::new(30, 1).as_slice()).map_err(|error| fdmap_proto::error_chain(&error))?;
            reader.areas(*swap_info).map_err(|error| fdmap_proto::error_chain(&error))?.map(drop)
        })
    }
}

/// Looks for `swap_info`. The inner error: this kernel's text does not show it.
fn find_swap_info(object: &Object) -> Result<Result<u64, String>, LoadError> {
    let count = text::NAMES.len() + text::OPERATIONS;
    let symbols = map_array::<SymbolRecord>(object, "symbols", count, true)?;
    let at = |number: usize| number * size_of::<SymbolRecord>();
    for (number, name) in text::NAMES.iter().enumerate() {
        let written = symbols.write_at(at(number), name.as_bytes());
        debug_assert!(written, "the map has a record for each name");
    }
    let [by_name, by_file] = [program_fd(object, "read_symbols")?, program_fd(object, "read_operations")?];
    if let Err(errno) = run(by_name.as_fd(), &mut [0]) {
        tracing::debug!(%errno, "BPF_PROG_TEST_RUN of read_symbols");
    }
    let swaps = match File::open("/proc/swaps") {
        Ok(swaps) => swaps,
        Err(error) => return Ok(Err(format!("open of /proc/swaps: {error}"))),
    };
    if let Err(error) = checked(run(by_file.as_fd(), &mut [u64::from(swaps.as_raw_fd().cast_unsigned())])) {
        return Ok(Err(fdmap_proto::error_chain(&error)));
    }
    let records: Vec<SymbolRecord> = (0..count)
        .map(|number| {
            let mut record = SymbolRecord::zeroed();
            let read = symbols.read_at(at(number), bytemuck::bytes_of_mut(&mut record));
            debug_assert!(read, "the map has a record for each symbol");
            record
        })
        .collect();
    let texts: Vec<&[u8]> =
        records[1..].iter().filter(|record| record.copied != 0).map(|record| &record.text[..]).collect();
    let symbol = Some(records[0].address).filter(|address| *address != 0);
    Ok(text::swap_info(symbol, &texts))
}

/// Programs and maps that one thread uses.
#[derive(Debug)]
struct Reader {
    read_areas: OwnedFd,
    read_slots: OwnedFd,
    /// [`AreaRecord`]s by swap type.
    areas: SharedMapping,
    /// [`SlotRecord`]s.
    slots: SharedMapping,
}

impl Reader {
    fn load() -> Result<(Self, Object), LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap_swap")?.open_memory(OBJECT)?;
        for mut map in open.maps_mut() {
            if map.name() == "slots" {
                map.set_max_entries(low_u32(to_u64(MAX_SLOTS)))?;
            }
        }
        let object = open.load()?;
        let reader = Self {
            read_areas: program_fd(&object, "read_areas")?,
            read_slots: program_fd(&object, "read_slots")?,
            areas: map_array::<AreaRecord>(&object, "areas", TYPES, false)?,
            slots: map_array::<SlotRecord>(&object, "slots", MAX_SLOTS, true)?,
        };
        Ok((reader, object))
    }

    /// The swap areas. The inner error: they differ from `/proc/swaps`.
    fn areas(&self, swap_info: u64) -> Result<Result<Vec<SwapArea>, String>, ScanError> {
        let mut found = Ok(Vec::new());
        for _ in 0..MAX_ATTEMPTS {
            checked(run(self.read_areas.as_fd(), &mut [swap_info]))?;
            let mut records = [AreaRecord::zeroed(); TYPES];
            let read = self.areas.read_at(0, bytemuck::bytes_of_mut(&mut records));
            debug_assert!(read, "load checked that the map holds the records");
            found = match std::fs::read_to_string("/proc/swaps") {
                Ok(swaps) => areas::areas(&records, &swaps),
                Err(error) => Err(format!("/proc/swaps: {error}")),
            };
            if found.is_ok() {
                break;
            }
        }
        Ok(found)
    }

    /// Appends where the content of at most [`MAX_SLOTS`] slots is.
    fn contents(
        &self,
        swap_info: u64,
        slots: &[SwapSlot],
        out: &mut Vec<SlotContent>,
    ) -> Result<(), ScanError> {
        let mut records: Vec<SlotRecord> = slots
            .iter()
            .map(|slot| SlotRecord { slot: slot.raw(), content: RawSlotContent::FDMAP_SLOT_UNKNOWN, pad: 0 })
            .collect();
        let written = self.slots.write_at(0, bytemuck::cast_slice(&records));
        debug_assert!(written, "the map holds MAX_SLOTS records");
        checked(run(self.read_slots.as_fd(), &mut [swap_info, to_u64(slots.len())]))?;
        let read = self.slots.read_at(0, bytemuck::cast_slice_mut(&mut records));
        debug_assert!(read, "the map holds MAX_SLOTS records");
        out.extend(records.iter().map(|record| match record.content {
            RawSlotContent::FDMAP_SLOT_DEVICE => SlotContent::Device,
            RawSlotContent::FDMAP_SLOT_ZERO => SlotContent::Zero,
            _ => SlotContent::Unknown,
        }));
        Ok(())
    }
}

fn checked(status: Result<i32, nix::errno::Errno>) -> Result<(), ScanError> {
    match status.map(|status| Status(status.unsigned_abs())) {
        Ok(Status::FDMAP_STATUS_OK) => Ok(()),
        Ok(status) => Err(ScanError::Run(format!("swap areas: {}", status_text(status)))),
        Err(errno) => Err(ScanError::Run(errno.to_string())),
    }
}
