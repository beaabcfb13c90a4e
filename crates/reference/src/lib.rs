//! The oracle: the GRPO loss, entropy and dlogits in f64, written to be compared with the formulas line by line.
//!
//! Inputs are widened exactly, sums are compensated ([`Sum`]), and gradients are in closed form. The crate shares no code with any
//! kernel, and uses nothing outside [`assay_core::spec`] and [`assay_core::problem`].
//!
//! The values of a masked token are never read: it is absent from every sum, whatever its logits, id, advantage and
//! log-probabilities are, and its dlogits are 0. If a value cannot be finite (a NaN logit, `exp` beyond 1.8e308), the
//! result contains the NaN or ∞ and [`Reference::first_nonfinite`] names the token; other rows stay correct.

mod columns;
mod cross_entropy;
mod distillation;
mod exponential;
mod gradient;
mod kl;
mod lm_head;
mod log_softmax;
mod logits_transform;
pub mod metrics;
mod objective;
mod ratio;
mod reduction;
mod rollout;
mod selection;
mod sum;
mod token;

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array2, Array3, arr0};
use rayon::prelude::*;

pub use columns::{SoftmaxColumns, TokenColumns};
pub use cross_entropy::{RowLogits, RowTerm};
pub use distillation::{DivergenceBin, TokenDivergence};
pub use lm_head::{HeadReference, evaluate_head};
pub use log_softmax::Softmax;
pub use objective::{Branch, clipped};
pub use ratio::BoundedValue;
pub use selection::{Choice, quantile_index};
pub use sum::Sum;
pub use token::{Term, TokenInputs};

use assay_core::problem::{Metrics, Outcome, Problem, ProblemError, Sequence, Shape};
use assay_core::spec::{
    Averaging, DroppedTerm, LossSpec, LossTerms, Objective, OldLogp, RatioLevel, Reduction, SoftmaxRange,
    TemperatureDivides,
};
use gradient::{LogpGradient, RowGradient};
use logits_transform::{TransformedLogits, divided};
use rollout::Corrections;
use selection::Sample;

/// A softmax over logits that were divided by `divisor`.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSoftmax {
    /// The divisor of the logits before the softmax, dimensionless.
    pub divisor: f64,
    /// The entries that the softmax runs over; the set unless the token has a kept set and another softmax besides.
    pub range: SoftmaxRange,
    /// The statistics of the divided logits.
    pub stats: Softmax,
}

impl ScaledSoftmax {
    /// Whether this softmax and `other`, of the same token, are of the same logits and have the same divisor.
    pub fn is_same_function(&self, other: &Self) -> bool {
        self.divisor == other.divisor && self.range == other.range
    }
}

/// Everything that the loss knows of one unmasked token.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// The position `[b,t]` of the token.
    pub at: (usize, usize),
    /// The sampled id, `y`; the first if the token has several.
    pub id: usize,
    /// The softmax that `logp` is taken from.
    pub logp_softmax: ScaledSoftmax,
    /// The softmax that `entropy` is taken from, whose divisor is the token's temperature. It equals the other unless
    /// the temperature divides the log-probability, or entropy is over the vocabulary and `logp` over a kept set.
    pub entropy_softmax: ScaledSoftmax,
    /// The softmax that the KL penalty's log-probability is taken from. It equals that of `logp` unless it is over the vocabulary and
    /// that over a kept set.
    pub kl_softmax: ScaledSoftmax,
    /// The probability `1 − p_y` of the other entries in the KL penalty's softmax, summed over them.
    pub kl_probability_of_others: f64,
    /// The probability of the other entries, `1 − p_y`, summed over them.
    pub probability_of_others: f64,
    /// The entropy `H` of the token's distribution, nats.
    pub entropy: f64,
    /// The log-probability `ℓ` and the values that it is compared with.
    pub inputs: TokenInputs,
    /// The smooth piece of the loss that the token is on.
    pub branch: Branch,
    /// The policy term, with its masks and weights.
    pub policy: Term,
    /// The KL estimate, without `beta`.
    pub kl: Term,
    /// The sum `Σ dlogp_k · ℓ_k` over the token's other ids; 0 if it has none.
    pub of_others: f64,
    /// The values of the row that the cross-entropy reads.
    pub row: RowLogits,
    /// The cross-entropy's term of the whole row: label smoothing and z-loss; 0 for other objectives.
    pub row_term: RowTerm,
    /// The loss of the token, `policy + beta · kl + of_others + row_term`, before the reduction.
    pub token_loss: f64,
    /// Whether the token counts as clipped low.
    pub clipped_low: bool,
    /// Whether the token counts as clipped high.
    pub clipped_high: bool,
    /// The factor of the policy term in the loss: the reduction's weight times `scale`.
    pub weight: f64,
    /// The factor of `beta · kl` in the loss: the reduction's weight times `scale`.
    pub kl_weight: f64,
    /// The factor of `entropy_coef · H` in the loss, with the opposite sign.
    pub entropy_weight: f64,
    /// The derivative `∂loss/∂H`, from the entropy bonus or given.
    pub grad_entropy: f64,
    /// The derivative `∂w/∂x` of the sequence's log-ratio by this token's: `1/n` for a mean, 1 for a sum; 1 if the
    /// ratio is the token's own.
    pub share: f64,
    /// The sum `Σ_u ∂loss/∂w_u` over the sequence, if its tokens share a ratio that has a gradient; else 0.
    pub coupling: f64,
}

