//! [`DeviceDtype`]: the element types of arrays on a device.

use std::fmt;

use ndarray::Dimension;
use serde::{Deserialize, Serialize};

use crate::array::with_array;
use crate::problem::{Dtype, FloatArray};

/// An element type of buffers and programs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceDtype {
    /// IEEE binary64, eight bytes.
    F64,
    /// IEEE binary32, four bytes.
    F32,
    /// bfloat16, with f32's exponent, two bytes.
    Bf16,
    /// IEEE binary16, two bytes.
    F16,
    /// A signed 64-bit integer.
    I64,
    /// A signed 32-bit integer.
    I32,
    /// A signed 16-bit integer.
    I16,
    /// An unsigned 8-bit integer.
    U8,
    /// A truth value, one byte on the host: 0 or 1.
    Pred,
}

impl DeviceDtype {
    /// The list of all element types.
    pub const ALL: [DeviceDtype; 9] = [
        DeviceDtype::F64,
        DeviceDtype::F32,
        DeviceDtype::Bf16,
        DeviceDtype::F16,
        DeviceDtype::I64,
        DeviceDtype::I32,
        DeviceDtype::I16,
        DeviceDtype::U8,
        DeviceDtype::Pred,
    ];

    /// Returns the size of an element on the host, in bytes.
    pub fn size(self) -> usize {
        match self {
            DeviceDtype::F64 | DeviceDtype::I64 => 8,
            DeviceDtype::F32 | DeviceDtype::I32 => 4,
            DeviceDtype::Bf16 | DeviceDtype::F16 | DeviceDtype::I16 => 2,
            DeviceDtype::U8 | DeviceDtype::Pred => 1,
        }
    }

    /// Whether the type is one of the floating-point types.
    pub fn is_float(self) -> bool {
        matches!(self, DeviceDtype::F64 | DeviceDtype::F32 | DeviceDtype::Bf16 | DeviceDtype::F16)
    }

    /// Returns the name of the type in MLIR, such as `ui8`.
    pub fn mlir(self) -> &'static str {
        match self {
            DeviceDtype::F64 => "f64",
            DeviceDtype::F32 => "f32",
            DeviceDtype::Bf16 => "bf16",
            DeviceDtype::F16 => "f16",
            DeviceDtype::I64 => "i64",
            DeviceDtype::I32 => "i32",
            DeviceDtype::I16 => "i16",
            DeviceDtype::U8 => "ui8",
            DeviceDtype::Pred => "i1",
        }
    }
}

impl fmt::Display for DeviceDtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // Two names of MLIR are unusual outside of it.
        f.write_str(match self {
            DeviceDtype::U8 => "u8",
            DeviceDtype::Pred => "pred",
            other => other.mlir(),
        })
    }
}

impl From<Dtype> for DeviceDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F64 => DeviceDtype::F64,
            Dtype::F32 => DeviceDtype::F32,
            Dtype::Bf16 => DeviceDtype::Bf16,
            Dtype::F16 => DeviceDtype::F16,
        }
    }
}

const DENSE: &str = "checked: dense row-major";

/// The bytes of a dense row-major array, as they are sent to a device.
pub trait ArrayBytes {
    /// Borrows the bytes of all elements, the last axis fastest.
    fn bytes(&self) -> &[u8];

    /// Borrows the bytes of all elements to write them, the last axis fastest.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl<D: Dimension> ArrayBytes for FloatArray<D> {
    fn bytes(&self) -> &[u8] {
        with_array!(FloatArray, self, array => bytemuck::cast_slice(array.as_slice().expect(DENSE)))
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        with_array!(FloatArray, self, array => bytemuck::cast_slice_mut(array.as_slice_mut().expect(DENSE)))
    }
}
