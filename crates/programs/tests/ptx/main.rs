//! The PTX of the kernels for GPUs, run by an interpreter written apart, and judged.

#[path = "../common/mod.rs"]
mod common;
mod kernels;
mod lm_head;
