//! [`TensorArgument`]: an argument of an operation, a tensor of a framework's, used where it lies.

use half::{bf16, f16};
use ndarray::{ArrayView, ArrayViewD, ArrayViewMut, Dimension, IxDyn, ShapeBuilder};
use pyo3::intern;
use pyo3::prelude::*;

use super::dlpack;
use crate::error;
use assay::native::op::{OpArray, OpArrayMut};
use assay::problem::FloatView;

/// A tensor in the host's memory, by `DLPack`.
pub(crate) struct TensorArgument {
    field: &'static str,
    /// The capsule that keeps the memory alive.
    _capsule: Py<PyAny>,
    data: *mut u8,
    shape: Vec<usize>,
    /// The strides in elements, none negative.
    strides: Vec<usize>,
    element: ArgumentElement,
}

#[derive(Clone, Copy, PartialEq)]
enum ArgumentElement {
    Bool,
    I32,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

impl ArgumentElement {
    fn size(self) -> usize {
        match self {
            ArgumentElement::Bool => 1,
            ArgumentElement::F16 | ArgumentElement::Bf16 => 2,
            ArgumentElement::I32 | ArgumentElement::F32 => 4,
            ArgumentElement::I64 | ArgumentElement::F64 => 8,
        }
    }
}

// SAFETY: the capsule keeps the memory on any thread; who calls an operation lends its arrays until that returns.
unsafe impl Send for TensorArgument {}
// SAFETY: as above. Only `lent_mut` writes, and takes it alone.
unsafe impl Sync for TensorArgument {}

impl TensorArgument {
    /// Takes the argument `field`.
    ///
    /// # Errors
    /// `ProblemError` for what is no tensor in the host's memory, or has elements that no operation takes.
    pub(crate) fn read(field: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let wrong = |given: &str, expected: &str| {
            error::problem_error(py, format!("`{field}`: got {given}, expected {expected}"))
        };
        let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
            return Err(wrong(&object.get_type().to_string(), "a tensor"));
        };
        let capsule = method.call0()?;
        let dlpack::CapsuleArray { data, shape, strides, dtype, on_host } = dlpack::read(&capsule)?;
        if !on_host {
            return Err(wrong("a tensor of a device", "one in the host's memory"));
        }
        // The first number is DLPack's type code: 0 signed, 2 float, 4 bf16, 6 bool.
        let element = match dtype {
            (6, 8, 1) => ArgumentElement::Bool,
            (0, 32, 1) => ArgumentElement::I32,
            (0, 64, 1) => ArgumentElement::I64,
            (2, 16, 1) => ArgumentElement::F16,
            (4, 16, 1) => ArgumentElement::Bf16,
            (2, 32, 1) => ArgumentElement::F32,
            (2, 64, 1) => ArgumentElement::F64,
            (code, bits, _) => {
                let given = match code {
                    0 => format!("dtype int{bits}"),
                    1 => format!("dtype uint{bits}"),
                    _ => format!("the DLPack dtype {code} of {bits} bits"),
                };
                return Err(wrong(&given, "bool, i32, i64, f16, bf16, f32 or f64"));
            }
        };
        // DLPack 0 leaves the strides out for dense arrays.
        let dense = || {
            let mut strides = vec![1; shape.len()];
            for axis in (1..shape.len()).rev() {
                strides[axis - 1] = strides[axis] * shape[axis];
            }
            strides
        };
        let strides = match strides {
            None => dense(),
            Some(strides) => {
                let strides: Result<_, _> = strides.into_iter().map(usize::try_from).collect();
                strides.map_err(|_| wrong("negative strides", "a tensor that runs forwards"))?
            }
        };
        if data.is_null() && !shape.contains(&0) {
            return Err(wrong(
                &format!("{} without memory of its own, a null pointer", object.get_type().qualname()?),
                "a plain tensor",
            ));
        }
        // DLPack allows an array to begin at any byte; elements of Rust must be aligned.
        if !data.addr().is_multiple_of(element.size()) {
            return Err(wrong(&format!("address {:#x}", data.addr()), "a multiple of an element's size"));
        }
        Ok(Self { field, _capsule: capsule.unbind(), data: data.cast_mut(), shape, strides, element })
    }

