//! Stores to mappings: by threads, by children, and to short-lived mappings.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use fdmap_sys::clock::monotonic_ns;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_tests::no_lost_writes::log::{Lane, after};
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::pattern::mix;
use nix::libc;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use crate::Writer;
use crate::call::{Done, Place, advise, error_text};
use crate::draw::Draw;

/// Number of writes of a batch.
const BATCH: usize = 256;

/// Stores 8 bytes to a page, and logs the write. Allocates no memory and takes no lock.
pub fn store(place: Place, page: u64, value: u64, method: Method, lane: &mut Lane<'_>) {
    let mapping = place.mapping();
    // An aligned position in the page.
    let target =
        mapping.atomic(page as usize * 4096 + (value % 512) as usize * 8).expect("a page of the mapping");
    let begin = monotonic_ns();
    target.store(value, Ordering::SeqCst);
    lane.append(method, page, 1, begin, after());
}

/// Stores to a mapping.
pub struct Stores {
    pub place: Place,
}

impl Writer for Stores {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        for _ in 0..BATCH {
            store(self.place, draw.page(), draw.word(), Method::Store, lane);
        }
        Ok(())
    }
}

/// Stores with long pauses. All threads of all processes store at the same moment to the same page: one of them takes
/// the fault, and the others store as soon as it has made the page writable.
pub struct Seldom {
    pub place: Place,
    pub first: u64,
    pub end: u64,
}

impl Writer for Seldom {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        const SLICE: u64 = 2_000_000;
        let slice = monotonic_ns() / SLICE + 1;
        // All threads are also idle at the same time.
        if !mix(slice / 8).is_multiple_of(4) {
            let page = self.first + mix(slice) % (self.end - self.first);
            std::thread::sleep(Duration::from_nanos(
                (slice * SLICE).saturating_sub(monotonic_ns() + 100_000),
            ));
            while monotonic_ns() < slice * SLICE {
                std::hint::spin_loop();
            }
            for _ in 0..16 {
                store(self.place, page, draw.word(), Method::Seldom, lane);
            }
        } else {
            std::thread::sleep(Duration::from_nanos(SLICE / 2));
        }
        Ok(())
    }
}

/// Swaps pages out to which others store.
pub struct PageOuts {
    pub place: Place,
}

impl Writer for PageOuts {
    fn batch(&mut self, draw: &mut Draw, _: &mut Lane<'_>) -> Done {
        let (page, pages) = draw.run(1024);
        advise(self.place, page, pages, libc::MADV_PAGEOUT)?;
        std::thread::sleep(Duration::from_micros(draw.below(2000)));
        Ok(())
    }
}

/// Stores by children, which are forked in sequence and write for a while. Some of them fork children too.
pub struct Forks {
    pub place: Place,
}

impl Writer for Forks {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let generations = 1 + draw.below(3);
        self.family(generations, draw, lane)
    }
}

impl Forks {
    fn family(&self, generations: u64, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        // The child must draw other pages than the parent draws next.
        let mut own = Draw::clone(draw);
        let parent = nix::unistd::getpid();
        // SAFETY: the child allocates no memory and takes no lock: it writes, logs, forks, waits and exits by _exit.
        match unsafe { fork() }.map_err(error_text)? {
            ForkResult::Parent { child } => {
                draw.word();
                match waitpid(child, None).map_err(error_text)? {
                    WaitStatus::Exited(_, 0) => Ok(()),
                    other => Err(format!("a child ended as {other:?}")),
                }
            }
            ForkResult::Child => {
                let mut failed = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_err();
                failed |= nix::unistd::getppid() != parent;
                for _ in 0..own.below(4) {
                    for _ in 0..64 {
                        if !lane.has_room(1) {
                            break;
                        }
                        store(self.place, own.page(), own.word(), Method::Fork, lane);
                    }
                }
                if generations > 1 {
                    failed |= self.family(generations - 1, &mut own, lane).is_err();
                }
                // SAFETY: _exit does not return, and runs no exit handlers of the parent.
                unsafe { libc::_exit(i32::from(failed)) }
            }
        }
    }
}

/// Stores to short-lived untracked mappings.
pub struct Passing {
    pub fd: OwnedFd,
}

impl Writer for Passing {
    fn batch(&mut self, draw: &mut Draw, lane: &mut Lane<'_>) -> Done {
        let (page, pages) = draw.run(16);
        let bytes = pages as usize * 4096;
        let mapping = RawMapping::shared(self.fd.as_fd(), page * 4096, bytes).map_err(error_text)?;
        for at in 0..pages {
            // The page number in the file differs from that in the mapping.
            let target = mapping.atomic(at as usize * 4096).map_err(error_text)?;
            lane.during(Method::Passing, page + at, 1, || {
                target.store(draw.word(), Ordering::SeqCst);
                Ok::<_, String>(())
            })?;
        }
        std::thread::sleep(Duration::from_micros(draw.below(300)));
        Ok(())
    }
}
