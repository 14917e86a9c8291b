//! `fdmap dump` and `fdmap restore`: images have the content of the files, as the library reads them and as `crit` decodes them, and files
//! that are restored have it, too, also lazily and as private copies.

mod chains;
mod clones;
mod damaged;
mod errors;
mod lazy;
mod lazy_events;
mod lazy_file;
mod lazy_mappings;
mod lazy_overlaps;
mod lazy_refused;
mod lazy_slow;
mod restored;
mod s3;
mod slot_writers;
mod slots;
mod slow_store;
mod swapped;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use fdmap_client::image::{DirectoryStore, ImageChain, ImageStore};
use fdmap_client::proto::units::to_u64;
use fdmap_tests::cleanup::CleanupGuard;
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::test;
use serde_json::{Value, json};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

/// A service, and a directory for images.
struct Bed {
    service: Service,
    folder: PathBuf,
    /// Environment variables of `fdmap`.
    variables: Vec<(&'static str, String)>,
    _guard: CleanupGuard,
}

impl Bed {
    fn new() -> Self {
        Self::with(&[])
    }

    /// With arguments of the service.
    fn with(arguments: &[&str]) -> Self {
        require(root());
        let (folder, guard) = temp_dir("fdmap-dump").unwrap();
        let service = Service::start(arguments).unwrap();
        Self { service, folder, variables: Vec::new(), _guard: guard }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(self.service.folder()).args(arguments).current_dir(&self.folder);
        // Not those of the host.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs `fdmap` with `--json`.
    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// Runs a command that fails. Returns the error.
    #[track_caller]
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        stderr
    }

    fn create(&self, name: &str, bytes: u64) -> OwnedFd {
        self.json(&["create", name, "--size", &bytes.to_string()]);
        self.service.fdpass().unwrap().open(&named(name), true).unwrap().0
    }

    fn image(&self, name: &str) -> Arc<dyn ImageStore> {
        Arc::new(DirectoryStore::open(&self.folder.join(name)).unwrap())
    }

    /// Asserts that the first file of an image has this content.
    #[track_caller]
    fn assert_image(&self, name: &str, content: &[u8]) {
        assert_content(&self.image(name), 0, content);
    }
}

/// The content of a file of an image, as the library reads it.
fn content_of(store: &Arc<dyn ImageStore>, number: usize) -> Vec<u8> {
    let chain = ImageChain::open(store).unwrap();
    let file = &chain.files().unwrap()[number];
    let size = usize::try_from(file.inode.size).unwrap();
    let mut content = vec![0; size.next_multiple_of(4096)];
    let mut reader = chain.reader(file.inode.shmid);
    for extent in &file.extents {
        let mut left = *extent;
        while !left.range.is_empty() {
            let bytes = reader.read(left).unwrap();
            let at = usize::try_from(left.range.start().0 * PAGE).unwrap();
            content[at..at + bytes.len()].copy_from_slice(bytes);
            let pages = to_u64(bytes.len()) / PAGE;
            left.position += pages;
            let rest = (left.range.start().plus(pages), left.range.end());
            left.range = fdmap_client::proto::PageRange::new(rest.0, rest.1).unwrap();
        }
    }
    assert!(content[size..].iter().all(|byte| *byte == 0), "the last page is padded with zeros");
    content.truncate(size);
    content
}

#[track_caller]
fn assert_content(store: &Arc<dyn ImageStore>, number: usize, expected: &[u8]) {
    let found = content_of(store, number);
    assert_eq!(found.len(), expected.len());
    let wrong: Vec<_> = (0..found.len().div_ceil(4096))
        .filter(|page| {
            let part = page * 4096..((page + 1) * 4096).min(found.len());
            found[part.clone()] != expected[part]
        })
        .collect();
    assert!(wrong.is_empty(), "{} pages differ, the first is {}", wrong.len(), wrong[0]);
}

/// Bytes that look random, and differ from page to page and from seed to seed.
fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(bytes).collect()
}

fn write_at(fd: &OwnedFd, page: u64, bytes: &[u8]) {
    fdmap_sys::fd::write_at(std::os::fd::AsFd::as_fd(fd), page * PAGE, bytes).unwrap();
}

/// The number of a file in the names of CRIU.
fn shmid(fd: &OwnedFd) -> u32 {
    u32::try_from(fdmap_sys::fd::stat(fd).unwrap().st_ino & 0xffff_ffff).unwrap()
}

/// The content of a file now.
fn content_now(fd: &OwnedFd) -> Vec<u8> {
    let fd = std::os::fd::AsFd::as_fd(fd);
    let size = usize::try_from(fdmap_sys::fd::stat(fd).unwrap().st_size).unwrap();
    let mut content = vec![0; size];
    let mut filled = 0;
    while filled < size {
        filled += fdmap_sys::fd::read_at(fd, to_u64(filled), &mut content[filled..]).unwrap();
    }
    content
}

