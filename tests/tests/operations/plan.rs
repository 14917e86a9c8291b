//! Operations on a file, and random lists of them.

use proptest::prelude::*;

/// Size of the file in pages at the start of a list.
pub const PAGES: u64 = 48;

/// How the service got the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// The service created it.
    Created,
    /// The test created the memfd, and keeps the descriptor of memfd_create, whose writes raise no event.
    Adopted,
}

/// The descriptor that a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Opened by path, as the service passes it.
    Path,
    /// The descriptor of memfd_create itself. By path, if the service created the file.
    Origin,
}

/// A mapping, as an index into those of its kind. Without such a mapping the operation does nothing.
pub type Nth = usize;

/// One step. All pages are taken modulo the current size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOperation {
    MapTracked,
    MapUntracked,
    /// Untracks and unmaps through the library.
    UnmapTracked(Nth),
    UnmapUntracked(Nth),
    /// Unmaps a part of a tracked mapping, without the library.
    TearTracked {
        nth: Nth,
        page: u64,
    },
    /// Duplicates an untracked or tracked mapping with mremap and an old length of 0, writes, and unmaps the duplicate.
    WriteDuplicate {
        nth: Nth,
        tracked: bool,
        page: u64,
    },
    StoreTracked {
        nth: Nth,
        page: u64,
    },
    StoreUntracked {
        nth: Nth,
        page: u64,
    },
    /// A forked child stores and exits.
    StoreInChild {
        nth: Nth,
        page: u64,
    },
    /// Frees the page tables of tracked pages: MADV_DONTNEED.
    ZapTracked {
        nth: Nth,
        page: u64,
    },
    /// MADV_REMOVE through a tracked mapping.
    RemoveTracked {
        nth: Nth,
        page: u64,
    },
    Pwrite {
        by: By,
        page: u64,
        pages: u64,
    },
    Splice {
        by: By,
        page: u64,
    },
    AioWrite {
        by: By,
        page: u64,
    },
    UringWrite {
        by: By,
        page: u64,
    },
    Punch {
        by: By,
        page: u64,
        pages: u64,
    },
    PunchByIoctl {
        by: By,
        page: u64,
    },
    Allocate {
        by: By,
        page: u64,
        pages: u64,
    },
    Ftruncate {
        by: By,
        pages: u64,
    },
    TruncatePath {
        pages: u64,
    },
    /// Calls that do not write to the file: on another file, by the same thread.
    OtherFile,
    Checkpoint {
        force: bool,
    },
}

fn descriptor() -> impl Strategy<Value = By> {
    prop_oneof![Just(By::Path), Just(By::Origin)]
}

/// A list for a file of this kind.
pub fn operations(kind: FileKind) -> impl Strategy<Value = Vec<FileOperation>> {
    let by = move || descriptor().prop_map(move |by| if kind == FileKind::Created { By::Path } else { by });
    let (nth, page, few) = (|| 0..4_usize, || 0..PAGES, || 1..6_u64);
    let mappings = prop_oneof![
        3 => Just(FileOperation::MapTracked),
        1 => Just(FileOperation::MapUntracked),
        1 => nth().prop_map(FileOperation::UnmapTracked),
        1 => nth().prop_map(FileOperation::UnmapUntracked),
        1 => (nth(), page()).prop_map(|(nth, page)| FileOperation::TearTracked { nth, page }),
        1 => (nth(), any::<bool>(), page())
            .prop_map(|(nth, tracked, page)| FileOperation::WriteDuplicate { nth, tracked, page }),
    ];
    let stores = prop_oneof![
        6 => (nth(), page()).prop_map(|(nth, page)| FileOperation::StoreTracked { nth, page }),
        2 => (nth(), page()).prop_map(|(nth, page)| FileOperation::StoreUntracked { nth, page }),
        1 => (nth(), page()).prop_map(|(nth, page)| FileOperation::StoreInChild { nth, page }),
        1 => (nth(), page()).prop_map(|(nth, page)| FileOperation::ZapTracked { nth, page }),
        1 => (nth(), page()).prop_map(|(nth, page)| FileOperation::RemoveTracked { nth, page }),
    ];
    let calls = prop_oneof![
        2 => (by(), page(), few()).prop_map(|(by, page, pages)| FileOperation::Pwrite { by, page, pages }),
        1 => (by(), page()).prop_map(|(by, page)| FileOperation::Splice { by, page }),
        1 => (by(), page()).prop_map(|(by, page)| FileOperation::AioWrite { by, page }),
        1 => (by(), page()).prop_map(|(by, page)| FileOperation::UringWrite { by, page }),
        1 => (by(), page(), few()).prop_map(|(by, page, pages)| FileOperation::Punch { by, page, pages }),
        1 => (by(), page()).prop_map(|(by, page)| FileOperation::PunchByIoctl { by, page }),
        1 => (by(), page(), few()).prop_map(|(by, page, pages)| FileOperation::Allocate { by, page, pages }),
        1 => (by(), 1..PAGES + 9).prop_map(|(by, pages)| FileOperation::Ftruncate { by, pages }),
        1 => (1..PAGES + 9).prop_map(|pages| FileOperation::TruncatePath { pages }),
        1 => Just(FileOperation::OtherFile),
    ];
    let checkpoint = any::<bool>().prop_map(|force| FileOperation::Checkpoint { force });
    prop::collection::vec(prop_oneof![2 => mappings, 4 => stores, 4 => calls, 3 => checkpoint], 1..40)
}
