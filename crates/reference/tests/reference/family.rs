//! The f64 reference of the whole loss family against the same losses in 640-bit arithmetic, and its closed-form
//! dlogits against central differences of the whole loss, with what is held constant held.
//!
//! A figure here is `κ = |error| / (u · scale)` with `u = 2⁻⁵³`. For all that lies behind the log-probabilities `scale`
//! is what [`Running`] says that an evaluation of the formula, or of its derivative, can lose when every step rounds
//! once; for the softmax it is that of [`SoftmaxCondition`]. No absolute tolerance stands anywhere: a non-target dlogit
//! is held to the size of `p_j`, a target's to `1 − p_y`, and what must be 0 to 0.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::common::cases;
use crate::common::draws::{self, Case};
use crate::common::family::{self, Frozen, Loss, Policy, Row, RowLoss, Undetermined};
use crate::common::real::Real;
use crate::common::running::{Running, U, nearest_choice};
use crate::common::softmax_condition::SoftmaxCondition;
use assay_core::problem::{Advantages, Extra, Outcome, Problem, ProblemError};
use assay_core::spec::{
    Cispo, ClipCov, CovarianceBand, Divergence, Dro, Drops, ImportanceSampling, Kl, KlCov, KlEstimator, KlGradient,
    KlImportance, LogClip, LossSpec, MaskedRatio, Objective, OffPolicyMask, OldLogp, Outside, PpoClip,
    QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, Rows, Sapo, Support, Temperature, TemperatureDivides, Terms, TopEntropy,
    TrustRegion, Unscored, Vespo,
};
use assay_reference::{self as reference, Reference};
use ndarray::{Array2, Array3, arr1, arr2};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{TestError, TestRunner};

/// A case with a choice nearer than this, relative to its sides, is drawn again.
const KINK: f64 = 1e-9;

/// How closely outputs are compared.
pub(crate) struct Precision {
    /// The largest `κ` allowed for each output.
    pub(crate) limits: [(&'static str, f64); 9],
    /// Errors below this are the 640-bit side's own.
    pub(crate) noise: f64,
    /// A central difference is over `±2ⁿ`.
    pub(crate) step: i32,
    /// What each output can lose.
    pub(crate) scales: fn(&Exact, &Scale, &ByLogp) -> Scales,
}

/// Of every spec.
///
/// A central difference with step 2⁻²⁰⁰ keeps 440 bits of a loss, and its truncation error is 2⁻⁴⁰⁰ of the third
/// derivative, which does not vanish where the first does. The smallest value drawn is the square of a probability at
/// margin 100 and temperature ½; its rounding in f64 is 1e-190, but it adds to larger ones, or is compared with its own
/// scale.
const OF_EVERY_SPEC: Precision = Precision { limits: LIMITS, noise: 1e-110, step: -200, scales: Scales::running };

/// About twice the worst `κ` seen, in the comment, over 12 arms × 700 cases.
const LIMITS: [(&str, f64); 9] = [
    ("loss", 1.5),               // 0.65
    ("logp", 2.5),               // 1.20
    ("entropy", 2.7),            // 1.34
    ("token_loss", 1.8),         // 0.91
    ("dlogits target", 1.5),     // 0.70
    ("dlogits non-target", 1.5), // 0.70
    ("kl_mean", 2.5),            // 1.25
    ("entropy_mean", 2.8),       // 1.38
    ("ratio_mean", 4.0),         // 1.97
];

/// Worst `κ` by output, and how many cases had what.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) worst: BTreeMap<&'static str, f64>,
    pub(crate) seen: BTreeMap<&'static str, usize>,
}

/// What the outputs of one token can lose, in units of `u`.
pub(crate) struct TokenScale {
    pub(crate) token_loss: f64,
    pub(crate) ratio: f64,
    pub(crate) kl: f64,
    pub(crate) dlogits: Vec<f64>,
}

/// What the outputs of one batch can lose, in units of `u`; `None` for a token that is not in `m`. The log-probability
/// and the entropy have theirs in [`Head`].
pub(crate) struct Scales {
    pub(crate) tokens: Array2<Option<TokenScale>>,
    pub(crate) loss: f64,
}

/// The rows with their derivatives with respect to `ℓ` of each token of `m`.
pub(crate) type ByLogp = Array2<Option<RowLoss<Running>>>;

impl Record {
    /// Compares one value. A scale of 0 allows no error at all.
    fn compare(
        &mut self,
        precision: &Precision,
        output: &'static str,
        got: f64,
        exact: &Real,
        scale: f64,
    ) -> Result<(), TestCaseError> {
        let (_, limit) = precision.limits.iter().find(|(name, _)| *name == output).expect("every output has a limit");
        prop_assert!(got.is_finite(), "{output}: got {got}, exact {:e}", exact.to_f64());
        let error = (Real::from(got) - exact.clone()).abs().to_f64();
        let kappa = if error < precision.noise { 0.0 } else { error / (U * scale) };
        let worst = self.worst.entry(output).or_default();
        *worst = worst.max(kappa);
        prop_assert!(
            kappa <= *limit,
            "{output}: got {got:e}, exact {:e}, error {error:e} = {kappa:.2} u·scale, limit {limit}",
            exact.to_f64()
        );
        Ok(())
    }

