//! The loss of one token, value and derivatives side by side: the one arm of all kernels, apart from the reference's.
//!
//! A term depends on the token's log-probability `ℓ` at first hand, and through the log-ratio `w` of its level, which
//! may be that of the whole row. A derivative that is 0 whatever the numbers is not written at all.
//!
//! Every comparison is false for a NaN, which so stays on the branch that follows the ratio. Where a term is left out it
//! is selected away, never multiplied by 0.

use super::arithmetic::Arithmetic;
use super::structure::{Form, KlForm, KlSlope, Number, Numbers, Structure, ValueClamp};
use assay_core::spec::{Divergence, KlEstimator, KlImportance, RatioLevel};

/// What the loss of a token depends on.
#[derive(Clone, Copy)]
pub struct Token<V, T> {
    /// `ℓ`, of the policy.
    pub logp: V,
    /// `logp` itself where the spec has `old_logp: current`.
    pub old_logp: V,
    /// `A`.
    pub advantage: V,
    /// The log-ratio of its level: its own after [`own_log_ratio`], or that of its row.
    pub log_ratio: V,
    /// Its own, whatever the level.
    pub own: Held<V, T>,
    /// The reference policy's log-probability, where there is a KL penalty.
    pub ref_logp: Option<V>,
    /// The sampler's, where the KL penalty is weighed against it.
    pub rollout_logp: Option<V>,
    /// What the policy term is multiplied by.
    pub policy_weight: Option<V>,
    /// What the KL estimate is multiplied by.
    pub kl_weight: Option<V>,
    /// What the KL penalty's own reduction weighs it with, over that of the policy term.
    pub kl_share: Option<V>,
    /// Above 0 where KL-Cov penalizes, or the token is positive.
    pub selected: Option<V>,
    /// VESPO's `ln w` of the row, not yet clamped.
    pub log_weight: Option<V>,
    /// Whether its row is near enough to the policy that acted.
    pub on_policy: Option<T>,
}

/// A value, and where it stands at a bound, without gradient.
#[derive(Clone, Copy)]
pub struct Held<V, T> {
    /// What is computed with.
    pub value: V,
    /// Whether it stands at a bound; `None` where there is none.
    pub held: Option<T>,
}

/// A term of the loss and its derivatives. `None` is 0.
#[derive(Clone, Copy)]
struct Term<V> {
    value: V,
    by_logp: Option<V>,
    by_log_ratio: Option<V>,
}

/// The loss of a token and what is logged of it.
pub struct TokenLoss<V, T> {
    /// Policy term plus `beta · kl`.
    pub loss: V,
    /// What the reduction weighs: the same, but for a KL penalty with a reduction of its own.
    pub reduced: V,
    /// The derivative of `reduced` with respect to `logp`, the log-ratio held; `None` is 0.
    pub by_logp: Option<V>,
    /// And to the log-ratio of the token's level.
    pub by_log_ratio: Option<V>,
    /// `r`, that of its level.
    pub ratio: V,
    /// The KL estimate, without `beta`.
    pub kl: Option<V>,
    /// The ratio is below the lower bound, and `A < 0`.
    pub clipped_low: T,
    /// The ratio is above the upper bound, and `A > 0`.
    pub clipped_high: T,
}

impl<V: Copy, T: Copy> TokenLoss<V, T> {
    /// The derivative with respect to `logp` of a token whose ratio is its own.
    pub fn grad<A: Arithmetic<Value = V, Truth = T>>(&self, on: &mut A, log_ratio: Held<V, T>) -> V {
        let through_ratio = self.by_log_ratio.map(|slope| unless(on, log_ratio.held, slope));
        sum(on, self.by_logp, through_ratio)
    }
}

/// `a + b`, where `None` is 0.
pub fn sum<A: Arithmetic>(on: &mut A, a: Option<A::Value>, b: Option<A::Value>) -> A::Value {
    match (a, b) {
        (Some(a), Some(b)) => on.add(a, b),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => on.constant(0.0),
    }
}

/// `value`, 0 where `out` holds.
pub fn unless<A: Arithmetic>(on: &mut A, out: Option<A::Truth>, value: A::Value) -> A::Value {
    let Some(out) = out else { return value };
    let zero = on.constant(0.0);
    on.select(out, zero, value)
}

