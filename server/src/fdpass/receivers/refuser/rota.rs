//! Which process gets the next refused connection. Pure: the caller passes connections and receives the answers.
//!
//! ```text
//!            start              max_unclosed connections              it has closed some
//!   (none) --------> current -----------------------------> full ----------------------> current, when the other is full
//!                       |                                     |
//!                       +------------- ended -----------------+--> reaped
//! ```
//!
//! A process that is asked answers how many connections it has not closed, of those that it got before it was asked. Those that it got
//! since are added. So a process never has more than is known here, however fast clients connect.

use super::Pong;

/// The processes, each of which the caller knows as a `P`.
#[derive(Debug)]
pub(super) struct Rota<P> {
    /// Connections that a process may have.
    max_unclosed: usize,
    /// Processes that have so many, beside the current one.
    max_full: usize,
    /// `None`: it could not be started.
    current: Option<Member<P>>,
    full: Vec<Member<P>>,
    /// Have not been reaped.
    ended: Vec<P>,
}

#[derive(Debug)]
struct Member<P> {
    process: P,
    /// Connections that it may have. It may have closed some of them since its last answer.
    unclosed: usize,
    /// Those of them that it has got since it was last asked.
    since_asked: usize,
}

/// What a process has answered since the last look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heard {
    pub(super) pong: Pong,
    /// It was asked again.
    pub(super) asked: bool,
}

/// Why another process is to be started.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Vacancy<'a, P> {
    /// There is none.
    Ended,
    /// This one is full.
    Full(&'a P),
}

impl<P> Rota<P> {
    pub(super) const fn new(max_unclosed: usize, max_full: usize) -> Self {
        Self { max_unclosed, max_full, current: None, full: Vec::new(), ended: Vec::new() }
    }

    /// A new process gets the next connections.
    pub(super) fn add(&mut self, process: P) {
        self.current = Some(Member { process, unclosed: 0, since_asked: 0 });
    }

    /// A process is only to be reaped.
    pub(super) fn add_ended(&mut self, process: P) {
        self.ended.push(process);
    }

    /// Passes a connection to the current process, by a function that returns whether it succeeds. False if no process has it.
    pub(super) fn pass(&mut self, pass: impl FnOnce(&P) -> bool) -> bool {
        let Some(current) = self.current.as_mut().filter(|current| current.unclosed < self.max_unclosed)
        else {
            return false;
        };
        let is_passed = pass(&current.process);
        current.unclosed += usize::from(is_passed);
        current.since_asked += usize::from(is_passed);
        is_passed
    }

    /// True if the current process may get connections.
    pub(super) fn has_room(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.unclosed < self.max_unclosed)
    }

    /// Looks at all processes, each of which `ask` asks.
    pub(super) fn look(
        &mut self,
        mut ask: impl FnMut(&mut P) -> Heard,
        mut is_reaped: impl FnMut(&P) -> bool,
    ) -> Option<Vacancy<'_, P>> {
        self.ended.retain(|ended| !is_reaped(ended));
        let ended = self.full.extract_if(.., |member| member.has_ended(&mut ask));
        self.ended.extend(ended.map(|member| member.process));
        let Some(mut current) = self.current.take() else { return Some(Vacancy::Ended) };
        if current.has_ended(&mut ask) {
            self.ended.push(current.process);
            return Some(Vacancy::Ended);
        }
        if current.unclosed < self.max_unclosed {
            self.current = Some(current);
            return None;
        }
        // One of the full ones may have closed what it had.
        if let Some(other) = self.full.iter_mut().find(|other| other.unclosed < self.max_unclosed) {
            std::mem::swap(&mut current, other);
        } else if self.full.len() < self.max_full {
            self.full.push(current);
            return self.full.last().map(|full| Vacancy::Full(&full.process));
        }
        self.current = Some(current);
        None
    }
}

impl<P> Member<P> {
    fn has_ended(&mut self, ask: &mut impl FnMut(&mut P) -> Heard) -> bool {
        let Heard { pong, asked } = ask(&mut self.process);
        if let Pong::Received { unclosed, .. } = pong {
            let before = usize::try_from(unclosed).unwrap_or(usize::MAX);
            self.unclosed = before.saturating_add(self.since_asked);
        }
        if asked {
            self.since_asked = 0;
        }
        matches!(pong, Pong::Ended)
    }
}

#[cfg(test)]
mod tests;
