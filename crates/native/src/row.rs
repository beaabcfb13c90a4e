//! One row of logits: softmax statistics, and dlogits.
//!
//! ```text
//! score    a_j = m − x_j,  e_j = exp(−a_j/T)     Σ e_j for j ≠ y,  Σ e_j a_j        ā = Σ e_j a_j / (S·T)
//! between  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! write    dx_j = e_j · (−G/(S·T))  +  e_j (a_j/T − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! The score is one walk: `m` is the largest logit so far, and what was summed is multiplied by `exp((m_old − m_new)/T)`
//! where a block of columns has a larger one. Sums are f32 over 32 columns, none of which is rounded more than nine times,
//! and f64 over those; f32 over two columns in the block that has the maximum.
//!
//! What bounds it is the number of vector instructions, so the walk has none that looks for a larger maximum or for a
//! column too far below it for the exponential's arithmetic: both show in the two highest bits of its gap, which are
//! or'ed over a block, and only a block where one is set is walked again with care.
//!
//! The exponentials may be kept for the write, each block's relative to the `m` that it was made with: beside the row, or
//! where f32 dlogits go over f32 logits, over those. Where they are not kept, they are made again.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::{bf16, f16};

use super::exp::{Exp, FAR, SCALE, step};
use super::simd::{Isa, LANES, Simd, Streaming, UNIT, Work, prefetch};
use assay_algebra::arithmetic::Immediate;
use assay_algebra::softmax;
use assay_core::problem::Float;
use assay_core::spec::{LossSpec, TemperatureDivides};

/// Units whose exponentials are added in f32, before their sums are in f64.
const GROUP: usize = 8;

/// Units in a block.
const UNITS: usize = 16;

/// Columns that are looked at relative to one maximum.
const BLOCK: usize = UNITS * UNIT;

/// An element of logits that the CPU kernel reads: f32, bf16 or f16.
pub trait Element: Packed {}

impl<E: Packed> Element for E {}

/// `2^16 + 1`, by which [`Simd::high_product`] takes off all but eight bits.
const SPLIT: f32 = 65_537.0;

/// What products are made with.
#[derive(Clone, Copy)]
pub struct Factor<S: Simd> {
    value: S::Lanes,
    /// [`SPLIT`] times it.
    split: S::Lanes,
    /// What is below has a product of 0.
    smallest: S::Lanes,
}

/// How elements are loaded and stored; widened to f32 exactly, narrowed to nearest even.
pub trait Packed: Float + PartialEq + Pod {
    /// −∞
    const MINUS_INFINITY: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// Rounded.
    fn from_f32(x: f32) -> Self;
    /// In an order of the type's own.
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2];
    /// In the same. Nothing is said of a NaN.
    fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]);
    /// `x·factor`, or 0 where `x` is below the factor's smallest, in the same.
    #[inline(always)]
    fn store_products<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], by: Factor<S>, to: &mut [Self; UNIT]) {
        let (low, high) = (simd.at_least(low, by.smallest), simd.at_least(high, by.smallest));
        Self::store(simd, [simd.mul(low, by.value), simd.mul(high, by.value)], to);
    }
    /// A row as what exponentials may be kept in, if it is.
    fn as_floats(_row: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

impl Packed for f32 {
    const MINUS_INFINITY: Self = Self::NEG_INFINITY;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2] {
        let (halves, _) = from.as_chunks();
        [simd.load(&halves[0]), simd.load(&halves[1])]
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], to: &mut [Self; UNIT]) {
        let (halves, _) = to.as_chunks_mut();
        simd.store(low, &mut halves[0]);
        simd.store(high, &mut halves[1]);
    }
    fn as_floats(row: &mut [Self]) -> Option<&mut [f32]> {
        Some(row)
    }
}

