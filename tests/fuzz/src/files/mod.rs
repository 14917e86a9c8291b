//! Requests that create files, and those that name mappings to track. The target creates the files in a registry of its own,
//! and checks each answer against the rules of files.proto.

mod check;

use std::sync::{Arc, LazyLock};

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::units::{PageIndex, PageSize};
use fdmap_proto::v1;
use fdmap_server::files::{AllocatedLimits, Caller, KeepPolicy, Limits, Quotas, Registry};
use fdmap_server::probe::SyscallsProbe;
use fdmap_server::scan::PageStateReader;
use fdmap_server::tracking::EventSources;
use prost::Message as _;

use crate::draft::{enum_value, enum_values, lifetime, rare, rarely, up_to};
use crate::fdpass::{check_open_files, open_files};
use check::Created;

/// Limits that inputs can reach.
static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits {
    allocated: AllocatedLimits { per_user: 1 << 30, of_users: 1 << 32 },
    file_bytes: 1 << 40,
    bytes_per_user: 3 << 39,
    files_per_user: 3,
    users_at_limit: 2,
    ..Limits::default()
});
/// The callers: root, and two users.
const USERS: [u32; 3] = [0, 1000, 1001];

#[derive(Arbitrary, Debug)]
pub enum Input {
    Create(#[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 8))] Vec<Create>),
    Track(#[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 64))] Vec<Mapping>),
}

#[derive(Arbitrary, Debug)]
pub struct Create {
    /// Index in [`USERS`].
    caller: u8,
    request: CreateDraft,
}

#[derive(Arbitrary, Debug)]
enum CreateDraft {
    Fields {
        name: NameDraft,
        size_bytes: SizeDraft,
        #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { enum_value(u, 3) } else { Ok(1) })]
        backing: i32,
        #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(0) })]
        hugetlb_page_size: u64,
        #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
        seals: Vec<i32>,
        access: Option<AccessDraft>,
        #[arbitrary(with = lifetime)]
        lifetime: i32,
    },
    /// Any bytes, decoded as a `CreateRequest`.
    Bytes(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum NameDraft {
    /// One of a few names, so that some are taken.
    Few(u8),
    Any(String),
    /// Of this length.
    Long(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum SizeDraft {
    Pages(u8),
    /// Near a power of two.
    Near {
        power: u8,
        less: u8,
    },
    Any(u64),
}

#[derive(Arbitrary, Debug)]
struct AccessDraft {
    user: u8,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    owner: Vec<i32>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 6))]
    other: Vec<i32>,
}

/// A mapping of a Track request.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Mapping {
    address: u16,
    pages: u8,
    first_page: u8,
    /// Any values, in place of these. Most are refused.
    #[arbitrary(with = rare)]
    any: Option<(u64, u64, u64)>,
}

impl Create {
    fn request(&self) -> Option<v1::CreateRequest> {
        let user = |nth: u8| USERS[usize::from(nth) % USERS.len()];
        match &self.request {
            CreateDraft::Bytes(bytes) => v1::CreateRequest::decode(&bytes[..]).ok(),
            CreateDraft::Fields { name, size_bytes, backing, hugetlb_page_size, seals, access, lifetime } => {
                Some(v1::CreateRequest {
                    name: name.text(),
                    size_bytes: size_bytes.bytes(),
                    backing: *backing,
                    hugetlb_page_size: *hugetlb_page_size,
                    seals: seals.clone(),
                    access: access.as_ref().map(|access| v1::Access {
                        uid: user(access.user),
                        gid: user(access.user),
                        owner: access.owner.clone(),
                        group: Vec::new(),
                        other: access.other.clone(),
                    }),
                    lifetime: *lifetime,
                })
            }
        }
    }
}

impl NameDraft {
    fn text(&self) -> String {
        match self {
            Self::Few(nth) => format!("file-{}", nth % 4),
            Self::Any(name) => name.clone(),
            Self::Long(len) => "n".repeat(usize::from(*len)),
        }
    }
}

impl SizeDraft {
    fn bytes(self) -> u64 {
        match self {
            Self::Pages(pages) => u64::from(pages) * 4096,
            Self::Near { power, less } => (1_u64 << (power % 64)).saturating_sub(u64::from(less % 4)),
            Self::Any(bytes) => bytes,
        }
    }
}

impl Mapping {
    fn fields(self) -> (u64, u64, PageIndex) {
        let (address, length, first) = self.any.unwrap_or((
            u64::from(self.address) * 4096,
            u64::from(self.pages) * 4096,
            u64::from(self.first_page),
        ));
        (address, length, PageIndex(first))
    }
}

/// Runs the requests and checks the answers.
///
/// # Panics
/// If a check fails.
pub fn run(input: Input) {
    match input {
        Input::Track(mappings) => {
            let mappings: Vec<_> = mappings.into_iter().map(Mapping::fields).collect();
            check::extents(&mappings);
        }
        Input::Create(requests) => {
            LazyLock::force(&REGISTRY);
            let before = open_files();
            create_all(requests);
            check_open_files(before, "deleted files");
        }
    }
}

/// Of all runs: each deletes its files, and a quota that is not returned is noticed later.
static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
    let event_sources = Arc::new(EventSources::new(None, false, false).unwrap());
    let reader = PageStateReader::new(Arc::new(SyscallsProbe));
    let quotas = Quotas::new(LIMITS.users_at_limit);
    Registry::new(reader, event_sources, PageSize::new(4096).unwrap(), Vec::new(), &quotas, *LIMITS, KeepPolicy::default())
});

fn create_all(requests: Vec<Create>) {
    let mut created: Vec<Created> = Vec::new();
    for create in requests {
        let uid = USERS[usize::from(create.caller) % USERS.len()];
        let caller = Caller { uid, gid: uid, groups: Vec::new(), admin: uid == 0 };
        if let Some(request) = create.request() {
            check::create(&REGISTRY, &caller, request, &mut created);
        }
    }
    check::all_deletable(&REGISTRY, created);
}
