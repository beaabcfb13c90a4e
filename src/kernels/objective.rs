//! The loss of one token, value and derivative side by side: the one arm of all kernels, apart from the reference's.

use super::arithmetic::Arithmetic;
use crate::spec::{KlEstimator, LossSpec, Objective, PpoClip};

/// The numbers of a spec that the loss of a token needs. A bound that the spec lacks is infinite.
#[derive(Clone, Copy)]
pub(crate) struct Numbers<V> {
    /// `1 − epsilon_low`
    pub(crate) low: V,
    /// `1 + epsilon_high`
    pub(crate) high: V,
    pub(crate) delta: V,
    pub(crate) dual_clip: V,
    pub(crate) beta: V,
}

impl Numbers<f64> {
    pub(crate) fn of(spec: &LossSpec) -> Self {
        let Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta, dual_clip }) = &spec.objective else {
            unreachable!("refused by `beyond_kernels`")
        };
        Self {
            low: 1.0 - epsilon_low,
            high: 1.0 + epsilon_high,
            delta: delta.unwrap_or(f64::INFINITY),
            dual_clip: dual_clip.unwrap_or(f64::INFINITY),
            beta: spec.kl.as_ref().map_or(0.0, |kl| kl.beta),
        }
    }
}

/// What the loss of a token depends on.
#[derive(Clone, Copy)]
pub(crate) struct Token<V> {
    pub(crate) logp: V,
    /// `logp` itself where the spec has `old_logp: current`.
    pub(crate) old_logp: V,
    pub(crate) advantage: V,
    /// The KL term, if there is one: its estimator and `ref_logp`.
    pub(crate) kl: Option<(KlEstimator, V)>,
}

/// A term of the loss and its derivative with respect to `logp`.
#[derive(Clone, Copy)]
struct Term<V> {
    loss: V,
    grad: V,
}

/// The loss of a token and what is logged of it.
pub(crate) struct TokenLoss<V, T> {
    /// Policy term plus `beta · kl`.
    pub(crate) loss: V,
    /// Its derivative with respect to `logp`.
    pub(crate) grad: V,
    pub(crate) ratio: V,
    /// The KL estimate, without `beta`.
    pub(crate) kl: Option<V>,
    /// The ratio is below the lower bound, and `A < 0`.
    pub(crate) clipped_low: T,
    /// The ratio is above the upper bound, and `A > 0`.
    pub(crate) clipped_high: T,
}

/// The loss of one token.
pub(crate) fn token_loss<A: Arithmetic>(
    on: &mut A,
    numbers: &Numbers<A::Value>,
    token: &Token<A::Value>,
) -> TokenLoss<A::Value, A::Truth> {
    let zero = on.constant(0.0);
    let log_ratio = on.sub(token.logp, token.old_logp);
    let ratio = on.exp(log_ratio);
    let policy = ppo_clip(on, numbers, ratio, token.advantage);

    let below = on.less(ratio, numbers.low);
    let above = on.less(numbers.high, ratio);
    let negative = on.less(token.advantage, zero);
    let positive = on.less(zero, token.advantage);
    let clipped_low = on.and(below, negative);
    let clipped_high = on.and(above, positive);

    let Some((estimator, ref_logp)) = token.kl else {
        return TokenLoss { loss: policy.loss, grad: policy.grad, ratio, kl: None, clipped_low, clipped_high };
    };
    let d = on.sub(ref_logp, token.logp);
    let kl = kl(on, estimator, d);
    // A weight of 0 leaves the term out, even where it overflows.
    let without = on.equal(numbers.beta, zero);
    let mut with_kl = |policy, kl| {
        let weighted = on.mul(numbers.beta, kl);
        let sum = on.add(policy, weighted);
        on.select(without, policy, sum)
    };
    let loss = with_kl(policy.loss, kl.loss);
    let grad = with_kl(policy.grad, kl.grad);
    TokenLoss { loss, grad, ratio, kl: Some(kl.loss), clipped_low, clipped_high }
}

/// `−min(min(r, δ)·a, clip(r)·a)`, capped at `−c·a` for `a < 0`. The gradient is that of the operand which the `min`
/// picks: `−r·a` where that operand still follows `r`, else 0. Exactly at a bound it follows `r`.
///
/// Every comparison is false for a NaN ratio, which so stays on the branch that follows it.
fn ppo_clip<A: Arithmetic>(on: &mut A, numbers: &Numbers<A::Value>, r: A::Value, a: A::Value) -> Term<A::Value> {
    let zero = on.constant(0.0);
    let (below, above) = (on.less(r, numbers.low), on.less(numbers.high, r));
    let beyond_delta = on.less(numbers.delta, r);
    let capped = on.select(beyond_delta, numbers.delta, r);
    let raised = on.select(below, numbers.low, r);
    let clamped = on.select(above, numbers.high, raised);
    let unclipped = on.mul(capped, a);
    let clipped = on.mul(clamped, a);

    let picks_clipped = on.less(clipped, unclipped);
    let surrogate = on.select(picks_clipped, clipped, unclipped);
    let loss = on.neg(surrogate);
    let following = on.mul(r, a);
    let following = on.neg(following);
    let out_of_range = on.or(below, above);
    let clipped_grad = on.select(out_of_range, zero, following);
    let unclipped_grad = on.select(beyond_delta, zero, following);
    let grad = on.select(picks_clipped, clipped_grad, unclipped_grad);

    let cap = on.mul(numbers.dual_clip, a);
    let cap = on.neg(cap);
    let negative = on.less(a, zero);
    let over_cap = on.less(cap, loss);
    let capped = on.and(negative, over_cap);
    let loss = on.select(capped, cap, loss);
    let grad = on.select(capped, zero, grad);

    // Without an advantage there is nothing to learn, even where r overflows.
    let idle = on.equal(a, zero);
    Term { loss: on.select(idle, zero, loss), grad: on.select(idle, zero, grad) }
}

/// The KL estimate at `d = ref_logp − logp`, without `beta`.
fn kl<A: Arithmetic>(on: &mut A, estimator: KlEstimator, d: A::Value) -> Term<A::Value> {
    match estimator {
        KlEstimator::K1 => Term { loss: on.neg(d), grad: on.constant(1.0) },
        KlEstimator::K2 => {
            let half = on.constant(0.5);
            let half_d = on.mul(half, d);
            Term { loss: on.mul(half_d, d), grad: on.neg(d) }
        }
        KlEstimator::K3 => {
            let excess = on.exp_m1(d);
            Term { loss: on.sub(excess, d), grad: on.neg(excess) }
        }
        KlEstimator::Abs => {
            let (zero, one) = (on.constant(0.0), on.constant(1.0));
            let minus_one = on.constant(-1.0);
            let (negative, positive) = (on.less(d, zero), on.less(zero, d));
            let minus_d = on.neg(d);
            let at_kink = on.select(positive, minus_one, zero);
            Term { loss: on.select(negative, minus_d, d), grad: on.select(negative, one, at_kink) }
        }
    }
}
