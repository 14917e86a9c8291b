//! The object `fdmap.json`: what CRIU's format cannot hold.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::chunks::Compression;

/// Content of `fdmap.json`. An image that CRIU wrote has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideFile {
    /// Version of this format.
    pub version: u32,
    /// When the content was read.
    pub consistency: Consistency,
    /// Seconds since 1970, when the dump began.
    pub created: u64,
    /// Compression of the pages files.
    pub compression: Compression,
    /// Digest of the parent's side file, if the image has a parent.
    pub parent: Option<String>,
    /// In the order of `memfd.img`.
    pub files: Vec<DumpedFile>,
    /// BLAKE3 hashes of the other objects but pages files, by name. Those of pages files are in the chunk objects.
    pub objects: BTreeMap<String, String>,
}

/// When the content of an image was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Consistency {
    /// While the writers were paused: all pages are those of one moment.
    PointInTime,
    /// While writers may have run: each page is read by itself, and a page that was written meanwhile is in the next incremental image.
    PerPage,
}

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DumpedFile {
    /// Number of the file in CRIU's names.
    pub shmid: u32,
    /// Id in the service, 16 hexadecimal digits.
    pub file_id: String,
    /// The image has all writes up to this generation.
    pub generation: u64,
    /// All writers were observed since the parent's generation, or since the file was created.
    pub exact: bool,
    /// Backing, such as `shmem-thp`.
    pub backing: String,
    /// Rights of owner, group and others, as `Access` of the API lists them.
    pub rights: [Vec<String>; 3],
    /// Page that was found in a state that the probe cannot determine, and was read.
    pub unknown_pages: u64,
    /// First page and number of pages of ranges that have all pages which were in memory, in ascending order, if others were in swap: a lazy
    /// restore copies them first. At most [`Self::MAX_RESIDENT_RANGES`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resident: Vec<[u64; 2]>,
}

impl DumpedFile {
    /// Most elements of [`Self::resident`].
    pub const MAX_RESIDENT_RANGES: usize = 4096;
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    content: SideFile,
    /// BLAKE3 hash of `content` as JSON without spaces.
    digest: String,
}

impl SideFile {
    /// Version of the format that this module writes.
    pub const VERSION: u32 = 1;

    /// Returns the object and its digest.
    pub(super) fn encode(&self) -> serde_json::Result<(Vec<u8>, String)> {
        let digest = self.digest()?;
        let sealed = Sealed { content: self.clone(), digest: digest.clone() };
        Ok((serde_json::to_vec_pretty(&sealed)?, digest))
    }

    /// Decodes the object. Returns it with its digest, or the reason why it is invalid.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, String), String> {
        let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let version = value.pointer("/content/version").and_then(serde_json::Value::as_u64);
        match version {
            Some(version) if version > u64::from(Self::VERSION) => {
                return Err(format!(
                    "version {version} is newer than {}, the last one that is known",
                    Self::VERSION
                ));
            }
            Some(version) if version == u64::from(Self::VERSION) => {}
            _ => return Err("no version".to_owned()),
        }
        let sealed: Sealed = serde_json::from_value(value).map_err(|error| error.to_string())?;
        let digest = sealed.content.digest().map_err(|error| error.to_string())?;
        if digest != sealed.digest {
            return Err("content differs from its digest".to_owned());
        }
        Ok((sealed.content, digest))
    }

    fn digest(&self) -> serde_json::Result<String> {
        Ok(blake3::hash(&serde_json::to_vec(self)?).to_hex().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> SideFile {
        SideFile {
            version: SideFile::VERSION,
            consistency: Consistency::PointInTime,
            created: 1,
            compression: Compression::Zstd,
            parent: Some("ab".to_owned()),
            files: vec![DumpedFile {
                shmid: 7,
                file_id: "0123456789abcdef".to_owned(),
                generation: 3,
                exact: true,
                backing: "shmem".to_owned(),
                rights: [vec!["inspect".to_owned()], Vec::new(), Vec::new()],
                unknown_pages: 0,
                resident: vec![[5, 7]],
            }],
            objects: BTreeMap::from([("memfd.img".to_owned(), "cd".to_owned())]),
        }
    }

    #[test]
    fn side_file_is_decoded_as_encoded() {
        let (bytes, digest) = example().encode().unwrap();
        assert_eq!(SideFile::decode(&bytes).unwrap(), (example(), digest));
    }

    /// As images of versions without [`DumpedFile::resident`].
    #[test]
    fn side_file_without_resident_pages_has_no_such_field() {
        let mut side = example();
        side.files[0].resident.clear();
        let (bytes, digest) = side.encode().unwrap();
        assert!(!String::from_utf8(bytes.clone()).unwrap().contains("resident"));
        assert_eq!(SideFile::decode(&bytes).unwrap(), (side, digest));
    }

    #[test]
    fn changed_side_files_are_refused() {
        let (bytes, _) = example().encode().unwrap();
        let text = String::from_utf8(bytes).unwrap();
        for (from, to, reason) in [
            ("\"generation\": 3", "\"generation\": 4", "content differs from its digest"),
            ("\"version\": 1", "\"version\": 2", "version 2 is newer than 1, the last one that is known"),
            ("\"version\": 1,", "", "no version"),
        ] {
            assert!(text.contains(from));
            assert_eq!(SideFile::decode(text.replace(from, to).as_bytes()).unwrap_err(), reason);
        }
        assert!(SideFile::decode(&text.as_bytes()[..text.len() / 2]).is_err());
        let unknown = text.replace("\"created\": 1", "\"created\": 1, \"new\": 2");
        assert!(SideFile::decode(unknown.as_bytes()).unwrap_err().contains("unknown field"));
    }
}
