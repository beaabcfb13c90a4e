//! What `assay emit` writes for a GPU: PTX, how it is launched, and the program that calls it.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, iter};

use assay_ptx::{ALIGNMENT, Kernel, Parameter, Role};
use serde::Serialize;

use super::emit::{Alias, Emit, MODULE, Module, by_name, make_folder};
use super::{CliError, Passed};
use crate::device_dtype::DeviceDtype;
use crate::gpu::Target;
use crate::gpu::assemble::expect_launch;
use crate::gpu::figures::compiled_for_gpus;
use crate::implementation::{Given, RunError};
use crate::problem::Dtype;
use crate::programs::{ANY_DEVICE, Device, LossProgram, Programs as _, Shaped};
use crate::spec::LossSpec;

/// What was emitted, and how it is called. Described in `docs/gpu.md`.
#[derive(Serialize)]
struct Manifest<'e> {
    assay: &'static str,
    #[serde(rename = "impl")]
    implementation: &'e str,
    target: String,
    /// What the text asks for at least: a driver assembles it for that or a newer chip.
    architecture: &'static str,
    devices: usize,
    /// What XLA's CUDA plugin is told of the chip where there is none: a `GpuTargetConfigProto` as text.
    target_config: String,
    /// `[B,T,V]` on each device.
    shape: [usize; 3],
    dtype: Dtype,
    spec: &'e LossSpec,
    #[serde(serialize_with = "by_name")]
    numbers: &'e [(&'static str, f32)],
    /// In the order of their calls.
    kernels: Vec<Emitted<'e>>,
    module: Module<'e>,
}

#[derive(Serialize)]
struct Emitted<'e> {
    /// Of its entry.
    name: &'e str,
    ptx: String,
    /// CTAs.
    grid: [u32; 3],
    /// Threads of a CTA.
    block: [u32; 3],
    /// CTAs of a cluster, which the text asks for itself.
    cluster: u32,
    /// Dynamic shared memory of a CTA, bytes. Above 49,152 a launch must ask for it
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    shared_bytes: u32,
    /// What the entry is given, one pointer each, in order.
    arguments: Vec<Argument<'e>>,
}

#[derive(Serialize)]
struct Argument<'e> {
    name: &'e str,
    dtype: DeviceDtype,
    shape: &'e [usize],
    /// Bytes: it begins at a multiple of so many, or the device stops the kernel.
    alignment: u64,
    /// `input` or `output`.
    role: &'static str,
    /// The place of the argument whose array this is too.
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<usize>,
}

impl<'e> From<&'e Kernel> for Emitted<'e> {
    fn from(kernel: &'e Kernel) -> Self {
        let argument = |parameter: &'e Parameter| {
            let (role, over) = match parameter.role {
                Role::Input => ("input", None),
                Role::Output { over } => ("output", over),
            };
            let Parameter { name, dtype, shape, .. } = parameter;
            Argument { name, dtype: *dtype, shape, alignment: ALIGNMENT, role, over }
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

/// Writes the kernels of `asked` for `target`.
pub(super) fn run(asked: &Emit, target: &Target, spec: &LossSpec) -> Result<Passed, CliError> {
    let id = asked.implementation.as_deref().unwrap_or("gpu-one-pass");
    let program: LossProgram = compiled_for_gpus(id)?;
    let (shape, dtype, devices) = (asked.shape, asked.dtype, target.devices());
    let (written_for, loss) = (target.chip.written_for(), Shaped::of(spec));
    if !program.has_kernels() {
        let all = LossProgram::all().into_iter().filter(|program| program.is_for_gpus());
        let ids = all.map(LossProgram::id).collect::<Vec<_>>().join(", ");
        let expected = format!("one that has kernels of PTX: {ids}");
        return Err(CliError::Usage(format!("implementation: got `{id}`, expected {expected}")));
    }
    let kernels = program.gpu_kernels_for(loss, shape, dtype, devices, written_for).map_err(RunError::from)?;
    kernels.iter().try_for_each(|kernel| expect_launch(kernel, target))?;
    let given = Given { shape, dtype, form: (), packed: None };
    let module = program.text(loss, given, devices, Device::gpu(written_for)).map_err(RunError::from)?;
    let signature = program.signature_for(loss, shape, dtype, devices, ANY_DEVICE).map_err(RunError::from)?;
    let manifest = Manifest {
        assay: env!("CARGO_PKG_VERSION"),
        implementation: id,
        target: target.to_string(),
        architecture: written_for.name(),
        devices,
        target_config: target.chip.target_config(),
        shape: program.held_by_each(shape, devices, ANY_DEVICE).map_err(RunError::from)?,
        dtype,
        spec,
        numbers: &signature.numbers,
        kernels: kernels.iter().map(Emitted::from).collect(),
        module: Module {
            file: MODULE,
            inputs: &signature.inputs,
            outputs: &signature.outputs,
            aliases: [Alias { operand: 0, result: 0 }],
        },
    };
    make_folder(&asked.output, |folder| {
        for (kernel, entry) in iter::zip(&kernels, &manifest.kernels) {
            fs::write(folder.join(&entry.ptx), &kernel.text)?;
        }
        fs::write(folder.join(MODULE), &module)?;
        fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(&manifest)? + "\n")
    })?;
    asked.printing.finish(&summary(&manifest, &asked.output), &manifest)?;
    Ok(Passed::Yes)
}

fn summary(manifest: &Manifest, folder: &Path) -> String {
    let Manifest { implementation, target, devices, shape: [b, t, v], dtype, kernels, .. } = manifest;
    let folder = folder.display();
    let mut text = format!("{folder}: {implementation} {b}x{t}x{v} {dtype} on each of {devices} devices, {target}\n");
    for Emitted { name, ptx, grid: [ctas, ..], block: [threads, ..], cluster, shared_bytes, .. } in kernels {
        let _ = writeln!(
            text,
            "{name}: {ptx}, {ctas} CTAs of {threads} threads in clusters of {cluster}, {shared_bytes} bytes of dynamic shared memory"
        );
    }
    text
}
