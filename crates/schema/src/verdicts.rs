//! The judge's verdicts: what `assay replay`, `gradcheck` and `judge` write.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// All checks of one command.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdicts {
    /// Whether every check passed, and each run with gradients compared one.
    pub pass: bool,
    /// The upper edges of the histograms' buckets, in ulp; the last bucket is open and has none.
    #[serde(default)]
    pub ulp_edges: Vec<f64>,
    /// The checks, in the order they were made.
    pub checks: Vec<GateCheck>,
    /// The checks that were not made, each with the reason.
    #[serde(default)]
    pub ignored: Vec<IgnoredCheck>,
    /// The likely causes of failures, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnoses: Vec<String>,
    /// A summary per implementation and device count, if a command runs several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub implementations: Vec<ImplementationSummary>,
    /// The comparisons of two runs bit by bit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invariance: Vec<BitComparison>,
}

/// One gate of one run against its limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateCheck {
    /// The problem: a fixture with its logits and old log-probabilities, or a generated problem.
    pub fixture: String,
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The number of devices that it ran on.
    #[serde(default = "one")]
    pub devices: usize,
    /// The lowering of its tile kernels: `loops` or `mosaic`; `None` for kernels of another kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// The output, the way it was compared, and its edge, such as `dlogits row_l2 at overflow`.
    pub output: String,
    /// The dtype that the output was returned in.
    #[serde(default)]
    pub dtype: Option<String>,
    /// The dtype that the problem promises for it: a coarser output is judged as if it were of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<String>,
    /// The better of the grades that it reaches; `None` if it reaches none, or nothing was compared.
    #[serde(default)]
    pub grade: Option<Grade>,
    /// The reason why it is not of grade `exact`, if `standard` was asked for and is the better one reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_of_exact: Option<String>,
    /// The number of tokens whose entropy equals the quantile of `top_entropy` within rounding, if nothing was compared for them; not
    /// written.
    #[serde(skip)]
    pub open_entropies: Option<usize>,
    /// The quotient error / limit of the worst value; `None` if nothing was compared, or a value is NaN or ∞ that should not be.
    #[serde(default, rename = "share")]
    pub error_over_limit: Option<f64>,
    /// The error of the comparison with the largest error / limit; `None` if nothing was compared.
    pub worst: Option<f64>,
    /// The limit of that comparison.
    pub limit: Option<f64>,
    /// The place of that comparison, such as `[b,t,v]`; empty for scalars.
    #[serde(default)]
    pub at: String,
    /// The decision: pass, fail, not finite, not compared or waived.
    pub verdict: Status,
    /// The `κ` that the output needed; NaN if no `κ` would do.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub kappa_needed: f64,
    /// The `κ` that it is allowed; `None` if no tolerance applies.
    pub kappa_allowed: Option<f64>,
    /// The number of elements by their error in ulp: up to each of [`Verdicts::ulp_edges`], and beyond the last; `None` for outputs
    /// that are not compared element by element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ulp: Option<Vec<u64>>,
    /// The first token that is NaN or ∞ as the reference is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonfinite_as_in_reference: Option<String>,
    /// The number of values, or rows, without a comparison: they have no finite limit, or a row has a value that is not finite.
    #[serde(default)]
    pub not_compared: u64,
    /// Whether a gradient was held against a limit; `None` if the output is no gradient. Not written.
    #[serde(skip)]
    pub compared_gradient: Option<bool>,
    /// The name of the outputs that share a line of a table while they pass, such as `metrics`. Not written.
    #[serde(skip)]
    pub family: Option<&'static str>,
}

impl GateCheck {
    /// Sets the number of devices of the run, and the lowering of its tile kernels.
    #[must_use]
    pub fn on_devices(self, devices: usize, lowering: Option<&str>) -> Self {
        Self { devices, lowering: lowering.map(String::from), ..self }
    }

    /// Names the run: `tile-two-pass ×4, loops`.
    pub fn run(&self) -> String {
        with_lowering(on_devices(&self.implementation, self.devices), self.lowering.as_deref())
    }
}

/// Names an implementation with its device count, `xla-rows ×4`; a single device is left out.
pub fn on_devices(id: &str, devices: usize) -> String {
    if devices == 1 { id.into() } else { format!("{id} ×{devices}") }
}