    fn saw(&mut self, what: &'static str, how: bool) {
        *self.seen.entry(what).or_default() += usize::from(how);
    }
}

/// The softmax of one token, exactly, and what f64 can lose on the way to it.
pub(crate) struct Head {
    pub(crate) id: usize,
    pub(crate) temperature: f64,
    row: Row,
    pub(crate) logp: Real,
    entropy: Real,
    pub(crate) logp_softmax: SoftmaxCondition,
    pub(crate) entropy_softmax: SoftmaxCondition,
    /// Absolute, of `ℓ`.
    pub(crate) logp_error: f64,
    /// `∂x_j/∂a_j` of the transform of logits, by column.
    derivative: Vec<f64>,
    /// Its relative error.
    derivative_error: Vec<f64>,
}

impl Head {
    fn of(spec: &LossSpec, problem: &Problem, b: usize, t: usize) -> Self {
        let id = usize::try_from(problem.ids[[b, t]]).expect("an id in the vocabulary");
        let row = family::logits(problem, b, t);
        let scaled = family::scaled(spec, problem, &row, id);
        let temperature = family::temperature(spec, problem, b, t);
        let (logp, entropy) = (family::logp(spec, &scaled, id, temperature), family::entropy(&scaled, temperature));
        let transform = &spec.logits;
        // Steps that round a logit on its way to the softmax; a tanh is three.
        let steps =
            u8::from(transform.bias) + u8::from(transform.scale != 1.0) + 3 * u8::from(transform.softcap.is_some());
        let softmax = |divisor: f64| {
            let steps = f64::from(steps + u8::from(divisor != 1.0));
            let z: Vec<Option<f64>> = scaled.iter().map(|x| x.as_ref().map(|x| x.to_f64() / divisor)).collect();
            let size: Vec<f64> = z.iter().map(|z| steps * z.unwrap_or(0.0).abs()).collect();
            SoftmaxCondition::of(&z, &size, id)
        };
        let logp_softmax = softmax(match spec.temperature_divides {
            TemperatureDivides::Logits => temperature,
            TemperatureDivides::Logp => 1.0,
        });
        let logp_error = match spec.temperature_divides {
            TemperatureDivides::Logits => logp_softmax.logp,
            TemperatureDivides::Logp => logp_softmax.logp / temperature + 2.0 * logp.to_f64().abs(),
        };
        // Of cap·tanh(c) by its logit: scale / cosh²(c), whose relative error is 2 tanh(c) times the error of c.
        let argument = |(j, a): (usize, &Option<Real>)| {
            let bias = problem.extra.bias.as_ref().filter(|_| transform.bias).map_or(0.0, |bias| bias[j]);
            let linear = transform.scale * (a.as_ref().map_or(0.0, Real::to_f64) + bias);
            transform.softcap.map_or(0.0, |cap| linear / cap)
        };
        let derivative = |column| transform.scale / f64::cosh(argument(column)).powi(2);
        let derivative_error = |column| 2.0 + 6.0 * argument(column).abs();
        Self {
            id,
            temperature,
            logp,
            entropy,
            logp_softmax,
            entropy_softmax: softmax(temperature),
            logp_error,
            derivative: row.iter().enumerate().map(derivative).collect(),
            derivative_error: row.iter().enumerate().map(derivative_error).collect(),
            row,
        }
    }

    /// `(ℓ, H)` with column `j` moved by `step`; `H` as it is where nothing hangs on it.
    fn moved(&self, spec: &LossSpec, problem: &Problem, j: usize, step: &Real) -> (Real, Real) {
        let mut row = self.row.clone();
        row[j] = row[j].take().map(|x| x + step.clone());
        let scaled = family::scaled(spec, problem, &row, self.id);
        let hangs = spec.entropy_coef != 0.0 || spec.dentropy;
        let entropy = if hangs { family::entropy(&scaled, self.temperature) } else { self.entropy.clone() };
        (family::logp(spec, &scaled, self.id, self.temperature), entropy)
    }

    /// What `dlogits[j]` can lose, from the gradients with respect to `ℓ` and `H`.
    fn dlogit(&self, by_logp: &Running, by_entropy: &Running, j: usize) -> f64 {
        let softmax = &self.logp_softmax;
        let (factor, factor_error) = if j == self.id {
            (softmax.p.iter().enumerate().filter(|(i, _)| *i != j).map(|(_, p)| p).sum(), softmax.others)
        } else {
            (softmax.p[j], softmax.p[j] * softmax.relative[j])
        };
        let (g, h) = (by_logp.slope.abs(), by_entropy.slope.abs());
        let own = self.derivative_error[j];
        let policy_and_kl = by_logp.slope_error * factor + g * (factor_error + own * factor);
        let entropy = self.entropy_softmax.entropy_gradient(j);
        let bonus = h * entropy * (1.0 + own) + by_entropy.slope_error * entropy;
        self.derivative[j].abs() / self.temperature * (policy_and_kl + bonus)
    }
}

/// One batch, evaluated exactly.
pub(crate) struct Exact<'a> {
    pub(crate) loss: Loss<'a>,
    pub(crate) heads: Array2<Option<Head>>,
    policy: Policy<Real>,
    pub(crate) frozen: Frozen<Real>,
    rows: Vec<RowLoss<Real>>,
}

impl<'a> Exact<'a> {
    fn of(case: &'a Case) -> Result<Self, Undetermined> {
        let Case { spec, problem } = case;
        let loss = Loss { spec, problem };
        let head = |at: (usize, usize)| problem.mask[at].then(|| Head::of(spec, problem, at.0, at.1));
        let heads = Array2::from_shape_fn(problem.mask.dim(), head);
        let policy = Policy {
            logp: heads.map(|head| head.as_ref().map(|head| head.logp.clone())),
            entropy: heads.map(|head| head.as_ref().map(|head| head.entropy.clone())),
        };
        let frozen = loss.freeze(policy.clone())?;
        let rows = (0..problem.mask.nrows()).map(|b| loss.row(&frozen, &policy, b)).collect();
        Ok(Self { loss, heads, policy, frozen, rows })
    }

    /// `∂loss/∂logits[b,t,j]` by central difference: the other rows' shares of it are exactly 0.
    fn dlogit(&self, b: usize, t: usize, j: usize, step: &Real) -> Real {
        let Loss { spec, problem } = self.loss;
        let head = self.heads[[b, t]].as_ref().expect("an unmasked token");
        let loss_at = |step: &Real| {
            let (logp, entropy) = head.moved(spec, problem, j, step);
            let mut policy = self.policy.clone();
            policy.logp[[b, t]] = Some(logp);
            policy.entropy[[b, t]] = Some(entropy);
            self.loss.row(&self.frozen, &policy, b).loss
        };
        (loss_at(step) - loss_at(&-step.clone())) / (Real::from(2.0) * step.clone())
    }

    pub(crate) fn token(&self, b: usize, t: usize) -> Option<&family::TokenLoss<Real>> {
        self.rows[b].tokens[t].as_ref()
    }
}

