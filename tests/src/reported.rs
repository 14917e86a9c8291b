//! Files of small pages, and the pages of them that the service reports as changed.

use fdmap_client::Client;
use fdmap_client::grpc::{ChangesOptions, CreateFile};
use fdmap_client::proto::Coverage;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::Generation;

use crate::HarnessResult;

/// Creates a file of `size_bytes` bytes.
///
/// # Errors
/// [`crate::HarnessError::Client`]
pub async fn create_file(client: &Client, name: &str, size_bytes: u64) -> HarnessResult<()> {
    let file = CreateFile { name: name.to_owned(), size_bytes, ..CreateFile::default() };
    Ok(client.create(file).await.map(drop)?)
}

/// Changed pages and the coverage of their generations.
#[derive(Debug)]
pub struct Reported {
    pub pages: Vec<u64>,
    pub coverage: Coverage,
}

impl Reported {
    /// The pages of a file that changed after generation `since`.
    ///
    /// # Errors
    /// [`crate::HarnessError::Client`]
    pub async fn since(client: &Client, file: &FileName, since: Generation) -> HarnessResult<Self> {
        let options = ChangesOptions { since, ..ChangesOptions::default() };
        let changes = client.changes(file, options).await?;
        let coverage = changes.header().coverage.clone();
        let runs = changes.runs().await?;
        let pages = runs.iter().flat_map(|run| run.run.range.start().0..run.run.range.end().0);
        Ok(Self { pages: pages.collect(), coverage })
    }

    /// Asserts that the page is reported.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn assert_contains(&self, page: u64, what: &str) {
        assert!(self.pages.contains(&page), "{what}: page {page} is missing in {:?}", self.pages);
    }

    /// Asserts that exactly these pages are reported, with exact coverage.
    ///
    /// # Panics
    /// If they are not.
    #[track_caller]
    pub fn assert_exact(&self, pages: &[u64], what: &str) {
        assert_eq!(self.pages, pages, "{what}: {:?}", self.coverage);
        assert!(self.coverage.exact, "{what}: {:?}", self.coverage);
    }
}