/// One of a token's ids after its first.
#[derive(Clone, Copy, Debug)]
pub struct OtherLogp {
    /// The id `y_k` that is scored.
    pub id: usize,
    /// The log-probability `ℓ_k` of the id, nats.
    pub logp: f64,
    /// The probability of the other entries, `1 − p_y`, summed over them.
    pub probability_of_others: f64,
    /// The derivative `∂loss/∂ℓ_k`, which is given.
    pub grad_logp: f64,
}

/// The reference's evaluation of a problem. Rows of dlogits are computed on request, so that a large vocabulary needs
/// no `[B,T,V]` of f64.
///
/// ```
/// # mod assay { pub use {assay_core::{problem, spec}, assay_reference as reference}; }
/// use assay::problem::{Advantages, Extra, Problem};
/// use assay::spec::LossSpec;
/// use ndarray::{Array2, Array3, arr1};
///
/// let problem: Problem = Problem {
///     logits: Array3::<f64>::zeros((1, 2, 4)).into(),
///     ids: Array2::zeros((1, 2)),
///     mask: Array2::from_elem((1, 2), true),
///     advantages: Advantages::Sequence(arr1(&[2.0])),
///     old_logp: Some(Array2::from_elem((1, 2), -4_f64.ln())), // the ratio is 1
///     ref_logp: None,
///     extra: Extra::default(),
/// };
/// let spec = LossSpec::default();
/// let reference = assay::reference::evaluate(&spec, &problem)?;
/// assert_eq!(reference.loss(), -2.0); // −ρ·A, the mean of two equal tokens
/// assert_eq!(reference.dlogits_row(0, 0), [-0.75, 0.25, 0.25, 0.25]); // A/2 · (p_j − 1[j = y])
/// assert_eq!(reference.metrics().entropy_mean, 4_f64.ln());
/// # Ok::<(), assay::problem::ProblemError>(())
/// ```
#[derive(Debug)]
pub struct Reference<'p> {
    spec: &'p LossSpec,
    problem: Cow<'p, Problem>,
    shape: Shape,
    tokens: Array2<Option<Token>>,
    /// The other ids of each token, in order; empty for a masked token.
    others: Array2<Vec<OtherLogp>>,
    /// The divergence of each token from its teacher; `None` for a masked token and for other objectives.
    divergences: Array2<Option<TokenDivergence>>,
    loss: f64,
    metrics: Metrics,
}

/// The softmaxes, log-probability and entropy of one token.
#[derive(Clone, Copy)]
struct TokenScore {
    at: (usize, usize),
    id: usize,
    logp_softmax: ScaledSoftmax,
    entropy_softmax: ScaledSoftmax,
    kl_softmax: ScaledSoftmax,
    probability_of_others: f64,
    kl_probability_of_others: f64,
    entropy: f64,
    logp: f64,
    /// The log-probability that the KL penalty reads.
    kl_logp: f64,
    /// The sum `Σ dlogp_k · ℓ_k` over the other ids.
    of_others: f64,
    row: RowLogits,
}

impl TokenScore {
    /// Takes the score of a token that was evaluated before.
    fn from_token(token: &Token) -> Self {
        let &Token { at, id, logp_softmax, entropy_softmax, kl_softmax, inputs, .. } = token;
        Self {
            at,
            id,
            logp_softmax,
            entropy_softmax,
            kl_softmax,
            probability_of_others: token.probability_of_others,
            kl_probability_of_others: token.kl_probability_of_others,
            entropy: token.entropy,
            logp: inputs.logp,
            kl_logp: inputs.kl_logp,
            of_others: token.of_others,
            row: token.row,
        }
    }
}

/// Evaluates `problem` under `spec` in f64.
///
/// # Errors
/// [`ProblemError`] if the spec is out of range or the problem does not fit it.
///
/// ```
/// # mod assay { pub use {assay_core::{problem, spec}, assay_reference as reference}; }
/// # use assay::problem::{Advantages, Extra, Problem};
/// # use ndarray::{Array2, Array3, arr1};
/// # let mut problem: Problem = Problem {
/// #     logits: Array3::<f64>::zeros((1, 2, 4)).into(),
/// #     ids: Array2::zeros((1, 2)),
/// #     mask: Array2::from_elem((1, 2), true),
/// #     advantages: Advantages::Sequence(arr1(&[2.0])),
/// #     old_logp: Some(Array2::from_elem((1, 2), -4_f64.ln())),
/// #     ref_logp: None,
/// #     extra: Extra::default(),
/// # };
/// use assay::{reference, spec::LossSpec};
///
/// // The sampler gave both tokens a third of their old probability: their weights of 3 are truncated to 2.
/// problem.extra.rollout_logp = Some(Array2::from_elem((1, 2), -12_f64.ln()));
/// let spec: LossSpec = serde_json::from_str(r#"{"rollout": {"source": "logp", "max": 2.0}}"#)?;
/// let reference = reference::evaluate(&spec, &problem)?;
/// assert_eq!(reference.token(0, 0).unwrap().inputs.policy_weight, 2.0);
/// assert_eq!(reference.loss(), -2.0 * 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn evaluate<'p>(spec: &'p LossSpec, problem: &'p Problem) -> Result<Reference<'p>, ProblemError> {
    evaluate_owned(spec, Cow::Borrowed(problem))
}

