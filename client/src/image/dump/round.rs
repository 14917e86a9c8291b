//! One round of a dump: one image.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fdmap_proto::units::Generation;
use fdmap_proto::{Backing, FileInfo, PageRange, PageState, Run};

use super::super::PAGE_BYTES;
use super::super::chain::ImageChain;
use super::super::error::ImageError;
use super::super::format::{ImageKind, InventoryEntry, MemfdInodeEntry, append_entry, header};
use super::super::names;
use super::super::ordered;
use super::super::progress::{Control, Phase};
use super::super::ranges::PageSet;
use super::super::side_file::{Consistency, DumpedFile, SideFile};
use super::super::store::ImageStore;
use super::super::swap::SlotAccess;
use super::content::ContentReader;
use super::plan::{Base, Extent, batches, plan};
use super::source::Closed;
use super::writer::{FileWriter, ImageWriter};
use super::{DumpCounts, DumpOptions, DumpSource};

/// Bits of hugetlb page sizes in the flags of memfd_create(2) (`MFD_HUGE_SHIFT` in linux/memfd.h).
const HUGE_SHIFT: u32 = 26;
const MFD_HUGETLB: u32 = 4;
/// Mode that CRIU restores. The service's own inodes have no executable bits.
const MODE: u32 = 0o600;

/// What a dump has written.
#[derive(Clone, Debug)]
pub struct DumpReport {
    /// Location of the image.
    pub location: String,
    pub consistency: Consistency,
    pub files: Vec<FileReport>,
    /// How long the writers were paused.
    pub paused: Option<Duration>,
    /// Why swapped pages were not read from their swap slots, if there was a reason but swapping in progress.
    pub slots_refused: Option<String>,
    /// Time of the round.
    pub elapsed: Duration,
    /// Images that were written before the pause.
    pub before: Vec<DumpReport>,
}

/// One file of a dump.
#[derive(Clone, Debug)]
pub struct FileReport {
    /// Name as the caller writes it.
    pub name: String,
    pub shmid: u32,
    /// The image has all writes up to this generation.
    pub generation: Generation,
    /// All writers were observed since the parent's generation, or since the file was created.
    pub exact: bool,
    pub counts: DumpCounts,
}

/// An image to write.
pub(super) struct Round<'a> {
    sources: &'a [DumpSource],
    store: &'a Arc<dyn ImageStore>,
    parent: Option<&'a ImageChain>,
    link: Option<&'a dyn ImageStore>,
    consistency: Consistency,
    options: &'a DumpOptions,
    begun: SystemTime,
}

/// A file whose pages are known.
struct Prepared<'a> {
    source: &'a DumpSource,
    info: FileInfo,
    closed: Closed,
    /// All writers since the parent's generation were observed.
    is_exact: bool,
    shmid: u32,
    unknown_pages: u64,
    /// Pages in memory; empty if none is in swap.
    resident: PageSet,
    batches: Vec<Vec<Extent>>,
}

/// An image whose content is copied.
pub(super) struct Copied<'a> {
    round: Round<'a>,
    image: ImageWriter<'a>,
    files: Vec<(Prepared<'a>, FileWriter)>,
    slots_refused: Option<String>,
}

impl<'a> Round<'a> {
    pub(super) fn begin(
        sources: &'a [DumpSource],
        store: &'a Arc<dyn ImageStore>,
        parent: Option<&'a ImageChain>,
        link: Option<&'a dyn ImageStore>,
        consistency: Consistency,
        options: &'a DumpOptions,
    ) -> Self {
        Self { sources, store, parent, link, consistency, options, begun: SystemTime::now() }
    }