macro_rules! sixteen_bits {
    ($type:ident, $load:ident, $store:ident $(, $products:item)?) => {
        impl Packed for $type {
            const MINUS_INFINITY: Self = Self::NEG_INFINITY;
            fn to_f32(self) -> f32 {
                $type::to_f32(self)
            }
            fn from_f32(x: f32) -> Self {
                $type::from_f32(x)
            }
            #[inline(always)]
            fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2] {
                simd.$load(from)
            }
            #[inline(always)]
            fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]) {
                simd.$store(x, to);
            }
            $($products)?
        }
    };
}
sixteen_bits!(
    bf16,
    load_bf16,
    store_bf16,
    #[inline(always)]
    fn store_products<S: Simd>(simd: S, [even, odd]: [S::Lanes; 2], by: Factor<S>, to: &mut [Self; UNIT]) {
        let even = simd.high_product(even, by.smallest, by.value, by.split);
        let odd = simd.high_product(odd, by.smallest, by.value, by.split);
        simd.truncate_bf16([even, odd], to);
    }
);
sixteen_bits!(f16, load_f16, store_f16);

/// The settings that all rows share.
#[derive(Clone, Copy)]
pub(super) struct Softmaxes {
    isa: Isa,
    /// `1/T`.
    inverse_temperature: f64,
    /// Whether entropy needs a softmax of its own.
    two: bool,
    /// Whether entropy may have a part in the loss.
    bonus: bool,
}

/// The exponentials of a block, on whole cache lines.
#[derive(Clone)]
#[repr(align(64))]
struct Exps([[f32; UNIT]; UNITS]);

/// Exponentials of the row that was last scored, under the softmax that logp is of.
#[derive(Default)]
pub(super) struct Kept {
    /// Whether they are where the row's logits were.
    over_logits: bool,
    /// `2^64·e_j`, 0 for the target, by blocks, where they are beside the row.
    exps: Vec<Exps>,
    /// The `m` of each block.
    maxima: Vec<f32>,
}

/// What a row's softmaxes come to.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    logp_softmax: Softmax,
    entropy_softmax: Softmax,
    pub(super) logp: f64,
    pub(super) entropy: f64,
}

/// A row's softmax.
#[derive(Clone, Copy)]
struct Softmax {
    /// `m`.
    max: f32,
    /// `1/T`.
    inverse_temperature: f64,
    end: softmax::Softmax<f64>,
}

/// The derivatives of the loss that a row's dlogits are made of.
#[derive(Clone, Copy)]
pub(super) struct Gradients {
    pub(super) logp: f64,
    pub(super) entropy: f64,
}

/// A row of logits and where its dlogits go.
pub(super) struct Row<'r, E> {
    /// `None`: they are where dlogits go.
    pub(super) logits: Option<&'r [E]>,
    pub(super) dlogits: &'r mut [E],
}

impl<E> Row<'_, E> {
    pub(super) fn logits(&self) -> &[E] {
        self.logits.unwrap_or(self.dlogits)
    }
}

impl Softmax {
    /// What gaps are counted in.
    fn step(&self) -> f64 {
        step(self.inverse_temperature)
    }

    /// As far below the maximum as an exponential is reckoned, in steps.
    fn farthest(&self) -> f64 {
        FAR / self.inverse_temperature / self.step()
    }

    /// `exp((max − m)/T)`: by how much exponentials relative to `max` were larger.
    fn faded(&self, max: f32) -> f64 {
        ((f64::from(max) - f64::from(self.max)) * self.inverse_temperature).exp()
    }
}

impl Softmaxes {
    pub(super) fn of(spec: &LossSpec, isa: Isa) -> Self {
        Self {
            isa,
            inverse_temperature: 1.0 / spec.temperature,
            two: spec.temperature_divides == TemperatureDivides::Logp && spec.temperature != 1.0,
            bonus: spec.entropy_coef != 0.0,
        }
    }

    /// Reads the row of an unmasked token.
    pub(super) fn score<E: Element>(self, row: &[E], id: usize) -> Scores {
        self.score_by(|inverse_temperature, _| self.isa.run(Walk { row, id, inverse_temperature, kept: None }))
    }

    /// The same, and keeps its exponentials: over its logits where those are f32, dlogits go there too, and nothing will ask
    /// for them again.
    pub(super) fn score_and_keep<E: Element>(self, row: &mut Row<E>, id: usize, kept: &mut Kept) -> Scores {
        kept.over_logits = false;
        if row.logits.is_none()
            && !self.two
            && !self.bonus
            && let Some(row) = E::as_floats(row.dlogits)
        {
            kept.over_logits = true;
            let inverse_temperature = self.inverse_temperature;
            return self.score_by(|_, _| {
                self.isa.run(WalkOver { row: &mut *row, id, inverse_temperature, maxima: &mut kept.maxima })
            });
        }
        let row = row.logits();
        self.score_by(|inverse_temperature, keeps| {
            let kept = if keeps { Some(&mut *kept) } else { None };
            self.isa.run(Walk { row, id, inverse_temperature, kept })
        })
    }

