//! The oracle: the GRPO loss, entropy and dlogits in f64, written to be read beside the formulas.
//!
//! Inputs are widened exactly, sums are compensated ([`Sum`]), gradients are in closed form. Nothing here is shared
//! with any kernel, and nothing outside [`assay_core::spec`] and [`assay_core::problem`] is used.
//!
//! A masked token is never looked at: it is absent from every sum, whatever stands in its logits, id, advantage or
//! log-probabilities, and its dlogits are 0. Where a value cannot be finite (a NaN logit, `exp` beyond 1.8e308) the
//! result holds the NaN or ∞ and [`Reference::first_nonfinite`] names the token; other rows stay right.

mod columns;
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
pub use lm_head::{HeadReference, evaluate_head};
pub use log_softmax::Softmax;
pub use objective::{Branch, clipped};
pub use ratio::BoundedValue;
pub use selection::{Choice, quantile_index};
pub use sum::Sum;
pub use token::{Term, TokenInputs};

use assay_core::problem::{Metrics, Outcome, Problem, ProblemError, Sequence, Shape};
use assay_core::spec::{
    Averaging, DroppedTerm, LossSpec, LossTerms, Objective, OldLogp, RatioLevel, Reduction, TemperatureDivides,
};
use gradient::LogpGradient;
use logits_transform::TransformedLogits;
use rollout::Corrections;
use selection::Sample;

/// A softmax over logits divided by `divisor`.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSoftmax {
    /// What divides the logits before the softmax.
    pub divisor: f64,
    /// Statistics of the divided row.
    pub stats: Softmax,
}

/// Everything the loss knows about one unmasked token.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// Its place, `[b,t]`.
    pub at: (usize, usize),
    /// The sampled id, `y`; the first where it has several.
    pub id: usize,
    /// The softmax that `logp` is taken from.
    pub logp_softmax: ScaledSoftmax,
    /// The softmax that `entropy` is taken from, whose divisor is the token's temperature: the same unless that divides the
    /// log-probability.
    pub entropy_softmax: ScaledSoftmax,
    /// `1 − p_y`, summed over the other columns.
    pub probability_of_others: f64,
    /// `H`, nats.
    pub entropy: f64,
    /// `ℓ` and what it is compared with.
    pub inputs: TokenInputs,
    /// The smooth piece of the loss that the token is on.
    pub branch: Branch,
    /// Policy term, with its masks and weights.
    pub policy: Term,
    /// KL estimate, without `beta`.
    pub kl: Term,
    /// `Σ dlogp_k · ℓ_k` of its other ids; 0 where it has none.
    pub of_others: f64,
    /// `policy + beta · kl`, and that.
    pub token_loss: f64,
    /// Whether the token counts as clipped low.
    pub clipped_low: bool,
    /// Whether the token counts as clipped high.
    pub clipped_high: bool,
    /// What the reduction, and `scale`, multiply the policy term by.
    pub weight: f64,
    /// And `beta · kl`.
    pub kl_weight: f64,
    /// And `entropy_coef · H`.
    pub entropy_weight: f64,
    /// `∂loss/∂H`: of the entropy bonus, or given.
    pub grad_entropy: f64,
    /// `∂w/∂x` of this token in its row's log-ratio: `1/n` of a token in its mean, 1 in its sum; 1 where the ratio is the token's own.
    pub share: f64,
    /// `Σ_u ∂loss/∂w_u` over the row where its tokens share a ratio that has a gradient; else 0.
    pub coupling: f64,
}

/// An id of a token beside its first.
#[derive(Clone, Copy, Debug)]
pub struct OtherLogp {
    /// `y_k`
    pub id: usize,
    /// `ℓ_k`, nats.
    pub logp: f64,
    /// `1 − p_y`, summed over the other columns.
    pub probability_of_others: f64,
    /// `∂loss/∂ℓ_k`.
    pub grad_logp: f64,
}

/// A problem, evaluated. Rows of dlogits are made on request, so that a large vocabulary needs no `[B,T,V]` of f64.
#[derive(Debug)]
pub struct Reference<'p> {
    spec: &'p LossSpec,
    problem: Cow<'p, Problem>,
    shape: Shape,
    tokens: Array2<Option<Token>>,
    /// Of each token, in order; none where it is masked.
    others: Array2<Vec<OtherLogp>>,
    loss: f64,
    metrics: Metrics,
}

/// What the logits of one token come to.
#[derive(Clone, Copy)]
struct TokenScore {
    at: (usize, usize),
    id: usize,
    logp_softmax: ScaledSoftmax,
    entropy_softmax: ScaledSoftmax,
    probability_of_others: f64,
    entropy: f64,
    logp: f64,
    /// `Σ dlogp_k · ℓ_k` of the other ids.
    of_others: f64,
}

