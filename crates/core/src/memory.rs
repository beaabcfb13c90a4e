//! Bytes: what a compiled program takes, what a device's allocator says of itself, what this machine has left.

use std::fmt;

use std::fs;

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

/// Bytes of memory that this machine could give now, without swapping; `None` where it does not say.
pub fn available_host_bytes() -> Option<usize> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}
