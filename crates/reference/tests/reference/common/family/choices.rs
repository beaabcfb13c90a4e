//! Choices of tokens by entropy, by distance from a policy and by covariance.

use std::cmp::Ordering;

use assay_core::spec::{
    CovarianceBand, Divergence, OldLogp, PpoClip, RolloutLevel, RolloutSource, TopCovariance, TrustRegion, Vespo,
};
use ndarray::Array2;

use super::{Frozen, Loss, Number, Policy, Undetermined, all, at, grid, mean, taken, whole};

impl Loss<'_> {
    /// `H ≥` the `1 − fraction` quantile of the tokens in `counts`.
    pub(super) fn top<N: Number>(&self, base: &Policy<N>, counts: &Array2<bool>) -> Array2<bool> {
        let Some(top) = &self.spec.top_entropy else { return counts.clone() };
        let mut sorted: Vec<N> = all(counts).into_iter().map(|(b, t)| base.entropy(b, t)).collect();
        if sorted.is_empty() {
            return counts.clone();
        }
        sorted.sort_by(N::compare);
        let place = (1.0 - top.fraction) * (sorted.len() - 1) as f64;
        let (below, above) = (&sorted[whole(place.floor())], &sorted[whole(place.ceil())]);
        let threshold = below.clone() + N::from(place - place.floor()) * (above.clone() - below.clone());
        // Where the quantile is a token's own entropy that token stays: the choice is between it and the next below.
        let next = (place.floor() == place.ceil()).then(|| whole(place).checked_sub(1));
        match next {
            Some(Some(next)) => _ = below.order(&sorted[next]),
            Some(None) => {}
            None => _ = (below.order(&threshold), above.order(&threshold)),
        }
        let stays = |b: usize, t: usize| base.entropy(b, t).compare(&threshold) != Ordering::Less;
        grid(self.shape(), |b, t| counts[[b, t]] && stays(b, t))
    }

    /// `A ≥ 0` or `Σ m (behaviour − ℓ) / Σ m ≤ threshold`.
    pub(super) fn near_policy<N: Number>(&self, base: &Policy<N>, counts: &Array2<bool>, b: usize, t: usize) -> bool {
        let Some(mask) = &self.spec.off_policy_mask else { return true };
        let behaviour = |t: usize| match mask.behaviour {
            OldLogp::Given => at(self.problem.old_logp.as_ref(), "old_logp")(b, t),
            OldLogp::Rollout => at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t),
            OldLogp::Current => unreachable!("refused by the spec's check"),
        };
        let difference = |t: usize| {
            let behaviour = behaviour(t);
            if behaviour.is_nan() { N::from(0.0) } else { N::from(behaviour) - base.logp(b, t) }
        };
        let differences: Vec<N> = self.tokens_of(counts, b).into_iter().map(difference).collect();
        self.advantage(b, t) >= 0.0 || mean(&differences).at_most(mask.threshold)
    }

    /// `(A − mean A)·(ℓ − mean ℓ)` of the tokens in `counts`, with means over `Σ m + epsilon`.
    pub(super) fn covariances<N: Number>(
        &self,
        base: &Policy<N>,
        counts: &Array2<bool>,
        epsilon: f64,
    ) -> Vec<((usize, usize), N)> {
        let tokens = all(counts);
        let count = || N::from(tokens.len() as f64) + N::from(epsilon);
        let advantage = |(b, t): (usize, usize)| N::from(self.advantage(b, t));
        let mean_advantage = tokens.iter().copied().map(advantage).sum::<N>() / count();
        let mean_logp = tokens.iter().map(|(b, t)| base.logp(*b, *t)).sum::<N>() / count();
        let covariance =
            |at: (usize, usize)| (advantage(at) - mean_advantage.clone()) * (base.logp(at.0, at.1) - mean_logp.clone());
        tokens.iter().map(|at| (*at, covariance(*at))).collect()
    }

    /// The `max(1, ⌊fraction · Σ m⌋)` tokens with the largest covariance.
    pub(super) fn most_covariant<N: Number>(&self, top: TopCovariance, frozen: &Frozen<N>) -> Array2<bool> {
        let mut covariances = self.covariances(&frozen.base, &frozen.counts, 0.0);
        let taken = taken(top.fraction, covariances.len());
        covariances.sort_by(|(_, a), (_, b)| b.compare(a));
        if let [.., (_, last), (_, next)] = &covariances[..covariances.len().min(taken + 1)]
            && taken < covariances.len()
        {
            // The choice is between the last one taken and the next.
            _ = last.order(next);
        }
        let mut selected = Array2::from_elem(self.shape(), false);
        for (at, _) in covariances.into_iter().take(taken) {
            selected[at] = true;
        }
        selected
    }

    /// The unclipped tokens with a covariance strictly within `band`, where there are no more than are taken.
    pub(super) fn within_band<N: Number>(
        &self,
        band: CovarianceBand,
        clip: &PpoClip,
        frozen: &Frozen<N>,
    ) -> Result<Array2<bool>, Undetermined> {
        let covariances = self.covariances(&frozen.base, &frozen.counts, 1e-8);
        let taken = taken(band.fraction, covariances.len());
        let mut selected = Array2::from_elem(self.shape(), false);
        for (at @ (b, t), covariance) in covariances {
            let ratio = self.log_ratio(frozen, &frozen.base, b, t).exp();
            let a = self.advantage(b, t);
            // The token is held at a bound if the clipped loss is the larger one.
            let held = (a > 0.0 && !ratio.at_most(1.0 + clip.epsilon_high))
                || (a < 0.0 && !ratio.at_least(1.0 - clip.epsilon_low));
            selected[at] = !held && !covariance.at_most(band.lower) && !covariance.at_least(band.upper);
        }
        let candidates = selected.iter().filter(|selected| **selected).count();
        if candidates > taken { Err(Undetermined { candidates, taken }) } else { Ok(selected) }
    }

    /// Whether the token's probability has not moved too far.
    pub(super) fn trusted<N: Number>(&self, region: &TrustRegion, base: &Policy<N>, b: usize, t: usize) -> bool {
        let (logp, old) = (base.logp(b, t), self.old_logp(base, b, t));
        let (p, p_old) = (logp.exp(), old.exp());
        let up = self.advantage(b, t) > 0.0;
        let bound = if up { region.high } else { region.low };
        match region.divergence {
            Divergence::TotalVariation => {
                let moved = p - p_old;
                if region.two_sided {
                    return moved.abs().at_most(bound);
                }
                if up { moved.at_most(bound) } else { (-moved).at_most(bound) }
            }
            Divergence::BinaryKl => {
                let rest = |p: N| N::from(1.0) - p + N::from(1e-8);
                let divergence = p_old.clone() * (old - logp)
                    + (N::from(1.0) - p_old.clone()) * (rest(p_old.clone()) / rest(p.clone())).ln();
                let moves_back = || if up { p.order(&p_old) } else { p_old.order(&p) } != Ordering::Greater;
                divergence.at_most(bound) || (!region.two_sided && moves_back())
            }
        }
    }

    /// `φ = exp(λ + k·ln w − λ·w)`
    pub(super) fn gamma_weight<N: Number>(
        &self,
        vespo: &Vespo,
        frozen: &Frozen<N>,
        weights: Option<&Array2<N>>,
        b: usize,
        t: usize,
    ) -> N {
        let own = |t: usize| {
            let (base, spec) = (&frozen.base, self.spec);
            let current = spec.old_logp == OldLogp::Current;
            let x = if current { N::from(0.0) } else { base.logp(b, t) - self.old_logp(base, b, t) };
            x.clamp(-20.0, 20.0)
        };
        let mut log = self.tokens_of(&frozen.counts, b).into_iter().map(own).sum::<N>();
        if let (Some(rollout), Some(weights)) = (&self.spec.rollout, weights) {
            // The logarithm of 0 is −∞, which the lower bound lifts.
            let log_weight = |t: usize| weights[[b, t]].clone().max(N::from(1e-8)).ln().min(N::from(20.0));
            let one_a_row = matches!(rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric)
                || (rollout.source == RolloutSource::Given
                    && self.problem.extra.rollout_weights.as_ref().is_some_and(|weights| weights.ncols() == 1));
            log = log
                + if one_a_row {
                    log_weight(t)
                } else if vespo.weights_of_masked_tokens && rollout.source == RolloutSource::Given {
                    (0..self.shape().1).map(log_weight).sum::<N>()
                } else {
                    // A computed weight under the mask is 1.
                    self.tokens_of(&frozen.counts, b).into_iter().map(log_weight).sum::<N>()
                };
        }
        let log = log.max(N::from(1e-8).ln()).min(N::from(20.0));
        let (k, lambda) = if self.advantage(b, t) >= 0.0 {
            (vespo.k_positive, vespo.lambda_positive)
        } else {
            (vespo.k_negative, vespo.lambda_negative)
        };
        let lambda = || N::from(lambda.max(1e-4));
        (lambda() + N::from(k) * log.clone() - lambda() * log.exp()).exp()
    }
}
