//! Attributes of pages beyond their state.

use bitflags::bitflags;
use serde::{Serialize, Serializer};

bitflags! {
    /// Folio flags with the bit numbers of `/proc/kpageflags` (`linux/kernel-page-flags.h`). Flags that fdmap does not
    /// report have no name here.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct PageFlags: u64 {
        /// `KPF_LOCKED`
        const LOCKED = 1 << 0;
        /// `KPF_REFERENCED`
        const REFERENCED = 1 << 2;
        /// `KPF_UPTODATE`
        const UPTODATE = 1 << 3;
        /// `KPF_DIRTY`
        const DIRTY = 1 << 4;
        /// `KPF_LRU`
        const LRU = 1 << 5;
        /// `KPF_ACTIVE`
        const ACTIVE = 1 << 6;
        /// `KPF_WRITEBACK`
        const WRITEBACK = 1 << 8;
        /// `KPF_RECLAIM`
        const RECLAIM = 1 << 9;
        /// `KPF_SWAPCACHE`
        const SWAPCACHE = 1 << 13;
        /// `KPF_SWAPBACKED`
        const SWAPBACKED = 1 << 14;
        /// `KPF_UNEVICTABLE`
        const UNEVICTABLE = 1 << 18;
        /// `KPF_HWPOISON`
        const HWPOISON = 1 << 19;
        /// `KPF_MLOCKED`
        const MLOCKED = 1 << 33;
        /// `KPF_PRIVATE`
        const PRIVATE = 1 << 35;
    }
}

impl PageFlags {
    /// Names of the flags in lower case, as the kernel's `enum pageflags` without the prefix `PG_`.
    pub fn names(self) -> impl Iterator<Item = String> {
        self.iter_names().map(|(name, _)| name.to_lowercase())
    }
}

/// Folio flags of a page, and which of them the probe can read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KnownFlags {
    /// Flags that are set. Only flags in `known` are valid.
    pub set: PageFlags,
    /// Flags that the probe can read.
    pub known: PageFlags,
}

impl KnownFlags {
    /// Flags that are known to be set.
    #[must_use]
    pub const fn valid(self) -> PageFlags {
        self.set.intersection(self.known)
    }
}

impl Serialize for KnownFlags {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.valid().names())
    }
}

/// Number of page tables that map a page, as far as every kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mappers {
    /// No page table.
    None,
    /// Exactly one page table.
    One,
    /// Two or more page tables.
    Several,
}

impl Mappers {
    /// Classifies a number of page tables.
    #[must_use]
    pub const fn of(map_count: u32) -> Self {
        match map_count {
            0 => Self::None,
            1 => Self::One,
            _ => Self::Several,
        }
    }
}

/// Attributes of a page. `None` means that the value is unknown, not that it is false or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct PageAttributes {
    /// log2 of the number of pages in the folio or large swap entry that contains the page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<u8>,
    /// Flags of the folio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<KnownFlags>,
    /// Number of page tables that map the page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_count: Option<u32>,
    /// Classification of the map count; available on kernels that do not count mappings of each page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mappers: Option<Mappers>,
    /// Whether the folio may be pinned for DMA. True for a small folio with 1024 or more references
    /// (`GUP_PIN_COUNTING_BIAS`), whatever they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maybe_pinned: Option<bool>,
}

/// A set of attributes that a request selects or a probe reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeSet {
    /// [`PageAttributes::order`].
    pub order: bool,
    /// [`PageAttributes::flags`].
    pub flags: bool,
    /// [`PageAttributes::map_count`] and [`PageAttributes::mappers`].
    pub map_count: bool,
    /// [`PageAttributes::maybe_pinned`].
    pub maybe_pinned: bool,
}

impl AttributeSet {
    /// All attributes.
    pub const ALL: Self = Self { order: true, flags: true, map_count: true, maybe_pinned: true };
    /// No attribute.
    pub const NONE: Self = Self { order: false, flags: false, map_count: false, maybe_pinned: false };

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        !(self.order || self.flags || self.map_count || self.maybe_pinned)
    }

    /// Returns true if the set contains all of `other`.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        (self.order || !other.order)
            && (self.flags || !other.flags)
            && (self.map_count || !other.map_count)
            && (self.maybe_pinned || !other.maybe_pinned)
    }

    /// Names of the attributes, as the fields are named.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        [
            (self.order, "order"),
            (self.flags, "flags"),
            (self.map_count, "map_count"),
            (self.maybe_pinned, "maybe_pinned"),
        ]
        .into_iter()
        .filter_map(|(contained, name)| contained.then_some(name))
    }
}

impl Serialize for AttributeSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.names())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_flags_are_not_listed() {
        let flags = KnownFlags { set: PageFlags::DIRTY | PageFlags::LRU, known: PageFlags::DIRTY };
        assert_eq!(serde_json::to_value(flags).unwrap(), serde_json::json!(["dirty"]));
    }
}
