//! The loss of one token, its value and its derivatives side by side. All kernels compute it from here; the reference has
//! formulas of its own.
//!
//! A term depends on the token's log-probability `ℓ` directly, and through the log-ratio `w` of its level, which may be that of
//! the whole sequence. A derivative that is 0 whatever the numbers is not written at all.
//!
//! With `x_t` the tokens' own log-ratios, `x′_t` their derivatives (0 beyond a bound, else 1), `c_t` their weights and `f_t`
//! their losses, in a sequence of `n` tokens that count, the derivative `G_t` of the loss by `ℓ_t` is
//!
//! ```text
//! token            w_t = x_t                    G_t = c_t (∂f_t/∂ℓ + x′_t ∂f_t/∂w)
//! sequence_token   w   = Σ x / (n + ε)          G_t = c_t (∂f_t/∂ℓ + ∂f_t/∂w)
//! sequence         w   = Σ x / (n + ε)          G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w / (n + ε)
//! sequence_product w   = Σ x                    G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w
//! ```
//!
//! Every comparison is false for a NaN, which therefore stays on the branch that follows the ratio. A term that is left out is
//! selected away, never multiplied by 0.

use super::arithmetic::Arithmetic;
use super::kl::kl_penalty;
use super::policy::PolicyFormula;
use super::structure::{ObjectiveForm, SpecNumber, SpecNumbers, Structure, TokenInput};
use super::term::{HeldValue, bounded, sum, sum_if_any, unless, within};
use assay_core::spec::RatioLevel;

/// Bounds of a token's log-ratio in VESPO's weight of a sequence.
pub(crate) const VESPO_LOG_RATIO: [f64; 2] = [-20.0, 20.0];

/// The name of an array `[B,T]` that the loss of a token reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenArray {
    /// The advantage `A` of each token.
    Advantage,
    /// The weight of the KL penalty over that of the policy term, if the penalty has its own reduction.
    KlShare,
    /// An array that is prepared from the batch before there are logits.
    Input(TokenInput),
}

/// Elements of one token in the arrays that its loss reads; `None` in those that the structure does not read.
#[derive(Clone, Copy)]
pub struct TokenArrays<V> {
    pub(crate) advantage: V,
    pub(crate) old_logp: Option<V>,
    pub(crate) ref_logp: Option<V>,
    pub(crate) policy_weight: Option<V>,
    pub(crate) kl_weight: Option<V>,
    pub(crate) kl_share: Option<V>,
    pub(crate) selected: Option<V>,
    pub(crate) rollout_logp: Option<V>,
    pub(crate) sampler_log_weight: Option<V>,
    pub(crate) behaviour_logp: Option<V>,
}

impl<V> TokenArrays<V> {
    /// Loads what `structure` reads, and nothing else, in one fixed order: loads are part of an emitted kernel's text.
    pub fn load(structure: Structure, mut load: impl FnMut(TokenArray) -> V) -> Self {
        let advantage = load(TokenArray::Advantage);
        let mut load_if = |reads: bool, array: TokenArray| reads.then(|| load(array));
        Self {
            advantage,
            old_logp: load_if(structure.old_logp_given, TokenArray::Input(TokenInput::OldLogp)),
            ref_logp: load_if(structure.kl.is_some(), TokenArray::Input(TokenInput::RefLogp)),
            policy_weight: load_if(structure.policy_weight, TokenArray::Input(TokenInput::PolicyWeight)),
            kl_weight: load_if(structure.kl_weight, TokenArray::Input(TokenInput::KlWeight)),
            kl_share: load_if(structure.kl_share(), TokenArray::KlShare),
            selected: load_if(structure.selected(), TokenArray::Input(TokenInput::Selected)),
            rollout_logp: load_if(structure.rollout_logp(), TokenArray::Input(TokenInput::RolloutLogp)),
            sampler_log_weight: load_if(
                structure.form == ObjectiveForm::Vespo,
                TokenArray::Input(TokenInput::LogWeight),
            ),
            behaviour_logp: load_if(structure.off_policy_mask, TokenArray::Input(TokenInput::Behaviour)),
        }
    }
}

