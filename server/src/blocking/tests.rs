use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

/// Longer than any call of these tests takes.
const LONG: Duration = Duration::from_secs(60);

fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: Vec::new(), admin: uid == 0 }
}

fn file(id: u64) -> Option<FileId> {
    FileId::new(id)
}

/// A call that works on a file.
fn call(turn: Option<FileId>) -> Call {
    Call { turn: turn.map(FileUse::Generations), ..Call::new("test") }
}

/// Two threads for each user.
fn calls() -> Arc<BlockingCalls> {
    Arc::new(BlockingCalls::new(&Quotas::new(16), 601, 2))
}

/// Begins a call that does not return until the sender is dropped. When this function returns, the call waits or runs.
async fn stuck(
    calls: &Arc<BlockingCalls>,
    uid: u32,
    file: Option<FileId>,
) -> (mpsc::Sender<()>, JoinHandle<bool>) {
    let (calls, (release, released)) = (Arc::clone(calls), mpsc::channel());
    let caller = user(uid);
    let work = move || released.recv();
    let (polled, is_polled) = oneshot::channel();
    let call = tokio::spawn(async move {
        // No other task of this thread runs before the call waits.
        polled.send(()).unwrap();
        calls.run(&caller, call(file), work).await.is_ok()
    });
    is_polled.await.unwrap();
    (release, call)
}

/// The result of a call that returns at once.
async fn ran(calls: &BlockingCalls, uid: u32, file: Option<FileId>) -> Result<i32, Code> {
    let caller = user(uid);
    let done = timeout(LONG, calls.run(&caller, call(file), || 5)).await.expect("the call waits");
    done.map_err(|error| error.code())
}

/// Ends a file with work that does not return until the sender is dropped.
fn stuck_end(calls: &Arc<BlockingCalls>, owner: u32, id: u64) -> (mpsc::Sender<()>, JoinHandle<bool>) {
    let (calls, (release, released)) = (Arc::clone(calls), mpsc::channel::<()>());
    let work = move || released.recv();
    let ends = call(file(id));
    (release, tokio::spawn(async move { calls.end(owner, ends, work).await.is_ok() }))
}

/// The users of scans that wait, in the order in which they begin.
#[tokio::test]
async fn scans_of_a_file_take_turns_among_its_users() {
    let calls = calls();
    let id = FileId::new(1).unwrap();
    let first = calls.begin_scan(&user(1), id).unwrap().turn().await;
    let (began, mut order) = tokio::sync::mpsc::unbounded_channel();
    for uid in [1, 1, 1, 2, 0, 2] {
        let (scan, began) = (calls.begin_scan(&user(uid), id).unwrap(), began.clone());
        tokio::spawn(async move {
            let _turn = scan.turn().await;
            began.send(uid).unwrap();
        });
        // The request waits.
        tokio::task::yield_now().await;
    }
    // The generations of the file, and scans of others, are not in use.
    assert_eq!(ran(&calls, 2, file(1)).await, Ok(5));
    drop(calls.begin_scan(&user(2), FileId::new(2).unwrap()).unwrap().turn().await);
    drop(first);
    let mut users = Vec::new();
    for _ in 0..6 {
        users.push(timeout(LONG, order.recv()).await.unwrap().unwrap());
    }
    assert_eq!(users, [2, 0, 1, 2, 1, 1]);
    assert_idle(&calls);
}

fn assert_idle(calls: &BlockingCalls) {
    let turns = calls.schedule.lock();
    assert!(turns.is_idle(), "{turns:?}");
}

#[tokio::test]
async fn threads_of_scans_count_for_their_user() {
    let calls = calls();
    let next = AtomicU64::new(1);
    // Each of another file.
    let thread = |uid| {
        let id = FileId::new(next.fetch_add(1, Ordering::Relaxed)).unwrap();
        calls.begin_scan(&user(uid), id).unwrap().turn()
    };
    let scanning = [thread(1).await, thread(1).await];
    let third = thread(1);
    tokio::pin!(third);
    let wait = Duration::from_millis(10);
    assert!(timeout(wait, &mut third).await.is_err());
    // Calls of the user wait as well; those of others do not.
    assert!(timeout(wait, calls.run(&user(1), call(None), || ())).await.is_err());
    assert_eq!((ran(&calls, 2, None).await, ran(&calls, 0, None).await), (Ok(5), Ok(5)));
    drop((timeout(LONG, thread(2)).await.unwrap(), timeout(LONG, thread(0)).await.unwrap()));
    drop(scanning);
    drop(timeout(LONG, third).await.unwrap());
    // A request that gets no answer, or needs no scan, keeps no thread.
    drop((thread(1), thread(1), thread(1)));
    assert_eq!(ran(&calls, 1, None).await, Ok(5));
    assert_idle(&calls);
}

#[tokio::test]
async fn call_that_does_not_return_delays_no_other_user_and_no_other_file() {
    let calls = calls();
    let (release, first) = stuck(&calls, 1, file(1)).await;
    let mut waiting = Vec::new();
    for _ in 0..599 {
        waiting.push(stuck(&calls, 1, file(1)).await);
    }
    for (uid, file) in [(1, file(2)), (1, None), (2, file(2)), (2, None), (0, file(2))] {
        assert_eq!(ran(&calls, uid, file).await, Ok(5));
    }
    waiting.push(stuck(&calls, 1, file(1)).await);
    assert_eq!(ran(&calls, 1, None).await, Err(Code::ResourceExhausted));
    drop(release);
    assert!(first.await.unwrap());
    for (release, call) in waiting {
        drop(release);
        assert!(call.await.unwrap());
    }
    assert_eq!(ran(&calls, 1, file(1)).await, Ok(5));
    assert_idle(&calls);
}

