//! The files that `assay emit` writes for a GPU: PTX with its launch sizes, and the program that calls it.

use assay_ptx::{Parameter, PtxKernel, Role};
use serde::Serialize;

use super::manifest::{EmitManifest, EmitRequest, EmitTarget};
use crate::cli::{CliError, Passed};
use crate::device_dtype::DeviceDtype;
use crate::gpu::GpuTarget;
use crate::gpu::assemble::expect_launch;
use crate::gpu::figures::gpu_program;
use crate::implementation::{ProblemFormat, RunError};
use crate::programs::{ANY_DEVICE, Device, LossProgram, Programs as _, StructuredSpec};

#[derive(Serialize)]
struct GpuFacts {
    /// The oldest architecture that the PTX runs on; a driver assembles it for that or a newer chip.
    architecture: &'static str,
    /// The description of the chip for XLA's CUDA plugin on a machine without one: a `GpuTargetConfigProto` as text.
    target_config: String,
}

#[derive(Serialize)]
struct EmittedPtx<'e> {
    /// The name of the PTX entry.
    name: &'e str,
    ptx: String,
    /// The number of CTAs along x, y and z.
    grid: [u32; 3],
    /// The number of threads of a CTA along x, y and z.
    block: [u32; 3],
    /// CTAs of a cluster, which the text asks for itself.
    cluster: u32,
    /// Dynamic shared memory of a CTA, bytes. Above 49,152 a launch must ask for it
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    shared_bytes: u32,
    /// The entry's arguments, one pointer each, in order.
    arguments: Vec<PtxArgument<'e>>,
}

#[derive(Serialize)]
struct PtxArgument<'e> {
    name: &'e str,
    dtype: DeviceDtype,
    shape: &'e [usize],
    /// Bytes: it begins at a multiple of so many, or the device stops the kernel.
    alignment: u64,
    /// The use of the array, `input` or `output`.
    role: &'static str,
    /// The place of the argument whose array this is too.
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<usize>,
}

impl<'e> From<&'e PtxKernel> for EmittedPtx<'e> {
    fn from(kernel: &'e PtxKernel) -> Self {
        let argument = |parameter: &'e Parameter| {
            let (role, over) = match parameter.role {
                Role::Input => ("input", None),
                Role::Output { over } => ("output", over),
            };
            let Parameter { name, dtype, shape, alignment, .. } = parameter;
            PtxArgument { name, dtype: *dtype, shape, alignment: *alignment, role, over }
        };
        Self {
            name: &kernel.name,
            ptx: format!("{}.ptx", kernel.name),
            grid: kernel.grid,
            block: kernel.block,
            cluster: kernel.cluster,
            shared_bytes: kernel.shared_bytes,
            arguments: kernel.parameters.iter().map(argument).collect(),
        }
    }
}

/// Writes the kernels that are `asked` for, for `target`.
pub(super) fn emit(asked: &EmitRequest, target: &GpuTarget) -> Result<Passed, CliError> {
    let spec = asked.spec()?;
    let id = asked.implementation.as_deref().unwrap_or("gpu-one-pass");
    let program: LossProgram = gpu_program(id)?;
    let (shape, dtype, devices) = (asked.shape, asked.dtype, target.devices());
    let (written_for, loss) = (target.chip.written_for(), StructuredSpec::new(&spec));
    // A program of XLA's operations alone has no PTX to hand over.
    if !program.has_kernels() {
        let all = LossProgram::all().into_iter().filter(|program| program.is_for_gpus());
        let ids = all.map(LossProgram::id).collect::<Vec<_>>().join(", ");
        let expected = format!("one that has kernels of PTX: {ids}");
        return Err(CliError::Usage(format!("implementation: got `{id}`, expected {expected}").into()));
    }
    let kernels = program.gpu_kernels_for(loss, shape, dtype, devices, written_for).map_err(RunError::from)?;
    // The driver of the target must be able to launch every kernel, which is checked here and not when it is used.
    kernels.iter().try_for_each(|kernel| expect_launch(kernel, target))?;
    let given = ProblemFormat { shape, dtype, form: (), packed: None };
    let module = program.text(loss, given, devices, Device::gpu(written_for)).map_err(RunError::from)?;
    let signature = program.signature_for(loss, shape, dtype, devices, ANY_DEVICE).map_err(RunError::from)?;
    let local = program.held_by_each(shape, devices, ANY_DEVICE).map_err(RunError::from)?;
    let facts = GpuFacts { architecture: written_for.name(), target_config: target.chip.target_config() };
    let of = EmitTarget { target: target.to_string(), devices, facts };
    let emitted = kernels.iter().map(EmittedPtx::from).collect();
    let manifest = EmitManifest::new(of, (id, local, dtype), &spec, &signature, emitted);
    let files = kernels.iter().zip(&manifest.kernels).map(|(kernel, emitted)| (&emitted.ptx, &kernel.text));
    manifest.write(asked, &module, &files.collect::<Vec<_>>(), |emitted: &EmittedPtx| {
        let EmittedPtx { name, ptx, grid: [ctas, ..], block: [threads, ..], cluster, shared_bytes, .. } = emitted;
        let launch = format!("{ctas} CTAs of {threads} threads in clusters of {cluster}");
        format!("{name}: {ptx}, {launch}, {shared_bytes} bytes of dynamic shared memory\n")
    })
}
