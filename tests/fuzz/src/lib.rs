//! The fuzz targets. A target decodes an input into a plan of client requests, so that most inputs pass the first validation. It
//! runs the plan on the code of the service, and compares the answers with an oracle that works page by page, or with the rules
//! of the protocol.

pub mod changes;
pub mod draft;
pub mod fdpass;
pub mod files;
pub mod images;
pub mod maps;
pub mod passed_mappings;
pub mod peers;
pub mod replies;
pub mod scan;
pub mod steps;
