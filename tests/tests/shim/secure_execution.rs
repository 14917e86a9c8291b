//! The shim in a setuid program, which /etc/ld.so.preload loads and any user can start in any environment, and beside a stranger who
//! listens at the place of the service.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fdmap_sys::testing::credentials::become_user;
use fdmap_sys::testing::mounts;
use fdmap_tests::attack::{USER as ATTACKER, assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;
use fdmap_tests::victim::GROUP;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr};
use tokio::runtime::Handle;

use crate::fixture::{compile_plain_program, map_memfd, with_shim};

/// A memfd that the programs map, for which the shim needs the service.
const FILE: &str = "of-the-program";

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// A socket of the attacker at the place of the fdpass socket, which does not block.
fn listen(folder: &Path) -> OwnedFd {
    let address = UnixAddr::new(&folder.join("fdpass.sock")).unwrap();
    let bind = || {
        become_user(ATTACKER, GROUP).unwrap();
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        socket::bind(listener.as_raw_fd(), &address).unwrap();
        socket::listen(&listener, Backlog::new(8).unwrap()).unwrap();
        set_mode(&folder.join("fdpass.sock"), 0o777);
        listener
    };
    std::thread::scope(|scope| scope.spawn(bind).join().unwrap())
}

/// A connection to the attacker, which is closed.
fn accept(listener: &OwnedFd) -> Result<(), Errno> {
    socket::accept(listener.as_raw_fd()).and_then(nix::unistd::close)
}

/// A program that the attacker can start, without and with the rights of root.
struct Programs {
    plain: PathBuf,
    setuid: PathBuf,
    _compiled: Compiled,
}

impl Programs {
    fn compile() -> Self {
        let compiled = compile_plain_program();
        let plain = compiled.path().to_owned();
        let setuid = plain.with_file_name("setuid");
        std::fs::copy(&plain, &setuid).unwrap();
        set_mode(&setuid, 0o4755);
        Self { plain, setuid, _compiled: compiled }
    }
}

/// A program that runs until it is dropped, and what it prints on standard error.
struct Running {
    _process: LineProcess,
    errors: File,
}

impl Running {
    /// Starts a program, which maps a memfd.
    fn start(mut command: Command) -> Self {
        let errors = tempfile::tempfile().unwrap();
        command.stderr(errors.try_clone().unwrap());
        let mut process = LineProcess::start(command, None).unwrap();
        map_memfd(&mut process, FILE, 512);
        Self { _process: process, errors }
    }

    /// The same by the attacker.
    fn start_by_attacker(program: &Path, runtime_dir: &Path) -> Self {
        let mut command = Command::new(program);
        command.env("FDMAP_RUNTIME_DIR", runtime_dir).env("FDMAP_SHIM_MIN_SIZE", "much");
        command.uid(ATTACKER).gid(GROUP);
        Self::start(command)
    }

    /// The output of the program so far.
    fn errors(&self) -> String {
        let mut text = vec![0; usize::try_from(self.errors.metadata().unwrap().len()).unwrap()];
        self.errors.read_exact_at(&mut text, 0).unwrap();
        String::from_utf8(text).unwrap()
    }
}

/// Lets all programs of this thread load the shim, by a file in /etc that no other thread and no other process sees.
fn preload_shim(folder: &Path) {
    let shim = folder.join("libfdmap_shim.so");
    std::fs::copy(program("fdmap").unwrap().with_file_name("libfdmap_shim.so"), &shim).unwrap();
    let [upper, work] = ["upper", "work"].map(|name| folder.join(name));
    for path in [&upper, &work] {
        std::fs::create_dir(path).unwrap();
    }
    set_mode(&upper, 0o755);
    mounts::make_private().unwrap();
    let options = format!("lowerdir=/etc,upperdir={},workdir={}", upper.display(), work.display());
    let kind = Some(OsStr::new("overlay"));
    mount(kind, "/etc", kind, MsFlags::empty(), Some(options.as_str())).unwrap();
    std::fs::write("/etc/ld.so.preload", shim.as_os_str().as_encoded_bytes()).unwrap();
}

/// Starts both programs with the address of a stranger, and with that of the service.
fn run_preloaded(programs: &Programs, stranger: &Path, service: &Path) -> (OwnedFd, [Running; 4]) {
    let listener = listen(stranger);
    let plain = Running::start_by_attacker(&programs.plain, stranger);
    accept(&listener).expect("the shim is loaded and needs the service");
    assert!(plain.errors().contains("invalid FDMAP_SHIM_MIN_SIZE"), "{}", plain.errors());
    while accept(&listener).is_ok() {}

    let setuid = Running::start_by_attacker(&programs.setuid, stranger);
    assert_eq!(setuid.errors(), "", "the environment is ignored");
    assert_eq!(accept(&listener), Err(Errno::EAGAIN), "a setuid program connects to a stranger");

    let served = [&programs.setuid, &programs.plain].map(|path| Running::start_by_attacker(path, service));
    let [served_setuid, served_plain] = served;
    (listener, [plain, setuid, served_setuid, served_plain])
}

/// The owners of the files of these programs.
async fn owners(service: &Service) -> Vec<u32> {
    let files = service.client().await.unwrap().list().await.unwrap();
    files.iter().filter(|file| file.name == FILE).map(|file| file.access.uid).collect()
}

#[test(flavor = "multi_thread")]
async fn setuid_program_ignores_the_place_of_the_service_in_its_environment() {
    require(root());
    let programs = Programs::compile();
    let attack = |service: &Service| {
        let (folder, guard) = temp_dir("fdmap-preload-").unwrap();
        set_mode(&folder, 0o755);
        let stranger = folder.join("stranger");
        std::fs::create_dir(&stranger).unwrap();
        chown(&stranger, Some(ATTACKER), Some(GROUP)).unwrap();
        let preloaded = || {
            preload_shim(&folder);
            run_preloaded(&programs, &stranger, service.folder())
        };
        let running = std::thread::scope(|scope| scope.spawn(preloaded).join().unwrap());
        assert!(!std::fs::exists("/etc/ld.so.preload").unwrap(), "the host has no such file");
        let owners = Handle::current().block_on(owners(service));
        assert_eq!(owners, [ATTACKER], "only the program without more rights uses the service");
        (running, guard)
    };
    tokio::task::block_in_place(|| assert_withstands(&mut service(&[]), attack));
}

/// Any user could have put the socket there.
#[test]
fn shim_passes_nothing_to_a_stranger_in_a_shared_directory() {
    require(root());
    let programs = Programs::compile();
    assert_withstands(&mut service(&[]), |_| {
        let (folder, guard) = temp_dir("fdmap-shared-").unwrap();
        set_mode(&folder, 0o1777);
        let listener = listen(&folder);
        let running = Running::start(with_shim(&folder, &[], &[programs.plain.to_str().unwrap()]));
        assert!(running.errors().contains("user 65534 listens there"), "{}", running.errors());
        while let Ok(connection) = socket::accept(listener.as_raw_fd()) {
            let received = socket::recv(connection, &mut [0; 1024], MsgFlags::MSG_DONTWAIT);
            nix::unistd::close(connection).unwrap();
            assert_eq!(received, Ok(0), "the shim sends nothing");
        }
        (running, listener, guard)
    });
}
