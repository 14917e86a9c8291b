//! Kernel writers: parts of the kernel that can write to a file without a signal. Whether one of them has the file open is unknown: the coverage
//! reports that this host has them.

use std::path::Path;

/// The kernel writers of this host. A module may be loaded at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelWriters {
    /// A device that pins pages of a memfd and writes to them: udmabuf or iommufd. Only a traced ioctl shows that it was given a file.
    pub(crate) memfd_devices: bool,
    /// iommufd is in use. It may pin the pages of a file long after it got it.
    pub(crate) iommufd_in_use: bool,
    /// A server of block devices that are backed by files, which it opens by path: `nvmet`, or the SCSI target with its file back
    /// end. Its writes raise no event.
    pub(crate) file_servers: bool,
}

impl KernelWriters {
    /// Looks for them in sysfs. If sysfs is not mounted, all may exist.
    pub(crate) fn of_host() -> Self {
        Self::below(Path::new("/sys"))
    }

    fn below(sysfs: &Path) -> Self {
        // These directories exist on every host.
        let exists = |folder: &str, name: &str| {
            let folder = sysfs.join(folder);
            folder.join(name).exists() || !folder.exists()
        };
        let iommufd = exists("class/misc", "iommu");
        let memfd_devices = iommufd || exists("class/misc", "udmabuf");
        // Number of references by open files and other modules. A built-in driver has no such file.
        let references = std::fs::read_to_string(sysfs.join("module/iommufd/refcnt"));
        let iommufd_in_use = iommufd && references.map_or(true, |count| count.trim() != "0");
        // A built-in server has no module directory, only its configuration.
        let serves = |module, configuration| {
            exists("module", module) || sysfs.join("kernel/config").join(configuration).exists()
        };
        let file_servers = serves("nvmet", "nvmet") || serves("target_core_file", "target");
        Self { memfd_devices, iommufd_in_use, file_servers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_writer_is_found_by_its_entry() {
        let none = KernelWriters::default();
        let device = KernelWriters { memfd_devices: true, ..none };
        let iommufd = KernelWriters { iommufd_in_use: true, ..device };
        let server = KernelWriters { file_servers: true, ..none };
        for (entry, found) in [
            ("class/misc/fuse", none),
            ("class/misc/udmabuf", device),
            ("class/misc/iommu", iommufd),
            ("module/loop", none),
            ("module/nvmet", server),
            ("module/target_core_file", server),
            ("kernel/config/nvmet", server),
            ("kernel/config/target", server),
        ] {
            let sysfs = tempfile::tempdir().unwrap();
            for folder in ["class/misc", "module", entry] {
                std::fs::create_dir_all(sysfs.path().join(folder)).unwrap();
            }
            assert_eq!(KernelWriters::below(sysfs.path()), found, "{entry}");
        }
    }

    #[test]
    fn iommufd_is_in_use_while_its_module_has_references() {
        let sysfs = tempfile::tempdir().unwrap();
        for folder in ["class/misc/iommu", "module/iommufd"] {
            std::fs::create_dir_all(sysfs.path().join(folder)).unwrap();
        }
        for (references, in_use) in [("0\n", false), ("2\n", true)] {
            std::fs::write(sysfs.path().join("module/iommufd/refcnt"), references).unwrap();
            let found = KernelWriters::below(sysfs.path());
            assert_eq!((found.memfd_devices, found.iommufd_in_use), (true, in_use));
        }
    }

    #[test]
    fn all_may_exist_where_sysfs_is_missing() {
        let all = KernelWriters { memfd_devices: true, iommufd_in_use: true, file_servers: true };
        assert_eq!(KernelWriters::below(Path::new("/nonexistent")), all);
    }
}
