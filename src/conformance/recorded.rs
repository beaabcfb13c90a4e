//! The scalars recorded with a fixture, computed again from the reference: a check of the reference itself.
//!
//! A key is `expected.<source>.<scalar>` or `expected.<source>.<old log-probabilities>.<scalar>`; what each scalar is
//! stands in `fixtures/README.md`.

use std::collections::BTreeMap;

use ndarray::{Array1, Array2};

use super::condition::Condition;
use super::judge::{Status, Verdict};
use super::metric::{Allowance, Position, Tally};
use super::tolerance::{Gate, Model, Output, ToleranceError, Tolerances};
use crate::problem::Dtype;
use crate::reference::{Reference, Token};
use crate::spec::{LossSpec, Objective, PpoClip};

/// The loss that every recorded scalar belongs to: PPO-clip at 0.2/0.3, temperature 1, mean over the batch's tokens.
pub fn recorded_spec() -> LossSpec {
    let clip = PpoClip { epsilon_low: 0.2, epsilon_high: 0.3, ..PpoClip::default() };
    LossSpec { objective: Objective::PpoClip(clip), ..LossSpec::default() }
}

/// A scalar and its condition: the recorded value may differ by `κ·u(f64)·scale`.
#[derive(Clone, Copy, Debug)]
pub struct Scalar {
    /// The value.
    pub value: f64,
    /// Its condition; 0 for a count.
    pub scale: f64,
}

/// A head whose rows span a part of the vocabulary: what `dhidden` and `dlm_head_rows` are taken through.
#[derive(Debug)]
pub struct SubVocabulary<'f> {
    /// `[B·T, H]`, the head's inputs.
    pub hidden: &'f Array2<f64>,
    /// `[V, H]`, its rows.
    pub lm_head_rows: &'f Array2<f64>,
}

/// `scalar → value` of one reference, under the names that fixtures use.
pub fn scalars(reference: &Reference, head: Option<&SubVocabulary>) -> BTreeMap<&'static str, Scalar> {
    let mut sums = Sums::default();
    let shape = reference.shape();
    // Only the head's gradients need the whole array at once.
    let mut gradients = Array2::zeros(if head.is_some() { (shape.batch * shape.tokens, shape.vocab) } else { (0, 0) });
    let mut scales = gradients.clone();
    for b in 0..shape.batch {
        for t in 0..shape.tokens {
            let Some(token) = reference.token(b, t) else { continue };
            let row = reference.logits_row(b, t);
            // Both sides are f64, far finer than any tie band.
            let condition = Condition::of(reference, token, &row, 0.0);
            let dlogits = reference.dlogits_row(b, t);
            let limits = condition.dlogits(reference, token, &row, &token.branch);
            for ((&x, &d), &(scale, _)) in row.iter().zip(&dlogits).zip(&limits) {
                sums.sum_abs.add(d.abs(), scale);
                sums.sum_sq.add(d * d, 2.0 * d.abs() * scale);
                sums.dot.add(d * x, x.abs() * scale);
            }
            if head.is_some() {
                let i = b * shape.tokens + t;
                gradients.row_mut(i).assign(&ndarray::aview1(&dlogits));
                scales.row_mut(i).assign(&limits.iter().map(|(scale, _)| *scale).collect::<Array1<_>>());
            }
            sums.add_token(reference, token, &condition);
        }
    }
    let mut scalars = sums.named(reference);
    if let Some(SubVocabulary { hidden, lm_head_rows }) = head {
        let sum_abs = |product: Array2<f64>, scale: Array2<f64>| Scalar {
            value: product.mapv(f64::abs).sum(),
            scale: scale.sum(),
        };
        let (abs_hidden, abs_rows) = (hidden.mapv(f64::abs), lm_head_rows.mapv(f64::abs));
        scalars.insert("dhidden_sum_abs", sum_abs(gradients.dot(*lm_head_rows), scales.dot(&abs_rows)));
        scalars.insert("dlm_head_rows_sum_abs", sum_abs(gradients.t().dot(*hidden), scales.t().dot(&abs_hidden)));
    }
    scalars
}

