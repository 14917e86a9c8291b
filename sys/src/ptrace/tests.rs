use std::process::{Child, Command, Stdio};

use super::*;

const NEVER: SignalMask = SignalMask(u64::MAX);

/// A process that reads from its input until that ends.
fn reader() -> Child {
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let path = format!("/proc/{}/syscall", child.id());
    while !std::fs::read_to_string(&path).unwrap().starts_with("0 ") {
        std::thread::yield_now();
    }
    child
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

#[test]
fn statuses_are_told_apart() {
    let stopped = |signal: i32, event: i32| event << 16 | signal << 8 | 0x7f;
    assert_eq!(stop_of(stopped(5, 128)), Stop::Interrupted);
    assert_eq!(stop_of(stopped(19, 128)), Stop::Group(19));
    assert_eq!(stop_of(stopped(0x85, 0)), Stop::Syscall);
    assert_eq!(stop_of(stopped(34, 0)), Stop::Signal(34));
    assert_eq!(stop_of(9), Stop::Ended);
    assert_eq!(stop_of(0x100), Stop::Ended);
}

#[test]
fn sleeping_thread_is_stopped_and_goes_on() {
    let mut child = reader();
    let tracee = Tracee::seize(child.id()).unwrap();
    assert_eq!(tracee.wait(Instant::now()), Ok(None), "seizing stops nobody");
    tracee.interrupt().unwrap();
    assert_eq!(tracee.wait(soon()), Ok(Some(Stop::Interrupted)));
    let registers = tracee.registers().unwrap();
    assert_eq!(registers.orig_rax, 0, "it reads");
    let memory = Memory::open(child.id()).unwrap();
    assert_eq!(memory.read(registers.rip - 2), Ok([0x0f, 0x05]));
    let mask = tracee.signal_mask().unwrap();
    tracee.set_signal_mask(NEVER).unwrap();
    // SIGKILL and SIGSTOP cannot be blocked.
    assert_eq!(tracee.signal_mask(), Ok(SignalMask(!(1 << 8 | 1 << 18))));
    tracee.set_signal_mask(mask).unwrap();
    tracee.set_registers(&registers).unwrap();
    assert_eq!(tracee.dispatches_syscalls(), Ok(false));
    assert_eq!(tracee.in_restartable_sequence(&memory, registers.rip), Ok(false));
    tracee.detach(0).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn end_of_the_tracing_thread_is_the_end_of_tracing() {
    let mut child = reader();
    let pid = child.id();
    std::thread::spawn(move || Tracee::seize(pid).map(drop)).join().unwrap().unwrap();
    assert!(std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("TracerPid:\t0\n"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(Tracee::seize(pid).unwrap_err().errno, Errno::ESRCH);
}

#[test]
fn thread_that_ends_says_so() {
    let mut child = reader();
    let tracee = Tracee::seize(child.id()).unwrap();
    drop(child.stdin.take());
    assert_eq!(tracee.wait(soon()), Ok(Some(Stop::Ended)));
    let _ = child.wait();
}

#[test]
fn restartable_sequences_have_a_beginning_and_an_end() {
    let mut sequence = [0; 32];
    sequence[8..16].copy_from_slice(&0x1000_u64.to_ne_bytes());
    sequence[16..24].copy_from_slice(&0x10_u64.to_ne_bytes());
    let within = [0xfff, 0x1000, 0x100f, 0x1010].map(|address| is_within(&sequence, address));
    assert_eq!(within, [false, true, true, false]);
}
