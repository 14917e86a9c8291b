//! An actor: does to files, on command, what clients of the service do. See `fdmap_tests::actor`.

use fdmap_proto::error_chain;
use std::io::{BufRead as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::proto::{ClientMapping, PageIndex};
use fdmap_client::{Endpoint, FdpassClient, MappedFile, Timeouts};
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::service::named;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::ftruncate;

const PAGE: u64 = 4096;

type Done = Result<String, String>;

/// What is mapped.
#[derive(Default)]
struct Stage {
    file: Option<(OwnedFd, SharedMapping)>,
    /// Progress of a march, for others to see: pages begun, pages done.
    progress: Option<MappedFile>,
    /// A file whose writes are tracked.
    tracked: Option<MappedFile>,
}

fn main() {
    let mut stage = Stage::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let words: Vec<&str> = line.split(' ').collect();
        match perform(&mut stage, &words) {
            Ok(said) => println!("ok {said}"),
            Err(said) => println!("failed {said}"),
        }
        if std::io::stdout().flush().is_err() {
            return;
        }
    }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|error| format!("{word}: {error}"))
}

fn words_of(error: impl std::error::Error) -> String {
    error_chain(&error)
}

fn perform(stage: &mut Stage, words: &[&str]) -> Done {
    match words {
        ["map", folder, name] => stage.map(folder, name),
        ["progress", folder, name] => {
            stage.progress = Some(fdpass(folder)?.map(&named(name), true).map_err(words_of)?);
            Ok(String::new())
        }
        ["track", folder, name] => {
            let mut mapped = fdpass(folder)?.map(&named(name), true).map_err(words_of)?;
            mapped.track().map_err(words_of)?;
            stage.tracked = Some(mapped);
            Ok(String::new())
        }
        // Whether or not there is a right to it, and without anything that could be tracked.
        ["claim", folder, name] => {
            let uffd = Userfaultfd::create().map_err(words_of)?;
            let nothing = ClientMapping { address: PAGE, length: PAGE, first_page: PageIndex(0) };
            let claimed = fdpass(folder)?.track(&named(name), uffd.as_fd(), None, None, &[nothing]);
            claimed.map(|_| String::new()).map_err(words_of)
        }
        // For another process, with a file of its own.
        ["track-for", folder, pid] => {
            let mut session = fdpass(folder)?;
            session.memfd_create("mine", "mine", 0).map_err(words_of)?;
            let uffd = Userfaultfd::create().map_err(words_of)?;
            let nothing = ClientMapping { address: PAGE, length: PAGE, first_page: PageIndex(0) };
            let pid = pid.parse().map_err(words_of)?;
            let asked = session.track_process(pid, &named("mine"), uffd.as_fd(), None, None, &[nothing]);
            asked.map(|_| String::new()).map_err(words_of)
        }
        ["poke", first, end] => stage.poke(number(first)?, number(end)?),
        ["undumpable"] => nix::sys::prctl::set_dumpable(false).map(|()| String::new()).map_err(words_of),
        ["fill", seed, percent, first, end] => {
            let pattern = Pattern { seed: number(seed)?, percent: number(percent)? };
            stage.fill(pattern, number(first)?, number(end)?)
        }
        ["verify", seed, percent, first, end] => {
            let pattern = Pattern { seed: number(seed)?, percent: number(percent)? };
            stage.verify(pattern, number(first)?, number(end)?)
        }
        ["read", first, end] => stage.read(number(first)?, number(end)?),
        ["punch", first, end] => {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            stage.allocate(flags, number(first)?, number(end)?)
        }
        ["allocate", first, end] => stage.allocate(FallocateFlags::empty(), number(first)?, number(end)?),
        ["truncate", bytes] => {
            ftruncate(&stage.file()?.0, number(bytes)?.cast_signed()).map_err(words_of)?;
            Ok(String::new())
        }
        ["advise", "hugepage"] => stage.advise(Advice::HugePage),
        ["advise", "pageout"] => stage.advise(Advice::PageOut),
        ["march", first, end] => stage.march(number(first)?, number(end)?),
        ["churn", seed, pages, millis] => stage.churn(number(seed)?, number(pages)?, number(millis)?),
        ["flap", seed, pages, times] => stage.flap(number(seed)?, number(pages)?, number(times)?),
        ["faults"] => {
            let usage = getrusage(UsageWho::RUSAGE_SELF).map_err(words_of)?;
            Ok(format!("{} {}", usage.minor_page_faults(), usage.major_page_faults()))
        }
        other => Err(format!("{other:?} is nothing to do")),
    }
}

fn fdpass(folder: &str) -> Result<FdpassClient, String> {
    FdpassClient::connect(&Endpoint::in_folder(Path::new(folder)), Timeouts::default()).map_err(words_of)
}

impl Stage {
    fn map(&mut self, folder: &str, name: &str) -> Done {
        // Unmapped first: the new mapping may be of the same file at another size.
        self.file = None;
        let (fd, info) = fdpass(folder)?.open(&named(name), true).map_err(words_of)?;
        let bytes = usize::try_from(info.size_bytes).map_err(|error| error.to_string())?;
        // So that huge pages fit, should they be asked for.
        let mapping = SharedMapping::shared_aligned(&fd, bytes, 2 << 20, true).map_err(words_of)?;
        self.file = Some((fd, mapping));
        Ok(String::new())
    }

