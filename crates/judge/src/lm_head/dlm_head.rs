//! [`DlmHeadLimits`]: the limits of the gradient of a head, as sums over tokens.

use std::collections::HashMap;
use std::ops::Range;

use ndarray::{Array2, ArrayView2, Axis, Ix2, s};
use rayon::prelude::*;

use super::dlogits::{DlogitsErrors, ProductErrors};
use super::gradient::{GradientRow, GradientTallies};
use super::sums::{ROUNDING_SUMS, rounding_of_sum, rounding_terms, square, stacked};
use super::{ALIKE, CandidateGradient, LARGEST_SUM};
use crate::U;
use crate::gate::Edge;
use crate::judge::{GateTallies, JudgedToken, shared_edge};
use crate::metric::Position;
use crate::tolerance::Limits;
use assay_core::problem::HeadShape;
use assay_reference::HeadReference;

/// The columns of a head that a thread judges at once: of 4,096 hidden units there are 64 in all that are widened at a time.
const ROWS_AT_ONCE: usize = 32;

/// The limits of `dlm_head`, as far as they do not depend on the vocabulary entry.
pub(super) struct DlmHeadLimits<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    /// The hidden states, `[tokens,H]`.
    hidden: Array2<f64>,
    /// The squares of the hidden states.
    hidden2: Array2<f64>,
    /// The absolute values of the hidden states.
    sizes: Array2<f64>,
    /// The first token with the same hidden state, one entry per token.
    first: Vec<usize>,
    /// The relative error of a sum over tokens.
    each: f64,
    /// The relative error of a gradient from its tokens' mean gaps.
    relative: f64,
    /// Whether values may be NaN or ∞.
    open: bool,
    /// The edge that values count at if they are NaN or ∞ and may not be.
    nonfinite_edge: Option<Edge>,
}

impl<'r> DlmHeadLimits<'r> {
    pub(super) fn new(
        reference: &'r HeadReference<'r>,
        tokens: &[JudgedToken],
        products: &[ProductErrors],
        limits: &'r Limits<'r>,
    ) -> Self {
        let places: Vec<usize> = tokens.iter().map(|token| token.b * reference.shape().tokens + token.t).collect();
        let hidden = reference.hidden().select(Axis(0), &places);
        // Tokens of one hidden state have one softmax, whose errors add up.
        let first = first_equal_rows(&hidden);
        let mut frequency = vec![0_usize; first.len()];
        for first in &first {
            frequency[*first] += 1;
        }
        let most = frequency.into_iter().max().filter(|most| *most >= ALIKE).unwrap_or(0);
        // A weight's gradient is a sum over all tokens: one that may overflow opens every weight.
        let open = tokens.iter().any(JudgedToken::may_be_nonfinite) || products.iter().any(|product| product.overflow);
        Self {
            reference,
            limits,
            hidden2: hidden.mapv(square),
            sizes: hidden.mapv(f64::abs),
            hidden,
            first,
            each: U * f64::max(limits.spread() * f64::sqrt(tokens.len() as f64), most as f64),
            relative: products.iter().map(|product| product.relative).fold(0.0, f64::max),
            open,
            nonfinite_edge: if open { None } else { shared_edge(tokens) },
        }
    }

    /// Compares the gradients of `columns` of the head, whose dlogits are `dlogits`.
    pub(super) fn compare(
        &self,
        dlogits: &DlogitsErrors,
        columns: Range<usize>,
        gradients: &[CandidateGradient<Ix2>],
        tallies: &mut [GateTallies],
    ) {
        let exact = self.reference.dlm_head(&self.reference.dlogits(columns.clone()));
        let parts: Vec<usize> = (0..columns.len()).step_by(ROWS_AT_ONCE).collect();
        let rows = parts.into_par_iter().flat_map_iter(|first| {
            let part = first..columns.len().min(first + ROWS_AT_ONCE);
            self.compare_part(dlogits, &exact.slice(s![part.clone(), ..]), columns.start, part, gradients)
        });
        // Threads only compare; rows are added in order, so that the first of equal errors is the worst.
        let rows: Vec<Vec<GradientTallies>> = rows.collect();
        for row in rows {
            for (gradient, row) in gradients.iter().zip(row) {
                gradient.gates.add(&mut tallies[gradient.candidate], None, self.nonfinite_edge, row);
            }
        }
    }

