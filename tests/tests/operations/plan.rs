//! Steps on a file, and random lists of them for a combination of file, method of mapping and writers.

use fdmap_client::proto::Backing;
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::test_agent::operation::{By, DescriptorCall, FileOperation, MappingCall};
use fdmap_tests::tracked::{HUGE, PAGE};
use proptest::prelude::*;
use proptest::strategy::Union;

/// Base pages of a hugetlb page, or of a transparent huge page.
const PER_HUGE: u64 = HUGE / PAGE;

/// The memory of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub backing: Backing,
    /// The writers are in a memory cgroup, and parts of the file are swapped out.
    pub swapped: bool,
}

impl Kind {
    /// The size of a hugetlb page in bytes; 0 for shmem.
    pub const fn hugetlb(self) -> u64 {
        match self.backing {
            Backing::Hugetlb(bytes) => bytes,
            Backing::Shmem | Backing::ShmemThp => 0,
        }
    }

    /// Operations that allocate, free or unmap pages concern multiples of so many bytes. Linux 6.18 does not return from a
    /// truncation that begins within a huge page in swap.
    pub const fn unit(self) -> u64 {
        match self.backing {
            Backing::Hugetlb(bytes) => bytes,
            Backing::ShmemThp if self.swapped => HUGE,
            Backing::Shmem | Backing::ShmemThp => PAGE,
        }
    }

    /// Size of the file in pages at the start of a list.
    pub const fn pages(self) -> u64 {
        match self.backing {
            Backing::Shmem if self.swapped => PER_HUGE,
            Backing::Shmem => 48,
            Backing::ShmemThp => 3 * PER_HUGE,
            Backing::Hugetlb(_) => 4 * PER_HUGE,
        }
    }

    /// Maximum size of the file in pages.
    pub const fn max_pages(self) -> u64 {
        match self.backing {
            Backing::Hugetlb(_) => self.pages() + PER_HUGE,
            Backing::Shmem | Backing::ShmemThp => self.pages() + 8,
        }
    }
}

/// How the writing process maps the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingMethod {
    /// The service created the file; the client library maps and tracks it.
    Tracked,
    /// The service created the file. A process that does not know the service opens it by path and maps it.
    Untracked,
    /// The process created and mapped a memfd, before the service adopted it and tracked its mapping.
    Adopted,
    /// The process runs under the shim, and creates and maps a memfd.
    Shim,
}

pub const MAPPING_METHODS: [MappingMethod; 4] =
    [MappingMethod::Tracked, MappingMethod::Untracked, MappingMethod::Adopted, MappingMethod::Shim];

/// The process that maps the file, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapBy {
    /// The writing process, in its method.
    Main,
    /// The writing process, by `mmap` alone.
    Plain,
    /// Another process, which does not know the service.
    Other,
}

/// One step of a list. Mappings are indices into those that exist: without any, the step does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Map(MapBy),
    Operation(FileOperation),
    /// A write to a mapping from outside of its process: by `process_vm_writev` or to `/proc/PID/mem`.
    Remote {
        method: Method,
        mapping: usize,
        page: u64,
    },
    /// The memory cgroup of the writers gets a limit that the file exceeds, for a moment.
    Reclaim,
    Checkpoint {
        force: bool,
    },
}

/// One method of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    Mapping(MappingCall),
    Remote(Method),
    Descriptor(DescriptorCall),
}

/// The writers of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    All,
    Only(Writer),
}

#[derive(Clone, Copy, Debug)]
pub struct Combination {
    pub kind: Kind,
    pub method: MappingMethod,
    pub writers: Writers,
}

/// The writers that exist for files of this backing, each with its share of a list of all writers.
fn writers(backing: Backing) -> Vec<(u32, Writer)> {
    use {DescriptorCall as Descriptor, MappingCall as Mapping, Writer::Remote};
    let mut all = vec![
        (8, Writer::Mapping(Mapping::Store)),
        (1, Writer::Mapping(Mapping::StoreInChild)),
        (1, Writer::Mapping(Mapping::Read)),
        (1, Writer::Mapping(Mapping::Remove)),
        (1, Remote(Method::Vm)),
        (1, Remote(Method::Mem)),
        (1, Writer::Descriptor(Descriptor::Punch)),
        (1, Writer::Descriptor(Descriptor::PunchByIoctl)),
        (1, Writer::Descriptor(Descriptor::Ftruncate)),
        (1, Writer::Descriptor(Descriptor::TruncatePath)),
    ];
    // hugetlbfs has no write calls, and mremap does not duplicate its mappings.
    if !matches!(backing, Backing::Hugetlb(_)) {
        all.extend([
            (1, Writer::Mapping(Mapping::StoreToDuplicate)),
            (2, Writer::Descriptor(Descriptor::Pwrite)),
            (1, Writer::Descriptor(Descriptor::Writev)),
            (1, Writer::Descriptor(Descriptor::Splice)),
            (1, Writer::Descriptor(Descriptor::Copy)),
            (1, Writer::Descriptor(Descriptor::Sendfile)),
            (1, Writer::Descriptor(Descriptor::AioWrite)),
            (1, Writer::Descriptor(Descriptor::UringWrite)),
        ]);
    }
    all
}

