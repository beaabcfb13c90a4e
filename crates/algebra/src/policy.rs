//! The policy term of a token: one formula for each objective.

use super::arithmetic::Arithmetic;
use super::objective::LossInputs;
use super::structure::{ObjectiveForm, SpecNumber, SpecNumbers, Structure};
use super::term::{LossTerm, bounded, unless};
use assay_core::spec::Divergence;

/// The policy term of one token before it is written down: the inputs, and the ratio that they have.
pub(crate) struct PolicyFormula<'t, A: Arithmetic> {
    pub(crate) structure: Structure,
    pub(crate) numbers: &'t SpecNumbers<A::Value>,
    pub(crate) inputs: &'t LossInputs<A::Value, A::Truth>,
    /// Log-ratio `w` of the token's level, within its bounds.
    pub(crate) log_ratio: A::Value,
    /// Ratio `r = e^w` of the token's level.
    pub(crate) ratio: A::Value,
}

impl<A: Arithmetic> PolicyFormula<'_, A> {
    fn number(&self, number: SpecNumber) -> A::Value {
        self.numbers.get(number)
    }

    /// Writes the whole term: the surrogate, a penalty on the log-ratio, then masks and weights.
    pub(crate) fn term(&self, on: &mut A) -> LossTerm<A::Value> {
        let zero = on.constant(0.0);
        let surrogate = self.surrogate(on);
        // Without an advantage there is nothing to learn, even where the ratio overflows. A cross-entropy has none.
        let mut term = surrogate;
        if self.structure.form != ObjectiveForm::CrossEntropy {
            let idle = on.equal(self.inputs.arrays.advantage, zero);
            term = term.unless(on, idle);
        }
        if let Some(penalty) = self.penalty(on) {
            term = term.plus(on, penalty);
        }
        if let Some(on_policy) = self.inputs.on_policy {
            term = term.map(on, |on, x| on.select(on_policy, x, zero));
        }
        if let Some(weight) = self.inputs.arrays.policy_weight {
            term = term.weighed(on, weight);
        }
        term
    }

    /// Writes the part of the term that is 0 without an advantage.
    fn surrogate(&self, on: &mut A) -> LossTerm<A::Value> {
        let (low, high) = (SpecNumber::Low, SpecNumber::High);
        match self.structure.form {
            ObjectiveForm::PpoClip => self.ppo_clip(on),
            // A score function of the ratio within its bounds.
            ObjectiveForm::Cispo => {
                let bounded = bounded(on, self.ratio, Some(self.number(low)), Some(self.number(high)));
                self.score(on, bounded.value)
            }
            ObjectiveForm::Sapo => self.sapo(on),
            ObjectiveForm::Vespo => {
                let weight = self.gamma_weight(on);
                self.score(on, weight)
            }
            ObjectiveForm::PolicyGradient | ObjectiveForm::Dro => {
                let by_logp = on.neg(self.inputs.arrays.advantage);
                self.linear(on, by_logp)
            }
            ObjectiveForm::ImportanceSampling | ObjectiveForm::KlCov => self.times_ratio(on),
            ObjectiveForm::MaskedRatio { score } => {
                // The window is open at both ends. A selection takes the term away outside, as a product with 0 would
                // turn an infinite ratio into NaN.
                let (above, below) = (on.less(self.number(low), self.ratio), on.less(self.ratio, self.number(high)));
                let inside = on.and(above, below);
                let zero = on.constant(0.0);
                let term = if score { self.score(on, self.ratio) } else { self.times_ratio(on) };
                term.map(on, |on, x| on.select(inside, x, zero))
            }
            ObjectiveForm::TrustRegion { divergence, two_sided, score } => {
                // A truncated ratio multiplies a score function; any other ratio has a gradient of its own.
                let term = if score {
                    let bounded = bounded(on, self.ratio, None, Some(self.number(SpecNumber::Truncate)));
                    self.score(on, bounded.value)
                } else {
                    self.times_ratio(on)
                };
                let trusted = self.trusted(on, divergence, two_sided);
                let zero = on.constant(0.0);
                term.map(on, |on, x| on.select(trusted, x, zero))
            }
            ObjectiveForm::Topr { selected } => self.tapered(on, selected),
            ObjectiveForm::Aspo { selected } => self.upside_down(on, selected),
            ObjectiveForm::CrossEntropy => {
                // A target that is uniform altogether leaves nothing of the log-probability, even of one of −∞.
                let weight = self.number(SpecNumber::TargetWeight);
                let zero = on.constant(0.0);
                let uniform = on.equal(weight, zero);
                let by_logp = on.neg(weight);
                self.linear(on, by_logp).unless(on, uniform)
            }
            ObjectiveForm::None => LossTerm { value: on.constant(0.0), by_logp: None, by_log_ratio: None },
        }
    }

    /// Writes TOPR: `−w₊·a·ℓ` for a positive token, `−w₋·min(r, upper)·a·ℓ` for any other.
    fn tapered(&self, on: &mut A, selected: bool) -> LossTerm<A::Value> {
        let zero = on.constant(0.0);
        // A token is positive by its advantage, or because the batch says so.
        let sign = self.inputs.arrays.selected.filter(|_| selected).unwrap_or(self.inputs.arrays.advantage);
        let positive = on.less(zero, sign);
        let bounded = bounded(on, self.ratio, None, Some(self.number(SpecNumber::High))).value;
        let other_weight = on.mul(self.number(SpecNumber::NegativeWeight), bounded);
        let coefficient = on.select(positive, self.number(SpecNumber::PositiveWeight), other_weight);
        self.score(on, coefficient)
    }

    /// Writes ASPO: `−a/u` with `u = min(r, high)` if `a > 0`, else `−a·v` with `v = max(r, low)`, each with its slope in `ln r`
    /// while it follows `r`. A coefficient beyond its second bound `c` becomes a score function, `−c·a·ℓ`.
    fn upside_down(&self, on: &mut A, selected: bool) -> LossTerm<A::Value> {
        let (r, a) = (self.ratio, self.inputs.arrays.advantage);
        let (zero, one) = (on.constant(0.0), on.constant(1.0));
        let positive = on.less(zero, a);
        // Selected tokens have bounds of their own.
        let (mut low, mut high) = (self.number(SpecNumber::Low), self.number(SpecNumber::High));
        if let Some(chosen) = self.inputs.arrays.selected.filter(|_| selected) {
            let chosen = on.less(zero, chosen);
            low = on.select(chosen, self.number(SpecNumber::LowOfSelected), low);
            high = on.select(chosen, self.number(SpecNumber::HighOfSelected), high);
        }
        // The coefficient is 1/u or v, by the sign of the advantage.
        let (below, above) = (on.less(r, low), on.less(high, r));
        let (raised, lowered) = (on.select(below, low, r), on.select(above, high, r));
        let inverse = on.div(one, lowered);
        let coefficient = on.select(positive, inverse, raised);
        // Beyond the second bound the coefficient no longer follows the ratio.
        let (positive_bound, other_bound) =
            (self.number(SpecNumber::DualClipPositive), self.number(SpecNumber::DualClip));
        let bound = on.select(positive, positive_bound, other_bound);
        let beyond = on.less(bound, coefficient);
        let following = on.mul(coefficient, a);
        let following = on.neg(following);
        // At the first bound it does not follow either: above for a positive advantage, below for any other.
        let at_upper = on.and(positive, above);
        let not_positive = on.select(positive, zero, one);
        let not_positive = on.less(zero, not_positive);
        let at_lower = on.and(not_positive, below);
        let held = on.or(at_upper, at_lower);
        let still = on.or(held, beyond);
        let score = self.score(on, bound);
        let by_logp = score.by_logp.map(|slope| on.select(beyond, slope, zero));
        let value = on.select(beyond, score.value, following);
        LossTerm { value, by_logp, by_log_ratio: Some(unless(on, Some(still), following)) }
    }

    /// Writes `−r·A`, which follows the ratio everywhere.
    fn times_ratio(&self, on: &mut A) -> LossTerm<A::Value> {
        let gain = on.mul(self.ratio, self.inputs.arrays.advantage);
        let loss = on.neg(gain);
        LossTerm { value: loss, by_logp: None, by_log_ratio: Some(loss) }
    }

    /// Writes `by_logp · ℓ` with a constant factor.
    fn linear(&self, on: &mut A, by_logp: A::Value) -> LossTerm<A::Value> {
        LossTerm { value: on.mul(by_logp, self.inputs.logp), by_logp: Some(by_logp), by_log_ratio: None }
    }

    /// Writes the score function `−coefficient·A·ℓ` with a constant coefficient.
    fn score(&self, on: &mut A, coefficient: A::Value) -> LossTerm<A::Value> {
        let by_logp = on.mul(coefficient, self.inputs.arrays.advantage);
        let by_logp = on.neg(by_logp);
        self.linear(on, by_logp)
    }

    /// Writes the penalty that does not depend on the advantage, if the objective has one: `penalty·w²`, or KL-Cov's
    /// `penalty·|w|` of the selected tokens.
    fn penalty(&self, on: &mut A) -> Option<LossTerm<A::Value>> {
        let w = self.log_ratio;
        match self.structure.form {
            ObjectiveForm::TrustRegion { .. } | ObjectiveForm::Dro => {
                // The value `penalty·w²` and its derivative `2·penalty·w` share the factor `penalty·w`.
                let half_slope = on.mul(self.number(SpecNumber::Penalty), w);
                let slope = on.add(half_slope, half_slope);
                Some(LossTerm { value: on.mul(half_slope, w), by_logp: None, by_log_ratio: Some(slope) })
            }
            ObjectiveForm::KlCov => {
                let (zero, coefficient) = (on.constant(0.0), self.number(SpecNumber::Penalty));
                // Two strict comparisons give `|w|` the slope 0 at its kink.
                let (negative, positive) = (on.less(w, zero), on.less(zero, w));
                let minus = on.neg(coefficient);
                let slope = on.select(positive, coefficient, zero);
                let slope = on.select(negative, minus, slope);
                let value = on.mul(slope, w);
                let term = LossTerm { value, by_logp: None, by_log_ratio: Some(slope) };
                // Tokens that are not selected have no penalty, whatever their ratio is.
                let selected = self.inputs.arrays.selected?;
                let spared = on.equal(selected, zero);
                Some(term.unless(on, spared))
            }
            _ => None,
        }
    }

    /// Writes PPO-clip: `−min(min(r, δ)·a, clip(r)·a)`, capped at `−c·a` for `a < 0`. The gradient is that of the operand which
    /// the `min` picks: `−r·a` if that operand still follows `r`, else 0. Exactly at a bound it follows `r`.
    fn ppo_clip(&self, on: &mut A) -> LossTerm<A::Value> {
        let (r, a) = (self.ratio, self.inputs.arrays.advantage);
        let zero = on.constant(0.0);
        let (low, high, delta) =
            (self.number(SpecNumber::Low), self.number(SpecNumber::High), self.number(SpecNumber::Delta));
        let (below, above) = (on.less(r, low), on.less(high, r));
        // The two operands of the `min`.
        let beyond_delta = on.less(delta, r);
        let capped = on.select(beyond_delta, delta, r);
        let raised = on.select(below, low, r);
        let clamped = on.select(above, high, raised);
        let unclipped = on.mul(capped, a);
        let clipped = on.mul(clamped, a);

        // The one that it picks, and whether that one still follows the ratio.
        let picks_clipped = on.less(clipped, unclipped);
        let surrogate = on.select(picks_clipped, clipped, unclipped);
        let loss = on.neg(surrogate);
        let following = on.mul(r, a);
        let following = on.neg(following);
        let out_of_range = on.or(below, above);
        let clipped_slope = on.select(out_of_range, zero, following);
        let unclipped_slope = on.select(beyond_delta, zero, following);
        let slope = on.select(picks_clipped, clipped_slope, unclipped_slope);

        // Dual clip: a negative advantage costs at most −c·a, without a gradient beyond that.
        let cap = on.mul(self.number(SpecNumber::DualClip), a);
        let cap = on.neg(cap);
        let negative = on.less(a, zero);
        let over_cap = on.less(cap, loss);
        let capped = on.and(negative, over_cap);
        let value = on.select(capped, cap, loss);
        let slope = on.select(capped, zero, slope);
        LossTerm { value, by_logp: None, by_log_ratio: Some(slope) }
    }

    /// Writes SAPO: `−(4/τ)·σ(u)·a` with `u = τ(r − 1)`. With `e = exp(−|u|)`, which cannot overflow, `σ(u)` is `1/(1 + e)` or,
    /// below 0, `e/(1 + e)`; and `σ′ = e/(1 + e)²`.
    fn sapo(&self, on: &mut A) -> LossTerm<A::Value> {
        let (r, a) = (self.ratio, self.inputs.arrays.advantage);
        let (zero, one) = (on.constant(0.0), on.constant(1.0));
        let minus_four = on.constant(-4.0);
        let positive = on.less(zero, a);
        let tau = on.select(positive, self.number(SpecNumber::TauPositive), self.number(SpecNumber::TauNegative));
        let over_one = on.sub(r, one);
        let u = on.mul(tau, over_one);
        // e = exp(−|u|), then σ(u).
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
        // The slope is r·σ′, in which σ′ goes to 0 faster than r to infinity: it is 0 once `e` is.
        let vanished = on.equal(e, zero);
        let farther = on.div(e, whole);
        let share = on.div(farther, whole);
        let slope = on.mul(share, r);
        let slope = on.mul(slope, times_a);
        LossTerm { value, by_logp: None, by_log_ratio: Some(unless(on, Some(vanished), slope)) }
    }

    /// Computes VESPO's weight `exp(λ + k·ln w − λ·w)`, or 0 if that is NaN or infinite.
    fn gamma_weight(&self, on: &mut A) -> A::Value {
        let zero = on.constant(0.0);
        // The weight is held within `[1e-8, e²⁰]` before the power `k` is taken of it.
        let (least, most) = (on.constant(1e-8_f64.ln()), on.constant(20.0));
        let log_weight = self.inputs.log_weight.unwrap_or(zero);
        let log_weight = bounded(on, log_weight, Some(least), Some(most)).value;
        let negative = on.less(self.inputs.arrays.advantage, zero);
        let by_sign = |on: &mut A, positive, other| {
            let (positive, other) = (self.number(positive), self.number(other));
            on.select(negative, other, positive)
        };
        let k = by_sign(on, SpecNumber::KPositive, SpecNumber::KNegative);
        let lambda = by_sign(on, SpecNumber::LambdaPositive, SpecNumber::LambdaNegative);
        // λ(1 − w) + k·ln w
        let minus_over_one = {
            let over_one = on.exp_m1(log_weight);
            on.neg(over_one)
        };
        let pull = on.mul(lambda, minus_over_one);
        let push = on.mul(k, log_weight);
        let exponent = on.add(pull, push);
        let weight = on.exp(exponent);
        // A NaN fails the comparison as ∞ does, and both give a weight of 0.
        let infinite = on.constant(f64::INFINITY);
        let real = on.less(weight, infinite);
        on.select(real, weight, zero)
    }

    /// Whether the token's probability has not moved too far in the direction that the advantage asks for, or in either one if the
    /// region is two-sided.
    fn trusted(&self, on: &mut A, divergence: Divergence, two_sided: bool) -> A::Truth {
        let zero = on.constant(0.0);
        let (logp, old_logp) = (self.inputs.logp, self.inputs.old_logp);
        let positive = on.less(zero, self.inputs.arrays.advantage);
        let limit = on.select(positive, self.number(SpecNumber::High), self.number(SpecNumber::Low));
        // The policy has advanced if it moved with the advantage: the probability rose where `A > 0`, or fell
        // elsewhere.
        let (p, p_old) = (on.exp(logp), on.exp(old_logp));
        let rise = on.sub(p, p_old);
        let fall = on.sub(p_old, p);
        let forward = on.select(positive, rise, fall);
        let advanced = on.less(zero, forward);
        // The divergence between the two Bernoulli distributions "this token or another".
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
                // The added 1e-8 keeps the quotient and its logarithm finite for a token whose probability rounds to 1.
                let tiny = on.constant(1e-8);
                let (numerator, denominator) = (on.add(q_old, tiny), on.add(q, tiny));
                let quotient = on.div(numerator, denominator);
                let other_tokens = on.ln(quotient);
                let other_tokens = on.mul(q_old, other_tokens);
                let fallen = on.sub(old_logp, logp);
                let this_token = on.mul(p_old, fallen);
                on.add(this_token, other_tokens)
            }
        };
        // Within the limit; or, in a one-sided region, moved against the advantage or not at all.
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
