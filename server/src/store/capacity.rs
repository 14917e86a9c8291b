//! The room of the descriptor store, and who uses it.
//!
//! At a restart, all names are one string of the environment, and execve(2) fails with E2BIG if that is too long. systemd then closes
//! what it stores, and all files are lost. So the service stores no more names than fit, and no user takes the room of others.

use std::collections::{BTreeMap, HashMap};

use fdmap_proto::units::FileId;

use super::{StoredFd, encode_name};

/// The longest string of an environment in bytes, with its final NUL byte: the kernel's `MAX_ARG_STRLEN`, with pages of 4 KiB.
const MAX_STRING_BYTES: u64 = 32 << 12;
/// The variable of the names. A colon precedes each name but the first one, and a NUL byte ends the last one.
const NAMES_VARIABLE: &str = "LISTEN_FDNAMES=";

/// An amount of room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    descriptors: u64,
    /// Of names, each with one separator.
    name_bytes: u64,
}

impl Room {
    /// Of a store that accepts `descriptors`.
    pub(super) const fn of_store(descriptors: u64) -> Self {
        Self { descriptors, name_bytes: MAX_STRING_BYTES - NAMES_VARIABLE.len() as u64 }
    }

    fn of(file: FileId, role: StoredFd) -> Self {
        Self { descriptors: 1, name_bytes: encode_name(file, role).len() as u64 + 1 }
    }

    fn of_all(file: FileId, roles: impl IntoIterator<Item = StoredFd>) -> Self {
        roles.into_iter().fold(Self::default(), |sum, role| sum.plus(Self::of(file, role)))
    }

    const fn plus(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.saturating_add(other.descriptors),
            name_bytes: self.name_bytes.saturating_add(other.name_bytes),
        }
    }

    const fn minus(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.saturating_sub(other.descriptors),
            name_bytes: self.name_bytes.saturating_sub(other.name_bytes),
        }
    }

    const fn half(self) -> Self {
        Self { descriptors: self.descriptors / 2, name_bytes: self.name_bytes / 2 }
    }

    const fn fits_in(self, other: Self) -> bool {
        self.descriptors <= other.descriptors && self.name_bytes <= other.name_bytes
    }
}

/// What the store holds of one file.
#[derive(Debug)]
struct StoredFile {
    /// The user for whom it counts.
    user: u32,
    /// The descriptors that have room, and whether they were sent.
    sent: BTreeMap<StoredFd, bool>,
}

impl StoredFile {
    fn room(&self, file: FileId) -> Room {
        Room::of_all(file, self.sent.keys().copied())
    }
}

/// Counts what the store holds.
#[derive(Debug)]
pub(super) struct Capacity {
    all: Room,
    files: BTreeMap<FileId, StoredFile>,
    used: Room,
    /// Users without stored descriptors have no entry.
    used_by: HashMap<u32, Room>,
}

impl Capacity {
    pub(super) fn new(all: Room) -> Self {
        Self { all, files: BTreeMap::new(), used: Room::default(), used_by: HashMap::new() }
    }

    /// Counts a descriptor that the store holds already, for root until [`Self::charge`].
    pub(super) fn inherit(&mut self, file: FileId, role: StoredFd) {
        self.add(file, 0, vec![role]);
        self.send(file, role);
    }

    /// Reserves room for `roles` of a file, all or none. A new file counts for `user`, another one still for its user. Returns
    /// whether there is room.
    pub(super) fn reserve(&mut self, file: FileId, user: u32, roles: &[StoredFd]) -> bool {
        let known = self.files.get(&file);
        let is_new = |role: &StoredFd| known.is_none_or(|known| !known.sent.contains_key(role));
        let new: Vec<_> = roles.iter().copied().filter(is_new).collect();
        let is_admitted =
            self.admits(known.map_or(user, |known| known.user), Room::of_all(file, new.iter().copied()));
        if is_admitted {
            self.add(file, user, new);
        }
        is_admitted
    }

    /// True if the store has the first descriptor of this file, or room for it.
    pub(super) fn contains(&self, file: FileId) -> bool {
        self.files.contains_key(&file)
    }

    /// Root may use all the room. Each other user may use half of what the others leave, so some is left for the next one.
    fn admits(&self, user: u32, more: Room) -> bool {
        let own = self.used_by.get(&user).copied().unwrap_or_default();
        let left_by_others = self.all.minus(self.used.minus(own));
        let share = if user == 0 { left_by_others } else { left_by_others.half() };
        own.plus(more).fits_in(share)
    }

    fn add(&mut self, file: FileId, user: u32, roles: Vec<StoredFd>) {
        let known = self.files.entry(file).or_insert_with(|| StoredFile { user, sent: BTreeMap::new() });
        let user = known.user;
        for role in roles {
            if known.sent.insert(role, false).is_none() {
                let room = Room::of(file, role);
                self.used = self.used.plus(room);
                let own = self.used_by.entry(user).or_default();
                *own = own.plus(room);
            }
        }
    }

    /// Notes that a descriptor is sent. Returns false if it has no room: then it must not be sent.
    pub(super) fn send(&mut self, file: FileId, role: StoredFd) -> bool {
        let sent = self.files.get_mut(&file).and_then(|known| known.sent.get_mut(&role));
        sent.map(|sent| *sent = true).is_some()
    }

    /// Returns the room of a descriptor that the store no longer holds.
    pub(super) fn remove(&mut self, file: FileId, role: StoredFd) {
        let Some(known) = self.files.get_mut(&file) else { return };
        let user = known.user;
        if known.sent.remove(&role).is_some() {
            if known.sent.is_empty() {
                self.files.remove(&file);
            }
            self.give_back(user, Room::of(file, role));
        }
    }

