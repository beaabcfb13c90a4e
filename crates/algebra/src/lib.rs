//! What all kernels share: the loss of one token, value and derivative, and how a softmax ends, over any
//! [`arithmetic`]; and, for what this machine computes around a kernel, the losses of a batch in f64.

pub mod arithmetic;
pub mod family;
pub mod loss;
pub mod objective;
pub mod parts;
pub mod reduction;
pub mod rollout;
pub mod softmax;
pub mod structure;
pub mod tape;
pub mod transform;
