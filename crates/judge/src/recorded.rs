//! Computes the scalars that are recorded with a fixture again from the reference, as a check of the reference itself.
//!
//! A key is `expected.<source>.<scalar>` or `expected.<source>.<old log-probabilities>.<scalar>`; `fixtures/README.md` describes each
//! scalar.

use std::collections::BTreeMap;

use ndarray::{Array1, Array2, Ix2, Ix3};

use super::column_bounds::DlogitsCondition;
use super::condition::{Bands, Condition};
use super::gate::{Gate, Model, Output};
use super::judge::Verdict;
use super::metric::{Allowance, Position, Tally};
use super::tolerance::{Grade, Tolerances};
use assay_core::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, Problem, Projection};
use assay_core::spec::{LossSpec, Objective, PpoClip};
use assay_reference::{HeadReference, Reference, Sum, Token};

/// The lower width of the clip of every recorded run.
const EPSILON_LOW: f64 = 0.2;
/// The upper width of the clip of every recorded run.
const EPSILON_HIGH: f64 = 0.3;

/// Returns the loss that every recorded scalar belongs to: PPO-clip at 0.2/0.3, temperature 1, mean over the batch's tokens.
pub fn recorded_spec() -> LossSpec {
    let clip = PpoClip { epsilon_low: EPSILON_LOW, epsilon_high: EPSILON_HIGH, ..PpoClip::default() };
    LossSpec { objective: Objective::PpoClip(clip), ..LossSpec::default() }
}

/// A scalar and its condition: the recorded value may differ from it by `κ·u(f64)·scale`.
#[derive(Clone, Copy, Debug)]
pub struct RecordedScalar {
    /// The value that follows from the reference.
    pub value: f64,
    /// The condition of the value; 0 for a count.
    pub scale: f64,
}

/// Computes the scalars of one reference, by the names that fixtures use.
pub fn scalars(reference: &Reference) -> BTreeMap<&'static str, RecordedScalar> {
    sums(reference).0.named(reference)
}

/// Computes the scalars of an LM head over a part of the vocabulary, with those of its gradients.
pub fn head_scalars(head: &HeadReference) -> BTreeMap<&'static str, RecordedScalar> {
    let reference = head.on_logits();
    let (sums, conditions) = sums(reference);
    let mut scalars = sums.named(reference);
    let sizes = head.hidden().mapv(f64::abs);
    let (mut dhidden, mut dlm_head) = (Total::default(), Total::default());
    for columns in head.column_chunks() {
        // The head and its gradient are too large for f64 as a whole, so both sums go over the vocabulary in chunks.
        // The scale of a sum of absolute values is the sum of the elements' scales, taken through the products with |w|
        // and |x|.
        let gradients = head.dlogits(columns.clone());
        let mut scales = Array2::zeros(gradients.dim());
        for ((b, t), condition) in conditions.indexed_iter() {
            let (Some(token), Some(condition)) = (reference.token(b, t), condition) else { continue };
            let columns = reference.columns(b, t, token, columns.clone());
            let row =
                DlogitsCondition::new(condition, reference, token, &condition.alternatives[0]).whole(&columns).scale;
            scales.row_mut(b * reference.shape().tokens + t).assign(&Array1::from(row));
        }
        dhidden.scale += scales.dot(&head.columns(columns).mapv(f64::abs)).sum();
        let scales = scales.t().dot(&sizes);
        head.dlm_head(&gradients).iter().zip(&scales).for_each(|(x, scale)| dlm_head.add(x.abs(), *scale));
    }
    head.dhidden(|columns| head.dlogits(columns)).iter().for_each(|x| dhidden.add(x.abs(), 0.0));
    for (name, Total { value, scale }) in [("dhidden_sum_abs", dhidden), ("dlm_head_rows_sum_abs", dlm_head)] {
        scalars.insert(name, RecordedScalar { value: value.value(), scale });
    }
    scalars
}

/// Sums over all tokens, and returns the tokens' conditions.
fn sums(reference: &Reference) -> (RecordedSums, Array2<Option<Condition>>) {
    let mut sums = RecordedSums::default();
    let shape = reference.shape();
    // Both sides are computed in f64, which is far finer than any tie band.
    let conditions = Condition::for_tokens(reference, Bands::NONE, &[]);
    for b in 0..shape.batch {
        for t in 0..shape.tokens {
            let Some(token) = reference.token(b, t) else { continue };
            let Some(condition) = &conditions[[b, t]] else { continue };
            let row = reference.row(b, t, token);
            let dlogits = reference.dlogits_row(b, t);
            let scales =
                DlogitsCondition::new(condition, reference, token, &condition.alternatives[0]).whole(&row).scale;
            for ((&x, &d), scale) in row.logits().iter().zip(&dlogits).zip(scales) {
                // The square d² moves by 2|d| of an error of d, and the product d·x by |x|.
                sums.sum_abs.add(d.abs(), scale);
                sums.sum_sq.add(d * d, 2.0 * d.abs() * scale);
                // The product 0 · (−∞) counts as 0.
                if x.is_finite() {
                    sums.dot.add(d * x, x.abs() * scale);
                }
            }
            sums.add_token(reference, token, condition);
        }
    }
    (sums, conditions)
}

