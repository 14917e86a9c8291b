//! The command line: its output, its JSON output and its exit codes.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fdmap_sys::{Errno, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, fdmap_as, program};
use fdmap_tests::test;
use fdmap_tests::tracked::{PageKind, TrackedMemfd};
use serde_json::Value;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

struct Fdmap<'a>(&'a Service);

impl Fdmap<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("fdmap").unwrap());
        command.arg("--runtime-dir").arg(self.0.folder()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(&[arguments, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    #[track_caller]
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("fdmap: ") || stderr.starts_with("error: "), "{stderr}");
        stderr
    }
}

#[test]
fn life_of_a_file() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    let made = fdmap.json(&["create", "ram", "--size", "1M", "--mode", "640", "--gid", "50"]);
    assert_eq!(made["size_bytes"], 1 << 20);
    assert_eq!(made["access"]["group"], serde_json::json!(["inspect", "read"]));
    let id = format!("id:{}", made["id"].as_str().unwrap());
    assert_eq!(fdmap.json(&["ls"])[0]["name"], "ram");
    assert!(fdmap.ok(&["ls"]).contains("ram"));

    let write = "printf data | dd of=/proc/self/fd/$FDMAP_FD bs=4096 seek=3 conv=notrunc 2>/dev/null";
    fdmap.ok(&["open", "ram", "--write", "--", "sh", "-c", write]);
    assert_eq!(
        fdmap.ok(&["open", "ram", "--", "sh", "-c", "dd bs=4096 skip=3 count=1 <&3 2>/dev/null | head -c 4"]),
        "data"
    );
    assert_eq!(fdmap.run(&["open", "ram", "--", "sh", "-c", "exit 9"]).status.code(), Some(9));

    let stat = fdmap.json(&["stat", &id]);
    assert_eq!(
        (&stat["pages"]["hole_pages"], &stat["pages"]["resident_pages"]),
        (&Value::from(255), &Value::from(1))
    );
    assert_eq!(stat["pages"]["provenance"]["exact"], true);
    assert!(fdmap.ok(&["stat", "ram"]).contains("resident   1"));

    let runs = fdmap.json(&["pages", "ram", "2.."])["runs"].clone();
    assert_eq!(runs[1], serde_json::json!({ "start": 3, "end": 4, "state": "resident" }));
    assert_eq!(fdmap.json(&["pages", "ram", "--state", "resident"])["runs"].as_array().unwrap().len(), 1);
    assert!(
        fdmap.ok(&["pages", "ram", "--attributes", "all"]).contains("uptodate")
            || service_has_no_attributes(&fdmap)
    );
    assert!(fdmap.ok(&["pages", "ram", "--map"]).contains("...R"));
    let entries = fdmap.run(&["pages", "ram", "..4", "--entries", "-"]).stdout;
    assert_eq!(entries.len(), 32);
    assert_eq!(entries[31] >> 7, 1, "page 3 is present");
    let lookup = fdmap.json(&["lookup", "ram", "3", "0", "3"]);
    let states: Vec<_> =
        lookup["pages"].as_array().unwrap().iter().map(|page| page["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["resident", "hole", "resident"]);

    let file = service.folder().join("snapshot");
    fdmap.ok(&["snapshot", "ram", "--layout", "states", "-o", file.to_str().unwrap()]);
    let bytes = std::fs::read(file).unwrap();
    assert_eq!((&bytes[..8], bytes.len(), bytes[128]), (&b"FDMAPSNP"[..], 128 + 64, 0b0100_0000));
    assert_eq!(fdmap.json(&["snapshot", "ram", "1.."])["pages"]["resident_pages"], 1);

    fdmap.ok(&["resize", "ram", "64K"]);
    fdmap.ok(&["seal", "ram", "grow", "shrink"]);
    assert!(fdmap.fails(6, &["resize", "ram", "1M"]).contains("seal"));
    let access = fdmap.json(&["access", "ram", "--other", "inspect"]);
    assert_eq!(access["access"]["other"], serde_json::json!(["inspect"]));
    assert_eq!(access["access"]["gid"], 50, "omitted fields stay unchanged");
    fdmap.ok(&["delete", "ram"]);
    fdmap.fails(3, &["stat", "ram"]);
    assert_eq!(fdmap.json(&["ls"]), serde_json::json!([]));
}

fn service_has_no_attributes(fdmap: &Fdmap<'_>) -> bool {
    fdmap.run(&["doctor", "--json"]).stdout.windows(8).any(|word| word == b"syscalls")
}

#[test]
fn diff_reports_changes_between_snapshots() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    fdmap.ok(&["create", "ram", "--size", "1M"]);
    let write = |page: u32| {
        let script = format!("printf x | dd of=/proc/self/fd/3 bs=4096 seek={page} conv=notrunc 2>/dev/null");
        fdmap.ok(&["open", "ram", "--write", "--", "sh", "-c", &script]);
    };
    write(5);
    let retained = fdmap.json(&["stat", "ram", "--retain-for", "1m"])["pages"]["snapshot_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let none = fdmap.json(&["diff", "ram", &retained]);
    assert_eq!((&none["changed_pages"], none["changes"].as_array().unwrap().len()), (&Value::from(0), 0));
    write(7);
    write(8);
    let diff = fdmap.json(&["diff", "ram", &retained, "--retain-for", "1m"]);
    assert_eq!(
        diff["changes"],
        serde_json::json!([{ "start": 7, "end": 9, "before": "hole", "after": "resident" }])
    );
    let later = diff["header"]["to_snapshot_id"].as_str().unwrap();
    write(20);
    assert_eq!(
        fdmap.json(&["diff", "ram", &retained, later])["changed_pages"],
        2,
        "both snapshots are retained"
    );
    assert_eq!(fdmap.run(&["diff", "ram", later, "--exit-code"]).status.code(), Some(1));
    assert_eq!(fdmap.json(&["diff", "ram", &retained, "--pages", "8..20"])["changed_pages"], 1);
    assert!(fdmap.ok(&["diff", "ram", "--over", "10ms"]).contains("0 of 256 pages changed"));
    fdmap.ok(&["drop-snapshot", "ram", &retained]);
    fdmap.fails(3, &["diff", "ram", &retained]);
}

#[test]
fn memfds_are_adopted_from_descriptors_and_paths() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    let make = |name| {
        let memfd = memfd::create(name, None).unwrap();
        memfd::resize(std::os::fd::AsFd::as_fd(&memfd), 8192).unwrap();
        memfd
    };
    let (one, two) = (make("one"), make("two"));
    let path = |memfd| format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(memfd));
    let adopted = fdmap.json(&["adopt", "--path", &path(&one)]);
    assert_eq!((&adopted["name"], &adopted["origin"]), (&Value::from("one"), &Value::from("adopted")));
    // A shell opens the memfd as its descriptor 5 and passes it on.
    let line = format!(
        "exec 5<>{} && exec {} --runtime-dir {} adopt second --fd 5",
        path(&two),
        program("fdmap").unwrap().display(),
        service.folder().display()
    );
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
    assert_eq!(fdmap.json(&["ls"]).as_array().unwrap().len(), 2);
    fdmap.fails(6, &["adopt", "again", "--path", &path(&one)]);
    fdmap.fails(6, &["adopt", "no-memfd", "--path", "/dev/null"]);
    fdmap.fails(7, &["adopt", "nothing", "--fd", "77"]);
}

