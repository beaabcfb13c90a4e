//! The kernels in [`crate::tile`].

pub(crate) use assay_algebra::{arithmetic, family, objective, rollout, structure};

#[cfg(feature = "pjrt")]
pub(crate) mod one_pass;
#[cfg(feature = "pjrt")]
pub(crate) mod rows;
#[cfg(feature = "pjrt")]
pub(crate) mod two_pass;
