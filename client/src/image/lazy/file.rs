//! A new file of the service whose pages are filled lazily, in the process that maps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use fdmap_proto::units::to_u64;
use fdmap_proto::{Backing, FileInfo};
use fdmap_sys::address::AddressRange;
use fdmap_sys::smaps::Smaps;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};

use super::super::PAGE_BYTES;
use super::super::cancellation::Cancellation;
use super::super::chain::{ImageChain, ImageFile};
use super::super::error::ImageError;
use super::super::progress::{Control, Progress};
use super::super::restore::target::Target;
use super::super::restore::{RestoreOptions, RestoreService, RestoredFile, new_file};
use super::filler::{Filler, Guest};
use super::reads::Reads;
use super::{LazyCounts, LazyEnd, LazyNotice, LazyRegion, LazyReport};
use crate::{ClientError, MappedFile};

/// linux/fcntl.h
const F_SEAL_WRITE: u32 = 8;

/// A new file that is usable at once: each access through this mapping finds the content of the image.
///
/// Threads fill it in the background. Until [`Self::finish`], the file is not complete: read(2) and other mappings would find zero. So the
/// service opens it for administrators only, its descriptor is not available here, and children that are forked do not inherit the mapping. Do
/// not change the mapping by address: madvise(MADV_REMOVE) of a page that was not filled yet has no effect.
///
/// A process without the privilege for page faults in kernel mode (CAP_SYS_PTRACE, or the sysctl `vm.unprivileged_userfaultfd`) gets `EFAULT`
/// from system calls that access pages which were not filled yet.
///
/// If content cannot be read, accesses to its pages raise `SIGBUS`; if the store fails for a moment, they wait. Dropped before it is complete, the file is deleted. The
/// drop waits for no read of the store: a thread whose read is in progress keeps the chain until that ends, and changes no page.
#[derive(Debug)]
pub struct LazyFile {
    parts: Option<Parts>,
    control: Arc<Control>,
    is_awaited: Arc<AtomicBool>,
    begun: Instant,
}

/// In the order of their drop.
#[derive(Debug)]
struct Parts {
    filler: JoinHandle<Result<(LazyEnd, LazyCounts), ImageError>>,
    /// While it is open, accesses to absent pages wait, also if the thread panics.
    _uffd: Userfaultfd,
    mapping: MappedFile,
    target: Target,
    file: Arc<ImageFile>,
}

struct OwnProcess {
    is_awaited: Arc<AtomicBool>,
}

impl Guest for OwnProcess {
    fn has_ended(&self) -> bool {
        false
    }

    fn registered(&self, range: AddressRange) -> Result<Vec<AddressRange>, SyscallError> {
        let parts = Smaps::open(std::process::id())?.within(range)?;
        Ok(parts.iter().filter(|part| part.is_missing_registered).map(|part| part.vma.range).collect())
    }

    fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::Relaxed)
    }

    fn notice(&self, _: LazyNotice<'_>) {}
}

/// The only file of an image, or that of this name or number (shmid).
///
/// # Errors
/// [`ImageError`]
pub fn single_file(chain: &ImageChain, wanted: Option<&str>) -> Result<ImageFile, ImageError> {
    let mut files = chain.selected(wanted)?;
    match (files.pop(), files.len()) {
        (Some(file), 0) => Ok(file),
        (_, others) => {
            let reason = format!("memory is restored from one file, and {} are selected", others + 1);
            Err(ImageError::Usage(reason))
        }
    }
}

impl LazyFile {
    /// Creates a file of the image in the service and maps it. Blocks for some calls to the service; do not call it on a thread of an async
    /// runtime. `options.jobs` is ignored.
    ///
    /// # Errors
    /// [`ImageError`]
    pub fn create(
        chain: Arc<ImageChain>,
        service: RestoreService<'_>,
        options: &RestoreOptions,
    ) -> Result<Self, ImageError> {
        let begun = Instant::now();
        let file = Arc::new(single_file(&chain, options.file.as_deref())?);
        if file.inode.size == 0 {
            return Err(ImageError::Usage(format!("file {:?} of the image is empty", file.inode.name)));
        }
        if file.inode.seals & F_SEAL_WRITE != 0 {
            let reason =
                format!("file {:?} is sealed against writes, and the mapping is writable", file.inode.name);
            return Err(ImageError::Usage(reason));
        }
        let create = new_file(&file, options, service.is_administrator()?)?;
        let RestoreService { client, fdpass, runtime } = service;
        let mut target = Target::create(client, fdpass, &runtime, create)?;
        target.hide()?;
        let descriptor = target.take_descriptor().ok_or(ClientError::Unexpected("no descriptor"))?;
        let mapping = fdpass.map_opened(descriptor, target.info().clone(), true)?;
        mapping.inherit(false)?;
        let uffd = Userfaultfd::create()?;
        uffd.api(UffdFeatures::empty())?;
        let reads = Reads::start(&chain, file.inode.shmid)?;
        let region = region_of(&mapping);
        let end = AddressRange::at(region.address, region.bytes);
        let range =
            end.ok_or(SyscallError { call: "address of a mapping".to_owned(), errno: Errno::EINVAL })?;
        uffd.register_missing(range)?;
        let control = Arc::new(Control::default());
        let is_awaited = Arc::new(AtomicBool::new(false));
        let guest = OwnProcess { is_awaited: Arc::clone(&is_awaited) };
        let (own, shared, stored) = (uffd.try_clone()?, Arc::clone(&control), Arc::clone(&file));
        let fill = move || Filler::new(&own, &[region], &chain, &stored, &shared, &guest, reads).run();
        let filler = std::thread::Builder::new().name("fdmap-lazy".to_owned()).spawn(fill);
        let filler = filler.map_err(|error| SyscallError {
            call: "start of a thread".to_owned(),
            errno: fdmap_sys::error::errno_of(&error),
        })?;
        let parts = Parts { filler, _uffd: uffd, mapping, target, file };
        Ok(Self { parts: Some(parts), control, is_awaited, begun })
    }

