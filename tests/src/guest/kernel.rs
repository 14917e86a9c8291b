//! The kernels that guests boot: Debian's, which `.ci/setup e2e-guest` unpacks below `target/` and never installs.

use std::path::{Path, PathBuf};

use super::initramfs::Archive;
use crate::host::output;
use crate::{HarnessError, HarnessResult};

/// A kernel and its initramfs.
#[derive(Debug)]
pub struct Kernel {
    pub image: PathBuf,
    /// Holds `guest_init` and the modules.
    pub initramfs: PathBuf,
}

/// The processor of guests. QEMU 7.2 without KVM leaves random bits in EFLAGS after a cmpxchg16b (it reads stale condition
/// codes), and an interrupt right after it crashes the guest. Kernels do not use the instruction on a processor without it.
pub(super) const CPU: &str = "qemu64,-cx16";

/// The kernel that runs `guest_init`.
const VERSION: &str = "6.1";

/// The unpacked files of a kernel.
#[derive(Debug)]
pub(super) struct KernelFiles {
    pub(super) image: PathBuf,
    modules: Vec<PathBuf>,
}

impl KernelFiles {
    /// Finds the kernel of a version such as `6.1`.
    pub(super) fn find(version: &str) -> HarnessResult<Self> {
        let unpacked = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target/guest");
        let missing =
            || HarnessError::Missing(format!("a kernel {version} for guests in {}", unpacked.display()));
        let of_version = |name: &str| name.strip_prefix(version).is_some_and(|rest| rest.starts_with('.'));
        let release = |path: &Path| {
            let name = path.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
            of_version(&name).then_some(name)
        };
        let mut images = files_below(&unpacked.join("boot"));
        images.sort();
        let found = images.into_iter().find_map(|path| release(&path).map(|release| (path, release)));
        let (image, release) = found.ok_or_else(missing)?;
        Ok(Self { image, modules: files_below(&unpacked.join("lib/modules").join(release)) })
    }

    /// Adds modules, each after its dependencies, as `modules/N.ko`. A module that the kernel does not have is built in.
    pub(super) fn load_modules(&self, archive: &mut Archive, names: &[&str]) -> HarnessResult<()> {
        let mut loaded = Vec::new();
        names.iter().try_for_each(|name| load(archive, name, &self.modules, &mut loaded))
    }
}

/// Modules that a guest requires for its disks. Their dependencies are read from the module files.
const MODULES: [&str; 2] = ["virtio_pci", "virtio_blk"];

impl Kernel {
    /// Finds the kernel, builds `guest_init` and writes the initramfs to a directory.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] if no kernel was unpacked.
    pub fn find(folder: &Path) -> HarnessResult<Self> {
        let files = KernelFiles::find(VERSION)?;
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.folder("proc");
        archive.folder("modules");
        archive.file("init", &read(&program(folder)?)?);
        files.load_modules(&mut archive, &MODULES)?;
        let initramfs = folder.join("initramfs");
        let failed = |error| HarnessError::File { what: "writing", path: initramfs.clone(), error };
        std::fs::write(&initramfs, archive.finish()).map_err(failed)?;
        Ok(Self { image: files.image, initramfs })
    }
}

/// Builds `guest_init` without shared libraries.
fn program(folder: &Path) -> HarnessResult<PathBuf> {
    let built = folder.join("init");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/guest_init.c");
    let (to, from) = (built.to_string_lossy(), source.to_string_lossy());
    output("cc", &["-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", &to, &from])?;
    Ok(built)
}

/// Adds a module after its dependencies. A missing module is built into the kernel.
fn load(
    archive: &mut Archive,
    name: &str,
    modules: &[PathBuf],
    loaded: &mut Vec<String>,
) -> HarnessResult<()> {
    let file = format!("{name}.ko");
    let found = modules.iter().find(|path| path.file_name().is_some_and(|known| *known == *file));
    let Some(path) = found.filter(|_| !loaded.iter().any(|one| one == name)) else { return Ok(()) };
    let content = read(path)?;
    for needed in dependencies_of(&content) {
        load(archive, &needed, modules, loaded)?;
    }
    archive.file(&format!("modules/{}.ko", loaded.len()), &content);
    loaded.push(name.to_owned());
    Ok(())
}

/// The dependencies of a module, from its `.modinfo` section. Pure.
fn dependencies_of(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = module[at + key.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

pub(super) fn read(path: &Path) -> HarnessResult<Vec<u8>> {
    std::fs::read(path).map_err(|error| HarnessError::File { what: "reading", path: path.to_owned(), error })
}

/// All files below a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_modules_are_named_by_the_module() {
        assert_eq!(
            dependencies_of(b"ELF\0license=GPL\0depends=virtio,virtio_ring\0name=x\0"),
            ["virtio", "virtio_ring"]
        );
        assert_eq!(dependencies_of(b"\0depends=\0name=x"), [""; 0]);
        assert_eq!(dependencies_of(b"no module"), [""; 0]);
    }
}
