//! [`Guardian`]: removes a campaign's folder and ends its kernel's processes, however the campaign ends.

use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;
use tempfile::TempDir;

use assay_fixture::{locked_folder, remove_unlocked};

/// Memory that is a file system, where there is one.
const SHARED_MEMORY: &str = "/dev/shm";

/// The start of the names of folders with problems and candidates.
const PREFIX: &str = "assay-worker-";

/// The shell script of the guardian: reads the worker's process group, line after line, until the campaign closes the pipe or ends; then
/// kills the last group and removes the folder.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
group=
while read -r line; do group=$line; done
[ -z "$group" ] || kill -s KILL -- "-$group"
rm -rf -- "$1"
"#;

/// A folder in shared memory for problems and candidates, and a process that removes it, and ends the worker's group, when this is dropped
/// or this process ends: a signal that cannot be caught leaves no other time to do so.
pub(super) struct Guardian {
    folder: TempDir,
    /// The folder, held locked for as long as it is in use.
    _lock: File,
    process: Child,
    groups: Option<ChildStdin>,
}

impl Guardian {
    /// Makes a folder in shared memory, or where temporary files are, and removes those that nobody uses any more.
    pub(super) fn start() -> io::Result<Self> {
        let [memory, disk] = [PathBuf::from(SHARED_MEMORY), env::temp_dir()];
        // The campaign of a folder that is not locked has ended without its guardian, as when a machine's every process is killed.
        for parent in [&memory, &disk] {
            remove_unlocked(parent, PREFIX);
        }
        let made = |parent: &Path| locked_folder(parent, PREFIX, None);
        let (folder, lock) = made(&memory).or_else(|_| made(&disk))?;
        // A group of its own: Ctrl-C, which ends all of the terminal's, does not reach it.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "assay-guardian"]).arg(folder.path()).process_group(0).current_dir("/");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let groups = process.stdin.take();
        Ok(Self { folder, _lock: lock, process, groups })
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Sets the group that is killed; `None` after it has been waited for, as another may get its number.
    pub(super) fn watch(&mut self, group: Option<Pid>) {
        let line = group.map_or(String::new(), |group| group.as_raw_nonzero().to_string()) + "\n";
        // A guardian that somebody killed guards nothing, which the campaign need not end for.
        let _ = self.groups.as_mut().map(|groups| groups.write_all(line.as_bytes()));
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.groups = None;
        let _ = self.process.wait();
    }
}
