//! What a writer has: mappings, descriptors, the log.

use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fdmap_client::{Endpoint as Sockets, FdpassClient, MappedFile, Timeouts};
use fdmap_sys::memfd;
use fdmap_tests::no_lost_writes::log::{Lane, Log};
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::service::named;
use nix::libc;
use nix::unistd::Pid;

use crate::Writer;
use crate::call::{Done, Place, READ_WRITE, advise, map, words_of};
use crate::descriptor::{Descriptor, Device, Holes};
use crate::direct::Direct;
use crate::draw::Draw;
use crate::remap::{Remaps, Vanishing, covered, doubled, left_behind, moved, part_moved, resized};
use crate::remote::{MOST, Reads, Remote, WaitingReads};
use crate::store::{Forks, PageOuts, Passing, Seldom, Stores, store};

/// Room that a lane must have for one more batch of any way.
const ROOM: usize = 4096;

/// Where files come from.
#[derive(Clone, Debug)]
pub struct Origin {
    folder: PathBuf,
    name: String,
}

impl Origin {
    fn fdpass(&self) -> Done<FdpassClient> {
        FdpassClient::connect(&Sockets::in_folder(&self.folder), Timeouts::default()).map_err(words_of)
    }

    /// A descriptor of the file.
    pub fn open(&self) -> Done<OwnedFd> {
        self.fdpass()?.open(&named(&self.name), true).map(|(fd, _)| fd).map_err(words_of)
    }

    /// The file, mapped by the library.
    fn mapped(&self, tracked: bool) -> Done<MappedFile> {
        let mut mapped = self.fdpass()?.map(&named(&self.name), true).map_err(words_of)?;
        if tracked {
            mapped.track().map_err(words_of)?;
        }
        Ok(mapped)
    }

    /// A new tracked mapping that the library will not unmap: who has it does what he likes with it.
    pub fn tracked(&self) -> Done<Place> {
        Ok(place_of(&ManuallyDrop::new(self.mapped(true)?)))
    }
}

fn place_of(mapped: &MappedFile) -> Place {
    Place { address: mapped.as_ptr().expose_provenance(), len: mapped.len() }
}

/// A mapping.
enum Mapped {
    /// By the library.
    Library(Box<MappedFile>),
    /// By raw system calls, or what those have left of one of the library's.
    Raw(Place),
    Gone,
}

/// Everything that a writer has.
#[derive(Default)]
pub struct Stage {
    log: Option<Log>,
    origin: Option<Origin>,
    mappings: Vec<Mapped>,
    tools: Tools,
}

/// What some ways of writing need.
#[derive(Default)]
pub struct Tools {
    /// A file on a disk.
    source: Option<PathBuf>,
    /// A block device over the file.
    device: Option<PathBuf>,
    /// The process to whose mapping to write.
    remote: Option<(Pid, Place)>,
}

impl Tools {
    /// A file in memory that holds something.
    pub fn constant(&self, len: u64) -> Done<OwnedFd> {
        let fd = memfd::create("fdmap-constant", None).map_err(words_of)?;
        memfd::resize(fd.as_fd(), len).map_err(words_of)?;
        nix::sys::uio::pwrite(&fd, &vec![0xa5; len as usize], 0).map_err(words_of)?;
        Ok(fd)
    }

    fn open_direct(path: Option<&PathBuf>, write: bool) -> Done<OwnedFd> {
        let path = path.ok_or("no file for direct I/O was named")?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(write).custom_flags(libc::O_DIRECT).open(path);
        file.map(OwnedFd::from).map_err(|error| format!("opening {} for direct I/O: {error}", path.display()))
    }
}

impl Stage {
    pub fn log(&mut self, path: &str) -> Done<String> {
        self.log = Some(Log::open(Path::new(path)).map_err(words_of)?);
        Ok(String::new())
    }

    /// Maps a file; gives the mapping's number, address and length.
    pub fn map(&mut self, folder: &str, name: &str, kind: &str) -> Done<String> {
        let origin = Origin { folder: folder.into(), name: name.to_owned() };
        let mapped = match kind {
            "tracked" => Mapped::Library(Box::new(origin.mapped(true)?)),
            "untracked" => Mapped::Library(Box::new(origin.mapped(false)?)),
            other => return Err(format!("{other:?} is no kind of mapping")),
        };
        self.origin = Some(origin);
        self.keep(mapped)
    }

    fn keep(&mut self, mapped: Mapped) -> Done<String> {
        self.mappings.push(mapped);
        let number = self.mappings.len() - 1;
        let Place { address, len } = self.place(number)?;
        Ok(format!("{number} {address} {len}"))
    }

