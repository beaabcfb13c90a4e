//! The LM head in front of the loss: logits as a product, and the gradients of its two factors.
//!
//! With `n` a token, `h` a hidden unit, `v` a column and `dx = ∂loss/∂logits`:
//!
//! ```text
//! x[n,v]        = Σ_h hidden[n,h] · lm_head[h,v]        rounded to the dtype of `hidden` if the problem rounds logits
//! dhidden[n,h]  = Σ_v dx[n,v] · lm_head[h,v]
//! dlm_head[h,v] = Σ_n hidden[n,h] · dx[n,v]
//! ```
//!
//! Products are of exact f64 values, and sums are compensated. The hidden state of a masked token is never read. A head
//! of 4096 × 151,936 weights is 5 GB of f64: a few of its columns are widened at a time.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array2, ArrayView2, Axis, arr0, s};
use rayon::prelude::*;

use super::{Reference, Sum, evaluate_owned};
use assay_core::problem::{
    Dtype, FloatArray, HeadGradient, HeadLayout, HeadProblem, HeadShape, Outcome, ProblemError, Projection,
};
use assay_core::spec::LossSpec;

/// The number of weights that are widened at a time by vocabulary entries: 2 MiB of f64, which fits in a cache.
const OF_COLUMNS: usize = 1 << 18;

/// The number of weights that are widened at a time by hidden units, each a whole row or column of the head: 32 MiB.
const OF_UNITS: usize = 1 << 22;

/// The reference's evaluation of a [`HeadProblem`]. It holds `8·B·T·V` bytes of logits, and nothing of the head's size.
#[derive(Debug)]
pub struct HeadReference<'p> {
    shape: HeadShape,
    /// The hidden states, `[B·T,H]`; zeros for a masked token.
    hidden: Cow<'p, Array2<f64>>,
    projection: &'p Projection,
    reference: Reference<'p>,
}

/// Evaluates `problem` under `spec` in f64, LM head included.
///
/// # Errors
/// [`ProblemError`] if the spec is out of range or the problem does not fit it.
pub fn evaluate_head<'p>(spec: &'p LossSpec, problem: &'p HeadProblem) -> Result<HeadReference<'p>, ProblemError> {
    let shape = problem.check(spec)?;
    let HeadShape { batch, tokens, hidden: width, vocab } = shape;
    let projection = &problem.logits;
    // Masked tokens become rows of 0, which the products skip.
    let mut hidden = projection.hidden.to_f64().into_shape_with_order((batch * tokens, width)).expect("dense");
    for (mut row, &counts) in hidden.rows_mut().into_iter().zip(&problem.mask) {
        if !counts {
            row.fill(0.0);
        }
    }

    // The product of a few vocabulary entries at a time, rounded if the problem's own matrix product rounds.
    let rounded = |x: f64| if projection.rounds_logits { problem.dtype().round(x) } else { x };
    let mut logits = Array2::zeros((batch * tokens, vocab));
    for columns in chunks(vocab, width, OF_COLUMNS) {
        let factor = projection.layout.part(&projection.lm_head.view(), columns.clone(), 0..width);
        let products = products(hidden.view(), factor.t().as_standard_layout().view());
        logits.slice_mut(s![.., columns]).assign(&products.mapv(rounded));
    }
    let logits = logits.into_shape_with_order((batch, tokens, vocab)).expect("dense");
    let reference = evaluate_owned(spec, Cow::Owned(problem.with_logits(FloatArray::F64(logits))))?;
    Ok(HeadReference { shape, hidden: Cow::Owned(hidden), projection, reference })
}

/// Splits `0..count` into ranges of at most `weights` weights, with `of` weights for each index.
fn chunks(count: usize, of: usize, weights: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = (weights / of).max(1);
    (0..count).step_by(at_once).map(move |first| first..count.min(first + at_once))
}

