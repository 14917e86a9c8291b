//! The search for lost writes. Writers log each write with the times before and after it (`log`, `method`), a consumer records
//! each checkpoint and the reported pages (`consumer`, `history`), and `check` compares both under the contract; `mirror`
//! needs no clock. `scenario` combines them. Nothing here depends on how writes are observed.

pub mod check;
pub mod consumer;
pub mod history;
pub mod log;
pub mod method;
pub mod mirror;
pub mod pages;
pub mod scenario;
