//! Keys of specs, packed sequences, memory limits and names that are nearly right.

mod memory;
mod sequences;
mod spec;
mod text;
