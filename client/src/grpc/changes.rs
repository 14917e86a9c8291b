//! The pages that were written.

use bytes::Bytes;
use fdmap_proto::changed::changed_from_wire;
use fdmap_proto::convert::{AttributeSet, ConvertError, FileName, generation_from_wire};
use fdmap_proto::units::{Generation, to_u64};
use fdmap_proto::v1::changes_response::Body;
use fdmap_proto::{ChangedPages, Coverage, PageIndex, PageRange, Provenance, v1};
use tonic::Streaming;

use super::tracking::coverage;
use super::{Client, bounded};
use crate::{ClientError, Timeouts};

/// How changes are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangesEncoding {
    /// Runs; the only one with attributes.
    #[default]
    Runs,
    /// A bitmap of all changed pages and one of those that nobody saw written.
    Bitmaps,
    /// 64-bit pagemap entries of all pages, with bit 55 ("soft dirty") set for changed ones.
    Entries,
}

/// What changes to tell. The default is all that was ever written, in runs.
#[derive(Clone, Debug, Default)]
pub struct ChangesOptions {
    /// What was written in generations after this one.
    pub since: Generation,
    /// The set that this cursor has frozen; then `since` must be [`Generation::NONE`].
    pub cursor: Option<String>,
    /// `None`: all pages.
    pub range: Option<PageRange>,
    /// How to answer.
    pub encoding: ChangesEncoding,
    /// These attributes of the changed pages, as they are now.
    pub attributes: AttributeSet,
}

/// What comes first in changes.
#[derive(Clone, Debug)]
pub struct ChangesHeader {
    /// Pages that were written after this generation are told.
    pub since: Generation,
    /// The last closed generation. All of it is told; what is written in the open one may be or may not.
    pub until_generation: Generation,
    /// The pages that are told of.
    pub range: PageRange,
    /// Pages of the file.
    pub file_pages: u64,
    /// What the generations told of rest on.
    pub coverage: Coverage,
    /// What states or attributes rest on, where those were asked for.
    pub provenance: Option<Provenance>,
}

/// A piece of the changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedBatch {
    /// Runs of changed pages in ascending order.
    Runs(Vec<ChangedPages>),
    /// Bitmaps.
    Bitmaps(ChangedBitmaps),
    /// Little-endian 64-bit entries.
    Entries {
        /// The page of the first one.
        first: PageIndex,
        /// The entries.
        bytes: Bytes,
    },
}

/// Bitmaps of some pages: bit p % 8 of byte p / 8 belongs to the `p`th page. An empty one has no bit set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedBitmaps {
    /// The pages.
    pub range: PageRange,
    /// All changed pages.
    pub changed: Bytes,
    /// Those of them that nobody saw written.
    pub conservative: Bytes,
}

impl Client {
    /// The pages of a file that were written after a generation was closed, or those that a cursor has frozen. Telling
    /// them destroys nothing.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn changes(&self, file: &FileName, options: ChangesOptions) -> Result<Changes, ClientError> {
        let ChangesOptions { since, cursor, range, encoding, attributes } = options;
        let wire_encoding = match encoding {
            ChangesEncoding::Runs => v1::Encoding::Runs,
            ChangesEncoding::Bitmaps => v1::Encoding::Bitmaps,
            ChangesEncoding::Entries => v1::Encoding::Entries,
        };
        let request = v1::ChangesRequest {
            file: Some(file.clone().into()),
            since: since.get(),
            cursor: cursor.unwrap_or_default(),
            range: range.map(v1::PageRange::from),
            encoding: wire_encoding.into(),
            attributes: attributes.to_wire(),
        };
        let mut stream = self.wait("Changes", self.tracking.clone().changes(request)).await?;
        let first = bounded("Changes", self.timeouts, stream.message()).await?;
        let Some(Body::Header(header)) = first.and_then(|message| message.body) else {
            return Err(ClientError::Unexpected("changes begin with their header"));
        };
        let header = header_of(header)?;
        let place = Progress::new(header.range, encoding == ChangesEncoding::Entries);
        Ok(Changes { header, stream, place, timeouts: self.timeouts })
    }
}

/// Changes, piece by piece.
#[derive(Debug)]
pub struct Changes {
    header: ChangesHeader,
    stream: Streaming<v1::ChangesResponse>,
    place: Progress,
    timeouts: Timeouts,
}

