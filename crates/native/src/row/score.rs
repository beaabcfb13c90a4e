//! The score: one walk over a row.
//!
//! `m` is the largest logit so far, and what was summed is multiplied by `exp((m_old − m_new)/T)` where a block of columns
//! has a larger one. Sums are f32 over 32 columns, none of which is rounded more than nine times, and f64 over those; f32
//! over two columns in the block that has the maximum.
//!
//! What bounds it is the number of vector instructions, so the walk has none that looks for a larger maximum or for a
//! column too far below it for the exponential's arithmetic: both show in the two highest bits of its gap, which are
//! or'ed over a block, and only a block where one is set is walked again. Once a column was too far below, others of its row
//! will be, and the walk of the blocks that follow takes care of them at once.

use super::packed::{Element, Packed};
use super::{BLOCK, Exps, Kept, Softmax, UNITS};
use crate::exp::{Exp, SCALE, step};
use crate::simd::{LANES, Simd, UNIT, Work, prefetch};
use assay_algebra::arithmetic::Immediate;
use assay_algebra::softmax;

/// Units whose exponentials are added in f32, before their sums are in f64.
const GROUP: usize = 8;

/// The bit of a gap in steps that is set in what is below 0.
const BELOW_0: u32 = 1 << 31;

/// That which is set in what is at least 2, or NaN.
const AT_LEAST_2: u32 = 1 << 30;

/// Scores a row under one softmax.
pub(super) struct Walk<'r, E> {
    pub(super) row: &'r [E],
    pub(super) id: usize,
    /// `1/T`.
    pub(super) inverse_temperature: f64,
    pub(super) kept: Option<&'r mut Kept>,
}

impl<E: Element> Work for Walk<'_, E> {
    type Output = Softmax;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> Softmax {
        let Self { row, id, inverse_temperature, kept } = self;
        let target = row[id].to_f32();
        let mut sums = Sums::new(simd, target, inverse_temperature);
        let mut not_kept = Exps([[0.0; UNIT]; UNITS]);
        let mut kept = kept.map(|kept| {
            let blocks = row.len().div_ceil(BLOCK);
            kept.exps.resize(blocks, not_kept.clone());
            kept.maxima.resize(blocks, 0.0);
            (&mut kept.exps[..], &mut kept.maxima[..])
        });
        for (i, block) in row.chunks(BLOCK).enumerate() {
            let Exps(exps) = match &mut kept {
                Some((exps, _)) => &mut exps[i],
                None => &mut not_kept,
            };
            sums.add(simd, block, (i == id / BLOCK).then_some(id % BLOCK), exps);
            if let Some((_, maxima)) = &mut kept {
                maxima[i] = sums.max;
            }
        }
        sums.softmax(simd, target)
    }
}

/// Scores a row under one softmax, and writes its exponentials over it.
pub(super) struct WalkOver<'r> {
    pub(super) row: &'r mut [f32],
    pub(super) id: usize,
    /// `1/T`.
    pub(super) inverse_temperature: f64,
    /// The `m` of each block.
    pub(super) maxima: &'r mut Vec<f32>,
}

impl Work for WalkOver<'_> {
    type Output = Softmax;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> Softmax {
        let Self { row, id, inverse_temperature, maxima } = self;
        let target = row[id];
        let mut sums = Sums::new(simd, target, inverse_temperature);
        maxima.clear();
        for (i, block) in row.chunks_mut(BLOCK).enumerate() {
            // Not at once over logits that may have to be read again.
            let mut exps = [[0.0; UNIT]; UNITS];
            sums.add(simd, block, (i == id / BLOCK).then_some(id % BLOCK), &mut exps);
            block.copy_from_slice(&exps.as_flattened()[..block.len()]);
            maxima.push(sums.max);
        }
        sums.softmax(simd, target)
    }
}

fn units<E>(block: &[E; BLOCK]) -> &[[E; UNIT]; UNITS] {
    block.as_chunks().0.try_into().expect("a block is whole units")
}

