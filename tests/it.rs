//! What needs the whole house: the command line, PJRT plugins, training, and what holds for the project. One binary, as each
//! links all of it.

mod commands;
mod common;
mod crates;
#[cfg(all(feature = "pjrt", feature = "train"))]
mod hostile;
#[cfg(feature = "pjrt")]
mod pjrt;
mod project;
#[cfg(feature = "train")]
mod train;

#[cfg(not(feature = "train"))]
#[test]
#[ignore = "the training loop is behind the feature `train`: cargo test --all-features"]
fn train() {
    panic!("there is none without the feature");
}

#[cfg(not(feature = "pjrt"))]
#[test]
#[ignore = "what runs through PJRT is behind the feature `pjrt`, on by default"]
fn pjrt() {
    panic!("there is none without the feature");
}
