use std::os::fd::AsFd;

use fdmap_proto::file::Access;
use fdmap_proto::units::FileId;
use fdmap_sys::memfd;
use fdmap_sys::memfd::MemfdFlags;

use super::super::tests::{MIB, named, owned, registry, spec, user};
use super::super::{FileSpec, Registry};
use super::*;

fn root() -> Caller {
    Caller { admin: true, ..user(0) }
}

fn create(registry: &Registry, caller: &Caller, name: &str) -> FileId {
    registry.create(caller, spec(name, MIB)).unwrap().id()
}

fn create_for(registry: &Registry, uid: u32, name: &str, mode: u32) -> FileId {
    let access = Some(Access::from_mode(uid, uid, mode));
    registry.create(&root(), FileSpec { access, ..spec(name, MIB) }).unwrap().id()
}

fn found(registry: &Registry, caller: &Caller, name: &FileName) -> Result<FileId, String> {
    let found = registry.find(caller, name, Right::Inspect);
    found.map(|file| file.id()).map_err(|error| error.to_string())
}

#[test]
fn name_alone_is_that_of_a_file_of_the_caller() {
    let registry = registry();
    let squatted = create(&registry, &user(1000), "vm-a");
    let hint = || Err("no file \"vm-a\" of user 0; user 1000 has one: 1000/vm-a".to_owned());
    assert_eq!(found(&registry, &root(), &named("vm-a")), hint());
    for refused in [
        registry.delete(&root(), &named("vm-a")).map(drop),
        registry.resize(&root(), &named("vm-a"), 2 * MIB).map(drop),
        registry.set_access(&root(), &named("vm-a"), Access::private(0, 0)).map(drop),
    ] {
        assert_eq!(refused.map_err(|error| error.to_string()), hint().map(drop));
    }
    let own = create(&registry, &root(), "vm-a");
    assert_eq!(found(&registry, &root(), &named("vm-a")), Ok(own));
    assert_eq!(found(&registry, &root(), &owned(1000, "vm-a")), Ok(squatted));
    assert_eq!(found(&registry, &user(1000), &named("vm-a")), Ok(squatted));
    registry.delete(&root(), &named("vm-a")).unwrap();
    assert_eq!(found(&registry, &root(), &named("vm-a")), hint());
    assert_eq!(found(&registry, &user(1000), &named("vm-a")), Ok(squatted));
}

#[test]
fn file_without_the_inspect_right_is_as_if_it_did_not_exist() {
    let registry = registry();
    create(&registry, &user(1000), "ram");
    let stranger = |name: FileName| found(&registry, &user(1001), &name).unwrap_err();
    assert_eq!(stranger(named("ram")), "no file \"ram\" of user 1001");
    assert_eq!(stranger(owned(1000, "ram")), "no file \"ram\" of user 1000");
    assert_eq!(stranger(owned(1000, "absent")), "no file \"absent\" of user 1000");
    let deleted = registry.delete(&user(1001), &owned(1000, "ram")).err().unwrap();
    assert_eq!(deleted.to_string(), "no file \"ram\" of user 1000");
    // The name is free for all others.
    create(&registry, &user(1001), "ram");
    // An owner without the right is refused, not misled.
    create_for(&registry, 1002, "hidden", 0o000);
    let denied = registry.find(&user(1002), &named("hidden"), Right::Inspect);
    assert!(matches!(denied, Err(FileError::Denied { uid: 1002, .. })));
}

#[test]
fn error_names_the_first_owners_that_the_caller_may_know() {
    let registry = registry();
    for uid in [7, 1000, 1001, 1002, 1003, 1004] {
        create_for(&registry, uid, "ram", 0o604);
    }
    create_for(&registry, 999, "ram", 0o600);
    let others = "other users have one: 1000/ram, 1001/ram, 1002/ram, 1003/ram";
    let expected = |uid| Err(format!("no file \"ram\" of user {uid}; {others}"));
    assert_eq!(found(&registry, &user(7), &owned(8, "ram")), expected(8));
    registry.delete(&user(7), &named("ram")).unwrap();
    assert_eq!(found(&registry, &user(7), &named("ram")), expected(7));
}

#[test]
fn list_continues_within_files_of_one_name() {
    let registry = registry();
    let mut expected = Vec::new();
    for name in ["a", "b", "c"] {
        for uid in [0, 7, 1000, 65534] {
            create_for(&registry, uid, name, 0o600);
            expected.push(OwnedName { name: name.to_owned(), uid });
        }
    }
    for max_files in 1..=expected.len() + 1 {
        let (mut listed, mut last) = (Vec::new(), None);
        loop {
            let (files, next) = registry.list(&root(), last.as_ref(), max_files);
            assert!(files.len() <= max_files);
            listed.extend(files.iter().map(|file| file.owned_name()));
            match next {
                Some(next) => last = Some(next),
                None => break,
            }
        }
        assert_eq!(listed, expected, "{max_files} files at a time");
    }
}

#[test]
fn changed_owner_moves_the_name() {
    let registry = registry();
    let given = create(&registry, &user(1000), "ram");
    let theirs = create(&registry, &user(1001), "ram");
    let give = |uid| {
        let set = registry.set_access(&root(), &owned(1000, "ram"), Access::private(uid, uid));
        set.map(|file| file.id()).map_err(|error| error.to_string())
    };
    assert_eq!(give(1001), Err("user 1001 already has a file named \"ram\"".to_owned()));
    assert_eq!(found(&registry, &user(1000), &named("ram")), Ok(given), "a refused change changes nothing");
    assert_eq!(give(1000), Ok(given));
    assert_eq!(give(1002), Ok(given));
    assert_eq!(found(&registry, &user(1002), &named("ram")), Ok(given));
    assert_eq!(found(&registry, &user(1001), &named("ram")), Ok(theirs));
    let moved = "no file \"ram\" of user 1000; other users have one: 1001/ram, 1002/ram";
    assert_eq!(found(&registry, &root(), &owned(1000, "ram")), Err(moved.to_owned()));
    create(&registry, &user(1000), "ram");
    registry.delete(&user(1002), &named("ram")).unwrap();
    create(&registry, &user(1002), "ram");
}

#[test]
fn adopted_and_created_memfds_have_names_of_their_owner() {
    let registry = registry();
    create(&registry, &user(1000), "ram");
    let flags = MemfdFlags::from_bits(0).unwrap();
    registry.memfd_create(&user(1001), "ram".to_owned(), "x", flags, None).unwrap();
    let again = registry.memfd_create(&user(1001), "ram".to_owned(), "x", flags, None);
    assert!(matches!(again, Err(FileError::NameTaken(_))));
    let memfd = memfd::create("ram", None).unwrap();
    memfd::resize(memfd.as_fd(), MIB).unwrap();
    let adopt = |uid| {
        let access = Some(Access::private(uid, uid));
        registry.adopt(&root(), memfd.as_fd(), String::new(), access, None).map(|file| file.owned_name())
    };
    assert!(matches!(adopt(1001), Err(FileError::NameTaken(_))));
    assert_eq!(adopt(1002).unwrap(), OwnedName { name: "ram".to_owned(), uid: 1002 });
}