    /// Returns the room of a file that was reserved and not used.
    pub(super) fn remove_reserved(&mut self, file: FileId) {
        let Some(known) = self.files.get(&file) else { return };
        let reserved: Vec<_> =
            known.sent.iter().filter_map(|(role, sent)| (!sent).then_some(*role)).collect();
        reserved.into_iter().for_each(|role| self.remove(file, role));
    }

    /// Counts a file for `user` from here on, even beyond the share of that user.
    pub(super) fn charge(&mut self, file: FileId, user: u32) {
        let Some(known) = self.files.get_mut(&file) else { return };
        let (former, room) = (std::mem::replace(&mut known.user, user), known.room(file));
        self.give_back(former, room);
        self.used = self.used.plus(room);
        let own = self.used_by.entry(user).or_default();
        *own = own.plus(room);
    }

    fn give_back(&mut self, user: u32, room: Room) {
        self.used = self.used.minus(room);
        let own = self.used_by.entry(user).or_default();
        *own = own.minus(room);
        if *own == Room::default() {
            self.used_by.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FILE: [StoredFd; 2] = [StoredFd::File, StoredFd::Journal];

    fn id(number: u64) -> FileId {
        FileId::new(number).unwrap()
    }

    fn space(key: u64) -> [StoredFd; 3] {
        [StoredFd::Userfaultfd(key), StoredFd::Pagemap(key), StoredFd::Maps(key)]
    }

    fn store(descriptors: u64) -> Capacity {
        Capacity::new(Room::of_store(descriptors))
    }

    /// The number of files that `user` can store.
    fn files_until_full(capacity: &mut Capacity, user: u32, first: u64) -> u64 {
        (first..).take_while(|number| capacity.reserve(id(*number), user, &FILE)).count() as u64
    }

    #[test]
    fn names_fit_in_one_string_of_the_environment() {
        let mut capacity = store(u64::MAX);
        let files = files_until_full(&mut capacity, 0, 1);
        let names = |number| FILE.map(|role| encode_name(id(number), role)).join(":");
        let variable = |files: u64| {
            let names: Vec<_> = (1..=files).map(names).collect();
            format!("{NAMES_VARIABLE}{}", names.join(":")).len() as u64 + 1
        };
        assert!(variable(files) <= MAX_STRING_BYTES);
        assert!(variable(files + 1) > MAX_STRING_BYTES);
    }

    #[test]
    fn each_user_leaves_half_of_the_room() {
        let mut capacity = store(160);
        assert_eq!(files_until_full(&mut capacity, 1, 1000), 40);
        assert_eq!(files_until_full(&mut capacity, 2, 2000), 20);
        assert_eq!(files_until_full(&mut capacity, 0, 3000), 20);
        assert_eq!(files_until_full(&mut capacity, 3, 4000), 0);
    }

    #[test]
    fn address_space_counts_for_the_user_of_its_file() {
        let mut capacity = store(20);
        assert!(capacity.reserve(id(1), 1, &FILE));
        assert!(capacity.reserve(id(1), 0, &space(1)));
        assert!(capacity.reserve(id(1), 0, &space(2)));
        assert!(!capacity.reserve(id(1), 0, &space(3)), "user 1 has 8 of 10");
        assert!(capacity.reserve(id(2), 0, &FILE));
        capacity.charge(id(1), 2);
        assert!(capacity.reserve(id(3), 1, &FILE));
    }

    #[test]
    fn descriptor_without_room_is_not_sent() {
        let mut capacity = store(4);
        assert!(!capacity.send(id(1), StoredFd::File));
        assert!(capacity.reserve(id(1), 1, &FILE));
        assert!(!capacity.reserve(id(2), 1, &FILE));
        assert!(capacity.send(id(1), StoredFd::File));
        assert!(!capacity.send(id(2), StoredFd::File));
        assert!(!capacity.contains(id(2)));
        // The journal was not sent.
        capacity.remove(id(1), StoredFd::File);
        capacity.remove_reserved(id(1));
        assert!(!capacity.contains(id(1)));
        assert!(capacity.reserve(id(2), 1, &FILE));
    }

    proptest! {
        /// After any operations, the room in use is that of the descriptors that have room.
        #[test]
        fn counts_equal_those_of_all_descriptors(operations in prop::collection::vec((0..5_u8, 1..4_u64, 0..3_u32, 0..3_u64), 0..60)) {
            let mut capacity = store(24);
            for (operation, file, user, key) in operations {
                let file = id(file);
                match operation {
                    0 => { capacity.reserve(file, user, &FILE); }
                    1 => { capacity.reserve(file, user, &space(key)); }
                    2 => { capacity.send(file, StoredFd::Userfaultfd(key)); }
                    3 => space(key).into_iter().chain(FILE).for_each(|role| capacity.remove(file, role)),
                    _ => capacity.charge(file, user),
                }
                let of_user = |user| {
                    let own = capacity.files.iter().filter(|(_, known)| known.user == user);
                    own.fold(Room::default(), |sum, (id, known)| sum.plus(known.room(*id)))
                };
                let users = [0, 1, 2].map(|user| (user, of_user(user)));
                for (user, room) in users {
                    prop_assert_eq!(capacity.used_by.get(&user).copied().unwrap_or_default(), room);
                }
                let sum = users.iter().fold(Room::default(), |sum, (_, room)| sum.plus(*room));
                prop_assert_eq!(capacity.used, sum);
                prop_assert!(sum.fits_in(capacity.all));
                prop_assert!(capacity.files.values().all(|known| !known.sent.is_empty()));
            }
        }
    }
}
