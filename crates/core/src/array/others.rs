//! Arrays `[B,T,K]` split into the first value of each token and the others.

use ndarray::{Array, Array2, Array3, Axis, Ix2, Ix3, concatenate, s};

use crate::array::FloatArray;

/// Splits `[B,T,K]`, `K ≥ 1`, into the first values, `[B,T]`, and the others, `[B,T,K−1]`, if `K > 1`.
///
/// # Panics
/// If `K` is 0.
pub fn first_and_others<T: Clone>(all: &Array3<T>) -> (Array2<T>, Option<Array3<T>>) {
    let others = all.slice(s![.., .., 1..]).as_standard_layout().into_owned();
    let first = all.index_axis(Axis(2), 0).as_standard_layout().into_owned();
    (first, (others.dim().2 > 0).then_some(others))
}

/// Joins first values, `[B,T]`, and others, `[B,T,K−1]`, to `[B,T,K]`.
///
/// # Panics
/// If their shapes `[B,T]` differ.
pub fn with_others<T: Clone>(first: &Array2<T>, others: &Array3<T>) -> Array3<T> {
    let first = first.view().insert_axis(Axis(2));
    concatenate(Axis(2), &[first, others.view()]).expect("of the same tokens").as_standard_layout().into_owned()
}

impl FloatArray<Ix3> {
    /// Splits `[B,T,K]` into the first values and the others, as the function [`first_and_others`].
    ///
    /// # Panics
    /// If `K` is 0.
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
    /// Joins first values and others in the dtype of the first, as the function [`with_others`].
    ///
    /// # Panics
    /// If their shapes `[B,T]` differ.
    #[must_use]
    pub fn with_others(&self, others: &FloatArray<Ix3>) -> FloatArray<Ix3> {
        FloatArray::rounded_from(&with_others(&self.to_f64(), &others.to_f64()), self.dtype())
    }
}