/// The same batch by running error analysis.
pub(crate) struct Scale<'a> {
    loss: Loss<'a>,
    policy: Policy<Running>,
    frozen: Frozen<Running>,
    rows: Vec<RowLoss<Running>>,
}

impl<'a> Scale<'a> {
    fn of(exact: &Exact<'a>) -> Self {
        let loss = exact.loss;
        let logp = |head: &Head| Running::input(head.logp.to_f64(), head.logp_error, false);
        let entropy = |head: &Head| Running::input(head.entropy.to_f64(), head.entropy_softmax.entropy, false);
        let policy = Policy {
            logp: exact.heads.map(|head| head.as_ref().map(logp)),
            entropy: exact.heads.map(|head| head.as_ref().map(entropy)),
        };
        let frozen = loss.freeze(policy.clone()).unwrap_or_else(|_| panic!("determined as in exact arithmetic"));
        let rows = (0..loss.problem.mask.nrows()).map(|b| loss.row(&frozen, &policy, b)).collect();
        Self { loss, policy, frozen, rows }
    }

    fn by_logp(&self) -> ByLogp {
        Array2::from_shape_fn(self.frozen.counts.dim(), |(b, t)| {
            let mut policy = self.policy.clone();
            policy.logp[[b, t]].as_mut()?.slope = 1.0;
            self.frozen.counts[[b, t]].then(|| self.loss.row(&self.frozen, &policy, b))
        })
    }

    /// Row `b` with its derivative with respect to `H` of token `t`.
    fn by_entropy(&self, b: usize, t: usize) -> RowLoss<Running> {
        let mut policy = self.policy.clone();
        policy.entropy[[b, t]].as_mut().expect("an unmasked token").slope = 1.0;
        self.loss.row(&self.frozen, &policy, b)
    }
}

impl Scales {
    /// By running error analysis.
    fn running(exact: &Exact, scale: &Scale, by_logp: &ByLogp) -> Self {
        let mut ratios = scale.loss.ratios(&scale.frozen).into_iter();
        let token = |(b, t): (usize, usize)| {
            let (token, by_logp) = (scale.rows[b].tokens[t].as_ref()?, by_logp[[b, t]].as_ref()?);
            let head = exact.heads[[b, t]].as_ref().expect("an unmasked token");
            let by_entropy = scale.by_entropy(b, t);
            let dlogit = |j| head.dlogit(&by_logp.loss, &by_entropy.loss, j);
            Some(TokenScale {
                token_loss: token.loss.error,
                ratio: ratios.next().expect("a ratio of every token").error,
                kl: token.kl.map_or(0.0, |kl| kl.error),
                dlogits: (0..head.row.len()).map(dlogit).collect(),
            })
        };
        let tokens = Array2::from_shape_fn(scale.frozen.counts.dim(), token);
        Self { tokens, loss: scale.rows.iter().map(|row| row.loss).sum::<Running>().error }
    }
}

/// One case against the exact loss: every value of every token, the totals and the metrics.
pub(crate) fn check(case: &Case, precision: &Precision, record: &mut Record) -> Result<(), TestCaseError> {
    let Case { spec, problem } = case;
    prop_assert_eq!(spec.check(), Ok(()));
    let exact = match Exact::of(case) {
        Ok(exact) => exact,
        Err(Undetermined { candidates, taken }) => {
            let refused = reference::evaluate(spec, problem).err();
            prop_assert_eq!(refused, Some(ProblemError::Undetermined { candidates, taken }));
            record.saw("clip_cov undetermined", true);
            return Ok(());
        }
    };
    let ((scale, by_logp), nearest) = nearest_choice(|| {
        let scale = Scale::of(&exact);
        let by_logp = scale.by_logp();
        (scale, by_logp)
    });
    prop_assume!(nearest > KINK, "near a kink");

    let reference = reference::evaluate(spec, problem).expect("a valid case");
    prop_assert_eq!(reference.first_nonfinite(), None);
    let outcome = reference.outcome();
    let scales = (precision.scales)(&exact, &scale, &by_logp);
    let step = Real::power_of_two(precision.step);
    for ((b, t), head) in exact.heads.indexed_iter() {
        let (Some(head), Some(token), Some(scale)) = (head, exact.token(b, t), &scales.tokens[[b, t]]) else {
            check_absent(&outcome, b, t)?;
            continue;
        };
        let mut compare = |output, got, exact: &Real, scale| record.compare(precision, output, got, exact, scale);
        compare("logp", outcome.logp.at(b, t), &head.logp, head.logp_error)?;
        compare("entropy", outcome.entropy.at(b, t), &head.entropy, head.entropy_softmax.entropy)?;
        compare("token_loss", outcome.token_loss.at(b, t), &token.loss, scale.token_loss)?;
        for (j, dlogit) in outcome.gradient.row(b, t).into_iter().enumerate() {
            let output = if j == head.id { "dlogits target" } else { "dlogits non-target" };
            compare(output, dlogit, &exact.dlogit(b, t, j, &step), scale.dlogits[j])?;
        }
    }
    check_totals(&reference, &exact, &scales, precision, record)?;
    check_clipped(&reference, &exact)?;
    note(spec, &exact, &by_logp, record);
    Ok(())
}

/// A token that is not in `m` holds 0 everywhere.
fn check_absent(outcome: &Outcome, b: usize, t: usize) -> Result<(), TestCaseError> {
    let values = [outcome.logp.at(b, t), outcome.entropy.at(b, t), outcome.token_loss.at(b, t)];
    prop_assert_eq!(values, [0.0; 3]);
    prop_assert!(outcome.gradient.row(b, t).iter().all(|x| *x == 0.0));
    Ok(())
}

