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

use std::fmt;

use ndarray::{Dimension, Ix2, Ix3};

use super::U;
use super::gate::{Edge, Output};
use super::judge::Verdict;
use super::metric::half_ulp;
use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView};
use assay_reference::{Reference, Token};
use assay_schema::number::six;
use assay_schema::verdicts::Status;

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

/// The roundings of a probability besides that of `lse`, and of the sum that it goes into.
const ROUNDINGS: f64 = 20.0;

/// Diagnoses the softmax: from the errors of logp, or if that is right, of entropy.
pub(super) fn diagnose_tokens<G>(
    reference: &Reference,
    candidate: &Candidate<G>,
    verdicts: &[Verdict],
) -> Option<Diagnosis> {
    let of_logp = failed(verdicts, Output::Logp);
    if !of_logp && !failed(verdicts, Output::Entropy) {
        return None;
    }
    let values = if of_logp { &candidate.logp } else { &candidate.entropy }.as_ref()?;
    let (shape, dtype) = (reference.shape(), reference.problem().logits.dtype());
    // The largest error, and the errors that known causes would have at most.
    let (mut error, mut coarse, mut of_sum, mut of_difference) = (0.0, 0.0, 0.0, 0.0);
    let mut difference = None;
    // Roundings go both ways; what is lost of a sum makes every log-probability too large.
    let mut signs = [0, 0];
    let mut explained_by_sum = true;
    // Tokens whose values are not finite have no error to look at.
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let exact = if of_logp { token.inputs.logp } else { token.entropy };
        let signed = values.at(b, t) - exact;
        let own = signed.abs();
        // A value that is not finite has lost what the others might show.
        if !own.is_finite() {
            return None;
        }
        if signed != 0.0 {
            signs[usize::from(signed > 0.0)] += 1;
        }
        // lse − Σ p·z is off by lse's rounding, a few more of each p, and as much of Σ p·z as no p sums up to 1.
        let stats = &token.entropy_softmax.stats;
        let (lse, mean) = (stats.max + stats.log_sum, stats.max - stats.mean_gap);
        if own >= error {
            difference = Some(Diagnosis::EntropyDifference { lse, entropy: token.entropy });
        }
        of_difference = f64::max(of_difference, U * (lse.abs() + ROUNDINGS) * (1.0 + mean.abs()));
        error = f64::max(error, own);
        // A softmax in the logits' own dtype is off by up to four half ulps of its largest logit; a sum of V terms that
        // rounds at each step is off by up to V·u times its size.
        let size = token.logp_softmax.stats.max.abs().max(token.inputs.logp.abs());
        coarse = f64::max(coarse, 4.0 * half_ulp(size, dtype));
        let sum = if of_logp { 1.0 } else { token.entropy };
        let most = U * shape.vocab as f64 * sum;
        of_sum = f64::max(of_sum, most);
        // An error that such a sum could have is looked at closely: the sum is added up, and must have this very error.
        if of_logp && shape.vocab >= LONG_SUM && own <= most {
            let predicted = -one_by_one_error(reference, (b, t), token).ln_1p();
            explained_by_sum &= (signed - predicted).abs() <= 0.25 * own + 4.0 * U * (1.0 + token.inputs.logp.abs());
        }
    }
    let narrow = matches!(dtype, Dtype::Bf16 | Dtype::F16);
    // Values that are all of the logits' dtype were made in it, whatever the size of their errors.
    if of_logp && matches!(dtype, Dtype::Bf16 | Dtype::F16) && is_narrow(reference, candidate.logp.as_ref(), dtype) {
        return Some(Diagnosis::NotUpcast(dtype));
    }
    if of_logp && let Some(sums) = diagnose_sums(reference, candidate.logp.as_ref()?) {
        return Some(sums);
    }
    // The size of the largest error alone decides between the two causes: within a factor of 16 of what a narrow
    // softmax would have, or below the worst of a sum one by one.
    match () {
        () if narrow && (coarse / 16.0..=coarse).contains(&error) && go_both_ways(signs) => {
            Some(Diagnosis::NotUpcast(dtype))
        }
        // A difference that may be off by more, as around logits of 10⁴, cannot be recognised by the size of its error.
        () if !of_logp && error <= of_difference && of_difference < 1e-2 => difference,
        // A sum of fewer terms has too small an error to be a cause.
        () if shape.vocab >= LONG_SUM && error <= of_sum && explained_by_sum => Some(Diagnosis::NaiveSum(shape.vocab)),
        () => None,
    }
}

