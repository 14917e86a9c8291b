//! `/proc/PID/pagemap`: what a process's page tables say.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::error::{Call, SyscallError};

/// The pagemap of one address space. It stays with the address space that the process had when it was opened.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    path: String,
}

impl Pagemap {
    /// Of process `pid`, or of the caller itself.
    ///
    /// # Errors
    /// `open`: `EACCES` if the caller may not look into that process.
    pub fn open(pid: Option<u32>) -> Result<Self, SyscallError> {
        let path = pid.map_or_else(|| "/proc/self/pagemap".to_owned(), |pid| format!("/proc/{pid}/pagemap"));
        let file = File::open(&path).call(|| format!("open of {path}"))?;
        Ok(Self { file, path })
    }

    /// Fills `out` with the entries of the pages from virtual address `page * page size` on. Gives how many there
    /// were: fewer than asked at the end of the address space.
    ///
    /// # Errors
    /// `pread`.
    pub fn read(&self, page: u64, out: &mut [u64]) -> Result<usize, SyscallError> {
        let wanted = out.len();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let mut done = 0;
        while done < bytes.len() {
            let offset = page * 8 + u64::try_from(done).unwrap_or(u64::MAX);
            let got = self
                .file
                .read_at(&mut bytes[done..], offset)
                .call(|| format!("pread of {wanted} entries from page {page:#x} of {}", self.path))?;
            if got == 0 {
                break;
            }
            done += got;
        }
        Ok(done / 8)
    }
}
