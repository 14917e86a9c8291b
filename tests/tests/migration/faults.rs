//! Migrations with a random fault each: the source is intact and tracked, or the destination is complete.
//!
//! `FDMAP_MIGRATION_FAULTS` is their number, 12 by default; `make soak` makes 1000. `FDMAP_MIGRATION_SEED` repeats a run, except for its
//! times.

use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fdmap_client::grpc::ChangesOptions;
use fdmap_proto::PageIndex;
use fdmap_tests::certificates::{Certificates, dns};
use fdmap_tests::pattern::mix;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::proxy::{self, Proxy};
use super::{Bed, PAGE, content_of, random, write_at};

const PAGES: u64 = 1024;
/// Bytes that the proxy passes each 10 ms, and so the time of a migration without a fault.
const SLOW_BYTES: usize = 1 << 17;
const MAX_DELAY_MILLIS: u64 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Each connection is cut, or a bit of it is flipped, until the file has arrived.
    Connections(proxy::Fault),
    /// A signal for a program after some time.
    Signal {
        is_source: bool,
        signal: Signal,
        after: Duration,
    },
    WrongCertificate,
    NameTaken,
    TooLarge,
}

impl Fault {
    /// Draws a fault.
    fn draw(word: u64) -> Self {
        let detail = mix(word);
        match word % 8 {
            0 => Self::Connections(proxy::Fault::Cut(1 << 21)),
            1 => Self::Connections(proxy::Fault::Flip(1 << 21)),
            2 => Self::WrongCertificate,
            3 if detail.is_multiple_of(2) => Self::NameTaken,
            3 => Self::TooLarge,
            other => Self::Signal {
                is_source: other.is_multiple_of(2),
                signal: if other < 6 { Signal::SIGKILL } else { Signal::SIGINT },
                after: Duration::from_millis(detail % MAX_DELAY_MILLIS),
            },
        }
    }
}

/// A source with several faults, one after the other.
struct Faults {
    bed: Bed,
    /// Admits smaller files only.
    small: Service,
    strangers: Certificates,
    fd: OwnedFd,
    /// Migrations that succeeded, failed, and left the file fenced.
    outcomes: [u64; 3],
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is no number: {value}")))
}