/// The loss and the means.
fn check_totals(
    reference: &Reference,
    exact: &Exact,
    scales: &Scales,
    precision: &Precision,
    record: &mut Record,
) -> Result<(), TestCaseError> {
    let mut compare = |output, got, exact: &Real, scale| record.compare(precision, output, got, exact, scale);
    let loss = exact.rows.iter().map(|row| row.loss.clone()).sum::<Real>();
    compare("loss", reference.loss(), &loss, scales.loss)?;

    let tokens: Vec<_> = exact.rows.iter().flat_map(|row| row.tokens.iter().flatten()).collect();
    let count = tokens.len().max(1) as f64;
    let mean_scale = |of: fn(&TokenScale) -> f64| scales.tokens.iter().flatten().map(of).sum::<f64>() / count;
    let metrics = reference.metrics();
    let ratio = exact.loss.ratios(&exact.frozen).into_iter().sum::<Real>() / Real::from(count);
    compare("ratio_mean", metrics.ratio_mean, &ratio, mean_scale(|scale| scale.ratio))?;
    prop_assert_eq!(metrics.kl_mean.is_some(), reference.spec().kl.is_some());
    if let Some(kl_mean) = metrics.kl_mean {
        let kl = tokens.iter().filter_map(|token| token.kl.clone()).sum::<Real>() / Real::from(count);
        compare("kl_mean", kl_mean, &kl, mean_scale(|scale| scale.kl))?;
    }
    let counted =
        || exact.heads.indexed_iter().filter(|(at, _)| exact.frozen.counts[*at]).filter_map(|(_, head)| head.as_ref());
    let entropy = counted().map(|head| head.entropy.clone()).sum::<Real>() / Real::from(count);
    let entropy_scale = counted().map(|head| head.entropy_softmax.entropy).sum::<f64>() / count;
    compare("entropy_mean", metrics.entropy_mean, &entropy, entropy_scale)
}

/// The shares of tokens beyond PPO's clip, on the side where it holds them.
fn check_clipped(reference: &Reference, exact: &Exact) -> Result<(), TestCaseError> {
    let Objective::PpoClip(clip) = &reference.spec().objective else { return Ok(()) };
    // A clip of log-ratios is counted in its place.
    if reference.spec().ratio.clip.is_some() {
        return Ok(());
    }
    let (low, high) = (Real::from(1.0 - clip.epsilon_low), Real::from(1.0 + clip.epsilon_high));
    let counted = exact.frozen.counts.indexed_iter().filter(|(_, counts)| **counts);
    let advantages = counted.map(|((b, t), _)| reference.problem().advantages.at(b, t));
    let tokens: Vec<(f64, Real)> = advantages.zip(exact.loss.ratios(&exact.frozen)).collect();
    let share = |clipped: &dyn Fn(f64, &Real) -> bool| {
        let clipped = tokens.iter().filter(|(advantage, ratio)| clipped(*advantage, ratio));
        clipped.count() as f64 / tokens.len().max(1) as f64
    };
    let clip_low = share(&|advantage, ratio| advantage < 0.0 && *ratio < low);
    let clip_high = share(&|advantage, ratio| advantage > 0.0 && *ratio > high);
    let metrics = reference.metrics();
    prop_assert_eq!((metrics.clip_low, metrics.clip_high), (clip_low, clip_high));
    prop_assert!((metrics.clip_region - (clip_low + clip_high)).abs() <= U);
    Ok(())
}

/// Counts what a case had, where it had a gradient.
fn note(spec: &LossSpec, exact: &Exact, by_logp: &ByLogp, record: &mut Record) {
    let tokens = || by_logp.iter().flatten().flat_map(|row| row.tokens.iter().flatten());
    let policy = tokens().any(|token| token.policy.slope != 0.0);
    let kl = tokens().any(|token| token.kl.is_some_and(|kl| kl.slope != 0.0));
    note_policy(spec, exact, policy, record);
    note_corrections(spec, exact, policy, kl, record);
    if let Some(terms) = &spec.kl {
        record.saw("kl.gradient own", kl && terms.gradient == KlGradient::Own);
        record.saw("kl.gradient k2", kl && terms.gradient == KlGradient::K2);
        record.saw("kl.importance ratio", kl && terms.importance == KlImportance::Ratio);
        record.saw("kl.importance score", kl && terms.importance == KlImportance::Score);
        record.saw("kl.difference_clamp", kl && terms.difference_clamp.is_some());
        record.saw("kl.value_clamp", kl && terms.value_clamp.is_some() && !terms.clamp_after_importance);
        record.saw("kl.clamp_after_importance", kl && terms.value_clamp.is_some() && terms.clamp_after_importance);
        record.saw("kl.averaging", kl && terms.averaging.is_some());
    }
    record.saw("entropy_coef", spec.entropy_coef != 0.0);
    record.saw("dentropy", spec.dentropy);
    record.saw("entropy_averaging", spec.entropy_coef != 0.0 && spec.entropy_averaging.is_some());
    let (transform, support) = (&spec.logits, &spec.support);
    record.saw("logits", policy && transform.softcap.is_some() && transform.bias && transform.scale != 1.0);
    record.saw("support", policy && !support.is_whole());
    record.saw("temperature given", policy && spec.temperature == Temperature::Given);
    record.saw("temperature_divides logp", policy && spec.temperature_divides == TemperatureDivides::Logp);
}

fn note_policy(spec: &LossSpec, exact: &Exact, policy: bool, record: &mut Record) {
    record.saw("policy", policy);
    let ratio = &spec.ratio;
    let level = match ratio.level {
        RatioLevel::Token => "ratio.level token",
        RatioLevel::Sequence => "ratio.level sequence",
        RatioLevel::SequenceToken => "ratio.level sequence_token",
        RatioLevel::SequenceProduct => "ratio.level sequence_product",
    };
    record.saw(level, policy);
    record.saw("ratio.clamp", policy && ratio.clamp.is_some());
    record.saw("ratio.clip", policy && ratio.clip.is_some());
    record.saw("ratio.cap", policy && ratio.cap.is_some());
    record.saw("ratio.denominator_epsilon", policy && ratio.denominator_epsilon > 0.0);
    record.saw("old_logp current", policy && spec.old_logp == OldLogp::Current);
    record.saw("old_logp rollout", policy && spec.old_logp == OldLogp::Rollout);
    let counts = &exact.frozen.counts;
    let some_selected = exact.frozen.selected.iter().zip(counts).any(|(selected, counts)| *counts && *selected);
    let some_not = exact.frozen.selected.iter().zip(counts).any(|(selected, counts)| *counts && !selected);
    match &spec.objective {
        Objective::TrustRegion(region) => {
            let divergence = match region.divergence {
                Divergence::TotalVariation => "trust_region.divergence total_variation",
                Divergence::BinaryKl => "trust_region.divergence binary_kl",
            };
            record.saw(divergence, policy && some_not);
            record.saw("trust_region.two_sided", policy && some_not && region.two_sided);
            record.saw("trust_region.truncate", some_selected && region.truncate.is_some());
        }
        Objective::KlCov(cov) => {
            record.saw("kl_cov.selection", policy && some_selected && some_not && cov.selection.is_some());
        }
        Objective::ClipCov(cov) => {
            record.saw("clip_cov.selection", policy && some_selected && some_not && cov.selection.is_some());
        }
        Objective::Vespo(vespo) => {
            record.saw("vespo with weights", policy && spec.rollout.is_some());
            let some_masked = exact.loss.problem.mask.iter().any(|counts| !counts);
            let given = spec.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given);
            record.saw("vespo.weights_of_masked_tokens", given && some_masked && vespo.weights_of_masked_tokens);
        }
        _ => {}
    }
}

