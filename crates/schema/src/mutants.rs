//! Deliberately wrong kernels and who rejects them: `assay mutants`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::verdicts::{Grade, IgnoredCheck};

/// What became of the mutants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mutants {
    /// How many there were.
    #[serde(default)]
    pub total: usize,
    /// How many the suite rejected.
    #[serde(default)]
    pub killed: usize,
    /// What they were held to.
    #[serde(default)]
    pub grade: Option<Grade>,
    /// Those that it accepted, and should not have.
    pub survived: Vec<String>,
    /// Those that the grade admits by design.
    #[serde(default)]
    pub admitted: Vec<String>,
    /// Cases that the correct kernel passed, on each number of devices.
    pub cases: usize,
    /// Each of them.
    pub mutants: Vec<Mutant>,
    /// What was left out, and why.
    #[serde(default)]
    pub ignored: Vec<IgnoredCheck>,
}

/// What became of the mutants at the widths that kernels are made for: `assay mutants --production`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Production {
    /// What they were held to.
    pub grade: Grade,
    /// By columns, or hidden units by columns.
    pub widths: Vec<Width>,
}

/// What became of them at one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Width {
    /// `V`, or `HxV` of heads.
    pub width: String,
    /// Those that were rejected.
    pub killed: Vec<String>,
    /// Other kernels than the correct one, which no gate told apart.
    pub accepted: Vec<String>,
    /// Those that had the bits of the correct kernel in every case.
    pub not_exercised: Vec<String>,
}

/// What became of one mutant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mutant {
    /// Named after the bug.
    pub name: String,
    /// What kind of mistake it is.
    pub class: String,
    /// What it computes instead.
    pub does: String,
    /// Where it was seen; empty where it is only conceivable.
    #[serde(default)]
    pub seen: String,
    /// The gate and the case that rejected it first; `None` where it survived.
    pub killed_by: Option<String>,
    /// The gate.
    pub gate: Option<String>,
    /// The case.
    pub case: Option<String>,
    /// Devices that it ran on there.
    pub devices: Option<usize>,
    /// Cases that it was given, the last among them.
    pub cases: usize,
    /// What the tests of others say of it, by project.
    #[serde(default)]
    pub peers: BTreeMap<String, Cell>,
    /// The projects that accept it.
    #[serde(default)]
    pub passes_peers: Vec<String>,
}

/// What a project's tests say of a mutant, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cell {
    /// Its outputs have the bits of the correct kernel's: these inputs do not reach the bug.
    NotExercised,
    /// Its outputs differ, and are accepted.
    Passes,
    /// They are rejected.
    Caught,
}
