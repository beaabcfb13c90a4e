//! Weights and rejections against the sampler's policy: constants of the loss, computed from the problem's arrays.

use ndarray::Array2;

use super::sum::Sum;
use assay_core::problem::{Problem, Sequence};
use assay_core::spec::{
    LossSpec, LossTerms, Objective, OutOfBounds, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, UnscoredWeight,
};

/// The corrections of each token for the sampler's policy, all `[B,T]`.
pub(super) struct Corrections {
    /// The problem's mask, without the tokens that are rejected as if masked.
    pub(super) mask: Array2<bool>,
    /// The mask of tokens that keep their policy term; a rejected token may still count.
    pub(super) accepted: Array2<bool>,
    /// The mask of tokens that keep their KL term.
    pub(super) accepted_by_kl: Array2<bool>,
    /// The rollout weights; 1 if the spec has none.
    pub(super) weights: Array2<f64>,
    /// The weights that the trainer gives; 1 if the spec has none.
    pub(super) token_weights: Array2<f64>,
}

pub(super) fn corrections(spec: &LossSpec, problem: &Problem) -> Corrections {
    let mut mask = problem.mask.clone();
    let mut accepted = Array2::from_elem(mask.dim(), true);
    let mut accepted_by_kl = accepted.clone();
    // A rejected token is removed from the mask, or loses one or both of its terms.
    for rejection in &spec.rejection {
        let stays = stays(rejection, problem);
        let within = |all: &mut Array2<bool>| all.zip_mut_with(&stays, |all, stays| *all &= stays);
        match (rejection.counts, rejection.drops_from) {
            (false, _) => within(&mut mask),
            (true, LossTerms::Policy) => within(&mut accepted),
            (true, LossTerms::PolicyAndKl) => [&mut accepted, &mut accepted_by_kl].into_iter().for_each(within),
        }
    }
    let token_weights = match (spec.token_weights, &problem.extra.token_weights) {
        (Some(_), Some(given)) => spread_over_tokens(given, problem),
        _ => Array2::ones(mask.dim()),
    };
    // A weight of 0 acts as a mask; rejections and weights below are nevertheless of the problem's own mask.
    mask.zip_mut_with(&token_weights, |counts, weight| *counts &= *weight != 0.0);
    let weights = spec.rollout.as_ref().map_or_else(|| Array2::ones(mask.dim()), |rollout| weights(rollout, problem));
    Corrections { mask, accepted, accepted_by_kl, weights, token_weights }
}

/// Repeats an array with one number per sequence for each token; an array `[B,T]` is copied.
fn spread_over_tokens(given: &Array2<f64>, problem: &Problem) -> Array2<f64> {
    if given.dim() == problem.mask.dim() {
        return given.clone();
    }
    let mut all = Array2::ones(problem.mask.dim());
    for sequence in problem.sequences() {
        sequence.places().for_each(|at| all[at] = given[[sequence.index, 0]]);
    }
    all
}

/// The log-probabilities of one token under the old policy and the sampler's.
#[derive(Clone, Copy)]
struct SamplerDifference {
    at: (usize, usize),
    old_logp: f64,
    /// The sampler's log-probability; `old_logp` if the sampler did not score the token.
    rollout_logp: f64,
    scored: bool,
}

impl SamplerDifference {
    /// Returns the log-ratio `y = old_logp − rollout_logp`.
    fn log_ratio(self) -> f64 {
        self.old_logp - self.rollout_logp
    }
}

/// Lists the unmasked tokens of a sequence under both policies.
fn compared(problem: &Problem, sequence: &Sequence) -> Vec<SamplerDifference> {
    let (Some(old), Some(rollout)) = (&problem.old_logp, &problem.extra.rollout_logp) else { return Vec::new() };
    let unmasked = sequence.places().filter(|&at| problem.mask[at]);
    unmasked
        .map(|at| {
            let (old_logp, rollout_logp) = (old[at], rollout[at]);
            let scored = !rollout_logp.is_nan();
            SamplerDifference { at, old_logp, rollout_logp: if scored { rollout_logp } else { old_logp }, scored }
        })
        .collect()
}

