//! Compares the emulated scan with the kernel's, over memory whose pages both know.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use fdmap_sys::address::AddressRange;
use nix::libc;
use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;
const PAGES: usize = 24;
/// Present, file, swapped, zero page: the categories that do not change spontaneously.
const STABLE_CATEGORIES: u64 = 0b11_1100;

/// Anonymous memory in which some pages were written and some only read.
struct AnonymousMemory(*mut u8);

impl AnonymousMemory {
    fn new(touched: &[u8]) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel picks a free range.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * 4096, protection, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the range was just mapped.
        unsafe { libc::madvise(start, PAGES * 4096, libc::MADV_NOHUGEPAGE) };
        let memory = Self(start.cast());
        for (page, access) in touched.iter().enumerate() {
            let byte = memory.0.wrapping_add(page * 4096);
            match access {
                // SAFETY: the page lies in the mapping.
                0 => unsafe { byte.write_volatile(1) },
                // SAFETY: as above.
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

impl Drop for AnonymousMemory {
    fn drop(&mut self) {
        // SAFETY: nothing else uses the mapping.
        unsafe { libc::munmap(self.0.cast(), PAGES * 4096) };
    }
}

fn kernel_of(pagemap: &File) -> impl Fn(&mut PmScanArg) -> Result<i64, Errno> {
    let fd = pagemap.as_raw_fd();
    move |argument| {
        // SAFETY: the argument has the kernel's layout; vec is null or refers to vec_len regions.
        let done = unsafe { libc::ioctl(fd, PAGEMAP_SCAN, std::ptr::from_mut(argument)) };
        Errno::result(done).map(i64::from)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn emulated_scan_reports_what_the_kernel_reports(
        touched in prop::collection::vec(0_u8..3, PAGES),
        masks in prop::array::uniform4(0_u64..16),
        vec_len in 1_usize..8,
        max_pages in 0_u64..20,
        cuts in prop::array::uniform4(0..=PAGES as u64),
    ) {
        let memory = AnonymousMemory::new(&touched);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let kernel = kernel_of(&pagemap);
        let [category_inverted, category_mask, category_anyof_mask, return_mask] = masks.map(|mask| mask << 2 & STABLE_CATEGORIES);
        let (start, end) = (memory.start(), memory.start() + PAGES as u64 * PAGE);
        let argument = PmScanArg {
            size: 96,
            start,
            end,
            max_pages,
            category_inverted,
            category_mask,
            category_anyof_mask,
            return_mask,
            ..PmScanArg::default()
        };
        let mut regions = vec![PageRegion::default(); vec_len];
        let mut by_kernel = argument;
        let count = call_kernel(&mut by_kernel, &mut regions, &kernel).unwrap();

        // Extents without states keep the kernel's categories but take the emulated path.
        let mut cuts = cuts.map(|page| start + page * PAGE);
        cuts.sort_unstable();
        let extent = |start, end| (start < end).then(|| FileExtent::without_states(AddressRange { start, end }));
        let extents: Vec<_> = [extent(cuts[0], cuts[1]), extent(cuts[2], cuts[3])].into_iter().flatten().collect();
        let argument = PmScanArg { vec_len: vec_len as u64, ..argument };
        let (output, walk_end) = walk(&argument, &extents, PAGE, &kernel).unwrap();

        // At the page limit the kernel may return an empty last region.
        let reported: Vec<_> = regions[..count].iter().filter(|region| region.start < region.end).copied().collect();
        let full = output.is_full() && walk_end < by_kernel.walk_end;
        prop_assert!(output.regions() == reported || full && reported.starts_with(&output.regions()[..output.regions().len() - 1]),
            "{:?} {reported:?}", output.regions());
        prop_assert!(walk_end == by_kernel.walk_end || output.is_full(), "{walk_end:#x} {:#x}", by_kernel.walk_end);
    }
}