#[test]
fn watch_prints_events() {
    use std::io::{BufRead as _, BufReader};
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    fdmap.ok(&["create", "before", "--size", "1M"]);
    let mut watch = fdmap.command(&["watch", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["file"]["name"], "before");
    assert_eq!(next()["event"], "synced");
    fdmap.ok(&["create", "ram", "--size", "1M"]);
    assert_eq!(next()["event"], "created");
    fdmap.ok(&["resize", "ram", "2M"]);
    assert_eq!(next()["file"]["size_bytes"], 2 << 20);
    fdmap.ok(&["delete", "ram"]);
    let removed = next();
    assert_eq!((&removed["event"], &removed["name"]), (&Value::from("removed"), &Value::from("ram")));
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn errors_have_distinct_exit_codes() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    fdmap.ok(&["create", "ram", "--size", "1M"]);
    fdmap.fails(2, &["pages", "ram", "9..3"]);
    fdmap.fails(2, &["create", "x", "--size", "much"]);
    fdmap.fails(2, &["nonsense"]);
    fdmap.fails(2, &["access", "ram"]);
    fdmap.fails(2, &["pages", "ram", "--map", "--json"]);
    let tls = ["--tls-ca", "/x", "--tls-cert", "/x", "--tls-key", "/x"];
    fdmap.fails(2, &[&["compare", "--pid", "1", "--tcp", "https://elsewhere:1"][..], &tls].concat());
    fdmap.fails(6, &["pages", "ram", "0..300"]);
    fdmap.fails(2, &["pages", "ram", "300.."]);
    fdmap.fails(6, &["create", "ram", "--size", "1M"]);
    fdmap.fails(7, &["open", "ram", "--", "/no/such/program"]);
    let elsewhere =
        Command::new(program("fdmap").unwrap()).args(["--runtime-dir", "/nowhere", "ls"]).output().unwrap();
    assert_eq!(elsewhere.status.code(), Some(5));
    let doctor = Command::new(program("fdmap").unwrap())
        .args(["--runtime-dir", "/nowhere", "doctor"])
        .output()
        .unwrap();
    assert_eq!(doctor.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&doctor.stderr).contains("fdmapd --runtime-dir /nowhere"));
}

