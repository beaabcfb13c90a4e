//! The scalars that one warp of each CTA computes between a row's sums and its dlogits: the token's loss, its
//! results, the factors of walk 3.

use std::f64::consts::LOG2_E;

use super::super::affine::Affine;
use super::super::transform::PtxTransform;
use super::{ClusterWriter, ThreadIndex, WalkScales, first_of_row, softmaxes};
use crate::one_pass::{PER_TOKEN, TokenColumn};
use crate::two_pass::Statistic;
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::objective::{TokenArrays, TokenLoss, single_token_loss};
use assay_algebra::softmax::SoftmaxSums;
use assay_algebra::structure::{SpecNumber, SpecNumbers, TemperaturePlace};
use assay_ptx::{PtxAddress, PtxBuilder, PtxValue};

impl ClusterWriter {
    /// The sums of one softmax of the row.
    pub(super) fn sums(
        &self,
        on: &mut PtxBuilder,
        place: ThreadIndex,
        which: u32,
        [max, target_logit]: [PtxValue<f32>; 2],
        inverse: Option<PtxValue<f32>>,
    ) -> SoftmaxSums<PtxValue<f32>> {
        let add = |on: &mut PtxBuilder, a, b| on.add(a, b);
        let here = self.shared.sums;
        let others = self.gather(on, place, here, 2 * which, add);
        let weighted = self.gather(on, place, here, 2 * which + 1, add);
        let weighted = inverse.map_or(weighted, |inverse| on.mul(weighted, inverse));
        SoftmaxSums { max, target_logit, others, weighted }
    }

    /// The columns of the row's statistics, from the sums of the softmax that entropy is of and of that of logp.
    pub(super) fn statistics(
        &self,
        on: &mut PtxBuilder,
        [of_entropy, of_logp]: [SoftmaxSums<PtxValue<f32>>; 2],
    ) -> [PtxValue<f32>; PER_TOKEN] {
        let mut columns = [PtxValue::from(0.0); PER_TOKEN];
        columns[Statistic::Max as usize] = of_entropy.max;
        columns[Statistic::TargetLogit as usize] = of_entropy.target_logit;
        let places = [[Statistic::Others, Statistic::Weighted], [Statistic::LogpOthers, Statistic::LogpWeighted]];
        let softmaxes = softmaxes(self.structure);
        for ([others, weighted], sums) in places.into_iter().zip([of_entropy, of_logp]).take(softmaxes) {
            columns[others as usize] = sums.others;
            // Statistics weigh by exponents of 2.
            columns[weighted as usize] = on.mul(sums.weighted, -LOG2_E as f32);
        }
        columns
    }

