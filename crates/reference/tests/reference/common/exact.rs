//! One evaluation of the reference against the exact loss of [`family`]: every value of every token, totals, metrics and dlogits,
//! the last against central differences with everything held that the loss holds constant.
//!
//! A figure here is `κ = |error| / (u · scale)` with `u = 2⁻⁵³`. For everything that is computed from the log-probabilities `scale`
//! is the largest error that [`Running`] finds for an evaluation of the formula, or of its derivative, in which every step rounds
//! once; for the softmax it is that of [`SoftmaxCondition`]. There is no absolute tolerance: a non-target dlogit
//! is held to the size of `p_j`, a target's to `1 − p_y`, and a value that must be 0 to 0.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::coverage;
use super::draws::{self, Case};
use super::family::{self, Frozen, Loss, Policy, Row, RowLoss, Undetermined};
use super::real::Real;
use super::running::{Running, U, nearest_choice};
use super::softmax_condition::SoftmaxCondition;
use assay_core::problem::{Outcome, Problem, ProblemError};
use assay_core::spec::{LossSpec, Objective, TemperatureDivides};
use assay_reference::{self as reference, Reference};
use ndarray::Array2;
use proptest::prelude::*;

/// A case with a choice nearer than this, relative to its sides, is drawn again.
pub(crate) const KINK: f64 = 1e-9;

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

/// The precision for every spec.
///
/// A central difference with step 2⁻²⁰⁰ keeps 440 bits of a loss, and its truncation error is 2⁻⁴⁰⁰ of the third
/// derivative, which does not vanish where the first does. The smallest value drawn is the square of a probability at
/// margin 100 and temperature ½; its rounding in f64 is 1e-190, but it adds to larger ones, or is compared with its own
/// scale.
pub(crate) const OF_EVERY_SPEC: Precision =
    Precision { limits: LIMITS, noise: 1e-110, step: -200, scales: Scales::running };

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

    pub(crate) fn saw(&mut self, what: &'static str, how: bool) {
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
    pub(crate) fn of(spec: &LossSpec, problem: &Problem, b: usize, t: usize) -> Self {
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
    pub(crate) fn of(case: &'a Case) -> Result<Self, Undetermined> {
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
    pub(crate) fn of(exact: &Exact<'a>) -> Self {
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

    pub(crate) fn by_logp(&self) -> ByLogp {
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
    coverage::note(spec, &exact, &by_logp, record);
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

/// Checks 48 draws of `cases`, unless the environment asks for another number, prints the worst κ of each output, and returns how many cases had what.
pub(crate) fn sweep(name: &str, failures: &str, cases: &BoxedStrategy<Case>, precision: &Precision) -> Record {
    let record = RefCell::new(Record::default());
    let result = draws::run(failures, 48, cases, |case| check(&case, precision, &mut record.borrow_mut()));
    let record = record.into_inner();
    println!("{name}: {:.2?}\n{:?}", record.worst, record.seen);
    result.unwrap_or_else(|error| panic!("{error}"));
    record
}
