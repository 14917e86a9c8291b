//! A redis server under the shim, whose heap is in a memfd.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fdmap_tests::HarnessError;
use fdmap_tests::cleanup::CleanupGuard;
use fdmap_tests::host::{output, temp_dir};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};

use super::Workload;
use crate::{BenchError, BenchResult};

pub const NAME: &str = "redis";

/// Keys of the data set.
const KEYS: &str = "100000";
/// Requests in one generation.
const REQUESTS: &str = "500";
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The server's memory that the preloaded library allocates is private otherwise. jemalloc must return none of it, since it expects
/// zeros after that.
const SERVER: &str = "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1 LD_PRELOAD=\"$1:$LD_PRELOAD\" exec redis-server --port 0 \
                      --unixsocket \"$2/socket\" --dir \"$2\" --save '' --logfile \"$2/log\"";

struct Redis {
    server: LineProcess,
    socket: String,
    _library: Compiled,
    /// The directory, dropped last.
    _folder: CleanupGuard,
}

/// Starts a server and fills it.
///
/// # Errors
/// [`BenchError`]; [`HarnessError::Missing`] if redis is not installed.
pub fn start(service: &Service) -> BenchResult<Box<dyn Workload>> {
    for name in ["redis-server", "redis-cli", "redis-benchmark"] {
        output(name, &["--version"]).map_err(|_| HarnessError::Missing(format!("the program {name}")))?;
    }
    let library = Compiled::library("heap_in_memfd")?;
    let (folder, guard) = temp_dir("fdmap-redis-")?;
    let mut command = Command::new(program("fdmap")?);
    command.arg("--runtime-dir").arg(service.folder()).args(["exec", "--", "sh", "-c", SERVER, "sh"]);
    command.arg(library.path()).arg(&folder).stderr(Stdio::inherit());
    let server = LineProcess::start(command, None)?;
    let socket = folder.join("socket").display().to_string();
    let redis = Redis { server, socket, _library: library, _folder: guard };
    let began = Instant::now();
    while output("redis-cli", &["-s", &redis.socket, "ping"]).is_err() {
        if began.elapsed() > START_TIMEOUT {
            return Err(BenchError::Wrong("redis-server does not answer".to_owned()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    redis.set(KEYS)?;
    redis.set(KEYS)?;
    Ok(Box::new(redis))
}

impl Redis {
    /// Sets as many random keys to random values.
    fn set(&self, requests: &str) -> BenchResult<()> {
        let words = ["-s", &self.socket, "-q", "-n", requests, "-r", KEYS, "-P", "16"];
        output("redis-benchmark", &[&words[..], &["set", "key:__rand_int__", "__rand_int__"]].concat())?;
        Ok(())
    }
}

impl Workload for Redis {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The name that the library gives to its memfd.
    fn file(&self) -> &str {
        "heap"
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.server.pid()]
    }

    fn write(&mut self, _: u64) -> BenchResult<()> {
        self.set(REQUESTS)
    }
}
