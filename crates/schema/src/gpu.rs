//! Programs compiled for GPUs without the chip: what `assay compile` of a GPU writes.

use serde::{Deserialize, Serialize};

use crate::compile::{HeldBy, ProgramMemory};
use crate::number::{nan, or_nan};

/// The figures of one program compiled for a GPU; all are of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuProgramReport {
    /// The chip, and the number of chips.
    pub target: String,
    /// The number of devices of the target.
    pub devices: usize,
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The extents of the batch, `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// The arrays that the shape describes: each device's, or all devices' together.
    #[serde(default)]
    pub held_by: HeldBy,
    /// The dtype of the logits, or of hidden states and head.
    pub dtype: String,
    /// The coefficient of the loss's entropy bonus; 0 if it has none, though entropy is returned anyway.
    #[serde(default)]
    pub entropy_coef: f64,
    /// The memory of one run.
    pub memory: ProgramMemory,
    /// The PTX kernels, in the order of their calls.
    pub launches: Vec<GpuLaunch>,
    /// The bytes read from HBM and written to it.
    pub hbm_bytes: u64,
    /// The HLO instructions whose bytes are not counted.
    #[serde(default)]
    pub hbm_uncounted: Vec<String>,
    /// The collectives, whose time is in no bound.
    #[serde(default)]
    pub collectives: Vec<String>,
    /// The lower bounds on the time of one run.
    pub bound: GpuTimeBound,
    /// The clock that is assumed in GHz: the boost clock.
    pub clock_ghz: f64,
    /// The seconds that the plugin took to compile.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub compile_s: f64,
}

/// An assembled PTX kernel, with its grid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuLaunch {
    /// The name of the kernel's entry point.
    pub name: String,
    /// The number of launches in one run.
    pub runs: u64,
    /// The number of CTAs along x, y and z.
    pub grid: [u32; 3],
    /// The number of threads of a CTA along x, y and z.
    pub block: [u32; 3],
    /// The number of CTAs of a cluster.
    pub cluster: u32,
    /// The number of registers per thread.
    pub registers: u32,
    /// The bytes that a thread spills, stored and loaded together.
    pub spill_bytes: u32,
    /// The bytes of shared memory per CTA, static and dynamic.
    pub shared_bytes: u32,
    /// The number of CTAs that fit on one multiprocessor together.
    pub resident: u32,
    /// The resource that limits that number: `registers`, `shared memory`, `threads` or `slots`.
    pub resident_by: String,
    /// The number of instructions that warps issue in one launch.
    pub instructions: f64,
    /// The time of each pipe in one launch, the busiest first.
    pub pipes: Vec<Pipe>,
    /// The parts that are not counted, with the reason.
    #[serde(default)]
    pub uncounted: Vec<String>,
}

/// An execution unit of all multiprocessors together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pipe {
    /// The name of the unit: `issue`, `fma`, `xu`, …
    pub name: String,
    /// The number of warp instructions that it executes.
    pub instructions: f64,
    /// The milliseconds of one launch at its rate and the clock.
    pub ms: f64,
}

/// The largest of the lower bounds on time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuLimit {
    /// The transfers from and to HBM take longest.
    Hbm,
    /// A pipe of the multiprocessors takes longest.
    Pipe,
}

/// The lower bounds on the time of one run, in milliseconds; none contains stalls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuTimeBound {
    /// The bound `bytes / bandwidth`, at the documented bandwidth.
    pub hbm_ms: f64,
    /// The time of the busiest pipe over all launches of PTX kernels; 0 if there are none.
    pub pipe_ms: f64,
    /// The name of the busiest pipe; empty if there is none.
    pub pipe: String,
    /// The larger of both bounds.
    pub predicted_ms: f64,
    /// The bound that is the larger one.
    pub limit: GpuLimit,
}

/// The table of `docs/gpu.md`, as `assay compile --table gpus` writes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuTable {
    /// The lines of the table, one per target, shape, dtype and program.
    pub gpu_rows: Vec<GpuProgramReport>,
}
