//! The Python package's extension module, `assay._native`: a face of the library, which judges nothing itself.
//!
//! What Python code sees of it, with its types and errors, is `assay/_native.pyi`.

mod agreement;
mod bench;
mod campaign;
mod deck;
mod divergence;
mod emitted;
mod error;
mod gpu;
mod memory;
mod op;
mod outputs;
mod problem;
mod spec;
mod tape;
mod verdicts;
mod xla;

use std::ffi::OsString;

use pyo3::prelude::*;

/// Blocks of a kibibyte and more, arrays among them, start at a multiple of 64: what XLA takes without a copy.
#[global_allocator]
static ALLOCATOR: memory::Aligned = memory::Aligned;

/// Runs the command line `arguments`, the first of which is the command's name, and returns its exit code.
#[pyfunction]
fn run(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<u8> {
    error::apart(py, || assay::cli::run(arguments))
}

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    /// Adds the version of the package, which is the workspace's.
    #[pymodule_init]
    fn add_version(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    #[pymodule_export]
    use super::agreement::{agreement_page, agreement_text, compare_logp};
    #[pymodule_export]
    use super::bench::{
        available_bytes, programs_markdown, programs_page, programs_text, unmasked_problem, with_memory,
    };
    #[pymodule_export]
    use super::campaign::{Campaign, answer, page, report_markdown, report_text};
    #[pymodule_export]
    use super::divergence::{op_divergence, op_divergence_gradient};
    #[pymodule_export]
    use super::emitted::{mosaic_kernels, ptx_kernels};
    #[pymodule_export]
    use super::gpu::{gpu_enqueue, gpu_numbers, gpu_plan, gpu_settled, gpu_takes_one_pass};
    #[pymodule_export]
    use super::memory::Array;
    #[pymodule_export]
    use super::op::{
        op_gather_logp, op_gather_logp_gradient, op_gradient, op_head_gather_logp, op_head_gather_logp_gradient,
        op_head_gradient, op_head_loss, op_head_loss_and_gradient, op_loss, op_sequences,
    };
    #[pymodule_export]
    use super::problem::{Problem, Problems, load};
    #[pymodule_export]
    use super::run;
    #[pymodule_export]
    use super::spec::{Spec, spec_of_cotangents, spec_of_fields, spec_of_file, spec_of_preset};
    #[pymodule_export]
    use super::tape::plan;
    #[pymodule_export]
    use super::verdicts::Verdicts;
    #[pymodule_export]
    use super::xla::xla_handlers;
}
