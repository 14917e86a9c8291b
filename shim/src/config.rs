//! Configuration from environment variables, read once when the library is loaded. Pure except [`Config::from_env`] and the
//! static that holds the active configuration.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::OnceLock;

use fdmap_proto::file::Lifetime;
use fdmap_proto::tracking::CoveragePolicy;

use crate::glob::Patterns;
use fdmap_proto::VariantArray as _;

/// Default of `FDMAP_SHIM_MIN_SIZE`, in bytes.
const DEFAULT_MIN_SIZE: u64 = 1 << 20;

/// `FDMAP_SHIM`: what the shim does when it fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The shim is disabled.
    Off,
    /// Print one message and continue without the service.
    #[default]
    On,
    /// Print a message and exit.
    Strict,
}

static ACTIVE: OnceLock<Config> = OnceLock::new();

/// Returns the configuration; `None` if the shim is disabled in this process.
pub fn active() -> Option<&'static Config> {
    ACTIVE.get()
}

/// Enables the shim with `config`. Returns `false` if it was enabled before.
pub fn set_active(config: Config) -> bool {
    ACTIVE.set(config).is_ok()
}

/// The configuration of the shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `FDMAP_SHIM`.
    pub mode: Mode,
    /// `FDMAP_SHIM_TAKE`: names of memfds to adopt.
    pub adopt: Patterns,
    /// `FDMAP_SHIM_MAKE`: names of memfds that the service creates.
    pub create: Patterns,
    /// `FDMAP_SHIM_MIN_SIZE`: smallest size in bytes of a memfd to adopt.
    pub min_size: u64,
    /// `FDMAP_SHIM_TRACK`: track writes through mappings.
    pub track: bool,
    /// `FDMAP_SHIM_KEEP`: adopted and created files are not ephemeral; they exist until they are deleted.
    pub keep: bool,
    /// `FDMAP_SHIM_POLICY`: coverage policy of adopted and created files; `None` keeps the service's default.
    pub policy: Option<CoveragePolicy>,
}

/// An environment variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    pub variable: &'static str,
    /// Description of the valid values.
    pub expected: &'static str,
}

impl Config {
    /// Reads the environment of this process. A variable with an invalid value has its default.
    #[must_use]
    pub fn from_env() -> (Self, Vec<InvalidValue>) {
        Self::read(|name| std::env::var_os(name))
    }

    /// Disables the shim.
    #[must_use]
    pub fn off() -> Self {
        Self { mode: Mode::Off, ..Self::read(|_| None).0 }
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<InvalidValue>) {
        let mut invalid = Vec::new();
        let text = |name| variable(name).filter(|value| !value.is_empty());
        let mut choice = |name, expected, parse: &dyn Fn(&str) -> Option<u64>| {
            let value = text(name)?;
            let parsed = value.to_str().and_then(parse);
            if parsed.is_none() {
                invalid.push(InvalidValue { variable: name, expected });
            }
            parsed
        };
        let mode =
            match choice("FDMAP_SHIM", "off, on or strict", &|word| position(&["off", "on", "strict"], word))
            {
                Some(0) => Mode::Off,
                Some(2) => Mode::Strict,
                _ => Mode::On,
            };
        let min_size = choice("FDMAP_SHIM_MIN_SIZE", "a size such as 64K, 1M or 2G", &parse_size);
        let track = choice("FDMAP_SHIM_TRACK", "0 or 1", &|word| position(&["0", "1"], word));
        let keep = choice("FDMAP_SHIM_KEEP", "0 or 1", &|word| position(&["0", "1"], word));
        let names: Vec<_> = CoveragePolicy::VARIANTS.iter().map(<&str>::from).collect();
        let policy =
            choice("FDMAP_SHIM_POLICY", "conservative, refuse or ignore", &|word| position(&names, word));
        let policy = policy.and_then(|at| CoveragePolicy::VARIANTS.get(usize::try_from(at).ok()?).copied());
        let patterns = |name| text(name).map(|value| Patterns::parse(value.as_bytes()));
        let config = Self {
            mode,
            adopt: patterns("FDMAP_SHIM_TAKE").unwrap_or_else(|| Patterns::parse(b"*")),
            create: patterns("FDMAP_SHIM_MAKE").unwrap_or_default(),
            min_size: min_size.unwrap_or(DEFAULT_MIN_SIZE),
            track: track != Some(0),
            keep: keep == Some(1),
            policy,
        };
        (config, invalid)
    }

