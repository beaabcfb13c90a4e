//! The loss on a GPU as an operation of a framework, whose arrays and whose stream it uses: kernels are enqueued from here, one after
//! another.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

use crate::error;
use crate::memory::{Array as LentArray, Element, device};
use crate::op::{LossArguments, done, lent};
use crate::spec::Spec;
use crate::tape::{KernelsOfPlan, expect_computed};
use assay::cuda::op::{Gpu, OperationLaunch};
use assay::implementation::RunError;
use assay::problem::{Dtype, Sequences, Shape};
use assay::programs::StructuredSpec;
use assay::programs::arrays::{given_columns, numbers as one_pass_numbers, softmax_numbers, width as width_of_tokens};
use assay::programs::operation::{BatchForm, Cotangents, OperationKernel, batch_numbers};
use assay::spec::{LossSpec, OldLogp, Support};
use assay_algebra::rollout::KernelInputs;
use assay_algebra::structure::{Structure, TokenInput};

/// The source of an input that is computed on the host before there are logits, and is not an argument.
const SETTLED: &str = "settled";

/// The plan of a loss on a GPU: which arrays its kernels read, and which numbers.
#[derive(Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is an answer, read by its name")]
struct GpuPlan<'s> {
    /// The arrays that are read beside ids, mask and advantages, and of each the argument that it is, or [`SETTLED`].
    inputs: Vec<(&'static str, &'static str)>,
    /// Whether the mask, or an input, is worked out before there are logits: see [`gpu_settled`].
    settles: bool,
    /// The first array of the kernels that read logits: its name, and what it holds; without numbers there is none.
    softmax_numbers: (&'static str, Vec<f32>),
    /// Columns of what the kernel of one pass is given of each token, and of its numbers.
    token_columns: usize,
    kernel_numbers: usize,
    /// Whether vocabulary entries differ before their softmax.
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
    expect_computed(py, spec, width, KernelsOfPlan::Gpu)?;
    let structure = Structure::from_spec(spec);
    // Name the argument that each input of the kernels comes from, or mark it as computed on the host.
    let inputs: Vec<_> = structure.inputs().into_iter().map(|input| (input.name(), source(spec, input))).collect();
    // None of these is of a batch's extents.
    let numbers = softmax_numbers(structure).into_iter().map(|number| number.value_in(spec, [1, 1]) as f32).collect();
    let name = if structure.transform.is_some() { "softmax_numbers" } else { "inverse_temperature" };
    let settled = inputs.iter().any(|(_, source)| *source == SETTLED);
    let plan = GpuPlan {
        settles: settled || !spec.rejection.is_empty() || spec.token_weights.is_some(),
        inputs,
        softmax_numbers: (name, numbers),
        token_columns: width_of_tokens(given_columns(structure).len()),
        kernel_numbers: one_pass_numbers(structure).len(),
        by_column: structure.transform.is_some_and(|transform| transform.columns),
        bias: spec.logits.bias,
        support: &spec.support,
        token_advantages: spec.advantages == assay::spec::AdvantageLevel::Token,
    };
    Ok(serde_json::to_string(&plan).expect("plain data has a JSON form"))
}

/// The numbers of a batch of so many sequences, padded to `width` or packed where there is none, in the order that kernels read them.
#[pyfunction]
#[pyo3(signature = (spec, sequences, width))]
pub(crate) fn gpu_numbers(spec: &Spec, sequences: usize, width: Option<usize>) -> Vec<f64> {
    let extents = [sequences, width.unwrap_or(1)];
    batch_numbers(Structure::from_spec(&spec.loss))
        .into_iter()
        .map(|number| number.value_in(&spec.loss, extents))
        .collect()
}

/// Whether the device at `place` computes the loss of `spec` on rows of `vocab` logits in one pass.
///
/// # Errors
/// `AssayError` in the driver's words.
#[pyfunction]
pub(crate) fn gpu_takes_one_pass(
    py: Python<'_>,
    spec: &Spec,
    place: usize,
    vocab: usize,
    dtype: &str,
) -> PyResult<bool> {
    let dtype: Dtype = dtype.parse().map_err(|reason| error::problem_error(py, format!("`logits`: {reason}")))?;
    let gpu = Gpu::at(place).map_err(|reason| error::other(py, reason))?;
    Ok(gpu.takes_one_pass(&spec.loss, vocab, dtype))
}