/// The entries of an image file, as `crit` decodes them.
fn crit(path: &Path) -> Value {
    let output = Command::new("crit").arg("decode").arg("-i").arg(path).output();
    let output =
        require(output.map_err(|error| fdmap_tests::HarnessError::Missing(format!("crit: {error}"))));
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn image_has_the_content_of_each_page_and_crit_decodes_it() {
    let bed = Bed::new();
    // A partial last page.
    let fd = bed.create("ram", 100 * PAGE + 100);
    write_at(&fd, 3, &random(1, 20 * 4096));
    write_at(&fd, 30, &[0; 5 * 4096]);
    write_at(&fd, 35, &random(2, 4096));
    write_at(&fd, 100, &random(3, 100));
    bed.json(&["seal", "ram", "shrink", "grow"]);
    for compression in ["none", "zstd", "lz4"] {
        let report = bed.json(&["dump", "ram", compression, "--compress", compression]);
        let counts = &report["files"][0]["counts"];
        let expected = (&json!(27), &json!(5), &json!(22));
        assert_eq!((&counts["memory_pages"], &counts["zero_pages"], &counts["stored_pages"]), expected);
        assert_eq!(report["consistency"], "per-page");
        bed.assert_image(compression, &content_now(&fd));
    }

    let shmid = shmid(&fd);
    let folder = bed.folder.join("none");
    assert_eq!(
        crit(&folder.join("inventory.img")),
        json!({"magic": "INVENTORY", "entries": [{"img_version": 2}]})
    );
    let memfd = crit(&folder.join("memfd.img"));
    let entry = &memfd["entries"][0];
    assert_eq!(memfd["magic"], "MEMFD_INODE");
    assert_eq!((&entry["name"], &entry["size"]), (&json!("ram"), &json!(100 * PAGE + 100)));
    assert_eq!((&entry["uid"], &entry["gid"], &entry["inode_id"]), (&json!(0), &json!(0), &json!(1)));
    assert_eq!(entry["shmid"], json!(shmid));
    // F_SEAL_SHRINK | F_SEAL_GROW, as crit 3.17 shows it.
    let seals = entry["seals"].to_string();
    assert!(seals.contains("SHRINK") && seals.contains("GROW") || seals == "6", "{seals}");
    let pagemap = crit(&folder.join(format!("pagemap-shmem-{shmid}.img")));
    let expected = json!({"magic": "PAGEMAP", "entries": [
        {"pages_id": 1},
        {"vaddr": 3 * PAGE, "nr_pages": 20, "flags": 4},
        {"vaddr": 35 * PAGE, "nr_pages": 1, "flags": 4},
        {"vaddr": 100 * PAGE, "nr_pages": 1, "flags": 4},
    ]});
    assert_eq!(pagemap, expected);
    let pages = std::fs::read(folder.join("pages-1.img")).unwrap();
    assert_eq!(pages[..20 * 4096], random(1, 20 * 4096));
    assert_eq!(pages.len(), 22 * 4096);
}

#[test]
fn several_files_are_in_one_image() {
    let bed = Bed::new();
    let files =
        [("one", 20), ("two", 3), ("empty", 7)].map(|(name, pages)| (bed.create(name, pages * PAGE), name));
    write_at(&files[0].0, 0, &random(1, 20 * 4096));
    write_at(&files[1].0, 1, &random(2, 4096));
    bed.json(&["dump", "one", "two", "empty", "image"]);
    let image = bed.image("image");
    for (number, (fd, name)) in files.iter().enumerate() {
        let chain = ImageChain::open(&image).unwrap();
        assert_eq!(chain.files().unwrap()[number].inode.name, *name);
        assert_content(&image, number, &content_now(fd));
    }
}

#[test]
fn hugetlb_file_is_dumped_with_its_page_size() {
    let bed = Bed::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let _pages = require(fdmap_tests::hugepages::hugetlb_2m(&host, 3));
    bed.json(&["create", "huge", "--size", "6M", "--huge", "2M"]);
    let mapped = bed.service.fdpass().unwrap().map(&named("huge"), true).unwrap();
    assert!(mapped.write_at(2 << 20, &random(1, 5000)));
    let report = bed.json(&["dump", "huge", "image"]);
    assert_eq!(report["files"][0]["counts"]["stored_pages"], 2);
    let mut expected = vec![0; 6 << 20];
    expected[2 << 20..(2 << 20) + 5000].copy_from_slice(&random(1, 5000));
    bed.assert_image("image", &expected);
    let memfd = crit(&bed.folder.join("image/memfd.img"));
    // MFD_HUGETLB and log2 of the size.
    let flag = memfd["entries"][0]["hugetlb_flag"].as_u64();
    assert!(flag.is_none_or(|flag| flag == 4 | 21 << 26), "{memfd}");
    let chain = ImageChain::open(&bed.image("image")).unwrap();
    assert_eq!(chain.files().unwrap()[0].inode.hugetlb_flag, Some(4 | 21 << 26));
}
