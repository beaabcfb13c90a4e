//! The write: dlogits from logits, or from the exponentials that the score saved.

use bytemuck::{cast_slice, cast_slice_mut};

use super::logits_transform::{ColumnTransform, RowTransform, TransformedBlock};
use super::score::units;
use super::{BLOCK, BlockScale, ExpBlock, Exponent, LogitsRow, NativeElement, SavedExponentials, UNITS};
use assay_simd::exp::{Exp, SCALE};
use assay_simd::{CacheLine, ExpFactor, PackedElement, Simd, SimdTask, Streaming, UNIT, smallest};

/// The factors of dlogits: `dx_j = e_j·policy + q_j·(slope·a_j + offset) + constant`, with `a` in steps and `q` of the
/// softmax that entropy is of.
#[derive(Clone, Copy)]
pub(super) struct DlogitsFactors {
    pub(super) policy: f64,
    pub(super) slope: f64,
    pub(super) offset: f64,
    /// The part that all columns have alike, of label smoothing; 0 without it.
    pub(super) constant: f64,
}

impl DlogitsFactors {
    /// Whether the factors are finite, and no product of them with an exponential can be NaN: no gap is beyond
    /// [`FAR`](assay_simd::exp::FAR).
    pub(super) fn in_range(self, entropy: Exponent) -> bool {
        let largest = self.policy.abs() + self.offset.abs() + self.slope.abs() * entropy.farthest();
        (largest as f32).is_finite()
    }

    /// Writes dlogits column by column, for factors that are not in range. A column of probability 0 has no part even
    /// in an infinite gradient.
    pub(super) fn write_carefully<E: NativeElement>(
        self,
        row: &mut LogitsRow<E>,
        transform: &RowTransform,
        logp: Exponent,
        entropy: Exponent,
        saved: Option<&SavedExponentials>,
    ) {
        // Saved exponentials that replaced the logits are all that is left of them.
        if let Some(saved) = saved
            && saved.over_logits
        {
            for (i, dlogits) in row.dlogits.chunks_mut(BLOCK).enumerate() {
                let faded = logp.faded(saved.blocks[i].max) / SCALE;
                for x in dlogits {
                    let e = (f64::from(x.to_f32()) * faded) as f32;
                    // A NaN among the logits may have left any number here.
                    let has_part = e != 0.0 || self.policy.is_nan();
                    let of_softmax = if has_part { e * self.policy as f32 } else { 0.0 };
                    *x = E::from_f32(of_softmax + self.constant as f32);
                }
            }
            return;
        }
        // Each term is left out where its exponential or its factor is 0, so that no infinity meets a 0.
        let term = |exponent: Exponent, t: f64, factor: &dyn Fn(f64) -> f64| {
            let gap = f64::from(exponent.max) - t;
            let e = (-gap * exponent.inverse_temperature).exp() as f32;
            if e == 0.0 { 0.0 } else { e * factor(gap / exponent.step()) as f32 }
        };
        for j in 0..row.dlogits.len() {
            let (t, tanh_slope) = transform.transformed(j, row.logits()[j]);
            let policy = if self.policy == 0.0 { 0.0 } else { term(logp, t, &|_| self.policy) };
            let bonus = |a: f64| self.slope * a + self.offset;
            let bonus = if self.slope == 0.0 { 0.0 } else { term(entropy, t, &bonus) };
            let sum = policy + bonus + self.constant as f32;
            row.dlogits[j] = E::from_f32(if sum == 0.0 { 0.0 } else { sum * tanh_slope as f32 });
        }
    }
}

/// The pass over a row that writes dlogits, except the target's. Those below 1.2e-38 are 0; if entropy has a part in
/// them, almost all of those.
pub(super) struct WriteRow<'w, 'r, E> {
    pub(super) row: &'w mut LogitsRow<'r, E>,
    pub(super) transform: &'w RowTransform,
    pub(super) logp: Exponent,
    pub(super) entropy: Exponent,
    /// Whether both softmaxes have a part in dlogits; otherwise that of `logp` alone has, which may be that of
    /// `entropy` too.
    pub(super) two: bool,
    pub(super) saved: Option<&'w SavedExponentials>,
    pub(super) factors: DlogitsFactors,
}

