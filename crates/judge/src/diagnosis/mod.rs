//! [`Diagnosis`]: the likely cause of a failure, if the errors of a candidate have the pattern of a known one.
//!
//! ```
//! use assay_judge::diagnosis::Diagnosis;
//! # use assay_core::problem::{Candidate, Dtype, FloatArray};
//! # use assay_core::spec::LossSpec;
//! # use assay_judge::generate::{Recipe, Regime};
//! # use assay_judge::judgeable::Judgeable;
//! # use assay_judge::tolerance::Limits;
//! # let spec = LossSpec::default();
//! # let recipe = Recipe {
//! #     shape: [2, 3, 32],
//! #     dtype: Dtype::F32,
//! #     regime: Regime::Normal,
//! #     seed: 0,
//! #     old_logp_noise_scale: 0.3,
//! #     masked_garbage: false,
//! # };
//! # let problem = recipe.problem(&spec)?;
//! # let reference = problem.evaluate(&spec)?;
//! // A kernel whose gradient is 1.5 times the exact one:
//! let exact: Candidate = reference.outcome().into();
//! let gradient = FloatArray::rounded_from(&(exact.gradient.to_f64() * 1.5), Dtype::F32);
//! let candidate = Candidate { gradient, ..exact };
//! let verdicts = problem.judge(&reference, &candidate.lend(), &Limits::for_class("external")?)?;
//! let causes = problem.diagnose(&reference, &candidate.lend(), &verdicts);
//! assert!(causes.iter().any(|cause| cause.to_string() == "dlogits are 1.5 times what they should be"));
//! assert!(matches!(causes[..], [Diagnosis::ConstantFactor { .. }, ..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod factors;
mod places;
mod rows;
mod tokens;

use std::fmt;

use ndarray::{Dimension, Ix2, Ix3};

use self::factors::{diagnose_dlogits, diagnose_sum_of_gradient, token_factors};
use self::places::diagnose_places;
use super::gate::{Edge, Output};
use super::judge::Verdict;
use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView};
use assay_reference::Reference;
use assay_schema::number::six;
use assay_schema::verdicts::Status;

pub(super) use self::factors::diagnose_factors;
pub(super) use self::tokens::diagnose_tokens;

/// Tokens or sequences whose factor a diagnosis shows.
const EXAMPLES: usize = 3;

/// The factor of a token's gradient, or of its sequence's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenFactor {
    /// The place `[b,t]` of the token.
    pub token: (usize, usize),
    /// The factor, 0 where there are fewer examples.
    pub factor: f64,
}

/// The tokens whose logits are read in place of a token's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherRows {
    /// Logits `[B,T,V]` are read as `[T,B,V]`.
    Transposed,
    /// The logits of the token after it.
    NextToken,
    /// The logits of the token before it.
    TokenBefore,
    /// The logits of the same place in the sequence after it.
    NextSequence,
    /// The logits of the same place in the sequence before it.
    SequenceBefore,
}

impl OtherRows {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 5] =
        [Self::Transposed, Self::NextToken, Self::TokenBefore, Self::NextSequence, Self::SequenceBefore];
}

