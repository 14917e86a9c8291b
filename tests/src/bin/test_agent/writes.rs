//! Logged writes to a file of a service: the mappings, the log, and the resources of some methods.

use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fdmap_client::MappedFile;
use fdmap_sys::memfd;
use fdmap_tests::no_lost_writes::log::{Lane, Log};
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::service::named;
use fdmap_tests::test_agent::command::{
    AgentMapping, FileOf, MappingEnd, Reply, Span, Writer as WriterSpec, WriterCommand,
};
use nix::libc;
use nix::unistd::Pid;

use crate::Writer;
use crate::call::{Done, Place, READ_WRITE, advise, error_text, map};
use crate::children::Children;
use crate::descriptor::{Descriptor, Device, Holes};
use crate::direct::Direct;
use crate::draw::Draw;
use crate::guard::install_and_remove;
use crate::remap::{Remaps, Vanishing, duplicate, map_over, move_page_tables, move_part, relocate, resize};
use crate::remote::{MAX_PAGES, Reads, Remote, WaitingReads};
use crate::requests::fdpass;
use crate::store::{Forks, PageOuts, Passing, Seldom, Stores, store};
use crate::unnoticed::write_in_child;

/// Number of free records that a lane needs for one more batch of any method.
const MAX_BATCH_RECORDS: usize = 4096;

/// The source of descriptors and mappings of the file.
#[derive(Clone, Debug)]
pub struct Origin(FileOf);

impl Origin {
    pub fn open(&self) -> Done<OwnedFd> {
        let opened = fdpass(&self.0.runtime_dir)?.open(&named(&self.0.name), true);
        opened.map(|(fd, _)| fd).map_err(error_text)
    }

    fn mapped(&self, tracked: bool) -> Done<MappedFile> {
        let mut mapped = fdpass(&self.0.runtime_dir)?.map(&named(&self.0.name), true).map_err(error_text)?;
        if tracked {
            mapped.track().map_err(error_text)?;
        }
        Ok(mapped)
    }

    /// A new tracked mapping that the library never unmaps.
    pub fn tracked(&self) -> Done<Place> {
        Ok(place_of(&ManuallyDrop::new(self.mapped(true)?)))
    }
}

fn place_of(mapped: &MappedFile) -> Place {
    Place { address: mapped.as_ptr().expose_provenance(), len: mapped.len() }
}

enum Mapped {
    /// A mapping of the client library.
    Library(Box<MappedFile>),
    /// A mapping created by raw system calls, or what they left of a mapping of the library.
    Raw(Place),
    Unmapped,
}

#[derive(Default)]
pub struct Writes {
    log: Option<Log>,
    origin: Option<Origin>,
    mappings: Vec<Mapped>,
    tools: Tools,
    children: Children,
}

/// Resources that some methods need.
#[derive(Default)]
pub struct Tools {
    /// A file on a disk.
    source: Option<PathBuf>,
    /// A block device over the file.
    device: Option<PathBuf>,
    /// The target of remote writes: a process and its mapping.
    remote: Option<(Pid, Place)>,
}

impl Tools {
    /// A new memfd of `len` bytes, none of them zero.
    pub fn constant(&self, len: u64) -> Done<OwnedFd> {
        let fd = memfd::create("fdmap-constant", None).map_err(error_text)?;
        memfd::resize(fd.as_fd(), len).map_err(error_text)?;
        nix::sys::uio::pwrite(&fd, &vec![0xa5; len as usize], 0).map_err(error_text)?;
        Ok(fd)
    }

    fn open_direct(path: Option<&PathBuf>, write: bool) -> Done<OwnedFd> {
        let path = path.ok_or("no file for direct I/O is set")?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(write).custom_flags(libc::O_DIRECT).open(path);
        file.map(OwnedFd::from).map_err(|error| format!("open of {} with O_DIRECT: {error}", path.display()))
    }
}