/// The error of a log-probability, in units of `u·(1 + |logp|)`, up to which f32 alone may be off.
const OF_F32: f64 = 16.0;

/// The relative error of a sum from which on a log-probability tells the sum: finer ones are hidden by the rounding of f32.
const TELLS_SUM: f64 = 1e-4;

/// Diagnoses the sums of exponentials that wrong log-probabilities tell: each is a number of a narrow dtype, or all are off by what the
/// same vocabulary entries add to them.
fn diagnose_sums(reference: &Reference, logp: &FloatArray<Ix2>) -> Option<Diagnosis> {
    let shape = reference.shape();
    let mut told = 0;
    let mut narrow = vec![Dtype::Bf16, Dtype::F16];
    // For entries at the end and at the beginning the boundaries that explain all tokens so far.
    let mut boundaries = [(0, shape.vocab); 2];
    let mut twice = None;
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let signed = logp.at(b, t) - token.inputs.logp;
        let rounding = OF_F32 * U * (1.0 + token.inputs.logp.abs());
        if signed.abs() <= rounding {
            continue;
        }
        // ln Σ' = ln Σ − (logp' − logp): the sum's relative error.
        let error = (-signed).exp_m1();
        if error.abs() < TELLS_SUM || rounding > error.abs() / 8.0 {
            continue;
        }
        if *twice.get_or_insert(error > 0.0) != (error > 0.0) {
            boundaries = [(1, 0); 2];
        }
        told += 1;
        let sum = token.logp_softmax.stats.log_sum.exp() * (1.0 + error);
        narrow.retain(|dtype| (dtype.round(sum) / sum - 1.0).abs() < rounding);
        if narrow.is_empty() && boundaries.iter().all(|(first, last)| first > last) {
            return None;
        }
        let row = reference.row(b, t, token);
        let p = &row.logp().probabilities;
        let missing = error.abs();
        // Boundaries v for which the entries from v on, and those before v, add what is missing.
        let (mut after, mut before): (f64, f64) = (p.iter().sum(), 0.0);
        let mut fits = [(usize::MAX, 0); 2];
        for (v, own) in p.iter().copied().chain([0.0]).enumerate() {
            for (fit, sum) in fits.iter_mut().zip([after, before]) {
                if (sum - missing).abs() <= rounding {
                    *fit = (fit.0.min(v), fit.1.max(v));
                }
            }
            (after, before) = (after - own, before + own);
        }
        for (boundary, fit) in boundaries.iter_mut().zip(fits) {
            *boundary = (boundary.0.max(fit.0), boundary.1.min(fit.1));
        }
    }
    // One token's sum agrees with some boundary by chance.
    let (vocab, is_told) =
        (shape.vocab, |(first, last): (usize, usize)| first <= last && last - first <= shape.vocab / 8);
    let roundest = |(first, last): (usize, usize)| (first..=last).max_by_key(|v| v.trailing_zeros());
    match (boundaries.map(is_told), twice) {
        ([true, _], Some(twice)) if told >= 2 => {
            let first = roundest(boundaries[0])?;
            (0 < first && first < vocab).then_some(Diagnosis::SumOfColumns { first, last: vocab - 1, vocab, twice })
        }
        ([_, true], Some(twice)) if told >= 2 => {
            let end = roundest(boundaries[1])?;
            (0 < end && end < vocab).then(|| Diagnosis::SumOfColumns { first: 0, last: end - 1, vocab, twice })
        }
        _ if told > 0 => narrow.first().copied().map(Diagnosis::NarrowSum),
        _ => None,
    }
}

/// The sums over pairs of an expected and an actual value from which a constant factor follows.
#[derive(Default)]
struct Pairs {
    count: usize,
    product: f64,
    expected2: f64,
    actual2: f64,
    /// The sum of each expected value times half an ulp of it.
    rounding: f64,
}

impl Pairs {
    fn add(&mut self, expected: f64, actual: f64, dtype: Dtype) {
        self.count += 1;
        self.rounding += expected.abs() * half_ulp(expected, dtype);
        self.product += expected * actual;
        self.expected2 += expected * expected;
        self.actual2 += actual * actual;
    }

    /// Returns the factor that fits best in least squares, and the relative size of what remains of the actual values.
    fn factor(&self) -> Option<(f64, f64)> {
        // The least-squares factor is Σxy/Σx², and what remains of Σy² is Σy² − factor·Σxy.
        let factor = self.product / self.expected2;
        let left2 = self.actual2 - factor * self.product;
        (self.count >= 4 && factor.is_finite()).then(|| (factor, (left2.max(0.0) / self.actual2).sqrt()))
    }

