//! Cursors: named generations that the service stores for consumers.

use fdmap_proto::convert::ConvertError;
use fdmap_proto::{BegunCursor, Cursor, FileName, Generation, v1};

use super::Client;
use crate::ClientError;

impl Client {
    /// Creates a cursor that starts after a closed generation, or at [`Generation::NONE`] for all writes since the file was
    /// created. The name has 1 to 64 bytes, no control and format characters, and no line separators.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the name is taken; [`ClientError`] of the connection.
    pub async fn create_cursor(
        &self,
        file: &FileName,
        name: &str,
        generation: Generation,
    ) -> Result<Cursor, ClientError> {
        let generation = generation.get();
        let request =
            v1::CreateCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), generation };
        required(self.wait("CreateCursor", self.tracking.clone().create_cursor(request)).await?.cursor)
    }

    /// Lists the caller's cursors of a file; all cursors for administrators.
    ///
    /// # Errors
    /// [`ClientError::Refused`] without the right to take checkpoints; [`ClientError`] of the connection.
    pub async fn cursors(&self, file: &FileName) -> Result<Vec<Cursor>, ClientError> {
        let request = v1::ListCursorsRequest { file: Some(file.clone().into()) };
        let response = self.wait("ListCursors", self.tracking.clone().list_cursors(request)).await?;
        Ok(response.cursors.into_iter().map(Cursor::try_from).collect::<Result<_, _>>()?)
    }

    /// Deletes a cursor.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if it does not exist; [`ClientError`] of the connection.
    pub async fn delete_cursor(&self, file: &FileName, name: &str) -> Result<(), ClientError> {
        let request = v1::DeleteCursorRequest { file: Some(file.clone().into()), name: name.to_owned() };
        self.wait("DeleteCursor", self.tracking.clone().delete_cursor(request)).await.map(|_| ())
    }

    /// Takes a checkpoint and freezes the set of changes since the cursor's generation until commit or abort.
    /// [`Client::changes`] with this cursor returns the frozen set. If the cursor has already begun, returns the same result
    /// and takes no checkpoint.
    ///
    /// # Errors
    /// As [`Client::checkpoint`].
    pub async fn begin_cursor(
        &self,
        file: &FileName,
        name: &str,
        force_scan: bool,
    ) -> Result<BegunCursor, ClientError> {
        let request =
            v1::BeginCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), force_scan };
        let response = self.wait("BeginCursor", self.tracking.clone().begin_cursor(request)).await?;
        Ok(response.try_into()?)
    }

    /// Moves a cursor to `generation`, the `until_generation` of its frozen set, and drops the set. Safe to retry.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the cursor has not begun; [`ClientError`] of the connection.
    pub async fn commit_cursor(
        &self,
        file: &FileName,
        name: &str,
        generation: Generation,
    ) -> Result<Cursor, ClientError> {
        let generation = generation.get();
        let request =
            v1::CommitCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), generation };
        required(self.wait("CommitCursor", self.tracking.clone().commit_cursor(request)).await?.cursor)
    }

    /// Drops the frozen set; the cursor keeps its generation.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the cursor does not exist; [`ClientError`] of the connection.
    pub async fn abort_cursor(&self, file: &FileName, name: &str) -> Result<Cursor, ClientError> {
        let request = v1::AbortCursorRequest { file: Some(file.clone().into()), name: name.to_owned() };
        required(self.wait("AbortCursor", self.tracking.clone().abort_cursor(request)).await?.cursor)
    }
}

fn required(cursor: Option<v1::Cursor>) -> Result<Cursor, ClientError> {
    Ok(cursor.ok_or(ConvertError::Missing("cursor"))?.try_into()?)
}
