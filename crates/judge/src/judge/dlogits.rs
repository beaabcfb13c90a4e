//! [`CandidateRow`]: the dlogits of one token under their three gates: each element, the row's norm, and the row's sum.

use ndarray::Ix3;

use super::branch::BranchDlogits;
use super::gates::{GateTallies, StoredDtype};
use super::outputs::CandidateOutputs;
use super::token::JudgedToken;
use crate::U;
use crate::column_bounds::ColumnErrors;
use crate::condition::ErrorBound;
use crate::error_sums::{BoundedValues, ErrorSums};
use crate::gate::{Edge, Gate, Model, Output};
use crate::metric::{Allowance, Position, Tally};
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, FloatView, HeadShape, Shape};
use assay_reference::{Reference, TokenColumns};
use multiversion::multiversion;

/// The ways in which dlogits are compared, in the order of [`RowTallies::into_tallies`].
pub(super) const DLOGITS_MODELS: [Model; 3] = [Model::Elementwise, Model::RowL2, Model::RowSum];

/// The vocabulary entries that are judged at once: few enough that a dozen numbers for each stay in a core's own cache.
const AT_ONCE: usize = 2048;

/// The tallies of one token's dlogits under its three gates.
#[derive(Default)]
pub(super) struct RowTallies {
    elements: Tally,
    l2: Tally,
    sum: Tally,
}

impl RowTallies {
    /// Returns the largest error / limit of the three gates.
    pub(super) fn badness(&self) -> f64 {
        self.elements.badness().max(self.l2.badness()).max(self.sum.badness())
    }

    pub(super) fn into_tallies(self) -> [Tally; 3] {
        [self.elements, self.l2, self.sum]
    }
}

/// The dlogits that one candidate returned for a token.
pub(super) struct CandidateRow<'t, 'c> {
    token: &'t JudgedToken<'t>,
    actual: FloatView<'c, Ix3>,
    stored: StoredDtype,
    kappa: f64,
    /// Whether one of the values is not finite on a token where that is honest: the row then reports the overflow, and exact values
    /// that are not finite need not be reported one by one.
    reports_nonfinite: bool,
    /// The extents of the maps of errors; `None` if there are no maps.
    mapped: Option<HeadShape>,
}

impl<'t, 'c> CandidateRow<'t, 'c> {
    /// Takes the row of `token` from a candidate; `None` if it has no dlogits.
    pub(super) fn new(
        token: &'t JudgedToken<'t>,
        candidate: &'c CandidateOutputs<'_>,
        reference: &Reference,
        limits: &Limits,
    ) -> Option<Self> {
        let actual = candidate.dlogits.as_ref()?.view();
        let stored = StoredDtype::gradient(actual.dtype(), reference.problem().logits.dtype());
        let reports_nonfinite = token.may_be_nonfinite() && actual.row(token.b, token.t).iter().any(|y| !y.is_finite());
        let mapped = limits.mapped(reference.shape(), 0);
        Some(Self { token, actual, stored, kappa: limits.kappa(Output::Dlogits), reports_nonfinite, mapped })
    }

    /// Returns the largest errors allowed for some vocabulary entries.
    fn limits(&self, exact: &[f64], bounds: &ColumnErrors) -> Vec<f64> {
        let allowances = exact.iter().enumerate().map(|(v, x)| self.stored.allowance(*x, bounds.at(v)));
        allowances.map(|allowance| allowance.limit(self.kappa)).collect()
    }

