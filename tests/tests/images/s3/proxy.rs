//! A TCP proxy on loopback that breaks connections at random bytes, answers requests with server errors, or is slow.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the proxy does to connections.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Of 100 connections, those that are answered with 500 or 503.
    pub server_errors: u64,
    /// Of 100 connections, those that break.
    pub breaks: u64,
    /// Largest number of bytes after which a connection breaks.
    pub max_bytes: u64,
    /// Wait after each block of 64 KiB.
    pub delay: Duration,
    /// Requests that create something are answered with 403.
    pub refuses_puts: bool,
}

impl Faults {
    pub const NONE: Self =
        Self { server_errors: 0, breaks: 0, max_bytes: 0, delay: Duration::ZERO, refuses_puts: false };
}

struct Shared {
    server: SocketAddr,
    faults: Mutex<Faults>,
    random: AtomicU64,
    /// Connections that broke or were answered with an error.
    faulty: AtomicU64,
    forwarded: AtomicU64,
    /// Connections of an earlier number break at their next byte.
    generation: AtomicU64,
    /// Nothing is forwarded any more.
    hangs: AtomicBool,
    has_ended: AtomicBool,
}

/// A proxy, until it is dropped.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub fn start(server: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server,
            faults: Mutex::new(Faults::NONE),
            random: AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            faulty: AtomicU64::new(0),
            forwarded: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            hangs: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        let listening = Arc::clone(&shared);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                if listening.has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), shared) = (connection, Arc::clone(&listening)) else { continue };
                // An error ends the connection, as the test wants it.
                std::thread::spawn(move || drop(shared.serve(client)));
            }
        });
        Self { address, shared }
    }

    /// Sets the faults of new connections.
    pub fn set(&self, faults: Faults) {
        *self.shared.faults.lock().unwrap() = faults;
    }

    /// Breaks the connections that exist.
    pub fn break_all(&self) {
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Forwards nothing any more, and answers nothing.
    pub fn hang(&self) {
        self.shared.hangs.store(true, Ordering::SeqCst);
    }

    /// Forwards again.
    pub fn resume(&self) {
        self.shared.hangs.store(false, Ordering::SeqCst);
    }

    /// Number of connections that broke or were answered with an error so far.
    pub fn faulty(&self) -> u64 {
        self.shared.faulty.load(Ordering::SeqCst)
    }

    /// Bytes that clients sent so far.
    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
    }
}

impl Shared {
    fn random(&self, below: u64) -> u64 {
        let step = |mut state: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^ state << 17
        };
        let previous =
            self.random.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| Some(step(state)));
        step(previous.unwrap()) % below.max(1)
    }

    fn serve(self: Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let faults = *self.faults.lock().unwrap();
        if self.random(100) < faults.server_errors {
            self.faulty.fetch_add(1, Ordering::SeqCst);
            let status = if self.random(2) == 0 { "500 Internal Server Error" } else { "503 Slow Down" };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return answer_and_close(client, answer.as_bytes());
        }
        let mut start = [0; 4];
        if faults.refuses_puts && client.peek(&mut start)? == 4 && (start == *b"PUT " || start == *b"POST") {
            self.faulty.fetch_add(1, Ordering::SeqCst);
            let answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 45\r\nConnection: close\r\n\r\n\
                           <Error><Code>AccessDenied</Code></Error>     ";
            return answer_and_close(client, answer);
        }
        let server = TcpStream::connect(self.server)?;
        let limit = || {
            let breaks = self.random(100) < faults.breaks;
            // Most requests and answers are short: half of the breaks are in their first bytes.
            let max_bytes = if self.random(2) == 0 { 2000 } else { faults.max_bytes };
            breaks.then(|| self.random(max_bytes))
        };
        let (up, down) = (limit(), limit());
        let (from, to) = (client.try_clone()?, server.try_clone()?);
        let sending = Arc::clone(&self);
        let thread = std::thread::spawn(move || sending.forward(from, to, up, faults.delay, true));
        self.forward(server, client, down, faults.delay, false);
        let _ = thread.join();
        Ok(())
    }

    /// Forwards bytes, until the connection ends or breaks after `limit` bytes.
    fn forward(&self, mut from: TcpStream, mut to: TcpStream, limit: Option<u64>, delay: Duration, up: bool) {
        let mut buffer = vec![0; 65536];
        let mut left = limit.unwrap_or(u64::MAX);
        let generation = self.generation.load(Ordering::SeqCst);
        while let Ok(bytes) = from.read(&mut buffer) {
            while self.hangs.load(Ordering::SeqCst) && !self.has_ended.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(20));
            }
            if self.generation.load(Ordering::SeqCst) != generation {
                left = 0;
            }
            let wanted = bytes as u64;
            let passed = wanted.min(left);
            if to.write_all(&buffer[..passed as usize]).is_err() {
                break;
            }
            if up {
                self.forwarded.fetch_add(passed, Ordering::SeqCst);
            }
            left -= passed;
            if passed < wanted {
                self.faulty.fetch_add(1, Ordering::SeqCst);
                break;
            }
            if bytes == 0 {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            std::thread::sleep(delay);
        }
        for stream in [from, to] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Answers a request before its body has arrived, and reads that until the client closes the connection.
///
/// A socket that is closed with unread bytes sends a reset, which may reach the client before it has read the answer.
fn answer_and_close(mut client: TcpStream, answer: &[u8]) -> std::io::Result<()> {
    let mut buffer = [0; 65536];
    let _ = client.read(&mut buffer)?;
    client.write_all(answer)?;
    client.shutdown(Shutdown::Write)?;
    client.set_read_timeout(Some(Duration::from_secs(5)))?;
    while client.read(&mut buffer)? > 0 {}
    Ok(())
}