/// What a walk has summed so far, of the columns other than the target.
struct Sums<S: Simd> {
    exp: Exp<S>,
    /// `1/T`
    inverse_temperature: f64,
    /// What gaps are counted in.
    step: f64,
    /// `m`
    max: f32,
    /// Whether a column was far below it.
    far: bool,
    /// `2^64·Σ e_j`, and `2^64·Σ e_j a_j` with `a` in steps, since `m` was last raised.
    running: [S::Sums; 2],
    /// The same until then.
    before: [f64; 2],
}

impl<S: Simd> Sums<S> {
    /// `m` begins at the target, or where that is −∞ at the least finite number. A NaN stays.
    #[inline(always)]
    fn new(simd: S, target: f32, inverse_temperature: f64) -> Self {
        Self {
            exp: Exp::new(simd, inverse_temperature),
            inverse_temperature,
            step: step(inverse_temperature),
            max: if target < f32::MIN { f32::MIN } else { target },
            far: false,
            running: [simd.sums(); 2],
            before: [0.0; 2],
        }
    }

    /// Adds a block, all but its target, and writes down its exponentials.
    #[inline(always)]
    fn add<E: Element>(&mut self, simd: S, block: &[E], target: Option<usize>, exps: &mut [[f32; UNIT]; UNITS]) {
        if let (Ok(whole), None) = (block.try_into(), target) {
            self.add_units(simd, units(whole), exps, self.far);
            return;
        }
        let mut without_target = [E::MINUS_INFINITY; BLOCK];
        without_target[..block.len()].copy_from_slice(block);
        if let Some(target) = target {
            without_target[target] = E::MINUS_INFINITY;
        }
        self.add_units(simd, units(&without_target), exps, true);
    }

    /// Adds a block of which a column may be far below `m`, or none is, as if no column were above `m`; and where that was
    /// wrong, again.
    #[inline(always)]
    fn add_units<E: Element>(
        &mut self,
        simd: S,
        block: &[[E; UNIT]; UNITS],
        exps: &mut [[f32; UNIT]; UNITS],
        far: bool,
    ) {
        let (sums, right) =
            if far { self.walk::<E, true>(simd, block, exps) } else { self.walk::<E, false>(simd, block, exps) };
        if right {
            self.running = sums;
            return;
        }
        let top = largest(simd, block);
        if top > self.max {
            self.raise(simd, top);
            self.add_singly(simd, block, exps);
        } else {
            // One is far below `m`, and others of the row will be; or there is a NaN.
            self.far = true;
            (self.running, _) = self.walk::<E, true>(simd, block, exps);
        }
    }

    /// The sums with a block, and whether no column was above `m`, nor one far below it unless `FAR` columns are looked for.
    #[inline(always)]
    fn walk<E: Element, const FAR: bool>(
        &self,
        simd: S,
        block: &[[E; UNIT]; UNITS],
        exps: &mut [[f32; UNIT]; UNITS],
    ) -> ([S::Sums; 2], bool) {
        let max = simd.splat(self.max);
        let (max_in_steps, steps_a_unit) =
            (simd.splat((f64::from(self.max) / self.step) as f32), simd.splat((-1.0 / self.step) as f32));
        let mut seen = simd.splat(0.0);
        let [mut sum, mut weighted] = self.running;
        for (group, exps) in block.chunks(GROUP).zip(exps.chunks_mut(GROUP)) {
            let [mut of_group, mut weighted_of_group] = [[simd.splat(-0.0); 2]; 2];
            for (units, exps) in group.as_chunks().0.iter().zip(exps.as_chunks_mut().0) {
                let [first, second]: &[_; 2] = units;
                prefetch(first);
                prefetch(second);
                let ([x0, x1], [x2, x3]) = (E::load(simd, first), E::load(simd, second));
                let mut gaps = [x0, x1, x2, x3];
                for x in &mut gaps {
                    *x = if FAR {
                        self.exp.gap(simd, max, *x)
                    } else {
                        simd.mul_add(*x, steps_a_unit, max_in_steps)
                    };
                }
                seen = simd.either(simd.either(seen, gaps[0], gaps[1]), gaps[2], gaps[3]);
                let e = self.exp.scaled(simd, gaps);
                for i in 0..4 {
                    of_group[i % 2] = simd.add(of_group[i % 2], e[i]);
                    weighted_of_group[i % 2] = simd.mul_add(e[i], gaps[i], weighted_of_group[i % 2]);
                }
                let [exps_of_first, exps_of_second]: &mut [_; 2] = exps;
                f32::store(simd, [e[0], e[1]], exps_of_first);
                f32::store(simd, [e[2], e[3]], exps_of_second);
            }
            sum = simd.accumulate(sum, simd.add(of_group[0], of_group[1]));
            weighted = simd.accumulate(weighted, simd.add(weighted_of_group[0], weighted_of_group[1]));
        }
        ([sum, weighted], !simd.any_set(seen, if FAR { BELOW_0 } else { BELOW_0 | AT_LEAST_2 }))
    }

