//! Arrays whose element type is chosen at run time.

mod others;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use half::{bf16, f16};
use multiversion::multiversion;
use ndarray::{Array, Array2, ArrayView, Axis, Dimension, Ix0, Ix2, Ix3, IxDyn, RemoveAxis, ShapeBuilder, s};
pub use others::{first_and_others, with_others};
use serde::{Deserialize, Serialize};

/// A floating-point element type.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::Dtype;
///
/// assert_eq!(Dtype::Bf16.round(1.0 + 1.0 / 256.0), 1.0); // a tie, rounded to even
/// assert_eq!(Dtype::F16.round(65_520.0), f64::INFINITY);
/// assert_eq!("bf16".parse(), Ok(Dtype::Bf16));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary64, for inputs of the reference only.
    F64,
    /// IEEE binary32, 24 bits of significand.
    #[serde(alias = "float32")]
    F32,
    /// bfloat16, with f32's exponent and 8 bits of significand.
    #[serde(alias = "bfloat16")]
    Bf16,
    /// IEEE binary16, 11 bits of significand.
    #[serde(alias = "float16")]
    F16,
}

impl Dtype {
    /// The dtypes of inputs that kernels support, widest first.
    pub const KERNEL: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// Rounds `x` to this dtype, to nearest even, and widens it again.
    #[inline]
    pub fn round(self, x: f64) -> f64 {
        match self {
            Dtype::F64 => x,
            Dtype::F32 => f32::from_f64(x).to_f64(),
            // The 16-bit types are rounded once, directly from f64.
            Dtype::Bf16 => Float::to_f64(<bf16 as Float>::from_f64(x)),
            Dtype::F16 => Float::to_f64(<f16 as Float>::from_f64(x)),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        })
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "f64" => Ok(Dtype::F64),
            "f32" => Ok(Dtype::F32),
            "bf16" => Ok(Dtype::Bf16),
            "f16" => Ok(Dtype::F16),
            _ => Err(format!("dtype: got `{name}`, expected f64, f32, bf16 or f16")),
        }
    }
}

/// An element type that [`FloatArray`] can have. Widening to f64 is exact for each of them.
pub trait Float: Copy + Send + Sync + 'static {
    /// The dtype that names this type.
    const DTYPE: Dtype;
    /// Widens the element to f64, exactly.
    fn to_f64(self) -> f64;
    /// Rounds `x` to this type, to nearest even.
    fn from_f64(x: f64) -> Self;
}

macro_rules! float {
    ($type:ty, $dtype:ident, $widen:expr, $round:expr) => {
        impl<D: Dimension> From<Array<$type, D>> for FloatArray<D> {
            fn from(array: Array<$type, D>) -> Self {
                FloatArray::$dtype(array)
            }
        }

        impl Float for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            #[inline]
            fn to_f64(self) -> f64 {
                $widen(self)
            }
            #[inline]
            fn from_f64(x: f64) -> Self {
                $round(x)
            }
        }
    };
}
float!(f64, F64, |x| x, |x| x);
float!(f32, F32, f64::from, |x| x as f32);
// Widened through f32, which is exact: a shift for bf16, and the processor's conversion for f16.
float!(bf16, Bf16, |x| f64::from(f32::from(x)), bf16::from_f64);
float!(f16, F16, |x| f64::from(f32::from(x)), f16::from_f64);

/// A dense row-major array of static rank with one of four element types.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::{Dtype, FloatArray};
/// use ndarray::arr2;
///
/// let exact = arr2(&[[0.1, 0.5], [1.0, 3.0]]);
/// let rounded = FloatArray::rounded_from(&exact, Dtype::Bf16);
/// assert_eq!(rounded.dtype(), Dtype::Bf16);
/// assert_eq!((rounded.at(0, 0), rounded.at(0, 1)), (0.10009765625, 0.5));
/// assert!(rounded.same_bits(&FloatArray::rounded_from(&rounded.to_f64(), Dtype::Bf16)));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum FloatArray<D: Dimension> {
    /// An array of f64 elements.
    F64(Array<f64, D>),
    /// An array of f32 elements.
    F32(Array<f32, D>),
    /// An array of bf16 elements.
    Bf16(Array<bf16, D>),
    /// An array of f16 elements.
    F16(Array<f16, D>),
}

