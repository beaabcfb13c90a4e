//! Bytes: what a compiled program takes, what a device's allocator says of itself, what this machine has left.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Bytes that one run of a compiled program takes on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledMemory {
    /// Inputs.
    pub argument_bytes: i64,
    /// Outputs, those that lie over an input included.
    pub output_bytes: i64,
    /// Scratch.
    pub temp_bytes: i64,
    /// Outputs that lie over a donated input.
    pub alias_bytes: i64,
    /// The program itself.
    pub code_bytes: i64,
}

impl CompiledMemory {
    /// `argument + output + temp − alias`: what is held while it runs.
    pub fn peak_bytes(&self) -> i64 {
        self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes
    }
}

impl fmt::Display for CompiledMemory {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { argument_bytes, output_bytes, temp_bytes, alias_bytes, .. } = self;
        write!(
            f,
            "arguments {argument_bytes}, outputs {output_bytes}, scratch {temp_bytes}, less {alias_bytes} that share memory"
        )
    }
}

/// What a device's allocator says of itself; `None` where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// Bytes allocated now.
    pub bytes_in_use: i64,
    /// The most that were.
    pub peak_bytes_in_use: Option<i64>,
    /// The most that were reserved from the device.
    pub peak_bytes_reserved: Option<i64>,
    /// Bytes that may be allocated.
    pub bytes_limit: Option<i64>,
}

/// It would not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory: {what} needs {needed} bytes, {available} are available")]
pub struct Shortage {
    /// What was to be allocated.
    pub what: String,
    /// Bytes it takes.
    pub needed: usize,
    /// Bytes there are.
    pub available: usize,
}

/// Checks that `needed` bytes are `available`; where that is not known, they are taken to be.
///
/// # Errors
/// [`Shortage`], with `what` was to be allocated and both numbers.
pub fn expect_room(what: impl FnOnce() -> String, needed: usize, available: Option<usize>) -> Result<(), Shortage> {
    match available {
        Some(available) if needed > available => Err(Shortage { what: what(), needed, available }),
        _ => Ok(()),
    }
}

/// Bytes of memory that this process could be given now, without swapping: of the machine, and of every control group that it is in,
/// as containers are; `None` where neither says.
pub fn available_host_bytes() -> Option<usize> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_groups = [Hierarchy::UNIFIED, Hierarchy::OF_MEMORY].into_iter().filter_map(|hierarchy| {
        let group = own.lines().find_map(|line| line.split_once(hierarchy.mark)?.1.strip_prefix('/'))?;
        hierarchy.available(Path::new(hierarchy.root), Path::new(group))
    });
    available_on_machine().into_iter().chain(of_groups).min()
}

/// Where a hierarchy of control groups says what memory they may hold.
pub struct Hierarchy {
    /// What stands before a process's group.
    mark: &'static str,
    root: &'static str,
    most: &'static str,
    held: &'static str,
    /// Of what is held, files that are cached and were not read lately: they can be given up.
    cached: &'static str,
}

impl Hierarchy {
    /// Version 2 of control groups.
    pub const UNIFIED: Hierarchy = Hierarchy {
        mark: "0::",
        root: "/sys/fs/cgroup",
        most: "memory.max",
        held: "memory.current",
        cached: "inactive_file ",
    };

    /// Version 1, the controller of memory.
    pub const OF_MEMORY: Hierarchy = Hierarchy {
        mark: ":memory:",
        root: "/sys/fs/cgroup/memory",
        most: "memory.limit_in_bytes",
        held: "memory.usage_in_bytes",
        cached: "total_inactive_file ",
    };

    /// Bytes: the least that `group` and those around it, below `root`, have left; `None` where none of them has a limit.
    pub fn available(&self, root: &Path, group: &Path) -> Option<usize> {
        let left = |group: &Path| {
            let read = |name: &str| fs::read_to_string(root.join(group).join(name)).ok();
            // A word where there is none.
            let most: usize = read(self.most)?.trim().parse().ok()?;
            let held: usize = read(self.held)?.trim().parse().ok()?;
            let statistics = read("memory.stat").unwrap_or_default();
            let cached = statistics.lines().find_map(|line| line.strip_prefix(self.cached)?.trim().parse().ok());
            Some(most.saturating_sub(held.saturating_sub(cached.unwrap_or(0))))
        };
        group.ancestors().filter_map(left).min()
    }
}

fn available_on_machine() -> Option<usize> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}