    /// Compares norm and sum of the row, once all its vocabulary entries are in `sums`.
    fn finish(&self, (elements, sums): (Tally, ErrorSums)) -> RowTallies {
        let mut row = RowTallies { elements, ..RowTallies::default() };
        let [error, rounding, scale] = sums.plain();
        if error.is_finite() {
            // A norm of a sum is at most the sum of the norms: ‖error‖ ≤ ‖½ulp + floor‖ + κu‖scale‖, so each part is summed in squares by
            // itself. The row's error is compared with an exact value of 0.
            let at = self.token.at();
            let allowance = |rounding, scale| Allowance { rounding, unit: U, scale, floor: 0.0 };
            let [norm_of_error, norm_of_rounding, norm_of_scale] = sums.norms();
            let l2 = allowance(norm_of_rounding, norm_of_scale);
            row.l2.compare(at, 0.0, norm_of_error, self.kappa, l2, Dtype::F64);
            row.sum.compare(at, 0.0, error, self.kappa, allowance(rounding, scale), Dtype::F64);
        } else {
            (row.l2.not_compared, row.sum.not_compared) = (1, 1);
        }
        row
    }
}

/// Compares the vocabulary entries from `first` on, and adds them to the row's `elements` and `sums`.
///
/// The norm leaves the token's ids out: the limit of an id is about `G`, that of another column `p_j·G`, and an id would hide all
/// others' errors.
#[multiversion(targets("x86_64+avx2"))]
fn compare_columns(
    row: &CandidateRow,
    reference: &Reference,
    (elements, sums): &mut (Tally, ErrorSums),
    first: usize,
    (exact, bounds): &(Vec<f64>, ColumnErrors),
    actual: &[f64],
) {
    let (token, stored, kappa) = (row.token, row.stored, row.kappa);
    let at = |v| Position::column(token.b, token.t, first + v);
    let allowance = stored.allowances();
    // The ids are of the whole row, and are moved to the block's own numbering; those of other blocks are left out.
    let ids = token.ids(reference).filter_map(|id| id.checked_sub(first)).filter(|&y| y < exact.len());
    let mut ids: Vec<usize> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    // Only a token that may overflow needs the loop element by element.
    if token.may_be_nonfinite() {
        for (v, (&x, &y)) in exact.iter().zip(actual).enumerate() {
            let ErrorBound { scale, floor } = bounds.at(v);
            let allowed = allowance(x, scale, floor);
            let unlimited = x.is_finite() && !(scale + floor).is_finite();
            let reported_elsewhere = !x.is_finite() && row.reports_nonfinite;
            if unlimited || reported_elsewhere || !y.is_finite() {
                elements.report(at(v));
                // A norm or a sum with such an element has no value: NaN marks it as not compared.
                sums.add_without_square(x, f64::NAN, allowed);
            } else {
                elements.compare(at(v), x, y, kappa, allowed, stored.given);
                if ids.contains(&v) { sums.add_without_square(x, y, allowed) } else { sums.add(x, y, allowed) }
            }
        }
        return;
    }
    // All other tokens take the blockwise comparison of the entries before each id, and of those after the last.
    let values = BoundedValues { exact, actual, scale: &bounds.scale, floor: &bounds.floor };
    let mut start = 0;
    for end in ids.iter().copied().chain([exact.len()]) {
        let at = |v| at(start + v);
        elements.compare_all(sums, at, values.range(start..end), kappa, &allowance, stored.given);
        if let (Some(&x), Some(&y)) = (exact.get(end), actual.get(end)) {
            let allowed = allowance(x, bounds.scale[end], bounds.floor[end]);
            elements.compare(at(end - start), x, y, kappa, allowed, stored.given);
            sums.add_without_square(x, y, allowed);
        }
        start = end + 1;
    }
}

