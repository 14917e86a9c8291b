//! A file to dump, and the calls to the service that owns it.

use std::fmt;
use std::os::fd::OwnedFd;

use fdmap_proto::units::Generation;
use fdmap_proto::{Effect, FileInfo, FileName, GapKind, PageIndex, PageRange, Run, SlotContents};
use tokio::runtime::Handle;

use super::super::error::ImageError;
use super::super::ranges::PageSet;
use crate::grpc::{ChangesOptions, ScanRequest};
use crate::{Client, ClientError, FdpassClient};

/// A file to dump.
#[derive(Debug)]
pub struct DumpSource {
    client: Client,
    runtime: Handle,
    /// By id: a file of the same name may take its place.
    id: FileName,
    /// Metadata when it was opened.
    pub(crate) info: FileInfo,
    /// Open read-only.
    pub(crate) fd: OwnedFd,
}

/// A generation that was closed for a dump.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closed {
    pub(crate) generation: Generation,
    pub(crate) is_exact: bool,
}

/// Pages that were written after a generation.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) pages: PageSet,
    /// The first pages of which a write was observed.
    pub(crate) first_observed: Option<PageRange>,
    /// Pages were pinned for DMA.
    pub(crate) has_pinned: bool,
    pub(crate) is_exact: bool,
}

impl DumpSource {
    /// Opens a file. Needs the rights to inspect and read it, and to take checkpoints. `runtime` runs the calls of `client`; another
    /// thread drives it.
    ///
    /// # Errors
    /// [`ClientError`]
    pub fn open(
        client: &Client,
        fdpass: &mut FdpassClient,
        runtime: Handle,
        file: &FileName,
    ) -> Result<Self, ClientError> {
        let (fd, info) = fdpass.open(file, false)?;
        Ok(Self { client: client.clone(), runtime, id: FileName::Id(info.id), info, fd })
    }

    /// Name, for messages.
    pub(crate) fn name(&self) -> String {
        self.info.caller_name()
    }

    /// Closes the open generation. Harvests all mappings, since an idle checkpoint may leave the last write to the next one.
    pub(crate) fn checkpoint(&self) -> Result<Closed, ImageError> {
        let checkpoint = self.runtime.block_on(self.client.checkpoint(&self.id, true, None))?;
        Ok(Closed { generation: checkpoint.generation, is_exact: checkpoint.coverage.exact })
    }

    /// Closes the open generation. `None`: nothing was written in it.
    #[cfg(feature = "migration")]
    pub(crate) fn checkpoint_of_writes(&self) -> Result<Option<Generation>, ImageError> {
        let checkpoint = self.runtime.block_on(self.client.checkpoint(&self.id, false, None))?;
        Ok((!checkpoint.unchanged).then_some(checkpoint.generation))
    }

    /// Fences the file. Returns its metadata, which stay as they are.
    #[cfg(feature = "migration")]
    pub(crate) fn fence(&self, reason: &str) -> Result<FileInfo, ImageError> {
        Ok(self.runtime.block_on(self.client.fence(&self.id, reason))?)
    }

    /// Ends the fence of this reason, if there is one.
    #[cfg(feature = "migration")]
    pub(crate) fn end_fence(&self, reason: &str) -> Result<(), ImageError> {
        self.runtime.block_on(self.client.end_fence(&self.id, reason))?;
        Ok(())
    }

    /// Metadata now. The size may have changed.
    pub(crate) fn current_info(&self) -> Result<FileInfo, ImageError> {
        Ok(self.runtime.block_on(self.client.get(&self.id))?)
    }

    /// Pages that were written after a generation. Fails if some may be missing.
    pub(crate) fn written_since(&self, since: Generation) -> Result<Written, ImageError> {
        let options = ChangesOptions { since, ..ChangesOptions::default() };
        let (coverage, changed) = self.runtime.block_on(async {
            let changes = self.client.changes(&self.id, options).await?;
            let coverage = changes.header().coverage.clone();
            Ok::<_, ClientError>((coverage, changes.runs().await?))
        })?;
        if let Some(gap) = coverage.gaps.iter().find(|gap| gap.effect == Effect::Ignored) {
            let reason = format!(
                "writes may be missing, since the coverage policy ignores {}: {}",
                gap.kind, gap.detail
            );
            let remedy = "Set another coverage policy, or dump without a parent";
            return Err(ImageError::Usage(format!("{self}: {reason}. {remedy}")));
        }
        let pages = changed.iter().map(|changed| changed.run.range).collect();
        let first_observed = changed.iter().find(|changed| !changed.run.conservative);
        let first_observed = first_observed.map(|changed| changed.run.range);
        let has_pinned = coverage.gaps.iter().any(|gap| gap.kind == GapKind::Pinned);
        Ok(Written { pages, first_observed, has_pinned, is_exact: coverage.exact })
    }

    /// The swap slots of pages, and where their content is. Empty if the service refuses that: it does not know the call, or the file has
    /// become smaller.
    pub(super) fn slot_content(&self, pages: &[PageIndex]) -> Result<SlotContents, ImageError> {
        match self.runtime.block_on(self.client.slot_content(&self.id, pages)) {
            Err(ClientError::Refused { .. }) => Ok(SlotContents::default()),
            other => Ok(other?),
        }
    }

    /// Passes the states of all pages to `take`, with slots, in ascending order.
    pub(crate) fn scan(&self, mut take: impl FnMut(&[Run])) -> Result<(), ImageError> {
        let request = ScanRequest::default();
        let scanned = self.runtime.block_on(async {
            let mut scan = self.client.scan(&self.id, &request).await?;
            while let Some(runs) = scan.next_runs().await? {
                take(&runs);
            }
            Ok::<_, ClientError>(())
        });
        Ok(scanned?)
    }
}

impl fmt::Display for DumpSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
