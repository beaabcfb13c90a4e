//! The Mosaic text of the kernels, run by an interpreter written apart, and that interpreter on texts whose results are known.

#[path = "../common/mod.rs"]
mod common;
mod interpreter;
mod kernels;
mod samples;
