//! Memory of another process, which passes its userfaultfd: one message with the descriptor and a JSON list of mappings, as Firecracker sends
//! it when it loads a snapshot. There is no reply.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fdmap_sys::address::AddressRange;
use fdmap_sys::pidfd::PidFd;
use fdmap_sys::smaps::{MappingDetails, Smaps};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError, peer};

use super::super::PAGE_BYTES;
use super::super::chain::{ImageChain, ImageFile};
use super::super::error::ImageError;
use super::super::progress::Control;
use super::accept::{HandOff, PassedMapping};
use super::filler::{Filler, Guest};
use super::reads::Reads;
use super::spaces::refuse;
use super::{LazyNotice, LazyRegion, LazyReport};

/// Most mappings of a message.
const MAX_MAPPINGS: usize = 256;
/// Largest page size, that of x86-64's largest hugetlb pages.
const MAX_PAGE_BYTES: u64 = 1 << 30;
/// End of the addresses of x86-64 programs with 5-level page tables.
const MAX_ADDRESS: u64 = (1 << 56) - PAGE_BYTES;
/// Memory of a refused message whose accesses raise SIGBUS.
const MAX_REFUSED_BYTES: u64 = 1 << 40;

/// Fills the mappings of a hand-off from a file of the image. Returns when all content was
/// copied, or the process has ended; then the process needs no handler any more. `on_notice` is called if content cannot be read, from
/// this thread.
///
/// # Errors
/// [`ImageError`]; accesses to pages that were not copied raise SIGBUS then.
pub fn serve(
    chain: &Arc<ImageChain>,
    file: &ImageFile,
    handoff: HandOff,
    control: &Control,
    on_notice: &dyn Fn(LazyNotice<'_>),
) -> Result<LazyReport, ImageError> {
    let begun = Instant::now();
    let HandOff { connection, mappings, uffd } = handoff;
    let accepted = regions(&mappings, file.inode.size).map_err(ImageError::HandOff).and_then(|regions| {
        let (pidfd, smaps) = checked_process(connection.as_fd(), &uffd, &regions)?;
        let reads = Reads::start(chain, file.inode.shmid)?;
        Ok((reads, regions, OtherProcess { pidfd, smaps: Mutex::new(smaps), on_notice }))
    });
    let (reads, regions, guest) = match accepted {
        Ok(accepted) => accepted,
        Err(error) => {
            // What fails in this has no effect: the error is that of the hand-off.
            let _ = refuse(uffd, &refused_ranges(&mappings));
            return Err(error);
        }
    };
    let (end, counts) = Filler::new(&uffd, &regions, chain, file, control, &guest, reads).run()?;
    Ok(LazyReport { end, counts, elapsed: begun.elapsed() })
}

/// The process that connected, if its mappings can be filled through the userfaultfd.
fn checked_process(
    connection: BorrowedFd<'_>,
    uffd: &Userfaultfd,
    regions: &[LazyRegion],
) -> Result<(PidFd, Smaps), ImageError> {
    let Some(pidfd) = peer::process(connection)? else {
        return Err(ImageError::HandOff("the process has ended, or is in another pid namespace".to_owned()));
    };
    let pid = u32::try_from(peer::credentials(connection)?.pid).ok().filter(|pid| *pid != 0);
    let pid = pid.ok_or_else(|| ImageError::HandOff("the process is in another pid namespace".to_owned()))?;
    let mut smaps = Smaps::open(pid)?;
    for region in regions {
        let found = smaps.within(range_of(region))?;
        check_mappings(region, &found).map_err(ImageError::HandOff)?;
        // Whether it is registered with this userfaultfd: again, this has no effect. It would drop other modes.
        for part in found.iter().filter(|part| !part.is_wp_registered) {
            uffd.register_missing(part.vma.range.intersect(range_of(region))).map_err(|error| {
                let range = part.vma.range;
                match error.errno {
                    Errno::EBUSY => ImageError::HandOff(format!(
                        "the mapping {range} is registered with another userfaultfd"
                    )),
                    _ => error.into(),
                }
            })?;
        }
    }
    Ok((pidfd, smaps))
}

/// The ranges of a message that was refused, as far as they can be addresses. Bounded: the kernel is asked page by page where nothing is
/// mapped.
fn refused_ranges(mappings: &[PassedMapping]) -> Vec<AddressRange> {
    let mut left = MAX_REFUSED_BYTES;
    let mut ranges = Vec::new();
    for mapping in mappings {
        let start = mapping.base_host_virt_addr / PAGE_BYTES * PAGE_BYTES;
        let end = mapping.base_host_virt_addr.saturating_add(mapping.size).min(MAX_ADDRESS);
        let bytes = end.saturating_sub(start).min(left).next_multiple_of(PAGE_BYTES);
        ranges.extend(AddressRange::at(start, bytes).filter(|range| !range.is_empty()));
        left = left.saturating_sub(bytes);
    }
    ranges
}

struct OtherProcess<'a> {
    pidfd: PidFd,
    /// Of the address space at the hand-off.
    smaps: Mutex<Smaps>,
    on_notice: &'a dyn Fn(LazyNotice<'_>),
}

