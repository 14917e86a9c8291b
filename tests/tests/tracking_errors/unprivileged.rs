//! Unprivileged clients and services, and undumpable clients.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::file::{Right, Rights};
use fdmap_client::proto::{Access, ProbeKind};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, copied, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{Command as AgentCommand, FileOf};

use crate::fixture::{PAGE, PAGES, assert_service_works, changed, create};

const UNPRIVILEGED: u32 = 65534;

/// Starts an agent as the user nobody.
fn as_unprivileged(service: &Service) -> TestAgent {
    let mut command = Command::new(copied(service.folder(), fdmap_tests::test_agent::PROGRAM).unwrap());
    command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    TestAgent::start_by(command, None).unwrap()
}

/// Starts a service for clients of the user nobody, who owns a file "ram". Root owns another one of this name.
async fn for_unprivileged() -> (Service, Client) {
    let service = Service::start(&["--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    create_as(&client, "ram", Access::from_mode(UNPRIVILEGED, UNPRIVILEGED, 0o600)).await;
    (service, client)
}

async fn create_as(client: &Client, name: &str, access: Access) {
    let (name, size_bytes) = (name.to_owned(), PAGES * PAGE);
    let file = CreateFile { name, size_bytes, access: Some(access), ..CreateFile::default() };
    client.create(file).await.unwrap();
}

/// The name of the file for root.
const RAM_OF_NOBODY: &str = "65534/ram";

/// Asserts that writes of an agent through a tracked mapping of [`RAM_OF_NOBODY`] are reported and, with `exactly`, that no other
/// pages are.
async fn assert_observed(client: &Client, agent: &mut TestAgent, exactly: bool) {
    let ram = named(RAM_OF_NOBODY);
    for _ in 0..2 {
        client.checkpoint(&ram, true, None).await.unwrap();
    }
    for first in [4, 40] {
        let before = client.coverage(&ram).await.unwrap().generation;
        agent.poke(0, first, first + 3).unwrap();
        let made = client.checkpoint(&ram, false, None).await.unwrap();
        assert!(!made.unchanged);
        let reported = changed(client, RAM_OF_NOBODY, before).await;
        let written = first..first + 3;
        assert!(written.clone().all(|page| reported.contains(&page)), "{reported:?}");
        if exactly {
            assert_eq!(made.observed_pages, 3, "{made:?}");
        }
    }
}

#[test(flavor = "multi_thread")]
async fn unprivileged_client_is_tracked() {
    require(root());
    let (service, client) = for_unprivileged().await;
    let mut agent = as_unprivileged(&service);
    agent.map(&service, "ram", true).unwrap();
    assert_observed(&client, &mut agent, true).await;
    agent.kill().unwrap();
    assert_service_works(&service, &client).await;
}

/// Each Track request costs the service descriptors.
#[test(flavor = "multi_thread")]
async fn track_requests_beyond_the_limit_of_the_user_are_refused() {
    require(root());
    let service = Service::start(&["--group", "65534", "--max-tracked-per-user", "3"]).unwrap();
    let client = service.client().await.unwrap();
    create_as(&client, "ram", Access::from_mode(UNPRIVILEGED, UNPRIVILEGED, 0o600)).await;
    let mut agent = as_unprivileged(&service);
    for _ in 0..3 {
        agent.map(&service, "ram", true).unwrap();
    }
    let mut other = as_unprivileged(&service);
    for refused in [&mut agent, &mut other] {
        let error = refused.map(&service, "ram", true).unwrap_err().to_string();
        assert!(error.contains("user 65534 has 3 tracked address spaces"), "{error}");
    }
    // Root is not limited, and what ended no longer counts.
    let mut unlimited = TestAgent::start(None).unwrap();
    for _ in 0..5 {
        unlimited.map(&service, RAM_OF_NOBODY, true).unwrap();
    }
    agent.kill().unwrap();
    client.checkpoint(&named(RAM_OF_NOBODY), true, None).await.unwrap();
    other.map(&service, "ram", true).unwrap();
}

/// Of all files of the user together.
#[test(flavor = "multi_thread")]
async fn user_whose_files_hold_too_much_gets_no_further_file() {
    require(root());
    let limit = (4 * PAGE).to_string();
    let service = Service::start(&["--group", "65534", "--max-allocated-bytes-per-user", &limit]).unwrap();
    let client = service.client().await.unwrap();
    for name in ["first", "second"] {
        create_as(&client, name, Access::from_mode(UNPRIVILEGED, UNPRIVILEGED, 0o600)).await;
    }
    let run = |arguments: &[&str]| {
        let output = fdmap_as(&service, UNPRIVILEGED).unwrap().args(arguments).output().unwrap();
        if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).unwrap()) }
    };
    let attempts = || {
        [
            run(&["create", "third", "--size", "1M"]),
            run(&["resize", "first", "1M"]),
            run(&["resize", "second", "128K"]),
        ]
    };
    let written = ["first", "second"].map(|name| {
        let name = named(&format!("65534/{name}"));
        let file = File::from(service.fdpass().unwrap().open(&name, true).unwrap().0);
        file.write_all_at(&[1; 2 * PAGE as usize], 0).unwrap();
        file
    });
    let [create, grow, shrink] = attempts();
    for refused in [create, grow] {
        let message = refused.unwrap_err();
        assert!(
            message.contains("user 65534 has") && message.contains("bytes of memory in files"),
            "{message}"
        );
    }
    shrink.unwrap();
    // Root is not limited, and memory that is freed does not count.
    create_as(&client, "of-root", Access::from_mode(0, 0, 0o600)).await;
    written[0].set_len(PAGE).unwrap();
    assert_eq!(attempts(), [Ok(()), Ok(()), Ok(())]);
}

