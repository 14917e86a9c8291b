//! Requests about written pages. The target validates each request and answers it from stamps with the code of the service, and
//! compares the answer with a list of single stamps. Cursor requests change cursors, which are compared with a map of them. It reads
//! nothing from the kernel but the time.

mod check;
mod cursors;
mod stamps;

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::v1;
use prost::Message as _;

use crate::draft::{DurationDraft, FileDraft, RangeDraft, enum_value, enum_values, ram, rare, rarely, up_to};
use crate::scan::model::{Model, ModelDraft};
use cursors::CursorsDraft;
use stamps::{StampDraft, StampList};

/// A file, the stamps of its pages, and a request.
#[derive(Arbitrary, Debug)]
pub struct Input {
    file: ModelDraft,
    #[arbitrary(with = |u: &mut Unstructured<'_>| up_to(u, 64))]
    stamps: Vec<StampDraft>,
    request: RequestDraft,
}

#[derive(Arbitrary, Debug)]
enum RequestDraft {
    Changes(ChangesDraft),
    /// Any bytes, decoded as a `ChangesRequest`.
    Bytes(Vec<u8>),
    /// Cursor requests.
    Cursors(CursorsDraft),
    /// The window of a `DirtyRateRequest`.
    Window(DurationDraft),
}

#[derive(Arbitrary, Debug)]
struct ChangesDraft {
    file: FileDraft,
    since: u8,
    /// Any generation, in place of `since`.
    #[arbitrary(with = rare)]
    any_since: Option<u64>,
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(String::new()) })]
    cursor: String,
    range: RangeDraft,
    #[arbitrary(with = |u: &mut Unstructured<'_>| enum_value(u, 4))]
    encoding: i32,
    #[arbitrary(with = |u: &mut Unstructured<'_>| if u.ratio(1_u8, 3)? { enum_values(u, 4) } else { Ok(Vec::new()) })]
    attributes: Vec<i32>,
}

impl ChangesDraft {
    fn request(&self, model: &Model) -> v1::ChangesRequest {
        v1::ChangesRequest {
            file: self.file.field(&[ram()]),
            since_generation: self.any_since.unwrap_or(u64::from(self.since)),
            cursor: self.cursor.clone(),
            range: self.range.field(model.first, model.file_pages),
            encoding: self.encoding,
            attributes: self.attributes.clone(),
        }
    }
}

/// Answers the request and checks the answer.
///
/// # Panics
/// If the answer is wrong.
pub fn run(input: Input) {
    match input.request {
        RequestDraft::Cursors(draft) => cursors::run(&draft),
        RequestDraft::Window(window) => check::window(window.field()),
        RequestDraft::Changes(draft) => {
            let model = Model::new(input.file);
            let stamps = StampList::new(&model, &input.stamps);
            check::changes(&model, &stamps, &draft.request(&model));
        }
        RequestDraft::Bytes(bytes) => {
            let Ok(request) = v1::ChangesRequest::decode(&bytes[..]) else { return };
            let model = Model::new(input.file);
            check::changes(&model, &StampList::new(&model, &input.stamps), &request);
        }
    }
}
