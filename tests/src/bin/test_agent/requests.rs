//! Requests to a service that it refuses.

use std::os::fd::AsFd as _;
use std::path::Path;

use fdmap_client::proto::{ClientMapping, PageIndex};
use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::service::named;
use fdmap_tests::test_agent::command::{FileOf, Reply};

use crate::call::{Done, error_text};

/// The second page of the address space, where nothing is mapped.
const NOTHING: ClientMapping = ClientMapping { address: 4096, length_bytes: 4096, first_page: PageIndex(0) };

/// A session with the service of a runtime directory.
pub fn fdpass(runtime_dir: &Path) -> Done<FdpassClient> {
    FdpassClient::connect(&Endpoint::in_runtime_dir(runtime_dir), Timeouts::default()).map_err(error_text)
}

pub fn claim(file: &FileOf) -> Done<Reply> {
    let uffd = Userfaultfd::create().map_err(error_text)?;
    let mut session = fdpass(&file.runtime_dir)?;
    let tracked = session.track(&named(&file.name), uffd.as_fd(), None, None, &[NOTHING]);
    tracked.map(|_| Reply::Done).map_err(error_text)
}

pub fn track_for(runtime_dir: &Path, pid: u32) -> Done<Reply> {
    let mut session = fdpass(runtime_dir)?;
    session.memfd_create("mine", "mine", 0).map_err(error_text)?;
    let uffd = Userfaultfd::create().map_err(error_text)?;
    let tracked = session.track_process(pid, &named("mine"), uffd.as_fd(), None, None, &[NOTHING]);
    tracked.map(|_| Reply::Done).map_err(error_text)
}