/// The values that the loss of one token depends on.
#[derive(Clone, Copy)]
pub struct LossInputs<V, T> {
    /// Log-probability `ℓ` of the token under the policy.
    pub(crate) logp: V,
    /// Log-probability that the KL penalty reads; `None` is `logp`.
    pub(crate) kl_logp: Option<V>,
    /// Log-probability that the ratio divides by; `logp` itself if the spec has `old_logp: current`.
    pub(crate) old_logp: V,
    /// The elements of the batch's arrays.
    pub(crate) arrays: TokenArrays<V>,
    /// Log-ratio `w` of the token's level: its own, or that of its sequence.
    pub(crate) log_ratio: V,
    /// The token's own log-ratio `x` after its bounds, whatever the level.
    pub(crate) own: HeldValue<V, T>,
    /// Logarithm of VESPO's weight of the sequence, not yet clamped.
    pub(crate) log_weight: Option<V>,
    /// Whether the off-policy mask keeps the token.
    pub(crate) on_policy: Option<T>,
}

/// The loss of a token, its derivatives, and what is logged about it.
pub struct TokenLoss<V, T> {
    /// Policy term plus `beta · kl`.
    pub loss: V,
    /// The number that the reduction weighs: `loss`, except that a KL penalty with its own reduction is multiplied by its share.
    pub reduced: V,
    /// The derivative of `reduced` by `logp` at a constant log-ratio; `None` is 0.
    pub by_logp: Option<V>,
    /// The derivative of `reduced` by the log-probability that the KL penalty alone reads; `None` is 0.
    pub by_kl_logp: Option<V>,
    /// The derivative of `reduced` by the log-ratio of the token's level; `None` is 0.
    pub by_log_ratio: Option<V>,
    /// Ratio `r = e^w` of the token's level.
    pub ratio: V,
    /// The KL estimate, not multiplied by `beta`.
    pub kl: Option<V>,
    /// Whether the ratio is below the lower bound and `A < 0`.
    pub clipped_low: T,
    /// Whether the ratio is above the upper bound and `A > 0`.
    pub clipped_high: T,
}

impl<V: Copy, T: Copy> LossInputs<V, T> {
    /// Gathers the inputs of a token whose ratio is its own. Those of a sequence are filled in by whoever sees the sequence.
    pub(crate) fn new<A: Arithmetic<Value = V, Truth = T>>(
        on: &mut A,
        structure: Structure,
        numbers: &SpecNumbers<V>,
        logp: V,
        arrays: TokenArrays<V>,
    ) -> Self {
        let old_logp = arrays.old_logp.unwrap_or(logp);
        let own = own_log_ratio(on, structure, numbers, [logp, old_logp, arrays.advantage]);
        Self { logp, kl_logp: None, old_logp, arrays, log_ratio: own.value, own, log_weight: None, on_policy: None }
    }
}

/// Evaluates a token whose loss depends on no other token: its loss, and the derivative of that by `logp`.
pub fn single_token_loss<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    logp: A::Value,
    arrays: TokenArrays<A::Value>,
) -> (TokenLoss<A::Value, A::Truth>, A::Value) {
    let inputs = LossInputs::new(on, structure, numbers, logp, arrays);
    let token = token_loss(on, structure, numbers, &inputs);
    let slope = own_slope(on, &token, &inputs);
    (token, slope)
}

