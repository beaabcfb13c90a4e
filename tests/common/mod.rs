//! What several folders of tests share.

pub(crate) mod arms;
#[cfg(feature = "train")]
pub(crate) mod checkpoint;
pub(crate) mod command;
#[cfg(feature = "train")]
pub(crate) mod formula;
#[cfg(feature = "train")]
pub(crate) mod interruption;
#[cfg(feature = "pjrt")]
pub(crate) mod plugins;
