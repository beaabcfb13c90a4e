//! Programs for PJRT devices, as text: a spec and extents become StableHLO, or Mosaic for a TPU, with cargo alone.
//!
//! ```text
//! LossSpec ─▶ Structure ─▶ program: the frame, a core in its middle ─▶ StableHLO
//!                                    │ baseline: plain XLA operations
//!                                    │ tiled: a tile kernel, lowered to loops or to Mosaic
//!                                    └ gpu: a kernel of PTX
//! ```
//!
//! [`LossProgram`] lists those of a loss on logits, [`HeadProgram`] those with an LM head before it; what runs them asks
//! neither for more than [`Programs`] has.
//!
//! # Example
//! The one-pass kernel of a loss, as PTX for an H100:
//!
//! ```
//! use assay_core::problem::{Dtype, Shape};
//! use assay_core::spec::LossSpec;
//! use assay_programs::{LossProgram, Programs, PtxTarget, StructuredSpec};
//!
//! let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
//! let shape = Shape { batch: 4, tokens: 512, vocab: 151_936 };
//! let program = LossProgram::all().into_iter().find(|program| program.id() == "gpu-one-pass").unwrap();
//! let kernels = program.gpu_kernels_for(StructuredSpec::new(&spec), shape, Dtype::Bf16, 1, PtxTarget::Sm90)?;
//!
//! println!("{}", kernels[0].text);
//! assert_eq!(kernels[0].grid[0], 4 * 512 * kernels[0].cluster, "a cluster for each row");
//! # Ok::<(), assay_core::implementation::Unsupported>(())
//! ```

/// The columns of the kernels' arrays, for callers without a program around them: of the kernel that reads logits
/// once and of the two that read them twice.
pub mod arrays {
    pub use crate::one_pass::{ResultColumn, TokenColumn, given_columns, numbers, result_names, width};
    pub use crate::two_pass::{PER_TOKEN, Scale, Statistic, numbers as softmax_numbers};
}

/// The kernels of a framework's operation on a GPU, one after another on its arrays.
pub mod operation {
    pub use crate::gpu::batch::{BatchExtent, BatchForm, BatchKernel, batch_numbers};
    pub use crate::gpu::cotangents::Cotangents;
    pub use crate::gpu::operation::{OperationKernel, OperationText, takes_one_pass};
}

mod alternatives;
mod baseline;
mod device;
mod frame;
mod gpu;
pub mod lm_head;
pub mod loss;
pub mod mesh;
mod one_pass;
mod program;
mod rows;
mod several;
mod sharding;
mod tiled;
mod transform;
mod two_pass;

pub use device::{ANY_DEVICE, ANY_TPU, Device, LOOPS_VARIABLE, Lowering, TpuKind};
pub use frame::logits_in_rows;
pub use gpu::meeting::{MEETING_VARIABLE, MeetingMethod};
pub use lm_head::{CHUNK_BYTES, HeadProgram};
pub use loss::{LossProgram, Signature};
pub use program::{NamedArray, ProgramOutput, ScalarOutputs, local_shape};
pub use sharding::Sharding;
pub use tiled::TpuKernel;

pub use assay_algebra::structure::StructuredSpec;
pub use assay_ptx::PtxTarget;
pub use assay_tile::TileMachine;

use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{ProblemFormat, Unsupported, Workload};
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use assay_tile::stablehlo;
use mesh::Mesh;

/// The programs of one kernel under one sharding, for one kind of problem.
pub trait Programs: Copy + Send + Sync {
    /// The kind of problem that the programs compute.
    type Problem: Workload;

    /// One for each kernel and each sharding that it knows.
    fn all() -> Vec<Self>;

    /// The name that commands and reports use.
    fn id(self) -> &'static str;

    /// One line on what it is and where it runs.
    fn summary(self) -> &'static str;

    /// The class of its arithmetic: which entries of `tolerances.toml` it is held to.
    fn class(self) -> &'static str;