fn note_corrections(spec: &LossSpec, exact: &Exact, policy: bool, kl: bool, record: &mut Record) {
    let frozen = &exact.frozen;
    if let Some(rollout) = &spec.rollout {
        let level = match (rollout.source, rollout.level) {
            (RolloutSource::Given, RolloutLevel::Token) => "rollout given",
            (RolloutSource::Given, _) => "rollout given, geometric",
            (_, RolloutLevel::Token) => "rollout.level token",
            (_, RolloutLevel::Sequence) => "rollout.level sequence",
            (_, RolloutLevel::Geometric) => "rollout.level geometric",
            (_, RolloutLevel::TokenGatedByGeometric) => "rollout.level token_gated_by_geometric",
        };
        record.saw(level, policy);
        record.saw("rollout.outside mask", policy && rollout.outside == Outside::Mask);
        record.saw("rollout.normalize", policy && rollout.normalize);
        record.saw("rollout.applies_to policy_and_kl", kl && rollout.applies_to == Terms::PolicyAndKl);
    }
    let unmasked = || exact.loss.problem.mask.indexed_iter().filter(|(_, inside)| **inside).map(|(at, _)| at);
    record.saw("rejection", policy && unmasked().any(|at| !frozen.counts[at]));
    record.saw("rejection.counts", policy && unmasked().any(|at| frozen.counts[at] && !frozen.stays[at]));
    let some_far = policy && unmasked().any(|at| frozen.counts[at] && !frozen.near[at]);
    for (name, which) in [("off_policy_mask given", OldLogp::Given), ("off_policy_mask rollout", OldLogp::Rollout)] {
        record.saw(name, some_far && spec.off_policy_mask.is_some_and(|mask| mask.behaviour == which));
    }
    let some_low = policy && unmasked().any(|at| frozen.counts[at] && !frozen.top[at]);
    let drops = |drops| some_low && spec.top_entropy.is_some_and(|top| top.drops == drops);
    record.saw("top_entropy.drops policy_term", drops(Drops::PolicyTerm));
    let shared = spec.ratio.level == RatioLevel::Sequence;
    record.saw("top_entropy.drops ratio", shared && drops(Drops::Ratio));
}

/// Draws cases of one objective, and prints the worst κ of each output.
fn sweep(name: &str) {
    let (_, objective) = cases::objectives().into_iter().find(|(arm, _)| *arm == name).expect("an arm");
    let record = RefCell::new(Record::default());
    let mut runner =
        draws::runner(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fixtures/regressions/reference_family.txt"), 48);
    let result =
        runner.run(&cases::of_family(objective), |case| check(&case, &OF_EVERY_SPEC, &mut record.borrow_mut()));
    let record = record.into_inner();
    println!("{name}: {:.2?}\n{:?}", record.worst, record.seen);
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, case)) => panic!("{reason}\n{case:#?}"),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
    // Without a policy term there is no gradient of one.
    let reached = |what: &str| record.seen.get(what).is_some_and(|cases| *cases > 0);
    assert_eq!(reached("policy"), name != "none", "{name}: {:?}", record.seen);
    assert!(reached("kl.gradient own"), "{name}: {:?}", record.seen);
}

/// The cases that [`sweep`] draws from have every option, on tokens that it matters to.
#[test]
fn cases_have_every_option_with_a_gradient() {
    let mut record = Record::default();
    for (name, objective) in cases::objectives() {
        let mut runner = TestRunner::deterministic();
        let cases = cases::of_family(objective);
        for _ in 0..50 {
            let case = cases.new_tree(&mut runner).expect("a case").current();
            let Ok(exact) = Exact::of(&case) else { continue };
            let scale = Scale::of(&exact);
            let by_logp = scale.by_logp();
            note(&case.spec, &exact, &by_logp, &mut record);
        }
        println!("{name}: {:?}", record.seen);
    }
    let rare: Vec<_> = record.seen.iter().filter(|(_, cases)| **cases < 3).collect();
    assert!(rare.is_empty(), "too few cases: {rare:?}");
}

#[test]
fn outcome_f64_ppo_clip_matches_640_bits() {
    sweep("ppo_clip");
}

#[test]
fn outcome_f64_cispo_matches_640_bits() {
    sweep("cispo");
}

#[test]
fn outcome_f64_sapo_matches_640_bits() {
    sweep("sapo");
}

#[test]
fn outcome_f64_vespo_matches_640_bits() {
    sweep("vespo");
}

#[test]
fn outcome_f64_policy_gradient_matches_640_bits() {
    sweep("policy_gradient");
}

#[test]
fn outcome_f64_importance_sampling_matches_640_bits() {
    sweep("importance_sampling");
}

#[test]
fn outcome_f64_masked_ratio_matches_640_bits() {
    sweep("masked_ratio");
}

#[test]
fn outcome_f64_trust_region_matches_640_bits() {
    sweep("trust_region");
}

#[test]
fn outcome_f64_dro_matches_640_bits() {
    sweep("dro");
}

#[test]
fn outcome_f64_kl_cov_matches_640_bits() {
    sweep("kl_cov");
}

#[test]
fn outcome_f64_clip_cov_matches_640_bits() {
    sweep("clip_cov");
}

