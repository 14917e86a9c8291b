//! Drafts of requests.

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::v1;
use prost::Message as _;

use super::check;
use super::model::Model;
use crate::draft::{DurationDraft, FileDraft, RangeDraft, enum_value, enum_values, ram};

/// A draft of a request about page states.
#[derive(Arbitrary, Debug)]
pub enum RequestDraft {
    Scan(ScanDraft),
    Lookup(LookupDraft),
    Summary(SummaryDraft),
    Diff(DiffDraft),
    /// Any bytes, decoded as a request of this RPC.
    Bytes(Rpc, Vec<u8>),
}

/// An RPC of the Pages service.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Rpc {
    Scan,
    Lookup,
    Summary,
    Diff,
}

#[derive(Arbitrary, Debug)]
pub struct ScanDraft {
    file: FileDraft,
    range: RangeDraft,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 5))]
    states: Vec<i32>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 4))]
    attributes: Vec<i32>,
    max_age: DurationDraft,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_value(u, 4))]
    encoding: i32,
    distinguish_swap_cached: bool,
    slots: bool,
    retain_for: DurationDraft,
}

#[derive(Arbitrary, Debug)]
pub struct LookupDraft {
    file: FileDraft,
    /// Relative to the first page with data.
    near: Vec<i16>,
    any: Vec<u64>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_values(u, 4))]
    attributes: Vec<i32>,
    max_age: DurationDraft,
    distinguish_swap_cached: bool,
}

#[derive(Arbitrary, Debug)]
pub struct SummaryDraft {
    file: FileDraft,
    range: RangeDraft,
    max_age: DurationDraft,
    distinguish_swap_cached: bool,
    retain_for: DurationDraft,
}

#[derive(Arbitrary, Debug)]
pub struct DiffDraft {
    file: FileDraft,
    from: u64,
    to: u64,
    range: RangeDraft,
    retain_for: DurationDraft,
}

fn file(draft: &FileDraft) -> Option<v1::FileRef> {
    draft.field(&[ram()])
}

impl ScanDraft {
    pub(super) fn request(&self, model: &Model) -> v1::ScanRequest {
        v1::ScanRequest {
            file: file(&self.file),
            range: self.range.field(model.first, model.file_pages),
            states: self.states.clone(),
            attributes: self.attributes.clone(),
            max_age: self.max_age.field(),
            encoding: self.encoding,
            distinguish_swap_cached: self.distinguish_swap_cached,
            slots: self.slots,
            retain_for: self.retain_for.field(),
        }
    }
}

impl LookupDraft {
    pub(super) fn request(&self, model: &Model) -> v1::LookupRequest {
        let near = self.near.iter().map(|page| model.first.saturating_add_signed(i64::from(*page)));
        v1::LookupRequest {
            file: file(&self.file),
            pages: near.chain(self.any.iter().copied()).collect(),
            attributes: self.attributes.clone(),
            max_age: self.max_age.field(),
            distinguish_swap_cached: self.distinguish_swap_cached,
        }
    }
}

impl SummaryDraft {
    pub(super) fn request(&self, model: &Model) -> v1::SummaryRequest {
        v1::SummaryRequest {
            file: file(&self.file),
            range: self.range.field(model.first, model.file_pages),
            max_age: self.max_age.field(),
            distinguish_swap_cached: self.distinguish_swap_cached,
            retain_for: self.retain_for.field(),
        }
    }
}

impl DiffDraft {
    pub(super) fn request(&self, model: &Model) -> v1::DiffRequest {
        v1::DiffRequest {
            file: file(&self.file),
            from_snapshot_id: self.from,
            to_snapshot_id: self.to,
            range: self.range.field(model.first, model.file_pages),
            retain_for: self.retain_for.field(),
        }
    }
}

/// Answers the request that the bytes decode to, if they do.
pub(super) fn decode(model: &Model, rpc: Rpc, bytes: &[u8]) {
    match rpc {
        Rpc::Scan => v1::ScanRequest::decode(bytes).iter().for_each(|request| check::scan(model, request)),
        Rpc::Lookup => {
            v1::LookupRequest::decode(bytes).iter().for_each(|request| check::lookup(model, request))
        }
        Rpc::Summary => {
            v1::SummaryRequest::decode(bytes).iter().for_each(|request| check::summary(model, request));
        }
        Rpc::Diff => v1::DiffRequest::decode(bytes)
            .iter()
            .for_each(|request| check::diff(model, model, model.whole_blocks(), request)),
    }
}
