//! What the kernels share: the loss of one token, value and derivative, over any arithmetic.

pub(crate) mod arithmetic;
pub(crate) mod family;
pub(crate) mod objective;
#[cfg(feature = "pjrt")]
pub(crate) mod one_pass;
#[cfg(feature = "pjrt")]
pub(crate) mod rows;
#[cfg(feature = "pjrt")]
pub(crate) mod structure;
#[cfg(feature = "pjrt")]
pub(crate) mod two_pass;
