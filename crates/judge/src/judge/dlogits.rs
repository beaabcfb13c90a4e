//! [`CandidateRow`]: the dlogits of one token under their three gates: each element, the row's norm, and the row's sum.

use ndarray::Ix3;

use super::branch::BranchDlogits;
use super::gates::{GateTallies, StoredDtype};
use super::outputs::CandidateOutputs;
use super::token::JudgedToken;
use crate::U;
use crate::column_bounds::ColumnErrors;
use crate::gate::{Edge, Gate, Model, Output};
use crate::metric::{Allowance, Allowances, Position, Tally};
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, FloatView, HeadShape, Shape};
use assay_reference::Reference;

/// The ways in which dlogits are compared, in the order of [`RowTallies::into_tallies`].
pub(super) const DLOGITS_MODELS: [Model; 3] = [Model::Elementwise, Model::RowL2, Model::RowSum];

/// The vocabulary entries that are judged at once: few enough to stay in a cache.
const AT_ONCE: usize = 4096;

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

    /// Compares the vocabulary entries from `first` on, and adds them to `sums`.
    fn add(
        &self,
        reference: &Reference,
        sums: &mut RowSums,
        first: usize,
        (exact, bounds): &(Vec<f64>, ColumnErrors),
        actual: &[f64],
    ) {
        let (token, stored, kappa) = (self.token, self.stored, self.kappa);
        let at = |v| Position::column(token.b, token.t, first + v);
        let allowed = stored.allowances(exact, bounds);
        // Only a token that may overflow needs the loop element by element; all other tokens take the blockwise
        // comparison, which decides most blocks without a branch.
        if token.may_be_nonfinite() {
            for (v, (&x, &y)) in exact.iter().zip(actual).enumerate() {
                let unlimited = x.is_finite() && !(bounds.scale[v] + bounds.floor[v]).is_finite();
                let reported_elsewhere = !x.is_finite() && self.reports_nonfinite;
                if unlimited || reported_elsewhere || !y.is_finite() {
                    sums.elements.report(at(v));
                    // A norm or a sum with such an element has no value: NaN marks it as not compared.
                    sums.error = f64::NAN;
                } else {
                    sums.elements.compare(at(v), x, y, kappa, allowed.at(v), stored.given);
                }
            }
        } else {
            sums.elements.compare_all(at, exact, actual, kappa, &allowed, stored.given);
        }
        // The ids are of the whole row, and are moved to the block's own numbering; those of other blocks are left out.
        let ids = token.ids(reference).filter_map(|id| id.checked_sub(first)).filter(|&y| y < exact.len());
        sums.add(exact, actual, &allowed, &ids.collect::<Vec<_>>());
    }

    /// Compares norm and sum of the row, once all its vocabulary entries are in `sums`.
    fn finish(&self, sums: RowSums) -> RowTallies {
        let mut row = RowTallies { elements: sums.elements, ..RowTallies::default() };
        if sums.error.is_finite() {
            // A norm of a sum is at most the sum of the norms: ‖error‖ ≤ ‖½ulp‖ + κu‖scale‖ + ‖floor‖, so each part is
            // summed in squares by itself. The row's error is compared with an exact value of 0.
            let at = self.token.at();
            let allowance = |rounding, scale, floor| Allowance { rounding, unit: U, scale, floor };
            let l2 = allowance(sums.rounding2.sqrt(), sums.scale2.sqrt(), sums.floor2.sqrt());
            row.l2.compare(at, 0.0, sums.error2.sqrt(), self.kappa, l2, Dtype::F64);
            let sum = allowance(sums.rounding, sums.scale, sums.floor);
            row.sum.compare(at, 0.0, sums.error, self.kappa, sum, Dtype::F64);
        } else {
            (row.l2.not_compared, row.sum.not_compared) = (1, 1);
        }
        row
    }
}

/// The sums over a row so far: plain ones of every vocabulary entry, and of squares of all but the token's ids.
#[derive(Clone, Default)]
struct RowSums {
    elements: Tally,
    error: f64,
    rounding: f64,
    scale: f64,
    floor: f64,
    error2: f64,
    rounding2: f64,
    scale2: f64,
    floor2: f64,
}

