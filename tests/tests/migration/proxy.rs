//! A TCP proxy that breaks connections, or slows them down.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use fdmap_tests::pattern::mix;

/// What the proxy does to each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Breaks it after a random number of bytes, below this one, in either direction.
    Cut(u64),
    /// Passes this number of bytes each 10 ms.
    Slow(usize),
    /// Flips a bit after a random number of bytes, below this one.
    Flip(u64),
}

/// Connections to a port, through the proxy. Ended on drop.
pub struct Proxy {
    pub port: u16,
    pub faults: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Proxy {
    pub fn start(to: u16, fault: Fault, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let (is_over, faults) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, counted) = (Arc::clone(&is_over), Arc::clone(&faults));
        let accepting = spawn(move || {
            let (mut word, mut threads) = (seed, Vec::new());
            while !over.load(Ordering::Relaxed) {
                let Ok((client, _)) = listener.accept() else {
                    sleep(Duration::from_millis(1));
                    continue;
                };
                client.set_nonblocking(false).unwrap();
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    word = mix(word);
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (counted, word) = (Arc::clone(&counted), word);
                    threads.push(spawn(move || pass(from, to, fault, word, &counted)));
                }
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
        Self { port, faults, is_over, accepting: Some(accepting) }
    }

    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // The ends of a connection end its threads: both programs have ended.
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Passes bytes until an end is closed, or the fault happens.
fn pass(mut from: TcpStream, mut to: TcpStream, fault: Fault, word: u64, faults: &AtomicU64) {
    let mut buffer = vec![0; 1 << 16];
    let mut passed = 0;
    loop {
        let max = if let Fault::Slow(bytes) = fault { bytes.min(buffer.len()) } else { buffer.len() };
        let Ok(len @ 1..) = from.read(&mut buffer[..max]) else { break };
        let mut bytes = &mut buffer[..len];
        match fault {
            Fault::Slow(_) => sleep(Duration::from_millis(10)),
            Fault::Cut(below) | Fault::Flip(below) => {
                let at = word % below;
                if (passed..passed + len as u64).contains(&at) {
                    faults.fetch_add(1, Ordering::Relaxed);
                    let at = usize::try_from(at - passed).unwrap();
                    if let Fault::Flip(_) = fault {
                        bytes[at] ^= 1 << (word >> 61);
                    } else {
                        bytes = &mut bytes[..at];
                    }
                }
                passed += len as u64;
            }
        }
        let is_cut = bytes.len() < len;
        if to.write_all(bytes).is_err() || is_cut {
            break;
        }
    }
    for socket in [from, to] {
        let _ = socket.shutdown(Shutdown::Both);
    }
}
