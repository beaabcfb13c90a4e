//! Kernels for devices that are called from a framework's own program: Mosaic for a TPU, PTX for a GPU.

use pyo3::prelude::*;
use serde::Serialize;

use crate::error;
use crate::spec::Spec;
use assay::gpu::GpuTarget;
use assay::implementation::Unsupported;
use assay::problem::{Dtype, Shape};
use assay::programs::{Device, LossProgram, Lowering, Programs as _, StructuredSpec, TileMachine, arrays};
use assay::tpu::TpuTarget;
use assay_algebra::structure::{DenominatorTokens, SpecNumber};

/// The kernels of a device.
#[derive(Serialize)]
struct Kernels {
    statistics: Emitted,
    gradient: Emitted,
    /// The kernel that reads logits once, for specs that need only a row and the loss of a token, and for rows that
    /// fit.
    one_pass: Option<OnePass>,
}

#[derive(Serialize)]
struct OnePass {
    #[serde(flatten)]
    kernel: Emitted,
    /// The numbers that it is given, by name, but for `entropy_factor`: as text, for some are infinite.
    numbers: Vec<(&'static str, String)>,
    /// The columns of what it is given of a token, and of what it returns.
    given: Vec<&'static str>,
    results: &'static [&'static str],
}

/// A kernel, and how it is called. Its operands and results are those of docs/jax.md.
#[derive(Serialize)]
struct Emitted {
    name: String,
    /// The `backend_config` of a `tpu_custom_call`, or PTX.
    text: String,
    /// Operand and result that share one array.
    aliases: Vec<(usize, usize)>,
    /// CTAs and threads of one, along x, y and z.
    #[serde(skip_serializing_if = "Option::is_none")]
    launch: Option<[[u32; 3]; 2]>,
    /// Dynamic shared memory of a CTA, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_bytes: Option<u32>,
}

/// The kernels for what a device holds of logits, as JSON. `target` is a chip's name, or what PJRT calls a device.
///
/// # Errors
/// A chip that nothing is written for, extents or a dtype that they do not take.
#[pyfunction]
pub(crate) fn mosaic_kernels(
    py: Python<'_>,
    spec: &Spec,
    shape: (usize, usize, usize),
    dtype: &str,
    target: &str,
) -> PyResult<String> {
    let machine = tpu_machine(target).map_err(|reason| error::other(py, format!("`target`: {reason}")))?;
    kernels(py, spec, asked(py, shape, dtype)?, ["tile-one-pass", "tile-two-pass"], |program, loss, shape, dtype| {
        let kernels = program.kernels_for(loss, shape, dtype, 1, machine)?.into_iter();
        let kernels = kernels.map(|kernel| Emitted {
            name: kernel.name,
            text: kernel.payload,
            aliases: kernel.aliases,
            launch: None,
            shared_bytes: None,
        });
        Ok(kernels.collect())
    })
}

/// Returns the GPU kernels for the logits that one device holds, as JSON.
///
/// # Errors
/// As there.
#[pyfunction]
pub(crate) fn ptx_kernels(
    py: Python<'_>,
    spec: &Spec,
    shape: (usize, usize, usize),
    dtype: &str,
    target: &str,
) -> PyResult<String> {
    let written_for = gpu_target(target).map_err(|reason| error::other(py, format!("`target`: {reason}")))?;
    kernels(py, spec, asked(py, shape, dtype)?, ["gpu-one-pass", "gpu-two-pass"], |program, loss, shape, dtype| {
        let kernels = program.gpu_kernels_for(loss, shape, dtype, 1, written_for)?.into_iter();
        let kernels = kernels.map(|kernel| Emitted {
            aliases: kernel.aliases(),
            launch: Some([kernel.grid, kernel.block]),
            shared_bytes: Some(kernel.shared_bytes),
            name: kernel.name,
            text: kernel.text,
        });
        Ok(kernels.collect())
    })
}

fn kernels(
    py: Python<'_>,
    spec: &Spec,
    (shape, dtype): (Shape, Dtype),
    programs: [&str; 2],
    write: impl Fn(LossProgram, StructuredSpec, Shape, Dtype) -> Result<Vec<Emitted>, Unsupported>,
) -> PyResult<String> {
    let mut loss = StructuredSpec::new(&spec.loss);
    // Rows may be of several batches, by `vmap`.
    loss.structure.entropy_bonus.iter_mut().for_each(|bonus| bonus.tokens = Some(DenominatorTokens::OfRow));
    let [one_pass, two_pass] = programs.map(|id| {
        let program = LossProgram::all().into_iter().find(|program| program.id() == id).expect("it is among them");
        write(program, loss, shape, dtype)
    });
    let two_pass: [Emitted; 2] =
        two_pass.map_err(|reason| error::other(py, reason))?.try_into().ok().expect("two passes");
    let [statistics, gradient] = two_pass;
    // Where it is not, the other two are.
    let one_pass = one_pass.ok().and_then(|kernels| kernels.into_iter().next()).map(|kernel| {
        let numbers = arrays::numbers(loss.structure).into_iter();
        let value =
            |number: SpecNumber| (number.name(), number.value_in(loss.spec, [shape.batch, shape.tokens]).to_string());
        OnePass {
            kernel,
            numbers: numbers.map(value).collect(),
            given: arrays::given_columns(loss.structure).into_iter().map(arrays::TokenColumn::name).collect(),
            results: arrays::result_names(loss.structure),
        }
    });
    Ok(serde_json::to_string(&Kernels { statistics, gradient, one_pass }).expect("plain data has a JSON form"))
}

fn asked(py: Python<'_>, shape: (usize, usize, usize), dtype: &str) -> PyResult<(Shape, Dtype)> {
    let (batch, tokens, vocab) = shape;
    let dtype = dtype.parse().map_err(|reason| error::other(py, format!("`logits`: {reason}")))?;
    Ok((Shape { batch, tokens, vocab }, dtype))
}

fn tpu_machine(target: &str) -> Result<TileMachine, String> {
    match Device::from_platform("tpu", target) {
        Ok(device) => Ok(device.machine),
        Err(_) => TpuTarget::parse(target).map(|target| target.chip.machine()).map_err(|reason| reason.to_string()),
    }
}

fn gpu_target(target: &str) -> Result<assay::programs::PtxTarget, String> {
    match Device::from_platform("cuda", target).map(|device| device.lowering) {
        Ok(Lowering::Ptx(written_for)) => Ok(written_for),
        _ => GpuTarget::parse(target).map(|target| target.chip.written_for()).map_err(|reason| reason.to_string()),
    }
}