impl Changes {
    /// What came first.
    #[must_use]
    pub const fn header(&self) -> &ChangesHeader {
        &self.header
    }

    /// The pages that have been told of lie before this one.
    #[must_use]
    pub const fn reached(&self) -> PageIndex {
        self.place.next
    }

    /// The next piece; `None` when all of it has come.
    ///
    /// # Errors
    /// [`ClientError`], also if the pieces do not follow one another.
    pub async fn next(&mut self) -> Result<Option<ChangedBatch>, ClientError> {
        match bounded("Changes", self.timeouts, self.stream.message()).await? {
            Some(message) => self.place.take(message).map(Some),
            None => self.place.finish().map(|()| None),
        }
    }

    /// All runs of changes in runs.
    ///
    /// # Errors
    /// [`ClientError`]
    pub async fn runs(mut self) -> Result<Vec<ChangedPages>, ClientError> {
        let mut all = Vec::new();
        while let Some(batch) = self.next().await? {
            match batch {
                ChangedBatch::Runs(runs) => all.extend(runs),
                _ => return Err(ClientError::Unexpected("runs were expected")),
            }
        }
        Ok(all)
    }
}

fn header_of(header: v1::ChangesHeader) -> Result<ChangesHeader, ClientError> {
    let since = generation_from_wire("since", header.since)?;
    let until_generation = generation_from_wire("until_generation", header.until_generation)?;
    if since > until_generation {
        return Err(ClientError::Unexpected("changes reach no generation after the one they begin with"));
    }
    Ok(ChangesHeader {
        since,
        until_generation,
        range: header.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
        file_pages: header.file_pages,
        coverage: coverage(header.coverage)?,
        provenance: header.provenance.map(Provenance::try_from).transpose()?,
    })
}

/// How much of the range was told of. Pure.
#[derive(Debug)]
struct Progress {
    range: PageRange,
    /// The pages before it have been told of.
    next: PageIndex,
    /// Every page is told of, so that a gap is an error.
    complete: bool,
}

impl Progress {
    const fn new(range: PageRange, complete: bool) -> Self {
        Self { range, next: range.start(), complete }
    }

    /// The batch of a message, if it follows the one before.
    fn take(&mut self, message: v1::ChangesResponse) -> Result<ChangedBatch, ClientError> {
        let (first, end, batch) = match message.body {
            Some(Body::Runs(runs)) => {
                let first = PageIndex(runs.first_page);
                let runs = changed_from_wire(runs)?;
                let end = runs.last().map_or(first, |pages| pages.run.range.end());
                (first, end, ChangedBatch::Runs(runs))
            }
            Some(Body::Bitmaps(batch)) => {
                let bitmaps = bitmaps(batch)?;
                (bitmaps.range.start(), bitmaps.range.end(), ChangedBatch::Bitmaps(bitmaps))
            }
            Some(Body::Entries(v1::EntryBatch { first_page, entries: bytes })) => {
                if !bytes.len().is_multiple_of(8) {
                    return Err(ClientError::Unexpected("an entry is cut"));
                }
                let first = PageIndex(first_page);
                (first, first.plus(to_u64(bytes.len() / 8)), ChangedBatch::Entries { first, bytes })
            }
            Some(Body::Header(_)) | None => return Err(ClientError::Unexpected("a batch was expected")),
        };
        let follows = if self.complete { first == self.next } else { first >= self.next };
        if !follows || end > self.range.end() {
            return Err(ClientError::Unexpected("a batch does not follow the one before"));
        }
        self.next = end;
        Ok(batch)
    }

    /// Nothing more comes.
    fn finish(&self) -> Result<(), ClientError> {
        if self.complete && self.next != self.range.end() {
            return Err(ClientError::Unexpected("the changes ended early"));
        }
        Ok(())
    }
}

fn bitmaps(batch: v1::ChangedBitmaps) -> Result<ChangedBitmaps, ClientError> {
    let v1::ChangedBitmaps { first_page, pages, changed, conservative } = batch;
    for bitmap in [&changed, &conservative] {
        if !bitmap.is_empty() && to_u64(bitmap.len()) != pages.div_ceil(8) {
            return Err(ClientError::Unexpected("a bitmap has not as many bits as pages"));
        }
    }
    // Bytes that are not there are 0.
    let of_changed = changed.iter().chain(std::iter::repeat(&0));
    if conservative.iter().zip(of_changed).any(|(conservative, changed)| conservative & !changed != 0) {
        return Err(ClientError::Unexpected("a page is told as written conservatively, and as not written"));
    }
    let end = first_page.checked_add(pages).ok_or(ConvertError::Number { field: "pages", value: pages })?;
    let range = PageRange::new(PageIndex(first_page), PageIndex(end)).unwrap_or_default();
    Ok(ChangedBitmaps { range, changed, conservative })
}

