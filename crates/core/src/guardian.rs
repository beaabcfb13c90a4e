//! [`Guardian`]: removes a temporary folder and ends the processes that work in it, however the process that started them ends.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::Pid;
use tempfile::TempDir;

use crate::temporary::{locked_folder, remove_unlocked};

/// The shell script of the guardian: reads the worker's process group, line after line, until the guarded process closes the pipe or ends;
/// then kills the last group and removes the folder. What was in it may still be written to, so that it is removed more than once.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
group=
while read -r line; do group=$line; done
[ -z "$group" ] || kill -s KILL -- "-$group"
for attempt in 1 2 3; do rm -rf -- "$1" && break; done
"#;

/// A temporary folder, and a process that removes it, and ends the worker's group, when this is dropped or this process ends: a signal that
/// cannot be caught leaves no other time to do so.
#[derive(Debug)]
pub struct Guardian {
    folder: TempDir,
    /// The folder, held locked for as long as it is in use.
    _lock: File,
    process: Child,
    groups: Option<ChildStdin>,
}

impl Guardian {
    /// Makes a folder whose name begins with `prefix` in the first of `parents` where one can be made, and removes those that nobody uses
    /// any more.
    ///
    /// # Errors
    /// The operating system's, from the last of `parents` or the shell.
    pub fn start(parents: &[PathBuf], prefix: &str) -> io::Result<Self> {
        // The process of a folder that is not locked has ended without its guardian, as when a machine's every process is killed.
        for parent in parents {
            remove_unlocked(parent, prefix);
        }
        let mut made = Err(io::Error::new(io::ErrorKind::InvalidInput, "no folder to make another in"));
        for parent in parents {
            made = made.or_else(|_| locked_folder(parent, prefix, None));
        }
        let (folder, lock) = made?;
        // A group of its own: Ctrl-C, which ends all of the terminal's, does not reach it.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "assay-guardian"]).arg(folder.path()).process_group(0).current_dir("/");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let groups = process.stdin.take();
        Ok(Self { folder, _lock: lock, process, groups })
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Sets the process group that is killed; `None` after it has been waited for, as another may get its number.
    pub fn watch(&mut self, group: Option<Pid>) {
        let line = group.map_or(String::new(), |group| group.as_raw_nonzero().to_string()) + "\n";
        // A guardian that somebody killed guards nothing, which is no reason to end.
        let _ = self.groups.as_mut().map(|groups| groups.write_all(line.as_bytes()));
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.groups = None;
        let _ = self.process.wait();
    }
}