impl<E: NativeElement> SimdTask for WriteRow<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) {
        const NOT_SAVED: &[[f32; UNIT]; UNITS] = &[[0.0; UNIT]; UNITS];
        let DlogitsFactors { policy, slope, offset, constant } = self.factors;
        let streaming = Streaming::begin();
        // Saved exponentials are already multiplied by the slopes of the cap.
        let sloped = self.two || self.saved.is_none();
        let mut mapping =
            self.transform.map(simd).map(|map| BlockTransform { map, mapped: TransformedBlock::room(), sloped });
        let constant = (constant != 0.0).then(|| simd.splat(constant as f32));
        match self.saved {
            // Two softmaxes: exponentials of both are computed again from the logits.
            _ if self.two => {
                let largest = offset.abs() + slope.abs() * self.entropy.farthest();
                let [logp, entropy] =
                    [RecomputedExp::new(simd, self.logp, policy), RecomputedExp::new(simd, self.entropy, largest)];
                let policy = simd.splat(policy as f32);
                let factors = [simd.splat(slope as f32), simd.splat(offset as f32)];
                let two = TwoSoftmaxes { logp, entropy, policy, factors };
                for (i, dlogits) in self.row.dlogits.chunks_mut(BLOCK).enumerate() {
                    write(simd, &streaming, mapping.as_mut(), i, self.row.logits, dlogits, NOT_SAVED, &two);
                }
            }
            // One softmax, and nothing saved: its exponentials are computed again.
            None => {
                let largest = (policy + offset).abs() + slope.abs() * self.logp.farthest();
                let factors = [simd.splat(slope as f32), simd.splat((policy + offset) as f32)];
                let again = OneSoftmax { softmax: RecomputedExp::new(simd, self.logp, largest), factors };
                for (i, dlogits) in self.row.dlogits.chunks_mut(BLOCK).enumerate() {
                    let (mapping, logits) = (mapping.as_mut(), self.row.logits);
                    write_smoothed(simd, &streaming, mapping, i, logits, dlogits, NOT_SAVED, &again, constant);
                }
            }
            // Saved exponentials: each block's are relative to the maximum at its time, so that its factors fade with later ones.
            Some(saved) => {
                let again = RecomputedExp::new(simd, self.logp, policy + offset);
                let farthest = self.logp.farthest();
                let (mut since, mut faded) = (self.logp.max, 1.0);
                for (i, dlogits) in self.row.dlogits.chunks_mut(BLOCK).enumerate() {
                    let BlockScale { max, near } = saved.blocks[i];
                    if max != since {
                        (since, faded) = (max, self.logp.faded(max));
                    }
                    let [slope, factor] = [slope * faded, (policy + offset) * faded];
                    let largest = factor.abs() + slope.abs() * farthest;
                    let again = RecomputedExp { smallest: simd.splat(smallest(largest)), ..again };
                    let factors = [simd.splat(slope as f32), simd.splat(factor as f32)];
                    let scaled = (factor / SCALE) as f32;
                    // They replaced the logits: one product of each, or two if the factor alone is not a normal number.
                    if saved.over_logits {
                        let factors = if scaled.is_normal() {
                            [simd.splat(scaled), simd.splat(1.0)]
                        } else {
                            [again.unscale, factors[1]]
                        };
                        let over = OverLogits { factors, smallest: again.smallest };
                        write_smoothed(simd, &streaming, None, i, None, dlogits, NOT_SAVED, &over, constant);
                        continue;
                    }
                    // They are beside the logits: one product of each without an entropy gradient, else the gaps are needed too.
                    let logits = self.row.logits;
                    let ExpBlock(exps) = &saved.exps[i];
                    if let (true, Some(factor)) = (slope == 0.0, ExpFactor::new(simd, scaled)) {
                        if near && factor.keeps_near() {
                            let unit = TimesFactor::<S, true>(factor);
                            write_smoothed(simd, &streaming, None, i, logits, dlogits, exps, &unit, constant);
                        } else {
                            let unit = TimesFactor::<S, false>(factor);
                            write_smoothed(simd, &streaming, None, i, logits, dlogits, exps, &unit, constant);
                        }
                    } else {
                        let sloped = TimesSlope { again, factors };
                        write_smoothed(simd, &streaming, mapping.as_mut(), i, logits, dlogits, exps, &sloped, constant);
                    }
                }
            }
        }
    }
}