/// Waits for the end of a child, at most for some time.
fn has_ended(child: &mut Child, within: Duration) -> bool {
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() >= within {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

#[test(flavor = "multi_thread")]
async fn each_fault_leaves_an_intact_source_or_a_complete_destination() {
    let faults = number("FDMAP_MIGRATION_FAULTS").unwrap_or(12);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("FDMAP_MIGRATION_SEED").unwrap_or(since.as_nanos() as u64);
    println!("FDMAP_MIGRATION_SEED={seed}");
    let bed = Bed::new();
    let small = Service::start(&["--max-file-bytes", "1048576"]).unwrap();
    let strangers = Certificates::new("strangers");
    strangers.sign("source", dns("source.test"), 2);
    let fd = bed.create("ram", PAGES * PAGE);
    let mut run = Faults { bed, small, strangers, fd, outcomes: [0; 3] };
    let mut word = seed;
    for number in 0..faults {
        word = mix(word);
        let fault = Fault::draw(word);
        let content = random(word, usize::try_from(PAGES * PAGE).unwrap());
        write_at(&run.fd, 0, &content);
        if number > 0 && number % 100 == 0 {
            println!("{number} faults: {:?} succeeded, failed, stayed fenced", run.outcomes);
        }
        run.one(fault, word, &content, &format!("seed {seed}, fault {number}, {fault:?}")).await;
    }
    let [succeeded, failed, fenced] = run.outcomes;
    println!(
        "{faults} faults: {succeeded} migrations succeeded, {failed} failed, {fenced} left the file fenced"
    );
    assert_eq!(succeeded + failed, faults);
}

impl Faults {
    async fn one(&mut self, fault: Fault, word: u64, content: &[u8], context: &str) {
        if fault == Fault::NameTaken {
            self.bed.json(&self.bed.destination, &["create", "ram", "--size", "4096"]);
        }
        if fault == Fault::TooLarge {
            std::mem::swap(&mut self.bed.destination, &mut self.small);
        }
        self.migrate(fault, word, content, context).await;
        if fault == Fault::TooLarge {
            std::mem::swap(&mut self.bed.destination, &mut self.small);
        }
    }

    async fn migrate(&mut self, fault: Fault, word: u64, content: &[u8], context: &str) {
        let bed = &self.bed;
        let mut receiving = bed.receive(&["--keep", "--reconnect-within", "1s"]);
        let passes =
            if let Fault::Connections(fault) = fault { fault } else { proxy::Fault::Slow(SLOW_BYTES) };
        let proxy = Proxy::start(receiving.port, passes, word);
        let mut command = bed.migrate(proxy.port, &["--paused", "--rounds", "1", "--reconnect-within", "1s"]);
        if fault == Fault::WrongCertificate {
            let path = |file| self.strangers.path(file);
            command =
                bed.fdmap(&bed.source, &["migrate", "ram", "--paused", "--tls-server-name", "fdmapd.test"]);
            command
                .arg("--to")
                .arg(format!("localhost:{}", proxy.port))
                .arg("--tls-ca")
                .arg(bed.certificates.path("ca"));
            command.arg("--tls-cert").arg(path("source")).arg("--tls-key").arg(path("source.key"));
        }
        let source = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if let Fault::Signal { is_source, signal, after } = fault {
            tokio::time::sleep(after).await;
            let pid = if is_source { source.id() } else { receiving.child.id() };
            // It may have ended.
            let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
        }
        let output = source.wait_with_output().unwrap();
        let is_killed = matches!(fault, Fault::Signal { is_source: false, signal: Signal::SIGKILL, .. });
        // A source that ended early has not connected: nothing ends this one.
        if !has_ended(&mut receiving.child, Duration::from_secs(3)) {
            kill(Pid::from_raw(receiving.child.id().cast_signed()), Signal::SIGINT).unwrap();
        }
        let (received, _, error) = receiving.ended();
        drop(proxy);
        let context = format!(
            "{context}: exit code {:?} {}, destination {received:?} {error}",
            output.status.code(),
            String::from_utf8_lossy(&output.stderr)
        );
        self.judge(fault, output.status.code(), received, is_killed, content, &context).await;
    }

    /// Checks what both ends have, and removes it.
    async fn judge(
        &mut self,
        fault: Fault,
        sent: Option<i32>,
        received: Option<i32>,
        is_killed: bool,
        content: &[u8],
        context: &str,
    ) {
        let bed = &self.bed;
        assert!(content_of(&self.fd) == content, "the source changed: {context}");
        let is_fenced = bed.json(&bed.source, &["ls"])[0]["fence"].is_string();
        let there = bed.json(&bed.destination, &["ls"]);
        if sent == Some(0) {
            assert!(is_fenced, "{context}");
            assert!(received == Some(0) || is_killed, "{context}");
        }
        let is_complete = sent == Some(0) || received == Some(0);
        if is_complete {
            assert!(is_fenced, "two files are in use: {context}");
            assert!(bed.content(&bed.destination, "ram") == content, "{context}");
        } else if fault == Fault::NameTaken {
            assert_eq!(there[0]["size_bytes"], 4096, "{context}");
        } else {
            assert!(there == json!([]) || is_killed, "{there} {context}");
        }
        if there != json!([]) {
            bed.json(&bed.destination, &["delete", "ram"]);
        }
        if is_fenced {
            bed.json(&bed.source, &["fence", "ram", "--remove"]);
        }
        self.assert_tracked(context).await;
        self.outcomes[usize::from(sent != Some(0))] += 1;
        self.outcomes[2] += u64::from(is_fenced && sent != Some(0));
    }

    /// The source reports a write.
    async fn assert_tracked(&self, context: &str) {
        let client = self.bed.source.client().await.unwrap();
        let since = client.checkpoint(&named("ram"), true, None).await.unwrap().generation;
        write_at(&self.fd, 7, &[1; 4096]);
        client.checkpoint(&named("ram"), true, None).await.unwrap();
        let options = ChangesOptions { since, ..ChangesOptions::default() };
        let changed = client.changes(&named("ram"), options).await.unwrap().runs().await.unwrap();
        assert!(
            changed.iter().any(|changed| changed.run.range.contains(PageIndex(7))),
            "{changed:?} {context}"
        );
    }
}