/// Evaluates all tokens at once, in an arithmetic whose values are arrays of them: their losses, and the derivatives of the
/// whole loss by `logp`, which is each token's `weight` times that of its own loss unless tokens share a ratio.
///
/// `sequence_sum` adds up a value over the tokens of each sequence that count and puts the sum in the places of all of them;
/// `token_count` gives how many there are, in the same places.
pub fn sequence_losses<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    [logp, weight]: [A::Value; 2],
    arrays: TokenArrays<A::Value>,
    sequence_sum: impl Fn(&mut A, A::Value) -> A::Value,
    token_count: impl Fn(&mut A) -> A::Value,
) -> (TokenLoss<A::Value, A::Truth>, A::Value) {
    let mut inputs = LossInputs::new(on, structure, numbers, logp, arrays);

    // The log-ratio of the level, over the count of tokens unless it is a product.
    let count = matches!(structure.level, RatioLevel::Sequence | RatioLevel::SequenceToken).then(|| {
        let count = token_count(on);
        on.add(count, numbers.get(SpecNumber::RatioEpsilon))
    });
    let over_count = |on: &mut A, sum: A::Value| count.map_or(sum, |count| on.div(sum, count));
    if structure.level != RatioLevel::Token {
        let total = sequence_sum(on, inputs.own.value);
        inputs.log_ratio = over_count(on, total);
    }

    // VESPO weighs a sequence by its ratio and by the sampler's weight.
    inputs.log_weight = arrays.sampler_log_weight.map(|sampler| {
        let x = on.sub(logp, inputs.old_logp);
        let x = on.clamp(x, VESPO_LOG_RATIO);
        let log_ratio = sequence_sum(on, x);
        on.add(log_ratio, sampler)
    });

    // The off-policy mask keeps what gains, and sequences that are near the policy that acted. Tokens without a score count as 0.
    inputs.on_policy = arrays.behaviour_logp.map(|behaviour| {
        let zero = on.constant(0.0);
        let scored = on.equal(behaviour, behaviour);
        let fallen = on.sub(behaviour, logp);
        let fallen = on.select(scored, fallen, zero);
        let (total, count) = (sequence_sum(on, fallen), token_count(on));
        let mean = on.div(total, count);
        let gains = on.at_least(arrays.advantage, zero);
        let near = on.at_least(numbers.get(SpecNumber::OffPolicyThreshold), mean);
        on.or(gains, near)
    });

    let token = token_loss(on, structure, numbers, &inputs);
    let gradient = match structure.level {
        // Every token of the sequence moves the shared log-ratio, and with it the losses of all.
        RatioLevel::Sequence | RatioLevel::SequenceProduct => {
            let direct = token.by_logp.map(|slope| on.mul(weight, slope));
            let through_ratio = token.by_log_ratio.map(|slope| {
                let weighed = on.mul(weight, slope);
                let total = sequence_sum(on, weighed);
                let share = over_count(on, total);
                unless(on, inputs.own.replaced, share)
            });
            sum(on, direct, through_ratio)
        }
        // GSPO-token passes the gradient on to the token alone.
        RatioLevel::SequenceToken => {
            let slope = sum(on, token.by_logp, token.by_log_ratio);
            on.mul(weight, slope)
        }
        RatioLevel::Token => {
            let slope = own_slope(on, &token, &inputs);
            on.mul(weight, slope)
        }
    };
    (token, gradient)
}

/// The derivative of the loss by `logp` of a token whose ratio is its own.
pub(crate) fn own_slope<A: Arithmetic>(
    on: &mut A,
    token: &TokenLoss<A::Value, A::Truth>,
    inputs: &LossInputs<A::Value, A::Truth>,
) -> A::Value {
    let through_ratio = token.by_log_ratio.map(|slope| unless(on, inputs.own.replaced, slope));
    sum(on, token.by_logp, through_ratio)
}

/// Computes a token's own log-ratio, after its clamp and GMPO's clip. The clamp of a product applies to its sequence instead.
fn own_log_ratio<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    [logp, old_logp, advantage]: [A::Value; 3],
) -> HeldValue<A::Value, A::Truth> {
    let x = on.sub(logp, old_logp);
    let mut clamped = HeldValue { value: x, replaced: None };
    if structure.bounds.clamp && structure.level != RatioLevel::SequenceProduct {
        clamped = within(on, x, numbers.get(SpecNumber::LogRatioClamp));
    }
    if !structure.bounds.clip {
        return clamped;
    }
    let zero = on.constant(0.0);
    // GMPO bounds a gain from above and a loss from below.
    let high = bounded(on, clamped.value, None, Some(numbers.get(SpecNumber::LogRatioHigh)));
    let low = bounded(on, clamped.value, Some(numbers.get(SpecNumber::LogRatioLow)), None);
    let (positive, negative) = (on.less(zero, advantage), on.less(advantage, zero));
    // Without an advantage the ratio is 1, and does not follow `x`.
    let value = on.select(negative, low.value, zero);
    let value = on.select(positive, high.value, value);
    let idle = on.equal(advantage, zero);
    let above = high.replaced.map(|replaced| on.and(positive, replaced));
    let below = low.replaced.map(|replaced| on.and(negative, replaced));
    let reasons = [above, below, clamped.replaced].into_iter().flatten();
    let replaced = reasons.fold(idle, |any, reason| on.or(any, reason));
    HeldValue { value, replaced: Some(replaced) }
}

