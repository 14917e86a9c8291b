//! The walk against the kernel's own, over memory of which both know the same.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use fdmap_sys::address::AddressRange;
use nix::libc;
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;
const PAGES: usize = 24;
/// Present, file, swapped, zero page: what does not change by itself.
const STEADY: u64 = 0b11_1100;

/// Anonymous memory, of which some pages were written and some read only.
struct Memory(*mut u8);

impl Memory {
    fn new(touched: &[u8]) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: anonymous memory, where the kernel likes.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * 4096, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: the range was mapped just now.
        unsafe { libc::madvise(at, PAGES * 4096, libc::MADV_NOHUGEPAGE) };
        let memory = Self(at.cast());
        for (page, how) in touched.iter().enumerate() {
            let byte = memory.0.wrapping_add(page * 4096);
            match how {
                // SAFETY: the page lies in the mapping.
                0 => unsafe { byte.write_volatile(1) },
                // SAFETY: likewise.
                1 => _ = unsafe { byte.read_volatile() },
                _ => {}
            }
        }
        memory
    }

    fn start(&self) -> u64 {
        memory::address_of(self.0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is nobody else's.
        unsafe { libc::munmap(self.0.cast(), PAGES * 4096) };
    }
}

fn kernel_of(pagemap: &File) -> impl Fn(&mut Argument) -> Result<i64, Errno> {
    let fd = pagemap.as_raw_fd();
    move |argument| {
        // SAFETY: the argument is the kernel's struct; vec is null or holds vec_len regions.
        let done = unsafe { libc::ioctl(fd, scan::REQUEST, std::ptr::from_mut(argument)) };
        Errno::result(done).map(i64::from)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn walk_tells_what_the_kernel_tells(
        touched in prop::collection::vec(0_u8..3, PAGES),
        masks in prop::array::uniform4(0_u64..16),
        vec_len in 1_usize..8,
        max_pages in 0_u64..20,
        cuts in prop::array::uniform4(0..=PAGES as u64),
    ) {
        let memory = Memory::new(&touched);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let kernel = kernel_of(&pagemap);
        let [category_inverted, category_mask, category_anyof_mask, return_mask] = masks.map(|mask| mask << 2 & STEADY);
        let (start, end) = (memory.start(), memory.start() + PAGES as u64 * PAGE);
        let asked = Argument {
            size: 96,
            start,
            end,
            max_pages,
            category_inverted,
            category_mask,
            category_anyof_mask,
            return_mask,
            ..Argument::default()
        };
        let mut regions = vec![Region::default(); vec_len];
        let mut theirs = asked;
        let count = ask(&mut theirs, &mut regions, &kernel).unwrap();

        // Some of it is taken for files that say nothing: then the kernel's word holds, but through our own walk.
        let mut cuts = cuts.map(|page| start + page * PAGE);
        cuts.sort_unstable();
        let piece = |start, end| (start < end).then(|| Piece::silent(AddressRange { start, end }));
        let pieces: Vec<_> = [piece(cuts[0], cuts[1]), piece(cuts[2], cuts[3])].into_iter().flatten().collect();
        let asked = Argument { vec_len: vec_len as u64, ..asked };
        let (found, walk_end) = walk(&asked, &pieces, PAGE, &kernel).unwrap();

        // The kernel may end with a region of no page where the number of pages is reached.
        let told: Vec<_> = regions[..count].iter().filter(|region| region.start < region.end).copied().collect();
        let full = found.is_full() && walk_end < theirs.walk_end;
        prop_assert!(found.regions() == told || full && told.starts_with(&found.regions()[..found.regions().len() - 1]),
            "{:?} {told:?}", found.regions());
        prop_assert!(walk_end == theirs.walk_end || found.is_full(), "{walk_end:#x} {:#x}", theirs.walk_end);
    }
}
