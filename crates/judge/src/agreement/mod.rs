//! [`compare_logp`]: whether a trainer's and a sampler's log-probabilities of the same tokens are as near as rounding allows, and if not,
//! what explains the difference.
//!
//! Two correct programs that compute `ℓ = log_softmax(z/T)[id]` from the same logits may differ by the sum of their limits, the *floor*.
//! What is beyond it has a reason, and each reason has numbers of its own: a side that forgets the temperature, renormalises over its
//! top-p set or rounds its logits is that computation, exactly, within the same limits. So each side is compared with every computation
//! that is one difference from the declared one, and then with those that are two.
//!
//! ```
//! use assay_core::problem::{Advantages, Extra, FloatArray, Problem};
//! use assay_core::spec::LossSpec;
//! use assay_judge::agreement::{LogpQuestion, SharedLogits, compare_logp};
//! use ndarray::{Array2, Array3};
//!
//! // Logits z_v = ln(v + 1) over three entries: the probabilities are 1/6, 2/6 and 3/6.
//! let logits = Array3::from_shape_fn((1, 2, 3), |(.., v)| (v as f32 + 1.0).ln());
//! let problem = Problem {
//!     logits: logits.into(),
//!     ids: ndarray::arr2(&[[0, 2]]),
//!     mask: Array2::from_elem((1, 2), true),
//!     advantages: Advantages::Token(Array2::zeros((1, 2))),
//!     old_logp: None,
//!     ref_logp: None,
//!     extra: Extra::default(),
//! };
//! let side = |p: [f32; 2]| -> FloatArray<_> { ndarray::arr2(&[p.map(f32::ln)]).into() };
//! let mut question = LogpQuestion::new(side([1.0 / 6.0, 0.5]), side([1.0 / 6.0, 0.5]), problem.mask.clone());
//! question.logits = Some((LossSpec::default(), SharedLogits::Logits(problem)));
//! assert_eq!(compare_logp(question.clone())?.agrees, Some(true));
//!
//! // A sampler whose ids are one too high.
//! question.sampler = side([2.0 / 6.0, 0.5]);
//! assert_eq!(compare_logp(question)?.agrees, Some(false));
//! # Ok::<(), assay_judge::agreement::AgreementError>(())
//! ```

mod computation;
mod figures;
mod kept;
mod rows;
mod search;
mod text;

use std::fmt;

use ndarray::{Array2, Ix2};

use crate::gate::Output;
use crate::tolerance::{Grade, Limits};
use assay_core::problem::{Dtype, FloatArray, HeadProblem, Problem, ProblemError};
use assay_core::spec::LossSpec;
use assay_core::text::ShownNumber;
use assay_schema::agreement::{LogpAgreement, RoundingFloor, SideFinding, TokenPair};
use computation::LimitFactors;
use rows::AgreementRows;
use search::{ComputationSearch, SideExplanation};

pub use text::agreement_text;

/// The tokens that a list of the worst has.
const WORST: usize = 5;

/// The tokens that a picture has.
const POINTS: usize = 1500;

/// The logits that both sides compute from: given, or a product of hidden states and an LM head.
#[derive(Clone, Debug)]
pub enum SharedLogits {
    /// The logits, with the tokens.
    Logits(Problem),
    /// The hidden states and the LM head.
    Head(HeadProblem),
}

/// The parameters that a sampler was given, which a side may have applied before it took the log-probability.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingParameters {
    /// The number of largest entries that are kept.
    pub top_k: Option<usize>,
    /// The probability mass that is kept.
    pub top_p: Option<f64>,
    /// The share of the largest probability that an entry must have.
    pub min_p: Option<f64>,
}

/// Two arrays of log-probabilities, and what they are compared by.
#[derive(Clone, Debug)]
pub struct LogpQuestion {
    /// The trainer's log-probabilities, `[B,T]`, nats.
    pub trainer: FloatArray<Ix2>,
    /// The sampler's log-probabilities, `[B,T]`, nats.
    pub sampler: FloatArray<Ix2>,
    /// The tokens that count, `[B,T]`.
    pub mask: Array2<bool>,
    /// The advantages of the tokens, `[B,T]`; only their correlation with the difference is told.
    pub advantages: Option<Array2<f64>>,
    /// The logits, and the spec that says how a log-probability follows from them; of the spec only the transform of logits, the
    /// support and the temperature are read.
    pub logits: Option<(LossSpec, SharedLogits)>,
    /// The dtypes that the trainer's and the sampler's own logits have, if not that of the logits given.
    pub logits_dtypes: [Option<Dtype>; 2],
    /// The parameters that the sampler was given.
    pub sampling: SamplingParameters,
    /// The bounds of the ratio `exp(trainer − sampler)` of the trainer's clip.
    pub ratio_bounds: [f64; 2],
}

