//! The score: one pass over a logits row that sums exponentials.
//!
//! `m` is the largest logit so far. If a block of columns has a larger one, the sums are multiplied by `exp((m_old − m_new)/T)`.
//! Sums are in f32 over 32 columns, none of which is rounded more than nine times, and in f64 over those; in the block that has
//! the maximum they are in f32 over two columns only.
//!
//! The number of vector instructions bounds the time, so the pass has none that looks for a larger maximum, or for a column too
//! far below it for the exponential's arithmetic. Both show in the two highest bits of the column's gap, the largest of which is kept
//! over a block; only a block in which one is set is passed again. Once a column was too far below, others of its row will be, and the
//! pass handles them at once in the blocks that follow.

use super::logits_transform::{ColumnTransform, LeftOutColumns, RowTransform, TransformedBlock};
use super::{BLOCK, BlockScale, ExpBlock, Exponent, NativeElement, RowSoftmax, SavedExponentials, UNITS};
use assay_algebra::arithmetic::Immediate;
use assay_algebra::softmax;
use assay_simd::exp::{Exp, NEAR, SCALE, step};
use assay_simd::{LANES, PackedElement, Simd, SimdTask, UNIT, prefetch, smallest};

/// Number of units whose exponentials are added in f32 before their sum is added in f64.
const GROUP: usize = 8;

/// Sign bit: set in the bit pattern of a gap below 0.
const BELOW_0: u32 = 1 << 31;

/// Bit 30 of an f32's bit pattern: set if the magnitude is at least 2 or the value is NaN.
const AT_LEAST_2: u32 = 1 << 30;

/// The pass over a row that computes one softmax.
pub(super) struct ScoreRow<'r, E> {
    pub(super) row: &'r [E],
    /// Target's column; `None` if another shard of the row has it.
    pub(super) id: Option<usize>,
    pub(super) transform: &'r RowTransform,
    /// Factor `1/T`, with the transform's rate.
    pub(super) inverse_temperature: f64,
    /// Whether all transformed logits are added up too.
    pub(super) sums_logits: bool,
    pub(super) saved: Option<&'r mut SavedExponentials>,
}

impl<E: NativeElement> SimdTask for ScoreRow<'_, E> {
    type Output = RowSoftmax;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> RowSoftmax {
        let Self { row, id, transform, inverse_temperature, sums_logits, saved } = self;
        let target = id.map(|id| (id, row[id]));
        let mut sums = RunningSums::new(simd, transform, target, inverse_temperature, sums_logits);
        let row = &row[..transform.vocab];
        let mut saved = saved.map(|saved| {
            let blocks = row.len().div_ceil(BLOCK);
            saved.exps.resize(blocks, ExpBlock::room());
            saved.blocks.resize(blocks, BlockScale::default());
            (&mut saved.exps[..], &mut saved.blocks[..])
        });
        // Each block's exponentials are relative to the maximum that the sums have after it: the write is told which.
        let mut mapped = TransformedBlock::room();
        for (i, block) in row.chunks(BLOCK).enumerate() {
            let scale = sums.add(simd, i, block, &mut mapped, saved.as_mut().map(|(exps, _)| &mut exps[i].0));
            if let Some((_, blocks)) = &mut saved {
                blocks[i] = scale;
            }
        }
        sums.softmax(simd)
    }
}

/// The pass over an f32 row that computes one softmax and writes its exponentials over the row.
pub(super) struct ScoreRowInPlace<'r> {
    pub(super) row: &'r mut [f32],
    pub(super) id: usize,
    pub(super) transform: &'r RowTransform,
    /// Factor `1/T`, with the transform's rate.
    pub(super) inverse_temperature: f64,
    /// Whether all transformed logits are added up too.
    pub(super) sums_logits: bool,
    pub(super) blocks: &'r mut Vec<BlockScale>,
}

impl SimdTask for ScoreRowInPlace<'_> {
    type Output = RowSoftmax;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> RowSoftmax {
        let Self { row, id, transform, inverse_temperature, sums_logits, blocks } = self;
        let mut sums = RunningSums::new(simd, transform, Some((id, row[id])), inverse_temperature, sums_logits);
        blocks.clear();
        // Exponentials go to a buffer first: a block whose maximum turns out larger is read again.
        let (mut mapped, ExpBlock(mut exps)) = (TransformedBlock::room(), ExpBlock::room());
        for (i, block) in row[..transform.vocab].chunks_mut(BLOCK).enumerate() {
            blocks.push(sums.add(simd, i, block, &mut mapped, Some(&mut exps)));
            block.copy_from_slice(&exps.as_flattened()[..block.len()]);
        }
        sums.softmax(simd)
    }
}

