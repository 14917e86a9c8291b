//! Objects in memory.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::sync::Arc;

use fdmap_client::image::{ImageStore, ObjectReader, ObjectWriter, StoreError};

/// An image in memory, which is only read.
#[derive(Debug)]
pub(super) struct MemoryStore {
    number: u8,
    objects: BTreeMap<String, Arc<Object>>,
    parent: Option<Arc<Self>>,
}

impl MemoryStore {
    pub(super) fn new(number: u8, objects: BTreeMap<String, Vec<u8>>, parent: Option<Arc<Self>>) -> Self {
        let objects = objects.into_iter().map(|(name, bytes)| (name, Arc::new(Object(bytes)))).collect();
        Self { number, objects, parent }
    }

    fn read_only<T>(&self) -> Result<T, StoreError> {
        Err(StoreError {
            operation: "changing",
            location: self.location(),
            error: ErrorKind::ReadOnlyFilesystem.into(),
        })
    }
}

impl ImageStore for MemoryStore {
    fn location(&self) -> String {
        format!("memory-{}", self.number)
    }

    fn create(&self, _: &str, _: u64) -> Result<Box<dyn ObjectWriter>, StoreError> {
        self.read_only()
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, StoreError> {
        Ok(self.objects.get(name).map(|object| Arc::clone(object) as Arc<dyn ObjectReader>))
    }

    fn find(&self, except: Option<&str>) -> Result<Option<String>, StoreError> {
        Ok(self.objects.keys().find(|name| Some(name.as_str()) != except).cloned())
    }

    fn remove(&self, _: &str) -> Result<(), StoreError> {
        self.read_only()
    }

    fn parent(&self) -> Result<Option<Arc<dyn ImageStore>>, StoreError> {
        Ok(self.parent.as_ref().map(|parent| Arc::clone(parent) as Arc<dyn ImageStore>))
    }

    fn parent_link(&self, _: &dyn ImageStore) -> Result<String, StoreError> {
        self.read_only()
    }

    fn set_parent(&self, _: &dyn ImageStore) -> Result<(), StoreError> {
        self.read_only()
    }

    fn child(&self, _: &str) -> Result<Arc<dyn ImageStore>, StoreError> {
        self.read_only()
    }

    fn remove_child(&self, _: &str) -> Result<(), StoreError> {
        self.read_only()
    }

    fn reserve(&self) -> Result<Option<String>, StoreError> {
        self.read_only()
    }

    fn sync(&self) -> Result<(), StoreError> {
        self.read_only()
    }
}

#[derive(Debug)]
struct Object(Vec<u8>);

impl ObjectReader for Object {
    fn bytes(&self) -> u64 {
        u64::try_from(self.0.len()).unwrap()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        let at = usize::try_from(offset).unwrap();
        let bytes =
            at.checked_add(buffer.len()).and_then(|end| self.0.get(at..end)).ok_or_else(|| StoreError {
                operation: "reading",
                location: "memory".to_owned(),
                error: Error::from(ErrorKind::UnexpectedEof),
            })?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}
