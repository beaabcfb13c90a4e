//! The loss as an operation of a framework: the functions that `assay.torch` registers.

use std::collections::BTreeMap;
use std::sync::Arc;

use ndarray::{Array, Array1, Array2, Array3, Axis, Dimension, Ix2, Ix3};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;
use crate::memory::{Array as LentArray, Block, Element, TensorArgument};
use crate::spec::Spec;
use assay::native::op::{Op, OpArguments, OpArray};
use assay::native::{HeadDerivatives, LogpEntropy, NativeHead, NativeHeadGradients, NativeOutputs, OutputCotangents};
use assay::problem::{CuSeqlens, Dtype, HeadLayout, ProblemError, ProjectionView, Sequences, with_others};
use assay::spec::{LossSpec, Reduction};

/// The results of a loss: loss, logp, entropy, token loss, and the metrics in their order.
type LossResults = (f32, LentArray, LentArray, LentArray, LentArray);

/// The gradients by hidden states, in their dtype, and by the head, in f32; `None` for each that was not asked for.
type HeadGradientArrays = (Option<LentArray>, Option<LentArray>);

/// The arguments beside logits, or beside hidden states and head.
pub(crate) struct LossArguments {
    pub(crate) spec: Arc<LossSpec>,
    ids: TensorArgument,
    mask: TensorArgument,
    advantages: TensorArgument,
    optional: BTreeMap<&'static str, TensorArgument>,
}

const OPTIONAL: [&str; 12] = [
    "old_logp",
    "ref_logp",
    "rollout_logp",
    "rollout_weights",
    "token_weights",
    "selected",
    "bias",
    "cu_seqlens",
    "segment_ids",
    "dentropy",
    "temperature",
    "kept_ids",
];

impl LossArguments {
    /// Reads the arguments from a dict of tensors by name, and the number that a reduction by a given number divides
    /// by.
    pub(crate) fn read(spec: &Spec, arrays: &Bound<'_, PyDict>, normalizer: Option<f64>) -> PyResult<Self> {
        let py = arrays.py();
        let taken = |field: &'static str| {
            let array = arrays.get_item(field)?.filter(|array| !array.is_none());
            array.map(|array| TensorArgument::read(field, &array)).transpose()
        };
        let required = |field: &'static str| {
            taken(field)?.ok_or_else(|| error::problem_error(py, format!("`{field}`: not given, expected a tensor")))
        };
        // An array of an unknown name would silently have no part in the loss.
        for key in arrays.keys() {
            let key: String = key.extract()?;
            if !["ids", "mask", "advantages"].contains(&&*key) && !OPTIONAL.contains(&&*key) {
                return Err(error::problem_error(py, format!("`{key}`: got an array of no such name")));
            }
        }
        let mut optional = BTreeMap::new();
        for field in OPTIONAL {
            optional.extend(taken(field)?.map(|array| (field, array)));
        }
        // A given normalizer replaces the number in the spec, in a copy of it.
        let mut spec = Arc::clone(&spec.loss);
        if let Some(given) = normalizer {
            let Reduction::Normalizer(count) = &mut Arc::make_mut(&mut spec).reduction else {
                let expected = "none, or a spec whose `reduction` is `normalizer`";
                return Err(error::problem_error(py, format!("`normalizer`: got {given}, expected {expected}")));
            };
            *count = given;
        }
        let (ids, mask, advantages) = (required("ids")?, required("mask")?, required("advantages")?);
        Ok(Self { spec, ids, mask, advantages, optional })
    }

    pub(crate) fn op(&self) -> Result<Op<'_>, String> {
        let lent = |field: &str| self.optional.get(field).map(TensorArgument::lent);
        let arguments = OpArguments {
            ids: self.ids.lent(),
            mask: self.mask.lent(),
            advantages: self.advantages.lent(),
            old_logp: lent("old_logp"),
            ref_logp: lent("ref_logp"),
            rollout_logp: lent("rollout_logp"),
            rollout_weights: lent("rollout_weights"),
            token_weights: lent("token_weights"),
            selected: lent("selected"),
            bias: lent("bias"),
            cu_seqlens: lent("cu_seqlens"),
            segment_ids: lent("segment_ids"),
            dentropy: lent("dentropy"),
            temperature: lent("temperature"),
            kept_ids: lent("kept_ids"),
        };
        Op::new(&self.spec, &arguments).map_err(|reason| reason.to_string())
    }
}

