//! One row of logits: softmax statistics, and dlogits.
//!
//! ```text
//! score    a_j = m − x_j,  e_j = exp(−a_j/T)     Σ e_j for j ≠ y,  Σ e_j a_j        ā = Σ e_j a_j / (S·T)
//! between  logp, entropy, loss, G = ∂loss/∂logp, E = ∂loss/∂entropy
//! write    dx_j = e_j · (−G/(S·T))  +  e_j (a_j/T − ā) · E/(S·T)       and at y the first term is  (Σ_{j≠y} e_j)·G/(S·T)
//! ```
//!
//! If a token has several ids `y_k` with derivatives `G_k`, the likeliest is `y`, and `G` is the sum; the columns of the ids are
//! written [separately](several).
//!
//! The spec's transform of logits ([`RowTransform`]) is applied block by block, where they are read.
//!
//! The exponentials may be saved for the write, each block's relative to the `m` of its time: in a separate buffer, or over the
//! logits if those are f32 and dlogits overwrite them. Exponentials that are not saved are computed again.

mod divergence;
mod divergence_terms;
mod kept;
mod logits_transform;
mod score;
mod several;
mod write;

use assay_algebra::arithmetic::Immediate;
use assay_algebra::cross_entropy::WholeRow;
use assay_algebra::softmax;
use assay_algebra::structure::Structure;
use assay_core::problem::Float;
use assay_core::spec::{LossSpec, Temperature, TemperatureDivides};
use assay_simd::exp::{FAR, step};
use assay_simd::{Isa, PackedElement, UNIT};
pub(super) use divergence::{PAIR_SCORES, PairScores, PairSettings};
pub(super) use kept::{KeptSettings, KeptToken, TokenScores};
pub(super) use logits_transform::RowTransform;
use score::{ScoreRow, ScoreRowInPlace};
use several::IdColumn;
use write::{DlogitsFactors, WriteRow};

/// An element of logits that the CPU kernel reads: f32, bf16 or f16.
pub trait NativeElement: Float + PackedElement {}

impl<E: Float + PackedElement> NativeElement for E {}

/// Number of units in a block.
const UNITS: usize = 16;

/// Number of columns in a block, whose exponentials are relative to one maximum.
const BLOCK: usize = UNITS * UNIT;

/// The settings that all rows of a batch share.
pub(super) struct SoftmaxSettings {
    isa: Isa,
    transform: RowTransform,
    /// Factor of gaps, `1/T` with the transform's rate; NaN if each row has its own.
    pub(super) rate: f64,
    /// Factor of logp: `1/T` if the temperature divides logp, else 1.
    logp_factor: f64,
    /// Whether entropy needs a softmax that is not that of logp.
    two: bool,
    /// Whether entropy may have a gradient.
    bonus: bool,
    /// Whether the mean of all logits is read, and has a gradient: label smoothing.
    smoothing: bool,
}

/// The exponentials of a block, aligned to cache lines.
#[derive(Clone)]
#[repr(align(64))]
struct ExpBlock([[f32; UNIT]; UNITS]);

impl ExpBlock {
    fn room() -> Self {
        Self([[0.0; UNIT]; UNITS])
    }
}

/// The exponentials of the row that was scored last, under the softmax that logp is of.
#[derive(Default)]
pub(super) struct SavedExponentials {
    /// Whether the exponentials replaced the row's logits.
    over_logits: bool,
    /// Exponentials `2^64·e_j` by blocks, 0 for the target, each times its slope under a cap; not used if they replaced
    /// the logits.
    exps: Vec<ExpBlock>,
    blocks: Vec<BlockScale>,
}

/// The maximum that the exponentials of a block are relative to, and how far they reach.
#[derive(Clone, Copy, Default)]
struct BlockScale {
    /// Maximum `m` of the columns so far.
    max: f32,
    /// Whether all columns are known to be within [`NEAR`](assay_simd::exp::NEAR) of `m`, and no slope makes an exponential smaller.
    near: bool,
}

