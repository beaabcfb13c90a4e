//! What needs the whole house: the command line, PJRT plugins, training, and what holds for the project. One binary, as each
//! links all of it.

mod commands;
mod common;
mod crates;
#[cfg(feature = "pjrt")]
mod pjrt;
mod project;
#[cfg(feature = "train")]
mod train;
