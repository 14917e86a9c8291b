//! Tests of the kernel behaviour that write tracking depends on, without the service.

mod address_space_end;
mod descriptor_events;
mod inode_times;
mod native_aio;
mod observed_writes;
mod page_sizes;
mod swap;
mod uffd_events;
mod unobserved_writes;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// The errno of a call that must fail.
fn errno<T: std::fmt::Debug>(result: Result<T, fdmap_sys::SyscallError>) -> fdmap_sys::Errno {
    result.unwrap_err().errno
}
