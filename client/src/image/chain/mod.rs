//! An image with its parents: which page of a file is stored where.

mod pagemap;
mod pages;

use std::sync::Arc;

use super::error::ImageError;
use super::format::{EntryReader, FormatError, ImageKind, InventoryEntry, MemfdInodeEntry};
use super::names;
use super::side_file::{DumpedFile, SideFile};
use super::store::{ImageStore, ObjectReader, Sequential, read_whole};
use pagemap::Pagemap;
use pages::PagesObject;

pub use pages::PageReader;

/// Longest chain of images that is read.
const MAX_CHAIN_IMAGES: usize = 4096;
/// Most memfds of an image.
const MAX_FILES: usize = 1024;
/// Largest side file that is read, bytes.
const MAX_SIDE_FILE_BYTES: u64 = 64 << 20;

/// Pages of a file, and where their content is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Pages of the file.
    pub range: fdmap_proto::PageRange,
    /// Number of the image in the chain; 0 is the newest.
    pub level: usize,
    /// Number of the first page in the pages file of that image.
    pub position: u64,
}

/// A chunk of one file in one image of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ChunkId {
    /// Number of the image in the chain; 0 is the newest.
    pub(super) level: usize,
    /// Number of its first page in the pages file of that image.
    pub(super) first_page: u64,
}

/// One image of a chain.
#[derive(Debug)]
pub struct Image {
    location: String,
    /// Side file and its digest. `None`: written by CRIU.
    side: Option<(SideFile, String)>,
    files: Vec<FileImage>,
}

/// One file in one image.
#[derive(Debug)]
struct FileImage {
    inode: MemfdInodeEntry,
    pagemap: Pagemap,
    pages: PagesObject,
}

impl Image {
    /// Opens the image in a store, without its parents.
    fn open(store: &dyn ImageStore) -> Result<Self, ImageError> {
        let location = store.location();
        let side = side_file(store)?;
        let inventory =
            object(store, names::INVENTORY)?.ok_or_else(|| ImageError::Incomplete(location.clone()))?;
        verify(&inventory, names::INVENTORY, side.as_ref(), &location)?;
        let path = format!("{location}/{}", names::INVENTORY);
        let version = EntryReader::new(Sequential::new(inventory), ImageKind::Inventory)
            .and_then(|mut entries| entries.next_entry::<InventoryEntry>())
            .map_err(ImageError::format(&path))?
            .map_or(0, |entry| entry.img_version);
        // Version 1 differs in the second magic numbers of other images.
        if !(1..=InventoryEntry::VERSION).contains(&version) {
            return Err(ImageError::invalid(path, format!("image version {version}, expected 1 or 2")));
        }
        let inodes = inodes(store, side.as_ref())?.into_iter();
        let files =
            inodes.map(|inode| FileImage::open(store, inode, side.as_ref())).collect::<Result<_, _>>()?;
        Ok(Self { location, side, files })
    }

    fn file(&self, shmid: u32) -> Option<&FileImage> {
        self.files.iter().find(|file| file.inode.shmid == shmid)
    }
}

impl FileImage {
    fn open(
        store: &dyn ImageStore,
        inode: MemfdInodeEntry,
        side: Option<&(SideFile, String)>,
    ) -> Result<Self, ImageError> {
        let (name, location) = (names::pagemap(inode.shmid), store.location());
        let path = format!("{location}/{name}");
        let object = object(store, &name)?.ok_or_else(|| ImageError::invalid(&path, "missing"))?;
        verify(&object, &name, side, &location)?;
        let pagemap = Pagemap::read(Sequential::new(object), inode.size).map_err(ImageError::format(path))?;
        let pages = PagesObject::open(store, pagemap.pages_id, pagemap.present_pages(), side)?;
        Ok(Self { inode, pagemap, pages })
    }
}

/// The side file and its digest; `None` if the store has none.
fn side_file(store: &dyn ImageStore) -> Result<Option<(SideFile, String)>, ImageError> {
    let Some(object) = object(store, names::SIDE_FILE)? else { return Ok(None) };
    let path = format!("{}/{}", store.location(), names::SIDE_FILE);
    let bytes = read_whole(&*object, &path, MAX_SIDE_FILE_BYTES)?;
    SideFile::decode(&bytes).map(Some).map_err(|reason| ImageError::invalid(path, reason))
}