/// Returns the mask of the tokens that a rejection accepts.
fn stays(rejection: &Rejection, problem: &Problem) -> Array2<bool> {
    if rejection.level == RejectionLevel::SecondMoment {
        return below_second_moment(rejection.max, problem);
    }
    let mut stays = Array2::from_elem(problem.mask.dim(), true);
    // The statistic of the sequence is compared for each of its tokens.
    let within = |statistic: f64| rejection.min.is_none_or(|min| statistic >= min) && statistic <= rejection.max;
    for sequence in problem.sequences() {
        let tokens: Vec<((usize, usize), f64)> =
            compared(problem, &sequence).into_iter().map(|of| (of.at, divergence(rejection.estimator, of))).collect();
        let sum = tokens.iter().map(|(_, k)| *k).collect::<Sum>().value();
        let count = tokens.len().max(1) as f64;
        for &(at, own) in &tokens {
            stays[at] = within(match rejection.level {
                RejectionLevel::Token => own,
                RejectionLevel::SequenceSum => sum,
                RejectionLevel::SequenceMean => sum / count,
                RejectionLevel::SequenceMax => tokens.iter().map(|(_, k)| *k).fold(f64::NEG_INFINITY, f64::max),
                RejectionLevel::SequenceMin => tokens.iter().map(|(_, k)| *k).fold(f64::INFINITY, f64::min),
                RejectionLevel::SecondMoment => unreachable!("it is of the batch"),
            });
        }
    }
    stays
}

/// Accepts the tokens with the smallest `y²`, as many as keep their mean below `bound`, and at least one.
fn below_second_moment(bound: f64, problem: &Problem) -> Array2<bool> {
    let all = problem.sequences().into_iter().flat_map(|sequence| compared(problem, &sequence));
    let mut tokens: Vec<((usize, usize), f64)> = all.map(|of| (of.at, of.log_ratio().powi(2))).collect();
    // The earlier of two equal ones is rejected first.
    tokens.sort_by(|(at, a), (other, b)| a.total_cmp(b).then(other.cmp(at)));
    let mut stays = Array2::from_elem(problem.mask.dim(), false);
    // The mean of the smallest values grows with their number: the last mean below the bound has the most.
    let mut sum = Sum::default();
    let mut most = 1;
    for (i, (_, square)) in tokens.iter().enumerate() {
        sum.add(*square);
        if sum.value() / ((i + 1) as f64) < bound {
            most = i + 1;
        }
    }
    for (at, _) in tokens.into_iter().take(most) {
        stays[at] = true;
    }
    stays
}

fn divergence(estimator: RejectionEstimator, of: SamplerDifference) -> f64 {
    let y = of.log_ratio().clamp(-20.0, 20.0);
    // Estimators read the clamped log-ratio, or probabilities.
    let [p, q] = [of.rollout_logp, of.old_logp].map(f64::exp);
    let [inner_p, inner_q] = [p, q].map(|probability| probability.clamp(1e-6, 1.0 - 1e-6));
    match estimator {
        RejectionEstimator::K1 => -y,
        RejectionEstimator::K2 => y * y / 2.0,
        RejectionEstimator::K3 => y.exp_m1() - y,
        RejectionEstimator::BinaryKl => {
            inner_p * (inner_p / inner_q).ln() + (1.0 - inner_p) * ((1.0 - inner_p) / (1.0 - inner_q)).ln()
        }
        RejectionEstimator::TotalVariation => (inner_p - inner_q).abs(),
        RejectionEstimator::Probability => q - p,
        RejectionEstimator::AbsoluteRatio => of.log_ratio().abs().exp(),
    }
}

/// Returns the rollout weights; a masked token has 1, or the weight that is given for it.
fn weights(rollout: &RolloutWeights, problem: &Problem) -> Array2<f64> {
    let mut weights = match rollout.source {
        RolloutSource::Given => given_weights(rollout, problem),
        RolloutSource::Logp => computed_weights(rollout, problem),
    };
    // The division by the mean comes after the bounds.
    if rollout.normalize {
        let mean = mean_weight(rollout.level, &weights, problem);
        if mean > 1e-8 {
            weights.mapv_inplace(|weight| weight / mean);
        }
    }
    weights
}

fn given_weights(rollout: &RolloutWeights, problem: &Problem) -> Array2<f64> {
    let Some(given) = &problem.extra.rollout_weights else { return Array2::ones(problem.mask.dim()) };
    let mut weights = spread_over_tokens(given, problem);
    // GMPO multiplies by the geometric mean of the sequence's given weights.
    if rollout.level == RolloutLevel::Geometric {
        for sequence in problem.sequences() {
            let unmasked: Vec<(usize, usize)> = sequence.places().filter(|&at| problem.mask[at]).collect();
            let logs = unmasked.iter().map(|&at| (weights[at] + 1e-10).ln()).collect::<Sum>().value();
            let geometric = (logs / (unmasked.len() as f64 + 1e-8)).exp();
            sequence.places().for_each(|at| weights[at] = geometric);
        }
    }
    weights
}