#[test]
fn inspect_right_suffices_for_a_snapshot_of_the_last_pages() {
    require(root());
    let service = Service::start(&["--group", "65534"]).unwrap();
    Fdmap(&service).ok(&["create", "ram", "--size", "1M", "--other", "inspect"]);
    let snapshot = ["snapshot", "root/ram", "200..", "--json"];
    let output = fdmap_as(&service, 65534).unwrap().args(snapshot).output().unwrap();
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&reported["range"]["start"], &reported["range"]["end"]), (&200.into(), &256.into()));
}

/// Installs a guard region in write-protected memory. `None`: the kernel has none in shmem; else whether the call returned before
/// the write protection was removed.
fn guard_installation_returns() -> Option<bool> {
    let install = |tracked: &TrackedMemfd| tracked.advise(0, 1, 102).map_err(|error| error.errno);
    let unprotected = TrackedMemfd::new(PageKind::Shmem, 4).unwrap();
    if install(&unprotected) == Err(Errno::EINVAL) {
        return None;
    }
    let tracked = TrackedMemfd::armed(4).unwrap();
    std::thread::scope(|scope| {
        let installing = scope.spawn(|| install(&tracked));
        let began = Instant::now();
        while !installing.is_finished() && began.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let returned = installing.is_finished();
        tracked.tracker.uffd.write_protect(tracked.tracker.range, false).unwrap();
        assert_eq!(installing.join().unwrap(), Ok(()));
        Some(returned)
    })
}

#[test]
fn doctor_reports_whether_guard_regions_can_be_installed() {
    require(root());
    let returns = guard_installation_returns();
    for arguments in [&[][..], &["--no-call-trace"]] {
        let service = Service::start(arguments).unwrap();
        let output = Fdmap(&service).run(&["doctor", "--json"]);
        let reported: Value = serde_json::from_slice(&output.stdout).unwrap();
        let all = reported["capabilities"].as_array().unwrap();
        let found = all.iter().find(|one| one["name"] == "guard-regions").unwrap();
        let affected = returns == Some(false);
        assert_eq!(found["availability"], if affected { "unavailable" } else { "available" }, "{found}");
        let detail = found["detail"].as_str().unwrap();
        assert_eq!(detail.contains("never returns"), affected, "{found}");
        assert_eq!(detail.contains("no guard regions"), returns.is_none(), "{found}");
        let traced = arguments.is_empty();
        assert_eq!(found["impact"].as_str().unwrap().is_empty(), traced, "{found}");
        assert!(!affected || detail.contains("fdmap exec") != traced, "{found}");
        let text = String::from_utf8(Fdmap(&service).run(&["doctor"]).stdout).unwrap();
        assert_eq!(text.contains("without guard-regions:"), affected && !traced, "{text}");
    }
}

