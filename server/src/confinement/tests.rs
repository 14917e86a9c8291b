use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::channel;

use fdmap_sys::Errno;
use fdmap_sys::testing::calls;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::*;

const CHILD_VARIABLE: &str = "FDMAP_CONFINED_CHILD";
/// The action of a child that installs no filter of system calls, which would kill it at the first open.
const OPEN_WITHOUT_FILTER: &str = "open without a filter";

const CALLS: &[CallRule] = &[
    call_with(libc::SYS_fcntl, 1, libc::F_GETFL.cast_unsigned()),
    call_with(libc::SYS_fcntl, 1, libc::F_GETFD.cast_unsigned()),
];

fn signals_parent(x32: bool) -> bool {
    calls::signal_first_thread(nix::unistd::getppid().as_raw(), x32).is_ok()
}

fn opens(flags: OFlag) -> bool {
    nix::fcntl::open("/dev/null", flags, nix::sys::stat::Mode::empty()).is_ok()
}

/// A call of a child that only reads files. Returns true if it succeeds.
type ReaderCall = (&'static str, fn() -> bool);

/// Sends a signal to the process itself.
const ABORT: &str = "abort";

const READER_CALLS: &[ReaderCall] = &[
    ("read a file", || std::fs::read_to_string("/proc/self/status").is_ok()),
    ("list a folder", || std::fs::read_dir("/proc/self/fd").is_ok_and(|folder| folder.count() > 0)),
    ("start a thread", || std::thread::spawn(|| ()).join().is_ok()),
    ("open to write", || opens(OFlag::O_WRONLY)),
    ("open to read and write", || opens(OFlag::O_RDWR)),
    ("create", || opens(OFlag::O_CREAT)),
    ("truncate", || opens(OFlag::O_TRUNC)),
    ("delete", || std::fs::remove_file("/proc/none").is_ok()),
    ("rename", || std::fs::rename("/proc/none", "/proc/another").is_ok()),
    ("mount", || nix::mount::umount("/proc/none").is_ok()),
    ("signal the parent", || nix::sys::signal::kill(nix::unistd::getppid(), None).is_ok()),
    ("signal a thread of the parent", || signals_parent(false)),
    #[cfg(target_arch = "x86_64")]
    ("signal it by an x32 call", || signals_parent(true)),
    ("send signals of a descriptor", || calls::set_signal_owner(std::io::stdin().as_fd(), 1).is_ok()),
    (ABORT, || std::process::abort()),
];
const PERMITTED_READER_CALLS: usize = 3;

/// A child confines itself, and then does this. Its exit code is 0 if the result is the expected one.
fn act(action: &str) -> bool {
    let refused = |result: Result<(), Errno>| result == Err(Errno::ENOSYS);
    let stdin = std::io::stdin();
    match action {
        "work" => {
            let (sender, numbers) = channel();
            let sum =
                || numbers.into_iter().map(|number: u64| vec![number; 100_000].iter().sum::<u64>()).sum();
            (0..10).for_each(|number| sender.send(number).unwrap());
            drop(sender);
            let sum: u64 = sum();
            let _ = writeln!(std::io::stderr(), "written");
            std::thread::sleep(std::time::Duration::from_millis(1));
            fcntl(stdin.as_fd(), FcntlArg::F_GETFL).is_ok()
                && fcntl(stdin.as_fd(), FcntlArg::F_GETFD).is_ok()
                && sum == 4_500_000
        }
        "F_SETFL" => refused(fcntl(stdin.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map(drop)),
        "chdir" => refused(nix::unistd::chdir("/")),
        "thread" => std::thread::Builder::new().spawn(|| ()).is_err(),
        "other thread" | "socket" => {
            socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).is_err()
        }
        "open" => std::fs::File::open("/dev/null").is_err(),
        "exec" => nix::unistd::execv(c"/bin/true", &[c"true"]).is_err(),
        _ => false,
    }
}

/// No test unless the variable is set: the process whose end is looked at.
#[test]
fn confined_child() {
    let Ok(action) = std::env::var(CHILD_VARIABLE) else { return };
    if let Some(call) = READER_CALLS.iter().find(|(name, _)| *name == action) {
        enter_file_reader(Capabilities::empty()).unwrap();
        std::process::exit(i32::from(!call.1()));
    }
    enter().unwrap();
    if action == OPEN_WITHOUT_FILTER {
        std::process::exit(open_files());
    }
    let (start, started) = channel::<String>();
    let (report, reported) = channel();
    // A thread that runs before the filter is installed, as in a helper.
    let (start_report, thread_runs) = channel();
    std::thread::spawn(move || {
        start_report.send(()).unwrap();
        started.into_iter().for_each(|action| report.send(act(&action)).unwrap());
    });
    thread_runs.recv().unwrap();
    restrict(CALLS).unwrap();
    let done = if action == "other thread" {
        start.send(action).unwrap();
        reported.recv().unwrap()
    } else {
        act(&action)
    };
    std::process::exit(i32::from(!done));
}

/// Opens a folder and a file, each in this thread and in one that it starts. The result is 0 if each open is refused by EACCES, 1 if
/// each succeeds, else 2.
fn open_files() -> i32 {
    let open = |path: &str| match std::fs::File::open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.raw_os_error()),
    };
    let paths = ["/", "/dev/null"];
    let here = paths.map(open);
    let there = std::thread::spawn(move || paths.map(open)).join().unwrap();
    let all = [here, there].concat();
    let is_all = |expected| all.iter().all(|result| *result == expected);
    if is_all(Err(Some(libc::EACCES))) {
        0
    } else if is_all(Ok(())) {
        1
    } else {
        2
    }
}