fn evaluate_owned<'p>(spec: &'p LossSpec, given: Cow<'p, Problem>) -> Result<Reference<'p>, ProblemError> {
    let problem = &*given;
    let shape = problem.check(spec)?;
    // Corrections for the sampler come first, as a rejection may remove a token from every later sum.
    let corrections = rollout::corrections(spec, problem);
    // The softmax of each token is independent of all others: these are the only values of size V.
    let positions: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
    let scored = positions.into_par_iter().map(|at| corrections.mask[at].then(|| score(spec, problem, at)));
    let (scored, others): (Vec<_>, Vec<_>) =
        scored.map(|token| token.map_or((None, Vec::new()), |(scored, others)| (Some(scored), others))).unzip();
    let scored = Array2::from_shape_vec((shape.batch, shape.tokens), scored).expect("one entry a token");
    let others = Array2::from_shape_vec((shape.batch, shape.tokens), others).expect("one entry a token");

    // A divergence from a teacher is of values of size V too.
    let divergence = |at: (usize, usize)| {
        let (distillation, token) = (spec.as_distillation()?, scored[at]?);
        let ScaledSoftmax { divisor, stats, .. } = token.logp_softmax;
        Some(TokenDivergence::new(distillation, problem, at, divisor, stats))
    };
    let positions: Vec<(usize, usize)> = ndarray::indices(scored.dim()).into_iter().collect();
    let divergences: Vec<_> = positions.into_par_iter().map(divergence).collect();
    let divergences = Array2::from_shape_vec(scored.dim(), divergences).expect("one entry a token");

    // The entropy mask is a quantile over the batch.
    let entropies = scored.mapv(|token| token.map(|token| token.entropy));
    let high = match &spec.top_entropy {
        Some(top) => selection::top_entropy(top, &entropies),
        None => entropies.mapv(|_| true),
    };
    joined(spec, given, &corrections, &scored, TokenExtras { others, divergences }, &high)
}

/// Values of tokens that only some specs have.
struct TokenExtras {
    others: Array2<Vec<OtherLogp>>,
    divergences: Array2<Option<TokenDivergence>>,
}

/// Completes the evaluation with all that depends on more than one token, given the tokens of `high` entropy.
fn joined<'p>(
    spec: &'p LossSpec,
    given: Cow<'p, Problem>,
    corrections: &Corrections,
    scored: &Array2<Option<TokenScore>>,
    TokenExtras { others, divergences }: TokenExtras,
    high: &Array2<bool>,
) -> Result<Reference<'p>, ProblemError> {
    let problem = &*given;
    let shape = problem.shape();
    // Terms of each token, then the weights of the reductions, then the coupling of tokens that share a ratio.
    let mut tokens = join(spec, problem, corrections, scored, &divergences, high)?;
    let sequences = problem.sequences();
    weigh(spec, problem, &sequences, &mut tokens);
    couple(spec, &sequences, &mut tokens);
    // One objective counts sequences without a token by their advantage.
    let empty: Vec<f64> = sequences
        .iter()
        .filter(|sequence| sequence.places().all(|at| tokens[at].is_none()))
        .map(|sequence| problem.tokens().advantage_of(sequence))
        .collect();
    let loss = reduction::loss(spec, &tokens, sequences.len(), &empty);
    let metrics = reduction::metrics(spec, &tokens);
    Ok(Reference { spec, problem: given, shape, tokens, others, divergences, loss, metrics })
}

