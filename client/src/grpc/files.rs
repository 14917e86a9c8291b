//! Files.

use fdmap_proto::convert::{ConvertError, FileName, backing_to_wire, seals_to_wire};
use fdmap_proto::units::FileId;
use fdmap_proto::v1::watch_response::Event;
use fdmap_proto::{Access, Backing, FileInfo, Seals, v1};
use tonic::Streaming;

use super::{Client, refusal};
use crate::{ClientError, Timeouts};

/// A file to make.
#[derive(Clone, Debug, Default)]
pub struct CreateFile {
    /// Unique in the service.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
    /// What its pages are made of.
    pub backing: Backing,
    /// Added right after the size is set.
    pub seals: Seals,
    /// `None`: ours alone.
    pub access: Option<Access>,
}

/// What a [`Watch`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// A file that was there when the watch began.
    Present(FileInfo),
    /// All of these have been told; what follows happens now.
    Synced,
    /// A new file.
    Created(FileInfo),
    /// Its size, seals or access changed.
    Changed(FileInfo),
    /// It was deleted, or we may no longer see it.
    Removed {
        /// Its id.
        id: FileId,
        /// Its name.
        name: String,
    },
    /// So many events were lost, since we read too slowly: list the files again.
    Lost(u64),
}

impl Client {
    /// Makes a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn create(&self, file: CreateFile) -> Result<FileInfo, ClientError> {
        let CreateFile { name, size_bytes, backing, seals, access } = file;
        let (backing, hugetlb_page_size) = backing_to_wire(backing);
        let request = v1::CreateRequest {
            name,
            size_bytes,
            backing,
            hugetlb_page_size,
            seals: seals_to_wire(seals),
            access: access.map(v1::Access::from),
        };
        info(self.wait("Create", self.files.clone().create(request)).await?.file)
    }

    /// What there is to tell of a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn get(&self, file: &FileName) -> Result<FileInfo, ClientError> {
        let request = v1::GetRequest { file: Some(file.clone().into()) };
        info(self.wait("Get", self.files.clone().get(request)).await?.file)
    }

    /// All files that we may see, in order of their names.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn list(&self) -> Result<Vec<FileInfo>, ClientError> {
        let mut files = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = v1::ListRequest { page_size: 0, page_token };
            let answer = self.wait("List", self.files.clone().list(request)).await?;
            for file in answer.files {
                files.push(FileInfo::try_from(file)?);
            }
            page_token = answer.next_page_token;
            if page_token.is_empty() {
                return Ok(files);
            }
        }
    }

    /// Changes a file's size, as ftruncate(2) does.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn resize(&self, file: &FileName, size_bytes: u64) -> Result<FileInfo, ClientError> {
        let request = v1::ResizeRequest { file: Some(file.clone().into()), size_bytes };
        info(self.wait("Resize", self.files.clone().resize(request)).await?.file)
    }

    /// Adds seals to a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn seal(&self, file: &FileName, seals: Seals) -> Result<FileInfo, ClientError> {
        let request = v1::SealRequest { file: Some(file.clone().into()), seals: seals_to_wire(seals) };
        info(self.wait("Seal", self.files.clone().seal(request)).await?.file)
    }

    /// Changes who may do what with a file.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn set_access(&self, file: &FileName, access: Access) -> Result<FileInfo, ClientError> {
        let request = v1::SetAccessRequest { file: Some(file.clone().into()), access: Some(access.into()) };
        info(self.wait("SetAccess", self.files.clone().set_access(request)).await?.file)
    }

    /// Makes the service let go of a file; whoever has it open or mapped keeps it.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn delete(&self, file: &FileName) -> Result<(), ClientError> {
        let request = v1::DeleteRequest { file: Some(file.clone().into()) };
        self.wait("Delete", self.files.clone().delete(request)).await.map(|_| ())
    }

    /// The files that we may see, and then each change as it happens.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn watch(&self) -> Result<Watch, ClientError> {
        let stream = self.wait("Watch", self.files.clone().watch(v1::WatchRequest {})).await?;
        Ok(Watch { stream, timeouts: self.timeouts })
    }
}

/// Changes of files as they happen.
#[derive(Debug)]
pub struct Watch {
    stream: Streaming<v1::WatchResponse>,
    timeouts: Timeouts,
}

impl Watch {
    /// The next change, however long it takes; `None` when the service stops. A service that is stuck is noticed by its
    /// silence to pings.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn next(&mut self) -> Result<Option<FileChange>, ClientError> {
        let message = self.stream.message().await;
        let Some(message) = message.map_err(|status| refusal("Watch", self.timeouts, &status))? else {
            return Ok(None);
        };
        Ok(Some(match message.event.ok_or(ConvertError::Missing("event"))? {
            Event::Present(file) => FileChange::Present(file.try_into()?),
            Event::Synced(_) => FileChange::Synced,
            Event::Created(file) => FileChange::Created(file.try_into()?),
            Event::Changed(file) => FileChange::Changed(file.try_into()?),
            Event::Removed(removed) => FileChange::Removed {
                id: FileId::new(removed.id).ok_or(ConvertError::ZeroId("file id"))?,
                name: removed.name,
            },
            Event::Lost(lost) => FileChange::Lost(lost.events),
        }))
    }
}

fn info(file: Option<v1::File>) -> Result<FileInfo, ClientError> {
    Ok(file.ok_or(ConvertError::Missing("file"))?.try_into()?)
}
