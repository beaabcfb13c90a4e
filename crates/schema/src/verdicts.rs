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
    /// What failures are likely of, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnoses: Vec<String>,
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
    /// How its tile kernels were written for them: `loops` or `mosaic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// The output and how it was compared.
    pub output: String,
    /// Dtype of the output.
    #[serde(default)]
    pub dtype: Option<String>,
    /// Dtype that the problem promises for it: a coarser output is judged as if it were of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<String>,
    /// The better of the grades that it reaches; `None` where it reaches none, or nothing was compared.
    #[serde(default)]
    pub grade: Option<Grade>,
    /// What keeps it from grade `exact`, where `standard` was asked for and is the better one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_of_exact: Option<String>,
    /// `worst / limit`; `None` where nothing was compared, or a value is NaN or ∞ that should not be.
    #[serde(default)]
    pub share: Option<f64>,
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
    /// Values, or rows, that were not compared: they have no finite limit, or a row has a value that is not finite.
    #[serde(default)]
    pub not_compared: u64,
}

fn one() -> usize {
    1
}

/// A verdict in words and numbers: what a terminal, a page and Python show of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The decision.
    pub status: Status,
    /// What was judged, and of what.
    pub of: String,
    /// The gate alone.
    pub gate: String,
    /// Dtype of the output.
    pub dtype: String,
    /// Where the worst value stands, `[b,t,v]`; empty of a scalar.
    pub at: String,
    /// The exact value; `None` of a norm or a sum, or where it is not finite.
    pub expected: Option<f64>,
    /// The value judged, or that norm or sum; `None` where it is not finite.
    pub actual: Option<f64>,
    /// `|actual − expected|`.
    pub error: Option<f64>,
    /// The largest error allowed.
    pub limit: Option<f64>,
    /// All of it in words, line by line.
    pub lines: Vec<Line>,
}

/// A line of an explanation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// What it says something of.
    pub name: String,
    /// What it says.
    pub text: String,
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        writeln!(f, "{} {}, {}", self.status.word(), self.of, self.dtype)?;
        self.lines.iter().try_for_each(|Line { name, text }| writeln!(f, "  {name:<9} {text}"))
    }
}

/// How a gate was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Every value within its limit.
    Pass,
    /// A value beyond its limit, or finite where the reference is not.
    Fail,
    /// A NaN or ∞ where the reference is finite.
    Nonfinite,
    /// There was no number to hold against a limit: no token counts, or those that do are NaN or ∞ as they may be.
    NotCompared,
    /// Failed, at an edge that was waived by name.
    Waived,
}

impl Status {
    /// As tables and texts have it.
    pub fn word(self) -> &'static str {
        match self {
            Status::Pass => "pass",
            Status::Fail => "FAIL",
            Status::Nonfinite => "NONFINITE",
            Status::NotCompared => "not compared",
            Status::Waived => "waived",
        }
    }

    /// Whether it keeps a candidate from passing.
    pub fn failed(self) -> bool {
        matches!(self, Status::Fail | Status::Nonfinite)
    }
}

/// How accurate a kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// As the textbook formulas are, carefully evaluated in f32.
    Standard,
    /// With every avoidable cancellation avoided.
    Exact,
}

impl Grade {
    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Grade::Standard => "standard",
            Grade::Exact => "exact",
        }
    }
}

impl std::fmt::Display for Grade {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Grade {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let grades = [Grade::Standard, Grade::Exact];
        grades
            .into_iter()
            .find(|grade| grade.name() == text)
            .ok_or_else(|| format!("got `{text}`, expected one of standard, exact"))
    }
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
    /// How its tile kernels were written for them: `loops` or `mosaic`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// How many checks there were.
    pub checks: usize,
    /// How many failed.
    pub failed: usize,
    /// How many had no number to hold against a limit.
    #[serde(alias = "compared_nothing")]
    pub not_compared: usize,
    /// The check that needed most of its `κ`; `None` where none has a `κ`.
    pub worst_kappa: Option<WorstKappa>,
    /// Seconds that its runs took, and what they waited for programs that are compiled ahead; `None` where it was not run.
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

/// Two runs of one implementation: on different device counts, or of a batch padded and packed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    /// What was evaluated.
    pub fixture: String,
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Devices of the two runs.
    pub devices: [usize; 2],
    /// Whether the first was of the padded batch, and the other of the packed one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
    /// Outputs with the same bits.
    pub same: Vec<String>,
    /// Outputs with others.
    pub other: Vec<String>,
}
