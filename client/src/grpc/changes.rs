//! Changed pages.

use bytes::Bytes;
use fdmap_proto::columns;
use fdmap_proto::convert::{ConvertError, generation_from_wire};
use fdmap_proto::units::{Generation, to_u64};
use fdmap_proto::v1::changes_response::Body;
use fdmap_proto::{AttributeSet, ChangedPages, Coverage, FileName, PageIndex, PageRange, Provenance, v1};
use tonic::Streaming;

use super::{Client, bounded};
use crate::{ClientError, Timeouts};

/// Encoding of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangesEncoding {
    /// Runs. The only encoding with attributes.
    #[default]
    Runs,
    /// One bitmap of changed pages and one of conservative pages.
    Bitmaps,
    /// One 64-bit pagemap entry per page, with bit 55 (soft-dirty) set for changed pages.
    Entries,
}

/// Options of [`Client::changes`]. The default reports all writes since the file was created, as runs.
#[derive(Clone, Debug, Default)]
pub struct ChangesOptions {
    /// Report pages written in generations after this one.
    pub since: Generation,
    /// Report the frozen set of this cursor; requires `since` to be [`Generation::NONE`].
    pub cursor: Option<String>,
    /// Pages to report; `None`: all pages.
    pub range: Option<PageRange>,
    /// Encoding of the batches.
    pub encoding: ChangesEncoding,
    /// Current attributes of the changed pages to report.
    pub attributes: AttributeSet,
}

/// Header of a stream of changes.
#[derive(Clone, Debug)]
pub struct ChangesHeader {
    /// Changes after this generation are reported.
    pub since: Generation,
    /// Last closed generation. The answer contains all writes up to it, and possibly writes of the open generation.
    pub until_generation: Generation,
    /// Pages that the batches cover.
    pub range: PageRange,
    /// Size of the file in pages.
    pub file_pages: u64,
    /// Coverage of the reported generations.
    pub coverage: Coverage,
    /// Provenance of page states or attributes, if requested.
    pub provenance: Option<Provenance>,
}

/// One batch of changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedBatch {
    /// Runs of changed pages in ascending page order.
    Runs(Vec<ChangedPages>),
    /// Bitmaps of consecutive pages.
    Bitmaps(ChangedBitmaps),
    /// Little-endian 64-bit pagemap entries.
    Entries {
        /// Page of the first entry.
        first: PageIndex,
        /// 8 bytes per page.
        bytes: Bytes,
    },
}

/// Bitmaps of consecutive pages: bit p % 8 of byte p / 8 belongs to the `p`th page. An empty bitmap has no bit set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedBitmaps {
    /// Pages of the bitmaps.
    pub range: PageRange,
    /// All changed pages.
    pub changed: Bytes,
    /// Changed pages whose write was not observed.
    pub conservative: Bytes,
}

impl Client {
    /// Streams the pages that were written after a generation, or the frozen set of a cursor. Has no side effects.
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn changes(&self, file: &FileName, options: ChangesOptions) -> Result<Changes, ClientError> {
        let ChangesOptions { since, cursor, range, encoding, attributes } = options;
        let wire_encoding = match encoding {
            ChangesEncoding::Runs => v1::Encoding::Runs,
            ChangesEncoding::Bitmaps => v1::Encoding::Bitmaps,
            ChangesEncoding::Entries => v1::Encoding::Entries,
        };
        let request = v1::ChangesRequest {
            file: Some(file.clone().into()),
            since_generation: since.get(),
            cursor: cursor.unwrap_or_default(),
            range: range.map(v1::PageRange::from),
            encoding: wire_encoding.into(),
            attributes: attributes.to_wire(),
        };
        let mut stream = self.wait("Changes", self.tracking.clone().changes(request)).await?;
        let first = bounded("Changes", self.timeouts, stream.message()).await?;
        let Some(Body::Header(header)) = first.and_then(|message| message.body) else {
            return Err(ClientError::Unexpected("first message of Changes is not a header"));
        };
        let header = header_of(header)?;
        let progress = Progress::new(header.range, encoding == ChangesEncoding::Entries);
        Ok(Changes { header, stream, progress, timeouts: self.timeouts })
    }
}

/// Stream of changes.
#[derive(Debug)]
pub struct Changes {
    header: ChangesHeader,
    stream: Streaming<v1::ChangesResponse>,
    progress: Progress,
    timeouts: Timeouts,
}

impl Changes {
    /// Header of the stream.
    #[must_use]
    pub const fn header(&self) -> &ChangesHeader {
        &self.header
    }

    /// First page that is not received yet.
    #[must_use]
    pub const fn reached(&self) -> PageIndex {
        self.progress.next
    }

    /// Returns the next batch; `None` at the end of the stream.
    ///
    /// # Errors
    /// [`ClientError::Unexpected`] if batches overlap or are missing; [`ClientError`] of the connection.
    pub async fn next(&mut self) -> Result<Option<ChangedBatch>, ClientError> {
        match bounded("Changes", self.timeouts, self.stream.message()).await? {
            Some(message) => self.progress.take(message).map(Some),
            None => self.progress.finish().map(|()| None),
        }
    }

    /// Collects all runs of a stream with [`ChangesEncoding::Runs`].
    ///
    /// # Errors
    /// [`ClientError::Refused`] by the service; [`ClientError`] of the connection.
    pub async fn runs(mut self) -> Result<Vec<ChangedPages>, ClientError> {
        let mut all = Vec::new();
        while let Some(batch) = self.next().await? {
            match batch {
                ChangedBatch::Runs(runs) => all.extend(runs),
                _ => return Err(ClientError::Unexpected("batch does not contain runs")),
            }
        }
        Ok(all)
    }
}

