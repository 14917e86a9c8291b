//! Running a command under the shim.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use super::super::CliError;
use super::super::args::ExecArgs;
use super::Context;

const LIBRARY: &str = "libfdmap_shim.so";

/// Becomes the command.
pub(super) fn exec(context: &Context, args: ExecArgs) -> Result<Infallible, CliError> {
    if context.service.tcp().is_some() {
        return Err(CliError::Usage("descriptors cannot be had by TCP".to_owned()));
    }
    let library = match args.library {
        Some(library) => absolute(&library)?,
        None => find()?,
    };
    let preload = preload(&library, std::env::var_os("LD_PRELOAD"))?;
    let place = context.service.place();
    let mut words = args.command.into_iter();
    let program = words.next().ok_or_else(|| CliError::Usage("a command is missing".to_owned()))?;
    let mut command = std::process::Command::new(&program);
    command.args(words).env("LD_PRELOAD", preload);
    // The command may go to another folder.
    command
        .env("FDMAP_SOCKET", absolute(&place.socket)?)
        .env("FDMAP_FDPASS_SOCKET", absolute(&place.fdpass)?);
    command.env("FDMAP_SHIM", if args.strict { "strict" } else { "on" });
    let list = |patterns: Vec<String>| (!patterns.is_empty()).then(|| patterns.join(","));
    let variables = [
        ("FDMAP_SHIM_TAKE", list(args.take)),
        ("FDMAP_SHIM_MAKE", list(args.make)),
        ("FDMAP_SHIM_MIN_SIZE", args.min_size.map(|bytes| bytes.to_string())),
        ("FDMAP_SHIM_TRACK", args.no_track.then(|| "0".to_owned())),
        ("FDMAP_SHIM_KEEP", args.keep.then(|| "1".to_owned())),
        ("FDMAP_SHIM_POLICY", args.policy.map(|policy| policy.policy().name().to_owned())),
    ];
    for (variable, value) in variables {
        // What was not said is not left to what we may run under ourselves.
        match value {
            Some(value) => command.env(variable, value),
            None => command.env_remove(variable),
        };
    }
    let error = command.exec();
    Err(CliError::Io { what: format!("running {}", program.display()), error })
}

/// Beside this program, as it is built; or where it is installed.
fn find() -> Result<PathBuf, CliError> {
    let failed = |error| CliError::Io { what: "finding this program".to_owned(), error };
    let own = std::env::current_exe().map_err(failed)?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    let missing = || CliError::Io {
        what: format!("looking for {} and {}", places[0].display(), places[1].display()),
        error: std::io::ErrorKind::NotFound.into(),
    };
    places.iter().find(|place| place.exists()).cloned().ok_or_else(missing)
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    let failed = |error| CliError::Io { what: format!("finding {}", path.display()), error };
    std::path::absolute(path).map_err(failed)
}

/// The library before what is preloaded already. Pure.
fn preload(library: &Path, before: Option<OsString>) -> Result<OsString, CliError> {
    // The loader takes both for the end of a name, and there is no way to quote them.
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        let what = format!("{} cannot be preloaded: its path has a colon or a space", library.display());
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
    fn shim_comes_before_what_is_preloaded_already() {
        let shim = Path::new("/lib/shim.so");
        assert_eq!(preload(shim, None).unwrap(), "/lib/shim.so");
        assert_eq!(preload(shim, Some("".into())).unwrap(), "/lib/shim.so");
        assert_eq!(preload(shim, Some("a.so b.so".into())).unwrap(), "/lib/shim.so:a.so b.so");
        assert!(preload(Path::new("/my lib/shim.so"), None).is_err());
    }
}
