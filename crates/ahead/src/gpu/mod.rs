//! Programs compiled for GPUs: memory, registers, HBM traffic and instructions by pipe.
//!
//! Three tools compile a program, and need neither a GPU nor a driver:
//!
//! - XLA's CUDA plugin compiles the whole program ([`compile`]): the memory of one run, and the optimized HLO, from which follow the
//!   bytes that move through HBM;
//! - `ptxas` assembles every kernel of PTX ([`assemble`]): registers, spills, shared memory, and how many CTAs find room together;
//! - `nvdisasm` lists the machine's instructions, each with its line of PTX. Executing the kernel's integers gives the number of runs of
//!   that line (`trips`), and NVIDIA's documents give the execution unit of an instruction (`pipes`).
//!
//! These give two lower bounds on the time of one run: HBM's, and that of the busiest unit. They are bounds and not predictions:
//! latency, stalls, bank conflicts and collectives are in neither. [`figures`] collects all of it for one program, [`table`] for many.

pub mod assemble;
#[cfg(feature = "plugin")]
pub mod compile;
pub mod figures;
mod pipes;
mod sass;
pub mod table;
pub mod target;
mod trips;

pub use assemble::CudaToolkit;
#[cfg(feature = "plugin")]
pub use compile::{GpuCompilation, GpuCompiler};
pub use target::{GpuChip, GpuTarget};