    fn place(&self, number: usize) -> Done<Place> {
        match self.mappings.get(number) {
            Some(Mapped::Library(mapped)) => Ok(place_of(mapped)),
            Some(Mapped::Raw(place)) => Ok(*place),
            Some(Mapped::Gone) | None => Err(format!("there is no mapping {number}")),
        }
    }

    /// Takes a mapping away from the library, if it has it.
    fn take(&mut self, number: usize) -> Done<Place> {
        let place = self.place(number)?;
        // Not to be dropped: it would be harvested and unmapped.
        std::mem::forget(std::mem::replace(&mut self.mappings[number], Mapped::Raw(place)));
        Ok(place)
    }

    /// Unmaps a mapping as the library does.
    pub fn drop_mapping(&mut self, number: usize) -> Done<String> {
        self.place(number)?;
        self.mappings[number] = Mapped::Gone;
        Ok(String::new())
    }

    pub fn source(&mut self, path: &str) -> Done<String> {
        self.tools.source = Some(path.into());
        Ok(String::new())
    }

    pub fn device(&mut self, path: &str) -> Done<String> {
        self.tools.device = Some(path.into());
        Ok(String::new())
    }

    pub fn remote(&mut self, pid: u64, address: u64, len: u64) -> Done<String> {
        let place = Place { address: address as usize, len: len as usize };
        self.tools.remote = Some((Pid::from_raw(pid as i32), place));
        Ok(String::new())
    }