/// Adds the gaps of a block's elements below `max` to sums in f64.
#[inline(always)]
fn with_gaps<S: Simd, E: NativeElement>(simd: S, mut sums: S::Sums, block: &[[E; UNIT]; UNITS], max: f32) -> S::Sums {
    let max = simd.splat(max);
    // A closure here would be compiled without the vector unit, and cost eight times the pass over the row.
    for unit in block {
        let [low, high] = E::load(simd, unit);
        sums = simd.accumulate(simd.accumulate(sums, simd.sub(max, low)), simd.sub(max, high));
    }
    sums
}

pub(super) fn units<E>(block: &[E; BLOCK]) -> &[[E; UNIT]; UNITS] {
    block.as_chunks().0.try_into().expect("a block is whole units")
}

/// The sums of a pass so far, over the columns other than the target.
struct RunningSums<'t, S: Simd> {
    exp: Exp<S>,
    map: Option<ColumnTransform<'t, S>>,
    absent: LeftOutColumns<'t>,
    /// Factor `1/T`, with the transform's rate.
    inverse_temperature: f64,
    /// Unit in which gaps are counted, in logits.
    step: f64,
    /// Largest gap of a column that is [`NEAR`], in steps.
    near: f32,
    target: f32,
    /// Maximum `m` of the columns so far.
    max: f32,
    /// Whether a column so far was too far below the maximum for the exponential's arithmetic.
    far: bool,
    /// Sums `2^64·Σ e_j`, and `2^64·Σ e_j a_j` with `a` in steps, since `m` was last raised.
    running: [S::Sums; 2],
    /// Sums of the columns before `m` was last raised, in f64, also times `2^64` and in steps.
    before: [f64; 2],
    /// Two sums whose difference is that of all transformed logits, the target's among them: the gaps of whole blocks, each below
    /// the maximum at its time, and those maxima with the logits of the last block. `None` if nobody reads it.
    logits: Option<(S::Sums, f64)>,
    transform: &'t RowTransform,
}

impl<'t, S: Simd> RunningSums<'t, S> {
    /// Begins with the target's logit as `m`, or with the least finite number if that is −∞ or in another shard. A NaN
    /// stays.
    #[inline(always)]
    fn new<E: NativeElement>(
        simd: S,
        transform: &'t RowTransform,
        target: Option<(usize, E)>,
        inverse_temperature: f64,
        sums_logits: bool,
    ) -> Self {
        let map = transform.map(simd);
        let absent = transform.absent(target.map(|(id, _)| id));
        // The target's logit passes through the same transform as its column, so that both round alike.
        let target = match (&map, target) {
            (Some(map), Some((id, logit))) => map.column(simd, id, logit),
            (None, Some((_, logit))) => logit.to_f32(),
            (_, None) => f32::NEG_INFINITY,
        };
        Self {
            exp: Exp::new(simd, inverse_temperature),
            map,
            absent,
            inverse_temperature,
            step: step(inverse_temperature),
            near: (NEAR / inverse_temperature / step(inverse_temperature)) as f32,
            target,
            // Beginning with the target spares a rescale for rows whose target is the maximum. The bound by the least
            // finite number keeps `x − max` from being −∞ − (−∞); a NaN fails the comparison and stays.
            max: if target < f32::MIN { f32::MIN } else { target },
            far: false,
            running: [simd.sums(); 2],
            before: [0.0; 2],
            logits: sums_logits.then(|| (simd.sums(), 0.0)),
            transform,
        }
    }

    /// Adds the `i`th block without its left-out columns, and writes its exponentials to `exps` if that is given, each
    /// times its slope. Returns the maximum that they are relative to, and whether all are near.
    #[inline(always)]
    fn add<E: NativeElement>(
        &mut self,
        simd: S,
        i: usize,
        block: &[E],
        mapped: &mut TransformedBlock,
        mut exps: Option<&mut [[f32; UNIT]; UNITS]>,
    ) -> BlockScale {
        block.as_chunks().0.iter().for_each(prefetch);
        // A block that is whole and has no left-out column is read in place; of any other a copy is, whose left-out columns are −∞.
        let mut absent = self.absent.in_block(i).chain(block.len()..BLOCK).peekable();
        let complete = absent.peek().is_none();
        let present;
        let units = match block.try_into() {
            Ok(whole) if complete => units(whole),
            _ => {
                // Columns of a transform are left out after it: before it they must not decide how their neighbours are computed.
                let left_out = if self.map.is_some() { E::from_f32(0.0) } else { E::MINUS_INFINITY };
                let mut copy = [left_out; BLOCK];
                copy[..block.len()].copy_from_slice(block);
                absent.clone().for_each(|j| copy[j] = left_out);
                present = copy;
                units(&present)
            }
        };
        let Some(map) = self.map else {
            let near = self.add_units(simd, units, exps, !complete);
            self.add_logits(simd, i, block, None);
            return BlockScale { max: self.max, near };
        };
        // The softmax is of the transformed logits; saved exponentials are multiplied by the slopes of the cap, since the write needs
        // them so.
        map.block(simd, i, units, mapped, exps.is_some());
        absent.clone().for_each(|j| mapped.set::<E>(j, f32::NEG_INFINITY));
        let near = self.add_units(simd, &mapped.t, exps.as_deref_mut(), !complete);
        if self.logits.is_some() {
            // The target is among the logits that are added up: of a whole vocabulary it alone is left out.
            absent.for_each(|j| mapped.set::<E>(j, self.target));
            self.add_logits(simd, i, block, Some(mapped));
        }
        if let (Some(exps), true) = (exps, map.caps()) {
            let smallest = simd.splat(smallest(1.0));
            for (exps, slopes) in exps.iter_mut().zip(&mapped.slopes) {
                let ([low, high], slopes) = (f32::load(simd, exps), f32::load(simd, slopes));
                let (low, high) = (simd.at_least(low, smallest), simd.at_least(high, smallest));
                f32::store(simd, [simd.mul(low, slopes[0]), simd.mul(high, slopes[1])], exps);
            }
        }
        BlockScale { max: self.max, near: near && !map.caps() }
    }