impl RowSums {
    /// Adds vocabulary entries; `targets` are the places of the token's ids among them.
    fn add(&mut self, exact: &[f64], actual: &[f64], allowed: &Allowances, targets: &[usize]) {
        let allowances = allowed.rounding.iter().zip(&allowed.scale).zip(&allowed.floor);
        for (v, ((x, y), ((&rounding, &scale), &floor))) in exact.iter().zip(actual).zip(allowances).enumerate() {
            let error = y - x;
            self.error += error;
            self.rounding += rounding;
            self.scale += scale;
            self.floor += floor;
            // The norm leaves the token's ids out: the limit of a target is about G, of another column p_j·G, and the
            // one would hide the errors of all others.
            let square = |x: f64| if targets.contains(&v) { 0.0 } else { x * x };
            self.error2 += square(error);
            self.rounding2 += square(rounding);
            self.scale2 += square(scale);
            self.floor2 += square(floor);
        }
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
    let sums = RowSums { elements, ..RowSums::default() };
    let mut sums = vec![vec![sums; choices.len()]; rows.len()];
    walk_rows(reference, token, rows, choices, |first, expected, row, actual| {
        for (choice, (expected, sums)) in expected.iter().zip(&mut sums[row]).enumerate() {
            match &shifts {
                None => rows[row].add(reference, sums, first, expected, actual),
                Some(shifts) => {
                    let at_ids = choices[choice].share_of_sum(token) * token.condition.softmax.lane_sum;
                    let shifted = shifted(reference, token, first, expected, (shifts[row][choice], at_ids));
                    rows[row].add(reference, sums, first, &shifted, actual);
                }
            }
        }
    });
    let finish = |(row, sums): (&CandidateRow, Vec<RowSums>)| sums.into_iter().map(|sums| row.finish(sums)).collect();
    rows.iter().zip(sums).map(finish).collect()
}

/// Walks the vocabulary a block at a time, and calls `visit` with the first entry of the block, the exact values and limits of it for each
/// choice, and for each candidate its number and its values.
fn walk_rows(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
    mut visit: impl FnMut(usize, &[(Vec<f64>, ColumnErrors)], usize, &[f64]),
) {
    let vocab = reference.shape().vocab;
    for first in (0..vocab).step_by(AT_ONCE) {
        let range = first..vocab.min(first + AT_ONCE);
        let columns = reference.columns(token.b, token.t, token.token, range.clone());
        let expected: Vec<_> = choices.iter().map(|choice| choice.evaluate(reference, token, &columns)).collect();
        for (number, row) in rows.iter().enumerate() {
            visit(first, &expected, number, &row.actual.row_part(token.b, token.t, range.clone()));
        }
    }
}

/// Returns the relative error of the row's sum that fits each candidate best on each choice; `None` where no such error is forgiven.
///
/// All probabilities of a row are off by one factor if their common sum is, so the error enters once, and with one sign: as
/// `Σ (y − x) / Σ x` over all entries but the token's ids, or the nearest shift that suits every entry, and no more than the bound of
/// the sum.
fn row_shifts(
    reference: &Reference,
    token: &JudgedToken,
    rows: &[CandidateRow],
    choices: &[BranchDlogits],
) -> Option<Vec<Vec<f64>>> {
    let most = token.condition.softmax.lane_sum;
    if most == 0.0 {
        return None;
    }
    let mut fits = vec![vec![ShiftFit::default(); choices.len()]; rows.len()];
    walk_rows(reference, token, rows, choices, |first, expected, row, actual| {
        let ids: Vec<usize> = token.ids(reference).filter_map(|id| id.checked_sub(first)).collect();
        let CandidateRow { stored, kappa, .. } = &rows[row];
        for ((exact, bounds), fit) in expected.iter().zip(&mut fits[row]) {
            let allowed = stored.allowances(exact, bounds);
            for (v, (x, y)) in exact.iter().zip(actual).enumerate().filter(|(v, _)| !ids.contains(v)) {
                let limit = allowed.rounding[v] + kappa * U * allowed.scale[v] + allowed.floor[v];
                fit.add(*x, *y, limit);
            }
        }
    });
    let shift = |fit: ShiftFit| fit.shift().clamp(-most, most);
    Some(fits.into_iter().map(|row| row.into_iter().map(shift).collect()).collect())
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
    /// Adds a value `y` for `x`, which may be off by `limit` besides the shift.
    fn add(&mut self, x: f64, y: f64, limit: f64) {
        (self.error, self.size) = (self.error + (y - x), self.size + x);
        // A value within its limit of 0 says nothing about a factor.
        if x.abs() > limit {
            let (shift, reach) = ((y - x) / x, limit / x.abs());
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

/// Shifts exact values as an error of the row's sum does: all but the ids' by one factor; the ids' limits grow by `at_ids`.
fn shifted(
    reference: &Reference,
    token: &JudgedToken,
    first: usize,
    (exact, bounds): &(Vec<f64>, ColumnErrors),
    (shift, at_ids): (f64, f64),
) -> (Vec<f64>, ColumnErrors) {
    let mut bounds = bounds.clone();
    let mut moved: Vec<f64> = exact.iter().map(|x| x * (1.0 + shift)).collect();
    for id in token.ids(reference).filter_map(|id| id.checked_sub(first)).filter(|&id| id < exact.len()) {
        moved[id] = exact[id];
        bounds.floor[id] += at_ids;
    }
    (moved, bounds)
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
