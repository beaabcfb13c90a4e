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
pub mod lm_head;
pub mod loss;
pub mod mesh;
mod one_pass;
mod program;
mod rows;
mod sharding;
mod tiled;
mod two_pass;

pub use lm_head::{CHUNK_BYTES, HeadProgram};
pub use loss::{LossProgram, Signature};
pub use program::{Named, Output, Scalars, local_shape};
pub use sharding::Sharding;
pub use tiled::TpuKernel;

pub use assay_algebra::structure::Shaped;
pub use assay_tile::Machine;

use assay_core::implementation::{Given, Unsupported, Workload};
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use mesh::Mesh;

/// A TPU core with 128 MiB of VMEM, as a v6e has.
pub const ANY_TPU: Machine = Machine::tpu(120 << 20, true);

/// Any other device: rows of its arrays follow one another, so that nothing is padded to be cut over several (`xla-vocab`
/// on eight CPU devices, 1x128x151936 bf16: 47 ms a step, 61 where 18,992 columns each were made 19,072). The kernels'
/// loops are those of a TPU: they are there to be judged, and take their sums in its order. Registers of 32 lanes in place
/// of 128 would take a CPU 0.9 (`tile-one-pass`) and 0.75 of the time (`tile-two-pass`, 1x64x32000), of 512 up to twice it.
pub const ANY_DEVICE: Machine = Machine { memory_columns: 1, ..ANY_TPU };

/// What the devices of a PJRT platform are, by the name that it gives itself.
pub fn machine_of(platform: &str) -> Machine {
    if platform == "tpu" { ANY_TPU } else { ANY_DEVICE }
}

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

    /// The program that any device runs, one of `devices`, each of which is a `machine`, for the whole batch that is `given`.
    ///
    /// # Errors
    /// [`Unsupported`], as of [`supports`](Self::supports).
    fn loops(
        self,
        loss: Shaped,
        given: Given<Self::Problem>,
        devices: usize,
        machine: Machine,
    ) -> Result<String, Unsupported>;
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
