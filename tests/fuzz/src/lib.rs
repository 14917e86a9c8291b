//! What the fuzz targets do with an input. An input is read as a plan of what some client sends, so that most of them get past
//! the first check; the plan is carried out on the service's own code, and whatever comes back is held against an oracle that
//! goes page by page, or against what the protocol promises.

pub mod draft;
pub mod fdpass;
pub mod scan;
