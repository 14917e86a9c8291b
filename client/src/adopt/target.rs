//! What stands in the way of stopping a process, found out before it is touched.

use std::fs;
use std::io::Read as _;

use super::AdoptError;
use crate::ClientError;

/// What `/proc/PID` says of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `/proc/PID/status`
    pub status: String,
    /// The first bytes of its program; `None` if it has none.
    pub program: Option<[u8; 5]>,
}

impl Target {
    /// Looks at a process.
    ///
    /// # Errors
    /// [`ClientError::Path`] if there is none, or one that we may not look into.
    pub fn look(pid: u32) -> Result<Self, ClientError> {
        let path = std::path::PathBuf::from(format!("/proc/{pid}/status"));
        let status =
            fs::read_to_string(&path).map_err(|error| ClientError::Path { what: "reading", path, error })?;
        let path = std::path::PathBuf::from(format!("/proc/{pid}/exe"));
        let mut program = [0; 5];
        let program = match fs::File::open(&path).and_then(|mut file| file.read_exact(&mut program)) {
            Ok(()) => Some(program),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(ClientError::Path { what: "reading", path, error }),
        };
        Ok(Self { status, program })
    }

    /// Whether a system call can be made inside of it.
    ///
    /// # Errors
    /// [`AdoptError::Unfit`] with the reason.
    pub fn check(&self) -> Result<(), AdoptError> {
        let no = |why: String| Err(AdoptError::Unfit(why));
        if matches!(self.field("State").and_then(|state| state.chars().next()), Some('Z' | 'X')) {
            return no("it has ended".to_owned());
        }
        // Before the program: nobody who is traced is looked at twice.
        match self.field("TracerPid") {
            Some("0") | None => {}
            Some(tracer) => return no(format!("it is traced already, by {tracer}")),
        }
        match self.field("Seccomp") {
            Some("0") | None => {}
            Some("1") => return no("it is under seccomp's strict mode".to_owned()),
            Some(_) => {
                return no(
                    "a seccomp filter decides on its system calls, and one made in its place could end it"
                        .to_owned(),
                );
            }
        }
        match self.program {
            None => no("it is a thread of the kernel".to_owned()),
            // EI_CLASS of elf(5): 2 is 64 bits.
            Some([0x7f, b'E', b'L', b'F', 2]) => Ok(()),
            Some(_) => no("it is not a program of 64 bits".to_owned()),
        }
    }

    fn field(&self, key: &str) -> Option<&str> {
        let value = self.status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        value.map(str::trim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELF64: [u8; 5] = [0x7f, b'E', b'L', b'F', 2];

    fn refused(status: &str, program: Option<[u8; 5]>) -> String {
        let target = Target { status: status.to_owned(), program };
        target.check().map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn ordinary_process_is_fit() {
        let status = "State:\tS (sleeping)\nTracerPid:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\n";
        assert_eq!(refused(status, Some(ELF64)), "");
        assert_eq!(refused("State:\tR (running)\n", Some(ELF64)), "", "a kernel without seccomp");
        assert!(Target::look(std::process::id()).unwrap().check().is_ok());
    }

    #[test]
    fn reasons_are_told() {
        assert!(refused("State:\tZ (zombie)\n", None).contains("ended"));
        assert!(refused("TracerPid:\t12\nSeccomp:\t2\n", Some(ELF64)).contains("traced already, by 12"));
        assert!(refused("Seccomp:\t2\n", Some(ELF64)).contains("filter"));
        assert!(refused("Seccomp:\t1\n", Some(ELF64)).contains("strict"));
        assert!(refused("State:\tI (idle)\n", None).contains("kernel"));
        let mut elf32 = ELF64;
        elf32[4] = 1;
        assert!(refused("State:\tS\n", Some(elf32)).contains("64 bits"));
        assert!(Target::look(0x7fff_fff0).is_err());
    }
}
