//! [`Disk`]: the one way to the files that a run writes.
//!
//! A file that is replaced appears whole or not at all: it is written under another name, synced, renamed, and its folder
//! synced. A file that grows is synced when asked. A watcher is called before each operation, and may refuse it, as a disk may.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::TrainError;
use assay_core::files::{create_own, open_lock};

/// The file that says that a process writes into a folder.
const LOCK: &str = ".lock";

/// One thing that is done to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation<'o> {
    /// A file begins, empty, over whatever was there.
    Create(&'o Path),
    /// Bytes behind those that it has.
    Append(&'o Path, &'o [u8]),
    /// The content of a file survives a loss of power from now on.
    Sync(&'o Path),
    /// A file is renamed, over any file of the new name.
    Rename(&'o Path, &'o Path),
    /// A file is removed from its folder.
    Remove(&'o Path),
    /// The names in a folder survive a loss of power from now on.
    SyncFolder(&'o Path),
}

/// An observer of the operations on files, which may refuse them.
pub trait DiskWatcher: Send + Sync {
    /// Is called with each `operation` before it is done.
    ///
    /// # Errors
    /// The error that the disk is to return instead of doing the operation.
    fn before(&self, operation: DiskOperation) -> io::Result<()>;
}

/// Files of a run, in a folder that no other process writes into.
#[derive(Clone)]
pub struct Disk {
    folder: PathBuf,
    watch: Option<Arc<dyn DiskWatcher>>,
    /// Held until the last of its clones is dropped.
    _lock: Arc<File>,
}

impl Disk {
    /// Locks a folder for this process, and creates it if it does not exist.
    ///
    /// # Errors
    /// [`TrainError`] where another process has it, or the system refuses.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let io = |action: &'static str| move |reason| TrainError::io(folder, action, reason);
        fs::create_dir_all(folder).map_err(io("create"))?;
        let lock = open_lock(&folder.join(LOCK)).map_err(io("lock"))?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::WouldBlock => {
                TrainError::file(folder, "another run writes here; wait for it, or choose another folder".into())
            }
            fs::TryLockError::Error(reason) => TrainError::io(folder, "lock", reason),
        })?;
        Ok(Self { folder: folder.into(), watch: None, _lock: Arc::new(lock) })
    }

    /// Returns the disk with `watch` called before every operation.
    #[must_use]
    pub fn watched(self, watch: Arc<dyn DiskWatcher>) -> Self {
        Self { watch: Some(watch), ..self }
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn doing<T>(&self, operation: DiskOperation, done: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch.before(operation))?;
        done()
    }

    /// Puts `bytes` at `path`, over whatever was there, so that they survive a loss of power.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses; `path` is then as it was.
    pub(super) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
        // The parent of a name alone is empty, which no folder is.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // In another folder, another process may write the same file: its temporary name is different.
        let owner = if folder == self.folder { String::new() } else { format!("{}-", std::process::id()) };
        let temporary = folder.join(format!(".tmp-{owner}{name}"));
        // Write, sync, rename, sync the folder: after a loss of power the file is either the old one or the new one.
        let written = self.create(&temporary).and_then(|mut file| {
            self.append(&temporary, &mut file, bytes)?;
            self.sync(&temporary, &file)?;
            self.doing(DiskOperation::Rename(&temporary, path), || fs::rename(&temporary, path))?;
            self.doing(DiskOperation::SyncFolder(folder), || sync_folder(folder))
        });
        written.map_err(|reason| {
            // If this fails too, the next write replaces the temporary file.
            let _ = self.remove(&temporary);
            TrainError::io(path, "write", reason)
        })
    }

    /// Removes `path`, which may not be there.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn forget(&self, path: &Path) -> Result<(), TrainError> {
        self.remove(path).map_err(|reason| TrainError::io(path, "remove", reason))
    }

    /// Begins a file that grows.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn begin(&self, path: PathBuf) -> Result<AppendFile, TrainError> {
        let file = self.create(&path).map_err(|reason| TrainError::io(&path, "write", reason))?;
        Ok(AppendFile { disk: self.clone(), path, file })
    }

    /// Goes on with a file that is there.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn go_on(&self, path: PathBuf) -> Result<AppendFile, TrainError> {
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.map_err(|reason| TrainError::io(&path, "write", reason))?;
        Ok(AppendFile { disk: self.clone(), path, file })
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.doing(DiskOperation::Create(path), || create_own(path))
    }

    fn append(&self, path: &Path, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        self.doing(DiskOperation::Append(path, bytes), || file.write_all(bytes))
    }

    fn sync(&self, path: &Path, file: &File) -> io::Result<()> {
        self.doing(DiskOperation::Sync(path), || file.sync_all())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if !path.exists() {
            return Ok(());
        }
        self.doing(DiskOperation::Remove(path), || fs::remove_file(path))
    }
}

/// Folders can be opened and synced on Unix alone; elsewhere the system does it when it likes.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// A file of a run to which bytes are appended.
pub(super) struct AppendFile {
    disk: Disk,
    path: PathBuf,
    file: File,
}

impl AppendFile {
    /// Adds `bytes`.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), TrainError> {
        let appended = self.disk.append(&self.path, &mut self.file, bytes);
        appended.map_err(|reason| TrainError::io(&self.path, "write", reason))
    }

    /// Syncs the file, so that all appended bytes survive a loss of power.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses.
    pub(super) fn sync(&self) -> Result<(), TrainError> {
        self.disk.sync(&self.path, &self.file).map_err(|reason| TrainError::io(&self.path, "sync", reason))
    }
}
