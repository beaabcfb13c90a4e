//! The condition of each output: how strongly f32 rounding shows in it, which is the `scale` of its limit.
//!
//! Derived in `docs/tolerances.md`. With the gaps `a_j = m − z_j`, `ā = Σ p_j a_j`, `ā₂ = Σ p_j a_j²`:
//!
//! | output | scale |
//! |---|---|
//! | logp | `C_ℓ = (1 + a_y + ā + |log p_y|)·∂ℓ/∂log p_y` |
//! | entropy | `C_H = 1 + H + ā + ā₂` |
//! | token loss | `|policy| + β(1 + |kl| + |d|) + Δ(token loss)` |
//! | `G = ∂loss/∂ℓ` | `w(|policy′| + β|kl′| + Δ(policy′ + β·kl′))` |
//! | dlogits, `j ≠ y` | `p_j (G_abs(1 + a_j + ā) + ΔG)/T + C_E` |
//! | dlogits, `j = y` | `(G_abs((1−p_y)(1 + ā) + Σ_{j≠y} p_j a_j) + (1−p_y)ΔG)/T + C_E` |
//!
//! `Δ(f)` is how far `f` moves, in units of `u`, when `ℓ` moves by `C·u` with `C = C_ℓ + |old_logp| + |ref_logp|`, or, if
//! that is more, when the log-ratio `x` and the difference `d` move by `|x|·u` and `|d|·u`, each by itself. If tokens
//! share a ratio, it is also moved by `C̄·u`, with `C̄` the sequence's mean of `C_ℓ + |old_logp| + |x|`, or its sum, and `G` includes
//! what the sequence's tokens owe to that ratio, terms and movement alike. `C_E = |E| q_j ((a_j + ā)(1 + a_j + ā) + ā₂)/T` is the
//! condition of the entropy bonus.
//!
//! At [`Grade::Standard`] the target is `max(…, G_abs(1 + p_y(a_y + ā)) + (1−p_y)ΔG)/T`, as `G − G·p_y` rounds, and
//! `C_E = |E| q_j ((1 + a_j + ā)(2 + |ln q_j| + H) + ā₂)/T`, as `−q_j(ln q_j + H)` does; and SAPO's
//! `|policy′|` is `4ρ|A|σ(2σ − 1)` or more, as `σ(1 − σ)` rounds.
//!
//! If a token has several ids, with cotangents `c_k`, `G_abs` is `W = Σ |c_k|` in every column that is none of them, and on an id's
//! column, with `C` the `Σ |c_k|` of its places and `R = W − C`,
//!
//! ```text
//! (C((1−p_y)(1 + ā) + Σ_{j≠y} p_j a_j) + R·p_y(1 + a_y + ā))/T + C_E
//! ```
//!
//! at [`Grade::Standard`] `(C(1 + p_y(a_y + ā)) + R·p_y(1 + a_y + ā))/T + C_E` or more, as `C − (C + R)·p_y` rounds. Sums of `K`
//! cotangents are also off by `(K − 1)·u` of their terms' sizes, in any order of adding up.
//!
//! If the KL penalty reads a log-probability `ℓ′` of another softmax than the ratio does, `ℓ′` has a condition `C_ℓ` and a
//! movement of its own, which add to those of `ℓ`, and dlogits have the terms of `G` once more, with the `G′ = ∂loss/∂ℓ′` and the
//! probabilities of that softmax.
//!
//! In addition to the scale, which `κ·u` multiplies, each limit has a *floor*, an error that nothing multiplies: what f32 flushes to
//! 0; what follows from an error `ε_j` that each logit has of its own, if it is a product; and at [`Grade::Standard`] from an
//! offset, `offset·u·M` with `M` the size of the row's largest logit divided by T, as `x − logsumexp(x)` and `x/T` round;
//! and of a long row, if nothing else explains it, from its sum in lanes of f32, one relative error `η` of all probabilities.

mod alternatives;
mod bound;
mod lanes;
mod moves;
mod row;
mod sequence;
mod softmax;
mod terms;

use ndarray::Array2;
use rayon::prelude::*;

use super::distillation::DivergenceCondition;
use super::gate::Output;
use super::objective::ObjectiveTerms;
use super::tolerance::{Grade, Limits};
use alternatives::{branches, nearby};
use assay_core::spec::{Kl, KlEstimator, KlImportance};
use assay_reference::{Branch, Reference, Token, TokenInputs, clipped};
use sequence::{BatchCondition, SequenceCondition};
use softmax::{LogpSoftmax, logp_bound, others_bound};
use terms::{clamp_rounding, importance, kl_flushed, weighted};

