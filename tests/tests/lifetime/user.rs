//! A process of a user, which this test program runs as: it creates and adopts files, and holds each of them in one way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, ExitCode, Stdio};

use fdmap_client::proto::Lifetime;
use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_proto::error_chain;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::credentials::become_user;
use fdmap_sys::{fd, memfd, scm};
use fdmap_tests::HarnessResult;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::service::{Service, named};

const ROLE: &str = "user";

/// Starts a process of a user, who must be in the group of the sockets.
pub fn start(service: &Service, uid: u32, gid: u32, cgroup: Option<&Cgroup>) -> HarnessResult<LineProcess> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(ROLE).arg(service.folder()).args([uid.to_string(), gid.to_string()]);
    LineProcess::start(command, cgroup)
}

/// Runs this process as one of a user, if its arguments request that.
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [ROLE, folder, uid, gid] = arguments[..] else { return None };
    become_user(uid.parse().unwrap(), gid.parse().unwrap()).unwrap();
    let mut user = User { endpoint: Endpoint::in_runtime_dir(folder), held: BTreeMap::new() };
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        match user.perform(&words) {
            Ok(()) => println!("ok"),
            Err(error) => println!("{}", error_chain(&*error)),
        }
        std::io::stdout().flush().unwrap();
    }
    Some(ExitCode::SUCCESS)
}

struct User {
    endpoint: Endpoint,
    held: BTreeMap<String, Held>,
}

/// How a file is held. The drop releases it.
enum Held {
    Open(OwnedFd),
    Mapped {
        _mapping: SharedMapping,
    },
    /// A socket, and the one that has a descriptor of the file in its queue.
    InSocket {
        _sockets: [OwnedFd; 2],
    },
    /// Standard input of a child.
    Inherited(Child),
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Self::Inherited(child) = self {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

type Failed = Box<dyn std::error::Error>;

impl User {
    fn perform(&mut self, words: &[&str]) -> Result<(), Failed> {
        let mut service = FdpassClient::connect(&self.endpoint, Timeouts::default())?;
        let (file, held) = match *words {
            ["create", name] => {
                let (file, _) = service.memfd_create(name, name, 0)?;
                memfd::resize(file.as_fd(), 4096)?;
                (name, Held::Open(file))
            }
            ["keep", name] => {
                let kept = Some(Lifetime::Kept);
                (name, Held::Open(service.memfd_create_with_lifetime(name, name, 0, kept)?.0))
            }
            ["adopt", name] => {
                let file = memfd::create(name, None)?;
                memfd::resize(file.as_fd(), 4096)?;
                service.adopt(file.as_fd(), name, None)?;
                (name, Held::Open(file))
            }
            ["adopt", name, path] => {
                let file = OwnedFd::from(File::options().read(true).write(true).open(path)?);
                service.adopt(file.as_fd(), name, None)?;
                (name, Held::Open(file))
            }
            ["open", name] => (name, Held::Open(service.open(&named(name), true)?.0)),
            ["fill", name, mib] => {
                let bytes = mib.parse::<u64>()? << 20;
                let file = self.take(name);
                memfd::resize(file.as_fd(), bytes)?;
                for offset in (0..bytes).step_by(1 << 20) {
                    fd::write_at(file.as_fd(), offset, &[1; 1 << 20])?;
                }
                (name, Held::Open(file))
            }
            ["map", name] => {
                (name, Held::Mapped { _mapping: SharedMapping::shared(self.take(name), 0, 4096, true)? })
            }
            ["hide", name] => {
                let (one, other) = scm::socket_pair()?;
                scm::send(one.as_fd(), b"hidden", &[self.take(name).as_fd()])?;
                (name, Held::InSocket { _sockets: [one, other] })
            }
            ["bequeath", name] => {
                let child = Command::new("sleep").arg("600").stdin(Stdio::from(self.take(name))).spawn()?;
                (name, Held::Inherited(child))
            }
            ["release", name] => {
                self.held.remove(name);
                return Ok(());
            }
            _ => return Err(format!("unknown command {words:?}").into()),
        };
        self.held.insert(file.to_owned(), held);
        Ok(())
    }

    /// The descriptor of a file that is open.
    fn take(&mut self, name: &str) -> OwnedFd {
        match self.held.get(name) {
            Some(Held::Open(file)) => fd::duplicate(file.as_fd()).unwrap(),
            _ => panic!("{name} is not open"),
        }
    }
}
