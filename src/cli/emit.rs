//! `assay emit`: the kernels of an implementation in files, for a program of the user's own.

use std::path::{Path, PathBuf};
use std::{fmt::Write as _, fs, io};

use clap::Args;
use serde::{Serialize, Serializer, ser::SerializeMap};

use super::compile::Chosen;
use super::{CliError, Passed, Printing, emit_gpu};
use crate::config;
use crate::implementation::RunError;
use crate::problem::{Dtype, Shape};
use crate::programs::{MOSAIC_VERSION, Named, Programs as _, Shaped, Signature, TpuKernel};
use crate::spec::LossSpec;
use crate::tpu::Target;
use crate::tpu::figures::loss_program;

/// The libtpu that kernels were compiled with: the one that `make setup-tpu` installs.
const LIBTPU: &str = "0.0.51";

/// The whole program, within the folder.
pub(super) const MODULE: &str = "module.mlir";

#[derive(Args)]
pub(super) struct Emit {
    /// A TPU and its topology: v5e, v5p, v6e or v7x, alone or as in v6e:2x4; or a GPU: h100, h200 or b200, alone or, as in h100:8, so
    /// many of them
    #[arg(long, value_name = "CHIP[:TOPOLOGY]", value_parser = Chosen::parse)]
    target: Chosen,
    /// The implementation: of a TPU tile-one-pass or tile-two-pass, or one of these over rows, vocabulary or both (-rows, -vocab,
    /// -mesh); of a GPU gpu-one-pass, gpu-two-pass, their cuts, or gpu-logp. The one-pass kernel if none is given
    #[arg(long = "impl", value_name = "ID")]
    pub(super) implementation: Option<String>,
    /// Sequences, tokens and vocabulary that each device holds; of -rows, -vocab and -mesh all that the devices hold together
    #[arg(long, value_name = "BxTxV")]
    pub(super) shape: Shape,
    /// Dtype of the logits: f32, bf16 or f16
    #[arg(long, default_value = "bf16")]
    pub(super) dtype: Dtype,
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// The folder to make
    #[arg(short, long, value_name = "DIR")]
    pub(super) output: PathBuf,
    #[command(flatten)]
    pub(super) printing: Printing,
}

impl Emit {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?.unwrap_or_default();
        match &self.target {
            Chosen::Tpu(target) => self.run_tpu(target, &spec),
            Chosen::Gpu(target) => emit_gpu::run(self, target, &spec),
        }
    }

    fn run_tpu(&self, target: &Target, spec: &LossSpec) -> Result<Passed, CliError> {
        let id = self.implementation.as_deref().unwrap_or("tile-one-pass");
        let implementation = loss_program(id)?;
        let (shape, dtype, devices) = (self.shape, self.dtype, target.devices());
        let (machine, loss) = (target.chip.machine(), Shaped::of(spec));
        if !implementation.has_kernels() {
            let reason = format!("implementation: got `{id}`, expected one that has kernels: ");
            let supported = "tile-one-pass, tile-two-pass, or one of these with -rows, -vocab or -mesh";
            return Err(CliError::Usage(reason + supported));
        }
        let kernels = implementation.kernels_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
        let module = implementation.program_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
        let signature = implementation.signature_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
        let local = implementation.held_by_each(shape, devices, machine).map_err(RunError::from)?;
        let manifest = Manifest::new((id, target, dtype), spec, local, &kernels, &signature);
        make_folder(&self.output, |folder| {
            for (kernel, entry) in kernels.iter().zip(&manifest.kernels) {
                fs::write(folder.join(&entry.payload), &kernel.payload)?;
                fs::write(folder.join(&entry.text), &kernel.text)?;
            }
            fs::write(folder.join(MODULE), &module)?;
            fs::write(folder.join("manifest.json"), serde_json::to_string_pretty(&manifest)? + "\n")
        })?;
        self.printing.finish(&manifest.summary(&self.output), &manifest)?;
        Ok(Passed::Yes)
    }
}

/// Makes `folder` whole or not at all: it is filled under another name and renamed.
pub(super) fn make_folder(folder: &Path, fill: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), CliError> {
    let failed = |reason| CliError::Io { path: folder.into(), action: "write", reason };
    if folder.symlink_metadata().is_ok() {
        return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "it exists, expected a folder to be made")));
    }
    let mut builder = tempfile::Builder::new();
    // Temporary folders are private by default; this one should obey the umask like any other.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let temporary = builder.tempdir_in(folder.parent().unwrap_or(folder)).map_err(failed)?;
    fill(temporary.path()).map_err(failed)?;
    fs::rename(temporary.path(), folder).map_err(failed)?;
    let _ = temporary.keep();
    Ok(())
}