/// A borrowed row-major array of static rank with one of four element types.
#[derive(Clone, Debug)]
pub enum FloatView<'a, D: Dimension> {
    /// A view of f64 elements.
    F64(ArrayView<'a, f64, D>),
    /// A view of f32 elements.
    F32(ArrayView<'a, f32, D>),
    /// A view of bf16 elements.
    Bf16(ArrayView<'a, bf16, D>),
    /// A view of f16 elements.
    F16(ArrayView<'a, f16, D>),
}

/// Evaluates `$body` with `$array` bound to the `ndarray` array inside, of any element type.
macro_rules! with_array {
    ($kind:ident, $float_array:expr, $array:ident => $body:expr) => {
        match $float_array {
            $kind::F64($array) => $body,
            $kind::F32($array) => $body,
            $kind::Bf16($array) => $body,
            $kind::F16($array) => $body,
        }
    };
}

/// Evaluates `$body` with `$array` bound to the `ndarray` array inside, and wraps the result in `$to` of the same
/// element type.
macro_rules! map_array {
    ($from:ident => $to:ident, $float_array:expr, $array:ident => $body:expr) => {
        match $float_array {
            $from::F64($array) => $to::F64($body),
            $from::F32($array) => $to::F32($body),
            $from::Bf16($array) => $to::Bf16($body),
            $from::F16($array) => $to::F16($body),
        }
    };
}

pub(crate) use with_array;

impl<'a, D: Dimension> FloatView<'a, D> {
    /// Returns the view with its rank chosen at run time.
    pub fn into_dyn(self) -> FloatView<'a, IxDyn> {
        map_array!(FloatView => FloatView, self, array => array.into_dyn())
    }

    /// Returns the view with another type for its rank.
    ///
    /// # Panics
    /// If it has another rank than `E`.
    pub fn into_rank<E: Dimension>(self) -> FloatView<'a, E> {
        map_array!(FloatView => FloatView, self, array => array.into_dimensionality().expect("an array of this rank"))
    }

    /// Borrows the view again, for a shorter lifetime.
    pub fn view(&self) -> FloatView<'_, D> {
        map_array!(FloatView => FloatView, self, array => array.view())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            FloatView::F64(_) => Dtype::F64,
            FloatView::F32(_) => Dtype::F32,
            FloatView::Bf16(_) => Dtype::Bf16,
            FloatView::F16(_) => Dtype::F16,
        }
    }

    /// Returns the shape, one length per axis.
    pub fn shape(&self) -> &[usize] {
        with_array!(FloatView, self, array => array.shape())
    }

    /// Whether the elements are dense and in row-major order.
    pub fn is_standard_layout(&self) -> bool {
        with_array!(FloatView, self, array => array.is_standard_layout())
    }

    /// Whether dtype, shape and the bits of every element equal those of `other`: −0 differs from 0, and a NaN equals
    /// itself.
    pub fn same_bits(&self, other: &FloatView<D>) -> bool {
        fn same<T, B: PartialEq, D: Dimension>(
            a: &ArrayView<T, D>,
            b: &ArrayView<T, D>,
            bits: impl Fn(&T) -> B,
        ) -> bool {
            // Bits distinguish what `==` does not: −0 from 0, and one NaN from another. Contiguous elements are
            // compared as slices, which is faster.
            let same = |(a, b): (&T, &T)| bits(a) == bits(b);
            a.shape() == b.shape()
                && match (a.as_slice(), b.as_slice()) {
                    (Some(a), Some(b)) => a.iter().zip(b).all(same),
                    _ => a.iter().zip(b).all(same),
                }
        }
        match (self, other) {
            (FloatView::F64(a), FloatView::F64(b)) => same(a, b, |x| x.to_bits()),
            (FloatView::F32(a), FloatView::F32(b)) => same(a, b, |x| x.to_bits()),
            (FloatView::Bf16(a), FloatView::Bf16(b)) => same(a, b, |x| x.to_bits()),
            (FloatView::F16(a), FloatView::F16(b)) => same(a, b, |x| x.to_bits()),
            _ => false,
        }
    }

    /// Widens every element to f64, exactly.
    pub fn to_f64(&self) -> Array<f64, D> {
        with_array!(FloatView, self, array => array.mapv(Float::to_f64))
    }

    /// Copies the elements into an array.
    pub fn to_owned(&self) -> FloatArray<D> {
        map_array!(FloatView => FloatArray, self, array => array.to_owned())
    }
}

impl FloatView<'_, Ix2> {
    /// Widens the elements of `rows` by `columns` to f64, exactly.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Array2<f64> {
        with_array!(FloatView, self, array => array.slice(s![rows, columns]).mapv(Float::to_f64))
    }

    /// Widens the elements of `rows` by `columns` to f64 as `[columns,rows]`, reading row by row so that reads are
    /// contiguous.
    pub fn part_transposed(&self, rows: Range<usize>, columns: Range<usize>) -> Array2<f64> {
        // Each source row is read in order and written with a stride.
        let height = rows.len();
        let mut values = vec![0.0; height * columns.len()];
        let extents = (columns.len(), height);
        with_array!(FloatView, self, array => {
            for (i, row) in array.slice(s![rows, columns]).rows().into_iter().enumerate() {
                values[i..].iter_mut().step_by(height).zip(row).for_each(|(value, &x)| *value = Float::to_f64(x));
            }
        });
        Array2::from_shape_vec(extents, values).expect("a value an element")
    }
}