impl LogpQuestion {
    /// Creates the question for two arrays without logits, with the ratio's bounds at 0.8 and 1.2.
    pub fn new(trainer: FloatArray<Ix2>, sampler: FloatArray<Ix2>, mask: Array2<bool>) -> Self {
        Self {
            trainer,
            sampler,
            mask,
            advantages: None,
            logits: None,
            logits_dtypes: [None; 2],
            sampling: SamplingParameters::default(),
            ratio_bounds: [0.8, 1.2],
        }
    }
}

/// The two programs that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogpSide {
    /// The program that trains the policy.
    Trainer,
    /// The engine that sampled the tokens.
    Sampler,
}

impl fmt::Display for LogpSide {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            LogpSide::Trainer => "trainer",
            LogpSide::Sampler => "sampler",
        })
    }
}

/// A pair that cannot be compared.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AgreementError {
    /// An array has another shape than the trainer's.
    #[error("`{field}`: got shape {given:?}, expected {expected:?}, that of `trainer`")]
    Shape {
        /// The name of the array.
        field: &'static str,
        /// The shape of the array.
        given: Vec<usize>,
        /// The shape of the trainer's array.
        expected: Vec<usize>,
    },
    /// The mask leaves no token that counts.
    #[error("`mask`: got no token that counts, expected one at least")]
    NoTokens,
    /// A sampling parameter is out of range.
    #[error("`{field}`: got {}, expected {expected}", ShownNumber(*given))]
    Parameter {
        /// The name of the parameter.
        field: &'static str,
        /// The value of the parameter.
        given: f64,
        /// The range of the parameter.
        expected: &'static str,
    },
    /// The logits do not fit the tokens or the spec.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl LogpQuestion {
    fn check(&self) -> Result<(), AgreementError> {
        let expected = self.trainer.shape();
        let advantages = self.advantages.as_ref().map(|advantages| ("advantages", advantages.shape()));
        let logits = self.logits.as_ref().map(|(_, logits)| match logits {
            SharedLogits::Logits(problem) => ("ids", problem.ids.shape()),
            SharedLogits::Head(problem) => ("ids", problem.ids.shape()),
        });
        let arrays = [Some(("sampler", self.sampler.shape())), Some(("mask", self.mask.shape())), advantages, logits];
        for (field, given) in arrays.into_iter().flatten() {
            if given != expected {
                return Err(AgreementError::Shape { field, given: given.to_vec(), expected: expected.to_vec() });
            }
        }
        let SamplingParameters { top_k, top_p, min_p } = self.sampling;
        let share = |x: &f64| *x > 0.0 && *x <= 1.0;
        if let Some(k) = top_k.filter(|k| *k == 0) {
            return Err(AgreementError::Parameter { field: "top_k", given: k as f64, expected: "an integer ≥ 1" });
        }
        for (field, given) in [("top_p", top_p), ("min_p", min_p)] {
            if let Some(given) = given.filter(|x| !share(x)) {
                return Err(AgreementError::Parameter { field, given, expected: "0 < p ≤ 1" });
            }
        }
        let [low, high] = self.ratio_bounds;
        if !(low > 0.0 && low < 1.0 && high > 1.0 && high.is_finite()) {
            let (field, expected) = ("ratio_bounds", "0 < low < 1 < high");
            return Err(AgreementError::Parameter { field, given: if low < 1.0 { high } else { low }, expected });
        }
        Ok(())
    }
}

