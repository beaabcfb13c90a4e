//! The time and memory of programs that compute one loss, side by side: `assay.bench`.

use serde::{Deserialize, Serialize};

/// A kernel and its opponents, timed in turns on one problem.
///
/// Times are seconds. Memory is bytes beyond the inputs of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramBench {
    /// The name of the kernel, the first of the programs.
    pub kernel: String,
    /// The loss, as it was asked for.
    pub loss: String,
    /// The extents of the problem, `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// The dtype of the logits, or of hidden states and head.
    pub dtype: String,
    /// The device: `cpu`, or the name of an accelerator.
    pub device: String,
    /// The packages that ran, each with its version.
    pub versions: Vec<String>,
    /// The number of threads on this machine's CPU.
    pub threads: usize,
    /// The clock of a GPU's multiprocessors after the last turn; `None` if nothing reports it.
    #[serde(default)]
    pub clock_mhz: Option<f64>,
    /// The size of the logits, `B·T·V` of the dtype, in which memory is told.
    pub logits_bytes: u64,
    /// The times of the bound, a copy of the logits or the products of a head; `None` if nothing was timed.
    #[serde(default)]
    pub bound: Option<BoundTimes>,
    /// The kernel, and the programs that it took turns with.
    pub programs: Vec<BenchedProgram>,
    /// The programs at other sizes; empty if none were asked for.
    #[serde(default)]
    pub sizes: Vec<BenchedSize>,
    /// The growth of time with a size.
    #[serde(default)]
    pub growths: Vec<TimeGrowth>,
    /// The reason why no program has its memory; `None` if it was measured.
    #[serde(default)]
    pub no_memory: Option<String>,
}

impl ProgramBench {
    /// Returns bytes in units of the logits' size; `None` if that is 0.
    pub fn in_logits(&self, bytes: u64) -> Option<f64> {
        (self.logits_bytes > 0).then(|| bytes as f64 / self.logits_bytes as f64)
    }
}

/// The bound that times are compared with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BoundTimes {
    /// The name of the bound: `a copy of the logits`, or `the three products of the head`.
    pub name: String,
    /// The times that it took.
    pub times: CallTimes,
    /// The rate of bytes read and written, in 10⁹ a second; `None` for products.
    #[serde(default)]
    pub gb_per_s: Option<f64>,
    /// The largest rate of the device's memory by its own clock and bus; `None` if nothing reports it.
    #[serde(default)]
    pub device_gb_per_s: Option<f64>,
}

/// The times of calls in turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallTimes {
    /// The number of calls that were timed.
    pub calls: usize,
    /// The median of their times.
    pub median: f64,
    /// The time of the fastest call.
    pub least: f64,
    /// The time that nine of ten do not exceed.
    pub p90: f64,
}

/// One program, and the figures that it has if its answer is right.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchedProgram {
    /// The name of the program.
    pub name: String,
    /// The outcome of asking it.
    pub outcome: ProgramOutcome,
    /// The reason why it has no time: what is wrong with its answer, or why it did not run. `None` if it was timed.
    #[serde(default)]
    pub why_untimed: Option<String>,
    /// The grade that its answer reaches.
    #[serde(default)]
    pub grade: Option<String>,
    /// The times of its calls, forward and backward together.
    #[serde(default)]
    pub times: Option<CallTimes>,
    /// The memory of one call.
    #[serde(default)]
    pub memory: Option<CallMemory>,
}

/// The outcome of asking one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramOutcome {
    /// All answers of the program were right, and it was timed.
    Timed,
    /// One of the answers was wrong, or an input was written to.
    Wrong,
    /// The program raised an error instead of an answer.
    Failed,
    /// The program is not installed, has no such loss, is too slow, or needs more memory than there is.
    Ignored,
}

impl ProgramOutcome {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Timed => "timed",
            Self::Wrong => "wrong",
            Self::Failed => "failed",
            Self::Ignored => "ignored",
        }
    }
}

/// The memory that one call takes, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallMemory {
    /// The peak of the forward pass; `None` if the two passes are one program.
    #[serde(default)]
    pub forward: Option<u64>,
    /// The peak of the backward pass, with what the forward pass left; `None` if the two passes are one program.
    #[serde(default)]
    pub backward: Option<u64>,
    /// The peak of the call.
    pub peak: u64,
    /// The bytes that the first call left behind and later calls use again; `None` if nobody looked.
    pub kept: Option<u64>,
    /// The bytes that each further call left behind; `None` if nobody looked.
    pub leaked: Option<u64>,
}

/// One program at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchedSize {
    /// The name of the program.
    pub program: String,
    /// The number of tokens, `B·T`.
    pub tokens: usize,
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// The median of its calls.
    pub median: f64,
    /// The peak of one call; `None` if it was not measured.
    #[serde(default)]
    pub peak: Option<u64>,
}

/// The line that fits log time over log size best.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeGrowth {
    /// The name of the program.
    pub program: String,
    /// The size that grows: `tokens` or `vocabulary`.
    pub size: String,
    /// The slope: 1 where twice the size takes twice the time.
    pub exponent: f64,
    /// The number of sizes that the line fits.
    pub sizes: usize,
}
