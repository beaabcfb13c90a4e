//! The ids of a token after its first, if logp is computed of several.
//!
//! Files and Python have all `K` ids of a token in one array `[B,T,K]`. The Rust types keep the first id as the token's own, and the
//! others here.

use ndarray::{Array3, s};

/// The ids of each token after its first, and the cotangents of their logp. An id may occur several times, and may
/// equal the first; its cotangents add up.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherIds {
    /// The ids, `[B,T,K−1]`; any value is allowed where the mask is false.
    pub ids: Array3<i64>,
    /// The cotangents of their logp, `[B,T,K−1]`; any value is allowed where the mask is false.
    pub dlogp: Array3<f64>,
}

impl OtherIds {
    /// Returns the number of ids per token after the first, `K − 1`.
    pub fn count(&self) -> usize {
        self.ids.dim().2
    }

    /// Lists the ids of token `[b,t]` after its first, each with its cotangent.
    pub fn at(&self, b: usize, t: usize) -> impl Iterator<Item = (i64, f64)> + '_ {
        self.ids.slice(s![b, t, ..]).into_iter().copied().zip(self.dlogp.slice(s![b, t, ..]).into_iter().copied())
    }
}
