//! [`DlogitsErrors`]: the errors of a correct kernel's dlogits, split by how they add up in a product.

use std::ops::Range;

use ndarray::Array2;
use rayon::prelude::*;

use crate::U;
use crate::column_bounds::{ColumnErrorParts, DlogitsCondition};
use crate::gate::Output;
use crate::judge::JudgedToken;
use crate::metric::half_ulp;
use crate::tolerance::Limits;
use assay_core::problem::Dtype;
use assay_reference::{HeadReference, Reference};

/// The errors of a correct kernel's dlogits, each part `[tokens,columns]`; the symbols are those of the [module](super).
pub(super) struct DlogitsErrors {
    /// The dtype in which dlogits go into the products.
    pub(super) dtype: Dtype,
    /// The exact dlogits, `dx`.
    pub(super) exact: Array2<f64>,
    /// The part `c` that all columns of a token share.
    pub(super) common: Array2<f64>,
    /// The part `o` of each column alone.
    pub(super) own: Array2<f64>,
    /// The half ulps `r` of the products' dtype.
    pub(super) rounding: Array2<f64>,
    /// The parts without a random sign: `f`, and the distance to the token's other branches.
    pub(super) one_sided: Array2<f64>,
    /// The part `s` of `c` and `o` that the tokens of a sequence share.
    pub(super) of_ratio: Array2<f64>,
    /// The part `i` of a token's ids, if it has several: of any sign, but all from one softmax.
    pub(super) of_ids: Array2<f64>,
}

/// The errors of one token's dlogits, each part `[columns]`.
pub(super) struct TokenDlogitsErrors {
    exact: Vec<f64>,
    common: Vec<f64>,
    pub(super) own: Vec<f64>,
    rounding: Vec<f64>,
    one_sided: Vec<f64>,
    of_ratio: Vec<f64>,
    of_ids: Vec<f64>,
}

impl TokenDlogitsErrors {
    pub(super) fn new(
        reference: &Reference,
        token: &JudgedToken,
        columns: Range<usize>,
        dtype: Dtype,
        limits: &Limits,
    ) -> Self {
        let (b, t, kappa) = (token.b, token.t, limits.kappa(Output::Dlogits) * U);
        let row = reference.columns(b, t, token.token, columns.clone());
        let dlogits = |branch, coupling| {
            let of_kl = reference.grad_kl_logp(token.token, branch);
            reference.dlogits_of(&row, token.token, [reference.grad_logp(token.token, branch, coupling), of_kl])
        };
        let exact = dlogits(&token.token.branch, token.token.coupling);
        let [mut common, mut own, mut rounding, mut one_sided, mut of_ratio, mut of_ids] =
            [(); 6].map(|()| vec![0.0; columns.len()]);
        // The most that one column other than a target loses by flushing.
        let mut flushed = 0.0;
        let ids: Vec<usize> = token.ids(reference).collect();
        // Each part is the largest over the branches that the token may be on.
        for alternative in &token.condition.alternatives {
            let there = dlogits(&alternative.branch, alternative.coupling);
            // A token on another branch has other dlogits: the distance between the exact ones counts as one-sided,
            // since the choice is made once for the whole row.
            let bounds = DlogitsCondition::new(&token.condition, reference, token.token, alternative).parts(&row);
            let ColumnErrorParts { whole, common: shared, of_ratio: by_ratio, flushed: lost } = bounds;
            for (v, x) in there.into_iter().enumerate() {
                let (whole, shared, by_ratio) = (whole.at(v), shared.at(v), by_ratio.at(v));
                let mut alone = kappa * (whole.scale - shared.scale) + (whole.floor - shared.floor);
                // A target loses more by flushing, and the loss is its own.
                if !ids.contains(&(columns.start + v)) {
                    alone -= lost[v];
                    flushed = f64::max(flushed, lost[v]);
                }
                common[v] = f64::max(common[v], kappa * shared.scale + shared.floor);
                own[v] = f64::max(own[v], alone);
                rounding[v] = f64::max(rounding[v], half_ulp(x, dtype));
                one_sided[v] = f64::max(one_sided[v], (x - exact[v]).abs());
                of_ratio[v] = f64::max(of_ratio[v], kappa * by_ratio.scale + by_ratio.floor);
            }
        }
        for x in &mut one_sided {
            *x += flushed;
        }
        // The error that a target shares has the opposite sign there, so it counts as the target's own.
        for v in ids.iter().filter(|id| columns.contains(id)).map(|id| id - columns.start) {
            own[v] += std::mem::take(&mut common[v]);
            if ids.len() > 1 {
                of_ids[v] += std::mem::take(&mut own[v]);
            }
        }
        Self { exact, common, own, rounding, one_sided, of_ratio, of_ids }
    }

