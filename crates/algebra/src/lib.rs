//! What all kernels share: the loss of one token, value and derivative, and how a softmax ends, over any
//! [`arithmetic`]; and, for what this machine computes around a kernel, the losses of a batch in f64.

pub mod arithmetic;
pub mod family;
mod kl;
pub mod loss;
mod number;
pub mod objective;
pub mod parts;
mod policy;
pub mod reduction;
pub mod rollout;
pub mod softmax;
pub mod structure;
pub mod tape;
mod term;
pub mod transform;