/// The results of a row's softmaxes.
#[derive(Clone)]
pub(super) struct Scores {
    logp_softmax: RowSoftmax,
    entropy_softmax: RowSoftmax,
    /// Id that sums leave out: the token's, or the likeliest of several.
    target: usize,
    /// Slope `1 − tanh²` of the target under a cap, else 1.
    target_slope: f64,
    /// Log-probability of the token's first id, nats.
    pub(super) logp: f64,
    pub(super) entropy: f64,
    /// Mean gap of all columns below the maximum, over `T`; 0 unless label smoothing reads it.
    mean_gap: f64,
    /// All ids of the token in order, if it has several.
    several: Vec<IdColumn>,
}

/// The ids of a token whose logp is asked for.
pub(super) struct TokenIds {
    pub(super) first: usize,
    /// Ids besides the first one.
    pub(super) others: Vec<usize>,
}

/// One softmax of a row, with its exponent.
#[derive(Clone, Copy)]
struct RowSoftmax {
    exponent: Exponent,
    /// Sum `Σ_{j≠y} e_j a_j`, with gaps `a` over `T`.
    weighted: f64,
    /// Target's logit `x_y`; −∞ if another shard of the row has it.
    target_logit: f64,
    /// Sum of all transformed logits; 0 unless label smoothing reads their mean.
    logits: f64,
    end: softmax::SoftmaxStatistics<f64>,
}

/// The exponent of a softmax, `−(m − x)/T`, as a function of the logit.
#[derive(Clone, Copy)]
struct Exponent {
    /// Maximum `m` of the row.
    max: f32,
    /// Factor `1/T`, with the transform's rate.
    inverse_temperature: f64,
}

/// Sums over a shard of a row, of transformed logits, without the target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStatistics {
    /// Maximum `m` of the logits; the least finite f32 if all are −∞.
    pub(crate) max: f64,
    /// Target's logit `x_y`; 0 if another shard has the target.
    pub(crate) target_logit: f64,
    /// Sums `Σ e_j` and `Σ e_j a_j`, with `a_j = (m − x_j)/T`, of the softmax that entropy is of.
    pub(crate) entropy: [f64; 2],
    /// Sums `Σ e_j` and `Σ e_j a_j` of the softmax that logp is of, if that is another; else 0.
    pub(crate) logp: [f64; 2],
}

/// The factors of a row's dlogits, which follow from the statistics of all shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DlogitsScales {
    /// Maximum `m` over all shards.
    pub(crate) max: f64,
    /// Factor `−G/(S·T)` of the exponentials, with `G = ∂loss/∂logp`.
    pub(crate) share: f64,
    /// Sum `Σ e_j` of the softmax that logp is of, without the target, over all shards.
    pub(crate) others: f64,
    /// Factor `E/(S·T)` of the entropy's part, with `E = ∂loss/∂entropy`.
    pub(crate) bonus: f64,
    /// Mean gap `ā` of the softmax that entropy is of.
    pub(crate) mean_gap: f64,
}

/// The derivatives of the loss from which a row's dlogits follow.
#[derive(Clone)]
pub(super) struct RowGradients {
    /// Derivative by logp of the first id.
    pub(super) logp: f64,
    pub(super) entropy: f64,
    /// Derivatives by logp of the other ids, in order.
    pub(super) others: Vec<f64>,
    /// Derivative by the row's log-sum-exp, besides that through logp.
    pub(super) log_sum_exp: f64,
    /// Derivative by the mean of the row's logits over `T`.
    pub(super) mean_logit: f64,
}

/// A logits row, and the row to which its dlogits are written.
pub(super) struct LogitsRow<'r, E> {
    /// Logits; `None` if dlogits overwrite them.
    pub(super) logits: Option<&'r [E]>,
    pub(super) dlogits: &'r mut [E],
}