/// The likely cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Diagnosis {
    /// Only the target has a gradient: all other vocabulary entries are 0.
    OnlyTheTarget,
    /// The gradient is the exact one times a factor.
    ConstantFactor {
        /// The factor of dlogits.
        dlogits: f64,
        /// The factor of the loss, if there is a loss and its factor is not 1.
        loss: Option<f64>,
    },
    /// The gradient of each token is the exact one times a factor, and the factors differ.
    FactorPerToken {
        /// The gradient: dlogits, or dhidden of an LM head.
        output: Output,
        /// The first tokens whose factor is not 1.
        examples: [TokenFactor; EXAMPLES],
        /// The number of tokens whose factor is not 1.
        off: usize,
        /// The number of tokens that have a gradient.
        tokens: usize,
    },
    /// The gradient of each sequence is the exact one times a factor, and the factors differ.
    FactorPerSequence {
        /// The gradient: dlogits, or dhidden of an LM head.
        output: Output,
        /// The first token of the first sequences whose factor is not 1.
        examples: [TokenFactor; EXAMPLES],
        /// The number of sequences whose factor is not 1.
        off: usize,
        /// The number of sequences that have a gradient.
        sequences: usize,
    },
    /// Some vocabulary entries are wrong in every token that has a gradient, and all others are right.
    Columns {
        /// The first wrong entry.
        first: usize,
        /// The last wrong entry.
        last: usize,
        /// The number of entries `V`.
        vocab: usize,
        /// Whether dlogits are 0 there.
        zero: bool,
    },
    /// All tokens of a sequence from some place on are wrong, and all before it are right.
    Tokens {
        /// The first wrong place `t`.
        first: usize,
        /// The number of tokens `T`.
        tokens: usize,
    },
    /// The errors are up to one ulp and all toward 0, as of truncation to this dtype.
    Truncated(Dtype),
    /// The errors are up to one ulp and to both sides, as of two roundings to this dtype, or of one by chance.
    RoundedTwice(Dtype),
    /// The values of an output are those of a narrower dtype than it is stored in.
    StoredWider(Output, Dtype),
    /// The errors of logp, or entropy, are as large as if logits of this dtype were not converted to f32 first.
    NotUpcast(Dtype),
    /// The errors of logp, or of entropy alone, are as large as those of a sum of so many terms, added one by one in f32.
    NaiveSum(usize),
    /// The sums of exponentials that logp tells are numbers of this dtype.
    NarrowSum(Dtype),
    /// The sums of exponentials that logp tells are off by what some vocabulary entries at one end add to them.
    SumOfColumns {
        /// The first of the entries.
        first: usize,
        /// The last of the entries.
        last: usize,
        /// The number of entries `V`.
        vocab: usize,
        /// Whether they are added twice, or not at all.
        twice: bool,
    },
    /// The log-probabilities are those of the tokens' ids by the logits of other tokens.
    OtherRows(OtherRows),
    /// The losses of all wrong tokens are those of log-ratios that are held within some nats of 0.
    HeldRatio {
        /// The bound of the log-ratio's magnitude, in nats.
        log_ratio: f64,
    },
    /// The errors of entropy alone are no larger than those of `lse − Σ p·x` with p rounded as `exp(x − lse)`.
    EntropyDifference {
        /// The logarithm of the sum of exponentials at the largest error, in nats.
        lse: f64,
        /// The entropy there, in nats.
        entropy: f64,
    },
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Diagnosis::OnlyTheTarget => write!(f, "only the target has a gradient: every other column of dlogits is 0"),
            Diagnosis::ConstantFactor { dlogits, loss } => {
                write!(f, "dlogits are {} times what they should be", six(*dlogits))?;
                if let Some(loss) = loss {
                    write!(f, ", the loss {} times", six(*loss))?;
                }
                // A whole number of equal parts is most often divided by once too much, or summed over instead of averaged.
                match integer(1.0 / dlogits) {
                    Some(parts) => {
                        write!(f, ": 1/{parts}, as of accumulation steps or ranks that divide once too much")
                    }
                    None => Ok(()),
                }
            }
            Diagnosis::FactorPerToken { output, examples, off, tokens } => {
                write!(f, "{} of each token are right up to a factor of its own: ", output.name())?;
                write!(f, "{}; {off} of {tokens} tokens are off", listed(examples, *off, "token"))
            }
            Diagnosis::FactorPerSequence { output, examples, off, sequences } => {
                write!(f, "{} of each sequence are right up to a factor of its own: ", output.name())?;
                let listed = listed(examples, *off, "the sequence of token");
                write!(
                    f,
                    "{listed}; {off} of {sequences} sequences are off: a weight, an advantage or a mean of sequences"
                )
            }
            Diagnosis::Columns { first, last, vocab, zero } => {
                let wrong = if *zero { "0" } else { "wrong" };
                if first == last {
                    write!(f, "the dlogit of vocabulary entry {first} of {vocab} is {wrong}")?;
                } else {
                    write!(f, "dlogits of vocabulary entries {first} to {last} of {vocab} are {wrong}")?;
                }
                write!(f, ", all others are right: ")?;
                write!(f, "{}", if last + 1 == *vocab { "the last tile, or its mask" } else { "a tile or a shard" })
            }
            Diagnosis::Tokens { first, tokens } => {
                write!(
                    f,
                    "dlogits of the tokens from t = {first} on, of {tokens}, are wrong, those before are right: "
                )?;
                write!(f, "the last block of tokens, or its mask")
            }
            Diagnosis::Truncated(dtype) => {
                write!(f, "every error of dlogits is toward 0, by up to one ulp: rounded to {dtype} by truncation. ")?;
                write!(f, "Triton's interpreter does that, and GPUs do not")
            }
            Diagnosis::RoundedTwice(dtype) => {
                write!(
                    f,
                    "errors of dlogits are up to one ulp of {dtype}, to both sides: rounded twice, or by chance "
                )?;
                write!(f, "(stochastic rounding)")
            }
            Diagnosis::StoredWider(output, dtype) => {
                write!(f, "every value of {} is one of {dtype}, stored wider: store it as {dtype}, ", output.name())?;
                write!(f, "or do not round it")
            }
            Diagnosis::NotUpcast(dtype) => {
                write!(f, "these are the errors of {dtype} logits that are not converted to f32 before their softmax")
            }
            Diagnosis::NaiveSum(terms) => {
                write!(f, "these are the errors of a sum of {terms} terms, added one by one in f32")
            }
            Diagnosis::NarrowSum(dtype) => {
                write!(f, "the sums of exponentials are numbers of {dtype}: they are added up or kept in {dtype}")
            }
            Diagnosis::SumOfColumns { first, last, vocab, twice } => {
                let entries = if first == last { "entry" } else { "entries" };
                write!(f, "the sums of exponentials {} vocabulary {entries} ", if *twice { "have" } else { "lack" })?;
                write!(f, "{first}")?;
                if first != last {
                    write!(f, " to {last}")?;
                }
                let end = if last + 1 == *vocab { "the last tile, or a shard" } else { "the first tile, or a shard" };
                write!(f, " of {vocab}{}: {end}", if *twice { " twice" } else { "" })
            }
            Diagnosis::OtherRows(rows) => {
                let of_other = match rows {
                    OtherRows::Transposed => "logits that are read as [T,B,V], not [B,T,V]",
                    OtherRows::NextToken => "the logits of the token after it",
                    OtherRows::TokenBefore => "the logits of the token before it",
                    OtherRows::NextSequence => "the logits of the next sequence",
                    OtherRows::SequenceBefore => "the logits of the sequence before it",
                };
                write!(f, "logp of each token is that of its id by {of_other}")
            }
            Diagnosis::HeldRatio { log_ratio } => {
                write!(f, "the loss of every wrong token is that of a log-ratio held to ±{}: ", six(*log_ratio))?;
                write!(f, "a clamp that this loss has not")
            }
            Diagnosis::EntropyDifference { lse, entropy } => {
                write!(
                    f,
                    "these are the errors of an entropy as lse − Σ p·x, where two numbers near {lse:.4} cancel to "
                )?;
                write!(f, "{entropy:.4}, if each p is exp(x − lse): p of a softmax, or x − max for x, loses less")
            }
        }
    }
}