impl TokenScore {
    /// What those of a token came to.
    fn from_token(token: &Token) -> Self {
        let &Token { at, id, logp_softmax, entropy_softmax, probability_of_others, entropy, inputs, of_others, .. } =
            token;
        Self { at, id, logp_softmax, entropy_softmax, probability_of_others, entropy, logp: inputs.logp, of_others }
    }
}

/// Evaluates `problem` under `spec`.
///
/// # Errors
/// [`ProblemError`] where the spec is out of range or the problem does not fit it.
pub fn evaluate<'p>(spec: &'p LossSpec, problem: &'p Problem) -> Result<Reference<'p>, ProblemError> {
    evaluate_owned(spec, Cow::Borrowed(problem))
}

fn evaluate_owned<'p>(spec: &'p LossSpec, given: Cow<'p, Problem>) -> Result<Reference<'p>, ProblemError> {
    let problem = &*given;
    let shape = problem.check(spec)?;
    let corrections = rollout::corrections(spec, problem);
    let positions: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
    let scored = positions.into_par_iter().map(|at| corrections.mask[at].then(|| score(spec, problem, at)));
    let (scored, others): (Vec<_>, Vec<_>) =
        scored.map(|token| token.map_or((None, Vec::new()), |(scored, others)| (Some(scored), others))).unzip();
    let scored = Array2::from_shape_vec((shape.batch, shape.tokens), scored).expect("one entry a token");
    let others = Array2::from_shape_vec((shape.batch, shape.tokens), others).expect("one entry a token");

    let entropies = scored.mapv(|token| token.map(|token| token.entropy));
    let high = match &spec.top_entropy {
        Some(top) => selection::top_entropy(top, &entropies),
        None => entropies.mapv(|_| true),
    };
    joined(spec, given, &corrections, &scored, others, &high)
}

/// What is more than one token's, where those of `high` entropy are these.
fn joined<'p>(
    spec: &'p LossSpec,
    given: Cow<'p, Problem>,
    corrections: &Corrections,
    scored: &Array2<Option<TokenScore>>,
    others: Array2<Vec<OtherLogp>>,
    high: &Array2<bool>,
) -> Result<Reference<'p>, ProblemError> {
    let problem = &*given;
    let shape = problem.shape();
    let mut tokens = join(spec, problem, corrections, scored, high)?;
    let sequences = problem.sequences();
    weigh(spec, problem, &sequences, &mut tokens);
    couple(spec, &sequences, &mut tokens);
    let empty: Vec<f64> = sequences
        .iter()
        .filter(|sequence| sequence.places().all(|at| tokens[at].is_none()))
        .map(|sequence| problem.tokens().advantage_of(sequence))
        .collect();
    let loss = reduction::loss(spec, &tokens, sequences.len(), &empty);
    let metrics = reduction::metrics(spec, &tokens);
    Ok(Reference { spec, problem: given, shape, tokens, others, loss, metrics })
}

/// Softmax, log-probability and entropy of token `[b,t]`; and what there is of its other ids.
fn score(spec: &LossSpec, problem: &Problem, at: (usize, usize)) -> (TokenScore, Vec<OtherLogp>) {
    let column = |id: i64| usize::try_from(id).expect("checked: 0 ≤ id < V");
    let id = column(problem.ids[at]);
    let logits = TransformedLogits::new(spec, problem, at, id, 0..problem.shape().vocab).logits;
    let softmax = |divisor: f64, z: &[f64]| ScaledSoftmax { divisor, stats: Softmax::new(z) };
    let divided = |logits: Vec<f64>, by: f64| logits.into_iter().map(|h| h / by).collect::<Vec<_>>();

    let temperature = problem.tokens().temperature(spec, at);
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
        probability_of_others: logp_softmax.stats.probability_of_others(z[id]),
        entropy: entropy_softmax.stats.entropy(),
        logp: logp_softmax.stats.log_probability(z[id]) * logp_factor,
        of_others: others.iter().map(|other| other.grad_logp * other.logp).collect::<Sum>().value(),
    };
    (scored, others)
}