impl<E> LogitsRow<'_, E> {
    pub(super) fn logits(&self) -> &[E] {
        self.logits.unwrap_or(self.dlogits)
    }
}

impl Exponent {
    /// Returns the unit in which gaps are counted, in logits.
    fn step(&self) -> f64 {
        step(self.inverse_temperature)
    }

    /// Returns the largest gap, in steps, whose exponential is computed.
    fn farthest(&self) -> f64 {
        FAR / self.inverse_temperature / self.step()
    }

    /// Computes `exp((max − m)/T)`, by which exponentials relative to `max` are too large.
    fn faded(&self, max: f32) -> f64 {
        ((f64::from(max) - f64::from(self.max)) * self.inverse_temperature).exp()
    }
}

impl Scores {
    /// Returns what the terms of a cross-entropy read of the row.
    pub(super) fn whole_row(&self) -> WholeRow<f64> {
        let RowSoftmax { exponent: Exponent { max, inverse_temperature }, end, .. } = self.logp_softmax;
        WholeRow { max: f64::from(max) * inverse_temperature, log_sum: end.log_sum, mean_gap: self.mean_gap }
    }
}

impl RowGradients {
    /// Whether every derivative is 0.
    fn is_zero(&self) -> bool {
        let Self { logp, entropy, others, log_sum_exp, mean_logit } = self;
        [*logp, *entropy, *log_sum_exp, *mean_logit].iter().chain(others).all(|grad| *grad == 0.0)
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
            smoothing: Structure::from_spec(spec).row_terms.smoothing,
        }
    }

    /// Returns the settings with an entropy gradient, if entropy `has` a cotangent in addition to its part in the loss.
    pub(super) fn with_entropy_cotangents(self, has: bool) -> Self {
        Self { bonus: self.bonus || has, ..self }
    }

    /// Scores the row of an unmasked token, whose gaps `rate` multiplies.
    pub(super) fn score<E: NativeElement>(&self, row: &[E], ids: &TokenIds, rate: f64) -> Scores {
        let (transform, (id, several)) = (&self.transform, self.target_of(row, ids));
        let sums_logits = self.smoothing;
        let scores = self.score_by(id, row[id], row.len(), rate, |inverse_temperature, _| {
            self.isa.run(ScoreRow { row, id: Some(id), transform, inverse_temperature, sums_logits, saved: None })
        });
        scores.with(several, rate)
    }

    /// Scores a row and saves its exponentials: over its logits if those are f32, dlogits go there too, and nothing
    /// will read the logits again.
    pub(super) fn score_and_save<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        ids: &TokenIds,
        rate: f64,
        saved: &mut SavedExponentials,
    ) -> Scores {
        let (id, several) = self.target_of(row.logits(), ids);
        self.score_target_and_save(row, id, rate, saved).with(several, rate)
    }

    fn score_target_and_save<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        id: usize,
        rate: f64,
        saved: &mut SavedExponentials,
    ) -> Scores {
        // The exponentials can replace f32 logits if the write needs nothing but them: one softmax, no entropy
        // gradient, and no slopes that multiply the constant of label smoothing. The target is read first, as such a
        // walk overwrites it.
        let (transform, target, vocab) = (&self.transform, row.logits()[id], row.dlogits.len());
        let (sums_logits, slopes_constant) = (self.smoothing, self.smoothing && transform.caps);
        saved.over_logits = false;
        if row.logits.is_none()
            && !self.two
            && !self.bonus
            && !slopes_constant
            && let Some(row) = E::as_floats(row.dlogits)
        {
            saved.over_logits = true;
            return self.score_by(id, target, vocab, rate, |inverse_temperature, _| {
                let blocks = &mut saved.blocks;
                self.isa.run(ScoreRowInPlace {
                    row: &mut *row,
                    id,
                    transform,
                    inverse_temperature,
                    sums_logits,
                    blocks,
                })
            });
        }
        let row = row.logits();
        self.score_by(id, target, vocab, rate, |inverse_temperature, keeps| {
            let saved = if keeps { Some(&mut *saved) } else { None };
            self.isa.run(ScoreRow { row, id: Some(id), transform, inverse_temperature, sums_logits, saved })
        })
    }

    /// Scores a row of `vocab` columns by `walk`, which takes a factor of gaps, and whether to save exponentials. `id` is the target, and
    /// `target` its logit.
    fn score_by<E: NativeElement>(
        &self,
        id: usize,
        target: E,
        vocab: usize,
        rate: f64,
        mut walk: impl FnMut(f64, bool) -> RowSoftmax,
    ) -> Scores {
        // Only the softmax of logp saves its exponentials, since it always has a part in dlogits.
        let (logp_softmax, entropy_softmax) = if self.two {
            (walk(self.transform.rate, true), walk(rate, false))
        } else {
            let shared = walk(rate, true);
            (shared, shared)
        };
        let Exponent { max, inverse_temperature } = logp_softmax.exponent;
        let mean_gap = (f64::from(max) - logp_softmax.logits / vocab as f64) * inverse_temperature;
        // The temperature may divide the logits or logp itself; `logp_factor` is 1 in the first case, as the walk has
        // divided already.
        Scores {
            logp_softmax,
            entropy_softmax,
            target: id,
            target_slope: self.transform.transformed(id, target).1,
            logp: logp_softmax.end.logp(&mut Immediate) * self.logp_factor,
            entropy: entropy_softmax.end.entropy(&mut Immediate),
            mean_gap: if self.smoothing { mean_gap } else { 0.0 },
            several: Vec::new(),
        }
    }

    /// Writes the dlogits of an unmasked token, from the exponentials of its score if they are given.
    pub(super) fn write<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        scores: &Scores,
        saved: Option<&SavedExponentials>,
        grad: &RowGradients,
    ) {
        // A derivative of 0 leaves its term out, so that nothing multiplies it into a NaN.
        if grad.is_zero() {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        // The factors of all columns' exponentials, in f64.
        let Scores { logp_softmax: logp, entropy_softmax: entropy, .. } = scores;
        let (of_logp, of_entropy) = (logp.end, entropy.end);
        let (transform, inverse_temperature) = (&self.transform, entropy.exponent.inverse_temperature);
        let by_logit = inverse_temperature * transform.factor;
        let of_all = grad.logp + grad.others.iter().sum::<f64>();
        let share = |grad: f64| if grad == 0.0 { 0.0 } else { grad * by_logit / of_logp.sum };
        let (policy, of_sum) = (share(of_all), share(grad.log_sum_exp));
        let constant = grad.mean_logit * by_logit / row.dlogits.len() as f64;
        let bonus = if grad.entropy == 0.0 { 0.0 } else { grad.entropy * by_logit / of_entropy.sum };
        let factors = DlogitsFactors {
            policy: of_sum - policy,
            constant,
            // e (a/T − ā) · bonus = e · (bonus·a/T − bonus·ā)
            slope: bonus * inverse_temperature * step(inverse_temperature),
            offset: if bonus == 0.0 { 0.0 } else { -bonus * of_entropy.mean_gap },
        };
        let exponents = [logp.exponent, entropy.exponent];
        // Several ids: every column as if it were none of them, then those of the ids.
        if !scores.several.is_empty() {
            self.write_by(row, exponents, saved, factors);
            scores.write_several(row, grad, by_logit, [bonus, factors.offset]);
            return;
        }
        // One id: its dlogit is `G·(1 − p)`, from the sum of the others, in which nothing cancels. It is computed before the row is
        // overwritten.
        let target = if grad.logp == 0.0 { 0.0 } else { policy * of_logp.others };
        let target = if of_sum == 0.0 { target } else { target + of_sum * of_logp.target } + constant;
        let target = match of_entropy.target {
            q if bonus == 0.0 || q == 0.0 => target,
            q => target + q * (factors.offset + bonus * of_entropy.target_gap),
        };
        self.write_by(row, exponents, saved, factors);
        row.dlogits[scores.target] = E::from_f32((target * scores.target_slope) as f32);
    }

    /// Writes the dlogits of all columns as if none were the target, and 0 outside the support.
    fn write_by<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        [logp, entropy]: [Exponent; 2],
        saved: Option<&SavedExponentials>,
        factors: DlogitsFactors,
    ) {
        let transform = &self.transform;
        // Columns beyond the support's end are not read; excluded ones before it are overwritten in the end.
        let (inside, outside) = row.dlogits.split_at_mut(transform.vocab);
        let mut of_support = LogitsRow { logits: row.logits.map(|logits| &logits[..transform.vocab]), dlogits: inside };
        if factors.in_range(entropy) {
            let two = self.two && (factors.slope != 0.0 || factors.offset != 0.0);
            // Saved exponentials are multiplied by the slopes of the cap, which the constant is not.
            let saved = saved.filter(|_| !two && (factors.constant == 0.0 || !transform.caps));
            self.isa.run(WriteRow { row: &mut of_support, transform, logp, entropy, two, saved, factors });
        } else {
            factors.write_carefully(&mut of_support, transform, logp, entropy, saved);
        }
        outside.fill(E::from_f32(0.0));
        transform.excluded.iter().for_each(|&j| row.dlogits[j] = E::from_f32(0.0));
    }

    /// Computes the statistics of a shard of a row, whose gaps `rate` multiplies; `id` is `None` if another shard has
    /// the target.
    pub(super) fn statistics<E: NativeElement>(&self, row: &[E], id: Option<usize>, rate: f64) -> RowStatistics {
        let transform = &self.transform;
        let walk = |inverse_temperature| {
            self.isa.run(ScoreRow { row, id, transform, inverse_temperature, sums_logits: false, saved: None })
        };
        let entropy = walk(rate);
        let sums = |softmax: RowSoftmax| [softmax.end.others, softmax.weighted];
        RowStatistics {
            max: entropy.exponent.max.into(),
            target_logit: if id.is_some() { entropy.target_logit } else { 0.0 },
            entropy: sums(entropy),
            logp: if self.two { sums(walk(transform.rate)) } else { [0.0; 2] },
        }
    }

    /// Writes the dlogits of a shard of a row, from the statistics of all shards.
    pub(super) fn write_part<E: NativeElement>(
        &self,
        row: &mut LogitsRow<E>,
        id: Option<usize>,
        scales: DlogitsScales,
        rate: f64,
    ) {
        let DlogitsScales { max, share, others, bonus, mean_gap } = scales;
        // The transform's constant slope multiplies every derivative by a logit.
        let (share, bonus) = (share * self.transform.factor, bonus * self.transform.factor);
        if share == 0.0 && bonus == 0.0 {
            row.dlogits.fill(E::from_f32(0.0));
            return;
        }
        // The gaps of the entropy's softmax are multiplied by the token's rate, those of logp's by the transform's rate
        // if the two differ.
        let inverse_temperature = rate;
        let entropy = Exponent { max: max as f32, inverse_temperature };
        let logp = if self.two { Exponent { inverse_temperature: self.transform.rate, ..entropy } } else { entropy };
        let factors = DlogitsFactors {
            // A column's part is `share·e_j + bonus·e_j·(a_j − ā)`, `a_j` counted in steps. A factor of 0 leaves its
            // term out, as `ā` need not be finite and 0·∞ is NaN.
            policy: share,
            constant: 0.0,
            slope: bonus * inverse_temperature * entropy.step(),
            offset: if bonus == 0.0 { 0.0 } else { -bonus * mean_gap },
        };
        // The target's part by logp is `−share·Σ others`, the other columns' parts with the sign changed: `1 − p` is
        // never computed as a difference.
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
