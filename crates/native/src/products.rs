//! The arithmetic bound: the three matrix products of an LM head and its gradients, and nothing between them. Heads on
//! this machine are compared with it.

use std::time::{Duration, Instant};

use ndarray::Array2;

use crate::gemm;
use assay_core::problem::HeadShape;

/// Operands and results of the products of a whole batch, in f32: logits `[N,V]`, `dhidden` `[N,H]`, `dlm_head`
/// `[H,V]`.
pub struct HeadProducts {
    hidden: Array2<f32>,
    lm_head: Array2<f32>,
    logits: Array2<f32>,
    dhidden: Array2<f32>,
    dlm_head: Array2<f32>,
}

impl HeadProducts {
    /// Allocates arrays of `shape`, in pages that the system has already provided.
    pub fn new(shape: HeadShape) -> Self {
        let HeadShape { batch, tokens, hidden: width, vocab } = shape;
        let matrix = |rows, columns| Array2::from_elem((rows, columns), 0.5);
        let n = batch * tokens;
        Self {
            hidden: matrix(n, width),
            lm_head: matrix(width, vocab),
            logits: matrix(n, vocab),
            dhidden: matrix(n, width),
            dlm_head: matrix(width, vocab),
        }
    }

    /// Returns the floating-point operations of the three products, `6·N·H·V`.
    pub fn operations(shape: HeadShape) -> f64 {
        6.0 * [shape.batch, shape.tokens, shape.hidden, shape.vocab].map(|extent| extent as f64).iter().product::<f64>()
    }

    /// Times the three products, on the threads that a kernel has.
    pub fn time(&mut self) -> Duration {
        let Self { hidden, lm_head, logits, dhidden, dlm_head } = self;
        let started = Instant::now();
        gemm(logits.view_mut(), false, hidden.view(), lm_head.view());
        gemm(dhidden.view_mut(), false, logits.view(), lm_head.t());
        gemm(dlm_head.view_mut(), false, hidden.t(), logits.view());
        started.elapsed()
    }
}