    /// By a walk under `1/T`, which keeps exponentials or not.
    fn score_by(self, mut walk: impl FnMut(f64, bool) -> Softmax) -> Scores {
        let (logp_softmax, entropy_softmax, logp_factor) = if self.two {
            (walk(1.0, true), walk(self.inverse_temperature, false), self.inverse_temperature)
        } else {
            let shared = walk(self.inverse_temperature, true);
            (shared, shared, 1.0)
        };
        Scores {
            logp_softmax,
            entropy_softmax,
            logp: logp_softmax.end.logp(&mut Immediate) * logp_factor,
            entropy: entropy_softmax.end.entropy(&mut Immediate),
        }
    }

    /// Writes the dlogits of an unmasked token, from the exponentials that its `score` kept if they are given.
    pub(super) fn write<E: Element>(
        self,
        row: &mut Row<E>,
        id: usize,
        scores: &Scores,
        kept: Option<&Kept>,
        grad: Gradients,
    ) {
        // A derivative of 0 leaves its term out, so that nothing multiplies it into a NaN.
        if grad.logp == 0.0 && grad.entropy == 0.0 {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        let (logp, entropy) = (&scores.logp_softmax, &scores.entropy_softmax);
        let (of_logp, of_entropy) = (logp.end, entropy.end);
        let policy = if grad.logp == 0.0 { 0.0 } else { grad.logp * self.inverse_temperature / of_logp.sum };
        let bonus = if grad.entropy == 0.0 { 0.0 } else { grad.entropy * self.inverse_temperature / of_entropy.sum };
        let factors = Factors {
            policy: -policy,
            // e (a/T − ā) · bonus = e · (bonus·a/T − bonus·ā)
            slope: bonus * self.inverse_temperature * step(self.inverse_temperature),
            offset: if bonus == 0.0 { 0.0 } else { -bonus * of_entropy.mean_gap },
        };
        let target = if grad.logp == 0.0 { 0.0 } else { policy * of_logp.others };
        let target = match of_entropy.target {
            q if bonus == 0.0 || q == 0.0 => target,
            q => target + q * (factors.offset + bonus * of_entropy.target_gap),
        };
        if factors.in_range(entropy) {
            let two = self.two && bonus != 0.0;
            let kept = kept.filter(|_| !two);
            self.isa.run(Write { row, logp, entropy, two, kept, factors });
        } else {
            factors.write_carefully(row, logp, entropy, kept);
        }
        row.dlogits[id] = E::from_f32(target as f32);
    }
}

/// Scores a row under one softmax.
struct Walk<'r, E> {
    row: &'r [E],
    id: usize,
    /// `1/T`.
    inverse_temperature: f64,
    kept: Option<&'r mut Kept>,
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
struct WalkOver<'r> {
    row: &'r mut [f32],
    id: usize,
    /// `1/T`.
    inverse_temperature: f64,
    /// The `m` of each block.
    maxima: &'r mut Vec<f32>,
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
            running: [simd.sums(); 2],
            before: [0.0; 2],
        }
    }

    /// Adds a block, all but its target, and writes down its exponentials.
    #[inline(always)]
    fn add<E: Element>(&mut self, simd: S, block: &[E], target: Option<usize>, exps: &mut [[f32; UNIT]; UNITS]) {
        if let (Ok(whole), None) = (block.try_into(), target) {
            self.add_whole(simd, units(whole), exps);
            return;
        }
        let mut without_target = [E::MINUS_INFINITY; BLOCK];
        without_target[..block.len()].copy_from_slice(block);
        if let Some(target) = target {
            without_target[target] = E::MINUS_INFINITY;
        }
        self.add_with_care(simd, units(&without_target), exps);
    }

    /// Adds a block as if no column were above `m` or far below it, and where one is, again.
    #[inline(always)]
    fn add_whole<E: Element>(&mut self, simd: S, block: &[[E; UNIT]; UNITS], exps: &mut [[f32; UNIT]; UNITS]) {
        let (max, steps_a_unit) =
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
                    *x = simd.mul_add(*x, steps_a_unit, max);
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
        if simd.any_outside(seen) {
            self.add_with_care(simd, block, exps);
        } else {
            self.running = [sum, weighted];
        }
    }

    /// Adds a block of any logits.
    #[inline(always)]
    fn add_with_care<E: Element>(&mut self, simd: S, block: &[[E; UNIT]; UNITS], exps: &mut [[f32; UNIT]; UNITS]) {
        let top = largest(simd, block);
        let raises = top > self.max;
        if raises {
            // What was summed moves to the new maximum. Beside an exponential of 1 every rounding counts, so each vector is
            // added in f64 by itself.
            let [mut sum, mut weighted] = self.total(simd);
            let gap = f64::from(top) - f64::from(self.max);
            let faded = (-gap * self.inverse_temperature).exp();
            weighted += gap / self.step * sum;
            sum *= faded;
            self.before = [sum, faded * weighted];
            self.running = [simd.sums(); 2];
            self.max = top;
        }
        let max = simd.splat(self.max);
        let [mut of_group, mut weighted_of_group] = [simd.splat(-0.0); 2];
        for (i, (unit, exps)) in block.iter().zip(exps).enumerate() {
            let [low, high] = E::load(simd, unit);
            let gaps = [self.exp.gap(simd, max, low), self.exp.gap(simd, max, high)];
            let e = self.exp.scaled(simd, gaps);
            for i in 0..2 {
                of_group = simd.add(of_group, e[i]);
                weighted_of_group = simd.mul_add(e[i], gaps[i], weighted_of_group);
                if raises {
                    self.accumulate(simd, &mut of_group, &mut weighted_of_group);
                }
            }
            f32::store(simd, e, exps);
            if (i + 1) % (GROUP / 2) == 0 {
                self.accumulate(simd, &mut of_group, &mut weighted_of_group);
            }
        }
    }

    /// Moves sums of a few vectors to those in f64.
    #[inline(always)]
    fn accumulate(&mut self, simd: S, sum: &mut S::Lanes, weighted: &mut S::Lanes) {
        self.running = [simd.accumulate(self.running[0], *sum), simd.accumulate(self.running[1], *weighted)];
        [*sum, *weighted] = [simd.splat(-0.0); 2];
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

/// `dx_j = e_j·policy + q_j·(slope·a_j + offset)`, with `a` in steps and `q` of the softmax that entropy is of.
#[derive(Clone, Copy)]
struct Factors {
    policy: f64,
    slope: f64,
    offset: f64,
}

impl Factors {
    /// Whether they are numbers and no product of them with an exponential can be NaN: no gap is beyond [`FAR`].
    fn in_range(self, entropy: &Softmax) -> bool {
        let largest = self.policy.abs() + self.offset.abs() + self.slope.abs() * entropy.farthest();
        (largest as f32).is_finite()
    }

    /// A column of probability 0 has no part even in an infinite gradient.
    fn write_carefully<E: Element>(self, row: &mut Row<E>, logp: &Softmax, entropy: &Softmax, kept: Option<&Kept>) {
        if let Some(kept) = kept
            && kept.over_logits
        {
            for (i, dlogits) in row.dlogits.chunks_mut(BLOCK).enumerate() {
                let faded = logp.faded(kept.maxima[i]) / SCALE;
                for x in dlogits {
                    let e = (f64::from(x.to_f32()) * faded) as f32;
                    // What stands there for a NaN is any number.
                    let has_part = e != 0.0 || self.policy.is_nan();
                    *x = E::from_f32(if has_part { e * self.policy as f32 } else { 0.0 });
                }
            }
            return;
        }
        let term = |softmax: &Softmax, x: f32, factor: &dyn Fn(f64) -> f64| {
            let gap = f64::from(softmax.max - x);
            let e = (-gap * softmax.inverse_temperature).exp() as f32;
            if e == 0.0 { 0.0 } else { e * factor(gap / softmax.step()) as f32 }
        };
        for j in 0..row.dlogits.len() {
            let x = row.logits()[j].to_f32();
            let policy = if self.policy == 0.0 { 0.0 } else { term(logp, x, &|_| self.policy) };
            let bonus = |a: f64| self.slope * a + self.offset;
            let bonus = if self.slope == 0.0 { 0.0 } else { term(entropy, x, &bonus) };
            row.dlogits[j] = E::from_f32(policy + bonus);
        }
    }
}

/// The smallest exponential, times 2^64, that is a normal number without that and times `factor` too. Smaller ones count for
/// 0: a processor takes a hundred times as long over numbers below the normal ones, which end at 1.2e-38.
fn smallest(factor: f64) -> f32 {
    // So much more that no rounding leads below.
    let margin = 1.0 + 1e-6;
    (f64::from(f32::MIN_POSITIVE) * SCALE / factor.abs().min(1.0) * margin) as f32
}

/// Writes dlogits, the target's apart. Those below 1.2e-38 are 0; where entropy has a part in them, almost all of those.
struct Write<'w, 'r, E> {
    row: &'w mut Row<'r, E>,
    logp: &'w Softmax,
    entropy: &'w Softmax,
    /// Whether both softmaxes have a part in it; else only `logp`'s, which is then the same as `entropy`'s or alone.
    two: bool,
    kept: Option<&'w Kept>,
    factors: Factors,
}

impl<E: Element> Work for Write<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) {
        const NOT_KEPT: &[[f32; UNIT]; UNITS] = &[[0.0; UNIT]; UNITS];
        let Factors { policy, slope, offset } = self.factors;
        let streaming = Streaming::begin();
        match self.kept {
            _ if self.two => {
                let largest = offset.abs() + slope.abs() * self.entropy.farthest();
                let [logp, entropy] = [Again::of(simd, self.logp, policy), Again::of(simd, self.entropy, largest)];
                let policy = simd.splat(policy as f32);
                let factors = [simd.splat(slope as f32), simd.splat(offset as f32)];
                write(
                    simd,
                    &streaming,
                    self.row.logits,
                    self.row.dlogits,
                    NOT_KEPT,
                    &Two { logp, entropy, policy, factors },
                );
            }
            None => {
                let largest = (policy + offset).abs() + slope.abs() * self.logp.farthest();
                let factors = [simd.splat(slope as f32), simd.splat((policy + offset) as f32)];
                let again = One { softmax: Again::of(simd, self.logp, largest), factors };
                write(simd, &streaming, self.row.logits, self.row.dlogits, NOT_KEPT, &again);
            }
            Some(kept) => {
                let again = Again::of(simd, self.logp, policy + offset);
                let farthest = self.logp.farthest();
                let (mut since, mut faded) = (self.logp.max, 1.0);
                for (i, dlogits) in self.row.dlogits.chunks_mut(BLOCK).enumerate() {
                    if kept.maxima[i] != since {
                        since = kept.maxima[i];
                        faded = self.logp.faded(since);
                    }
                    let [slope, factor] = [slope * faded, (policy + offset) * faded];
                    let largest = factor.abs() + slope.abs() * farthest;
                    let again = Again { smallest: simd.splat(smallest(largest)), ..again };
                    let factors = [simd.splat(slope as f32), simd.splat(factor as f32)];
                    let scaled = (factor / SCALE) as f32;
                    if kept.over_logits {
                        let factors = if scaled.is_normal() {
                            [simd.splat(scaled), simd.splat(1.0)]
                        } else {
                            [again.unscale, factors[1]]
                        };
                        let over = Over { factors, smallest: again.smallest };
                        write(simd, &streaming, None, dlogits, NOT_KEPT, &over);
                        continue;
                    }
                    let logits = self.row.logits.map(|logits| &logits[i * BLOCK..][..dlogits.len()]);
                    let Exps(exps) = &kept.exps[i];
                    if let (true, Some(scaled)) = (slope == 0.0, Scaled::by(simd, scaled)) {
                        write(simd, &streaming, logits, dlogits, exps, &scaled);
                    } else {
                        write(simd, &streaming, logits, dlogits, exps, &Sloped { again, factors });
                    }
                }
            }
        }
    }
}