fn object(store: &dyn ImageStore, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, ImageError> {
    Ok(store.open(name)?)
}

/// Compares an object with its hash in the side file, if there is one.
fn verify(
    object: &Arc<dyn ObjectReader>,
    name: &str,
    side: Option<&(SideFile, String)>,
    location: &str,
) -> Result<(), ImageError> {
    let Some((side, _)) = side else { return Ok(()) };
    let path = format!("{location}/{name}");
    let Some(expected) = side.objects.get(name) else {
        return Err(ImageError::invalid(path, "not listed in fdmap.json"));
    };
    let mut hasher = blake3::Hasher::new();
    std::io::copy(&mut Sequential::new(Arc::clone(object)), &mut hasher).map_err(|error| {
        ImageError::from(super::store::StoreError { operation: "reading", location: path.clone(), error })
    })?;
    if hasher.finalize().to_hex().as_str() != expected {
        return Err(ImageError::invalid(path, "content differs from its digest in fdmap.json"));
    }
    Ok(())
}

/// The memfds of an image.
fn inodes(
    store: &dyn ImageStore,
    side: Option<&(SideFile, String)>,
) -> Result<Vec<MemfdInodeEntry>, ImageError> {
    let location = store.location();
    let path = format!("{location}/{}", names::MEMFD);
    let object = object(store, names::MEMFD)?
        .ok_or_else(|| ImageError::invalid(&path, "missing: the image has no memfd"))?;
    verify(&object, names::MEMFD, side, &location)?;
    let failed = || ImageError::format(path.clone());
    let mut entries = EntryReader::new(Sequential::new(object), ImageKind::Memfd).map_err(failed())?;
    let mut inodes: Vec<MemfdInodeEntry> = Vec::new();
    loop {
        let offset = entries.offset();
        let Some(entry) = entries.next_entry::<MemfdInodeEntry>().map_err(failed())? else {
            return Ok(inodes);
        };
        let invalid = |reason| failed()(FormatError::Invalid { offset, reason });
        if inodes.iter().any(|inode| inode.shmid == entry.shmid) {
            return Err(invalid(format!("shmid {} appears twice", entry.shmid)));
        }
        if inodes.len() == MAX_FILES {
            return Err(invalid(format!("more than {MAX_FILES} memfds")));
        }
        inodes.push(entry);
    }
}

/// An image and its parents.
#[derive(Debug)]
pub struct ImageChain {
    /// The newest first.
    images: Vec<Image>,
}

/// One file of a chain.
#[derive(Clone, Debug)]
pub struct ImageFile {
    /// Name, size, owner and seals in the newest image.
    pub inode: MemfdInodeEntry,
    /// The file in the side file of the newest image.
    pub dumped: Option<DumpedFile>,
    /// The stored pages, in ascending order. All others have no data.
    pub extents: Vec<Located>,
}

impl ImageChain {
    /// Opens an image and all of its parents.
    ///
    /// # Errors
    /// [`ImageError`], also if the parents form a loop, or one was replaced since its child was written.
    pub fn open(store: &Arc<dyn ImageStore>) -> Result<Self, ImageError> {
        let mut images: Vec<Image> = Vec::new();
        let mut next = Some(Arc::clone(store));
        while let Some(store) = next {
            let location = store.location();
            if images.iter().any(|image| image.location == location) {
                return Err(ImageError::invalid(location, "its parents form a loop"));
            }
            if images.len() == MAX_CHAIN_IMAGES {
                return Err(ImageError::invalid(
                    location,
                    format!("the chain has over {MAX_CHAIN_IMAGES} images"),
                ));
            }
            let image = Image::open(&*store)?;
            if let Some(child) = images.last() {
                check_parent(child, &image)?;
            }
            next = store.parent()?;
            let wants_parent = image.side.as_ref().is_some_and(|(side, _)| side.parent.is_some());
            if wants_parent && next.is_none() {
                return Err(ImageError::invalid(location, "the link to its parent is missing"));
            }
            images.push(image);
        }
        Ok(Self { images })
    }

    /// Side file of the newest image. `None`: written by CRIU.
    #[must_use]
    pub fn side_file(&self) -> Option<&SideFile> {
        self.images.first().and_then(|image| image.side.as_ref()).map(|(side, _)| side)
    }

    /// Digest of the newest image's side file.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        self.images.first().and_then(|image| image.side.as_ref()).map(|(_, digest)| digest.as_str())
    }

    /// Number of images.
    #[must_use]
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Always false: a chain has at least one image.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Finds the files of the newest image.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if a page is to be in a parent that does not have it.
    pub fn files(&self) -> Result<Vec<ImageFile>, ImageError> {
        let Some(newest) = self.images.first() else { return Ok(Vec::new()) };
        let dumped = |shmid| {
            let (side, _) = newest.side.as_ref()?;
            side.files.iter().find(|file| file.shmid == shmid).cloned()
        };
        let resolve = |file: &FileImage| {
            let shmid = file.inode.shmid;
            let extents = self.resolve(shmid)?;
            Ok(ImageFile { inode: file.inode.clone(), dumped: dumped(shmid), extents })
        };
        newest.files.iter().map(resolve).collect()
    }

    /// The files of the newest image: all, or that of this name or number (shmid).
    ///
    /// # Errors
    /// [`ImageError::Usage`] if the image has no such file; as [`Self::files`].
    pub fn selected(&self, wanted: Option<&str>) -> Result<Vec<ImageFile>, ImageError> {
        let mut files = self.files()?;
        if let Some(wanted) = wanted {
            let by_number = wanted.parse().ok();
            files.retain(|file| file.inode.name == wanted || Some(file.inode.shmid) == by_number);
            if files.is_empty() {
                return Err(ImageError::Usage(format!("the image has no file {wanted:?}")));
            }
        }
        Ok(files)
    }

    /// The stored pages of a file, in ascending order.
    fn resolve(&self, shmid: u32) -> Result<Vec<Located>, ImageError> {
        // From the oldest image on: what a parent has is known when its child refers to it.
        let mut known: Vec<Located> = Vec::new();
        for (level, image) in self.images.iter().enumerate().rev() {
            let Some(file) = image.file(shmid) else {
                known.clear();
                continue;
            };
            known = file.pagemap.resolve(level, &known).map_err(|page| {
                let object = format!("{}/{}", image.location, names::pagemap(shmid));
                ImageError::invalid(
                    object,
                    format!("page {page} is to be in a parent, which does not have it"),
                )
            })?;
        }
        Ok(known)
    }

    /// The chunk that has the first of these pages of a file, and the number of its pages.
    pub(super) fn chunk_of(&self, shmid: u32, located: &Located) -> (ChunkId, u64) {
        let (level, position) = (located.level, located.position);
        match self.pages_object(shmid, level).and_then(|pages| pages.find(position)) {
            Some(found) => (ChunkId { level, first_page: found.first_page }, found.pages()),
            // Its read reports that.
            None => (ChunkId { level, first_page: position }, 1),
        }
    }

    /// Reads and verifies a chunk of a file.
    ///
    /// # Errors
    /// [`ImageError`]
    pub(super) fn read_chunk(&self, shmid: u32, chunk: ChunkId) -> Result<Vec<u8>, ImageError> {
        let Some(pages) = self.pages_object(shmid, chunk.level) else {
            return Err(ImageError::invalid(
                format!("image {} of the chain", chunk.level),
                "the file is missing",
            ));
        };
        pages.chunk(chunk.first_page).map(|(_, bytes)| bytes)
    }

    fn pages_object(&self, shmid: u32, level: usize) -> Option<&PagesObject> {
        self.images.get(level).and_then(|image| image.file(shmid)).map(|file| &file.pages)
    }

    /// A reader of the content of one file.
    #[must_use]
    pub fn reader(&self, shmid: u32) -> PageReader<'_> {
        PageReader::new(self.images.iter().map(|image| image.file(shmid).map(|file| &file.pages)).collect())
    }
}

/// A child names the parent that it was written for.
fn check_parent(child: &Image, parent: &Image) -> Result<(), ImageError> {
    let Some((side, _)) = &child.side else { return Ok(()) };
    let found = parent.side.as_ref().map(|(_, digest)| digest);
    if side.parent.as_ref() == found {
        return Ok(());
    }
    let reason = format!("it is not the image that {} was written for", child.location);
    Err(ImageError::invalid(parent.location.clone(), reason))
}
