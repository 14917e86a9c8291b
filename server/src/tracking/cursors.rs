//! Cursors: named generations that consumers of changes have processed. Pure.
//!
//! ```text
//!   at g --begin--> begun until r: the changes in (g, r] are frozen --commit r--> at r
//!                     |  begin again: the same set
//!                     +--abort--> at g
//! ```

use std::collections::BTreeMap;
use std::time::SystemTime;

use fdmap_proto::tracking::{Coverage, Cursor};
use fdmap_proto::units::Generation;

use super::observe::Charge;
use super::stamps::StampMap;

/// Cursors of one file.
const MAX_CURSORS: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CursorError {
    #[error("no cursor {0:?}")]
    NotFound(String),
    #[error("cursor {0:?} already exists")]
    Taken(String),
    #[error("cursor {0:?} belongs to another user")]
    NotYours(String),
    #[error("cursor {0:?} has not begun")]
    NotBegun(String),
    /// The frozen set ends at another generation.
    #[error("the frozen set of cursor {name:?} ends at generation {until_generation}, not {requested}")]
    OtherGeneration { name: String, until_generation: Generation, requested: Generation },
    #[error("the file already has {MAX_CURSORS} cursors")]
    TooMany,
}

/// A set of changes that later writes do not change.
#[derive(Clone, Debug)]
pub struct FrozenSet {
    /// The set holds changes after this generation.
    pub since: Generation,
    /// The last generation of the set.
    pub until_generation: Generation,
    pub stamps: StampMap,
    pub coverage: Coverage,
    /// Size of the file in pages when the set was frozen.
    pub pages: u64,
    /// What a user is charged for the stamps.
    pub memory: Option<Charge>,
}

#[derive(Clone, Debug)]
struct CursorEntry {
    generation: Generation,
    uid: u32,
    created: SystemTime,
    frozen: Option<FrozenSet>,
}

impl CursorEntry {
    fn describe(&self, name: &str) -> Cursor {
        Cursor {
            name: name.to_owned(),
            generation: self.generation,
            until_generation: self.frozen.as_ref().map(|frozen| frozen.until_generation),
            uid: self.uid,
            created: self.created,
        }
    }
}

/// The cursors of one file.
#[derive(Clone, Debug, Default)]
pub struct Cursors(BTreeMap<String, CursorEntry>);

/// The caller, with access to its own cursors.
#[derive(Clone, Copy, Debug)]
pub struct CursorUser {
    pub uid: u32,
    /// The caller has access to the cursors of all users.
    pub admin: bool,
}

impl Cursors {
    /// Restores cursors from the journal. Frozen sets are lost: each cursor has to begin again.
    #[must_use]
    pub fn restore(cursors: impl IntoIterator<Item = Cursor>) -> Self {
        let entry = |cursor: Cursor| {
            let Cursor { name, generation, uid, created, .. } = cursor;
            (name, CursorEntry { generation, uid, created, frozen: None })
        };
        Self(cursors.into_iter().map(entry).collect())
    }

    /// Creates a cursor at `generation`.
    ///
    /// # Errors
    /// [`CursorError::Taken`] or [`CursorError::TooMany`]
    pub fn create(
        &mut self,
        name: &str,
        generation: Generation,
        user: CursorUser,
    ) -> Result<Cursor, CursorError> {
        if self.0.contains_key(name) {
            return Err(CursorError::Taken(name.to_owned()));
        }
        if self.0.len() >= MAX_CURSORS {
            return Err(CursorError::TooMany);
        }
        let entry = CursorEntry { generation, uid: user.uid, created: SystemTime::now(), frozen: None };
        let cursor = entry.describe(name);
        self.0.insert(name.to_owned(), entry);
        Ok(cursor)
    }

    /// The cursors that `user` has access to, in order of their names.
    #[must_use]
    pub fn list(&self, user: CursorUser) -> Vec<Cursor> {
        let mine = self.0.iter().filter(|(_, entry)| user.admin || entry.uid == user.uid);
        mine.map(|(name, entry)| entry.describe(name)).collect()
    }

    /// # Errors
    /// [`CursorError`]
    pub fn delete(&mut self, name: &str, user: CursorUser) -> Result<(), CursorError> {
        self.entry(name, user)?;
        self.0.remove(name);
        Ok(())
    }

    /// A cursor, and its frozen set if it has begun.
    ///
    /// # Errors
    /// [`CursorError`]
    pub fn get(&self, name: &str, user: CursorUser) -> Result<(Cursor, Option<&FrozenSet>), CursorError> {
        let entry = self.0.get(name).ok_or_else(|| CursorError::NotFound(name.to_owned()))?;
        if !user.admin && entry.uid != user.uid {
            return Err(CursorError::NotYours(name.to_owned()));
        }
        Ok((entry.describe(name), entry.frozen.as_ref()))
    }

    /// Freezes a set. A cursor that has begun keeps its set.
    ///
    /// # Errors
    /// [`CursorError`]
    pub fn begin(
        &mut self,
        name: &str,
        user: CursorUser,
        freeze: impl FnOnce(Generation) -> FrozenSet,
    ) -> Result<(Cursor, &FrozenSet), CursorError> {
        let entry = self.entry(name, user)?;
        let frozen = entry.frozen.take().unwrap_or_else(|| freeze(entry.generation));
        let until_generation = Some(frozen.until_generation);
        let cursor = Cursor { until_generation, ..entry.describe(name) };
        Ok((cursor, entry.frozen.insert(frozen)))
    }