impl Writes {
    pub fn perform(&mut self, command: WriterCommand) -> Done<Reply> {
        match command {
            WriterCommand::OpenLog(path) => self.log = Some(Log::open(&path).map_err(error_text)?),
            WriterCommand::Map { file, tracked } => {
                let origin = Origin(file);
                let mapped = Mapped::Library(Box::new(origin.mapped(tracked)?));
                self.origin = Some(origin);
                return self.add(mapped).map(Reply::Mapping);
            }
            WriterCommand::Unmap(number) => {
                self.place(number)?;
                self.mappings[number] = Mapped::Unmapped;
            }
            WriterCommand::Source(path) => self.tools.source = Some(path),
            WriterCommand::Device(path) => self.tools.device = Some(path),
            WriterCommand::Remote { pid, address, len } => {
                self.tools.remote = Some((Pid::from_raw(pid.cast_signed()), Place { address, len }));
            }
            WriterCommand::Poke { mapping, pages } => self.poke(mapping, pages)?,
            WriterCommand::Fill { mapping, pattern, pages, lane } => {
                return self.fill(mapping, pattern, pages, lane).map(Reply::Number);
            }
            WriterCommand::Read { mapping, pages } => return self.read(mapping, pages).map(Reply::Number),
            WriterCommand::Guard { mapping, pages, process } => {
                let count = pages.end - pages.first;
                install_and_remove(self.place(mapping)?, pages.first, count, process)?;
            }
            WriterCommand::ForkUnnoticed { mapping, page } => {
                write_in_child(self.place(mapping)?.page(page))?;
            }
            WriterCommand::Children { mapping, command } => {
                return self.children.perform(self.place(mapping)?, command);
            }
            WriterCommand::PageOut(number) => {
                let place = self.place(number)?;
                advise(place, 0, place.pages(), libc::MADV_PAGEOUT)?;
            }
            WriterCommand::EndMapping { mapping, end } => return self.end_mapping(mapping, end),
            WriterCommand::FillUntracked { pattern, pages, lane } => {
                self.fill_untracked(pattern, pages, lane)?;
            }
            WriterCommand::WriteOnce { writer, seed, pages, lane } => {
                let (mut writer, mut lane) = (self.writer(writer, pages)?, self.lane(lane)?);
                writer.batch(&mut Draw::new(seed, pages.first, pages.end), &mut lane)?;
                writer.finish(&mut lane)?;
            }
            WriterCommand::Free { method, pages, lane } => {
                let holes = Holes { fd: self.origin()?.open()?, place: self.place(0)?, method };
                holes.punch(pages.first, pages.end - pages.first, &mut self.lane(lane)?)?;
            }
            WriterCommand::Run { writers, millis, seed, pages, lane } => {
                self.run(Duration::from_millis(millis), seed, pages, lane, &writers)?;
            }
        }
        Ok(Reply::Done)
    }

    fn add(&mut self, mapped: Mapped) -> Done<AgentMapping> {
        self.mappings.push(mapped);
        let number = self.mappings.len() - 1;
        let Place { address, len } = self.place(number)?;
        Ok(AgentMapping { number, address, len })
    }

    fn place(&self, number: usize) -> Done<Place> {
        match self.mappings.get(number) {
            Some(Mapped::Library(mapped)) => Ok(place_of(mapped)),
            Some(Mapped::Raw(place)) => Ok(*place),
            Some(Mapped::Unmapped) | None => Err(format!("no mapping {number}")),
        }
    }

    /// Removes a mapping from the library, if the library holds it.
    fn take(&mut self, number: usize) -> Done<Place> {
        let place = self.place(number)?;
        // Dropping the mapping would harvest and unmap it.
        std::mem::forget(std::mem::replace(&mut self.mappings[number], Mapped::Raw(place)));
        Ok(place)
    }

