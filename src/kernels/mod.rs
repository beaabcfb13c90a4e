//! What the kernels share: the loss of one token, value and derivative, over any arithmetic.

pub(crate) mod arithmetic;
pub(crate) mod family;
pub(crate) mod objective;
#[cfg(feature = "pjrt")]
pub(crate) mod one_pass;
pub(crate) mod rollout;
#[cfg(feature = "pjrt")]
pub(crate) mod rows;
#[cfg_attr(not(feature = "pjrt"), allow(dead_code, reason = "programs read more of it than native does"))]
pub(crate) mod structure;
#[cfg(feature = "pjrt")]
pub(crate) mod two_pass;