/// Adds the lowering of tile kernels to a name: `tile-one-pass, loops`.
pub fn with_lowering(name: String, lowering: Option<&str>) -> String {
    match lowering {
        Some(lowering) => format!("{name}, {lowering}"),
        None => name,
    }
}

fn one() -> usize {
    1
}

/// A verdict in words and numbers, as a terminal, a page and Python show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The decision: pass, fail, not finite, not compared or waived.
    pub status: Status,
    /// The implementation and the gate that were judged.
    pub of: String,
    /// The gate alone, such as `dlogits row_l2`.
    pub gate: String,
    /// The dtype that the output was returned in.
    pub dtype: String,
    /// The place of the worst value, `[b,t,v]`; empty for a scalar.
    pub at: String,
    /// The exact value; `None` for a norm or a sum, or if it is not finite.
    pub expected: Option<f64>,
    /// The value judged, or that norm or sum; `None` if it is not finite.
    pub actual: Option<f64>,
    /// The error `|actual − expected|`.
    pub error: Option<f64>,
    /// The largest error allowed.
    pub limit: Option<f64>,
    /// The explanation in words, line by line.
    pub lines: Vec<ExplanationLine>,
    /// The bits, the roundings and the distribution of the errors, line by line.
    #[serde(default)]
    pub details: Vec<ExplanationLine>,
}

/// A line of an explanation, such as `error  3.2e-5, 1.4 times the limit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplanationLine {
    /// The subject of the line, one word.
    pub name: String,
    /// The statement about it.
    pub text: String,
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        // `{:#}` adds the details.
        let details = if f.alternate() { self.details.as_slice() } else { &[] };
        writeln!(f, "{} {}, {}", self.status.word(), self.of, self.dtype)?;
        let mut lines = self.lines.iter().chain(details);
        lines.try_for_each(|ExplanationLine { name, text }| writeln!(f, "  {name:<9} {text}"))
    }
}

/// The decision on one gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Every value is within its limit.
    Pass,
    /// A value is beyond its limit, or finite where the reference is not.
    Fail,
    /// A value is NaN or ∞ where the reference is finite.
    Nonfinite,
    /// No number was held against a limit: no token counts, or those that do are NaN or ∞ as they may be.
    NotCompared,
    /// The gate failed, at an edge that was waived by name.
    Waived,
}

impl Status {
    /// Returns the word that tables and texts use.
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

/// The accuracy that a kernel is held to, and reaches; `exact` is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// As accurate as the textbook formulas, carefully evaluated in f32.
    Standard,
    /// As accurate as formulas without any avoidable cancellation.
    Exact,
}

impl Grade {
    /// Returns the name as users type it.
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

/// A check that was not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IgnoredCheck {
    /// The check, such as the name of an output, or a problem with an implementation.
    pub what: String,
    /// The reason why it was not made.
    pub why: String,
    /// The implementation, with its devices, that was not run. Not written.
    #[serde(skip)]
    pub not_run: Option<String>,
}

/// The summary of one implementation's checks on one device count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImplementationSummary {
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The number of devices that it ran on.
    pub devices: usize,
    /// The lowering of its tile kernels: `loops` or `mosaic`; `None` for kernels of another kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// The number of checks.
    pub checks: usize,
    /// The number of checks that failed.
    pub failed: usize,
    /// The number of checks in which no number was held against a limit.
    #[serde(alias = "compared_nothing")]
    pub not_compared: usize,
    /// The check with the largest error / limit; `None` if nothing was compared.
    #[serde(rename = "worst_kappa")]
    pub worst: Option<WorstCheck>,
    /// The seconds that its runs took, with the wait for programs that are compiled ahead; `None` if it was not run.
    pub run_s: Option<f64>,
}

/// The check with the largest error / limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstCheck {
    /// The quotient error / limit; ∞ if a value is NaN or ∞ that should not be, which is NaN when it is read again.
    #[serde(default = "nan", deserialize_with = "or_nan", rename = "share")]
    pub error_over_limit: f64,
    /// The output and how it was compared.
    pub output: String,
    /// The problem.
    pub fixture: String,
}

/// A comparison of two runs bit by bit: on different device counts, or of a batch padded and packed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitComparison {
    /// The problem.
    pub fixture: String,
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The device counts of the two runs.
    pub devices: [usize; 2],
    /// Whether the first run was of the padded batch, and the other of the packed one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
    /// The outputs with the same bits in both runs.
    pub same: Vec<String>,
    /// The outputs with different bits.
    pub other: Vec<String>,
}
