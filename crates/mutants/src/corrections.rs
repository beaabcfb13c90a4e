//! Corrections of the specimen: tokens that are rejected, and weights from the sampler's log-probabilities or from the
//! trainer.

use ndarray::Array2;

use crate::bank::Bug;
use crate::launch::{SpecimenLaunch, TokenCorrections, part};
use assay_core::problem::Sequence;
use assay_core::spec::{
    LossTerms, OutOfBounds, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights,
    TokenWeights, UnscoredWeight,
};

impl TokenCorrections {
    pub(crate) fn new(launch: &SpecimenLaunch) -> Self {
        let (spec, given) = (launch.spec, launch.tokens.mask);
        // In this order: rejections, the trainer's weights, weights against the sampler.
        let mut all = Self::none(given);
        all.reject(launch);
        // Weights against the sampler are computed over the given mask; these mutants take the one that earlier steps
        // have narrowed.
        let rejected = launch.has(Bug::RejectedOutOfRollout).then(|| all.mask.clone());
        if let Some(TokenWeights { applies_to }) = spec.token_weights {
            let weights = token_weights(launch);
            let applies_to = match applies_to {
                _ if launch.has(Bug::TokenWeightsOnKl) => LossTerms::PolicyAndKl,
                _ if launch.has(Bug::TokenWeightsNotOnKl) => LossTerms::Policy,
                given => given,
            };
            all.weigh(&weights, applies_to, !launch.has(Bug::TokenWeightsNotInGradient));
            if !launch.has(Bug::ZeroWeightCounts) {
                all.mask.zip_mut_with(&weights, |counts, weight| *counts &= *weight != 0.0);
            }
        }
        if let Some(rollout) = &spec.rollout {
            let narrowed = rejected.or_else(|| launch.has(Bug::ZeroWeightOutOfRollout).then(|| all.mask.clone()));
            let weights = RolloutWeighing { launch, rollout, mask: narrowed.as_ref().unwrap_or(given) }.weights();
            let applies_to = match rollout.applies_to {
                _ if launch.has(Bug::RolloutOnKl) => LossTerms::PolicyAndKl,
                _ if launch.has(Bug::RolloutNotOnKl) => LossTerms::Policy,
                given => given,
            };
            if !launch.has(Bug::RolloutIgnored) {
                all.weigh(&weights, applies_to, !launch.has(Bug::RolloutNotInGradient));
            }
        }
        all
    }

    fn weigh(&mut self, weights: &Array2<f64>, applies_to: LossTerms, in_gradient: bool) {
        self.factors.zip_mut_with(weights, |[policy, kl], weight| {
            policy.times(*weight, in_gradient);
            if applies_to == LossTerms::PolicyAndKl {
                kl.times(*weight, in_gradient);
            }
        });
    }

    fn reject(&mut self, launch: &SpecimenLaunch) {
        // A token stays if no rejection takes it.
        let rejections = match launch.spec.rejection.as_slice() {
            _ if launch.has(Bug::RejectionIgnored) => &[],
            all if launch.has(Bug::FirstRejectionAlone) => &all[..all.len().min(1)],
            all => all,
        };
        let mut stays: Vec<Array2<bool>> = rejections.iter().map(|rejection| stays(launch, rejection)).collect();
        if launch.has(Bug::RejectionByAll) {
            let by_any = stays.iter().fold(Array2::from_elem(self.mask.dim(), false), |any, stays| any | stays);
            stays.fill(by_any);
        }
        for (rejection, stays) in rejections.iter().zip(stays) {
            let counts = match rejection.counts {
                true if launch.has(Bug::RejectedDoNotCount) => false,
                false if launch.has(Bug::RejectedStillCount) => true,
                counts => counts,
            };
            let drops_from = match rejection.drops_from {
                _ if launch.has(Bug::RejectionKeepsKl) => LossTerms::Policy,
                _ if launch.has(Bug::RejectionTakesKl) => LossTerms::PolicyAndKl,
                given => given,
            };
            // A rejected token that counts loses its terms and stays in denominators; any other is masked.
            if counts {
                let weights = stays.mapv(|stays| f64::from(u8::from(stays)));
                self.weigh(&weights, drops_from, true);
            } else {
                self.mask.zip_mut_with(&stays, |counts, stays| *counts &= stays);
            }
        }
    }
}

