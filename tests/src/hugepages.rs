//! Huge page settings of the host, restored on drop. Each function takes the [`HostLock`], which its guard must not
//! outlive: otherwise a second test that adds and removes pages would take those of the first.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::host::{HostLock, read, root, write};
use crate::{HarnessError, HarnessResult};

/// Time in which contiguous memory is free.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Changes a setting until the guard is dropped.
fn change(path: impl Into<PathBuf>, value: &str) -> HarnessResult<CleanupGuard> {
    root()?;
    let path = path.into();
    let before = read(&path).map_err(|_| HarnessError::Missing(path.display().to_string()))?;
    // The kernel lists all choices, with the current one in brackets: "always [never]".
    let before = before.split(['[', ']']).nth(1).unwrap_or(&before).trim().to_owned();
    let guard = CleanupGuard::new(Cleanup::Restore { path: path.clone(), value: before })?;
    write(&path, value).map_err(|_| HarnessError::Missing(format!("{value} as {}", path.display())))?;
    Ok(guard)
}

/// Adds `pages` hugetlb pages of 2 MiB. The kernel adds fewer where it finds no contiguous memory at once: so this tries again.
///
/// # Errors
/// [`HarnessError::Missing`] if the host has too little free memory for 10 s.
pub fn hugetlb_2m(_host: &HostLock, pages: u64) -> HarnessResult<CleanupGuard> {
    const FOLDER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let number = |name: &str| -> HarnessResult<u64> {
        let text = read(format!("{FOLDER}/{name}"))
            .map_err(|_| HarnessError::Missing("hugetlb pages of 2 MiB".to_owned()))?;
        text.trim().parse().map_err(|_| HarnessError::Missing(format!("a number in {text:?}")))
    };
    let began = Instant::now();
    loop {
        let all = number("nr_hugepages")?;
        let setting = change(format!("{FOLDER}/nr_hugepages"), &(all + pages).to_string())?;
        if number("free_hugepages")? >= pages {
            return Ok(setting);
        }
        drop(setting);
        if began.elapsed() >= MEMORY_TIMEOUT {
            return Err(HarnessError::Missing(format!("memory for {pages} hugetlb pages of 2 MiB")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Transparent huge pages of 2 MiB for shmem with MADV_HUGEPAGE.
///
/// # Errors
/// [`HarnessError::Missing`]
pub fn shmem_thp(_host: &HostLock) -> HarnessResult<CleanupGuard> {
    change("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise")
}

/// Folios of 64 KiB for shmem with MADV_HUGEPAGE.
///
/// # Errors
/// [`HarnessError::Missing`]
pub fn shmem_64k(_host: &HostLock) -> HarnessResult<CleanupGuard> {
    change("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled", "advise")
}