/// Compares the row of each candidate on each of `choices`; the result has one entry per candidate and choice.
///
/// The vocabulary is walked once, a block at a time: exact values and limits of a block are evaluated for each choice, and every
/// candidate is compared with them while they are in the cache.
pub(super) fn compare_rows(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
) -> Vec<Vec<RowTallies>> {
    let shifts = row_shifts(reference, token, rows, choices);
    let gate = Gate::new(Output::Dlogits, Model::Elementwise);
    let elements = Tally::with_maps(gate, rows.iter().find_map(|row| row.mapped));
    let mut sums = vec![vec![(elements, ErrorSums::default()); choices.len()]; rows.len()];
    walk_rows(reference, token, rows, choices, |block, row, actual| {
        for (choice, (expected, sums)) in block.expected.iter().zip(&mut sums[row]).enumerate() {
            match &shifts {
                None => compare_columns(&rows[row], reference, sums, block.columns.first(), expected, actual),
                Some(shifts) => {
                    let moved = block.moved(reference, token, choice, &choices[choice], shifts[row][choice]);
                    compare_columns(&rows[row], reference, sums, block.columns.first(), &moved, actual);
                }
            }
        }
    });
    let finish = |(row, sums): (&CandidateRow, Vec<_>)| sums.into_iter().map(|sums| row.finish(sums)).collect();
    rows.iter().zip(sums).map(finish).collect()
}

/// The exact values of a block of vocabulary entries, and how they move with what the whole row shares.
struct ColumnBlock {
    columns: TokenColumns,
    /// The exact values and limits, one entry per choice.
    expected: Vec<(Vec<f64>, ColumnErrors)>,
    /// The movement of each dlogit by an error of the token's entropy, `∂loss/∂H · q_j/T`; empty if no such error is forgiven.
    by_entropy: Vec<f64>,
    /// The part of each dlogit that no probability is a factor of; empty unless a cross-entropy smooths labels.
    constant: Vec<f64>,
}

impl ColumnBlock {
    /// Returns how far a relative error of 1 of the row's sum moves the dlogit `x` of column `v`.
    fn by_sum(&self, v: usize, x: f64) -> f64 {
        x - self.constant.get(v).copied().unwrap_or(0.0)
    }

    /// Moves the exact values of a choice as errors of the row's sum and entropy do: the sum moves all but the ids by one factor, and adds
    /// to the ids' limits.
    fn moved(
        &self,
        reference: &Reference,
        token: &JudgedToken,
        choice: usize,
        branch: &BranchDlogits,
        shift: RowShift,
    ) -> (Vec<f64>, ColumnErrors) {
        let (exact, bounds) = &self.expected[choice];
        let mut bounds = bounds.clone();
        let mut moved: Vec<f64> = exact.iter().enumerate().map(|(v, x)| x + shift.sum * self.by_sum(v, *x)).collect();
        for id in token.ids(reference).filter_map(|id| self.columns.place_of(id)) {
            moved[id] = exact[id];
            bounds.floor[id] += self.sum_error_at_id(token, branch, id);
        }
        for (moved, by_entropy) in moved.iter_mut().zip(&self.by_entropy) {
            *moved += shift.entropy * by_entropy;
        }
        (moved, bounds)
    }

    /// Bounds how far the largest error of the row's sum moves the id in column `id` of the block.
    fn sum_error_at_id(&self, token: &JudgedToken, branch: &BranchDlogits, id: usize) -> f64 {
        // The id's part of the entropy's gradient, −q(ln q + H), moves by as much of itself.
        let log_q = token.token.entropy_softmax.stats.log_probability(self.columns.entropy().z[id]);
        let of_entropy = self.by_entropy.get(id).map_or(0.0, |q| q.abs() * (log_q.abs() + token.token.entropy));
        (branch.share_of_sum(token) + of_entropy) * token.condition.row_sum()
    }
}

