//! Which process gets the next refused connection. Pure: the caller passes connections and receives the answers.
//!
//! ```text
//!            start                  max_unclosed connections                 it could close
//!   (none) --------> current -----------------------------------> full ----------------------> current, when the other is full
//!                       |                                           |
//!                       +--------------- ended ---------------------+--> reaped
//! ```

use super::Pong;

/// The processes, each of which the caller knows as a `P`.
#[derive(Debug)]
pub(super) struct Rota<P> {
    /// Connections that a process gets while it cannot close them.
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
    /// Connections that it has got since it last reported that it could close.
    unclosed: usize,
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
        self.current = Some(Member { process, unclosed: 0 });
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
        is_passed
    }

    /// Looks at all processes. `ask` returns what one has answered since the last look.
    pub(super) fn look(
        &mut self,
        mut ask: impl FnMut(&mut P) -> Pong,
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
    fn has_ended(&mut self, ask: &mut impl FnMut(&mut P) -> Pong) -> bool {
        match ask(&mut self.process) {
            Pong::Nothing | Pong::Received { blocked: true } => false,
            Pong::Received { blocked: false } => {
                self.unclosed = 0;
                false
            }
            Pong::Ended => true,
        }
    }
}

#[cfg(test)]
mod tests;
