use std::process::{Child, Command, Stdio};

use super::*;

const ALL_SIGNALS: SignalMask = SignalMask(u64::MAX);
const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// A process that blocks in read(2) of its standard input.
fn reader() -> Child {
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let path = format!("/proc/{}/syscall", child.id());
    while !std::fs::read_to_string(&path).unwrap().starts_with("0 ") {
        std::thread::yield_now();
    }
    child
}

fn in_five_seconds() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

#[test]
fn wait_statuses_are_distinguished() {
    let stopped = |signal: i32, event: i32| event << 16 | signal << 8 | 0x7f;
    assert_eq!(decode_status(stopped(5, 128)), Stop::Interrupted);
    assert_eq!(decode_status(stopped(19, 128)), Stop::Group(19));
    assert_eq!(decode_status(stopped(0x85, 0)), Stop::Syscall);
    assert_eq!(decode_status(stopped(34, 0)), Stop::Signal(34));
    assert_eq!(decode_status(9), Stop::Ended);
    assert_eq!(decode_status(0x100), Stop::Ended);
}

#[test]
fn sleeping_thread_stops_and_resumes() {
    let mut child = reader();
    let thread = TracedThread::seize(child.id()).unwrap();
    assert_eq!(thread.wait(Instant::now()), Ok(None), "PTRACE_SEIZE does not stop the thread");
    thread.interrupt().unwrap();
    assert_eq!(thread.wait(in_five_seconds()), Ok(Some(Stop::Interrupted)));
    let registers = thread.registers().unwrap();
    assert_eq!(registers.orig_rax, 0, "the thread is in read(2)");
    assert_eq!(thread.peek(registers.rip - 2).unwrap()[..2], SYSCALL_INSTRUCTION);
    assert_eq!(thread.peek(0).unwrap_err().errno, Errno::EIO);
    let memory = ProcessMemory::open(child.id()).unwrap();
    let mut instruction = [0; 2];
    memory.read(registers.rip - 2, &mut instruction).unwrap();
    assert_eq!(instruction, SYSCALL_INSTRUCTION);
    let mask = thread.signal_mask().unwrap();
    thread.set_signal_mask(ALL_SIGNALS).unwrap();
    // SIGKILL and SIGSTOP cannot be blocked.
    assert_eq!(thread.signal_mask(), Ok(SignalMask(!(1 << 8 | 1 << 18))));
    thread.set_signal_mask(mask).unwrap();
    thread.set_registers(&registers).unwrap();
    assert_eq!(thread.dispatches_syscalls(), Ok(false));
    assert_eq!(thread.in_restartable_sequence(registers.rip), Ok(false));
    thread.detach(0).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn exit_of_the_tracing_thread_detaches() {
    let mut child = reader();
    let pid = child.id();
    std::thread::spawn(move || TracedThread::seize(pid).map(drop)).join().unwrap().unwrap();
    let is_traced =
        || !std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("TracerPid:\t0\n");
    // The kernel wakes those who join a thread before it detaches what the thread traces.
    let deadline = in_five_seconds();
    while is_traced() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(TracedThread::seize(pid).unwrap_err().errno, Errno::ESRCH);
}

#[test]
fn exited_thread_reports_its_end() {
    let mut child = reader();
    let thread = TracedThread::seize(child.id()).unwrap();
    drop(child.stdin.take());
    assert_eq!(thread.wait(in_five_seconds()), Ok(Some(Stop::Ended)));
    let _ = child.wait();
}

#[test]
fn restartable_sequence_excludes_its_end() {
    let within = [0xfff, 0x1000, 0x100f, 0x1010].map(|address| is_within(0x1000, 0x10, address));
    assert_eq!(within, [false, true, true, false]);
}
