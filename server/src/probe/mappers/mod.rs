//! Finds the VMAs that map a file, in all processes. libbpf glue: loads `mappers.bpf.c`, runs it on demand, and repeats walks
//! that `accept` rejects. `trial` compares a walk with `/proc/self/maps` when the program is loaded.

mod accept;
mod trial;

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use fdmap_proto::error_chain;
use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::ObjectBuilder;

use super::file_vma::{FileVma, KernelAddress, MapperWalk, PageTables};
use super::interface::ScanError;
use super::pool::Pool;
use crate::bpf::records::{MapperRecord, MapperRun, Status};
use crate::bpf::{LoadError, loaded_or_logged, map_array, program_fd, run, status_text};
use accept::{Acceptance, WritableCount};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mappers.bpf.o"));

/// VMAs that one run handles under the RCU read lock: some 0.05 ms, or 0.25 ms before Linux 6.2 (`bpf_rdonly_cast`), and a
/// multiple of that if the VMAs of thousands of processes are in no cache. A walk over more VMAs takes several runs.
const MAX_RUN_VMAS: usize = 1024;

/// VMAs of one file. If there are more, the mappers are unknown.
const MAX_VMAS: usize = 1 << 18;

/// VMAs of a file with few. Those of most files fit, and a walk over them takes less than a millisecond.
const MAX_SHORT_VMAS: usize = 1 << 13;

/// Walks before the mappers are unknown, because other processes map and unmap the file, or fork, all the time.
const MAX_WALKS: u32 = 50;

/// Time of all walks over one file, with the pauses between them, after which its mappers are unknown.
const WALK_TIMEOUT: Duration = Duration::from_millis(100);

/// Time for which one search waits for walkers that others use. Only walks over files with many VMAs take so long.
const WALKER_TIMEOUT: Duration = Duration::from_millis(300);

/// Walks where another check replaces them: none of them waits.
const MAX_SHORT_WALKS: u32 = 3;

/// The loaded programs, or why they cannot be used.
#[derive(Debug)]
pub(super) struct MapperFinder {
    walkers: Result<Walkers, String>,
}

#[derive(Debug)]
struct Walkers {
    /// Each walk takes one, so that those of other files are interleaved. A walk over more than [`MAX_SHORT_VMAS`] ends there.
    short: Pool<Walker>,
    /// For walks over more VMAs, which delay only each other.
    long: Pool<Walker>,
    /// For the kernel objects of descriptors: no walk delays them.
    identities: Pool<Walker>,
}

impl MapperFinder {
    /// Loads the programs for up to `max_walks` concurrent walks and one reader of kernel objects, and tries them on a file of the service.
    pub(super) fn load(max_walks: usize) -> Self {
        let load = || Walker::load(WritableCount::MayWrite).map_err(|error| error_chain(&error));
        let walkers = load().and_then(|mut walker| {
            let counts = trial::check(&mut walker)?;
            let identities = Pool::new(load()?, 1, || None);
            let more = || loaded_or_logged(Walker::load(counts));
            let long = Pool::new(Walker::load(counts).map_err(|error| error_chain(&error))?, max_walks, more);
            let short = Pool::new(walker, max_walks, more);
            Ok(Walkers { short, long, identities })
        });
        if let Err(error) = &walkers {
            tracing::warn!(error, "mappers of a file cannot be found by a walk");
        }
        Self { walkers }
    }

    /// See [`super::Probe::mappers`].
    pub(super) fn mappers(&self, fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        match &self.walkers {
            Ok(walkers) => {
                let deadline = Instant::now() + WALKER_TIMEOUT;
                let find = |walkers: &Pool<Walker>, max_vmas| {
                    find(MAX_WALKS, || walkers.with_until(deadline, |walker| walker.walk(fd, max_vmas)))
                };
                let found = find(&walkers.short, MAX_SHORT_VMAS)?;
                let is_long = matches!(found, Walked::TooMany);
                Ok(if is_long { find(&walkers.long, MAX_VMAS)? } else { found }.into())
            }
            Err(reason) => Ok(MapperWalk::Unavailable(reason.clone())),
        }
    }

    /// See [`super::Probe::mappers_at_once`].
    pub(super) fn mappers_at_once(&self, fd: BorrowedFd<'_>) -> Result<MapperWalk, ScanError> {
        match &self.walkers {
            Ok(walkers) => {
                let find =
                    |walker: &mut Walker| find(MAX_SHORT_WALKS, || Some(walker.walk(fd, MAX_RUN_VMAS)));
                let found = walkers.short.with_idle(find);
                found.map_or(Ok(MapperWalk::Unknown), |found| found.map(MapperWalk::from))
            }
            Err(reason) => Ok(MapperWalk::Unavailable(reason.clone())),
        }
    }