/// One way to compute the dlogits of a unit, from its logits or from saved exponentials.
trait DlogitsUnit<S: Simd> {
    /// Whether the unit's logits are read.
    const READS_LOGITS: bool = true;

    /// Computes dlogits from the unit's logits, or from what replaces them, and from saved exponentials.
    fn dlogits(&self, simd: S, logits: [S::Lanes; 2], exps: &[f32; UNIT]) -> [S::Lanes; 2];

    /// Writes dlogits over the unit's logits, or over what replaces them.
    #[inline(always)]
    fn write<E: NativeElement>(&self, simd: S, logits: &mut [E; UNIT], exps: &[f32; UNIT]) {
        let dlogits = self.dlogits(simd, E::load(simd, logits), exps);
        E::store(simd, dlogits, logits);
    }
}

/// The transform of logits where they are read, and its buffer.
struct BlockTransform<'t, S: Simd> {
    map: ColumnTransform<'t, S>,
    mapped: TransformedBlock,
    /// Whether dlogits must be multiplied by the slopes.
    sloped: bool,
}

/// Writes the `i`th block of a row as [`write`] does, with the constant of label smoothing if there is one.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "those of `write` and the constant")]
fn write_smoothed<S: Simd, E: NativeElement, U: DlogitsUnit<S> + Copy>(
    simd: S,
    streaming: &Streaming,
    mapping: Option<&mut BlockTransform<S>>,
    i: usize,
    logits: Option<&[E]>,
    dlogits: &mut [E],
    exps: &[[f32; UNIT]; UNITS],
    unit: &U,
    constant: Option<S::Lanes>,
) {
    match constant {
        None => write(simd, streaming, mapping, i, logits, dlogits, exps, unit),
        Some(constant) => {
            let smoothed = PlusConstant { of_softmax: *unit, constant };
            write(simd, streaming, mapping, i, logits, dlogits, exps, &smoothed);
        }
    }
}

/// Writes the `i`th block of a row. Dlogits that do not overwrite the logits bypass the caches, which have no use for
/// them.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "a block, where it is from and where it goes")]
fn write<S: Simd, E: NativeElement, U: DlogitsUnit<S>>(
    simd: S,
    streaming: &Streaming,
    mapping: Option<&mut BlockTransform<S>>,
    i: usize,
    logits: Option<&[E]>,
    dlogits: &mut [E],
    exps: &[[f32; UNIT]; UNITS],
    unit: &U,
) {
    // Without a transform every unit is written where it goes: over the logits, or past the caches into lines of its own. A last unit
    // that is not whole is written through a copy.
    let from = logits.map(|logits| &logits[i * BLOCK..][..dlogits.len()]);
    let in_lines = dlogits.as_ptr().addr().is_multiple_of(align_of::<CacheLine>());
    if mapping.is_none() && (from.is_none() || in_lines) {
        let (units, tail) = dlogits.as_chunks_mut();
        let mut exps = exps.iter();
        match from {
            None => {
                for (to, exps) in units.iter_mut().zip(&mut exps) {
                    unit.write(simd, to, exps);
                }
            }
            Some(from) => {
                for ((to, from), exps) in units.iter_mut().zip(from.as_chunks().0).zip(&mut exps) {
                    let mut made: [E; UNIT] = *from;
                    unit.write(simd, &mut made, exps);
                    streaming.copy(simd, cast_slice(&made), cast_slice_mut(to));
                }
            }
        }
        if let (false, Some(exps)) = (tail.is_empty(), exps.next()) {
            let of_tail = from.map_or(&*tail, |from| from.as_chunks::<UNIT>().1);
            let mut last = [E::MINUS_INFINITY; UNIT];
            last[..tail.len()].copy_from_slice(of_tail);
            unit.write(simd, &mut last, exps);
            tail.copy_from_slice(&last[..tail.len()]);
        }
        return;
    }
    // Otherwise a block is computed in a buffer, with −∞ beyond the end of the row.
    let mut block = [E::MINUS_INFINITY; BLOCK];
    if U::READS_LOGITS {
        block[..dlogits.len()].copy_from_slice(from.unwrap_or(dlogits));
    }
    match mapping {
        Some(BlockTransform { map, mapped, sloped }) => {
            // Derivatives by the transformed logits, times the slopes of the transform.
            map.clear_excluded(i, &mut block);
            map.block(simd, i, units(&block), mapped, *sloped);
            for (((to, t), slopes), exps) in
                block.as_chunks_mut().0.iter_mut().zip(&mut mapped.t).zip(&mapped.slopes).zip(exps)
            {
                unit.write(simd, t, exps);
                let mut dt = f32::load(simd, t);
                if *sloped {
                    let [low, high] = f32::load(simd, slopes);
                    dt = [simd.mul(dt[0], low), simd.mul(dt[1], high)];
                }
                E::store(simd, dt, to);
            }
        }
        None => {
            for (to, exps) in block.as_chunks_mut().0.iter_mut().zip(exps) {
                unit.write(simd, to, exps);
            }
        }
    }
    // Dlogits in a separate array are streamed past the caches.
    let bytes = cast_slice(&block[..dlogits.len()]);
    match from {
        Some(_) => streaming.copy(simd, bytes, cast_slice_mut(dlogits)),
        None => dlogits.copy_from_slice(&block[..dlogits.len()]),
    }
}

