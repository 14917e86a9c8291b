//! Requests for the content of swap slots.

use fdmap_proto::{SlotContent, SwapSlot, v1};

use super::{LookupQuery, QueryError};
use crate::files::Limits;

/// Validates a request. Its pages are looked up twice, the states of each time being current.
///
/// # Errors
/// [`QueryError`]
pub fn slot_query(request: v1::SlotContentRequest, limits: &Limits) -> Result<LookupQuery, QueryError> {
    let v1::SlotContentRequest { file, pages } = request;
    LookupQuery::new(v1::LookupRequest { file, pages, ..Default::default() }, limits)
}

/// The slots of pages, and where their content is. `before` and `after`: the slots of the pages before and after the content of the
/// former was looked for, in `contents`. It is known only of pages that kept their slots.
#[must_use]
pub fn settled_slots(
    before: &[Option<SwapSlot>],
    contents: &[SlotContent],
    after: &[Option<SwapSlot>],
) -> Vec<(Option<SwapSlot>, SlotContent)> {
    let mut contents = contents.iter().copied();
    before
        .iter()
        .zip(after)
        .map(|(before, after)| {
            let content = before.and_then(|_| contents.next()).unwrap_or_default();
            (*after, if before == after { content } else { SlotContent::Unknown })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use SlotContent::{Device, Unknown, Zero};
    use fdmap_proto::FileName;

    use super::*;

    #[test]
    fn content_is_known_of_pages_that_kept_their_slots() {
        let [one, two, three] = [1, 2, 3].map(|offset| SwapSlot::new(0, offset));
        let before = [one, None, two, three, None];
        let after = [one, two, None, three, None];
        let expected = [(one, Device), (two, Unknown), (None, Unknown), (three, Zero), (None, Unknown)];
        assert_eq!(settled_slots(&before, &[Device, Device, Zero], &after), expected);
        assert_eq!(settled_slots(&[one, two], &[Zero], &[two, one]), [(two, Unknown), (one, Unknown)]);
        assert_eq!(settled_slots(&[one], &[], &[one]), [(one, Unknown)]);
    }

    #[test]
    fn number_of_pages_is_limited() {
        let limits = Limits { lookup_pages: 3, ..Limits::default() };
        let file = v1::FileRef::from(FileName::Name("ram".to_owned()));
        let query = |pages| slot_query(v1::SlotContentRequest { file: Some(file.clone()), pages }, &limits);
        assert!(query(vec![1, 0, 2]).is_ok());
        assert!(query(vec![0; 4]).is_err());
        assert!(query(vec![]).is_err());
    }
}
