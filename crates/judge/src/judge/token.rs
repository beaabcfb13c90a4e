//! [`JudgedToken`]: one unmasked token with its conditions, and the judging of all of them.

use ndarray::{Ix0, Ix2};
use rayon::prelude::*;

use super::JudgedReference;
use super::branch::{BestBranch, best_branches};
use super::dlogits::{DLOGITS_MODELS, compare_masked_rows};
use super::gates::{GateLimit, GateTallies, StoredDtype};
use super::metrics::compare_metrics;
use super::outputs::CandidateOutputs;
use crate::condition::{Condition, ErrorBound, FLUSHED, LogitErrors};
use crate::gate::{Edge, Gate, Output};
use crate::metric::Position;
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, FloatArray, Shape};
use assay_reference::{Reference, Token};

/// One unmasked token with its conditions.
pub(crate) struct JudgedToken<'r> {
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) token: &'r Token,
    pub(crate) condition: Condition,
    /// Whether every exact value of the token is finite.
    pub(crate) finite: bool,
    pub(crate) edge: Option<Edge>,
}

impl JudgedToken<'_> {
    pub(crate) fn at(&self) -> Position {
        Position::token(self.b, self.t)
    }

    /// Iterates over the token's ids: the first, then the others that the spec asks logp of; none of a divergence.
    pub(crate) fn ids(&self, reference: &Reference) -> impl Iterator<Item = usize> {
        // A divergence has no sampled token.
        let first = self.condition.divergence.is_none().then_some(self.token.id);
        first.into_iter().chain(reference.others(self.token).iter().map(|other| other.id))
    }

    /// Whether a correct kernel's values of the token may be NaN or ∞.
    pub(crate) fn may_be_nonfinite(&self) -> bool {
        self.condition.overflows || !self.finite
    }
}

/// Collects the unmasked tokens in order; `errors` are those of each token's logits, empty if logits are given.
pub(crate) fn judged_tokens<'r>(
    reference: &'r Reference,
    limits: &Limits,
    errors: &[LogitErrors],
) -> Vec<JudgedToken<'r>> {
    let mut conditions = Condition::for_tokens(reference, limits.into(), errors);
    let judged = |(b, t): (usize, usize)| {
        let (token, condition) = (reference.token(b, t)?, conditions[[b, t]].take()?);
        let finite = reference.finite(token);
        let edge = edge_at(reference, (b, t), condition.overflows || !finite);
        Some(JudgedToken { b, t, token, condition, finite, edge })
    };
    let Shape { batch, tokens, .. } = reference.shape();
    ndarray::indices((batch, tokens)).into_iter().filter_map(judged).collect()
}

/// Finds the edge that a token is at: a logit of −∞ comes before a very low one, and both before overflow.
fn edge_at(reference: &Reference, (b, t): (usize, usize), overflows: bool) -> Option<Edge> {
    let logits = &reference.problem().logits;
    // The range of bf16 is that of f32, and f64 logits are judged by f32's as kernels read them so. Half of the lowest
    // number is low enough: kernels that mask by a lowest float may add a logit to it.
    let lowest = match logits.dtype() {
        Dtype::F16 => f64::from(half::f16::MIN) / 2.0,
        Dtype::Bf16 | Dtype::F32 | Dtype::F64 => f64::from(f32::MIN) / 2.0,
    };
    match logits.at_most(b, t, lowest) {
        true if logits.at_most(b, t, f64::NEG_INFINITY) => Some(Edge::MinusInfinity),
        true => Some(Edge::LowestFloat),
        false if lacks_entries(reference, (b, t)) => Some(Edge::MinusInfinity),
        false => overflows.then_some(Edge::Overflow),
    }
}

/// Whether the token's teacher has entries without probability.
fn lacks_entries(reference: &Reference, (b, t): (usize, usize)) -> bool {
    let teacher = reference.problem().extra.teacher.as_ref().filter(|_| reference.spec().reads_teacher());
    teacher.is_some_and(|teacher| teacher.floats().at_most(b, t, f64::NEG_INFINITY))
}

/// Picks the edge that a value of all tokens is judged at if it is NaN or ∞ and should not be: the first of their edges.
pub(crate) fn shared_edge(tokens: &[JudgedToken]) -> Option<Edge> {
    tokens.iter().filter_map(|token| token.edge).min()
}

/// Judges all outputs of each candidate but the gradients of an LM head: token by token, then what tokens share.
pub(super) fn judge_tokens(
    judged: JudgedReference,
    candidates: &[CandidateOutputs],
    tokens: &[JudgedToken],
    limits: &Limits,
) -> Vec<GateTallies> {
    // Tokens are independent, and each finds the branches that fit the candidates best: this is nearly all of the work.
    let best = |token| best_branches(judged.reference, candidates, token, limits);
    let by_token: Vec<Vec<BestBranch>> = tokens.par_iter().map(best).collect();
    // Transposed, so that each candidate has its own tokens in order.
    let mut by_candidate: Vec<Vec<BestBranch>> = candidates.iter().map(|_| Vec::with_capacity(tokens.len())).collect();
    for of_token in by_token {
        by_candidate.iter_mut().zip(of_token).for_each(|(all, best)| all.push(best));
    }
    let tally = |(candidate, best): (&CandidateOutputs, Vec<BestBranch>)| {
        tally_candidate(judged, candidate, tokens, best, limits)
    };
    candidates.iter().zip(by_candidate).map(tally).collect()
}