/// The derivatives by loss, logp and entropy. A cotangent that is absent or zero is `None`.
struct CotangentArrays {
    loss: f64,
    logp: Option<Array2<f64>>,
    entropy: Option<Array2<f64>>,
}

impl CotangentArrays {
    fn read(
        py: Python<'_>,
        loss: f64,
        logp: Option<&Bound<'_, PyAny>>,
        entropy: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let cotangent = |field: &'static str, array: Option<&Bound<'_, PyAny>>| {
            let Some(array) = array else { return Ok(None) };
            let taken = TensorArgument::read(field, array)?;
            let floats =
                taken.floats::<Ix2>("floats [B,T]").map_err(|reason| error::problem_error(py, reason))?.to_f64();
            // A cotangent of zeros is as good as none, and spares the work for its gradient.
            PyResult::Ok(Some(floats).filter(|floats| floats.iter().any(|x| *x != 0.0)))
        };
        Ok(Self {
            loss,
            logp: cotangent("cotangent of logp", logp)?,
            entropy: cotangent("cotangent of entropy", entropy)?,
        })
    }

    fn cotangents(&self) -> OutputCotangents<'_> {
        OutputCotangents { loss: self.loss, logp: self.logp.as_ref(), entropy: self.entropy.as_ref() }
    }
}

/// Lends an array that this extension made.
pub(crate) fn lent<T: Send + Sync + 'static, D: Dimension + 'static>(
    element: Element,
    array: Array<T, D>,
) -> LentArray {
    let block = Block::lend(&Arc::new(array), element, |array| array);
    LentArray::lend(block.expect("made densely"), true)
}

fn kept<D: Dimension + 'static>(array: Array<f32, D>) -> LentArray {
    lent(Element::Float(Dtype::F32), array)
}

fn evaluated(evaluation: NativeOutputs) -> LossResults {
    let NativeOutputs { loss, logp, logp_of_others: _, entropy, token_loss, metrics } = evaluation;
    let metrics = [
        metrics.clip_low,
        metrics.clip_high,
        metrics.clip_region,
        metrics.kl_mean.unwrap_or(0.0),
        metrics.entropy_mean,
        metrics.ratio_mean,
    ];
    (loss, kept(logp), kept(entropy), kept(token_loss), kept(Array1::from_iter(metrics.map(|x| x as f32))))
}

/// Does `work` without the interpreter's lock, and raises its error as a `ProblemError`.
pub(crate) fn done<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, String> + Send) -> PyResult<T> {
    error::apart(py, work)?.map_err(|reason| error::problem_error(py, reason))
}

/// Returns the cumulative lengths `[S+1]` of sequences packed into a row, from `cu_seqlens` or from segment ids `[N]`.
/// `mask` is `[N]`.
#[pyfunction]
#[pyo3(signature = (mask, *, cu_seqlens=None, segment_ids=None))]
pub(crate) fn op_sequences(
    py: Python<'_>,
    mask: Vec<bool>,
    cu_seqlens: Option<Vec<i64>>,
    segment_ids: Option<Vec<i64>>,
) -> PyResult<Vec<usize>> {
    let mask = Array2::from_shape_vec((1, mask.len()), mask).expect("one row");
    let checked = || {
        let cu_seqlens = match segment_ids {
            Some(ids) => CuSeqlens::from_segment_ids(&ids, &mask)?,
            None => CuSeqlens::new(&cu_seqlens.unwrap_or_default())?,
        };
        let values = cu_seqlens.values().to_vec();
        Sequences::Packed(cu_seqlens).check(&mask)?;
        Ok(values)
    };
    checked().map_err(|reason: ProblemError| error::problem_error(py, reason))
}

