//! The comparison of two programs' log-probabilities, from arrays of Python.

use std::path::Path;

use ndarray::{Array2, Ix2, Ix3};
use pyo3::prelude::*;

use crate::error;
use crate::memory::OutputArray;
use crate::spec::Spec;
use assay::judge::agreement::{
    LogpQuestion, SamplingParameters, SharedLogits, agreement_text as text_of, compare_logp as compare,
};
use assay::problem::{Advantages, Dtype, Extra, FloatArray, HeadLayout, Problem, Projection};
use assay::report::{Input, render};
use assay::schema::agreement::LogpAgreement;

/// Reads an array of `extents`, dense, and copies it.
fn matrix(py: Python<'_>, field: &str, object: &Bound<'_, PyAny>) -> PyResult<FloatArray<Ix2>> {
    let seen = OutputArray::read(field, object, false)?.expect_dense(py, field)?;
    match *seen.shape() {
        [rows, columns] => Ok(seen.view(Ix2(rows, columns)).to_owned()),
        _ => Err(error::problem_error(py, format!("`{field}`: got shape {:?}, expected two extents", seen.shape()))),
    }
}

fn tensor(py: Python<'_>, field: &str, object: &Bound<'_, PyAny>) -> PyResult<FloatArray<Ix3>> {
    let seen = OutputArray::read(field, object, false)?.expect_dense(py, field)?;
    match *seen.shape() {
        [batch, tokens, columns] => Ok(seen.view(Ix3(batch, tokens, columns)).to_owned()),
        _ => Err(error::problem_error(py, format!("`{field}`: got shape {:?}, expected three extents", seen.shape()))),
    }
}

/// Makes an array of rows of equal length.
fn rows<T: Clone>(py: Python<'_>, field: &str, rows: Vec<Vec<T>>) -> PyResult<Array2<T>> {
    let (count, width) = (rows.len(), rows.first().map_or(0, Vec::len));
    let ragged = || error::problem_error(py, format!("`{field}`: got rows of unequal lengths, expected [B,T]"));
    if rows.iter().any(|row| row.len() != width) {
        return Err(ragged());
    }
    Array2::from_shape_vec((count, width), rows.concat()).map_err(|_| ragged())
}

/// The options of a comparison that are plain data.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ComparisonOptions {
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    logits_dtypes: [Option<String>; 2],
    ratio_bounds: [f64; 2],
}

/// Compares the two sides, and returns the agreement as JSON.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each is an array of its own")]
pub(crate) fn compare_logp(
    py: Python<'_>,
    trainer: &Bound<'_, PyAny>,
    sampler: &Bound<'_, PyAny>,
    mask: Option<Vec<Vec<bool>>>,
    advantages: Option<Vec<Vec<f64>>>,
    ids: Option<Vec<Vec<i64>>>,
    logits: Option<Bound<'_, PyAny>>,
    head: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>, String)>,
    spec: &Spec,
    options: ComparisonOptions,
) -> PyResult<String> {
    let trainer = matrix(py, "trainer", trainer)?;
    let sampler = matrix(py, "sampler", sampler)?;
    let mask = match mask {
        Some(mask) => rows(py, "mask", mask)?,
        None => Array2::from_elem((trainer.shape()[0], trainer.shape()[1]), true),
    };
    let advantages = advantages.map(|advantages| rows(py, "advantages", advantages)).transpose()?;
    let ids = ids.map(|ids| rows(py, "ids", ids)).transpose()?;
    let tokens = |ids: &Array2<i64>| {
        let zeros = Advantages::Token(Array2::zeros(ids.raw_dim()));
        (ids.clone(), mask.clone(), zeros)
    };
    // The ids are needed with logits, and say nothing without them.
    let logits = match (logits, head, ids) {
        (None, None, _) => None,
        (_, _, None) => return Err(error::problem_error(py, "`ids`: got nothing, expected [B,T] beside the logits")),
        (Some(logits), _, Some(ids)) => {
            let (ids, mask, advantages) = tokens(&ids);
            let logits = tensor(py, "logits", &logits)?;
            let extra = Extra::default();
            let problem = Problem { logits, ids, mask, advantages, old_logp: None, ref_logp: None, extra };
            Some(SharedLogits::Logits(problem))
        }
        (None, Some((hidden, lm_head, layout)), Some(ids)) => {
            let (ids, mask, advantages) = tokens(&ids);
            let layout = match layout.as_str() {
                "vh" => HeadLayout::VocabByHidden,
                "hv" => HeadLayout::HiddenByVocab,
                other => {
                    return Err(error::problem_error(py, format!("`layout`: got `{other}`, expected `vh` or `hv`")));
                }
            };
            let logits = Projection {
                hidden: tensor(py, "hidden", &hidden)?,
                lm_head: matrix(py, "lm_head", &lm_head)?,
                layout,
                rounds_logits: false,
            };
            let extra = Extra::default();
            let problem = Problem { logits, ids, mask, advantages, old_logp: None, ref_logp: None, extra };
            Some(SharedLogits::Head(problem))
        }
    };
    let ComparisonOptions { top_k, top_p, min_p, logits_dtypes, ratio_bounds } = options;
    let dtype = |given: Option<String>| {
        let parsed = given.as_ref().map(|given| given.parse::<Dtype>()).transpose();
        parsed.map_err(|_| {
            let given = given.unwrap_or_default();
            error::problem_error(py, format!("`logits_dtypes`: got `{given}`, expected f64, f32, bf16 or f16"))
        })
    };
    let [of_trainer, of_sampler] = logits_dtypes;
    let question = LogpQuestion {
        advantages,
        logits: logits.map(|logits| ((*spec.loss).clone(), logits)),
        logits_dtypes: [dtype(of_trainer)?, dtype(of_sampler)?],
        sampling: SamplingParameters { top_k, top_p, min_p },
        ratio_bounds,
        ..LogpQuestion::new(trainer, sampler, mask)
    };
    let agreement = error::apart(py, || compare(question))?.map_err(|reason| error::problem_error(py, reason))?;
    Ok(serde_json::to_string(&agreement).expect("plain data has a JSON form"))
}

/// Formats an agreement for a terminal, from its JSON.
#[pyfunction]
pub(crate) fn agreement_text(py: Python<'_>, json: &str) -> PyResult<String> {
    let agreement: LogpAgreement = serde_json::from_str(json).map_err(|reason| error::other(py, reason))?;
    Ok(text_of(&agreement))
}

/// Renders the page of an agreement from its JSON.
#[pyfunction]
pub(crate) fn agreement_page(py: Python<'_>, json: &str) -> PyResult<String> {
    let path = Path::new("assay.compare_logp");
    let input = Input::parse(path, json.as_bytes()).map_err(|reason| error::other(py, reason))?;
    Ok(render(&[input], "assay.compare_logp(…).to_html(path)"))
}
