//! Programs compiled for GPUs that were not there: `assay compile` of a GPU.

use serde::{Deserialize, Serialize};

use crate::compile::{HeldBy, Memory};
use crate::number::{nan, or_nan};

/// What is known of one compiled program; all of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    /// Chip, and how many of them.
    pub target: String,
    /// Devices of the target.
    pub devices: usize,
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// What the shape is the extent of.
    #[serde(default)]
    pub held_by: HeldBy,
    /// Of logits, or of hidden states and head.
    pub dtype: String,
    /// The loss's entropy bonus; 0 where it has none. Entropy is returned all the same.
    #[serde(default)]
    pub entropy_coef: f64,
    /// Of one run.
    pub memory: Memory,
    /// The kernels of PTX, in the order of their calls.
    pub launches: Vec<Launch>,
    /// Bytes read from HBM and written to it.
    pub hbm_bytes: u64,
    /// HLO instructions whose bytes are not among them.
    #[serde(default)]
    pub hbm_uncounted: Vec<String>,
    /// Collectives, whose time is in no bound.
    #[serde(default)]
    pub collectives: Vec<String>,
    /// Lower bounds on the time of one run.
    pub bound: Bound,
    /// Assumed: the boost clock.
    pub clock_ghz: f64,
    /// Seconds that the plugin took.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub compile_s: f64,
}

/// A kernel of PTX, assembled, and all its threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The name of its entry.
    pub name: String,
    /// How often it is launched.
    pub runs: u64,
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster.
    pub cluster: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread spills: stored and loaded.
    pub spill_bytes: u32,
    /// Shared memory of a CTA, static and dynamic, bytes.
    pub shared_bytes: u32,
    /// CTAs that find room on one multiprocessor together.
    pub resident: u32,
    /// What holds that number where it is: `registers`, `shared memory`, `threads` or `slots`.
    pub resident_by: String,
    /// Instructions that warps issue in one launch.
    pub instructions: f64,
    /// What each pipe takes of one launch, the busiest first.
    pub pipes: Vec<Pipe>,
    /// What is not counted, and why.
    #[serde(default)]
    pub uncounted: Vec<String>,
}

/// An execution unit of all multiprocessors together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pipe {
    /// `issue`, `fma`, `xu`, …
    pub name: String,
    /// Instructions of warps that go through it.
    pub instructions: f64,
    /// Milliseconds of one launch at its rate and the clock.
    pub ms: f64,
}

/// Which of the bounds is the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// HBM delivers.
    Hbm,
    /// A pipe of the multiprocessors works.
    Pipe,
}

/// Lower bounds on one run, in milliseconds. Stalls are in none of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// `bytes / bandwidth`, at the documented bandwidth.
    pub hbm_ms: f64,
    /// The busiest pipe over all launches of kernels of PTX; 0 where there is none.
    pub pipe_ms: f64,
    /// Which that is; empty where there is none.
    pub pipe: String,
    /// The larger of both.
    pub predicted_ms: f64,
    /// Which that is.
    pub limit: Limit,
}

/// Every row of docs/gpu.md: `assay compile --table gpus`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// A row for each target, shape, dtype and program.
    pub gpu_rows: Vec<Compiled>,
}
