//! Sums and maxima over the columns of a thread, the lanes of a warp and the threads of a CTA.

use super::logits::FloatPair;
use crate::rows::FARTHEST;
use assay_ptx::{PtxAddress, PtxBuilder, PtxValue};

/// Returns `2^(gap·scale)` of both halves.
pub(crate) fn exp(on: &mut PtxBuilder, gap: FloatPair, scale: PtxValue<f32>) -> FloatPair {
    on.mul_pair(gap, [scale; 2]).map(|exponent| on.exp2(exponent))
}

/// Returns the sum of all elements, added by halves.
pub(crate) fn sum(on: &mut PtxBuilder, pairs: &[FloatPair]) -> PtxValue<f32> {
    let mut all = pairs.to_vec();
    while all.len() > 1 {
        all = all.chunks(2).map(|two| on.add_pair(two[0], two[1])).collect();
    }
    let [a, b] = all[0];
    on.add(a, b)
}

/// `Σ a·b`, one after another.
pub(crate) fn dot(on: &mut PtxBuilder, a: &[FloatPair], b: &[FloatPair]) -> PtxValue<f32> {
    let mut sum = on.mul_pair(a[0], b[0]);
    for (&a, &b) in a.iter().zip(b).skip(1) {
        sum = on.mul_add_pair(a, b, sum);
    }
    on.add(sum[0], sum[1])
}

/// Adds the exponentials of a block, and these times gaps or exponents.
pub(crate) fn add_block(on: &mut PtxBuilder, exps: &[FloatPair], weights: &[FloatPair], sums: [PtxValue<f32>; 2]) {
    let of_block = [sum(on, exps), dot(on, exps, weights)];
    for (sum, of_block) in sums.into_iter().zip(of_block) {
        let next = on.add(sum, of_block);
        on.set(sum, next);
    }
}

/// Folds what `lanes` neighbours have: each of them then has the same.
pub(crate) fn over_lanes(
    on: &mut PtxBuilder,
    value: PtxValue<f32>,
    lanes: u32,
    fold: impl Fn(&mut PtxBuilder, PtxValue<f32>, PtxValue<f32>) -> PtxValue<f32>,
) -> PtxValue<f32> {
    (0..lanes.ilog2()).rev().fold(value, |value, bit| {
        let other = on.exchange(value, 1 << bit);
        fold(on, value, other)
    })
}

/// Folds over all threads of a CTA. Each has an array of shared memory of its own, so that no thread waits for a reader of an earlier one.
pub(crate) struct CtaFolds {
    warps: u32,
    arrays: PtxValue<u32>,
    lane: PtxValue<u32>,
    warp: PtxValue<u32>,
}

impl CtaFolds {
    /// Room for so many `folds` of so many `threads`.
    pub(crate) fn new(on: &mut PtxBuilder, [threads, folds]: [u32; 2], thread: PtxValue<u32>) -> Self {
        let warps = threads / 32;
        let arrays = on.shared("folds", 4 * folds * warps);
        Self { warps, arrays, lane: on.bits_and(thread, 31), warp: on.shift_right(thread, 5) }
    }

    /// Folds the `value` of all threads, lanes by halves and then warps by halves: every thread then has the same. `which` counts the folds
    /// from 0.
    pub(crate) fn fold(
        &self,
        on: &mut PtxBuilder,
        which: u32,
        value: PtxValue<f32>,
        fold: impl Fn(&mut PtxBuilder, PtxValue<f32>, PtxValue<f32>) -> PtxValue<f32>,
    ) -> PtxValue<f32> {
        let warps = self.warps;
        // Lanes exchange registers; the first of each warp writes the warp's value to shared memory.
        let of_warp = over_lanes(on, value, 32, &fold);
        let array = on.add(self.arrays, 4 * warps * which);
        let first = on.less(self.lane, 1);
        on.when(first, |on| {
            let to = on.mul_add(self.warp, 4, array);
            on.store(PtxAddress::Shared(to, 0), of_warp);
        });
        on.barrier();
        // After the barrier every warp reads all warps' values and folds them in the same order.
        let own = on.bits_and(self.lane, warps - 1);
        let from = on.mul_add(own, 4, array);
        let value = on.load(PtxAddress::Shared(from, 0));
        over_lanes(on, value, warps, &fold)
    }
}

/// Returns the gaps of a block's logits below `max`; if `bounded`, at most [`FARTHEST`].
pub(crate) fn gaps(on: &mut PtxBuilder, x: &[FloatPair], max: PtxValue<f32>, bounded: bool) -> Vec<FloatPair> {
    let gap = |&x: &FloatPair| {
        let gap = on.sub_pair([max; 2], x);
        if bounded { gap.map(|gap| on.min(gap, FARTHEST as f32)) } else { gap }
    };
    x.iter().map(gap).collect()
}

/// Writes eight values that follow one another.
pub(crate) fn store_8(on: &mut PtxBuilder, to: PtxAddress, values: [PtxValue<f32>; 8]) {
    let [a, b, c, d, e, f, g, h] = values.map(|value| on.variable(value));
    on.store_all(to, [a, b, c, d]);
    on.store_all(to.plus(16), [e, f, g, h]);
}
