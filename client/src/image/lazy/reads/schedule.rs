//! Which chunk is read next. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::super::super::chain::ChunkId;

/// Time until a read is repeated that failed for the first time. It doubles each time.
const MIN_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Why a chunk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Priority {
    /// For the stream.
    Stream,
    /// A thread waits for it.
    Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobState {
    /// In the queue of its priority.
    Queued,
    /// With the priority that it had.
    Reading(Priority),
    /// Queued again later.
    Delayed,
    /// Read, or impossible to read, and not taken yet.
    Arrived,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    priority: Priority,
    state: JobState,
    /// Reads that failed.
    failures: u32,
}

/// Chunks that are wanted. Each is read once, for all who want it.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Most chunks that are read for the stream at the same time.
    max_stream_reads: usize,
    jobs: BTreeMap<ChunkId, Job>,
    faults: VecDeque<ChunkId>,
    stream: VecDeque<ChunkId>,
    /// With the time at which each is queued again.
    delayed: BTreeSet<(Instant, ChunkId)>,
    /// Reads in progress.
    stream_reads: usize,
    fault_reads: usize,
}

impl Schedule {
    pub(super) fn new(max_stream_reads: usize) -> Self {
        let (faults, stream) = (VecDeque::new(), VecDeque::new());
        let (jobs, delayed) = (BTreeMap::new(), BTreeSet::new());
        Self { max_stream_reads, jobs, faults, stream, delayed, stream_reads: 0, fault_reads: 0 }
    }

    pub(super) fn request(&mut self, chunk: ChunkId, priority: Priority) {
        let new = Job { priority, state: JobState::Queued, failures: 0 };
        let job = self.jobs.get(&chunk).copied();
        if job.is_some_and(|job| job.priority >= priority) {
            return;
        }
        self.jobs.insert(chunk, Job { priority, ..job.unwrap_or(new) });
        match job.map(|job| job.state) {
            None => self.queue(priority).push_back(chunk),
            Some(JobState::Queued) => {
                self.stream.retain(|queued| *queued != chunk);
                self.queue(priority).push_back(chunk);
            }
            Some(JobState::Reading(_) | JobState::Delayed | JobState::Arrived) => {}
        }
    }

    const fn queue(&mut self, priority: Priority) -> &mut VecDeque<ChunkId> {
        match priority {
            Priority::Fault => &mut self.faults,
            Priority::Stream => &mut self.stream,
        }
    }

    /// True if a further chunk can be read now.
    pub(super) fn has_next(&self) -> bool {
        // Page faults need the processors.
        let max_stream_reads = if self.fault_reads > 0 { 1 } else { self.max_stream_reads };
        !self.faults.is_empty() || self.stream_reads < max_stream_reads && !self.stream.is_empty()
    }

    /// The chunk that is to be read next, if any, and why. [`Self::finish`] follows.
    pub(super) fn take(&mut self) -> Option<(ChunkId, Priority)> {
        if !self.has_next() {
            return None;
        }
        let chunk = self.faults.pop_front().or_else(|| self.stream.pop_front())?;
        let job = self.jobs.get_mut(&chunk)?;
        let priority = job.priority;
        job.state = JobState::Reading(priority);
        *self.reads_of(priority) += 1;
        Some((chunk, priority))
    }

    /// The read of a chunk has ended. Until [`Self::forget`], it is not read again: who wants it gets this result.
    pub(super) fn finish(&mut self, chunk: ChunkId) {
        let job = self.jobs.get_mut(&chunk);
        let state = job.map(|job| std::mem::replace(&mut job.state, JobState::Arrived));
        if let Some(JobState::Reading(priority)) = state {
            *self.reads_of(priority) -= 1;
        }
    }

    /// The result was taken, if there is one.
    pub(super) fn forget(&mut self, chunk: ChunkId) {
        if self.jobs.get(&chunk).is_some_and(|job| job.state == JobState::Arrived) {
            self.jobs.remove(&chunk);
        }
    }

    /// The read of a chunk failed, and is repeated later.
    pub(super) fn delay(&mut self, chunk: ChunkId, now: Instant) {
        let Some(job) = self.jobs.get_mut(&chunk) else { return };
        let state = std::mem::replace(&mut job.state, JobState::Delayed);
        // Not above the maximum for any number of failures.
        let delay = MIN_DELAY.saturating_mul(1 << job.failures.min(16)).min(MAX_DELAY);
        job.failures = job.failures.saturating_add(1);
        if let JobState::Reading(priority) = state {
            *self.reads_of(priority) -= 1;
        }
        self.delayed.insert((now + delay, chunk));
    }

