//! Files of /proc and /sys, and programs of the host.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::{HarnessError, HarnessResult};

/// Reads a file of /proc or /sys.
///
/// # Errors
/// [`HarnessError::File`]
pub fn read(path: impl Into<PathBuf>) -> HarnessResult<String> {
    let path = path.into();
    std::fs::read_to_string(&path).map_err(|error| HarnessError::File { what: "reading", path, error })
}

/// Writes a file of /proc or /sys.
///
/// # Errors
/// [`HarnessError::File`]
pub fn write(path: impl Into<PathBuf>, text: &str) -> HarnessResult<()> {
    let path = path.into();
    std::fs::write(&path, text).map_err(|error| HarnessError::File { what: "writing", path, error })
}

/// Runs a program and returns its standard output.
///
/// # Errors
/// [`HarnessError::Missing`] if it is not installed, [`HarnessError::Program`] if it fails.
pub fn output(program: &str, arguments: &[&str]) -> HarnessResult<String> {
    let shown = format!("{program} {}", arguments.join(" "));
    // Not every user has /sbin in PATH. ^C does not reach the program, so that it finishes its work.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = match Command::new(program).args(arguments).env("PATH", path).process_group(0).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(HarnessError::Missing(format!("the program {program}")));
        }
        other => other
            .map_err(|error| HarnessError::Program { program: shown.clone(), message: error.to_string() })?,
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(HarnessError::Program { program: shown, message: format!("{}: {stderr}", output.status) })
}
