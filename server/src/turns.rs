//! Which calls run, and which wait. Pure.
//!
//! A call takes all that it needs at once: while it waits, it has no turn on a file and no thread.
//!
//! Among users whose calls wait for a turn on a file, the user served longest ago comes first. So each other user delays a call by one
//! call, however many it makes. A call that continues an earlier one comes before those that begin: what it holds meanwhile is memory.
//!
//! An end looks up only what the calls need that it can let start, so that it takes little time however many wait.

use std::collections::{HashMap, VecDeque};

use fdmap_proto::units::FileId;

/// The thread that a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thread {
    /// One that no limit counts.
    Unlimited,
    User(u32),
    /// One that ends files of this owner, or closes descriptors that it passed.
    End(u32),
}

impl Thread {
    /// Whose limit counts it.
    pub(crate) const fn user(self) -> Option<u32> {
        match self {
            Self::Unlimited => None,
            Self::User(user) | Self::End(user) => Some(user),
        }
    }

    /// True if one limit for all counts both.
    const fn is_of_kind(self, other: Self) -> bool {
        matches!((self, other), (Self::User(_), Self::User(_)) | (Self::End(_), Self::End(_)))
    }
}

/// A use of a file that one call at a time has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FileUse {
    /// Reads or changes its generations.
    Generations(FileId),
    /// Scans its pages.
    Scan(FileId),
}

impl FileUse {
    pub(crate) const fn file(self) -> FileId {
        match self {
            Self::Generations(file) | Self::Scan(file) => file,
        }
    }
}

/// What a call has while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) thread: Thread,
    /// The use of a file for which it takes turns with others.
    pub(crate) turn: Option<FileUse>,
    /// It continues an earlier call.
    pub(crate) continues: bool,
}

/// Threads that users share.
#[derive(Debug)]
pub(crate) struct Threads {
    max_per_user: u32,
    max: u32,
    /// Users without a running call have no entry.
    by_user: HashMap<u32, u32>,
    running: u32,
}

/// The calls that run, and those that wait as `W`.
#[derive(Debug)]
pub(crate) struct Turns<W> {
    users: Threads,
    ends: Threads,
    /// Uses of files that calls have, or wait for.
    files: HashMap<FileUse, FileTurns>,
    /// Calls that were started.
    started: u64,
    /// The number of the last call that waited.
    last: u64,
    /// In the order of their requests, so of their numbers. None of them can run.
    waiting: VecDeque<Waiting<W>>,
}

#[derive(Debug)]
struct Waiting<W> {
    number: u64,
    needs: Needs,
    waiter: W,
}

/// The calls that take turns at a use of a file.
#[derive(Debug, Default)]
struct FileTurns {
    is_in_use: bool,
    /// Calls that wait for it.
    waiting: usize,
    /// For each user, the number of the last call that was started. Administrators are one user. Kept while calls wait.
    last: HashMap<Option<u32>, u64>,
}

impl Threads {
    pub(crate) fn new(max_per_user: u32, max: u32) -> Self {
        Self { max_per_user, max, by_user: HashMap::new(), running: 0 }
    }

    fn of(&self, user: u32) -> u32 {
        self.by_user.get(&user).copied().unwrap_or(0)
    }

    fn has_one_for(&self, user: u32) -> bool {
        self.running < self.max && self.of(user) < self.max_per_user
    }

    fn take(&mut self, user: u32) {
        *self.by_user.entry(user).or_default() += 1;
        self.running += 1;
    }

    /// Returns true if all threads were in use.
    fn give_back(&mut self, user: u32) -> bool {
        let left = self.of(user).saturating_sub(1);
        if left == 0 {
            self.by_user.remove(&user);
        } else {
            self.by_user.insert(user, left);
        }
        self.running -= 1;
        self.running + 1 >= self.max
    }
}

impl<W> Turns<W> {
    pub(crate) fn new(users: Threads, ends: Threads) -> Self {
        Self { users, ends, files: HashMap::new(), started: 0, last: 0, waiting: VecDeque::new() }
    }

    /// Starts a call, and returns `waiter`, or lets it wait, and returns its number.
    pub(crate) fn start(&mut self, needs: Needs, waiter: W) -> Result<W, u64> {
        if self.can_run(needs) {
            self.take(needs);
            return Ok(waiter);
        }
        if let Some(turn) = needs.turn {
            self.files.entry(turn).or_default().waiting += 1;
        }
        self.last += 1;
        self.waiting.push_back(Waiting { number: self.last, needs, waiter });
        Err(self.last)
    }

