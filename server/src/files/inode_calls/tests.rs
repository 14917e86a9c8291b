use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::{Receiver, channel};

use fdmap_sys::{fd, memfd, ownership, scm};

use super::call::CALL_BYTES;
use super::*;

const USER: u32 = 5;

fn file() -> OwnedFd {
    memfd::create("fdmap-test", None).unwrap()
}

fn mode(file: &OwnedFd) -> u32 {
    fd::stat(file).unwrap().st_mode & 0o777
}

/// Gets the result of a late call.
fn late() -> (WhenLate, Receiver<Result<(), String>>) {
    let (sender, receiver) = channel();
    let late = move |result: Result<(), InodeCallError>| {
        sender.send(result.map_err(|error| error.to_string())).unwrap();
    };
    (Box::new(late), receiver)
}

fn never() -> WhenLate {
    Box::new(|result| panic!("not late: {result:?}"))
}

/// A helper that this test plays.
struct Played(OwnedFd);

impl Played {
    /// The next call is sent to it.
    fn add(calls: &InodeCalls) -> Self {
        let (service, helper) = scm::socket_pair().unwrap();
        let mut state = calls.0.lock();
        let of_user = state.users.entry(USER).or_default();
        of_user.idle.push((HelperProcess::of_socket(service), Instant::now()));
        Self(helper)
    }

    /// The calls that were sent, with their descriptors.
    fn calls(&self) -> Vec<(InodeCall, Vec<OwnedFd>)> {
        let mut calls = Vec::new();
        let mut message = [0; CALL_BYTES];
        while let Ok(Some(packet)) = scm::receive(self.0.as_fd(), &mut message) {
            calls.push((InodeCall::decode(&message).unwrap(), packet.descriptors));
        }
        calls
    }

    fn answer(&self, answer: &Answer) {
        scm::send(self.0.as_fd(), &answer.encode(), &[]).unwrap();
    }
}

const SETTLED: Duration = Duration::from_secs(5);

#[test]
fn helper_makes_calls() {
    let (calls, file) = (InodeCalls::new(Worker::Thread, Duration::from_secs(10)), file());
    calls.resize(USER, file.as_fd(), 8192, never()).unwrap();
    assert_eq!(fd::stat(&file).unwrap().st_size, 8192);
    let mode_before = mode(&file);
    let before = calls.take(USER, file.as_fd(), never()).unwrap();
    assert_eq!((before.parts().2, mode(&file)), (mode_before, 0o600));
    // A take that is kept is not undone by the next call.
    calls.add_seals(USER, file.as_fd(), memfd::SEAL_SHRINK, never()).unwrap();
    assert_eq!((memfd::seals(file.as_fd()), mode(&file)), (Ok(memfd::SEAL_SHRINK), 0o600));
    calls.restore(USER, file.as_fd(), before, never()).unwrap();
    assert_eq!(mode(&file), mode_before);
    let refused = calls.resize(USER, file.as_fd(), 4096, never()).unwrap_err();
    let InodeCallError::Syscall(error) = refused else { panic!("{refused:?}") };
    assert_eq!(error.errno, Errno::EPERM);
    assert!(error.call.starts_with("ftruncate of descriptor"), "{error:?}");
    assert_eq!(calls.0.lock().users[&USER].idle.len(), 1, "one helper made all calls");
}

#[test]
fn calls_of_many_threads_share_few_helpers() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    std::thread::scope(|scope| {
        for _ in 0..4 * MAX_HELPERS {
            scope.spawn(|| calls.resize(USER, file().as_fd(), 4096, never()).unwrap());
        }
    });
    let state = calls.0.lock();
    let of_user = &state.users[&USER];
    assert!((1..=MAX_HELPERS).contains(&of_user.idle.len()) && of_user.busy == 0);
}

#[test]
fn late_call_gets_its_result() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    let helper = Played::add(&calls);
    let (when_late, result) = late();
    let began = Instant::now();
    assert!(matches!(calls.resize(USER, file().as_fd(), 4096, when_late), Err(InodeCallError::Blocked)));
    assert!(began.elapsed() < Duration::from_secs(2));
    // Another helper makes the next call.
    calls.resize(USER, file().as_fd(), 4096, never()).unwrap();
    assert_eq!(calls.0.lock().users[&USER].late.len(), 1);
    helper.answer(&Answer::Failed(SyscallError { call: "ftruncate".to_owned(), errno: Errno::EPERM }));
    assert_eq!(result.recv_timeout(SETTLED), Ok(Err("ftruncate".to_owned())));
    assert!(calls.0.lock().users[&USER].late.is_empty());
}

#[test]
fn late_take_is_undone() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    let helper = Played::add(&calls);
    let (undone, result) = late();
    assert!(matches!(calls.take(USER, file().as_fd(), undone), Err(InodeCallError::Blocked)));
    let sent: Vec<_> = helper.calls().into_iter().map(|(call, files)| (call, files.len())).collect();
    assert_eq!(sent, [(InodeCall::Take, 1), (InodeCall::Undo, 0)]);
    helper.answer(&Answer::Taken(ownership::Ownership::new(1, 1, 0o600)));
    assert!(result.recv_timeout(Duration::from_millis(300)).is_err(), "it is not undone yet");
    helper.answer(&Answer::Done);
    assert_eq!(result.recv_timeout(SETTLED), Ok(Ok(())));
}

