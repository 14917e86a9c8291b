//! What the environment asks for. Read once, when the library is loaded. Pure but for [`Config::from_env`].

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;

use fdmap_proto::tracking::CoveragePolicy;

use crate::glob::Patterns;

/// Memfds that are smaller are left alone, unless something else is said.
pub const DEFAULT_MIN_SIZE: u64 = 1 << 20;

/// How it goes about failures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// It does nothing at all.
    Off,
    /// It says so once, and gets out of the way.
    #[default]
    On,
    /// The program ends.
    Strict,
}

/// What the environment asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `FDMAP_SHIM`
    pub mode: Mode,
    /// `FDMAP_SHIM_TAKE`: names of memfds that are adopted.
    pub take: Patterns,
    /// `FDMAP_SHIM_MAKE`: names of memfds that the service is to make.
    pub make: Patterns,
    /// `FDMAP_SHIM_MIN_SIZE`: bytes that a memfd must have to be adopted.
    pub min_size: u64,
    /// `FDMAP_SHIM_TRACK`: whether writes are observed.
    pub track: bool,
    /// `FDMAP_SHIM_KEEP`: whether the service keeps adopted files when nobody uses them any more.
    pub keep: bool,
    /// `FDMAP_SHIM_POLICY`: of files that are adopted or made; `None`: as the service sees fit.
    pub policy: Option<CoveragePolicy>,
}

/// A variable that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadValue {
    /// Its name.
    pub variable: &'static str,
    /// What it should be.
    pub expected: &'static str,
}

impl Config {
    /// From the environment of this process. What cannot be understood is as if it were not said.
    #[must_use]
    pub fn from_env() -> (Self, Vec<BadValue>) {
        Self::read(|name| std::env::var_os(name))
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<BadValue>) {
        let mut bad = Vec::new();
        let text = |name| variable(name).filter(|value| !value.is_empty());
        let mut choice = |name, expected, parse: &dyn Fn(&str) -> Option<u64>| {
            let value = text(name)?;
            let parsed = value.to_str().and_then(parse);
            if parsed.is_none() {
                bad.push(BadValue { variable: name, expected });
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
        let names: Vec<_> = CoveragePolicy::ALL.iter().map(|policy| policy.name()).collect();
        let policy =
            choice("FDMAP_SHIM_POLICY", "conservative, refuse or ignore", &|word| position(&names, word));
        let policy = policy.and_then(|at| CoveragePolicy::ALL.get(usize::try_from(at).ok()?).copied());
        let patterns = |name| text(name).map(|value| Patterns::parse(value.as_bytes()));
        let config = Self {
            mode,
            take: patterns("FDMAP_SHIM_TAKE").unwrap_or_else(|| Patterns::parse(b"*")),
            make: patterns("FDMAP_SHIM_MAKE").unwrap_or_default(),
            min_size: min_size.unwrap_or(DEFAULT_MIN_SIZE),
            track: track != Some(0),
            keep: keep == Some(1),
            policy,
        };
        (config, bad)
    }
}

fn position(words: &[&str], word: &str) -> Option<u64> {
    words.iter().position(|one| *one == word).and_then(|at| u64::try_from(at).ok())
}

/// Bytes, or with K, M, G or T of 1024.
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
        let of = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        let (config, bad) = Config::read(of);
        (config, bad.into_iter().map(|bad| bad.variable).collect())
    }

    #[test]
    fn nothing_said_takes_all_that_is_large() {
        let (config, bad) = read(&[("FDMAP_SHIM_TAKE", "")]);
        assert!(bad.is_empty());
        assert_eq!(
            (config.mode, config.min_size, config.track, config.policy),
            (Mode::On, 1 << 20, true, None)
        );
        assert!(config.take.fit(b"anything") && !config.make.fit(b"anything"));
    }

    #[test]
    fn everything_can_be_said() {
        let (config, bad) = read(&[
            ("FDMAP_SHIM", "strict"),
            ("FDMAP_SHIM_TAKE", "ram*,vhost"),
            ("FDMAP_SHIM_MAKE", "disk"),
            ("FDMAP_SHIM_MIN_SIZE", "64K"),
            ("FDMAP_SHIM_TRACK", "0"),
            ("FDMAP_SHIM_KEEP", "1"),
            ("FDMAP_SHIM_POLICY", "refuse"),
        ]);
        assert!(bad.is_empty());
        assert_eq!((config.mode, config.min_size, config.track), (Mode::Strict, 65_536, false));
        assert!(config.keep);
        assert_eq!(config.policy, Some(CoveragePolicy::Refuse));
        assert!(config.take.fit(b"vhost") && !config.take.fit(b"disk") && config.make.fit(b"disk"));
    }

    #[test]
    fn what_cannot_be_understood_is_told_and_left_out() {
        let (config, bad) = read(&[
            ("FDMAP_SHIM", "yes"),
            ("FDMAP_SHIM_MIN_SIZE", "12Q"),
            ("FDMAP_SHIM_TRACK", "2"),
            ("FDMAP_SHIM_KEEP", "no"),
            ("FDMAP_SHIM_POLICY", "strict"),
        ]);
        assert_eq!(
            bad,
            ["FDMAP_SHIM", "FDMAP_SHIM_MIN_SIZE", "FDMAP_SHIM_TRACK", "FDMAP_SHIM_KEEP", "FDMAP_SHIM_POLICY"]
        );
        assert_eq!(config, read(&[]).0);
    }

    #[test]
    fn sizes_have_units_of_1024() {
        assert_eq!(parse_size("0"), Some(0));
        assert_eq!(parse_size("3k"), Some(3072));
        assert_eq!(parse_size("2T"), Some(2 << 40));
        for bad in ["", "K", "-1", "1.5M", "99999999999999T", "1µ"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }
}
