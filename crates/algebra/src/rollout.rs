//! Arrays that are computed before there are logits: the tokens that rejections leave, and the weights against the
//! sampler's policy. They are computed once, in f64, for native and for devices alike.
//!
//! The log-ratio `y_t = old_logp_t − rollout_logp_t` of an unmasked token is 0 if the sampler did not score it.

use ndarray::{Array2, Zip};

use super::structure::{ObjectiveForm, StructuredSpec, TokenInput};
use super::transform;
use assay_core::problem::{Extra, Sequence, Tokens};
use assay_core::spec::{
    LossSpec, LossTerms, Objective, OldLogp, OutOfBounds, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, UnscoredWeight,
};

/// Logarithms of the least and of the greatest rollout weight in VESPO's product.
const LOG_WEIGHTS: [f64; 2] = [-18.420_680_743_952_367, 20.0];

/// The arrays of a batch that kernels read besides its logits, ids and advantages.
pub struct KernelInputs {
    /// Mask of the tokens that count, `[B,T]`: the problem's mask without tokens that a rejection masks.
    pub mask: Array2<bool>,
    /// Arrays `[B,T]` that the structure reads, in its order.
    pub inputs: Vec<(TokenInput, Array2<f64>)>,
}

impl KernelInputs {
    /// Computes the arrays of `tokens` that `spec`, whose structure is given, reads.
    pub fn new(StructuredSpec { spec, structure }: StructuredSpec, tokens: &Tokens) -> Self {
        // Rejections first: a token is masked, or its terms get the factor 0.
        let mut mask = tokens.mask.clone();
        // 0 where a token counts, but has no part in the term; else the trainer's own weight.
        let mut in_policy = Array2::ones(mask.dim());
        let mut in_kl = Array2::ones(mask.dim());
        for rejection in &spec.rejection {
            let stays = stays(rejection, tokens);
            for (at, _) in stays.indexed_iter().filter(|(_, stays)| !**stays) {
                if !rejection.counts {
                    mask[at] = false;
                    continue;
                }
                in_policy[at] = 0.0;
                if rejection.drops_from == LossTerms::PolicyAndKl {
                    in_kl[at] = 0.0;
                }
            }
        }
        // Weights of the trainer multiply; a weight of 0 masks the token.
        if let (Some(given), Some(own)) = (spec.token_weights, &tokens.extra.token_weights) {
            let own = per_token(tokens, own);
            mask.zip_mut_with(&own, |counts, weight| *counts &= *weight != 0.0);
            in_policy *= &own;
            if given.applies_to == LossTerms::PolicyAndKl {
                in_kl *= &own;
            }
        }
        // Weights against the sampler's policy.
        let weights = spec.rollout.as_ref().map(|rollout| weights(rollout, tokens));
        let times =
            |part: &Array2<f64>, weights: Option<&Array2<f64>>| weights.map_or_else(|| part.clone(), |w| w * part);
        let array = |array: Option<&Array2<f64>>| array.cloned().unwrap_or_else(|| Array2::zeros(mask.dim()));
        let Extra { rollout_logp, selected, .. } = tokens.extra;
        let selected = || match selected {
            Some(selected) => selected.mapv(|selected| f64::from(u8::from(selected))),
            None => Array2::zeros(mask.dim()),
        };
        let logp_of = |which: OldLogp| if which == OldLogp::Rollout { rollout_logp.as_ref() } else { tokens.old_logp };
        // Each array that the structure may read; masked tokens may hold anything.
        let value = |input: TokenInput| match input {
            TokenInput::OldLogp => array(logp_of(spec.old_logp)),
            TokenInput::RefLogp => array(tokens.ref_logp),
            TokenInput::PolicyWeight => {
                let of_sampler = times(&in_policy, weights.as_ref().filter(|_| structure.form != ObjectiveForm::Vespo));
                match spec.objective {
                    Objective::ClipCov(_) => of_sampler * selected().mapv(|selected| 1.0 - selected),
                    _ => of_sampler,
                }
            }
            TokenInput::KlWeight => {
                let on_kl = |rollout: &RolloutWeights| rollout.applies_to == LossTerms::PolicyAndKl;
                times(&in_kl, weights.as_ref().filter(|_| spec.rollout.as_ref().is_some_and(on_kl)))
            }
            TokenInput::Selected => selected(),
            TokenInput::RolloutLogp => array(rollout_logp.as_ref()),
            TokenInput::LogWeight => log_weights(spec, tokens, &mask, weights.as_ref()),
            TokenInput::Behaviour => {
                array(logp_of(spec.off_policy_mask.map_or(OldLogp::Given, |off_policy| off_policy.behaviour)))
            }
            TokenInput::Dentropy => array(tokens.extra.dentropy.as_ref()),
            TokenInput::Rate => {
                let rate = transform::rate(spec);
                let of_token = |(at, &counts): ((usize, usize), &bool)| {
                    if counts { rate / tokens.temperature(spec, at) } else { 1.0 }
                };
                let rates = mask.indexed_iter().map(of_token).collect();
                Array2::from_shape_vec(mask.dim(), rates).expect("one entry a token")
            }
        };
        let inputs = structure.inputs().into_iter().map(|input| (input, value(input))).collect();
        Self { mask, inputs }
    }

