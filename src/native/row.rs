//! One row of logits: softmax statistics, and dlogits.
//!
//! ```text
//! score    t_j = (x_j − m)/T     e_j = exp(t_j)     Σ e_j for j ≠ y,  Σ e_j t_j         a_j = −t_j,  ā = −Σ e_j t_j / S
//! between  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! write    dx_j = e_j · (−G/(S·T))  +  e_j (a_j − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! The score is one walk: `m` is the largest logit so far, and what was summed is multiplied by `exp((m_old − m_new)/T)`
//! where a block of columns has a larger one. Sums are f32 over 16 columns, none of which is rounded more than eight times,
//! and f64 over those; that of `e_j t_j`, in which the largest has no part, f32 over 64.
//!
//! The exponentials may be kept for the write, each block's relative to the `m` that it was made with; where they are not,
//! they are made again.

use half::{bf16, f16};

use super::exp::{Exp, FLOOR, SCALE};
use super::simd::{Isa, Simd, UNIT, Work};
use crate::problem::Float;
use crate::spec::{LossSpec, TemperatureDivides};

/// Units whose exponentials are added in f32, before their sums are in f64.
const GROUP: usize = 4;

/// Units in a block.
const UNITS: usize = 16;

/// Columns that are looked at relative to one maximum.
const BLOCK: usize = UNITS * UNIT;

/// An element of logits that the CPU kernel reads: f32, bf16 or f16.
pub trait Element: Packed {}

impl<E: Packed> Element for E {}

/// How elements are loaded and stored; widened to f32 exactly, narrowed to nearest even.
pub trait Packed: Float + PartialEq {
    /// −∞
    const MINUS_INFINITY: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// Rounded.
    fn from_f32(x: f32) -> Self;
    /// In an order of the type's own.
    fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2];
    /// In the same.
    fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]);
}

macro_rules! packed {
    ($type:ty, $minus_infinity:expr, $widen:expr, $narrow:expr, $load:ident, $store:ident) => {
        impl Packed for $type {
            const MINUS_INFINITY: Self = $minus_infinity;
            fn to_f32(self) -> f32 {
                $widen(self)
            }
            fn from_f32(x: f32) -> Self {
                $narrow(x)
            }
            #[inline(always)]
            fn load<S: Simd>(simd: S, from: &[Self; UNIT]) -> [S::Lanes; 2] {
                simd.$load(from)
            }
            #[inline(always)]
            fn store<S: Simd>(simd: S, x: [S::Lanes; 2], to: &mut [Self; UNIT]) {
                simd.$store(x, to);
            }
        }
    };
}
packed!(f32, f32::NEG_INFINITY, |x| x, |x| x, load_f32, store_f32);
packed!(bf16, bf16::NEG_INFINITY, bf16::to_f32, bf16::from_f32, load_bf16, store_bf16);
packed!(f16, f16::NEG_INFINITY, f16::to_f32, f16::from_f32, load_f16, store_f16);

/// The settings that all rows share.
#[derive(Clone, Copy)]
pub(super) struct Softmaxes {
    isa: Isa,
    /// `1/T`.
    inverse_temperature: f64,
    /// Whether entropy needs a softmax of its own.
    two: bool,
}

/// Exponentials of the row that was last scored, under the softmax that logp is of.
#[derive(Default)]
pub(super) struct Kept {
    /// `2^26·e_j`, 0 for the target; whole blocks.
    exps: Vec<f32>,
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

/// Sums over one row of exponentials.
#[derive(Clone, Copy)]
struct Softmax {
    /// `m`.
    max: f32,
    /// `1/T`, rounded.
    inverse_temperature: f32,
    /// `t_y`.
    target_exponent: f64,
    /// `e_y`.
    target: f64,
    /// `Σ_{j≠y} e_j`.
    others: f64,
    /// `S`.
    sum: f64,
    /// `ln S`.
    log_sum: f64,
    /// `ā`.
    mean_gap: f64,
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

impl Softmaxes {
    pub(super) fn of(spec: &LossSpec, isa: Isa) -> Self {
        Self {
            isa,
            inverse_temperature: 1.0 / spec.temperature,
            two: spec.temperature_divides == TemperatureDivides::Logp && spec.temperature != 1.0,
        }
    }

