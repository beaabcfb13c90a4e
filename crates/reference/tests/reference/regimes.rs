//! The plain PPO-clip loss in every regime of logits, against 640 bits as the whole family is ([`crate::common::exact`]), with
//! scales by hand.
//!
//! [`crate::common::running`] counts a step of the whole family's formula even where the spec leaves it out, as a factor
//! of 1. Here `scale` is the condition number of the value: what a relative error of one `u` in every elementary step of
//! the plain loss can add up to, up to 16 times less.

use crate::common::cases;
use crate::common::draws::Regime;
use crate::common::exact::{ByLogp, Exact, Head, Precision, Scale, Scales, TokenScale, sweep};
use crate::common::real::Real;
use assay_core::spec::{KlEstimator, Objective, OldLogp};
use ndarray::Array2;

/// The smallest value drawn is 1e-88 or so, a probability at margin 100 and temperature ½; its rounding in f64 is 1e-104.
/// The truncation error of a central difference with step 2⁻⁸⁰ is 2⁻¹⁶⁰ of the third derivative, which vanishes where the
/// first does; the 640-bit side's own errors are in the last bit, such as `ln exp x ≠ x`.
const PLAIN: Precision = Precision { limits: LIMITS, noise: 1e-144, step: -80, scales };

/// `scale` counts a relative error of `u` once a step, so `κ` is about 1 where nothing is lost; the loss adds the few
/// steps of its weights and its sum.
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

/// What everything about one token can lose, in units of `u`.
///
/// ```text
/// log_ratio  = |log r| + logp                        absolute, of log r = relative, of r
/// d          = |d| + logp                            absolute, of d = ref_logp − ℓ
/// policy     = |policy| (1 + log_ratio)              the last only while the ratio is unclipped
/// k1, |d|    : d              derivative 1
/// k2         : |d| d          derivative d
/// k3         : |e^d − 1| (1 + d) + |d|     derivative |e^d − 1| + e^d d
/// ```
fn token_scale(exact: &Exact, head: &Head, (b, t): (usize, usize)) -> TokenScale {
    let (spec, problem) = (exact.loss.spec, exact.loss.problem);
    let policy_term = &exact.token(b, t).expect("a token that counts").policy;
    let old_logp = problem.old_logp.as_ref().filter(|_| spec.old_logp == OldLogp::Given);
    let log_r = old_logp.map_or(Real::from(0.0), |old| head.logp.clone() - Real::from(old[[b, t]]));
    let log_ratio = old_logp.map_or(0.0, |_| log_r.to_f64().abs() + head.logp_error);
    let policy = policy_term.to_f64().abs();
    let unclipped = *policy_term == -(log_r.exp() * Real::from(problem.advantages.at(b, t)));
    let policy_error = if unclipped { policy * (1.0 + log_ratio) } else { policy };
    let policy_grad = if unclipped { policy } else { 0.0 };

    let ref_logp = problem.ref_logp.as_ref().filter(|_| spec.kl.is_some());
    let d = ref_logp.map_or(0.0, |ref_logp| (Real::from(ref_logp[[b, t]]) - head.logp.clone()).to_f64());
    let d_error = d.abs() + head.logp_error;
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
    // `|policy′| + β |kl′|`, and the error of `policy′ + β kl′`.
    let grad = policy_grad + beta * kl_grad;
    let grad_error = policy_grad * (1.0 + log_ratio) + beta * kl_grad_error;

    let weight = weight(exact, b);
    let entropy_weight = spec.entropy_coef.abs() / count(exact);
    let softmax = &head.logp_softmax;
    let dlogit = |j: usize| {
        let (factor, factor_error) = if j == head.id {
            (softmax.p.iter().enumerate().filter(|(i, _)| *i != j).map(|(_, p)| p).sum(), softmax.others)
        } else {
            (softmax.p[j], softmax.p[j] * softmax.relative[j])
        };
        let bonus = entropy_weight * head.entropy_softmax.entropy_gradient(j);
        (weight * (grad_error * factor + grad * factor_error) + bonus) / head.temperature
    };
    TokenScale {
        token_loss: policy_error + beta * kl_error,
        ratio: log_r.exp().to_f64() * (1.0 + log_ratio),
        kl: kl_error,
        dlogits: (0..softmax.p.len()).map(dlogit).collect(),
    }
}

/// What the reduction multiplies the loss of a token of row `b` by.
fn weight(exact: &Exact, b: usize) -> f64 {
    exact.loss.weight(exact.loss.spec.averaging(), &exact.frozen, b).to_f64()
}

/// `Σ m`; 1 without a token.
fn count(exact: &Exact) -> f64 {
    exact.heads.iter().flatten().count().max(1) as f64
}

fn scales(exact: &Exact, _: &Scale, _: &ByLogp) -> Scales {
    assert!(matches!(exact.loss.spec.objective, Objective::PpoClip(_)), "only PPO-clip is drawn");
    let tokens = Array2::from_shape_fn(exact.heads.dim(), |at| {
        exact.heads[at].as_ref().map(|head| token_scale(exact, head, at))
    });
    let weighted = |((b, _), token): (_, &Option<TokenScale>)| {
        let token_loss = token.as_ref()?.token_loss;
        Some(weight(exact, b) * token_loss)
    };
    let weighted = tokens.indexed_iter().filter_map(weighted);
    let entropy = exact.heads.iter().flatten().map(|head| head.entropy_softmax.entropy).sum::<f64>() / count(exact);
    Scales { loss: weighted.sum::<f64>() + exact.loss.spec.entropy_coef.abs() * entropy, tokens }
}

/// Defines a test for each regime, so that they run at the same time.
macro_rules! regimes_match_640_bits {
    ($($test:ident: $regime:ident,)*) => {$(
        #[test]
        fn $test() {
            sweep(stringify!($regime), "reference_regimes", &cases::plain(Regime::$regime), &PLAIN);
        }
    )*};
}

regimes_match_640_bits! {
    small_logits_match_640_bits: Small,
    normal_logits_match_640_bits: Normal,
    wide_logits_match_640_bits: Wide,
    shifted_logits_match_640_bits: Shifted,
    low_logits_match_640_bits: Low,
    confident_logits_match_640_bits: Confident,
    excluded_columns_match_640_bits: Excluded,
    tied_logits_match_640_bits: Tied,
}
