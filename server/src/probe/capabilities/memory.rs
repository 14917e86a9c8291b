//! Configuration of the host's memory, read from sysfs and procfs: hugetlb, transparent huge pages, swap and zswap.

use std::fs;
use std::io;

use super::capability::{Availability, Capability};

pub(super) fn capabilities(hugetlb_page_sizes: &[u64]) -> [Capability; 4] {
    [hugetlb(hugetlb_page_sizes), shmem_thp(), swap(), zswap_off()]
}

/// The sizes in /sys/kernel/mm/hugepages, in bytes, ascending. Entries that cannot be read are omitted.
pub(super) fn hugetlb_page_sizes() -> Vec<u64> {
    let entries = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let mut sizes: Vec<u64> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            kib.checked_mul(1024)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

fn hugetlb(sizes: &[u64]) -> Capability {
    let free: Vec<String> = sizes
        .iter()
        .map(|bytes| {
            let kib = bytes / 1024;
            let free =
                fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages"));
            format!("{} free of {kib} KiB", free.as_deref().unwrap_or("unknown").trim())
        })
        .collect();
    let (availability, detail) = if sizes.is_empty() {
        (Availability::Unavailable, "/sys/kernel/mm/hugepages is empty".to_owned())
    } else {
        (Availability::Available, free.join(", "))
    };
    Capability { name: "hugetlb".into(), availability, detail, impact: "hugetlb files".into() }
}

fn shmem_thp() -> Capability {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let (availability, detail) = match fs::read_to_string(PATH) {
        Err(error) => (Availability::Unknown, format!("{PATH}: {error}")),
        Ok(text) => {
            let setting = text.split(['[', ']']).nth(1).unwrap_or("").to_owned();
            let on = matches!(setting.as_str(), "always" | "within_size" | "advise" | "force");
            let availability = if on { Availability::Available } else { Availability::Unavailable };
            (availability, format!("{PATH} is {setting}"))
        }
    };
    let impact = "transparent huge pages in files that request them";
    Capability { name: "shmem-thp".into(), availability, detail, impact: impact.into() }
}

fn swap() -> Capability {
    let (availability, detail) = match fs::read_to_string("/proc/swaps") {
        Err(error) => (Availability::Unknown, format!("/proc/swaps: {error}")),
        Ok(text) => {
            let areas: Vec<_> =
                text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
            if areas.is_empty() {
                (Availability::Unavailable, "/proc/swaps lists no areas".to_owned())
            } else {
                (Availability::Available, areas.join(", "))
            }
        }
    };
    Capability { name: "swap".into(), availability, detail, impact: "".into() }
}

fn zswap_off() -> Capability {
    const PATH: &str = "/sys/module/zswap/parameters/enabled";
    let (availability, detail) = match fs::read_to_string(PATH) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            (Availability::Available, format!("{PATH} does not exist"))
        }
        Err(error) => (Availability::Unknown, format!("{PATH}: {error}")),
        Ok(text) if text.trim() == "N" => (Availability::Available, format!("{PATH} is N")),
        Ok(text) => (Availability::Unavailable, format!("{PATH} is {}", text.trim())),
    };
    let impact =
        "the certainty that the content of a swap slot is on the device; states and slots stay exact";
    Capability { name: "zswap-off".into(), availability, detail, impact: impact.into() }
}