/// Widens contiguous elements to f64, in a loop that is compiled for a wider vector unit too.
#[multiversion(targets("x86_64+avx2"))]
fn widened<T: Float>(row: &[T]) -> Vec<f64> {
    row.iter().map(|&x| x.to_f64()).collect()
}

impl FloatView<'_, Ix3> {
    /// Widens row `[b,t,:]` to f64, exactly.
    pub fn row(&self, b: usize, t: usize) -> Vec<f64> {
        self.row_part(b, t, 0..self.shape()[2])
    }

    /// Whether any element of row `[b,t,:]` is at most `bound`.
    pub fn at_most(&self, b: usize, t: usize, bound: f64) -> bool {
        // Every element is compared: a loop without an early exit is vectorized.
        with_array!(FloatView, self, array => {
            array.slice(s![b, t, ..]).iter().fold(false, |any, &x| any | (Float::to_f64(x) <= bound))
        })
    }

    /// Widens elements `[b,t,columns]` to f64, exactly.
    pub fn row_part(&self, b: usize, t: usize, columns: Range<usize>) -> Vec<f64> {
        with_array!(FloatView, self, array => {
            let row = array.slice(s![b, t, columns]);
            match row.as_slice() {
                Some(row) => widened(row),
                None => row.iter().map(|&x| Float::to_f64(x)).collect(),
            }
        })
    }
}

impl<D: Dimension> FloatArray<D> {
    /// Returns the array with its rank chosen at run time, without a copy.
    pub fn into_dyn(self) -> FloatArray<IxDyn> {
        map_array!(FloatArray => FloatArray, self, array => array.into_dyn())
    }

    /// Returns the array with another type for its rank, without a copy.
    ///
    /// # Panics
    /// If it has another rank than `E`.
    pub fn into_rank<E: Dimension>(self) -> FloatArray<E> {
        map_array!(FloatArray => FloatArray, self, array => array.into_dimensionality().expect("an array of this rank"))
    }

    /// Borrows the array without copying it.
    pub fn view(&self) -> FloatView<'_, D> {
        map_array!(FloatArray => FloatView, self, array => array.view())
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.view().dtype()
    }

    /// Returns the shape, one length per axis.
    pub fn shape(&self) -> &[usize] {
        with_array!(FloatArray, self, array => array.shape())
    }

    /// Whether the elements are dense and in row-major order, as every kernel expects.
    pub fn is_standard_layout(&self) -> bool {
        self.view().is_standard_layout()
    }

    /// Returns an array of zeros.
    pub fn zeros(shape: impl ShapeBuilder<Dim = D>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 => FloatArray::F64(Array::from_elem(shape, 0.0)),
            Dtype::F32 => FloatArray::F32(Array::from_elem(shape, 0.0)),
            Dtype::Bf16 => FloatArray::Bf16(Array::from_elem(shape, bf16::ZERO)),
            Dtype::F16 => FloatArray::F16(Array::from_elem(shape, f16::ZERO)),
        }
    }

    /// Rounds `values` to `dtype`, to nearest even.
    pub fn rounded_from(values: &Array<f64, D>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 => FloatArray::F64(values.clone()),
            Dtype::F32 => FloatArray::F32(values.mapv(Float::from_f64)),
            Dtype::Bf16 => FloatArray::Bf16(values.mapv(Float::from_f64)),
            Dtype::F16 => FloatArray::F16(values.mapv(Float::from_f64)),
        }
    }

    /// Whether dtype, shape and the bits of every element equal those of `other`, as [`FloatView::same_bits`].
    pub fn same_bits(&self, other: &Self) -> bool {
        self.view().same_bits(&other.view())
    }

    /// Widens every element to f64, exactly.
    pub fn to_f64(&self) -> Array<f64, D> {
        self.view().to_f64()
    }

    /// Copies the elements of `other` into this array's memory.
    ///
    /// # Panics
    /// If dtype or shape differ.
    pub fn assign(&mut self, other: &Self) {
        match (self, other) {
            (FloatArray::F64(a), FloatArray::F64(b)) => a.assign(b),
            (FloatArray::F32(a), FloatArray::F32(b)) => a.assign(b),
            (FloatArray::Bf16(a), FloatArray::Bf16(b)) => a.assign(b),
            (FloatArray::F16(a), FloatArray::F16(b)) => a.assign(b),
            (a, b) => panic!("got {}, expected {}", b.dtype(), a.dtype()),
        }
    }

    /// Selects `indices` along `axis`, in their order, into a row-major array.
    #[must_use]
    pub fn select(&self, axis: Axis, indices: &[usize]) -> Self
    where
        D: RemoveAxis,
    {
        // The layout of ndarray's own result is unspecified.
        // Kernels read rows in memory order, whatever axis was selected.
        fn selected<T: Clone, D: RemoveAxis>(array: &Array<T, D>, axis: Axis, indices: &[usize]) -> Array<T, D> {
            array.select(axis, indices).as_standard_layout().into_owned()
        }
        map_array!(FloatArray => FloatArray, self, array => selected(array, axis, indices))
    }
}

