//! A set of pages, one bit each. Pure.

use std::fmt;

/// A set of the pages of one file.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
}

impl PageSet {
    /// An empty set of the first `pages` pages of a file.
    #[must_use]
    pub fn of(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize] }
    }

    /// Adds a page.
    ///
    /// # Panics
    /// If the file has no such page.
    pub fn insert(&mut self, page: u64) {
        self.words[(page / 64) as usize] |= 1 << (page % 64);
    }

    /// True if the set contains the page.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        self.words.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The pages of the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        (0_u64..).zip(&self.words).flat_map(|(index, word)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| u64::from(left.trailing_zeros()))?;
                left &= left - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// The pages of this set that `other` does not contain.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let others = other.words.iter().chain(std::iter::repeat(&0));
        Self { words: self.words.iter().zip(others).map(|(own, other)| own & !other).collect() }
    }
}

impl Extend<u64> for PageSet {
    fn extend<T: IntoIterator<Item = u64>>(&mut self, pages: T) {
        for page in pages {
            self.insert(page);
        }
    }
}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first: Vec<_> = self.iter().take(10).collect();
        write!(f, "{} pages, the first of them {first:?}", self.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_contains_the_inserted_pages() {
        let mut set = PageSet::of(130);
        let pages = [0, 1, 63, 64, 127, 129];
        set.extend(pages);
        assert_eq!(set.iter().collect::<Vec<_>>(), pages);
        assert_eq!(set.count(), 6);
        assert!(set.contains(127) && !set.contains(128) && !set.contains(100_000));
        let mut other = PageSet::of(130);
        other.extend([1, 2, 129]);
        assert_eq!(set.without(&other).iter().collect::<Vec<_>>(), [0, 63, 64, 127]);
    }
}
