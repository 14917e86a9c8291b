//! Is any write ever lost? Writers log each write with the moments before and after it (`log`, `way`), a consumer logs each
//! checkpoint and what it was told (`consumer`, `history`, `mirror`), and `check` holds both against the contract. Nothing
//! here knows how writes are observed.

pub mod check;
pub mod history;
pub mod log;
pub mod pages;
pub mod way;