/// `x` within the bounds there are. On one it still follows.
fn held<A: Arithmetic>(
    on: &mut A,
    x: A::Value,
    low: Option<A::Value>,
    high: Option<A::Value>,
) -> Held<A::Value, A::Truth> {
    let below = low.map(|low| (on.less(x, low), low));
    let above = high.map(|high| (on.less(high, x), high));
    let value = below.map_or(x, |(below, low)| on.select(below, low, x));
    let value = above.map_or(value, |(above, high)| on.select(above, high, value));
    let held = match (below, above) {
        (Some((below, _)), Some((above, _))) => Some(on.or(below, above)),
        (one, other) => one.or(other).map(|(beyond, _)| beyond),
    };
    Held { value, held }
}

/// `x` within `±bound`.
fn within<A: Arithmetic>(on: &mut A, x: A::Value, bound: A::Value) -> Held<A::Value, A::Truth> {
    let low = on.neg(bound);
    held(on, x, Some(low), Some(bound))
}

/// A token's own log-ratio, after its clamp and GMPO's clip. A product's clamp is that of its row.
pub fn own_log_ratio<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &Numbers<A::Value>,
    [logp, old_logp, advantage]: [A::Value; 3],
) -> Held<A::Value, A::Truth> {
    let x = on.sub(logp, old_logp);
    let mut clamped = Held { value: x, held: None };
    if structure.bounds.clamp && structure.level != RatioLevel::SequenceProduct {
        clamped = within(on, x, numbers.get(Number::LogRatioClamp));
    }
    if !structure.bounds.clip {
        return clamped;
    }
    let zero = on.constant(0.0);
    let high = held(on, clamped.value, None, Some(numbers.get(Number::LogRatioHigh)));
    let low = held(on, clamped.value, Some(numbers.get(Number::LogRatioLow)), None);
    let (positive, negative) = (on.less(zero, advantage), on.less(advantage, zero));
    // Without an advantage the ratio is 1, and stays.
    let value = on.select(negative, low.value, zero);
    let value = on.select(positive, high.value, value);
    let idle = on.equal(advantage, zero);
    let sides = [high.held.map(|held| on.and(positive, held)), low.held.map(|held| on.and(negative, held))];
    let held = sides.into_iter().chain([clamped.held]).flatten().fold(idle, |all, held| on.or(all, held));
    Held { value, held: Some(held) }
}

/// The loss of one token.
pub fn token_loss<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &Numbers<A::Value>,
    token: &Token<A::Value, A::Truth>,
) -> TokenLoss<A::Value, A::Truth> {
    let zero = on.constant(0.0);
    let cap = structure.bounds.cap.then(|| numbers.get(Number::LogRatioCap));
    let mut capped = held(on, token.log_ratio, None, cap);
    if structure.bounds.clamp && structure.level == RatioLevel::SequenceProduct {
        let clamped = within(on, capped.value, numbers.get(Number::LogRatioClamp));
        let held = [capped.held, clamped.held].into_iter().flatten().reduce(|cap, clamp| on.or(cap, clamp));
        capped = Held { value: clamped.value, held };
    }
    let ratio = on.exp(capped.value);
    let policy = Policy { structure, numbers, token, log_ratio: capped.value, ratio }.term(on);
    let (clipped_low, clipped_high) = clipped(on, structure, numbers, token, ratio);
    let follow = |on: &mut A, slope: Option<A::Value>| slope.map(|slope| unless(on, capped.held, slope));

    let Some((form, ref_logp)) = structure.kl.zip(token.ref_logp) else {
        let by_log_ratio = follow(on, policy.by_log_ratio);
        let (loss, by_logp) = (policy.value, policy.by_logp);
        return TokenLoss { loss, reduced: loss, by_logp, by_log_ratio, ratio, kl: None, clipped_low, clipped_high };
    };
    let kl = kl(on, form, numbers, token, [ref_logp, ratio]);
    let kl = token.kl_weight.map_or(kl, |weight| kl.weighed(on, weight));
    // A weight of 0 leaves the term out, even where it overflows.
    let beta = numbers.get(Number::Beta);
    let without = on.equal(beta, zero);
    let penalty = |on: &mut A, term: A::Value| {
        let weighted = on.mul(beta, term);
        on.select(without, zero, weighted)
    };
    let value = penalty(on, kl.value);
    let loss = on.add(policy.value, value);
    let shared = |on: &mut A, term: A::Value| match token.kl_share {
        Some(share) => on.mul(share, term),
        None => term,
    };
    let reduced = match token.kl_share {
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
        policy.or(kl).map(|_| sum(on, policy, kl))
    };
    let by_logp = joined(on, policy.by_logp, kl.by_logp);
    let by_log_ratio = joined(on, policy.by_log_ratio, kl.by_log_ratio);
    let by_log_ratio = follow(on, by_log_ratio);
    TokenLoss { loss, reduced, by_logp, by_log_ratio, ratio, kl: Some(kl.value), clipped_low, clipped_high }
}

