//! Programs compiled for TPUs: memory, schedule, HBM traffic and the links between chips.
//!
//! [`TpuCompiler`] hands a StableHLO text to libtpu in a child process and reads three things of the result:
//!
//! - the memory of one run ([`CompiledMemory`](assay_core::memory::CompiledMemory)), which is what a device really reserves;
//! - the final VLIW program of every kernel ([`schedule`]): bundles, loops and their trips, slots used;
//! - the optimized HLO ([`traffic`](crate::traffic)): bytes that move between HBM and the cores.
//!
//! These, and the bytes that must cross the [`links`] between chips, give lower bounds on the time of one run, [`TpuTimeBound`]. They are
//! bounds and not predictions: DMA latency, stalls within a kernel and `SparseCore` work are in none of them. [`mllm_jax`] has the
//! measurements of a v6e to compare with. [`figures`] collects all of it for one program, [`table`] for every recorded shape.

#[cfg(feature = "plugin")]
pub mod compile;
pub mod figures;
pub mod links;
pub mod mllm_jax;
pub mod schedule;
pub mod table;
pub mod target;

pub use assay_schema::compile::{TpuLimit, TpuTimeBound};
#[cfg(feature = "plugin")]
pub use compile::{TpuCompilation, TpuCompiler};
pub use target::{TpuChip, TpuTarget};
