//! Compares the kernel's swap areas with `/proc/swaps`. Pure.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use fdmap_proto::units::{low_u8, to_u64};
use fdmap_proto::{SwapArea, SwapAreaKind};

use crate::bpf::records::AreaRecord;

/// KiB of a page. The programs are used on x86-64 only.
const PAGE_KIB: u64 = 4;
/// Bits of the minor number in `dev_t` (linux/kdev_t.h).
const MINOR_BITS: u32 = 20;

/// The areas of the records, one record per swap type, if they are those of `/proc/swaps`. It lists areas in ascending order of swap
/// types.
pub(super) fn areas(records: &[AreaRecord], swaps: &str) -> Result<Vec<SwapArea>, String> {
    let used: Vec<_> = records.iter().enumerate().filter(|(_, record)| record.flags != 0).collect();
    let listed: Vec<_> = swaps
        .lines()
        .skip(1)
        .map(listed)
        .collect::<Option<_>>()
        .ok_or_else(|| format!("/proc/swaps has a line that is no swap area: {swaps:?}"))?;
    if used.len() != listed.len() {
        return Err(format!(
            "the kernel has {} swap areas, and /proc/swaps lists {}",
            used.len(),
            listed.len()
        ));
    }
    used.into_iter()
        .zip(listed)
        .map(|((swap_type, record), listed)| area(swap_type, record, listed))
        .collect()
}

fn area(swap_type: usize, record: &AreaRecord, listed: Listed) -> Result<SwapArea, String> {
    let Listed { path, kind, kib } = listed;
    if record.pages * PAGE_KIB != kib {
        return Err(format!(
            "swap area {swap_type} has {} pages, and /proc/swaps lists {kib} KiB",
            record.pages
        ));
    }
    Ok(SwapArea {
        swap_type: low_u8(to_u64(swap_type)),
        kind,
        path: path.into(),
        pages: record.pages,
        device: (record.device >> MINOR_BITS, record.device & ((1 << MINOR_BITS) - 1)),
        inode: record.inode,
    })
}

/// A line of `/proc/swaps`.
struct Listed {
    path: OsString,
    kind: SwapAreaKind,
    kib: u64,
}

fn listed(line: &str) -> Option<Listed> {
    let mut fields = line.split_ascii_whitespace();
    let path = unescaped(fields.next()?);
    let kind = match fields.next()? {
        "partition" => SwapAreaKind::Partition,
        "file" => SwapAreaKind::File,
        _ => return None,
    };
    Some(Listed { path, kind, kib: fields.next()?.parse().ok()? })
}

/// Replaces octal escapes such as `\040`, which the kernel writes for white space and backslashes (`seq_path`).
fn unescaped(text: &str) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => bytes.push(*first),
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWAPS: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
        /dev/zram0                              partition\t1048572\t\t0\t\t100\n\
        /var/my\\040swap\\134file\\040(deleted)   file\t\t4096\t\t12\t\t-2\n";

    fn record(pages: u64, device: u32) -> AreaRecord {
        AreaRecord { flags: 3, pages, inode: 7, device, pad: 0 }
    }

    const NONE: AreaRecord = AreaRecord { flags: 0, pages: 262_143, inode: 0, device: 0, pad: 0 };

    #[test]
    fn areas_have_the_types_of_the_kernel_and_the_paths_of_proc_swaps() {
        let found =
            areas(&[record(262_143, 252 << 20 | 5), NONE, record(1024, 8 << 20 | 300)], SWAPS).unwrap();
        let zram = SwapArea {
            swap_type: 0,
            kind: SwapAreaKind::Partition,
            path: "/dev/zram0".into(),
            pages: 262_143,
            device: (252, 5),
            inode: 7,
        };
        let file = SwapArea {
            swap_type: 2,
            kind: SwapAreaKind::File,
            path: "/var/my swap\\file (deleted)".into(),
            pages: 1024,
            device: (8, 300),
            inode: 7,
        };
        assert_eq!(found, [zram, file]);
        assert_eq!(areas(&[NONE], "Filename Type Size Used Priority\n"), Ok(Vec::new()));
        assert_eq!(areas(&[], ""), Ok(Vec::new()));
    }

    #[test]
    fn areas_that_differ_from_proc_swaps_are_rejected() {
        let [zram, file] = [record(262_143, 1), record(1024, 1)];
        for records in [&[][..], &[zram], &[file, zram], &[zram, file, file], &[zram, record(1025, 1)]] {
            assert!(areas(records, SWAPS).is_err(), "{records:?}");
        }
        assert!(areas(&[zram], "header\n/dev/zram0 dirt 1048572 0 0\n").is_err());
        assert!(areas(&[zram], "header\n/dev/zram0\n").is_err());
    }

    #[test]
    fn text_that_is_no_escape_stays() {
        for (text, path) in
            [("\\", "\\"), ("a\\01", "a\\01"), ("\\999", "\\999"), ("\\011x", "\tx"), ("é\\040", "é ")]
        {
            assert_eq!(unescaped(text), *path, "{text:?}");
        }
    }
}