    /// Moves what was summed to a new maximum.
    #[inline(always)]
    fn raise(&mut self, simd: S, top: f32) {
        let [mut sum, mut weighted] = self.total(simd);
        let gap = f64::from(top) - f64::from(self.max);
        let faded = (-gap * self.inverse_temperature).exp();
        weighted += gap / self.step * sum;
        sum *= faded;
        self.before = [sum, faded * weighted];
        self.running = [simd.sums(); 2];
        self.max = top;
    }

    /// Adds the block that has the maximum: beside an exponential of 1 every rounding counts, so each vector is added in f64
    /// by itself.
    #[inline(always)]
    fn add_singly<E: Element>(&mut self, simd: S, block: &[[E; UNIT]; UNITS], exps: &mut [[f32; UNIT]; UNITS]) {
        let max = simd.splat(self.max);
        for (unit, exps) in block.iter().zip(exps) {
            let [low, high] = E::load(simd, unit);
            let gaps = [self.exp.gap(simd, max, low), self.exp.gap(simd, max, high)];
            let e = self.exp.scaled(simd, gaps);
            for i in 0..2 {
                let [sum, weighted] = self.running;
                self.running = [simd.accumulate(sum, e[i]), simd.accumulate(weighted, simd.mul(e[i], gaps[i]))];
            }
            f32::store(simd, e, exps);
        }
    }

    /// `2^64·Σ e_j` and `2^64·Σ e_j a_j`.
    #[inline(always)]
    fn total(&self, simd: S) -> [f64; 2] {
        [self.before[0] + simd.total(self.running[0]), self.before[1] + simd.total(self.running[1])]
    }

    /// With the target. A NaN among the logits is a NaN in `weighted`, and then everywhere.
    #[inline(always)]
    fn softmax(&self, simd: S, target: f32) -> Softmax {
        let [sum, weighted] = self.total(simd);
        let others = if weighted.is_nan() { f64::NAN } else { sum / SCALE };
        let weighted = weighted / SCALE * self.step * self.inverse_temperature;
        let (max, target_logit) = (f64::from(self.max), f64::from(target));
        let sums = softmax::Sums { max, target_logit, others, weighted };
        let end = sums.softmax(&mut Immediate, Some(self.inverse_temperature));
        Softmax { max: self.max, inverse_temperature: self.inverse_temperature, end }
    }
}

/// The largest logit of a block, at least the least finite number; NaN counts for nothing.
#[inline(always)]
fn largest<S: Simd, E: Element>(simd: S, block: &[[E; UNIT]; UNITS]) -> f32 {
    let mut top = simd.splat(f32::MIN);
    for unit in block {
        let [low, high] = E::load(simd, unit);
        top = simd.max(high, simd.max(low, top));
    }
    let mut lanes = [0.0; LANES];
    simd.store(top, &mut lanes);
    let mut largest = f32::MIN;
    for x in lanes {
        if x > largest {
            largest = x;
        }
    }
    largest
}
