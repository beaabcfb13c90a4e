//! Programs compiled ahead of time for GPUs, on a machine that has none, and what the compilers say of them.
//!
//! Three tools are asked, none of which needs a GPU or a driver:
//!
//! - XLA's CUDA plugin compiles the whole program ([`compile`]): the memory of one run, and the optimized HLO, from which follow the
//!   bytes that move through HBM;
//! - `ptxas` assembles every kernel of PTX ([`assemble`]): registers, spills, shared memory, and how many CTAs find room together;
//! - `nvdisasm` reads the machine's instructions back, each with its line of PTX. How often that line runs is told by running the
//!   kernel's integers (`trips`), and which unit an instruction takes by NVIDIA's documents (`pipes`).
//!
//! From these follow two lower bounds on the time of one run: HBM's, and that of the busiest unit. They are bounds, not predictions:
//! latency, stalls, conflicts of banks and collectives are in neither. [`figures`] brings all of it together for one program,
//! [`table`] for many.

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
