//! The memory of a worker's processes, as Linux tells it.

use std::fs;
use std::path::Path;

use assay_core::files::read_regular_text;
use rustix::process::Pid;

/// The memory of all processes of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerMemory {
    /// The bytes that they hold.
    pub held: u64,
    /// The most bytes that each has held since the last look, added up.
    pub peak: u64,
}

impl WorkerMemory {
    /// Looks at the processes of `group`, and sets their high-water marks back. `None` if there is no `/proc`, or it refuses.
    pub(super) fn look_at(group: Pid) -> Option<Self> {
        let mut all = Self { held: 0, peak: 0 };
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let folder = entry.path();
            let is_one = entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
            // A process may end while it is looked at.
            let Some(status) = is_one.then(|| status_in_group(&folder, group)).flatten() else { continue };
            all.held += kibibytes(&status, "VmRSS:")? << 10;
            all.peak += kibibytes(&status, "VmHWM:")? << 10;
            // One that has ended meanwhile has no mark to be set back.
            if fs::write(folder.join("clear_refs"), "5").is_err() && folder.exists() {
                return None;
            }
        }
        (all.held > 0).then_some(all)
    }
}

/// The longest file about a process that is read.
const LONGEST: u64 = 64 << 10;

/// Reads the status of a process, if it is one of `group`.
fn status_in_group(folder: &Path, group: Pid) -> Option<String> {
    let read = |name: &str| read_regular_text(&folder.join(name), LONGEST).ok();
    let stat = read("stat")?;
    // The name, in parentheses, may have spaces; after it come the state, the parent and the group.
    let of = stat.rsplit_once(')')?.1.split_whitespace().nth(2)?;
    (of == group.as_raw_nonzero().to_string()).then(|| read("status")).flatten()
}

fn kibibytes(status: &str, name: &str) -> Option<u64> {
    // A process that has ended, and was not waited for, has none.
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(Some(0), |line| line.split_whitespace().next()?.parse().ok())
}
