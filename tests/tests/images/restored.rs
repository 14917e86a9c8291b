//! Restored files are equal to what was dumped.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;

use fdmap_client::proto::PageState;
use fdmap_tests::harness::require;
use fdmap_tests::probe_pair::pages_of;
use fdmap_tests::service::named;
use fdmap_tests::test;
use serde_json::json;

use super::{Bed, PAGE, content_now, random, write_at};

impl Bed {
    /// Restores the only file of an image as `name`.
    fn restore(&self, image: &str, name: &str) -> OwnedFd {
        self.json(&["restore", image, "--name", name]);
        self.service.fdpass().unwrap().open(&named(name), true).unwrap().0
    }
}

#[test(flavor = "multi_thread")]
async fn restored_file_is_equal_with_holes_size_and_seals() {
    let bed = Bed::new();
    let fd = bed.create("ram", 700 * PAGE + 77);
    write_at(&fd, 3, &random(1, 400 * 4096));
    write_at(&fd, 500, &[0; 5 * 4096]);
    write_at(&fd, 700, &random(3, 77));
    bed.json(&["seal", "ram", "shrink", "grow", "seal"]);
    for compression in ["none", "zstd", "lz4"] {
        bed.json(&["dump", "ram", compression, "--compress", compression]);
        let copy = bed.restore(compression, compression);
        assert!(content_now(&copy) == content_now(&fd), "{compression}");
        let seals = [&fd, &copy].map(|fd| fdmap_sys::memfd::seals(fd.as_fd()).unwrap());
        assert_eq!(seals[0], seals[1], "{compression}");
        let (states, _) = pages_of(&bed.service.client().await.unwrap(), compression).await.unwrap();
        let data: Vec<_> = (0..701).filter(|page| states[*page].0 != PageState::Hole).collect();
        assert_eq!(data, (3..403).chain([700]).collect::<Vec<_>>(), "{compression}");
    }
}

#[test]
fn each_image_of_a_chain_is_restored() {
    let bed = Bed::new();
    let fd = bed.create("ram", 600 * PAGE);
    let mut contents = Vec::new();
    for number in 1..=4_u64 {
        write_at(&fd, number * 50, &random(number, 100 * 4096));
        fdmap_sys::memfd::punch_hole(fd.as_fd(), number * 60 * PAGE, 7 * PAGE).unwrap();
        let (image, parent) = (number.to_string(), (number - 1).to_string());
        let compression = if number == 3 { "zstd" } else { "none" };
        let mut arguments = vec!["dump", "ram", &image, "--compress", compression];
        if number > 1 {
            arguments.extend(["--parent", &parent]);
        }
        bed.json(&arguments);
        contents.push(content_now(&fd));
    }
    for (number, content) in (1..).zip(&contents) {
        let copy = bed.restore(&number.to_string(), &format!("copy-{number}"));
        assert!(content_now(&copy) == *content, "{number}");
    }
    // A chain can be moved as a whole.
    let moved = bed.folder.join("moved");
    std::fs::create_dir(&moved).unwrap();
    for number in 1..=4 {
        std::fs::rename(bed.folder.join(number.to_string()), moved.join(number.to_string())).unwrap();
    }
    assert!(content_now(&bed.restore("moved/4", "again")) == contents[3]);
}

/// Plain images as CRIU writes them, also by versions that wrote other fields.
#[test]
fn images_without_objects_of_fdmap_are_restored() {
    let bed = Bed::new();
    let fd = bed.create("ram", 300 * PAGE + 5);
    write_at(&fd, 10, &random(1, 280 * 4096));
    bed.json(&["dump", "ram", "1"]);
    write_at(&fd, 20, &random(2, 3 * 4096));
    bed.json(&["dump", "ram", "2", "--parent", "1"]);
    for image in ["1", "2"] {
        for object in ["fdmap.json", "fdmap-chunks-1.bin"] {
            std::fs::remove_file(bed.folder.join(image).join(object)).unwrap();
        }
    }
    let copy = bed.restore("2", "copy");
    assert!(content_now(&copy) == content_now(&fd));
}

