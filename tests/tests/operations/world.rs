//! One file, its mappings in this process, and a copy of it that is kept from Changes alone.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_client::grpc::{ChangesOptions, CreateFile};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, MappedFile};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::testing::{aio, uring};
use fdmap_sys::{fd, memfd};
use fdmap_tests::memory::pages_of;
use fdmap_tests::service::{Service, named};
use nix::fcntl::{FallocateFlags, SpliceFFlags, fallocate, splice};
use nix::libc;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, ftruncate, truncate, write};

use crate::plan::{By, FileKind, FileOperation, Nth, PAGES};

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;

/// A mapping that the client library tracks.
struct Tracked {
    mapped: MappedFile,
    /// Pages that were unmapped without the library. Access to them raises SIGSEGV.
    torn: BTreeSet<u64>,
}

impl Tracked {
    /// The whole range, of which the torn pages must not be used.
    fn mapping(&self) -> BorrowedMapping<'_> {
        pages_of(&self.mapped).mapping()
    }
}

pub struct World {
    client: Client,
    service: fdmap_client::FdpassClient,
    name: FileName,
    /// Opened by path.
    path: File,
    /// The descriptor of memfd_create.
    origin: Option<File>,
    tracked: Vec<Tracked>,
    untracked: Vec<SharedMapping>,
    since: Generation,
    copy: Vec<u8>,
    /// Makes the content of each write unique.
    writes: u64,
}