#[tokio::test]
async fn calls_of_one_user_have_a_bounded_number_of_threads() {
    let calls = calls();
    let running = [stuck(&calls, 1, None).await, stuck(&calls, 1, None).await];
    let caller = user(1);
    let mut third = Box::pin(calls.run(&caller, call(None), || 5));
    assert!(timeout(Duration::from_millis(50), &mut third).await.is_err());
    drop(running);
    assert_eq!(timeout(LONG, third).await.unwrap().unwrap(), 5);
}

/// Their threads are in calls on files of their own.
#[tokio::test]
async fn user_without_a_free_thread_holds_no_file() {
    let calls = calls();
    let running = [stuck(&calls, 1, None).await, stuck(&calls, 1, None).await];
    let (release, waiting) = stuck(&calls, 1, file(1)).await;
    drop(release);
    assert_eq!(ran(&calls, 2, file(1)).await, Ok(5));
    drop(running);
    assert!(timeout(LONG, waiting).await.unwrap().unwrap());
}

#[tokio::test]
async fn all_users_but_administrators_share_a_bounded_number_of_threads() {
    let calls = calls();
    let mut running = Vec::new();
    for uid in 0..128 {
        running.push(stuck(&calls, 1000 + uid, None).await);
        running.push(stuck(&calls, 1000 + uid, None).await);
    }
    let caller = user(1);
    let mut waiting = Box::pin(calls.run(&caller, call(None), || 5));
    assert!(timeout(Duration::from_millis(50), &mut waiting).await.is_err());
    assert_eq!(ran(&calls, 0, None).await, Ok(5));
    running.pop();
    assert_eq!(timeout(LONG, waiting).await.unwrap().unwrap(), 5);
}

/// Calls that wait for different things start one another.
#[tokio::test(flavor = "multi_thread")]
async fn all_calls_of_a_burst_are_done() {
    let calls = calls();
    let burst: Vec<_> = (0..500_u64)
        .map(|nth| {
            let calls = Arc::clone(&calls);
            let caller = user(u32::try_from(nth % 5).unwrap());
            let work = move || std::thread::sleep(Duration::from_micros(nth % 7 * 10));
            tokio::spawn(async move { calls.run(&caller, call(file(nth % 4)), work).await.is_ok() })
        })
        .collect();
    for call in burst {
        assert!(timeout(LONG, call).await.expect("a call waits for ever").unwrap());
    }
    assert_idle(&calls);
}

#[tokio::test]
async fn canceled_call_that_waits_is_not_done() {
    let calls = calls();
    let (release, first) = stuck(&calls, 1, file(1)).await;
    let (done, was_done) = mpsc::channel();
    let caller = user(2);
    let canceled = calls.run(&caller, call(file(1)), move || done.send(()));
    assert!(timeout(Duration::from_millis(10), canceled).await.is_err());
    drop(release);
    assert!(first.await.unwrap());
    assert_eq!(ran(&calls, 2, file(1)).await, Ok(5));
    assert_eq!(was_done.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    assert_idle(&calls);
}

#[tokio::test]
async fn panic_gives_back_what_the_call_had() {
    let calls = calls();
    let caller = user(1);
    for _ in 0..5 {
        let panicked = calls.run(&caller, call(file(1)), || panic!("on purpose"));
        let panicked = timeout(LONG, panicked).await.unwrap();
        assert_eq!(panicked.map(drop).map_err(|error| error.code()), Err(Code::Internal));
    }
    assert_eq!(ran(&calls, 1, file(1)).await, Ok(5));
    assert_idle(&calls);
}

/// The ends of two owners block all threads that they may have; one of the owners is root.
#[tokio::test(flavor = "multi_thread")]
async fn ends_of_one_owner_delay_no_end_of_another() {
    const MAX_DELAY: Duration = Duration::from_secs(1);
    let calls = calls();
    let blocked: Vec<_> = (0..60).map(|nth| stuck_end(&calls, u32::from(nth % 2 == 0), 1 + nth)).collect();
    let is_blocked = || calls.schedule.lock().running_ends() == 2 * MAX_ENDS_PER_OWNER;
    timeout(LONG, async {
        while !is_blocked() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    for nth in 0..20 {
        let ended = timeout(MAX_DELAY, calls.end(2, call(file(100 + nth)), || ()));
        ended.await.expect("the end waits for another owner").unwrap();
    }
    // Nor do calls wait for them.
    assert_eq!((ran(&calls, 1, None).await, ran(&calls, 0, file(100)).await), (Ok(5), Ok(5)));
    // Any of them may have a thread.
    let (released, ended): (Vec<_>, Vec<_>) = blocked.into_iter().unzip();
    drop(released);
    for ended in ended {
        assert!(timeout(LONG, ended).await.unwrap().unwrap());
    }
    assert_idle(&calls);
}

/// Ends of files with calls that do not return.
#[tokio::test]
async fn end_that_waits_for_calls_about_its_file_has_no_thread() {
    let calls = calls();
    let running = [stuck(&calls, 1, file(1)).await, stuck(&calls, 1, file(2)).await];
    let waiting = [stuck(&calls, 2, file(3)).await, stuck(&calls, 1, file(3)).await];
    let ends: Vec<_> = [1, 2, 3].map(|id| stuck_end(&calls, 1, id)).into();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(calls.schedule.lock().running_ends(), 0);
    for id in 10..10 + 2 * u64::from(MAX_ENDS_PER_OWNER) {
        timeout(LONG, calls.end(1, call(file(id)), || ())).await.expect("no thread is left").unwrap();
    }
    for (release, call) in running.into_iter().chain(waiting).chain(ends) {
        drop(release);
        assert!(timeout(LONG, call).await.unwrap().unwrap());
    }
    assert_idle(&calls);
}
