//! A bank of deliberately wrong kernels: what a suite is worth is what it catches.
//!
//! [`Specimen`] is a correct kernel; each [`Mutant`] is one small change to it.

mod bank;
mod loss;
mod property;
mod run;
mod specimen;

pub use bank::{BANK, Bug, Class, Mutant};
pub use run::{Case, Kill, Suite, property_cases};
pub use specimen::Specimen;
