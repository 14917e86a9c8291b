//! A file that processes of several users map, and requests by sessions about the mappings of it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Instant;

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::file::{Access, Rights};
use fdmap_client::proto::units::Generation;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::attack::MAX_RELEASE;
use fdmap_tests::raw::{RawSession, packet};
use fdmap_tests::reported::Reported;
use fdmap_tests::service::{Service, named};
use fdmap_tests::victim::{GROUP, USER as VICTIM};
use tonic::Code;

const FILE_BYTES: u64 = 64 * 4096;
/// A pid that no process has.
const UNUSED_PID: u32 = u32::MAX >> 1;

/// A file of the victim's user to which all users may write, and its consumer.
pub struct SharedFile {
    client: Client,
    pub name: String,
    since: Generation,
    /// Keeps the file while no process has mapped it.
    _descriptor: OwnedFd,
}

impl SharedFile {
    pub async fn create(service: &Service, name: String) -> Self {
        let client = service.client().await.unwrap();
        let access =
            Some(Access { group: Rights::ALL, other: Rights::ALL, ..Access::private(VICTIM, GROUP) });
        let file = CreateFile { name: name.clone(), size_bytes: FILE_BYTES, access, ..CreateFile::default() };
        client.create(file).await.unwrap();
        let name = format!("{VICTIM}/{name}");
        let (descriptor, _) = service.fdpass().unwrap().open(&named(&name), false).unwrap();
        Self { client, name, since: Generation::NONE, _descriptor: descriptor }
    }

    pub fn named(&self) -> FileName {
        named(&self.name)
    }

    /// Closes a generation. Returns its pages and the number of those that were seen written.
    pub async fn next_observed(&mut self) -> (Reported, u64) {
        let made = self.client.checkpoint(&self.named(), true, None).await.unwrap();
        let reported = Reported::since(&self.client, &self.named(), self.since).await.unwrap();
        self.since = made.generation;
        (reported, made.observed_pages)
    }

    pub async fn next(&mut self) -> Reported {
        self.next_observed().await.0
    }

    /// Closes generations until one has exact coverage and no page.
    pub async fn settle(&mut self) {
        let began = Instant::now();
        loop {
            let reported = self.next().await;
            if reported.coverage.exact && reported.pages.is_empty() {
                return;
            }
            assert!(began.elapsed() < MAX_RELEASE, "{reported:?}");
        }
    }

    /// Pids and ids of the tracked mappings, sorted.
    pub async fn mappings(&self) -> Vec<(u32, u64)> {
        let coverage = self.client.coverage(&self.named()).await.unwrap();
        let mut mappings: Vec<_> = coverage.mappings.iter().map(|one| (one.pid, one.id.get())).collect();
        mappings.sort_unstable();
        mappings
    }
}

pub fn untrack(file: &SharedFile, mapping_ids: Vec<u64>) -> Op {
    Op::Untrack(v1::Untrack { file: Some(file.named().into()), mapping_ids })
}

pub fn detach(file: &SharedFile, pid: u32, mapping_ids: Vec<u64>) -> Op {
    Op::Detach(v1::Detach { file: Some(file.named().into()), pid, mapping_ids })
}

/// The number of mappings that a Detach request of all mappings of a process ends.
pub fn detached(session: &RawSession, file: &SharedFile, pid: u32) -> u32 {
    session.send(&packet(detach(file, pid, vec![])), &[]).unwrap();
    match session.reply().unwrap() {
        Some((Reply::Detached(detached), _)) => detached.mappings,
        other => panic!("process {pid}: {other:?}"),
    }
}

#[track_caller]
pub fn assert_refused(session: &RawSession, operation: Op, code: Code) {
    session.send(&packet(operation.clone()), &[]).unwrap();
    let error = session.error().unwrap();
    assert_eq!((error.code, error.fatal), (i32::from(code), false), "{operation:?}: {error:?}");
}

pub fn track(session: &RawSession, file: &SharedFile, pid: u32) -> v1::Error {
    let uffd = Userfaultfd::create_user_mode_only().unwrap();
    let mapping = v1::ClientMapping { address: 1 << 20, length_bytes: 4096, ..Default::default() };
    let file = Some(file.named().into());
    let request = v1::Track { file, mappings: vec![mapping], pagemap: false, maps: false, pid };
    session.send(&packet(Op::Track(request)), &[uffd.as_fd()]).unwrap();
    session.error().unwrap()
}

/// The answers about each of these processes are those about one that does not exist.
#[track_caller]
pub fn assert_unknown(session: &RawSession, user: u32, file: &SharedFile, pids: &[u32]) {
    for pid in pids.iter().copied().chain([UNUSED_PID]) {
        session.send(&packet(detach(file, pid, vec![])), &[]).unwrap();
        for error in [session.error().unwrap(), track(session, file, pid)] {
            let expected = format!("user {user} has no process {pid} whose mappings may be tracked");
            assert_eq!((error.code, error.message), (i32::from(Code::PermissionDenied), expected));
        }
    }
}