/// Computes the loss of `logits` without its gradient.
#[pyfunction]
pub(crate) fn op_loss(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    arrays: &Bound<'_, PyDict>,
    normalizer: Option<f64>,
) -> PyResult<LossResults> {
    let (given, logits) = (LossArguments::read(&spec, arrays, normalizer)?, TensorArgument::read("logits", logits)?);
    let evaluation = done(py, || given.op()?.loss(&logits.lent()).map_err(|reason| reason.to_string()))?;
    Ok(evaluated(evaluation))
}

/// Computes the gradient of `logits` into `dlogits`, or over the logits if that is `None`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the operation's")]
pub(crate) fn op_gradient(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    dlogits: Option<&Bound<'_, PyAny>>,
    arrays: &Bound<'_, PyDict>,
    normalizer: Option<f64>,
    loss: f64,
    logp: Option<&Bound<'_, PyAny>>,
    entropy: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let given = LossArguments::read(&spec, arrays, normalizer)?;
    let sent = CotangentArrays::read(py, loss, logp, entropy)?;
    let mut logits = TensorArgument::read("logits", logits)?;
    let mut dlogits = dlogits.map(|dlogits| TensorArgument::read("dlogits", dlogits)).transpose()?;
    done(py, || {
        let op = given.op()?;
        // Without memory for dlogits they overwrite the logits.
        let evaluation = match &mut dlogits {
            Some(dlogits) => op.gradient(&logits.lent(), dlogits.lent_mut()?, sent.cotangents()),
            None => op.gradient_in_place(logits.lent_mut()?, sent.cotangents()),
        };
        evaluation.map(drop).map_err(|reason| reason.to_string())
    })
}

/// Joins hidden states `[B,T,H]` and a head `[V,H]`, as `PyTorch` stores it, to the projection that gives the logits.
fn projection<'t>(
    hidden: &'t TensorArgument,
    lm_head: &'t TensorArgument,
    rounds_logits: bool,
) -> Result<ProjectionView<'t>, String> {
    Ok(ProjectionView {
        hidden: hidden.floats::<Ix3>("floats [B,T,H]")?,
        lm_head: lm_head.floats::<Ix2>("floats [V,H]")?,
        layout: HeadLayout::VocabByHidden,
        rounds_logits,
    })
}

/// The arguments that the logits are the product of, with the kernel that multiplies them.
struct Projected {
    hidden: TensorArgument,
    lm_head: TensorArgument,
    rounds_logits: bool,
    kernel: NativeHead,
}

impl Projected {
    fn read(head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize)) -> PyResult<Self> {
        let (hidden, lm_head, rounds_logits, chunk) = head;
        let kernel = NativeHead::default().chunk(chunk);
        let (hidden, lm_head) = (TensorArgument::read("hidden", &hidden)?, TensorArgument::read("lm_head", &lm_head)?);
        Ok(Self { hidden, lm_head, rounds_logits, kernel })
    }

    fn projection(&self) -> Result<ProjectionView<'_>, String> {
        projection(&self.hidden, &self.lm_head, self.rounds_logits)
    }

    /// Computes the loss and the gradients that are `asked` for, by the hidden states and by the head.
    fn differentiated(
        &self,
        spec: &LossSpec,
        op: &Op<'_>,
        cotangents: OutputCotangents<'_>,
        (hidden, lm_head): (bool, bool),
    ) -> Result<(NativeOutputs, NativeHeadGradients), String> {
        let (projection, tokens) = (self.projection()?, op.tokens().tokens());
        let asked = HeadDerivatives { hidden, lm_head };
        let done = self.kernel.forward_backward(spec, &projection, tokens, cotangents, asked);
        done.map_err(|reason| reason.to_string())
    }
}

/// The arguments for the log-probabilities of several ids per token, with their cotangents if they are differentiated.
struct Gathered {
    spec: Arc<LossSpec>,
    ids: TensorArgument,
    mask: TensorArgument,
    /// The cotangents with their sign inverted, `[B,T,K]`.
    advantages: Array3<f64>,
}