    /// Copies the content of all files. The writers may continue afterwards.
    pub(super) fn copy(self, control: &Control) -> Result<Copied<'a>, ImageError> {
        control.begin_round();
        let files = self.prepare(control)?;
        control.enter(Phase::Copying);
        let image = ImageWriter::new(&**self.store);
        let mut copied = Vec::with_capacity(files.len());
        let slots = SlotAccess::default();
        for (pages_id, file) in (1..).zip(files) {
            let compression = self.options.compression;
            let max_pages = file.batches.iter().flatten().map(|extent| extent.range.len()).sum();
            let mut writer = FileWriter::new(&**self.store, file.shmid, pages_id, compression, max_pages)?;
            let workers = (0..self.options.jobs.max(1)).map(|_| {
                let mut reader =
                    ContentReader::new(file.source, file.info.size_bytes, compression, control, &slots);
                move |batch: &Vec<Extent>| reader.read(batch)
            });
            ordered::process(&file.batches, workers.collect(), |packed| writer.append(packed))?;
            copied.push((file, writer));
        }
        Ok(Copied { round: self, image, files: copied, slots_refused: slots.refusal() })
    }

    /// Closes a generation of each file before the states of any are read: with a pause that is the moment of all of them.
    fn prepare(&self, control: &Control) -> Result<Vec<Prepared<'a>>, ImageError> {
        let closed: Vec<_> = self.sources.iter().map(DumpSource::checkpoint).collect::<Result<_, _>>()?;
        let known: Vec<_> = self.sources.iter().map(|source| self.known(source)).collect::<Result<_, _>>()?;
        let mut shmids: BTreeSet<u32> = known.iter().flatten().map(|known| known.shmid).collect();
        let mut files = Vec::with_capacity(self.sources.len());
        for ((source, closed), known) in self.sources.iter().zip(closed).zip(known) {
            control.check()?;
            let shmid = known.as_ref().map_or_else(|| free_shmid(&source.info, &shmids), |known| known.shmid);
            shmids.insert(shmid);
            let (base, is_exact) = match known {
                Some(known) => {
                    let written = source.written_since(known.since)?;
                    (Some(Base { changed: written.pages, stored: known.stored }), written.is_exact)
                }
                None => (None, closed.is_exact),
            };
            let info = source.current_info()?;
            let (mut extents, mut unknown_pages, mut residency) = (Vec::new(), 0, Residency::default());
            let file = PageRange::first(info.size_bytes.div_ceil(PAGE_BYTES));
            source.scan(|runs| {
                unknown_pages += unknown(runs);
                residency.add(runs);
                extents.extend(plan(runs, file, base.as_ref()));
            })?;
            control.expect(extents.iter().map(|extent| extent.range.len()).sum());
            let batches = batches(&extents);
            let resident = residency.pages();
            files.push(Prepared { source, info, closed, is_exact, shmid, unknown_pages, resident, batches });
        }
        Ok(files)
    }

    /// The file in the parent image, if that has it.
    fn known(&self, source: &DumpSource) -> Result<Option<Known>, ImageError> {
        let (Some(chain), Some(link)) = (self.parent, self.link) else { return Ok(None) };
        let parent = || link.location();
        let Some(side) = chain.side_file() else {
            let reason = "it has no fdmap.json, so the generation of its content is unknown".to_owned();
            return Err(ImageError::Parent { parent: parent(), reason });
        };
        let id = source.info.id.to_string();
        let Some(dumped) = side.files.iter().find(|file| file.file_id == id) else {
            if self.sources.len() > 1 {
                return Ok(None);
            }
            let reason = format!("it has no image of {source} (id:{id})");
            return Err(ImageError::Parent { parent: parent(), reason });
        };
        let Some(since) = Generation::new(dumped.generation).filter(|since| !since.is_none()) else {
            let reason = format!("generation {} of {source}", dumped.generation);
            return Err(ImageError::Parent { parent: parent(), reason });
        };
        let files = chain.files()?;
        let stored = files.iter().find(|file| file.inode.shmid == dumped.shmid);
        let stored: PageSet =
            stored.map(|file| file.extents.iter().map(|one| one.range).collect()).unwrap_or_default();
        Ok(Some(Known { shmid: dumped.shmid, since, stored }))
    }
}

/// A file in the parent image.
struct Known {
    shmid: u32,
    since: Generation,
    stored: PageSet,
}

/// Where the pages of a file are.
#[derive(Default)]
struct Residency {
    resident: PageSet,
    has_swapped: bool,
}

impl Residency {
    fn add(&mut self, runs: &[Run]) {
        for run in runs {
            match run.state {
                PageState::Resident | PageState::SwapCached => self.resident.push(run.range),
                PageState::Swapped => self.has_swapped = true,
                PageState::Hole | PageState::Unknown => {}
            }
        }
    }

    /// The pages in memory, in a few ranges; empty if none is in swap.
    fn pages(self) -> PageSet {
        if !self.has_swapped {
            return PageSet::default();
        }
        self.resident.coarsened(DumpedFile::MAX_RESIDENT_RANGES)
    }
}

