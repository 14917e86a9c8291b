//! Both probes on the same files: two services, one of which adopts the files of the other.

use fdmap_client::Client;
use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_client::proto::{Backing, PageRange, PageState, Provenance, Run, SwapSlot};

use crate::HarnessResult;
use crate::service::{Service, named};

/// The state of one page, and its swap slot.
pub type Page = (PageState, Option<SwapSlot>);

/// Two services with the same files.
#[derive(Debug)]
pub struct ProbePair {
    /// The service with the xarray probe, which creates the files.
    pub xarray: Service,
    /// The service with the syscalls probe, which adopts the files.
    pub syscalls: Service,
}

impl ProbePair {
    /// Starts both services.
    ///
    /// # Errors
    /// [`crate::HarnessError`]
    pub fn start() -> HarnessResult<Self> {
        crate::host::root()?;
        Ok(Self {
            xarray: Service::start(&["--probe", "xarray"])?,
            syscalls: Service::start(&["--probe", "syscalls"])?,
        })
    }

    /// Creates a file in the first service; the second adopts it.
    ///
    /// # Errors
    /// [`crate::HarnessError`]
    pub async fn create(&self, name: &str, size_bytes: u64, backing: Backing) -> HarnessResult<()> {
        let file = CreateFile { name: name.to_owned(), size_bytes, backing, ..CreateFile::default() };
        self.xarray.client().await?.create(file).await?;
        let (memfd, _) = self.xarray.fdpass()?.open(&named(name), true)?;
        self.syscalls.fdpass()?.adopt(std::os::fd::AsFd::as_fd(&memfd), name, None)?;
        Ok(())
    }

    /// Deletes a file in both services.
    ///
    /// # Errors
    /// [`crate::HarnessError`]
    pub async fn delete(&self, name: &str) -> HarnessResult<()> {
        self.xarray.client().await?.delete(&named(name)).await?;
        self.syscalls.client().await?.delete(&named(name)).await?;
        Ok(())
    }

    /// The pages of a file as each probe reports them: xarray, syscalls.
    ///
    /// # Errors
    /// [`crate::HarnessError`]
    pub async fn pages(&self, name: &str) -> HarnessResult<[Vec<Page>; 2]> {
        Ok([
            pages_of(&self.xarray.client().await?, name).await?.0,
            pages_of(&self.syscalls.client().await?, name).await?.0,
        ])
    }
}

/// All pages of a file, one by one, and their provenance.
///
/// # Errors
/// [`crate::HarnessError`]
pub async fn pages_of(client: &Client, name: &str) -> HarnessResult<(Vec<Page>, Provenance)> {
    let (runs, provenance) = runs_of(client, name, &ScanRequest::default()).await?;
    Ok((expand(&runs), provenance))
}

/// The runs of a scan, and their provenance.
///
/// # Errors
/// [`crate::HarnessError`]
pub async fn runs_of(
    client: &Client,
    name: &str,
    options: &ScanRequest,
) -> HarnessResult<(Vec<Run>, Provenance)> {
    let scan = client.scan(&named(name), options).await?;
    let provenance = scan.header().provenance;
    Ok((scan.runs().await?, provenance))
}

/// Expands runs that begin at page 0 and have no gaps to one entry per page.
#[must_use]
pub fn expand(runs: &[Run]) -> Vec<Page> {
    let page_of = |run: &Run, page| (run.state, run.slot_of(fdmap_proto::PageIndex(page)));
    runs.iter()
        .flat_map(|run| (run.range.start().0..run.range.end().0).map(|page| page_of(run, page)))
        .collect()
}

/// The pages that hold data.
#[must_use]
pub fn data(pages: &[Page]) -> Vec<u64> {
    (0_u64..).zip(pages).filter(|(_, (state, _))| state.is_data()).map(|(page, _)| page).collect()
}

/// The pages in one state.
#[must_use]
pub fn in_state(pages: &[Page], wanted: PageState) -> Vec<u64> {
    (0_u64..).zip(pages).filter(|(_, (state, _))| *state == wanted).map(|(page, _)| page).collect()
}

/// The range of all pages of a file.
#[must_use]
pub const fn whole(pages: u64) -> PageRange {
    PageRange::first(pages)
}
