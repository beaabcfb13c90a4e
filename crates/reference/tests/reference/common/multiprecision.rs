//! The GRPO loss in 640-bit arithmetic: the definitions, and nothing done for the sake of rounding.
//!
//! Written from the published formulas and apart from `crates/reference`. There is no maximum subtracted, no branch
//! chosen and no derivative taken: `log_softmax` is `z_y − ln Σ exp z_j`, the clip is `min` and `max`.

use assay_core::problem::Problem;
use assay_core::spec::{KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides};

use super::real::Real;

/// One row of logits; `None` is −∞, a column that is not there.
pub(crate) type Row = Vec<Option<Real>>;

/// An unmasked token before its logits are looked at.
#[derive(Clone, Debug)]
pub(crate) struct Position {
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) id: usize,
    pub(crate) advantage: f64,
    /// `None`: the log-probability itself, held constant.
    old_logp: Option<f64>,
    ref_logp: Option<f64>,
    /// What the reduction multiplies the token's loss by.
    pub(crate) weight: Real,
}

/// What a token's logits make of it.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) logp: Real,
    pub(crate) log_ratio: Real,
    pub(crate) ratio: Real,
    pub(crate) policy: Real,
    /// `ref_logp − logp`, with a KL term.
    pub(crate) kl_difference: Option<Real>,
    pub(crate) kl: Option<Real>,
    /// Before mask and weight.
    pub(crate) loss: Real,
}

/// The unmasked tokens of `problem`, in row-major order, with their weights.
pub(crate) fn positions(spec: &LossSpec, problem: &Problem) -> Vec<Position> {
    let row_counts: Vec<usize> =
        problem.mask.rows().into_iter().map(|row| row.iter().filter(|m| **m).count()).collect();
    let total = row_counts.iter().sum::<usize>();
    let rows = row_counts.len();
    let rows_with_tokens = row_counts.iter().filter(|n| **n > 0).count();
    let denominator = |row_count: usize| match spec.reduction {
        Reduction::TokenMean => total as f64,
        Reduction::SequenceMean { rows: Rows::All } => (rows * row_count) as f64,
        Reduction::SequenceMean { rows: Rows::NonEmpty } => (rows_with_tokens * row_count) as f64,
        Reduction::FixedLength { rows: Rows::All, length: Some(max_length) } => (rows * max_length) as f64,
        Reduction::Normalizer(normalizer) => normalizer,
        other => unreachable!("{other:?} is not drawn"),
    };
    let unmasked = problem.mask.indexed_iter().filter(|(_, counts)| **counts);
    unmasked
        .map(|((b, t), _)| Position {
            b,
            t,
            id: usize::try_from(problem.ids[[b, t]]).expect("an id in the vocabulary"),
            advantage: problem.advantages.at(b, t),
            old_logp: match spec.old_logp {
                OldLogp::Given => problem.old_logp.as_ref().map(|a| a[[b, t]]),
                OldLogp::Current | OldLogp::Rollout => None,
            },
            ref_logp: problem.ref_logp.as_ref().map(|a| a[[b, t]]),
            weight: Real::from(1.0) / Real::from(denominator(row_counts[b])),
        })
        .collect()
}

/// The logits of `position`, exactly.
pub(crate) fn row(problem: &Problem, position: &Position) -> Row {
    let logits = problem.logits.row(position.b, position.t);
    logits.into_iter().map(|x| (x != f64::NEG_INFINITY).then(|| Real::from(x))).collect()
}

/// `ln Σ exp z_j`.
fn log_sum_exp(z: &Row) -> Real {
    z.iter().flatten().map(Real::exp).sum::<Real>().ln()
}

fn divided(row: &Row, divisor: f64) -> Row {
    row.iter().map(|x| x.clone().map(|x| x / Real::from(divisor))).collect()
}

/// `log_softmax(x / T)[y]`, or `log_softmax(x)[y] / T`.
pub(crate) fn logp(spec: &LossSpec, row: &Row, id: usize) -> Real {
    let log_softmax = |z: &Row| z[id].clone().expect("a finite logit on the sampled id") - log_sum_exp(z);
    match spec.temperature_divides {
        TemperatureDivides::Logits => log_softmax(&divided(row, spec.temperature)),
        TemperatureDivides::Logp => log_softmax(row) / Real::from(spec.temperature),
    }
}