/// The tokens with their losses, but without weights: what looks at a row or at the batch is looked up here.
fn join(
    spec: &LossSpec,
    problem: &Problem,
    corrections: &Corrections,
    scored: &Array2<Option<TokenScore>>,
    high: &Array2<bool>,
) -> Result<Array2<Option<Token>>, ProblemError> {
    let drops = spec.top_entropy.map_or(DroppedTerm::PolicyTerm, |top| top.drops);
    let at = |array: &Option<Array2<f64>>, place: (usize, usize)| array.as_ref().map(|array| array[place]);
    let old_logp = |place, logp| {
        ratio::old_logp(spec.old_logp, at(&problem.old_logp, place), at(&problem.extra.rollout_logp, place), logp)
    };
    let advantages = problem.tokens().advantages_of_tokens();
    // (x after clamp and clip, whether it is in the row's mean)
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
            };
            let share = match spec.ratio.level {
                RatioLevel::Token | RatioLevel::SequenceToken => 1.0,
                RatioLevel::Sequence | RatioLevel::SequenceProduct if !log_ratio(place, &token).1 => 0.0,
                RatioLevel::Sequence | RatioLevel::SequenceProduct => ratio::share(&spec.ratio, in_mean.len()),
            };
            tokens[place] = Some((token, inputs, share));
        }
    }
    select(spec, &mut tokens)?;
    Ok(tokens.mapv(|token| token.map(|(scored, inputs, share)| evaluated(spec, scored, inputs, share))))
}

/// `Σ m (behaviour − ℓ) / max(Σ m, 1)` of a row, for the off-policy mask.
fn mean_divergence(spec: &LossSpec, problem: &Problem, row: &[((usize, usize), TokenScore)]) -> f64 {
    let Some(mask) = &spec.off_policy_mask else { return 0.0 };
    let behaviour = if mask.behaviour == OldLogp::Rollout { &problem.extra.rollout_logp } else { &problem.old_logp };
    let Some(behaviour) = behaviour else { return 0.0 };
    let difference = |&(at, token): &((usize, usize), TokenScore)| {
        let difference = behaviour[at] - token.logp;
        if difference.is_nan() { 0.0 } else { difference }
    };
    row.iter().map(difference).collect::<Sum>().value() / row.len().max(1) as f64
}

/// VESPO's `ln w` of a sequence, not yet clamped.
fn row_log_weight(
    spec: &LossSpec,
    problem: &Problem,
    corrections: &Corrections,
    sequence: &Sequence,
    row: &[((usize, usize), TokenScore)],
) -> f64 {
    let Objective::Vespo(_) = &spec.objective else { return 0.0 };
    let log_ratios = row.iter().map(|(place, token)| {
        let at = |array: &Option<Array2<f64>>| array.as_ref().map(|array| array[*place]);
        let old = ratio::old_logp(spec.old_logp, at(&problem.old_logp), at(&problem.extra.rollout_logp), token.logp);
        (token.logp - old).clamp(-20.0, 20.0)
    });
    let of_tokens = log_ratios.collect::<Sum>().value();
    of_tokens + rollout::log_weights(spec, problem, corrections, sequence)
}

/// A token on its way: what its logits came to, its inputs, its share in the row's mean.
type Joined = Array2<Option<(TokenScore, TokenInputs, f64)>>;

/// What KL-Cov and Clip-Cov select by covariance, over the whole batch.
fn select(spec: &LossSpec, tokens: &mut Joined) -> Result<(), ProblemError> {
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
    for ((_, inputs, _), choice) in tokens.iter_mut().flatten().zip(choices.into_iter().flatten()) {
        inputs.selected = choice;
    }
    Ok(())
}

