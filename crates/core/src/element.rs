//! Element types of arrays on a device.

use std::fmt;

use ndarray::Dimension;
use serde::{Deserialize, Serialize};

use crate::problem::{Dtype, FloatArray};

/// An element type that buffers and programs can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned byte.
    U8,
    /// Truth value, one byte on the host: 0 or 1.
    Pred,
}

impl Element {
    /// Every element type.
    pub const ALL: [Element; 9] = [
        Element::F64,
        Element::F32,
        Element::Bf16,
        Element::F16,
        Element::I64,
        Element::I32,
        Element::I16,
        Element::U8,
        Element::Pred,
    ];

    /// Bytes an element on the host.
    pub fn size(self) -> usize {
        match self {
            Element::F64 | Element::I64 => 8,
            Element::F32 | Element::I32 => 4,
            Element::Bf16 | Element::F16 | Element::I16 => 2,
            Element::U8 | Element::Pred => 1,
        }
    }

    /// Whether it is one of the floating-point types.
    pub fn is_float(self) -> bool {
        matches!(self, Element::F64 | Element::F32 | Element::Bf16 | Element::F16)
    }

    /// Its name in MLIR.
    pub fn mlir(self) -> &'static str {
        match self {
            Element::F64 => "f64",
            Element::F32 => "f32",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::I64 => "i64",
            Element::I32 => "i32",
            Element::I16 => "i16",
            Element::U8 => "ui8",
            Element::Pred => "i1",
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Element::U8 => "u8",
            Element::Pred => "pred",
            other => other.mlir(),
        })
    }
}

impl From<Dtype> for Element {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 => Element::F64,
            Dtype::F32 => Element::F32,
            Dtype::Bf16 => Element::Bf16,
            Dtype::F16 => Element::F16,
        }
    }
}

const DENSE: &str = "checked: dense row-major";

/// The bytes of a dense row-major array, as a device is sent them.
pub trait ArrayBytes {
    /// Of every element, the last axis fastest.
    fn bytes(&self) -> &[u8];

    /// The same, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl<D: Dimension> ArrayBytes for FloatArray<D> {
    fn bytes(&self) -> &[u8] {
        match self {
            FloatArray::F64(array) => bytemuck::cast_slice(array.as_slice().expect(DENSE)),
            FloatArray::F32(array) => bytemuck::cast_slice(array.as_slice().expect(DENSE)),
            FloatArray::Bf16(array) => bytemuck::cast_slice(array.as_slice().expect(DENSE)),
            FloatArray::F16(array) => bytemuck::cast_slice(array.as_slice().expect(DENSE)),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            FloatArray::F64(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(DENSE)),
            FloatArray::F32(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(DENSE)),
            FloatArray::Bf16(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(DENSE)),
            FloatArray::F16(array) => bytemuck::cast_slice_mut(array.as_slice_mut().expect(DENSE)),
        }
    }
}
