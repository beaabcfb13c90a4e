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
pub use program::{Named, Output, Scalars, local_shape, numbers};
pub use rows::Machine;
pub use sharding::Sharding;
pub use tiled::TpuKernel;

/// A core with 128 MiB of VMEM, as a v6e has: what the kernels are written for where no TPU runs them.
pub const ANY_DEVICE: Machine = Machine { vmem_bytes: 120 << 20, bf16_arithmetic: true };

/// The version of Mosaic's dialects that kernels are written in.
pub const MOSAIC_VERSION: usize = assay_tile::mosaic::VERSION;