impl Guest for OtherProcess<'_> {
    fn has_ended(&self) -> bool {
        self.pidfd.exited().unwrap_or(false)
    }

    fn registered(&self, range: AddressRange) -> Result<Vec<AddressRange>, SyscallError> {
        // No code panics with the lock held.
        let parts = self.smaps.lock().unwrap_or_else(PoisonError::into_inner).within(range)?;
        Ok(parts.iter().filter(|part| part.is_missing_registered).map(|part| part.vma.range).collect())
    }

    fn is_awaited(&self) -> bool {
        false
    }

    fn notice(&self, notice: LazyNotice<'_>) {
        (self.on_notice)(notice);
    }
}

/// The mappings that a complete message passes, for a file of `size` bytes. Pure.
///
/// # Errors
/// The reason why the message is invalid.
pub fn parse_mappings(message: &[u8], size: u64) -> Result<Vec<LazyRegion>, String> {
    regions(&serde_json::from_slice::<Vec<PassedMapping>>(message).map_err(|error| error.to_string())?, size)
}

/// The mappings of a message, for a file of `size` bytes; or the reason why it is invalid.
fn regions(mappings: &[PassedMapping], size: u64) -> Result<Vec<LazyRegion>, String> {
    if mappings.is_empty() || mappings.len() > MAX_MAPPINGS {
        return Err(format!("{} mappings, expected 1 to {MAX_MAPPINGS}", mappings.len()));
    }
    let mut regions = Vec::with_capacity(mappings.len());
    for mapping in mappings {
        let region = region(mapping, size)?;
        let overlaps = |other: &LazyRegion| !range_of(other).intersect(range_of(&region)).is_empty();
        if regions.iter().any(overlaps) {
            return Err(format!("the mapping at {:#x} overlaps another one", region.address));
        }
        regions.push(region);
    }
    Ok(regions)
}

fn region(mapping: &PassedMapping, size: u64) -> Result<LazyRegion, String> {
    let PassedMapping { base_host_virt_addr: address, size: bytes, offset, .. } = *mapping;
    let page_bytes = mapping.page_size.or(mapping.page_size_kib).unwrap_or(PAGE_BYTES);
    if !page_bytes.is_power_of_two() || !(PAGE_BYTES..=MAX_PAGE_BYTES).contains(&page_bytes) {
        return Err(format!("page size {page_bytes} of the mapping at {address:#x}"));
    }
    if [address, bytes, offset].iter().any(|value| !value.is_multiple_of(page_bytes)) || bytes == 0 {
        return Err(format!(
            "{bytes} bytes at {address:#x}, offset {offset}: not in whole pages of {page_bytes} bytes"
        ));
    }
    let end = offset.checked_add(bytes).filter(|_| address.checked_add(bytes).is_some());
    if end.is_none_or(|end| end > size.next_multiple_of(page_bytes)) {
        return Err(format!(
            "{bytes} bytes from offset {offset} on extend past the end of the file, which has {size} bytes"
        ));
    }
    Ok(LazyRegion { address, bytes, offset, page_bytes })
}

