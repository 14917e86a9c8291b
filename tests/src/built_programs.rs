//! The programs of the workspace, in the target directory that this program is in, or those of another version.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::host_io::output;
use crate::{HarnessError, HarnessResult};

/// Names a directory whose programs replace those of this version, for measurements of an earlier one. Programs that it lacks are
/// those of this version.
const OTHER_PROGRAMS: &str = "FDMAP_OTHER_PROGRAMS";

/// The path of a program of this project, built with the same profile as this program.
///
/// # Errors
/// [`HarnessError::Program`] if it cannot be built.
pub fn program(name: &str) -> HarnessResult<PathBuf> {
    let other = std::env::var_os(OTHER_PROGRAMS).map(|folder| PathBuf::from(folder).join(name));
    match other.filter(|path| path.exists()) {
        Some(other) => Ok(other),
        None => own_program(name),
    }
}

/// The path of a program of this version, built with the same profile as this program.
///
/// # Errors
/// [`HarnessError::Program`] if it cannot be built.
pub fn own_program(name: &str) -> HarnessResult<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = BUILT.get_or_init(|| build().map_err(|error| fdmap_proto::error_chain(&error)));
    match folder {
        Ok(folder) => Ok(folder.join(name)),
        Err(message) => {
            Err(HarnessError::Program { program: "cargo build".to_owned(), message: message.clone() })
        }
    }
}

/// Builds the programs into the directory of this program, unless `FDMAP_PROGRAMS_ARE_BUILT` is set.
fn build() -> HarnessResult<PathBuf> {
    let failed = |error| HarnessError::File { what: "finding", path: PathBuf::from("/proc/self/exe"), error };
    let own = std::env::current_exe().map_err(failed)?;
    // Tests are in target/PROFILE/deps, programs in target/PROFILE.
    let mut folder = own.parent().unwrap_or(Path::new("/")).to_owned();
    if folder.ends_with("deps") {
        folder.pop();
    }
    if std::env::var_os("FDMAP_PROGRAMS_ARE_BUILT").is_none() {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let release = folder.ends_with("release");
        // All targets of the workspace, as for tests. Fewer targets would have other features and would all be
        // rebuilt.
        let mut arguments = vec!["build", "--quiet", "--workspace", "--all-targets"];
        if release {
            arguments.push("--release");
        }
        output(&cargo, &arguments)?;
    }
    Ok(folder)
}
