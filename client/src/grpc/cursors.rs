//! Cursors: generations that the service remembers for consumers.

use fdmap_proto::convert::{ConvertError, FileName};
use fdmap_proto::units::Generation;
use fdmap_proto::{Coverage, Cursor, v1};

use super::Client;
use super::tracking::coverage;
use crate::ClientError;

/// A cursor with a frozen set of changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BegunCursor {
    /// The cursor; `reaches` is what to commit.
    pub cursor: Cursor,
    /// Pages in the set that surely were written.
    pub observed_pages: u64,
    /// Pages that are told as written though nobody saw it.
    pub conservative_pages: u64,
    /// What that rests on.
    pub coverage: Coverage,
}

impl Client {
    /// Makes a cursor on a file that begins at a closed generation, or at [`Generation::NONE`] for all that was ever
    /// written. Its name has 1 to 64 bytes and no control characters.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn create_cursor(
        &self,
        file: &FileName,
        name: &str,
        generation: Generation,
    ) -> Result<Cursor, ClientError> {
        let generation = generation.get();
        let request =
            v1::CreateCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), generation };
        told(self.wait("CreateCursor", self.tracking.clone().create_cursor(request)).await?.cursor)
    }

    /// Our cursors on a file; all of them for administrators.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn cursors(&self, file: &FileName) -> Result<Vec<Cursor>, ClientError> {
        let request = v1::ListCursorsRequest { file: Some(file.clone().into()) };
        let answer = self.wait("ListCursors", self.tracking.clone().list_cursors(request)).await?;
        Ok(answer.cursors.into_iter().map(Cursor::try_from).collect::<Result<_, _>>()?)
    }

    /// Makes the service forget a cursor.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn delete_cursor(&self, file: &FileName, name: &str) -> Result<(), ClientError> {
        let request = v1::DeleteCursorRequest { file: Some(file.clone().into()), name: name.to_owned() };
        self.wait("DeleteCursor", self.tracking.clone().delete_cursor(request)).await.map(|_| ())
    }

    /// Makes a checkpoint and freezes what has changed since the cursor's generation, until it is committed or aborted.
    /// [`Client::changes`] with the cursor's name tells that same set again and again. On a cursor that has begun already it
    /// changes nothing and answers the same.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn begin_cursor(
        &self,
        file: &FileName,
        name: &str,
        force_scan: bool,
    ) -> Result<BegunCursor, ClientError> {
        let request =
            v1::BeginCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), force_scan };
        let answer = self.wait("BeginCursor", self.tracking.clone().begin_cursor(request)).await?;
        let cursor = told(answer.cursor)?;
        if cursor.until_generation.is_none() {
            return Err(ClientError::Unexpected("a begun cursor until_generation a generation"));
        }
        Ok(BegunCursor {
            cursor,
            observed_pages: answer.observed_pages,
            conservative_pages: answer.conservative_pages,
            coverage: coverage(answer.coverage)?,
        })
    }

    /// The frozen set was dealt with: moves the cursor to `generation`, the one that it reached. Can be asked for again if
    /// it is not known whether it was done.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn commit_cursor(
        &self,
        file: &FileName,
        name: &str,
        generation: Generation,
    ) -> Result<Cursor, ClientError> {
        let generation = generation.get();
        let request =
            v1::CommitCursorRequest { file: Some(file.clone().into()), name: name.to_owned(), generation };
        told(self.wait("CommitCursor", self.tracking.clone().commit_cursor(request)).await?.cursor)
    }

    /// Lets go of the frozen set; the cursor stays where it was.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn abort_cursor(&self, file: &FileName, name: &str) -> Result<Cursor, ClientError> {
        let request = v1::AbortCursorRequest { file: Some(file.clone().into()), name: name.to_owned() };
        told(self.wait("AbortCursor", self.tracking.clone().abort_cursor(request)).await?.cursor)
    }
}

fn told(cursor: Option<v1::Cursor>) -> Result<Cursor, ClientError> {
    Ok(cursor.ok_or(ConvertError::Missing("cursor"))?.try_into()?)
}