    fn lane(&self, lane: usize) -> Done<Lane<'_>> {
        let log = self.log.as_ref().ok_or("no log is open")?;
        log.claim(lane).ok_or_else(|| format!("lane {lane} does not exist or is claimed"))
    }

    fn origin(&self) -> Done<&Origin> {
        self.origin.as_ref().ok_or_else(|| "no file was mapped".to_owned())
    }

    fn poke(&self, number: usize, pages: Span) -> Done {
        let Some(Mapped::Library(mapped)) = self.mappings.get(number) else {
            return Err(format!("the client library does not hold mapping {number}"));
        };
        let written = pages.range().all(|page| mapped.write_at(page * 4096, &(page + 1).to_ne_bytes()));
        if written { Ok(()) } else { Err(format!("the mapping does not have all of pages {pages:?}")) }
    }

    fn fill(&self, number: usize, pattern: Pattern, pages: Span, lane: usize) -> Done<u64> {
        let (place, mut lane) = (self.place(number)?, self.lane(lane)?);
        let mut written = 0_u64;
        for page in pages.range().filter(|page| pattern.has(*page)) {
            store(place, page, mix(page ^ pattern.seed), Method::Store, &mut lane);
            written += 1;
        }
        Ok(written)
    }

    /// Replies with the sum of the bytes, so that no read is optimized away.
    fn read(&self, number: usize, pages: Span) -> Done<u64> {
        let mapping = self.place(number)?.mapping();
        let byte = |page| mapping.read(page as usize * 4096).map(u64::from).map_err(error_text);
        pages.range().map(byte).sum()
    }

    /// Ends a mapping. Keeps the mappings that this creates, and replies with a second mapping if there is one.
    fn end_mapping(&mut self, number: usize, end: MappingEnd) -> Done<Reply> {
        let place = self.take(number)?;
        let half = place.len / 2;
        let (left, more) = match end {
            MappingEnd::Unmap => (place.unmap(0, place.len).map(|()| None)?, None),
            MappingEnd::UnmapPart => (place.unmap(half / 2, half / 2 + half).map(|()| None)?, None),
            MappingEnd::CoverAnonymous => (map_over(place, None).map(|_| None)?, None),
            MappingEnd::CoverSameFile => {
                let fd = self.origin()?.open()?;
                (Some(map_over(place, Some(fd.as_fd()))?), None)
            }
            MappingEnd::CoverPart => {
                let part = Place { address: place.address, len: half };
                (map_over(part, None).map(|_| None)?, None)
            }
            MappingEnd::Move => (Some(relocate(place)?), None),
            MappingEnd::MovePart => move_part(place, half).map(|(first, _)| (Some(first), None))?,
            MappingEnd::Shrink => (Some(resize(place, half)?), None),
            MappingEnd::Duplicate => (Some(place), Some(duplicate(place)?)),
            MappingEnd::LeaveBehind => (Some(place), Some(move_page_tables(place)?)),
        };
        self.mappings[number] = left.map_or(Mapped::Unmapped, Mapped::Raw);
        more.map_or(Ok(Reply::Done), |place| self.add(Mapped::Raw(place)).map(Reply::Mapping))
    }

    fn fill_untracked(&self, pattern: Pattern, pages: Span, lane: usize) -> Done {
        let mut lane = self.lane(lane)?;
        let fd = self.origin()?.open()?;
        let place = map(Some((fd.as_fd(), 0)), pages.end as usize * 4096, READ_WRITE)?;
        for page in pages.range().filter(|page| pattern.has(*page)) {
            store(place, page, mix(page ^ pattern.seed), Method::Passing, &mut lane);
        }
        place.unmap(0, place.len)
    }

    fn writer(&self, spec: WriterSpec, pages: Span) -> Done<Box<dyn Writer + Send>> {
        let WriterSpec { method, mapping } = spec;
        let place = || self.place(mapping.unwrap_or(0));
        let origin = self.origin()?;
        Ok(match method {
            Method::Store => Box::new(Stores { place: place()? }),
            Method::Fork => Box::new(Forks { place: place()? }),
            Method::Seldom => Box::new(Seldom { place: place()?, first: pages.first, end: pages.end }),
            // A named mapping is changed repeatedly. Without a name, new mappings are created.
            Method::Remap if mapping.is_some() => {
                Box::new(Remaps { origin: None, place: Some(place()?), left: 0 })
            }
            Method::Remap => Box::new(Remaps { origin: Some(origin.clone()), place: None, left: 0 }),
            Method::Vanish => Box::new(Vanishing { origin: origin.clone(), fd: origin.open()? }),
            Method::PageOut => Box::new(PageOuts { place: place()? }),
            Method::Passing => Box::new(Passing { fd: origin.open()? }),
            Method::Punch | Method::Remove => Box::new(Holes { fd: origin.open()?, place: place()?, method }),
            Method::Device => {
                let fd = Tools::open_direct(self.tools.device.as_ref(), true)?;
                Box::new(Device { fd })
            }
            Method::Vm | Method::Mem => self.remote_writer(method)?,
            Method::Read => {
                Box::new(Reads { place: place()?, source: self.tools.constant(MAX_PAGES * 4096)? })
            }
            Method::UringRead => Box::new(WaitingReads::new(place()?)?),
            Method::Aio | Method::Uring | Method::UringFixed => {
                let source = Tools::open_direct(self.tools.source.as_ref(), false)?;
                Box::new(Direct::new(method, place()?, source, pages.first, pages.end)?)
            }
            Method::Pwrite
            | Method::Write
            | Method::Writev
            | Method::Splice
            | Method::Copy
            | Method::Sendfile
            | Method::UringWrite
            | Method::AioWrite => Box::new(Descriptor::new(origin.open()?, method, &self.tools)?),
        })
    }

    fn remote_writer(&self, method: Method) -> Done<Box<dyn Writer + Send>> {
        let (pid, place) = self.tools.remote.ok_or("no process is set")?;
        let path = format!("/proc/{pid}/mem");
        let open = || OpenOptions::new().read(true).write(true).open(&path);
        let memory: Option<File> = (method == Method::Mem)
            .then(open)
            .transpose()
            .map_err(|error| format!("open of {path}: {error}"))?;
        Ok(Box::new(Remote { pid, place, memory, bytes: vec![0x3c; MAX_PAGES as usize * 4096] }))
    }

    fn run(&self, time: Duration, seed: u64, pages: Span, lane: usize, writers: &[WriterSpec]) -> Done {
        let until = Instant::now() + time;
        let mut threads = Vec::new();
        for (number, spec) in writers.iter().enumerate() {
            let draw = Draw::new(mix(seed) ^ number as u64, pages.first, pages.end);
            threads.push((self.writer(*spec, pages)?, draw, self.lane(lane + number)?));
        }
        std::thread::scope(|scope| {
            let work = |(mut writer, mut draw, mut lane): (Box<dyn Writer + Send>, Draw, Lane<'_>)| {
                while Instant::now() < until && !lane.log().is_stopped() && lane.has_room(MAX_BATCH_RECORDS) {
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
        Ok(())
    }
}