#[test]
fn outcome_f64_none_matches_640_bits() {
    sweep("none");
}

/// Two rows of three tokens over four columns, every array there, and `mask` over them.
fn batch(mask: [[bool; 3]; 2]) -> Problem {
    let shape = (2, 3);
    let spread = |(b, t): (usize, usize), from: f64| from + 0.37 * ((5 * b + 3 * t) % 4) as f64;
    let array = |from: f64| Some(Array2::from_shape_fn(shape, |at| spread(at, from)));
    let logits = Array3::from_shape_fn((2, 3, 4), |(b, t, j)| 0.3 * ((7 * b + 3 * t + 5 * j) % 11) as f64);
    Problem {
        logits: logits.into(),
        ids: arr2(&[[0, 1, 2], [3, 0, 1]]),
        mask: arr2(&mask),
        advantages: Advantages::Sequence(arr1(&[0.8, -1.3])),
        old_logp: array(-2.1),
        ref_logp: array(-2.3),
        extra: Extra {
            rollout_logp: array(-2.2),
            rollout_weights: array(0.4),
            token_weights: array(0.6),
            selected: Some(arr2(&[[true, false, true], [false, true, false]])),
            bias: Some(arr1(&[0.1, -0.2, 0.3, 0.0])),
            dentropy: array(0.2),
            ..Extra::default()
        },
    }
}

const FULL: [[bool; 3]; 2] = [[true; 3]; 2];

const LEVELS: [RatioLevel; 4] =
    [RatioLevel::Token, RatioLevel::Sequence, RatioLevel::SequenceToken, RatioLevel::SequenceProduct];

/// Compares `problem` under `spec` with the exact loss.
fn agrees(spec: LossSpec, problem: &Problem) -> f64 {
    let case = Case { spec, problem: problem.clone() };
    if let Err(reason) = check(&case, &OF_EVERY_SPEC, &mut Record::default()) {
        panic!("{reason}\n{case:?}");
    }
    reference::evaluate(&case.spec, problem).expect("a valid case").loss()
}

fn with(objective: Objective) -> LossSpec {
    LossSpec { objective, ..LossSpec::default() }
}

/// One objective of every arm, at its usual numbers.
fn arms() -> Vec<LossSpec> {
    let region = |truncate| TrustRegion {
        divergence: Divergence::BinaryKl,
        low: 0.2,
        high: 0.2,
        two_sided: false,
        truncate,
        penalty: 1e-3,
    };
    let arms = vec![
        Objective::PpoClip(PpoClip { delta: Some(2.5), dual_clip: Some(3.0), ..PpoClip::default() }),
        Objective::Cispo(Cispo { lower: Some(0.8), upper: 5.0 }),
        Objective::Sapo(Sapo::default()),
        Objective::Vespo(Vespo::default()),
        Objective::PolicyGradient,
        Objective::ImportanceSampling(ImportanceSampling { empty_rows: false }),
        Objective::MaskedRatio(MaskedRatio { lower: 0.5, upper: 2.0 }),
        Objective::TrustRegion(region(None)),
        Objective::TrustRegion(region(Some(3.0))),
        Objective::Dro(Dro { beta: 0.5 }),
        Objective::KlCov(KlCov { coefficient: 1.0, selection: None }),
        Objective::ClipCov(ClipCov { clip: PpoClip::default(), selection: None }),
        Objective::None,
    ];
    arms.into_iter().map(with).collect()
}

#[test]
fn outcome_f64_every_arm_at_its_usual_numbers_matches() {
    for spec in arms() {
        for level in LEVELS {
            let ratio = Ratio { level, ..Ratio::default() };
            agrees(LossSpec { ratio, ..spec.clone() }, &batch([[true, true, false], [true; 3]]));
        }
    }
}

#[test]
fn clip_cov_with_more_candidates_than_it_takes_is_refused_by_field() {
    let band = |fraction| Some(CovarianceBand { fraction, lower: -10.0, upper: 10.0 });
    let wide = || PpoClip { epsilon_low: 0.99, epsilon_high: 99.0, ..PpoClip::default() };
    let cov = |fraction| with(Objective::ClipCov(ClipCov { clip: wide(), selection: band(fraction) }));
    let problem = batch(FULL);
    let spec = cov(0.5);
    let Err(refused) = reference::evaluate(&spec, &problem) else { panic!("six candidates, of which three are taken") };
    assert_eq!(refused, ProblemError::Undetermined { candidates: 6, taken: 3 });
    assert!(refused.to_string().starts_with("`selected`: not given"), "{refused}");
    assert_eq!(agrees(cov(1.0), &problem), 0.0);
}

#[test]
fn loss_f64_gmpo_counts_a_row_without_tokens_as_a_ratio_of_one() {
    let gmpo = |empty_rows| LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, clip: Some(LogClip { low: 0.4, high: 0.4 }), ..Ratio::default() },
        reduction: Reduction::SequenceMean { rows: Rows::All },
        scale: 0.5,
        ..with(Objective::ImportanceSampling(ImportanceSampling { empty_rows }))
    };
    let problem = batch([[true, false, true], [false; 3]]);
    let (counted, left_out) = (agrees(gmpo(true), &problem), agrees(gmpo(false), &problem));
    assert!((counted - left_out - 0.5 * 1.3 / 2.0).abs() < 1e-15, "{counted} and {left_out}");
    // A row whose tokens are all rejected has none.
    let rejection = Rejection {
        estimator: RejectionEstimator::K2,
        level: RejectionLevel::Token,
        min: None,
        max: 1e-9,
        counts: false,
        drops_from: Terms::PolicyAndKl,
    };
    let rejected = LossSpec { rejection: vec![rejection], ..gmpo(true) };
    assert!((agrees(rejected, &batch(FULL)) - 0.5 * (1.3 - 0.8) / 2.0).abs() < 1e-15);
}