    /// The token's results, and the third walk's [scales](WalkScales), by one warp.
    pub(super) fn scalars(
        &self,
        on: &mut PtxBuilder,
        place: ThreadIndex,
        change: Option<PtxTransform>,
        ends @ [_, target_logit]: [PtxValue<f32>; 2],
        affine: Option<&Affine>,
    ) {
        let structure = self.structure;
        let by_token = structure.temperature == TemperaturePlace::Given;
        let inverse = (!by_token).then(|| self.number(on, SpecNumber::InverseTemperature));
        let gap_scales = structure.gap_rates().into_iter();
        let gap_scales: Vec<_> = gap_scales.map(|rate| rate.map(|rate| self.rate(on, rate))).collect();
        let (tempered, one_softmax) = (gap_scales[0], gap_scales.len() == 1);
        // Softmaxes from the sums of all warps of the cluster.
        let entropy_sums = self.sums(on, place, 0, ends, tempered);
        let entropy_softmax = entropy_sums.softmax(on, tempered);
        let (logp_sums, logp_softmax) = if one_softmax {
            (entropy_sums, entropy_softmax)
        } else {
            let sums = self.sums(on, place, 1, ends, gap_scales[1]);
            (sums, sums.softmax(on, gap_scales[1]))
        };
        let logp = logp_softmax.logp(on);
        let logp = match inverse {
            Some(inverse) if !one_softmax => on.mul(logp, inverse),
            _ => logp,
        };
        let entropy = entropy_softmax.entropy(on);

        // The loss of the token and its derivative by logp, with the arithmetic that all kernels share.
        let spec_numbers = structure.numbers().into_iter().map(|which| (which, self.number(on, which)));
        let spec_numbers = SpecNumbers::new(spec_numbers.collect::<Vec<_>>());
        let arrays = TokenArrays::load(structure, |array| self.given(on, array.into()));
        let (token, grad) = single_token_loss(on, structure, &spec_numbers, logp, arrays);
        let TokenLoss { loss, reduced, ratio, kl, clipped_low, clipped_high, .. } = token;
        let [low, high] = [clipped_low, clipped_high].map(|clipped| on.select(clipped, 1.0, 0.0));
        let zero = on.constant(0.0);
        let first = first_of_row(on, place);
        // In the order of the columns.
        let columns = [logp, entropy, loss, ratio, kl.unwrap_or(zero), low, high, reduced];
        let upstream = self.arrays.upstream.map(|upstream| on.load(PtxAddress::Global(upstream, 0)));
        // Statistics in place of results go with the factor of a framework's loss.
        let columns = if upstream.is_some() { self.statistics(on, [entropy_sums, logp_sums]) } else { columns };
        on.when(first, |on| self.give(on, place.row, columns));

        // The factors of dlogits: dx_j = e_j·(base + slope·gap_j), with a separate formula for the target.
        let times_upstream =
            |on: &mut PtxBuilder, factor: PtxValue<f32>| upstream.map_or(factor, |upstream| on.mul(factor, upstream));
        let weight = self.given(on, TokenColumn::Weight);
        let weight = times_upstream(on, weight);
        let of_row = self.given_if(on, TokenColumn::EntropyFactor);
        let factor = on.mul(weight, grad);
        let factor = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
        let share = on.div(factor, logp_softmax.sum);
        let policy = on.neg(share);
        let share_of_others = on.div(logp_softmax.others, logp_softmax.sum);
        let target = on.mul(factor, share_of_others);
        let mut scales = WalkScales { policy, base: policy, slope: zero, target };
        if structure.entropy_bonus.is_some() {
            let factor = of_row.unwrap_or_else(|| self.number(on, SpecNumber::EntropyFactor));
            let factor = times_upstream(on, factor);
            let factor = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
            let factor = on.div(factor, entropy_softmax.sum);
            let minus = on.neg(factor);
            let before = if one_softmax { policy } else { zero };
            scales.base = on.mul_add(minus, entropy_softmax.mean_gap, before);
            scales.slope = tempered.map_or(factor, |inverse| on.mul(factor, inverse));
            // The bonus of the target's column, from the same mean gap.
            let above_mean = on.sub(entropy_softmax.target_gap, entropy_softmax.mean_gap);
            let exp_above_mean = on.mul(entropy_softmax.target, above_mean);
            let term = on.mul(exp_above_mean, factor);
            // A logit of −∞ has an infinite gap and no weight.
            let nothing = on.equal(entropy_softmax.target, zero);
            let term = on.select(nothing, zero, term);
            scales.target = on.add(target, term);
        }
        if let Some(change) = change {
            scales.target = change.through_target(on, scales.target, target_logit);
        }
        // Without a bonus `base` and `slope` are free; the walk by exponents keeps its factor and the maximum in
        // them.
        if let Some(affine) = affine {
            scales.base = affine.restore(on, scales.policy);
            scales.slope = ends[0];
        }
        let first = on.less(place.lane, 1);
        let to = PtxAddress::Shared(self.shared.scales, 0);
        let WalkScales { policy, base, slope, target } = scales;
        on.when(first, |on| {
            let values = [policy, base, slope, target].map(|value| on.variable(value));
            on.store_all(to, values);
        });
    }

    /// Writes the columns of what is returned of a row's token. The address is made where it is needed: a register that lives from the
    /// start is one less for exponentials.
    pub(super) fn give(&self, on: &mut PtxBuilder, row: PtxValue<u32>, columns: [PtxValue<f32>; PER_TOKEN]) {
        let [a, b, c, d, e, f, g, h] = columns.map(|column| on.variable(column));
        let offset = on.mul_wide(row, 4 * PER_TOKEN as u32);
        let to = PtxAddress::Global(on.add(self.arrays.returned, offset), 0);
        on.store_all(to, [a, b, c, d]);
        on.store_all(to.plus(16), [e, f, g, h]);
    }
}