pub(crate) use bound::{ErrorBound, FLUSHED};
pub(crate) use lanes::{LONG_ROW, lane_sum_error_of, sum_error_at_any_scale};
pub(crate) use moves::{InputMoves, response};
pub(crate) use row::RowErrors;
pub(crate) use sequence::RatioTerms;
pub(crate) use softmax::{LogitErrors, SoftmaxErrors, entropy_errors, sum_error, transform_rounding};
pub(crate) use terms::{GradTerms, grad_flushed, grad_terms};

/// The parts of the limits that a condition depends on: how near to a kink either side is right, and what a grade forgives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bands {
    /// The `κ` of logp.
    pub(crate) logp: f64,
    /// The `κ` of entropy.
    pub(crate) entropy: f64,
    pub(crate) grade: Grade,
    /// The error of an exponent in units of `u·M`.
    pub(crate) offset: f64,
    /// Whether the sum of a long row may have been added up in lanes of f32.
    pub(crate) lanes: bool,
    /// Whether entropy may have been computed as `lse − Σ p·z`.
    pub(crate) entropy_difference: bool,
    /// Whether half of the difference of two answers is judged: a row's sum may then be added up in one lane, and in a tree of lanes.
    pub(crate) differences: bool,
}

impl Bands {
    /// Bands of width 0, for values that are far finer than any band.
    pub(crate) const NONE: Bands = Bands {
        logp: 0.0,
        entropy: 0.0,
        grade: Grade::Exact,
        offset: 0.0,
        lanes: false,
        entropy_difference: false,
        differences: false,
    };
}

impl From<&Limits<'_>> for Bands {
    fn from(limits: &Limits) -> Self {
        Self {
            logp: limits.kappa(Output::Logp),
            entropy: limits.kappa(Output::Entropy),
            grade: limits.grade,
            offset: limits.offset(),
            lanes: limits.sums_in_lanes(),
            entropy_difference: limits.entropy_as_difference(),
            differences: limits.are_of_differences(),
        }
    }
}

/// A branch of the loss that rounding may have put a token on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BranchAlternative {
    /// The token's own branch.
    pub(crate) branch: Branch,
    /// The derivative of the loss by the ratio that the sequence's tokens share, with all of them on their branches.
    pub(crate) coupling: f64,
}

/// The conditions of one unmasked token.
#[derive(Clone, Debug)]
pub(crate) struct Condition {
    /// The bound of logp; its scale is `C_ℓ`.
    pub(crate) logp: ErrorBound,
    /// The bounds of logp of the token's other ids, in order.
    pub(crate) others: Vec<ErrorBound>,
    /// The bound of entropy; its scale is `C_H`.
    pub(crate) entropy: ErrorBound,
    /// The bound of the token loss: the largest over the alternatives. The ratio, times `A` and times the KL estimate, and the loss
    /// itself may be flushed.
    pub(crate) token_loss: ErrorBound,
    /// The bound of the KL estimate.
    pub(crate) kl: ErrorBound,
    /// The bound of the ratio.
    pub(crate) ratio: ErrorBound,
    /// The branches that rounding may have put the token on; the reference's own first.
    pub(crate) alternatives: Vec<BranchAlternative>,
    /// Whether the token may or may not count as clipped low, and high.
    pub(crate) tied: (bool, bool),
    /// Whether f32 arithmetic overflows though f64 does not: any value that is not finite is then an honest answer.
    pub(crate) overflows: bool,
    pub(crate) softmax: SoftmaxErrors,
    pub(crate) row: RowErrors,
    pub(crate) errors: LogitErrors,
    pub(crate) moves: InputMoves,
    /// The terms of `Σ_u |∂loss/∂w_u|` over the sequence before they cancel, and how far they move.
    pub(crate) shared: RatioTerms,
    /// The bounds of the divergence from a teacher, if the spec is of one.
    pub(crate) divergence: Option<DivergenceCondition>,
    pub(crate) grade: Grade,
}

