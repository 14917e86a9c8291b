//! Finds references to a file's pages: writable mappings and pins. libbpf glue: loads `page_pins.bpf.c`, runs it on
//! demand, and passes the records to `pins`.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use fdmap_proto::units::{PageRange, low_u32, to_u64};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::ObjectBuilder;

use super::interface::{PinnedRange, ScanError, ScanTarget};
use super::pins::{MAX_WINDOW_RECORDS, Window, collect_pins, fill_requests, push, windows};
use super::pool::Pool;
use crate::bpf::records::{PinRecord, Status};
use crate::bpf::{
    LoadError, Refusal, load_explained, loaded_or_logged, map_array, program_fd, run, status_text,
};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/page_pins.bpf.o"));

/// The loaded programs.
#[derive(Debug)]
pub(super) struct ReferenceFinder {
    /// Why this kernel refuses the programs, if it does.
    loaded: Result<Loaded, Refusal>,
}

#[derive(Debug)]
struct Loaded {
    /// The program has no state, so any number of threads can run it concurrently.
    writable_mappings: OwnedFd,
    searchers: Pool<Searcher>,
}

impl ReferenceFinder {
    /// Loads the programs for up to `max_searches` concurrent searches. If the kernel refuses them, no references are
    /// found, and the log contains the reason.
    pub(super) fn load(max_searches: usize) -> Self {
        let loaded = load_explained(Searcher::load).map(|(first, writable_mappings)| Loaded {
            writable_mappings,
            searchers: Pool::new(first, max_searches, load_searcher),
        });
        Self { loaded }
    }

    /// See [`super::Probe::references_refused`].
    pub(super) fn refused(&self) -> Option<String> {
        self.loaded.as_ref().err().map(ToString::to_string)
    }

    /// See [`super::Probe::writable_mappings`].
    pub(super) fn writable_mappings(&self, fd: BorrowedFd<'_>) -> Result<Option<u64>, ScanError> {
        let Ok(loaded) = &self.loaded else { return Ok(None) };
        let fd = fd.as_raw_fd();
        let count = run(loaded.writable_mappings.as_fd(), &mut [u64::from(fd.cast_unsigned())])
            .map_err(|errno| ScanError::Run(errno.to_string()))?;
        match u64::try_from(count) {
            Ok(count) => Ok(Some(count)),
            Err(_) => Err(ScanError::Walk { fd, why: status_text(Status(count.unsigned_abs())) }),
        }
    }

    pub(super) const fn finds_pins(&self) -> bool {
        self.loaded.is_ok()
    }

    /// See [`super::Probe::pins`]. The kernel must index hugetlb files by base pages.
    pub(super) fn pins(
        &self,
        target: &ScanTarget<'_>,
        ranges: &[PageRange],
        out: &mut Vec<PinnedRange>,
    ) -> Result<bool, ScanError> {
        /// Windows that a thread takes at once. Fewer windows do not justify another thread.
        const WINDOWS_PER_PORTION: usize = 8;
        let Ok(loaded) = &self.loaded else { return Ok(false) };
        let windows = windows(ranges);
        let portions: Vec<&[Window]> = windows.chunks(WINDOWS_PER_PORTION).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                let Some(portion) = portions.get(nth) else { return Ok::<_, ScanError>(done) };
                let mut found = Vec::new();
                loaded.searchers.with(|searcher| {
                    portion.iter().try_for_each(|window| searcher.search(target, ranges, *window, &mut found))
                })?;
                done.push((nth, found));
            }
        };
        let mut done = std::thread::scope(|scope| {
            let helpers = loaded.searchers.count().min(portions.len()).saturating_sub(1);
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
            let mut done = work()?;
            for helper in helpers {
                done.extend(helper.join().map_err(|_| ScanError::Panicked)??);
            }
            Ok::<_, ScanError>(done)
        })?;
        done.sort_unstable_by_key(|(nth, _)| *nth);
        done.into_iter().flat_map(|(_, found)| found).for_each(|pinned| push(out, pinned));
        Ok(true)
    }
}

fn load_searcher() -> Option<Searcher> {
    loaded_or_logged(Searcher::load()).map(|(searcher, _)| searcher)
}

/// Runs one search at a time.
#[derive(Debug)]
struct Searcher {
    find_pins: OwnedFd,
    /// The [`PinRecord`]s of a window, shared with the program.
    records: SharedMapping,
    window: Vec<PinRecord>,
}

impl Searcher {
    /// Also returns the program that counts mappings.
    fn load() -> Result<(Self, OwnedFd), LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap_pins")?.open_memory(OBJECT)?;
        if let Some(mut map) = open.maps_mut().find(|map| map.name() == "pins") {
            map.set_max_entries(low_u32(to_u64(MAX_WINDOW_RECORDS)))?;
        }
        let object = open.load()?;
        let records = map_array::<PinRecord>(&object, "pins", MAX_WINDOW_RECORDS, true)?;
        let find_pins = program_fd(&object, "find_pins")?;
        let writable_mappings = program_fd(&object, "writable_mappings")?;
        let window = vec![PinRecord::default(); MAX_WINDOW_RECORDS];
        Ok((Self { find_pins, records, window }, writable_mappings))
    }

    /// Examines one window.
    fn search(
        &mut self,
        target: &ScanTarget<'_>,
        ranges: &[PageRange],
        window: Window,
        out: &mut Vec<PinnedRange>,
    ) -> Result<(), ScanError> {
        let records = &mut self.window[..window.records()];
        fill_requests(window, ranges, records);
        let written = self.records.write_at(0, bytemuck::cast_slice(records));
        debug_assert!(written, "load checked that the map holds a window");
        let fd = target.fd.as_raw_fd();
        let mut arguments = [
            u64::from(fd.cast_unsigned()),
            window.first.0,
            window.blocks(),
            u64::from(target.hugetlb_order.is_some()),
        ];
        let status =
            run(self.find_pins.as_fd(), &mut arguments).map_err(|errno| ScanError::Run(errno.to_string()))?;
        let status = Status(status.unsigned_abs());
        if status != Status::FDMAP_STATUS_OK {
            return Err(ScanError::Walk { fd, why: status_text(status) });
        }
        let read = self.records.read_at(0, bytemuck::cast_slice_mut(records));
        debug_assert!(read, "load checked that the map holds a window");
        collect_pins(window.first, records, out);
        Ok(())
    }
}