    fn file(&self) -> Result<&(OwnedFd, SharedMapping), String> {
        self.file.as_ref().ok_or_else(|| "nothing is mapped".to_owned())
    }

    fn write(&self, pattern: Pattern, page: u64) -> Result<(), String> {
        let (_, mapping) = self.file()?;
        let at = usize::try_from(page * PAGE).map_err(|error| error.to_string())?;
        // The last page of an odd size may have less room.
        let room = mapping.len().saturating_sub(at).min(16);
        if mapping.write_at(at, &pattern.content(page)[..room]) {
            Ok(())
        } else {
            Err(format!("no page {page}"))
        }
    }

    fn fill(&self, pattern: Pattern, first: u64, end: u64) -> Done {
        for page in (first..end).filter(|page| pattern.has(*page)) {
            self.write(pattern, page)?;
        }
        Ok(String::new())
    }

    /// Writes pages through the mapping that is tracked.
    fn poke(&self, first: u64, end: u64) -> Done {
        let tracked = self.tracked.as_ref().ok_or("nothing is tracked")?;
        let written = (first..end).all(|page| tracked.write_at(page * PAGE, &(page + 1).to_ne_bytes()));
        if written { Ok(String::new()) } else { Err("there is no such page".to_owned()) }
    }

    fn verify(&self, pattern: Pattern, first: u64, end: u64) -> Done {
        let (_, mapping) = self.file()?;
        let mut wrong = 0_u64;
        for page in (first..end).filter(|page| pattern.has(*page)) {
            let mut bytes = [0; 16];
            let at = usize::try_from(page * PAGE).map_err(|error| error.to_string())?;
            if !mapping.read_at(at, &mut bytes) || bytes != pattern.content(page) {
                wrong += 1;
            }
        }
        Ok(wrong.to_string())
    }

    fn read(&self, first: u64, end: u64) -> Done {
        let (_, mapping) = self.file()?;
        let mut sum = 0_u64;
        for page in first..end {
            let mut byte = [0];
            let at = usize::try_from(page * PAGE).map_err(|error| error.to_string())?;
            if !mapping.read_at(at, &mut byte) {
                return Err(format!("no page {page}"));
            }
            sum += u64::from(byte[0]);
        }
        Ok(sum.to_string())
    }

    fn allocate(&self, flags: FallocateFlags, first: u64, end: u64) -> Done {
        let (fd, _) = self.file()?;
        let (offset, bytes) = ((first * PAGE).cast_signed(), ((end - first) * PAGE).cast_signed());
        fallocate(fd.as_fd(), flags, offset, bytes).map_err(words_of)?;
        Ok(String::new())
    }

    fn advise(&self, advice: Advice) -> Done {
        self.file()?.1.advise(advice).map_err(words_of)?;
        Ok(String::new())
    }

    /// Writes page after page, and tells each before and after.
    fn march(&self, first: u64, end: u64) -> Done {
        let progress = self.progress.as_ref().ok_or("no progress is mapped")?;
        let pattern = Pattern { seed: 1, percent: 100 };
        for page in first..end {
            tell(progress, 0, page + 1)?;
            self.write(pattern, page)?;
            tell(progress, 8, page + 1)?;
        }
        Ok(String::new())
    }

    /// Reads and writes pages of the first `pages`, drawn at random, that have data already.
    fn churn(&self, seed: u64, pages: u64, millis: u64) -> Done {
        let pattern = Pattern { seed: 1, percent: 100 };
        let until = Instant::now() + Duration::from_millis(millis);
        let mut word = seed;
        let mut touched = 0_u64;
        while Instant::now() < until {
            for _ in 0..64 {
                word = mix(word);
                let page = word % pages;
                if word >> 40 & 1 == 1 {
                    self.write(pattern, page)?
                } else {
                    self.read(page, page + 1).map(drop)?
                }
                touched += 1;
            }
        }
        Ok(touched.to_string())
    }

    /// Cuts the file to one page and lets it grow again, writing to some of what it gains.
    fn flap(&self, seed: u64, pages: u64, times: u64) -> Done {
        let (fd, _) = self.file()?;
        let pattern = Pattern { seed: 1, percent: 100 };
        let mut word = seed;
        for _ in 0..times {
            ftruncate(fd, PAGE.cast_signed()).map_err(words_of)?;
            ftruncate(fd, (pages * PAGE).cast_signed()).map_err(words_of)?;
            for _ in 0..8 {
                word = mix(word);
                self.write(pattern, 1 + word % (pages - 1))?;
            }
        }
        Ok(String::new())
    }
}

/// Stores a counter where others see it, after all that was done before.
fn tell(progress: &MappedFile, offset: usize, value: u64) -> Result<(), String> {
    static ORDER: AtomicU64 = AtomicU64::new(0);
    // A locked instruction: the writes before it are seen by others before those after it.
    ORDER.fetch_add(1, Ordering::SeqCst);
    if !progress.write_at(u64::try_from(offset).unwrap_or(0), &value.to_le_bytes()) {
        return Err("the progress cannot be written".to_owned());
    }
    ORDER.fetch_add(1, Ordering::SeqCst);
    Ok(())
}