fn confined(action: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "confinement::tests::confined_child", "--nocapture"])
        .env(CHILD_VARIABLE, action)
        .status()
        .unwrap()
}

#[test]
fn confined_process_works_and_cannot_make_unlisted_calls() {
    if let Err(reason) = try_seccomp() {
        eprintln!("not run: {reason}");
        return;
    }
    for action in ["work", "F_SETFL", "chdir", "thread"] {
        assert_eq!(confined(action).code(), Some(0), "{action}");
    }
}

#[test]
fn confined_process_that_reaches_out_is_killed() {
    if let Err(reason) = try_seccomp() {
        eprintln!("not run: {reason}");
        return;
    }
    for action in ["socket", "other thread", "open", "exec"] {
        assert_eq!(confined(action).signal(), Some(Signal::SIGSYS as i32), "{action}");
    }
}

#[test]
fn reader_of_files_changes_none() {
    if let Err(reason) = try_seccomp() {
        eprintln!("not run: {reason}");
        return;
    }
    let (permitted, deadly) = READER_CALLS.split_at(PERMITTED_READER_CALLS);
    for (call, _) in permitted {
        assert_eq!(confined(call).code(), Some(0), "{call}");
    }
    for (call, _) in deadly {
        let signal = if *call == ABORT { Signal::SIGABRT } else { Signal::SIGSYS };
        assert_eq!(confined(call).signal(), Some(signal as i32), "{call}");
    }
}

/// seccomp hides Landlock, which refuses later: so this child has no filter.
#[test]
fn helper_without_a_filter_of_calls_opens_no_file() {
    let code = confined(OPEN_WITHOUT_FILTER).code();
    match try_landlock() {
        Ok(()) => assert_eq!(code, Some(0), "Landlock refuses no open"),
        Err(reason) => {
            // `fdmap doctor` reports this as the detail of `helper-landlock`.
            let reasons = ["Landlock is not in the kernel parameter lsm=", "this kernel has no Landlock"];
            assert!(reasons.contains(&reason.as_str()), "{reason}");
            assert_eq!(code, Some(1), "{reason}");
        }
    }
}

#[test]
fn attempts_leave_the_process_unrestricted() {
    let _ = (try_seccomp(), try_landlock());
    std::fs::File::open("/").unwrap();
    pidfd::open(std::process::id()).unwrap();
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    assert!(!status.contains("Seccomp:\t2"), "{status}");
}
