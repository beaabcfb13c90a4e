//! Kernels for devices that are called from a framework's own program: Mosaic for a TPU, PTX for a GPU.

use pyo3::prelude::*;
use serde::Serialize;

use crate::error;
use crate::spec::Spec;
use assay::problem::{Dtype, Shape};
use assay::programs::{Device, LossProgram, Lowering, Machine, Programs as _, Shaped};
use assay::{gpu, tpu};

/// A kernel, and how it is called. Its operands and results are those of docs/jax.md.
#[derive(Serialize)]
struct Kernel {
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

/// The kernels of statistics and of dlogits for what a device holds of logits, as JSON. `target` is a chip's name, or what
/// PJRT calls a device.
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
    let (shape, dtype) = asked(py, shape, dtype)?;
    let kernels = program("tile-two-pass").kernels_for(Shaped::of(&spec.loss), shape, dtype, 1, machine);
    let kernels = kernels.map_err(|reason| error::other(py, reason))?.into_iter().map(|kernel| Kernel {
        name: kernel.name,
        text: kernel.payload,
        aliases: kernel.aliases,
        launch: None,
        shared_bytes: None,
    });
    Ok(as_json(kernels.collect()))
}

/// The same for a GPU.
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
    let (shape, dtype) = asked(py, shape, dtype)?;
    let kernels = program("gpu-two-pass").gpu_kernels_for(Shaped::of(&spec.loss), shape, dtype, 1, written_for);
    let kernels = kernels.map_err(|reason| error::other(py, reason))?.into_iter().map(|kernel| Kernel {
        aliases: kernel.aliases(),
        launch: Some([kernel.grid, kernel.block]),
        shared_bytes: Some(kernel.shared_bytes),
        name: kernel.name,
        text: kernel.text,
    });
    Ok(as_json(kernels.collect()))
}

fn as_json(kernels: Vec<Kernel>) -> String {
    serde_json::to_string(&kernels).expect("plain data has a JSON form")
}

fn asked(py: Python<'_>, shape: (usize, usize, usize), dtype: &str) -> PyResult<(Shape, Dtype)> {
    let (batch, tokens, vocab) = shape;
    let dtype = dtype.parse().map_err(|reason| error::other(py, format!("`logits`: {reason}")))?;
    Ok((Shape { batch, tokens, vocab }, dtype))
}

fn program(id: &str) -> LossProgram {
    LossProgram::all().into_iter().find(|program| program.id() == id).expect("it is among them")
}

fn tpu_machine(target: &str) -> Result<Machine, String> {
    match Device::of("tpu", target) {
        Ok(device) => Ok(device.machine),
        Err(_) => tpu::Target::parse(target).map(|target| target.chip.machine()).map_err(|reason| reason.to_string()),
    }
}

fn gpu_target(target: &str) -> Result<assay::programs::Target, String> {
    match Device::of("cuda", target).map(|device| device.lowering) {
        Ok(Lowering::Ptx(written_for)) => Ok(written_for),
        _ => gpu::Target::parse(target).map(|target| target.chip.written_for()).map_err(|reason| reason.to_string()),
    }
}