    fn lane(&self, lane: usize) -> Done<Lane<'_>> {
        let log = self.log.as_ref().ok_or("there is no log")?;
        log.claim(lane).ok_or_else(|| format!("lane {lane} cannot be had"))
    }

    fn origin(&self) -> Done<&Origin> {
        self.origin.as_ref().ok_or_else(|| "no file was named".to_owned())
    }

    /// Writes each page of a pattern once.
    pub fn fill(&self, number: usize, pattern: Pattern, first: u64, end: u64, lane: usize) -> Done<String> {
        let (place, mut lane) = (self.place(number)?, self.lane(lane)?);
        let mut written = 0_u64;
        for page in (first..end).filter(|page| pattern.has(*page)) {
            store(place, page, mix(page ^ pattern.seed), Method::Store, &mut lane);
            written += 1;
        }
        Ok(written.to_string())
    }

    /// Reads each page.
    pub fn read(&self, number: usize, first: u64, end: u64) -> Done<String> {
        let place = self.place(number)?;
        // SAFETY: the mapping stays while it is read.
        let sum: u64 = (first..end).map(|page| u64::from(unsafe { place.page(page).read_volatile() })).sum();
        Ok(sum.to_string())
    }

    /// Pushes the pages of a mapping out of memory.
    pub fn page_out(&self, number: usize) -> Done<String> {
        let place = self.place(number)?;
        advise(place, 0, place.pages(), libc::MADV_PAGEOUT)?;
        Ok(String::new())
    }

    /// Ends a mapping behind the library's back, whole or in part; new mappings that this makes are kept, and told.
    pub fn end(&mut self, number: usize, how: &str) -> Done<String> {
        let place = self.take(number)?;
        let half = place.len / 2;
        let (left, more) = match how {
            "unmap" => (place.unmap(0, place.len).map(|()| None)?, None),
            "unmap-part" => (place.unmap(half / 2, half / 2 + half).map(|()| None)?, None),
            "over-nothing" => (covered(place, None).map(|_| None)?, None),
            "over-same" => {
                let fd = self.origin()?.open()?;
                (Some(covered(place, Some(fd.as_fd()))?), None)
            }
            "over-part" => {
                let part = Place { address: place.address, len: half };
                (covered(part, None).map(|_| None)?, None)
            }
            "move" => (Some(moved(place)?), None),
            "move-part" => part_moved(place, half).map(|(first, _)| (Some(first), None))?,
            "shrink" => (Some(resized(place, half)?), None),
            "double" => (Some(place), Some(doubled(place)?)),
            "leave" => (Some(place), Some(left_behind(place)?)),
            other => return Err(format!("{other:?} is no way to end a mapping")),
        };
        self.mappings[number] = left.map_or(Mapped::Gone, Mapped::Raw);
        more.map_or(Ok(String::new()), |place| self.keep(Mapped::Raw(place)))
    }

    /// Maps the file without a word to anybody, writes pages and unmaps it.
    pub fn pass(&self, pattern: Pattern, first: u64, end: u64, lane: usize) -> Done<String> {
        let mut lane = self.lane(lane)?;
        let fd = self.origin()?.open()?;
        let place = map(Some((fd.as_fd(), 0)), end as usize * 4096, 0, READ_WRITE)?;
        for page in (first..end).filter(|page| pattern.has(*page)) {
            store(place, page, mix(page ^ pattern.seed), Method::Passing, &mut lane);
        }
        place.unmap(0, place.len)?;
        Ok(String::new())
    }

    fn writer(&self, way: &str, first: u64, end: u64) -> Done<Box<dyn Writer + Send>> {
        let (way, own) = way.split_once('@').map_or((way, None), |(way, number)| (way, Some(number)));
        let number = own.unwrap_or("0");
        let way: Method = way.parse().map_err(words_of)?;
        let place = || self.place(number.parse().map_err(words_of)?);
        let origin = self.origin()?;
        Ok(match way {
            Method::Store => Box::new(Stores { place: place()? }),
            Method::Fork => Box::new(Forks { place: place()? }),
            Method::Seldom => Box::new(Seldom { place: place()?, first, end }),
            // A mapping that is named is changed; else there is a new one now and then.
            Method::Remap if own.is_some() => {
                Box::new(Remaps { origin: None, place: Some(place()?), left: 0 })
            }
            Method::Remap => Box::new(Remaps { origin: Some(origin.clone()), place: None, left: 0 }),
            Method::Vanish => Box::new(Vanishing { origin: origin.clone(), fd: origin.open()? }),
            Method::PageOut => Box::new(PageOuts { place: place()? }),
            Method::Passing => Box::new(Passing { fd: origin.open()? }),
            Method::Punch | Method::Remove => Box::new(Holes { fd: origin.open()?, place: place()?, way }),
            Method::Device => {
                let fd = Tools::open_direct(self.tools.device.as_ref(), true)?;
                Box::new(Device::new(fd)?)
            }
            Method::Vm | Method::Mem => {
                let (pid, place) = self.tools.remote.ok_or("no process was named")?;
                let path = format!("/proc/{pid}/mem");
                let memory = OpenOptions::new().read(true).write(true).open(&path);
                let memory: Option<File> = (way == Method::Mem)
                    .then_some(memory)
                    .transpose()
                    .map_err(|error| format!("{path}: {error}"))?;
                Box::new(Remote { pid, place, memory, bytes: vec![0x3c; MOST as usize * 4096] })
            }
            Method::Read => Box::new(Reads { place: place()?, source: self.tools.constant(MOST * 4096)? }),
            Method::UringRead => Box::new(WaitingReads::new(place()?)?),
            Method::Aio | Method::Uring | Method::UringFixed => {
                let source = Tools::open_direct(self.tools.source.as_ref(), false)?;
                Box::new(Direct::new(way, place()?, source, first, end)?)
            }
            Method::Pwrite
            | Method::Write
            | Method::Writev
            | Method::Splice
            | Method::Copy
            | Method::Sendfile
            | Method::UringWrite
            | Method::AioWrite => Box::new(Descriptor::new(origin.open()?, way, &self.tools)?),
        })
    }

    /// Writes something among the pages from `first` up to `end`, once.
    pub fn once(&self, way: &str, seed: u64, pages: (u64, u64), lane: usize) -> Done<String> {
        let (mut writer, mut lane) = (self.writer(way, pages.0, pages.1)?, self.lane(lane)?);
        writer.batch(&mut Draw::new(seed, pages.0, pages.1), &mut lane)?;
        writer.finish(&mut lane)?;
        Ok(String::new())
    }

    /// Takes the memory of pages from `first` up to `end`.
    pub fn hole(&self, way: Method, first: u64, end: u64, lane: usize) -> Done<String> {
        let holes = Holes { fd: self.origin()?.open()?, place: self.place(0)?, way };
        holes.punch(first, end - first, &mut self.lane(lane)?)?;
        Ok(String::new())
    }

    /// Writes pages from `first` up to `end` for a time, each way on a thread and in a lane of its own; gives how often.
    pub fn run(
        &self,
        time: Duration,
        seed: u64,
        pages: (u64, u64),
        lane: usize,
        ways: &[&str],
    ) -> Done<String> {
        let until = Instant::now() + time;
        let (first, end) = pages;
        let mut threads = Vec::new();
        for (number, way) in ways.iter().enumerate() {
            let draw = Draw::new(mix(seed) ^ number as u64, first, end);
            threads.push((self.writer(way, first, end)?, draw, self.lane(lane + number)?));
        }
        std::thread::scope(|scope| {
            let work = |(mut writer, mut draw, mut lane): (Box<dyn Writer + Send>, Draw, Lane<'_>)| {
                while Instant::now() < until && !lane.log().is_stopped() && lane.has_room(ROOM) {
                    writer.batch(&mut draw, &mut lane)?;
                }
                writer.finish(&mut lane)
            };
            let running: Vec<_> =
                threads.into_iter().map(|thread| scope.spawn(move || work(thread))).collect();
            let ended = running.into_iter().map(|thread| {
                thread.join().map_err(|_| "a thread panicked".to_owned()).and_then(|done| done)
            });
            ended.collect::<Done<Vec<()>>>()
        })?;
        Ok(String::new())
    }
}
