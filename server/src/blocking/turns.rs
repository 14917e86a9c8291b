//! Which calls run, and which wait. Pure.
//!
//! A call takes all that it needs at once: while it waits, it has no file and no thread.
//!
//! Of the users whose calls wait for a file, the one comes first that was served longest ago. So each other user delays a call by one
//! call, however many it makes.

use std::collections::{HashMap, VecDeque};

use fdmap_proto::units::FileId;

/// The thread that a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thread {
    /// One that no limit counts.
    Unlimited,
    User(u32),
    /// One that ends files of this owner.
    End(u32),
}

impl Thread {
    /// Whose limit counts it.
    pub(super) const fn user(self) -> Option<u32> {
        match self {
            Self::Unlimited => None,
            Self::User(user) | Self::End(user) => Some(user),
        }
    }
}

/// What a call has while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) thread: Thread,
    /// The file whose generations the call works on.
    pub(super) file: Option<FileId>,
}

/// Threads that users share.
#[derive(Debug)]
pub(super) struct Threads {
    max_per_user: u32,
    max: u32,
    /// Users without a running call have no entry.
    by_user: HashMap<u32, u32>,
    running: u32,
}

/// The calls that run, and those that wait as `W`.
#[derive(Debug)]
pub(super) struct Turns<W> {
    users: Threads,
    ends: Threads,
    /// The files that calls work on, or wait for.
    files: HashMap<FileId, FileTurns>,
    /// Calls that were started.
    started: u64,
    /// In the order of their requests. None of them can run, except between [`Self::end`] and the last [`Self::next`].
    waiting: VecDeque<(Needs, W)>,
}

/// The calls that work on a file.
#[derive(Debug, Default)]
struct FileTurns {
    is_in_use: bool,
    /// For each user, the number of the last call that was started. Administrators are one user. Kept while calls wait for the file.
    last: HashMap<Option<u32>, u64>,
}

impl Threads {
    pub(super) fn new(max_per_user: u32, max: u32) -> Self {
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

    fn give_back(&mut self, user: u32) {
        let left = self.of(user).saturating_sub(1);
        if left == 0 {
            self.by_user.remove(&user);
        } else {
            self.by_user.insert(user, left);
        }
        self.running -= 1;
    }
}

impl<W> Turns<W> {
    pub(super) fn new(users: Threads, ends: Threads) -> Self {
        Self { users, ends, files: HashMap::new(), started: 0, waiting: VecDeque::new() }
    }

    /// Starts a call, and returns `waiter`, or lets it wait.
    pub(super) fn start(&mut self, needs: Needs, waiter: W) -> Option<W> {
        if self.can_run(needs) {
            self.take(needs);
            return Some(waiter);
        }
        self.waiting.push_back((needs, waiter));
        None
    }

    /// Ends a call. [`Self::next`] has to follow until it returns `None`.
    pub(super) fn end(&mut self, Needs { thread, file }: Needs) {
        if let Some(file) = file {
            if self.waiting.iter().any(|(needs, _)| needs.file == Some(file)) {
                self.files.entry(file).or_default().is_in_use = false;
            } else {
                self.files.remove(&file);
            }
        }
        match thread {
            Thread::Unlimited => {}
            Thread::User(user) => self.users.give_back(user),
            Thread::End(owner) => self.ends.give_back(owner),
        }
    }

    /// Starts one of the calls that wait and can run: the first one, but of ends one of an owner with the fewest threads, and of calls
    /// that work on the same file one of the user who was served longest ago.
    pub(super) fn next(&mut self) -> Option<(Needs, W)> {
        let first = self.first_by_key(|_| true, |needs| self.rank(needs.thread))?;
        let at = match self.waiting.get(first)?.0.file {
            None => first,
            file => self.first_by_key(|needs| needs.file == file, |needs| self.last_of(*needs))?,
        };
        let (needs, waiter) = self.waiting.remove(at)?;
        self.take(needs);
        Some((needs, waiter))
    }

    /// The index of the first call with the least key, of the chosen ones that can run.
    fn first_by_key<K: Ord>(
        &self,
        is_chosen: impl Fn(&Needs) -> bool,
        key: impl Fn(&Needs) -> K,
    ) -> Option<usize> {
        let calls = self.waiting.iter().enumerate();
        let can_run = calls.filter(|(_, (needs, _))| is_chosen(needs) && self.can_run(*needs));
        can_run.min_by_key(|(at, (needs, _))| (key(needs), *at)).map(|(at, _)| at)
    }

    /// The number of the last call of the same user that worked on the same file.
    fn last_of(&self, Needs { thread, file }: Needs) -> u64 {
        let turns = file.and_then(|file| self.files.get(&file));
        turns.and_then(|turns| turns.last.get(&thread.user())).copied().unwrap_or(0)
    }

    /// Forgets calls that wait.
    pub(super) fn forget(&mut self, is_canceled: impl Fn(&W) -> bool) {
        self.waiting.retain(|(_, waiter)| !is_canceled(waiter));
        let waiting = &self.waiting;
        let is_awaited = |file: &FileId| waiting.iter().any(|(needs, _)| needs.file == Some(*file));
        self.files.retain(|file, turns| turns.is_in_use || is_awaited(file));
    }

    fn can_run(&self, Needs { thread, file }: Needs) -> bool {
        let has_thread = match thread {
            Thread::Unlimited => true,
            Thread::User(user) => self.users.has_one_for(user),
            Thread::End(owner) => self.ends.has_one_for(owner),
        };
        has_thread && file.is_none_or(|file| self.files.get(&file).is_none_or(|turns| !turns.is_in_use))
    }

    fn rank(&self, thread: Thread) -> u32 {
        match thread {
            Thread::Unlimited | Thread::User(_) => 0,
            Thread::End(owner) => self.ends.of(owner),
        }
    }

    fn take(&mut self, Needs { thread, file }: Needs) {
        match thread {
            Thread::Unlimited => {}
            Thread::User(user) => self.users.take(user),
            Thread::End(owner) => self.ends.take(owner),
        }
        self.started += 1;
        if let Some(file) = file {
            let turns = self.files.entry(file).or_default();
            turns.is_in_use = true;
            turns.last.insert(thread.user(), self.started);
        }
    }

    #[cfg(test)]
    pub(super) const fn running_ends(&self) -> u32 {
        self.ends.running
    }

    /// True if no call runs or waits.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let has_none = |threads: &Threads| threads.by_user.is_empty() && threads.running == 0;
        self.waiting.is_empty() && self.files.is_empty() && has_none(&self.users) && has_none(&self.ends)
    }
}

#[cfg(test)]
mod tests;
