//! [`DhiddenLimits`]: the limits of the gradient of hidden states, as sums over the vocabulary.

use std::collections::HashMap;

use ndarray::{Array1, Array2, Ix3, s};
use rayon::prelude::*;

use super::dlogits::{DlogitsErrors, ProductErrors, TokenDlogitsErrors};
use super::gradient::GradientRow;
use super::sums::{ROUNDING_SUMS, add_product, rounding_of_sum, rounding_terms, square, stacked};
use super::{ALIKE, CandidateGradient, LARGEST_SUM};
use crate::U;
use crate::gate::{Edge, Gate, Model, Output};
use crate::judge::{GateTallies, JudgedToken, compare_with_zero};
use crate::metric::Position;
use crate::tolerance::Limits;
use assay_core::problem::{Dtype, HeadShape};
use assay_reference::HeadReference;

/// The sums over the vocabulary from which the limits of `dhidden` follow; `[tokens,H]`, several stacked.
pub(super) struct DhiddenLimits<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    /// The sums `Σ_v c_v w_hv`.
    common: Array2<f64>,
    /// The sums `Σ_v r_v |w_hv|` of all tokens, then `Σ_v (f + i_v) |w_hv|` with the distance to other branches.
    by_size: Array2<f64>,
    /// The sums `Σ_v o_v² w_hv²` of all tokens, then `Σ_v r_v² w_hv²`, then `Σ_v dx_v² w_hv²`.
    by_square: Array2<f64>,
    /// The sums of [`rounding_terms`] times `w_hv`.
    roundings: Array2<f64>,
    /// The first of the sums of squares if the errors of equal logits are added up first; 0 for tokens without equal logits.
    equal_logits: Array2<f64>,
    /// The relative error of a sum over the vocabulary, one entry per token.
    relative: Vec<f64>,
}

impl<'r> DhiddenLimits<'r> {
    pub(super) fn new(reference: &'r HeadReference<'r>, tokens: &[JudgedToken], limits: &'r Limits<'r>) -> Self {
        let HeadShape { hidden, vocab, .. } = reference.shape();
        let zeros = |sums: usize| Array2::zeros((sums * tokens.len(), hidden));
        Self {
            reference,
            limits,
            common: zeros(1),
            by_size: zeros(2),
            by_square: zeros(3),
            roundings: zeros(ROUNDING_SUMS),
            equal_logits: zeros(1),
            relative: vec![limits.spread() * U * f64::sqrt(vocab as f64); tokens.len()],
        }
    }

    /// Adds some columns of the vocabulary, whose weights are `[columns,H]`.
    pub(super) fn add(&mut self, dlogits: &DlogitsErrors, weights: &Array2<f64>) {
        let DlogitsErrors { exact, common, own, rounding, one_sided, of_ids, dtype, .. } = dlogits;
        // Errors of different kinds add up in different ways: common ones keep their sign, so that Σ c·w is taken as it
        // is; one-sided ones are added by size; errors of one column each by squares. Parts of one kind are stacked, so
        // that the weights are read once for each.
        add_product(&mut self.common, common, weights.view(), |w| w);
        add_product(&mut self.by_size, &stacked(&[rounding, &(one_sided + of_ids)]), weights.view(), f64::abs);
        let squares = stacked(&[own, rounding, exact]).mapv_into(square);
        add_product(&mut self.by_square, &squares, weights.view(), square);
        add_product(&mut self.roundings, &rounding_terms(exact, *dtype), weights.view(), |w| w);
    }

    /// Adds up the errors of equal logits before they are squared, some hidden units at a time.
    pub(super) fn add_equal_logits(&mut self, dtype: Dtype, tokens: &[JudgedToken]) {
        let groups = |token| EqualLogits::find(self.reference, token, dtype, self.limits);
        let by_token: Vec<(usize, EqualLogits)> =
            tokens.par_iter().enumerate().filter_map(|(i, token)| Some((i, groups(token)?))).collect();
        if by_token.is_empty() {
            return;
        }
        for units in self.reference.unit_chunks() {
            let weights = self.reference.units(units.clone());
            let squares: Vec<_> = by_token.par_iter().map(|(_, equal)| equal.squares(&weights)).collect();
            for ((i, _), squares) in by_token.iter().zip(squares) {
                self.equal_logits.slice_mut(s![*i, units.clone()]).assign(&squares);
            }
        }
        for (i, equal) in &by_token {
            // Equal terms that are added one after the other are rounded alike too.
            self.relative[*i] = self.relative[*i].max(U * equal.most as f64);
        }
    }

    /// Bounds the error of element `h` of the `i`th token, which is exactly `exact`.
    fn limit(&self, (i, h): (usize, usize), exact: f64, product: ProductErrors) -> f64 {
        let tokens = self.relative.len();
        let [rounding, one_sided] = [0, 1].map(|sum| self.by_size[[sum * tokens + i, h]]);
        let [own2, rounding2, exact2] = [0, 1, 2].map(|sum| self.by_square[[sum * tokens + i, h]]);
        let roundings = std::array::from_fn(|sum| self.roundings[[sum * tokens + i, h]]);
        // The bound of one element is the line of the table at the head of [`super`]: c, then o, R, f + i, and the
        // roundings of the sum itself.
        self.common[[i, h]].abs()
            + own2.max(self.equal_logits[[i, h]]).sqrt()
            + rounding_of_sum(rounding, rounding2, roundings, self.limits)
            + one_sided
            + product.relative * exact.abs()
            + self.relative[i] * (exact.abs() + exact2.sqrt())
    }