/// Walks the vocabulary a block at a time, and calls `visit` with the block, and for each candidate its number and its values.
fn walk_rows(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
    mut visit: impl FnMut(&ColumnBlock, usize, &[f64]),
) {
    let vocab = reference.shape().vocab;
    let by_entropy = (most_shift(token).entropy > 0.0).then(|| token.token.grad_entropy / token.token.temperature());
    for first in (0..vocab).step_by(AT_ONCE) {
        let range = first..vocab.min(first + AT_ONCE);
        let columns = reference.columns(token.b, token.t, token.token, range.clone());
        let expected = choices.iter().map(|choice| choice.evaluate(reference, token, &columns)).collect();
        let constant = match reference.constant_dlogit(token.token) {
            0.0 => Vec::new(),
            constant => columns
                .slopes()
                .map_or(vec![constant; range.len()], |slopes| slopes.iter().map(|slope| constant * slope).collect()),
        };
        let mut block = ColumnBlock { columns, expected, by_entropy: Vec::new(), constant };
        if let Some(factor) = by_entropy {
            block.by_entropy = block.columns.entropy().probabilities.iter().map(|q| factor * q).collect();
            if let Some(slopes) = block.columns.slopes() {
                block.by_entropy.iter_mut().zip(slopes).for_each(|(moved, slope)| *moved *= slope);
            }
        }
        for (number, row) in rows.iter().enumerate() {
            visit(&block, number, &row.actual.row_part(token.b, token.t, range.clone()));
        }
    }
}

/// The errors that all dlogits of a row share.
#[derive(Clone, Copy, Default)]
struct RowShift {
    /// The relative error of the row's sum of exponentials.
    sum: f64,
    /// The error of the entropy, in nats.
    entropy: f64,
}

/// Returns the largest shared errors that are forgiven in the row of `token`; 0 for an entropy that has no gradient.
fn most_shift(token: &JudgedToken) -> RowShift {
    // The errors of a divergence's two sums are in its limits.
    if token.condition.divergence.is_some() {
        return RowShift::default();
    }
    let softmax = &token.condition.softmax;
    let entropy = if token.token.grad_entropy == 0.0 { 0.0 } else { softmax.entropy_shift };
    RowShift { sum: token.condition.row_sum(), entropy }
}

/// Returns the shared errors that fit each candidate best on each choice; `None` where no such error is forgiven.
///
/// All probabilities of a row are off by one factor if their common sum is, so the error enters once, and with one sign: as
/// `Σ (y − x) / Σ x` over all entries but the token's ids, or the nearest shift that suits every entry, and no more than the bound of
/// the sum. The error of an entropy moves all entries in proportion to their probabilities, and is fitted alike, for errors of the sum
/// in small steps: the range of shifts that suits every entry is widest at one of them, and narrower the farther from it.
fn row_shifts(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
) -> Option<Vec<Vec<RowShift>>> {
    let most = most_shift(token);
    if most.entropy == 0.0 {
        return (most.sum > 0.0).then(|| sum_shifts(reference, token, rows, choices));
    }
    let around = |middle: f64, reach: f64| -> Vec<f64> {
        let steps = (-STEPS..=STEPS).map(|step| middle + reach * f64::from(step) / f64::from(STEPS));
        steps.map(|sum| sum.clamp(-most.sum, most.sum)).collect()
    };
    let sums = if most.sum == 0.0 { vec![0.0] } else { around(0.0, most.sum) };
    let given = vec![vec![sums; choices.len()]; rows.len()];
    let mut fits = entropy_fits(reference, token, rows, choices, given);
    if most.sum > 0.0 {
        let reach = most.sum / f64::from(STEPS);
        let finer = |fit: &EntropyFit| around(fit.sums[fit.widest(most.entropy)], reach);
        let finer = fits.iter().map(|row| row.iter().map(finer).collect()).collect();
        fits = entropy_fits(reference, token, rows, choices, finer);
    }
    let shift = |fit: &EntropyFit| fit.shift(most.entropy);
    Some(fits.iter().map(|row| row.iter().map(shift).collect()).collect())
}

/// The steps of the sum's error to either side, of which the finer ones divide a coarse one.
const STEPS: i32 = 16;

