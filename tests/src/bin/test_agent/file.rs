//! The file that the agent has open and mapped.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::MappedFile;
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::service::named;
use fdmap_tests::test_agent::command::{FileCommand, FileOf, Reply, Span};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::ftruncate;

use crate::call::{Done, error_text};
use crate::requests::fdpass;

const PAGE: u64 = 4096;

/// Written by [`FileCommand::March`], `Churn` and `Flap`.
const EVERY_PAGE: Pattern = Pattern { seed: 1, percent: 100 };

#[derive(Default)]
pub struct OpenFile {
    file: Option<(OwnedFd, SharedMapping)>,
    /// The progress of a march, for other processes: pages begun, pages done.
    progress: Option<MappedFile>,
}

impl OpenFile {
    pub fn perform(&mut self, command: FileCommand) -> Done<Reply> {
        match command {
            FileCommand::Open(file) => self.open(&file)?,
            FileCommand::MapProgress(FileOf { runtime_dir, name }) => {
                self.progress = Some(fdpass(&runtime_dir)?.map(&named(&name), true).map_err(error_text)?);
            }
            FileCommand::Fill { pattern, pages } => self.fill(pattern, pages)?,
            FileCommand::Verify { pattern, pages } => return self.verify(pattern, pages).map(Reply::Number),
            FileCommand::Read(pages) => self.read(pages)?,
            FileCommand::Punch(pages) => {
                self.allocate(
                    FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
                    pages,
                )?;
            }
            FileCommand::Allocate(pages) => self.allocate(FallocateFlags::empty(), pages)?,
            FileCommand::Truncate(bytes) => {
                ftruncate(&self.file()?.0, bytes.cast_signed()).map_err(error_text)?;
            }
            FileCommand::AdviseHugePages => self.advise(Advice::HugePage)?,
            FileCommand::PageOut => self.advise(Advice::PageOut)?,
            FileCommand::March(pages) => self.march(pages)?,
            FileCommand::Churn { seed, pages, millis } => {
                return self.churn(seed, pages, millis).map(Reply::Number);
            }
            FileCommand::Flap { seed, pages, times } => self.flap(seed, pages, times)?,
        }
        Ok(Reply::Done)
    }

    fn open(&mut self, file: &FileOf) -> Done {
        // Unmapped first: the new mapping may be of the same file at another size.
        self.file = None;
        let (fd, info) = fdpass(&file.runtime_dir)?.open(&named(&file.name), true).map_err(error_text)?;
        let bytes = usize::try_from(info.size_bytes).map_err(error_text)?;
        // The alignment permits huge pages.
        let mapping = SharedMapping::shared_aligned(&fd, bytes, 2 << 20, true).map_err(error_text)?;
        self.file = Some((fd, mapping));
        Ok(())
    }

    fn file(&self) -> Done<&(OwnedFd, SharedMapping)> {
        self.file.as_ref().ok_or_else(|| "no file is open".to_owned())
    }

    fn write(&self, pattern: Pattern, page: u64) -> Done {
        let (_, mapping) = self.file()?;
        let at = usize::try_from(page * PAGE).map_err(error_text)?;
        // The last page of the file may be a partial one.
        let room = mapping.len().saturating_sub(at).min(16);
        if mapping.write_at(at, &pattern.content(page)[..room]) {
            Ok(())
        } else {
            Err(format!("the mapping has no page {page}"))
        }
    }

    fn fill(&self, pattern: Pattern, pages: Span) -> Done {
        pages.range().filter(|page| pattern.has(*page)).try_for_each(|page| self.write(pattern, page))
    }

    fn verify(&self, pattern: Pattern, pages: Span) -> Done<u64> {
        let (_, mapping) = self.file()?;
        let mut wrong = 0_u64;
        for page in pages.range().filter(|page| pattern.has(*page)) {
            let mut bytes = [0; 16];
            let at = usize::try_from(page * PAGE).map_err(error_text)?;
            if !mapping.read_at(at, &mut bytes) || bytes != pattern.content(page) {
                wrong += 1;
            }
        }
        Ok(wrong)
    }

    fn read(&self, pages: Span) -> Done {
        let (_, mapping) = self.file()?;
        for page in pages.range() {
            let at = usize::try_from(page * PAGE).map_err(error_text)?;
            if !mapping.read_at(at, &mut [0]) {
                return Err(format!("the mapping has no page {page}"));
            }
        }
        Ok(())
    }

    fn allocate(&self, flags: FallocateFlags, pages: Span) -> Done {
        let (offset, bytes) =
            ((pages.first * PAGE).cast_signed(), ((pages.end - pages.first) * PAGE).cast_signed());
        fallocate(self.file()?.0.as_fd(), flags, offset, bytes).map_err(error_text)
    }

    fn advise(&self, advice: Advice) -> Done {
        self.file()?.1.advise(advice).map_err(error_text)
    }

    fn march(&self, pages: Span) -> Done {
        let progress = self.progress.as_ref().ok_or("no progress file is mapped")?;
        for page in pages.range() {
            publish(progress, 0, page + 1)?;
            self.write(EVERY_PAGE, page)?;
            publish(progress, 8, page + 1)?;
        }
        Ok(())
    }

    /// All of the first `pages` pages must hold data.
    fn churn(&self, seed: u64, pages: u64, millis: u64) -> Done<u64> {
        let until = Instant::now() + Duration::from_millis(millis);
        let mut word = seed;
        let mut touched = 0_u64;
        while Instant::now() < until {
            for _ in 0..64 {
                word = mix(word);
                let page = word % pages;
                if word >> 40 & 1 == 1 {
                    self.write(EVERY_PAGE, page)?;
                } else {
                    self.read((page..page + 1).into())?;
                }
                touched += 1;
            }
        }
        Ok(touched)
    }

    /// Writes some of the pages that the file gains each time.
    fn flap(&self, seed: u64, pages: u64, times: u64) -> Done {
        let (fd, _) = self.file()?;
        let mut word = seed;
        for _ in 0..times {
            ftruncate(fd, PAGE.cast_signed()).map_err(error_text)?;
            ftruncate(fd, (pages * PAGE).cast_signed()).map_err(error_text)?;
            for _ in 0..8 {
                word = mix(word);
                self.write(EVERY_PAGE, 1 + word % (pages - 1))?;
            }
        }
        Ok(())
    }
}

/// Stores a counter for other processes, after all earlier stores and before all later ones.
fn publish(progress: &MappedFile, offset: u64, value: u64) -> Done {
    static ORDER: AtomicU64 = AtomicU64::new(0);
    // A locked instruction orders the stores before it and those after it.
    ORDER.fetch_add(1, Ordering::SeqCst);
    if !progress.write_at(offset, &value.to_le_bytes()) {
        return Err("the progress file cannot be written".to_owned());
    }
    ORDER.fetch_add(1, Ordering::SeqCst);
    Ok(())
}