impl FloatArray<Ix0> {
    /// Returns the one value of a scalar, as f64.
    pub fn value(&self) -> f64 {
        with_array!(FloatArray, self, array => Float::to_f64(array[()]))
    }
}

impl FloatArray<Ix2> {
    /// Returns element `[b,t]` as f64, exactly.
    pub fn at(&self, b: usize, t: usize) -> f64 {
        with_array!(FloatArray, self, array => Float::to_f64(array[[b, t]]))
    }

    /// Widens the elements of `rows` by `columns` to f64, exactly.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Array2<f64> {
        self.view().part(rows, columns)
    }
}

impl FloatArray<Ix3> {
    /// Widens row `[b,t,:]` to f64, exactly.
    pub fn row(&self, b: usize, t: usize) -> Vec<f64> {
        self.view().row(b, t)
    }

    /// Whether any element of row `[b,t,:]` is at most `bound`.
    pub fn at_most(&self, b: usize, t: usize, bound: f64) -> bool {
        self.view().at_most(b, t, bound)
    }

    /// Widens elements `[b,t,columns]` to f64, exactly.
    pub fn row_part(&self, b: usize, t: usize, columns: Range<usize>) -> Vec<f64> {
        self.view().row_part(b, t, columns)
    }

    /// Sets row `[b,t,:]` to `values`, rounded to nearest even.
    pub fn set_row(&mut self, b: usize, t: usize, values: &[f64]) {
        with_array!(FloatArray, self, array => {
            let mut row = array.slice_mut(s![b, t, ..]);
            row.iter_mut().zip(values).for_each(|(x, value)| *x = Float::from_f64(*value));
        });
    }

    /// Selects the rows at `places`, which are `(b, t)`, as `[1,N,…]`.
    ///
    /// # Panics
    /// If a place is out of range.
    #[must_use]
    pub fn at_places(&self, places: &[(usize, usize)]) -> Self {
        let tokens = self.shape()[1];
        self.in_one_row().select(Axis(1), &places.iter().map(|&(b, t)| b * tokens + t).collect::<Vec<_>>())
    }

    /// Concatenates the rows of all sequences, as `[1,B·T,…]`.
    #[must_use]
    pub fn in_one_row(&self) -> Self {
        fn flat<T: Clone>(array: &Array<T, Ix3>) -> Array<T, Ix3> {
            let (batch, tokens, width) = array.dim();
            let dense = array.as_standard_layout().into_owned();
            dense.into_shape_with_order((1, batch * tokens, width)).expect("dense")
        }
        map_array!(FloatArray => FloatArray, self, array => flat(array))
    }

    /// Copies the array to memory whose first element is one behind an aligned one.
    #[must_use]
    pub fn misaligned(&self) -> Self {
        fn moved<T: Copy>(array: &Array<T, Ix3>) -> Array<T, Ix3> {
            let Some(first) = array.first() else { return array.clone() };
            let longer: ndarray::Array1<T> = std::iter::once(first).chain(array).copied().collect();
            longer.slice_move(s![1..]).into_shape_with_order(array.raw_dim()).expect("dense")
        }
        map_array!(FloatArray => FloatArray, self, array => moved(array))
    }

    /// Whether the first element is at an address that is no multiple of 16.
    pub fn is_misaligned(&self) -> bool {
        with_array!(FloatArray, self, array => !array.as_ptr().addr().is_multiple_of(16))
    }

    /// Sets every element of row `[b,t,:]` to `x`, rounded to nearest even.
    pub fn fill_row(&mut self, b: usize, t: usize, x: f64) {
        with_array!(FloatArray, self, array => array.slice_mut(s![b, t, ..]).fill(Float::from_f64(x)));
    }
}
