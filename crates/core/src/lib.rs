//! The types that every other crate uses: a [`spec::LossSpec`] defines a loss, a [`problem::Problem`] is one batch, and
//! an [`implementation::Implementation`] computes a [`problem::Candidate`] from the two.
//!
//! Notation, everywhere: `B` sequences of `T` tokens over a vocabulary of `V`; `ℓ = logp`; `r = exp(ℓ − old_logp)`;
//! `A` the advantage; `m` the mask; `u` a dtype's unit roundoff (2⁻²⁴ for f32). Logarithms are natural.

mod array;
pub mod device_dtype;
pub mod files;
#[cfg(unix)]
pub mod guardian;
pub mod implementation;
pub mod memory;
pub mod problem;
pub mod project;
pub mod spec;
pub mod tanh;
pub mod temporary;
pub mod text;
