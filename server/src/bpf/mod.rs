//! libbpf glue that the `xarray` probe and the write tracer share: loading, maps, and programs that run on demand. The
//! records that the programs exchange with the service are in [`records`].

mod error;
pub(crate) mod records;
mod refusal;

pub use error::{LoadError, TraceError};
pub(crate) use refusal::Refusal;

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use fdmap_proto::units::{low_u32, to_u64, to_usize};
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::{Link, MapCore as _, MapHandle, Object, PrintLevel};
use nix::errno::Errno;

use records::Status;

/// Loads BPF programs. If that fails, the result explains why, and the log has the verifier's output.
pub(crate) fn load_explained<T, E: std::error::Error>(
    load: impl FnOnce() -> Result<T, E>,
) -> Result<T, Refusal> {
    let (loaded, messages) = with_libbpf_messages(load);
    loaded.map_err(|error| {
        let refusal = Refusal::new(&fdmap_proto::error_chain(&error), &messages);
        tracing::warn!(reason = %refusal, "BPF programs were refused");
        for message in &messages {
            tracing::debug!("libbpf: {message}");
        }
        refusal
    })
}

/// Runs `work` and returns libbpf's messages beside the result. Later messages go to the log.
fn with_libbpf_messages<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn take() -> Vec<String> {
        std::mem::take(&mut *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner))
    }
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, text| {
        MESSAGES.lock().unwrap_or_else(PoisonError::into_inner).push(text.trim_end().to_owned());
    })));
    take();
    let result = work();
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, text| {
        tracing::warn!("libbpf: {}", text.trim_end());
    })));
    (result, take())
}

/// Programs for one more thread. Without them, which is logged, fewer threads scan or search.
pub(crate) fn loaded_or_logged<T>(loaded: Result<T, LoadError>) -> Option<T> {
    let log = |error: &LoadError| {
        tracing::warn!(error = fdmap_proto::error_chain(error), "further BPF programs cannot be loaded");
    };
    loaded.inspect_err(log).ok()
}

/// Maps the first `entries` values of a BPF array of `T`.
pub(crate) fn map_array<T>(
    object: &Object,
    name: &'static str,
    entries: usize,
    writable: bool,
) -> Result<SharedMapping, LoadError> {
    let map = object.maps().find(|map| map.name() == name).ok_or(LoadError::Missing(name))?;
    // The kernel pads the values of an array map to 8 bytes. Every record is a multiple of that.
    if to_usize(u64::from(map.value_size())) != size_of::<T>() || !size_of::<T>().is_multiple_of(8) {
        return Err(LoadError::Missing(name));
    }
    Ok(SharedMapping::shared(map.as_fd(), 0, entries * size_of::<T>(), writable)?)
}

/// A new descriptor of the map `name`.
pub(crate) fn map_fd(object: &Object, name: &'static str) -> Result<OwnedFd, LoadError> {
    let map = object.maps().find(|map| map.name() == name).ok_or(LoadError::Missing(name))?;
    map.as_fd().try_clone_to_owned().map_err(LoadError::Duplicate)
}

/// A handle of the map `name`, which reads and removes entries.
pub(crate) fn map_handle(object: &Object, name: &'static str) -> Result<MapHandle, LoadError> {
    let map = object.maps().find(|map| map.name() == name).ok_or(LoadError::Missing(name))?;
    Ok(MapHandle::try_from(&map)?)
}

/// Attaches the loaded tracepoint programs, whose names begin with `on_`. Dropping the links detaches them: no other process has them
/// (`own_program`).
pub(crate) fn attach(object: &Object) -> Result<Vec<Link>, TraceError> {
    let mut links = Vec::new();
    for program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        if name.starts_with("on_") && program.autoload() {
            links.push(program.attach().map_err(|error| TraceError::Attach { program: name, error })?);
        }
    }
    Ok(links)
}

/// Attaches the program `name`.
pub(crate) fn attach_one(object: &Object, name: &'static str) -> Result<Link, TraceError> {
    let program = object.progs_mut().find(|program| program.name() == name);
    let program = program.ok_or(LoadError::Missing(name))?;
    program.attach().map_err(|error| TraceError::Attach { program: name.to_owned(), error })
}

/// A new descriptor of the program `name`. The program stays loaded when the object is dropped.
pub(crate) fn program_fd(object: &Object, name: &'static str) -> Result<OwnedFd, LoadError> {
    let program = object.progs().find(|program| program.name() == name).ok_or(LoadError::Missing(name))?;
    program.as_fd().try_clone_to_owned().map_err(LoadError::Duplicate)
}

/// Runs a raw tracepoint program with these arguments, and returns its return value.
pub(crate) fn run(program: BorrowedFd<'_>, arguments: &mut [u64]) -> Result<i32, Errno> {
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: to_u64(size_of::<libbpf_sys::bpf_test_run_opts>()),
        ctx_in: arguments.as_ptr().cast(),
        ctx_size_in: low_u32(to_u64(size_of_val(arguments))),
        ..Default::default()
    };
    // SAFETY: sz is the size of options, and the context that it points to stays borrowed until the call returns.
    let failed = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if failed == 0 { Ok(options.retval.cast_signed()) } else { Err(Errno::from_raw(failed.saturating_neg())) }
}

/// The meaning of a status, for error messages.
pub(crate) const fn status_text(status: Status) -> &'static str {
    match status {
        Status::FDMAP_STATUS_BAD_FD => "no such descriptor",
        Status::FDMAP_STATUS_FAULT => "a kernel structure could not be read",
        Status::FDMAP_STATUS_LAYOUT => "this kernel's structures have an unexpected layout",
        Status::FDMAP_STATUS_SMALL_NODES => {
            "this kernel's XArray nodes have 16 slots instead of 64; use a kernel without CONFIG_BASE_SMALL"
        }
        Status::FDMAP_STATUS_NO_VMA_LOCKS => {
            "this kernel has no per-VMA locks: use Linux 6.4 or later with CONFIG_PER_VMA_LOCK"
        }
        Status::FDMAP_STATUS_TWICE => "the file is already followed, or is not followed",
        Status::FDMAP_STATUS_FULL => "the maximum number of files is followed",
        _ => "unknown status",
    }
}
