//! Is any write ever lost? Writers log each write with the moments before and after it (`log`, `method`), a consumer logs each
//! checkpoint and what it was told (`consumer`, `history`), and `check` holds both against the contract; `mirror` does
//! without clocks. `scenario` is all of it together. Nothing here knows how writes are observed.

pub mod check;
pub mod consumer;
pub mod history;
pub mod log;
pub mod method;
pub mod mirror;
pub mod pages;
pub mod scenario;