    /// When adopted and created files end.
    pub const fn lifetime(&self) -> Lifetime {
        if self.keep { Lifetime::Kept } else { Lifetime::Ephemeral }
    }
}

fn position(words: &[&str], word: &str) -> Option<u64> {
    words.iter().position(|one| *one == word).and_then(|at| u64::try_from(at).ok())
}

/// Parses a number of bytes with an optional unit K, M, G or T, powers of 1024.
fn parse_size(word: &str) -> Option<u64> {
    let unit = |letter| Some(10_u32 * (u32::try_from("KMGT".find(letter)?).ok()? + 1));
    let (digits, shift) = match word.chars().next_back()? {
        last if last.is_ascii_digit() => (word, 0),
        last => (&word[..word.len() - last.len_utf8()], unit(last.to_ascii_uppercase())?),
    };
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> (Config, Vec<&'static str>) {
        let variable = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        let (config, invalid) = Config::read(variable);
        (config, invalid.into_iter().map(|value| value.variable).collect())
    }

    #[test]
    fn default_configuration_adopts_all_large_memfds() {
        let (config, invalid) = read(&[("FDMAP_SHIM_TAKE", "")]);
        assert!(invalid.is_empty());
        assert_eq!(
            (config.mode, config.min_size, config.track, config.policy),
            (Mode::On, 1 << 20, true, None)
        );
        assert!(config.adopt.matches(b"anything") && !config.create.matches(b"anything"));
    }

    #[test]
    fn every_variable_is_parsed() {
        let (config, invalid) = read(&[
            ("FDMAP_SHIM", "strict"),
            ("FDMAP_SHIM_TAKE", "ram*,vhost"),
            ("FDMAP_SHIM_MAKE", "disk"),
            ("FDMAP_SHIM_MIN_SIZE", "64K"),
            ("FDMAP_SHIM_TRACK", "0"),
            ("FDMAP_SHIM_KEEP", "1"),
            ("FDMAP_SHIM_POLICY", "refuse"),
        ]);
        assert!(invalid.is_empty());
        assert_eq!((config.mode, config.min_size, config.track), (Mode::Strict, 65_536, false));
        assert!(config.keep);
        assert_eq!(config.policy, Some(CoveragePolicy::Refuse));
        assert!(
            config.adopt.matches(b"vhost")
                && !config.adopt.matches(b"disk")
                && config.create.matches(b"disk")
        );
    }

    #[test]
    fn invalid_values_are_reported_and_have_their_defaults() {
        let (config, invalid) = read(&[
            ("FDMAP_SHIM", "yes"),
            ("FDMAP_SHIM_MIN_SIZE", "12Q"),
            ("FDMAP_SHIM_TRACK", "2"),
            ("FDMAP_SHIM_KEEP", "no"),
            ("FDMAP_SHIM_POLICY", "strict"),
        ]);
        assert_eq!(
            invalid,
            ["FDMAP_SHIM", "FDMAP_SHIM_MIN_SIZE", "FDMAP_SHIM_TRACK", "FDMAP_SHIM_KEEP", "FDMAP_SHIM_POLICY"]
        );
        assert_eq!(config, read(&[]).0);
    }

    #[test]
    fn size_units_are_powers_of_1024() {
        assert_eq!(parse_size("0"), Some(0));
        assert_eq!(parse_size("3k"), Some(3072));
        assert_eq!(parse_size("2T"), Some(2 << 40));
        for bad in ["", "K", "-1", "1.5M", "99999999999999T", "1µ"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }
}
