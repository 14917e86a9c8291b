//! What tracking of writes costs: the writer its page faults, and the one who asks the time of a checkpoint and of its
//! changes. Every figure stands beside what the kernel does by itself.

pub mod checkpoints;
pub mod first;
pub mod report;
pub mod signal;
pub mod swapped;

use fdmap_client::grpc::{Checkpoint, CreateFile};
use fdmap_client::{Client, MappedFile};
use fdmap_tests::host::HostLock;
use fdmap_tests::service::{Service, named};

use crate::{BenchError, Measured, Settings};

/// A service, and one who asks it.
pub struct Stage {
    /// What to measure on.
    pub settings: Settings,
    client: Client,
    runtime: tokio::runtime::Runtime,
    service: Service,
    _host: HostLock,
}

impl Stage {
    /// Starts a service.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn make(settings: Settings) -> Measured<Self> {
        fdmap_tests::host::root()?;
        let alone = HostLock::acquire()?;
        let service = Service::start(&["--probe", "xarray"])?;
        let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let client = runtime.block_on(service.client())?;
        Ok(Self { settings, client, runtime, service, _host: alone })
    }

    /// A new file of the service, mapped for writing.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn map(&self, name: &str, size_bytes: u64) -> Measured<MappedFile> {
        let file = CreateFile { name: name.to_owned(), size_bytes, ..CreateFile::default() };
        self.wait(self.client.create(file))?;
        Ok(self.service.fdpass()?.map(&named(name), true)?)
    }

    /// Deletes a file, whose mapping should be gone.
    ///
    /// # Errors
    /// [`BenchError::Client`]
    pub fn delete(&self, name: &str) -> Measured<()> {
        Ok(self.wait(self.client.delete(&named(name)))?)
    }

    /// Closes a generation of writes.
    ///
    /// # Errors
    /// [`BenchError::Client`]
    pub fn checkpoint(&self, name: &str, exact: bool) -> Measured<Checkpoint> {
        Ok(self.wait(self.client.checkpoint(&named(name), exact, None))?)
    }

    /// A client of the service.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Waits for an answer.
    pub fn wait<T>(&self, answer: impl Future<Output = T>) -> T {
        self.runtime.block_on(answer)
    }
}
