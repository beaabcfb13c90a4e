//! What several folders of tests share.

#[cfg(feature = "train")]
pub(crate) mod checkpoint;
pub(crate) mod command;
#[cfg(feature = "train")]
pub(crate) mod formula;
#[cfg(feature = "train")]
pub(crate) mod interruption;
#[cfg(feature = "train")]
pub(crate) mod training;