    pub(crate) fn lent(&self) -> OpArray<'_> {
        match self.element {
            ArgumentElement::Bool => OpArray::Bool(self.elements()),
            ArgumentElement::I32 => OpArray::I32(self.elements()),
            ArgumentElement::I64 => OpArray::I64(self.elements()),
            ArgumentElement::F16 => OpArray::F16(self.elements()),
            ArgumentElement::Bf16 => OpArray::Bf16(self.elements()),
            ArgumentElement::F32 => OpArray::F32(self.elements()),
            ArgumentElement::F64 => OpArray::F64(self.elements()),
        }
    }

    /// Views the argument as floats of the rank `D`.
    ///
    /// # Errors
    /// What it is, in words, where it is none.
    pub(crate) fn floats<D: Dimension>(&self, expected: &str) -> Result<FloatView<'_, D>, String> {
        let lent = self.lent();
        let wrong =
            format!("`{}`: got dtype {} and shape {:?}, expected {expected}", self.field, lent.dtype(), self.shape);
        match lent {
            OpArray::F16(array) => array.into_dimensionality().map(FloatView::F16),
            OpArray::Bf16(array) => array.into_dimensionality().map(FloatView::Bf16),
            OpArray::F32(array) => array.into_dimensionality().map(FloatView::F32),
            OpArray::F64(array) => array.into_dimensionality().map(FloatView::F64),
            _ => return Err(wrong),
        }
        .map_err(|_| wrong)
    }

    /// Views the argument for writing.
    ///
    /// # Errors
    /// What it is, in words, where that is no `[B,T,V]` of f32, bf16 or f16 whose elements are apart.
    pub(crate) fn lent_mut(&mut self) -> Result<OpArrayMut<'_>, String> {
        let wrong =
            |given: String| format!("`{}`: got {given}, expected a dense [B,T,V] of f32, bf16 or f16", self.field);
        let &[batch, tokens, vocab] = &self.shape[..] else { return Err(wrong(format!("shape {:?}", self.shape))) };
        // No element is two: each axis steps over all of the next.
        let &[by_batch, by_token, by_column] = &self.strides[..] else { unreachable!("a stride an axis") };
        let apart = by_column == 1 && (tokens == 1 || by_token >= vocab);
        if !(apart && (batch == 1 || by_batch >= (tokens - 1) * by_token + vocab)) {
            return Err(wrong(format!("strides {:?}", self.strides)));
        }
        Ok(match self.element {
            ArgumentElement::F16 => OpArrayMut::F16(self.elements_mut([batch, tokens, vocab])),
            ArgumentElement::Bf16 => OpArrayMut::Bf16(self.elements_mut([batch, tokens, vocab])),
            ArgumentElement::F32 => OpArrayMut::F32(self.elements_mut([batch, tokens, vocab])),
            _ => return Err(wrong(format!("dtype {}", self.lent().dtype()))),
        })
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn elements<T: TensorElement>(&self) -> ArrayViewD<'_, T> {
        if self.is_empty() {
            return ArrayView::from_shape(IxDyn(&self.shape), &[]).expect("no element");
        }
        let extents = IxDyn(&self.shape).strides(IxDyn(&self.strides));
        // SAFETY: the capsule says that there are so many elements of this type with these strides, which are not negative, and
        // it lives; `of` has seen that they are aligned. They are lent by the caller of an operation, and only read.
        unsafe { ArrayView::from_shape_ptr(extents, self.data.cast_const().cast()) }
    }

    fn elements_mut<T: TensorElement>(&mut self, [batch, tokens, vocab]: [usize; 3]) -> ndarray::ArrayViewMut3<'_, T> {
        if self.is_empty() {
            return ArrayViewMut::from_shape((batch, tokens, vocab), &mut []).expect("no element");
        }
        let extents = (batch, tokens, vocab).strides((self.strides[0], self.strides[1], self.strides[2]));
        // SAFETY: as in `elements`; `lent_mut` has seen that no two elements are one, and who calls an operation that writes
        // lends this array to it alone.
        unsafe { ArrayViewMut::from_shape_ptr(extents, self.data.cast()) }
    }
}

/// A type of element that an argument may have.
trait TensorElement: Copy {}
impl TensorElement for bool {}
impl TensorElement for i32 {}
impl TensorElement for i64 {}
impl TensorElement for f16 {}
impl TensorElement for bf16 {}
impl TensorElement for f32 {}
impl TensorElement for f64 {}
