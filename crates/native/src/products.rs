//! What arithmetic allows: the three matrix products of an LM head and its gradients, with nothing between them. The bound that
//! a head on this machine is measured against.

use std::time::{Duration, Instant};

use ndarray::Array2;

use crate::gemm;
use assay_core::problem::HeadShape;

/// The products of a whole batch, each at once, in f32: logits `[N,V]`, `dhidden` `[N,H]`, `dlm_head` `[H,V]`.
pub struct HeadProducts {
    hidden: Array2<f32>,
    lm_head: Array2<f32>,
    logits: Array2<f32>,
    dhidden: Array2<f32>,
    dlm_head: Array2<f32>,
}

impl HeadProducts {
    /// Room for those of `shape`, in memory that the system has handed out.
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

    /// Floating-point operations of the three: `6·N·H·V`.
    pub fn operations(shape: HeadShape) -> f64 {
        6.0 * [shape.batch, shape.tokens, shape.hidden, shape.vocab].map(|extent| extent as f64).iter().product::<f64>()
    }

    /// How long they take, on the threads that a kernel is given.
    pub fn time(&mut self) -> Duration {
        let Self { hidden, lm_head, logits, dhidden, dlm_head } = self;
        let started = Instant::now();
        gemm(logits.view_mut(), false, hidden.view(), lm_head.view());
        gemm(dhidden.view_mut(), false, logits.view(), lm_head.t());
        gemm(dlm_head.view_mut(), false, hidden.t(), logits.view());
        started.elapsed()
    }
}
