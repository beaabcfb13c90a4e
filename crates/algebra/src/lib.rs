//! What all kernels share: the loss of one token, value and derivative, over any [`arithmetic`].

pub mod arithmetic;
pub mod family;
pub mod objective;
pub mod rollout;
pub mod structure;
