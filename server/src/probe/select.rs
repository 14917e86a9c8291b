//! Which probe to use: from what was found to work, and what was asked for. Pure.

use clap::ValueEnum;
use fdmap_proto::provenance::ProbeKind;

/// What the one who starts the service asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProbeChoice {
    /// The best one that works.
    #[default]
    Auto,
    /// The page cache XArray, by a BPF program.
    Xarray,
    /// SEEK_DATA and mincore.
    Syscalls,
}

/// No probe can be used as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The one that was asked for does not work here.
    #[error("the {probe} probe does not work here: {reason}")]
    Refused {
        /// The probe.
        probe: ProbeKind,
        /// What was found.
        reason: String,
    },
    /// None works.
    #[error("no probe works here: xarray: {xarray}; syscalls: {syscalls}")]
    None {
        /// What was found.
        xarray: String,
        /// What was found.
        syscalls: String,
    },
}

/// Chooses. Each probe works, or there is a reason why not.
///
/// # Errors
/// [`PlanError`]
pub fn choose(
    choice: ProbeChoice,
    xarray: Result<(), String>,
    syscalls: Result<(), String>,
) -> Result<ProbeKind, PlanError> {
    let refused = |probe, reason| Err(PlanError::Refused { probe, reason });
    match (choice, xarray, syscalls) {
        (ProbeChoice::Auto | ProbeChoice::Xarray, Ok(()), _) => Ok(ProbeKind::Xarray),
        (ProbeChoice::Auto | ProbeChoice::Syscalls, _, Ok(())) => Ok(ProbeKind::Syscalls),
        (ProbeChoice::Xarray, Err(reason), _) => refused(ProbeKind::Xarray, reason),
        (ProbeChoice::Syscalls, _, Err(reason)) => refused(ProbeKind::Syscalls, reason),
        (ProbeChoice::Auto, Err(xarray), Err(syscalls)) => Err(PlanError::None { xarray, syscalls }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: &str = "no CAP_BPF";

    #[test]
    fn best_working_probe_is_taken() {
        assert_eq!(choose(ProbeChoice::Auto, Ok(()), Ok(())), Ok(ProbeKind::Xarray));
        assert_eq!(choose(ProbeChoice::Auto, Err(NO.into()), Ok(())), Ok(ProbeKind::Syscalls));
        assert_eq!(choose(ProbeChoice::Syscalls, Ok(()), Ok(())), Ok(ProbeKind::Syscalls));
    }

    #[test]
    fn forced_probe_is_never_replaced() {
        let error = choose(ProbeChoice::Xarray, Err(NO.into()), Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "the xarray probe does not work here: no CAP_BPF");
        assert!(choose(ProbeChoice::Syscalls, Ok(()), Err("x".into())).is_err());
        assert!(choose(ProbeChoice::Auto, Err("x".into()), Err("y".into())).is_err());
    }
}
