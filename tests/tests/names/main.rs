//! Each user has names of its own: no user takes a name from another one, and a name without an owner never selects a file of
//! another user, for root too. No request shows that a file exists to a caller without rights to it.

mod inodes;
mod rights;

use std::os::fd::AsFd as _;
use std::process::{Output, Stdio};

use fdmap_client::Client;
use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{CreateFile, FileChange};
use fdmap_client::proto::{Access, FileInfo, FileName, OwnedName};
use fdmap_proto::v1;
use fdmap_proto::v1::files_client::FilesClient;
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::raw::channel;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use serde_json::Value;
use tonic::Code;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const SQUATTER: u32 = 65534;
const VICTIM: u32 = 1234;

fn service() -> Service {
    require(root());
    Service::start(&["--group", "65534"]).unwrap()
}

/// Runs `fdmap` as a user in the group of the sockets.
fn fdmap(service: &Service, user: u32, arguments: &[&str]) -> Output {
    use std::os::unix::process::CommandExt as _;
    fdmap_as(service, user).unwrap().gid(65534).args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn ok(service: &Service, user: u32, arguments: &[&str]) -> String {
    let output = fdmap(service, user, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn json(service: &Service, user: u32, arguments: &[&str]) -> Value {
    serde_json::from_str(&ok(service, user, &[arguments, &["--json"]].concat())).unwrap()
}

/// Asserts that `fdmap` exits with `code`. Returns its error text.
#[track_caller]
fn fails(service: &Service, user: u32, code: i32, arguments: &[&str]) -> String {
    let output = fdmap(service, user, arguments);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
    errors
}

/// Creates a file for a user. No user is in its group.
async fn create_for(client: &Client, uid: u32, name: &str, mode: u32) -> FileInfo {
    let access = Some(Access::from_mode(uid, 7, mode));
    let file = CreateFile { name: name.to_owned(), size_bytes: 16 * PAGE, access, ..CreateFile::default() };
    client.create(file).await.unwrap()
}

/// Login name of the squatter.
fn login() -> String {
    nix::unistd::User::from_uid(SQUATTER.into()).unwrap().expect("a user of this host").name
}

fn owned(uid: u32, name: &str) -> OwnedName {
    OwnedName { name: name.to_owned(), uid }
}

/// Commands on the file vm-a, in an order in which its owner can run all of them but the first [`NEED_MORE`].
fn commands(image: &str) -> Vec<Vec<&str>> {
    const COMMANDS: &str = "drop-snapshot vm-a 00000000000000ff
        watch --checkpoints vm-a
        compare --pid 1 vm-a
        stat vm-a
        pages vm-a
        lookup vm-a 0
        snapshot vm-a
        checkpoint vm-a
        dirty vm-a --since 0
        coverage vm-a
        diff vm-a --over 1ms
        cursor ls vm-a
        open vm-a -- true
        open vm-a --write -- sh -c printf${IFS}attacked>&3
        dirty-rate vm-a --window 10ms
        cursor create vm-a backup
        cursor begin vm-a backup
        cursor abort vm-a backup
        cursor rm vm-a backup
        coverage-policy vm-a ignore
        resize vm-a 32K
        access vm-a --other inspect
        seal vm-a grow
        seal-writers vm-a
        dump vm-a IMAGE
        fence vm-a --reason moved
        delete vm-a";
    let word = |word| if word == "IMAGE" { image } else { word };
    COMMANDS.lines().map(|line| line.split_whitespace().map(word).collect()).collect()
}

/// Commands that need a snapshot, an event, or a process that maps the file.
const NEED_MORE: usize = 3;

#[test]
async fn name_of_root_never_selects_the_file_of_another_user() {
    let service = service();
    let client = service.client().await.unwrap();
    ok(&service, SQUATTER, &["create", "vm-a", "--size", "64K"]);
    let theirs = named("65534/vm-a");
    let before = client.get(&theirs).await.unwrap();
    let (folder, _guard) = temp_dir("fdmap-names-").unwrap();
    let image = folder.join("image");
    let commands = commands(image.to_str().unwrap());
    for command in &commands {
        let errors = fails(&service, 0, 3, command);
        let hint = "no file \"vm-a\" of user 0; user 65534 has one: 65534/vm-a";
        assert!(errors.contains(hint), "{command:?}: {errors}");
    }
    let mut session = service.fdpass().unwrap();
    for writable in [false, true] {
        let refused = session.open(&named("vm-a"), writable).unwrap_err();
        assert_eq!(refused.refusal(), Some(RefusalCode::NotFound));
    }

    let own: FileInfo = create_for(&client, 0, "vm-a", 0o600).await;
    assert_ne!(own.id, before.id);
    for command in &commands[NEED_MORE..] {
        ok(&service, 0, command);
    }
    fails(&service, 0, 3, &["stat", "vm-a"]);
    assert_eq!(client.get(&theirs).await.unwrap(), before, "a command of root changed the file");
    assert_eq!(client.coverage(&theirs).await.unwrap().generation.get(), 0, "a command closed a generation");
    assert_eq!(json(&service, SQUATTER, &["stat", "vm-a"])["file"]["id"], before.id.to_string());
    // Root names the owner to delete it: the login name, or the number.
    assert_eq!(
        json(&service, 0, &["stat", &format!("{}/vm-a", login())])["file"]["id"],
        before.id.to_string()
    );
    ok(&service, 0, &["delete", "65534/vm-a"]);
    fails(&service, SQUATTER, 3, &["stat", "vm-a"]);
}

#[test]
async fn squatter_takes_no_name_from_another_user() {
    let service = service();
    ok(&service, SQUATTER, &["create", "vm-a", "--size", "64K"]);
    ok(&service, VICTIM, &["create", "vm-a", "--size", "128K"]);
    for (user, other, bytes) in [(SQUATTER, VICTIM, 64 << 10), (VICTIM, SQUATTER, 128 << 10)] {
        assert_eq!(json(&service, user, &["stat", "vm-a"])["file"]["size_bytes"], bytes);
        let listed = json(&service, user, &["ls"]);
        assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
        let theirs = |name: &str| fails(&service, user, 3, &["stat", &format!("{other}/{name}")]);
        assert_eq!(theirs("vm-a").replace("vm-a", "vm-b"), theirs("vm-b"), "the error discloses the file");
        fails(&service, user, 3, &["delete", &format!("{other}/vm-a")]);
        fails(&service, user, 4, &["create", &format!("{other}/vm-b"), "--size", "64K"]);
    }
    ok(&service, VICTIM, &["delete", "vm-a"]);
    let errors = fails(&service, VICTIM, 3, &["delete", "vm-a"]);
    assert!(errors.contains("no file \"vm-a\" of user 1234") && !errors.contains("65534"), "{errors}");
    assert_eq!(json(&service, SQUATTER, &["stat", "vm-a"])["file"]["size_bytes"], 64 << 10);
}

#[test]
async fn printed_names_select_the_same_files() {
    let service = service();
    let client = service.client().await.unwrap();
    for uid in [0, VICTIM, SQUATTER] {
        create_for(&client, uid, "guest ram", 0o604).await;
    }
    for user in [0, VICTIM, SQUATTER] {
        let listed = json(&service, user, &["ls"]);
        let table = ok(&service, user, &["ls"]);
        for (file, line) in listed.as_array().unwrap().iter().zip(table.lines().skip(1)) {
            let (id, uid) = (file["id"].as_str().unwrap(), &file["access"]["uid"]);
            assert!(line.contains(id), "{table}");
            let name = line.split("  ").next().unwrap().trim();
            let expected = if *uid == user { "guest ram".to_owned() } else { format!("{uid}/guest ram") };
            assert_eq!((name, &file["name"]), (&*expected, &"guest ram".into()));
            assert_eq!(json(&service, user, &["stat", name])["file"]["id"], id);
            assert!(ok(&service, user, &["stat", name]).contains(&format!("{name}  id:{id}")));
            assert_eq!(file["owned_by_caller"], *uid == user);
        }
        assert_eq!(table.lines().count(), 4, "{table}");
    }
    let of_login = format!("{}/new", login());
    ok(&service, 0, &["create", &of_login, "--size", "64K"]);
    assert_eq!(json(&service, SQUATTER, &["stat", "new"])["file"]["access"]["uid"], SQUATTER);
    let errors = fails(&service, 0, 2, &["stat", "no-such-user/new"]);
    assert!(errors.contains("no user \"no-such-user\" on this host"), "{errors}");
    fails(&service, 0, 2, &["create", "65534/a/b", "--size", "64K"]);
    fails(&service, 0, 2, &["create", "65534/new", "--size", "64K", "--uid", "0"]);
    fails(&service, 0, 6, &["create", "65534/new", "--size", "64K"]);
    // An adopted file gets a name of its owner, too.
    let memfd = fdmap_sys::memfd::create("new", None).unwrap();
    fdmap_sys::memfd::resize(memfd.as_fd(), PAGE).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&memfd));
    fails(&service, 0, 6, &["adopt", &of_login, "--path", &path]);
    assert_eq!(json(&service, 0, &["adopt", "1234/new", "--path", &path])["access"]["uid"], VICTIM);
}

#[test]
async fn changed_owner_moves_the_name() {
    let service = service();
    let client = service.client().await.unwrap();
    let file = create_for(&client, 0, "vm-a", 0o600).await;
    ok(&service, SQUATTER, &["create", "vm-a", "--size", "64K"]);
    let mut watch = client.watch().await.unwrap();
    while watch.next().await.unwrap() != Some(FileChange::Synced) {}
    let mut theirs = fdmap_as(&service, VICTIM).unwrap();
    std::os::unix::process::CommandExt::gid(&mut theirs, 65534);
    let mut theirs = theirs.args(["watch", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(theirs.stdout.take().unwrap()));
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["event"], "synced");

    let errors = fails(&service, 0, 6, &["access", "vm-a", "--uid", &login()]);
    assert!(errors.contains("user 65534 already has a file named \"vm-a\""), "{errors}");
    assert_eq!(client.get(&named("vm-a")).await.unwrap(), file);
    ok(&service, 0, &["access", "vm-a", "--uid", "1234"]);
    fails(&service, 0, 3, &["stat", "vm-a"]);
    assert_eq!(json(&service, VICTIM, &["stat", "vm-a"])["file"]["id"], file.id.to_string());
    let Some(FileChange::Changed(changed)) = watch.next().await.unwrap() else { panic!("no change") };
    assert_eq!((changed.owned_name(), changed.owned_by_caller), (owned(VICTIM, "vm-a"), false));
    let changed = next();
    assert_eq!((&changed["event"], &changed["file"]["access"]["uid"]), (&"changed".into(), &VICTIM.into()));
    // The owner that the watcher knows.
    ok(&service, 0, &["access", "1234/vm-a", "--uid", "0"]);
    let removed = next();
    assert_eq!((&removed["event"], &removed["uid"]), (&"removed".into(), &VICTIM.into()));
    ok(&service, 0, &["delete", "vm-a"]);
    let Some(FileChange::Changed(_)) = watch.next().await.unwrap() else { panic!("no change") };
    let Some(FileChange::Removed { name, .. }) = watch.next().await.unwrap() else { panic!("not removed") };
    assert_eq!(name, owned(0, "vm-a"));
    theirs.kill().unwrap();
    theirs.wait().unwrap();
}

#[test]
async fn pages_of_a_list_end_between_files_of_one_name() {
    let service = service();
    let client = service.client().await.unwrap();
    let mut expected = Vec::new();
    for name in ["a", "b", "c"] {
        for uid in [0, VICTIM, SQUATTER] {
            create_for(&client, uid, name, 0o600).await;
            expected.push(owned(uid, name));
        }
    }
    let names = |files: Vec<v1::File>| {
        files.into_iter().map(|file| FileInfo::try_from(file).unwrap().owned_name()).collect::<Vec<_>>()
    };
    let mut raw = FilesClient::new(channel(&service.endpoint(), 1 << 16).await.unwrap());
    for page_size in 1..=4 {
        let (mut listed, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = v1::ListRequest { page_size, page_token };
            let page = raw.list(request).await.unwrap().into_inner();
            listed.extend(names(page.files));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!(listed, expected);
    }
    for invalid in ["a", "/a", "x/a", "-1/a", "4294967296/a"] {
        let request = v1::ListRequest { page_size: 1, page_token: invalid.to_owned() };
        assert_eq!(raw.list(request).await.unwrap_err().code(), Code::InvalidArgument, "{invalid}");
    }
}

/// The descriptors of a file in the FD store.
fn stored(service: &Service, file: &FileInfo) -> Vec<(String, std::os::fd::OwnedFd)> {
    let prefix = format!("fdmap.{}.", file.id);
    let names = service.fd_store().names().into_iter().filter(|name| name.starts_with(&prefix));
    let take = |name: String| {
        let fd = service.fd_store().replace(&name, None).unwrap();
        service.fd_store().put(&name, fd.try_clone().unwrap());
        (name, fd)
    };
    names.map(take).collect()
}

#[test(flavor = "multi_thread")]
async fn recovered_files_keep_their_owners_and_none_is_lost() {
    require(root());
    let service = Service::start_with_fd_store(&["--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    let longest = "n".repeat(249);
    let mut twins = Vec::new();
    for name in ["vm-a", &longest] {
        let old = create_for(&client, VICTIM, name, 0o600).await;
        let open = |file: &FileInfo| service.fdpass().unwrap().open(&FileName::Id(file.id), true).unwrap().0;
        fdmap_sys::fd::write_at(open(&old).as_fd(), 0, b"old").unwrap();
        service.fd_store().settle().unwrap();
        let old_fds = stored(&service, &old);
        assert_eq!(old_fds.len(), 2, "memfd and journal");
        client.delete(&FileName::Id(old.id)).await.unwrap();
        let new = create_for(&client, VICTIM, name, 0o600).await;
        twins.push((old, old_fds, new));
    }
    let others = create_for(&client, 0, "vm-a", 0o600).await;
    let given = create_for(&client, VICTIM, "given", 0o600).await;
    client.set_access(&named("1234/given"), Access::private(SQUATTER, SQUATTER)).await.unwrap();
    service.kill().unwrap();
    // The store did not receive the removal.
    for (_, fds, _) in &mut twins {
        std::mem::take(fds).into_iter().for_each(|(name, fd)| service.fd_store().put(&name, fd));
    }
    for restart in 0..2 {
        service.restart().unwrap();
        let client = service.client().await.unwrap();
        let id = async |name: OwnedName| client.get(&FileName::Owned(name)).await.unwrap().id;
        assert_eq!(id(owned(0, "vm-a")).await, others.id);
        assert_eq!(id(owned(SQUATTER, "given")).await, given.id);
        for (old, _, new) in &twins {
            assert_eq!(id(owned(VICTIM, &new.name)).await, new.id, "the newer file keeps the name");
            let info = client.get(&FileName::Id(old.id)).await.unwrap();
            let expected = format!(".{}", old.id);
            assert!(info.name.ends_with(&expected) && info.name.len() <= 249, "{}", info.name);
            assert_eq!(id(info.owned_name()).await, old.id);
            let (fd, _) = service.fdpass().unwrap().open(&FileName::Owned(info.owned_name()), false).unwrap();
            let mut content = [0; 3];
            fdmap_sys::fd::read_at(fd.as_fd(), 0, &mut content).unwrap();
            assert_eq!(&content, b"old");
            let logged = service.log().lines().filter(|line| line.contains("renamed a stored file")).count();
            assert_eq!(logged, twins.len(), "start {restart}: the new name is recorded");
        }
        service.kill().unwrap();
    }
}
