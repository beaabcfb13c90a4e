//! What is read of a spec, a batch and the machine, and what is said where it is wrong.

mod memory;
mod sequences;
mod spec;
mod text;
