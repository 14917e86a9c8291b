//! Single operations on one file: `fdmap_tests::test_agent::operation`.

mod descriptors;
mod mappings;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::memfd;
use fdmap_tests::service::named;
use fdmap_tests::test_agent::AgentMapping;
use fdmap_tests::test_agent::command::{FileOf, Reply, Span};
use fdmap_tests::test_agent::operation::{By, FileOperation, MappingCall, OperationCommand};

use crate::call::{Done, error_text};
use crate::requests::fdpass;
use descriptors::OpenFile;
use mappings::{Mapped, Mapping};

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// The alignment of mappings, so that huge pages fit.
const HUGE_BYTES: usize = 2 << 20;

/// The file and its mappings.
#[derive(Default)]
pub struct Operations {
    file: Option<OpenFile>,
    mappings: BTreeMap<usize, Mapping>,
    /// The number of the next mapping.
    next: usize,
}

/// The content of a written page.
fn page_of(content: u64) -> Vec<u8> {
    content.to_le_bytes().repeat(PAGE_BYTES / 8)
}

impl Operations {
    pub fn perform(&mut self, command: OperationCommand) -> Done<Reply> {
        match command {
            OperationCommand::Create { name, bytes, hugetlb, unit } => {
                let origin = memfd::create(&name, (hugetlb != 0).then_some(hugetlb)).map_err(error_text)?;
                memfd::resize(origin.as_fd(), bytes).map_err(error_text)?;
                let number = u64::try_from(origin.as_raw_fd()).map_err(error_text)?;
                let path = open(Path::new(&format!("/proc/self/fd/{number}")))?;
                self.file = Some(OpenFile { path, origin: Some(File::from(origin)), unit });
                Ok(Reply::Number(number))
            }
            OperationCommand::Open { path, unit } => {
                self.file = Some(OpenFile { path: open(&path)?, origin: None, unit });
                Ok(Reply::Done)
            }
            OperationCommand::Close => {
                self.mappings.clear();
                self.file = None;
                Ok(Reply::Done)
            }
            OperationCommand::Map { tracked, huge_pages } => {
                self.map(tracked, huge_pages).map(Reply::Mapping)
            }
            OperationCommand::Fill { mapping, step, content } => {
                let mapping = self.mapping(mapping)?;
                for at in (0..mapping.len()).step_by(step as usize) {
                    mapping.range().write_all(at, &page_of(content)).map_err(error_text)?;
                }
                Ok(Reply::Done)
            }
            OperationCommand::Address { mapping, page } => {
                let mapping = self.mapping(mapping)?;
                let at = mapping.offset(page, self.file()?.bytes()?, PAGE);
                let len = if at.is_some() { PAGE_BYTES } else { 0 };
                let at = at.unwrap_or(0);
                let address = mapping.range().address() + at;
                Ok(Reply::Mapping(AgentMapping { number: at / PAGE_BYTES, address, len }))
            }
            OperationCommand::Perform { operation, content } => {
                self.operate(operation, &page_of(content)).map(Reply::Pages)
            }
        }
    }

    fn file(&self) -> Done<&OpenFile> {
        self.file.as_ref().ok_or_else(|| "no file for operations".to_owned())
    }

    fn mapping(&self, number: usize) -> Done<&Mapping> {
        self.mappings.get(&number).ok_or_else(|| format!("no mapping {number} for operations"))
    }

    fn map(&mut self, tracked: Option<FileOf>, huge_pages: bool) -> Done<AgentMapping> {
        let mapped = match tracked {
            Some(FileOf { runtime_dir, name }) => {
                let mut mapped = fdpass(&runtime_dir)?.map(&named(&name), true).map_err(error_text)?;
                mapped.track().map_err(error_text)?;
                Mapped::Library(Box::new(mapped))
            }
            None => {
                let file = self.file()?;
                let bytes = usize::try_from(file.bytes()?).map_err(error_text)?;
                let fd = file.descriptor(By::Origin);
                let mapping =
                    SharedMapping::shared_aligned(fd, bytes, HUGE_BYTES, true).map_err(error_text)?;
                if huge_pages {
                    mapping.advise(Advice::HugePage).map_err(error_text)?;
                }
                Mapped::Plain(mapping)
            }
        };
        let (number, mapping) = (self.next, Mapping::new(mapped));
        let (address, len) = (mapping.range().address(), mapping.len());
        self.mappings.insert(number, mapping);
        self.next += 1;
        Ok(AgentMapping { number, address, len })
    }

    /// Returns the pages whose content may have changed.
    fn operate(&mut self, operation: FileOperation, content: &[u8]) -> Done<Span> {
        let file = self.file.as_ref().ok_or("no file for operations")?;
        match operation {
            FileOperation::Mapping { call, mapping, page } => {
                let place = self.mappings.get_mut(&mapping).ok_or_else(|| format!("no mapping {mapping}"))?;
                let (bytes, unit) = (file.bytes()?, file.unit);
                let changed = place.perform(call, page, (bytes, unit), content)?;
                if call == MappingCall::Unmap {
                    self.mappings.remove(&mapping);
                }
                Ok(changed)
            }
            FileOperation::Descriptor { call, by, page, pages } => {
                file.perform(call, by, (page, pages), content)
            }
        }
    }
}

fn open(path: &Path) -> Done<File> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|error| format!("open of {}: {error}", path.display()))
}