impl<'p> HeadReference<'p> {
    /// Evaluates the batch again with `high` as the tokens that the entropy mask keeps, as [`Reference::keeping`].
    ///
    /// # Errors
    /// [`ProblemError`] as [`evaluate_head`].
    pub fn keeping(&self, high: &Array2<bool>) -> Result<HeadReference<'_>, ProblemError> {
        let reference = self.reference.keeping(high)?;
        let Self { shape, projection, .. } = *self;
        Ok(HeadReference { shape, hidden: Cow::Borrowed(&*self.hidden), projection, reference })
    }

    /// Returns the shape `(B, T, H, V)`.
    pub fn shape(&self) -> HeadShape {
        self.shape
    }

    /// Returns the layout of the problem's head, and of its gradient.
    pub fn layout(&self) -> HeadLayout {
        self.projection.layout
    }

    /// Returns the evaluation of the loss on the product's logits.
    pub fn on_logits(&self) -> &Reference<'p> {
        &self.reference
    }

    /// Returns the hidden states, `[B·T,H]`; zeros for a masked token.
    pub fn hidden(&self) -> &Array2<f64> {
        &self.hidden
    }

    /// Splits all vocabulary entries into ranges whose weights take 2 MiB of f64.
    pub fn column_chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        chunks(self.shape.vocab, self.shape.hidden, OF_COLUMNS)
    }

    /// Splits all hidden units into ranges whose weights take 32 MiB of f64.
    pub fn unit_chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        chunks(self.shape.hidden, self.shape.vocab, OF_UNITS)
    }

    /// Widens the head's weights of vocabulary entries to f64, `[columns,H]` for either layout.
    pub fn columns(&self, columns: Range<usize>) -> Array2<f64> {
        self.projection.layout.part(&self.projection.lm_head.view(), columns, 0..self.shape.hidden)
    }

    /// Widens the head's weights of hidden units to f64, `[V,units]` for either layout.
    pub fn units(&self, units: Range<usize>) -> Array2<f64> {
        self.projection.layout.part(&self.projection.lm_head.view(), 0..self.shape.vocab, units)
    }

    /// Returns dlogits of vocabulary entries, `[B·T,columns]`.
    pub fn dlogits(&self, columns: Range<usize>) -> Array2<f64> {
        let HeadShape { batch, tokens, .. } = self.shape;
        let row = |n: usize| self.reference.dlogits_columns(n / tokens, n % tokens, columns.clone());
        let rows = (0..batch * tokens).into_par_iter().flat_map_iter(row);
        Array2::from_shape_vec((batch * tokens, columns.len()), rows.collect()).expect("a value a column")
    }

    /// Computes `dhidden`, `[B·T,H]`, from the function that returns `[B·T,columns]` dlogits; zeros for a token without
    /// a gradient.
    pub fn dhidden(&self, dlogits: impl Fn(Range<usize>) -> Array2<f64>) -> Array2<f64> {
        // Compensated sums are kept across ranges of entries: `dhidden` is one sum over the vocabulary.
        let mut sums = Array2::from_elem(self.hidden.dim(), Sum::default());
        let reference = &self.reference;
        let has_gradient = |n: usize| {
            let token = reference.token(n / self.shape.tokens, n % self.shape.tokens);
            token.is_some_and(|token| {
                reference.grad_logp(token, &token.branch, token.coupling) != 0.0
                    || reference.grad_kl_logp(token, &token.branch) != 0.0
                    || reference.others(token).iter().any(|other| other.grad_logp != 0.0)
                    || token.grad_entropy != 0.0
                    || token.row_term.by_log_sum_exp != 0.0
                    || token.row_term.by_mean != 0.0
                    || reference.divergence(token).is_some()
            })
        };
        for columns in self.column_chunks() {
            add_products(&mut sums, dlogits(columns.clone()).view(), self.columns(columns).view(), has_gradient);
        }
        sums.mapv(Sum::value)
    }

    /// Computes `dlm_head` as `[columns,H]` from the `[B·T,columns]` dlogits of the same entries.
    pub fn dlm_head(&self, dlogits: &Array2<f64>) -> Array2<f64> {
        products(dlogits.t(), self.hidden.view())
    }

    /// Computes all outputs at once, including the head's gradient in f64.
    pub fn outcome(&self) -> Outcome<HeadGradient> {
        let HeadShape { batch, tokens, hidden, vocab } = self.shape;
        let reference = &self.reference;
        let per_token = |value: &dyn Fn(&super::Token) -> f64| {
            Array2::from_shape_fn((batch, tokens), |(b, t)| reference.token(b, t).map_or(0.0, value))
        };
        // Dlogits are computed twice, once for each gradient, rather than held as `[B·T,V]`.
        let dhidden = self.dhidden(|columns| self.dlogits(columns));
        let layout = self.layout();
        let mut dlm_head = Array2::zeros(layout.extents(hidden, vocab));
        for columns in self.column_chunks() {
            let part = self.dlm_head(&self.dlogits(columns.clone()));
            for ((v, h), x) in part.indexed_iter() {
                dlm_head[layout.at(h, columns.start + v)] = *x;
            }
        }
        Outcome {
            loss: arr0(reference.loss()).into(),
            logp: per_token(&|token| token.inputs.logp).into(),
            logp_of_others: reference.logp_of_others().map(Into::into),
            entropy: per_token(&|token| token.entropy).into(),
            token_loss: per_token(&|token| token.token_loss).into(),
            gradient: HeadGradient {
                dhidden: dhidden.into_shape_with_order((batch, tokens, hidden)).expect("dense").into(),
                dlm_head: dlm_head.into(),
                dlogits_dtype: Dtype::F64,
            },
            metrics: reference.metrics(),
        }
    }
}

/// Multiplies `a [I,K]` and `b [K,J]` to `[I,J]`, `Σ_k a[i,k] · b[k,j]`. A row of `a` that is all 0 is skipped.
fn products(a: ArrayView2<f64>, b: ArrayView2<f64>) -> Array2<f64> {
    let mut sums = Array2::from_elem((a.nrows(), b.ncols()), Sum::default());
    add_products(&mut sums, a, b, |i| a.row(i).iter().any(|x| *x != 0.0));
    sums.mapv(Sum::value)
}

/// Adds the products of the `live` rows of `a` to `sums`.
fn add_products(sums: &mut Array2<Sum>, a: ArrayView2<f64>, b: ArrayView2<f64>, live: impl Fn(usize) -> bool) {
    const AT_ONCE: usize = 256;
    // Threads share the columns; each adds its terms in the order of `k`, so that the result does not depend on their
    // number.
    let live: Vec<bool> = (0..a.nrows()).map(live).collect();
    let parts: Vec<_> = sums.axis_chunks_iter_mut(Axis(1), AT_ONCE).zip(b.axis_chunks_iter(Axis(1), AT_ONCE)).collect();
    parts.into_par_iter().for_each(|(mut sums, b)| {
        let rows = sums.rows_mut().into_iter().zip(a.rows()).zip(&live);
        for ((mut sums, a), _) in rows.filter(|(_, live)| **live) {
            let sums = sums.as_slice_mut().expect("dense");
            for (x, b) in a.iter().zip(b.rows()) {
                let b = b.to_slice().expect("dense");
                sums.iter_mut().zip(b).for_each(|(sum, y)| sum.add(x * y));
            }
        }
    });
}
