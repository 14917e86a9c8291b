//! A store whose reads of pages wait or fail as a test wants it.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fdmap_client::image::{ImageStore, ObjectReader, ObjectWriter, StoreError};

/// What reads of a chunk do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// They wait until the fault is removed.
    Wait,
    /// They fail so many times more.
    Fail(ErrorKind, u32),
}

/// State of the store. Chunks have 1 MiB, and are numbered in each object of pages.
#[derive(Debug, Default)]
pub struct Faults {
    faults: Mutex<HashMap<u64, Fault>>,
    changed: Condvar,
    reads: Mutex<HashMap<u64, u32>>,
}

impl Faults {
    pub fn set(&self, chunks: impl Iterator<Item = u64>, fault: Option<Fault>) {
        let mut faults = self.faults.lock().unwrap();
        for chunk in chunks {
            match fault {
                Some(fault) => faults.insert(chunk, fault),
                None => faults.remove(&chunk),
            };
        }
        self.changed.notify_all();
    }

    /// Number of reads of a chunk that began.
    pub fn reads(&self, chunk: u64) -> u32 {
        self.reads.lock().unwrap().get(&chunk).copied().unwrap_or_default()
    }

    /// Waits until a read of the chunk has begun.
    pub fn wait_for(&self, chunk: u64) {
        let begun = std::time::Instant::now();
        while self.reads(chunk) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "chunk {chunk} is not read");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn read(&self, chunk: u64) -> io::Result<()> {
        *self.reads.lock().unwrap().entry(chunk).or_default() += 1;
        let mut faults = self.faults.lock().unwrap();
        loop {
            match faults.get_mut(&chunk) {
                Some(Fault::Wait) => faults = self.changed.wait(faults).unwrap(),
                Some(Fault::Fail(kind, left)) if *left > 0 => {
                    *left -= 1;
                    return Err(io::Error::new(*kind, "planted"));
                }
                _ => return Ok(()),
            }
        }
    }
}

/// A store with faults in the objects of pages.
#[derive(Debug)]
pub struct SlowStore {
    pub inner: Arc<dyn ImageStore>,
    pub faults: Arc<Faults>,
}

#[derive(Debug)]
struct SlowReader {
    inner: Arc<dyn ObjectReader>,
    faults: Arc<Faults>,
}

impl ObjectReader for SlowReader {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        self.faults.read(offset >> 20).map_err(|error| StoreError {
            operation: "reading",
            location: format!("chunk {}", offset >> 20),
            error,
        })?;
        self.inner.read_at(offset, buffer)
    }
}

impl ImageStore for SlowStore {
    fn location(&self) -> String {
        self.inner.location()
    }

    fn create(&self, name: &str, max_bytes: u64) -> Result<Box<dyn ObjectWriter>, StoreError> {
        self.inner.create(name, max_bytes)
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, StoreError> {
        let inner = self.inner.open(name)?;
        if !name.starts_with("pages-") {
            return Ok(inner);
        }
        let slow = |inner| Arc::new(SlowReader { inner, faults: Arc::clone(&self.faults) });
        Ok(inner.map(|inner| slow(inner) as Arc<dyn ObjectReader>))
    }

    fn find(&self, except: Option<&str>) -> Result<Option<String>, StoreError> {
        self.inner.find(except)
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.inner.remove(name)
    }

    fn parent(&self) -> Result<Option<Arc<dyn ImageStore>>, StoreError> {
        self.inner.parent()
    }

    fn parent_link(&self, parent: &dyn ImageStore) -> Result<String, StoreError> {
        self.inner.parent_link(parent)
    }

    fn set_parent(&self, parent: &dyn ImageStore) -> Result<(), StoreError> {
        self.inner.set_parent(parent)
    }

    fn child(&self, name: &str) -> Result<Arc<dyn ImageStore>, StoreError> {
        self.inner.child(name)
    }

    fn remove_child(&self, name: &str) -> Result<(), StoreError> {
        self.inner.remove_child(name)
    }

    fn reserve(&self) -> Result<Option<String>, StoreError> {
        self.inner.reserve()
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.inner.sync()
    }
}
