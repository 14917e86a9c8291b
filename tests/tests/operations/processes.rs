//! The service and the processes that operate on its files.

use std::process::Command;

use fdmap_tests::HarnessResult;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test_agent::operation::OperationCommand;
use fdmap_tests::test_agent::{PROGRAM, TestAgent};
use fdmap_tests::tracked::PAGE;

use crate::plan::{Kind, MappingMethod};

/// The limit of a memory cgroup that the processes and the file never exceed: where the kernel finds nothing to swap out in time,
/// it kills a process.
const fn memory_limit(kind: Kind) -> u64 {
    kind.max_pages() * PAGE + (32 << 20)
}

/// The processes, which are reused for several lists. One that is taken and not put back is started again.
pub struct Processes {
    pub service: Service,
    /// The cgroup of all processes but the service.
    cgroup: Option<Cgroup>,
    main: Option<(MappingMethod, TestAgent)>,
    other: Option<TestAgent>,
}

impl Processes {
    pub fn start(kind: Kind) -> Self {
        let cgroup = kind.swapped.then(|| require(Cgroup::with_limit(memory_limit(kind))));
        Self { service: Service::start(&[]).unwrap(), cgroup, main: None, other: None }
    }

    /// Swaps out what exceeds half of the file.
    pub fn reclaim(&self, kind: Kind) -> HarnessResult<()> {
        let bytes = kind.pages() * PAGE / 2;
        self.cgroup.as_ref().map_or(Ok(()), |cgroup| cgroup.reclaim_to(bytes, memory_limit(kind)))
    }

    /// The writing process.
    pub fn take_main(&mut self, method: MappingMethod) -> HarnessResult<TestAgent> {
        match self.main.take() {
            Some((same, agent)) if same == method => Ok(agent),
            _ if method == MappingMethod::Shim => {
                TestAgent::start_by(self.under_shim()?, self.cgroup.as_ref())
            }
            _ => TestAgent::start(self.cgroup.as_ref()),
        }
    }

    /// A process that does not know the service.
    pub fn take_other(&mut self) -> HarnessResult<TestAgent> {
        self.other.take().map_or_else(|| TestAgent::start(self.cgroup.as_ref()), Ok)
    }

    /// Makes the processes of a list release the file. Those that fail end.
    pub fn put_back(&mut self, method: MappingMethod, main: TestAgent, other: Option<TestAgent>) {
        let released = |mut agent: TestAgent| agent.operation(OperationCommand::Close).ok().map(|_| agent);
        self.main = released(main).map(|agent| (method, agent));
        self.other = other.and_then(released).or_else(|| self.other.take());
    }

    fn under_shim(&self) -> HarnessResult<Command> {
        let mut command = Command::new(program("fdmap")?);
        command
            .arg("--runtime-dir")
            .arg(self.service.folder())
            .args(["exec", "--min-size", "4K", "--"])
            .arg(program(PROGRAM)?);
        Ok(command)
    }
}