#[test]
fn loss_f64_vespo_weights_of_masked_tokens_match() {
    let vespo = |weights_of_masked_tokens, level, normalize| LossSpec {
        rollout: Some(RolloutWeights {
            source: RolloutSource::Given,
            level,
            outside: Outside::Truncate,
            min: None,
            max: None,
            clamp: None,
            normalize,
            unscored: Unscored::One,
            applies_to: Terms::Policy,
        }),
        ..with(Objective::Vespo(Vespo { weights_of_masked_tokens, ..Vespo::default() }))
    };
    let problem = batch([[true, true, false], [true, false, false]]);
    let token = RolloutLevel::Token;
    for normalize in [false, true] {
        assert_ne!(agrees(vespo(true, token, normalize), &problem), agrees(vespo(false, token, normalize), &problem));
        for masked_too in [false, true] {
            agrees(vespo(masked_too, RolloutLevel::Geometric, normalize), &problem);
        }
    }
    // One weight a row is added once, whether or not masked tokens have it too.
    let mut of_rows = problem;
    of_rows.extra.rollout_weights = Some(arr2(&[[0.4], [1.7]]));
    assert_eq!(agrees(vespo(true, token, false), &of_rows), agrees(vespo(false, token, false), &of_rows));
}

#[test]
fn outcome_f64_ratio_beyond_f64_without_advantage_is_zero() {
    for spec in arms() {
        // A penalty does not ask for an advantage.
        let penalizes = matches!(&spec.objective, Objective::Dro(_) | Objective::TrustRegion(_) | Objective::KlCov(_));
        let mut problem = batch(FULL);
        problem.advantages = Advantages::Sequence(arr1(&[0.0, 0.0]));
        problem.old_logp = Some(Array2::from_elem((2, 3), -1000.0));
        let outcome = reference::evaluate(&spec, &problem).expect("a valid case").outcome();
        if penalizes {
            assert!(outcome.token_loss.to_f64().iter().all(|loss| loss.is_finite()), "{spec:?}");
            continue;
        }
        assert!(outcome.token_loss.to_f64().iter().all(|loss| *loss == 0.0), "{spec:?}");
        assert!(outcome.gradient.to_f64().iter().all(|dlogit| *dlogit == 0.0), "{spec:?}");
    }
}

#[test]
fn outcome_f64_nan_under_the_mask_is_never_read() {
    let weights = RolloutWeights {
        source: RolloutSource::Given,
        level: RolloutLevel::Token,
        outside: Outside::Truncate,
        min: None,
        max: None,
        clamp: None,
        normalize: true,
        unscored: Unscored::One,
        applies_to: Terms::PolicyAndKl,
    };
    let computed = RolloutWeights { source: RolloutSource::Logp, level: RolloutLevel::Sequence, ..weights.clone() };
    let rejection = Rejection {
        estimator: RejectionEstimator::K3,
        level: RejectionLevel::SequenceMax,
        min: None,
        max: 0.5,
        counts: false,
        drops_from: Terms::PolicyAndKl,
    };
    let clean = batch([[true, false, true], [true, true, false]]);
    let mut dirty = clean.clone();
    for (at, _) in clean.mask.indexed_iter().filter(|(_, counts)| !**counts) {
        let Extra { rollout_logp, rollout_weights, dentropy, .. } = &mut dirty.extra;
        for array in [&mut dirty.old_logp, &mut dirty.ref_logp, rollout_logp, rollout_weights, dentropy] {
            array.as_mut().expect("there")[at] = f64::NAN;
        }
        dirty.ids[at] = i64::MIN;
        dirty.logits.fill_row(at.0, at.1, f64::NAN);
    }
    for arm in arms() {
        for rollout in [weights.clone(), computed.clone()] {
            let spec = LossSpec {
                rollout: Some(rollout),
                rejection: vec![rejection],
                off_policy_mask: Some(OffPolicyMask { threshold: 0.1, behaviour: OldLogp::Rollout }),
                top_entropy: Some(TopEntropy {
                    fraction: 0.6,
                    drops: Drops::PolicyTerm,
                    precision: QuantilePrecision::Exact,
                }),
                kl: Some(Kl::plain(0.1, KlEstimator::K3)),
                entropy_coef: 0.01,
                ..arm.clone()
            };
            let [clean, dirty] = [&clean, &dirty].map(|problem| {
                let reference = reference::evaluate(&spec, problem).expect("a valid case");
                (reference.loss(), reference.metrics(), reference.outcome().gradient)
            });
            assert_eq!(clean, dirty, "{spec:?}");
            assert!(!clean.0.is_nan(), "{spec:?}");
        }
    }
}

#[test]
fn sampled_id_outside_the_support_is_refused_or_put_back() {
    let spec = |keep_sampled| LossSpec {
        support: Support { vocab: Some(3), excluded_ids: vec![1], keep_sampled },
        ..with(Objective::PolicyGradient)
    };
    let problem = batch(FULL);
    let outside = ProblemError::IdOutsideSupport { b: 0, t: 1, k: None, id: 1 };
    assert_eq!(reference::evaluate(&spec(false), &problem).err(), Some(outside));
    agrees(spec(true), &problem);
    // Column 3 is padding where it was not sampled, and a token of its own where it was.
    let spec = spec(true);
    let dlogits = reference::evaluate(&spec, &problem).expect("a valid case").outcome().gradient;
    assert_eq!(dlogits.row(0, 0)[3], 0.0);
    assert_ne!(dlogits.row(1, 0)[3], 0.0);
    // Under the mask it is nobody's.
    let masked = batch([[true, false, true], [false, true, false]]);
    agrees(LossSpec { support: Support { keep_sampled: false, ..spec.support.clone() }, ..spec }, &masked);
}

#[test]
fn top_entropy_keeps_the_token_that_the_quantile_is() {
    let masks = [FULL, [[true, true, true], [true, true, false]]];
    for (mask, fraction, kept) in [(masks[0], 0.4, 3), (masks[1], 0.5, 3), (masks[1], 0.75, 4), (masks[1], 0.25, 2)] {
        let top_entropy = Some(TopEntropy { fraction, drops: Drops::PolicyTerm, precision: QuantilePrecision::Exact });
        let spec = LossSpec { top_entropy, ..with(Objective::PolicyGradient) };
        let mut problem = batch(mask);
        // All entropies differ: the peak of each row has its own height.
        let peak = |(b, t, j): (usize, usize, usize)| if j == 0 { 0.5 + (3 * b + t) as f64 } else { 0.0 };
        problem.logits = Array3::from_shape_fn((2, 3, 4), peak).into();
        agrees(spec.clone(), &problem);
        let token_loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss;
        assert_eq!(token_loss.to_f64().iter().filter(|loss| **loss != 0.0).count(), kept, "fraction {fraction}");
    }
}