/// Computes softmax, log-probability and entropy of token `[b,t]`, and the log-probabilities of its other ids.
fn score(spec: &LossSpec, problem: &Problem, at: (usize, usize)) -> (TokenScore, Vec<OtherLogp>) {
    // The transform of the logits depends on the id only through the support, which may keep it.
    let column = |id: i64| usize::try_from(id).expect("checked: 0 ≤ id < V");
    let id = column(problem.ids[at]);
    let TransformedLogits { logits, over_vocabulary, .. } =
        TransformedLogits::new(spec, problem, at, id, 0..problem.shape().vocab);
    let softmax = |divisor: f64, z: &[f64]| ScaledSoftmax { divisor, range: SoftmaxRange::Set, stats: Softmax::new(z) };

    let temperature = problem.tokens().temperature(spec, at);
    // One softmax serves both outputs unless the temperature divides the log-probability.
    let (z, logp_softmax, entropy_softmax, logp_factor) = match spec.temperature_divides {
        TemperatureDivides::Logits => {
            let z = divided(logits, temperature);
            let both = softmax(temperature, &z);
            (z, both, both, 1.0)
        }
        TemperatureDivides::Logp => {
            let logp = softmax(1.0, &logits);
            let entropy = softmax(temperature, &divided(logits.clone(), temperature));
            (logits, logp, entropy, 1.0 / temperature)
        }
    };
    // Next to a softmax over a kept set, entropy and the KL penalty may have one over the vocabulary. The check of the spec lets it
    // have no other divisor.
    let vocabulary = over_vocabulary.map(|logits| divided(logits, temperature));
    let whole = |z: &Vec<f64>| ScaledSoftmax { range: SoftmaxRange::Vocabulary, ..softmax(temperature, z) };
    let entropy_softmax =
        vocabulary.as_ref().filter(|_| spec.has_entropy_over_vocabulary()).map_or(entropy_softmax, whole);
    let (kl_z, kl_softmax) = match vocabulary.as_ref().filter(|_| spec.has_kl_over_vocabulary()) {
        Some(z) => (z, whole(z)),
        None => (&z, logp_softmax),
    };
    // Further ids of the token are scored by the same softmax.
    let other = |(id, dlogp): (i64, f64)| {
        let id = column(id);
        OtherLogp {
            id,
            logp: logp_softmax.stats.log_probability(z[id]) * logp_factor,
            probability_of_others: logp_softmax.stats.probability_of_others(z[id]),
            grad_logp: dlogp,
        }
    };
    let others = problem.extra.others.as_ref();
    let others: Vec<OtherLogp> = others.into_iter().flat_map(|others| others.at(at.0, at.1)).map(other).collect();
    let scored = TokenScore {
        at,
        id,
        logp_softmax,
        entropy_softmax,
        kl_softmax,
        probability_of_others: logp_softmax.stats.probability_of_others(z[id]),
        kl_probability_of_others: kl_softmax.stats.probability_of_others(kl_z[id]),
        entropy: entropy_softmax.stats.entropy(),
        logp: logp_softmax.stats.log_probability(z[id]) * logp_factor,
        kl_logp: kl_softmax.stats.log_probability(kl_z[id]) * logp_factor,
        of_others: others.iter().map(|other| other.grad_logp * other.logp).collect::<Sum>().value(),
        row: RowLogits::new(spec, &logp_softmax.stats, &z),
    };
    (scored, others)
}

/// Computes the losses of the tokens, without weights: everything that depends on a sequence or on the batch is looked
/// up here.
fn join(
    spec: &LossSpec,
    problem: &Problem,
    corrections: &Corrections,
    scored: &Array2<Option<TokenScore>>,
    divergences: &Array2<Option<TokenDivergence>>,
    high: &Array2<bool>,
) -> Result<Array2<Option<Token>>, ProblemError> {
    // Values of one token, by its position.
    let drops = spec.top_entropy.map_or(DroppedTerm::PolicyTerm, |top| top.drops);
    let at = |array: &Option<Array2<f64>>, place: (usize, usize)| array.as_ref().map(|array| array[place]);
    let old_logp = |place, logp| {
        ratio::old_logp(spec.old_logp, at(&problem.old_logp, place), at(&problem.extra.rollout_logp, place), logp)
    };
    let advantages = problem.tokens().advantages_of_tokens();
    // The pair of x after clamp and clip, and whether it is in the sequence's mean.
    let log_ratio = |place: (usize, usize), token: &TokenScore| {
        let x = token.logp - old_logp(place, token.logp);
        let in_mean = drops != DroppedTerm::Ratio || high[place];
        (ratio::log_ratio(&spec.ratio, x, advantages[place]), in_mean)
    };

    let mut tokens = Array2::from_elem(scored.dim(), None);
    for sequence in problem.sequences() {
        let row: Vec<((usize, usize), TokenScore)> =
            sequence.places().filter_map(|at| Some((at, scored[at]?))).collect();
        let in_mean: Vec<f64> = row
            .iter()
            .map(|(at, token)| log_ratio(*at, token))
            .filter_map(|(x, in_mean)| in_mean.then_some(x.value))
            .collect();
        let row_log_ratio =
            (spec.ratio.level != RatioLevel::Token).then(|| ratio::row_log_ratio(&spec.ratio, &in_mean));
        let divergence = mean_divergence(spec, problem, &row);
        let row_log_weight = row_log_weight(spec, problem, corrections, &sequence, &row);
        // The inputs of each of its tokens, in which masks and weights become factors.
        for &(place, token) in &row {
            let advantage = advantages[place];
            let accepted = |by: &Array2<bool>| f64::from(u8::from(by[place]));
            let weight = corrections.weights[place];
            let in_vespo = matches!(spec.objective, Objective::Vespo(_));
            let to_kl = spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl);
            let own_weight = corrections.token_weights[place];
            let own_to_kl = spec.token_weights.is_some_and(|weights| weights.applies_to == LossTerms::PolicyAndKl);
            let inputs = TokenInputs {
                logp: token.logp,
                kl_logp: token.kl_logp,
                old_logp: old_logp(place, token.logp),
                ref_logp: spec.kl.as_ref().and(at(&problem.ref_logp, place)),
                rollout_logp: if spec.weighs_kl_by_rollout() { at(&problem.extra.rollout_logp, place) } else { None },
                advantage,
                row_log_ratio,
                row_log_weight,
                policy_weight: accepted(&corrections.accepted) * own_weight * if in_vespo { 1.0 } else { weight },
                kl_weight: accepted(&corrections.accepted_by_kl)
                    * if own_to_kl { own_weight } else { 1.0 }
                    * if to_kl { weight } else { 1.0 },
                on_policy: spec
                    .off_policy_mask
                    .map_or(Choice::fixed(true), |mask| selection::on_policy(advantage, divergence, mask.threshold)),
                top_entropy: drops != DroppedTerm::PolicyTerm || high[place],
                selected: Choice::fixed(problem.extra.selected.as_ref().is_some_and(|selected| selected[place])),
                divergence: divergences[place].as_ref().map_or(0.0, |divergence| divergence.value),
            };
            // The derivative of the sequence's log-ratio by this token's.
            let share = match spec.ratio.level {
                RatioLevel::Token | RatioLevel::SequenceToken => 1.0,
                RatioLevel::Sequence | RatioLevel::SequenceProduct if !log_ratio(place, &token).1 => 0.0,
                RatioLevel::Sequence | RatioLevel::SequenceProduct => ratio::share(&spec.ratio, in_mean.len()),
            };
            tokens[place] = Some((token, inputs, share));
        }
    }
    // Selections by covariance compare all tokens of the batch, so their inputs must be complete.
    select(spec, &mut tokens)?;
    Ok(tokens.mapv(|token| token.map(|(scored, inputs, share)| evaluated(spec, &scored, inputs, share))))
}