/// Dlogits `(e_j·first)·second`, of exponentials that were saved over the logits.
#[derive(Clone, Copy)]
struct OverLogits<S: Simd> {
    factors: [S::Lanes; 2],
    smallest: S::Lanes,
}

impl<S: Simd> DlogitsUnit<S> for OverLogits<S> {
    #[inline(always)]
    fn dlogits(&self, simd: S, [low, high]: [S::Lanes; 2], _: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [first, second] = self.factors;
        let (low, high) = (simd.at_least(low, self.smallest), simd.at_least(high, self.smallest));
        [simd.mul(simd.mul(low, first), second), simd.mul(simd.mul(high, first), second)]
    }
}

/// Dlogits `e_j·factor`, of exponentials that were saved. With `ALL_NEAR` none of them is flushed to 0.
#[derive(Clone, Copy)]
struct TimesFactor<S: Simd, const ALL_NEAR: bool>(ExpFactor<S>);

impl<S: Simd, const ALL_NEAR: bool> DlogitsUnit<S> for TimesFactor<S, ALL_NEAR> {
    const READS_LOGITS: bool = false;

    #[inline(always)]
    fn dlogits(&self, simd: S, _: [S::Lanes; 2], exps: &[f32; UNIT]) -> [S::Lanes; 2] {
        self.0.products::<ALL_NEAR>(simd, f32::load(simd, exps))
    }

    #[inline(always)]
    fn write<E: NativeElement>(&self, simd: S, logits: &mut [E; UNIT], exps: &[f32; UNIT]) {
        E::store_products::<S, ALL_NEAR>(simd, f32::load(simd, exps), self.0, logits);
    }
}

/// Dlogits `e_j·(slope·a_j + factor)`, of exponentials that were saved.
#[derive(Clone, Copy)]
struct TimesSlope<S: Simd> {
    again: RecomputedExp<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> DlogitsUnit<S> for TimesSlope<S> {
    #[inline(always)]
    fn dlogits(&self, simd: S, [low, high]: [S::Lanes; 2], exps: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [slope, factor] = self.factors;
        let [e_low, e_high] = f32::load(simd, exps);
        let low = simd.mul_add(self.again.gap(simd, low), slope, factor);
        let high = simd.mul_add(self.again.gap(simd, high), slope, factor);
        let (e_low, e_high) = (self.again.unscaled(simd, e_low), self.again.unscaled(simd, e_high));
        [simd.mul(e_low, low), simd.mul(e_high, high)]
    }
}

/// Dlogits of a softmax, and a constant, the derivative of the mean logit.
struct PlusConstant<S: Simd, U> {
    of_softmax: U,
    constant: S::Lanes,
}

impl<S: Simd, U: DlogitsUnit<S>> DlogitsUnit<S> for PlusConstant<S, U> {
    const READS_LOGITS: bool = U::READS_LOGITS;