/// Evaluates the loss of one token from inputs that are complete.
pub(crate) fn token_loss<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    inputs: &LossInputs<A::Value, A::Truth>,
) -> TokenLoss<A::Value, A::Truth> {
    let zero = on.constant(0.0);

    // The ratio, of a log-ratio within the bounds of its level.
    // The cap is of what the clamp leaves, and the gradient may pass the cap alone.
    let mut clamped = HeldValue { value: inputs.log_ratio, replaced: None };
    if structure.bounds.clamp && structure.level == RatioLevel::SequenceProduct {
        clamped = within(on, clamped.value, numbers.get(SpecNumber::LogRatioClamp));
    }
    let cap = structure.bounds.cap.then(|| numbers.get(SpecNumber::LogRatioCap));
    let mut capped = bounded(on, clamped.value, None, cap);
    if structure.bounds.straight_through {
        capped.replaced = None;
    }
    let reasons = [clamped.replaced, capped.replaced].into_iter().flatten();
    capped.replaced = reasons.reduce(|clamp, cap| on.or(clamp, cap));
    let ratio = on.exp(capped.value);

    let policy = PolicyFormula { structure, numbers, inputs, log_ratio: capped.value, ratio }.term(on);
    let (clipped_low, clipped_high) = clipped(on, structure, numbers, inputs, ratio);
    let follow = |on: &mut A, slope: Option<A::Value>| slope.map(|slope| unless(on, capped.replaced, slope));

    let Some((form, ref_logp)) = structure.kl.zip(inputs.arrays.ref_logp) else {
        let by_log_ratio = follow(on, policy.by_log_ratio);
        let (loss, by_logp) = (policy.value, policy.by_logp);
        return TokenLoss {
            loss,
            reduced: loss,
            by_logp,
            by_kl_logp: None,
            by_log_ratio,
            ratio,
            kl: None,
            clipped_low,
            clipped_high,
        };
    };
    let kl = kl_penalty(on, form, numbers, inputs, [ref_logp, ratio]);
    let kl = inputs.arrays.kl_weight.map_or(kl, |weight| kl.weighed(on, weight));

    // A `beta` of 0 leaves the penalty out, even where it overflows.
    let beta = numbers.get(SpecNumber::Beta);
    let without = on.equal(beta, zero);
    let penalty = |on: &mut A, term: A::Value| {
        let weighted = on.mul(beta, term);
        on.select(without, zero, weighted)
    };
    let value = penalty(on, kl.value);
    let loss = on.add(policy.value, value);

    // A penalty with its own reduction is weighed by its share before the two are reduced together.
    let shared = |on: &mut A, term: A::Value| inputs.arrays.kl_share.map_or(term, |share| on.mul(share, term));
    let reduced = match inputs.arrays.kl_share {
        Some(_) => {
            let value = shared(on, value);
            on.add(policy.value, value)
        }
        None => loss,
    };
    let joined = |on: &mut A, policy: Option<A::Value>, kl: Option<A::Value>| {
        let kl = kl.map(|slope| {
            let slope = penalty(on, slope);
            shared(on, slope)
        });
        sum_if_any(on, policy, kl)
    };
    // A log-probability that the penalty alone reads has a derivative of its own.
    let (by_logp, by_kl_logp) = match inputs.kl_logp {
        Some(_) => (policy.by_logp, joined(on, None, kl.by_logp)),
        None => (joined(on, policy.by_logp, kl.by_logp), None),
    };
    let by_log_ratio = joined(on, policy.by_log_ratio, kl.by_log_ratio);
    let by_log_ratio = follow(on, by_log_ratio);
    let kl = Some(kl.value);
    TokenLoss { loss, reduced, by_logp, by_kl_logp, by_log_ratio, ratio, kl, clipped_low, clipped_high }
}

/// Whether the token counts as clipped low, and as clipped high: a clip in log space compares the token's own log-ratio, PPO's and
/// CISPO's the ratio, and the other objectives have none.
fn clipped<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &SpecNumbers<A::Value>,
    inputs: &LossInputs<A::Value, A::Truth>,
    ratio: A::Value,
) -> (A::Truth, A::Truth) {
    // GMPO clips log-ratios, PPO and CISPO ratios. The log-ratio is that of the log-probabilities, before any bound is
    // applied to it.
    let zero = on.constant(0.0);
    let compared = if structure.bounds.clip {
        let x = on.sub(inputs.logp, inputs.old_logp);
        Some((x, numbers.get(SpecNumber::LogRatioLow), numbers.get(SpecNumber::LogRatioHigh)))
    } else if matches!(structure.form, ObjectiveForm::PpoClip | ObjectiveForm::Cispo) {
        Some((ratio, numbers.get(SpecNumber::Low), numbers.get(SpecNumber::High)))
    } else {
        None
    };
    let Some((x, low, high)) = compared else {
        // This arithmetic has no constant truth; `0 < 0` never holds.
        let never = on.less(zero, zero);
        return (never, never);
    };
    let (below, above) = (on.less(x, low), on.less(high, x));
    let negative = on.less(inputs.arrays.advantage, zero);
    let positive = on.less(zero, inputs.arrays.advantage);
    (on.and(below, negative), on.and(above, positive))
}