fn unknown(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| run.state == PageState::Unknown).map(|run| run.range.len()).sum()
}

/// The number of a file in CRIU's names: that of its inode, as far as no other file has it.
fn free_shmid(info: &FileInfo, taken: &BTreeSet<u32>) -> u32 {
    let mut shmid = fdmap_proto::units::low_u32(info.inode);
    while taken.contains(&shmid) {
        shmid = shmid.wrapping_add(1);
    }
    shmid
}

impl Copied<'_> {
    /// Completes all objects. Returns their names, too.
    pub(super) fn finish(self, control: &Control) -> Result<(DumpReport, Vec<String>), ImageError> {
        let Self { round, mut image, files, slots_refused } = self;
        control.enter(Phase::Completing);
        let (mut dumped, mut reports) = (Vec::new(), Vec::new());
        let mut memfds = header(ImageKind::Memfd);
        for (number, (file, writer)) in (1..).zip(files) {
            control.check()?;
            let counts = writer.finish(&mut image)?;
            append_entry(&mut memfds, &inode_entry(&file, number));
            dumped.push(dumped_file(&file));
            reports.push(FileReport {
                name: file.source.name(),
                shmid: file.shmid,
                generation: file.closed.generation,
                exact: file.is_exact,
                counts,
            });
        }
        image.write(names::MEMFD, &memfds)?;
        if let Some(parent) = round.link {
            image.link(parent)?;
        }
        let mut inventory = header(ImageKind::Inventory);
        append_entry(&mut inventory, &InventoryEntry { img_version: InventoryEntry::VERSION });
        let side = round.side_file(dumped, &image, &inventory);
        let (bytes, _) =
            side.encode().map_err(|error| ImageError::invalid(names::SIDE_FILE, error.to_string()))?;
        image.write(names::SIDE_FILE, &bytes)?;
        // Last: from now on the image is complete.
        round.store.sync()?;
        image.write(names::INVENTORY, &inventory)?;
        let objects = image.complete()?;
        let report = DumpReport {
            location: round.store.location(),
            consistency: round.consistency,
            files: reports,
            paused: None,
            slots_refused,
            elapsed: round.begun.elapsed().unwrap_or_default(),
            before: Vec::new(),
        };
        Ok((report, objects))
    }
}

impl Round<'_> {
    fn side_file(&self, files: Vec<DumpedFile>, image: &ImageWriter<'_>, inventory: &[u8]) -> SideFile {
        let mut objects = image.hashes.clone();
        objects.insert(names::INVENTORY.to_owned(), blake3::hash(inventory).to_hex().to_string());
        SideFile {
            version: SideFile::VERSION,
            consistency: self.consistency,
            created: self.begun.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs(),
            compression: self.options.compression,
            parent: self.parent.and_then(ImageChain::digest).map(ToOwned::to_owned),
            files,
            objects,
        }
    }
}

fn inode_entry(file: &Prepared<'_>, inode_id: u64) -> MemfdInodeEntry {
    let info = &file.info;
    let hugetlb_flag = match info.backing {
        Backing::Hugetlb(bytes) => Some(MFD_HUGETLB | bytes.trailing_zeros() << HUGE_SHIFT),
        Backing::Shmem | Backing::ShmemThp => None,
    };
    MemfdInodeEntry {
        name: info.name.clone(),
        uid: info.access.uid,
        gid: info.access.gid,
        size: info.size_bytes,
        shmid: file.shmid,
        seals: info.seals.bits(),
        inode_id,
        hugetlb_flag,
        mode: Some(MODE),
    }
}

fn dumped_file(file: &Prepared<'_>) -> DumpedFile {
    let access = &file.info.access;
    let names = |rights: fdmap_proto::Rights| rights.elements().map(|right| right.to_string()).collect();
    DumpedFile {
        shmid: file.shmid,
        file_id: file.info.id.to_string(),
        generation: file.closed.generation.get(),
        exact: file.is_exact,
        backing: match file.info.backing {
            Backing::Shmem => "shmem",
            Backing::ShmemThp => "shmem-thp",
            Backing::Hugetlb(_) => "hugetlb",
        }
        .to_owned(),
        rights: [access.owner, access.group, access.other].map(names),
        unknown_pages: file.unknown_pages,
        resident: file.resident.ranges().iter().map(|range| [range.start().0, range.len()]).collect(),
    }
}