#[test]
fn outcome_f64_single_tokens_and_an_empty_batch_match() {
    for spec in arms() {
        for level in LEVELS {
            let spec = LossSpec {
                ratio: Ratio { level, ..Ratio::default() },
                top_entropy: Some(TopEntropy {
                    fraction: 0.3,
                    drops: Drops::Ratio,
                    precision: QuantilePrecision::Exact,
                }),
                kl: Some(Kl { importance: KlImportance::Ratio, ..Kl::plain(0.2, KlEstimator::K3) }),
                entropy_coef: 0.1,
                ..spec.clone()
            };
            agrees(spec.clone(), &batch([[false, true, false], [false; 3]]));
            assert_eq!(agrees(spec, &batch([[false; 3]; 2])), 0.0);
        }
    }
}

#[test]
fn loss_f64_vespo_has_no_weight_of_a_rejected_token() {
    let rejection = Rejection {
        estimator: RejectionEstimator::K1,
        level: RejectionLevel::Token,
        min: Some(-0.5),
        max: 0.5,
        counts: false,
        drops_from: Terms::PolicyAndKl,
    };
    let spec = LossSpec {
        rollout: Some(RolloutWeights {
            source: RolloutSource::Logp,
            level: RolloutLevel::Token,
            outside: Outside::Truncate,
            min: None,
            max: None,
            clamp: None,
            normalize: false,
            unscored: Unscored::One,
            applies_to: Terms::Policy,
        }),
        rejection: vec![rejection],
        ..with(Objective::Vespo(Vespo::default()))
    };
    let mut problem = batch(FULL);
    problem.extra.rollout_logp.as_mut().expect("there")[[0, 1]] -= 1.0;
    let rejected = agrees(spec.clone(), &problem);
    problem.mask[[0, 1]] = false;
    assert_eq!(rejected, agrees(spec, &problem));
}

#[test]
fn loss_f64_rejection_sees_no_further_than_twenty_nats() {
    let spec = |max| {
        let rejection = Rejection {
            estimator: RejectionEstimator::K1,
            level: RejectionLevel::SequenceSum,
            min: None,
            max,
            counts: true,
            drops_from: Terms::PolicyAndKl,
        };
        LossSpec { rejection: vec![rejection], ..with(Objective::PolicyGradient) }
    };
    let mut problem = batch([[true, false, false], [true, false, false]]);
    problem.extra.rollout_logp.as_mut().expect("there")[[0, 0]] += 30.0;
    assert_eq!(agrees(spec(21.0), &problem), agrees(spec(100.0), &problem));
    assert_ne!(agrees(spec(19.0), &problem), agrees(spec(21.0), &problem));
}

#[test]
fn loss_f64_clip_cov_means_are_over_a_little_more_than_the_tokens() {
    let mut problem = batch([[true, false, false], [true, false, false]]);
    problem.advantages = Advantages::Sequence(arr1(&[1200.0, 1000.0]));
    let wide = PpoClip { epsilon_low: 0.99, epsilon_high: 99.0, ..PpoClip::default() };
    let reference = reference::evaluate(&LossSpec::default(), &problem).map(|reference| reference.outcome().logp);
    let logp = reference.expect("a valid case");
    let (first, second) = (logp.at(0, 0), logp.at(1, 0));
    let covariance = |count: f64| (1000.0 - 2200.0 / count) * (second - (first + second) / count);
    let (with_it, without) = (covariance(2.0 + 1e-8), covariance(2.0));
    assert!((with_it - without).abs() > 10.0 * KINK * without.abs().max(1.0));
    // The other token's is smaller by half of that, and lies outside too.
    let between = 0.5 * (with_it + without);
    let beyond = between + (with_it - without).signum();
    let (lower, upper) = (between.min(beyond), between.max(beyond));
    let band = Some(CovarianceBand { fraction: 1.0, lower, upper });
    let spec = with(Objective::ClipCov(ClipCov { clip: wide, selection: band }));
    agrees(spec.clone(), &problem);
    let token_loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss;
    assert_eq!(token_loss.at(1, 0), 0.0, "{with_it:e} lies within {lower:e} to {upper:e}");
}

#[test]
fn token_loss_f64_trust_region_ends_at_its_divergence() {
    let mut problem = batch([[true, false, false], [false; 3]]);
    problem.logits = Array3::from_shape_fn((2, 3, 4), |(.., j)| if j == 0 { 7.0 } else { 0.0 }).into();
    problem.old_logp = Some(Array2::from_elem((2, 3), -0.05));
    let p = 1.0 / (1.0 + 3.0 * (-7.0_f64).exp());
    let (old, p_old) = (-0.05, (-0.05_f64).exp());
    let others = ((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8)).ln();
    let divergences = [
        (Divergence::TotalVariation, p - p_old),
        (Divergence::BinaryKl, p_old * (old - p.ln()) + (1.0 - p_old) * others),
    ];
    for (divergence, distance) in divergences {
        // Upwards, as the advantage asks; and downwards of a negative one only where both directions count.
        for (advantage, two_sided, asked) in [(0.8, false, true), (-0.8, false, false), (-0.8, true, true)] {
            problem.advantages = Advantages::Sequence(arr1(&[advantage, 0.0]));
            for (bound, within) in [(distance * (1.0 - 2e-7), false), (distance * (1.0 + 2e-7), true)] {
                let (low, high) = if advantage > 0.0 { (9.0, bound) } else { (bound, 9.0) };
                let region = TrustRegion { divergence, low, high, two_sided, truncate: None, penalty: 0.0 };
                let spec = with(Objective::TrustRegion(region));
                agrees(spec.clone(), &problem);
                let loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss.at(0, 0);
                assert_eq!(loss != 0.0, within || !asked, "{spec:?}");
            }
        }
    }
}