    /// Reads the row of an unmasked token.
    pub(super) fn score<E: Element>(self, row: &[E], id: usize, kept: Option<&mut Kept>) -> Scores {
        let walk = |inverse_temperature, kept| self.isa.run(Walk { row, id, inverse_temperature, kept });
        let tempered = self.inverse_temperature as f32;
        let (logp_softmax, entropy_softmax, logp_factor) = if self.two {
            (walk(1.0, kept), walk(tempered, None), self.inverse_temperature)
        } else {
            let shared = walk(tempered, kept);
            (shared, shared, 1.0)
        };
        Scores {
            logp_softmax,
            entropy_softmax,
            logp: (logp_softmax.target_exponent - logp_softmax.log_sum) * logp_factor,
            entropy: entropy_softmax.log_sum + entropy_softmax.mean_gap,
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
        let policy = if grad.logp == 0.0 { 0.0 } else { grad.logp * self.inverse_temperature / logp.sum };
        let bonus = if grad.entropy == 0.0 { 0.0 } else { grad.entropy * self.inverse_temperature / entropy.sum };
        let factors = Factors {
            policy: -policy,
            // e (a − ā) · bonus = e · (−bonus·t − bonus·ā)
            slope: -bonus,
            offset: if bonus == 0.0 { 0.0 } else { -bonus * entropy.mean_gap },
        };
        let target = if grad.logp == 0.0 { 0.0 } else { policy * logp.others };
        let target = match entropy.target {
            q if bonus == 0.0 || q == 0.0 => target,
            q => target + q * (factors.offset - bonus * entropy.target_exponent),
        };
        if factors.in_range() {
            let two = self.two && bonus != 0.0;
            let kept = kept.filter(|_| !two);
            self.isa.run(Write { row, logp, entropy, two, kept, factors });
        } else {
            factors.write_carefully(row, logp, entropy);
        }
        row.dlogits[id] = E::from_f32(target as f32);
    }
}

/// Scores a row under one softmax.
struct Walk<'r, E> {
    row: &'r [E],
    id: usize,
    inverse_temperature: f32,
    kept: Option<&'r mut Kept>,
}

impl<E: Element> Work for Walk<'_, E> {
    type Output = Softmax;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> Softmax {
        let Self { row, id, inverse_temperature, kept } = self;
        let blocks = row.len().div_ceil(BLOCK);
        let (mut exps, mut maxima): (&mut [f32], &mut [f32]) = (&mut [], &mut []);
        if let Some(kept) = kept {
            kept.exps.resize(blocks * BLOCK, 0.0);
            kept.maxima.resize(blocks, 0.0);
            (exps, maxima) = (&mut kept.exps, &mut kept.maxima);
        }
        let target = row[id].to_f32();
        let mut sums = Sums::new(simd, target, inverse_temperature);
        for (i, block) in row.chunks(BLOCK).enumerate() {
            let exps = exps.get_mut(i * BLOCK..(i + 1) * BLOCK).unwrap_or_default().as_chunks_mut().0;
            if i == id / BLOCK || block.len() < BLOCK {
                let mut without_target = [E::MINUS_INFINITY; BLOCK];
                without_target[..block.len()].copy_from_slice(block);
                if i == id / BLOCK {
                    without_target[id % BLOCK] = E::MINUS_INFINITY;
                }
                sums.add(simd, without_target.as_chunks().0, exps);
            } else {
                sums.add(simd, block.as_chunks().0, exps);
            }
            if let Some(max) = maxima.get_mut(i) {
                *max = sums.max;
            }
        }
        sums.softmax(target, inverse_temperature)
    }
}

/// What a walk has summed so far, of the columns other than the target.
struct Sums<S: Simd> {
    exp: Exp<S>,
    inverse_temperature: S::Lanes,
    /// `1/T`
    rate: f64,
    /// `m`
    max: f32,
    /// `2^26·Σ e_j`
    exps: f64,
    /// `2^26·Σ e_j t_j`
    weighted: f64,
}

impl<S: Simd> Sums<S> {
    /// `m` begins at the target, or where that is −∞ at the least finite number. A NaN stays.
    #[inline(always)]
    fn new(simd: S, target: f32, inverse_temperature: f32) -> Self {
        Self {
            exp: Exp::new(simd),
            inverse_temperature: simd.splat(inverse_temperature),
            rate: f64::from(inverse_temperature),
            max: if target < f32::MIN { f32::MIN } else { target },
            exps: 0.0,
            weighted: 0.0,
        }
    }

