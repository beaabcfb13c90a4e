//! Weights and rejections against the sampler's policy.

use std::cmp::Ordering;

use assay_core::spec::{
    LossTerms, OutOfBounds, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights,
    UnscoredWeight,
};
use ndarray::Array2;

use super::{Loss, Number, all, at, grid, mean};

impl Loss<'_> {
    /// `y = old_logp − rollout_logp`; 0 where the sampler did not score the token.
    pub(super) fn sampler_log_ratio<N: Number>(&self, b: usize, t: usize) -> N {
        let old = at(self.problem.old_logp.as_ref(), "old_logp")(b, t);
        let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
        if rollout.is_nan() { N::from(0.0) } else { N::from(old) - N::from(rollout) }
    }

    pub(super) fn scored(&self, b: usize, t: usize) -> bool {
        !at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t).is_nan()
    }

    /// `[exp(rollout_logp), exp(old_logp)]`; an unscored token's are alike.
    pub(super) fn probabilities<N: Number>(&self, b: usize, t: usize) -> [N; 2] {
        let old = N::from(at(self.problem.old_logp.as_ref(), "old_logp")(b, t));
        let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
        let rollout = if rollout.is_nan() { old.clone() } else { N::from(rollout) };
        [rollout.exp(), old.exp()]
    }

    /// M2PO: tokens leave, largest `y²` first, until the mean of those that are left is below the threshold, or one is left.
    pub(super) fn below_second_moment<N: Number>(&self, threshold: f64) -> Array2<bool> {
        let mut left: Vec<((usize, usize), N)> = all(&self.problem.mask)
            .into_iter()
            .map(|(b, t)| ((b, t), self.sampler_log_ratio::<N>(b, t).squared()))
            .collect();
        let mut stays = self.problem.mask.clone();
        let mean_of = |left: &[((usize, usize), N)]| mean(&left.iter().map(|(_, y)| y.clone()).collect::<Vec<N>>());
        while left.len() > 1 && mean_of(&left).at_least(threshold) {
            let largest = (1..left.len())
                .fold(0, |most, i| if left[i].1.order(&left[most].1) == Ordering::Greater { i } else { most });
            let (at, _) = left.remove(largest);
            stays[at] = false;
        }
        stays
    }

    /// Whether `rejection` lets the tokens of row `b` pass.
    pub(super) fn passes<N: Number>(&self, rejection: &Rejection, b: usize) -> Vec<bool> {
        let tokens = self.tokens_of(&self.problem.mask, b);
        let estimate = |t: &usize| {
            let log_ratio = self.sampler_log_ratio::<N>(b, *t);
            let y = log_ratio.clone().clamp(-20.0, 20.0);
            let [p, q] = self.probabilities::<N>(b, *t);
            let inner = |p: N| p.clamp(1e-6, 1.0 - 1e-6);
            let others = |p: N| N::from(1.0) - p;
            match rejection.estimator {
                RejectionEstimator::K1 => -y,
                RejectionEstimator::K2 => y.squared() / N::from(2.0),
                RejectionEstimator::K3 => y.exp_excess(),
                RejectionEstimator::BinaryKl => {
                    let (p, q) = (inner(p), inner(q));
                    p.clone() * (p.clone() / q.clone()).ln() + others(p.clone()) * (others(p) / others(q)).ln()
                }
                RejectionEstimator::TotalVariation => (inner(p) - inner(q)).abs(),
                RejectionEstimator::Probability => q - p,
                RejectionEstimator::AbsoluteRatio => log_ratio.abs().exp(),
            }
        };
        let of_tokens: Vec<N> = tokens.iter().map(estimate).collect();
        let passes = |x: &N| x.at_most(rejection.max) && rejection.min.is_none_or(|min| x.at_least(min));
        let of_row = match rejection.level {
            RejectionLevel::Token => {
                let mut all = vec![true; self.shape().1];
                for (t, estimate) in tokens.iter().zip(&of_tokens) {
                    all[*t] = passes(estimate);
                }
                return all;
            }
            RejectionLevel::SequenceSum => of_tokens.into_iter().sum(),
            RejectionLevel::SequenceMean => mean(&of_tokens),
            RejectionLevel::SequenceMax => of_tokens.into_iter().reduce(N::max).unwrap_or(N::from(0.0)),
            RejectionLevel::SequenceMin => of_tokens.into_iter().reduce(N::min).unwrap_or(N::from(0.0)),
            RejectionLevel::SecondMoment => {
                return self.below_second_moment::<N>(rejection.max).row(b).to_vec();
            }
        };
        vec![passes(&of_row); self.shape().1]
    }

    /// `(m, the tokens of it that keep their policy term, and their KL penalty)`.
    pub(super) fn rejected<N: Number>(&self) -> [Array2<bool>; 3] {
        let mask = &self.problem.mask;
        let [mut counts, mut stays, mut stays_for_kl] = [(); 3].map(|()| mask.clone());
        for rejection in &self.spec.rejection {
            for b in 0..self.shape().0 {
                for (t, passes) in self.passes::<N>(rejection, b).into_iter().enumerate() {
                    stays[[b, t]] &= passes;
                    let spared = rejection.counts && rejection.drops_from == LossTerms::Policy;
                    stays_for_kl[[b, t]] &= passes || spared;
                    counts[[b, t]] &= passes || rejection.counts;
                }
            }
        }
        // What has no weight is not there.
        for (at, counts) in counts.indexed_iter_mut() {
            *counts = *counts && self.token_weight(at.0, at.1) != 0.0;
        }
        [counts, stays, stays_for_kl]
    }

    /// The trainer's own weight of a token.
    pub(super) fn token_weight(&self, b: usize, t: usize) -> f64 {
        match (self.spec.token_weights, &self.problem.extra.token_weights) {
            (Some(_), Some(given)) => given[[b, if given.ncols() == 1 { 0 } else { t }]],
            _ => 1.0,
        }
    }

    /// The weight against the sampler's policy of every token, masked ones too. Where a mask comes from rejections, the
    /// weights are of before: verl and unsloth take both from the same arrays.
    pub(super) fn rollout_weights<N: Number>(&self, rollout: &RolloutWeights) -> Array2<N> {
        let mask = &self.problem.mask;
        let given = rollout.source == RolloutSource::Given;
        let raw = |b: usize, t: usize| {
            let weights = self.problem.extra.rollout_weights.as_ref().expect("given weights");
            weights[[b, if weights.ncols() == 1 { 0 } else { t }]]
        };
        // A masked token's log-ratio is 0, as its difference is multiplied by the mask.
        let log = |b: usize, t: usize| if mask[[b, t]] { self.sampler_log_ratio(b, t) } else { N::from(0.0) };
        let sum = |b: usize| self.tokens_of(mask, b).into_iter().map(|t| log(b, t)).sum::<N>();
        let count = |b: usize| self.tokens_of(mask, b).len() as f64;
        let exp = |log: N| log.within(rollout.clamp).exp();
        let geometric = |b: usize| exp(sum(b) / N::from(count(b).max(1.0)));
        let bounded = |weight: N| bounded(rollout, weight);
        // In NeMo a NaN goes through sum and exponential, and is then 0.
        let nan = |t: usize, b: usize| rollout.unscored == UnscoredWeight::Zero && mask[[b, t]] && !self.scored(b, t);
        let or_zero = |nan: bool, weight: N| if nan { N::from(0.0) } else { weight };
        let any_nan = |b: usize| (0..mask.ncols()).any(|t| nan(t, b));
        let weights = grid(self.shape(), |b, t| match rollout.level {
            RolloutLevel::Token if given => bounded(N::from(raw(b, t))),
            RolloutLevel::Geometric if given => {
                let logs = self.tokens_of(mask, b).into_iter().map(|t| (N::from(raw(b, t)) + N::from(1e-10)).ln());
                bounded(exp(logs.sum::<N>() / (N::from(count(b)) + N::from(1e-8))))
            }
            RolloutLevel::Token => bounded(or_zero(nan(t, b), exp(log(b, t)))),
            RolloutLevel::Sequence => bounded(or_zero(any_nan(b), exp(sum(b)))),
            RolloutLevel::Geometric => bounded(or_zero(any_nan(b), geometric(b))),
            RolloutLevel::TokenGatedByGeometric => {
                if inside(rollout, &geometric(b)) {
                    or_zero(nan(t, b), exp(log(b, t)))
                } else {
                    N::from(0.0)
                }
            }
        });
        if !rollout.normalize {
            return weights;
        }
        let per_row = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric);
        let counted: Vec<N> = if per_row {
            let filled = (0..self.shape().0).filter_map(|b| Some((b, *self.tokens_of(mask, b).first()?)));
            filled.map(|at| weights[at].clone()).collect()
        } else {
            all(mask).into_iter().map(|at| weights[at].clone()).collect()
        };
        // verl's masked_mean has 1e-8 more tokens than there are, also in the mean of one weight over its own row.
        let plus = |count: f64| N::from(count) + N::from(1e-8);
        let mean = if per_row {
            let own = |b: usize| N::from(count(b)) / plus(count(b));
            let filled = (0..self.shape().0).filter(|b| count(*b) > 0.0);
            let shrunk = counted.iter().zip(filled).map(|(weight, b)| weight.clone() * own(b));
            shrunk.sum::<N>() / N::from(counted.len().max(1) as f64)
        } else {
            counted.iter().cloned().sum::<N>() / plus(counted.len() as f64)
        };
        if mean.at_most(1e-8) { weights } else { weights.mapv(|weight| weight / mean.clone()) }
    }
}

pub(super) fn inside<N: Number>(rollout: &RolloutWeights, weight: &N) -> bool {
    rollout.min.is_none_or(|min| weight.at_least(min)) && rollout.max.is_none_or(|max| weight.at_most(max))
}

pub(super) fn bounded<N: Number>(rollout: &RolloutWeights, weight: N) -> N {
    match rollout.outside {
        OutOfBounds::Mask if inside(rollout, &weight) => weight,
        OutOfBounds::Mask => N::from(0.0),
        OutOfBounds::Truncate => {
            let weight = rollout.min.map_or(weight.clone(), |min| weight.max(N::from(min)));
            rollout.max.map_or(weight.clone(), |max| weight.min(N::from(max)))
        }
    }
}
