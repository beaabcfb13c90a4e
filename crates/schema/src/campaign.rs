//! One kernel before many problems: `assay check`, `assay.check` in Python, and `assay judge` of a folder.

use serde::{Deserialize, Serialize};

use crate::verdicts::{Explanation, Grade};

/// What a campaign found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Campaign {
    /// Whether problems were judged, and nothing failed that is not allowed.
    pub passed: bool,
    /// The kernel.
    pub kernel: String,
    /// The loss, as its description has it.
    pub spec: String,
    /// What was asked of its accuracy.
    pub grade: Grade,
    /// Of the deck.
    pub seed: u64,
    /// Whether the sequences of each problem lay in one row.
    #[serde(default)]
    pub packed: bool,
    /// Problems that were to be tried.
    pub cases: u64,
    /// Problems that were judged, or should have been.
    pub tried: u64,
    /// Of them, those that failed.
    pub failed: u64,
    /// Calls of the kernel, all of them.
    pub calls: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// Whether somebody stopped it, or its time was up, before every problem was tried.
    pub stopped: Option<String>,
    /// Which outputs were judged.
    pub outputs: Vec<String>,
    /// What failed.
    pub causes: Vec<Cause>,
    /// What failed and is allowed by name.
    pub allowed: Vec<Cause>,
    /// What was not tried, and why.
    pub skipped: Vec<Skipped>,
    /// What the problems had in them.
    pub coverage: Coverage,
    /// How many wrong kernels it would have caught; `None` where nobody counted.
    pub power: Option<Power>,
}

/// Failures that look alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// The gate that failed, or the name of what the kernel did instead of answering.
    pub gate: String,
    /// Problems that it was seen in.
    pub cases: u64,
    /// The first of them, in words.
    pub first: String,
    /// The smallest problem it was seen in: extents and dtype.
    pub problem: String,
    /// Wrong kernels that fail alike.
    pub like: Vec<Name>,
    /// What is likely behind it, from the pattern of its errors.
    pub diagnoses: Vec<String>,
    /// Losses whose numbers these are, each under all its names.
    pub computes: Vec<Vec<String>>,
    /// Whether no problem that was tried tells several of them apart.
    pub computes_one_of: bool,
    /// The verdict on that problem; `None` where there was no answer.
    pub verdict: Option<Explanation>,
    /// What the kernel did, or said, where there was none.
    pub fault: Option<String>,
    /// The number of the signal that ended the kernel's process; `None` where none did.
    pub signal: Option<i32>,
    /// The file that holds the problem.
    pub repro: Option<String>,
}

/// A wrong kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Of the bank.
    pub mutant: String,
    /// What it computes instead.
    pub does: String,
}

/// Problems that were not tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// How many.
    pub cases: u64,
    /// Why.
    pub why: String,
}

/// What problems have in them, all together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Coverage {
    /// Tokens that count.
    pub tokens: u64,
    /// Of them, those whose gradient is not all 0.
    pub with_gradient: u64,
    /// Tokens that a clip holds, below and above.
    pub clipped: [u64; 2],
    /// Tokens with `A > 0`, and with `A < 0`.
    pub advantages: [u64; 2],
    /// Targets with a gradient in the first tile of 128 columns, and in the last.
    pub first_and_last_tile: [u64; 2],
    /// Sequences without a token.
    pub empty_rows: u64,
}

/// How much a campaign can see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Power {
    /// Wrong kernels that it rejects.
    pub rejected: usize,
    /// Wrong kernels whose bits differ from the correct one's on its problems: under this loss, the others cannot show.
    pub exercised: usize,
    /// Those that it accepts.
    pub accepted: Vec<Name>,
    /// Problems that they were run on.
    pub cases: usize,
}
