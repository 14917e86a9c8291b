//! The name of a file for an agent.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::service::Service;

/// A file of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileOf {
    pub runtime_dir: PathBuf,
    pub name: String,
}

impl FileOf {
    #[must_use]
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        Self { runtime_dir: runtime_dir.to_owned(), name: name.to_owned() }
    }

    #[must_use]
    pub fn of(service: &Service, name: &str) -> Self {
        Self::new(service.folder(), name)
    }
}
