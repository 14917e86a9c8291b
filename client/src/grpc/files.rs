//! Creation, metadata and deletion of files.

use fdmap_proto::convert::{ConvertError, backing_to_wire, lifetime_to_wire, seals_to_wire};
use fdmap_proto::units::FileId;
use fdmap_proto::v1::watch_response::Event;
use fdmap_proto::{Access, Backing, FileInfo, FileName, Lifetime, OwnedName, Seals, v1};
use tonic::Streaming;

use super::{Client, refusal};
use crate::ClientError;

/// Properties of a file to create.
#[derive(Clone, Debug, Default)]
pub struct CreateFile {
    /// Name; 1 to 249 bytes, unique among the files of the owner.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Memory that backs the file.
    pub backing: Backing,
    /// Seals to add after the size is set.
    pub seals: Seals,
    /// Owner, group and rights; `None`: the caller owns the file and has all rights.
    pub access: Option<Access>,
    /// When the file ends; `None`: a file that an administrator owns and creates is kept, all others are ephemeral.
    /// [`Lifetime::Kept`] needs permission of the service (`fdmapd --allow-keep`).
    pub lifetime: Option<Lifetime>,
}

/// Event of a [`Watch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// A file that existed when the watch started.
    Present(FileInfo),
    /// All existing files have been reported; changes follow.
    Synced,
    /// A file was created or adopted.
    Created(FileInfo),
    /// Size, seals or access of a file changed.
    Changed(FileInfo),
    /// A file was deleted, or the caller lost the right to inspect it.
    Removed {
        /// Id of the file.
        id: FileId,
        /// Name of the file, with the owner that was last reported.
        name: OwnedName,
    },
    /// This number of events was discarded because the client read too slowly. List the files again.
    Lost(u64),
}

impl Client {
    /// Creates a file.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn create(&self, file: CreateFile) -> Result<FileInfo, ClientError> {
        let CreateFile { name, size_bytes, backing, seals, access, lifetime } = file;
        let (backing, hugetlb_page_size) = backing_to_wire(backing);
        let request = v1::CreateRequest {
            name,
            size_bytes,
            backing,
            hugetlb_page_size,
            seals: seals_to_wire(seals),
            access: access.map(v1::Access::from),
            lifetime: lifetime_to_wire(lifetime),
        };
        info(self.wait("Create", self.files.clone().create(request)).await?.file)
    }

    /// Returns the metadata of a file.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn get(&self, file: &FileName) -> Result<FileInfo, ClientError> {
        let request = v1::GetRequest { file: Some(file.clone().into()) };
        info(self.wait("Get", self.files.clone().get(request)).await?.file)
    }

    /// Lists the files that the caller may inspect, sorted by name, and files of one name by owner.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
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

    /// Changes the size of a file, as ftruncate(2) does.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn resize(&self, file: &FileName, size_bytes: u64) -> Result<FileInfo, ClientError> {
        let request = v1::ResizeRequest { file: Some(file.clone().into()), size_bytes };
        info(self.wait("Resize", self.files.clone().resize(request)).await?.file)
    }

    /// Adds seals to a file.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn seal(&self, file: &FileName, seals: Seals) -> Result<FileInfo, ClientError> {
        let request = v1::SealRequest { file: Some(file.clone().into()), seals: seals_to_wire(seals) };
        info(self.wait("Seal", self.files.clone().seal(request)).await?.file)
    }

    /// Replaces owner, group and rights of a file. If the owner changes, the file keeps its name, among the names of the new owner.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service, also if the new owner has a file of this name; [`ClientError`] of the connection.
    pub async fn set_access(&self, file: &FileName, access: Access) -> Result<FileInfo, ClientError> {
        let request = v1::SetAccessRequest { file: Some(file.clone().into()), access: Some(access.into()) };
        info(self.wait("SetAccess", self.files.clone().set_access(request)).await?.file)
    }

    /// Fences a file whose content has moved elsewhere: no generation of it is closed, it is not opened for writing, and its size and
    /// seals do not change.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service, also if the file is fenced for another reason; [`ClientError`] of the connection.
    pub async fn fence(&self, file: &FileName, reason: &str) -> Result<FileInfo, ClientError> {
        self.change_fence(file, reason, "").await
    }

    /// Ends the fence of a file that has the reason `expected`; if that is empty, any fence. The file may have none.
    ///
    /// # Errors
    /// As [`Self::fence`].
    pub async fn end_fence(&self, file: &FileName, expected: &str) -> Result<FileInfo, ClientError> {
        self.change_fence(file, "", expected).await
    }

    async fn change_fence(
        &self,
        file: &FileName,
        reason: &str,
        expected_reason: &str,
    ) -> Result<FileInfo, ClientError> {
        let (reason, expected_reason) = (reason.to_owned(), expected_reason.to_owned());
        let request = v1::FenceRequest { file: Some(file.clone().into()), reason, expected_reason };
        info(self.wait("Fence", self.files.clone().fence(request)).await?.file)
    }

    /// Removes a file from the service. Descriptors and mappings of other processes stay valid.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn delete(&self, file: &FileName) -> Result<(), ClientError> {
        let request = v1::DeleteRequest { file: Some(file.clone().into()) };
        self.wait("Delete", self.files.clone().delete(request)).await.map(|_| ())
    }

    /// Streams the files that the caller may inspect, then each change.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn watch(&self) -> Result<Watch, ClientError> {
        let stream = self.wait("Watch", self.files.clone().watch(v1::WatchRequest {})).await?;
        Ok(Watch { stream })
    }
}

/// Stream of changes to files.
#[derive(Debug)]
pub struct Watch {
    stream: Streaming<v1::WatchResponse>,
}

impl Watch {
    /// Waits without a timeout for the next event. Returns `None` when the service stops. HTTP/2 pings detect a service that
    /// hangs.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn next(&mut self) -> Result<Option<FileChange>, ClientError> {
        let message = self.stream.message().await;
        let Some(message) = message.map_err(|status| refusal(&status))? else {
            return Ok(None);
        };
        Ok(Some(match message.event.ok_or(ConvertError::Missing("event"))? {
            Event::Present(file) => FileChange::Present(file.try_into()?),
            Event::Synced(_) => FileChange::Synced,
            Event::Created(file) => FileChange::Created(file.try_into()?),
            Event::Changed(file) => FileChange::Changed(file.try_into()?),
            Event::Removed(removed) => FileChange::Removed {
                id: FileId::new(removed.id).ok_or(ConvertError::ZeroId("file id"))?,
                name: OwnedName { name: removed.name, uid: removed.uid },
            },
            Event::Lost(lost) => FileChange::Lost(lost.events),
        }))
    }
}

fn info(file: Option<v1::File>) -> Result<FileInfo, ClientError> {
    Ok(file.ok_or(ConvertError::Missing("file"))?.try_into()?)
}