#[derive(Clone, Copy, Default)]
struct Total {
    value: f64,
    scale: f64,
}

impl Total {
    fn add(&mut self, value: f64, scale: f64) {
        self.value += value;
        self.scale += scale;
    }
}

#[derive(Default)]
struct Sums {
    sum_abs: Total,
    sum_sq: Total,
    dot: Total,
    loss_scale: f64,
    entropy_scale: f64,
    ratio_scale: f64,
    ratios: Vec<f64>,
    clipped: [u32; 2],
}

impl Sums {
    fn add_token(&mut self, reference: &Reference, token: &Token, condition: &Condition) {
        self.loss_scale += token.weight * condition.token_loss;
        self.entropy_scale += condition.entropy / reference.count() as f64;
        self.ratio_scale = self.ratio_scale.max(condition.ratio);
        self.ratios.push(token.inputs.ratio());
        self.clipped[0] += u32::from(token.clipped_low);
        self.clipped[1] += u32::from(token.clipped_high);
    }

    fn named(self, reference: &Reference) -> BTreeMap<&'static str, Scalar> {
        let Objective::PpoClip(clip) = &reference.spec().objective;
        let (low, high) = (1.0 - clip.epsilon_low, 1.0 + clip.epsilon_high);
        let count = |holds: &dyn Fn(f64) -> bool| self.ratios.iter().filter(|r| holds(**r)).count() as f64;
        let exact = |value: f64| Scalar { value, scale: 0.0 };
        let scalar = |total: Total| Scalar { value: total.value, scale: total.scale };
        let of_ratio = |value: f64| Scalar { value, scale: self.ratio_scale };
        let margin = |r: &f64| (r - low).abs().min((r - high).abs());
        BTreeMap::from([
            ("n_tokens", exact(reference.count() as f64)),
            ("entropy_mean", Scalar { value: reference.metrics().entropy_mean, scale: self.entropy_scale }),
            ("loss", Scalar { value: reference.loss(), scale: self.loss_scale }),
            ("dlogits_sum_abs", scalar(self.sum_abs)),
            ("dlogits_sum_sq", scalar(self.sum_sq)),
            ("dlogits_dot_logits", scalar(self.dot)),
            ("ratio_low", exact(count(&|r| r < low))),
            ("ratio_high", exact(count(&|r| r > high))),
            ("clipped_low", exact(f64::from(self.clipped[0]))),
            ("clipped_high", exact(f64::from(self.clipped[1]))),
            ("ratio_min", of_ratio(self.ratios.iter().copied().fold(f64::INFINITY, f64::min))),
            ("ratio_max", of_ratio(self.ratios.iter().copied().fold(0.0, f64::max))),
            ("tie_margin", of_ratio(self.ratios.iter().map(margin).fold(f64::INFINITY, f64::min))),
        ])
    }
}

/// Judges a recorded value against the reference's.
///
/// # Errors
/// [`ToleranceError::Absent`] where `tolerances` has no entry for recorded scalars.
pub fn judge_recorded(scalar: Scalar, recorded: f64, tolerances: &Tolerances) -> Result<Verdict, ToleranceError> {
    let gate = Gate { output: Output::Recorded, model: Model::Elementwise };
    let kappa = tolerances.kappa(gate, Dtype::F64, "reference")?;
    let mut tally = Tally::default();
    let allowance = Allowance { rounding: 0.0, unit: f64::EPSILON / 2.0, scale: scalar.scale, floor: 0.0 };
    tally.compare(Position::default(), scalar.value, recorded, kappa, allowance, Dtype::F64);
    let status = if tally.passes() { Status::Pass } else { Status::Fail };
    Ok(Verdict { gate, dtype: Dtype::F64, status, kappa: Some(kappa), tally })
}
