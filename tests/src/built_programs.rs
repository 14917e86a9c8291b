//! The programs of the workspace, in the target directory that this program is in.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::host_io::output;
use crate::{HarnessError, HarnessResult};

/// The path of a program of this project, built as this one was.
///
/// # Errors
/// [`HarnessError::Program`] if it cannot be built.
pub fn program(name: &str) -> HarnessResult<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = BUILT.get_or_init(|| build().map_err(|error| fdmap_proto::error_chain(&error)));
    match folder {
        Ok(folder) => Ok(folder.join(name)),
        Err(said) => Err(HarnessError::Program { program: "cargo build".to_owned(), said: said.clone() }),
    }
}

/// Builds the programs into the directory of this one, unless the caller has (`FDMAP_PROGRAMS_ARE_BUILT`).
fn build() -> HarnessResult<PathBuf> {
    let failed = |error| HarnessError::File { what: "finding", path: PathBuf::from("/proc/self/exe"), error };
    let own = std::env::current_exe().map_err(failed)?;
    // Tests are in target/PROFILE/deps, programs one above.
    let mut folder = own.parent().unwrap_or(Path::new("/")).to_owned();
    if folder.ends_with("deps") {
        folder.pop();
    }
    if std::env::var_os("FDMAP_PROGRAMS_ARE_BUILT").is_none() {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let release = folder.ends_with("release");
        // All targets of the whole workspace, as for tests: fewer would have other features, and all be built again.
        let mut arguments = vec!["build", "--quiet", "--workspace", "--all-targets"];
        if release {
            arguments.push("--release");
        }
        output(&cargo, &arguments)?;
    }
    Ok(folder)
}