/// Whether the token counts as clipped low, and high: of a clip in log space by its own log-ratio, of PPO's and CISPO's by
/// the ratio; of the others never.
fn clipped<A: Arithmetic>(
    on: &mut A,
    structure: Structure,
    numbers: &Numbers<A::Value>,
    token: &Token<A::Value, A::Truth>,
    ratio: A::Value,
) -> (A::Truth, A::Truth) {
    let zero = on.constant(0.0);
    let compared = if structure.bounds.clip {
        let x = on.sub(token.logp, token.old_logp);
        Some((x, numbers.get(Number::LogRatioLow), numbers.get(Number::LogRatioHigh)))
    } else if matches!(structure.form, Form::PpoClip | Form::Cispo) {
        Some((ratio, numbers.get(Number::Low), numbers.get(Number::High)))
    } else {
        None
    };
    let Some((x, low, high)) = compared else {
        let never = on.less(zero, zero);
        return (never, never);
    };
    let (below, above) = (on.less(x, low), on.less(high, x));
    let negative = on.less(token.advantage, zero);
    let positive = on.less(zero, token.advantage);
    (on.and(below, negative), on.and(above, positive))
}

impl<V: Copy> Term<V> {
    fn map<A: Arithmetic<Value = V>>(self, on: &mut A, f: impl Fn(&mut A, V) -> V) -> Self {
        Self {
            value: f(on, self.value),
            by_logp: self.by_logp.map(|slope| f(on, slope)),
            by_log_ratio: self.by_log_ratio.map(|slope| f(on, slope)),
        }
    }

    /// The term, 0 where `out` holds.
    fn unless<A: Arithmetic<Value = V>>(self, on: &mut A, out: A::Truth) -> Self {
        self.map(on, |on, x| unless(on, Some(out), x))
    }

    /// `weight` times the term; 0 where the weight is, even if the term overflows.
    fn weighed<A: Arithmetic<Value = V>>(self, on: &mut A, weight: V) -> Self {
        let zero = on.constant(0.0);
        let out = on.equal(weight, zero);
        self.map(on, |on, x| on.mul(weight, x)).unless(on, out)
    }

    fn plus<A: Arithmetic<Value = V>>(self, on: &mut A, other: Self) -> Self {
        let joined = |on: &mut A, a: Option<V>, b: Option<V>| a.or(b).map(|_| sum(on, a, b));
        Self {
            value: on.add(self.value, other.value),
            by_logp: joined(on, self.by_logp, other.by_logp),
            by_log_ratio: joined(on, self.by_log_ratio, other.by_log_ratio),
        }
    }
}

/// The policy term of a token.
struct Policy<'t, A: Arithmetic> {
    structure: Structure,
    numbers: &'t Numbers<A::Value>,
    token: &'t Token<A::Value, A::Truth>,
    /// `w`, capped.
    log_ratio: A::Value,
    /// `e^w`
    ratio: A::Value,
}

