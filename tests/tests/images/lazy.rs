//! Private memory of another process is filled from an image while the process uses it.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{Bed, PAGE, content_now, random, write_at};

/// Pages of the image: enough that page faults come before the stream.
pub(super) const PAGES: u64 = 24 << 10;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A chain of images of a file with this content.
pub(super) struct Chain {
    pub(super) bed: Bed,
    program: Compiled,
    content: Vec<u8>,
}

/// The process that fills the memory. Killed on drop.
pub(super) struct Handler(pub(super) Child);

impl Chain {
    /// Three images, one of them compressed, with holes between stored pages.
    pub(super) fn new() -> Self {
        Self::at(Bed::new(), "")
    }

    /// The images have this prefix before their number.
    pub(super) fn at(bed: Bed, prefix: &str) -> Self {
        let [first, second, third] = [1, 2, 3].map(|number| format!("{prefix}{number}"));
        let fd = bed.create("ram", PAGES * PAGE);
        for (number, seed) in (0..PAGES / 1024).zip(1..) {
            // The last 100 pages of each 1024 are holes.
            write_at(&fd, number * 1024, &random(seed, 924 * 4096));
        }
        bed.json(&["dump", "ram", &first]);
        write_at(&fd, 500, &random(101, 3000 * 4096));
        bed.json(&["dump", "ram", &second, "--parent", &first, "--compress", "zstd"]);
        write_at(&fd, PAGES - 300, &random(102, 250 * 4096));
        fdmap_sys::memfd::punch_hole(fd.as_fd(), 700 * PAGE, 20 * PAGE).unwrap();
        bed.json(&["dump", "ram", &third, "--parent", &second]);
        let content = content_now(&fd);
        bed.json(&["delete", "ram"]);
        Self { bed, program: Compiled::new("uffd_guest").unwrap(), content }
    }

    pub(super) fn handler(&self, arguments: &[&str]) -> Handler {
        self.handler_of("3", arguments)
    }

    pub(super) fn handler_of(&self, image: &str, arguments: &[&str]) -> Handler {
        let mut command =
            self.bed.command(&["restore", image, "--lazy", "--uffd-socket", "uffd.sock", "--json"]);
        let child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Handler(child.unwrap())
    }

    pub(super) fn guest(&self, options: &[&str]) -> LineProcess {
        let mut command = Command::new(self.program.path());
        command.arg(self.bed.folder.join("uffd.sock")).arg((PAGES * PAGE).to_string()).args(options);
        let mut guest = LineProcess::start(command, None).unwrap();
        assert!(guest.receive().unwrap().starts_with("ok "));
        guest
    }

    fn page(&self, number: u64) -> &[u8] {
        let at = usize::try_from(number * PAGE).unwrap();
        &self.content[at..at + 4096]
    }

    /// The first bytes of a page, as the guest prints them.
    pub(super) fn text(&self, number: u64) -> String {
        self.page(number)[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Asserts that the memory of the guest has the content of the image, but for pages where `expected` has another one.
    #[track_caller]
    pub(super) fn assert_memory(&self, guest: &mut LineProcess, expected: impl Fn(u64) -> Option<Vec<u8>>) {
        let path = self.bed.folder.join("memory");
        guest.call(&format!("dump {}", path.display())).unwrap();
        let memory = std::fs::read(&path).unwrap();
        assert_eq!(memory.len(), self.content.len());
        let wrong: Vec<_> = (0..PAGES)
            .filter(|page| {
                let at = usize::try_from(page * PAGE).unwrap();
                let found = &memory[at..at + 4096];
                expected(*page).map_or_else(|| found != self.page(*page), |other| found != other)
            })
            .collect();
        assert!(wrong.is_empty(), "{} pages differ, the first is {}", wrong.len(), wrong[0]);
    }
}

impl Handler {
    pub(super) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    /// Waits until it exits with `code`. Returns its output and its messages.
    #[track_caller]
    pub(super) fn exits(mut self, code: i32) -> (String, String) {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < TIMEOUT, "the handler does not exit");
            std::thread::sleep(Duration::from_millis(5));
        };
        let (mut output, mut messages) = (String::new(), String::new());
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        self.0.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        assert_eq!(status.code(), Some(code), "{status}: {output} {messages}");
        (output, messages)
    }

