//! Recorded runs of published implementations against the reference: `assay peers`.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// Every run, and the largest errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peers {
    /// Whether every run could be compared and agrees, known differences apart.
    pub pass: bool,
    /// A line for each run.
    pub files: Vec<Run>,
    /// A line for each peer and dtype.
    pub worst: Vec<Worst>,
    /// Files that could not be compared, and why.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// One recorded run. Errors are relative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Its file's name.
    pub file: String,
    /// The project.
    pub peer: String,
    /// The function that was called.
    #[serde(default)]
    pub function: String,
    /// That it was called in.
    pub dtype: String,
    /// Error of the loss; NaN where it is no number.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub loss_rel: f64,
    /// Error of dlogits; NaN where it is no number.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub dlogits_rel: f64,
    /// The limit of both.
    pub limit: f64,
    /// The outputs that were judged, as `assay judge` would, by gate.
    #[serde(default)]
    pub gates: Vec<String>,
    /// Those of them that the run failed: what the judge says of the peer, where `verdict` is about the reference.
    #[serde(default)]
    pub caught_by: Vec<String>,
    /// Whether the file records a defect of its release, which is not reproduced.
    #[serde(default)]
    pub quirk: bool,
    /// The decision.
    pub verdict: Verdict,
    /// Options of the run that change nothing.
    #[serde(default)]
    pub without_effect: Vec<String>,
    /// What else is to be known of it.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// What was decided of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The reference agrees with it.
    Pass,
    /// It does not.
    Fail,
    /// A quirk: counted neither way.
    KnownDifference,
}

/// The largest errors of one peer's runs in one dtype, quirks left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// The project.
    pub peer: String,
    /// The dtype.
    pub dtype: String,
    /// How many runs.
    pub files: usize,
    /// Of the loss; NaN where one is no number.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub loss_rel: f64,
    /// Of dlogits; NaN where one is no number.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub dlogits_rel: f64,
}