impl<A: Arithmetic> Policy<'_, A> {
    fn number(&self, number: Number) -> A::Value {
        self.numbers.get(number)
    }

    fn term(&self, on: &mut A) -> Term<A::Value> {
        let zero = on.constant(0.0);
        let surrogate = self.surrogate(on);
        // Without an advantage there is nothing to learn, even where the ratio overflows.
        let idle = on.equal(self.token.advantage, zero);
        let mut term = surrogate.unless(on, idle);
        if let Some(penalty) = self.penalty(on) {
            term = term.plus(on, penalty);
        }
        if let Some(on_policy) = self.token.on_policy {
            term = term.map(on, |on, x| on.select(on_policy, x, zero));
        }
        if let Some(weight) = self.token.policy_weight {
            term = term.weighed(on, weight);
        }
        term
    }

    /// What the advantage multiplies.
    fn surrogate(&self, on: &mut A) -> Term<A::Value> {
        let (low, high) = (Number::Low, Number::High);
        match self.structure.form {
            Form::PpoClip => self.ppo_clip(on),
            Form::Cispo => {
                let bounded = held(on, self.ratio, Some(self.number(low)), Some(self.number(high)));
                self.score(on, bounded.value)
            }
            Form::Sapo => self.sapo(on),
            Form::Vespo => {
                let weight = self.gamma_weight(on);
                self.score(on, weight)
            }
            Form::PolicyGradient | Form::Dro => {
                let by_logp = on.neg(self.token.advantage);
                self.linear(on, by_logp)
            }
            Form::ImportanceSampling | Form::KlCov => self.of_ratio(on),
            Form::MaskedRatio => {
                let (above, below) = (on.less(self.number(low), self.ratio), on.less(self.ratio, self.number(high)));
                let inside = on.and(above, below);
                let zero = on.constant(0.0);
                let term = self.score(on, self.ratio);
                term.map(on, |on, x| on.select(inside, x, zero))
            }
            Form::TrustRegion { divergence, two_sided, score } => {
                let term = if score {
                    let bounded = held(on, self.ratio, None, Some(self.number(Number::Truncate)));
                    self.score(on, bounded.value)
                } else {
                    self.of_ratio(on)
                };
                let trusted = self.trusted(on, divergence, two_sided);
                let zero = on.constant(0.0);
                term.map(on, |on, x| on.select(trusted, x, zero))
            }
            Form::Topr { selected } => self.tapered(on, selected),
            Form::Aspo { selected } => self.upside_down(on, selected),
            Form::None => Term { value: on.constant(0.0), by_logp: None, by_log_ratio: None },
        }
    }

    /// `−w₊·a·ℓ` of the positive, `−w₋·min(r, upper)·a·ℓ` of the others.
    fn tapered(&self, on: &mut A, selected: bool) -> Term<A::Value> {
        let zero = on.constant(0.0);
        let of = self.token.selected.filter(|_| selected).unwrap_or(self.token.advantage);
        let positive = on.less(zero, of);
        let bounded = held(on, self.ratio, None, Some(self.number(Number::High))).value;
        let of_others = on.mul(self.number(Number::NegativeWeight), bounded);
        let coefficient = on.select(positive, self.number(Number::PositiveWeight), of_others);
        self.score(on, coefficient)
    }

    /// For `a > 0` `−a/u` with `u = min(r, high)`, for others `−a·v` with `v = max(r, low)`, each with the slope that it has in
    /// `ln r` while it follows; beyond its second bound `c` a score function, `−c·a·ℓ`.
    fn upside_down(&self, on: &mut A, selected: bool) -> Term<A::Value> {
        let (r, a) = (self.ratio, self.token.advantage);
        let (zero, one) = (on.constant(0.0), on.constant(1.0));
        let positive = on.less(zero, a);
        let (mut low, mut high) = (self.number(Number::Low), self.number(Number::High));
        if let Some(chosen) = self.token.selected.filter(|_| selected) {
            let chosen = on.less(zero, chosen);
            low = on.select(chosen, self.number(Number::LowOfSelected), low);
            high = on.select(chosen, self.number(Number::HighOfSelected), high);
        }
        let (below, above) = (on.less(r, low), on.less(high, r));
        let (raised, lowered) = (on.select(below, low, r), on.select(above, high, r));
        let inverse = on.div(one, lowered);
        let coefficient = on.select(positive, inverse, raised);
        let (positive_bound, other_bound) = (self.number(Number::DualClipPositive), self.number(Number::DualClip));
        let bound = on.select(positive, positive_bound, other_bound);
        let beyond = on.less(bound, coefficient);
        let following = on.mul(coefficient, a);
        let following = on.neg(following);
        let at_upper = on.and(positive, above);
        let not_positive = on.select(positive, zero, one);
        let not_positive = on.less(zero, not_positive);
        let at_lower = on.and(not_positive, below);
        let held = on.or(at_upper, at_lower);
        let still = on.or(held, beyond);
        let score = self.score(on, bound);
        let by_logp = score.by_logp.map(|slope| on.select(beyond, slope, zero));
        let value = on.select(beyond, score.value, following);
        Term { value, by_logp, by_log_ratio: Some(unless(on, Some(still), following)) }
    }

    /// `−ρ·A`
    fn of_ratio(&self, on: &mut A) -> Term<A::Value> {
        let gain = on.mul(self.ratio, self.token.advantage);
        let loss = on.neg(gain);
        Term { value: loss, by_logp: None, by_log_ratio: Some(loss) }
    }

    /// `by_logp · ℓ`, the factor held.
    fn linear(&self, on: &mut A, by_logp: A::Value) -> Term<A::Value> {
        Term { value: on.mul(by_logp, self.token.logp), by_logp: Some(by_logp), by_log_ratio: None }
    }

    /// `−coefficient·A·ℓ`, the coefficient held.
    fn score(&self, on: &mut A, coefficient: A::Value) -> Term<A::Value> {
        let by_logp = on.mul(coefficient, self.token.advantage);
        let by_logp = on.neg(by_logp);
        self.linear(on, by_logp)
    }

    /// What is added whatever the advantage: `penalty·w²`, or KL-Cov's `penalty·|w|`.
    fn penalty(&self, on: &mut A) -> Option<Term<A::Value>> {
        let w = self.log_ratio;
        match self.structure.form {
            Form::TrustRegion { .. } | Form::Dro => {
                let half_slope = on.mul(self.number(Number::Penalty), w);
                let slope = on.add(half_slope, half_slope);
                Some(Term { value: on.mul(half_slope, w), by_logp: None, by_log_ratio: Some(slope) })
            }
            Form::KlCov => {
                let (zero, coefficient) = (on.constant(0.0), self.number(Number::Penalty));
                let (negative, positive) = (on.less(w, zero), on.less(zero, w));
                let minus = on.neg(coefficient);
                let slope = on.select(positive, coefficient, zero);
                let slope = on.select(negative, minus, slope);
                let value = on.mul(slope, w);
                let term = Term { value, by_logp: None, by_log_ratio: Some(slope) };
                let selected = self.token.selected?;
                let spared = on.equal(selected, zero);
                Some(term.unless(on, spared))
            }
            _ => None,
        }
    }

    /// `−min(min(r, δ)·a, clip(r)·a)`, capped at `−c·a` for `a < 0`. The gradient is that of the operand which the `min`
    /// picks: `−r·a` where that operand still follows `r`, else 0. Exactly at a bound it follows `r`.
    fn ppo_clip(&self, on: &mut A) -> Term<A::Value> {
        let (r, a) = (self.ratio, self.token.advantage);
        let zero = on.constant(0.0);
        let (low, high, delta) = (self.number(Number::Low), self.number(Number::High), self.number(Number::Delta));
        let (below, above) = (on.less(r, low), on.less(high, r));
        let beyond_delta = on.less(delta, r);
        let capped = on.select(beyond_delta, delta, r);
        let raised = on.select(below, low, r);
        let clamped = on.select(above, high, raised);
        let unclipped = on.mul(capped, a);
        let clipped = on.mul(clamped, a);

        let picks_clipped = on.less(clipped, unclipped);
        let surrogate = on.select(picks_clipped, clipped, unclipped);
        let loss = on.neg(surrogate);
        let following = on.mul(r, a);
        let following = on.neg(following);
        let out_of_range = on.or(below, above);
        let clipped_slope = on.select(out_of_range, zero, following);
        let unclipped_slope = on.select(beyond_delta, zero, following);
        let slope = on.select(picks_clipped, clipped_slope, unclipped_slope);

        let cap = on.mul(self.number(Number::DualClip), a);
        let cap = on.neg(cap);
        let negative = on.less(a, zero);
        let over_cap = on.less(cap, loss);
        let capped = on.and(negative, over_cap);
        let value = on.select(capped, cap, loss);
        let slope = on.select(capped, zero, slope);
        Term { value, by_logp: None, by_log_ratio: Some(slope) }
    }

    /// `−(4/τ)·σ(u)·a` with `u = τ(r − 1)`. With `e = exp(−|u|)`, which cannot overflow, `σ(u)` is `1/(1 + e)` or, below 0,
    /// `e/(1 + e)`; and `σ′ = e/(1 + e)²`.
    fn sapo(&self, on: &mut A) -> Term<A::Value> {
        let (r, a) = (self.ratio, self.token.advantage);
        let (zero, one) = (on.constant(0.0), on.constant(1.0));
        let minus_four = on.constant(-4.0);
        let positive = on.less(zero, a);
        let tau = on.select(positive, self.number(Number::TauPositive), self.number(Number::TauNegative));
        let over_one = on.sub(r, one);
        let u = on.mul(tau, over_one);
        let below = on.less(u, zero);
        let minus_u = on.neg(u);
        let decline = on.select(below, u, minus_u);
        let e = on.exp(decline);
        let whole = on.add(one, e);
        let nearer = on.select(below, e, one);
        let gate = on.div(nearer, whole);
        let times_a = on.mul(minus_four, a);
        let per_tau = on.div(times_a, tau);
        let value = on.mul(per_tau, gate);
        // Of r·σ′ the second goes to 0 the faster.
        let vanished = on.equal(e, zero);
        let farther = on.div(e, whole);
        let share = on.div(farther, whole);
        let slope = on.mul(share, r);
        let slope = on.mul(slope, times_a);
        Term { value, by_logp: None, by_log_ratio: Some(unless(on, Some(vanished), slope)) }
    }

    /// VESPO's `exp(λ + k·ln w − λ·w)`; 0 where that is no number or beyond all.
    fn gamma_weight(&self, on: &mut A) -> A::Value {
        let zero = on.constant(0.0);
        let (least, most) = (on.constant(1e-8_f64.ln()), on.constant(20.0));
        let log_weight = self.token.log_weight.unwrap_or(zero);
        let log_weight = held(on, log_weight, Some(least), Some(most)).value;
        let negative = on.less(self.token.advantage, zero);
        let by_sign = |on: &mut A, positive, other| {
            let (positive, other) = (self.number(positive), self.number(other));
            on.select(negative, other, positive)
        };
        let k = by_sign(on, Number::KPositive, Number::KNegative);
        let lambda = by_sign(on, Number::LambdaPositive, Number::LambdaNegative);
        // λ(1 − w) + k·ln w
        let minus_over_one = {
            let over_one = on.exp_m1(log_weight);
            on.neg(over_one)
        };
        let pull = on.mul(lambda, minus_over_one);
        let push = on.mul(k, log_weight);
        let exponent = on.add(pull, push);
        let weight = on.exp(exponent);
        let infinite = on.constant(f64::INFINITY);
        let real = on.less(weight, infinite);
        on.select(real, weight, zero)
    }

    /// Whether the token's probability has not moved too far in the direction that the advantage asks for, or in any.
    fn trusted(&self, on: &mut A, divergence: Divergence, two_sided: bool) -> A::Truth {
        let zero = on.constant(0.0);
        let (logp, old_logp) = (self.token.logp, self.token.old_logp);
        let positive = on.less(zero, self.token.advantage);
        let limit = on.select(positive, self.number(Number::High), self.number(Number::Low));
        let (p, p_old) = (on.exp(logp), on.exp(old_logp));
        let rise = on.sub(p, p_old);
        let fall = on.sub(p_old, p);
        let forward = on.select(positive, rise, fall);
        let advanced = on.less(zero, forward);
        let distance = match divergence {
            Divergence::TotalVariation => {
                let back = on.select(positive, fall, rise);
                on.select(advanced, forward, back)
            }
            Divergence::BinaryKl => {
                let others = |on: &mut A, logp| {
                    let less_one = on.exp_m1(logp);
                    on.neg(less_one)
                };
                let (q, q_old) = (others(on, logp), others(on, old_logp));
                let tiny = on.constant(1e-8);
                let (numerator, denominator) = (on.add(q_old, tiny), on.add(q, tiny));
                let quotient = on.div(numerator, denominator);
                let of_others = on.ln(quotient);
                let of_others = on.mul(q_old, of_others);
                let fallen = on.sub(old_logp, logp);
                let of_token = on.mul(p_old, fallen);
                on.add(of_token, of_others)
            }
        };
        let (less, equal) = (on.less(distance, limit), on.equal(distance, limit));
        let near = on.or(less, equal);
        if two_sided {
            return near;
        }
        let stayed = on.less(forward, zero);
        let unmoved = on.equal(forward, zero);
        let harmless = on.or(stayed, unmoved);
        on.or(near, harmless)
    }
}