/// Spreads an array over tokens, if it has one number per sequence.
fn per_token(launch: &SpecimenLaunch, given: &Array2<f64>) -> Array2<f64> {
    let mut all = Array2::ones(launch.tokens.mask.dim());
    for sequence in launch.sequences() {
        let of_sequence = given.dim() != all.dim();
        for (b, t) in sequence.places() {
            all[[b, t]] = if of_sequence { given[[sequence.index, 0]] } else { given[[b, t]] };
        }
    }
    all
}

/// Returns the trainer's weights, as the kernel reads them.
pub(crate) fn token_weights(launch: &SpecimenLaunch) -> Array2<f64> {
    let dim = launch.tokens.mask.dim();
    let Some(given) = launch.tokens.extra.token_weights.as_ref() else { return Array2::ones(dim) };
    // One weight a sequence, `[B,1]`, is spread over its tokens.
    let mut all = per_token(launch, given);
    if launch.has(Bug::TokenWeightOfFirstSequence) && given.dim() != dim {
        all.fill(given[[0, 0]]);
    }
    if launch.has(Bug::TokenWeightsOfFirstToken) {
        for mut row in all.rows_mut() {
            let first = row[0];
            row.fill(first);
        }
    }
    all.mapv_inplace(|weight| match () {
        () if launch.has(Bug::TokenWeightsIgnored) => 1.0,
        () if launch.has(Bug::TokenWeightsSquared) => weight * weight,
        () if launch.has(Bug::TokenWeightsAsMask) => f64::from(u8::from(weight != 0.0)),
        () => weight,
    });
    all
}

/// The log-probabilities of a token under the old policy and under the sampler.
#[derive(Clone, Copy)]
struct RolloutComparison {
    at: (usize, usize),
    old_logp: f64,
    rollout_logp: f64,
}

impl RolloutComparison {
    fn is_scored(self) -> bool {
        !self.rollout_logp.is_nan()
    }

    /// Returns `old_logp − rollout_logp`, 0 if the sampler did not score the token.
    fn gap(self) -> f64 {
        if self.is_scored() { self.old_logp - self.rollout_logp } else { 0.0 }
    }
}

/// Lists the tokens of a sequence for which `counts` holds.
fn compared(
    launch: &SpecimenLaunch,
    sequence: &Sequence,
    counts: impl Fn((usize, usize)) -> bool,
) -> Vec<RolloutComparison> {
    let tokens = &launch.tokens;
    let (Some(old), Some(rollout)) = (tokens.old_logp, &tokens.extra.rollout_logp) else { return Vec::new() };
    let places = sequence.places().filter(|&at| counts(at));
    places.map(|at| RolloutComparison { at, old_logp: old[at], rollout_logp: rollout[at] }).collect()
}

/// Returns the row shard that a sequence is on.
fn device_of(launch: &SpecimenLaunch, sequence: &Sequence) -> usize {
    let rows = launch.mesh.rows;
    (0..rows).find(|&i| part(launch.shape.batch, rows, i).contains(&sequence.row)).unwrap_or(0)
}

/// Returns all packed tokens as one sequence.
fn pack(launch: &SpecimenLaunch) -> Vec<Sequence> {
    vec![Sequence { index: 0, row: 0, tokens: 0..launch.shape.tokens }]
}

