//! Events for the watchers of the registry.

use fdmap_proto::units::FileId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileEventKind {
    /// The file was created or adopted.
    Created,
    /// Its size, seals or access changed.
    Changed,
    /// The registry no longer has it.
    Deleted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEvent {
    pub id: FileId,
    pub name: String,
    pub kind: FileEventKind,
}
