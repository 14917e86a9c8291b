//! Cursor requests of several users about one file, compared with a plain map of cursors.

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::convert::{FileName, generation_from_wire};
use fdmap_proto::tracking::{Coverage, Cursor};
use fdmap_proto::units::Generation;
use fdmap_proto::v1;
use fdmap_server::query::cursor_name;
use fdmap_server::tracking::{CursorError, CursorUser, Cursors, FrozenSet, StampMap};
use prost::Message;

use super::check;
use crate::draft::{FileDraft, ram, rare, rarely, up_to};

/// Cursors that one file may have.
const MAX_CURSORS: usize = 256;

#[derive(Arbitrary, Debug)]
pub(super) struct CursorsDraft {
    /// Cursors of user 0 that exist at first, beside those of the steps.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.int_in_range(0..=256) } else { Ok(0) })]
    existing: usize,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 64))]
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
struct Step {
    /// The journal is read first, which has no frozen sets.
    #[arbitrary(with = rarely)]
    restarts: bool,
    /// A checkpoint closes a generation first.
    closes: bool,
    /// User 0 is an administrator.
    #[arbitrary(with = |u: &mut Unstructured<'_>| Ok(*u.choose(&[5, 5, 5, 5, 6, 0])?))]
    uid: u32,
    method: Method,
    request: RequestDraft,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Method {
    Create,
    Delete,
    Begin,
    Commit,
    Abort,
}

#[derive(Arbitrary, Debug)]
struct RequestDraft {
    file: FileDraft,
    /// Of one of two cursors.
    second: bool,
    #[arbitrary(with = rare)]
    any_name: Option<String>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { Ok(Some(u.arbitrary()?)) } else { Ok(None) })]
    any_generation: Option<u64>,
    /// The generation differs by this from the end of the cursor's frozen set, or else from its generation.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if u.ratio(1_u8, 4)? { u.int_in_range(-2..=2) } else { Ok(0) })]
    off_by: i64,
    force_scan: bool,
    /// In place of the encoded request.
    #[arbitrary(with = rare)]
    bytes: Option<Vec<u8>>,
}

impl RequestDraft {
    fn encoded(&self, method: Method, model: &Model) -> Vec<u8> {
        if let Some(bytes) = &self.bytes {
            return bytes.clone();
        }
        let file = self.file.field(&[ram()]);
        let name = self.any_name.clone().unwrap_or_else(|| format!("cursor-{}", u8::from(self.second)));
        let expected = model.cursors.get(&name).map_or(0, Entry::expected);
        let generation = self.any_generation.unwrap_or(expected.saturating_add_signed(self.off_by));
        match method {
            Method::Create => v1::CreateCursorRequest { file, name, generation }.encode_to_vec(),
            Method::Delete => v1::DeleteCursorRequest { file, name }.encode_to_vec(),
            Method::Begin => {
                v1::BeginCursorRequest { file, name, force_scan: self.force_scan }.encode_to_vec()
            }
            Method::Commit => v1::CommitCursorRequest { file, name, generation }.encode_to_vec(),
            Method::Abort => v1::AbortCursorRequest { file, name }.encode_to_vec(),
        }
    }
}

/// A request that was decoded.
struct Decoded {
    file: Option<v1::FileRef>,
    name: String,
    /// 0 if the request has no such field.
    generation: u64,
}

fn decode(method: Method, bytes: &[u8]) -> Result<Decoded, prost::DecodeError> {
    let (file, name, generation) = match method {
        Method::Create => {
            let v1::CreateCursorRequest { file, name, generation } = Message::decode(bytes)?;
            (file, name, generation)
        }
        Method::Delete => {
            let v1::DeleteCursorRequest { file, name } = Message::decode(bytes)?;
            (file, name, 0)
        }
        Method::Begin => {
            let v1::BeginCursorRequest { file, name, force_scan: _ } = Message::decode(bytes)?;
            (file, name, 0)
        }
        Method::Commit => {
            let v1::CommitCursorRequest { file, name, generation } = Message::decode(bytes)?;
            (file, name, generation)
        }
        Method::Abort => {
            let v1::AbortCursorRequest { file, name } = Message::decode(bytes)?;
            (file, name, 0)
        }
    };
    Ok(Decoded { file, name, generation })
}

/// Why a cursor request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    NotFound,
    Taken,
    NotYours,
    NotBegun,
    OtherGeneration,
    TooMany,
}

impl From<CursorError> for Refused {
    fn from(error: CursorError) -> Self {
        match error {
            CursorError::NotFound(_) => Self::NotFound,
            CursorError::Taken(_) => Self::Taken,
            CursorError::NotYours(_) => Self::NotYours,
            CursorError::NotBegun(_) => Self::NotBegun,
            CursorError::OtherGeneration { .. } => Self::OtherGeneration,
            CursorError::TooMany => Self::TooMany,
        }
    }
}

/// A cursor, as the map has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    uid: u32,
    generation: u64,
    until: Option<u64>,
    /// The number of the frozen set.
    set: u64,
}

impl Entry {
    fn expected(&self) -> u64 {
        self.until.unwrap_or(self.generation)
    }

    fn of(cursor: &Cursor) -> (u32, u64, Option<u64>) {
        (cursor.uid, cursor.generation.get(), cursor.until_generation.map(Generation::get))
    }

    const fn described(&self) -> (u32, u64, Option<u64>) {
        (self.uid, self.generation, self.until)
    }
}

/// The cursors as they must be.
#[derive(Default)]
struct Model {
    cursors: BTreeMap<String, Entry>,
    /// The last closed generation.
    closed: u64,
    /// Sets that were frozen.
    sets: u64,
}