impl Gathered {
    fn read(
        spec: &Spec,
        ids: &Bound<'_, PyAny>,
        mask: &Bound<'_, PyAny>,
        dlogp: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (py, ids, mask) = (ids.py(), TensorArgument::read("ids", ids)?, TensorArgument::read("mask", mask)?);
        let advantages = match dlogp {
            // The policy gradient's loss is `−A·logp`, so that a cotangent of logp is an advantage with the sign
            // changed. A forward pass has none, and takes zeros; ids of a wrong rank are refused by `op`.
            Some(dlogp) => {
                let dlogp = TensorArgument::read("cotangent of logp", dlogp)?;
                let floats =
                    dlogp.floats::<Ix3>("floats [B,T,K]").map_err(|reason| error::problem_error(py, reason))?;
                -floats.to_f64()
            }
            None => match *ids.lent().shape() {
                [batch, tokens, top] => Array3::zeros((batch, tokens, top)),
                _ => Array3::zeros((0, 0, 1)),
            },
        };
        Ok(Self { spec: Arc::clone(&spec.loss), ids, mask, advantages })
    }

    fn op(&self) -> Result<Op<'_>, String> {
        let (ids, mask) = (self.ids.lent(), self.mask.lent());
        if ids.shape().len() != 3 {
            return Err(format!("`ids`: got shape {:?}, expected [B,T,K]", ids.shape()));
        }
        let arguments = OpArguments {
            ids,
            mask,
            advantages: OpArray::F64(self.advantages.view().into_dyn()),
            old_logp: None,
            ref_logp: None,
            rollout_logp: None,
            rollout_weights: None,
            token_weights: None,
            selected: None,
            bias: None,
            cu_seqlens: None,
            segment_ids: None,
            dentropy: None,
            temperature: None,
            kept_ids: None,
        };
        Op::new(&self.spec, &arguments).map_err(|reason| reason.to_string())
    }
}

/// Joins the log-probabilities of all ids to one array `[B,T,K]`.
fn logps(LogpEntropy { logp, logp_of_others, .. }: LogpEntropy) -> LentArray {
    kept(match logp_of_others {
        Some(others) => with_others(&logp, &others),
        None => logp.insert_axis(Axis(2)),
    })
}

/// Computes the log-probabilities of the ids under `logits`.
#[pyfunction]
pub(crate) fn op_gather_logp(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    ids: &Bound<'_, PyAny>,
    mask: &Bound<'_, PyAny>,
) -> PyResult<LentArray> {
    let (given, logits) = (Gathered::read(&spec, ids, mask, None)?, TensorArgument::read("logits", logits)?);
    done(py, || given.op()?.logp_and_entropy(&logits.lent()).map_err(|reason| reason.to_string())).map(logps)
}

/// Computes the gradient of the log-probabilities by the logits, into `dlogits`.
#[pyfunction]
pub(crate) fn op_gather_logp_gradient(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    dlogits: &Bound<'_, PyAny>,
    ids: &Bound<'_, PyAny>,
    mask: &Bound<'_, PyAny>,
    dlogp: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let given = Gathered::read(&spec, ids, mask, Some(dlogp))?;
    let (logits, mut dlogits) = (TensorArgument::read("logits", logits)?, TensorArgument::read("dlogits", dlogits)?);
    done(py, || {
        let evaluation = given.op()?.gradient(&logits.lent(), dlogits.lent_mut()?, OutputCotangents::default());
        evaluation.map(drop).map_err(|reason| reason.to_string())
    })
}

/// Computes the log-probabilities of the ids under the logits `hidden · lm_headᵀ`.
#[pyfunction]
pub(crate) fn op_head_gather_logp(
    py: Python<'_>,
    spec: Spec,
    head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize),
    ids: &Bound<'_, PyAny>,
    mask: &Bound<'_, PyAny>,
) -> PyResult<LentArray> {
    let (given, head) = (Gathered::read(&spec, ids, mask, None)?, Projected::read(head)?);
    let forward = done(py, || {
        let (op, projection) = (given.op()?, head.projection()?);
        head.kernel.forward(&given.spec, &projection, op.tokens().tokens()).map_err(|reason| reason.to_string())
    });
    forward.map(logps)
}