/// Marks the tokens that a rejection keeps.
fn stays(launch: &SpecimenLaunch, rejection: &Rejection) -> Array2<bool> {
    let is_packed = launch.tokens.extra.sequences.packed().is_some();
    let sequences = if is_packed && launch.has(Bug::RejectionOfPack) { pack(launch) } else { launch.sequences() };
    if rejection.level == RejectionLevel::SecondMoment {
        return below_second_moment(launch, rejection.max, &sequences);
    }
    let mask = launch.tokens.mask;
    let mut stays = Array2::from_elem(mask.dim(), true);
    let min = rejection.min.filter(|_| !launch.has(Bug::RejectionMinIgnored)).unwrap_or(f64::NEG_INFINITY);
    let within = |x: f64| match () {
        () if launch.has(Bug::RejectionOnTheWrongSide) => x >= min && x >= rejection.max,
        () => x >= min && x <= rejection.max,
    };
    for sequence in sequences {
        // The divergence of each token, then that of the sequence by the rejection's level.
        let tokens = compared(launch, &sequence, |at| mask[at] || launch.has(Bug::RejectionCountsMasked));
        let own: Vec<f64> = tokens.iter().map(|of| divergence(launch, rejection.estimator, *of)).collect();
        let count = if launch.has(Bug::RejectionMeanOverWidth) { launch.shape.tokens } else { own.len() };
        let sum: f64 = own.iter().sum();
        let mean = sum / count as f64;
        let [least, most] = [f64::min, f64::max].map(|end: fn(f64, f64) -> f64| own.iter().copied().reduce(end));
        let (least, most) = (least.unwrap_or(0.0), most.unwrap_or(0.0));
        for (of, own) in tokens.iter().zip(&own) {
            // Tokens of a sequence stay or leave together, unless the level is the token's.
            stays[of.at] = within(match rejection.level {
                _ if launch.has(Bug::RejectionOfTokens) => *own,
                RejectionLevel::SequenceSum if launch.has(Bug::RejectionMeanForSum) => mean,
                RejectionLevel::SequenceMean if launch.has(Bug::RejectionSumForMean) => sum,
                RejectionLevel::SequenceMax if launch.has(Bug::RejectionMinForMax) => least,
                RejectionLevel::SequenceMin if launch.has(Bug::RejectionMaxForMin) => most,
                RejectionLevel::SequenceSum => sum,
                RejectionLevel::SequenceMean => mean,
                RejectionLevel::SequenceMax => most,
                RejectionLevel::SequenceMin => least,
                RejectionLevel::Token | RejectionLevel::SecondMoment => *own,
            });
        }
    }
    stays
}

fn divergence(launch: &SpecimenLaunch, estimator: RejectionEstimator, of: RolloutComparison) -> f64 {
    if launch.has(Bug::RejectionOfUnscored) && !of.is_scored() {
        return f64::NAN;
    }
    // The clamp is that of the estimators of `y`; the absolute ratio takes the gap as it is.
    let y = of.gap().clamp(-20.0, 20.0);
    let sampler = if of.is_scored() { of.rollout_logp } else { of.old_logp };
    let (p, q) = (sampler.exp(), of.old_logp.exp());
    // The binary divergences keep both probabilities off 0 and 1, where a logarithm is infinite.
    let inner = |p: f64| p.clamp(1e-6, 1.0 - 1e-6);
    let binary_kl = |p: f64, q: f64| {
        let own = p * (p / q).ln();
        if launch.has(Bug::RejectionKlOfTokenAlone) { own } else { own + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln() }
    };
    match estimator {
        RejectionEstimator::K1 if launch.has(Bug::RejectionK1SignFlipped) => y,
        RejectionEstimator::K1 => -y,
        RejectionEstimator::K2 if launch.has(Bug::RejectionK2NotHalved) => y * y,
        RejectionEstimator::K2 => y * y / 2.0,
        RejectionEstimator::K3 if launch.has(Bug::RejectionK3SignFlipped) => (-y).exp_m1() + y,
        RejectionEstimator::K3 => y.exp_m1() - y,
        RejectionEstimator::BinaryKl if launch.has(Bug::RejectionKlReversed) => binary_kl(inner(q), inner(p)),
        RejectionEstimator::BinaryKl => binary_kl(inner(p), inner(q)),
        RejectionEstimator::TotalVariation if launch.has(Bug::RejectionVariationSigned) => inner(p) - inner(q),
        RejectionEstimator::TotalVariation => (inner(p) - inner(q)).abs(),
        RejectionEstimator::Probability if launch.has(Bug::RejectionProbabilityReversed) => p - q,
        RejectionEstimator::Probability => q - p,
        RejectionEstimator::AbsoluteRatio if launch.has(Bug::RejectionRatioSigned) => of.gap().exp(),
        RejectionEstimator::AbsoluteRatio => of.gap().abs().exp(),
    }
}