/// They count as late until the thread that looks at all helpers has found that.
#[test]
fn restore_is_made_when_all_late_helpers_have_ended() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    let helpers: Vec<_> = (0..MAX_HELPERS)
        .map(|_| {
            let helper = Played::add(&calls);
            calls.resize(USER, file().as_fd(), 1, Box::new(drop)).unwrap_err();
            helper
        })
        .collect();
    let file = file();
    let own = fd::stat(&file).unwrap();
    let before = ownership::Ownership::new(own.st_uid, own.st_gid, 0o640);
    drop(helpers);
    calls.restore(USER, file.as_fd(), before, never()).unwrap();
    assert_eq!(mode(&file), 0o640);
}

#[test]
fn restore_is_appended_while_all_helpers_are_late() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    let helpers: Vec<_> = (0..MAX_HELPERS)
        .map(|_| {
            let helper = Played::add(&calls);
            let (when_late, result) = late();
            calls.resize(USER, file().as_fd(), 1, when_late).unwrap_err();
            assert_eq!(helper.calls().len(), 1);
            (helper, result)
        })
        .collect();
    let refused = calls.resize(USER, file().as_fd(), 1, never()).unwrap_err();
    assert!(matches!(refused, InodeCallError::TooManyBlocked(USER)), "{refused:?}");
    calls.resize(USER + 1, file().as_fd(), 1, never()).unwrap();
    let before = ownership::Ownership::new(1, 2, 0o640);
    let (when_late, restored) = late();
    let appended = calls.restore(USER, file().as_fd(), before, when_late).unwrap_err();
    assert!(matches!(appended, InodeCallError::Blocked), "{appended:?}");
    let sent: Vec<_> = helpers.iter().map(|(helper, _)| helper.calls()).collect();
    let at = sent.iter().position(|calls| !calls.is_empty()).unwrap();
    assert!(matches!(sent[at][..], [(InodeCall::Restore(_), ref files)] if files.len() == 1));
    let (helper, resized) = &helpers[at];
    helper.answer(&Answer::Done);
    assert_eq!(resized.recv_timeout(SETTLED), Ok(Ok(())));
    helper.answer(&Answer::Done);
    assert_eq!(restored.recv_timeout(SETTLED), Ok(Ok(())));
    // The others end without an answer.
    for (at_other, (helper, result)) in helpers.into_iter().enumerate() {
        drop(helper);
        if at_other != at {
            let ended = InodeCallError::Ended.to_string();
            assert_eq!(result.recv_timeout(SETTLED), Ok(Err(ended)));
        }
    }
}

#[test]
fn helper_that_the_service_leaves_makes_queued_calls_and_undoes_a_take() {
    let (taken, restored) = (file(), file());
    let before = mode(&taken);
    let own = fd::stat(&restored).unwrap();
    for (at, ends_first) in [true, false].into_iter().enumerate() {
        let (service, theirs) = scm::socket_pair().unwrap();
        let send = |call: InodeCall, file: &OwnedFd| {
            scm::send(service.as_fd(), &call.encode(), &[file.as_fd()]).unwrap();
        };
        let wanted = [0o640, 0o604][at];
        send(InodeCall::Restore(ownership::Ownership::new(own.st_uid, own.st_gid, wanted)), &restored);
        send(InodeCall::Take, &taken);
        let run = move || helper::run(theirs.as_fd());
        if ends_first {
            drop(service);
            run();
        } else {
            let runs = std::thread::spawn(run);
            let started = Instant::now();
            while mode(&taken) == before {
                assert!(started.elapsed() < SETTLED);
            }
            // With answers that it has not read.
            drop(service);
            runs.join().unwrap();
        }
        assert_eq!((mode(&taken), mode(&restored)), (before, wanted), "{ends_first}");
    }
}

#[test]
fn late_helpers_of_all_users_but_root_are_limited() {
    let calls = InodeCalls::new(Worker::Thread, Duration::from_secs(10));
    let others: Vec<_> = (0..MAX_LATE_OF_USERS)
        .map(|number| {
            let (service, helper) = scm::socket_pair().unwrap();
            let late = LateHelper::new(HelperProcess::of_socket(service), vec![None]);
            let user = 100 + u32::try_from(number).unwrap();
            calls.0.change(user, |of_user, _| of_user.late.push(late));
            helper
        })
        .collect();
    let file = file();
    let refused = calls.resize(USER, file.as_fd(), 1, never()).unwrap_err();
    assert!(matches!(refused, InodeCallError::TooManyOfAll), "{refused:?}");
    calls.resize(0, file.as_fd(), 1, never()).unwrap();
    let own = fd::stat(&file).unwrap();
    let before = ownership::Ownership::new(own.st_uid, own.st_gid, 0o640);
    calls.restore(USER, file.as_fd(), before, never()).unwrap();
    drop(others);
    let began = Instant::now();
    while calls.resize(USER, file.as_fd(), 1, never()).is_err() {
        assert!(began.elapsed() < SETTLED, "the late helpers have ended");
        std::thread::sleep(late::INTERVAL);
    }
}