/// All writers together and each by itself, for each method of mapping.
pub fn combinations(kind: Kind) -> Vec<Combination> {
    let alone = || writers(kind.backing).into_iter().map(|(_, writer)| Writers::Only(writer));
    let of_way = |method| [Writers::All].into_iter().chain(alone()).map(move |writers| (method, writers));
    MAPPING_METHODS
        .into_iter()
        .flat_map(of_way)
        .map(|(method, writers)| Combination { kind, method, writers })
        .collect()
}

type Steps = BoxedStrategy<Step>;

impl Combination {
    /// Random lists of steps.
    pub fn lists(self) -> impl Strategy<Value = Vec<Step>> {
        let checkpoint = any::<bool>().prop_map(|force| Step::Checkpoint { force }).boxed();
        let mut steps = vec![(10, self.writes()), (3, checkpoint)];
        match self.writers {
            Writers::All => steps.extend([(3, self.mapping_changes()), (2, self.no_writes())]),
            // The end of a mapping makes a generation conservative, which hides lost writes.
            Writers::Only(Writer::Mapping(_) | Writer::Remote(_)) => {
                steps.extend([(1, self.mapping_changes()), (1, self.no_writes())]);
            }
            Writers::Only(Writer::Descriptor(_)) if self.kind.swapped => {
                steps.push((4, self.swapping()));
            }
            Writers::Only(Writer::Descriptor(_)) => {}
        }
        prop::collection::vec(Union::new_weighted(steps), 1..40)
    }

    fn writes(self) -> Steps {
        let writers = match self.writers {
            Writers::All => writers(self.kind.backing),
            Writers::Only(writer) => vec![(1, writer)],
        };
        Union::new_weighted(
            writers.into_iter().map(|(weight, writer)| (weight, self.write(writer))).collect(),
        )
        .boxed()
    }

    fn write(self, writer: Writer) -> Steps {
        match writer {
            Writer::Mapping(call) => self.mapping(call),
            Writer::Remote(method) => (0..4_usize, 0..self.kind.pages())
                .prop_map(move |(mapping, page)| Step::Remote { method, mapping, page })
                .boxed(),
            Writer::Descriptor(call) => self.descriptor(call),
        }
    }

    fn mapping(self, call: MappingCall) -> Steps {
        (0..4_usize, 0..self.kind.pages())
            .prop_map(move |(mapping, page)| Step::Operation(FileOperation::Mapping { call, mapping, page }))
            .boxed()
    }

    fn descriptor(self, call: DescriptorCall) -> Steps {
        let by = match self.method {
            MappingMethod::Tracked | MappingMethod::Untracked => Just(By::Path).boxed(),
            MappingMethod::Adopted | MappingMethod::Shim => {
                prop_oneof![Just(By::Path), Just(By::Origin)].boxed()
            }
        };
        let pages = match call {
            DescriptorCall::Ftruncate | DescriptorCall::TruncatePath => (1..=self.kind.max_pages()).boxed(),
            // Also whole huge pages. Pages that are being allocated cannot be swapped out.
            DescriptorCall::Punch | DescriptorCall::Allocate
                if self.kind.backing != Backing::Shmem && !self.kind.swapped =>
            {
                prop_oneof![1..6_u64, PER_HUGE..2 * PER_HUGE].boxed()
            }
            _ => (1..6_u64).boxed(),
        };
        (by, 0..self.kind.pages(), pages)
            .prop_map(move |(by, page, pages)| {
                Step::Operation(FileOperation::Descriptor { call, by, page, pages })
            })
            .boxed()
    }

    /// Mappings that are made and that end.
    fn mapping_changes(self) -> Steps {
        let mut by = vec![(3, Just(Step::Map(MapBy::Main)).boxed())];
        if self.writers == Writers::All {
            by.push((1, Just(Step::Map(MapBy::Other)).boxed()));
            if matches!(self.method, MappingMethod::Tracked | MappingMethod::Adopted) {
                by.push((1, Just(Step::Map(MapBy::Plain)).boxed()));
            }
        }
        let ends = prop_oneof![2 => self.mapping(MappingCall::Unmap), 1 => self.mapping(MappingCall::Tear)];
        prop_oneof![4 => Union::new_weighted(by), 3 => ends].boxed()
    }

    fn swapping(self) -> Steps {
        prop_oneof![self.mapping(MappingCall::PageOut), Just(Step::Reclaim)].boxed()
    }

    /// Calls that write nothing.
    fn no_writes(self) -> Steps {
        let mut steps = vec![(2, self.mapping(MappingCall::Zap))];
        if self.kind.swapped {
            steps.push((6, self.swapping()));
        }
        if self.writers == Writers::All {
            steps.push((1, self.descriptor(DescriptorCall::Allocate)));
            steps.push((1, self.descriptor(DescriptorCall::OtherFile)));
        }
        Union::new_weighted(steps).boxed()
    }
}
