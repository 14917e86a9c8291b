use object_store::memory::InMemory;
use tokio::runtime::Runtime;

use super::super::super::error::ImageError;
use super::*;

/// A bucket in memory, and the runtime of its requests.
fn bucket() -> (Runtime, Arc<InMemory>, ObjectImageStore, Cancellation) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (objects, cancellation) = (Arc::new(InMemory::new()), Cancellation::default());
    let bucket = Bucket::of(objects.clone(), runtime.handle().clone(), cancellation.clone());
    let store = ObjectImageStore { bucket: Arc::new(bucket), prefix: Key::from("vm/2") };
    (runtime, objects, store, cancellation)
}

fn write(store: &ObjectImageStore, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let mut writer = store.create(name, 0)?;
    // Unaligned, as chunks are.
    for part in bytes.chunks((1 << 20) + 77) {
        writer.append(part)?;
    }
    writer.finish()
}

#[test]
fn object_is_read_as_it_was_written() {
    let (_runtime, _, store, _) = bucket();
    for (name, bytes) in [("empty", 0), ("small", 100), ("one-part", 8 << 20), ("parts", (20 << 20) + 3)] {
        let content: Vec<u8> = (0..bytes).map(|at: usize| at.to_le_bytes()[at % 3]).collect();
        write(&store, name, &content).unwrap();
        let object = store.open(name).unwrap().unwrap();
        assert_eq!(read_whole(&*object, name, 1 << 30).unwrap(), content);
        let error = object.read_at(object.bytes() - object.bytes().min(1), &mut [0; 2]).unwrap_err();
        assert!(error.to_string().contains(&format!("reading s3://memory/vm/2/{name}")), "{error}");
    }
    assert!(store.open("other").unwrap().is_none());
}

/// The S3 console creates an empty object `PREFIX/` as a folder.
#[test]
fn folder_object_is_no_object_and_hides_none() {
    let (runtime, objects, store, _) = bucket();
    runtime.block_on(objects.put(&Key::from("vm/2"), Vec::new().into())).unwrap();
    let below = store.at(Key::from("vm"));
    assert_eq!(below.find(None).unwrap().as_deref(), Some("2"));
    // Only keys with the prefix and a slash are listed; a store in memory leaves out the slash at the end of the key.
    assert_eq!(store.find(None).unwrap(), None);
    write(&store, "inventory.img", b"x").unwrap();
    assert_eq!(store.find(None).unwrap().as_deref(), Some("inventory.img"));
}

#[test]
fn object_that_exists_is_not_replaced() {
    let (_runtime, _, store, _) = bucket();
    write(&store, "a", b"abc").unwrap();
    // Its creation succeeded, and the answer was lost.
    write(&store, "a", b"abc").unwrap();
    for other in [&b"abd"[..], b"abcd", b""] {
        let error = write(&store, "a", other).unwrap_err();
        assert_eq!(error.error.kind(), std::io::ErrorKind::AlreadyExists, "{error}");
        assert_eq!(store.open("a").unwrap().unwrap().bytes(), 3);
    }
}

#[test]
fn dropped_writers_leave_nothing() {
    let (_runtime, _, store, cancellation) = bucket();
    for bytes in [10, 30 << 20] {
        let mut writer = store.create("a", 0).unwrap();
        writer.append(&vec![1; bytes]).unwrap();
        drop(writer);
        assert_eq!(store.find(None).unwrap(), None);
    }
    let mut writer = store.create("a", 0).unwrap();
    writer.append(&vec![1; 10 << 20]).unwrap();
    cancellation.cancel();
    let error = ImageError::from(writer.finish().unwrap_err());
    assert!(matches!(error, ImageError::Cancelled), "{error}");
    let (_runtime, _, other, _) = bucket();
    assert_eq!(other.find(None).unwrap(), None);
}

#[test]
fn only_one_dump_has_the_reservation() {
    let (_runtime, _, store, _) = bucket();
    let name = store.reserve().unwrap().unwrap();
    assert_eq!(name, "fdmap.partial");
    assert_eq!(store.find(None).unwrap().as_deref(), Some("fdmap.partial"));
    assert_eq!(store.find(Some(&name)).unwrap(), None);
    let error = store.reserve().unwrap_err();
    assert_eq!(error.to_string(), "creating s3://memory/vm/2/fdmap.partial");
    store.remove(&name).unwrap();
    store.remove(&name).unwrap();
    store.reserve().unwrap();
}

#[test]
fn names_of_other_prefixes_are_not_found() {
    let (_runtime, _, store, _) = bucket();
    let other = ObjectImageStore { prefix: Key::from("vm/22"), ..store.clone() };
    write(&other, "a", b"abc").unwrap();
    assert_eq!(store.find(None).unwrap(), None);
    write(&other.at_child(), "a", b"abc").unwrap();
    assert_eq!(other.find(Some("a")).unwrap().as_deref(), Some("pre-1"));
}

impl ObjectImageStore {
    fn at_child(&self) -> Self {
        Self { bucket: Arc::clone(&self.bucket), prefix: self.object("pre-1") }
    }
}

#[test]
fn parent_is_linked_by_a_relative_path() {
    let (_runtime, objects, store, _) = bucket();
    let first = ObjectImageStore { prefix: Key::from("vm/1"), ..store.clone() };
    assert!(store.parent().unwrap().is_none());
    store.set_parent(&first).unwrap();
    assert_eq!(store.parent().unwrap().unwrap().location(), "s3://memory/vm/1");
    let object = store.open(names::PARENT).unwrap().unwrap();
    assert_eq!(read_whole(&*object, "parent", 100).unwrap(), b"../1\n");

    let folder = tempfile::tempdir().unwrap();
    let directory = super::super::DirectoryStore::open(folder.path()).unwrap();
    let error = store.parent_link(&directory).unwrap_err();
    assert_eq!(error.error.to_string(), "the parent is not in the bucket s3://memory");
    let error = directory.parent_link(&store).unwrap_err();
    assert_eq!(error.error.to_string(), "the parent is not in a directory, as the image is");

    let root = ObjectImageStore { prefix: Key::ROOT, ..store.clone() };
    assert_eq!(store.parent_link(&root).unwrap(), "../..");
    let key = store.object(names::PARENT);
    for link in ["../../..", "/vm/1", "a\nb\n", ""] {
        let put = objects.put(&key, link.to_owned().into());
        store.bucket.runtime.block_on(put).unwrap();
        let error = store.parent().unwrap_err();
        assert_eq!(error.error.to_string(), "no relative path to the parent", "{link:?}");
    }
}

#[test]
fn variables_that_cannot_work_are_refused() {
    let runtime = Runtime::new().unwrap();
    let http = ("AWS_ENDPOINT", "http://127.0.0.1:1");
    for (variables, reason) in [
        (&[("AWS_ACCESS_KEY_ID", "id")][..], "SecretAccessKey"),
        (&[http], "the endpoint has no TLS: set AWS_ALLOW_HTTP=true"),
        (&[http, ("AWS_ALLOW_HTTP", "false")], "the endpoint has no TLS"),
        (&[http, ("AWS_ALLOW_HTTP", "maybe")], "the endpoint has no TLS"),
    ] {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let bucket = Bucket::s3("b", variables, runtime.handle().clone(), Cancellation::default());
        let error = bucket.unwrap_err();
        assert_eq!(error.to_string(), "opening s3://b");
        assert!(error.error.to_string().contains(reason), "{error:?}");
    }
    let variables = [http, ("AWS_ALLOW_HTTP", "True")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter();
    assert!(Bucket::s3("b", variables, runtime.handle().clone(), Cancellation::default()).is_ok());
}
