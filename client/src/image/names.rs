//! Names of the objects of an image.

/// Exists if the dump was completed.
pub const INVENTORY: &str = "inventory.img";
/// The memfds of the image.
pub const MEMFD: &str = "memfd.img";
/// What CRIU's format cannot hold; see [`super::SideFile`].
pub const SIDE_FILE: &str = "fdmap.json";

/// Link to the parent image (`CR_PARENT_LINK` of CRIU). In an object store, an object with its text.
pub const PARENT: &str = "parent";

/// Exists in an object store while a dump writes there.
#[cfg(feature = "object-store")]
pub const RESERVATION: &str = "fdmap.partial";

/// The pages of one memfd.
#[must_use]
pub fn pagemap(shmid: u32) -> String {
    format!("pagemap-shmem-{shmid}.img")
}

/// Content of pages. `ending` is that of the compression, such as `.zst`.
#[must_use]
pub fn pages(pages_id: u32, ending: &str) -> String {
    format!("pages-{pages_id}.img{ending}")
}

/// Lengths and digests of the chunks of a pages file.
#[must_use]
pub fn chunks(pages_id: u32) -> String {
    format!("fdmap-chunks-{pages_id}.bin")
}
