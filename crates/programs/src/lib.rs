//! Programs for PJRT devices, as text: a spec and extents become StableHLO, or Mosaic for a TPU, with cargo alone.
//!
//! ```text
//! LossSpec ─▶ Structure ─▶ program: the frame, a core in its middle ─▶ StableHLO
//!                                    │ baseline: plain XLA operations
//!                                    └ tiled: a tile kernel, lowered to loops or to Mosaic
//! ```
//!
//! [`LossProgram`] lists those of a loss on logits, [`HeadProgram`] those with an LM head before it; what runs them asks
//! neither for more than [`Programs`] has.

mod alternatives;
mod baseline;
mod device;
pub mod lm_head;
pub mod loss;
pub mod mesh;
mod one_pass;
mod program;
mod rows;
mod sharding;
mod tiled;
mod two_pass;

pub use device::{ANY_DEVICE, ANY_TPU, Device, LOOPS_VARIABLE, Lowering, TpuCore};
pub use lm_head::{CHUNK_BYTES, HeadProgram};
pub use loss::{LossProgram, Signature};
pub use program::{Named, Output, Scalars, local_shape, logits_in_rows};
pub use sharding::Sharding;
pub use tiled::TpuKernel;

pub use assay_algebra::structure::Shaped;
pub use assay_tile::Machine;

use assay_core::implementation::{Given, Unsupported, Workload};
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use mesh::Mesh;

/// The programs of one kernel under one sharding, for one kind of problem.
pub trait Programs: Copy + Send + Sync {
    /// What they are given.
    type Problem: Workload;

    /// One for each kernel and each sharding that it knows.
    fn all() -> Vec<Self>;

    /// The name that commands and reports use.
    fn id(self) -> &'static str;

    /// One line on what it is and where it runs.
    fn summary(self) -> &'static str;

    /// The class of its arithmetic: which entries of `tolerances.toml` it is held to.
    fn class(self) -> &'static str;

    /// How a batch is cut for it.
    fn sharding(self) -> Sharding;

    /// Whether one device holds all there is.
    fn is_whole(self) -> bool {
        self.sharding() == Sharding::Whole
    }

    /// Whether it is an implementation to run and to judge: it computes a loss and its gradient, and is not there to be compiled
    /// beside another that is.
    fn is_implementation(self) -> bool {
        true
    }

    /// Whether it computes `spec` on arrays of `shape` and `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports(
        self,
        spec: &LossSpec,
        shape: <Self::Problem as Workload>::Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<(), Unsupported>;

    /// The mesh that `devices` make for a batch whose logits are of `shape`.
    ///
    /// # Errors
    /// [`Unsupported`], naming the counts that would do.
    fn mesh(self, shape: Shape, devices: usize) -> Result<Mesh, Unsupported> {
        let mesh = self.sharding().mesh(shape, devices);
        mesh.map_err(|counts| unsupported(self, "device count", devices, counts))
    }

    /// The program that each of `devices` runs, which are of one kind, for the whole batch that is `given`.
    ///
    /// # Errors
    /// [`Unsupported`], as of [`supports`](Self::supports).
    fn text(
        self,
        loss: Shaped,
        given: Given<Self::Problem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported>;

    /// Whether it has tile kernels, which are [lowered](Lowering) in one way or another.
    fn has_kernels(self) -> bool;

    /// Whether its logits, if it is given any, cross as [rows](logits_in_rows).
    fn takes_rows(self, device: Device) -> bool {
        self.has_kernels() && device.lowering == Lowering::Mosaic
    }
}

fn unsupported(
    programs: impl Programs,
    field: &'static str,
    given: impl ToString,
    supported: impl Into<String>,
) -> Unsupported {
    Unsupported { implementation: programs.id().into(), field, given: given.to_string(), supported: supported.into() }
}

/// The version of Mosaic's dialects that kernels are written in.
pub const MOSAIC_VERSION: usize = assay_tile::mosaic::VERSION;
