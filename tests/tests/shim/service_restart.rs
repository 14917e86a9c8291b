//! Programs under the shim while the service is missing, exits or restarts.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::{root, temp_dir};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;

use crate::fixture::{
    ChangeReader, compile_plain_program, map_memfd, start_program, stderr_of, wait_until, with_shim,
};
use crate::guard_regions::{InstallMethod, call, guard};

#[test]
fn without_a_service_the_program_continues_after_one_message() {
    let (folder, _guard) = temp_dir("fdmap-missing-").unwrap();
    let counts = Compiled::new("counts").unwrap();
    let command = [counts.path().to_str().unwrap(), "1024", "pread"];
    let output = with_shim(&folder, &[], &command).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "present 768 swap 0 none 256\n");
    assert_eq!(stderr_of(&output).lines().count(), 1, "{}", stderr_of(&output));
    assert!(stderr_of(&output).starts_with("fdmap shim: connecting to fdmapd at "), "{}", stderr_of(&output));

    let output = with_shim(&folder, &[], &["true"]).output().unwrap();
    assert_eq!(
        (output.status.code(), stderr_of(&output).as_str()),
        (Some(0), ""),
        "the service was not needed"
    );
    let output = with_shim(&folder, &["--strict"], &["true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("connecting to fdmapd at"), "{}", stderr_of(&output));

    let mut off = with_shim(&folder, &["--strict"], &["env", "FDMAP_SHIM=off", "true"]);
    assert_eq!(off.output().unwrap().status.code(), Some(125), "env itself runs under the shim");
    let bad = with_shim(&folder, &[], &["env", "FDMAP_SHIM_MIN_SIZE=much", "true"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(0));
    assert_eq!(
        stderr_of(&bad),
        "fdmap shim: invalid FDMAP_SHIM_MIN_SIZE: expected a size such as 64K, 1M or 2G\n"
    );
}

/// As a setuid program in which /etc/ld.so.preload loads the shim.
#[test]
fn shim_ignores_the_environment_of_a_program_with_more_rights_than_its_caller() {
    const LOAD: &str = "import ctypes, sys; ctypes.CDLL(sys.argv[1])";
    const GAIN_RIGHTS: &str = "import os, sys; os.setresuid(65534, 0, 0); os.execv(sys.executable, sys.argv)";
    require(root());
    let library = program("fdmap").unwrap().with_file_name("libfdmap_shim.so");
    let library = library.to_str().unwrap();
    let stderr = |arguments: &[&str]| {
        let mut python = Command::new("python3");
        python.args(arguments).env("FDMAP_SHIM_MIN_SIZE", "much");
        let output = python.output().unwrap();
        assert!(output.status.success(), "{}", stderr_of(&output));
        stderr_of(&output)
    };
    assert!(stderr(&["-c", LOAD, library]).contains("invalid FDMAP_SHIM_MIN_SIZE"));
    assert_eq!(stderr(&["-c", GAIN_RIGHTS, "-c", LOAD, library]), "");
}

#[test]
fn variables_of_absent_options_are_cleared() {
    let (folder, _guard) = temp_dir("fdmap-missing-").unwrap();
    let mut nested = with_shim(&folder, &["--take", "ram"], &["env"]);
    let output = nested.env("FDMAP_SHIM_KEEP", "1").env("FDMAP_SHIM_TAKE", "other").output().unwrap();
    let variables = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(variables.contains("FDMAP_SHIM_TAKE=ram\n"), "{variables}");
    assert!(!variables.contains("FDMAP_SHIM_KEEP"), "{variables}");
}

/// Runs the plain program with commands on standard input. Returns its standard error and its answers.
fn run_commands(folder: &Path, commands: &str) -> (String, String) {
    let compiled = compile_plain_program();
    let script =
        ["sh", "-c", "printf '%b' \"$2\" | \"$1\"", "sh", compiled.path().to_str().unwrap(), commands];
    let output = with_shim(folder, &[], &script).output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, stderr_of(&output));
    (stderr_of(&output), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn seccomp_filter_disables_the_shim() {
    let (folder, _guard) = temp_dir("fdmap-missing-").unwrap();
    let (messages, answers) =
        run_commands(&folder, "filter\\nmemfd ram 2097152\\nmap 3 0 2097152\\nwrite 0 5\\n");
    assert_eq!(answers, "ok 0\nok 3\nok 0\nok\n");
    assert_eq!(messages.lines().count(), 1, "{messages}");
    assert!(messages.contains("seccomp filter"), "{messages}");
}

#[test]
fn replaced_standard_error_is_not_written_to() {
    let (folder, _guard) = temp_dir("fdmap-missing-").unwrap();
    // The memfd gets descriptor 2.
    let (messages, answers) =
        run_commands(&folder, "close 2\\nmemfd ram 2097152\\nmap 2 0 2097152\\nbyte 0 0\\n");
    assert_eq!((messages.as_str(), answers.as_str()), ("", "ok\nok 2\nok 0\nok 0\n"));
}

/// A service without an FD store.
struct Daemon {
    child: Child,
    _guard: CleanupGuard,
}

impl Daemon {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new(program("fdmapd").unwrap());
        command.arg("--runtime-dir").arg(folder).stdin(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let guard = CleanupGuard::new(Cleanup::process(child.id())).unwrap();
        wait_until("the service starts", || {
            FdpassClient::connect(&Endpoint::in_runtime_dir(folder), Timeouts::default()).is_ok()
        });
        Self { child, _guard: guard }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
async fn restarted_service_tracks_the_mappings_again() {
    let (folder, _guard) = temp_dir("fdmap-service-").unwrap();
    let first = Daemon::start(&folder);
    let compiled = compile_plain_program();
    let command = with_shim(&folder, &[], &[compiled.path().to_str().unwrap()]);
    let mut program = LineProcess::start(command, None).unwrap();
    let (fd, slot) = map_memfd(&mut program, "ram", 512);
    program.call(&format!("close {fd}")).unwrap();
    program.call(&format!("write {slot} 1")).unwrap();
    drop(first);
    program.call(&format!("write {slot} 2")).unwrap();
    let (_, small) = map_memfd(&mut program, "meanwhile", 512);
    program.call(&format!("unmap {small} 0 {}", 512 * 4096)).unwrap();

    let _second = Daemon::start(&folder);
    // The next memfd that the program maps makes the shim reconnect.
    std::thread::sleep(std::time::Duration::from_millis(300));
    map_memfd(&mut program, "later", 512);
    let place = Endpoint::in_runtime_dir(&folder);
    let client = fdmap_client::Client::connect(&place, Timeouts::default()).await.unwrap();
    let mut names: Vec<_> = client.list().await.unwrap().into_iter().map(|file| file.name).collect();
    names.sort();
    assert_eq!(names, ["later", "ram"]);
    let mut reader = ChangeReader::start_with(client, "ram").await;
    reader.wait_until_exact().await;
    program.call(&format!("write {slot} 7")).unwrap();
    assert_eq!(reader.read().await, (vec![(7, true)], true));
}

#[test]
async fn guard_region_outlives_the_service() {
    let (folder, _guard) = temp_dir("fdmap-service-").unwrap();
    let first = Daemon::start(&folder);
    let compiled = compile_plain_program();
    let command = with_shim(&folder, &[], &[compiled.path().to_str().unwrap()]);
    let mut program = LineProcess::start(command, None).unwrap();
    let (_, slot) = map_memfd(&mut program, "ram", 512);
    program.call(&format!("write {slot} 9")).unwrap();
    guard(&mut program, &slot, &(8..12), InstallMethod::Madvise);
    drop(first);

    let _second = Daemon::start(&folder);
    std::thread::sleep(std::time::Duration::from_millis(300));
    // The shim reconnects, and has all of the mapping tracked again.
    map_memfd(&mut program, "later", 512);
    let faults = (nix::errno::Errno::EFAULT as i32).to_string();
    let place = Endpoint::in_runtime_dir(&folder);
    let client = fdmap_client::Client::connect(&place, Timeouts::default()).await.unwrap();
    let mut reader = ChangeReader::start_with(client, "ram").await;
    assert_eq!(call(&mut program, &format!("access {slot} 9")), faults);
    reader.wait_until_exact().await;
    assert_eq!(call(&mut program, &format!("access {slot} 9")), faults, "checkpoints keep it");
    call(&mut program, &format!("write {slot} 20"));
    assert!(reader.read_pages().await.contains(&20));
    call(&mut program, &format!("unguard {slot} 8 4"));
    call(&mut program, &format!("write {slot} 9"));
    assert!(reader.read_pages().await.contains(&9));
    guard(&mut program, &slot, &(8..16), InstallMethod::Madvise);
}

#[test]
async fn tracking_survives_a_restart_with_an_fd_store() {
    let service = Service::start_with_fd_store(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut program = start_program(&service, &compiled, &["--keep-files"]);
    let (_, slot) = map_memfd(&mut program, "ram", 512);
    program.call(&format!("write {slot} 1")).unwrap();
    service.kill().unwrap();
    program.call(&format!("write {slot} 2")).unwrap();
    service.restart().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    map_memfd(&mut program, "later", 512);
    let mut reader = ChangeReader::start(&service, "ram").await;
    program.call(&format!("write {slot} 7")).unwrap();
    let written = reader.read_pages().await;
    assert!(written.contains(&7), "{written:?}");
    // The mapping still has the same id.
    program.call(&format!("write {slot} 8")).unwrap();
    program.call(&format!("unmap {slot} 0 {}", 512 * 4096)).unwrap();
    let (written, _) = reader.read().await;
    assert!(written.contains(&(8, true)), "{written:?}");
}

#[test]
async fn unused_ephemeral_files_are_deleted() {
    let service = Service::start(&[]).unwrap();
    let compiled = compile_plain_program();
    let mut short = start_program(&service, &compiled, &[]);
    let mut kept = start_program(&service, &compiled, &["--keep-files"]);
    let mut long = start_program(&service, &compiled, &[]);
    map_memfd(&mut short, "short", 512);
    map_memfd(&mut kept, "kept", 512);
    let (fd, _) = map_memfd(&mut long, "long", 512);
    long.call(&format!("close {fd}")).unwrap();
    drop((short, kept));
    let client = service.client().await.unwrap();
    for _ in 0..60 {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let mut names: Vec<_> = client.list().await.unwrap().into_iter().map(|file| file.name).collect();
        names.sort();
        if names == ["kept", "long"] {
            return;
        }
    }
    panic!("the file of an exited program still exists");
}
