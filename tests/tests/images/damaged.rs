//! Damaged images are refused by object and reason, and leave nothing in the service.

use std::path::{Path, PathBuf};

use fdmap_tests::test;

use super::{Bed, PAGE, content_now, random, write_at};

/// Copies an image.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_symlink() {
            std::os::unix::fs::symlink(std::fs::read_link(entry.path()).unwrap(), target).unwrap();
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Two images, of which the second is restored after `damage` of a copy of it. Returns the error, or `None` if the restored file is equal.
struct Chain {
    bed: Bed,
    content: Vec<u8>,
    copies: std::cell::Cell<u32>,
}

impl Chain {
    fn new(compression: &str) -> Self {
        let bed = Bed::new();
        let fd = bed.create("ram", 300 * PAGE);
        write_at(&fd, 0, &random(1, 280 * 4096));
        bed.json(&["dump", "ram", "1", "--compress", compression]);
        write_at(&fd, 100, &random(2, 20 * 4096));
        bed.json(&["dump", "ram", "2", "--parent", "1", "--compress", compression]);
        let content = content_now(&fd);
        bed.json(&["delete", "ram"]);
        Self { bed, content, copies: std::cell::Cell::new(0) }
    }

    fn objects(&self) -> Vec<String> {
        let all = std::fs::read_dir(self.bed.folder.join("2")).unwrap();
        let mut names: Vec<_> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "parent");
        names.sort();
        names
    }

    fn restore(&self, damage: impl FnOnce(&Path)) -> Option<String> {
        let folder = &self.bed.folder;
        self.copies.set(self.copies.get() + 1);
        let image: PathBuf = folder.join(format!("copy-{}", self.copies.get()));
        copy(&folder.join("2"), &image);
        damage(&image);
        let output = self.bed.run(&["restore", image.to_str().unwrap(), "--name", "restored"]);
        std::fs::remove_dir_all(&image).unwrap();
        if output.status.success() {
            let name = fdmap_tests::service::named("restored");
            let restored = self.bed.service.fdpass().unwrap().open(&name, false).unwrap().0;
            assert!(content_now(&restored) == self.content, "a restored file is equal");
            self.bed.json(&["delete", "restored"]);
            return None;
        }
        let files = self.bed.json(&["ls"]);
        assert_eq!(files.as_array().map(Vec::len), Some(0), "nothing is left: {files}");
        Some(String::from_utf8(output.stderr).unwrap())
    }

    /// Restores after a change of one object.
    fn changed(&self, object: &str, change: impl FnOnce(&mut Vec<u8>)) -> Option<String> {
        self.restore(|image| {
            let path = image.join(object);
            let mut bytes = std::fs::read(&path).unwrap();
            change(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
        })
    }
}

#[test]
fn truncated_and_changed_objects_are_refused() {
    for compression in ["none", "zstd"] {
        let chain = Chain::new(compression);
        assert_eq!(chain.restore(|_| ()), None);
        for object in chain.objects() {
            let len = std::fs::metadata(chain.bed.folder.join("2").join(&object)).unwrap().len();
            let len = usize::try_from(len).unwrap();
            for cut in [0, 3, 7, len / 2, len - 1] {
                let error = chain.changed(&object, |bytes| bytes.truncate(cut));
                let error = error.unwrap_or_else(|| panic!("{object} of {cut} bytes is restored"));
                assert!(error.contains(&object), "{object} of {cut} bytes: {error}");
            }
            for at in (0..len).step_by(len / 7 + 1) {
                let error = chain.changed(&object, |bytes| bytes[at] ^= 1);
                // White space of the side file, and bits that a compressed frame does not use.
                let harmless = object == "fdmap.json" || object.ends_with(".zst");
                match error {
                    Some(error) => assert!(error.contains(&object), "{object} byte {at}: {error}"),
                    None => assert!(harmless, "{object}: changed byte {at} is not found"),
                }
            }
            let error = chain.restore(|image| std::fs::remove_file(image.join(&object)).unwrap());
            match error {
                Some(error) => {
                    assert!(error.contains(&object) || error.contains("missing"), "{object}: {error}")
                }
                // What is left is a plain image.
                None => assert_eq!((object.as_str(), compression), ("fdmap.json", "none")),
            }
        }
    }
}

/// Without hashes, the format itself has to be checked.
#[test]
fn damaged_plain_images_are_refused_with_object_and_offset() {
    let chain = Chain::new("none");
    for image in ["1", "2"] {
        for object in ["fdmap.json", "fdmap-chunks-1.bin"] {
            std::fs::remove_file(chain.bed.folder.join(image).join(object)).unwrap();
        }
    }
    assert_eq!(chain.restore(|_| ()), None);
    let pagemap = chain.objects().into_iter().find(|name| name.starts_with("pagemap")).unwrap();
    for (object, at, value, reason) in [
        ("inventory.img", 0, 0, "byte 0: magic number"),
        ("inventory.img", 4, 0, "byte 4: magic number"),
        ("inventory.img", 13, 9, "image version 9"),
        ("memfd.img", 11, 0xff, "byte 8: entry of"),
        ("memfd.img", 12, 0xff, "byte 8: invalid protobuf entry"),
        (pagemap.as_str(), 10, 0x7f, "byte 8: entry of"),
        (pagemap.as_str(), 8, 0x60, "truncated at byte"),
    ] {
        let error = chain.changed(object, |bytes| bytes[at] = value).unwrap_or_default();
        assert!(error.contains(object) && error.contains(reason), "{object} byte {at}: {error}");
    }
    let error = chain.changed("pages-1.img", |bytes| bytes.truncate(4096)).unwrap();
    assert!(error.contains("pages-1.img: 4096 bytes, expected 81920"), "{error}");
    let error = chain.restore(|image| std::fs::remove_file(image.join("parent")).unwrap()).unwrap();
    assert!(error.contains("is to be in a parent, which does not have it"), "{error}");
}

#[test]
fn wrong_parents_are_refused() {
    let chain = Chain::new("none");
    let link = |target: &str| {
        let target = target.to_owned();
        move |image: &Path| {
            std::fs::remove_file(image.join("parent")).unwrap();
            std::os::unix::fs::symlink(target, image.join("parent")).unwrap();
        }
    };
    let error = chain.restore(link("../missing")).unwrap();
    assert!(error.contains("parent"), "{error}");
    let error = chain.restore(link("../2")).unwrap();
    assert!(error.contains("it is not the image that"), "{error}");
    let error = chain.restore(|image| std::fs::remove_file(image.join("parent")).unwrap()).unwrap();
    assert!(error.contains("the link to its parent is missing"), "{error}");
    // Plain images have no digests of their parents.
    for image in ["1", "2"] {
        for object in ["fdmap.json", "fdmap-chunks-1.bin"] {
            std::fs::remove_file(chain.bed.folder.join(image).join(object)).unwrap();
        }
    }
    let error = chain.restore(link(".")).unwrap();
    assert!(error.contains("its parents form a loop"), "{error}");
}
