//! Selection of the probe that the service uses, from the user's choice and the probes that work on this host. Pure.

use std::sync::LazyLock;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use fdmap_proto::provenance::ProbeKind;

use super::registry::PROBES;

/// Value of `--probe`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProbeChoice {
    /// The first probe of the registry that works.
    #[default]
    Auto,
    /// This probe, or none.
    Only(ProbeKind),
}

impl ValueEnum for ProbeChoice {
    fn value_variants<'a>() -> &'a [Self] {
        static VARIANTS: LazyLock<Vec<ProbeChoice>> = LazyLock::new(|| {
            let probes = PROBES.iter().map(|entry| ProbeChoice::Only(entry.kind));
            std::iter::once(ProbeChoice::Auto).chain(probes).collect()
        });
        &VARIANTS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Auto => Some(PossibleValue::new("auto").help("Use the best probe that works on this host")),
            Self::Only(kind) => {
                let entry = PROBES.iter().find(|entry| entry.kind == *kind)?;
                Some(PossibleValue::new(<&str>::from(kind)).help(entry.description))
            }
        }
    }
}

/// A probe of the registry after it was tried on this host.
#[derive(Clone, Debug)]
pub struct TriedProbe<P> {
    pub kind: ProbeKind,
    /// The working probe, or why it does not work.
    pub outcome: Result<P, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// The requested probe does not work.
    #[error("the {probe} probe does not work here: {reason}")]
    Unavailable { probe: ProbeKind, reason: String },
    #[error("no probe works here: {0}")]
    NoneWorks(String),
}

/// Selects a probe. `tried` is in order of preference. A requested probe is never replaced by another.
///
/// # Errors
/// [`SelectError`], with the reason of each probe that was considered.
pub fn select<P: Clone>(choice: ProbeChoice, tried: &[TriedProbe<P>]) -> Result<P, SelectError> {
    let considered = |tried: &&TriedProbe<P>| match choice {
        ProbeChoice::Auto => true,
        ProbeChoice::Only(kind) => tried.kind == kind,
    };
    let mut reasons = Vec::new();
    for TriedProbe { kind, outcome } in tried.iter().filter(considered) {
        match outcome {
            Ok(probe) => return Ok(probe.clone()),
            Err(reason) => reasons.push((*kind, reason.clone())),
        }
    }
    match (choice, reasons.pop()) {
        (ProbeChoice::Only(probe), reason) => {
            let reason = reason.map_or_else(|| "it was not tried".to_owned(), |(_, reason)| reason);
            Err(SelectError::Unavailable { probe, reason })
        }
        (ProbeChoice::Auto, last) => {
            reasons.extend(last);
            let texts: Vec<String> =
                reasons.iter().map(|(kind, reason)| format!("{kind}: {reason}")).collect();
            Err(SelectError::NoneWorks(texts.join("; ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: &str = "no CAP_BPF";

    /// Selects between a working or failing xarray and syscalls probe.
    fn choose(
        choice: ProbeChoice,
        xarray: Result<(), &str>,
        syscalls: Result<(), &str>,
    ) -> Result<ProbeKind, SelectError> {
        let tried = |kind, works: Result<(), &str>| TriedProbe {
            kind,
            outcome: works.map(|()| kind).map_err(str::to_owned),
        };
        select(choice, &[tried(ProbeKind::Xarray, xarray), tried(ProbeKind::Syscalls, syscalls)])
    }

    #[test]
    fn auto_selects_the_first_working_probe() {
        assert_eq!(choose(ProbeChoice::Auto, Ok(()), Ok(())), Ok(ProbeKind::Xarray));
        assert_eq!(choose(ProbeChoice::Auto, Err(NO), Ok(())), Ok(ProbeKind::Syscalls));
        let syscalls = ProbeChoice::Only(ProbeKind::Syscalls);
        assert_eq!(choose(syscalls, Ok(()), Ok(())), Ok(ProbeKind::Syscalls));
    }

    #[test]
    fn requested_probe_is_never_replaced() {
        let error = choose(ProbeChoice::Only(ProbeKind::Xarray), Err(NO), Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "the xarray probe does not work here: no CAP_BPF");
        assert!(choose(ProbeChoice::Only(ProbeKind::Syscalls), Ok(()), Err("x")).is_err());
        let error = choose(ProbeChoice::Auto, Err("x"), Err("y")).unwrap_err();
        assert_eq!(error.to_string(), "no probe works here: xarray: x; syscalls: y");
    }

    #[test]
    fn every_registered_probe_is_a_value_of_the_option() {
        let names: Vec<String> = ProbeChoice::value_variants()
            .iter()
            .map(|choice| choice.to_possible_value().unwrap().get_name().to_owned())
            .collect();
        assert_eq!(names, ["auto", "xarray", "syscalls"]);
    }
}