/// Removes the tokens with the largest `y²`, the earlier of equal ones first, until the mean of the rest is below
/// `bound` or one is left.
fn below_second_moment(launch: &SpecimenLaunch, bound: f64, sequences: &[Sequence]) -> Array2<bool> {
    let mask = launch.tokens.mask;
    let mut stays = Array2::from_elem(mask.dim(), true);
    // One group is brought below the bound; a bug makes several.
    let group = |sequence: &Sequence| match () {
        () if launch.has(Bug::SecondMomentOfRow) => sequence.index,
        () if launch.has(Bug::SecondMomentOfDevice) => device_of(launch, sequence),
        () => 0,
    };
    let groups = sequences.iter().map(group).max().map_or(0, |last| last + 1);
    for i in 0..groups {
        let of_group = sequences.iter().filter(|sequence| group(sequence) == i);
        let tokens = of_group.flat_map(|sequence| compared(launch, sequence, |at| mask[at]));
        let halved = if launch.has(Bug::SecondMomentHalved) { 0.5 } else { 1.0 };
        let mut squares: Vec<(f64, (usize, usize))> = tokens.map(|of| (of.gap() * of.gap() * halved, of.at)).collect();
        // The last leaves first.
        squares.sort_by(|(a, at), (b, other)| a.total_cmp(b).then(other.cmp(at)));
        let mean =
            |left: &[(f64, (usize, usize))]| left.iter().map(|(square, _)| square).sum::<f64>() / left.len() as f64;
        let above = squares.len() > 1 && mean(&squares) >= bound;
        if launch.has(Bug::SecondMomentOfToken) || (launch.has(Bug::SecondMomentOfAll) && above) {
            for (square, at) in &squares {
                stays[*at] = *square < bound;
            }
            continue;
        }
        // The largest leave first, until the mean is below the bound.
        while squares.len() > 1 && mean(&squares) >= bound {
            if let Some((_, at)) = squares.pop() {
                stays[at] = false;
            }
        }
    }
    stays
}

/// The computation of weights against the sampler's policy, over the tokens of `mask`.
struct RolloutWeighing<'a, 'l> {
    launch: &'a SpecimenLaunch<'l>,
    rollout: &'a RolloutWeights,
    mask: &'a Array2<bool>,
}

impl RolloutWeighing<'_, '_> {
    fn has(&self, bug: Bug) -> bool {
        self.launch.has(bug)
    }

    fn sequences(&self) -> Vec<Sequence> {
        let is_packed = self.launch.tokens.extra.sequences.packed().is_some();
        if is_packed && self.has(Bug::RolloutOfPack) { pack(self.launch) } else { self.launch.sequences() }
    }

    fn weights(&self) -> Array2<f64> {
        let given = self.launch.tokens.extra.rollout_weights.as_ref();
        let mut weights = match (self.rollout.source, given) {
            (RolloutSource::Given, Some(given)) => self.given_weights(given),
            _ => self.computed_weights(),
        };
        if self.rollout.normalize {
            self.normalise(&mut weights);
            if self.has(Bug::RolloutNormalisedBeforeBounds) {
                weights.mapv_inplace(|weight| self.bounded(weight));
            }
        }
        weights
    }