impl Diagnosis {
    /// Whether two diagnoses, of different problems, are one mistake: the same pattern, at places that depend on the problem.
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::ConstantFactor { dlogits: a, .. }, Self::ConstantFactor { dlogits: b, .. }) => {
                (a - b).abs() < 1e-2 * a.abs()
            }
            (
                Self::Columns { last, vocab, zero, .. },
                Self::Columns { last: other_last, vocab: other_vocab, zero: other_zero, .. },
            ) => zero == other_zero && (last + 1 == *vocab) == (other_last + 1 == *other_vocab),
            (
                Self::SumOfColumns { last, vocab, twice, .. },
                Self::SumOfColumns { last: other_last, vocab: other_vocab, twice: other_twice, .. },
            ) => twice == other_twice && (last + 1 == *vocab) == (other_last + 1 == *other_vocab),
            (Self::HeldRatio { log_ratio: a }, Self::HeldRatio { log_ratio: b }) => (a - b).abs() < 1e-2,
            (Self::Tokens { .. }, Self::Tokens { .. })
            | (Self::NaiveSum(_), Self::NaiveSum(_))
            | (Self::EntropyDifference { .. }, Self::EntropyDifference { .. })
            | (Self::FactorPerToken { .. }, Self::FactorPerToken { .. })
            | (Self::FactorPerSequence { .. }, Self::FactorPerSequence { .. }) => true,
            _ => self == other,
        }
    }
}

