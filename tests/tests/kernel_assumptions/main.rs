//! Tests of the kernel behaviour that write tracking depends on, without the service.

mod address_space_end;
mod descriptor_events;
mod file_mappers;
mod guard_regions;
mod inode_times;
mod mapping_calls;
mod observed_writes;
mod page_sizes;
mod swap;
mod uffd_events;
mod unobserved_writes;
mod zapped_pages;

use std::os::fd::AsFd;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// The ctime of an inode: seconds and nanoseconds. Before Linux 6.13 its resolution is one timer tick. Since then two
/// changes have different times if the ctime was read between them.
fn change_time(file: impl AsFd) -> (i64, i64) {
    let stat = fdmap_sys::fd::stat(file).unwrap();
    (stat.st_ctime, stat.st_ctime_nsec)
}

/// The errno of a call that must fail.
fn errno<T: std::fmt::Debug>(result: Result<T, fdmap_sys::SyscallError>) -> fdmap_sys::Errno {
    result.unwrap_err().errno
}