    /// Whether a factor differs from 1 by more than what remains can make of it, and than errors of two ulps that all go one way can.
    fn is_off(&self, factor: f64, left: f64) -> bool {
        (factor - 1.0).abs() > f64::max(4.0 * left.max(1e-6), 4.0 * self.rounding / self.expected2)
    }
}

/// The size of what a factor may leave of a gradient, as a share of it.
const LEFT: f64 = 1e-2;

/// The difference of two factors that are one, as a share of their distance from 1; and what a factor may leave of an error, as a share
/// of that.
const APART: f64 = 0.25;

/// Diagnoses a gradient `output` whose rows are the exact ones, each times a factor. `row` returns a token's exact and actual values.
pub(super) fn diagnose_factors(
    reference: &Reference,
    output: Output,
    dtype: Dtype,
    row: impl Fn(usize, usize) -> (Vec<f64>, Vec<f64>),
) -> Option<Diagnosis> {
    let factors = token_factors(reference, dtype, row)?;
    let off: Vec<TokenFactor> = factors.iter().filter(|(_, off)| *off).map(|(factor, _)| *factor).collect();
    let is_same = |a: f64, b: f64| (a - b).abs() <= LEFT * a.abs().max(b.abs());
    if off.is_empty() || factors.iter().all(|(other, _)| is_same(other.factor, off[0].factor)) {
        return None;
    }
    // Factors that agree within every sequence are those of sequences, if some sequence has two.
    let owner = |of: &TokenFactor| reference.problem().extra.sequences.owner(of.token);
    let mut sequences: Vec<(TokenFactor, usize)> = Vec::new();
    let mut is_of_sequences = true;
    for (of, _) in &factors {
        match sequences.last_mut().filter(|(first, _)| owner(first) == owner(of)) {
            Some((first, count)) => {
                is_of_sequences &= is_same(first.factor, of.factor);
                *count += 1;
            }
            None => sequences.push((*of, 1)),
        }
    }
    let first = |all: &[TokenFactor]| std::array::from_fn(|i| all.get(i).copied().unwrap_or_default());
    if is_of_sequences && sequences.len() > 1 && sequences.iter().any(|(_, count)| *count > 1) {
        let is_off = |of: &TokenFactor| off.iter().any(|other| owner(other) == owner(of));
        let of_sequences: Vec<TokenFactor> = sequences.iter().map(|(of, _)| *of).filter(is_off).collect();
        let (examples, off, sequences) = (first(&of_sequences), of_sequences.len(), sequences.len());
        return Some(Diagnosis::FactorPerSequence { output, examples, off, sequences });
    }
    Some(Diagnosis::FactorPerToken { output, examples: first(&off), off: off.len(), tokens: factors.len() })
}

/// Returns the factor of each token that has a gradient, and whether it is off from 1; `None` if some token is not its exact row times a
/// factor. `row` returns a token's exact and actual values.
fn token_factors(
    reference: &Reference,
    dtype: Dtype,
    row: impl Fn(usize, usize) -> (Vec<f64>, Vec<f64>),
) -> Option<Vec<(TokenFactor, bool)>> {
    // One token that no factor explains is enough to end it.
    let mut factors: Vec<(TokenFactor, bool)> = Vec::new();
    for token in ndarray::indices((reference.shape().batch, reference.shape().tokens)) {
        let Some(known) = reference.token(token.0, token.1).filter(|known| reference.finite(known)) else { continue };
        let (expected, actual) = row(token.0, token.1);
        let (mut all, mut small) = (Pairs::default(), Pairs::default());
        // The largest value hides what the others are: without it they must have the same factor.
        let largest = expected.iter().map(|x| x.abs()).fold(0.0, f64::max);
        for (x, y) in expected.into_iter().zip(actual) {
            if !y.is_finite() || (largest == 0.0 && y != 0.0) {
                return None;
            }
            if x.abs() < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            all.add(x, y, dtype);
            if x.abs() < largest {
                small.add(x, y, dtype);
            }
        }
        if !reference.has_gradient(known) || largest < f64::from(f32::MIN_POSITIVE) {
            continue;
        }
        // Two or three values are one number: the sum of a row of dlogits is 0.
        let ((factor, left), (of_small, left_of_small)) = (all.factor()?, small.factor()?);
        // A wrong sum scales all probabilities and not the one-hot: both parts must have one deviation from 1, not only one size.
        let apart = (factor - of_small).abs();
        let rounding = f64::max(all.rounding / all.expected2, small.rounding / small.expected2);
        let is_one = apart < LEFT * factor.abs() && apart <= f64::max(APART * (factor - 1.0).abs(), 4.0 * rounding);
        if !(left.max(left_of_small) < LEFT && is_one) {
            return None;
        }
        factors
            .push((TokenFactor { token, factor }, all.is_off(factor, left) && small.is_off(of_small, left_of_small)));
    }
    Some(factors)
}

