//! Explains why BPF programs could not be loaded, from the error and libbpf's messages. Pure.

use std::fmt;

/// Why BPF programs could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The last line of the verifier's output if the verifier refused a program, else libbpf's last message.
    reason: String,
    remedy: Option<&'static str>,
}

const PRIVILEGES: &str = "run fdmapd as root, or with CAP_BPF and CAP_PERFMON";
const BTF: &str = "use a kernel with CONFIG_DEBUG_INFO_BTF=y";
const LOCKDOWN: &str =
    "kernel lockdown forbids BPF programs to read kernel memory: use lockdown mode integrity or none";
const BPF_LOOP: &str = "use Linux 5.17 or later, which has bpf_loop";
const VERIFIER: &str =
    "no privilege or setting helps: report the kernel release and the verifier's output (FDMAPD_LOG=debug)";

impl Refusal {
    /// `error` is the error of the load, with its causes.
    pub(crate) fn new(error: &str, messages: &[String]) -> Self {
        let says = |text: &str| error.contains(text) || messages.iter().any(|message| message.contains(text));
        if let Some((program, line)) = messages.iter().rev().find_map(|message| verifier_line(message)) {
            let remedy = if line.contains("bpf_probe_read_kernel") {
                LOCKDOWN
            } else if line.contains("bpf_loop") || line.contains("#181") {
                BPF_LOOP
            } else {
                VERIFIER
            };
            return Self { reason: format!("the verifier refused {program}: {line}"), remedy: Some(remedy) };
        }
        let remedy = if says("vmlinux BTF") || says("kernel BTF") {
            Some(BTF)
        } else if says("Operation not permitted") || says("EPERM") {
            Some(PRIVILEGES)
        } else {
            None
        };
        let reason = match messages.last() {
            // Without privileges libbpf suggests other causes.
            Some(last) if remedy != Some(PRIVILEGES) => {
                format!("{error}; libbpf: {}", last.trim_start_matches("libbpf: ").trim_end())
            }
            _ => error.to_owned(),
        };
        Self { reason, remedy }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        self.remedy.map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

/// The program, and the last line of the verifier's output that is not a statistic, of a message of libbpf such as
/// "libbpf: prog 'NAME': -- BEGIN PROG LOAD LOG --\n...\n-- END PROG LOAD LOG --".
fn verifier_line(message: &str) -> Option<(&str, &str)> {
    const STATISTICS: [&str; 3] = ["processed ", "verification time ", "stack depth "];
    let (head, log) = message.split_once("-- BEGIN PROG LOAD LOG --")?;
    let program = head.split('\'').nth(1).unwrap_or("a program");
    let log = log.split("-- END PROG LOAD LOG --").next().unwrap_or_default();
    let lines = log.lines().map(str::trim).rev();
    let mut lines =
        lines.filter(|line| !line.is_empty() && !STATISTICS.iter().any(|start| line.starts_with(start)));
    Some((program, lines.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: &str = "loading the BPF programs: Permission denied (os error 13)";

    fn log(last: &str) -> String {
        format!(
            "libbpf: prog 'find_pins': -- BEGIN PROG LOAD LOG --\nfunc#0 @0\n{last}\nverification time 6 usec\n\
             stack depth 208+0\nprocessed 1 insns (limit 1000000)\n-- END PROG LOAD LOG --"
        )
    }

    #[test]
    fn remedy_fits_the_reason() {
        let no_btf = "libbpf: Error loading vmlinux BTF: -ESRCH";
        let table = [
            ("combined stack size of 3 calls is 928. Too large", VERIFIER),
            ("program of this type cannot use helper bpf_probe_read_kernel#113", LOCKDOWN),
            ("unknown func bpf_loop#181", BPF_LOOP),
            ("invalid func unknown#181", BPF_LOOP),
        ];
        for (line, remedy) in table {
            let after = "libbpf: failed to load object 'fdmap_pins'".to_owned();
            let refusal = Refusal::new(ERROR, &[log(line), after]);
            let reason = format!("the verifier refused find_pins: {line}");
            assert_eq!(refusal, Refusal { reason, remedy: Some(remedy) });
        }
        let table = [
            ("libbpf: map 'nodes': failed to create: -EPERM", Some(PRIVILEGES)),
            (no_btf, Some(BTF)),
            ("libbpf: failed to find valid kernel BTF", Some(BTF)),
            ("libbpf: something else", None),
        ];
        for (message, remedy) in table {
            let refusal = Refusal::new("loading", &[message.to_owned()]);
            assert_eq!(refusal.remedy, remedy, "{message}");
        }
        let refusal = Refusal::new("loading: Operation not permitted (os error 1)", &[]);
        assert_eq!(
            refusal.to_string(),
            format!("loading: Operation not permitted (os error 1); {PRIVILEGES}")
        );
    }

    #[test]
    fn message_without_a_verifier_log_has_no_verifier_line() {
        assert_eq!(verifier_line("libbpf: prog 'x': BPF program load failed: -EPERM"), None);
        assert_eq!(
            verifier_line("libbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n-- END PROG LOAD LOG --"),
            None
        );
    }
}
