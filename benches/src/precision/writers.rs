//! Several processes that write to one file: four store to tracked mappings, two write through descriptors. In a second workload
//! the bench also writes to another file once per generation, by calls that do not name their file.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use fdmap_client::grpc::CreateFile;
use fdmap_sys::testing::uring;
use fdmap_tests::cleanup::CleanupGuard;
use fdmap_tests::host::temp_dir;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::pattern::mix;
use fdmap_tests::service::Service;
use fdmap_tests::test_agent::TestAgent;

use super::Workload;
use crate::{BenchError, BenchResult};

pub const NAME: &str = "processes";
pub const BESIDE_OTHERS: &str = "processes beside other writers";

const FILE: &str = "shared";
/// 128 MiB.
const PAGES: u64 = 32_768;
/// Batches of writes of each process in one generation.
const WRITES: u64 = 50;

/// Pages of one batch, at most.
const MAX_WRITE_PAGES: u64 = 4;

/// The agents log their writes, which are not read here.
const LOG_RECORDS: usize = 1 << 20;
/// Generations that fit into a log.
const LOGGED_GENERATIONS: u64 = 32;

/// How each process writes.
const METHODS: [Method; 6] =
    [Method::Store, Method::Store, Method::Store, Method::Store, Method::Pwrite, Method::Writev];

struct Writers {
    agents: Vec<(TestAgent, Method, Log)>,
    /// A file that is not one of the service.
    other: Option<(PathBuf, CleanupGuard)>,
}

/// Starts the processes. Each writes the first half of the file once.
///
/// # Errors
/// [`BenchError`]
pub fn start(service: &Service) -> BenchResult<Box<dyn Workload>> {
    Ok(Box::new(Writers::start(service)?))
}

/// The same, beside writers of another file.
///
/// # Errors
/// [`BenchError`]
pub fn start_beside_others(service: &Service) -> BenchResult<Box<dyn Workload>> {
    let (folder, guard) = temp_dir("fdmap-precision-")?;
    let other = Some((folder.join("other"), guard));
    Ok(Box::new(Writers { other, ..Writers::start(service)? }))
}

impl Writers {
    fn start(service: &Service) -> BenchResult<Self> {
        let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let client = runtime.block_on(service.client())?;
        let file = CreateFile { name: FILE.to_owned(), size_bytes: PAGES << 12, ..CreateFile::default() };
        runtime.block_on(client.create(file))?;
        let mut writers = Writers { agents: Vec::new(), other: None };
        for method in METHODS {
            let mut agent = TestAgent::start(None)?;
            let log = Log::create(1, LOG_RECORDS)?;
            agent.use_log(&log)?;
            agent.map(service, FILE, true)?;
            agent.poke(0, 0, PAGES / 2)?;
            writers.agents.push((agent, method, log));
        }
        Ok(writers)
    }
}

/// Writes to a file by io_uring, and truncates it by its path.
fn write_other(path: &Path) -> BenchResult<()> {
    let failed =
        |error: std::io::Error| BenchError::Io { what: format!("writing {}", path.display()), error };
    let file = File::create(path).map_err(failed)?;
    uring::write(file.as_fd(), b"abc", 0).map_err(|errno| failed(errno.into()))?;
    nix::unistd::truncate(path, 9 << 12).map_err(|errno| failed(errno.into()))
}

impl Workload for Writers {
    fn name(&self) -> &'static str {
        if self.other.is_some() { BESIDE_OTHERS } else { NAME }
    }

    fn file(&self) -> &str {
        FILE
    }

    fn processes(&self) -> Vec<u32> {
        self.agents.iter().map(|(agent, ..)| agent.pid()).collect()
    }

    fn write(&mut self, seed: u64) -> BenchResult<()> {
        if let Some((path, _)) = &self.other {
            write_other(path)?;
        }
        if seed.is_multiple_of(LOGGED_GENERATIONS) {
            for (agent, _, log) in &mut self.agents {
                *log = Log::create(1, LOG_RECORDS)?;
                agent.use_log(log)?;
            }
        }
        for nth in 0..WRITES {
            for (at, (agent, method, _)) in self.agents.iter_mut().enumerate() {
                let draw = mix(seed << 32 | nth << 8 | at as u64);
                let first = draw % (PAGES / 2 - MAX_WRITE_PAGES);
                agent.write_once(*method, mix(draw), first..first + MAX_WRITE_PAGES)?;
            }
        }
        Ok(())
    }
}
