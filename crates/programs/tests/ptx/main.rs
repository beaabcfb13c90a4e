//! The PTX of the kernels for GPUs, run by an interpreter written apart, and judged.

mod kernels;