    /// Returns the way in which a batch is distributed over devices.
    fn sharding(self) -> Sharding;

    /// Whether one device holds all there is.
    fn is_whole(self) -> bool {
        self.sharding() == Sharding::Whole
    }

    /// Whether what it sums over devices comes back in parts, one a device, and with the vocabulary cut hidden states come in so: see
    /// [`lm_head`].
    fn scatters(self) -> bool {
        false
    }

    /// Whether it is an implementation to run and to judge: it computes a loss and its gradient, and is not there to be compiled
    /// beside another that is.
    fn is_implementation(self) -> bool {
        true
    }

    /// Whether `1 − p_y` keeps its digits where the target has almost all the probability, and `p` where logits are
    /// large: what the grade `exact` asks for, and what `log_softmax` and autodiff do not give.
    fn keeps_digits(self) -> bool {
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
        loss: StructuredSpec,
        given: ProblemFormat<Self::Problem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported>;

    /// Whether it has kernels, which are [lowered](Lowering) in one way or another.
    fn has_kernels(self) -> bool;

    /// Returns the first GPU architecture that the program's PTX runs on; `None` if it has no PTX. A program with PTX
    /// runs on NVIDIA's GPUs only.
    fn least_target(self) -> Option<PtxTarget> {
        None
    }

    /// Whether its kernels are PTX.
    fn is_for_gpus(self) -> bool {
        self.least_target().is_some()
    }

    /// Checks that it can be written for `device`: any program can but those for GPUs.
    ///
    /// # Errors
    /// [`Unsupported`], with what it needs.
    fn expect_device(self, device: Device) -> Result<(), Unsupported> {
        match (self.least_target(), device.lowering) {
            (None, _) => Ok(()),
            (Some(least), Lowering::Ptx(target)) if least <= target => Ok(()),
            (Some(least), Lowering::Ptx(target)) => {
                let supported = format!("{} and up, whose CTAs form clusters; gpu-two-pass takes sm_80", least.name());
                Err(unsupported(self, "device", target.name(), supported))
            }
            (Some(least), other) => {
                let given = format!("that takes kernels as {}", other.name());
                Err(unsupported(self, "device", given, format!("an NVIDIA GPU of {} and up", least.name())))
            }
        }
    }

    /// Returns the form of the program's kernels on `device`; `None` if it has no kernels.
    fn lowering(self, device: Device) -> Option<Lowering> {
        let tile = match device.lowering {
            Lowering::Ptx(_) => Lowering::Loops,
            other => other,
        };
        self.has_kernels().then_some(if self.is_for_gpus() { device.lowering } else { tile })
    }

    /// Returns the architecture that the program's PTX is written for; `None` if it has no PTX.
    fn ptx_target(self, lowering: Lowering) -> Option<PtxTarget> {
        match lowering {
            Lowering::Ptx(target) if self.is_for_gpus() => Some(target),
            _ => None,
        }
    }

    /// Whether its logits, if it is given any, must be row-major on the device, in whatever order a plugin lays an
    /// array out that it is sent: see [`row_major_copy`].
    fn takes_row_major(self, _: Device) -> bool {
        false
    }

    /// Whether its logits, if it is given any, cross as [rows](logits_in_rows).
    fn takes_rows(self, device: Device) -> bool {
        self.lowering(device) == Some(Lowering::Mosaic)
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

/// The program that lays an array out row-major on the device: its result is its parameter, in another order.
///
/// libtpu lays an array that it is sent out as pads least (`[1,6,300]` f32 as six registers of one row, `[4,1024,V]`
/// with its sequences in one register), and refuses it where a program expects another order and size. Where the sizes
/// agree, it does not notice.
pub fn row_major_copy(element: DeviceDtype, shape: &[usize]) -> String {
    stablehlo::row_major_copy(&stablehlo::HloType::new(element, shape))
}

/// The version of Mosaic's dialects that kernels are written in.
pub const MOSAIC_VERSION: usize = assay_tile::mosaic::VERSION;