/// Fits the error of the row's sum alone.
fn sum_shifts(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
) -> Vec<Vec<RowShift>> {
    let most = most_shift(token).sum;
    let mut fits = vec![vec![ShiftFit::default(); choices.len()]; rows.len()];
    walk_rows(reference, token, rows, choices, |block, row, actual| {
        let ids: Vec<usize> = token.ids(reference).filter_map(|id| block.columns.place_of(id)).collect();
        for ((exact, bounds), fit) in block.expected.iter().zip(&mut fits[row]) {
            let limits = rows[row].limits(exact, bounds);
            for (v, (x, y)) in exact.iter().zip(actual).enumerate().filter(|(v, _)| !ids.contains(v)) {
                fit.add(block.by_sum(v, *x), y - x, limits[v]);
            }
        }
    });
    let shift = |fit: ShiftFit| RowShift { sum: fit.shift().clamp(-most, most), entropy: 0.0 };
    fits.into_iter().map(|row| row.into_iter().map(shift).collect()).collect()
}

/// Fits the error of the entropy for each error of the sum in `sums`, of each candidate and choice.
fn entropy_fits(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
    sums: Vec<Vec<Vec<f64>>>,
) -> Vec<Vec<EntropyFit>> {
    let fits = |sums: Vec<Vec<f64>>| sums.into_iter().map(EntropyFit::new).collect();
    let mut fits: Vec<Vec<EntropyFit>> = sums.into_iter().map(fits).collect();
    walk_rows(reference, token, rows, choices, |block, row, actual| {
        let ids: Vec<usize> = token.ids(reference).filter_map(|id| block.columns.place_of(id)).collect();
        for (((exact, bounds), branch), fit) in block.expected.iter().zip(choices).zip(&mut fits[row]) {
            let limits = rows[row].limits(exact, bounds);
            for (v, (x, y)) in exact.iter().zip(actual).enumerate() {
                if ids.contains(&v) {
                    // How an id moves with the sum is in its limit.
                    fit.narrow(0.0, block.by_entropy[v], y - x, limits[v] + block.sum_error_at_id(token, branch, v));
                } else {
                    fit.add(block.by_sum(v, *x), block.by_entropy[v], y - x, limits[v]);
                }
            }
        }
    });
    fits
}

/// The shifts of a row with which its values are within their limits.
#[derive(Clone)]
struct ShiftFit {
    error: f64,
    size: f64,
    within: [f64; 2],
}

impl Default for ShiftFit {
    fn default() -> Self {
        Self { error: 0.0, size: 0.0, within: [f64::NEG_INFINITY, f64::INFINITY] }
    }
}

impl ShiftFit {
    /// Adds a value that a shift of 1 moves by `direction`, is off by `error`, and may be off by `limit` besides the shift.
    fn add(&mut self, direction: f64, error: f64, limit: f64) {
        (self.error, self.size) = (self.error + error, self.size + direction);
        // A value within its limit of 0 says nothing about a factor.
        if direction.abs() > limit {
            let (shift, reach) = (error / direction, limit / direction.abs());
            self.within = [self.within[0].max(shift - reach), self.within[1].min(shift + reach)];
        }
    }

    /// Returns the shift of the row's sum, or the nearest with which every value is within its limit. Of coarse dtypes the sum is one of
    /// roundings, which equal values share.
    fn shift(&self) -> f64 {
        let of_sum = Some(self.error / self.size).filter(|shift| shift.is_finite()).unwrap_or(0.0);
        let [low, high] = self.within;
        // At the very end of the range a value is at its limit, on either side of it by the last bit.
        let inset = (high - low) / 16.0;
        if inset > 0.0 && inset.is_finite() { of_sum.clamp(low + inset, high - inset) } else { of_sum }
    }
}

/// The errors of an entropy with which a row's values are within their limits, for several errors of the row's sum.
struct EntropyFit {
    /// The errors of the sum that are tried.
    sums: Vec<f64>,
    /// The smallest and the largest error of the entropy that suits every value, one entry per error of the sum.
    within: [Vec<f64>; 2],
    /// The sum of the values' errors, and how far an error of the sum and one of the entropy move it.
    error: f64,
    by_sum: f64,
    by_entropy: f64,
}

