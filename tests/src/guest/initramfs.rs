//! The initial RAM file system: a cpio archive of the "newc" format. Pure.

#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: usize,
}

/// Modes as in `stat(2)`.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    /// Adds a directory, whose parent must have been added before.
    pub fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, PROGRAM, content);
    }

    /// Returns the archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    /// Documentation/driver-api/early-userspace/buffer-format.rst: thirteen numbers in hex, the name, the content.
    /// The name and the content are padded to four bytes.
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let (inode, size, name_size) = (self.inode, content.len(), name.len() + 1);
        let head = format!(
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}",
            0, 1
        );
        self.bytes.extend(head.bytes().chain(name.bytes()).chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_their_names_and_sizes_and_are_aligned() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.file("init", b"12345");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes).unwrap();
        let heads: Vec<_> = text.match_indices("070701").map(|(at, _)| at).collect();
        assert_eq!(heads.len(), 3);
        assert!(heads.iter().all(|at| at % 4 == 0));
        let file = &text[heads[1]..];
        assert_eq!((&file[54..62], &file[94..102]), ("00000005", "00000005"));
        assert_eq!((&file[110..115], &file[116..121]), ("init\0", "12345"));
        assert!(text[heads[2]..].contains("TRAILER!!!\0"));
    }
}