/// A sum over all elements, compensated: a million plain additions would lose more than the limit allows.
#[derive(Clone, Copy, Default)]
struct Total {
    value: Sum,
    scale: f64,
}

impl Total {
    fn add(&mut self, value: f64, scale: f64) {
        self.value.add(value);
        self.scale += scale;
    }
}

/// The sums and counts over all tokens from which the scalars follow.
#[derive(Default)]
struct RecordedSums {
    sum_abs: Total,
    sum_sq: Total,
    dot: Total,
    loss_scale: f64,
    entropy_scale: f64,
    ratio_scale: f64,
    ratios: Vec<f64>,
    clipped: [u32; 2],
}

impl RecordedSums {
    fn add_token(&mut self, reference: &Reference, token: &Token, condition: &Condition) {
        self.loss_scale += token.weight * condition.token_loss.scale;
        self.entropy_scale += condition.entropy.scale / reference.count() as f64;
        self.ratio_scale = self.ratio_scale.max(condition.ratio.scale);
        self.ratios.push(token.inputs.ratio(reference.spec()));
        self.clipped[0] += u32::from(token.clipped_low);
        self.clipped[1] += u32::from(token.clipped_high);
    }

    fn named(self, reference: &Reference) -> BTreeMap<&'static str, RecordedScalar> {
        let (low, high) = (1.0 - EPSILON_LOW, 1.0 + EPSILON_HIGH);
        let count = |holds: &dyn Fn(f64) -> bool| self.ratios.iter().filter(|r| holds(**r)).count() as f64;
        let exact = |value: f64| RecordedScalar { value, scale: 0.0 };
        let scalar = |total: Total| RecordedScalar { value: total.value.value(), scale: total.scale };
        let of_ratio = |value: f64| RecordedScalar { value, scale: self.ratio_scale };
        let margin = |r: &f64| (r - low).abs().min((r - high).abs());
        BTreeMap::from([
            ("n_tokens", exact(reference.count() as f64)),
            ("entropy_mean", RecordedScalar { value: reference.metrics().entropy_mean, scale: self.entropy_scale }),
            ("loss", RecordedScalar { value: reference.loss(), scale: self.loss_scale }),
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

/// Iterates over logp, or entropy, of every unmasked token.
pub fn token_values<'r>(
    reference: &'r Reference,
    entropy: bool,
) -> impl Iterator<Item = ((usize, usize), RecordedScalar)> + use<'r> {
    let conditions = Condition::for_tokens(reference, Bands::NONE, &[]);
    conditions.into_iter().enumerate().filter_map(move |(i, condition)| {
        let tokens = reference.shape().tokens;
        let (b, t) = (i / tokens, i % tokens);
        let (token, condition) = (reference.token(b, t)?, condition?);
        let (value, scale) =
            if entropy { (token.entropy, condition.entropy.scale) } else { (token.inputs.logp, condition.logp.scale) };
        Some(((b, t), RecordedScalar { value, scale }))
    })
}

/// Makes the problem of `whole`'s tokens over a part of the vocabulary, whose rows of the head are `lm_head_rows`, `[V,H]`.
///
/// # Errors
/// A message naming the id that has no row.
pub fn sub_vocabulary_problem(
    whole: &Problem,
    hidden: FloatArray<Ix3>,
    lm_head_rows: FloatArray<Ix2>,
    row_ids: &Array1<i64>,
) -> Result<HeadProblem, String> {
    let index: BTreeMap<i64, i64> = row_ids.iter().copied().zip(0..).collect();
    if let Some(((b, t), id)) = whole.ids.indexed_iter().find(|(at, id)| whole.mask[*at] && !index.contains_key(id)) {
        return Err(format!("`ids[{b},{t}]`: got {id}, expected one of `lm_head_row_ids`"));
    }
    let projection =
        Projection { hidden, lm_head: lm_head_rows, layout: HeadLayout::VocabByHidden, rounds_logits: false };
    let ids = whole.ids.mapv(|id| index.get(&id).copied().unwrap_or(-1));
    Ok(HeadProblem { ids, ..whole.with_logits(projection) })
}

/// Judges recorded values, each with its place and the scalar from the reference, as one gate.
pub fn judge_recorded(pairs: &[(Position, RecordedScalar, f64)], tolerances: &Tolerances) -> Verdict {
    let kappa = tolerances.recorded.kappa;
    let mut tally = Tally::default();
    for &(at, scalar, recorded) in pairs {
        let allowance = Allowance { rounding: 0.0, unit: f64::EPSILON / 2.0, scale: scalar.scale, floor: 0.0 };
        tally.compare(at, scalar.value, recorded, kappa, allowance, Dtype::F64);
    }
    let status = tally.status();
    Verdict {
        gate: Gate::new(Output::Recorded, Model::Elementwise),
        dtype: Dtype::F64,
        promised: Dtype::F64,
        status,
        kappa: Some(kappa),
        tally,
        grade: (!status.failed()).then_some(Grade::Exact),
        short_of_exact: None,
        open_entropies: None,
    }
}
