//! What counts as a use of a file, on this kernel.

use std::fs::{self, File};
use std::path::PathBuf;

use fdmap_sys::scm;
use fdmap_sys::testing::segment::Segment;

use super::*;

/// A file as the service has it: by two open file descriptions.
struct Owned {
    finder: UserFinder,
    own: [OwnedFd; 2],
}

impl Owned {
    fn new(file: OwnedFd) -> Self {
        let other = fd::reopen(file.as_fd(), false).unwrap();
        Self { finder: UserFinder::load(), own: [file, other] }
    }

    fn references(&self) -> DentryReferences {
        let [first, second] = &self.own;
        self.finder
            .dentry_references([first.as_fd(), second.as_fd()])
            .unwrap()
            .expect("the kernel counts users")
    }

    #[track_caller]
    fn assert_used(&self, expected: bool) {
        let references = self.references();
        assert_eq!(references.is_used(), expected, "{references:?}");
    }
}

/// Paths of files that do not exist yet, in a directory of a tmpfs.
fn paths<const N: usize>() -> (tempfile::TempDir, [PathBuf; N]) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let paths = std::array::from_fn(|nth| folder.path().join(nth.to_string()));
    (folder, paths)
}

fn create(path: &PathBuf) -> OwnedFd {
    File::options().read(true).write(true).create_new(true).open(path).unwrap().into()
}

#[test]
fn descriptor_in_a_socket_is_a_use() {
    let owned = Owned::new(memfd::create("hidden", None).unwrap());
    owned.assert_used(false);
    let (one, other) = scm::socket_pair().unwrap();
    let hidden = fd::reopen(owned.own[0].as_fd(), true).unwrap();
    scm::send(one.as_fd(), b"hidden", &[hidden.as_fd()]).unwrap();
    drop(hidden);
    owned.assert_used(true);
    drop((one, other));
    owned.assert_used(false);
}

#[test]
fn path_descriptor_is_a_use() {
    use std::os::unix::fs::OpenOptionsExt as _;
    let owned = Owned::new(memfd::create("path", None).unwrap());
    let path = format!("/proc/self/fd/{}", owned.own[0].as_raw_fd());
    let opened = File::options().read(true).custom_flags(nix::libc::O_PATH).open(path).unwrap();
    owned.assert_used(true);
    drop(opened);
    owned.assert_used(false);
}

#[test]
fn name_is_no_use() {
    let (_folder, [path]) = paths();
    let owned = Owned::new(create(&path));
    owned.assert_used(false);
    let opened = File::open(&path).unwrap();
    owned.assert_used(true);
    fs::remove_file(&path).unwrap();
    owned.assert_used(true);
    drop(opened);
    owned.assert_used(false);
}

#[test]
fn other_names_may_hide_uses() {
    let (_folder, [path, other, renamed]) = paths();
    let owned = Owned::new(create(&path));
    fs::hard_link(&path, &other).unwrap();
    let opened = File::open(&other).unwrap();
    owned.assert_used(true);
    fs::remove_file(&path).unwrap();
    owned.assert_used(true);
    fs::rename(&other, &renamed).unwrap();
    fs::remove_file(&renamed).unwrap();
    owned.assert_used(true);
    drop(opened);
    owned.assert_used(false);
}

#[test]
fn renamed_and_replaced_file_has_the_uses_of_its_dentry() {
    let (_folder, [path, renamed]) = paths();
    let owned = Owned::new(create(&path));
    fs::rename(&path, &renamed).unwrap();
    owned.assert_used(false);
    let opened = File::open(&renamed).unwrap();
    owned.assert_used(true);
    drop(create(&path));
    fs::rename(&path, &renamed).unwrap();
    owned.assert_used(true);
    drop(opened);
    owned.assert_used(false);
}

#[test]
fn file_without_a_name_may_get_one() {
    use std::os::unix::fs::OpenOptionsExt as _;
    let (folder, [path]) = paths();
    let mut options = File::options();
    let file = options.read(true).write(true).custom_flags(nix::libc::O_TMPFILE).open(folder.path()).unwrap();
    let owned = Owned::new(file.into());
    owned.assert_used(false);
    let own = PathBuf::from(format!("/proc/self/fd/{}", owned.own[0].as_raw_fd()));
    let (here, follow) = (nix::fcntl::AT_FDCWD, nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW);
    nix::unistd::linkat(here, &own, here, &path, follow).unwrap();
    let opened = File::open(&path).unwrap();
    owned.assert_used(true);
    fs::remove_file(&path).unwrap();
    owned.assert_used(true);
    drop(opened);
    owned.assert_used(false);
}

#[test]
fn segment_is_used_until_it_is_removed_and_detached() {
    let segment = Segment::new(4096).unwrap();
    let mapping = segment.attach().unwrap();
    let start = mapping.address();
    let path = format!("/proc/self/map_files/{start:x}-{:x}", start + 4096);
    let owned = Owned::new(File::options().read(true).write(true).open(path).unwrap().into());
    owned.assert_used(true);
    drop(mapping);
    owned.assert_used(true);
    let mapping = segment.attach().unwrap();
    drop(segment);
    owned.assert_used(true);
    drop(mapping);
    owned.assert_used(false);
}

#[test]
fn duplicates_of_the_services_descriptions_are_no_uses() {
    let owned = Owned::new(memfd::create("stored", None).unwrap());
    let _duplicates = owned.own.each_ref().map(|fd| fd::duplicate(fd.as_fd()).unwrap());
    let _mapping = SharedMapping::shared(&owned.own[1], 0, 0x1000, false);
    owned.assert_used(false);
    let references = owned.references();
    assert_eq!((references.references, references.own), (2, 2));
}