fn computed_weights(rollout: &RolloutWeights, problem: &Problem) -> Array2<f64> {
    let mut weights = Array2::ones(problem.mask.dim());
    let exp = |y: f64| rollout.clamp.map_or(y, |clamp| y.clamp(-clamp, clamp)).exp();
    let (min, max) = (rollout.min.unwrap_or(0.0), rollout.max.unwrap_or(f64::INFINITY));
    let within = |weight: f64| (min..=max).contains(&weight);
    // `exp` of a clamped log-ratio, and then the bounds.
    let bounded = |weight: f64| match rollout.outside {
        OutOfBounds::Truncate => weight.clamp(min, max),
        OutOfBounds::Mask if within(weight) => weight,
        OutOfBounds::Mask => 0.0,
    };
    for sequence in problem.sequences() {
        let tokens = compared(problem, &sequence);
        // The sequence's own sum and geometric mean, of which a token's weight may be made.
        let sum = tokens.iter().map(|of| of.log_ratio()).collect::<Sum>().value();
        let geometric = exp(sum / tokens.len().max(1) as f64);
        let counts = |scored: bool| scored || rollout.unscored == UnscoredWeight::One;
        // A weight that depends on an unscored token may be 0, before its bounds.
        let where_scored = |scored: bool, weight: f64| if counts(scored) { weight } else { 0.0 };
        let all_scored = tokens.iter().all(|of| of.scored);
        for of in &tokens {
            let own = where_scored(of.scored, exp(of.log_ratio()));
            weights[of.at] = match rollout.level {
                RolloutLevel::Token => bounded(own),
                RolloutLevel::Sequence => bounded(where_scored(all_scored, exp(sum))),
                RolloutLevel::Geometric => bounded(where_scored(all_scored, geometric)),
                RolloutLevel::TokenGatedByGeometric if within(geometric) => own,
                RolloutLevel::TokenGatedByGeometric => 0.0,
            };
        }
    }
    weights
}

/// Returns the mean over unmasked tokens, or over the sequences that have any of their own means.
fn mean_weight(level: RolloutLevel, weights: &Array2<f64>, problem: &Problem) -> f64 {
    // Both means have 1e-8 in the count, as in verl.
    let of_row = |sequence: &Sequence| {
        let row = sequence.places().filter(|&at| problem.mask[at]).map(|at| weights[at]);
        row.collect::<Vec<f64>>()
    };
    let rows: Vec<Vec<f64>> = problem.sequences().iter().map(of_row).filter(|row| !row.is_empty()).collect();
    let mean = |values: &[f64]| values.iter().copied().collect::<Sum>().value() / (values.len() as f64 + 1e-8);
    match level {
        RolloutLevel::Token | RolloutLevel::TokenGatedByGeometric => mean(&rows.concat()),
        RolloutLevel::Sequence | RolloutLevel::Geometric => {
            let rows: Vec<f64> = rows.iter().map(|row| mean(row)).collect();
            rows.iter().copied().collect::<Sum>().value() / rows.len().max(1) as f64
        }
    }
}

/// Returns VESPO's `Σ_t clamp(ln weight, ln 1e-8, 20)` of a sequence: over all tokens or the unmasked ones, or once if
/// the weight is of the whole sequence.
pub(super) fn log_weights(spec: &LossSpec, problem: &Problem, corrections: &Corrections, sequence: &Sequence) -> f64 {
    let Some(rollout) = &spec.rollout else { return 0.0 };
    // A weight of the whole sequence is added once, by its first token.
    let masked_too = matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
    let log = |weight: f64| weight.ln().clamp(1e-8_f64.ln(), 20.0);
    let given = rollout.source == RolloutSource::Given;
    let given_a_row = given && problem.extra.rollout_weights.as_ref().is_some_and(|weights| weights.ncols() == 1);
    let of_row = given_a_row || matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric);
    // The computed weight of a masked token is 1, and its logarithm 0.
    let read = |at: &(usize, usize)| corrections.mask[*at] || (masked_too && given);
    let mut logs = sequence.places().filter(read).map(|at| log(corrections.weights[at]));
    if of_row { logs.next().unwrap_or(0.0) } else { logs.collect::<Sum>().value() }
}
