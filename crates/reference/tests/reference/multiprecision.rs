//! The f64 reference against the same loss in 640-bit arithmetic, and its closed-form dlogits against central
//! differences of that loss.
//!
//! A figure here is `κ = |error| / (u · scale)` with `u = 2⁻⁵³` and `scale` the value's own condition number: what a
//! relative error of one `u` in every elementary step of an f64 evaluation can add up to. No absolute tolerance stands
//! anywhere: a non-target dlogit is held to the size of `p_j`, a target's to `1 − p_y`, however small they are.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::common::cases::{self, Case, Regime};
use crate::common::multiprecision::{self as exact, Position, Row, Token};
use crate::common::real::Real;
use crate::common::softmax_condition::SoftmaxCondition;
use assay_core::problem::{Outcome, Problem};
use assay_core::spec::{KlEstimator, LossSpec, Objective, OldLogp, TemperatureDivides};
use assay_reference::{self as reference, Reference};
use proptest::prelude::*;
use proptest::test_runner::TestError;

/// `u`, f64's unit roundoff.
const U: f64 = 1.0 / (1_u64 << 53) as f64;

/// Errors below this are the 640-bit side's own, such as `ln exp x ≠ x` in the last bit. The smallest value drawn is
/// 1e-88 or so, a probability at margin 100 and temperature ½; its rounding in f64 is 1e-104.
const NOISE: f64 = 1e-144;

/// A case nearer than this to a kink, where the loss has two derivatives, is drawn again.
const KINK: f64 = 1e-9;

/// The largest `κ` allowed for each output. `scale` counts a relative error of `u` once a step, so `κ` is about 1 where
/// nothing is lost; the loss adds the few steps of its weights and its sum.
///
/// Each limit is between 1.9 and 2.6 times the worst seen, in the comment, over 8 regimes × 7000 cases.
const LIMITS: [(&str, f64); 9] = [
    ("loss", 6.0),               // 2.65
    ("logp", 3.0),               // 1.31
    ("entropy", 3.5),            // 1.51
    ("token_loss", 5.0),         // 2.40
    ("dlogits target", 3.0),     // 1.27
    ("dlogits non-target", 3.0), // 1.17
    ("kl_mean", 4.0),            // 1.74
    ("entropy_mean", 3.0),       // 1.50
    ("ratio_mean", 3.0),         // 1.45
];