    /// Adds a block, and keeps its exponentials if `exps` has room for them.
    #[inline(always)]
    fn add<E: Element>(&mut self, simd: S, block: &[[E; UNIT]], exps: &mut [[f32; UNIT]]) {
        loop {
            let max = simd.splat(self.max);
            let mut top = max;
            let mut sum = simd.sums();
            let mut weighted = simd.splat(0.0);
            let mut exps = exps.chunks_mut(GROUP);
            for group in block.chunks(GROUP) {
                // Few are added in f32, so that few are rounded next to the largest; in the other sum it is 0.
                let mut of_group = simd.splat(0.0);
                let exps = exps.next().unwrap_or_default();
                for (i, unit) in group.iter().enumerate() {
                    let [low, high] = E::load(simd, unit);
                    top = simd.max(high, simd.max(low, top));
                    let t = self.exponent(simd, low, max);
                    let e_low = self.exp.scaled(simd, t);
                    of_group = simd.add(of_group, e_low);
                    weighted = simd.mul_add(e_low, t, weighted);
                    let t = self.exponent(simd, high, max);
                    let e_high = self.exp.scaled(simd, t);
                    of_group = simd.add(of_group, e_high);
                    weighted = simd.mul_add(e_high, t, weighted);
                    if let Some(exps) = exps.get_mut(i) {
                        simd.store_f32([e_low, e_high], exps);
                    }
                }
                sum = simd.accumulate(sum, of_group);
            }
            let weighted = simd.accumulate(simd.sums(), weighted);
            let top = largest(simd.array(top));
            if top > self.max {
                // What was summed moves to the new maximum, and the block is done again.
                let step = (f64::from(self.max) - f64::from(top)) * self.rate;
                self.weighted = step.exp() * (self.weighted + step * self.exps);
                self.exps *= step.exp();
                self.max = top;
            } else {
                self.exps += simd.total(sum);
                self.weighted += simd.total(weighted);
                return;
            }
        }
    }

    /// `t`, floored.
    #[inline(always)]
    fn exponent(&self, simd: S, x: S::Lanes, max: S::Lanes) -> S::Lanes {
        self.exp.floored(simd, simd.mul(simd.sub(x, max), self.inverse_temperature))
    }

    /// With the target. A NaN among the logits is a NaN in `weighted`, and then everywhere.
    fn softmax(&self, target: f32, inverse_temperature: f32) -> Softmax {
        let others = if self.weighted.is_nan() { f64::NAN } else { self.exps / SCALE };
        let target_exponent = (f64::from(target) - f64::from(self.max)) * self.rate;
        let target = target_exponent.exp();
        let weighted = self.weighted / SCALE + if target == 0.0 { 0.0 } else { target * target_exponent };
        Softmax {
            max: self.max,
            inverse_temperature,
            target_exponent,
            target,
            others,
            sum: others + target,
            // sum − 1, with nothing lost where the target is the maximum and the others are tiny.
            log_sum: (others + (target - 1.0)).ln_1p(),
            mean_gap: -weighted / (others + target),
        }
    }
}

/// The largest of the lanes; NaN counts for nothing.
#[inline(always)]
fn largest(lanes: [f32; 16]) -> f32 {
    let mut largest = f32::MIN;
    for x in lanes {
        if x > largest {
            largest = x;
        }
    }
    largest
}

/// `dx_j = e_j·policy + q_j·(slope·t_j + offset)`, with `q` and `t` of the softmax that entropy is of.
#[derive(Clone, Copy)]
struct Factors {
    policy: f64,
    slope: f64,
    offset: f64,
}

impl Factors {
    /// Whether no product of them with an exponential can be NaN: no `t` is below the floor.
    fn in_range(self) -> bool {
        let largest = self.policy.abs() + self.offset.abs() + self.slope.abs() * -f64::from(FLOOR);
        (largest as f32).is_finite()
    }

