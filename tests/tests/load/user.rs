//! Clients of other users, as threads of this process.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use fdmap_client::Endpoint;
use fdmap_sys::testing::credentials::become_user;
use fdmap_tests::HarnessResult;
use fdmap_tests::service::copied;
use fdmap_tests::test_agent::{PROGRAM, TestAgent};

/// The group that may connect.
pub const GROUP: u32 = 65_534;

/// A client, of whom the service knows the user.
#[derive(Clone, Debug)]
pub struct User {
    pub uid: u32,
    pub runtime_dir: PathBuf,
}

impl User {
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::in_runtime_dir(&self.runtime_dir)
    }

    /// Runs a client on this thread, which must end afterwards. The kernel takes the identity of a peer from the thread that
    /// connects: those of this runtime are made on this thread and on threads
    /// that it creates, which inherit its user.
    pub fn run<T>(&self, client: impl Future<Output = HarnessResult<T>>) -> HarnessResult<T> {
        become_user(self.uid, GROUP)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(client)
    }

    /// Starts a test agent of this user.
    pub fn agent(&self) -> HarnessResult<TestAgent> {
        let mut command = Command::new(copied(&self.runtime_dir, PROGRAM)?);
        command.uid(self.uid).gid(GROUP);
        TestAgent::start_by(command, None)
    }
}