    /// Adds the transformed logits of the `i`th block, left-out columns among them, if their sum is read. Their gaps below the maximum
    /// are added in vectors: a sum of two of them is rounded at the size of a gap, and not at that of a logit.
    #[inline(always)]
    fn add_logits<E: NativeElement>(&mut self, simd: S, i: usize, block: &[E], mapped: Option<&TransformedBlock>) {
        let Some((gaps, rest)) = &mut self.logits else { return };
        if let Ok(block) = block.try_into() {
            *gaps = match mapped {
                Some(mapped) => with_gaps(simd, *gaps, &mapped.t, self.max),
                None => with_gaps(simd, *gaps, units(block), self.max),
            };
            *rest += BLOCK as f64 * f64::from(self.max);
        } else {
            // The last block is not whole: its columns are few.
            let of_column = |(j, &x): (usize, &E)| self.transform.transformed(i * BLOCK + j, x).0;
            *rest += block.iter().enumerate().map(of_column).sum::<f64>();
        }
    }

    /// Adds a block as if no column were above `m`, and none far below it unless that is to be expected; if that was
    /// wrong, adds it again. Returns whether all columns are known to be [`NEAR`].
    #[inline(always)]
    fn add_units<E: NativeElement>(
        &mut self,
        simd: S,
        block: &[[E; UNIT]; UNITS],
        mut exps: Option<&mut [[f32; UNIT]; UNITS]>,
        expects_far: bool,
    ) -> bool {
        // The first pass over a block assumes that the maximum stays, and checks it by the bits of the gaps.
        let mut far = expects_far || self.far;
        loop {
            let room = exps.as_deref_mut();
            let (sums, right, near) =
                if far { self.walk::<E, true>(simd, block, room) } else { self.walk::<E, false>(simd, block, room) };
            // If the block exceeds the assumed maximum, move the sums to the new one, and add the block column by column.
            let top = if right { f32::MIN } else { largest(simd, block) };
            if top > self.max {
                self.raise(simd, top);
                self.add_singly(simd, block, exps);
                return false;
            }
            // The maximum stays. If the pass handled far columns and still was not right, there is a NaN, which the sums have.
            if right || far {
                self.running = sums;
                return right && near;
            }
            // A column was too far below for the exponential: add the block again, and expect such columns from now on.
            (self.far, far) = (true, true);
        }
    }

