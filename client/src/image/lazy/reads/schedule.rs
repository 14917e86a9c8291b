//! Which chunk is read next. Pure.

use std::collections::{BTreeMap, VecDeque};

use super::super::super::chain::ChunkId;

/// Why a chunk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Priority {
    /// For the stream.
    Stream,
    /// A thread waits for it.
    Fault,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    priority: Priority,
    /// With this priority; `None`: it is queued.
    reading: Option<Priority>,
}

/// Chunks that are wanted. Each is read once, for all who want it.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Most chunks that are read for the stream at the same time.
    max_stream_reads: usize,
    jobs: BTreeMap<ChunkId, Job>,
    faults: VecDeque<ChunkId>,
    stream: VecDeque<ChunkId>,
    /// Reads in progress.
    stream_reads: usize,
    fault_reads: usize,
}

impl Schedule {
    pub(super) fn new(max_stream_reads: usize) -> Self {
        let (jobs, faults, stream) = (BTreeMap::new(), VecDeque::new(), VecDeque::new());
        Self { max_stream_reads, jobs, faults, stream, stream_reads: 0, fault_reads: 0 }
    }

    pub(super) fn request(&mut self, chunk: ChunkId, priority: Priority) {
        let job = self.jobs.get(&chunk).copied();
        if job.is_some_and(|job| job.priority >= priority) {
            return;
        }
        let reading = job.and_then(|job| job.reading);
        self.jobs.insert(chunk, Job { priority, reading });
        if reading.is_none() {
            // It leaves the queue of the stream if it was there.
            self.stream.retain(|queued| *queued != chunk || job.is_none());
            self.queue(priority).push_back(chunk);
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

    /// The chunk that is to be read next, if any. [`Self::finish`] follows.
    pub(super) fn take(&mut self) -> Option<ChunkId> {
        if !self.has_next() {
            return None;
        }
        let chunk = self.faults.pop_front().or_else(|| self.stream.pop_front())?;
        let job = self.jobs.get_mut(&chunk)?;
        job.reading = Some(job.priority);
        let priority = job.priority;
        *self.reads_of(priority) += 1;
        Some(chunk)
    }

    /// The read of a chunk has ended.
    pub(super) fn finish(&mut self, chunk: ChunkId) {
        if let Some(priority) = self.jobs.remove(&chunk).and_then(|job| job.reading) {
            *self.reads_of(priority) -= 1;
        }
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
        std::iter::from_fn(|| schedule.take()).map(|chunk| chunk.first_page).collect()
    }

    #[test]
    fn chunks_of_faults_come_first_and_each_is_read_once() {
        let mut schedule = Schedule::new(4);
        for number in 0..10 {
            schedule.request(chunk(number), Priority::Stream);
            schedule.request(chunk(number), Priority::Stream);
        }
        assert_eq!(schedule.take(), Some(chunk(0)));
        schedule.request(chunk(7), Priority::Fault);
        schedule.request(chunk(50), Priority::Fault);
        schedule.request(chunk(7), Priority::Fault);
        // It is being read.
        schedule.request(chunk(0), Priority::Fault);
        schedule.request(chunk(50), Priority::Stream);
        assert_eq!(taken(&mut schedule), [7, 50]);
        schedule.request(chunk(51), Priority::Fault);
        assert_eq!(taken(&mut schedule), [51]);
        [7, 50, 51].into_iter().for_each(|number| schedule.finish(chunk(number)));
        assert_eq!(taken(&mut schedule), [1, 2, 3]);
        schedule.finish(chunk(0));
        schedule.finish(chunk(2));
        assert_eq!(taken(&mut schedule), [4, 5]);
        // Wanted again after it was read.
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
}
