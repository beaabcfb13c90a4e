//! The transform from the given logits to those of the softmax.

use std::ops::Range;

use ndarray::s;

use assay_core::problem::Problem;
use assay_core::spec::LossSpec;

/// The transformed logits of one token, for all vocabulary entries or a range of them.
pub(super) struct TransformedLogits {
    /// The first vocabulary entry of the range.
    pub(super) first: usize,
    /// The transformed logits `h_j = softcap · tanh(scale · (x_j + bias_j) / softcap)`; −∞ outside the support, and outside the
    /// token's kept set if the spec has kept sets.
    pub(super) logits: Vec<f64>,
    /// The transformed logits without regard to the kept set; `None` if the spec has none.
    pub(super) over_vocabulary: Option<Vec<f64>>,
    /// The derivatives `∂h_j/∂x_j`; `None` if all are 1.
    pub(super) slopes: Option<Vec<f64>>,
}

impl TransformedLogits {
    /// Transforms the logits `columns` of token `[b,t]`, whose sampled id is `id`.
    pub(super) fn new(
        spec: &LossSpec,
        problem: &Problem,
        (b, t): (usize, usize),
        id: usize,
        columns: Range<usize>,
    ) -> Self {
        let first = columns.start;
        // In the order of the formula: bias, scale, soft cap, support.
        let mut logits = problem.logits.row_part(b, t, columns.clone());
        let transform = &spec.logits;
        if let Some(bias) = problem.extra.bias.as_ref().filter(|_| transform.bias) {
            logits.iter_mut().zip(bias.iter().skip(first)).for_each(|(x, bias)| *x += bias);
        }
        let mut slopes = None;
        if let Some(cap) = transform.softcap {
            // d/dx of cap·tanh(scale·x/cap) is scale·(1 − tanh²) = scale / cosh².
            let slope = |x: &f64| transform.scale / (transform.scale * x / cap).cosh().powi(2);
            slopes = Some(logits.iter().map(slope).collect());
            for x in &mut logits {
                *x = cap * (transform.scale * *x / cap).tanh();
            }
        } else if transform.scale != 1.0 {
            slopes = Some(vec![transform.scale; logits.len()]);
            for x in &mut logits {
                *x *= transform.scale;
            }
        }
        // The sampled id is never excluded: if it is outside the support, the check of the problem has refused it or
        // it is to be kept.
        let mut exclude = |j: usize| {
            if j != id && columns.contains(&j) {
                logits[j - first] = f64::NEG_INFINITY;
            }
        };
        if let Some(vocab) = spec.support.vocab {
            (vocab..problem.shape().vocab).for_each(&mut exclude);
        }
        spec.support.excluded_ids.iter().for_each(|&j| exclude(j));
        // A kept set leaves out all other entries of this one token.
        let mut over_vocabulary = None;
        if let (Some(_), Some(kept)) = (spec.support.kept, &problem.extra.kept_ids) {
            let mut inside = vec![false; logits.len()];
            let ids = kept.slice(s![b, t, ..]).into_iter().filter_map(|&kept| usize::try_from(kept).ok());
            for j in ids.chain(std::iter::once(id)).filter(|j| columns.contains(j)) {
                inside[j - first] = true;
            }
            over_vocabulary = Some(logits.clone());
            logits.iter_mut().zip(inside).filter(|(_, inside)| !inside).for_each(|(x, _)| *x = f64::NEG_INFINITY);
        }
        Self { first, logits, over_vocabulary, slopes }
    }
}

/// Returns the quotients of `logits` by `divisor`.
pub(super) fn divided(mut logits: Vec<f64>, divisor: f64) -> Vec<f64> {
    // Most often the temperature is 1. A quotient by 1 is the logit itself, and takes as long as any other.
    if divisor != 1.0 {
        for h in &mut logits {
            *h /= divisor;
        }
    }
    logits
}
