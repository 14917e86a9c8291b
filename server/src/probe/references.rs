//! Who refers to a file's pages beside the file itself: mappings that can write, and pins. libbpf glue: it loads
//! `page_pins.bpf.c`, runs it on demand and hands its answers to `pins`.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use fdmap_proto::units::{PageRange, low_u32, to_u64};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::ObjectBuilder;

use super::bpf::{LoadError, map_of, program_of, run, why};
use super::pins::{PinRecord, WINDOW_RECORDS, Window, ask, gather, push, windows};
use super::pool::Pool;
use super::record::STATUS_OK;
use super::{Pinned, ScanError, Target};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/page_pins.bpf.o"));

/// What refers to pages, as far as this kernel lets it be seen.
#[derive(Debug)]
pub(super) struct References {
    loaded: Option<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    /// Keeps nothing between runs, so that any number of threads may run it at once.
    writable_mappings: OwnedFd,
    searchers: Pool<Searcher>,
}

impl References {
    /// Loads the programs, for up to `most` searches at once. If that fails, nothing can be seen, and the log says why.
    pub(super) fn load(most: usize) -> Self {
        let loaded = Searcher::load().map(|(first, writable_mappings)| Loaded {
            writable_mappings,
            searchers: Pool::new(first, most),
        });
        let said = |error| tracing::warn!("pins cannot be seen: {}", fdmap_proto::error_chain(&error));
        Self { loaded: loaded.map_err(said).ok() }
    }

    /// See [`super::Probe::writable_mappings`].
    pub(super) fn writable_mappings(&self, fd: BorrowedFd<'_>) -> Result<Option<u64>, ScanError> {
        let Some(loaded) = &self.loaded else { return Ok(None) };
        let fd = fd.as_raw_fd();
        let count = run(loaded.writable_mappings.as_fd(), &mut [u64::from(fd.cast_unsigned())])?;
        match u64::try_from(count) {
            Ok(count) => Ok(Some(count)),
            Err(_) => Err(ScanError::Walk { fd, why: why(count.unsigned_abs()) }),
        }
    }

    /// True if pins can be seen.
    pub(super) const fn sees_pins(&self) -> bool {
        self.loaded.is_some()
    }

    /// See [`super::Probe::pins`]. Hugetlb files must be counted by base pages.
    pub(super) fn pins(
        &self,
        target: &Target<'_>,
        ranges: &[PageRange],
        out: &mut Vec<Pinned>,
    ) -> Result<bool, ScanError> {
        /// Windows that a thread takes at once, and below which another thread is not worth its start.
        const PORTION: usize = 8;
        let Some(loaded) = &self.loaded else { return Ok(false) };
        let windows = windows(ranges);
        let portions: Vec<&[Window]> = windows.chunks(PORTION).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                let Some(portion) = portions.get(nth) else { return Ok::<_, ScanError>(done) };
                let mut found = Vec::new();
                loaded.searchers.with(another, |searcher| {
                    portion.iter().try_for_each(|window| searcher.search(target, ranges, *window, &mut found))
                })??;
                done.push((nth, found));
            }
        };
        let mut done = std::thread::scope(|scope| {
            let helpers = loaded.searchers.most().min(portions.len()).saturating_sub(1);
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
            let mut done = work()?;
            for helper in helpers {
                done.extend(helper.join().map_err(|_| ScanError::Lost)??);
            }
            Ok::<_, ScanError>(done)
        })?;
        done.sort_unstable_by_key(|(nth, _)| *nth);
        done.into_iter().flat_map(|(_, found)| found).for_each(|pinned| push(out, pinned));
        Ok(true)
    }
}

fn another() -> Result<Searcher, ScanError> {
    let (searcher, _) = Searcher::load().map_err(|error| ScanError::Run(error.to_string()))?;
    Ok(searcher)
}

/// One search at a time.
#[derive(Debug)]
struct Searcher {
    find_pins: OwnedFd,
    /// [`PinRecord`]s of a window.
    records: SharedMapping,
    window: Vec<PinRecord>,
}

impl Searcher {
    /// Together with the program that counts mappings.
    fn load() -> Result<(Self, OwnedFd), LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap_pins")?.open_memory(OBJECT)?;
        if let Some(mut map) = open.maps_mut().find(|map| map.name() == "pins") {
            map.set_max_entries(low_u32(to_u64(WINDOW_RECORDS)))?;
        }
        let object = open.load()?;
        let records = map_of::<PinRecord>(&object, "pins", WINDOW_RECORDS, true)?;
        let find_pins = program_of(&object, "find_pins")?;
        let writable_mappings = program_of(&object, "writable_mappings")?;
        let window = vec![PinRecord::default(); WINDOW_RECORDS];
        Ok((Self { find_pins, records, window }, writable_mappings))
    }

    /// Looks at one window.
    fn search(
        &mut self,
        target: &Target<'_>,
        ranges: &[PageRange],
        window: Window,
        out: &mut Vec<Pinned>,
    ) -> Result<(), ScanError> {
        let records = &mut self.window[..window.records()];
        ask(window, ranges, records);
        let fits = self.records.write_at(0, bytemuck::cast_slice(records));
        debug_assert!(fits, "the map holds a window, by load");
        let fd = target.fd.as_raw_fd();
        let mut arguments = [
            u64::from(fd.cast_unsigned()),
            window.first.0,
            window.blocks(),
            u64::from(target.hugetlb_order.is_some()),
        ];
        let status = run(self.find_pins.as_fd(), &mut arguments)?.unsigned_abs();
        if status != STATUS_OK {
            return Err(ScanError::Walk { fd, why: why(status) });
        }
        let read = self.records.read_at(0, bytemuck::cast_slice_mut(records));
        debug_assert!(read, "the map holds a window, by load");
        gather(window.first, records, out);
        Ok(())
    }
}