    /// A column of probability 0 has no part even in an infinite gradient.
    fn write_carefully<E: Element>(self, row: &mut Row<E>, logp: &Softmax, entropy: &Softmax) {
        let term = |softmax: &Softmax, x: f32, factor: &dyn Fn(f32) -> f64| {
            let t = (x - softmax.max) * softmax.inverse_temperature;
            let e = t.exp();
            if e == 0.0 { 0.0 } else { e * factor(t) as f32 }
        };
        for j in 0..row.dlogits.len() {
            let x = row.logits()[j].to_f32();
            let policy = if self.policy == 0.0 { 0.0 } else { term(logp, x, &|_| self.policy) };
            let bonus = |t: f32| self.slope * f64::from(t) + self.offset;
            let bonus = if self.slope == 0.0 { 0.0 } else { term(entropy, x, &bonus) };
            row.dlogits[j] = E::from_f32(policy + bonus);
        }
    }
}

/// Writes dlogits, the target's apart.
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
        let Factors { policy, slope, offset } = self.factors;
        match self.kept {
            _ if self.two => {
                let [logp, entropy] = [Again::of(simd, self.logp), Again::of(simd, self.entropy)];
                let policy = simd.splat(policy as f32);
                let factors = [simd.splat(slope as f32), simd.splat(offset as f32)];
                write(simd, self.row.logits, self.row.dlogits, &[], &Two { logp, entropy, policy, factors });
            }
            None => {
                let factors = [simd.splat(slope as f32), simd.splat((policy + offset) as f32)];
                let again = One { softmax: Again::of(simd, self.logp), factors };
                write(simd, self.row.logits, self.row.dlogits, &[], &again);
            }
            Some(kept) => {
                let unscale = simd.splat((1.0 / SCALE) as f32);
                let exponent = Again::of(simd, self.logp);
                let (mut since, mut faded) = (self.logp.max, 1.0);
                for (i, dlogits) in self.row.dlogits.chunks_mut(BLOCK).enumerate() {
                    let logits = self.row.logits.map(|logits| &logits[i * BLOCK..][..dlogits.len()]);
                    let exps = kept.exps[i * BLOCK..(i + 1) * BLOCK].as_chunks().0;
                    if kept.maxima[i] != since {
                        since = kept.maxima[i];
                        let step = f64::from(since) - f64::from(self.logp.max);
                        faded = (step * f64::from(self.logp.inverse_temperature)).exp();
                    }
                    let [slope, factor] = [slope * faded, (policy + offset) * faded];
                    let factors = [simd.splat(slope as f32), simd.splat(factor as f32)];
                    if slope == 0.0 {
                        write(simd, logits, dlogits, exps, &Scaled { unscale, factor: factors[1] });
                    } else {
                        write(simd, logits, dlogits, exps, &Sloped { unscale, exponent, factors });
                    }
                }
            }
        }
    }
}

/// How the dlogits of a unit come from its logits, or from the exponentials that were kept.
trait Unit<S: Simd> {
    fn dlogits<E: Element>(&self, simd: S, logits: &[E; UNIT], exps: &[f32; UNIT]) -> [S::Lanes; 2];
}