const fn range_of(region: &LazyRegion) -> AddressRange {
    AddressRange { start: region.address, end: region.address + region.bytes }
}

/// Checks that mappings cover the region that are private (see the head of [`super`]), registered for missing pages, and of its page size.
/// Other mappings would read as zero where a page is absent, and a larger page size than theirs would settle pages that were not filled.
fn check_mappings(region: &LazyRegion, found: &[MappingDetails]) -> Result<(), String> {
    let wanted = range_of(region);
    let mut covered = 0;
    for mapping in found {
        let range = mapping.vma.range;
        if mapping.vma.shared {
            return Err(format!(
                "the mapping at {:#x} is shared; only private memory is filled",
                range.start
            ));
        }
        if !mapping.is_missing_registered {
            return Err(format!("the mapping {range} is not registered for missing pages"));
        }
        if mapping.is_minor_registered {
            return Err(format!("the mapping {range} is registered for minor faults"));
        }
        if mapping.page_bytes != region.page_bytes {
            let (found, expected) = (mapping.page_bytes, region.page_bytes);
            return Err(format!(
                "the mapping {range} has pages of {found} bytes, and the message has {expected}"
            ));
        }
        covered += range.intersect(wanted).len();
    }
    if covered != region.bytes {
        return Err(format!("the process maps {covered} of {} bytes of {wanted}", region.bytes));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fdmap_sys::maps::Vma;

    use super::*;

    fn parsed(json: &str, size: u64) -> Result<Vec<LazyRegion>, String> {
        parse_mappings(json.as_bytes(), size)
    }

    #[test]
    fn messages_of_all_versions_of_firecracker_are_understood() {
        let region = |address, offset, page_bytes| LazyRegion { address, bytes: 4 << 20, offset, page_bytes };
        for (json, expected) in [
            (
                r#"[{"base_host_virt_addr":8388608,"size":4194304,"offset":0}]"#,
                vec![region(8 << 20, 0, 4096)],
            ),
            (
                r#"[{"base_host_virt_addr":8388608,"size":4194304,"offset":0,"page_size":2097152,"page_size_kib":2097152},
                    {"base_host_virt_addr":16777216,"size":4194304,"offset":4194304,"page_size":2097152,"page_size_kib":2097152}]"#,
                vec![region(8 << 20, 0, 2 << 20), region(16 << 20, 4 << 20, 2 << 20)],
            ),
            (
                r#"[{"base_host_virt_addr":8388608,"size":4194304,"offset":0,"page_size_kib":4096,"later":[1]}]"#,
                vec![region(8 << 20, 0, 4096)],
            ),
        ] {
            assert_eq!(parsed(json, 8 << 20).unwrap(), expected, "{json}");
        }
    }

    #[test]
    fn invalid_messages_are_refused_with_the_reason() {
        let one = |address: u64, size: u64, offset: u64, page: u64| {
            format!(
                r#"{{"base_host_virt_addr":{address},"size":{size},"offset":{offset},"page_size":{page}}}"#
            )
        };
        let far = u64::MAX - 4095;
        for (mappings, reason) in [
            (String::new(), "0 mappings, expected 1 to 256"),
            (vec![one(4096, 4096, 0, 4096); 257].join(","), "257 mappings, expected 1 to 256"),
            (one(4096, 4096, 0, 0), "page size 0 of"),
            (one(4096, 4096, 0, 12288), "page size 12288 of"),
            (one(4096, 4096, 0, 2 << 30), "page size 2147483648 of"),
            (one(4096, 0, 0, 4096), "0 bytes at 0x1000, offset 0: not in whole pages"),
            (one(4097, 4096, 0, 4096), "not in whole pages"),
            (one(4096, 4096, 100, 4096), "not in whole pages"),
            (one(4096, 12288, 0, 4096), "extend past the end of the file"),
            (one(4096, 4096, far, 4096), "extend past the end of the file"),
            (one(far, 8192, 0, 4096), "extend past the end of the file"),
            (one(4096, 8192, 0, 4096) + "," + &one(8192, 4096, 0, 4096), "overlaps another one"),
            (r#"{"size":4096,"offset":0}"#.to_owned(), "missing field `base_host_virt_addr`"),
            (r#"{"base_host_virt_addr":-1,"size":4096,"offset":0}"#.to_owned(), "invalid value"),
        ] {
            let error = parsed(&format!("[{mappings}]"), 2 * 4096).unwrap_err();
            assert!(error.contains(reason), "{error}, expected {reason}");
        }
    }

    #[test]
    fn only_private_registered_memory_of_the_page_size_is_accepted() {
        let vma = |start, end| Vma {
            range: AddressRange { start, end },
            offset: 0,
            device: 0,
            inode: 0,
            readable: true,
            writable: true,
            executable: false,
            shared: false,
        };
        let good = |start, end| MappingDetails {
            vma: vma(start, end),
            page_bytes: 0x1000,
            is_missing_registered: true,
            is_wp_registered: false,
            is_minor_registered: false,
        };
        let all = good(0x2000, 0x4000);
        let region = LazyRegion { address: 0x2000, bytes: 0x2000, offset: 0, page_bytes: 0x1000 };
        let error = |found: &[MappingDetails]| check_mappings(&region, found).err().unwrap_or_default();
        assert_eq!(error(&[good(0x1000, 0x3000), good(0x3000, 0x9000)]), "");
        assert_eq!(error(&[MappingDetails { is_wp_registered: true, ..all }]), "");
        let shared = MappingDetails { vma: Vma { shared: true, ..all.vma }, ..all };
        assert!(error(&[shared]).contains("is shared"));
        let unregistered = MappingDetails { is_missing_registered: false, ..good(0x3000, 0x4000) };
        assert_eq!(
            error(&[good(0x2000, 0x3000), unregistered]),
            "the mapping 0x3000..0x4000 is not registered for missing pages"
        );
        let minor = MappingDetails { is_minor_registered: true, ..all };
        assert!(error(&[minor]).contains("minor faults"));
        let huge = MappingDetails { page_bytes: 2 << 20, ..all };
        assert!(error(&[huge]).contains("has pages of 2097152 bytes, and the message has 4096"));
        assert_eq!(error(&[good(0x2000, 0x3000)]), "the process maps 4096 of 8192 bytes of 0x2000..0x4000");
        assert!(error(&[]).contains("maps 0 of 8192 bytes"));
    }

    #[test]
    fn ranges_of_a_refused_message_are_whole_pages_and_bounded() {
        let mapping = |base_host_virt_addr, size| PassedMapping {
            base_host_virt_addr,
            size,
            offset: 0,
            page_size: None,
            page_size_kib: None,
        };
        let found = refused_ranges(&[mapping(4097, 4096), mapping(8192, 0), mapping(1 << 20, u64::MAX)]);
        let start = 1 << 20;
        let end = start + MAX_REFUSED_BYTES - 2 * 4096;
        let expected = [AddressRange { start: 4096, end: 3 * 4096 }, AddressRange { start, end }];
        assert_eq!(found, expected);
        assert_eq!(refused_ranges(&[mapping(u64::MAX, 4096)]), []);
    }

    #[test]
    fn mapping_lengths_fit_the_file_rounded_up() {
        assert_eq!(
            parsed(r#"[{"base_host_virt_addr":4096,"size":8192,"offset":0}]"#, 4097).unwrap().len(),
            1
        );
    }
}
