//! A puppet: one thread that does to a mapping of its own what it is told. See `fdmap_tests::puppet`.

use std::ffi::c_void;
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;

use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, memfd};
use nix::libc;
use nix::unistd::{ForkResult, fork, pipe, setuid};

const PAGE: usize = 4096;

type Done = Result<String, Box<dyn std::error::Error>>;

#[derive(Default)]
struct Puppet {
    file: Option<OwnedFd>,
    mapping: Option<SharedMapping>,
    uffd: Option<Userfaultfd>,
    /// Orders for a child, and its answers.
    child: Option<(OwnedFd, OwnedFd)>,
}

fn main() {
    let mut puppet = Puppet::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let words: Vec<&str> = line.split(' ').collect();
        match puppet.perform(&words) {
            Ok(said) => println!("ok {said}"),
            Err(error) => println!("failed {error}"),
        }
        if std::io::stdout().flush().is_err() {
            return;
        }
    }
}

impl Puppet {
    fn perform(&mut self, words: &[&str]) -> Done {
        let nothing = Ok(String::new());
        match words {
            ["map", bytes] => return self.map(bytes.parse()?, None),
            ["map-huge", bytes] => return self.map(bytes.parse()?, Some(2 << 20)),
            ["userfaultfd"] => {
                let uffd = self.uffd.insert(Userfaultfd::create()?);
                return Ok(uffd.as_fd().as_raw_fd().to_string());
            }
            ["forget-userfaultfd"] => self.uffd = None,
            ["write", page] => write(self.mapping()?, page.parse()?)?,
            ["read", page] => {
                if !self.mapping()?.read_at(page.parse::<usize>()? * PAGE, &mut [0]) {
                    return Err("there is no such page".into());
                }
            }
            ["pageout"] => self.mapping()?.advise(Advice::PageOut)?,
            ["unmap"] => self.mapping = None,
            ["cover"] => cover(self.mapping()?)?,
            ["copy"] => return copy(self.mapping()?),
            ["become-nobody"] => setuid(65534.into())?,
            ["open-own-pagemap"] => drop(Pagemap::open(None)?),
            ["fork"] => return self.fork(),
            ["child-write", page] => self.child_write(page.parse()?)?,
            ["exec"] => return Err(std::process::Command::new("cat").exec().into()),
            ["exit"] => std::process::exit(0),
            other => return Err(format!("{other:?} is nothing to do").into()),
        }
        nothing
    }

    fn mapping(&self) -> Result<&SharedMapping, &'static str> {
        self.mapping.as_ref().ok_or("nothing is mapped")
    }

    fn map(&mut self, bytes: u64, huge: Option<u64>) -> Done {
        let file = memfd::create("puppet", huge)?;
        memfd::resize(file.as_fd(), bytes)?;
        let mapping = SharedMapping::shared(&file, 0, usize::try_from(bytes)?, true)?;
        let said = format!("{} {}", file.as_raw_fd(), mapping.as_ptr().addr());
        (self.file, self.mapping) = (Some(file), Some(mapping));
        Ok(said)
    }

    /// A child that writes pages when told to, and ends when this process does.
    fn fork(&mut self) -> Done {
        let (orders, ordering) = pipe()?;
        let (answering, answers) = pipe()?;
        // SAFETY: this process has one thread.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => {
                self.child = Some((ordering, answering));
                Ok(child.to_string())
            }
            ForkResult::Child => {
                drop((ordering, answering));
                let mut orders = std::fs::File::from(orders);
                let mut answers = std::fs::File::from(answers);
                let mut page = [0; 8];
                while orders.read_exact(&mut page).is_ok() {
                    let done = self.mapping().is_ok_and(|all| write(all, usize::from_ne_bytes(page)).is_ok());
                    if answers.write_all(&[u8::from(done)]).is_err() {
                        break;
                    }
                }
                // SAFETY: _exit takes an integer. What the parent has buffered is not for us to write.
                unsafe { libc::_exit(0) }
            }
        }
    }

    fn child_write(&self, page: usize) -> Result<(), Box<dyn std::error::Error>> {
        let (ordering, answering) = self.child.as_ref().ok_or("there is no child")?;
        nix::unistd::write(ordering, &page.to_ne_bytes())?;
        let mut answer = [0];
        nix::unistd::read(answering, &mut answer)?;
        if answer == [1] { Ok(()) } else { Err("the child did not write".into()) }
    }
}

fn write(mapping: &SharedMapping, page: usize) -> Result<(), &'static str> {
    if mapping.write_at(page * PAGE, b"w") { Ok(()) } else { Err("there is no such page") }
}

/// Puts anonymous memory over a mapping.
fn cover(mapping: &SharedMapping) -> Result<(), Errno> {
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = mapping.as_ptr().cast::<c_void>();
    // SAFETY: what is replaced is the mapping, to which there are no references; it stays as long as it is.
    let covered = unsafe { libc::mmap(at, mapping.len(), protection, flags, -1, 0) };
    if covered == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// Makes a second mapping of the same by `mremap` with a length of 0, left there until this process ends.
fn copy(mapping: &SharedMapping) -> Done {
    let at = mapping.as_ptr().cast::<c_void>();
    // SAFETY: of a shared mapping, an old length of 0 leaves it as it is and maps the same anew where there is room.
    let copied = unsafe { libc::mremap(at, 0, mapping.len(), libc::MREMAP_MAYMOVE) };
    if copied == libc::MAP_FAILED { Err(Errno::last().into()) } else { Ok(copied.addr().to_string()) }
}