    /// See [`super::Probe::private_data`].
    pub(super) fn private_data(&self, fd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        match &self.walkers {
            Ok(walkers) => walkers.identities.with(|walker| walker.private_data(fd)),
            Err(_) => Ok(None),
        }
    }

    /// See [`super::Probe::userfaultfd_space`].
    pub(super) fn userfaultfd_space(
        &self,
        userfaultfd: BorrowedFd<'_>,
    ) -> Result<Option<KernelAddress>, ScanError> {
        match &self.walkers {
            Ok(walkers) => walkers.identities.with(|walker| walker.userfaultfd_space(userfaultfd)),
            Err(_) => Ok(None),
        }
    }

    /// See [`super::Probe::page_tables`].
    pub(super) fn page_tables(&self, pagemap: BorrowedFd<'_>) -> Result<Option<PageTables>, ScanError> {
        match &self.walkers {
            Ok(walkers) => walkers.identities.with(|walker| walker.page_tables(pagemap)),
            Err(_) => Ok(None),
        }
    }
}

/// Makes one walk at a time.
#[derive(Debug)]
struct Walker {
    walk: OwnedFd,
    compare: OwnedFd,
    private_data: OwnedFd,
    userfaultfd_space: OwnedFd,
    page_tables: OwnedFd,
    /// The [`MapperRecord`]s of one run, shared with the programs.
    records: SharedMapping,
    /// The [`MapperRun`], shared with the programs.
    result: SharedMapping,
    /// The records of all runs of a walk.
    found: Vec<MapperRecord>,
    counts: WritableCount,
}

impl Walker {
    fn load(counts: WritableCount) -> Result<Self, LoadError> {
        let mut open = ObjectBuilder::default().name("fdmap_mappers")?.open_memory(OBJECT)?;
        if let Some(mut map) = open.maps_mut().find(|map| map.name() == "mappers") {
            map.set_max_entries(low_u32(to_u64(MAX_RUN_VMAS)))?;
        }
        let object = open.load()?;
        Ok(Self {
            walk: program_fd(&object, "walk_mappers")?,
            compare: program_fd(&object, "compare_mappers")?,
            private_data: program_fd(&object, "private_data")?,
            userfaultfd_space: program_fd(&object, "userfaultfd_space")?,
            page_tables: program_fd(&object, "page_tables")?,
            records: map_array::<MapperRecord>(&object, "mappers", MAX_RUN_VMAS, true)?,
            result: map_array::<MapperRun>(&object, "mapper_runs", 1, false)?,
            found: Vec::new(),
            counts,
        })
    }

    /// Walks once, over up to `max_vmas` VMAs.
    fn walk(&mut self, fd: BorrowedFd<'_>, max_vmas: usize) -> Walk {
        let began = Instant::now();
        let result = match self.is_accepted(fd, max_vmas) {
            Ok(true) => {
                let vmas: Option<Vec<_>> = self.found.iter().map(accept::vma).collect();
                Ok(vmas.map_or(Walked::Rejected, Walked::Found))
            }
            Ok(false) if self.found.len() >= max_vmas => Ok(Walked::TooMany),
            Ok(false) => Ok(Walked::Rejected),
            Err(error) => Err(error),
        };
        Walk { result, time: began.elapsed() }
    }

    /// Walks once. If the walk is accepted, `found` has all VMAs.
    fn is_accepted(&mut self, fd: BorrowedFd<'_>, max_vmas: usize) -> Result<bool, ScanError> {
        let mut acceptance = Acceptance::default();
        self.found.clear();
        loop {
            let resume = u64::from(!self.found.is_empty());
            let run = self.run(&self.walk, fd, [to_u64(MAX_RUN_VMAS), resume])?;
            if !acceptance.admits(&run) {
                return Ok(false);
            }
            self.take_records(&run);
            if run.rest == 0 {
                break;
            }
            if run.records == 0 || self.found.len() >= max_vmas {
                return Ok(false);
            }
        }
        let in_place = self.found.len() <= MAX_RUN_VMAS;
        for records in self.found.chunks(MAX_RUN_VMAS) {
            if !in_place {
                let written = self.records.write_at(0, bytemuck::cast_slice(records));
                debug_assert!(written, "load checked that the map holds the records of a run");
            }
            let run = self.run(&self.compare, fd, [to_u64(records.len()), 1])?;
            if !acceptance.admits(&run) || to_usize(u64::from(run.records)) != records.len() {
                return Ok(false);
            }
        }
        Ok(acceptance.accepts(&self.found, self.counts))
    }

