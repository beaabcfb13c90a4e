//! The kernel languages, and the kernels that are written in them, run by interpreters written apart.

mod common;
mod mosaic;
mod ptx;
mod tile;
