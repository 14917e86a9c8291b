//! A service, and processes for it to adopt.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fdmap_tests::blocked_syscall::BlockedSyscall;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A service, and the program to adopt.
pub struct Fixture {
    pub service: Service,
    pub program: Compiled,
}

impl Fixture {
    pub fn new() -> Self {
        Self::with(&[])
    }

    pub fn with(arguments: &[&str]) -> Self {
        require(root());
        let program = require(Compiled::new("blocked_syscall"));
        Self { service: Service::start(arguments).unwrap(), program }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(self.service.folder()).args(arguments);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a command that must fail with this exit code. Returns its standard error.
    #[track_caller]
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        errors
    }

    pub fn start(&self, kind: &str, name: &str) -> BlockedSyscall {
        let mut command = Command::new(self.program.path());
        command.args([kind, name]);
        BlockedSyscall::start(command).unwrap()
    }

    #[track_caller]
    pub fn adopt(&self, process: &BlockedSyscall, more: &[&str]) -> Value {
        let pid = process.pid().to_string();
        let adopted = self.json(&[&["adopt", "--pid", &pid, "--track"], more].concat());
        eprintln!("{}", adopted["stop"]);
        adopted
    }

    /// Asserts that the writes of the process are observed, and no others. Other processes of the host may make the
    /// service report all pages with data, but as conservative.
    #[track_caller]
    pub fn tracks_writes(&self, process: &mut BlockedSyscall, file: &Value) {
        let name = &format!("id:{}", file["id"].as_str().unwrap());
        self.json(&["checkpoint", name]);
        let since = self.json(&["checkpoint", name])["generation"].to_string();
        process.write(5).unwrap();
        process.write(6).unwrap();
        self.json(&["checkpoint", name]);
        let dirty = self.json(&["dirty", name, "--since", &since]);
        let written = serde_json::json!({ "conservative": false, "start": 5, "end": 7 });
        assert!(dirty["runs"].as_array().unwrap().contains(&written), "{dirty}");
        assert_eq!(
            (&dirty["observed_pages"], &dirty["header"]["coverage"]["tracked_mappings"]),
            (&2.into(), &1.into())
        );
    }
}

pub fn signal(process: &BlockedSyscall, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(process.pid()).unwrap()), signal).unwrap();
}

/// Measures, while it lives, how late the scheduler runs a thread that is ready.
pub struct Lateness {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Lateness {
    pub fn measure() -> Self {
        const SLEEP: Duration = Duration::from_millis(1);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(SLEEP);
                longest = longest.max(began.elapsed().saturating_sub(SLEEP));
            }
            longest
        });
        Self { stop, thread }
    }

    /// The greatest lateness until now.
    pub fn longest(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