/// Returns `Σ m (behaviour − ℓ) / max(Σ m, 1)` of a sequence, for the off-policy mask.
fn mean_divergence(spec: &LossSpec, problem: &Problem, row: &[((usize, usize), TokenScore)]) -> f64 {
    let Some(mask) = &spec.off_policy_mask else { return 0.0 };
    let behaviour = if mask.behaviour == OldLogp::Rollout { &problem.extra.rollout_logp } else { &problem.old_logp };
    let Some(behaviour) = behaviour else { return 0.0 };
    // A token that the sampler did not score adds 0 and still counts.
    let difference = |&(at, token): &((usize, usize), TokenScore)| {
        let difference = behaviour[at] - token.logp;
        if difference.is_nan() { 0.0 } else { difference }
    };
    row.iter().map(difference).collect::<Sum>().value() / row.len().max(1) as f64
}

/// Returns VESPO's `ln w` of a sequence, before it is clamped.
fn row_log_weight(
    spec: &LossSpec,
    problem: &Problem,
    corrections: &Corrections,
    sequence: &Sequence,
    row: &[((usize, usize), TokenScore)],
) -> f64 {
    let Objective::Vespo(_) = &spec.objective else { return 0.0 };
    // VESPO's own clamp of log-ratios, whatever the spec's ratio is.
    let log_ratios = row.iter().map(|(place, token)| {
        let at = |array: &Option<Array2<f64>>| array.as_ref().map(|array| array[*place]);
        let old = ratio::old_logp(spec.old_logp, at(&problem.old_logp), at(&problem.extra.rollout_logp), token.logp);
        (token.logp - old).clamp(-20.0, 20.0)
    });
    let of_tokens = log_ratios.collect::<Sum>().value();
    of_tokens + rollout::log_weights(spec, problem, corrections, sequence)
}

/// The tokens before their losses: softmaxes, inputs, and the share in the sequence's mean.
type Joined = Array2<Option<(TokenScore, TokenInputs, f64)>>;

/// Makes the selection by covariance of KL-Cov and Clip-Cov, over the whole batch.
fn select(spec: &LossSpec, tokens: &mut Joined) -> Result<(), ProblemError> {
    // Clip-Cov does not select a token whose loss the clip already bounds.
    let sample = |inputs: &TokenInputs| {
        let clipped = match &spec.objective {
            Objective::ClipCov(cov) => objective::held_by_clip(&cov.clip, inputs.ratio(spec), inputs.advantage),
            _ => false,
        };
        Sample { advantage: inputs.advantage, logp: inputs.logp, clipped }
    };
    let samples: Vec<Sample> = tokens.iter().flatten().map(|(_, inputs, _)| sample(inputs)).collect();
    let choices = match &spec.objective {
        Objective::KlCov(cov) if !samples.is_empty() => {
            cov.selection.map(|top| selection::top_covariance(top, &samples))
        }
        Objective::ClipCov(cov) => cov.selection.map(|band| selection::covariance_band(band, &samples)).transpose()?,
        _ => None,
    };
    // Choices are in the order of the samples, which is that of the tokens.
    for ((_, inputs, _), choice) in tokens.iter_mut().flatten().zip(choices.into_iter().flatten()) {
        inputs.selected = choice;
    }
    Ok(())
}