    /// Returns the array `input`, if the structure reads it.
    pub fn input(&self, input: TokenInput) -> Option<&Array2<f64>> {
        self.inputs.iter().find(|(other, _)| *other == input).map(|(_, values)| values)
    }
}

/// Computes the log-ratios `y` of all tokens, 0 under the mask.
fn log_ratios(tokens: &Tokens) -> Array2<f64> {
    let mut ratios = Array2::zeros(tokens.mask.dim());
    if let (Some(old), Some(rollout)) = (tokens.old_logp, &tokens.extra.rollout_logp) {
        Zip::from(&mut ratios).and(tokens.mask).and(old).and(rollout).for_each(|y, &counts, old, rollout| {
            if counts && !rollout.is_nan() {
                *y = old - rollout;
            }
        });
    }
    ratios
}

/// Lists the places of a sequence's unmasked tokens.
fn unmasked(mask: &Array2<bool>, sequence: &Sequence) -> impl Iterator<Item = (usize, usize)> {
    sequence.places().filter(|&at| mask[at])
}

fn count(mask: &Array2<bool>, sequence: &Sequence) -> f64 {
    unmasked(mask, sequence).count() as f64
}

/// Whether the sampler scored each token; unspecified under the mask.
fn scored(tokens: &Tokens) -> Array2<bool> {
    let all = || Array2::from_elem(tokens.mask.dim(), true);
    tokens.extra.rollout_logp.as_ref().map_or_else(all, |logp| logp.mapv(|logp| !logp.is_nan()))
}

/// Estimates the divergence of each token from the sampler; unspecified under the mask.
fn estimates(estimator: RejectionEstimator, tokens: &Tokens) -> Array2<f64> {
    // Estimators of the log-ratio alone.
    let y = log_ratios(tokens);
    match estimator {
        RejectionEstimator::K1 => return y.mapv(|y| -y.clamp(-20.0, 20.0)),
        RejectionEstimator::K2 => return y.mapv(|y| y.clamp(-20.0, 20.0).powi(2) / 2.0),
        RejectionEstimator::K3 => {
            return y.mapv(|y| {
                let y = y.clamp(-20.0, 20.0);
                y.exp_m1() - y
            });
        }
        RejectionEstimator::AbsoluteRatio => return y.mapv(|y| y.abs().exp()),
        RejectionEstimator::BinaryKl | RejectionEstimator::TotalVariation | RejectionEstimator::Probability => {}
    }
    // Estimators of the probabilities themselves.
    let Some(old) = tokens.old_logp else { return y };
    let inner = |probability: f64| probability.clamp(1e-6, 1.0 - 1e-6);
    Zip::from(old).and(&y).map_collect(|&old, &y| {
        let (p, q) = ((old - y).exp(), old.exp());
        match estimator {
            RejectionEstimator::Probability => q - p,
            RejectionEstimator::TotalVariation => (inner(p) - inner(q)).abs(),
            _ => {
                let (p, q) = (inner(p), inner(q));
                p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()
            }
        }
    })
}

