//! What all kernels share: the loss of one token, value and derivative, and how a softmax ends, over any
//! [`arithmetic`].

pub mod arithmetic;
pub mod family;
pub mod objective;
pub mod rollout;
pub mod softmax;
pub mod structure;