/// The KL estimate at `d = ref_logp − logp`, without `beta`.
fn kl<A: Arithmetic>(
    on: &mut A,
    form: KlForm,
    numbers: &Numbers<A::Value>,
    token: &Token<A::Value, A::Truth>,
    [ref_logp, ratio]: [A::Value; 2],
) -> Term<A::Value> {
    let difference = on.sub(ref_logp, token.logp);
    let mut d = Held { value: difference, held: None };
    if form.difference_clamp {
        d = within(on, difference, numbers.get(Number::KlDifferenceClamp));
    }
    let (mut value, slope) = estimate(on, form.estimator, d.value);
    let mut slope = unless(on, d.held, slope);
    if form.value_clamp == Some(ValueClamp::BeforeImportance) {
        let bounded = within(on, value, numbers.get(Number::KlValueClamp));
        (value, slope) = (bounded.value, unless(on, bounded.held, slope));
    }
    match form.slope {
        KlSlope::Own => {}
        KlSlope::K2 => slope = on.neg(difference),
        KlSlope::K2Weighted => {
            let log_ratio = on.sub(token.logp, token.old_logp);
            let ratio = on.exp(log_ratio);
            let weight = held(on, ratio, None, Some(numbers.get(Number::KlWeightBound))).value;
            let weighed = on.mul(weight, difference);
            slope = on.neg(weighed);
        }
    }
    let mut term = match form.importance {
        KlImportance::One => Term { value, by_logp: Some(slope), by_log_ratio: None },
        KlImportance::Ratio => {
            let value = on.mul(ratio, value);
            Term { value, by_logp: Some(on.mul(ratio, slope)), by_log_ratio: Some(value) }
        }
        KlImportance::TokenRatio => {
            let weight = on.exp(token.own.value);
            weighed(on, weight, value, slope, token.own.held)
        }
        KlImportance::Rollout => {
            let zero = on.constant(0.0);
            let rollout_logp = token.rollout_logp.unwrap_or(token.logp);
            let scored = on.equal(rollout_logp, rollout_logp);
            let log_weight = on.sub(token.logp, rollout_logp);
            let weight = on.exp(log_weight);
            let term = weighed(on, weight, value, slope, d.held);
            term.map(on, |on, x| on.select(scored, x, zero))
        }
        KlImportance::Score => {
            // Where the difference is held, so is the score.
            let own = unless(on, d.held, value);
            Term { value, by_logp: Some(on.add(slope, own)), by_log_ratio: None }
        }
    };
    if form.value_clamp == Some(ValueClamp::AfterImportance) {
        let bounded = within(on, term.value, numbers.get(Number::KlValueClamp));
        if let Some(held) = bounded.held {
            term = Term { value: bounded.value, ..term.unless(on, held) };
        }
    }
    term
}