    /// Returns the error of column `v` before the dlogit is rounded.
    fn before_rounding(&self, v: usize) -> f64 {
        self.common[v] + self.own[v] + self.of_ids[v] + self.one_sided[v]
    }
}

impl DlogitsErrors {
    pub(super) fn new(
        reference: &Reference,
        tokens: &[JudgedToken],
        columns: &Range<usize>,
        dtype: Dtype,
        limits: &Limits,
    ) -> Self {
        let row = |token: &JudgedToken| TokenDlogitsErrors::new(reference, token, columns.clone(), dtype, limits);
        let rows: Vec<TokenDlogitsErrors> = tokens.par_iter().map(row).collect();
        let matrix = |part: fn(&TokenDlogitsErrors) -> &Vec<f64>| {
            let values = rows.iter().flat_map(part).copied().collect();
            Array2::from_shape_vec((tokens.len(), columns.len()), values).expect("a value per column")
        };
        Self {
            dtype,
            exact: matrix(|row| &row.exact),
            common: matrix(|row| &row.common),
            own: matrix(|row| &row.own),
            rounding: matrix(|row| &row.rounding),
            one_sided: matrix(|row| &row.one_sided),
            of_ratio: matrix(|row| &row.of_ratio),
            of_ids: matrix(|row| &row.of_ids),
        }
    }
}

/// The errors of a token in the products that do not belong to one column.
#[derive(Clone, Copy)]
pub(super) struct ProductErrors {
    /// Whether a dlogit may overflow the dtype of the products.
    pub(super) overflow: bool,
    /// The relative error of the token's gradient, as [`relative_error`] has it.
    pub(super) relative: f64,
}

/// Evaluates the [`ProductErrors`] of each token.
pub(super) fn token_product_errors(
    reference: &HeadReference,
    tokens: &[JudgedToken],
    dtype: Dtype,
    limits: &Limits,
) -> Vec<ProductErrors> {
    let on_logits = reference.on_logits();
    let overflows = |token: &JudgedToken, columns| {
        let row = TokenDlogitsErrors::new(on_logits, token, columns, dtype, limits);
        // Twice the sum of the dlogit and its errors rounds to ∞ wherever the value comes within a factor of 2 of the
        // largest number of the dtype.
        (0..row.exact.len()).any(|v| !dtype.round(2.0 * (row.exact[v].abs() + row.before_rounding(v))).is_finite())
    };
    let errors = |token: &JudgedToken| ProductErrors {
        overflow: reference.column_chunks().any(|columns| overflows(token, columns)),
        relative: relative_error(on_logits, token, limits.kappa(Output::Dlogits) * U),
    };
    tokens.par_iter().map(errors).collect()
}

/// Bounds the error that all dlogits of a token share as a factor, with `κ·u` as `kappa`: that of the mean gap if there is an entropy
/// bonus, and of a divergence that of a sum of exponentials.
fn relative_error(reference: &Reference, token: &JudgedToken, kappa: f64) -> f64 {
    let divergence = token.condition.divergence.as_ref().zip(reference.divergence(token.token));
    match divergence {
        Some((condition, divergence)) if !condition.loses_tail => {
            let of_sum = condition.shared_by_columns(divergence, 1.0).1;
            kappa * of_sum.scale + of_sum.floor
        }
        _ if token.token.grad_entropy != 0.0 => kappa * (1.0 + token.token.entropy_softmax.stats.mean_gap),
        _ => 0.0,
    }
}