/// Evaluates the terms of one token, without weights.
fn evaluated(spec: &LossSpec, scored: &TokenScore, inputs: TokenInputs, share: f64) -> Token {
    // The smooth piece is found once, and every value and derivative is evaluated on it.
    let branch = Branch::at(spec, &inputs);
    let policy = branch.policy(spec, &inputs);
    let kl = spec.kl.as_ref().map_or(Term::default(), |kl| branch.kl(spec, kl, &inputs));
    let (clipped_low, clipped_high) = clipped(spec, &inputs);
    let &TokenScore { at, id, logp_softmax, entropy_softmax, kl_softmax, entropy, of_others, row, .. } = scored;
    let row_term = RowTerm::new(spec, row, &logp_softmax.stats, inputs.policy_weight);
    let kl_loss = spec.kl.as_ref().map_or(0.0, |term| times_beta(term.beta, kl.value));
    Token {
        at,
        id,
        logp_softmax,
        entropy_softmax,
        kl_softmax,
        probability_of_others: scored.probability_of_others,
        kl_probability_of_others: scored.kl_probability_of_others,
        entropy,
        inputs,
        branch,
        policy,
        kl,
        of_others,
        row,
        row_term,
        token_loss: policy.value + kl_loss + of_others + row_term.value,
        clipped_low,
        clipped_high,
        weight: 0.0,
        kl_weight: 0.0,
        entropy_weight: 0.0,
        grad_entropy: 0.0,
        share,
        coupling: 0.0,
    }
}

/// Sets the factors of each token's terms by the reductions, and `∂loss/∂H`.
fn weigh(spec: &LossSpec, problem: &Problem, sequences: &[Sequence], tokens: &mut Array2<Option<Token>>) {
    let count = |sequence: &Sequence| sequence.places().filter(|&at| tokens[at].is_some()).count();
    let counts: Vec<usize> = sequences.iter().map(count).collect();
    // Packed sequences are not averaged over a width.
    let width = tokens.ncols();
    // The policy term and the KL penalty may have different reductions.
    let weights = reduction::row_weights(spec.averaging(), &counts, width);
    let kl_weights = reduction::row_weights(spec.kl_averaging(), &counts, width);
    // The default mean is over the tokens that `top_entropy` keeps.
    let kept = tokens.map(|token| token.as_ref().is_some_and(|token| token.inputs.top_entropy));
    let all_kept: Vec<usize> =
        sequences.iter().map(|sequence| sequence.places().filter(|&at| kept[at]).count()).collect();
    // The entropy bonus has its own reduction, or a mean over the tokens that are kept.
    let own = spec.entropy_averaging.map(|averaging| reduction::row_weights(averaging, &counts, width));
    let token_mean = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
    let over_kept = reduction::row_weights(token_mean, &all_kept, width);
    // `scale` multiplies the whole loss, and so every weight.
    for (s, at) in sequences.iter().flat_map(|sequence| sequence.places().map(|at| (sequence.index, at))) {
        let Some(token) = &mut tokens[at] else { continue };
        token.weight = weights[s] * spec.scale;
        token.kl_weight = kl_weights[s] * spec.scale;
        token.entropy_weight = spec.scale
            * match &own {
                Some(own) => own[s],
                None if kept[at] => over_kept[s],
                None => 0.0,
            };
        token.grad_entropy = match &problem.extra.dentropy {
            Some(dentropy) if spec.dentropy => spec.scale * dentropy[at],
            _ if spec.entropy_coef == 0.0 => 0.0,
            _ => -spec.entropy_coef * token.entropy_weight,
        };
    }
}

/// Sets the coupling of tokens that share a ratio: the derivative of the loss with respect to its logarithm.
fn couple(spec: &LossSpec, sequences: &[Sequence], tokens: &mut Array2<Option<Token>>) {
    if !spec.ratio.level.is_shared() {
        return;
    }
    for sequence in sequences {
        // Each token's loss depends on the shared ratio, and the shared ratio on each token.
        let row = sequence.places().filter_map(|at| tokens[at].as_ref());
        let coupling = row.map(|token| by_log_ratio(spec, token, &token.branch)).collect::<Sum>().value();
        for at in sequence.places() {
            tokens[at].iter_mut().for_each(|token| token.coupling = coupling);
        }
    }
}

/// Returns `∂loss/∂w` of a token, if it were on `branch`.
fn by_log_ratio(spec: &LossSpec, token: &Token, branch: &Branch) -> f64 {
    let policy = token.weight * branch.policy(spec, &token.inputs).by_log_ratio;
    let kl = spec
        .kl
        .as_ref()
        .map_or(0.0, |kl| token.kl_weight * times_beta(kl.beta, branch.kl(spec, kl, &token.inputs).by_log_ratio));
    branch.cap_slope * (policy + kl)
}

/// Returns `beta · term`; 0 if `beta` is 0, even if the term overflows.
fn times_beta(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}

impl Token {
    /// Whether the KL penalty reads another log-probability than the ratio does.
    pub fn has_separate_kl(&self) -> bool {
        !self.kl_softmax.is_same_function(&self.logp_softmax)
    }

    /// Returns the temperature `T` of this token.
    pub fn temperature(&self) -> f64 {
        self.entropy_softmax.divisor
    }
}