/// Writes a row, or the part of one that `exps` are of.
#[inline(always)]
fn write<S: Simd, E: Element>(
    simd: S,
    logits: Option<&[E]>,
    dlogits: &mut [E],
    exps: &[[f32; UNIT]],
    unit: &impl Unit<S>,
) {
    const NONE: [f32; UNIT] = [0.0; UNIT];
    let (units, tail) = dlogits.as_chunks_mut::<UNIT>();
    let (sources, source_tail) = logits.unwrap_or_default().as_chunks::<UNIT>();
    for (i, to) in units.iter_mut().enumerate() {
        let from = sources.get(i).unwrap_or(to);
        let x = unit.dlogits(simd, from, exps.get(i).unwrap_or(&NONE));
        E::store(simd, x, to);
    }
    if !tail.is_empty() {
        let mut last = [E::MINUS_INFINITY; UNIT];
        last[..tail.len()].copy_from_slice(if logits.is_some() { source_tail } else { tail });
        let x = unit.dlogits(simd, &last, exps.get(units.len()).unwrap_or(&NONE));
        E::store(simd, x, &mut last);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// `e_j·factor`, of exponentials that were kept.
struct Scaled<S: Simd> {
    unscale: S::Lanes,
    factor: S::Lanes,
}

impl<S: Simd> Unit<S> for Scaled<S> {
    #[inline(always)]
    fn dlogits<E: Element>(&self, simd: S, _: &[E; UNIT], exps: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [low, high] = simd.load_f32(exps);
        [simd.mul(simd.mul(low, self.unscale), self.factor), simd.mul(simd.mul(high, self.unscale), self.factor)]
    }
}

/// `e_j·(slope·t_j + factor)`, of exponentials that were kept.
struct Sloped<S: Simd> {
    unscale: S::Lanes,
    exponent: Again<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Unit<S> for Sloped<S> {
    #[inline(always)]
    fn dlogits<E: Element>(&self, simd: S, logits: &[E; UNIT], exps: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [slope, factor] = self.factors;
        let [low, high] = E::load(simd, logits);
        let [e_low, e_high] = simd.load_f32(exps);
        let low = simd.mul_add(self.exponent.exponent(simd, low), slope, factor);
        let high = simd.mul_add(self.exponent.exponent(simd, high), slope, factor);
        [simd.mul(simd.mul(e_low, self.unscale), low), simd.mul(simd.mul(e_high, self.unscale), high)]
    }
}

/// `e_j·(slope·t_j + factor)`.
struct One<S: Simd> {
    softmax: Again<S>,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Unit<S> for One<S> {
    #[inline(always)]
    fn dlogits<E: Element>(&self, simd: S, logits: &[E; UNIT], _: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [low, high] = E::load(simd, logits);
        [self.softmax.sloped(simd, low, self.factors), self.softmax.sloped(simd, high, self.factors)]
    }
}

/// `e_j·policy + q_j·(slope·t_j + offset)`.
struct Two<S: Simd> {
    logp: Again<S>,
    entropy: Again<S>,
    policy: S::Lanes,
    factors: [S::Lanes; 2],
}

impl<S: Simd> Two<S> {
    #[inline(always)]
    fn sum(&self, simd: S, x: S::Lanes) -> S::Lanes {
        let e = self.logp.exp(simd, self.logp.exponent(simd, x));
        simd.mul_add(e, self.policy, self.entropy.sloped(simd, x, self.factors))
    }
}

impl<S: Simd> Unit<S> for Two<S> {
    #[inline(always)]
    fn dlogits<E: Element>(&self, simd: S, logits: &[E; UNIT], _: &[f32; UNIT]) -> [S::Lanes; 2] {
        let [low, high] = E::load(simd, logits);
        [self.sum(simd, low), self.sum(simd, high)]
    }
}

/// The exponentials of a softmax, once more.
#[derive(Clone, Copy)]
struct Again<S: Simd> {
    exp: Exp<S>,
    max: S::Lanes,
    inverse_temperature: S::Lanes,
    unscale: S::Lanes,
}

impl<S: Simd> Again<S> {
    #[inline(always)]
    fn of(simd: S, softmax: &Softmax) -> Self {
        Self {
            exp: Exp::new(simd),
            max: simd.splat(softmax.max),
            inverse_temperature: simd.splat(softmax.inverse_temperature),
            unscale: simd.splat((1.0 / SCALE) as f32),
        }
    }

    /// `t`, floored.
    #[inline(always)]
    fn exponent(&self, simd: S, x: S::Lanes) -> S::Lanes {
        self.exp.floored(simd, simd.mul(simd.sub(x, self.max), self.inverse_temperature))
    }

    #[inline(always)]
    fn exp(&self, simd: S, t: S::Lanes) -> S::Lanes {
        simd.mul(self.exp.scaled(simd, t), self.unscale)
    }

    /// `e·(slope·t + factor)`
    #[inline(always)]
    fn sloped(&self, simd: S, x: S::Lanes, [slope, factor]: [S::Lanes; 2]) -> S::Lanes {
        let t = self.exponent(simd, x);
        simd.mul(self.exp(simd, t), simd.mul_add(t, slope, factor))
    }
}