#[test(flavor = "multi_thread")]
async fn undumpable_client_is_tracked() {
    require(root());
    let (service, client) = for_unprivileged().await;
    let mut agent = as_unprivileged(&service);
    agent.call(&AgentCommand::SetUndumpable).unwrap();
    let own = std::fs::metadata(format!("/proc/{}/pagemap", agent.pid())).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&own), 0, "the client cannot open its own pagemap");
    agent.map(&service, "ram", true).unwrap();
    assert_observed(&client, &mut agent, true).await;
    agent.kill().unwrap();
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn client_without_the_right_to_write_is_refused() {
    require(root());
    let (service, client) = for_unprivileged().await;
    let everything: Rights = [Right::Inspect, Right::Read, Right::Checkpoint].into_iter().collect();
    let access =
        Access { owner: Rights::ALL, group: Rights::NONE, other: everything, ..Access::private(1000, 1000) };
    create_as(&client, "theirs", access).await;
    create_as(&client, "hidden", Access::private(1000, 1000)).await;
    let mut agent = as_unprivileged(&service);
    for (name, reason) in [
        ("1000/theirs", "user 65534 lacks the write right to file \"theirs\" of user 1000"),
        ("1000/hidden", "no file \"hidden\" of user 1000"),
        ("hidden", "no file \"hidden\" of user 65534"),
    ] {
        let message = agent.call(&AgentCommand::Claim(FileOf::of(&service, name))).unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }
    // Other operations without the right are refused too.
    let fdmap = |arguments: &[&str]| {
        let output = fdmap_as(&service, UNPRIVILEGED).unwrap().args(arguments).output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let message = fdmap(&["seal-writers", "1000/theirs"]);
    assert!(message.contains("lacks the write right"), "{message}");
    let message = fdmap(&["checkpoint", "1000/hidden"]);
    assert!(message.contains("no file \"hidden\" of user 1000"), "{message}");
    // A cursor belongs to its creator.
    client
        .create_cursor(&named(RAM_OF_NOBODY), "roots", fdmap_client::proto::Generation::NONE)
        .await
        .unwrap();
    let message = fdmap(&["cursor", "begin", "ram", "roots"]);
    assert!(message.contains("roots") && message.contains("another user"), "{message}");
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn unprivileged_service_tracks() {
    require(root());
    let (folder, _removed) = fdmap_tests::host::temp_dir("fdmap-unprivileged-").unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&folder, open).unwrap();
    let command = Command::new(copied(&folder, "fdmapd").unwrap());
    let service = Service::start_as(UNPRIVILEGED, command).unwrap();
    let client = service.client().await.unwrap();
    assert_eq!(client.host_info().await.unwrap().probe, ProbeKind::Syscalls);
    create(&client, "ram").await;
    create_as(&client, "ram", Access::from_mode(UNPRIVILEGED, UNPRIVILEGED, 0o600)).await;
    for unprivileged in [false, true] {
        let mut agent =
            if unprivileged { as_unprivileged(&service) } else { TestAgent::start(None).unwrap() };
        agent.map(&service, RAM_OF_NOBODY, true).unwrap();
        assert_observed(&client, &mut agent, false).await;
        let coverage = client.coverage(&named(RAM_OF_NOBODY)).await.unwrap();
        assert_eq!(coverage.mappings.len(), 1);
        assert!(
            !coverage.coverage.exact,
            "the service sees neither mappings of other users nor pins: {coverage:?}"
        );
        agent.kill().unwrap();
        client.checkpoint(&named(RAM_OF_NOBODY), true, None).await.unwrap();
    }
    assert_service_works(&service, &client).await;
}