    /// Queues the chunks again whose time has come.
    pub(super) fn wake(&mut self, now: Instant) {
        while let Some((due, chunk)) = self.delayed.first().copied().filter(|(due, _)| *due <= now) {
            self.delayed.remove(&(due, chunk));
            if let Some(job) = self.jobs.get_mut(&chunk) {
                job.state = JobState::Queued;
                let priority = job.priority;
                self.queue(priority).push_back(chunk);
            }
        }
    }

    /// When [`Self::wake`] has an effect.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.delayed.first().map(|(due, _)| *due)
    }

    const fn reads_of(&mut self, priority: Priority) -> &mut usize {
        match priority {
            Priority::Fault => &mut self.fault_reads,
            Priority::Stream => &mut self.stream_reads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(first_page: u64) -> ChunkId {
        ChunkId { level: 0, first_page }
    }

    fn taken(schedule: &mut Schedule) -> Vec<u64> {
        std::iter::from_fn(|| schedule.take()).map(|(chunk, _)| chunk.first_page).collect()
    }

    #[test]
    fn chunks_of_faults_come_first_and_each_is_read_once() {
        let mut schedule = Schedule::new(4);
        for number in 0..10 {
            schedule.request(chunk(number), Priority::Stream);
            schedule.request(chunk(number), Priority::Stream);
        }
        assert_eq!(schedule.take(), Some((chunk(0), Priority::Stream)));
        schedule.request(chunk(7), Priority::Fault);
        schedule.request(chunk(50), Priority::Fault);
        schedule.request(chunk(7), Priority::Fault);
        // It is being read.
        schedule.request(chunk(0), Priority::Fault);
        schedule.request(chunk(50), Priority::Stream);
        assert_eq!(taken(&mut schedule), [7, 50]);
        schedule.request(chunk(51), Priority::Fault);
        assert_eq!(schedule.take(), Some((chunk(51), Priority::Fault)));
        [7, 50, 51].into_iter().for_each(|number| schedule.finish(chunk(number)));
        assert_eq!(taken(&mut schedule), [1, 2, 3]);
        schedule.finish(chunk(0));
        schedule.finish(chunk(2));
        assert_eq!(taken(&mut schedule), [4, 5]);
        schedule.request(chunk(0), Priority::Fault);
        assert!(taken(&mut schedule).is_empty(), "its result waits");
        schedule.forget(chunk(0));
        schedule.forget(chunk(1));
        // Wanted again after it was read; the other one is being read.
        schedule.request(chunk(1), Priority::Fault);
        schedule.request(chunk(0), Priority::Fault);
        assert_eq!(taken(&mut schedule), [0]);
    }

    #[test]
    fn stream_goes_on_by_one_read_while_reads_of_faults_are_in_progress() {
        let mut schedule = Schedule::new(2);
        schedule.request(chunk(90), Priority::Fault);
        (0..5).for_each(|number| schedule.request(chunk(number), Priority::Stream));
        assert_eq!(taken(&mut schedule), [90, 0]);
        schedule.finish(chunk(0));
        assert_eq!(taken(&mut schedule), [1]);
        schedule.finish(chunk(90));
        assert_eq!(taken(&mut schedule), [2]);
    }

    #[test]
    fn failed_reads_are_repeated_later_and_later() {
        let mut schedule = Schedule::new(1);
        let mut now = Instant::now();
        schedule.request(chunk(1), Priority::Stream);
        for millis in [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000] {
            assert_eq!(taken(&mut schedule), [1]);
            schedule.delay(chunk(1), now);
            schedule.wake(now + Duration::from_millis(millis - 1));
            // It is wanted by others meanwhile.
            schedule.request(chunk(1), Priority::Stream);
            assert!(taken(&mut schedule).is_empty());
            now += Duration::from_millis(millis);
            assert_eq!(schedule.next_due(), Some(now));
            schedule.wake(now);
            assert_eq!(schedule.next_due(), None);
        }
        assert_eq!(taken(&mut schedule), [1]);
        schedule.finish(chunk(1));
        schedule.forget(chunk(1));
        schedule.request(chunk(1), Priority::Stream);
        assert_eq!(taken(&mut schedule), [1]);
    }

    #[test]
    fn delayed_reads_leave_their_threads_to_others() {
        let mut schedule = Schedule::new(1);
        let now = Instant::now();
        (0..3).for_each(|number| schedule.request(chunk(number), Priority::Stream));
        for number in 0..3 {
            assert_eq!(taken(&mut schedule), [number]);
            schedule.delay(chunk(number), now);
        }
        // A thread waits for it now.
        schedule.request(chunk(2), Priority::Fault);
        schedule.request(chunk(9), Priority::Stream);
        schedule.wake(now + MIN_DELAY);
        assert_eq!(taken(&mut schedule), [2, 9]);
        schedule.finish(chunk(9));
        assert_eq!(taken(&mut schedule), [0]);
    }
}
