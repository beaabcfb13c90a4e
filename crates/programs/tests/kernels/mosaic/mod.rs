//! The Mosaic text of the kernels, run by an interpreter written apart, and that interpreter on texts whose results are known.

mod interpreter;
mod kernels;
mod samples;