    /// Tells for each hidden unit whether its sum may overflow f32 on the way to a finite value; `None` if no sum can.
    fn overflowing_sums(&self, i: usize, token: &JudgedToken) -> Option<Vec<bool>> {
        let HeadShape { vocab, hidden, .. } = self.reference.shape();
        // A sum of sizes is at most √V times the root of the squares' sum: the cheap test first.
        let sum2 = |h: usize| self.by_square[[2 * self.relative.len() + i, h]] * vocab as f64;
        if (0..hidden).all(|h| sum2(h).sqrt() <= LARGEST_SUM) {
            return None;
        }
        let mut sizes = Array1::<f64>::zeros(hidden);
        for columns in self.reference.column_chunks() {
            let dlogits = self.reference.on_logits().dlogits_columns(token.b, token.t, columns.clone());
            let weights = self.reference.columns(columns).mapv_into(f64::abs);
            sizes += &Array1::from(dlogits).mapv_into(f64::abs).dot(&weights);
        }
        Some(sizes.iter().map(|size| *size > LARGEST_SUM).collect())
    }

    /// Compares the `dhidden` of one candidate with `exact`, `[B·T,H]`.
    pub(super) fn compare(
        &self,
        exact: &Array2<f64>,
        CandidateGradient { actual, gates, .. }: &CandidateGradient<Ix3>,
        tokens: &[JudgedToken],
        products: &[ProductErrors],
        tallies: &mut GateTallies,
    ) {
        let HeadShape { batch, tokens: width, .. } = self.reference.shape();
        for (b, t) in ndarray::indices((batch, width)) {
            let (row, at) = (actual.row(b, t), |h| Position::hidden(b, t, h));
            let Ok(i) = tokens.binary_search_by_key(&(b, t), |token| (token.b, token.t)) else {
                let gate = Gate::new(Output::Dhidden, Model::Elementwise).at(Some(Edge::Masked));
                compare_with_zero(tallies.entry(gate, gates.stored, None), &row, at);
                continue;
            };
            let token = &tokens[i];
            let exact: Vec<f64> = exact.row(b * width + t).to_vec();
            let limit = |(h, &x): (usize, &f64)| self.limit((i, h), x, products[i]);
            let limits: Vec<f64> = exact.iter().enumerate().map(limit).collect();
            let all_open = token.may_be_nonfinite() || products[i].overflow;
            let overflows = if all_open { None } else { self.overflowing_sums(i, token) };
            let open = |h: usize| all_open || overflows.as_ref().is_some_and(|overflows| overflows[h]);
            let row = GradientRow { exact: &exact, limits: &limits, actual: &row };
            gates.add(tallies, token.edge, token.edge, gates.compare(token.at(), at, open, row));
        }
    }
}

/// The columns of a token, without its ids, grouped by equal logits.
struct EqualLogits {
    groups: Vec<EqualLogitsGroup>,
    /// The size of the largest group.
    most: usize,
}

/// The columns of one logit value.
struct EqualLogitsGroup {
    columns: Vec<usize>,
    /// The largest `o²` among them.
    own2: f64,
}

impl EqualLogits {
    /// Groups the columns of a token; `None` if no logit occurs [`ALIKE`] times.
    fn find(reference: &HeadReference, token: &JudgedToken, dtype: Dtype, limits: &Limits) -> Option<Self> {
        let reference = reference.on_logits();
        let logits = reference.problem().logits.row(token.b, token.t);
        // Equal logits have equal errors in any kernel, since it computes all of them alike.
        let mut groups: HashMap<u64, Vec<usize>> = HashMap::new();
        for (v, x) in logits.iter().enumerate().filter(|(v, _)| token.ids(reference).all(|id| id != *v)) {
            groups.entry(x.to_bits()).or_default().push(v);
        }
        let most = groups.values().map(Vec::len).max().filter(|most| *most >= ALIKE)?;
        let row = TokenDlogitsErrors::new(reference, token, 0..logits.len(), dtype, limits);
        let own2 = |columns: &[usize]| columns.iter().map(|&v| square(row.own[v])).fold(0.0, f64::max);
        let group = |columns: Vec<usize>| EqualLogitsGroup { own2: own2(&columns), columns };
        Some(Self { groups: groups.into_values().map(group).collect(), most })
    }

    /// Sums `own2·w²` over all columns, with the weights of a group added up first if that is more; `weights` are `[V,units]`.
    fn squares(&self, weights: &Array2<f64>) -> Array1<f64> {
        let mut all = Array1::zeros(weights.ncols());
        for EqualLogitsGroup { columns, own2 } in &self.groups {
            let mut sums = vec![(0.0, 0.0); all.len()];
            for &v in columns {
                for ((sum, squares), x) in sums.iter_mut().zip(weights.row(v)) {
                    *sum += x;
                    *squares += square(*x);
                }
            }
            for (all, (sum, squares)) in all.iter_mut().zip(sums) {
                // Equal errors add up to own·Σw; where the weights cancel in that sum, the squares of unequal errors
                // are the larger bound.
                *all += own2 * f64::max(squares, square(sum));
            }
        }
        all
    }
}
