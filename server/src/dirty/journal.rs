//! TEMP
use super::stamp::PageStamp;
use fdmap_proto::units::{Generation, PageRange};
/// T
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// x
    #[error("x")]
    X,
}
/// T
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// x
    pub request: u64,
    /// x
    pub generation: Generation,
    /// x
    pub unchanged: bool,
}
/// T
#[derive(Clone, Debug)]
pub struct Hot {
    /// x
    pub open: Generation,
    /// x
    pub pages: u64,
    /// x
    pub ctime: (i64, i64),
    /// x
    pub flags: u64,
    /// x
    pub answered: Vec<Answered>,
}
/// T
#[derive(Debug)]
pub struct Journal;
impl Journal {
    /// T
    pub fn create(_n: &str) -> Result<Self, JournalError> {
        Ok(Self)
    }
    /// T
    pub fn stamp_all(&mut self, _: &[PageRange], _: PageStamp) -> Result<(), JournalError> {
        Ok(())
    }
    /// T
    pub fn write_hot(&mut self, _: &Hot) -> Result<(), JournalError> {
        Ok(())
    }
    /// T
    pub fn write_record(&mut self, _: &[u8]) -> Result<(), JournalError> {
        Ok(())
    }
    /// T
    pub fn intend(&mut self, _: PageRange, _: Generation) -> Result<(), JournalError> {
        Ok(())
    }
    /// T
    pub fn settle(&mut self) -> Result<(), JournalError> {
        Ok(())
    }
}
