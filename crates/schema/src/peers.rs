//! Recorded runs of published implementations against the reference: `assay peers`.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// The comparison of every recorded run, and the largest errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeersReport {
    /// Whether every run could be compared and agrees, except for known differences.
    pub pass: bool,
    /// The comparisons, one per run.
    pub files: Vec<PeerRun>,
    /// The largest errors, one entry per peer and dtype.
    pub worst: Vec<PeerErrors>,
    /// The files that could not be compared, with the reason.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// The comparison of one recorded run; errors are relative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRun {
    /// The name of the run's file.
    pub file: String,
    /// The project that was run.
    pub peer: String,
    /// The function that was called.
    #[serde(default)]
    pub function: String,
    /// The dtype that the function was called in.
    pub dtype: String,
    /// The error of the loss; NaN if it is not finite.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub loss_rel: f64,
    /// The error of dlogits; NaN if it is not finite.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub dlogits_rel: f64,
    /// The limit of both errors.
    pub limit: f64,
    /// The gates that were judged, as in `assay judge`.
    #[serde(default)]
    pub gates: Vec<String>,
    /// The gates that the run failed: the judge's verdict on the peer, while `verdict` is about the reference.
    #[serde(default)]
    pub caught_by: Vec<String>,
    /// Whether the file records a defect of its release, which is not reproduced.
    #[serde(default)]
    pub quirk: bool,
    /// The decision on the run.
    pub verdict: PeerVerdict,
    /// The options of the run that have no effect.
    #[serde(default)]
    pub without_effect: Vec<String>,
    /// Further notes on the run.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The decision on one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerVerdict {
    /// The reference agrees with the run.
    Pass,
    /// The reference does not agree with the run.
    Fail,
    /// The run differs by a known quirk, which counts neither way.
    KnownDifference,
}

/// The largest errors of one peer's runs in one dtype, quirks left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerErrors {
    /// The project that was run.
    pub peer: String,
    /// The dtype that the functions were called in.
    pub dtype: String,
    /// The number of runs.
    pub files: usize,
    /// The largest error of the loss; NaN if one is not finite.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub loss_rel: f64,
    /// The largest error of dlogits; NaN if one is not finite.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub dlogits_rel: f64,
}
