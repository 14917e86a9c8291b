//! Mappings whose writes are observed by page tables: proving that they stand, and harvesting them.
//!
//! PAGEMAP_SCAN finds nothing and says so without an error where a mapping has gone. So a scan counts only if the mapping was
//! there all the while: each VMA of the range is looked up (it must be of this file, at this page), and one page of it is
//! scanned with PM_SCAN_CHECK_WPASYNC, which fails unless the VMA is registered. A registered VMA cannot come back once
//! it is gone: the service alone registers, and does not while it harvests.

use fdmap_proto::tracking::TrackedMapping;
use fdmap_proto::units::{MappingId, PageIndex, PageRange, PageSize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_sys::pidfd;
use fdmap_sys::{Errno, SyscallError};

use super::forked::Held;
use super::forks::ForkSubscription;
use super::ranges;
use super::record::ObservedRecord;

/// Regions that one scan can bring: 96 KiB.
const REGIONS: usize = 4096;

/// A part of a file that one VMA, or several side by side, map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingExtent {
    /// Where.
    pub range: AddressRange,
    /// The page of the file at its start.
    pub first_page: PageIndex,
}

impl MappingExtent {
    /// The pages of the file that it maps.
    #[must_use]
    pub const fn pages(&self, page_size: PageSize) -> PageRange {
        PageRange::at(self.first_page, (self.range.end - self.range.start) / page_size.bytes())
    }

    /// The file's page at an address in it.
    const fn page_at(&self, address: u64, page_size: PageSize) -> PageIndex {
        self.first_page.plus((address - self.range.start) / page_size.bytes())
    }
}

/// What of a piece one VMA maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What.
    pub piece: MappingExtent,
    /// All of the VMA, which may reach beyond.
    pub vma: AddressRange,
}

/// One mapping that a client named, and what is left of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its id.
    pub id: MappingId,
    /// What stands of it, in ascending order.
    pub pieces: Vec<MappingExtent>,
    /// Its owner has let go of it when it could not be written through any more: its end loses nothing.
    pub leaving: bool,
}

/// The mappings of one address space that were handed over together, or that a fork made.
#[derive(Debug)]
pub struct Observed {
    /// Names its descriptors.
    pub key: u64,
    /// Its process.
    pub pid: u32,
    /// Its page tables.
    pub pagemap: Pagemap,
    /// Its VMAs.
    pub maps: Maps,
    /// As long as one is open, the kernel keeps track.
    pub userfaultfd: Held,
    /// The mappings.
    pub mappings: Vec<Mapping>,
    /// A fork made it.
    pub inherited: bool,
    /// Its forks are told as long as this lives.
    pub forks: Option<ForkSubscription>,
    /// Faults of its children that have ended, as they were at the last look, where forks are not told.
    pub reaped: u64,
}

/// The file that is mapped.
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// Of its inode, as `stat` has it.
    pub device: u64,
    /// Of its inode.
    pub inode: u64,
    /// The base page size.
    pub page_size: PageSize,
}

/// What a look at the VMAs of a mapping found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What stands and is registered, one for each VMA.
    pub parts: Vec<Part>,
    /// The whole address space has gone.
    pub gone: bool,
}

/// What a harvest brought.
#[derive(Clone, Debug, Default)]
pub struct Harvest {
    /// Pages that were written, sorted.
    pub written: Vec<PageRange>,
    /// Pages whose marks are lost.
    pub lost: Vec<PageRange>,
}

impl Observed {
    /// What is to stand.
    pub fn pieces(&self) -> impl Iterator<Item = &MappingExtent> {
        self.mappings.iter().flat_map(|mapping| &mapping.pieces)
    }

    /// All pages that it maps.
    #[must_use]
    pub fn pages(&self, page_size: PageSize) -> Vec<PageRange> {
        let mut pages: Vec<_> = self.pieces().map(|piece| piece.pages(page_size)).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// What the journal keeps of it.
    #[must_use]
    pub fn record(&self) -> ObservedRecord {
        ObservedRecord { key: self.key, pid: self.pid, mappings: self.mappings.clone() }
    }

    /// True if a child of it, of which nothing was told, has ended and was waited for since this was asked last.
    pub fn lost_a_child(&mut self) -> bool {
        if self.forks.is_some() {
            return false;
        }
        // It may have ended itself: that shows elsewhere.
        let reaped = pidfd::faults_of_reaped_children(self.pid).unwrap_or(self.reaped);
        std::mem::replace(&mut self.reaped, reaped) != reaped
    }

    /// What can be told of its mappings.
    pub fn told(&self) -> impl Iterator<Item = TrackedMapping> {
        self.mappings.iter().flat_map(|mapping| {
            mapping.pieces.iter().map(|piece| TrackedMapping {
                id: mapping.id,
                pid: self.pid,
                address: piece.range.start,
                length: piece.range.end - piece.range.start,
                first_page: piece.first_page,
                inherited: self.inherited,
            })
        })
    }

    /// What of `piece` stands and is registered.
    ///
    /// # Errors
    /// A system call, other than by the end of the address space.
    pub fn standing(&self, file: Mapped, piece: &MappingExtent) -> Result<Standing, SyscallError> {
        let vmas = match self.vmas(file, piece) {
            Ok(vmas) => vmas,
            Err(error) if is_gone(&error) => return Ok(Standing { parts: Vec::new(), gone: true }),
            Err(error) => return Err(error),
        };
        let mut standing = Standing::default();
        for found in vmas {
            let start = found.piece.range.start;
            let page = AddressRange { start, end: start + file.page_size.bytes() };
            let flags = ScanFlags::CHECK_WPASYNC;
            match self.pagemap.scan(page, flags, &mut [PageRegion::default()]) {
                Ok(_) => standing.parts.push(found),
                Err(SyscallError { errno: Errno::EPERM, .. }) => {}
                Err(error) if is_gone(&error) => return Ok(Standing { parts: Vec::new(), gone: true }),
                Err(error) => return Err(error),
            }
        }
        Ok(standing)
    }

    /// The parts of `piece` that shared VMAs map from the same pages of the file still, one for each VMA.
    pub(super) fn vmas(&self, file: Mapped, piece: &MappingExtent) -> Result<Vec<Part>, SyscallError> {
        let fits = |vma: &Vma| {
            let start = vma.range.start.max(piece.range.start);
            let offset = file.page_size.offset_of(piece.page_at(start, file.page_size));
            let same = vma.shared && vma.device == file.device && vma.inode == file.inode;
            same && offset == vma.offset.checked_add(start - vma.range.start)
        };
        let part = |vma: &Vma| {
            let start = vma.range.start.max(piece.range.start);
            let range = AddressRange { start, end: vma.range.end.min(piece.range.end) };
            let piece = MappingExtent { range, first_page: piece.page_at(start, file.page_size) };
            Part { piece, vma: vma.range }
        };
        let mut found = Vec::new();
        let mut at = piece.range.start;
        while at < piece.range.end {
            let vma = match self.maps.vma_at_or_after(at, false) {
                Ok(vma) => vma,
                // A kernel before 6.11: all of the text is read.
                Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                    let vmas = self.maps.all()?;
                    let overlap =
                        |vma: &&Vma| vma.range.start < piece.range.end && vma.range.end > piece.range.start;
                    return Ok(vmas.iter().filter(overlap).filter(|vma| fits(vma)).map(part).collect());
                }
                Err(error) => return Err(error),
            };
            let Some(vma) = vma.filter(|vma| vma.range.start < piece.range.end) else { break };
            if fits(&vma) {
                found.push(part(&vma));
            }
            at = vma.range.end;
        }
        Ok(found)
    }