/// Computes the gradients of the log-probabilities by the hidden states, in their dtype, and by the head, in f32; if each is
/// `asked` for.
#[pyfunction]
pub(crate) fn op_head_gather_logp_gradient(
    py: Python<'_>,
    spec: Spec,
    head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize),
    asked: (bool, bool),
    ids: &Bound<'_, PyAny>,
    mask: &Bound<'_, PyAny>,
    dlogp: &Bound<'_, PyAny>,
) -> PyResult<HeadGradientArrays> {
    let (given, head) = (Gathered::read(&spec, ids, mask, Some(dlogp))?, Projected::read(head)?);
    let (_, gradients) =
        done(py, || head.differentiated(&given.spec, &given.op()?, OutputCotangents::default(), asked))?;
    Ok(head_gradients(gradients))
}

/// Computes the loss of the logits `hidden · lm_headᵀ` without its gradients.
#[pyfunction]
pub(crate) fn op_head_loss(
    py: Python<'_>,
    spec: Spec,
    head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize),
    arrays: &Bound<'_, PyDict>,
    normalizer: Option<f64>,
) -> PyResult<LossResults> {
    let (given, head) = (LossArguments::read(&spec, arrays, normalizer)?, Projected::read(head)?);
    let evaluation = done(py, || {
        let (op, projection) = (given.op()?, head.projection()?);
        let tokens = op.tokens().tokens();
        head.kernel.evaluate(&given.spec, &projection, tokens).map_err(|reason| reason.to_string())
    })?;
    Ok(evaluated(evaluation))
}

/// Computes the loss of the logits `hidden · lm_headᵀ`, and the gradients of `loss` times it by the hidden states, in
/// their dtype, and by the head, in f32, if each is `asked` for. Their bits are those of
/// [`op_head_loss`] and [`op_head_gradient`].
#[pyfunction]
pub(crate) fn op_head_loss_and_gradient(
    py: Python<'_>,
    spec: Spec,
    head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize),
    asked: (bool, bool),
    arrays: &Bound<'_, PyDict>,
    normalizer: Option<f64>,
    loss: f64,
) -> PyResult<(LossResults, HeadGradientArrays)> {
    let (given, head) = (LossArguments::read(&spec, arrays, normalizer)?, Projected::read(head)?);
    let sent = OutputCotangents::from_loss(loss);
    let (evaluation, gradients) = done(py, || head.differentiated(&given.spec, &given.op()?, sent, asked))?;
    Ok((evaluated(evaluation), head_gradients(gradients)))
}

/// Computes the gradients of the loss by the hidden states, in their dtype, and by the head, in f32: those of the two
/// that are `asked` for.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the operation's")]
pub(crate) fn op_head_gradient(
    py: Python<'_>,
    spec: Spec,
    head: (Bound<'_, PyAny>, Bound<'_, PyAny>, bool, usize),
    asked: (bool, bool),
    arrays: &Bound<'_, PyDict>,
    normalizer: Option<f64>,
    loss: f64,
    logp: Option<&Bound<'_, PyAny>>,
    entropy: Option<&Bound<'_, PyAny>>,
) -> PyResult<HeadGradientArrays> {
    let (given, head) = (LossArguments::read(&spec, arrays, normalizer)?, Projected::read(head)?);
    let sent = CotangentArrays::read(py, loss, logp, entropy)?;
    let (_, gradients) = done(py, || head.differentiated(&given.spec, &given.op()?, sent.cotangents(), asked))?;
    Ok(head_gradients(gradients))
}

fn head_gradients(NativeHeadGradients { dhidden, dlm_head }: NativeHeadGradients) -> HeadGradientArrays {
    let lent_floats =
        |dhidden| LentArray::lend(Block::floats(&Arc::new(dhidden), |dhidden| dhidden).expect("made densely"), true);
    (dhidden.map(lent_floats), dlm_head.map(kept))
}