    /// Appends the records of a run to `found`.
    fn take_records(&mut self, run: &MapperRun) {
        let before = self.found.len();
        let count = to_usize(u64::from(run.records)).min(MAX_RUN_VMAS);
        self.found.resize(before + count, MapperRecord::zeroed());
        let read = self.records.read_at(0, bytemuck::cast_slice_mut(&mut self.found[before..]));
        debug_assert!(read, "load checked that the map holds the records of a run");
    }

    fn private_data(&self, fd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        let run = self.run(&self.private_data, fd, [0, 0])?;
        Ok(KernelAddress::new(run.private_data))
    }

    fn userfaultfd_space(&self, userfaultfd: BorrowedFd<'_>) -> Result<Option<KernelAddress>, ScanError> {
        let run = self.run(&self.userfaultfd_space, userfaultfd, [0, 0])?;
        Ok(KernelAddress::new(run.private_data))
    }

    fn page_tables(&self, pagemap: BorrowedFd<'_>) -> Result<Option<PageTables>, ScanError> {
        let run = self.run(&self.page_tables, pagemap, [0, 0])?;
        let space = KernelAddress::new(run.private_data);
        Ok(space.map(|space| PageTables { space, bytes: run.page_table_bytes }))
    }

    fn run(&self, program: &OwnedFd, fd: BorrowedFd<'_>, more: [u64; 2]) -> Result<MapperRun, ScanError> {
        let fd = fd.as_raw_fd();
        let mut arguments = [u64::from(fd.cast_unsigned()), more[0], more[1]];
        let status =
            run(program.as_fd(), &mut arguments).map_err(|errno| ScanError::Run(errno.to_string()))?;
        let status = Status(status.unsigned_abs());
        if status != Status::FDMAP_STATUS_OK {
            return Err(ScanError::Walk { fd, why: status_text(status) });
        }
        let mut result = MapperRun::zeroed();
        let read = self.result.read_at(0, bytemuck::bytes_of_mut(&mut result));
        debug_assert!(read, "load checked that the map holds a result");
        Ok(result)
    }
}

/// One walk.
struct Walk {
    result: Result<Walked, ScanError>,
    time: Duration,
}

/// The result of one walk, or of several ones.
enum Walked {
    /// All VMAs.
    Found(Vec<FileVma>),
    /// It may have missed some, which changed meanwhile.
    Rejected,
    /// There are more than the walk may handle.
    TooMany,
}

impl From<Walked> for MapperWalk {
    fn from(walked: Walked) -> Self {
        match walked {
            Walked::Found(vmas) => Self::Found(vmas),
            Walked::Rejected | Walked::TooMany => Self::Unknown,
        }
    }
}

/// Walks until a walk is accepted, up to `max_walks` times, as long as that does not take too long, and `walk` finds a walker.
fn find(max_walks: u32, mut walk: impl FnMut() -> Option<Walk>) -> Result<Walked, ScanError> {
    let mut time = Duration::ZERO;
    for attempt in 0..max_walks {
        time += back_off(attempt);
        let Some(walked) = walk() else { break };
        match walked.result? {
            Walked::Rejected => time += walked.time,
            ended => return Ok(ended),
        }
        if time >= WALK_TIMEOUT {
            break;
        }
    }
    Ok(Walked::Rejected)
}

