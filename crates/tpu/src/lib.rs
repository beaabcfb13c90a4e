//! Programs compiled ahead of time for TPUs, on a machine that has none, and what the compiler says of them.
//!
//! [`compile`] hands a StableHLO text to libtpu in a child process. Of what comes back, three things are read:
//!
//! - the memory of one run ([`CompiledMemory`](assay_core::memory::CompiledMemory)), which is what a device really reserves;
//! - the final VLIW program of every kernel ([`schedule`]): bundles, loops and their trips, slots used;
//! - the optimized HLO ([`traffic`]): bytes that move between HBM and the cores.
//!
//! From these, and from what must cross the [`links`] between chips, follow lower bounds on the time of one run, [`Bound`]. They are
//! bounds, not predictions: DMA latency, stalls within a kernel and `SparseCore` work are in none. [`seed_measurements`] holds what hardware measured, to
//! put beside them. [`figures`] brings all of it together for one program, [`table`] for every recorded shape.

#[cfg(feature = "libtpu")]
pub mod compile;
mod error;
pub mod figures;
mod files;
pub mod links;
pub mod schedule;
pub mod seed_measurements;
pub mod table;
pub mod target;
pub mod traffic;

pub use assay_schema::compile::{Bound, Limit};
#[cfg(feature = "libtpu")]
pub use compile::{Compiled, Compiler, Request};
pub use error::TpuError;
pub use target::{Chip, Target};
