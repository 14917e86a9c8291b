//! `libfdmap_shim.so`: loaded into an unmodified program by `LD_PRELOAD`, it gives the program's memfds to fdmapd, has the
//! writes through their mappings observed, and answers reads of pagemaps by what the files say.
//!
//! It has no runtime and no thread. What libc promises to be callable from a signal handler stays so: descriptors and
//! mappings that are not ours are told by tables of atomics, without a lock, and without allocating.
//!
//! [`hooks`] are the functions that stand before libc's, thin; [`decide`], [`entries`], [`scan`], [`glob`] and [`config`]
//! are what they decide, pure; [`session`] and [`register`] talk with the service.

mod config;
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
mod scan;
mod service_calls;
mod session;
mod stderr;

use std::sync::OnceLock;

use config::{Config, Mode};
use nix::libc;

static CONFIG: OnceLock<Config> = OnceLock::new();

/// What the environment asked for; `None` if the shim does not work here.
fn config() -> Option<&'static Config> {
    CONFIG.get()
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

/// When the library is loaded, before the program's own code.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn loaded() {
    let _ = std::panic::catch_unwind(begin);
}

fn begin() {
    hooks::all().for_each(libc_next::Resolve::resolve);
    stderr::begin();
    let (config, bad) = Config::from_env();
    if config.mode == Mode::Off {
        return;
    }
    for bad in bad {
        let said = format_args!("{} should be {}", bad.variable, bad.expected);
        if config.mode == Mode::Strict {
            stderr::end(said);
        }
        stderr::line(said);
    }
    memory::begin();
    let strict = config.mode == Mode::Strict;
    session::begin(config.clone());
    if CONFIG.set(config).is_err() {
        return;
    }
    // SAFETY: the handler is safe in a child that was forked from a process with threads.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    guard::begin();
    if strict {
        guard::work(|inside| session::with(inside, session::Shim::reach));
    }
}

/// In the child after `fork`.
unsafe extern "C" fn forked() {
    session::abandon();
    guard::begin();
}