#[cfg(test)]
mod tests {
    use fdmap_proto::ChangedRun;
    use fdmap_proto::changed::ChangedColumns;

    use super::*;

    fn runs(first: u64, ranges: &[(u64, u64)]) -> v1::ChangesResponse {
        let mut columns = ChangedColumns::new(PageIndex(first));
        for (start, len) in ranges {
            let range = PageRange::at(PageIndex(*start), *len);
            columns.push(ChangedRun { range, conservative: false }, None);
        }
        v1::ChangesResponse { body: Some(Body::Runs(columns.finish())) }
    }

    fn bits(first_page: u64, pages: u64, changed: &'static [u8], conservative: &'static [u8]) -> Body {
        Body::Bitmaps(v1::ChangedBitmaps {
            first_page,
            pages,
            changed: Bytes::from_static(changed),
            conservative: Bytes::from_static(conservative),
        })
    }

    fn take(progress: &mut Progress, body: Body) -> Result<ChangedBatch, ClientError> {
        progress.take(v1::ChangesResponse { body: Some(body) })
    }

    #[test]
    fn runs_may_leave_pages_out_and_not_go_back() {
        let mut progress = Progress::new(PageRange::first(100), false);
        assert!(progress.take(runs(0, &[(3, 2), (9, 1)])).is_ok());
        assert_eq!(progress.next, PageIndex(10));
        assert!(progress.take(runs(9, &[(9, 1)])).is_err(), "page 9 again");
        assert!(progress.take(runs(50, &[(60, 40)])).is_ok());
        assert!(progress.take(runs(100, &[(100, 1)])).is_err(), "past the end");
        assert!(progress.finish().is_ok());
    }

    #[test]
    fn entries_leave_nothing_out() {
        let entries = |first_page, pages: usize| {
            Body::Entries(v1::EntryBatch { first_page, entries: Bytes::from(vec![0; pages * 8]) })
        };
        let mut progress = Progress::new(PageRange::at(PageIndex(10), 10), true);
        assert!(take(&mut progress, entries(11, 1)).is_err());
        assert!(take(&mut progress, entries(10, 4)).is_ok());
        assert!(progress.finish().is_err());
        assert!(take(&mut progress, entries(14, 7)).is_err());
        assert!(take(&mut progress, entries(14, 6)).is_ok());
        assert!(progress.finish().is_ok());
        let cut = Body::Entries(v1::EntryBatch { first_page: 20, entries: Bytes::from_static(&[0; 7]) });
        assert!(take(&mut progress, cut).is_err());
    }

    #[test]
    fn bitmaps_fit_their_pages_and_one_another() {
        let mut progress = Progress::new(PageRange::first(64), false);
        assert!(take(&mut progress, bits(0, 10, &[0xff, 3], &[1, 2])).is_ok());
        assert!(take(&mut progress, bits(10, 8, &[], &[])).is_ok());
        for bad in [
            bits(20, 10, &[0xff], &[]),
            bits(20, 8, &[1], &[2]),
            bits(20, 8, &[], &[1]),
            bits(u64::MAX, 8, &[1], &[]),
            bits(60, 8, &[1], &[]),
        ] {
            assert!(take(&mut progress, bad).is_err());
        }
    }

    #[test]
    fn header_reaches_at_least_where_it_begins() {
        let coverage = v1::Coverage { exact: true, granularity_pages: 1, ..Default::default() };
        let range = Some(v1::PageRange { start: 0, end: 9 });
        let header = v1::ChangesHeader {
            since: 3,
            until_generation: 3,
            range,
            file_pages: 9,
            coverage: Some(coverage),
            provenance: None,
        };
        assert_eq!(header_of(header.clone()).unwrap().until_generation, Generation::new(3).unwrap());
        assert!(header_of(v1::ChangesHeader { until_generation: 2, ..header.clone() }).is_err());
        assert!(header_of(v1::ChangesHeader { coverage: None, ..header }).is_err());
        assert!(header_of(v1::ChangesHeader { range: None, ..header }).is_err());
    }
}
