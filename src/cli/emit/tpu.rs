//! The files that `assay emit` writes for a TPU: Mosaic text, and the program that calls it.

use serde::Serialize;

use super::manifest::{Alias, EmitManifest, EmitRequest, EmitTarget};
use crate::cli::{CliError, Passed};
use crate::implementation::RunError;
use crate::problem::Dtype;
use crate::programs::{MOSAIC_VERSION, NamedArray, Programs as _, StructuredSpec, TpuKernel};
use crate::tpu::TpuTarget;
use crate::tpu::figures::loss_program;

/// The libtpu that kernels were compiled with: the one that `make setup-tpu` installs.
const LIBTPU: &str = "0.0.51";

#[derive(Serialize)]
struct TpuFacts {
    mosaic_version: usize,
    libtpu: &'static str,
}

#[derive(Serialize)]
struct EmittedMosaic<'e> {
    name: &'e str,
    payload: String,
    text: String,
    operands: Vec<DenseArray<'e>>,
    results: Vec<DenseArray<'e>>,
    aliases: Vec<Alias>,
    /// The least and the most that its operand `columns` may say.
    #[serde(skip_serializing_if = "Option::is_none")]
    columns: Option<[usize; 2]>,
    vmem_bytes: usize,
}

/// An array of a kernel.
#[derive(Serialize)]
struct DenseArray<'e> {
    #[serde(flatten)]
    named: &'e NamedArray,
    /// Axes, from major to minor.
    layout: Vec<usize>,
    /// The dtype whose bit patterns the array's integers are.
    #[serde(skip_serializing_if = "Option::is_none")]
    bits_of: Option<Dtype>,
}

impl<'e> EmittedMosaic<'e> {
    fn new(kernel: &'e TpuKernel, dtype: Dtype) -> Self {
        let dense = |named: &'e NamedArray| {
            // A TPU has no f16, so that f16 logits are given as the i16 of their bits; the manifest names the dtype
            // that they mean.
            let stored_as_bits = named.name.ends_with("logits") && named.dtype != dtype.into();
            DenseArray { named, layout: (0..named.shape.len()).collect(), bits_of: stored_as_bits.then_some(dtype) }
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

/// Writes the kernels that are `asked` for, for `target`.
pub(super) fn emit(asked: &EmitRequest, target: &TpuTarget) -> Result<Passed, CliError> {
    let spec = asked.spec()?;
    let id = asked.implementation.as_deref().unwrap_or("tile-one-pass");
    let implementation = loss_program(id)?;
    let (shape, dtype, devices) = (asked.shape, asked.dtype, target.devices());
    let (machine, loss) = (target.chip.machine(), StructuredSpec::new(&spec));
    if !implementation.has_kernels() {
        let reason = format!("implementation: got `{id}`, expected one that has kernels: ");
        let supported = "tile-one-pass, tile-two-pass, or one of these with -rows, -vocab or -mesh";
        return Err(CliError::Usage((reason + supported).into()));
    }
    let kernels = implementation.kernels_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
    let module = implementation.program_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
    let signature = implementation.signature_for(loss, shape, dtype, devices, machine).map_err(RunError::from)?;
    let local = implementation.held_by_each(shape, devices, machine).map_err(RunError::from)?;
    let facts = TpuFacts { mosaic_version: MOSAIC_VERSION, libtpu: LIBTPU };
    let of = EmitTarget { target: target.to_string(), devices, facts };
    let emitted = kernels.iter().map(|kernel| EmittedMosaic::new(kernel, dtype)).collect();
    let manifest = EmitManifest::new(of, (id, local, dtype), &spec, &signature, emitted);
    let files = kernels
        .iter()
        .zip(&manifest.kernels)
        .flat_map(|(kernel, EmittedMosaic { payload, text, .. })| [(payload, &kernel.payload), (text, &kernel.text)]);
    manifest.write(asked, &module, &files.collect::<Vec<_>>(), |EmittedMosaic { name, vmem_bytes, payload, .. }| {
        format!("{name}: {payload}, {vmem_bytes} bytes of VMEM\n")
    })
}