/// Diagnoses the failures of a candidate on logits; empty if all verdicts passed.
pub(super) fn diagnose_logits(
    reference: &Reference,
    candidate: &Candidate<FloatView<Ix3>>,
    verdicts: &[Verdict],
) -> Vec<Diagnosis> {
    let mut all: Vec<Diagnosis> = diagnose_tokens(reference, candidate, verdicts).into_iter().collect();
    let dtype = candidate.gradient.dtype();
    let row = |b, t| (reference.dlogits_row(b, t), candidate.gradient.row(b, t));
    if let [Diagnosis::NotUpcast(narrow)] = all[..]
        && candidate.logp.as_ref().is_some_and(|logp| logp.dtype() != narrow)
        && is_narrow(reference, candidate.logp.as_ref(), narrow)
        && (!failed(verdicts, Output::Dlogits) || token_factors(reference, dtype, row).is_some())
    {
        // A softmax in a narrow dtype has wrong probabilities. Where these are right, up to what the rounded logp makes of a ratio,
        // logp alone is rounded.
        all = vec![Diagnosis::StoredWider(Output::Logp, narrow)];
    }
    if failed(verdicts, Output::Dlogits) {
        let is_nonfinite = |verdict: &Verdict| verdict.status == Status::Nonfinite;
        // Values that are not finite are no pattern of numbers that are.
        if !verdicts.iter().any(|verdict| verdict.gate.output == Output::Dlogits && is_nonfinite(verdict)) {
            let loss = candidate.loss.as_ref().map(FloatArray::value);
            all.extend(diagnose_dlogits(reference, &candidate.gradient, loss));
            if all.is_empty() {
                all.extend(diagnose_sum_of_gradient(reference, &candidate.gradient));
            }
            // Wrong probabilities make a factor of each token, which is no cause of its own.
            if all.is_empty() && !failed(verdicts, Output::Logp) {
                all.extend(diagnose_factors(reference, Output::Dlogits, dtype, row));
            }
        }
        if !all.contains(&Diagnosis::OnlyTheTarget) {
            all.extend(diagnose_places(reference, &candidate.gradient));
        }
    }
    all
}

/// Whether a gate of `output` failed at tokens that count: what is under the mask has no pattern of errors.
fn failed(verdicts: &[Verdict], output: Output) -> bool {
    let of_output = |verdict: &&Verdict| verdict.gate.output == output && verdict.gate.edge != Some(Edge::Masked);
    verdicts.iter().filter(of_output).any(|verdict| verdict.status.failed())
}

/// Whether all log-probabilities of tokens that count are values of `dtype`, however they are stored.
fn is_narrow(reference: &Reference, logp: Option<&FloatArray<Ix2>>, dtype: Dtype) -> bool {
    let Some(logp) = logp else { return false };
    let shape = reference.shape();
    let counting = ndarray::indices((shape.batch, shape.tokens)).into_iter();
    let mut values = counting.filter(|at| reference.token(at.0, at.1).is_some()).map(|(b, t)| logp.at(b, t));
    // 0 is a number of every dtype.
    let mut is_any = false;
    values.all(|value| {
        is_any |= value != 0.0;
        dtype.round(value) == value
    }) && is_any
}

/// Returns `0.5000 at token [0,1], 2.0000 at token [0,2]`.
fn listed(examples: &[TokenFactor; EXAMPLES], off: usize, place: &str) -> String {
    let one = |of: &TokenFactor| format!("{:.4} at {place} [{},{}]", of.factor, of.token.0, of.token.1);
    examples.iter().take(off).map(one).collect::<Vec<_>>().join(", ")
}

/// Returns the whole number from 2 on that `x` is, to within what a sum in f32 may be off by.
fn integer(x: f64) -> Option<f64> {
    let whole = x.round();
    ((2.0..=4096.0).contains(&whole) && (x - whole).abs() < 1e-3 * whole).then_some(whole)
}

/// Finds the narrower dtype that all values of an output are of.
pub(super) fn stored_wider<D: Dimension>(output: Output, values: &FloatView<D>) -> Option<Diagnosis> {
    if !matches!(values.dtype(), Dtype::F32 | Dtype::F64) {
        return None;
    }
    let values = values.to_f64();
    // A handful of values may be round by chance: at least 16 finite ones other than 0 are asked for.
    let finite = || values.iter().copied().filter(|x| x.is_finite() && *x != 0.0);
    let of = |dtype: Dtype| finite().all(|x| dtype.round(x) == x);
    let narrow =
        (finite().take(16).count() == 16).then(|| [Dtype::Bf16, Dtype::F16].into_iter().find(|dtype| of(*dtype)));
    Some(Diagnosis::StoredWider(output, narrow??))
}