/// Worst `κ` by output.
#[derive(Debug, Default)]
struct Worst(BTreeMap<&'static str, f64>);

impl Worst {
    /// Compares one value. A scale of 0 allows no error at all.
    fn compare(&mut self, output: &'static str, got: f64, exact: &Real, scale: f64) -> Result<(), TestCaseError> {
        let (_, limit) = LIMITS.iter().find(|(name, _)| *name == output).expect("every output has a limit");
        prop_assert!(got.is_finite(), "{output}: got {got}, exact {:e}", exact.to_f64());
        let error = (Real::from(got) - exact.clone()).abs().to_f64();
        let kappa = if error < NOISE { 0.0 } else { error / (U * scale) };
        let worst = self.0.entry(output).or_default();
        *worst = worst.max(kappa);
        prop_assert!(
            kappa <= *limit,
            "{output}: got {got:e}, exact {:e}, error {error:e} = {kappa:.2} u·scale, limit {limit}",
            exact.to_f64()
        );
        Ok(())
    }
}

/// Of the softmax over `x / divisor`: a division rounds, unless it is by 1.
fn softmax_condition(row: &Row, divisor: f64, y: usize) -> SoftmaxCondition {
    let z: Vec<Option<f64>> = row.iter().map(|x| x.as_ref().map(|x| x.to_f64() / divisor)).collect();
    let rounded = |z: &Option<f64>| if divisor == 1.0 { 0.0 } else { z.unwrap_or(0.0).abs() };
    let size: Vec<f64> = z.iter().map(rounded).collect();
    SoftmaxCondition::of(&z, &size, y)
}

/// Condition of everything about one token, in units of `u`.
///
/// ```text
/// log_ratio  = |log r| + logp                        absolute, of log r = relative, of r
/// d          = |d| + logp                            absolute, of d = ref_logp − ℓ
/// policy     = |policy| (1 + log_ratio)              the last only while the ratio is unclipped
/// k1, |d|    : d              derivative 1
/// k2         : |d| d          derivative d
/// k3         : |e^d − 1| (1 + d) + |d|     derivative |e^d − 1| + e^d d
/// ```
struct TokenCondition {
    logp_softmax: SoftmaxCondition,
    entropy_softmax: SoftmaxCondition,
    logp: f64,
    ratio: f64,
    kl: f64,
    token_loss: f64,
    /// `|policy′| + β |kl′|`.
    grad: f64,
    /// Absolute, of `policy′ + β kl′`.
    grad_error: f64,
}

impl TokenCondition {
    fn of(spec: &LossSpec, position: &Position, row: &Row, token: &Token) -> Self {
        let y = position.id;
        let entropy_softmax = softmax_condition(row, spec.temperature, y);
        let (logp_softmax, logp) = match spec.temperature_divides {
            TemperatureDivides::Logits => {
                let softmax = softmax_condition(row, spec.temperature, y);
                let logp = softmax.logp;
                (softmax, logp)
            }
            TemperatureDivides::Logp => {
                let softmax = softmax_condition(row, 1.0, y);
                let logp = softmax.logp / spec.temperature + 2.0 * token.logp.to_f64().abs();
                (softmax, logp)
            }
        };
        let log_ratio = match spec.old_logp {
            OldLogp::Given => token.log_ratio.to_f64().abs() + logp,
            OldLogp::Current | OldLogp::Rollout => 0.0,
        };
        let ratio = token.ratio.to_f64() * (1.0 + log_ratio);
        let policy = token.policy.to_f64().abs();
        let unclipped = token.policy == -(token.ratio.clone() * Real::from(position.advantage));
        let policy_error = if unclipped { policy * (1.0 + log_ratio) } else { policy };
        let policy_grad = if unclipped { policy } else { 0.0 };

        let d = token.kl_difference.as_ref().map_or(0.0, Real::to_f64);
        let d_error = d.abs() + logp;
        let (kl_error, kl_grad, kl_grad_error) = match spec.kl.as_ref().map(|kl| kl.estimator) {
            None => (0.0, 0.0, 0.0),
            Some(KlEstimator::K1 | KlEstimator::Abs) => (d_error, 1.0, 1.0),
            Some(KlEstimator::K2) => (d.abs() * d_error, d.abs(), d_error),
            Some(KlEstimator::K3) => {
                let rise = d.exp_m1().abs();
                (rise * (1.0 + d_error) + d.abs(), rise, rise + d.exp() * d_error)
            }
        };
        let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
        Self {
            logp_softmax,
            entropy_softmax,
            logp,
            ratio,
            kl: kl_error,
            token_loss: policy_error + beta * kl_error,
            grad: policy_grad + beta * kl_grad,
            grad_error: policy_grad * (1.0 + log_ratio) + beta * kl_grad_error,
        }
    }

    /// Of `dlogits[j]`.
    fn dlogit(&self, spec: &LossSpec, position: &Position, count: usize, j: usize) -> f64 {
        let softmax = &self.logp_softmax;
        let (factor, factor_error) = if j == position.id {
            (softmax.p.iter().enumerate().filter(|(i, _)| *i != j).map(|(_, p)| p).sum(), softmax.others)
        } else {
            (softmax.p[j], softmax.p[j] * softmax.relative[j])
        };
        let policy_and_kl = position.weight.to_f64() * (self.grad_error * factor + self.grad * factor_error);
        let bonus = spec.entropy_coef.abs() / count as f64 * self.entropy_softmax.entropy_gradient(j);
        (policy_and_kl + bonus) / spec.temperature
    }
}

/// Whether a token lies so near a kink of its loss that f64 may see the other side.
fn near_a_kink(spec: &LossSpec, token: &Token) -> bool {
    let Objective::PpoClip(clip) = &spec.objective else { unreachable!("only PPO-clip is drawn") };
    let bounds = [Some(1.0 - clip.epsilon_low), Some(1.0 + clip.epsilon_high), clip.delta, clip.dual_clip];
    let ratio = token.ratio.to_f64();
    let at_a_bound = bounds.into_iter().flatten().any(|bound| (ratio - bound).abs() < KINK);
    let is_abs = spec.kl.as_ref().is_some_and(|kl| kl.estimator == KlEstimator::Abs);
    at_a_bound || (is_abs && token.kl_difference.as_ref().is_some_and(|d| d.to_f64().abs() < KINK))
}

/// One unmasked token, evaluated exactly.
struct Exact {
    position: Position,
    row: Row,
    token: Token,
    entropy: Real,
    condition: TokenCondition,
}

impl Exact {
    fn of(spec: &LossSpec, problem: &Problem, position: Position) -> Self {
        let row = exact::row(problem, &position);
        let current = exact::logp(spec, &row, position.id);
        let token = exact::token(spec, &position, &row, &current);
        let condition = TokenCondition::of(spec, &position, &row, &token);
        Self { entropy: exact::entropy(spec, &row), position, row, token, condition }
    }
}

/// One case against the exact loss: every value of every token, the totals and the metrics.
fn check(case: &Case, worst: &mut Worst) -> Result<(), TestCaseError> {
    let Case { spec, problem } = case;
    let tokens: Vec<Exact> =
        exact::positions(spec, problem).into_iter().map(|position| Exact::of(spec, problem, position)).collect();
    prop_assume!(!tokens.iter().any(|exact| near_a_kink(spec, &exact.token)), "near a kink");

    let reference = reference::evaluate(spec, problem).expect("a valid case");
    prop_assert_eq!(reference.first_nonfinite(), None);
    let outcome = reference.outcome();
    for Exact { position, row, token, entropy, condition } in &tokens {
        let Position { b, t, id, .. } = *position;
        worst.compare("logp", outcome.logp.at(b, t), &token.logp, condition.logp)?;
        worst.compare("entropy", outcome.entropy.at(b, t), entropy, condition.entropy_softmax.entropy)?;
        worst.compare("token_loss", outcome.token_loss.at(b, t), &token.loss, condition.token_loss)?;
        for (j, dlogit) in outcome.gradient.row(b, t).into_iter().enumerate() {
            let output = if j == id { "dlogits target" } else { "dlogits non-target" };
            let derivative = exact::derivative(spec, position, row, &token.logp, tokens.len(), j);
            worst.compare(output, dlogit, &derivative, condition.dlogit(spec, position, tokens.len(), j))?;
        }
    }
    check_masked(problem, &outcome)?;
    check_totals(spec, &reference, &tokens, worst)
}

/// Masked tokens hold 0 everywhere.
fn check_masked(problem: &Problem, outcome: &Outcome) -> Result<(), TestCaseError> {
    for ((b, t), _) in problem.mask.indexed_iter().filter(|(_, counts)| !**counts) {
        let values = [outcome.logp.at(b, t), outcome.entropy.at(b, t), outcome.token_loss.at(b, t)];
        prop_assert_eq!(values, [0.0; 3]);
        prop_assert!(outcome.gradient.row(b, t).iter().all(|x| *x == 0.0));
    }
    Ok(())
}

/// The loss and the metrics.
fn check_totals(
    spec: &LossSpec,
    reference: &Reference,
    tokens: &[Exact],
    worst: &mut Worst,
) -> Result<(), TestCaseError> {
    // Without a token there is nothing to divide by, and every total is 0.
    let count = tokens.len().max(1);
    let mean = |value: &dyn Fn(&Exact) -> Real| tokens.iter().map(value).sum::<Real>() / Real::from(count as f64);
    let mean_scale = |scale: &dyn Fn(&Exact) -> f64| tokens.iter().map(scale).sum::<f64>() / count as f64;

    let contribution = |x: &Exact| exact::contribution(spec, &x.position, &x.row, &x.token.logp, count);
    let loss_scale: f64 = tokens.iter().map(|x| x.position.weight.to_f64() * x.condition.token_loss).sum();
    let entropy_scale = mean_scale(&|x| x.condition.entropy_softmax.entropy);
    let bonus_scale = spec.entropy_coef.abs() * entropy_scale;
    worst.compare("loss", reference.loss(), &tokens.iter().map(contribution).sum(), loss_scale + bonus_scale)?;

    let metrics = reference.metrics();
    worst.compare("entropy_mean", metrics.entropy_mean, &mean(&|x| x.entropy.clone()), entropy_scale)?;
    let ratio_scale = mean_scale(&|x| x.condition.ratio);
    worst.compare("ratio_mean", metrics.ratio_mean, &mean(&|x| x.token.ratio.clone()), ratio_scale)?;
    prop_assert_eq!(metrics.kl_mean.is_some(), spec.kl.is_some());
    if let Some(kl_mean) = metrics.kl_mean {
        let kl = |x: &Exact| x.token.kl.clone().expect("a KL term");
        worst.compare("kl_mean", kl_mean, &mean(&kl), mean_scale(&|x| x.condition.kl))?;
    }

    let Objective::PpoClip(clip) = &spec.objective else { unreachable!("only PPO-clip is drawn") };
    let (low, high) = (Real::from(1.0 - clip.epsilon_low), Real::from(1.0 + clip.epsilon_high));
    let share = |clipped: &dyn Fn(f64, &Real) -> bool| {
        tokens.iter().filter(|x| clipped(x.position.advantage, &x.token.ratio)).count() as f64 / count as f64
    };
    let clip_low = share(&|advantage, ratio| advantage < 0.0 && *ratio < low);
    let clip_high = share(&|advantage, ratio| advantage > 0.0 && *ratio > high);
    prop_assert_eq!((metrics.clip_low, metrics.clip_high), (clip_low, clip_high));
    prop_assert!((metrics.clip_region - (clip_low + clip_high)).abs() <= U);
    Ok(())
}

/// Draws cases of one regime, and prints the worst κ of each output.
fn sweep(regime: Regime) {
    let worst = RefCell::new(Worst::default());
    let mut runner = cases::runner(
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/regressions/reference_multiprecision.txt"),
        128,
    );
    let result = runner.run(&cases::case(regime), |case| check(&case, &mut worst.borrow_mut()));
    println!("{regime:?}: {:.2?}", worst.borrow().0);
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, case)) => panic!("{reason}\n{case:#?}"),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}

#[test]
fn outcome_f64_small_logits_match_640_bits() {
    sweep(Regime::Small);
}

#[test]
fn outcome_f64_normal_logits_match_640_bits() {
    sweep(Regime::Normal);
}

#[test]
fn outcome_f64_wide_logits_match_640_bits() {
    sweep(Regime::Wide);
}

#[test]
fn outcome_f64_shifted_logits_match_640_bits() {
    sweep(Regime::Shifted);
}

#[test]
fn outcome_f64_low_logits_match_640_bits() {
    sweep(Regime::Low);
}

#[test]
fn outcome_f64_confident_logits_match_640_bits() {
    sweep(Regime::Confident);
}

#[test]
fn outcome_f64_excluded_columns_match_640_bits() {
    sweep(Regime::Excluded);
}

#[test]
fn outcome_f64_tied_logits_match_640_bits() {
    sweep(Regime::Tied);
}