    /// The report of a handler that succeeds.
    #[track_caller]
    pub(super) fn report(self) -> Value {
        serde_json::from_str(&self.exits(0).0).unwrap()
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The first bytes of a page and the duration of the access, or `sigbus`.
pub(super) fn read(guest: &mut LineProcess, page: u64) -> (String, Duration) {
    let answer = guest.call(&format!("read {page}")).unwrap();
    let (bytes, nanoseconds) = answer.split_once(' ').unwrap_or((&answer, "0"));
    (bytes.to_owned(), Duration::from_nanos(nanoseconds.parse().unwrap()))
}

#[test]
fn pages_of_a_guest_have_the_content_of_a_chain_before_and_after_the_stream() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&[]);
    let mut times = Vec::new();
    for number in 0..200_u64 {
        // From the end, which the stream reaches last; every sixth page is in a hole or near one.
        let page =
            if number % 6 == 0 { 700 + number % 30 } else { PAGES - 1 - (number * 7919) % (PAGES / 2) };
        let (bytes, time) = read(&mut guest, page);
        assert_eq!(bytes, chain.text(page), "page {page}");
        times.push(time);
    }
    guest.call(&format!("write {} 17", PAGES - 5)).unwrap();
    times.sort_unstable();
    println!("first access: median {:?}, p99 {:?}", times[100], times[197]);
    let (report, messages) = handler.exits(0);
    let report: Value = serde_json::from_str(&report).unwrap();
    println!("{report}");
    assert!(messages.starts_with("{") && messages.contains("\"progress\":{"), "{messages}");
    let counts = &report["lazy"]["counts"];
    assert_eq!(report["lazy"]["end"], "complete");
    assert!(counts["faults"].as_u64().unwrap() > 50, "{counts}");
    assert!(counts["streamed_pages"].as_u64().unwrap() > PAGES / 2, "{counts}");
    assert_eq!((&counts["damaged_pages"], &counts["removed_pages"]), (&0.into(), &0.into()));
    assert!(!chain.bed.folder.join("uffd.sock").exists(), "the socket is removed");
    // The handler has ended: what is absent is a hole.
    let mut written = chain.page(PAGES - 5).to_vec();
    written[0] = 17;
    chain.assert_memory(&mut guest, |page| (page == PAGES - 5).then(|| written.clone()));
}

/// As a balloon does.
#[test]
fn pages_that_a_guest_removes_are_zero_and_stay_so() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&[]);
    let half = PAGES / 2;
    guest.call(&format!("remove {half} 4000")).unwrap();
    // Each thread removes pages, which are then zero, and writes to them, while the stream copies those around.
    assert_eq!(guest.call(&format!("churn 4 3 {half}")).unwrap(), "0");
    guest.call("remove 2 1").unwrap();
    let report = handler.report();
    assert!(report["lazy"]["counts"]["removed_pages"].as_u64().unwrap() > 1000, "{report}");
    // Also after the handler has ended, without waiting for anything.
    guest.call("remove 4 2").unwrap();
    let mut marked = vec![0; 4096];
    marked[7] = 0x5a;
    chain.assert_memory(&mut guest, |page| match page {
        2 | 4 | 5 => Some(vec![0; 4096]),
        _ if page < half && page % 3 == 0 => Some(marked.clone()),
        _ if (half..half + 4000).contains(&page) => Some(vec![0; 4096]),
        _ => None,
    });
}

#[test]
fn access_to_damaged_content_raises_sigbus() {
    let chain = Chain::new();
    let path = chain.bed.folder.join("1/pages-1.img");
    let mut bytes = std::fs::read(&path).unwrap();
    // Page 9 * 1024 + 5 of the file is at this position of the pages file.
    let at = (9 * 924 + 5) * 4096;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let handler = chain.handler_of("1", &[]);
    let mut guest = chain.guest(&[]);
    let damaged = 9 * 1024 + 5;
    for _ in 0..3 {
        assert_eq!(read(&mut guest, damaged).0, "sigbus");
    }
    let (mut refused, mut right) = (0, 0);
    // The later images of the chain have other pages.
    for page in (4000..PAGES - 400).step_by(7).chain(damaged - 300..damaged + 300) {
        match read(&mut guest, page).0 {
            bytes if bytes == chain.text(page) => right += 1,
            bytes => {
                assert_eq!(bytes, "sigbus", "page {page}");
                refused += 1;
            }
        }
    }
    assert!((1..=2 * 256).contains(&refused) && right > 2000, "{refused} {right}");
    // It serves the guest until that ends.
    guest.kill().unwrap();
    let (_, messages) = handler.exits(7);
    assert!(messages.contains("1/pages-1.img: the chunk at byte"), "{messages}");
    assert_eq!(messages.matches("differs from its digest").count(), 1, "{messages}");
}

/// True while a thread of the process waits for a page.
fn waits(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/wchan")).is_ok_and(|name| name.contains("userfault"))
}

#[test]
fn guest_with_a_descriptor_waits_after_its_handler_was_killed() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&[]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    handler.signal(Signal::SIGKILL);
    drop(handler);
    guest.send(&format!("read {}", PAGES - 200)).unwrap();
    let began = Instant::now();
    while !waits(guest.pid()) {
        assert!(began.elapsed() < TIMEOUT, "the guest reads a page that was not filled");
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(waits(guest.pid()));
    guest.kill().unwrap();
}

