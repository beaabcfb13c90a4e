//! One row of logits: softmax statistics, and dlogits.
//!
//! ```text
//! score    a_j = m − x_j,  e_j = exp(−a_j/T)     Σ e_j for j ≠ y,  Σ e_j a_j        ā = Σ e_j a_j / (S·T)
//! between  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! write    dx_j = e_j · (−G/(S·T))  +  e_j (a_j/T − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! Of several ids `y_k` of a token, with `G_k`, the likeliest is `y` and `G` their sum; their columns are written [apart](several).
//!
//! What the spec does to logits first ([`RowTransform`]) is done a block at a time, where they are read.
//!
//! The exponentials may be kept for the write, each block's relative to the `m` that it was made with: beside the row, or
//! where f32 dlogits go over f32 logits, over those. Where they are not kept, they are made again.

mod logits_transform;
mod score;
mod several;
mod write;

use assay_algebra::arithmetic::Immediate;
use assay_algebra::softmax;
use assay_core::problem::Float;
use assay_core::spec::{LossSpec, Temperature, TemperatureDivides};
use assay_simd::exp::{FAR, step};
use assay_simd::{Isa, PackedElement, UNIT};
pub(super) use logits_transform::RowTransform;
use score::{ScoreRow, ScoreRowInPlace};
use several::IdColumn;
use write::{DlogitsFactors, WriteRow};

/// An element of logits that the CPU kernel reads: f32, bf16 or f16.
pub trait NativeElement: Float + PackedElement {}

impl<E: Float + PackedElement> NativeElement for E {}

/// Units in a block.
const UNITS: usize = 16;

/// Columns that are looked at relative to one maximum.
const BLOCK: usize = UNITS * UNIT;

/// The settings that all rows share.
pub(super) struct SoftmaxSettings {
    isa: Isa,
    transform: RowTransform,
    /// `1/T`, with the rate of what is done to logits; NaN where each row is given its own.
    pub(super) rate: f64,
    /// What multiplies logp: not 1 where the temperature divides it.
    logp_factor: f64,
    /// Whether entropy needs a softmax of its own.
    two: bool,
    /// Whether entropy may have a gradient.
    bonus: bool,
}

/// The exponentials of a block, on whole cache lines.
#[derive(Clone)]
#[repr(align(64))]
struct ExpBlock([[f32; UNIT]; UNITS]);

impl ExpBlock {
    fn room() -> Self {
        Self([[0.0; UNIT]; UNITS])
    }
}

/// Exponentials of the row that was last scored, under the softmax that logp is of.
#[derive(Default)]
pub(super) struct SavedExponentials {
    /// Whether they are where the row's logits were.
    over_logits: bool,
    /// `2^64·e_j`, 0 for the target, by blocks, where they are beside the row; each times `1 − tanh²` under a cap.
    exps: Vec<ExpBlock>,
    /// The `m` of each block.
    maxima: Vec<f32>,
}

/// What a row's softmaxes come to.
#[derive(Clone)]
pub(super) struct Scores {
    logp_softmax: RowSoftmax,
    entropy_softmax: RowSoftmax,
    /// The id that sums leave out: the token's, or the likeliest of several.
    target: usize,
    /// `1 − tanh²` of the target, under a cap.
    target_slope: f64,
    /// Of the first id.
    pub(super) logp: f64,
    pub(super) entropy: f64,
    /// All ids in order, where there are several.
    several: Vec<IdColumn>,
}

/// The ids of a token.
pub(super) struct TokenIds {
    pub(super) first: usize,
    /// Beside the first.
    pub(super) others: Vec<usize>,
}

/// A row's softmax.
#[derive(Clone, Copy)]
struct RowSoftmax {
    exponent: Exponent,
    /// `Σ_{j≠y} e_j a_j`, with `a` over `T`.
    weighted: f64,
    /// `x_y`; −∞ where another part of the row has it.
    target_logit: f64,
    end: softmax::SoftmaxStatistics<f64>,
}

/// What makes an exponential of a logit, `exp(−(m − x)/T)`.
#[derive(Clone, Copy)]
struct Exponent {
    /// `m`.
    max: f32,
    /// `1/T`, with the rate of what is done to logits.
    inverse_temperature: f64,
}

/// What is summed of a part of a row, of logits as their transform has them. Sums are of the columns other than the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStatistics {
    /// `m`: the largest logit, the least finite f32 where all are −∞.
    pub(crate) max: f64,
    /// `x_y`; 0 where another part has the target.
    pub(crate) target_logit: f64,
    /// `Σ e_j` and `Σ e_j a_j`, with `a_j = (m − x_j)/T`, of the softmax that entropy is of.
    pub(crate) entropy: [f64; 2],
    /// The same of the one that logp is of, where that is another; else 0.
    pub(crate) logp: [f64; 2],
}