impl Model {
    /// Changes the map. Returns the cursor afterwards; a deleted one as it was.
    fn apply(&mut self, method: Method, name: &str, uid: u32, generation: u64) -> Result<Entry, Refused> {
        if let Method::Create = method {
            if self.cursors.contains_key(name) {
                return Err(Refused::Taken);
            }
            if self.cursors.len() >= MAX_CURSORS {
                return Err(Refused::TooMany);
            }
            let entry = Entry { uid, generation, until: None, set: 0 };
            self.cursors.insert(name.to_owned(), entry);
            return Ok(entry);
        }
        let entry = self.cursors.get_mut(name).ok_or(Refused::NotFound)?;
        if uid != 0 && entry.uid != uid {
            return Err(Refused::NotYours);
        }
        match method {
            Method::Create => {}
            Method::Delete => return Ok(self.cursors.remove(name).unwrap()),
            Method::Begin if entry.until.is_some() => {}
            Method::Begin => {
                self.sets += 1;
                (entry.until, entry.set) = (Some(self.closed), self.sets);
            }
            Method::Commit => match entry.until {
                // A repeated commit; nothing was committed to generation 0.
                None if generation > 0 && generation == entry.generation => {}
                None => return Err(Refused::NotBegun),
                Some(until) if until == generation => (entry.generation, entry.until) = (generation, None),
                Some(_) => return Err(Refused::OtherGeneration),
            },
            Method::Abort => entry.until = None,
        }
        Ok(*entry)
    }
}

/// Performs the steps as `rpc` does.
pub(super) fn run(draft: &CursorsDraft) {
    let (mut cursors, mut model) = (Cursors::default(), Model::default());
    for nth in 0..draft.existing {
        let name = format!("existing-{nth}");
        cursors.create(&name, Generation::NONE, user(0)).unwrap();
        model.apply(Method::Create, &name, 0, 0).unwrap();
    }
    for Step { restarts, closes, uid, method, request } in &draft.steps {
        if *restarts {
            cursors = Cursors::restore(cursors.all());
            model.cursors.values_mut().for_each(|entry| entry.until = None);
        }
        model.closed += u64::from(*closes);
        perform(*method, *uid, &request.encoded(*method, &model), &mut cursors, &mut model);
        check_list(*uid, &cursors, &model);
    }
    check_list(0, &cursors, &model);
}

const fn user(uid: u32) -> CursorUser {
    CursorUser { uid, admin: uid == 0 }
}

fn perform(method: Method, uid: u32, bytes: &[u8], cursors: &mut Cursors, model: &mut Model) {
    let Ok(Decoded { file, name, generation: number }) = decode(method, bytes) else { return };
    let generation = generation_from_wire("generation", number);
    assert_eq!(generation.is_ok(), number <= Generation::MAX.get(), "generation {number}");
    check::cursor(name.clone());
    let (Ok(generation), Ok(_), Ok(name)) = (generation, FileName::try_from(file), cursor_name(name)) else {
        return;
    };
    // The tracker refuses a generation that is not closed.
    if matches!(method, Method::Create) && number > model.closed {
        return;
    }
    let expected = model.apply(method, &name, uid, number);
    let set = model.sets;
    let done = match method {
        Method::Create => cursors.create(&name, generation, user(uid)),
        Method::Delete => {
            // The request returns no cursor.
            let deleted = cursors.get(&name, user(uid)).map(|(cursor, _)| cursor);
            cursors.delete(&name, user(uid)).and(deleted)
        }
        Method::Begin => {
            let until = Generation::new(model.closed).unwrap();
            let begun = cursors.begin(&name, user(uid), |since| frozen(since, until, set));
            begun.map(|(cursor, frozen)| {
                // A cursor that has begun keeps its set.
                assert_eq!(Some(frozen.pages), expected.ok().map(|entry| entry.set));
                assert_eq!(
                    (frozen.since, Some(frozen.until_generation)),
                    (cursor.generation, cursor.until_generation)
                );
                cursor
            })
        }
        Method::Commit => cursors.commit(&name, user(uid), generation),
        Method::Abort => cursors.abort(&name, user(uid)),
    };
    if let Ok(cursor) = &done {
        assert_eq!(cursor.name, name);
        let received = Cursor::try_from(v1::Cursor::from(cursor.clone())).unwrap();
        // A generation of 0 is none on the wire.
        let until_generation = cursor.until_generation.filter(|until| !until.is_none());
        assert_eq!(received, Cursor { until_generation, ..cursor.clone() });
    }
    let done = done.map(|cursor| Entry::of(&cursor)).map_err(Refused::from);
    assert_eq!(done, expected.map(|entry| entry.described()), "{method:?} {name:?} by {uid}");
}

/// `set`: its number, in place of the size of the file.
fn frozen(since: Generation, until_generation: Generation, set: u64) -> FrozenSet {
    let coverage = Coverage { exact: true, gaps: Vec::new(), tracked_mappings: 0, granularity_pages: 1 };
    FrozenSet { since, until_generation, stamps: StampMap::default(), coverage, pages: set, memory: None }
}

/// A user lists its own cursors; an administrator, all.
fn check_list(uid: u32, cursors: &Cursors, model: &Model) {
    let listed = cursors.list(user(uid));
    let listed: Vec<_> = listed.iter().map(|cursor| (&cursor.name, Entry::of(cursor))).collect();
    let own = model.cursors.iter().filter(|(_, entry)| uid == 0 || entry.uid == uid);
    let expected: Vec<_> = own.map(|(name, entry)| (name, entry.described())).collect();
    assert_eq!(listed, expected, "cursors of user {uid}");
}
