//! What the kernels share: the loss of one token over any arithmetic, and what their numbers are rounded from.

pub(crate) mod arithmetic;
pub(crate) mod objective;