/// Waits before another walk: first not at all, finally 3.2 ms, and some 30 ms in all. A process that changes its mappings holds the
/// lock of the tree for some microseconds. A process that forks holds those of its VMAs until its page tables are copied. Returns
/// how long.
fn back_off(attempt: u32) -> Duration {
    match attempt {
        0..5 => Duration::ZERO,
        5..20 => {
            std::thread::yield_now();
            Duration::ZERO
        }
        _ => {
            let pause = Duration::from_micros(100 << ((attempt - 20) / 5));
            std::thread::sleep(pause);
            pause
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(time: Duration) -> Option<Walk> {
        Some(Walk { result: Ok(Walked::Rejected), time })
    }

    #[test]
    fn search_ends_when_walks_take_too_long_or_find_no_walker() {
        let walks = std::cell::Cell::new(0);
        let count = |walk: Option<Walk>| {
            walks.set(walks.get() + 1);
            walk
        };
        let unknown = |found| matches!(found, Ok(Walked::Rejected));
        assert!(unknown(find(MAX_WALKS, || count(rejected(WALK_TIMEOUT / 4)))));
        assert_eq!(walks.replace(0), 4);
        assert!(unknown(find(MAX_SHORT_WALKS, || count(rejected(Duration::ZERO)))));
        assert_eq!(walks.replace(0), MAX_SHORT_WALKS);
        assert!(unknown(find(MAX_WALKS, || count(None))));
        assert_eq!(walks.replace(0), 1);
        let accept = || {
            let walk = Walk { result: Ok(Walked::Found(Vec::new())), time: 2 * WALK_TIMEOUT };
            count(if walks.get() == 2 { Some(walk) } else { rejected(Duration::ZERO) })
        };
        assert!(matches!(find(MAX_WALKS, accept), Ok(Walked::Found(_))));
        assert_eq!(walks.get(), 3);
    }

    mod needs_root {
        use std::os::fd::AsFd as _;

        use fdmap_sys::mapping::SharedMapping;
        use fdmap_sys::memfd;
        use fdmap_sys::pagemap::Pagemap;
        use fdmap_sys::uffd::Userfaultfd;

        use super::*;

        /// Mappings of single pages. No two of them can be merged.
        fn mapped(name: &str, count: usize) -> (OwnedFd, Vec<SharedMapping>) {
            let file = memfd::create(name, None).unwrap();
            memfd::resize(file.as_fd(), 4 * 4096).unwrap();
            let map = |nth| SharedMapping::shared(&file, 4096 * (nth % 2) * 2, 4096, true).unwrap();
            let mappings = (0..to_u64(count)).map(map).collect();
            (file, mappings)
        }

        #[test]
        fn page_tables_are_those_of_the_address_space_until_it_ends() {
            const MIB: u64 = 1 << 20;
            let finder = MapperFinder::load(1);
            let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            let pagemaps = [Some(child.id()), None].map(|pid| Pagemap::open(pid).unwrap());
            let [theirs, own] = pagemaps;
            let tables = |pagemap: &Pagemap| finder.page_tables(pagemap.as_fd()).unwrap().unwrap();
            assert_ne!(tables(&own).space, tables(&theirs).space);
            let userfaultfd = Userfaultfd::create().unwrap();
            let space = finder.userfaultfd_space(userfaultfd.as_fd()).unwrap();
            assert_eq!(space, Some(tables(&own).space));
            let before = tables(&own).bytes;
            let file = memfd::create("tables", None).unwrap();
            memfd::resize(file.as_fd(), 1024 * MIB).unwrap();
            let mapping = SharedMapping::shared(&file, 0, 1024 << 20, true).unwrap();
            for mebibyte in (0..1024).step_by(2) {
                assert!(mapping.write_at(mebibyte << 20, &[1]));
            }
            // 512 tables of 4 KiB. Other tests of this process have page tables, too.
            assert!(tables(&own).bytes >= before + MIB, "{before}, then {:?}", tables(&own));
            assert!(tables(&theirs).bytes > 0);
            child.kill().unwrap();
            child.wait().unwrap();
            // The kernel frees them when the last user of the address space is gone.
            let began = Instant::now();
            while tables(&theirs).bytes > 0 {
                assert!(began.elapsed() < Duration::from_secs(10), "{:?}", tables(&theirs));
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        #[test]
        fn walks_over_many_vmas_delay_none_over_few() {
            let finder = MapperFinder::load(1);
            let count = |file: &OwnedFd| match finder.mappers(file.as_fd()).unwrap() {
                MapperWalk::Found(vmas) => Some(vmas.len()),
                _ => None,
            };
            let (few, _few) = mapped("few", 3);
            let (many, _many) = mapped("many", MAX_SHORT_VMAS + 1);
            assert_eq!((count(&few), count(&many)), (Some(3), Some(MAX_SHORT_VMAS + 1)));
            // Walks over other files take all that there are for many VMAs.
            let counted = finder.walkers.as_ref().unwrap().long.with(|_| (count(&few), count(&many)));
            assert_eq!(counted, (Some(3), None));
            assert_eq!(count(&many), Some(MAX_SHORT_VMAS + 1));
        }
    }
}