/// Returns `0.5000 at token [0,1], 2.0000 at token [0,2]`.
fn listed(examples: &[TokenFactor; EXAMPLES], off: usize, place: &str) -> String {
    let one = |of: &TokenFactor| format!("{:.4} at {place} [{},{}]", of.factor, of.token.0, of.token.1);
    examples.iter().take(off).map(one).collect::<Vec<_>>().join(", ")
}

/// Diagnoses dlogits from the pattern of their errors over all tokens.
fn diagnose_dlogits(reference: &Reference, dlogits: &FloatView<Ix3>, loss: Option<f64>) -> Vec<Diagnosis> {
    let shape = reference.shape();
    let dtype = dlogits.dtype();
    let (mut others, mut targets) = (Pairs::default(), Pairs::default());
    let (mut counted, mut beyond_half, mut toward_zero, mut within_one) = (0, 0, true, true);
    // Targets and other entries are kept apart: a wrong factor on one of them alone is another bug.
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            // A flushed value, and one that is not finite, has no pattern.
            if !y.is_finite() || x.abs() < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            let is_id = v == token.id || reference.others(token).iter().any(|other| other.id == v);
            if is_id { &mut targets } else { &mut others }.add(x, y, dtype);
            // A rounded value is within half an ulp and a truncated one within a whole ulp below it. The 5 % above
            // leave room for the kernel's own f32 errors.
            let half = half_ulp(x, dtype);
            counted += 1;
            if (y - x).abs() > 1.05 * half {
                beyond_half += 1;
                toward_zero &= y.abs() < x.abs();
                within_one &= (y - x).abs() < 2.1 * half;
            }
        }
    }
    let mut all = Vec::new();
    if others.count > 0 && others.actual2 == 0.0 && targets.actual2 > 0.0 {
        all.push(Diagnosis::OnlyTheTarget);
        return all;
    }
    // One factor must fit the targets and the other entries alike, much better than a factor of 1 does.
    if let (Some((factor, left)), Some((of_targets, left_of_targets))) =
        (others.factor(), targets.factor().or(others.factor()))
        && left.max(left_of_targets) < LEFT
        && (factor - of_targets).abs() < LEFT * factor.abs()
        && others.is_off(factor, left)
        && explains_most(reference, dlogits, factor)
    {
        let of_loss = loss.map(|loss| loss / reference.loss()).filter(|of_loss| of_loss.is_finite());
        let loss = of_loss.filter(|of_loss| (of_loss - 1.0).abs() > 1e-2);
        all.push(Diagnosis::ConstantFactor { dlogits: factor, loss });
    }
    if matches!(dtype, Dtype::Bf16 | Dtype::F16) && beyond_half >= 8 && within_one {
        // A second rounding, and one by chance, is beyond half an ulp for a quarter of evenly spread values, and goes both ways.
        match () {
            () if toward_zero => all.push(Diagnosis::Truncated(dtype)),
            () if beyond_half >= 16 && 8 * beyond_half >= counted => all.push(Diagnosis::RoundedTwice(dtype)),
            () => {}
        }
    }
    all.extend(stored_wider(Output::Dlogits, dlogits));
    all
}

/// Whether a factor of dlogits leaves little of the errors: of nine in ten targets and of nine in ten other values that it is seen on, in
/// three of four tokens. One large value, or one token, would have a factor of its own.
fn explains_most(reference: &Reference, dlogits: &FloatView<Ix3>, factor: f64) -> bool {
    let (shape, dtype) = (reference.shape(), dlogits.dtype());
    // For targets, other values and tokens how many the factor is seen on, and how many it explains.
    let (mut targets, mut others, mut tokens) = ([0_usize; 2], [0_usize; 2], [0_usize; 2]);
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        let mut of_token = [0; 2];
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            let half = half_ulp(x, dtype);
            let (error, made) = ((y - x).abs(), ((factor - 1.0) * x).abs());
            if x.abs() < f64::from(f32::MIN_POSITIVE) || (error <= 4.0 * half && made <= 8.0 * half) {
                continue;
            }
            let is_explained = (y - factor * x).abs() <= APART * error.max(made) + 2.0 * half;
            for counts in [&mut of_token, if v == token.id { &mut targets } else { &mut others }] {
                counts[0] += 1;
                counts[1] += usize::from(is_explained);
            }
        }
        if of_token[0] > 0 {
            tokens[0] += 1;
            tokens[1] += usize::from(4 * of_token[1] >= 3 * of_token[0]);
        }
    }
    [targets, others].iter().all(|[seen, explained]| 10 * explained >= 9 * seen) && 4 * tokens[1] >= 3 * tokens[0]
}