/// What the dlogits of a row are made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DlogitsScales {
    /// `m`, of all parts.
    pub(crate) max: f64,
    /// `−G/(S·T)`
    pub(crate) share: f64,
    /// `Σ e_j` of the softmax that logp is of, without the target, of all parts.
    pub(crate) others: f64,
    /// `E/(S·T)`
    pub(crate) bonus: f64,
    /// `ā`
    pub(crate) mean_gap: f64,
}

/// The derivatives of the loss that a row's dlogits are made of.
#[derive(Clone)]
pub(super) struct RowGradients {
    /// By logp of the first id.
    pub(super) logp: f64,
    pub(super) entropy: f64,
    /// By logp of the others, in order.
    pub(super) others: Vec<f64>,
}

/// A row of logits and where its dlogits go.
pub(super) struct LogitsRow<'r, E> {
    /// `None`: they are where dlogits go.
    pub(super) logits: Option<&'r [E]>,
    pub(super) dlogits: &'r mut [E],
}

impl<E> LogitsRow<'_, E> {
    pub(super) fn logits(&self) -> &[E] {
        self.logits.unwrap_or(self.dlogits)
    }
}

impl Exponent {
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

impl SoftmaxSettings {
    pub(super) fn new(spec: &LossSpec, isa: Isa, transform: RowTransform) -> Self {
        let two = spec.temperature_divides == TemperatureDivides::Logp && spec.temperature != Temperature::ONE;
        let temperature = spec.temperature.number().unwrap_or(f64::NAN);
        Self {
            isa,
            rate: transform.rate / temperature,
            transform,
            logp_factor: if two { 1.0 / temperature } else { 1.0 },
            two,
            bonus: spec.entropy_coef != 0.0 || spec.dentropy,
        }
    }

    /// The same where entropy `has` a gradient beside its part in the loss.
    pub(super) fn with_entropy_cotangents(self, has: bool) -> Self {
        Self { bonus: self.bonus || has, ..self }
    }

    /// Reads the row of an unmasked token, whose gaps `rate` multiplies.
    pub(super) fn score<E: NativeElement>(&self, row: &[E], ids: &TokenIds, rate: f64) -> Scores {
        let (transform, (id, several)) = (&self.transform, self.target_of(row, ids));
        let scores = self.score_by(id, row[id], rate, |inverse_temperature, _| {
            self.isa.run(ScoreRow { row, id: Some(id), transform, inverse_temperature, kept: None })
        });
        scores.with(several, rate)
    }

    /// The same, and keeps its exponentials: over its logits where those are f32, dlogits go there too, and nothing will ask
    /// for them again.
    pub(super) fn score_and_keep<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        ids: &TokenIds,
        rate: f64,
        kept: &mut SavedExponentials,
    ) -> Scores {
        let (id, several) = self.target_of(row.logits(), ids);
        self.score_target_and_keep(row, id, rate, kept).with(several, rate)
    }