/// Marks all tokens but those with the largest `y²`, as few as bring the mean of the rest below `bound`.
fn below_second_moment(bound: f64, tokens: &Tokens) -> Array2<bool> {
    // Squares in descending order, with the sums of each and all smaller ones.
    let squares = log_ratios(tokens).mapv(|y| y * y);
    let mut largest: Vec<((usize, usize), f64)> =
        tokens.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| (at, squares[at])).collect();
    largest.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let mut sums: Vec<f64> = largest
        .iter()
        .rev()
        .scan(0.0, |sum, (_, y)| {
            Some({
                *sum += y;
                *sum
            })
        })
        .collect();
    sums.reverse();
    // The fewest that must leave; one token always stays.
    let count = sums.len();
    let below = sums.iter().enumerate().position(|(i, sum)| sum / ((count - i) as f64) < bound);
    let leave = below.unwrap_or(count.saturating_sub(1));
    let mut stays = Array2::from_elem(squares.dim(), true);
    for (at, _) in largest.into_iter().take(leave) {
        stays[at] = false;
    }
    stays
}

/// Marks the tokens that a rejection keeps; unspecified under the mask.
fn stays(rejection: &Rejection, tokens: &Tokens) -> Array2<bool> {
    if rejection.level == RejectionLevel::SecondMoment {
        return below_second_moment(rejection.max, tokens);
    }
    // A bound on each token, or on a sum, mean or extreme over its sequence.
    let of_token = estimates(rejection.estimator, tokens);
    // A missing lower bound is −∞. A NaN is in no range, so that its token is rejected.
    let range = rejection.min.unwrap_or(f64::NEG_INFINITY)..=rejection.max;
    let mut stays = Array2::from_elem(tokens.mask.dim(), true);
    if rejection.level == RejectionLevel::Token {
        return of_token.mapv(|k| range.contains(&k));
    }
    for sequence in tokens.sequences() {
        let unmasked = unmasked(tokens.mask, &sequence).map(|at| of_token[at]);
        let of_row = match rejection.level {
            RejectionLevel::Token | RejectionLevel::SecondMoment => unreachable!("done"),
            RejectionLevel::SequenceSum => unmasked.sum(),
            RejectionLevel::SequenceMean => unmasked.sum::<f64>() / count(tokens.mask, &sequence).max(1.0),
            RejectionLevel::SequenceMax => unmasked.fold(f64::NEG_INFINITY, f64::max),
            RejectionLevel::SequenceMin => unmasked.fold(f64::INFINITY, f64::min),
        };
        sequence.places().for_each(|at| stays[at] = range.contains(&of_row));
    }
    stays
}

/// Computes the rollout weight of each token; unspecified under the mask.
pub fn weights(rollout: &RolloutWeights, tokens: &Tokens) -> Array2<f64> {
    let mut weights = match (rollout.source, &tokens.extra.rollout_weights) {
        (RolloutSource::Given, Some(given)) => given_weights(rollout.level, tokens, given),
        _ => computed_weights(rollout, tokens),
    };
    // Weights are divided by their mean, unless that is almost 0.
    if rollout.normalize {
        let of_rows = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric);
        let mean = mean_weight(&weights, tokens, of_rows);
        if mean > 1e-8 {
            weights /= mean;
        }
    }
    weights
}

/// Spreads numbers over tokens, if one per sequence is given.
pub(super) fn per_token(tokens: &Tokens, given: &Array2<f64>) -> Array2<f64> {
    if given.dim() == tokens.mask.dim() {
        return given.clone();
    }
    tokens.extra.sequences.spread(tokens.mask.dim(), &given.column(0).to_vec())
}

fn given_weights(level: RolloutLevel, tokens: &Tokens, given: &Array2<f64>) -> Array2<f64> {
    let mut weights = per_token(tokens, given);
    // A given weight of each token becomes the geometric mean over its sequence.
    if level == RolloutLevel::Geometric {
        for sequence in tokens.sequences() {
            let logs = unmasked(tokens.mask, &sequence).map(|at| (weights[at] + 1e-10).ln());
            let mean = logs.sum::<f64>() / (count(tokens.mask, &sequence) + 1e-8);
            sequence.places().for_each(|at| weights[at] = mean.exp());
        }
    }
    weights
}