/// Tallies the outputs of one candidate, whose tokens fit the branches `best`.
fn tally_candidate(
    judged: JudgedReference,
    candidate: &CandidateOutputs,
    tokens: &[JudgedToken],
    best: Vec<BestBranch>,
    limits: &Limits,
) -> GateTallies {
    let reference = judged.reference;
    let hidden = judged.head.map_or(0, |head| head.reference.shape().hidden);
    let mut tallies = GateTallies::new(limits, reference.shape(), hidden);
    if let Some(logp) = candidate.logp {
        compare_each(&mut tallies, Output::Logp, logp, tokens, limits, |token| {
            (token.token.inputs.logp, token.condition.logp)
        });
    }
    if let Some(entropy) = candidate.entropy {
        compare_each(&mut tallies, Output::Entropy, entropy, tokens, limits, |token| {
            (token.token.entropy, token.condition.entropy)
        });
    }
    if let Some(values) = candidate.logp_of_others {
        let limit = GateLimit::elementwise(Output::Logp, StoredDtype::scalar(values.dtype()), limits);
        for token in tokens {
            let expected = reference.others(token.token).iter().zip(&token.condition.others);
            let tally = tallies.entry(limit.gate.at(token.edge), limit.stored, Some(limit.kappa));
            for (k, ((other, bound), actual)) in (1..).zip(expected.zip(values.row(token.b, token.t))) {
                limit.compare(tally, token, Position { k: Some(k), ..token.at() }, (other.logp, *bound), actual);
            }
        }
    }

    // The gates of token losses and dlogits are entered first: each has a verdict even if no token counts.
    let token_loss = candidate
        .token_loss
        .map(|values| GateLimit::elementwise(Output::TokenLoss, StoredDtype::scalar(values.dtype()), limits));
    if let Some(GateLimit { gate, stored, kappa }) = token_loss {
        // The tally of the gate at no edge exists even if all tokens are at edges.
        tallies.entry(gate, stored, Some(kappa));
    }
    let rows = candidate.dlogits.as_ref().map(|dlogits| {
        let stored = StoredDtype::gradient(dlogits.dtype(), reference.problem().logits.dtype());
        let kappa = limits.kappa(Output::Dlogits);
        for model in DLOGITS_MODELS {
            tallies.entry(Gate::new(Output::Dlogits, model), stored, Some(kappa));
        }
        compare_masked_rows(dlogits, tokens, reference.shape(), stored, &mut tallies);
        (stored, kappa)
    });
    // The kinks are read before the tallies are moved out: the loss, compared last, is allowed the distance to the
    // branches that fit.
    let kinks: Vec<f64> = best.iter().map(|best| best.kink).collect();
    for (token, best) in tokens.iter().zip(best) {
        if let Some(GateLimit { gate, stored, kappa }) = token_loss {
            tallies.entry(gate.at(token.edge), stored, Some(kappa)).absorb(best.token_loss);
        }
        if let Some((stored, kappa)) = rows {
            for (model, tally) in DLOGITS_MODELS.into_iter().zip(best.row.into_tallies()) {
                tallies.entry(Gate::new(Output::Dlogits, model).at(token.edge), stored, Some(kappa)).absorb(tally);
            }
        }
    }
    if let Some(loss) = candidate.loss {
        compare_loss(&mut tallies, reference, loss, tokens, &kinks, limits);
    }
    if let Some(metrics) = candidate.metrics {
        compare_metrics(&mut tallies, reference, metrics, tokens, limits);
    }
    tallies
}

/// Compares a `[B,T]` output, whose exact value and error bound `expected` gives.
fn compare_each(
    tallies: &mut GateTallies,
    output: Output,
    values: &FloatArray<Ix2>,
    tokens: &[JudgedToken],
    limits: &Limits,
    expected: fn(&JudgedToken) -> (f64, ErrorBound),
) {
    let limit = GateLimit::elementwise(output, StoredDtype::scalar(values.dtype()), limits);
    tallies.entry(limit.gate, limit.stored, Some(limit.kappa));
    for token in tokens {
        let tally = tallies.entry(limit.gate.at(token.edge), limit.stored, Some(limit.kappa));
        limit.compare(tally, token, token.at(), expected(token), values.at(token.b, token.t));
    }
}

/// Compares the loss: `|Δloss| ≤ ½ulp + κ·u·(Σ w·scale + Σ |∂loss/∂H|·C_H) + floor`, where the floor contains what flushing, and
/// crossing a kink inside its band, may change.
fn compare_loss(
    tallies: &mut GateTallies,
    reference: &Reference,
    loss: &FloatArray<Ix0>,
    tokens: &[JudgedToken],
    kinks: &[f64],
    limits: &Limits,
) {
    let mut bound = ErrorBound { scale: 0.0, floor: FLUSHED };
    for (token, kink) in tokens.iter().zip(kinks) {
        // The weight of policy and KL terms may differ. The larger of the two bounds both, as `token_loss` is the bound
        // of their sum.
        let weight = token.token.weight.max(token.token.kl_weight);
        let grad_entropy = token.token.grad_entropy.abs();
        let Condition { token_loss, entropy, .. } = &token.condition;
        bound.scale += weight * token_loss.scale + grad_entropy * entropy.scale;
        bound.floor += weight * (token_loss.floor + kink) + grad_entropy * entropy.floor;
    }
    let limit = GateLimit::elementwise(Output::Loss, StoredDtype::scalar(loss.dtype()), limits);
    let actual = loss.value();
    // A mean of no loss is NaN in some projects, and 0 in others, which divide by at least 1.
    let is_of_nothing = tokens.is_empty() && reference.loss().is_nan();
    let open = is_of_nothing || (!actual.is_finite() && tokens.iter().any(JudgedToken::may_be_nonfinite));
    tallies.compare_shared(limit, tokens, (reference.loss(), bound), actual, open);
}
