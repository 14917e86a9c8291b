//! One file, its mappings in this process, and a copy of it that is kept from Changes alone.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_client::grpc::{ChangesOptions, CreateFile};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, MappedFile};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{fd, memfd};
use fdmap_tests::service::{Service, named};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, ftruncate, truncate, write};

use crate::plan::{By, FileKind, FileOperation, Nth, PAGES};

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// `FS_IOC_UNRESVSP64` of linux/falloc.h.
const FS_IOC_UNRESVSP64: u64 = 0x4030_582B;

pub struct World {
    client: Client,
    service: fdmap_client::FdpassClient,
    name: FileName,
    /// Opened by path.
    path: File,
    /// The descriptor of memfd_create.
    origin: Option<File>,
    tracked: Vec<MappedFile>,
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
            FileOperation::StoreTracked { nth, page } => self.store(true, nth, page),
            FileOperation::StoreUntracked { nth, page } => self.store(false, nth, page),
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
            FileOperation::AioWrite { by, page } => aio_write(file(by), at(page), &content),
            FileOperation::UringWrite { by, page } => uring_write(file(by), at(page), &content),
            FileOperation::Punch { by, page, pages } => {
                let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(file(by), mode, at(page).cast_signed(), (pages * PAGE).cast_signed()).unwrap();
            }
            FileOperation::PunchByIoctl { by, page } => {
                let space = [0, at(page), PAGE, 0, 0, 0_u64];
                // SAFETY: the argument is a struct space_resv.
                let punched = unsafe { libc::ioctl(file(by).as_raw_fd(), FS_IOC_UNRESVSP64, space.as_ptr()) };
                assert_eq!(punched, 0, "{}", std::io::Error::last_os_error());
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
                uring_write(&other, 0, &content);
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
        self.tracked.push(mapped);
    }

    /// The address of a page in a mapping; `None` if the mapping does not reach it, or it is beyond the end of the file.
    fn address(&self, tracked: bool, nth: Nth, page: u64) -> Option<usize> {
        let (start, len) = if tracked {
            let mapped = self.tracked.get(nth % self.tracked.len().max(1))?;
            (mapped.as_ptr().addr(), mapped.len())
        } else {
            let mapped = self.untracked.get(nth % self.untracked.len().max(1))?;
            (mapped.as_ptr().addr(), mapped.len())
        };
        let pages = (len as u64 / PAGE).min(self.pages());
        let address = start + usize::try_from(page.checked_rem(pages)? * PAGE).unwrap();
        is_mapped(address).then_some(address)
    }

    fn store(&mut self, tracked: bool, nth: Nth, page: u64) {
        let content = self.content();
        if let Some(address) = self.address(tracked, nth, page) {
            store(address, &content);
        }
    }

    fn store_in_child(&mut self, nth: Nth, page: u64) {
        let content = self.content();
        let Some(address) = self.address(true, nth, page) else { return };
        // SAFETY: the child stores to memory that is mapped, and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                store(address, &content);
                // SAFETY: _exit runs no code of this process.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => drop(waitpid(child, None).unwrap()),
        }
    }

    fn advise(&self, nth: Nth, page: u64, advice: i32) {
        let Some(address) = self.address(true, nth, page) else { return };
        // SAFETY: the page belongs to a file, and no reference to its content exists.
        let advised = unsafe { libc::madvise(address as *mut libc::c_void, PAGE_BYTES, advice) };
        assert_eq!(advised, 0, "madvise({advice}): {}", std::io::Error::last_os_error());
    }

    fn tear(&self, nth: Nth, page: u64) {
        let Some(address) = self.address(true, nth, page) else { return };
        // SAFETY: no reference to the page exists, and is_mapped() finds the hole.
        assert_eq!(unsafe { libc::munmap(address as *mut libc::c_void, PAGE_BYTES) }, 0);
    }

    fn write_duplicate(&mut self, nth: Nth, tracked: bool, page: u64) {
        let content = self.content();
        let Some(address) = self.address(tracked, nth, page) else { return };
        let old = address as *mut libc::c_void;
        // SAFETY: the duplicate is a new mapping, which is unmapped below.
        let duplicate = unsafe { libc::mremap(old, 0, PAGE_BYTES, libc::MREMAP_MAYMOVE) };
        assert_ne!(duplicate, libc::MAP_FAILED, "mremap: {}", std::io::Error::last_os_error());
        store(duplicate.expose_provenance(), &content);
        // SAFETY: nothing refers to the duplicate.
        assert_eq!(unsafe { libc::munmap(duplicate, PAGE_BYTES) }, 0);
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

/// True unless a part of the mapping was unmapped there.
fn is_mapped(address: usize) -> bool {
    let mut resident = 0_u8;
    // SAFETY: mincore writes one byte for one page, and fails if nothing is mapped.
    unsafe { libc::mincore(address as *mut libc::c_void, PAGE_BYTES, &raw mut resident) == 0 }
}

fn store(address: usize, content: &[u8]) {
    let at = std::ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: the callers pass a page of a writable mapping, to which no reference exists.
    unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), at, content.len()) };
}

fn splice_page(file: &File, offset: u64, content: &[u8]) {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    assert_eq!(write(&writer, content).unwrap(), content.len());
    let (mut rest, mut at) = (content.len(), offset.cast_signed());
    while rest > 0 {
        let (from, to) = (reader.as_raw_fd(), file.as_raw_fd());
        // SAFETY: splice stores the offset, which outlives the call.
        let moved = unsafe { libc::splice(from, std::ptr::null_mut(), to, &raw mut at, rest, 0) };
        rest -= usize::try_from(moved).unwrap();
    }
}

fn aio_write(file: &File, offset: u64, content: &[u8]) {
    // struct iocb of linux/aio_abi.h: operation and descriptor, buffer, bytes, offset.
    let mut request = [0_u64; 8];
    request[2] = 1 | u64::from(file.as_raw_fd().cast_unsigned()) << 32;
    (request[3], request[4], request[5]) =
        (content.as_ptr().expose_provenance() as u64, content.len() as u64, offset);
    let (mut context, list) = (0_u64, [request.as_ptr()]);
    // SAFETY: io_setup stores a number.
    assert_eq!(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) }, 0);
    // SAFETY: the request, its list and its bytes outlive the request: io_destroy waits for it.
    assert_eq!(unsafe { libc::syscall(libc::SYS_io_submit, context, 1_i64, list.as_ptr()) }, 1);
    // SAFETY: the call takes a number.
    assert_eq!(unsafe { libc::syscall(libc::SYS_io_destroy, context) }, 0);
}

fn uring_write(file: &File, offset: u64, content: &[u8]) {
    let mut ring = io_uring::IoUring::new(2).unwrap();
    let target = io_uring::types::Fd(file.as_raw_fd());
    let entry = io_uring::opcode::Write::new(target, content.as_ptr(), u32::try_from(content.len()).unwrap());
    // SAFETY: the bytes outlive the request, which is complete before the function returns.
    unsafe { ring.submission().push(&entry.offset(offset).build()) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(usize::try_from(ring.completion().next().unwrap().result()).unwrap(), content.len());
}