/// How the dlogits of a unit come from its logits, or from the exponentials that were kept.
trait Unit<S: Simd> {
    /// Whether logits have a part in it.
    const READS_LOGITS: bool = true;

    /// Over the logits, or what stands for them.
    fn write<E: Element>(&self, simd: S, logits: &mut [E; UNIT], exps: &[f32; UNIT]);
}

/// Writes a row, or the block of one that `exps` are of. Where dlogits do not go over the logits, they go past the caches,
/// which have no use for them.
#[inline(always)]
fn write<S: Simd, E: Element, U: Unit<S>>(
    simd: S,
    streaming: &Streaming,
    logits: Option<&[E]>,
    dlogits: &mut [E],
    exps: &[[f32; UNIT]; UNITS],
    unit: &U,
) {
    if let Some(logits) = logits {
        for (from, to) in logits.chunks(BLOCK).zip(dlogits.chunks_mut(BLOCK)) {
            let mut block = [E::MINUS_INFINITY; BLOCK];
            if U::READS_LOGITS {
                block[..from.len()].copy_from_slice(from);
            }
            for (to, exps) in block.as_chunks_mut().0.iter_mut().zip(exps) {
                unit.write(simd, to, exps);
            }
            streaming.copy(cast_slice(&block[..to.len()]), cast_slice_mut(to));
        }
        return;
    }
    for block in dlogits.chunks_mut(BLOCK) {
        let (units, tail) = block.as_chunks_mut();
        let mut exps = exps.iter();
        for (to, exps) in units.iter_mut().zip(&mut exps) {
            unit.write(simd, to, exps);
        }
        if let (false, Some(exps)) = (tail.is_empty(), exps.next()) {
            let mut last = [E::MINUS_INFINITY; UNIT];
            last[..tail.len()].copy_from_slice(tail);
            unit.write(simd, &mut last, exps);
            tail.copy_from_slice(&last[..tail.len()]);
        }
    }
}

