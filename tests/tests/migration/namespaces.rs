//! Migrations between two services in two network namespaces, whose link goes down.

use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::proto::Backing;
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::pattern::mix;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;
use fdmap_tests::test_agent::Run;
use fdmap_tests::{HarnessError, HarnessResult};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Bed, PAGE, Receiving, content_of, error_of, random, write_at};

const ADDRESSES: [&str; 2] = ["10.231.77.1", "10.231.77.2"];
/// The ends of the link, in either namespace.
const LINK: &str = "fdmap-test";
/// Time until an end notices that the other one is out of reach: interval and timeout of its pings, and some time on a busy host.
const SOURCE_NOTICES: Duration = Duration::from_secs(20 + 15);
const DESTINATION_NOTICES: Duration = Duration::from_secs(10 + 15);

/// A network namespace, which ends with its process.
struct Namespace {
    holder: Child,
    // Dropped first: it kills the process.
    guard: Option<CleanupGuard>,
}

impl Namespace {
    fn new() -> HarnessResult<Self> {
        let mut unshare = Command::new("unshare");
        // Its standard input is a pipe that never ends.
        unshare.args(["--net", "sh", "-c", "echo && exec cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let missing = |error: std::io::Error| HarnessError::Missing(format!("network namespaces: {error}"));
        let mut holder = unshare.spawn().map_err(missing)?;
        let guard = CleanupGuard::new(Cleanup::process(holder.id()))?;
        let mut line = [0];
        let mut stdout = holder.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut line).map_err(missing)?;
        Ok(Self { holder, guard: Some(guard) })
    }

    /// The words that run a command in the namespace.
    fn enter(&self) -> [String; 3] {
        let net = format!("--net=/proc/{}/ns/net", self.holder.id());
        ["nsenter".to_owned(), net, "--".to_owned()]
    }

    /// A command in the namespace.
    fn command(&self, command: &Command) -> Command {
        let [nsenter, net, end] = self.enter();
        let mut inside = Command::new(nsenter);
        inside.args([net, end]).arg(command.get_program()).args(command.get_args());
        if let Some(folder) = command.get_current_dir() {
            inside.current_dir(folder);
        }
        inside
    }

    fn ip(&self, arguments: &str) -> HarnessResult<()> {
        let mut ip = Command::new("ip");
        ip.args(arguments.split(' '));
        let output = self.command(&ip).output();
        let failed = |message| HarnessError::Missing(format!("ip {arguments}: {message}"));
        match output {
            Ok(Output { status, .. }) if status.success() => Ok(()),
            Ok(Output { stderr, .. }) => Err(failed(String::from_utf8_lossy(&stderr).into_owned())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    fn set_link(&self, state: &str) {
        self.ip(&format!("link set {LINK} {state}")).unwrap();
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.guard.take());
        let _ = self.holder.wait();
    }
}

/// Two services, each in a namespace of its own, and a link between these.
struct Linked {
    bed: Bed,
    source: Namespace,
    destination: Namespace,
}

impl Linked {
    fn new() -> Self {
        let mut bed = Bed::new();
        let (source, destination) = (require(Namespace::new()), require(Namespace::new()));
        let peer = format!("link add {LINK} type veth peer name {LINK} netns {}", destination.holder.id());
        require(source.ip(&peer));
        for (namespace, address) in [(&source, ADDRESSES[0]), (&destination, ADDRESSES[1])] {
            namespace.ip(&format!("addr add {address}/24 dev {LINK}")).unwrap();
            namespace.set_link("up");
        }
        let service = |namespace: &Namespace| {
            Service::start_command(namespace.command(&Command::new(program("fdmapd").unwrap()))).unwrap()
        };
        bed.source = service(&source);
        bed.destination = service(&destination);
        Self { bed, source, destination }
    }

    fn receive(&self, options: &[&str]) -> Receiving {
        let address = format!("{}:0", ADDRESSES[1]);
        Receiving::start(self.destination.command(&self.bed.receive_at(&address, options)))
    }

    fn migrate(&self, receiving: &Receiving, options: &[&str]) -> Command {
        let to = format!("{}:{}", ADDRESSES[1], receiving.port);
        self.source.command(&self.bed.migrate_to(&to, options))
    }

    /// A shell command that takes the link down: the end of the destination, so that packets of the source vanish.
    fn cut(&self) -> String {
        format!("{} ip link set {LINK} down", self.destination.enter().join(" "))
    }
}

/// Takes the link down and up at random moments until the end of a task.
fn flap(link: &Namespace, seed: u64, is_over: &AtomicBool) -> u64 {
    let (mut word, mut outages) = (seed, 0);
    while !is_over.load(Ordering::Relaxed) {
        for (state, most) in [("down", 150), ("up", 150)] {
            link.set_link(state);
            word = mix(word);
            std::thread::sleep(Duration::from_millis(20 + word % most));
        }
        outages += 1;
    }
    outages
}

/// Writers run, and the link goes down and up, all the time.
#[test(flavor = "multi_thread")]
async fn destination_equals_the_source_though_the_link_goes_down() {
    const PAGES: u64 = 4096;
    for percent in [1, 10, 50] {
        let linked = Linked::new();
        let bed = &linked.bed;
        // Room for the writes of some seconds.
        let log = Log::create(2, 1 << 24).unwrap();
        let scenario = Scenario::new(&bed.source, "ram", PAGES, Backing::Shmem, log).await.unwrap();
        let mut writer = scenario.writer(None).unwrap();
        scenario.map(&mut writer, true).unwrap();
        writer.write_all(0, 1, 0..PAGES, 0).unwrap();
        writer.start_run(Run::new("store", 8000, 7, 0..PAGES * percent / 100, 0)).unwrap();
        let pid = writer.pid();
        let pause = format!(
            "kill -STOP {pid} && until grep -q '^State:.T' /proc/{pid}/status; do :; done && \
             '{}' --runtime-dir '{}' open ram -- sh -c 'cat <&3' > copy",
            program("fdmap").unwrap().display(),
            bed.source.folder().display(),
        );
        let receiving = linked.receive(&["--keep"]);
        let mut migrate = linked.migrate(&receiving, &["--pause", &pause, "--rounds", "4"]);
        let is_over = AtomicBool::new(false);
        let (output, outages) = std::thread::scope(|scope| {
            let flapping = scope.spawn(|| {
                // The first connection is not opened again.
                while !is_over.load(Ordering::Relaxed) && bed.json(&bed.destination, &["ls"]) == json!([]) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                flap(&linked.destination, percent, &is_over)
            });
            let output = migrate.output();
            is_over.store(true, Ordering::Relaxed);
            (output.unwrap(), flapping.join().unwrap())
        });
        error_of(&output, 0);
        let (status, _, error) = receiving.ended();
        assert_eq!(status, Some(0), "{error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        println!("{percent} %, {outages} outages: {report}");
        let rounds = report["rounds"].as_array().unwrap();
        assert!(outages > 0 && rounds.len() > 2, "{report}");
        assert!(rounds[1]["pages"].as_u64().unwrap() > PAGES * percent / 200, "the writer writes: {report}");
        let copy = std::fs::read(bed.folder.join("copy")).unwrap();
        assert!(bed.content(&bed.destination, "ram") == copy, "{percent} %");
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGCONT).unwrap();
        writer.reply().unwrap();
        writer.finish().unwrap();
    }
}

/// Packets vanish from the pause on. Pings notice that at both ends, in a bounded time.
#[test]
fn vanished_peer_is_noticed_at_both_ends() {
    let linked = Linked::new();
    let bed = &linked.bed;
    let fd = bed.create("ram", 1024 * PAGE);
    write_at(&fd, 0, &random(1, 1024 * 4096));
    let receiving = linked.receive(&["--keep", "--reconnect-within", "1s"]);
    let pause = format!("touch paused; {}", linked.cut());
    let options = ["--pause", &pause, "--resume", "touch resumed", "--reconnect-within", "1s"];
    let mut migrate = linked.migrate(&receiving, &options);
    let source = migrate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !bed.folder.join("paused").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let since = Instant::now();
    let (status, _, error) = receiving.ended();
    let destination_noticed = since.elapsed();
    assert!(status == Some(7) && error.contains("the source did not connect for 1s"), "{error}");
    let error = error_of(&source.wait_with_output().unwrap(), 5);
    let source_noticed = since.elapsed();
    println!("destination after {destination_noticed:?}, source after {source_noticed:?}");
    assert!(destination_noticed < DESTINATION_NOTICES && source_noticed < SOURCE_NOTICES);
    assert!(error.contains("lost the connection to"), "{error}");
    assert!(bed.folder.join("resumed").exists());
    bed.assert_not_migrated();
}

/// The link is down until both ends have noticed that. Then the migration goes on.
#[test]
fn migration_goes_on_after_an_outage_that_both_ends_noticed() {
    let linked = Linked::new();
    let bed = &linked.bed;
    let fd = bed.create("ram", 1024 * PAGE);
    write_at(&fd, 0, &random(1, 1024 * 4096));
    let receiving = linked.receive(&["--keep"]);
    let pause = format!("touch paused; {}", linked.cut());
    let mut migrate = linked.migrate(&receiving, &["--pause", &pause]);
    let source = migrate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !bed.folder.join("paused").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_secs(24));
    linked.destination.set_link("up");
    let output = source.wait_with_output().unwrap();
    error_of(&output, 0);
    let (status, _, error) = receiving.ended();
    assert_eq!(status, Some(0), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["reconnections"], 1, "{report}");
    assert!(bed.content(&bed.destination, "ram") == content_of(&fd));
}
