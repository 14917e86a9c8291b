//! The shim in a setuid program, which /etc/ld.so.preload loads and any user can start in any environment, and beside a stranger who
//! listens at the place of the service.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use fdmap_sys::testing::credentials::become_user;
use fdmap_sys::testing::mounts;
use fdmap_tests::attack::USER as ATTACKER;
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;
use fdmap_tests::victim::{GROUP, Victim};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr};

use crate::fixture::{compile_plain_program, stderr_of, with_shim};

/// Maps a memfd, for which the shim needs the service.
const COMMANDS: &str = "memfd of-the-program 2097152\nmap 3 0 2097152\n";
/// A connection on a loaded host.
const CONNECT_TIMEOUT_MS: u16 = 20_000;

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

/// The attacker starts a program.
fn start(program: &Path, runtime_dir: &Path) -> Child {
    let mut command = Command::new(program);
    command.env("FDMAP_RUNTIME_DIR", runtime_dir).env("FDMAP_SHIM_MIN_SIZE", "much");
    command.uid(ATTACKER).gid(GROUP).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), COMMANDS.as_bytes()).unwrap();
    child
}

#[track_caller]
fn finish(child: Child) -> Output {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
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

/// Runs both programs at a stranger's socket, and at that of a service.
fn run_preloaded(programs: &Programs, stranger: &Path, service: &Service) {
    let listener = listen(stranger);
    let child = start(&programs.plain, stranger);
    let connected = poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], CONNECT_TIMEOUT_MS);
    assert_eq!(connected, Ok(1), "the shim is loaded and needs the service");
    accept(&listener).unwrap();
    assert!(stderr_of(&finish(child)).contains("invalid FDMAP_SHIM_MIN_SIZE"));
    while accept(&listener).is_ok() {}

    let output = finish(start(&programs.setuid, stranger));
    assert_eq!(stderr_of(&output), "", "the environment is ignored");
    assert_eq!(accept(&listener), Err(Errno::EAGAIN), "a setuid program connects to a stranger");

    finish(start(&programs.setuid, service.folder()));
    finish(start(&programs.plain, service.folder()));
}

#[test]
async fn setuid_program_ignores_the_place_of_the_service_in_its_environment() {
    require(root());
    let service = Service::start(&["--group", &GROUP.to_string()]).unwrap();
    let mut victim = Victim::start(&service).unwrap();
    let (folder, _guard) = temp_dir("fdmap-preload-").unwrap();
    set_mode(&folder, 0o755);
    let stranger = folder.join("stranger");
    std::fs::create_dir(&stranger).unwrap();
    chown(&stranger, Some(ATTACKER), Some(GROUP)).unwrap();
    let programs = Programs::compile();
    let preloaded = || {
        preload_shim(&folder);
        run_preloaded(&programs, &stranger, &service);
    };
    std::thread::scope(|scope| scope.spawn(preloaded).join().unwrap());
    assert!(!std::fs::exists("/etc/ld.so.preload").unwrap(), "the host has no such file");
    victim.assert_served("after the programs");
    let mut files = service.client().await.unwrap().list().await.unwrap();
    files.retain(|file| file.name == "of-the-program");
    let owners: Vec<_> = files.iter().map(|file| file.access.uid).collect();
    assert_eq!(owners, [ATTACKER], "only the program without more rights uses the service: {files:?}");
}

/// Any user could have put the socket there.
#[test]
fn shim_passes_nothing_to_a_stranger_in_a_shared_directory() {
    require(root());
    let (folder, _guard) = temp_dir("fdmap-shared-").unwrap();
    set_mode(&folder, 0o1777);
    let listener = listen(&folder);
    let programs = Programs::compile();
    let mut command = with_shim(&folder, &[], &[programs.plain.to_str().unwrap()]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), COMMANDS.as_bytes()).unwrap();
    let output = finish(child);
    assert!(stderr_of(&output).contains("user 65534 listens there"), "{}", stderr_of(&output));
    while let Ok(connection) = socket::accept(listener.as_raw_fd()) {
        let received = socket::recv(connection, &mut [0; 1024], MsgFlags::MSG_DONTWAIT);
        nix::unistd::close(connection).unwrap();
        assert_eq!(received, Ok(0), "the shim sends nothing");
    }
}