#[test]
fn files_of_an_image_are_selected_by_name_and_number() {
    let bed = Bed::new();
    let files = ["one", "two"].map(|name| bed.create(name, 10 * PAGE));
    write_at(&files[0], 1, &random(1, 4096));
    write_at(&files[1], 2, &random(2, 4096));
    bed.json(&["dump", "one", "two", "image"]);
    for name in ["one", "two"] {
        bed.json(&["delete", name]);
    }
    let report = bed.json(&["restore", "image"]);
    assert_eq!(report["files"].as_array().unwrap().len(), 2);
    for (name, fd) in ["one", "two"].into_iter().zip(&files) {
        let copy = bed.service.fdpass().unwrap().open(&named(name), false).unwrap().0;
        assert!(content_now(&copy) == content_now(fd), "{name}");
    }
    let shmid = super::shmid(&files[1]).to_string();
    let report = bed.json(&["restore", "image", "--file", &shmid, "--name", "second"]);
    assert_eq!(report["files"][0]["file"]["name"], "second");
    let text = bed.fails(2, &["restore", "image", "--name", "both"]);
    assert!(text.contains("a name is for one file, and 2 are selected"), "{text}");
    let text = bed.fails(2, &["restore", "image", "--file", "three"]);
    assert!(text.contains("the image has no file \"three\""), "{text}");
    // The name is taken; the other file is deleted again.
    bed.json(&["delete", "two"]);
    let text = bed.fails(6, &["restore", "image"]);
    assert!(text.contains("one"), "{text}");
    assert_eq!(bed.run(&["stat", "two"]).status.code(), Some(3));
}

#[test]
fn hugetlb_file_is_restored_with_its_page_size() {
    let bed = Bed::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let _pages = require(fdmap_tests::hugepages::hugetlb_2m(&host, 6));
    bed.json(&["create", "huge", "--size", "6M", "--huge", "2M"]);
    let mapped = bed.service.fdpass().unwrap().map(&named("huge"), true).unwrap();
    assert!(mapped.write_at(2 << 20, &random(1, 5000)) && mapped.write_at(5 << 20, &random(2, 1 << 20)));
    bed.json(&["dump", "huge", "image"]);
    let copy = bed.restore("image", "copy");
    assert!(
        content_now(&copy)
            == content_now(&bed.service.fdpass().unwrap().open(&named("huge"), false).unwrap().0)
    );
    assert_eq!(bed.json(&["ls"])[0]["hugetlb_page_size"], 2 << 20);
}

#[test]
fn empty_file_is_restored() {
    let bed = Bed::new();
    fdmap_sys::memfd::resize(bed.create("ram", PAGE).as_fd(), 0).unwrap();
    bed.json(&["dump", "ram", "image"]);
    let report = bed.json(&["restore", "image", "--name", "copy"]);
    assert_eq!(
        (&report["files"][0]["file"]["size_bytes"], &report["files"][0]["stored_pages"]),
        (&json!(0), &json!(0))
    );
}

/// The owner and the rights are those of the image, for root.
#[test]
fn root_restores_owner_and_rights() {
    let bed = Bed::new();
    bed.json(&["create", "1234/ram", "--size", "64K", "--mode", "0640", "--gid", "50"]);
    bed.json(&["dump", "1234/ram", "image"]);
    let report = bed.json(&["restore", "image", "--name", "copy"]);
    let restored = &report["files"][0]["file"]["access"];
    let dumped = &bed.json(&["stat", "1234/ram"]);
    assert_eq!((&restored["uid"], &restored["gid"]), (&json!(1234), &json!(50)), "{dumped}");
    assert_eq!(restored["group"], json!(["inspect", "read"]));
    let report = bed.json(&["restore", "image", "--name", "own", "--mode", "0600"]);
    assert_eq!(report["files"][0]["file"]["access"]["uid"], 0);
}

/// The file belongs to the user, and ends with the command.
#[test]
fn ordinary_user_restores_for_a_command() {
    const USER: u32 = 65534;
    let bed = Bed::new();
    let fd = bed.create("ram", 10 * PAGE);
    write_at(&fd, 1, &random(1, 4096));
    bed.json(&["dump", "ram", "image"]);
    for path in [bed.folder.clone(), bed.folder.join("image")] {
        std::os::unix::fs::chown(&path, Some(USER), Some(USER)).unwrap();
        for entry in std::fs::read_dir(&path).unwrap() {
            std::os::unix::fs::chown(entry.unwrap().path(), Some(USER), Some(USER)).unwrap();
        }
    }
    let service = fdmap_tests::service::Service::start(&["--group", &USER.to_string()]).unwrap();
    let mut command = std::process::Command::new(fdmap_tests::service::program("fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).current_dir(&bed.folder);
    command.args(["restore", "image", "--name", "mine", "--", "sh", "-c", "cat <&3"]).uid(USER).gid(USER);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == content_now(&fd), "the content alone");
    let files = service.fdpass().unwrap().open(&fdmap_client::file_name::parse("65534/mine").unwrap(), false);
    assert!(files.is_ok_and(|(_, info)| json!(info)["access"]["uid"] == USER));
}
