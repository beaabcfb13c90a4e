//! One kernel before many problems: `assay check`, `assay.check` in Python, and `assay judge` of a folder.

use serde::{Deserialize, Serialize};

use crate::invariance::RelationFinding;
use crate::number::{distinct, quotient, six};
use crate::picture::ErrorPicture;
use crate::programs::CallMemory;
use crate::verdicts::{Explanation, Grade};

/// The result of a campaign: one kernel on many problems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CampaignReport {
    /// Whether problems were judged, and every failure is allowed.
    pub passed: bool,
    /// The name of the kernel.
    pub kernel: String,
    /// The loss in words.
    pub spec: String,
    /// The grade that the kernel was held to.
    pub grade: Grade,
    /// The seed of the deck of problems.
    pub seed: u64,
    /// Whether the sequences of each problem were packed one after another.
    #[serde(default)]
    pub packed: bool,
    /// Whether logp and entropy were asked for by their cotangents, and no loss.
    #[serde(default)]
    pub from_cotangents: bool,
    /// The number of problems that were planned.
    pub cases: u64,
    /// The number of problems that the kernel was given.
    pub tried: u64,
    /// The number of those problems that failed.
    pub failed: u64,
    /// The number of calls of the kernel.
    pub calls: u64,
    /// The seconds that the campaign took.
    pub seconds: f64,
    /// The reason why it stopped before every problem was tried: an interrupt, or its time was over.
    pub stopped: Option<String>,
    /// The outputs that were judged.
    pub outputs: Vec<String>,
    /// The causes of failures that are not allowed.
    pub causes: Vec<FailureCause>,
    /// The causes of failures that are allowed by name.
    pub allowed: Vec<FailureCause>,
    /// The problems that were not tried, with the reason.
    pub skipped: Vec<SkippedProblems>,
    /// The features that the problems covered.
    pub coverage: DeckCoverage,
    /// The time that problems of each size of vocabulary took; sizes of which none was tried are left out.
    #[serde(default)]
    pub costs: Vec<VocabularyCost>,
    /// The number of mutants that it would have caught; `None` if they were not counted.
    pub power: Option<MutationScore>,
    /// The relations in which a token must have the same numbers; empty if none was asked.
    #[serde(default)]
    pub invariance: Vec<RelationFinding>,
    /// The memory that a call takes, for each dtype; empty if it was not asked for.
    #[serde(default)]
    pub memory: Vec<MemoryFinding>,
}

/// The memory that a call takes on one wide problem, and the limit that it was given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryFinding {
    /// The problem: extents and dtype.
    pub problem: String,
    /// The size of its logits, `B·T·V` of the dtype.
    pub logits_bytes: u64,
    /// The most that the peak and what is kept may be together, in units of the logits.
    pub limit: f64,
    /// The memory of a call; `None` if it could not be measured.
    #[serde(default)]
    pub call: Option<CallMemory>,
    /// The error that the kernel raised in place of it.
    #[serde(default)]
    pub raised: Option<String>,
}

/// Failures that are explained alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailureCause {
    /// The gate that failed, or the name of the kernel's fault, such as a crash.
    pub gate: String,
    /// The most telling explanation, in one sentence.
    #[serde(default)]
    pub sentence: String,
    /// The number of problems that failed so.
    pub cases: u64,
    /// The first of those problems, in words.
    pub first: String,
    /// The smallest problem that failed so: extents and dtype.
    pub problem: String,
    /// The problem that failed worst; `None` where no error has a limit.
    #[serde(default)]
    pub worst: Option<WorstProblem>,
    /// The place of the errors in the problem that tells most; `None` if the output has no axis, or there is no output.
    #[serde(default)]
    pub picture: Option<ErrorPicture>,
    /// The values of the smallest problem, if they are few: `logits = [[[0.5, -1.25]]], ids = [[1]], …`.
    #[serde(default)]
    pub values: Option<String>,
    /// The property that all of the problems have and none that passed, with counts; `None` if nothing is known of the kind.
    #[serde(default)]
    pub in_common: Option<String>,
    /// The mutants that fail alike.
    pub like: Vec<MutantName>,
    /// The likely causes, from the pattern of the errors.
    pub diagnoses: Vec<String>,
    /// The losses that the kernel computes instead, each with all its names.
    pub computes: Vec<Vec<String>>,
    /// Whether several losses fit, as no problem distinguishes them.
    pub computes_one_of: bool,
    /// The verdict on the smallest problem; `None` if the kernel returned nothing.
    pub verdict: Option<Explanation>,
    /// The kernel's fault or message, if it returned nothing.
    pub fault: Option<String>,
    /// The number of the signal that ended the kernel's process, if one did.
    pub signal: Option<i32>,
    /// The file with the smallest problem.
    pub repro: Option<String>,
}

