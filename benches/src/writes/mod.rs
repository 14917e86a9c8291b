//! Cost of write tracking: page faults of the writer, and the time of checkpoints and changes. Each figure is compared with the
//! kernel mechanism alone.

pub mod checkpoints;
pub mod first;
pub mod report;
pub mod signal;
pub mod swapped;

use fdmap_client::grpc::{Checkpoint, CreateFile};
use fdmap_client::{Client, MappedFile};
use fdmap_tests::host::HostLock;
use fdmap_tests::service::{Service, named};

use crate::{BenchError, BenchResult, Settings};

/// The fixture of the write tracking benchmarks: a service and a client.
pub struct WritesFixture {
    pub settings: Settings,
    client: Client,
    runtime: tokio::runtime::Runtime,
    service: Service,
    _host: HostLock,
}

impl WritesFixture {
    /// Starts a service.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn make(settings: Settings) -> BenchResult<Self> {
        fdmap_tests::host::root()?;
        let alone = HostLock::acquire()?;
        let service = Service::start(&["--probe", "xarray"])?;
        let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let client = runtime.block_on(service.client())?;
        Ok(Self { settings, client, runtime, service, _host: alone })
    }

    /// Creates a file in the service and maps it writable.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn map(&self, name: &str, size_bytes: u64) -> BenchResult<MappedFile> {
        let file = CreateFile { name: name.to_owned(), size_bytes, ..CreateFile::default() };
        self.wait(self.client.create(file))?;
        Ok(self.service.fdpass()?.map(&named(name), true)?)
    }

    /// Deletes a file. Its mapping should be dropped before.
    ///
    /// # Errors
    /// [`BenchError::Client`]
    pub fn delete(&self, name: &str) -> BenchResult<()> {
        Ok(self.wait(self.client.delete(&named(name)))?)
    }

    /// Makes a checkpoint.
    ///
    /// # Errors
    /// [`BenchError::Client`]
    pub fn checkpoint(&self, name: &str, force_scan: bool) -> BenchResult<Checkpoint> {
        Ok(self.wait(self.client.checkpoint(&named(name), force_scan, None))?)
    }

    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a request to completion.
    pub fn wait<T>(&self, answer: impl Future<Output = T>) -> T {
        self.runtime.block_on(answer)
    }
}
