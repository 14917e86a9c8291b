//! The test harness of the end-to-end tests, in place of the built-in one: a test whose host lacks something is reported as
//! ignored, with the reason.
//!
//! [`crate::test`] registers the tests of a binary; its `main` calls [`main`].

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

pub use inventory;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::{HarnessError, HarnessResult};

/// One registered test.
#[derive(Debug)]
pub struct EndToEndTest {
    /// Crate, modules and function.
    pub path: &'static str,
    pub run: fn(),
}

inventory::collect!(EndToEndTest);

thread_local! {
    /// True if the test of this thread lacks a requirement.
    static IGNORED: Cell<bool> = const { Cell::new(false) };
}

/// The payload of the unwinding that ends a test whose host lacks something.
struct MissingRequirement(String);

/// Runs the registered tests as the arguments of the process select them.
#[must_use]
pub fn main() -> ExitCode {
    main_of(|_| true)
}

/// The same for those tests whose names `is_wanted` accepts.
#[must_use]
pub fn main_of(is_wanted: impl Fn(&str) -> bool) -> ExitCode {
    // Threads of a test would make files conservative, also those of a test that runs beside it.
    fdmap_sys::process::allocate_without_mremap();
    let arguments = Arguments::from_args();
    let mut trials: Vec<_> = inventory::iter::<EndToEndTest>.into_iter().map(trial).collect();
    trials.retain(|trial| is_wanted(trial.name()));
    trials.sort_by(|one, other| one.name().cmp(other.name()));
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(test: &'static EndToEndTest) -> Trial {
    let name = test.path.split_once("::").map_or(test.path, |(_, name)| name);
    Trial::ignorable_test(name, || run(test.run))
}

fn run(test: fn()) -> Result<Completion, Failed> {
    IGNORED.set(false);
    match catch_unwind(AssertUnwindSafe(test)) {
        Ok(()) => Ok(Completion::Completed),
        Err(payload) => match payload.downcast::<MissingRequirement>() {
            Ok(missing) => Ok(Completion::ignored_with(format!("the host lacks {}", missing.0))),
            Err(panic) => resume_unwind(panic),
        },
    }
}

/// Runs an async test on a new runtime.
///
/// # Panics
/// If the runtime cannot be created.
pub fn block_on<F: Future<Output = ()>>(test: F, multi_thread: bool) {
    let mut builder = match multi_thread {
        true => tokio::runtime::Builder::new_multi_thread(),
        false => tokio::runtime::Builder::new_current_thread(),
    };
    builder.enable_all().build().expect("a tokio runtime").block_on(test);
}

/// True if a test must fail where its host lacks something, as in CI: `FDMAP_REQUIRE_ALL` is 1.
#[must_use]
pub fn require_all() -> bool {
    std::env::var_os("FDMAP_REQUIRE_ALL").is_some_and(|value| value == "1")
}

/// Returns what the test needs. If the host lacks it, ends the test, which is then reported as ignored, with the reason.
///
/// Call it on the thread of the test.
///
/// # Panics
/// If `FDMAP_REQUIRE_ALL` is 1 and the host lacks it; if the host has it and it does not work.
pub fn require<T>(requirement: HarnessResult<T>) -> T {
    require_as(requirement, require_all())
}

fn require_as<T>(requirement: HarnessResult<T>, require_all: bool) -> T {
    match requirement {
        Ok(value) => value,
        Err(HarnessError::Missing(what)) if !require_all => {
            IGNORED.set(true);
            // Unlike panic!, this prints no message and no backtrace.
            resume_unwind(Box::new(MissingRequirement(what)))
        }
        Err(error) => panic!("test setup failed: {}", fdmap_proto::error_chain(&error)),
    }
}

/// True while the test of this thread unwinds because it failed.
#[must_use]
pub fn is_failing() -> bool {
    std::thread::panicking() && !IGNORED.get()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn test_that_lacks_something_is_ignored_with_the_reason() {
        fn lacking(require_all: bool) {
            require_as(Err(HarnessError::Missing("a moon".to_owned())), require_all)
        }
        match run(|| lacking(false)) {
            Ok(Completion::Ignored { reason }) => {
                assert_eq!(reason.as_deref(), Some("the host lacks a moon"));
            }
            _ => panic!("not ignored"),
        }
        assert!(catch_unwind(|| run(|| lacking(true))).is_err(), "a required test was ignored");
        assert!(matches!(run(|| ()), Ok(Completion::Completed)));
        assert!(catch_unwind(|| run(|| panic!("failed"))).is_err());
    }

    fn sources(folder: &Path) -> Vec<PathBuf> {
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        paths.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
    }

    /// The built-in attribute compiles to nothing without the built-in harness: a test that used it would never run.
    #[test]
    fn every_end_to_end_test_is_registered() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let manifest = std::fs::read_to_string(tests.join("Cargo.toml")).unwrap();
        for path in sources(&tests.join("tests")) {
            let text = std::fs::read_to_string(&path).unwrap();
            let imports = |line: &str| line.ends_with("::test;") || line.contains(" test}");
            let registers = text.lines().any(|line| line.starts_with("use fdmap_tests::") && imports(line));
            assert!(registers || !text.contains("#[test"), "{}: no `use fdmap_tests::test;`", path.display());
            assert!(!text.contains("#[tokio::test"), "{}: #[test] runs async functions too", path.display());
            let target = path.strip_prefix(tests.join("tests")).unwrap().iter().next().unwrap();
            let name = Path::new(target).file_stem().unwrap().to_string_lossy();
            let section = format!("[[test]]\nname = \"{name}\"\nharness = false\n");
            assert!(manifest.contains(&section), "Cargo.toml has no section\n{section}");
        }
    }
}
