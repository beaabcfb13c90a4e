//! The second door to NVIDIA's GPUs: CUDA's driver, opened at run time ([`driver`]), and the kernels of PTX run through it on one
//! device ([`run`]), or on arrays that a framework holds, on its stream ([`op`]). No XLA is there, so that a kernel's time is the
//! kernel's alone.
//!
//! Nothing of CUDA is needed to build it, and no toolkit to run it: `libcuda.so.1` comes with the driver, and assembles the PTX itself.

pub mod driver;
mod error;
mod frame;
pub mod op;
pub mod run;

pub use error::CudaError;
pub use run::{DriverLogp, DriverLoss};
