//! Arrays that cross the border: lent to frameworks, and read from them, both without a copy.
//!
//! Of this crate's two places of `unsafe` this is one: what `DLPack` and Python's buffer protocol hand over is pointers.
#![allow(unsafe_code)]

mod aligned;
pub(crate) mod device;
mod dlpack;
mod lent;
mod output_array;
mod tensor_argument;

use std::ffi::CStr;

pub(crate) use aligned::Aligned;
pub(crate) use lent::{Array, Block};
pub(crate) use output_array::{OutputArray, requires_grad};
pub(crate) use tensor_argument::TensorArgument;

use assay::problem::Dtype;

/// The element type of an array that Python borrows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    Float(Dtype),
    Int64,
    Bool,
}

impl Element {
    fn size(self) -> usize {
        match self {
            Element::Float(dtype) => dtype.size(),
            Element::Int64 => 8,
            Element::Bool => 1,
        }
    }

    /// Returns the name of the type in the package.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Element::Float(Dtype::F64) => "f64",
            Element::Float(Dtype::F32) => "f32",
            Element::Float(Dtype::Bf16) => "bf16",
            Element::Float(Dtype::F16) => "f16",
            Element::Int64 => "i64",
            Element::Bool => "bool",
        }
    }

    /// Returns the type in the notation of Python's `struct` module, which has no bf16: its bits are unsigned integers
    /// there.
    fn format(self) -> &'static CStr {
        match self {
            Element::Float(Dtype::F64) => c"d",
            Element::Float(Dtype::F32) => c"f",
            Element::Float(Dtype::Bf16) => c"H",
            Element::Float(Dtype::F16) => c"e",
            Element::Int64 => c"q",
            Element::Bool => c"?",
        }
    }
}