/// Why a process keeps a descriptor of its userfaultfd.
#[test]
fn guest_without_a_descriptor_reads_zero_after_its_handler_was_killed() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&["drop"]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    handler.signal(Signal::SIGKILL);
    drop(handler);
    assert_eq!(read(&mut guest, PAGES - 200).0, "00000000");
}

#[test]
fn missing_pages_raise_sigbus_after_a_cancelled_handler() {
    let chain = Chain::new();
    for option in ["keep", "drop"] {
        let handler = chain.handler(&[]);
        let mut guest = chain.guest(&[option]);
        assert_eq!(read(&mut guest, 1).0, chain.text(1), "{option}");
        handler.signal(Signal::SIGTERM);
        let (_, messages) = handler.exits(7);
        assert!(messages.contains("cancelled"), "{messages}");
        let mut refused = 0;
        for page in (0..PAGES).rev().step_by(3) {
            match read(&mut guest, page).0 {
                bytes if bytes == "sigbus" => refused += 1,
                bytes => assert_eq!(bytes, chain.text(page), "page {page}"),
            }
        }
        assert!(refused > 100, "{option}: {refused}");
    }
}

#[test]
fn missing_pages_raise_sigbus_in_a_child_that_is_followed() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&["fork"]);
    assert_eq!(read(&mut guest, 1).0, chain.text(1));
    // The child has copies of the pages that were filled.
    let answers = [1, PAGES - 200].map(|page| guest.call(&format!("fork {page}")).unwrap());
    assert!(answers[0].starts_with(&chain.text(1)), "{answers:?}");
    assert_eq!(answers[1], "sigbus");
    assert_eq!(read(&mut guest, PAGES - 200).0, chain.text(PAGES - 200), "the parent is served");
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    chain.assert_memory(&mut guest, |_| None);
}

#[test]
fn handler_ends_with_its_guest() {
    let chain = Chain::new();
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&[]);
    assert_eq!(read(&mut guest, PAGES - 250).0, chain.text(PAGES - 250));
    guest.kill().unwrap();
    assert_eq!(handler.report()["lazy"]["end"], "process-ended");
}

#[test]
fn command_gets_the_socket_and_its_exit_code_is_passed_on() {
    let chain = Chain::new();
    let program = chain.program.path().to_str().unwrap();
    let size = (PAGES * PAGE).to_string();
    let first = i32::from(chain.page(0)[0]);
    let code = format!("exit={}", (7 - first).rem_euclid(256));
    let handler = chain.handler(&["--", program, "-", &size, &code]);
    let (output, messages) = handler.exits(7);
    assert_eq!(output, "", "standard output is that of the command");
    assert!(messages.contains("\"end\":"), "{messages}");
    let (_, messages) = chain.handler(&["--", "false"]).exits(7);
    assert!(messages.contains("the command ended before it passed a userfaultfd"), "{messages}");
    let (_, messages) = chain.handler(&["--", "/nonexistent"]).exits(7);
    assert!(messages.contains("running /nonexistent"), "{messages}");
}

#[test]
fn invalid_handoffs_are_refused_with_the_reason() {
    let chain = Chain::new();
    // Its memory waits for content: that no other connection is accepted shows it.
    let handler = chain.handler(&[]);
    let guest = chain.guest(&["invalid"]);
    let (_, messages) = handler.exits(7);
    assert!(messages.contains("hand-off of a userfaultfd: invalid list of mappings"), "{messages}");
    guest.kill().unwrap();
    let handler = chain.handler(&[]);
    let guest = chain.guest(&["shared"]);
    let (_, messages) = handler.exits(7);
    assert!(messages.contains("is shared; only private memory is filled"), "{messages}");
    guest.kill().unwrap();
    let text = chain.bed.fails(2, &["restore", "3", "--lazy"]);
    assert!(text.contains("--uffd-socket"), "{text}");
    let text = chain.bed.fails(2, &["restore", "3", "--lazy", "--uffd-socket", "s", "--name", "new"]);
    assert!(text.contains("cannot be used with"), "{text}");
}

#[test]
fn hugetlb_memory_is_filled_in_huge_pages() {
    let chain = Chain::new();
    let host = fdmap_tests::host::HostLock::acquire().unwrap();
    let pages = u32::try_from(PAGES / 512).unwrap();
    let _pages = fdmap_tests::harness::require(fdmap_tests::hugepages::hugetlb_2m(&host, pages.into()));
    let handler = chain.handler(&[]);
    let mut guest = chain.guest(&["huge"]);
    for page in [PAGES - 1, PAGES - 520, 5, 710] {
        assert_eq!(read(&mut guest, page).0, chain.text(page), "page {page}");
    }
    assert_eq!(handler.report()["lazy"]["end"], "complete");
    chain.assert_memory(&mut guest, |_| None);
}
