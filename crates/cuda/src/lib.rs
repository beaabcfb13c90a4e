//! The second way to NVIDIA's GPUs, besides PJRT: CUDA's driver, opened at run time ([`driver`]). The kernels of PTX run through it on
//! one device ([`run`]), or on the arrays and the stream of a framework ([`op`]). No XLA is involved, so that a kernel's time is the
//! kernel's alone.
//!
//! Building needs nothing of CUDA, and running needs no toolkit: `libcuda.so.1` is part of the driver, and assembles the PTX itself.

pub mod driver;
mod error;
mod frame;
pub mod op;
pub mod run;

pub use error::CudaError;
pub use run::{DriverLogp, DriverLoss};