/// `(e_j·first)·second`, of exponentials that were kept over the logits.
struct Over<S: Simd> {
    factors: [S::Lanes; 2],
    smallest: S::Lanes,
}

impl<S: Simd> Unit<S> for Over<S> {
    #[inline(always)]
    fn write<E: Element>(&self, simd: S, exps: &mut [E; UNIT], _: &[f32; UNIT]) {
        let [first, second] = self.factors;
        let [low, high] = E::load(simd, exps);
        let (low, high) = (simd.at_least(low, self.smallest), simd.at_least(high, self.smallest));
        E::store(simd, [simd.mul(simd.mul(low, first), second), simd.mul(simd.mul(high, first), second)], exps);
    }
}

/// `e_j·factor`, of exponentials that were kept.
struct Scaled<S: Simd>(Factor<S>);

impl<S: Simd> Scaled<S> {
    /// Of `2^-64·factor`, where that is a normal number and no product is out of range on the way.
    #[inline(always)]
    fn by(simd: S, factor: f32) -> Option<Self> {
        let split = factor * SPLIT;
        // An exponential is 2^64 at most.
        let in_range = factor.is_normal() && (split * 2.0 * SCALE as f32).is_finite();
        in_range.then_some(Self(Factor {
            value: simd.splat(factor),
            split: simd.splat(split),
            smallest: simd.splat(smallest(f64::from(factor) * SCALE)),
        }))
    }
}

