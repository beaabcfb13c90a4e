//! The CPU kernels against the reference, and against themselves.

mod bits;
mod divergence;
mod kept;
mod lm_head;
mod match_reference;
mod op;
mod packed;
mod parts;
mod sampler_support;