/// Returns the whole number from 2 on that `x` is, to within what a sum in f32 may be off by.
fn integer(x: f64) -> Option<f64> {
    let whole = x.round();
    ((2.0..=4096.0).contains(&whole) && (x - whole).abs() < 1e-3 * whole).then_some(whole)
}

/// The number of terms from which on the error of a sum one by one may be a cause.
const LONG_SUM: usize = 1 << 10;

/// The number of errors from which on a single sign of all is no chance.
const SIGNS: usize = 6;

/// Whether errors may be roundings, which go both ways: of few errors nothing is known, of more each sign has an eighth at least.
fn go_both_ways(signs: [usize; 2]) -> bool {
    let count = signs[0] + signs[1];
    count < SIGNS || signs.into_iter().all(|sign| 8 * sign >= count)
}

/// Returns the relative error of a token's sum of exponentials that is added up one by one in f32.
fn one_by_one_error(reference: &Reference, (b, t): (usize, usize), token: &Token) -> f64 {
    let row = reference.row(b, t, token);
    let probabilities = &row.logp().probabilities;
    let largest = probabilities.iter().copied().fold(0.0, f64::max);
    let exact: f64 = probabilities.iter().map(|p| p / largest).sum();
    let one_by_one = probabilities.iter().fold(0.0_f32, |sum, p| sum + (p / largest) as f32);
    f64::from(one_by_one) / exact - 1.0
}

/// The number of tokens before a wrong end from which on that end is one of a block: blocks of tokens have eight at least.
const BLOCK: usize = 8;

/// The error of a value, as a share of it, from which on it is wrong beyond any rounding.
const WRONG: f64 = 0.1;

/// Diagnoses where dlogits are wrong: in a run of vocabulary entries, or from some token on.
fn diagnose_places(reference: &Reference, dlogits: &FloatView<Ix3>) -> Option<Diagnosis> {
    let shape = reference.shape();
    // For each entry and each place in a sequence whether any value is wrong, and whether any is right.
    let (mut columns, mut places) = (vec![[false; 2]; shape.vocab], vec![[false; 2]; shape.tokens]);
    let (mut zero, mut only_targets) = (true, true);
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let Some(token) = reference.token(b, t).filter(|token| reference.finite(token)) else { continue };
        if !reference.has_gradient(token) {
            continue;
        }
        let mut all_wrong = true;
        for (v, (x, y)) in reference.dlogits_row(b, t).into_iter().zip(dlogits.row(b, t)).enumerate() {
            // A value below the dtype's resolution is neither right nor wrong.
            if half_ulp(x, dlogits.dtype()) > WRONG / 2.0 * x.abs() {
                continue;
            }
            let wrong = y.is_nan() || (y - x).abs() > WRONG * x.abs();
            columns[v][usize::from(!wrong)] = true;
            all_wrong &= wrong;
            zero &= !wrong || y == 0.0;
            only_targets &= !wrong || v == token.id;
        }
        places[t][usize::from(!all_wrong)] = true;
    }
    let run = |marks: &[[bool; 2]]| {
        let first = marks.iter().position(|[wrong, _]| *wrong)?;
        let last = marks.iter().rposition(|[wrong, _]| *wrong)?;
        // Within the run nothing is right; outside it something is, and nothing wrong.
        let whole = marks[first..=last].iter().all(|[_, right]| !right);
        let others = marks[..first].iter().chain(&marks[last + 1..]).any(|[_, right]| *right);
        (whole && others).then_some((first, last))
    };
    // A target that is wrong alone is no place in the vocabulary.
    if let Some((first, last)) = run(&columns).filter(|_| !only_targets) {
        return Some(Diagnosis::Columns { first, last, vocab: shape.vocab, zero });
    }
    let (first, last) = run(&places)?;
    (last + 1 == shape.tokens && first >= BLOCK).then_some(Diagnosis::Tokens { first, tokens: shape.tokens })
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
