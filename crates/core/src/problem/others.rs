//! The ids of a token beside its first, where logp is asked of several.
//!
//! Outside, in files and in Python, all `K` of a token are one array `[B,T,K]`. Inside the first is the token's own, as everywhere,
//! and what comes of the others is beside it.

use ndarray::{Array, Array2, Array3, Axis, Ix2, Ix3, concatenate, s};

use super::FloatArray;

/// The ids of each token beside its first, and the cotangents of their logp. An id may stand at several places, the token's first
/// too: its cotangents add up.
#[derive(Clone, Debug, PartialEq)]
pub struct Others {
    /// `[B,T,K−1]`; anything may stand where the mask is false.
    pub ids: Array3<i64>,
    /// `[B,T,K−1]`, the same.
    pub dlogp: Array3<f64>,
}

impl Others {
    /// `K − 1`.
    pub fn count(&self) -> usize {
        self.ids.dim().2
    }

    /// Of token `[b,t]`: its ids, with their cotangents.
    pub fn of(&self, b: usize, t: usize) -> impl Iterator<Item = (i64, f64)> + '_ {
        self.ids.slice(s![b, t, ..]).into_iter().copied().zip(self.dlogp.slice(s![b, t, ..]).into_iter().copied())
    }
}

/// `[B,T,K]`, `K ≥ 1`, as the first, `[B,T]`, and the others, `[B,T,K−1]`, where there are any.
///
/// # Panics
/// Where `K` is 0.
pub fn first_and_others<T: Clone>(all: &Array3<T>) -> (Array2<T>, Option<Array3<T>>) {
    let others = all.slice(s![.., .., 1..]).as_standard_layout().into_owned();
    let first = all.index_axis(Axis(2), 0).as_standard_layout().into_owned();
    (first, (others.dim().2 > 0).then_some(others))
}

/// `[B,T,K]` of the first and the others.
///
/// # Panics
/// Where their extents `[B,T]` are not the same.
pub fn with_others<T: Clone>(first: &Array2<T>, others: &Array3<T>) -> Array3<T> {
    let first = first.view().insert_axis(Axis(2));
    concatenate(Axis(2), &[first, others.view()]).expect("of the same tokens").as_standard_layout().into_owned()
}

impl FloatArray<Ix3> {
    /// As [`first_and_others`].
    ///
    /// # Panics
    /// Where `K` is 0.
    pub fn first_and_others(&self) -> (FloatArray<Ix2>, Option<FloatArray<Ix3>>) {
        fn split<T: Clone>(all: &Array3<T>) -> (FloatArray<Ix2>, Option<FloatArray<Ix3>>)
        where
            FloatArray<Ix2>: From<Array<T, Ix2>>,
            FloatArray<Ix3>: From<Array<T, Ix3>>,
        {
            let (first, others) = first_and_others(all);
            (first.into(), others.map(Into::into))
        }
        match self {
            FloatArray::F64(all) => split(all),
            FloatArray::F32(all) => split(all),
            FloatArray::Bf16(all) => split(all),
            FloatArray::F16(all) => split(all),
        }
    }
}

impl FloatArray<Ix2> {
    /// As [`with_others`], in the dtype of the first.
    ///
    /// # Panics
    /// Where their extents `[B,T]` are not the same.
    #[must_use]
    pub fn with_others(&self, others: &FloatArray<Ix3>) -> FloatArray<Ix3> {
        FloatArray::rounded_from(&with_others(&self.to_f64(), &others.to_f64()), self.dtype())
    }
}
