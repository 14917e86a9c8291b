//! Images in a directory, as CRIU keeps them. The link to the parent is the symbolic link `parent`, or in a copy from an object store a file
//! with the text of the link.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::libc::O_NONBLOCK;

use super::super::names::PARENT;
use super::{ImageStore, ObjectReader, ObjectWriter, StoreError, invalid, link, read_whole};

/// Ending of an object that is not finished.
const PARTIAL: &str = ".partial";
/// The content of memory is for its owner.
const OBJECT_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// A directory.
#[derive(Clone, Debug)]
pub struct DirectoryStore {
    /// Canonical.
    path: PathBuf,
}

impl DirectoryStore {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`StoreError`]
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let path = path.canonicalize().map_err(failed("opening", path))?;
        fs::read_dir(&path).map_err(failed("opening", &path))?;
        Ok(Self { path })
    }

    /// Opens a directory, and creates it and those above it (mode 0700) if they do not exist.
    ///
    /// # Errors
    /// [`StoreError`]
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        let mut builder = fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, DIRECTORY_MODE);
        let mut created = builder.create(path);
        if let (Err(error), Some(above)) = (&created, path.parent())
            && error.kind() == ErrorKind::NotFound
            && !above.as_os_str().is_empty()
        {
            Self::create(above)?;
            created = builder.create(path);
        }
        match created {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(failed("creating", path)(error)),
            Err(_) => Self::open(path),
            Ok(()) => {
                let store = Self::open(path)?;
                let above = store.path.parent().unwrap_or(&store.path);
                File::open(above)
                    .and_then(|above| above.sync_all())
                    .map_err(failed("synchronizing", above))?;
                Ok(store)
            }
        }
    }

    fn object(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError + use<> {
    let location = path.display().to_string();
    move |error| StoreError { operation, location, error }
}

impl ImageStore for DirectoryStore {
    fn location(&self) -> String {
        self.path.display().to_string()
    }

    fn create(&self, name: &str, _: u64) -> Result<Box<dyn ObjectWriter>, StoreError> {
        let path = self.object(name);
        if path.symlink_metadata().is_ok() {
            return Err(failed("creating", &path)(ErrorKind::AlreadyExists.into()));
        }
        let partial = self.object(&format!("{name}{PARTIAL}"));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(OBJECT_MODE)
            .open(&partial)
            .map_err(failed("creating", &partial))?;
        Ok(Box::new(DirectoryWriter { file, partial, path, is_finished: false }))
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn ObjectReader>>, StoreError> {
        let path = self.object(name);
        // A FIFO opens at once, and is refused below.
        let file = match OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(failed("opening", &path))?,
        };
        let metadata = file.metadata().map_err(failed("reading", &path))?;
        if !metadata.is_file() {
            let error = io::Error::new(ErrorKind::InvalidInput, "not a regular file");
            return Err(failed("opening", &path)(error));
        }
        Ok(Some(Arc::new(DirectoryReader { file, path, bytes: metadata.len() })))
    }

    fn find(&self, except: Option<&str>) -> Result<Option<String>, StoreError> {
        let names = fs::read_dir(&self.path).map_err(failed("listing", &self.path))?;
        for entry in names {
            let name = entry.map_err(failed("listing", &self.path))?.file_name();
            if except.is_none_or(|except| name != except) {
                return Ok(Some(name.to_string_lossy().into_owned()));
            }
        }
        Ok(None)
    }

    fn remove(&self, name: &str) -> Result<(), StoreError> {
        let path = self.object(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("removing", &path)(error)),
            _ => Ok(()),
        }
    }

    fn parent(&self) -> Result<Option<Arc<dyn ImageStore>>, StoreError> {
        let link = self.object(PARENT);
        let metadata = match link.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(failed("reading", &link))?,
        };
        if !metadata.is_file() {
            return Ok(Some(Arc::new(Self::open(&link)?)));
        }
        let Some(object) = self.open(PARENT)? else { return Ok(None) };
        let location = link.display().to_string();
        let bytes = read_whole(&*object, &location, link::MAX_LINK_BYTES)?;
        let target = link::from_content(&bytes)
            .ok_or_else(|| invalid("reading", location, "no relative path to the parent"))?;
        Ok(Some(Arc::new(Self::open(&self.path.join(target))?)))
    }

    fn parent_link(&self, parent: &dyn ImageStore) -> Result<String, StoreError> {
        let location = parent.location();
        if !location.starts_with('/') {
            return Err(invalid("linking", location, "the parent is not in a directory, as the image is"));
        }
        // Relative, so that a chain can be moved as a whole.
        Ok(link::relative(&self.location(), &location))
    }

    fn set_parent(&self, parent: &dyn ImageStore) -> Result<(), StoreError> {
        let link = self.object(PARENT);
        std::os::unix::fs::symlink(self.parent_link(parent)?, &link).map_err(failed("creating", &link))
    }

    fn child(&self, name: &str) -> Result<Arc<dyn ImageStore>, StoreError> {
        Ok(Arc::new(Self::create(&self.object(name))?))
    }

    fn remove_child(&self, name: &str) -> Result<(), StoreError> {
        let path = self.object(name);
        fs::remove_dir(&path).map_err(failed("removing", &path))
    }

    fn reserve(&self) -> Result<Option<String>, StoreError> {
        // Each object is created on condition that there is none, nor a partial one.
        Ok(None)
    }

    fn sync(&self) -> Result<(), StoreError> {
        let directory = File::open(&self.path).map_err(failed("opening", &self.path))?;
        directory.sync_all().map_err(failed("synchronizing", &self.path))
    }
}