    /// Moves the cursor to `generation`, the end of its frozen set, and drops the set. A repeated commit succeeds.
    ///
    /// # Errors
    /// [`CursorError`]
    pub fn commit(
        &mut self,
        name: &str,
        user: CursorUser,
        generation: Generation,
    ) -> Result<Cursor, CursorError> {
        let entry = self.entry(name, user)?;
        match entry.frozen.as_ref().map(|frozen| frozen.until_generation) {
            None if entry.generation == generation && !generation.is_none() => {}
            None => return Err(CursorError::NotBegun(name.to_owned())),
            Some(until_generation) if until_generation == generation => {
                entry.generation = generation;
                entry.frozen = None;
            }
            Some(until_generation) => {
                return Err(CursorError::OtherGeneration {
                    name: name.to_owned(),
                    until_generation,
                    requested: generation,
                });
            }
        }
        Ok(entry.describe(name))
    }

    /// Drops the frozen set, if there is one.
    ///
    /// # Errors
    /// [`CursorError`]
    pub fn abort(&mut self, name: &str, user: CursorUser) -> Result<Cursor, CursorError> {
        let entry = self.entry(name, user)?;
        entry.frozen = None;
        Ok(entry.describe(name))
    }

    /// All cursors, for the journal.
    #[must_use]
    pub fn all(&self) -> Vec<Cursor> {
        self.list(CursorUser { uid: 0, admin: true })
    }

    fn entry(&mut self, name: &str, user: CursorUser) -> Result<&mut CursorEntry, CursorError> {
        match self.0.get_mut(name) {
            None => Err(CursorError::NotFound(name.to_owned())),
            Some(entry) if !user.admin && entry.uid != user.uid => {
                Err(CursorError::NotYours(name.to_owned()))
            }
            Some(entry) => Ok(entry),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: CursorUser = CursorUser { uid: 1000, admin: false };
    const OTHER: CursorUser = CursorUser { uid: 1001, admin: false };

    fn generation(number: u64) -> Generation {
        Generation::new(number).unwrap()
    }

    fn frozen(since: Generation, until_generation: u64) -> FrozenSet {
        let (stamps, coverage) =
            (StampMap::default(), crate::tracking::gap_log::GapLog::default().coverage(since, since, 0, 1));
        FrozenSet {
            since,
            until_generation: generation(until_generation),
            stamps,
            coverage,
            pages: 1,
            memory: None,
        }
    }

    #[test]
    fn failed_consumer_begins_again_with_the_same_set() {
        let mut cursors = Cursors::default();
        cursors.create("dump", generation(3), ME).unwrap();
        let (cursor, set) = cursors.begin("dump", ME, |since| frozen(since, 7)).unwrap();
        assert_eq!((cursor.until_generation, set.since), (Some(generation(7)), generation(3)));
        // Later writes do not change the set.
        let (again, set) = cursors.begin("dump", ME, |_| panic!("the set is frozen")).unwrap();
        assert_eq!((again.until_generation, set.until_generation), (Some(generation(7)), generation(7)));
        assert_eq!(cursors.abort("dump", ME).unwrap().generation, generation(3));
        let (cursor, _) = cursors.begin("dump", ME, |since| frozen(since, 9)).unwrap();
        assert_eq!((cursor.generation, cursor.until_generation), (generation(3), Some(generation(9))));
    }

    #[test]
    fn commit_names_what_it_commits_and_can_be_repeated() {
        let mut cursors = Cursors::default();
        cursors.create("dump", Generation::NONE, ME).unwrap();
        assert!(matches!(cursors.commit("dump", ME, generation(1)), Err(CursorError::NotBegun(_))));
        cursors.begin("dump", ME, |since| frozen(since, 4)).unwrap();
        let wrong = cursors.commit("dump", ME, generation(5));
        assert!(matches!(wrong, Err(CursorError::OtherGeneration { .. })));
        for _ in 0..2 {
            assert_eq!(cursors.commit("dump", ME, generation(4)).unwrap().generation, generation(4));
        }
        assert!(cursors.commit("dump", ME, generation(3)).is_err(), "a late commit is refused");
    }

    #[test]
    fn cursor_is_accessible_to_its_creator_and_to_administrators() {
        let mut cursors = Cursors::default();
        cursors.create("mine", Generation::NONE, ME).unwrap();
        assert!(matches!(cursors.create("mine", Generation::NONE, OTHER), Err(CursorError::Taken(_))));
        assert!(matches!(cursors.abort("mine", OTHER), Err(CursorError::NotYours(_))));
        assert!(cursors.list(OTHER).is_empty());
        assert_eq!(cursors.all().len(), 1);
        let restored = Cursors::restore(cursors.all());
        assert_eq!(restored.all(), cursors.all());
        cursors.delete("mine", CursorUser { uid: 0, admin: true }).unwrap();
        assert!(matches!(cursors.get("mine", ME), Err(CursorError::NotFound(_))));
    }

    #[test]
    fn number_of_cursors_is_limited() {
        let mut cursors = Cursors::default();
        for number in 0..MAX_CURSORS {
            cursors.create(&number.to_string(), Generation::NONE, ME).unwrap();
        }
        assert_eq!(cursors.create("one more", Generation::NONE, ME), Err(CursorError::TooMany));
    }
}