    fn given_weights(&self, given: &Array2<f64>) -> Array2<f64> {
        let mut weights = per_token(self.launch, given);
        if self.rollout.level == RolloutLevel::Geometric && !self.has(Bug::RolloutGivenAsIs) {
            for sequence in self.sequences() {
                let places: Vec<_> = sequence.places().filter(|&at| self.mask[at]).collect();
                let count = if self.has(Bug::RolloutMeanOverWidth) { self.launch.shape.tokens } else { places.len() };
                let sum: f64 = places.iter().map(|&at| (weights[at] + 1e-10).ln()).sum();
                let mean = sum / (count as f64 + 1e-8);
                sequence.places().for_each(|at| weights[at] = mean.exp());
            }
        }
        weights
    }

    fn exp(&self, y: f64) -> f64 {
        let y = if self.has(Bug::RolloutInverted) { -y } else { y };
        match self.rollout.clamp {
            Some(clamp) if self.has(Bug::RolloutClampAfterExp) => y.exp().clamp(-clamp, clamp),
            Some(clamp) if !self.has(Bug::RolloutClampIgnored) => y.clamp(-clamp, clamp).exp(),
            _ => y.exp(),
        }
    }

    fn is_within(&self, weight: f64) -> bool {
        let RolloutWeights { min, max, .. } = *self.rollout;
        let min = min.filter(|_| !self.has(Bug::RolloutMinIgnored));
        let compared = if self.has(Bug::RolloutBoundOnLog) { weight.ln() } else { weight };
        min.is_none_or(|min| compared >= min) && max.is_none_or(|max| compared <= max)
    }

    fn bounded(&self, weight: f64) -> f64 {
        let RolloutWeights { min, max, outside, .. } = *self.rollout;
        let min = min.filter(|_| !self.has(Bug::RolloutMinIgnored));
        let outside = match outside {
            OutOfBounds::Truncate if self.has(Bug::RolloutMasks) => OutOfBounds::Mask,
            OutOfBounds::Mask if self.has(Bug::RolloutTruncates) => OutOfBounds::Truncate,
            outside => outside,
        };
        match outside {
            _ if self.is_within(weight) => weight,
            OutOfBounds::Mask => 0.0,
            OutOfBounds::Truncate if max.is_some_and(|max| weight > max) => max.unwrap_or(weight),
            OutOfBounds::Truncate => min.map_or(weight, |min| min.max(weight)),
        }
    }

    fn computed_weights(&self) -> Array2<f64> {
        let mut weights = Array2::ones(self.mask.dim());
        let counts_as_one = match self.rollout.unscored {
            UnscoredWeight::One => !self.has(Bug::UnscoredOneAsZero),
            UnscoredWeight::Zero => self.has(Bug::UnscoredZeroAsOne),
        };
        for sequence in self.sequences() {
            let tokens = compared(self.launch, &sequence, |at| self.mask[at]);
            let sum: f64 = tokens.iter().map(|of| of.gap()).sum();
            // Tokens that the sampler did not score count with a gap of 0, and are in the count of the mean.
            let count = match () {
                () if self.has(Bug::RolloutMeanOverWidth) => self.launch.shape.tokens,
                () if self.has(Bug::UnscoredOutOfMean) => tokens.iter().filter(|of| of.is_scored()).count().max(1),
                () => tokens.len(),
            };
            // The weight of the sequence: that of its sum, or of its mean.
            let geometric = self.exp(sum / count as f64);
            let all_scored = tokens.iter().all(|of| of.is_scored());
            for of in &tokens {
                let own_counts = of.is_scored() || counts_as_one;
                let row_counts = match () {
                    () if self.has(Bug::UnscoredZeroesTokenAlone) => own_counts,
                    () => all_scored || counts_as_one,
                };
                let (weight, counts) = match self.rollout.level {
                    RolloutLevel::Sequence if self.has(Bug::RolloutMeanForSum) => (geometric, row_counts),
                    RolloutLevel::Geometric if self.has(Bug::RolloutSumForMean) => (self.exp(sum), row_counts),
                    RolloutLevel::Sequence if !self.has(Bug::RolloutOfTokens) => (self.exp(sum), row_counts),
                    RolloutLevel::Geometric if !self.has(Bug::RolloutOfTokens) => (geometric, row_counts),
                    _ => (self.exp(of.gap()), own_counts),
                };
                // A gate leaves weights as they are or takes all of a sequence; bounds hold each weight.
                let is_gated = self.rollout.level == RolloutLevel::TokenGatedByGeometric;
                let weight = if counts { weight } else { 0.0 };
                weights[of.at] = match () {
                    () if self.has(Bug::UnscoredNan) && !of.is_scored() => f64::NAN,
                    () if is_gated && self.is_shut(geometric, weight, all_scored) => 0.0,
                    () if is_gated && !self.has(Bug::RolloutGateTruncates) => weight,
                    () if !counts && self.has(Bug::UnscoredEscapesBounds) => 0.0,
                    () if self.rollout.normalize && self.has(Bug::RolloutNormalisedBeforeBounds) => weight,
                    () => self.bounded(weight),
                };
            }
        }
        weights
    }

