//! Of crates that have no binary of their own for it: what is read of a spec, a batch and the machine, the constants of kernels, the
//! page, and workers in processes of their own.

mod agreement;
mod algebra;
mod core;
mod report;
mod schema;
mod worker;