    /// Compares the columns `part` of those that begin at `start`, each a row of `exact`; each has one tally per gradient.
    fn compare_part(
        &self,
        dlogits: &DlogitsErrors,
        exact: &ArrayView2<f64>,
        start: usize,
        part: Range<usize>,
        gradients: &[CandidateGradient<Ix2>],
    ) -> Vec<Vec<GradientTallies>> {
        let HeadShape { hidden: width, .. } = self.reference.shape();
        let count = part.len();
        // Everything here is `[columns,tokens]`: a product with the hidden states sums over tokens.
        let transposed = |terms: &Array2<f64>| terms.slice(s![.., part.clone()]).t().to_owned();
        let of_ratio = transposed(&dlogits.of_ratio);
        let signed = transposed(&dlogits.common) + transposed(&dlogits.own) + transposed(&dlogits.of_ids) - &of_ratio;
        let own = self.joined_equal_tokens(signed);
        let (rounding, exact_dlogits) = (transposed(&dlogits.rounding), transposed(&dlogits.exact));
        // Each `[count,H]`, stacked.
        let by_size = stacked(&[&rounding, &(transposed(&dlogits.one_sided) + of_ratio)]).dot(&self.sizes);
        let squares = stacked(&[&own, &rounding, &exact_dlogits]).mapv_into(square);
        let by_square = squares.dot(&self.hidden2);
        let roundings = rounding_terms(&exact_dlogits, dlogits.dtype).dot(&self.hidden);
        let columns = start + part.start..start + part.end;
        let widened = |gradient: &CandidateGradient<Ix2>| {
            self.reference.layout().part(&gradient.actual, columns.clone(), 0..width)
        };
        let actual: Vec<Array2<f64>> = gradients.iter().map(widened).collect();

        let row = |i: usize| {
            let (v, exact) = (columns.start + i, exact.row(i).to_slice().expect("dense"));
            let [rounding, one_sided] = [0, 1].map(|sum| by_size.row(sum * count + i).to_slice().expect("dense"));
            let [own2, rounding2, exact2] =
                [0, 1, 2].map(|sum| by_square.row(sum * count + i).to_slice().expect("dense"));
            let roundings: [&[f64]; ROUNDING_SUMS] =
                std::array::from_fn(|sum| roundings.row(sum * count + i).to_slice().expect("dense"));
            let limit = |h: usize| {
                let x = exact[h].abs();
                let roundings = roundings.map(|sum| sum[h]);
                let rounding = rounding_of_sum(rounding[h], rounding2[h], roundings, self.limits);
                // One-sided errors have no random sign: those of all tokens may add up.
                own2[h].sqrt() + rounding + one_sided[h] + self.relative * x + self.each * (x + exact2[h].sqrt())
            };
            let limits: Vec<f64> = (0..width).map(limit).collect();
            // Evaluated only for a value that is not finite.
            let sum_of_sizes = |h: usize| {
                let dlogits = dlogits.exact.column(part.start + i);
                dlogits.iter().zip(self.sizes.column(h)).map(|(x, size)| x.abs() * size).sum::<f64>()
            };
            let open = |h: usize| self.open || sum_of_sizes(h) > LARGEST_SUM;
            let compare = |(actual, gradient): (&Array2<f64>, &CandidateGradient<Ix2>)| {
                let row = GradientRow { exact, limits: &limits, actual: actual.row(i).to_slice().expect("dense") };
                let column = Position { v: Some(v), ..Position::default() };
                gradient.gates.compare(column, |h| Position::weight(h, v), open, row)
            };
            actual.iter().zip(gradients).map(compare).collect()
        };
        (0..count).map(row).collect()
    }

    /// Adds up the terms, `[columns,tokens]`, of tokens with equal hidden states in the first of them.
    fn joined_equal_tokens(&self, mut terms: Array2<f64>) -> Array2<f64> {
        for (n, &first) in self.first.iter().enumerate().filter(|(n, first)| n != *first) {
            let (mut into, mut from) = terms.multi_slice_mut((s![.., first], s![.., n]));
            into += &from;
            from.fill(0.0);
        }
        terms
    }
}

/// Finds for each row the first one that is equal to it.
fn first_equal_rows(rows: &Array2<f64>) -> Vec<usize> {
    let mut first: HashMap<Vec<u64>, usize> = HashMap::new();
    let rows = rows.rows().into_iter().enumerate();
    rows.map(|(n, row)| *first.entry(row.iter().map(|x| x.to_bits()).collect()).or_insert(n)).collect()
}