impl EntropyFit {
    fn new(sums: Vec<f64>) -> Self {
        let within = [f64::NEG_INFINITY, f64::INFINITY].map(|end| vec![end; sums.len()]);
        Self { sums, within, error: 0.0, by_sum: 0.0, by_entropy: 0.0 }
    }

    /// Adds a value that an error of the sum moves by `by_sum`, one of the entropy by `by_entropy`, that is off by `error` and may be
    /// off by `limit` besides.
    fn add(&mut self, by_sum: f64, by_entropy: f64, error: f64, limit: f64) {
        self.error += error;
        self.by_sum += by_sum;
        self.by_entropy += by_entropy;
        self.narrow(by_sum, by_entropy, error, limit);
    }

    /// Narrows the ranges to those that suit a value, which is no part of the row's sum.
    fn narrow(&mut self, by_sum: f64, by_entropy: f64, error: f64, limit: f64) {
        if by_entropy == 0.0 {
            return;
        }
        let (shift, slope, reach) = (error / by_entropy, by_sum / by_entropy, limit / by_entropy.abs());
        let [lows, highs] = &mut self.within;
        for ((sum, low), high) in self.sums.iter().zip(lows).zip(highs) {
            let shift = shift - sum * slope;
            *low = if shift - reach > *low { shift - reach } else { *low };
            *high = if shift + reach < *high { shift + reach } else { *high };
        }
    }

    /// Returns the errors of the entropy, of at most `most`, that suit every value where the sum's error is the `i`th; empty if the
    /// first is above the second.
    fn range(&self, i: usize, most: f64) -> [f64; 2] {
        [self.within[0][i].max(-most), self.within[1][i].min(most)]
    }

    /// Returns the place of the error of the sum at which the range of the entropy's error is widest.
    fn widest(&self, most: f64) -> usize {
        let width = |i: &usize| {
            let [low, high] = self.range(*i, most);
            high - low
        };
        (0..self.sums.len())
            .max_by(|a, b| width(a).total_cmp(&width(b)))
            .expect("at least one error of the sum is tried")
    }

    /// Returns the shift that suits every value, with an error of the entropy of at most `most`.
    fn shift(&self, most: f64) -> RowShift {
        let at = self.widest(most);
        let (sum, within) = (self.sums[at], self.range(at, most));
        let fit = ShiftFit { error: self.error - sum * self.by_sum, size: self.by_entropy, within };
        RowShift { sum, entropy: fit.shift().clamp(-most, most) }
    }
}

/// Checks that the dlogits of masked tokens are exactly 0.
pub(super) fn compare_masked_rows(
    dlogits: &FloatView<Ix3>,
    tokens: &[JudgedToken],
    Shape { batch, tokens: width, .. }: Shape,
    stored: StoredDtype,
    tallies: &mut GateTallies,
) {
    for (b, t) in ndarray::indices((batch, width)) {
        // The tokens are in row-major order, so that a token that is not among them is masked.
        if tokens.binary_search_by_key(&(b, t), |token| (token.b, token.t)).is_err() {
            let gate = Gate::new(Output::Dlogits, Model::Elementwise).at(Some(Edge::Masked));
            compare_with_zero(tallies.entry(gate, stored, None), &dlogits.row(b, t), |v| Position::column(b, t, v));
        }
    }
}

/// Compares a masked token's gradient with 0: the first element that is not 0 is the one that counts.
pub(crate) fn compare_with_zero(tally: &mut Tally, values: &[f64], at: impl Fn(usize) -> Position) {
    let (i, x) = values.iter().copied().enumerate().find(|(_, x)| *x != 0.0).unwrap_or((0, 0.0));
    tally.compare(at(i), 0.0, x, 0.0, Allowance::default(), Dtype::F64);
}
