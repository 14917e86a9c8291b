//! The service is not there, goes, and comes back.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::host::temp_dir;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;

use crate::bed::{Consumer, mapped, said, stranger, under, until};

#[test]
fn without_a_service_the_program_goes_on_after_one_line() {
    let (folder, _guard) = temp_dir("fdmap-nobody-").unwrap();
    let counts = Compiled::new("counts").unwrap();
    let command = [counts.path().to_str().unwrap(), "1024", "pread"];
    let output = under(&folder, &[], &command).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "present 768 swap 0 none 256\n");
    assert_eq!(said(&output).lines().count(), 1, "{}", said(&output));
    assert!(said(&output).starts_with("fdmap shim: no fdmapd answers at "), "{}", said(&output));

    let output = under(&folder, &[], &["true"]).output().unwrap();
    assert_eq!((output.status.code(), said(&output).as_str()), (Some(0), ""), "nothing was wanted of it");
    let output = under(&folder, &["--strict"], &["true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(said(&output).contains("no fdmapd answers"), "{}", said(&output));

    let mut off = under(&folder, &["--strict"], &["env", "FDMAP_SHIM=off", "true"]);
    assert_eq!(off.output().unwrap().status.code(), Some(125), "env itself is under the shim");
    let bad = under(&folder, &[], &["env", "FDMAP_SHIM_MIN_SIZE=much", "true"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(0));
    assert_eq!(said(&bad), "fdmap shim: FDMAP_SHIM_MIN_SIZE should be a size such as 64K, 1M or 2G\n");
}

#[test]
fn variables_of_options_that_are_not_given_are_cleared() {
    let (folder, _guard) = temp_dir("fdmap-nobody-").unwrap();
    let mut nested = under(&folder, &["--take", "ram"], &["env"]);
    let output = nested.env("FDMAP_SHIM_KEEP", "1").env("FDMAP_SHIM_TAKE", "other").output().unwrap();
    let variables = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(variables.contains("FDMAP_SHIM_TAKE=ram\n"), "{variables}");
    assert!(!variables.contains("FDMAP_SHIM_KEEP"), "{variables}");
}

/// Says what a program that does this writes to descriptor 2 and what it answers.
fn told_to(folder: &Path, commands: &str) -> (String, String) {
    let compiled = Compiled::new("plain_program").unwrap();
    let script =
        ["sh", "-c", "printf '%b' \"$2\" | \"$1\"", "sh", compiled.path().to_str().unwrap(), commands];
    let output = under(folder, &[], &script).output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, said(&output));
    (said(&output), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn filter_of_system_calls_is_got_out_of_the_way_of() {
    let (folder, _guard) = temp_dir("fdmap-nobody-").unwrap();
    let (said, answers) = told_to(&folder, "filter\\nmemfd ram 2097152\\nmap 3 0 2097152\\nwrite 0 5\\n");
    assert_eq!(answers, "ok 0\nok 3\nok 0\nok\n");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("filters its system calls"), "{said}");
}

#[test]
fn file_in_place_of_standard_error_is_not_written_to() {
    let (folder, _guard) = temp_dir("fdmap-nobody-").unwrap();
    // The memfd has number 2.
    let (said, answers) = told_to(&folder, "close 2\\nmemfd ram 2097152\\nmap 2 0 2097152\\nbyte 0 0\\n");
    assert_eq!((said.as_str(), answers.as_str()), ("", "ok\nok 2\nok 0\nok 0\n"));
}

/// A service whose descriptors nobody keeps.
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
        until("the service starts", || {
            FdpassClient::connect(&Endpoint::in_folder(folder), Timeouts::default()).is_ok()
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
async fn service_that_is_back_is_told_again() {
    let (folder, _guard) = temp_dir("fdmap-service-").unwrap();
    let first = Daemon::start(&folder);
    let compiled = Compiled::new("plain_program").unwrap();
    let command = under(&folder, &[], &[compiled.path().to_str().unwrap()]);
    let mut stranger = LineProcess::start(command, None).unwrap();
    let (fd, slot) = mapped(&mut stranger, "ram", 512);
    stranger.call(&format!("close {fd}")).unwrap();
    stranger.call(&format!("write {slot} 1")).unwrap();
    drop(first);
    stranger.call(&format!("write {slot} 2")).unwrap();
    let (_, small) = mapped(&mut stranger, "meanwhile", 512);
    stranger.call(&format!("unmap {small} 0 {}", 512 * 4096)).unwrap();

    let _second = Daemon::start(&folder);
    // The next memfd that is mapped brings it to the program's mind.
    std::thread::sleep(std::time::Duration::from_millis(300));
    mapped(&mut stranger, "later", 512);
    let place = Endpoint::in_folder(&folder);
    let client = fdmap_client::Client::connect(&place, Timeouts::default()).await.unwrap();
    let mut names: Vec<_> = client.list().await.unwrap().into_iter().map(|file| file.name).collect();
    names.sort();
    assert_eq!(names, ["later", "ram"]);
    let mut consumer = Consumer::with(client, "ram").await;
    consumer.settle().await;
    stranger.call(&format!("write {slot} 7")).unwrap();
    assert_eq!(consumer.step().await, (vec![(7, true)], true));
}

#[test]
async fn service_whose_descriptors_were_kept_goes_on() {
    let service = Service::start_with_fd_store(&[]).unwrap();
    let compiled = Compiled::new("plain_program").unwrap();
    let mut stranger = stranger(&service, &compiled, &["--keep"]);
    let (_, slot) = mapped(&mut stranger, "ram", 512);
    stranger.call(&format!("write {slot} 1")).unwrap();
    service.kill().unwrap();
    stranger.call(&format!("write {slot} 2")).unwrap();
    service.restart().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    mapped(&mut stranger, "later", 512);
    let mut consumer = Consumer::begin(&service, "ram").await;
    stranger.call(&format!("write {slot} 7")).unwrap();
    let told = consumer.pages().await;
    assert!(told.contains(&7), "{told:?}");
    // It is still known by the name that it had.
    stranger.call(&format!("write {slot} 8")).unwrap();
    stranger.call(&format!("unmap {slot} 0 {}", 512 * 4096)).unwrap();
    let (told, _) = consumer.step().await;
    assert!(told.contains(&(8, true)), "{told:?}");
}

#[test]
async fn files_that_nobody_uses_any_more_are_let_go_of() {
    let service = Service::start(&[]).unwrap();
    let compiled = Compiled::new("plain_program").unwrap();
    let mut short = stranger(&service, &compiled, &[]);
    let mut kept = stranger(&service, &compiled, &["--keep"]);
    let mut long = stranger(&service, &compiled, &[]);
    mapped(&mut short, "short", 512);
    mapped(&mut kept, "kept", 512);
    let (fd, _) = mapped(&mut long, "long", 512);
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
    panic!("the file of a program that has ended is still there");
}
