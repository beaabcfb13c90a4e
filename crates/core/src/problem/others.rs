//! The ids of a token beside its first, where logp is asked of several.
//!
//! Outside, in files and in Python, all `K` of a token are one array `[B,T,K]`. Inside the first is the token's own, as everywhere,
//! and what comes of the others is beside it.

use ndarray::{Array3, s};

/// The ids of each token beside its first, and the cotangents of their logp. An id may stand at several places, the token's first
/// too: its cotangents add up.
#[derive(Clone, Debug, PartialEq)]
pub struct OtherIds {
    /// `[B,T,K−1]`; anything may stand where the mask is false.
    pub ids: Array3<i64>,
    /// `[B,T,K−1]`, the same.
    pub dlogp: Array3<f64>,
}

impl OtherIds {
    /// `K − 1`.
    pub fn count(&self) -> usize {
        self.ids.dim().2
    }

    /// Of token `[b,t]`: its ids, with their cotangents.
    pub fn at(&self, b: usize, t: usize) -> impl Iterator<Item = (i64, f64)> + '_ {
        self.ids.slice(s![b, t, ..]).into_iter().copied().zip(self.dlogp.slice(s![b, t, ..]).into_iter().copied())
    }
}
