//! Kernels for a TPU, on a machine that may have none.

pub mod interpret;
