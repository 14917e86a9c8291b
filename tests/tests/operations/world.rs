//! One file, the processes that write to it, and an incremental copy of it.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_client::adopt::{AdoptOptions, Selection, adopt};
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Backing, error_chain};
use fdmap_client::{Client, FdpassClient};
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::service::named;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{AgentMapping, FileOf, Reply, Span};
use fdmap_tests::test_agent::operation::{FileOperation, MappingCall, OperationCommand};
use fdmap_tests::tracked::PAGE;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;

use crate::incremental::{Counts, IncrementalCopy};
use crate::plan::{Combination, Kind, MapBy, MappingMethod, Step};
use crate::processes::Processes;

/// A mapping of one of the processes.
#[derive(Clone, Copy)]
struct Mapping {
    of_other: bool,
    number: usize,
}

pub struct World<'a> {
    processes: &'a mut Processes,
    kind: Kind,
    method: MappingMethod,
    client: Client,
    name: String,
    /// Opened by path.
    path: File,
    main: TestAgent,
    other: Option<TestAgent>,
    mappings: Vec<Mapping>,
    copy: IncrementalCopy,
    /// Makes the content of each write unique.
    writes: u64,
}

fn text(error: impl std::error::Error) -> String {
    error_chain(&error)
}

impl<'a> World<'a> {
    /// A new file with one mapping, through which half of the pages are written.
    pub async fn new(processes: &'a mut Processes, combination: Combination) -> Result<Self, String> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let Combination { kind, method, .. } = combination;
        let name = format!("file-{}", FILES.fetch_add(1, Ordering::Relaxed));
        let client = processes.service.client().await.map_err(text)?;
        let mut session = processes.service.fdpass().map_err(text)?;
        let mut main = processes.take_main(method).map_err(text)?;
        let plain = OperationCommand::Map { tracked: None, huge_pages: kind.backing == Backing::ShmemThp };
        let step = 2 * kind.hugetlb().max(PAGE);
        let fill = |mapping| OperationCommand::Fill { mapping, step, content: u64::MAX };
        let mut mapped = Vec::new();
        match method {
            MappingMethod::Tracked | MappingMethod::Untracked => {
                let (size_bytes, backing) = (kind.pages() * PAGE, kind.backing);
                let file = CreateFile { name: name.clone(), size_bytes, backing, ..CreateFile::default() };
                client.create(file).await.map_err(text)?;
            }
            MappingMethod::Adopted | MappingMethod::Shim => {
                let (bytes, hugetlb, unit) = (kind.pages() * PAGE, kind.hugetlb(), kind.unit());
                let create = OperationCommand::Create { name: name.clone(), bytes, hugetlb, unit };
                let Reply::Number(descriptor) = main.operation(create).map_err(text)? else {
                    return Err("no descriptor of the new memfd".to_owned());
                };
                let mapping = mapping_of(main.operation(plain.clone()).map_err(text)?)?;
                mapped.push(Mapping { of_other: false, number: mapping.number });
                main.operation(fill(mapping.number)).map_err(text)?;
                if method == MappingMethod::Adopted {
                    adopt_file(&mut session, main.pid(), descriptor, &name)?;
                }
            }
        }
        let path = File::from(session.open(&named(&name), true).map_err(text)?.0);
        let copy = IncrementalCopy::new();
        let mut world = Self {
            processes,
            kind,
            method,
            client,
            name,
            path,
            main,
            other: None,
            mappings: mapped,
            copy,
            writes: 0,
        };
        if world.mappings.is_empty() {
            let open = world.open_by_path();
            world.main.operation(open).map_err(text)?;
            world.map(MapBy::Main)?;
            let mapping = world.mappings[0].number;
            world.main.operation(fill(mapping)).map_err(text)?;
        }
        Ok(world)
    }

    /// Releases the file, and deletes it.
    pub async fn finish(self) -> Result<Counts, String> {
        self.processes.put_back(self.method, self.main, self.other);
        self.client.delete(&named(&self.name)).await.map_err(text)?;
        Ok(self.copy.counts)
    }

