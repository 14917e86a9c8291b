//! [`BitWriter`].

use std::io::{self, Write};

/// Writes runs of pages as a bitmap, one bit per page, lowest bit first.
#[derive(Debug)]
pub struct BitWriter<W> {
    to: W,
    /// Pages written.
    pages: u64,
    /// Bits of the incomplete last byte.
    byte: u8,
}

impl<W: Write> BitWriter<W> {
    pub const fn new(to: W) -> Self {
        Self { to, pages: 0, byte: 0 }
    }

    /// Appends `pages` equal bits.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn add(&mut self, mut pages: u64, set: bool) -> io::Result<()> {
        const WHOLE: [u8; 4096] = [0xff; 4096];
        const NONE: [u8; 4096] = [0; 4096];
        while pages > 0 && (!self.pages.is_multiple_of(8) || pages < 8) {
            self.byte |= u8::from(set) << (self.pages % 8);
            (self.pages, pages) = (self.pages + 1, pages - 1);
            if self.pages.is_multiple_of(8) {
                self.to.write_all(&[self.byte])?;
                self.byte = 0;
            }
        }
        let bytes = if set { &WHOLE } else { &NONE };
        while pages >= 8 {
            let now = bytes.len().min(usize::try_from(pages / 8).unwrap_or(usize::MAX));
            self.to.write_all(&bytes[..now])?;
            let written = fdmap_client::proto::units::to_u64(now) * 8;
            (self.pages, pages) = (self.pages + written, pages - written);
        }
        if pages > 0 { self.add(pages, set) } else { Ok(()) }
    }

    /// Pads the last byte with 0 and returns the writer.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        if !self.pages.is_multiple_of(8) {
            self.to.write_all(&[self.byte])?;
        }
        Ok(self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bitmap_equals_the_oracle(pieces in proptest::collection::vec((0_u64..70_000, any::<bool>()), 0..6)) {
            let mut writer = BitWriter::new(Vec::new());
            let mut oracle = Vec::new();
            for (pages, set) in pieces {
                writer.add(pages, set).unwrap();
                oracle.extend((0..pages).map(|_| set));
            }
            let bytes = writer.finish().unwrap();
            prop_assert_eq!(bytes.len(), oracle.len().div_ceil(8));
            let bits: Vec<_> = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect();
            prop_assert_eq!(&bits[..oracle.len()], &oracle[..]);
            prop_assert!(bits[oracle.len()..].iter().all(|bit| !bit));
        }
    }
}