/// `−Σ q_j ln q_j` with `q = softmax(x / T)`.
pub(crate) fn entropy(spec: &LossSpec, row: &Row) -> Real {
    let z = divided(row, spec.temperature);
    let lse = log_sum_exp(&z);
    let log_q = z.into_iter().flatten().map(|z| z - lse.clone());
    -log_q.map(|log_q| log_q.exp() * log_q).sum::<Real>()
}

/// `−min(min(r, δ)·A, clip(r, 1 − εl, 1 + εh)·A)`; with a dual clip and `A < 0` at most `−c·A`.
fn ppo_clip(clip: &PpoClip, ratio: &Real, advantage: f64) -> Real {
    let one = || Real::from(1.0);
    let a = || Real::from(advantage);
    let low = one() - Real::from(clip.epsilon_low);
    let high = one() + Real::from(clip.epsilon_high);
    let unclipped = clip.delta.map_or(ratio.clone(), |delta| ratio.clone().min(Real::from(delta)));
    let clipped = ratio.clone().max(low).min(high);
    let loss = -(unclipped * a()).min(clipped * a());
    match clip.dual_clip {
        Some(c) if advantage < 0.0 => loss.min(-(Real::from(c) * a())),
        _ => loss,
    }
}

fn kl_estimate(estimator: KlEstimator, d: &Real) -> Real {
    let d = || d.clone();
    match estimator {
        KlEstimator::K1 => -d(),
        KlEstimator::K2 => d() * d() / Real::from(2.0),
        KlEstimator::K3 => d().exp() - d() - Real::from(1.0),
        KlEstimator::Abs => d().abs(),
    }
}

/// The token at `position` with logits `row`. `current` is the log-probability that
/// [`OldLogp::Current`] holds constant while `row` is varied.
pub(crate) fn token(spec: &LossSpec, position: &Position, row: &Row, current: &Real) -> Token {
    let logp = logp(spec, row, position.id);
    let Objective::PpoClip(clip) = &spec.objective else { unreachable!("only PPO-clip is drawn") };
    let log_ratio = logp.clone() - position.old_logp.map_or(current.clone(), Real::from);
    let ratio = log_ratio.exp();
    let policy = ppo_clip(clip, &ratio, position.advantage);
    let kl_difference = spec.kl.as_ref().and(position.ref_logp).map(|ref_logp| Real::from(ref_logp) - logp.clone());
    let kl = spec.kl.as_ref().zip(kl_difference.as_ref()).map(|(kl, d)| kl_estimate(kl.estimator, d));
    let penalty = spec.kl.as_ref().zip(kl.clone()).map(|(kl, estimate)| Real::from(kl.beta) * estimate);
    let loss = policy.clone() + penalty.unwrap_or(Real::from(0.0));
    Token { logp, log_ratio, ratio, policy, kl_difference, kl, loss }
}

/// What the token at `position` adds to the loss: `w · token_loss − coef · H / Σ m`.
pub(crate) fn contribution(spec: &LossSpec, position: &Position, row: &Row, current: &Real, count: usize) -> Real {
    let weighted = position.weight.clone() * token(spec, position, row, current).loss;
    if spec.entropy_coef == 0.0 {
        return weighted;
    }
    weighted - Real::from(spec.entropy_coef) * entropy(spec, row) / Real::from(count as f64)
}

/// `∂loss / ∂row[j]` by central difference with step 2⁻⁸⁰: the truncation error is 2⁻¹⁶⁰ of the third derivative.
/// Other tokens do not depend on this row: their share of the difference is exactly 0.
pub(crate) fn derivative(
    spec: &LossSpec,
    position: &Position,
    row: &Row,
    current: &Real,
    count: usize,
    j: usize,
) -> Real {
    let Some(x) = &row[j] else { return Real::from(0.0) };
    let loss_at = |x: Real| {
        let mut moved = row.clone();
        moved[j] = Some(x);
        contribution(spec, position, &moved, current, count)
    };
    let h = || Real::power_of_two(-80);
    (loss_at(x.clone() + h()) - loss_at(x.clone() - h())) / (Real::from(2.0) * h())
}
