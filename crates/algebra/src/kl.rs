//! The KL penalty of a token: an estimate, the term whose derivative it takes, and the importance that weighs it.

use super::arithmetic::Arithmetic;
use super::objective::LossInputs;
use super::structure::{KlForm, KlSlope, SpecNumber, SpecNumbers, ValueClamp};
use super::term::{HeldValue, LossTerm, bounded, unless, within};
use assay_core::spec::{KlEstimator, KlImportance};

/// Writes the KL estimate at `d = ref_logp − logp`, not multiplied by `beta`, with its derivatives by `logp` and by the log-ratio.
pub(crate) fn kl_penalty<A: Arithmetic>(
    on: &mut A,
    form: KlForm,
    numbers: &SpecNumbers<A::Value>,
    inputs: &LossInputs<A::Value, A::Truth>,
    [ref_logp, ratio]: [A::Value; 2],
) -> LossTerm<A::Value> {
    let logp = inputs.kl_logp.unwrap_or(inputs.logp);
    let difference = on.sub(ref_logp, logp);
    let mut d = HeldValue { value: difference, replaced: None };
    if form.difference_clamp {
        d = within(on, difference, numbers.get(SpecNumber::KlDifferenceClamp));
    }
    // The estimate, within its bound if that applies before the importance.
    let (mut value, slope) = estimate(on, form.estimator, d.value);
    let mut slope = unless(on, d.replaced, slope);
    if form.value_clamp == Some(ValueClamp::BeforeImportance) {
        let limited = within(on, value, numbers.get(SpecNumber::KlValueClamp));
        (value, slope) = (limited.value, unless(on, limited.replaced, slope));
    }
    // Some specs take the derivative of another estimate, without bounds.
    match form.slope {
        KlSlope::Own => {}
        KlSlope::K2 => slope = on.neg(difference),
        KlSlope::K2Weighted => {
            let log_ratio = on.sub(inputs.logp, inputs.old_logp);
            let ratio = on.exp(log_ratio);
            let weight = bounded(on, ratio, None, Some(numbers.get(SpecNumber::KlWeightBound))).value;
            let weighed = on.mul(weight, difference);
            slope = on.neg(weighed);
        }
    }
    // An importance weight that depends on `logp` adds its own derivative.
    let mut term = match form.importance {
        KlImportance::One => LossTerm { value, by_logp: Some(slope), by_log_ratio: None },
        KlImportance::Ratio => {
            let value = on.mul(ratio, value);
            LossTerm { value, by_logp: Some(on.mul(ratio, slope)), by_log_ratio: Some(value) }
        }
        KlImportance::TokenRatio => {
            let weight = on.exp(inputs.own.value);
            weighed(on, weight, value, slope, inputs.own.replaced)
        }
        KlImportance::Rollout => {
            let zero = on.constant(0.0);
            let rollout_logp = inputs.arrays.rollout_logp.unwrap_or(logp);
            let scored = on.equal(rollout_logp, rollout_logp);
            let log_weight = on.sub(logp, rollout_logp);
            let weight = on.exp(log_weight);
            let term = weighed(on, weight, value, slope, d.replaced);
            term.map(on, |on, x| on.select(scored, x, zero))
        }
        KlImportance::Score => {
            // A bound of the difference holds the score too.
            let own = unless(on, d.replaced, value);
            LossTerm { value, by_logp: Some(on.add(slope, own)), by_log_ratio: None }
        }
    };
    if form.value_clamp == Some(ValueClamp::AfterImportance) {
        let limited = within(on, term.value, numbers.get(SpecNumber::KlValueClamp));
        if let Some(replaced) = limited.replaced {
            term = LossTerm { value: limited.value, ..term.unless(on, replaced) };
        }
    }
    term
}

/// Writes `weight · value`, where the weight is `e^(ℓ − constant)`, so that it is its own derivative unless a bound `replaced` it.
fn weighed<A: Arithmetic>(
    on: &mut A,
    weight: A::Value,
    value: A::Value,
    slope: A::Value,
    replaced: Option<A::Truth>,
) -> LossTerm<A::Value> {
    let own = unless(on, replaced, value);
    let slope = on.add(slope, own);
    LossTerm { value: on.mul(weight, value), by_logp: Some(on.mul(weight, slope)), by_log_ratio: None }
}

/// Writes an estimate at `d`, and its derivative by `−d`, which is that by `logp`.
fn estimate<A: Arithmetic>(on: &mut A, estimator: KlEstimator, d: A::Value) -> (A::Value, A::Value) {
    // All estimators are functions of `d = ref_logp − logp`. K3 is `e^d − 1 − d`, and `exp_m1` forms its first
    // difference, which would cancel near 0.
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
            // The kink at `d = 0` has the slope 0, as automatic differentiation of an absolute value gives it.
            let (negative, positive) = (on.less(d, zero), on.less(zero, d));
            let minus_d = on.neg(d);
            let at_kink = on.select(positive, minus_one, zero);
            (on.select(negative, minus_d, d), on.select(negative, one, at_kink))
        }
    }
}
