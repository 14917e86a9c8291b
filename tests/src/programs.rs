//! The C programs of `tests/programs`, which contain no fdmap code.

use std::path::{Path, PathBuf};

use crate::cleanup::CleanupGuard;
use crate::{HarnessResult, host};

/// A compiled program, removed on drop.
#[derive(Debug)]
pub struct Compiled {
    path: PathBuf,
    /// The directory, dropped last.
    _guard: CleanupGuard,
}

impl Compiled {
    /// Compiles `tests/programs/NAME.c`.
    ///
    /// # Errors
    /// [`crate::HarnessError::Program`] with the messages of the compiler.
    pub fn new(name: &str) -> HarnessResult<Self> {
        Self::with_options(name, &["-pthread"])
    }

    /// Compiles `tests/programs/NAME.c` to a shared library for `LD_PRELOAD`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn library(name: &str) -> HarnessResult<Self> {
        Self::with_options(name, &["-shared", "-fPIC"])
    }

    fn with_options(name: &str, options: &[&str]) -> HarnessResult<Self> {
        let (folder, guard) = host::temp_dir("fdmap-program-")?;
        // Other users run the program too.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        let opened = std::fs::set_permissions(&folder, open);
        opened.map_err(|error| crate::HarnessError::File {
            what: "setting the mode of",
            path: folder.clone(),
            error,
        })?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(format!("{name}.c"));
        let path = folder.join(name);
        let words = ["-O2", "-Wall", "-Wextra", "-Werror"];
        let (source, target) = (source.to_string_lossy(), path.to_string_lossy());
        host::output("cc", &[&words[..], options, &["-o", &target, &source]].concat())?;
        Ok(Self { path, _guard: guard })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}