fn computed_weights(rollout: &RolloutWeights, tokens: &Tokens) -> Array2<f64> {
    // The bounds of weights, and of their logarithms before.
    let (least, most) = (rollout.min.unwrap_or(0.0), rollout.max.unwrap_or(f64::INFINITY));
    let weight = |log: f64| match rollout.clamp {
        Some(clamp) => log.clamp(-clamp, clamp).exp(),
        None => log.exp(),
    };
    let bounded = |weight: f64| match rollout.outside {
        _ if weight >= least && weight <= most => weight,
        OutOfBounds::Truncate => weight.min(most).max(least),
        OutOfBounds::Mask => 0.0,
    };
    // An unscored token has the log-ratio 0, or the weight 0.
    let mut weights = log_ratios(tokens);
    let known = match rollout.unscored {
        UnscoredWeight::Zero => scored(tokens),
        UnscoredWeight::One => Array2::from_elem(tokens.mask.dim(), true),
    };
    // By sequences: the product of the tokens' weights, and its geometric mean.
    for sequence in tokens.sequences() {
        let sum = unmasked(tokens.mask, &sequence).map(|at| weights[at]).sum::<f64>();
        let geometric = weight(sum / count(tokens.mask, &sequence).max(1.0));
        let all_known = unmasked(tokens.mask, &sequence).all(|at| known[at]);
        let of_row = |weight: f64| bounded(if all_known { weight } else { 0.0 });
        for at in sequence.places() {
            let own = if known[at] { weight(weights[at]) } else { 0.0 };
            weights[at] = match rollout.level {
                RolloutLevel::Token => bounded(own),
                RolloutLevel::Sequence => of_row(weight(sum)),
                RolloutLevel::Geometric => of_row(geometric),
                RolloutLevel::TokenGatedByGeometric if geometric >= least && geometric <= most => own,
                RolloutLevel::TokenGatedByGeometric => 0.0,
            };
        }
    }
    weights
}

/// Averages weights over unmasked tokens, or over sequences that have any, each by its own mean.
fn mean_weight(weights: &Array2<f64>, tokens: &Tokens, of_rows: bool) -> f64 {
    let mask = tokens.mask;
    let rows: Vec<Sequence> = tokens.sequences().into_iter().filter(|row| count(mask, row) > 0.0).collect();
    let sum = |row: &Sequence| unmasked(mask, row).map(|at| weights[at]).sum::<f64>();
    if of_rows {
        rows.iter().map(|row| sum(row) / (count(mask, row) + 1e-8)).sum::<f64>() / (rows.len() as f64).max(1.0)
    } else {
        rows.iter().map(sum).sum::<f64>() / (mask.iter().filter(|&&counts| counts).count() as f64 + 1e-8)
    }
}

/// Adds up `clamp(ln weight)` over each sequence and puts the sum in all of its places: over the unmasked tokens, or
/// over all of them if the spec asks for it and the weights are given; only the first one counts if the sequence has
/// one weight.
fn log_weights(spec: &LossSpec, tokens: &Tokens, mask: &Array2<bool>, weights: Option<&Array2<f64>>) -> Array2<f64> {
    let mut sums = Array2::zeros(mask.dim());
    let (Some(rollout), Some(weights)) = (&spec.rollout, weights) else { return sums };
    // The product runs over unmasked tokens, or over all if the spec asks for it; a weight of the sequence counts once.
    let given = tokens.extra.rollout_weights.as_ref().filter(|_| rollout.source == RolloutSource::Given);
    let masked_too =
        given.is_some() && matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
    let one_a_row = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric)
        || given.is_some_and(|given| given.ncols() == 1);
    for sequence in tokens.sequences() {
        let read = sequence.places().filter(|&at| mask[at] || masked_too);
        let logs = read.map(|at| weights[at].ln().clamp(LOG_WEIGHTS[0], LOG_WEIGHTS[1]));
        let sum: f64 = logs.take(if one_a_row { 1 } else { usize::MAX }).sum();
        sequence.places().for_each(|at| sums[at] = sum);
    }
    sums
}