impl Reference<'_> {
    /// Evaluates the batch again with `high` as the tokens whose entropy [`TopEntropy`](assay_core::spec::TopEntropy)
    /// keeps.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn keeping(&self, high: &Array2<bool>) -> Result<Reference<'_>, ProblemError> {
        let corrections = rollout::corrections(self.spec, &self.problem);
        let scored = self.tokens.mapv(|token| token.map(|token| TokenScore::from_token(&token)));
        let extras = TokenExtras { others: self.others.clone(), divergences: self.divergences.clone() };
        joined(self.spec, Cow::Borrowed(&self.problem), &corrections, &scored, extras, high)
    }

    /// Returns the loss of the batch.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// Returns the means that trainers log.
    pub fn metrics(&self) -> Metrics {
        self.metrics
    }

    /// Returns the shape `(B, T, V)` of the logits.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the spec of the evaluation.
    pub fn spec(&self) -> &LossSpec {
        self.spec
    }

    /// Returns the problem that was evaluated.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Returns the softmaxes of `token`, at `[b,t]`, over a range of vocabulary entries, with the transformed logits
    /// and their derivatives by the given ones.
    pub fn columns(&self, b: usize, t: usize, token: &Token, columns: Range<usize>) -> TokenColumns {
        TokenColumns::new(TransformedLogits::new(self.spec, &self.problem, (b, t), token.id, columns), token)
    }

    /// Returns the softmaxes of `token`, at `[b,t]`, over all vocabulary entries.
    pub fn row(&self, b: usize, t: usize, token: &Token) -> TokenColumns {
        self.columns(b, t, token, 0..self.shape.vocab)
    }

    /// Returns token `[b,t]`, or `None` if it is masked.
    pub fn token(&self, b: usize, t: usize) -> Option<&Token> {
        self.tokens[[b, t]].as_ref()
    }

    /// Returns the number of unmasked tokens, `Σ m`.
    pub fn count(&self) -> usize {
        self.tokens.iter().flatten().count()
    }

    /// Returns the ids of an unmasked token after its first.
    pub fn others(&self, token: &Token) -> &[OtherLogp] {
        &self.others[token.at]
    }

    /// Returns the divergence of a token from its teacher; `None` for other objectives.
    pub fn divergence(&self, token: &Token) -> Option<&TokenDivergence> {
        self.divergences[token.at].as_ref()
    }

    /// Returns `policy + beta · kl` at `inputs`, on `branch`.
    pub fn token_loss(&self, inputs: &TokenInputs, branch: &Branch) -> f64 {
        let kl = self.spec.kl.as_ref();
        let kl = kl.map_or(0.0, |kl| times_beta(kl.beta, branch.kl(self.spec, kl, inputs).value));
        branch.policy(self.spec, inputs).value + kl
    }

    /// Returns `∂loss/∂w` of a token, if it were on `branch`: its contribution to the coupling of its sequence.
    pub fn by_log_ratio(&self, token: &Token, branch: &Branch) -> f64 {
        by_log_ratio(self.spec, token, branch)
    }

    /// Returns `∂loss/∂ℓ` of a token, if it were on `branch` and its sequence's coupling were `coupling`:
    ///
    /// ```text
    /// w·policy_ℓ + w_kl·beta·kl_ℓ + ∂x/∂ℓ · share · Σ_u (w_u·policy_w + w_kl,u·beta·kl_w)
    /// ```
    ///
    /// The sum is over the tokens that share the ratio: the row, or the token alone. The term of `kl_ℓ` is left to
    /// [`grad_kl_logp`](Self::grad_kl_logp) if that log-probability is another.
    pub fn grad_logp(&self, token: &Token, branch: &Branch, coupling: f64) -> f64 {
        let policy = token.weight * branch.policy(self.spec, &token.inputs).by_logp;
        let kl = if token.has_separate_kl() { 0.0 } else { self.kl_slope(token, branch) };
        // The path through the ratio: the token's own, or the sequence's with its share.
        let through_ratio = match self.spec.ratio.level {
            RatioLevel::Token => branch.slope * self.by_log_ratio(token, branch),
            RatioLevel::SequenceToken => self.by_log_ratio(token, branch),
            RatioLevel::Sequence | RatioLevel::SequenceProduct => branch.slope * token.share * coupling,
        };
        policy + kl + through_ratio
    }

    /// Returns `∂loss/∂ℓ` of the KL penalty's own log-probability, if the token were on `branch`: `w_kl·beta·kl_ℓ`; 0 if that is the
    /// token's only log-probability.
    pub fn grad_kl_logp(&self, token: &Token, branch: &Branch) -> f64 {
        if token.has_separate_kl() { self.kl_slope(token, branch) } else { 0.0 }
    }

    /// Returns the slope `w_kl·beta·kl_ℓ` of the KL penalty.
    fn kl_slope(&self, token: &Token, branch: &Branch) -> f64 {
        self.spec
            .kl
            .as_ref()
            .map_or(0.0, |kl| token.kl_weight * times_beta(kl.beta, branch.kl(self.spec, kl, &token.inputs).by_logp))
    }

    /// Whether any dlogit of a token differs from 0, apart from entries of probability 0.
    pub fn has_gradient(&self, token: &Token) -> bool {
        if let Some(divergence) = self.divergence(token) {
            return divergence.value != 0.0 && token.weight * token.inputs.policy_weight != 0.0;
        }
        // A gradient of a logp reaches no logit if its id has all of the probability.
        let first = (self.grad_logp(token, &token.branch, token.coupling), token.probability_of_others);
        let of_kl = (self.grad_kl_logp(token, &token.branch), token.kl_probability_of_others);
        let others = self.others(token).iter().map(|other| (other.grad_logp, other.probability_of_others));
        [first, of_kl].into_iter().chain(others).any(|(grad, others)| grad != 0.0 && others > 0.0)
            || token.grad_entropy != 0.0
            || RowGradient::new(token).is_some()
    }

    /// Returns `dlogits[b,t,:]`; zeros if the token is masked.
    pub fn dlogits_row(&self, b: usize, t: usize) -> Vec<f64> {
        self.dlogits_columns(b, t, 0..self.shape.vocab)
    }

    /// Returns `dlogits[b,t,columns]`; zeros if the token is masked.
    pub fn dlogits_columns(&self, b: usize, t: usize, columns: Range<usize>) -> Vec<f64> {
        match self.token(b, t) {
            Some(token) => {
                let grads =
                    [self.grad_logp(token, &token.branch, token.coupling), self.grad_kl_logp(token, &token.branch)];
                self.dlogits_of(&self.columns(b, t, token, columns), token, grads)
            }
            None => vec![0.0; columns.len()],
        }
    }

    /// Returns the dlogits of a token's `columns`, if its `∂loss/∂ℓ` and that of the KL penalty's own log-probability were these.
    pub fn dlogits_of(&self, columns: &TokenColumns, token: &Token, [grad_logp, grad_kl]: [f64; 2]) -> Vec<f64> {
        if let Some(divergence) = self.divergence(token) {
            let weight = token.weight * token.inputs.policy_weight;
            let p = &columns.logp().probabilities;
            let gradient = divergence.gradient(&self.problem, token.at, columns.first(), p);
            return gradient.into_iter().map(|slope| if weight == 0.0 { 0.0 } else { weight * slope }).collect();
        }
        let first = LogpGradient { id: token.id, probability_of_others: token.probability_of_others, grad: grad_logp };
        let other = |&OtherLogp { id, probability_of_others, grad_logp, .. }: &OtherLogp| LogpGradient {
            id,
            probability_of_others,
            grad: grad_logp,
        };
        let of_logps: Vec<LogpGradient> = std::iter::once(first).chain(self.others(token).iter().map(other)).collect();
        let of_kl = LogpGradient { id: token.id, probability_of_others: token.kl_probability_of_others, grad: grad_kl };
        gradient::dlogits_row(columns, token, &of_logps, &of_kl, token.grad_entropy, self.shape.vocab)
    }

    /// Returns the part of a token's dlogits that all columns have alike, before the slopes of the logits' transform: that of the mean
    /// of the logits, which label smoothing reads; else 0.
    pub fn constant_dlogit(&self, token: &Token) -> f64 {
        let of_mean = RowGradient::new(token).map_or(0.0, |row| row.by_mean);
        of_mean / self.shape.vocab as f64 / token.temperature()
    }

    /// Returns the first unmasked token, in row-major order, with a NaN or infinite log-probability, entropy, loss or
    /// gradient.
    pub fn first_nonfinite(&self) -> Option<(usize, usize)> {
        self.tokens.indexed_iter().find_map(|(at, token)| token.as_ref().is_some_and(|t| !self.finite(t)).then_some(at))
    }

    /// Whether all values of a token are finite.
    pub fn finite(&self, token: &Token) -> bool {
        // A divergence has no sampled token, whose log-probability may be −∞.
        if self.divergence(token).is_some() {
            return token.token_loss.is_finite();
        }
        let grad = self.grad_logp(token, &token.branch, token.coupling);
        let of_kl = self.grad_kl_logp(token, &token.branch);
        let of_row = token.row_term.by_log_sum_exp;
        [token.inputs.logp, token.entropy, token.token_loss, grad, of_kl, of_row].iter().all(|x| x.is_finite())
    }

    /// Returns the log-probabilities of each token's ids after its first, `[B,T,K−1]`, nats, 0 if it is masked; `None`
    /// if tokens have one id.
    pub fn logp_of_others(&self) -> Option<Array3<f64>> {
        let count = self.problem.extra.others.as_ref()?.count();
        let Shape { batch, tokens, .. } = self.shape;
        let logp = |(b, t, k): (usize, usize, usize)| self.others[[b, t]].get(k).map_or(0.0, |other| other.logp);
        Some(Array3::from_shape_fn((batch, tokens, count), logp))
    }

    /// Computes all outputs at once, including `8·B·T·V` bytes of dlogits.
    pub fn outcome(&self) -> Outcome {
        let Shape { batch, tokens, vocab } = self.shape;
        let per_token = |value: &dyn Fn(&Token) -> f64| self.tokens.map(|token| token.as_ref().map_or(0.0, value));
        // Rows are independent and are computed in parallel, in order.
        let rows = (0..batch * tokens).into_par_iter().flat_map_iter(|i| self.dlogits_row(i / tokens, i % tokens));
        Outcome {
            loss: arr0(self.loss).into(),
            logp: per_token(&|token| token.inputs.logp).into(),
            logp_of_others: self.logp_of_others().map(Into::into),
            entropy: per_token(&|token| token.entropy).into(),
            token_loss: per_token(&|token| token.token_loss).into(),
            gradient: Array3::from_shape_vec((batch, tokens, vocab), rows.collect()).expect("V values a token").into(),
            metrics: self.metrics,
        }
    }
}
