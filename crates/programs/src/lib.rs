//! Programs for PJRT devices, as text: a spec and extents become StableHLO, or Mosaic for a TPU, with cargo alone.
//!
//! ```text
//! LossSpec ─▶ Structure ─▶ program: the frame, a core in its middle ─▶ StableHLO
//!                                    │ baseline: plain XLA operations
//!                                    └ tiled: a tile kernel, lowered to loops or to Mosaic
//! ```
//!
//! [`LossProgram`] lists those of a loss on logits, [`HeadProgram`] those with an LM head before it.

mod baseline;
pub mod lm_head;
pub mod loss;
pub mod mesh;
mod one_pass;
mod program;
mod rows;
mod sharding;
mod tiled;
mod two_pass;

pub use lm_head::{CHUNK_BYTES, HeadArrays, HeadProgram};
pub use loss::{LossProgram, Signature};
pub use program::{Named, Output, Scalars, local_shape};
pub use sharding::Sharding;
pub use tiled::TpuKernel;

pub use assay_algebra::structure::Shaped;
pub use assay_tile::Machine;

/// A TPU core with 128 MiB of VMEM, as a v6e has.
pub const ANY_TPU: Machine = Machine::tpu(120 << 20, true);

/// Any other device: rows of its arrays follow one another, so that nothing is padded to be cut over several (`xla-vocab`
/// on eight CPU devices, 1x128x151936 bf16: 47 ms a step, 61 where 18,992 columns each were made 19,072). The kernels'
/// loops are those of a TPU: they are there to be judged, and take their sums in its order. Registers of 32 lanes in place
/// of 128 would take a CPU 0.9 (`tile-one-pass`) and 0.75 of the time (`tile-two-pass`, 1x64x32000), of 512 up to twice it.
pub const ANY_DEVICE: Machine = Machine { memory_columns: 1, ..ANY_TPU };

/// The version of Mosaic's dialects that kernels are written in.
pub const MOSAIC_VERSION: usize = assay_tile::mosaic::VERSION;