    /// True if every piece stands, each as one VMA, which does not reach beyond it: so that they count as many as the kernel
    /// counts.
    ///
    /// # Errors
    /// As [`Self::standing`].
    pub fn stands(&self, file: Mapped) -> Result<bool, SyscallError> {
        for piece in self.pieces() {
            if self.standing(file, piece)?.parts != [Part { piece: *piece, vma: piece.range }] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes the pages that were written through all mappings since the last harvest and protects them again. What does
    /// not stand any more is let go of, and is lost.
    ///
    /// # Errors
    /// A system call; then nothing is known of any page of these mappings, and marks may be lost.
    pub fn harvest(&mut self, file: Mapped, regions: &mut Regions) -> Result<Harvest, SyscallError> {
        let mut harvest = Harvest::default();
        for at in 0..self.mappings.len() {
            let (mut standing, mut lost) = (Vec::<Part>::new(), Vec::new());
            for piece in &self.mappings[at].pieces {
                let pages = piece.pages(file.page_size);
                let whole = self.take(file, piece, regions, &mut harvest.written)?;
                let found = self.standing(file, piece)?.parts;
                let mut held: Vec<_> = found.iter().map(|found| found.piece.pages(file.page_size)).collect();
                ranges::normalize(&mut held);
                if whole {
                    lost.extend(ranges::missing(pages, &held));
                } else {
                    // It failed part of the way, and what it took by then is not known. What stands is armed anew: the scan
                    // stopped before it got there.
                    lost.push(pages);
                    for part in &found {
                        self.take(file, &part.piece, regions, &mut harvest.written)?;
                    }
                }
                for part in found {
                    match standing.last_mut() {
                        // VMAs that were split have been joined again.
                        Some(last)
                            if last.vma == part.vma && last.piece.range.end == part.piece.range.start =>
                        {
                            last.piece.range.end = part.piece.range.end;
                        }
                        _ => standing.push(part),
                    }
                }
            }
            self.mappings[at].pieces = standing.into_iter().map(|part| part.piece).collect();
            if !self.mappings[at].leaving {
                harvest.lost.extend(lost);
            }
        }
        self.mappings.retain(|mapping| !mapping.pieces.is_empty());
        ranges::normalize(&mut harvest.written);
        ranges::normalize(&mut harvest.lost);
        Ok(harvest)
    }

    /// Takes and protects the written pages of one piece. `false` if a part of it is not registered any more, or the address
    /// space has gone.
    fn take(
        &self,
        file: Mapped,
        piece: &MappingExtent,
        Regions(regions): &mut Regions,
        written: &mut Vec<PageRange>,
    ) -> Result<bool, SyscallError> {
        let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
        let mut rest = piece.range;
        while rest.start < rest.end {
            let scanned = match self.pagemap.scan(rest, flags, regions) {
                Ok(scanned) => scanned,
                Err(error) if is_gone(&error) || error.errno == Errno::EPERM => return Ok(false),
                Err(error) => return Err(error),
            };
            for region in &regions[..scanned.count] {
                let pages = (region.end - region.start).div_ceil(file.page_size.bytes());
                written.push(PageRange::at(piece.page_at(region.start, file.page_size), pages));
            }
            if scanned.walk_end <= rest.start {
                break;
            }
            rest.start = scanned.walk_end;
        }
        Ok(true)
    }
}

/// Room for what a scan brings.
#[derive(Debug)]
pub struct Regions(Vec<PageRegion>);

impl Default for Regions {
    fn default() -> Self {
        Self(vec![PageRegion::default(); REGIONS])
    }
}

/// The process has exited, or runs another program now.
fn is_gone(error: &SyscallError) -> bool {
    error.errno == Errno::ESRCH
}