    /// Ends a call. Returns those that start now.
    pub(crate) fn end(&mut self, ended: Needs) -> Vec<(Needs, W)> {
        if let Some(turns) = ended.turn.and_then(|turn| self.files.get_mut(&turn)) {
            turns.is_in_use = false;
        }
        self.forget_unused(ended.turn);
        let were_all_in_use = match ended.thread {
            Thread::Unlimited => false,
            Thread::User(user) => self.users.give_back(user),
            Thread::End(owner) => self.ends.give_back(owner),
        };
        let awaits = |needs: &Needs| {
            needs.turn.is_some() && needs.turn == ended.turn
                || needs.thread == ended.thread
                || were_all_in_use && needs.thread.is_of_kind(ended.thread)
        };
        std::iter::from_fn(|| self.next(awaits)).collect()
    }

    /// Removes a call that waits. Does nothing if it has started.
    pub(crate) fn cancel(&mut self, number: u64) {
        if let Ok(at) = self.waiting.binary_search_by_key(&number, |waiting| waiting.number) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) -> Option<Waiting<W>> {
        let removed = self.waiting.remove(at)?;
        if let Some(turns) = removed.needs.turn.and_then(|turn| self.files.get_mut(&turn)) {
            turns.waiting -= 1;
        }
        self.forget_unused(removed.needs.turn);
        Some(removed)
    }

    fn forget_unused(&mut self, turn: Option<FileUse>) {
        if let Some(turn) = turn
            && self.files.get(&turn).is_some_and(|turns| !turns.is_in_use && turns.waiting == 0)
        {
            self.files.remove(&turn);
        }
    }

    /// Starts one of the calls that wait and can run, of those that `awaits` chooses: the first one of a user with the fewest threads, but
    /// of calls that take turns one of the user who was served longest ago.
    fn next(&mut self, awaits: impl Fn(&Needs) -> bool) -> Option<(Needs, W)> {
        let first = self.first_by_key(awaits, |needs| (self.rank(needs.thread), !needs.continues))?;
        let at = match self.waiting.get(first)?.needs.turn {
            None => first,
            turn => self.first_by_key(|needs| needs.turn == turn, |needs| self.last_of(*needs))?,
        };
        // Before it is removed: its user was served.
        let needs = self.waiting.get(at)?.needs;
        self.take(needs);
        let Waiting { needs, waiter, .. } = self.remove(at)?;
        Some((needs, waiter))
    }

    /// The index of the first call with the least key, of the chosen ones that can run.
    fn first_by_key<K: Ord>(
        &self,
        is_chosen: impl Fn(&Needs) -> bool,
        key: impl Fn(&Needs) -> K,
    ) -> Option<usize> {
        let calls = self.waiting.iter().enumerate();
        let can_run = calls.filter(|(_, Waiting { needs, .. })| is_chosen(needs) && self.can_run(*needs));
        can_run.min_by_key(|(at, Waiting { needs, .. })| (key(needs), *at)).map(|(at, _)| at)
    }

    /// The number of the last call of the same user that had this turn.
    fn last_of(&self, Needs { thread, turn, .. }: Needs) -> u64 {
        let turns = turn.and_then(|turn| self.files.get(&turn));
        turns.and_then(|turns| turns.last.get(&thread.user())).copied().unwrap_or(0)
    }

    fn can_run(&self, Needs { thread, turn, .. }: Needs) -> bool {
        let has_thread = match thread {
            Thread::Unlimited => true,
            Thread::User(user) => self.users.has_one_for(user),
            Thread::End(owner) => self.ends.has_one_for(owner),
        };
        has_thread && turn.is_none_or(|turn| self.files.get(&turn).is_none_or(|turns| !turns.is_in_use))
    }

    fn rank(&self, thread: Thread) -> u32 {
        match thread {
            Thread::Unlimited => 0,
            Thread::User(user) => self.users.of(user),
            Thread::End(owner) => self.ends.of(owner),
        }
    }

    fn take(&mut self, Needs { thread, turn, .. }: Needs) {
        match thread {
            Thread::Unlimited => {}
            Thread::User(user) => self.users.take(user),
            Thread::End(owner) => self.ends.take(owner),
        }
        self.started += 1;
        if let Some(turn) = turn {
            let turns = self.files.entry(turn).or_default();
            turns.is_in_use = true;
            turns.last.insert(thread.user(), self.started);
        }
    }

    #[cfg(test)]
    pub(crate) const fn running_ends(&self) -> u32 {
        self.ends.running
    }

    /// True if no call runs or waits.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let has_none = |threads: &Threads| threads.by_user.is_empty() && threads.running == 0;
        self.waiting.is_empty() && self.files.is_empty() && has_none(&self.users) && has_none(&self.ends)
    }
}

#[cfg(test)]
mod tests;
