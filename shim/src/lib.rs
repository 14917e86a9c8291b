//! `libfdmap_shim.so`, loaded into unmodified programs with `LD_PRELOAD`. It adopts the program's memfds into fdmapd, has writes
//! through their mappings tracked, and corrects pagemap reads with the page states of the files.
//!
//! The library has no runtime and no threads. Functions that libc defines as async-signal-safe stay so: descriptors and mappings
//! that do not belong to fdmap are recognised with tables of atomics, without locks and without allocation.
//!
//! [`hooks`] holds the interposed functions. Decisions are pure: [`policy`], [`pagemap_overlay`], [`scan`], [`glob`] and
//! [`config`]. [`session`] owns the connection to the service; [`adoption`] and [`service_calls`] use it.

mod adoption;
mod config;
mod descriptor;
mod file_extent;
mod file_states;
mod freeze;
mod glob;
mod guard;
pub mod hooks;
mod libc_next;
mod mapping_table;
mod memory;
mod pagemap_fds;
mod pagemap_overlay;
mod pagemap_read;
mod policy;
mod readahead;
mod readahead_cache;
mod remapping;
mod scan;
mod service_calls;
mod session;
mod stderr;
mod vmas;

use config::{Config, Mode};
use nix::libc;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

/// Runs when the library is loaded, before the program's own code.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn init() {
    let _ = std::panic::catch_unwind(initialize);
}

fn initialize() {
    hooks::all().for_each(libc_next::Resolve::resolve);
    stderr::initialize();
    // The environment of a program with more rights than its caller belongs to the caller: it names the sockets of the service.
    // SAFETY: the call takes an integer.
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    let (config, invalid) = if is_secure { (Config::off(), Vec::new()) } else { Config::from_env() };
    if config.mode == Mode::Off {
        return;
    }
    for value in invalid {
        let message = format_args!("invalid {}: expected {}", value.variable, value.expected);
        if config.mode == Mode::Strict {
            stderr::exit(message);
        }
        stderr::print(message);
    }
    memory::initialize();
    let strict = config.mode == Mode::Strict;
    session::initialize(config.clone(), service_calls::restore_session);
    if !config::set_active(config) {
        return;
    }
    // SAFETY: the handler only does what is safe in the child of a multi-threaded process.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    guard::initialize();
    if strict {
        guard::run(|guard| session::with_shim(guard, session::Shim::connect_now));
    }
}

unsafe extern "C" fn after_fork_in_child() {
    session::reset_after_fork();
    guard::initialize();
}
