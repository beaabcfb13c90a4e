//! What the judge said: `assay replay`, `gradcheck` and `judge`.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// All checks of one command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdicts {
    /// Whether every check passed.
    pub pass: bool,
    /// Upper edges of the histograms in the checks, of every bucket but the last, which is open.
    #[serde(default)]
    pub ulp_edges: Vec<f64>,
    /// The checks, in the order they were made.
    pub checks: Vec<Check>,
    /// What was not checked, and why.
    #[serde(default)]
    pub ignored: Vec<Ignored>,
    /// What each implementation came to, where a command runs several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub implementations: Vec<Summary>,
    /// Runs on one device count against runs on another.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invariance: Vec<Compared>,
}

/// One output of one run against its limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// What was evaluated: a fixture with its logits and old log-probabilities, or a generated problem.
    pub fixture: String,
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Devices that it ran on.
    #[serde(default = "one")]
    pub devices: usize,
    /// The output and how it was compared.
    pub output: String,
    /// Dtype of the output.
    #[serde(default)]
    pub dtype: Option<String>,
    /// Error of the comparison closest to its limit, or furthest beyond; `None` where there was nothing to compare.
    pub worst: Option<f64>,
    /// Its limit.
    pub limit: Option<f64>,
    /// Where it stands.
    #[serde(default)]
    pub at: String,
    /// The decision.
    pub verdict: Status,
    /// The `κ` that the output needed; NaN where no `κ` would do.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub kappa_needed: f64,
    /// The `κ` it is allowed; `None` where no tolerance applies.
    pub kappa_allowed: Option<f64>,
    /// Elements by their error in ulp of that dtype, up to each of [`Verdicts::ulp_edges`], and beyond the last; `None`
    /// where the output has no elements, as metrics have none, or was not compared one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ulp: Option<Vec<u64>>,
    /// The first token that is rightly NaN or ∞.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonfinite_as_in_reference: Option<String>,
}

fn one() -> usize {
    1
}

/// How a gate was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Every value within its limit.
    Pass,
    /// A value beyond its limit, or finite where the reference is not.
    Fail,
    /// A NaN or ∞ where the reference is finite.
    Nonfinite,
}

/// Something that was not checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ignored {
    /// What it would have been.
    pub what: String,
    /// Why it was not.
    pub why: String,
}

/// What the checks of one implementation came to on one device count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Devices that it ran on.
    pub devices: usize,
    /// How many checks there were.
    pub checks: usize,
    /// How many failed.
    pub failed: usize,
    /// How many passed without a number to hold against a limit.
    pub compared_nothing: usize,
    /// The check that needed most of its `κ`; `None` where none has a `κ`.
    pub worst_kappa: Option<WorstKappa>,
    /// Seconds that its runs took, compiling among them; `None` where it was not run.
    pub run_s: Option<f64>,
}

/// The check that came closest to the `κ` it is allowed, or went furthest beyond.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstKappa {
    /// The `κ` needed over the `κ` allowed. ∞ where no `κ` would do, which is read again as NaN.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub share: f64,
    /// The output and how it was compared.
    pub output: String,
    /// What was evaluated.
    pub fixture: String,
}

/// Two runs of one implementation on different device counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    /// What was evaluated.
    pub fixture: String,
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Devices of the two runs.
    pub devices: [usize; 2],
    /// Outputs with the same bits.
    pub same: Vec<String>,
    /// Outputs with others.
    pub other: Vec<String>,
}