    /// Metadata of the file. Its rights are those of the image once it is complete.
    #[must_use]
    pub fn info(&self) -> Option<&FileInfo> {
        self.parts.as_ref().map(|parts| parts.target.info())
    }

    /// Start address of the mapping.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.parts.as_ref().map_or(std::ptr::null_mut(), |parts| parts.mapping.as_ptr())
    }

    /// Length of the mapping in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.as_ref().map_or(0, |parts| parts.mapping.len())
    }

    /// Always false: an empty file is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from the mapping. Returns false and copies nothing if the range exceeds the mapping.
    #[must_use]
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.mapping.read_at(offset, out))
    }

    /// Copies bytes to the mapping. Returns false and copies nothing if the range exceeds the mapping.
    #[must_use]
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.mapping.write_at(offset, bytes))
    }

    /// How many pages were filled.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.control.progress()
    }

    /// Ends the restore early, also while another thread waits in [`Self::finish`] for a store that cannot be reached: accesses to pages that
    /// were not filled raise `SIGBUS`.
    #[must_use]
    pub fn cancellation(&self) -> Cancellation {
        self.control.cancellation()
    }

    /// True if [`Self::finish`] would not wait for content.
    #[must_use]
    pub fn is_filled(&self) -> bool {
        self.parts.as_ref().is_none_or(|parts| parts.filler.is_finished())
    }

    /// Waits until all content was copied. Adds the seals of the image and gives the file its rights. Returns the mapping, whose writes can be
    /// tracked now; earlier ones were not observed, so the service reports all data pages conservatively in the first generation.
    ///
    /// # Errors
    /// [`ImageError`]; the file is deleted.
    pub fn finish(mut self) -> Result<(MappedFile, RestoredFile, LazyReport), ImageError> {
        self.is_awaited.store(true, Ordering::Relaxed);
        let Some(parts) = self.parts.take() else { return Err(ImageError::Cancelled) };
        let Parts { filler, _uffd: uffd, mapping, mut target, file } = parts;
        let panicked = || ImageError::Usage("the thread that fills pages panicked".to_owned());
        let (end, counts) = filler.join().map_err(|_| panicked())??;
        if end != LazyEnd::Complete {
            return Err(ImageError::HandOff("the address space of the userfaultfd has ended".to_owned()));
        }
        drop(uffd);
        mapping.inherit(true)?;
        target.complete(&file)?;
        let pages = counts.fault_pages + counts.streamed_pages;
        let (mut restored, _) = target.keep();
        restored.pages = pages;
        Ok((mapping, restored, LazyReport { end, counts, elapsed: self.begun.elapsed() }))
    }
}

impl Drop for LazyFile {
    fn drop(&mut self) {
        self.control.cancel();
        if let Some(Parts { filler, _uffd, mapping, target, .. }) = self.parts.take() {
            // It waits for no read. It has poisoned all pages that lack content: also a thread that accesses them by address finds no zero.
            let _ = filler.join();
            // The mapping before the userfaultfd: without that, absent pages would be zero.
            drop(mapping);
            drop(target);
        }
    }
}

/// The whole mapping. The kernel rounds its length up to whole pages.
fn region_of(mapping: &MappedFile) -> LazyRegion {
    let page_bytes = match mapping.info().backing {
        Backing::Hugetlb(bytes) => bytes,
        Backing::Shmem | Backing::ShmemThp => PAGE_BYTES,
    };
    LazyRegion {
        address: to_u64(mapping.as_ptr().addr()),
        bytes: to_u64(mapping.len()).next_multiple_of(page_bytes),
        offset: 0,
        page_bytes,
    }
}