/// Everything about a token but its weights.
fn evaluated(spec: &LossSpec, scored: TokenScore, inputs: TokenInputs, share: f64) -> Token {
    let branch = Branch::at(spec, &inputs);
    let policy = branch.policy(spec, &inputs);
    let kl = spec.kl.as_ref().map_or(Term::default(), |kl| branch.kl(spec, kl, &inputs));
    let (clipped_low, clipped_high) = clipped(spec, &inputs);
    let TokenScore { at, id, logp_softmax, entropy_softmax, probability_of_others, entropy, of_others, .. } = scored;
    Token {
        at,
        id,
        logp_softmax,
        entropy_softmax,
        probability_of_others,
        entropy,
        inputs,
        branch,
        policy,
        kl,
        of_others,
        token_loss: policy.value + spec.kl.as_ref().map_or(0.0, |term| times_beta(term.beta, kl.value)) + of_others,
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

/// Fills in what the reductions multiply each token by, and `∂loss/∂H`.
fn weigh(spec: &LossSpec, problem: &Problem, sequences: &[Sequence], tokens: &mut Array2<Option<Token>>) {
    let count = |sequence: &Sequence| sequence.places().filter(|&at| tokens[at].is_some()).count();
    let counts: Vec<usize> = sequences.iter().map(count).collect();
    // Packed sequences are not averaged over a width.
    let width = tokens.ncols();
    let weights = reduction::row_weights(spec.averaging(), &counts, width);
    let kl_weights = reduction::row_weights(spec.kl_averaging(), &counts, width);
    // The default is over the tokens that `top_entropy` keeps.
    let kept = tokens.map(|token| token.as_ref().is_some_and(|token| token.inputs.top_entropy));
    let all_kept: Vec<usize> =
        sequences.iter().map(|sequence| sequence.places().filter(|&at| kept[at]).count()).collect();
    let own = spec.entropy_averaging.map(|averaging| reduction::row_weights(averaging, &counts, width));
    let token_mean = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
    let over_kept = reduction::row_weights(token_mean, &all_kept, width);
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

/// Fills in what the tokens of a row owe to the ratio that they share.
fn couple(spec: &LossSpec, sequences: &[Sequence], tokens: &mut Array2<Option<Token>>) {
    if !spec.ratio.level.is_shared() {
        return;
    }
    for sequence in sequences {
        let row = sequence.places().filter_map(|at| tokens[at].as_ref());
        let coupling = row.map(|token| by_log_ratio(spec, token, &token.branch)).collect::<Sum>().value();
        for at in sequence.places() {
            tokens[at].iter_mut().for_each(|token| token.coupling = coupling);
        }
    }
}

/// `∂loss/∂w` of a token, were it on `branch`.
fn by_log_ratio(spec: &LossSpec, token: &Token, branch: &Branch) -> f64 {
    let policy = token.weight * branch.policy(spec, &token.inputs).by_log_ratio;
    let kl = spec
        .kl
        .as_ref()
        .map_or(0.0, |kl| token.kl_weight * times_beta(kl.beta, branch.kl(spec, kl, &token.inputs).by_log_ratio));
    branch.cap_slope * (policy + kl)
}

/// `beta · term`; 0 where `beta` is, even if the term overflows.
fn times_beta(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}

impl Token {
    /// `T`, of this token.
    pub fn temperature(&self) -> f64 {
        self.entropy_softmax.divisor
    }
}

impl Reference<'_> {
    /// The same batch, were these the tokens whose entropy [`TopEntropy`](assay_core::spec::TopEntropy) takes for high.
    ///
    /// # Errors
    /// As [`evaluate`].
    pub fn keeping(&self, high: &Array2<bool>) -> Result<Reference<'_>, ProblemError> {
        let corrections = rollout::corrections(self.spec, &self.problem);
        let scored = self.tokens.mapv(|token| token.map(|token| TokenScore::from_token(&token)));
        joined(self.spec, Cow::Borrowed(&self.problem), &corrections, &scored, self.others.clone(), high)
    }

    /// The loss.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// What trainers log.
    pub fn metrics(&self) -> Metrics {
        self.metrics
    }

    /// `(B, T, V)`.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The spec this was evaluated under.
    pub fn spec(&self) -> &LossSpec {
        self.spec
    }

    /// The problem that was evaluated.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The logits that the softmaxes of `token`, at `[b,t]`, are of, with their probabilities and their derivatives by those given:
    /// those of `columns`.
    pub fn columns(&self, b: usize, t: usize, token: &Token, columns: Range<usize>) -> TokenColumns {
        TokenColumns::new(TransformedLogits::new(self.spec, &self.problem, (b, t), token.id, columns), token)
    }

    /// Those of all columns.
    pub fn row(&self, b: usize, t: usize, token: &Token) -> TokenColumns {
        self.columns(b, t, token, 0..self.shape.vocab)
    }

    /// Token `[b,t]`, or `None` where it is masked.
    pub fn token(&self, b: usize, t: usize) -> Option<&Token> {
        self.tokens[[b, t]].as_ref()
    }

    /// Number of unmasked tokens, `Σ m`.
    pub fn count(&self) -> usize {
        self.tokens.iter().flatten().count()
    }

    /// The ids of an unmasked token beside its first.
    pub fn others(&self, token: &Token) -> &[OtherLogp] {
        &self.others[token.at]
    }

    /// `policy + beta · kl` at `inputs`, on `branch`.
    pub fn token_loss(&self, inputs: &TokenInputs, branch: &Branch) -> f64 {
        let kl = self.spec.kl.as_ref();
        let kl = kl.map_or(0.0, |kl| times_beta(kl.beta, branch.kl(self.spec, kl, inputs).value));
        branch.policy(self.spec, inputs).value + kl
    }

    /// `∂loss/∂w` of a token, were it on `branch`: what it adds to the coupling of its row.
    pub fn by_log_ratio(&self, token: &Token, branch: &Branch) -> f64 {
        by_log_ratio(self.spec, token, branch)
    }

    /// `∂loss/∂ℓ` of a token, were it on `branch` and its row's coupling `coupling`:
    ///
    /// ```text
    /// w·policy_ℓ + w_kl·beta·kl_ℓ + ∂x/∂ℓ · share · Σ_u (w_u·policy_w + w_kl,u·beta·kl_w)
    /// ```
    ///
    /// with the sum over the tokens that share the ratio: the row, or the token alone.
    pub fn grad_logp(&self, token: &Token, branch: &Branch, coupling: f64) -> f64 {
        let policy = token.weight * branch.policy(self.spec, &token.inputs).by_logp;
        let kl =
            self.spec.kl.as_ref().map_or(0.0, |kl| {
                token.kl_weight * times_beta(kl.beta, branch.kl(self.spec, kl, &token.inputs).by_logp)
            });
        let through_ratio = match self.spec.ratio.level {
            RatioLevel::Token => branch.slope * self.by_log_ratio(token, branch),
            RatioLevel::SequenceToken => self.by_log_ratio(token, branch),
            RatioLevel::Sequence | RatioLevel::SequenceProduct => branch.slope * token.share * coupling,
        };
        policy + kl + through_ratio
    }

    /// Whether a dlogit of a token is other than 0, but for columns of no probability.
    pub fn has_gradient(&self, token: &Token) -> bool {
        let first = (self.grad_logp(token, &token.branch, token.coupling), token.probability_of_others);
        let others = self.others(token).iter().map(|other| (other.grad_logp, other.probability_of_others));
        std::iter::once(first).chain(others).any(|(grad, others)| grad != 0.0 && others > 0.0)
            || token.grad_entropy != 0.0
    }

    /// `dlogits[b,t,:]`; zeros where the token is masked.
    pub fn dlogits_row(&self, b: usize, t: usize) -> Vec<f64> {
        self.dlogits_columns(b, t, 0..self.shape.vocab)
    }

    /// `dlogits[b,t,columns]`.
    pub fn dlogits_columns(&self, b: usize, t: usize, columns: Range<usize>) -> Vec<f64> {
        match self.token(b, t) {
            Some(token) => {
                let grad_logp = self.grad_logp(token, &token.branch, token.coupling);
                self.dlogits_of(&self.columns(b, t, token, columns), token, grad_logp)
            }
            None => vec![0.0; columns.len()],
        }
    }

    /// The dlogits of a token's `columns`, were its `∂loss/∂ℓ` `grad_logp`.
    pub fn dlogits_of(&self, columns: &TokenColumns, token: &Token, grad_logp: f64) -> Vec<f64> {
        let first = LogpGradient { id: token.id, probability_of_others: token.probability_of_others, grad: grad_logp };
        let other = |&OtherLogp { id, probability_of_others, grad_logp, .. }: &OtherLogp| LogpGradient {
            id,
            probability_of_others,
            grad: grad_logp,
        };
        let of_logps: Vec<LogpGradient> = std::iter::once(first).chain(self.others(token).iter().map(other)).collect();
        gradient::dlogits_row(columns, token, &of_logps, token.grad_entropy)
    }

    /// The first unmasked token, in row-major order, with a NaN or infinite log-probability, entropy, loss or gradient.
    pub fn first_nonfinite(&self) -> Option<(usize, usize)> {
        self.tokens.indexed_iter().find_map(|(at, token)| token.as_ref().is_some_and(|t| !self.finite(t)).then_some(at))
    }

    /// Whether all of a token's values are finite.
    pub fn finite(&self, token: &Token) -> bool {
        let grad = self.grad_logp(token, &token.branch, token.coupling);
        [token.inputs.logp, token.entropy, token.token_loss, grad].iter().all(|x| x.is_finite())
    }

    /// `[B,T,K−1]`, nats: log-probabilities of each token's ids beside its first, 0 where it is masked; `None` where it has no other.
    pub fn logp_of_others(&self) -> Option<Array3<f64>> {
        let count = self.problem.extra.others.as_ref()?.count();
        let Shape { batch, tokens, .. } = self.shape;
        let logp = |(b, t, k): (usize, usize, usize)| self.others[[b, t]].get(k).map_or(0.0, |other| other.logp);
        Some(Array3::from_shape_fn((batch, tokens, count), logp))
    }

    /// All outputs at once, `8·B·T·V` bytes of dlogits among them.
    pub fn outcome(&self) -> Outcome {
        let Shape { batch, tokens, vocab } = self.shape;
        let per_token = |value: &dyn Fn(&Token) -> f64| self.tokens.map(|token| token.as_ref().map_or(0.0, value));
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