    fn score_target_and_keep<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        id: usize,
        rate: f64,
        kept: &mut SavedExponentials,
    ) -> Scores {
        let (transform, target) = (&self.transform, row.logits()[id]);
        kept.over_logits = false;
        if row.logits.is_none()
            && !self.two
            && !self.bonus
            && let Some(row) = E::as_floats(row.dlogits)
        {
            kept.over_logits = true;
            return self.score_by(id, target, rate, |inverse_temperature, _| {
                let maxima = &mut kept.maxima;
                self.isa.run(ScoreRowInPlace { row: &mut *row, id, transform, inverse_temperature, maxima })
            });
        }
        let row = row.logits();
        self.score_by(id, target, rate, |inverse_temperature, keeps| {
            let kept = if keeps { Some(&mut *kept) } else { None };
            self.isa.run(ScoreRow { row, id: Some(id), transform, inverse_temperature, kept })
        })
    }

    /// By a walk under `1/T`, which keeps exponentials or not. The target's id and logit are given.
    fn score_by<E: NativeElement>(
        &self,
        id: usize,
        target: E,
        rate: f64,
        mut walk: impl FnMut(f64, bool) -> RowSoftmax,
    ) -> Scores {
        let (logp_softmax, entropy_softmax) = if self.two {
            (walk(self.transform.rate, true), walk(rate, false))
        } else {
            let shared = walk(rate, true);
            (shared, shared)
        };
        Scores {
            logp_softmax,
            entropy_softmax,
            target: id,
            target_slope: self.transform.transformed(id, target).1,
            logp: logp_softmax.end.logp(&mut Immediate) * self.logp_factor,
            entropy: entropy_softmax.end.entropy(&mut Immediate),
            several: Vec::new(),
        }
    }

    /// Writes the dlogits of an unmasked token, from the exponentials that its `score` kept if they are given.
    pub(super) fn write<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        scores: &Scores,
        kept: Option<&SavedExponentials>,
        grad: &RowGradients,
    ) {
        // A derivative of 0 leaves its term out, so that nothing multiplies it into a NaN.
        if grad.logp == 0.0 && grad.entropy == 0.0 && grad.others.iter().all(|grad| *grad == 0.0) {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        let Scores { logp_softmax: logp, entropy_softmax: entropy, .. } = scores;
        let (of_logp, of_entropy) = (logp.end, entropy.end);
        let (transform, inverse_temperature) = (&self.transform, entropy.exponent.inverse_temperature);
        let by_logit = inverse_temperature * transform.factor;
        let of_all = grad.logp + grad.others.iter().sum::<f64>();
        let policy = if of_all == 0.0 { 0.0 } else { of_all * by_logit / of_logp.sum };
        let bonus = if grad.entropy == 0.0 { 0.0 } else { grad.entropy * by_logit / of_entropy.sum };
        let factors = DlogitsFactors {
            policy: -policy,
            // e (a/T − ā) · bonus = e · (bonus·a/T − bonus·ā)
            slope: bonus * inverse_temperature * step(inverse_temperature),
            offset: if bonus == 0.0 { 0.0 } else { -bonus * of_entropy.mean_gap },
        };
        let exponents = [logp.exponent, entropy.exponent];
        if !scores.several.is_empty() {
            self.write_by(row, exponents, kept, factors);
            scores.write_several(row, grad, by_logit, [bonus, factors.offset]);
            return;
        }
        let target = if grad.logp == 0.0 { 0.0 } else { policy * of_logp.others };
        let target = match of_entropy.target {
            q if bonus == 0.0 || q == 0.0 => target,
            q => target + q * (factors.offset + bonus * of_entropy.target_gap),
        };
        self.write_by(row, exponents, kept, factors);
        row.dlogits[scores.target] = E::from_f32((target * scores.target_slope) as f32);
    }

    /// Writes the dlogits of all columns as if none were the target.
    fn write_by<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        [logp, entropy]: [Exponent; 2],
        kept: Option<&SavedExponentials>,
        factors: DlogitsFactors,
    ) {
        let transform = &self.transform;
        let (inside, outside) = row.dlogits.split_at_mut(transform.vocab);
        let mut of_support = LogitsRow { logits: row.logits.map(|logits| &logits[..transform.vocab]), dlogits: inside };
        if factors.in_range(entropy) {
            let two = self.two && (factors.slope != 0.0 || factors.offset != 0.0);
            let kept = kept.filter(|_| !two);
            self.isa.run(WriteRow { row: &mut of_support, transform, logp, entropy, two, kept, factors });
        } else {
            factors.write_carefully(&mut of_support, transform, logp, entropy, kept);
        }
        outside.fill(E::from_f32(0.0));
        transform.excluded.iter().for_each(|&j| row.dlogits[j] = E::from_f32(0.0));
    }

    /// Reads a row that may be a part of one, whose gaps `rate` multiplies: its target is one of its columns or, where another part has
    /// it, none.
    pub(super) fn statistics<E: NativeElement>(&self, row: &[E], id: Option<usize>, rate: f64) -> RowStatistics {
        let transform = &self.transform;
        let walk = |inverse_temperature| self.isa.run(ScoreRow { row, id, transform, inverse_temperature, kept: None });
        let entropy = walk(rate);
        let sums = |softmax: RowSoftmax| [softmax.end.others, softmax.weighted];
        RowStatistics {
            max: entropy.exponent.max.into(),
            target_logit: if id.is_some() { entropy.target_logit } else { 0.0 },
            entropy: sums(entropy),
            logp: if self.two { sums(walk(transform.rate)) } else { [0.0; 2] },
        }
    }

    /// Writes the dlogits of such a part, from what follows from the statistics of all of them.
    pub(super) fn write_part<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        id: Option<usize>,
        scales: DlogitsScales,
        rate: f64,
    ) {
        let DlogitsScales { max, share, others, bonus, mean_gap } = scales;
        let (share, bonus) = (share * self.transform.factor, bonus * self.transform.factor);
        if share == 0.0 && bonus == 0.0 {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        let inverse_temperature = rate;
        let entropy = Exponent { max: max as f32, inverse_temperature };
        let logp = if self.two { Exponent { inverse_temperature: self.transform.rate, ..entropy } } else { entropy };
        let factors = DlogitsFactors {
            policy: share,
            slope: bonus * inverse_temperature * entropy.step(),
            offset: if bonus == 0.0 { 0.0 } else { -bonus * mean_gap },
        };
        let target = id.map(|id| {
            let (logit, slope) = self.transform.transformed(id, row.logits()[id]);
            let gap = (max - logit) * inverse_temperature;
            let e = (-gap).exp();
            let of_logp = if share == 0.0 { 0.0 } else { -share * others };
            let of_entropy = if bonus == 0.0 || e == 0.0 { 0.0 } else { bonus * e * (gap - mean_gap) };
            (id, (of_logp + of_entropy) * slope)
        });
        self.write_by(row, [logp, entropy], None, factors);
        if let Some((id, target)) = target {
            row.dlogits[id] = E::from_f32(target as f32);
        }
    }
}
