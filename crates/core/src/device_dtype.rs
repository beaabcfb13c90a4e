//! [`DeviceDtype`]: what arrays on a device hold.

use std::fmt;

use ndarray::Dimension;
use serde::{Deserialize, Serialize};

use crate::array::with_array;
use crate::problem::{Dtype, FloatArray};

/// A dtype that buffers and programs can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceDtype {
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

impl DeviceDtype {
    /// Each of them.
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

    /// Bytes an element on the host.
    pub fn size(self) -> usize {
        match self {
            DeviceDtype::F64 | DeviceDtype::I64 => 8,
            DeviceDtype::F32 | DeviceDtype::I32 => 4,
            DeviceDtype::Bf16 | DeviceDtype::F16 | DeviceDtype::I16 => 2,
            DeviceDtype::U8 | DeviceDtype::Pred => 1,
        }
    }

    /// Whether it is one of the floating-point types.
    pub fn is_float(self) -> bool {
        matches!(self, DeviceDtype::F64 | DeviceDtype::F32 | DeviceDtype::Bf16 | DeviceDtype::F16)
    }

    /// Its name in MLIR.
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

/// The bytes of a dense row-major array, as a device is sent them.
pub trait ArrayBytes {
    /// Of every element, the last axis fastest.
    fn bytes(&self) -> &[u8];

    /// The same, to be written.
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