#[test]
fn closed_output_pipe_is_no_error() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    fdmap.ok(&["create", "ram", "--size", "64M"]);
    let script = "i=0; while [ $i -lt 4000 ]; do printf x; i=$((i+1)); done | dd of=/proc/self/fd/3 bs=1 conv=notrunc seek=0 2>/dev/null";
    fdmap.ok(&["open", "ram", "--write", "--", "sh", "-c", script]);
    let mut child =
        fdmap.command(&["pages", "ram", "--entries", "-"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn doctor_checks_a_process_without_a_service() {
    require(root());
    // The program is built before the inspected process starts, which ends after a minute.
    let fdmap = program("fdmap").unwrap();
    let doctor = |pid: u32, more: &[&str]| {
        let mut command = Command::new(&fdmap);
        command.args(["--runtime-dir", "/nowhere", "doctor", "--json", "--pid", &pid.to_string()]).args(more);
        let output = command.output().unwrap();
        (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default())
    };
    let seen = |reported: &Value, name: &str| {
        let check =
            reported["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
        check["observed"].as_str().unwrap().to_owned()
    };
    let with_stdin = |stdin: Stdio, more: &[&str]| {
        let mut idle = Command::new("sleep").arg("60").stdin(stdin).stdout(Stdio::null()).spawn().unwrap();
        let answer = doctor(idle.id(), more);
        idle.kill().unwrap();
        idle.wait().unwrap();
        answer
    };
    let (code, reported) = with_stdin(Stdio::null(), &[]);
    assert_eq!((code, &reported["all_observed"]), (Some(0), &Value::from(true)), "{reported}");

    let made = memfd::create("looked-at", None).unwrap();
    let opened = fdmap_sys::fd::reopen(std::os::fd::AsFd::as_fd(&made), true).unwrap();
    for (stdin, more, expected) in [
        (&made, &[][..], "unknown"),
        (&made, &["--try-descriptors"], "no"),
        (&opened, &["--try-descriptors"], "yes"),
    ] {
        let (code, reported) = with_stdin(stdin.try_clone().unwrap().into(), more);
        assert_eq!(seen(&reported, "unnotified-descriptors"), expected, "{reported}");
        assert_eq!(code, Some(i32::from(expected != "yes")));
    }
    assert_eq!(doctor(0x7fff_fff0, &[]).0, Some(7));
}

#[test]
fn completions_are_valid_shell_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let output = Command::new(program("fdmap").unwrap()).args(["completions", shell]).output().unwrap();
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("compare") && script.contains("fdmap"), "{shell}");
    }
    let output = Command::new(program("fdmap").unwrap()).args(["completions", "bash"]).output().unwrap();
    let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(&output.stdout).unwrap();
    assert!(bash.wait().unwrap().success(), "bash reads its script");
}

#[test]
fn dirty_lists_pages_written_since_a_generation() {
    require(root());
    let service = Service::start(&[]).unwrap();
    let fdmap = Fdmap(&service);
    fdmap.ok(&["create", "ram", "--size", "1M"]);
    let first = fdmap.json(&["checkpoint", "ram"]);
    assert_eq!((&first["generation"], &first["unchanged"]), (&Value::from(1), &Value::from(false)));
    assert_eq!(fdmap.json(&["checkpoint", "ram"])["unchanged"], true, "nothing was written");

    let write = "printf data | dd of=/proc/self/fd/3 bs=4096 seek=5 conv=notrunc 2>/dev/null";
    fdmap.ok(&["open", "ram", "--write", "--", "sh", "-c", write]);
    assert_eq!(fdmap.json(&["checkpoint", "ram"])["generation"], 2);
    let reported = fdmap.json(&["dirty", "ram", "--since", "1"]);
    let run = &reported["runs"][0];
    assert!(run["start"].as_u64() <= Some(5) && run["end"].as_u64() > Some(5), "{reported}");
    assert!(fdmap.ok(&["dirty", "ram", "--since", "1", "--map"]).contains("pages per cell"));
    assert_eq!(fdmap.run(&["dirty", "ram", "--since", "1", "--exit-code"]).status.code(), Some(1));
    fdmap.fails(6, &["dirty", "ram", "--since", "9"]);

    fdmap.ok(&["cursor", "create", "ram", "backup"]);
    let begun = fdmap.json(&["cursor", "begin", "ram", "backup"]);
    let until_generation = begun["cursor"]["until_generation"].as_u64().unwrap();
    for _ in 0..2 {
        assert_eq!(
            fdmap.json(&["dirty", "ram", "--cursor", "backup"])["header"]["until_generation"],
            until_generation
        );
    }
    fdmap.ok(&["cursor", "commit", "ram", "backup", &until_generation.to_string()]);
    assert_eq!(fdmap.json(&["cursor", "ls", "ram"])[0]["generation"], until_generation);

    fdmap.ok(&["coverage-policy", "ram", "refuse"]);
    assert_eq!(fdmap.json(&["coverage", "ram"])["policy"], "refuse");
    fdmap.ok(&["seal-writers", "ram"]);
    let coverage = fdmap.json(&["coverage", "ram"]);
    assert_eq!(
        (&coverage["writers_sealed"], &coverage["coverage"]["exact"]),
        (&Value::from(true), &Value::from(true))
    );
    let denied = fdmap.run(&["open", "ram", "--write", "--", "sh", "-c", write]);
    assert!(!denied.status.success(), "a writer-sealed file refuses new writers");
    fdmap.ok(&["dirty-rate", "ram", "--window", "10ms"]);
}