    /// Whether a sequence with this mean, and with this weight of a token, is gated out.
    fn is_shut(&self, geometric: f64, own: f64, all_scored: bool) -> bool {
        match () {
            () if self.has(Bug::RolloutGateIgnored) => false,
            () if self.has(Bug::RolloutGateByToken) => !self.is_within(own),
            () if self.has(Bug::UnscoredClosesGate) && !all_scored => true,
            () => !self.is_within(geometric),
        }
    }

    /// Divides the weights by their mean over the batch.
    fn normalise(&self, weights: &mut Array2<f64>) {
        let sequences = self.sequences();
        if !self.has(Bug::RolloutNormalisedByDevice) {
            return self.divide(weights, &sequences);
        }
        for device in 0..self.launch.mesh.rows {
            let of_device = sequences.iter().filter(|sequence| device_of(self.launch, sequence) == device);
            self.divide(weights, &of_device.cloned().collect::<Vec<_>>());
        }
    }

    fn divide(&self, weights: &mut Array2<f64>, sequences: &[Sequence]) {
        let rollout_logp = self.launch.tokens.extra.rollout_logp.as_ref();
        let is_scored = |at: (usize, usize)| rollout_logp.is_none_or(|logp| !logp[at].is_nan());
        let counts = |at: (usize, usize)| match () {
            () if self.has(Bug::RolloutNormalisedOverPadding) => true,
            () if self.has(Bug::UnscoredOutOfNormaliser) => self.mask[at] && is_scored(at),
            () => self.mask[at],
        };
        let weight = |at: (usize, usize)| if self.mask[at] { weights[at] } else { 1.0 };
        // The mean over tokens, or over sequences if weights are those of sequences.
        let rows: Vec<Vec<f64>> =
            sequences.iter().map(|sequence| sequence.places().filter(|&at| counts(at)).map(weight).collect()).collect();
        let rows: Vec<Vec<f64>> = rows.into_iter().filter(|row: &Vec<f64>| !row.is_empty()).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / (values.len() as f64 + 1e-8);
        let by_row = matches!(self.rollout.level, RolloutLevel::Sequence | RolloutLevel::Geometric);
        let mean = if by_row && !self.has(Bug::RolloutNormalisedOverTokens) {
            rows.iter().map(|row| mean(row)).sum::<f64>() / rows.len().max(1) as f64
        } else {
            mean(&rows.concat())
        };
        // Weights whose mean is 0 are left alone: the quotient would be NaN.
        if mean > 1e-8 {
            let places = sequences.iter().flat_map(Sequence::places);
            places.for_each(|at| weights[at] /= mean);
        }
    }
}