fn header_of(header: v1::ChangesHeader) -> Result<ChangesHeader, ClientError> {
    let since = generation_from_wire("since_generation", header.since_generation)?;
    let until_generation = generation_from_wire("until_generation", header.until_generation)?;
    if since > until_generation {
        return Err(ClientError::Unexpected("until_generation is before since_generation"));
    }
    Ok(ChangesHeader {
        since,
        until_generation,
        range: header.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
        file_pages: header.file_pages,
        coverage: header.coverage.ok_or(ConvertError::Missing("coverage"))?.try_into()?,
        provenance: header.provenance.map(Provenance::try_from).transpose()?,
    })
}

/// Checks that batches are in order and within the range.
#[derive(Debug)]
struct Progress {
    range: PageRange,
    /// First page that is not received yet.
    next: PageIndex,
    /// Every page must be received.
    complete: bool,
}

impl Progress {
    const fn new(range: PageRange, complete: bool) -> Self {
        Self { range, next: range.start(), complete }
    }

    /// Decodes a batch that follows the previous one.
    fn take(&mut self, message: v1::ChangesResponse) -> Result<ChangedBatch, ClientError> {
        let (first, end, batch) = match message.body {
            Some(Body::Runs(runs)) => {
                let first = PageIndex(runs.first_page);
                let runs = columns::decode(runs)?;
                let end = runs.last().map_or(first, |pages| pages.run.range.end());
                (first, end, ChangedBatch::Runs(runs))
            }
            Some(Body::Bitmaps(batch)) => {
                let bitmaps = bitmaps(batch)?;
                (bitmaps.range.start(), bitmaps.range.end(), ChangedBatch::Bitmaps(bitmaps))
            }
            Some(Body::Entries(v1::EntryBatch { first_page, entries: bytes })) => {
                if !bytes.len().is_multiple_of(8) {
                    return Err(ClientError::Unexpected("entries are not a multiple of 8 bytes"));
                }
                let first = PageIndex(first_page);
                (first, first.plus(to_u64(bytes.len() / 8)), ChangedBatch::Entries { first, bytes })
            }
            Some(Body::Header(_)) | None => return Err(ClientError::Unexpected("message is not a batch")),
        };
        let follows = if self.complete { first == self.next } else { first >= self.next };
        if !follows || end > self.range.end() {
            return Err(ClientError::Unexpected("batch overlaps the previous one or leaves a gap"));
        }
        self.next = end;
        Ok(batch)
    }

    /// Checks that the stream is complete.
    fn finish(&self) -> Result<(), ClientError> {
        if self.complete && self.next != self.range.end() {
            return Err(ClientError::Unexpected("stream of changes ended early"));
        }
        Ok(())
    }
}

fn bitmaps(batch: v1::ChangedBitmaps) -> Result<ChangedBitmaps, ClientError> {
    let v1::ChangedBitmaps { first_page, pages, changed, conservative } = batch;
    for bitmap in [&changed, &conservative] {
        if !bitmap.is_empty() && to_u64(bitmap.len()) != pages.div_ceil(8) {
            return Err(ClientError::Unexpected("bitmap has the wrong length"));
        }
    }
    // Missing bytes are 0.
    let of_changed = changed.iter().chain(std::iter::repeat(&0));
    if conservative.iter().zip(of_changed).any(|(conservative, changed)| conservative & !changed != 0) {
        return Err(ClientError::Unexpected("conservative page is not in the changed bitmap"));
    }
    let end = first_page.checked_add(pages).ok_or(ConvertError::Number { field: "pages", value: pages })?;
    let range = PageRange::new(PageIndex(first_page), PageIndex(end)).unwrap_or_default();
    Ok(ChangedBitmaps { range, changed, conservative })
}

#[cfg(test)]
mod tests {
    use fdmap_proto::ChangedRun;
    use fdmap_proto::columns::Columns;

    use super::*;

    fn runs(first: u64, ranges: &[(u64, u64)]) -> v1::ChangesResponse {
        let mut columns = Columns::new(PageIndex(first));
        for (start, len) in ranges {
            let range = PageRange::at(PageIndex(*start), *len);
            let run = ChangedRun { range, conservative: false };
            columns.push(&ChangedPages { run, attributes: None });
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
    fn runs_may_skip_pages_but_not_go_back() {
        let mut progress = Progress::new(PageRange::first(100), false);
        assert!(progress.take(runs(0, &[(3, 2), (9, 1)])).is_ok());
        assert_eq!(progress.next, PageIndex(10));
        assert!(progress.take(runs(9, &[(9, 1)])).is_err(), "page 9 again");
        assert!(progress.take(runs(50, &[(60, 40)])).is_ok());
        assert!(progress.take(runs(100, &[(100, 1)])).is_err(), "past the end");
        assert!(progress.finish().is_ok());
    }

    #[test]
    fn entries_cover_every_page() {
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
    fn inconsistent_bitmaps_are_rejected() {
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
    fn header_that_ends_before_it_starts_is_rejected() {
        let coverage = v1::Coverage { exact: true, granularity_pages: 1, ..Default::default() };
        let range = Some(v1::PageRange { start: 0, end: 9 });
        let header = v1::ChangesHeader {
            since_generation: 3,
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