    /// Returns the sums with a block, and whether they are right: no column was above `m`, and none far below it unless
    /// `FAR` handles such columns. If they are right, the last says whether all columns are [`NEAR`].
    #[inline(always)]
    fn walk<E: NativeElement, const FAR: bool>(
        &self,
        simd: S,
        block: &[[E; UNIT]; UNITS],
        mut exps: Option<&mut [[f32; UNIT]; UNITS]>,
    ) -> ([S::Sums; 2], bool, bool) {
        // A gap in steps is one fused product and sum; with far columns it is held below the largest that the exponential takes.
        let max = simd.splat(self.max);
        let (max_in_steps, steps_a_unit) =
            (simd.splat((f64::from(self.max) / self.step) as f32), simd.splat((-1.0 / self.step) as f32));
        // The largest bits of all gaps tell after the block whether any was below 0 or too far: the sign bit is above all others.
        let mut seen = simd.splat(0.0);
        let [mut sum, mut weighted] = self.running;
        for group in (0..UNITS).step_by(GROUP) {
            // Sums of a group in f32. They begin at −0, which adds nothing to any number.
            let [mut of_group, mut weighted_of_group] = [[simd.splat(-0.0); 2]; 2];
            for n in (group..group + GROUP).step_by(2) {
                let ([x0, x1], [x2, x3]) = (E::load(simd, &block[n]), E::load(simd, &block[n + 1]));
                let mut gaps = [x0, x1, x2, x3];
                for x in &mut gaps {
                    *x = if FAR { self.exp.gap(simd, max, *x) } else { simd.mul_add(*x, steps_a_unit, max_in_steps) };
                }
                seen = simd.larger_bits(
                    simd.larger_bits(seen, simd.larger_bits(gaps[0], gaps[1])),
                    simd.larger_bits(gaps[2], gaps[3]),
                );
                // Four vectors at a time hide the latency of each step of the exponential.
                let e = self.exp.scaled(simd, gaps);
                for i in 0..4 {
                    of_group[i % 2] = simd.add(of_group[i % 2], e[i]);
                    weighted_of_group[i % 2] = simd.mul_add(e[i], gaps[i], weighted_of_group[i % 2]);
                }
                if let Some(exps) = &mut exps {
                    f32::store(simd, [e[0], e[1]], &mut exps[n]);
                    f32::store(simd, [e[2], e[3]], &mut exps[n + 1]);
                }
            }
            // Sums of groups in f64.
            sum = simd.accumulate(sum, simd.add(of_group[0], of_group[1]));
            weighted = simd.accumulate(weighted, simd.add(weighted_of_group[0], weighted_of_group[1]));
        }
        let right = !simd.any_set(seen, if FAR { BELOW_0 } else { BELOW_0 | AT_LEAST_2 });
        ([sum, weighted], right, !simd.any_set(simd.sub(simd.splat(self.near), seen), BELOW_0))
    }

    /// Makes the sums relative to a new maximum `top`.
    #[inline(always)]
    fn raise(&mut self, simd: S, top: f32) {
        let [mut sum, mut weighted] = self.total(simd);
        // Σ e·(a + gap) = Σ e·a + gap·Σ e, and every e is smaller by the same factor.
        let gap = f64::from(top) - f64::from(self.max);
        let faded = (-gap * self.inverse_temperature).exp();
        weighted += gap / self.step * sum;
        sum *= faded;
        self.before = [sum, faded * weighted];
        self.running = [simd.sums(); 2];
        self.max = top;
    }

    /// Adds the block that has the maximum. Next to an exponential of 1 every rounding counts, so each vector is added
    /// in f64 by itself.
    #[inline(always)]
    fn add_singly<E: NativeElement>(
        &mut self,
        simd: S,
        block: &[[E; UNIT]; UNITS],
        mut exps: Option<&mut [[f32; UNIT]; UNITS]>,
    ) {
        let max = simd.splat(self.max);
        for (n, unit) in block.iter().enumerate() {
            let [low, high] = E::load(simd, unit);
            let gaps = [self.exp.gap(simd, max, low), self.exp.gap(simd, max, high)];
            let e = self.exp.scaled(simd, gaps);
            for i in 0..2 {
                let [sum, weighted] = self.running;
                self.running = [simd.accumulate(sum, e[i]), simd.accumulate(weighted, simd.mul(e[i], gaps[i]))];
            }
            if let Some(exps) = &mut exps {
                f32::store(simd, e, &mut exps[n]);
            }
        }
    }

    /// Returns the sums `2^64·Σ e_j` and `2^64·Σ e_j a_j` over all columns so far.
    #[inline(always)]
    fn total(&self, simd: S) -> [f64; 2] {
        [self.before[0] + simd.total(self.running[0]), self.before[1] + simd.total(self.running[1])]
    }

    /// Finishes the softmax with the target. A NaN among the logits is a NaN in `weighted`, and then in every result.
    #[inline(always)]
    fn softmax(&self, simd: S) -> RowSoftmax {
        // Back from steps to gaps over T, and from 2⁶⁴ times the sums.
        let [sum, weighted] = self.total(simd);
        let others = if weighted.is_nan() { f64::NAN } else { sum / SCALE };
        let weighted = weighted / SCALE * self.step * self.inverse_temperature;
        let (max, target_logit) = (f64::from(self.max), f64::from(self.target));
        let sums = softmax::SoftmaxSums { max, target_logit, others, weighted };
        let end = sums.softmax(&mut Immediate, Some(self.inverse_temperature));
        let exponent = Exponent { max: self.max, inverse_temperature: self.inverse_temperature };
        let logits = self.logits.map_or(0.0, |(gaps, rest)| rest - simd.total(gaps));
        RowSoftmax { exponent, weighted, target_logit, logits, end }
    }
}

/// Returns the largest logit of a block, at least the least finite number; a NaN is ignored.
#[inline(always)]
fn largest<S: Simd, E: NativeElement>(simd: S, block: &[[E; UNIT]; UNITS]) -> f32 {
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
