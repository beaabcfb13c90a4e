//! Programs compiled ahead of time, on a machine without the chip, and what their compilers report about them.
//!
//! | target | compilers | facts | lower bounds on one run |
//! |---|---|---|---|
//! | [`tpu`] | libtpu | memory, the final VLIW program of every kernel, HBM bytes | cycles, HBM, links between chips |
//! | [`gpu`] | the CUDA plugin, `ptxas`, `nvdisasm` | memory, registers, spills, HBM bytes, instructions by pipe | HBM, busiest pipe |
//!
//! The two targets do not depend on each other. They share the [request](CompileRequest), the [error](AheadError) and the account of
//! [`traffic`], the bytes that an optimized HLO moves through HBM. A plugin runs in a child process (`assay_pjrt::compile_worker`),
//! because it may abort or never return.
//!
//! Times are lower bounds and not predictions: each target's page lists what its bounds leave out.

mod error;
mod files;
pub mod gpu;
#[cfg(feature = "plugin")]
mod plugin;
mod request;
mod table;
pub mod tpu;
pub mod traffic;

pub use error::AheadError;
#[cfg(feature = "plugin")]
pub use plugin::StableHloModule;
pub use request::{CompileOptions, CompileRequest, ProgramText, find_program};
