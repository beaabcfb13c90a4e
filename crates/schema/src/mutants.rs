//! Deliberately wrong kernels and who rejects them: `assay mutants`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::verdicts::{Grade, IgnoredCheck};

/// The result of a suite on all mutants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MutationReport {
    /// The number of mutants.
    #[serde(default)]
    pub total: usize,
    /// The number of mutants that the suite rejects.
    #[serde(default)]
    pub killed: usize,
    /// The grade that they were held to.
    #[serde(default)]
    pub grade: Option<Grade>,
    /// The mutants that it accepts and should reject.
    pub survived: Vec<String>,
    /// The mutants that the grade admits by design.
    #[serde(default)]
    pub admitted: Vec<String>,
    /// The number of cases that the correct kernel passed, on each device count.
    pub cases: usize,
    /// The result for each mutant.
    pub mutants: Vec<MutantReport>,
    /// The checks that were left out, with the reason.
    #[serde(default)]
    pub ignored: Vec<IgnoredCheck>,
}

/// The result of a suite on the mutants at production widths, as `assay mutants --production` writes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductionReport {
    /// The grade that they were held to.
    pub grade: Grade,
    /// The results by width of the vocabulary, or of head and vocabulary.
    pub widths: Vec<Width>,
}

/// The result at one width.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Width {
    /// The width `V`, or `HxV` with an LM head.
    pub width: String,
    /// The mutants that were rejected.
    pub killed: Vec<String>,
    /// The mutants with other bits than the correct kernel that every gate accepts.
    pub accepted: Vec<String>,
    /// The mutants with the bits of the correct kernel in every case.
    pub not_exercised: Vec<String>,
}

/// The result for one mutant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MutantReport {
    /// The name of the mutant, after its bug.
    pub name: String,
    /// The kind of the bug.
    pub class: String,
    /// The wrong computation, in words.
    pub does: String,
    /// The place where the bug was seen; empty if it is only conceivable.
    #[serde(default)]
    pub seen: String,
    /// The gate and the case that rejected it first; `None` if it survived.
    pub killed_by: Option<String>,
    /// The gate that rejected it first.
    pub gate: Option<String>,
    /// The case that rejected it first.
    pub case: Option<String>,
    /// The number of devices that it ran on there.
    pub devices: Option<usize>,
    /// The number of cases that it was given, including the last.
    pub cases: usize,
    /// The verdict of other projects' tests on it, by project.
    #[serde(default)]
    pub peers: BTreeMap<String, PeerOutcome>,
    /// The projects whose tests accept it.
    #[serde(default)]
    pub passes_peers: Vec<String>,
}

/// The verdict of a project's tests on a mutant, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerOutcome {
    /// The outputs have the bits of the correct kernel's, as the inputs do not reach the bug.
    NotExercised,
    /// The outputs differ, and are accepted.
    Passes,
    /// The outputs differ, and are rejected.
    Caught,
}
