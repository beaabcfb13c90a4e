//! The LM head in front of the loss: logits as a product, and the gradients of its two factors.
//!
//! With `n` a token, `h` a hidden unit, `v` a column and `dx = ∂loss/∂logits`:
//!
//! ```text
//! x[n,v]        = Σ_h hidden[n,h] · lm_head[h,v]        rounded to the dtype of `hidden` where the problem says so
//! dhidden[n,h]  = Σ_v dx[n,v] · lm_head[h,v]
//! dlm_head[h,v] = Σ_n hidden[n,h] · dx[n,v]
//! ```
//!
//! Products are of exact f64 values, sums compensated. A masked token is never looked at, whatever its hidden state holds.

use std::borrow::Cow;

use ndarray::{Array2, ArrayView1, Axis, arr0};
use rayon::prelude::*;

use super::{Reference, Sum, evaluate_owned};
use assay_core::problem::{Dtype, FloatArray, HeadGradient, HeadLayout, HeadProblem, HeadShape, Outcome, ProblemError};
use assay_core::spec::LossSpec;

/// A [`HeadProblem`], evaluated. `8·B·T·V` bytes of logits are held.
#[derive(Debug)]
pub struct HeadReference<'p> {
    shape: HeadShape,
    /// `[B·T,H]`; zeros where a token is masked.
    hidden: Array2<f64>,
    /// `[V,H]`, whatever the layout.
    columns: Array2<f64>,
    layout: HeadLayout,
    reference: Reference<'p>,
}

/// Evaluates `problem` under `spec`.
///
/// # Errors
/// [`ProblemError`] where the spec is out of range or the problem does not fit it.
pub fn evaluate_head<'p>(spec: &'p LossSpec, problem: &HeadProblem) -> Result<HeadReference<'p>, ProblemError> {
    let shape = problem.check(spec)?;
    let HeadShape { batch, tokens, hidden: width, vocab } = shape;
    let projection = &problem.logits;
    let mut hidden = projection.hidden.to_f64().into_shape_with_order((batch * tokens, width)).expect("dense");
    for (mut row, &counts) in hidden.rows_mut().into_iter().zip(&problem.mask) {
        if !counts {
            row.fill(0.0);
        }
    }
    let lm_head = projection.lm_head.to_f64();
    let columns = match projection.layout {
        HeadLayout::HiddenByVocab => lm_head.reversed_axes().as_standard_layout().into_owned(),
        HeadLayout::VocabByHidden => lm_head,
    };

    let rounded = |x: f64| if projection.rounds_logits { problem.dtype().round(x) } else { x };
    let logits = products(&hidden, &columns).mapv(rounded);
    let logits = logits.into_shape_with_order((batch, tokens, vocab)).expect("dense");
    let reference = evaluate_owned(spec, Cow::Owned(problem.with_logits(FloatArray::F64(logits))))?;
    Ok(HeadReference { shape, hidden, columns, layout: projection.layout, reference })
}

/// `Σ a_i · b_i`.
fn dot(a: ArrayView1<f64>, b: ArrayView1<f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).collect::<Sum>().value()
}

impl<'p> HeadReference<'p> {
    /// Extents.
    pub fn shape(&self) -> HeadShape {
        self.shape
    }

    /// How the head of the problem lies, and so its gradient.
    pub fn layout(&self) -> HeadLayout {
        self.layout
    }

    /// The loss on the logits that the product left.
    pub fn on_logits(&self) -> &Reference<'p> {
        &self.reference
    }

    /// `[B·T,H]`; zeros where a token is masked.
    pub fn hidden(&self) -> &Array2<f64> {
        &self.hidden
    }

    /// `[V,H]`, whatever the layout.
    pub fn columns(&self) -> &Array2<f64> {
        &self.columns
    }

    /// `[B·T,V]`.
    pub fn dlogits(&self) -> Array2<f64> {
        let HeadShape { batch, tokens, vocab, .. } = self.shape;
        let row = |n: usize| self.reference.dlogits_row(n / tokens, n % tokens);
        let rows = (0..batch * tokens).into_par_iter().flat_map_iter(row);
        Array2::from_shape_vec((batch * tokens, vocab), rows.collect()).expect("V values a token")
    }

    /// `dhidden`, `[B·T,H]`, from dlogits `[B·T,V]`.
    pub fn dhidden(&self, dlogits: &Array2<f64>) -> Array2<f64> {
        products(dlogits, &self.columns.t().as_standard_layout().into_owned())
    }

    /// `dlm_head` as `[V,H]`, from dlogits `[B·T,V]`.
    pub fn dlm_head(&self, dlogits: &Array2<f64>) -> Array2<f64> {
        let of_columns = dlogits.t().as_standard_layout().into_owned();
        products(&of_columns, &self.hidden.t().as_standard_layout().into_owned())
    }

    /// All outputs at once.
    pub fn outcome(&self) -> Outcome<HeadGradient> {
        let HeadShape { batch, tokens, hidden, .. } = self.shape;
        let reference = &self.reference;
        let per_token = |value: &dyn Fn(&super::Token) -> f64| {
            Array2::from_shape_fn((batch, tokens), |(b, t)| reference.token(b, t).map_or(0.0, value))
        };
        let dlogits = self.dlogits();
        let dhidden = self.dhidden(&dlogits).into_shape_with_order((batch, tokens, hidden)).expect("dense");
        let dlm_head = self.dlm_head(&dlogits);
        let dlm_head = match self.layout {
            HeadLayout::HiddenByVocab => dlm_head.reversed_axes().as_standard_layout().into_owned(),
            HeadLayout::VocabByHidden => dlm_head,
        };
        Outcome {
            loss: arr0(reference.loss()).into(),
            logp: per_token(&|token| token.inputs.logp).into(),
            entropy: per_token(&|token| token.entropy).into(),
            token_loss: per_token(&|token| token.token_loss).into(),
            gradient: HeadGradient { dhidden: dhidden.into(), dlm_head: dlm_head.into(), dlogits_dtype: Dtype::F64 },
            metrics: reference.metrics(),
        }
    }
}

/// `[I,J]` from `a [I,K]` and `b [J,K]`: `Σ_k a[i,k] · b[j,k]`. A row of `a` that is all 0 is not multiplied.
fn products(a: &Array2<f64>, b: &Array2<f64>) -> Array2<f64> {
    let row = |i: usize| {
        let a = a.index_axis(Axis(0), i);
        let zero = a.iter().all(|x| *x == 0.0);
        b.rows().into_iter().map(move |b| if zero { 0.0 } else { dot(a, b) })
    };
    let values = (0..a.nrows()).into_par_iter().flat_map_iter(row);
    Array2::from_shape_vec((a.nrows(), b.nrows()), values.collect()).expect("one product a pair")
}