impl World {
    /// A new file with one tracked mapping.
    pub async fn new(service: &Service, kind: FileKind) -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let name = format!("file-{}", FILES.fetch_add(1, Ordering::Relaxed));
        let client = service.client().await.unwrap();
        let mut fdpass = service.fdpass().unwrap();
        let origin = match kind {
            FileKind::Created => {
                let size_bytes = PAGES * PAGE;
                client
                    .create(CreateFile { name: name.clone(), size_bytes, ..CreateFile::default() })
                    .await
                    .unwrap();
                None
            }
            FileKind::Adopted => {
                let origin = memfd::create(&name, None).unwrap();
                memfd::resize(origin.as_fd(), PAGES * PAGE).unwrap();
                fdpass.adopt(origin.as_fd(), &name, None).unwrap();
                Some(File::from(origin))
            }
        };
        let name = named(&name);
        let path = File::from(fdpass.open(&name, true).unwrap().0);
        let mut world = Self {
            client,
            service: fdpass,
            name,
            path,
            origin,
            tracked: Vec::new(),
            untracked: Vec::new(),
            since: Generation::NONE,
            copy: Vec::new(),
            writes: 0,
        };
        world.map_tracked();
        world
    }

    pub async fn finish(self) {
        drop((self.tracked, self.untracked));
        self.client.delete(&self.name).await.unwrap();
    }

    /// Performs one operation. After a checkpoint, returns the pages in which the copy differs from the file, if there are any.
    pub async fn apply(&mut self, operation: FileOperation) -> Option<Vec<u64>> {
        match operation {
            FileOperation::MapTracked => self.map_tracked(),
            FileOperation::MapUntracked => {
                let bytes = usize::try_from(self.pages() * PAGE).unwrap();
                self.untracked.push(SharedMapping::shared(&self.path, 0, bytes, true).unwrap());
            }
            FileOperation::UnmapTracked(nth) => drop(take(&mut self.tracked, nth)),
            FileOperation::UnmapUntracked(nth) => drop(take(&mut self.untracked, nth)),
            FileOperation::TearTracked { nth, page } => self.tear(nth, page),
            FileOperation::WriteDuplicate { nth, tracked, page } => self.write_duplicate(nth, tracked, page),
            FileOperation::StoreTracked { nth, page } => self.store_tracked(nth, page),
            FileOperation::StoreUntracked { nth, page } => self.store_untracked(nth, page),
            FileOperation::StoreInChild { nth, page } => self.store_in_child(nth, page),
            FileOperation::ZapTracked { nth, page } => self.advise(nth, page, libc::MADV_DONTNEED),
            FileOperation::RemoveTracked { nth, page } => self.advise(nth, page, libc::MADV_REMOVE),
            FileOperation::Checkpoint { force } => return self.checkpoint(force).await,
            call => self.call(call),
        }
        None
    }

    /// Performs a call on a descriptor.
    fn call(&mut self, call: FileOperation) {
        let content = self.content();
        let (size, path) = (self.pages(), self.path.try_clone().unwrap());
        let file = |by| match by {
            By::Origin => self.origin.as_ref().unwrap_or(&path),
            By::Path => &path,
        };
        let at = |page: u64| page % size * PAGE;
        match call {
            FileOperation::Pwrite { by, page, pages } => {
                let bytes = content.repeat(usize::try_from(pages.min(size - page % size)).unwrap());
                file(by).write_all_at(&bytes, at(page)).unwrap();
            }
            FileOperation::Splice { by, page } => splice_page(file(by), at(page), &content),
            FileOperation::AioWrite { by, page } => {
                assert_eq!(aio::write(file(by).as_fd(), &content, at(page)), Ok(content.len()));
            }
            FileOperation::UringWrite { by, page } => {
                assert_eq!(uring::write(file(by).as_fd(), &content, at(page)), Ok(content.len()));
            }
            FileOperation::Punch { by, page, pages } => {
                let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(file(by), mode, at(page).cast_signed(), (pages * PAGE).cast_signed()).unwrap();
            }
            FileOperation::PunchByIoctl { by, page } => {
                space::change(file(by).as_fd(), SpaceCall::Unreserve, at(page), PAGE).unwrap();
            }
            FileOperation::Allocate { by, page, pages } => {
                let mode = FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(file(by), mode, at(page).cast_signed(), (pages * PAGE).cast_signed()).unwrap();
            }
            FileOperation::Ftruncate { by, pages } => {
                ftruncate(file(by), (pages * PAGE).cast_signed()).unwrap()
            }
            FileOperation::TruncatePath { pages } => {
                let link = format!("/proc/self/fd/{}", path.as_raw_fd());
                truncate(link.as_str(), (pages * PAGE).cast_signed()).unwrap();
            }
            FileOperation::OtherFile => {
                let other = File::from(memfd::create("other", None).unwrap());
                other.write_all_at(&content, 0).unwrap();
                assert_eq!(uring::write(other.as_fd(), &content, 0), Ok(content.len()));
                truncate(format!("/proc/self/fd/{}", other.as_raw_fd()).as_str(), 0).unwrap();
            }
            other => unreachable!("{other:?} is not a call on a descriptor"),
        }
    }

    fn pages(&self) -> u64 {
        fd::stat(&self.path).unwrap().st_size.unsigned_abs() / PAGE
    }

    /// The content of the next write: one page.
    fn content(&mut self) -> Vec<u8> {
        self.writes += 1;
        self.writes.to_le_bytes().repeat(PAGE_BYTES / 8)
    }

    fn map_tracked(&mut self) {
        let mut mapped = self.service.map(&self.name, true).unwrap();
        mapped.track().unwrap();
        self.tracked.push(Tracked { mapped, torn: BTreeSet::new() });
    }

    /// The page of a mapping of `len` bytes that `page` selects; `None` if all of the mapping is beyond the end of the file.
    fn page(&self, len: usize, page: u64) -> Option<u64> {
        page.checked_rem((len as u64 / PAGE).min(self.pages()))
    }

    /// A tracked mapping, and an offset in it; `None` if the page was unmapped, or there is no such mapping or page.
    fn tracked(&self, nth: Nth, page: u64) -> Option<(&Tracked, usize)> {
        let tracked = self.tracked.get(nth % self.tracked.len().max(1))?;
        let page = self.page(tracked.mapped.len(), page)?;
        (!tracked.torn.contains(&page)).then(|| (tracked, usize::try_from(page * PAGE).unwrap()))
    }

    /// As [`Self::tracked`], for an untracked mapping.
    fn untracked(&self, nth: Nth, page: u64) -> Option<(&SharedMapping, usize)> {
        let mapping = self.untracked.get(nth % self.untracked.len().max(1))?;
        Some((mapping, usize::try_from(self.page(mapping.len(), page)? * PAGE).unwrap()))
    }

    fn store_tracked(&mut self, nth: Nth, page: u64) {
        let content = self.content();
        if let Some((tracked, at)) = self.tracked(nth, page) {
            assert!(tracked.mapped.write_at(at as u64, &content));
        }
    }

    fn store_untracked(&mut self, nth: Nth, page: u64) {
        let content = self.content();
        if let Some((mapping, at)) = self.untracked(nth, page) {
            assert!(mapping.write_at(at, &content));
        }
    }

    fn store_in_child(&mut self, nth: Nth, page: u64) {
        let content = self.content();
        let Some((tracked, at)) = self.tracked(nth, page) else { return };
        // SAFETY: the child stores to memory that is mapped, and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let failed = !tracked.mapped.write_at(at as u64, &content);
                // SAFETY: _exit runs no code of this process.
                unsafe { libc::_exit(i32::from(failed)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)))
            }
        }
    }

    fn advise(&self, nth: Nth, page: u64, advice: i32) {
        if let Some((tracked, at)) = self.tracked(nth, page) {
            tracked.mapping().advise(at, PAGE_BYTES, advice).unwrap();
        }
    }

    fn tear(&mut self, nth: Nth, page: u64) {
        let Some((tracked, at)) = self.tracked(nth, page) else { return };
        // Another mapping in the hole would end with this one.
        tracked.mapping().unmap_and_reserve(at, PAGE_BYTES).unwrap();
        let nth = nth % self.tracked.len();
        self.tracked[nth].torn.insert(at as u64 / PAGE);
    }

    fn write_duplicate(&mut self, nth: Nth, tracked: bool, page: u64) {
        let content = self.content();
        let duplicate = if tracked {
            self.tracked(nth, page).map(|(tracked, at)| tracked.mapping().duplicate(at, PAGE_BYTES))
        } else {
            self.untracked(nth, page)
                .map(|(mapping, at)| BorrowedMapping::of(mapping).duplicate(at, PAGE_BYTES))
        };
        if let Some(duplicate) = duplicate {
            duplicate.unwrap().write_all(0, &content).unwrap();
        }
    }

    /// Updates the copy by what Changes returns, and compares it with the file.
    async fn checkpoint(&mut self, force: bool) -> Option<Vec<u64>> {
        let made = self.client.checkpoint(&self.name, force, None).await.unwrap();
        let options = ChangesOptions { since: self.since, ..ChangesOptions::default() };
        let changes = self.client.changes(&self.name, options).await.unwrap().runs().await.unwrap();
        let mut file = vec![0; usize::try_from(self.pages() * PAGE).unwrap()];
        self.path.read_exact_at(&mut file, 0).unwrap();
        self.copy.resize(file.len(), 0);
        for run in &changes {
            let end = (run.run.range.end().0 * PAGE).min(file.len() as u64);
            let range =
                usize::try_from(run.run.range.start().0 * PAGE).unwrap()..usize::try_from(end).unwrap();
            if !range.is_empty() {
                self.copy[range.clone()].copy_from_slice(&file[range]);
            }
        }
        self.since = made.generation;
        let pages = self.copy.chunks(PAGE_BYTES).zip(file.chunks(PAGE_BYTES)).zip(0..);
        let stale: Vec<u64> = pages.filter(|((copy, file), _)| copy != file).map(|(_, page)| page).collect();
        (!stale.is_empty()).then_some(stale)
    }
}

fn take<T>(mappings: &mut Vec<T>, nth: Nth) -> Option<T> {
    (!mappings.is_empty()).then(|| mappings.swap_remove(nth % mappings.len()))
}

fn splice_page(file: &File, offset: u64, content: &[u8]) {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    assert_eq!(write(&writer, content).unwrap(), content.len());
    let (mut rest, mut at) = (content.len(), offset.cast_signed());
    while rest > 0 {
        rest -= splice(&reader, None, file, Some(&mut at), rest, SpliceFFlags::empty()).unwrap();
    }
}