/// `weight · value`, the weight `e` to the power of `ℓ` less a constant, unless it is held.
fn weighed<A: Arithmetic>(
    on: &mut A,
    weight: A::Value,
    value: A::Value,
    slope: A::Value,
    held: Option<A::Truth>,
) -> Term<A::Value> {
    let own = unless(on, held, value);
    let slope = on.add(slope, own);
    Term { value: on.mul(weight, value), by_logp: Some(on.mul(weight, slope)), by_log_ratio: None }
}

/// An estimate at `d`, and its derivative with respect to `−d`.
fn estimate<A: Arithmetic>(on: &mut A, estimator: KlEstimator, d: A::Value) -> (A::Value, A::Value) {
    match estimator {
        KlEstimator::K1 => (on.neg(d), on.constant(1.0)),
        KlEstimator::K2 => {
            let half = on.constant(0.5);
            let half_d = on.mul(half, d);
            (on.mul(half_d, d), on.neg(d))
        }
        KlEstimator::K3 => {
            let excess = on.exp_m1(d);
            (on.sub(excess, d), on.neg(excess))
        }
        KlEstimator::Abs => {
            let (zero, one) = (on.constant(0.0), on.constant(1.0));
            let minus_one = on.constant(-1.0);
            let (negative, positive) = (on.less(d, zero), on.less(zero, d));
            let minus_d = on.neg(d);
            let at_kink = on.select(positive, minus_one, zero);
            (on.select(negative, minus_d, d), on.select(negative, one, at_kink))
        }
    }
}
