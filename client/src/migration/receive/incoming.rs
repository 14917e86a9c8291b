//! The state of a migration at the destination: applies its steps, in order.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fdmap_proto::convert::{backing_from_wire, seals_from_wire};
use fdmap_proto::units::to_u64;
use fdmap_proto::v1::receive_request::Step;
use fdmap_proto::{Access, FileInfo, PageIndex, Seals, v1};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::Status;

use super::super::digest::PageHashes;
use super::super::error::Rejected;
use super::super::message::{Pages, file_digest};
use super::ReceiveOptions;
use super::file::IncomingFile;
use crate::grpc::CreateFile;
use crate::image::{Control, PAGE_BYTES, Phase};
use crate::{Client, FdpassClient};

/// A migration in progress.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Number of the last step that was applied.
    number: u64,
    file: IncomingFile,
    hashes: PageHashes,
    /// The last step compared the digests.
    is_verified: bool,
    seals: Seals,
    access: Option<Access>,
    control: Arc<Control>,
}

/// Parts that the file of a migration is made of.
pub(super) struct NewFile {
    pub(super) options: ReceiveOptions,
    pub(super) client: Client,
    pub(super) runtime: Handle,
    /// Cloned into the file; closed when its deletion has ended.
    pub(super) deletion: mpsc::Sender<()>,
    /// Counts what was received.
    pub(super) control: Arc<Control>,
}

/// The result of a step.
#[derive(Debug)]
pub(super) enum Applied {
    /// Steps up to this number were applied.
    Received(u64),
    /// The file exists. The descriptor keeps it, if it is ephemeral.
    Committed(Box<FileInfo>, OwnedFd),
}

impl Incoming {
    /// Creates the file.
    pub(super) fn begin(
        begin: v1::BeginMigration,
        new: &NewFile,
        fdpass: &mut FdpassClient,
    ) -> Result<Self, Rejected> {
        let NewFile { options, client, runtime, deletion, control } = new;
        let invalid = |error| Rejected(Status::invalid_argument(fdmap_proto::error_chain(&error)));
        let backing = backing_from_wire(begin.backing, begin.hugetlb_page_size).map_err(invalid)?;
        let seals = seals_from_wire(&begin.seals).map_err(invalid)?;
        let given = begin.access.map(Access::try_from).transpose().map_err(invalid)?;
        let access = options.access.or(given.filter(|_| options.takes_access));
        let file = CreateFile {
            name: options.name.clone().unwrap_or(begin.name),
            size_bytes: begin.size_bytes,
            backing,
            access,
            lifetime: options.lifetime,
            ..CreateFile::default()
        };
        let file = IncomingFile::create(client, fdpass, runtime, deletion.clone(), file)?;
        control.begin_round();
        control.enter(Phase::Copying);
        Ok(Self {
            number: 0,
            file,
            hashes: PageHashes::default(),
            is_verified: false,
            seals,
            access,
            control: Arc::clone(control),
        })
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Applies a step, unless it was applied. Blocks.
    pub(super) fn apply(&mut self, request: v1::ReceiveRequest) -> Result<Applied, Rejected> {
        let v1::ReceiveRequest { number, step } = request;
        let invalid = |reason: String| Rejected(Status::invalid_argument(reason));
        if let Some(Step::Abort(_)) = step {
            return Err(Rejected(Status::cancelled("the source aborted the migration")));
        }
        if number <= self.number {
            return Ok(Applied::Received(self.number));
        }
        if number != self.number + 1 {
            return Err(invalid(format!("step {number} follows step {}", self.number)));
        }
        let was_verified = std::mem::take(&mut self.is_verified);
        match step {
            Some(Step::Pages(pages)) => self.store(&Pages::decode(pages, self.file.pages())?)?,
            Some(Step::ResizeBytes(bytes)) => {
                self.file.resize(bytes)?;
                self.hashes.clear_from(PageIndex(bytes.div_ceil(PAGE_BYTES)));
            }
            Some(Step::Verify(digest)) => self.verify(&digest)?,
            Some(Step::Commit(_)) if was_verified => {
                let descriptor = self.file.descriptor()?;
                let info = self.file.complete(self.seals, self.access)?;
                self.number = number;
                return Ok(Applied::Committed(Box::new(info), descriptor));
            }
            Some(Step::Commit(_)) => return Err(invalid("commit without verify before it".to_owned())),
            Some(Step::Begin(_) | Step::Abort(_)) | None => {
                return Err(invalid(format!("step {number} has no content that may follow begin")));
            }
        }
        self.number = number;
        Ok(Applied::Received(number))
    }

    fn store(&mut self, pages: &Pages) -> Result<(), Rejected> {
        for (range, bytes) in pages.ranges() {
            self.file.write(range, bytes)?;
        }
        for (page, hash) in pages.hashes() {
            match hash {
                Some(hash) => self.hashes.set(PageIndex(page), hash),
                None => self.hashes.clear(fdmap_proto::PageRange::at(PageIndex(page), 1)),
            }
        }
        for range in &pages.zero {
            // All others are zero.
            for present in self.hashes.present(*range) {
                self.control.check()?;
                self.file.zero(present)?;
            }
            self.hashes.clear(*range);
        }
        let received = pages.content.iter().chain(&pages.zero).map(|range| range.len()).sum();
        self.control.advance(received, to_u64(pages.bytes.len()));
        Ok(())
    }

    fn verify(&mut self, digest: &[u8]) -> Result<(), Rejected> {
        if file_digest(digest)? != self.hashes.digest(self.file.size_bytes()) {
            let reason = "the digest of the file differs from that at the source";
            return Err(Rejected(Status::data_loss(reason)));
        }
        self.is_verified = true;
        Ok(())
    }
}
