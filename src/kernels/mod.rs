//! What the kernels share: the loss of one token, value and derivative, over any arithmetic.

pub(crate) mod arithmetic;
pub(crate) mod objective;
