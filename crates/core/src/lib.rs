//! What every other crate speaks of: [`spec::LossSpec`] says which loss, [`problem::Problem`] is one batch, and an
//! [`implementation::Implementation`] makes a [`problem::Candidate`] of the two.
//!
//! Notation, everywhere: `B` sequences of `T` tokens over a vocabulary of `V`; `ℓ = logp`; `r = exp(ℓ − old_logp)`;
//! `A` the advantage; `m` the mask; `u` a dtype's unit roundoff (2⁻²⁴ for f32). Logarithms are natural.

mod array;
pub mod device_dtype;
pub mod implementation;
pub mod memory;
pub mod problem;
pub mod project;
pub mod spec;
pub mod tanh;
pub mod text;
