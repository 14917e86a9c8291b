//! Guard regions in tracked mappings: the call that installs one returns, and no write is lost.

use std::collections::BTreeSet;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use fdmap_client::proto::GapKind;
use fdmap_tests::HarnessError;
use fdmap_tests::harness::require;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{ChangeReader, compile_plain_program, map_memfd, start_program};

const PAGES: u64 = 512;
/// A call that takes longer never returns.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Sends a command to the program, and kills the program if it does not answer.
#[track_caller]
pub fn call(program: &mut LineProcess, command: &str) -> String {
    let pid = Pid::from_raw(program.pid().cast_signed());
    let (answered, waiting) = channel();
    let answer = std::thread::scope(|scope| {
        scope.spawn(move || {
            if waiting.recv_timeout(MAX_WAIT) == Err(RecvTimeoutError::Timeout) {
                kill(pid, Signal::SIGKILL).unwrap();
            }
        });
        let answer = program.call(command);
        answered.send(()).unwrap_or(());
        answer
    });
    answer.unwrap_or_else(|error| panic!("{command}: {}", fdmap_client::proto::error_chain(&error)))
}

/// Installs a guard region over pages of a mapping.
#[track_caller]
pub fn guard(program: &mut LineProcess, slot: &str, pages: &std::ops::Range<u64>, method: InstallMethod) {
    let command = format!("guard {slot} {} {} {}", pages.start, pages.end - pages.start, method as u8);
    let installed = call(program, &command);
    if installed == (Errno::EINVAL as i32).to_string() {
        require::<()>(Err(HarnessError::Missing("guard regions in shmem".to_owned())));
    }
    assert_eq!(installed, "0", "{command}");
    let faults = (Errno::EFAULT as i32).to_string();
    assert_eq!(call(program, &format!("access {slot} {}", pages.start)), faults);
    assert_eq!(call(program, &format!("access {slot} {}", pages.end)), "0");
}

/// How the program installs a guard region.
#[derive(Clone, Copy)]
pub enum InstallMethod {
    Madvise = 0,
    ProcessMadvise = 1,
    SyscallNumber = 2,
}

/// A program under the shim that has written the first pages of a tracked mapping of a writer-sealed file.
async fn start(service: &Service) -> (LineProcess, String, ChangeReader) {
    let compiled = compile_plain_program();
    let mut program = start_program(service, &compiled, &[]);
    let (_, slot) = map_memfd(&mut program, "ram", PAGES);
    for page in 0..64 {
        program.call(&format!("write {slot} {page}")).unwrap();
    }
    service.client().await.unwrap().seal_writers(&named("ram")).await.unwrap();
    let mut reader = ChangeReader::start(service, "ram").await;
    wait_until_empty(&mut reader).await;
    (program, slot, reader)
}

async fn wait_until_empty(reader: &mut ChangeReader) {
    let start = std::time::Instant::now();
    while !reader.read_pages().await.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30), "pages are reported without a write");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[track_caller]
fn write(program: &mut LineProcess, slot: &str, pages: &[u64]) {
    for page in pages {
        call(program, &format!("write {slot} {page}"));
    }
}

async fn check_installation(traced: bool, method: InstallMethod) {
    let service = Service::start(if traced { &[] } else { &["--no-call-trace"] }).unwrap();
    // The trace does not know the range of process_madvise, so that it counts as all of the address space.
    let is_range_known = !traced || !matches!(method, InstallMethod::ProcessMadvise);
    let (mut program, slot, mut reader) = start(&service).await;
    write(&mut program, &slot, &[8, 40]);
    guard(&mut program, &slot, &(8..12), method);
    write(&mut program, &slot, &[41]);
    let written = reader.read_pages().await;
    assert!([8, 40, 41].iter().all(|page| written.contains(page)), "{written:?}");
    // One page is a hole until it is written.
    for written in [20, 9, 100] {
        if written == 9 {
            call(&mut program, &format!("unguard {slot} 8 4"));
        }
        // Pages of the generations before are conservative once more.
        reader.read_pages().await;
        reader.read_pages().await;
        write(&mut program, &slot, &[written]);
        let pages: BTreeSet<_> = reader.read_pages().await.into_iter().collect();
        let expected: BTreeSet<_> = (8..12).chain([written]).collect();
        if is_range_known {
            assert_eq!(pages, expected, "after a write of page {written}");
        }
        assert!(pages.is_superset(&expected), "after a write of page {written}: {pages:?}");
    }
    let coverage = service.client().await.unwrap().coverage(&named("ram")).await.unwrap().coverage;
    assert!(coverage.gaps.iter().any(|gap| gap.kind == GapKind::UntrackedMapping), "{coverage:?}");
    write(&mut program, &slot, &[10, 50]);
    call(&mut program, &format!("unmap {slot} 0 {}", PAGES * 4096));
    let written = reader.read_pages().await;
    assert!(written.contains(&10) && written.contains(&50), "{written:?}");
}

#[test]
async fn guard_region_is_installed_where_calls_are_traced() {
    for method in [InstallMethod::Madvise, InstallMethod::ProcessMadvise, InstallMethod::SyscallNumber] {
        check_installation(true, method).await;
    }
}

#[test]
async fn guard_region_is_installed_where_calls_are_not_traced() {
    for method in [InstallMethod::Madvise, InstallMethod::ProcessMadvise, InstallMethod::SyscallNumber] {
        check_installation(false, method).await;
    }
}

#[test]
async fn child_installs_a_guard_region_in_an_inherited_mapping() {
    let service = Service::start(&["--no-call-trace"]).unwrap();
    let (mut program, slot, mut reader) = start(&service).await;
    guard(&mut program, &slot, &(200..201), InstallMethod::Madvise);
    assert_eq!(call(&mut program, &format!("guardfork {slot} 8 4")), "7");
    write(&mut program, &slot, &[30]);
    let written = reader.read_pages().await;
    assert!(written.contains(&8) && written.contains(&30), "{written:?}");
}

#[test]
async fn guard_region_needs_no_running_service() {
    let service = Service::start(&["--no-call-trace"]).unwrap();
    let (mut program, slot, mut reader) = start(&service).await;
    service.stop();
    write(&mut program, &slot, &[8]);
    guard(&mut program, &slot, &(8..12), InstallMethod::Madvise);
    write(&mut program, &slot, &[20]);
    service.signal(Signal::SIGCONT);
    let written = reader.read_pages().await;
    assert!(written.contains(&8) && written.contains(&20), "{written:?}");
}
