//! Memory in bytes: of compiled programs, of a device's allocator, and of this machine.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The memory of one run of a compiled program on each device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledMemory {
    /// The size of the inputs, in bytes.
    pub argument_bytes: i64,
    /// The size of the outputs, in bytes, including those in the memory of an input.
    pub output_bytes: i64,
    /// The size of temporary buffers, in bytes.
    pub temp_bytes: i64,
    /// The size of the outputs in the memory of a donated input, in bytes.
    pub alias_bytes: i64,
    /// The size of the program itself, in bytes.
    pub code_bytes: i64,
}

impl CompiledMemory {
    /// Returns the memory in use during a run, `argument + output + temp − alias`, in bytes.
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

/// The figures of a device's allocator, in bytes; `None` where it does not report one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// The bytes that are allocated now.
    pub bytes_in_use: i64,
    /// The largest number of bytes that was allocated so far.
    pub peak_bytes_in_use: Option<i64>,
    /// The largest number of bytes that was reserved from the device so far.
    pub peak_bytes_reserved: Option<i64>,
    /// The number of bytes that may be allocated in all.
    pub bytes_limit: Option<i64>,
}

/// An allocation that does not fit into the available memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory: {what} needs {needed} bytes, {available} are available")]
pub struct Shortage {
    /// The thing to be allocated, in words.
    pub what: String,
    /// The bytes that it needs.
    pub needed: usize,
    /// The bytes that are available.
    pub available: usize,
}

/// Checks that `needed` bytes are `available`; memory of unknown size is taken to suffice.
///
/// # Errors
/// [`Shortage`], with the description `what` and both numbers.
pub fn expect_room(what: impl FnOnce() -> String, needed: usize, available: Option<usize>) -> Result<(), Shortage> {
    match available {
        Some(available) if needed > available => Err(Shortage { what: what(), needed, available }),
        _ => Ok(()),
    }
}

/// The size up to which an allocation is not worth a look at the machine's memory, in bytes.
const SMALL: usize = 1 << 26;

/// Checks that this process can get `needed` bytes: an allocation that fails would end it. Nothing up to 64 MiB is refused, and where the
/// machine reports no memory only what no address can reach.
///
/// # Errors
/// [`Shortage`], with the description `what` and both numbers.
pub fn expect_host_room(what: impl FnOnce() -> String, needed: usize) -> Result<(), Shortage> {
    let available = (needed > SMALL).then(|| available_host_bytes().unwrap_or(isize::MAX.unsigned_abs()));
    expect_room(what, needed, available)
}

/// Returns the bytes of memory that this process could get now without swapping: the least that the machine, each control group around
/// the process, such as a container, and the limit of its addresses have left; `None` if none reports it.
pub fn available_host_bytes() -> Option<usize> {
    // A process is in one group of each hierarchy; a machine without control groups has none.
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_groups = [Hierarchy::UNIFIED, Hierarchy::OF_MEMORY].into_iter().filter_map(|hierarchy| {
        // The path is absolute within the hierarchy: without its slash it is joined to the root.
        let group = own.lines().find_map(|line| line.split_once(hierarchy.mark)?.1.strip_prefix('/'))?;
        hierarchy.available(Path::new(hierarchy.root), Path::new(group))
    });
    available_on_machine().into_iter().chain(of_groups).chain(available_addresses()).min()
}

/// Returns the bytes of addresses that are left below the limit `RLIMIT_AS` of this process; `None` if there is no limit.
fn available_addresses() -> Option<usize> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    // An absent limit reads `unlimited`.
    let most: usize = limit.split_whitespace().next()?.parse().ok()?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(most.saturating_sub(kibibytes_of(&status, "VmSize:")?))
}

/// The files in which a hierarchy of control groups reports its memory.
pub struct Hierarchy {
    /// The text before a process's group in `/proc/self/cgroup`.
    mark: &'static str,
    root: &'static str,
    most: &'static str,
    held: &'static str,
    /// The name, in `memory.stat`, of cached files that were not read lately and can be given up.
    cached: &'static str,
}

impl Hierarchy {
    /// The hierarchy of version 2 of control groups.
    pub const UNIFIED: Hierarchy = Hierarchy {
        mark: "0::",
        root: "/sys/fs/cgroup",
        most: "memory.max",
        held: "memory.current",
        cached: "inactive_file ",
    };

    /// The memory controller of version 1 of control groups.
    pub const OF_MEMORY: Hierarchy = Hierarchy {
        mark: ":memory:",
        root: "/sys/fs/cgroup/memory",
        most: "memory.limit_in_bytes",
        held: "memory.usage_in_bytes",
        cached: "total_inactive_file ",
    };

    /// Returns the least number of bytes that `group` and the groups around it, below `root`, have left; `None` if none
    /// has a limit.
    pub fn available(&self, root: &Path, group: &Path) -> Option<usize> {
        let left = |group: &Path| {
            let read = |name: &str| fs::read_to_string(root.join(group).join(name)).ok();
            // A group without a limit has the word `max` there, or a number beyond any memory.
            let most: usize = read(self.most)?.trim().parse().ok()?;
            let held: usize = read(self.held)?.trim().parse().ok()?;
            // Cached files count as used, but the system gives them up under pressure.
            let statistics = read("memory.stat").unwrap_or_default();
            let cached = statistics.lines().find_map(|line| line.strip_prefix(self.cached)?.trim().parse().ok());
            Some(most.saturating_sub(held.saturating_sub(cached.unwrap_or(0))))
        };
        // A group cannot get more than any group around it has left.
        group.ancestors().filter_map(left).min()
    }
}

fn available_on_machine() -> Option<usize> {
    kibibytes_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Returns the bytes that a file of the kernel's gives after `name`.
fn kibibytes_of(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    // The kernel says kB and means 1,024 bytes.
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}
