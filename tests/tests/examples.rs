//! The programs of `examples/`, run as their README describes.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use fdmap_client::grpc::CreateFile;
use fdmap_tests::harness::require;
use fdmap_tests::host::{output, root, temp_dir};
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::{HarnessError, HarnessResult, test};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

/// A service with a file named `ram`, and a writable descriptor of it.
async fn service() -> (Service, std::fs::File) {
    let service = Service::start(&[]).unwrap();
    let file = CreateFile { name: "ram".to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
    service.client().await.unwrap().create(file).await.unwrap();
    let (fd, _) = service.fdpass().unwrap().open(&named("ram"), true).unwrap();
    (service, fd.into())
}

fn rust(example: &str) -> Command {
    Command::new(program(&format!("examples/{example}")).unwrap())
}

/// Runs an example. Returns its output.
#[track_caller]
fn run(mut command: Command, service: &Service, arguments: &[&Path]) -> String {
    command.env("FDMAP_RUNTIME_DIR", service.folder()).args(arguments);
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// A Python example in a virtual environment with grpcio and the generated stubs. The environment stays in `target/`.
fn python(example: &str) -> HarnessResult<Command> {
    static ENVIRONMENT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let environment =
        ENVIRONMENT.get_or_init(|| environment().map_err(|error| fdmap_proto::error_chain(&error)));
    let environment = environment.as_ref().map_err(|error| {
        HarnessError::Missing(format!("Python with venv, grpcio and grpcio-tools: {error}"))
    })?;
    let mut command = Command::new(environment.join("bin/python"));
    command
        .env("PYTHONPATH", environment.join("stubs"))
        .arg(repository().join("examples/python").join(example));
    Ok(command)
}

fn environment() -> HarnessResult<PathBuf> {
    let environment = program("python")?;
    let path = |path: PathBuf| path.to_string_lossy().into_owned();
    let (python, stubs) = (path(environment.join("bin/python")), environment.join("stubs"));
    let (proto, stubs) = (path(repository().join("proto")), path(stubs));
    if output(&python, &["-c", "import grpc_tools"]).is_err() {
        output("python3", &["-m", "venv", &path(environment.clone())])?;
        let requirements = path(repository().join("examples/python/requirements.txt"));
        output(&python, &["-m", "pip", "install", "--quiet", "--requirement", &requirements])?;
    }
    output("mkdir", &["-p", &stubs])?;
    let files = std::fs::read_dir(repository().join("proto/fdmap/v1")).unwrap();
    let files: Vec<_> = files.map(|file| path(file.unwrap().path())).collect();
    let (python_out, grpc_out) = (format!("--python_out={stubs}"), format!("--grpc_python_out={stubs}"));
    let mut arguments = vec!["-m", "grpc_tools.protoc", "-I", &proto, &python_out, &grpc_out];
    arguments.extend(files.iter().map(String::as_str));
    output(&python, &arguments)?;
    Ok(environment)
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
async fn scan_prints_the_state_of_every_page() {
    let (service, file) = service().await;
    file.write_all_at(b"data", 3 * PAGE).unwrap();
    let printed = run(rust("scan"), &service, &["root/ram".as_ref()]);
    assert_eq!(printed, "0..3 hole\n3..4 resident\n4..64 hole\nexact: true\n");
}

#[test]
async fn track_prints_the_pages_that_it_wrote() {
    require(root());
    let (service, _) = service().await;
    let printed = run(rust("track"), &service, &["ram".as_ref()]);
    assert!(
        printed.starts_with("3..5 written, conservative: false\n9..10 written, conservative: false\n"),
        "{printed}"
    );
}

#[test]
async fn incremental_copy_in_rust_transfers_only_what_changed() {
    require(root());
    transfers_only_what_changed(|| Ok(rust("incremental_copy"))).await;
}

#[test]
async fn incremental_copy_in_python_transfers_only_what_changed() {
    require(root());
    require(python("incremental_copy.py"));
    transfers_only_what_changed(|| python("incremental_copy.py")).await;
}

async fn transfers_only_what_changed(example: impl Fn() -> HarnessResult<Command>) {
    let (service, file) = service().await;
    let (folder, _guard) = temp_dir("fdmap-example-").unwrap();
    let target = folder.join("copy");
    let copy = || run(example().unwrap(), &service, &["0/ram".as_ref(), &target]);
    let page = |number: u64| {
        let mut page = vec![0; PAGE as usize];
        std::fs::File::open(&target).unwrap().read_exact_at(&mut page, number * PAGE).unwrap();
        page
    };
    for number in [0, 5, 6, PAGES - 1] {
        file.write_all_at(&[1; PAGE as usize], number * PAGE).unwrap();
    }
    copy();
    assert_eq!([page(0), page(5), page(6), page(PAGES - 1)].concat(), [1; 4 * PAGE as usize]);

    // For 10 s a descriptor write that began before tracking may be in progress: all data pages are conservative.
    std::thread::sleep(Duration::from_secs(11));
    copy();
    // A page that the next run does not transfer keeps this mark.
    let mark = std::fs::OpenOptions::new().write(true).open(&target).unwrap();
    mark.write_all_at(&[9; PAGE as usize], 5 * PAGE).unwrap();
    for number in [6, 20] {
        file.write_all_at(&[2; PAGE as usize], number * PAGE).unwrap();
    }
    copy();
    assert_eq!([page(6), page(20)].concat(), [2; 2 * PAGE as usize]);
    assert_eq!(page(5), [9; PAGE as usize], "page 5 did not change and was copied again");
    assert_eq!(page(PAGES - 1), [1; PAGE as usize]);
}

#[test]
async fn incremental_copies_in_rust_equal_the_file() {
    equal_the_file(|| Ok(rust("incremental_copy"))).await;
}

#[test]
async fn incremental_copies_in_python_equal_the_file() {
    require(python("incremental_copy.py"));
    equal_the_file(|| python("incremental_copy.py")).await;
}

/// Each target is complete after each run, also if another one was written before, and has the size of the file.
async fn equal_the_file(example: impl Fn() -> HarnessResult<Command>) {
    let (service, file) = service().await;
    let client = service.client().await.unwrap();
    let (folder, _guard) = temp_dir("fdmap-example-").unwrap();
    let targets = [folder.join("one"), folder.join("two")];
    let copy = |target: &PathBuf| {
        run(example().unwrap(), &service, &["ram".as_ref(), target]);
        let mut expected = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut expected, 0).unwrap();
        assert!(std::fs::read(target).unwrap() == expected, "{} differs", target.display());
    };
    // All data is far from the end of the file.
    file.write_all_at(&[1; PAGE as usize], 2 * PAGE).unwrap();
    targets.iter().for_each(copy);
    file.write_all_at(&[2; PAGE as usize], 5 * PAGE).unwrap();
    targets.iter().for_each(copy);
    assert_eq!(client.cursors(&named("ram")).await.unwrap().len(), 2, "one for each target");

    // The next target of this path may have the same inode number.
    std::fs::remove_file(&targets[0]).unwrap();
    targets.iter().for_each(copy);
    // The same inode, without its content.
    std::fs::write(&targets[0], "").unwrap();
    targets.iter().for_each(copy);
    let other = folder.join("other");
    std::fs::write(&other, [3; 9 * PAGE as usize]).unwrap();
    copy(&other);

    for pages in [PAGES / 2, 2 * PAGES] {
        client.resize(&named("ram"), pages * PAGE).await.unwrap();
        targets.iter().for_each(copy);
    }
    file.write_all_at(&[4; PAGE as usize], PAGES * PAGE).unwrap();
    targets.iter().for_each(copy);
}

#[test]
async fn incremental_copy_in_python_prints_why_a_file_is_refused() {
    let (service, _file) = service().await;
    let (folder, _guard) = temp_dir("fdmap-example-").unwrap();
    let mut command = require(python("incremental_copy.py"));
    command.env("FDMAP_RUNTIME_DIR", service.folder()).arg("absent").arg(folder.join("copy"));
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with("incremental_copy.py: ") && errors.contains("no file \"absent\""), "{errors}");
    assert!(!folder.join("copy").exists());
}

#[test]
async fn page_states_in_python_counts_every_state() {
    let (service, file) = service().await;
    file.write_all_at(b"data", 3 * PAGE).unwrap();
    for name in ["ram", "0/ram", "root/ram"] {
        let printed = run(require(python("page_states.py")), &service, &[name.as_ref()]);
        assert_eq!(printed, "hole 63\nswapped 0\nresident 1\nunknown 0\n");
    }
}

/// gRPC's C-core sends the path of the socket as `:authority`: docs/clients.md.
#[test]
async fn python_without_an_authority_is_refused() {
    let (service, _file) = service().await;
    let mut command = require(python("page_states.py"));
    let script = "import os, grpc\n\
                  from fdmap.v1 import host_pb2, host_pb2_grpc\n\
                  channel = grpc.insecure_channel('unix:' + os.environ['FDMAP_RUNTIME_DIR'] + '/fdmap.sock')\n\
                  try: host_pb2_grpc.HostStub(channel).Info(host_pb2.InfoRequest(), timeout=10)\n\
                  except grpc.RpcError as error: print(error.code().name)";
    let interpreter = command.get_program().to_owned();
    let mut plain = Command::new(interpreter);
    plain.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).args(["-c", script]);
    command = plain;
    assert_eq!(run(command, &service, &[]), "INTERNAL\n");
}