impl<S: Simd> Unit<S> for Scaled<S> {
    const READS_LOGITS: bool = false;

    #[inline(always)]
    fn write<E: Element>(&self, simd: S, logits: &mut [E; UNIT], exps: &[f32; UNIT]) {
        E::store_products(simd, f32::load(simd, exps), self.0, logits);
    }
}

/// `e_j·(slope·a_j + factor)`, of exponentials that were kept.
struct Sloped<S: Simd> {
    again: Again<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Unit<S> for Sloped<S> {
    #[inline(always)]
    fn write<E: Element>(&self, simd: S, logits: &mut [E; UNIT], exps: &[f32; UNIT]) {
        let [slope, factor] = self.factors;
        let [low, high] = E::load(simd, logits);
        let [e_low, e_high] = f32::load(simd, exps);
        let low = simd.mul_add(self.again.gap(simd, low), slope, factor);
        let high = simd.mul_add(self.again.gap(simd, high), slope, factor);
        let (e_low, e_high) = (self.again.unscaled(simd, e_low), self.again.unscaled(simd, e_high));
        E::store(simd, [simd.mul(e_low, low), simd.mul(e_high, high)], logits);
    }
}

/// `e_j·(slope·a_j + factor)`.
struct One<S: Simd> {
    softmax: Again<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Unit<S> for One<S> {
    #[inline(always)]
    fn write<E: Element>(&self, simd: S, logits: &mut [E; UNIT], _: &[f32; UNIT]) {
        let [low, high] = E::load(simd, logits);
        let [low, high] = [self.softmax.sloped(simd, low, self.factors), self.softmax.sloped(simd, high, self.factors)];
        E::store(simd, [low, high], logits);
    }
}

/// `e_j·policy + q_j·(slope·a_j + offset)`.
struct Two<S: Simd> {
    logp: Again<S>,
    entropy: Again<S>,
    policy: S::Lanes,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Two<S> {
    #[inline(always)]
    fn sum(&self, simd: S, x: S::Lanes) -> S::Lanes {
        let e = self.logp.exp(simd, self.logp.gap(simd, x));
        simd.mul_add(e, self.policy, self.entropy.sloped(simd, x, self.factors))
    }
}

impl<S: Simd> Unit<S> for Two<S> {
    #[inline(always)]
    fn write<E: Element>(&self, simd: S, logits: &mut [E; UNIT], _: &[f32; UNIT]) {
        let [low, high] = E::load(simd, logits);
        E::store(simd, [self.sum(simd, low), self.sum(simd, high)], logits);
    }
}

/// The exponentials of a softmax, once more.
#[derive(Clone, Copy)]
struct Again<S: Simd> {
    exp: Exp<S>,
    max: S::Lanes,
    unscale: S::Lanes,
    smallest: S::Lanes,
}

impl<S: Simd> Again<S> {
    /// To be multiplied with what is at most `largest`.
    #[inline(always)]
    fn of(simd: S, softmax: &Softmax, largest: f64) -> Self {
        Self {
            exp: Exp::new(simd, softmax.inverse_temperature),
            max: simd.splat(softmax.max),
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

    /// `e` of `2^64·e`.
    #[inline(always)]
    fn unscaled(&self, simd: S, e: S::Lanes) -> S::Lanes {
        simd.mul(simd.at_least(e, self.smallest), self.unscale)
    }

    /// `e·(slope·a + factor)`
    #[inline(always)]
    fn sloped(&self, simd: S, x: S::Lanes, [slope, factor]: [S::Lanes; 2]) -> S::Lanes {
        let a = self.gap(simd, x);
        simd.mul(self.exp(simd, a), simd.mul_add(a, slope, factor))
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Products of `exps` and a factor, in bf16, if the factor is in range.
    struct Products<'x>(&'x [f32; UNIT], f32);

    impl Work for Products<'_> {
        type Output = Option<[bf16; UNIT]>;

        #[inline(always)]
        fn on<S: Simd>(self, simd: S) -> Option<[bf16; UNIT]> {
            let mut products = [bf16::ZERO; UNIT];
            Scaled::by(simd, self.1)?.write(simd, &mut products, self.0);
            Some(products)
        }
    }

    #[test]
    fn products_are_rounded_once_to_the_nearest_bf16() {
        let mut rng = ChaCha8Rng::seed_from_u64(6);
        for case in 0..(if cfg!(miri) { 20 } else { 20_000 }) {
            let mut exps: [f32; UNIT] = std::array::from_fn(|_| rng.random_range(-60.0_f32..64.0).exp2());
            exps[..5].copy_from_slice(&[0.0, 1.0, 1.0 + f32::EPSILON, 2.0 - f32::EPSILON, 257.0 / 256.0]);
            let factor = match case % 4 {
                0 => 1.0,
                1 => -(1.0 + f32::EPSILON),
                2 => 1.0 - f32::EPSILON / 2.0,
                _ => rng.random_range(-4.0_f32..4.0),
            };
            // In the order in which they are stored.
            let exact = |j: usize| f64::from(exps[j / 2 + j % 2 * LANES]) * f64::from(factor);
            for isa in Isa::available() {
                for (j, product) in isa.run(Products(&exps, factor)).unwrap().into_iter().enumerate() {
                    let (exact, product) = (exact(j), f64::from(product.to_f32()));
                    let half_ulp = if exact == 0.0 { 0.0 } else { (exact.abs().log2().floor() - 8.0).exp2() };
                    assert!((product - exact).abs() <= half_ulp, "{isa}: {exact:e} as {product:e}");
                }
            }
        }
    }

    #[test]
    fn factors_are_in_range_as_long_as_no_product_overflows_or_loses_bits() {
        let power = |exponent: i32| f64::from(exponent).exp2() as f32;
        let largest = [power(64); UNIT];
        for isa in Isa::available() {
            let product = |factor: f32| isa.run(Products(&largest, factor)).map(|products| products[0].to_f32());
            for factor in [power(-126), -power(-126), 1.0, 1.75 * power(46), -1.75 * power(46)] {
                assert_eq!(product(factor), Some(factor * power(64)), "{isa}: {factor:e}");
            }
            for factor in [0.0, power(-127), power(47), -power(47), power(127), f32::INFINITY, f32::NAN] {
                assert_eq!(product(factor), None, "{isa}: {factor:e}");
            }
        }
    }

    /// Dlogits of a row that goes down to e^-110 of its largest, which is the target, against f64.
    fn dlogits_are_normal_numbers_or_0<E: Element>(isa: Isa, keeps: bool, entropy_coef: f64) {
        let columns = BLOCK + 50;
        let logits: Vec<E> = (0..columns).map(|j| E::from_f32(-110.0 * j as f32 / columns as f32)).collect();
        let gaps: Vec<f64> = logits.iter().map(|x| -f64::from(x.to_f32())).collect();
        let (mut dlogits, mut kept) = (logits.clone(), Kept::default());
        let mut row = Row { logits: None, dlogits: &mut dlogits };
        let softmaxes = Softmaxes::of(&LossSpec { entropy_coef, ..LossSpec::default() }, isa);
        let grad = Gradients { logp: 1e-3, entropy: entropy_coef };
        if keeps {
            let scores = softmaxes.score_and_keep(&mut row, 0, &mut kept);
            softmaxes.write(&mut row, 0, &scores, Some(&kept), grad);
        } else {
            softmaxes.write(&mut row, 0, &softmaxes.score(&logits, 0), None, grad);
        }
        let sum: f64 = gaps.iter().map(|a| (-a).exp()).sum();
        let mean_gap = gaps.iter().map(|a| (-a).exp() * a).sum::<f64>() / sum;
        for (j, (&a, dx)) in gaps.iter().zip(dlogits).enumerate().skip(1) {
            let exact = (-a).exp() / sum * (entropy_coef * (a - mean_gap) - grad.logp);
            let (dx, case) = (dx.to_f32(), format!("{isa}, {:?}, column {j}, kept {keeps}, {entropy_coef}", E::DTYPE));
            // The part of entropy differs from column to column, so that a few slip through.
            assert!(dx == 0.0 || dx.is_normal() || entropy_coef != 0.0, "{case}: {dx:e}");
            let error = (f64::from(dx) - exact).abs();
            let allowed = if dx == 0.0 {
                f32::MIN_POSITIVE.into()
            } else {
                exact.abs() * if size_of::<E>() == 2 { 2.0_f64.powi(-8) } else { 1e-5 }
            };
            assert!(error <= allowed, "{case}: {dx:e} for {exact:e}");
        }
    }

    #[test]
    fn dlogits_below_the_normal_numbers_are_0_and_no_others() {
        for isa in Isa::available() {
            for (keeps, entropy_coef) in [(true, 0.0), (false, 0.0), (true, 1e-3), (false, 1e-3)] {
                dlogits_are_normal_numbers_or_0::<f32>(isa, keeps, entropy_coef);
                dlogits_are_normal_numbers_or_0::<bf16>(isa, keeps, entropy_coef);
            }
        }
    }
}
