//! Counters of the host that show whether pages were swapped out. Pure, except for [`SwapOuts::now`].

use fdmap_sys::{Errno, SyscallError};

use super::kernel_file::{self, PROC_SUPER_MAGIC, SYSFS_MAGIC};

const MODULES: &str = "/sys/module";
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// Pages that the host has swapped out since it started, each counted before it is written or marked.
///
/// The kernel counts them per processor, and `/proc/vmstat` sums over all processors when it is read (`all_vm_events` in mm/vmstat.c). So,
/// unlike the counters of zones and nodes in the same file, they do not lag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SwapOuts {
    /// `pswpout`: pages that were written to swap areas.
    written: u64,
    /// `swpout_zero`: pages that were marked as zero; 0 if the kernel does not count them.
    marked: u64,
    /// `zswpout`: pages that zswap took; 0 if the kernel has no zswap.
    compressed: u64,
}

impl SwapOuts {
    /// The counters now. `Ok(None)` if zswap may have pages or take some, or if a counter is missing.
    ///
    /// # Errors
    /// Of the file that cannot be read, or that is not the kernel's.
    pub(super) fn now() -> Result<Option<Self>, SyscallError> {
        let switch = match kernel_file::read(ZSWAP, SYSFS_MAGIC) {
            // /sys may be hidden.
            Err(error) if error.errno == Errno::ENOENT => {
                kernel_file::open(MODULES, SYSFS_MAGIC)?;
                None
            }
            switch => Some(switch?),
        };
        let vmstat = kernel_file::read("/proc/vmstat", PROC_SUPER_MAGIC)?;
        let meminfo = kernel_file::read("/proc/meminfo", PROC_SUPER_MAGIC)?;
        Ok(Self::parse(&vmstat, &meminfo, switch.as_deref()))
    }

    /// `switch`: the content of [`ZSWAP`], if the kernel has it.
    fn parse(vmstat: &str, meminfo: &str, switch: Option<&str>) -> Option<Self> {
        let written = counter(vmstat, "pswpout")?;
        // Older kernels mark no pages.
        let marked = counter(vmstat, "swpout_zero").unwrap_or(0);
        match switch {
            None => Some(Self { written, marked, compressed: 0 }),
            Some(switch) => {
                let is_off = switch.trim() == "N" && counter(meminfo, "Zswapped:")? == 0;
                let compressed = counter(vmstat, "zswpout")?;
                is_off.then_some(Self { written, marked, compressed })
            }
        }
    }
}

/// The number after `name` at the start of a line.
fn counter(text: &str, name: &str) -> Option<u64> {
    let fields = text.lines().map(|line| line.split_ascii_whitespace());
    let mut named = fields.filter_map(|mut line| (line.next() == Some(name)).then(|| line.next()).flatten());
    named.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VMSTAT: &str = "nr_free_pages 1\npswpin 5\npswpout 77\nswpout_zero 3\nzswpin 0\nzswpout 9\n";
    const MEMINFO: &str = "MemTotal:       1000 kB\nZswap:              0 kB\nZswapped:           0 kB\n";

    #[test]
    fn counters_are_valid_while_zswap_is_off_and_empty() {
        let off = Some(SwapOuts { written: 77, marked: 3, compressed: 9 });
        let older = Some(SwapOuts { written: 77, marked: 0, compressed: 0 });
        assert_eq!(SwapOuts::parse(VMSTAT, MEMINFO, Some("N\n")), off);
        assert_eq!(SwapOuts::parse("pswpout 77\n", "", None), older);
        let filled = MEMINFO.replace("Zswapped:           0", "Zswapped:           4");
        for (vmstat, meminfo, switch) in [
            (VMSTAT, MEMINFO, Some("Y\n")),
            (VMSTAT, filled.as_str(), Some("N\n")),
            (VMSTAT, "MemTotal: 1000 kB\n", Some("N\n")),
            ("pswpout 77\n", MEMINFO, Some("N\n")),
            ("pswpin 5\n", MEMINFO, None),
            ("pswpout many\n", MEMINFO, None),
        ] {
            assert_eq!(SwapOuts::parse(vmstat, meminfo, switch), None, "{vmstat:?} {meminfo:?} {switch:?}");
        }
    }
}