#[derive(Debug)]
struct DirectoryWriter {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl ObjectWriter for DirectoryWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file.write_all(bytes).map_err(failed("writing", &self.path))
    }

    fn finish(mut self: Box<Self>) -> Result<(), StoreError> {
        self.file.sync_data().map_err(failed("synchronizing", &self.path))?;
        rename_new(&self.partial, &self.path).map_err(failed("renaming to", &self.path))?;
        self.is_finished = true;
        Ok(())
    }
}

/// Renames an object, and replaces none where the file system can do that.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        Err(Errno::EINVAL | Errno::ENOSYS) => fs::rename(from, to),
        renamed => Ok(renamed?),
    }
}

impl Drop for DirectoryWriter {
    fn drop(&mut self) {
        if !self.is_finished {
            // Its name shows that it is not finished, if it stays.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

#[derive(Debug)]
struct DirectoryReader {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl ObjectReader for DirectoryReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        self.file.read_exact_at(buffer, offset).map_err(failed("reading", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_exists_once_it_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let store = DirectoryStore::create(&folder.path().join("image")).unwrap();
        let mut writer = store.create("a.img", 3).unwrap();
        writer.append(b"abc").unwrap();
        assert!(store.open("a.img").unwrap().is_none());
        writer.finish().unwrap();
        let object = store.open("a.img").unwrap().unwrap();
        let mut bytes = [0; 2];
        object.read_at(1, &mut bytes).unwrap();
        assert_eq!((object.bytes(), &bytes), (3, b"bc"));
        assert!(object.read_at(2, &mut bytes).is_err());
        assert!(store.create("a.img", 3).is_err());
        drop(store.create("b.img", 0).unwrap());
        assert_eq!(store.find(None).unwrap().as_deref(), Some("a.img"));
        assert_eq!(store.find(Some("a.img")).unwrap(), None);
    }

    #[test]
    fn fifo_in_place_of_an_object_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let store = DirectoryStore::open(folder.path()).unwrap();
        nix::unistd::mkfifo(&folder.path().join("a.img"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = store.open("a.img").unwrap_err();
        assert_eq!(error.error.to_string(), "not a regular file");
    }

    #[test]
    fn parent_is_linked_by_a_relative_path() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] =
            ["1", "2"].map(|name| DirectoryStore::create(&folder.path().join(name)).unwrap());
        assert!(second.parent().unwrap().is_none());
        second.set_parent(&first).unwrap();
        assert_eq!(second.parent().unwrap().unwrap().location(), first.location());
        let link = folder.path().join("2/parent");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("../1"));

        // A copy from an object store has its text.
        fs::remove_file(&link).unwrap();
        fs::write(&link, "../1\n").unwrap();
        assert_eq!(second.parent().unwrap().unwrap().location(), first.location());
        for (content, reason) in [("/etc\n", "no relative path to the parent"), ("", "no relative path")] {
            fs::write(&link, content).unwrap();
            let error = second.parent().unwrap_err().error.to_string();
            assert!(error.contains(reason), "{content:?}: {error}");
        }
    }
}