/// What was emitted, and how it is called. Described in `docs/jax.md`.
#[derive(Serialize)]
struct Manifest<'e> {
    assay: &'static str,
    mosaic_version: usize,
    libtpu: &'static str,
    #[serde(rename = "impl")]
    implementation: &'e str,
    target: String,
    devices: usize,
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
    name: &'e str,
    payload: String,
    text: String,
    operands: Vec<Dense<'e>>,
    results: Vec<Dense<'e>>,
    aliases: Vec<Alias>,
    /// The least and the most that its operand `columns` may say.
    #[serde(skip_serializing_if = "Option::is_none")]
    columns: Option<[usize; 2]>,
    vmem_bytes: usize,
}

/// An array of a kernel.
#[derive(Serialize)]
struct Dense<'e> {
    #[serde(flatten)]
    named: &'e Named,
    /// Axes, from major to minor.
    layout: Vec<usize>,
    /// What its integers are the bits of.
    #[serde(skip_serializing_if = "Option::is_none")]
    bits_of: Option<Dtype>,
}

/// Places of an operand and of a result that share one array.
#[derive(Serialize)]
pub(super) struct Alias {
    pub(super) operand: usize,
    pub(super) result: usize,
}

#[derive(Serialize)]
pub(super) struct Module<'e> {
    pub(super) file: &'static str,
    pub(super) inputs: &'e [Named],
    pub(super) outputs: &'e [Named],
    pub(super) aliases: [Alias; 1],
}

/// As an object. JSON has no infinity: `"inf"`.
pub(super) fn by_name<S: Serializer>(numbers: &&[(&'static str, f32)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(numbers.len()))?;
    for (name, value) in *numbers {
        if value.is_finite() {
            map.serialize_entry(name, value)?;
        } else {
            map.serialize_entry(name, &value.to_string())?;
        }
    }
    map.end()
}

impl<'e> Manifest<'e> {
    fn new(
        (implementation, target, dtype): (&'e str, &Target, Dtype),
        spec: &'e LossSpec,
        shape: [usize; 3],
        kernels: &'e [TpuKernel],
        signature: &'e Signature,
    ) -> Self {
        Self {
            assay: env!("CARGO_PKG_VERSION"),
            mosaic_version: MOSAIC_VERSION,
            libtpu: LIBTPU,
            implementation,
            target: target.to_string(),
            devices: target.devices(),
            shape,
            dtype,
            spec,
            numbers: &signature.numbers,
            kernels: kernels.iter().map(|kernel| Emitted::new(kernel, dtype)).collect(),
            module: Module {
                file: MODULE,
                inputs: &signature.inputs,
                outputs: &signature.outputs,
                aliases: [Alias { operand: 0, result: 0 }],
            },
        }
    }

    fn summary(&self, folder: &Path) -> String {
        let Self { implementation, target, devices, shape: [b, t, v], dtype, kernels, .. } = self;
        let folder = folder.display();
        let mut text =
            format!("{folder}: {implementation} {b}x{t}x{v} {dtype} on each of {devices} devices, {target}\n");
        for Emitted { name, vmem_bytes, payload, .. } in kernels {
            let _ = writeln!(text, "{name}: {payload}, {vmem_bytes} bytes of VMEM");
        }
        text
    }
}

impl<'e> Emitted<'e> {
    fn new(kernel: &'e TpuKernel, dtype: Dtype) -> Self {
        let dense = |named: &'e Named| {
            let stored_as_bits = named.name.ends_with("logits") && named.dtype != dtype.into();
            Dense { named, layout: (0..named.shape.len()).collect(), bits_of: stored_as_bits.then_some(dtype) }
        };
        Self {
            name: &kernel.name,
            payload: format!("{}.payload.json", kernel.name),
            text: format!("{}.mlir", kernel.name),
            operands: kernel.operands.iter().map(dense).collect(),
            results: kernel.results.iter().map(dense).collect(),
            aliases: kernel.aliases.iter().map(|&(operand, result)| Alias { operand, result }).collect(),
            columns: kernel.columns,
            vmem_bytes: kernel.vmem_bytes,
        }
    }
}