/// Compares the two sides, and looks for what explains their difference.
///
/// # Errors
/// [`AgreementError`] if the arrays do not fit each other, no token counts, or a parameter is out of range.
pub fn compare_logp(question: LogpQuestion) -> Result<LogpAgreement, AgreementError> {
    question.check()?;
    let LogpQuestion { trainer, sampler, mask, advantages, logits, logits_dtypes, sampling, ratio_bounds } = question;
    // Take the tokens that count, and set those apart that have no number on a side.
    let counted = mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
    let pair =
        |(b, t): (usize, usize)| TokenPair { b, t, trainer: trainer.at(b, t), sampler: sampler.at(b, t), floor: None };
    let finite = |pair: &TokenPair| pair.trainer.is_finite() && pair.sampler.is_finite();
    let (mut pairs, nonfinite): (Vec<TokenPair>, Vec<TokenPair>) = counted.map(pair).partition(finite);
    if pairs.is_empty() && nonfinite.is_empty() {
        return Err(AgreementError::NoTokens);
    }

    // Ask what each side computes, and how far apart rounding alone may put them.
    let dtypes = [trainer.dtype(), sampler.dtype()];
    let explained = match logits {
        Some((spec, logits)) => {
            let limits = Limits::external(Grade::Standard);
            let rows = AgreementRows::new(&spec, logits, &limits)?;
            Some(explain(&rows, &mut pairs, dtypes, logits_dtypes, sampling, &limits))
        }
        None => None,
    };
    let floor = explained.as_ref().filter(|_| !pairs.is_empty()).map(|_| figures::floor(&pairs, ratio_bounds));

    let advantages = advantages.as_ref();
    let mut by_size: Vec<&TokenPair> = pairs.iter().collect();
    by_size.sort_by(|a, b| figures::size(b).total_cmp(&figures::size(a)));
    // A picture has the worst tokens, and evenly some of the rest.
    let stride = by_size.len().div_ceil(POINTS).max(1);
    let in_picture = |(i, pair): (usize, &&TokenPair)| (i < POINTS / 3 || i % stride == 0).then(|| (*pair).clone());
    let points: Vec<TokenPair> = by_size.iter().enumerate().filter_map(in_picture).take(POINTS).collect();
    let worst: Vec<TokenPair> = by_size.iter().take(WORST).map(|pair| (*pair).clone()).collect();
    let sides = explained.unwrap_or_default();
    let agrees = (!sides.is_empty()).then(|| sides.iter().all(|side| side.declared) && nonfinite.is_empty());
    let mut agreement = LogpAgreement {
        agrees,
        conclusion: String::new(),
        tokens: (pairs.len() + nonfinite.len()) as u64,
        nonfinite_tokens: nonfinite.len() as u64,
        nonfinite: nonfinite.into_iter().take(WORST).collect(),
        figures: figures::figures(&pairs, ratio_bounds),
        floor,
        sides,
        positions: figures::positions(&pairs),
        sequences: figures::sequences(&pairs),
        trends: figures::trends(&pairs, advantages),
        worst,
        points,
    };
    agreement.conclusion = text::conclusion(&agreement);
    Ok(agreement)
}

/// Finds what each side computes, and notes the floor of every token.
fn explain(
    rows: &AgreementRows,
    pairs: &mut [TokenPair],
    dtypes: [Dtype; 2],
    logits_dtypes: [Option<Dtype>; 2],
    sampling: SamplingParameters,
    limits: &Limits,
) -> Vec<SideFinding> {
    let given = rows.problem().logits.dtype();
    let temperature = rows.spec().temperature.number();
    let mut sides = Vec::new();
    for (side, (stored, logits_dtype)) in
        [LogpSide::Trainer, LogpSide::Sampler].into_iter().zip(dtypes.into_iter().zip(logits_dtypes))
    {
        let factors = LimitFactors {
            kappa: limits.kappa(Output::Logp),
            offset: limits.offset(),
            lanes: false,
            // Logits of the given dtype, or of a finer one, lose nothing more.
            declared: logits_dtype.filter(|dtype| *dtype != given && dtype.size() <= given.size()),
        };
        let number = |pair: &TokenPair| match side {
            LogpSide::Trainer => ((pair.b, pair.t), pair.trainer),
            LogpSide::Sampler => ((pair.b, pair.t), pair.sampler),
        };
        let numbers: Vec<((usize, usize), f64)> = pairs.iter().map(number).collect();
        let search = ComputationSearch::new(rows, &numbers, stored, factors, sampling);
        let declared = search.words();
        let SideExplanation { computations, is_declared, tokens } = search.run();
        let by_place: std::collections::HashMap<(usize, usize), f64> =
            tokens.iter().map(|token| (token.at, token.limit)).collect();
        for pair in pairs.iter_mut() {
            pair.floor = Some(pair.floor.unwrap_or(0.0) + by_place[&(pair.b, pair.t)]);
        }
        sides.push(SideFinding {
            side: side.to_string(),
            declared: is_declared,
            computes: computations
                .iter()
                .map(|(computation, _)| computation.describe(&declared, temperature))
                .collect(),
            declared_error: tokens.first().map_or(0.0, |token| token.declared_error),
            explained_error: computations.first().map(|(_, error)| *error),
        });
    }
    sides
}
