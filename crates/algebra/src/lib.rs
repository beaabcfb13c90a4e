//! The loss of one token, value and derivative, and the last steps of a softmax, over any [`arithmetic`], shared by all
//! kernels; and the losses of a batch in f64, which this machine computes around a kernel.

pub mod arithmetic;
pub mod cross_entropy;
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
