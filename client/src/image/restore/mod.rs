//! Restore: creates files of the service from an image and its parents.
//!
//! ```text
//!   open the chain -> create the files -> copy the stored pages -> add the seals -> keep the files
//!                          |                      |                     |
//!                          +------ error, ^C: the files are deleted ----+
//! ```
//!
//! Pages that the image does not store stay holes. Each chunk is verified before its pages are written.

mod file;
pub(super) mod target;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fdmap_proto::{Access, FileInfo, Lifetime};
use tokio::runtime::Handle;

use super::chain::{ImageChain, ImageFile};
use super::error::ImageError;
use super::progress::{Control, Phase};
use crate::grpc::CreateFile;
use crate::{Client, FdpassClient};
use file::{access_of, backing_of};
use target::Target;
#[cfg(feature = "migration")]
pub(crate) use target::write;

/// How files are restored.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// Restore only the file of this name or number (shmid) in the image.
    pub file: Option<String>,
    /// Name of the new file; `None`: that in the image. Only for one file.
    pub name: Option<String>,
    /// Owner, group and rights; `None`: those of the image if the caller is an administrator, else the caller's.
    pub access: Option<Access>,
    /// As in [`crate::grpc::CreateFile`].
    pub lifetime: Option<Lifetime>,
    /// Threads that read and write; at least 1.
    pub jobs: usize,
}

/// A restored file.
#[derive(Clone, Debug)]
pub struct RestoredFile {
    pub info: FileInfo,
    /// Pages that were written.
    pub pages: u64,
}

/// What a restore has made.
#[derive(Clone, Debug)]
pub struct RestoreReport {
    pub files: Vec<RestoredFile>,
    /// Number of images in the chain.
    pub images: usize,
    pub elapsed: Duration,
}

/// Connections to the service that gets the files.
#[derive(Debug)]
pub struct RestoreService<'a> {
    pub client: &'a Client,
    pub fdpass: &'a mut FdpassClient,
    /// Runs the calls of `client`. Another thread drives it.
    pub runtime: Handle,
}

impl RestoreService<'_> {
    /// True if the caller may create files with any owner.
    pub(in crate::image) fn is_administrator(&self) -> Result<bool, ImageError> {
        let host = self.runtime.block_on(self.client.host_info())?;
        Ok(host.caller_uid == 0 || host.caller_uid == host.uid)
    }
}

/// The new file for one of the image.
pub(in crate::image) fn new_file(
    file: &ImageFile,
    options: &RestoreOptions,
    is_admin: bool,
) -> Result<CreateFile, ImageError> {
    let access = match options.access {
        None if is_admin => Some(access_of(file)?),
        given => given,
    };
    Ok(CreateFile {
        name: options.name.clone().unwrap_or_else(|| file.inode.name.clone()),
        size_bytes: file.inode.size,
        backing: backing_of(file)?,
        access,
        lifetime: options.lifetime,
        ..CreateFile::default()
    })
}

/// Restores the files of an image. Returns them with descriptors, open for reading and writing: a file that is not kept ends when no
/// process uses it. Blocks; do not call it on a thread of an async runtime. After an error the files are deleted.
///
/// # Errors
/// [`ImageError`]
pub fn restore(
    chain: &ImageChain,
    service: RestoreService<'_>,
    options: &RestoreOptions,
    control: &Control,
) -> Result<(RestoreReport, Vec<OwnedFd>), ImageError> {
    let begun = Instant::now();
    control.begin_round();
    let files = chain.selected(options.file.as_deref())?;
    if options.name.is_some() && files.len() != 1 {
        let reason = format!("a name is for one file, and {} are selected", files.len());
        return Err(ImageError::Usage(reason));
    }
    control.expect(files.iter().flat_map(|file| &file.extents).map(|extent| extent.range.len()).sum());
    let is_admin = service.is_administrator()?;
    let RestoreService { client, fdpass, runtime } = service;
    let mut targets = Vec::with_capacity(files.len());
    for file in &files {
        control.check()?;
        targets.push(Target::create(client, fdpass, &runtime, new_file(file, options, is_admin)?)?);
    }
    control.enter(Phase::Copying);
    for (file, target) in files.iter().zip(&mut targets) {
        target.copy(chain, file, options.jobs.max(1), control)?;
    }
    control.enter(Phase::Completing);
    for (file, target) in files.iter().zip(&mut targets) {
        control.check()?;
        target.complete(file)?;
    }
    let (files, descriptors): (_, Vec<_>) = targets.into_iter().map(Target::keep).unzip();
    let report = RestoreReport { files, images: chain.len(), elapsed: begun.elapsed() };
    Ok((report, descriptors.into_iter().flatten().collect()))
}
