//! `fdmap exec`: runs a command with the shim preloaded.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use super::super::CliError;
use super::super::args::ExecArgs;
use super::Context;

const LIBRARY: &str = "libfdmap_shim.so";

/// Replaces this process with the command.
pub(super) fn exec(context: &Context, args: ExecArgs) -> Result<Infallible, CliError> {
    if context.service.tcp().is_some() {
        return Err(CliError::Usage(
            "commands that pass file descriptors are unavailable over TCP".to_owned(),
        ));
    }
    let library = match args.library {
        Some(library) => absolute(&library)?,
        None => find()?,
    };
    let preload = preload(&library, std::env::var_os("LD_PRELOAD"))?;
    let endpoint = context.service.endpoint();
    let mut words = args.command.into_iter();
    let program = words.next().ok_or_else(|| CliError::Usage("no command given".to_owned()))?;
    let mut command = std::process::Command::new(&program);
    command.args(words).env("LD_PRELOAD", preload);
    // The command may change its working directory.
    command
        .env("FDMAP_SOCKET", absolute(&endpoint.socket)?)
        .env("FDMAP_FDPASS_SOCKET", absolute(&endpoint.fdpass)?);
    command.env("FDMAP_SHIM", if args.strict { "strict" } else { "on" });
    let list = |patterns: Vec<String>| (!patterns.is_empty()).then(|| patterns.join(","));
    let variables = [
        ("FDMAP_SHIM_TAKE", list(args.take)),
        ("FDMAP_SHIM_MAKE", list(args.make)),
        ("FDMAP_SHIM_MIN_SIZE", args.min_size.map(|bytes| bytes.to_string())),
        ("FDMAP_SHIM_TRACK", args.no_track.then(|| "0".to_owned())),
        ("FDMAP_SHIM_KEEP", args.keep_files.then(|| "1".to_owned())),
        ("FDMAP_SHIM_POLICY", args.policy.map(|policy| policy.policy().to_string())),
    ];
    for (variable, value) in variables {
        // Options that are not given must not be inherited from the environment.
        match value {
            Some(value) => command.env(variable, value),
            None => command.env_remove(variable),
        };
    }
    let error = command.exec();
    Err(CliError::Io { what: format!("running {}", program.display()), error })
}

/// Finds the shim beside this program (build directory) or in `../lib` (installed).
fn find() -> Result<PathBuf, CliError> {
    let failed = |error| CliError::Io { what: "locating this program".to_owned(), error };
    let own = std::env::current_exe().map_err(failed)?;
    let directory = own.parent().unwrap_or(Path::new("/"));
    let candidates = [directory.join(LIBRARY), directory.join("../lib").join(LIBRARY)];
    let missing = || CliError::Io {
        what: format!("looking for {} and {}", candidates[0].display(), candidates[1].display()),
        error: std::io::ErrorKind::NotFound.into(),
    };
    candidates.iter().find(|path| path.exists()).cloned().ok_or_else(missing)
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    let failed = |error| CliError::Io { what: format!("resolving {}", path.display()), error };
    std::path::absolute(path).map_err(failed)
}

/// Prepends the library to the current value of `LD_PRELOAD`.
fn preload(library: &Path, before: Option<OsString>) -> Result<OsString, CliError> {
    // Both separate names in LD_PRELOAD, and the loader has no quoting.
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        let what = format!("{} cannot be preloaded: the path contains a colon or a space", library.display());
        return Err(CliError::Usage(what));
    }
    let mut preload = library.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        preload.push(OsStr::new(":"));
        preload.push(before);
    }
    Ok(preload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shim_precedes_libraries_that_are_already_preloaded() {
        let shim = Path::new("/lib/shim.so");
        assert_eq!(preload(shim, None).unwrap(), "/lib/shim.so");
        assert_eq!(preload(shim, Some("".into())).unwrap(), "/lib/shim.so");
        assert_eq!(preload(shim, Some("a.so b.so".into())).unwrap(), "/lib/shim.so:a.so b.so");
        assert!(preload(Path::new("/my lib/shim.so"), None).is_err());
    }
}
