//! What happened to files, for those who watch.

use fdmap_proto::units::FileId;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// The file was made or adopted.
    Created,
    /// Its size, seals or access changed.
    Changed,
    /// The service let go of it.
    Deleted,
}

/// Something happened to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEvent {
    /// The file.
    pub id: FileId,
    /// Its name.
    pub name: String,
    /// What.
    pub happened: Happened,
}