impl FailureCause {
    /// Returns the rows of a table of the smallest problem of a cause and its worst: problem, place, expected and actual value, error /
    /// limit. The list is empty if the kernel returned nothing.
    pub fn value_rows(&self) -> Vec<[String; 6]> {
        let Self { problem, worst, verdict, .. } = self;
        let Some(verdict) = verdict else { return Vec::new() };
        let place = |at: &str| if at.is_empty() { "–".to_string() } else { at.to_string() };
        let values = |expected: Option<f64>, actual: Option<f64>| match (expected, actual) {
            (Some(expected), Some(actual)) => distinct(expected, actual),
            // The judge reports the norm or the sum of a difference, whose exact value is 0.
            (None, Some(actual)) => ["–".into(), six(actual)],
            (_, None) => ["a number".into(), "NaN or ∞".into()],
        };
        let over = verdict.error.zip(verdict.limit);
        let over =
            over.map_or("–".into(), |(error, limit)| if error == 0.0 { "0".into() } else { quotient(error / limit) });
        let [expected, actual] = values(verdict.expected, verdict.actual);
        let mut rows = vec![["smallest".into(), problem.clone(), place(&verdict.at), expected, actual, over]];
        if let Some(worst) = worst.as_ref().filter(|worst| worst.problem != *problem) {
            let [expected, actual] = values(worst.expected, worst.actual);
            // The extents, the dtype and the regime; the rest of the label is among the details.
            let problem = worst.problem.split(',').next().unwrap_or_default().to_string();
            let over = quotient(worst.error_over_limit);
            rows.push(["worst".into(), problem, place(&worst.at), expected, actual, over]);
        }
        rows
    }
}

/// The problem of a cause with the largest error / limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstProblem {
    /// The problem in words: extents, dtype, regime and seed.
    pub problem: String,
    /// The largest error / limit of its values.
    pub error_over_limit: f64,
    /// The place of that value, `[b,t,v]`; empty for a scalar.
    #[serde(default)]
    pub at: String,
    /// The exact value; `None` for a norm or a sum, whose exact value is 0.
    #[serde(default)]
    pub expected: Option<f64>,
    /// The value that the kernel returned, or the norm or sum of the difference.
    #[serde(default)]
    pub actual: Option<f64>,
}

/// The name of a mutant, and its bug.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutantName {
    /// The name in the bank of mutants.
    pub mutant: String,
    /// The wrong computation, in words.
    pub does: String,
}

/// Problems that were not tried, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedProblems {
    /// The number of those problems.
    pub cases: u64,
    /// The reason why they were not tried.
    pub why: String,
}

/// The features that all problems of a campaign cover together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeckCoverage {
    /// The number of tokens that count.
    pub tokens: u64,
    /// The number of tokens whose gradient is not all 0.
    pub with_gradient: u64,
    /// The numbers of tokens that a clip holds, at its lower and its upper bound.
    pub clipped: [u64; 2],
    /// The numbers of tokens with `A > 0`, and with `A < 0`.
    pub advantages: [u64; 2],
    /// The numbers of targets with a gradient in the first tile of 128 vocabulary entries, and in the last.
    pub first_and_last_tile: [u64; 2],
    /// The number of sequences without a token that counts.
    pub empty_rows: u64,
    /// The features that a kernel may depend on, the most important first, with the problems that had them.
    pub features: Vec<FeatureCoverage>,
}

/// The problems of a campaign whose vocabularies have a size in a range, and the time that they took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VocabularyCost {
    /// The size of the largest vocabulary that was met in the range; ranges end at 1,024, 16,384 and 65,536.
    pub vocabulary: usize,
    /// The number of problems with such vocabularies.
    pub problems: u64,
    /// The seconds in which they were drawn, answered and judged.
    pub seconds: f64,
}

/// The problems of a campaign that had one feature.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureCoverage {
    /// The name of the feature.
    pub feature: String,
    /// The mistake of kernels that it shows.
    pub reason: String,
    /// The number of problems that had it.
    pub problems: u64,
    /// The number of regimes in which they were drawn.
    pub regimes: u64,
    /// The dtypes in which they were drawn.
    pub dtypes: Vec<String>,
}

/// The mutation score of a campaign: the share of mutants that it rejects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutationScore {
    /// The number of mutants that it rejects.
    pub rejected: usize,
    /// The number of mutants whose bits differ from the correct kernel's on its problems: under this loss, the others cannot show.
    pub exercised: usize,
    /// The mutants that it accepts though their bits differ.
    pub accepted: Vec<MutantName>,
    /// The number of problems that the mutants were run on.
    pub cases: usize,
    /// The options under which the campaign would reject mutants that it accepts; no mutant is in two.
    #[serde(default)]
    pub options: Vec<CatchingOption>,
}

/// An option of a campaign under which it rejects mutants that it accepts without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatchingOption {
    /// The option with its value: `grade=exact`, `shapes=1x33x8`.
    pub option: String,
    /// The names of the mutants that it rejects.
    pub mutants: Vec<String>,
}