/// The argument that an input is.
fn source(spec: &LossSpec, input: TokenInput) -> &'static str {
    let of_policy = |which: OldLogp| if which == OldLogp::Rollout { "rollout_logp" } else { "old_logp" };
    match input {
        TokenInput::OldLogp => of_policy(spec.old_logp),
        TokenInput::Behaviour => of_policy(spec.off_policy_mask.map_or(OldLogp::Given, |mask| mask.behaviour)),
        TokenInput::RefLogp | TokenInput::Selected | TokenInput::RolloutLogp | TokenInput::Dentropy => input.name(),
        TokenInput::Rate => "temperature",
        TokenInput::PolicyWeight | TokenInput::KlWeight | TokenInput::LogWeight => SETTLED,
    }
}

/// The arrays of a batch by name, and the ends of its packed sequences.
type HostInputs = (BTreeMap<&'static str, LentArray>, Option<Vec<usize>>);

/// Computes the inputs of a batch `[B,T,V]` that need no logits, from arrays in the host's memory: `mask` and the
/// weights, in f64, and `cu_seqlens` if sequences are packed.
///
/// # Errors
/// `ProblemError` naming the first array that does not fit.
#[pyfunction]
pub(crate) fn gpu_settled<'py>(
    py: Python<'py>,
    spec: Spec,
    shape: (usize, usize, usize),
    arrays: &Bound<'py, PyDict>,
) -> PyResult<HostInputs> {
    let given = LossArguments::read(&spec, arrays, None)?;
    let (batch, tokens, vocab) = shape;
    let (settled, ends) = done(py, || {
        let op = given.op()?;
        let tokens_of = op.tokens().tokens();
        // The arrays come from a user: check them against the extents before anything is computed.
        tokens_of.check(&given.spec, Shape { batch, tokens, vocab }).map_err(|reason| reason.to_string())?;
        let ends = match &tokens_of.extra.sequences {
            Sequences::Rows => None,
            Sequences::Packed(cu_seqlens) => Some(cu_seqlens.values().to_vec()),
        };
        Ok((KernelInputs::new(StructuredSpec::new(&given.spec), &tokens_of), ends))
    })?;
    // Rejections and weights against the sampler are of whole sequences, so that the host settles them: kernels read
    // one array per input.
    let inputs = settled.inputs.into_iter();
    let mut of = BTreeMap::from([("mask", lent(Element::Bool, settled.mask))]);
    of.extend(inputs.map(|(input, values)| (input.name(), lent(Element::Float(Dtype::F64), values))));
    Ok((of, ends))
}

/// Enqueues a kernel of `spec` on a device's stream, and does not wait for it. `place` is the device's number and the stream's handle,
/// `extents` are the tokens, the sequences and the vocabulary; `of_tokens` says whether advantages and temperatures are each token's own, and
/// `sent` whether logp and entropy have cotangents, and whether dlogits are there already for one of the loss. `arrays` are address and
/// bytes by name.
///
/// # Errors
/// `ProblemError` for what the kernels do not take, `AssayError` in the driver's words.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the launch's")]
pub(crate) fn gpu_enqueue(
    py: Python<'_>,
    spec: Spec,
    kernel: &str,
    place: (usize, usize),
    extents: (usize, usize, usize),
    dtype: &str,
    of_tokens: (bool, bool),
    sent: (bool, bool, bool),
    arrays: BTreeMap<String, (u64, usize)>,
) -> PyResult<()> {
    let dtype: Dtype = dtype.parse().map_err(|reason| error::problem_error(py, format!("`logits`: {reason}")))?;
    let (logp, entropy, unless_used) = sent;
    let kernel = match kernel {
        "count" => OperationKernel::Count,
        "tokens" => OperationKernel::Tokens,
        "one_pass" => OperationKernel::OnePass,
        "statistics" => OperationKernel::Statistics,
        "losses" => OperationKernel::Losses,
        "sums" => OperationKernel::Sums,
        "multiply" => OperationKernel::Multiply,
        _ => OperationKernel::Dlogits(Cotangents { logp, entropy, unless_used }),
    };
    let form = BatchForm {
        token_advantages: of_tokens.0,
        token_temperatures: of_tokens.1,
        bias: spec.loss.logits.bias,
        keep_sampled: spec.loss.support.keep_sampled,
    };
    let (place, stream) = (place.0, device::stream(place.1));
    let arrays: Vec<_> =
        arrays.iter().map(|(name, &(address, bytes))| (name.as_str(), device::lent(address, bytes))).collect();
    let enqueue = || {
        let called =
            OperationLaunch { kernel, spec: &spec.loss, form, extents: extents.into(), dtype, stream, arrays: &arrays };
        Gpu::at(place)?.enqueue(called)
    };
    error::apart(py, enqueue)?.map_err(|reason| match reason {
        RunError::Backend(reason) => error::other(py, reason),
        reason => error::problem_error(py, reason),
    })
}