impl Condition {
    /// Evaluates the conditions of every unmasked token; `errors` has one entry per token, or none if logits are given.
    pub(crate) fn for_tokens(reference: &Reference, bands: Bands, errors: &[LogitErrors]) -> Array2<Option<Condition>> {
        let shape = reference.shape();
        // The errors are flat, `[B·T]`; an empty list means that logits are given, and each token then has no error.
        let errors = |(b, t): (usize, usize)| errors.get(b * shape.tokens + t).cloned().unwrap_or_default();
        // First every softmax by itself, which is the expensive part: each reads V logits.
        let places: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
        let softmax = |at: (usize, usize)| {
            Some(SoftmaxErrors::new(reference, at, reference.token(at.0, at.1)?, &errors(at), bands))
        };
        let all: Vec<Option<SoftmaxErrors>> = places.into_par_iter().map(softmax).collect();
        let all = Array2::from_shape_vec((shape.batch, shape.tokens), all).expect("one entry per token");
        // Then what tokens share: choices among all tokens of the batch, and the ratio of a sequence.
        let batch = BatchCondition::new(reference, &all, bands);
        let mut conditions = Array2::from_elem(all.dim(), None);
        for places in reference.problem().sequences() {
            let tokens = places.places().filter_map(|at| Some((at, reference.token(at.0, at.1)?, all[at]?)));
            let tokens: Vec<((usize, usize), &Token, SoftmaxErrors)> = tokens.collect();
            let sequence = SequenceCondition::new(reference, bands, &batch, &tokens);
            for &(at, token, softmax) in &tokens {
                conditions[at] =
                    Some(Condition::new(reference, token, (softmax, errors(at)), bands, &batch, &sequence));
            }
            // A token's derivative by a shared ratio reaches all tokens of its sequence, and so does its overflow.
            if reference.spec().ratio.level.is_shared() {
                let overflow = |at| conditions[at].as_ref().is_some_and(|condition: &Condition| condition.overflows);
                let overflows = places.places().any(overflow);
                for at in places.places() {
                    conditions[at].iter_mut().for_each(|condition: &mut Condition| condition.overflows = overflows);
                }
            }
        }
        conditions
    }

    /// Returns the relative error of the row's sum of exponentials, and of the cotangents that multiply it: all probabilities in dlogits
    /// share it; 0 unless it is forgiven.
    pub(crate) fn row_sum(&self) -> f64 {
        self.softmax.lane_sum + self.row.cotangents
    }

    fn new(
        reference: &Reference,
        token: &Token,
        (softmax, errors): (SoftmaxErrors, LogitErrors),
        bands: Bands,
        batch: &BatchCondition,
        sequence: &SequenceCondition,
    ) -> Self {
        let (spec, inputs) = (reference.spec(), &token.inputs);
        let moves = sequence.moves(spec, token, softmax);

        // The branches that rounding may have put the token on, each with every choice of the sequence's other tokens.
        let nearby = nearby(spec, token, softmax, bands, batch, sequence);
        let branches = branches(spec, token, &nearby, moves, bands);
        // The branches do not tell how a token counts in the clip fractions, so inputs nearby are asked again: a token
        // is tied where any of them counts otherwise than the reference.
        let tied = nearby.iter().fold((false, false), |tied, inputs| {
            let (low, high) = clipped(spec, inputs);
            (tied.0 || low != token.clipped_low, tied.1 || high != token.clipped_high)
        });
        // A coupling belongs to the whole sequence and a branch to the token, so every pair of them is possible.
        let with_coupling = |&coupling| branches.iter().map(move |&branch| BranchAlternative { branch, coupling });
        let alternatives: Vec<BranchAlternative> = sequence.couplings.iter().flat_map(with_coupling).collect();

        // The token loss: its terms' sizes, and how far it moves with its inputs, on the branch where that is most.
        let respond = |f: &dyn Fn(&TokenInputs) -> f64| response(spec, inputs, moves, f);
        let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
        // A KL estimate rounds at the size of its value and at those of its terms 1 and d, which the importance weight
        // multiplies; d is at most its clamp.
        let kl_terms = spec.kl.as_ref().map_or(0.0, |kl| {
            let d = inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.kl_logp);
            let d = d.abs().min(kl.difference_clamp.unwrap_or(f64::INFINITY));
            let importance = importance(spec, kl, inputs);
            token.kl.value.abs() + importance * (1.0 + d) + clamp_rounding(spec, kl, inputs)
        });
        // A token whose values are not finite is judged by that alone, and adds no scale to a sum.
        let token_loss = branches.iter().fold(ErrorBound::default(), |most, branch| {
            let response = respond(&|inputs| reference.token_loss(inputs, branch));
            let terms = ObjectiveTerms::new(spec, inputs, branch, bands.grade).value + weighted(beta, kl_terms);
            most.or(ErrorBound { scale: terms + response.scale, floor: response.floor }.finite_or_zero())
        });
        // The other ids of a token bring a term `c_k·ℓ_k` each to its loss, and their bounds to the bound of the loss.
        let others: Vec<ErrorBound> = reference
            .others(token)
            .iter()
            .map(|other| logp_bound(reference, token, other.id, LogpSoftmax::Ratio, (&errors, &softmax), bands))
            .collect();
        let others_loss = others_bound(reference, token, &others).finite_or_zero();
        let row = RowErrors::new(reference, token, &softmax, &errors, bands);

