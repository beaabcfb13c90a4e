//! The PTX of the kernels for GPUs, run by an interpreter written apart, and judged.

mod harness;
mod kernels;
mod lm_head;
mod mistakes;
