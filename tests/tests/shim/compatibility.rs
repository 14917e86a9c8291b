//! Programs of the distribution behave under the shim as they do without it.

use std::path::Path;
use std::process::{Command, Stdio};

use fdmap_tests::harness::require;
use fdmap_tests::host::temp_dir;
use fdmap_tests::service::Service;
use fdmap_tests::test;
use fdmap_tests::{HarnessError, HarnessResult};

use crate::fixture::{stderr_of, with_shim, without_shim};

fn installed(name: &str) -> HarnessResult<()> {
    let found =
        Command::new("sh").args(["-c", "command -v \"$1\"", "sh", name]).stdout(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        Ok(())
    } else {
        Err(HarnessError::Missing(format!("the program {name}")))
    }
}

/// Runs a command without and with the shim, checks that both succeed, and returns what each printed.
#[track_caller]
fn run_both(service: &Service, command: &[&str]) -> [String; 2] {
    let run = |mut command: Command| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), printed, stderr_of(&output))
    };
    let without = run(without_shim(command));
    let with = run(with_shim(service.folder(), &[], command));
    assert_eq!(with.0, without.0, "{command:?}: with: {} without: {}", with.2, without.2);
    assert_eq!(with.0, Some(0), "{command:?}: {}", with.2);
    assert!(!with.2.contains("fdmap shim"), "{}", with.2);
    [without.1, with.1]
}

#[test]
fn stress_ng_succeeds_under_the_shim() {
    require(installed("stress-ng"));
    let service = Service::start(&[]).unwrap();
    for stressor in [
        vec!["--memfd", "1", "--memfd-bytes", "32M"],
        vec!["--mmap", "1", "--mmap-bytes", "32M"],
        vec!["--fork", "1"],
        vec!["--shm-sysv", "1"],
    ] {
        run_both(&service, &[&["stress-ng", "--quiet", "--timeout", "5"], &stressor[..]].concat());
    }
}

const SHARED: &str = "
from multiprocessing import Pool, shared_memory
import mmap, os
def add(name):
    memory = shared_memory.SharedMemory(name)
    total = sum(memory.buf[:4096])
    memory.close()
    return total
if __name__ == '__main__':
    memory = shared_memory.SharedMemory(create=True, size=4 << 20)
    memory.buf[:4096] = bytes([3]) * 4096
    with Pool(3) as pool:
        print(pool.map(add, [memory.name] * 9))
    memory.close()
    memory.unlink()
    memfd = os.memfd_create('area')
    os.ftruncate(memfd, 1 << 20)
    with mmap.mmap(memfd, 1 << 20) as area:
        area[:5] = b'hello'
        print(area[:5])
";

#[test]
fn python_shared_memory_has_the_same_content() {
    require(installed("python3"));
    let service = Service::start(&[]).unwrap();
    let [without, with] = run_both(&service, &["python3", "-c", SHARED]);
    assert_eq!(with, without);
    assert!(with.contains("12288"));
}

/// Starts a server, queries it, saves by fork, puts it under load and shuts it down.
const REDIS: &str = "
set -e
cd \"$1\"
redis-server --port 0 --unixsocket \"$1/socket\" --daemonize no --dir \"$1\" --save '' --logfile \"$1/log\" &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 200); do redis-cli -s \"$1/socket\" ping >/dev/null 2>&1 && break; sleep 0.05; done
redis-cli -s \"$1/socket\" debug populate 20000 >/dev/null 2>&1 || redis-benchmark -s \"$1/socket\" -n 2000 -r 1000 -q set k__rand_int__ v >/dev/null
redis-cli -s \"$1/socket\" set key value
redis-cli -s \"$1/socket\" bgsave >/dev/null
for _ in $(seq 200); do redis-cli -s \"$1/socket\" info persistence | grep -q 'rdb_bgsave_in_progress:0' && break; sleep 0.05; done
redis-cli -s \"$1/socket\" info persistence | tr -d '\\r' | grep -E 'rdb_last_bgsave_status|rdb_saves'
test -s dump.rdb
redis-benchmark -s \"$1/socket\" -n 5000 -q -t set,get,lpush >/dev/null
redis-cli -s \"$1/socket\" get key
redis-cli -s \"$1/socket\" shutdown nosave >/dev/null || true
trap - EXIT
wait $server
";

#[test]
fn redis_saves_by_fork_under_the_shim() {
    require(installed("redis-server"));
    let service = Service::start(&[]).unwrap();
    let run = |under_shim: bool| {
        let (folder, _guard) = temp_dir("fdmap-redis-").unwrap();
        let script = ["sh", "-c", REDIS, "sh", folder.to_str().unwrap()];
        let mut command =
            if under_shim { with_shim(service.folder(), &[], &script) } else { without_shim(&script) };
        let output = command.stdin(Stdio::null()).output().unwrap();
        let log = std::fs::read_to_string(Path::new(&folder).join("log")).unwrap_or_default();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), stderr_of(&output), log)
    };
    let (without, with) = (run(false), run(true));
    assert_eq!((with.0, &with.1), (without.0, &without.1), "{} {}", with.2, with.3);
    assert_eq!(with.0, Some(0), "{} {}", with.2, with.3);
    assert!(with.1.contains("rdb_last_bgsave_status:ok") && with.1.contains("value"), "{}", with.1);
}