        // Flushed values add to the floor: the loss itself, the ratio (which `A` multiplies, and then the sampler's
        // weight), a coefficient that multiplies ℓ, and the ratio in front of the KL estimate.
        let kl_flushed = kl_flushed(spec, inputs, &token.branch)[0];
        let loss_flushed = {
            let terms = ObjectiveTerms::new(spec, inputs, &token.branch, bands.grade);
            let is_score = terms.is_score && inputs.logp.is_finite();
            let of_score = if is_score { inputs.logp.abs() * terms.flushed } else { 0.0 };
            let of_kl = weighted(beta, kl_flushed);
            (1.0 + inputs.advantage.abs() * (1.0 + inputs.policy_weight) + of_score + of_kl) * FLUSHED
        };
        let with_response = |scale: f64, response: ErrorBound| {
            ErrorBound { scale: scale + response.scale, ..response }.finite_or_zero()
        };
        // A divergence has no log-probability to respond to.
        let divergence = DivergenceCondition::new(reference, token, &errors, bands);
        let token_loss = match &divergence {
            Some(of) => times_weight(of.value, inputs.policy_weight),
            None => token_loss,
        };
        let loses_tail = divergence.as_ref().is_some_and(|of| of.loses_tail);
        let ratio = inputs.ratio(spec);
        let kl_value =
            |inputs: &TokenInputs| spec.kl.as_ref().map_or(0.0, |kl| token.branch.kl(spec, kl, inputs).value);
        Self {
            logp: softmax.logp.finite_or_zero(),
            others: others.into_iter().map(ErrorBound::finite_or_zero).collect(),
            entropy: softmax.entropy.finite_or_zero(),
            token_loss: token_loss.plus_floor(loss_flushed).plus(others_loss).plus(row.value.finite_or_zero()),
            kl: with_response(kl_terms, respond(&kl_value)).plus_floor((1.0 + kl_flushed) * FLUSHED),
            ratio: with_response(ratio, respond(&|inputs| inputs.ratio(spec))),
            alternatives,
            tied,
            overflows: overflows(reference, token) || loses_tail,
            softmax,
            row,
            errors,
            moves,
            shared: sequence.terms,
            divergence,
            grade: bands.grade,
        }
    }
}

/// Returns the bound of a value times a weight; that of a weight of 0 is 0.
fn times_weight(bound: ErrorBound, weight: f64) -> ErrorBound {
    if weight == 0.0 { ErrorBound::default() } else { bound.times(weight) }
}

/// Whether a value on the way to the token's loss or gradient may overflow f32 though it is finite in f64.
fn overflows(reference: &Reference, token: &Token) -> bool {
    let (spec, inputs) = (reference.spec(), &token.inputs);
    // A factor of 2 leaves room for the errors of the value itself.
    let largest = f64::from(f32::MAX) / 2.0;
    // k3's own exponential, which an importance ratio below 1 may bring back into range.
    let k3 = spec.kl.as_ref().filter(|kl| kl.estimator == KlEstimator::K3).map_or(0.0, |kl| {
        let d = inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.kl_logp);
        d.min(kl.difference_clamp.unwrap_or(f64::INFINITY)).exp()
    });
    // A gradient is divided by the temperature before or after it is multiplied by a probability.
    let grad = reference.grad_logp(token, &token.branch, token.coupling) / token.temperature();
    let grad_kl = reference.grad_kl_logp(token, &token.branch) / token.temperature();
    let grad_others: f64 =
        reference.others(token).iter().map(|other| other.grad_logp.abs() / token.temperature()).sum();
    let parts = [token.policy, token.kl].map(|term| [term.value, term.by_logp, term.by_log_ratio]);
    // A weight may overflow though its product with a small estimate does not.
    let weighs = |kl: &&Kl| matches!(kl.importance, KlImportance::TokenRatio | KlImportance::Rollout);
    let weight = spec.kl.as_ref().filter(weighs).map_or(0.0, |kl| importance(spec, kl, inputs));
    parts.as_flattened().iter().any(|x| x.abs() > largest)
        || (token.policy.by_log_ratio != 0.0 && inputs.ratio(spec) > largest)
        || [k3, weight, grad.abs(), grad_kl.abs(), grad_others].into_iter().any(|x| x > largest)
}
