//! The PTX of the kernels for GPUs, run by an interpreter written apart, and judged.

pub(crate) mod kernels;
mod lm_head;
