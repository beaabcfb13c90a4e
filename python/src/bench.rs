//! What a bench needs that Python measures: its problem, and the forms of its figures.

use std::path::Path;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::error;
use crate::problem::{Batch, Problem};
use crate::spec::Spec;
use assay::campaign::add_memory;
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::memory::available_host_bytes;
use assay::report::{self, Input, render};
use assay::schema::programs::ProgramBench;

/// Draws a problem of `extents`, `[B, T, V]` or `[B, T, H, V]`, in which every token counts. Its frameworks' arrays are on
/// `device`, and with `inplace` its logits may be written to.
#[pyfunction]
#[pyo3(signature = (spec, extents, dtype, *, layout, seed, device = None, inplace = false))]
#[expect(clippy::too_many_arguments, reason = "they are a problem's, each by its name")]
pub(crate) fn unmasked_problem(
    py: Python<'_>,
    spec: Spec,
    extents: Vec<usize>,
    dtype: &str,
    layout: &str,
    seed: u64,
    device: Option<String>,
    inplace: bool,
) -> PyResult<Problem> {
    let wrong = |reason: String| error::problem_error(py, reason);
    let dtype = dtype.parse().map_err(|reason: String| wrong(format!("dtype: {reason}")))?;
    let layout = layout.parse().map_err(|reason: String| wrong(format!("layout: {reason}")))?;
    let recipe = |shape: [usize; 3]| Recipe {
        shape,
        dtype,
        // The logits are as peaked as a trained model's.
        regime: Regime::Peaked,
        seed,
        // So near to the policy that no token is clipped: one that is costs less.
        old_logp_noise_scale: 0.03,
        masked_garbage: false,
    };
    let loss = &spec.loss;
    let drawn = error::apart(py, || match extents[..] {
        [batch, tokens, vocab] => {
            let problem = recipe([batch, tokens, vocab]).unmasked_problem(loss);
            problem.map(|problem| Batch::Logits(Arc::new(problem))).map_err(|reason| reason.to_string())
        }
        [batch, tokens, hidden, vocab] => {
            let recipe = recipe([batch, tokens, vocab]);
            let problem = HeadRecipe { hidden, layout, rounds_logits: false, recipe }.unmasked_problem(loss);
            problem.map(|problem| Batch::Head(Arc::new(problem))).map_err(|reason| reason.to_string())
        }
        _ => Err(format!("shape: got {} extents, expected [B,T,V] or [B,T,H,V]", extents.len())),
    })?;
    let problem = Problem::from_batch(spec.clone(), drawn.map_err(wrong)?, None).on_device(device);
    Ok(if inplace { problem.with_writable_logits() } else { problem })
}

fn read(py: Python<'_>, json: &str) -> PyResult<ProgramBench> {
    serde_json::from_str(json).map_err(|reason| error::other(py, reason))
}

/// Returns the bytes that this process could get now; `None` if nothing reports them.
#[pyfunction]
pub(crate) fn available_bytes() -> Option<usize> {
    available_host_bytes()
}

/// Adds the memory of calls, as JSON, to the report of a campaign.
#[pyfunction]
pub(crate) fn with_memory(py: Python<'_>, report: &str, found: &str, allow: Vec<String>) -> PyResult<String> {
    let mut report = serde_json::from_str(report).map_err(|reason| error::other(py, reason))?;
    let found = serde_json::from_str(found).map_err(|reason| error::other(py, reason))?;
    add_memory(&mut report, found, &allow);
    Ok(serde_json::to_string_pretty(&report).expect("plain data has a JSON form"))
}

/// Formats a bench for a terminal, from its JSON.
#[pyfunction]
pub(crate) fn programs_text(py: Python<'_>, json: &str) -> PyResult<String> {
    Ok(report::programs_text(&read(py, json)?))
}

/// Formats a bench as Markdown, from its JSON.
#[pyfunction]
pub(crate) fn programs_markdown(py: Python<'_>, json: &str) -> PyResult<String> {
    Ok(report::programs_markdown(&read(py, json)?))
}

/// Renders the page of a bench from its JSON.
#[pyfunction]
pub(crate) fn programs_page(py: Python<'_>, json: &str) -> PyResult<String> {
    let input = Input::parse(Path::new("assay.bench"), json.as_bytes()).map_err(|reason| error::other(py, reason))?;
    Ok(render(&[input], "assay.bench(…).to_html(path)"))
}
