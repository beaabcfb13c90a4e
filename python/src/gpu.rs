//! The loss on a GPU as an operation of a framework, whose arrays and whose stream it uses: kernels are enqueued from here, and what
//! lies between them is computed by the framework, from a [tape](crate::tape).

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

use crate::error;
use crate::memory::{Array as LentArray, Element, device};
use crate::op::{Given, done, lent};
use crate::spec::Spec;
use crate::tape::{Around, Plan};
use assay::cuda::op::{Called, Gpu, Half};
use assay::implementation::RunError;
use assay::problem::{Dtype, Sequences, Shape};
use assay::programs::{Shaped, arrays::softmax_numbers};
use assay::spec::{LossSpec, OldLogp, Support};
use assay_algebra::rollout::Settled;
use assay_algebra::structure::{Input, Structure};

/// What an input is that no argument is.
const SETTLED: &str = "settled";

/// A [`Plan`], and what else is to be known to call the kernels.
#[derive(Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is an answer, read by its name")]
struct GpuPlan<'s> {
    #[serde(flatten)]
    plan: Plan,
    /// Of each input the argument that it is, or [`SETTLED`].
    sources: Vec<&'static str>,
    /// Whether the mask, or an input, is worked out before there are logits: see [`gpu_settled`].
    settles: bool,
    /// The first array of the kernels: its name, and what it holds; without numbers there is none.
    numbers: (&'static str, Vec<f32>),
    /// Whether kernels are told what differs by column.
    by_column: bool,
    bias: bool,
    support: &'s Support,
    /// Whether each token has an advantage of its own.
    token_advantages: bool,
}

/// The plan of `spec` for a batch that is padded to `width`, or packed where there is none, as JSON.
///
/// # Errors
/// As [`plan`](crate::tape::plan).
#[pyfunction]
#[pyo3(signature = (spec, width))]
pub(crate) fn gpu_plan(py: Python<'_>, spec: &Spec, width: Option<usize>) -> PyResult<String> {
    let spec = &*spec.loss;
    let structure = Structure::of(spec);
    let sources: Vec<&str> = structure.inputs().into_iter().map(|input| source(spec, input)).collect();
    // None of these is of a batch's extents.
    let numbers = softmax_numbers(structure).into_iter().map(|number| number.of(spec, [1, 1]) as f32).collect();
    let name = if structure.transform.is_some() { "softmax_numbers" } else { "inverse_temperature" };
    let plan = GpuPlan {
        plan: Plan::of(py, spec, width, Around::Device)?,
        settles: sources.contains(&SETTLED) || !spec.rejection.is_empty() || spec.token_weights.is_some(),
        sources,
        numbers: (name, numbers),
        by_column: structure.transform.is_some_and(|transform| transform.columns),
        bias: spec.logits.bias,
        support: &spec.support,
        token_advantages: spec.advantages == assay::spec::AdvantageLevel::Token,
    };
    Ok(serde_json::to_string(&plan).expect("plain data has a JSON form"))
}

/// The argument that an input is.
fn source(spec: &LossSpec, input: Input) -> &'static str {
    let of_policy = |which: OldLogp| if which == OldLogp::Rollout { "rollout_logp" } else { "old_logp" };
    match input {
        Input::OldLogp => of_policy(spec.old_logp),
        Input::Behaviour => of_policy(spec.off_policy_mask.map_or(OldLogp::Given, |mask| mask.behaviour)),
        Input::RefLogp | Input::Selected | Input::RolloutLogp | Input::Dentropy => input.name(),
        Input::Rate => "temperature",
        Input::PolicyWeight | Input::KlWeight | Input::LogWeight => SETTLED,
    }
}

/// Arrays by name, and where packed sequences end.
type OfBatch = (BTreeMap<&'static str, LentArray>, Option<Vec<usize>>);

/// What is settled before there are logits `[B,T,V]`, from arrays in the host's memory: `mask`, the inputs, f64, and where sequences are
/// packed `cu_seqlens`.
///
/// # Errors
/// `ProblemError` naming the first array that does not fit.
#[pyfunction]
pub(crate) fn gpu_settled<'py>(
    py: Python<'py>,
    spec: Spec,
    shape: (usize, usize, usize),
    arrays: &Bound<'py, PyDict>,
) -> PyResult<OfBatch> {
    let given = Given::of(&spec, arrays, None)?;
    let (batch, tokens, vocab) = shape;
    let (settled, ends) = done(py, || {
        let op = given.op()?;
        let tokens_of = op.tokens().tokens();
        tokens_of.check(&given.spec, Shape { batch, tokens, vocab }).map_err(|reason| reason.to_string())?;
        let ends = match &tokens_of.extra.sequences {
            Sequences::Rows => None,
            Sequences::Packed(cu_seqlens) => Some(cu_seqlens.values().to_vec()),
        };
        Ok((Settled::of(Shaped::of(&given.spec), &tokens_of), ends))
    })?;
    let inputs = settled.inputs.into_iter();
    let mut of = BTreeMap::from([("mask", lent(Element::Bool, settled.mask))]);
    of.extend(inputs.map(|(input, values)| (input.name(), lent(Element::Float(Dtype::F64), values))));
    Ok((of, ends))
}

/// Enqueues the `statistics` or the `dlogits` kernel of `spec` for `[rows, vocab]` of logits on a device's stream, and does not wait for
/// it. `entropy`: whether the entropy has a derivative that is not the spec's. `arrays` are address and bytes by name.
///
/// # Errors
/// `ProblemError` for what the kernels do not take, `AssayError` in the driver's words.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the launch's")]
pub(crate) fn gpu_enqueue(
    py: Python<'_>,
    spec: Spec,
    kernel: &str,
    entropy: bool,
    place: (usize, usize),
    extents: (usize, usize),
    dtype: &str,
    arrays: BTreeMap<String, (u64, usize)>,
) -> PyResult<()> {
    let dtype: Dtype = dtype.parse().map_err(|reason| error::of_problem(py, format!("`logits`: {reason}")))?;
    let kernel = if kernel == "dlogits" { Half::Dlogits { entropy } } else { Half::Statistics };
    let (place, stream) = (place.0, device::stream(place.1));
    let arrays: Vec<_> =
        arrays.iter().map(|(name, &(address, bytes))| (name.as_str(), device::lent(address, bytes))).collect();
    let enqueue = || {
        let called = Called { kernel, spec: &spec.loss, extents: extents.into(), dtype, stream, arrays: &arrays };
        Gpu::at(place)?.enqueue(called)
    };
    error::apart(py, enqueue)?.map_err(|reason| match reason {
        RunError::Backend(reason) => error::other(py, reason),
        reason => error::of_problem(py, reason),
    })
}