    #[inline(always)]
    fn dlogits(&self, simd: S, logits: [S::Lanes; 2], exps: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [low, high] = self.of_softmax.dlogits(simd, logits, exps);
        [simd.add(low, self.constant), simd.add(high, self.constant)]
    }
}

/// Dlogits `e_j·(slope·a_j + factor)`, of exponentials that are computed again.
#[derive(Clone, Copy)]
struct OneSoftmax<S: Simd> {
    softmax: RecomputedExp<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> DlogitsUnit<S> for OneSoftmax<S> {
    #[inline(always)]
    fn dlogits(&self, simd: S, [low, high]: [S::Lanes; 2], _: &[f32; UNIT]) -> [S::Lanes; 2] {
        [self.softmax.sloped(simd, low, self.factors), self.softmax.sloped(simd, high, self.factors)]
    }
}

/// Dlogits `e_j·policy + q_j·(slope·a_j + offset)`, of the exponentials of two softmaxes.
struct TwoSoftmaxes<S: Simd> {
    logp: RecomputedExp<S>,
    entropy: RecomputedExp<S>,
    policy: S::Lanes,
    factors: [S::Lanes; 2],
}

impl<S: Simd> TwoSoftmaxes<S> {
    #[inline(always)]
    fn sum(&self, simd: S, x: S::Lanes) -> S::Lanes {
        let e = self.logp.exp(simd, self.logp.gap(simd, x));
        simd.mul_add(e, self.policy, self.entropy.sloped(simd, x, self.factors))
    }
}

impl<S: Simd> DlogitsUnit<S> for TwoSoftmaxes<S> {
    #[inline(always)]
    fn dlogits(&self, simd: S, [low, high]: [S::Lanes; 2], _: &[f32; UNIT]) -> [S::Lanes; 2] {
        [self.sum(simd, low), self.sum(simd, high)]
    }
}

/// The exponentials of a softmax, computed again from logits.
#[derive(Clone, Copy)]
struct RecomputedExp<S: Simd> {
    exp: Exp<S>,
    max: S::Lanes,
    unscale: S::Lanes,
    smallest: S::Lanes,
}

impl<S: Simd> RecomputedExp<S> {
    /// Prepares exponentials that are multiplied by at most `largest`.
    #[inline(always)]
    fn new(simd: S, exponent: Exponent, largest: f64) -> Self {
        Self {
            exp: Exp::new(simd, exponent.inverse_temperature),
            max: simd.splat(exponent.max),
            unscale: simd.splat((1.0 / SCALE) as f32),
            smallest: simd.splat(smallest(largest)),
        }
    }

    #[inline(always)]
    fn gap(&self, simd: S, x: S::Lanes) -> S::Lanes {
        self.exp.gap(simd, self.max, x)
    }

    #[inline(always)]
    fn exp(&self, simd: S, a: S::Lanes) -> S::Lanes {
        let [e] = self.exp.scaled(simd, [a]);
        self.unscaled(simd, e)
    }

    /// Computes `e` from `2^64·e`, or 0 if its product would be below the normal numbers.
    #[inline(always)]
    fn unscaled(&self, simd: S, e: S::Lanes) -> S::Lanes {
        simd.mul(simd.at_least(e, self.smallest), self.unscale)
    }

    /// Computes `e·(slope·a + factor)` of logits.
    #[inline(always)]
    fn sloped(&self, simd: S, x: S::Lanes, [slope, factor]: [S::Lanes; 2]) -> S::Lanes {
        let a = self.gap(simd, x);
        simd.mul(self.exp(simd, a), simd.mul_add(a, slope, factor))
    }
}