    pub async fn apply(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Map(by) => self.map(by),
            Step::Operation(operation) => self.operate(operation),
            Step::Remote { method, mapping, page } => self.write_remotely(method, mapping, page),
            Step::Reclaim => self.processes.reclaim(self.kind).map_err(text),
            Step::Checkpoint { force } => self.checkpoint(force).await,
        }
    }

    pub async fn checkpoint(&mut self, force: bool) -> Result<(), String> {
        let name: FileName = named(&self.name);
        self.copy.checkpoint((&self.client, &name), &self.path, force).await
    }

    /// A command that opens the file by path.
    fn open_by_path(&self) -> OperationCommand {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.path.as_raw_fd());
        OperationCommand::Open { path: PathBuf::from(path), unit: self.kind.unit() }
    }

    fn map(&mut self, by: MapBy) -> Result<(), String> {
        if by == MapBy::Other && self.other.is_none() {
            let open = self.open_by_path();
            let other = self.other.insert(self.processes.take_other().map_err(text)?);
            other.operation(open).map_err(text)?;
        }
        let library =
            by == MapBy::Main && matches!(self.method, MappingMethod::Tracked | MappingMethod::Adopted);
        let tracked = library.then(|| FileOf::of(&self.processes.service, &self.name));
        let huge_pages = self.kind.backing == Backing::ShmemThp;
        let of_other = by == MapBy::Other;
        let map = OperationCommand::Map { tracked, huge_pages };
        let mapping = mapping_of(self.agent(of_other).operation(map).map_err(text)?)?;
        self.mappings.push(Mapping { of_other, number: mapping.number });
        Ok(())
    }

    fn agent(&mut self, of_other: bool) -> &mut TestAgent {
        match &mut self.other {
            Some(other) if of_other => other,
            _ => &mut self.main,
        }
    }

    fn operate(&mut self, operation: FileOperation) -> Result<(), String> {
        self.writes += 1;
        let content = self.writes;
        let (of_other, operation) = match operation {
            FileOperation::Mapping { call, mapping, page } => {
                let Some(index) = mapping.checked_rem(self.mappings.len()) else { return Ok(()) };
                let Mapping { of_other, number } = self.mappings[index];
                if call == MappingCall::Unmap {
                    self.mappings.swap_remove(index);
                }
                (of_other, FileOperation::Mapping { call, mapping: number, page })
            }
            descriptor @ FileOperation::Descriptor { .. } => (false, descriptor),
        };
        let perform = OperationCommand::Perform { operation, content };
        match self.agent(of_other).operation(perform).map_err(text)? {
            Reply::Pages(pages) => {
                self.copy.record(pages);
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    }

    fn write_remotely(&mut self, method: Method, mapping: usize, page: u64) -> Result<(), String> {
        self.writes += 1;
        let content = self.writes.to_le_bytes().repeat(PAGE as usize / 8);
        let Some(index) = mapping.checked_rem(self.mappings.len()) else { return Ok(()) };
        let Mapping { of_other, number } = self.mappings[index];
        let agent = self.agent(of_other);
        let pid = agent.pid();
        let address = OperationCommand::Address { mapping: number, page };
        let AgentMapping { number: page, address, len } =
            mapping_of(agent.operation(address).map_err(text)?)?;
        if len == 0 {
            return Ok(());
        }
        if method == Method::Mem {
            let memory = File::options().write(true).open(format!("/proc/{pid}/mem"));
            memory
                .and_then(|memory| memory.write_all_at(&content, address as u64))
                .map_err(|error| format!("write to /proc/{pid}/mem: {error}"))?;
        } else {
            let target = [RemoteIoVec { base: address, len }];
            let written =
                process_vm_writev(Pid::from_raw(pid.cast_signed()), &[IoSlice::new(&content)], &target);
            if written != Ok(len) {
                return Err(format!("process_vm_writev: {written:?}"));
            }
        }
        let first = page as u64;
        self.copy.record(Span { first, end: first + 1 });
        Ok(())
    }
}

fn mapping_of(reply: Reply) -> Result<AgentMapping, String> {
    match reply {
        Reply::Mapping(mapping) => Ok(mapping),
        other => Err(format!("{other:?}")),
    }
}

/// Adopts the file of a descriptor of a process from outside, and tracks its mapping.
fn adopt_file(session: &mut FdpassClient, pid: u32, descriptor: u64, name: &str) -> Result<(), String> {
    let options = AdoptOptions {
        selection: Selection::Descriptor(i32::try_from(descriptor).map_err(text)?),
        name: Some(name.to_owned()),
        access: None,
        lifetime: None,
        track: true,
        allow_eintr: false,
    };
    let adopted = adopt(session, pid, &options).map_err(text)?;
    let tracked: usize = adopted.files.iter().map(|file| file.tracked.len()).sum();
    match (adopted.problems.as_slice(), tracked) {
        ([], 1) => Ok(()),
        (problems, tracked) => Err(format!("{tracked} mappings are tracked: {problems:?}")),
    }
}
