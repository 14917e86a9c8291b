//! Each right permits its own requests: a user who may inspect a file sends every kind of request about it.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::{Access, FileName, Right, Rights};
use fdmap_client::{Client, ClientError};
use fdmap_sys::fd;
use fdmap_sys::testing::credentials::become_user;
use fdmap_tests::service::Service;
use fdmap_tests::test;

use super::inodes::{GROUP, answers_to};
use super::{PAGE, SQUATTER, VICTIM, owned, service};

/// The right that a request needs besides *inspect*; `None`: only the owner may send it.
fn needed(request: &str) -> Option<&'static [Right]> {
    Some(match request {
        "Get" | "Scan" | "Lookup" | "Summary" | "Diff" | "DropSnapshot" | "FetchSnapshot" | "Changes"
        | "GetCoverage" | "WatchCheckpoints" => &[],
        "Open for reading" | "SlotContent" => &[Right::Read],
        "Open for writing" => &[Right::Read, Right::Write],
        "Track"
        | "Untrack"
        | "Detach"
        | "SetCoveragePolicy"
        | "SetCoveragePolicy by fdpass"
        | "Resize"
        | "Seal"
        | "SealWriters" => &[Right::Write],
        "Checkpoint" | "DirtyRate" | "CreateCursor" | "ListCursors" | "BeginCursor" | "AbortCursor"
        | "CommitCursor" | "DeleteCursor" => &[Right::Checkpoint],
        "Fence" | "end of Fence" => &[Right::Migrate],
        "SetAccess" | "Delete" => return None,
        other => panic!("a new request: {other}"),
    })
}

/// Creates a file of the victim, which other users have these rights to.
async fn create_shared(client: &Client, name: &str, rights: &[Right]) -> FileName {
    let access = Some(Access { other: rights_of(rights), ..Access::private(VICTIM, 7) });
    let file = CreateFile { name: name.to_owned(), size_bytes: 16 * PAGE, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
    FileName::Owned(owned(VICTIM, name))
}

fn rights_of(rights: &[Right]) -> Rights {
    rights.iter().copied().collect()
}

#[test(flavor = "multi_thread")]
async fn each_right_permits_its_own_requests_alone() {
    let service = service();
    let client = service.client().await.unwrap();
    let sets: [&[Right]; 7] = [
        &[],
        &[Right::Read],
        &[Right::Write],
        &[Right::Read, Right::Write],
        &[Right::Checkpoint],
        &[Right::Migrate],
        &[Right::Evict],
    ];
    for (number, rights) in sets.into_iter().enumerate() {
        let all = [&[Right::Inspect], rights].concat();
        let file = create_shared(&client, &format!("shared-{number}"), &all).await;
        for (request, answer) in answers_to(&service, SQUATTER, &file) {
            let may = needed(request).is_some_and(|needed| needed.iter().all(|right| rights.contains(right)));
            let refusal = if needed(request).is_some() { "lacks the" } else { "does not own" };
            let is_refused = answer.starts_with("PermissionDenied") && answer.contains(refusal);
            assert_eq!(is_refused, !may, "{request} with {rights:?}: {answer}");
        }
    }
}

/// Opens a file for writing as another user than its owner.
fn open(service: &Service, file: &FileName) -> Result<OwnedFd, ClientError> {
    let open = || {
        become_user(SQUATTER, GROUP).unwrap();
        service.fdpass().unwrap().open(file, true).map(|(fd, _)| fd)
    };
    std::thread::scope(|scope| scope.spawn(open).join().unwrap())
}

#[test]
async fn revoked_right_closes_no_descriptor() {
    let service = service();
    let client = service.client().await.unwrap();
    let rights = [Right::Inspect, Right::Read, Right::Write];
    let file = create_shared(&client, "shared", &rights).await;
    let opened = open(&service, &file).unwrap();
    let inspect = Access { other: rights_of(&[Right::Inspect]), ..Access::private(VICTIM, 7) };
    client.set_access(&file, inspect).await.unwrap();
    let refused = open(&service, &file).unwrap_err();
    assert_eq!(refused.refusal(), Some(RefusalCode::PermissionDenied));
    fd::write_at(opened.as_fd(), 0, b"written").unwrap();
}
