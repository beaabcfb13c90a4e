//! The divergence from a teacher as an operation of `PyTorch`: the functions that `assay.torch.divergence` registers.

use std::sync::Arc;

use ndarray::Ix3;
use pyo3::prelude::*;

use crate::error;
use crate::memory::{Array as LentArray, Element, TensorArgument};
use crate::op::{done, lent};
use crate::spec::Spec;
use assay::native::{DivergenceOp, OpTeacher};
use assay::problem::Dtype;
use assay::spec::LossSpec;

/// A teacher as Python hands it over: its logits, or the log-probabilities and ids of its likeliest entries.
type TeacherArguments<'py> = (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// The arguments of the operation, without the student's logits.
struct DivergenceArguments {
    spec: Arc<LossSpec>,
    logits: Option<TensorArgument>,
    logp: Option<TensorArgument>,
    ids: Option<TensorArgument>,
    mask: Option<TensorArgument>,
}

impl DivergenceArguments {
    fn read(spec: &Spec, teacher: TeacherArguments, mask: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let (logits, logp, ids) = teacher;
        let taken =
            |field, array: Option<&Bound<'_, PyAny>>| array.map(|array| TensorArgument::read(field, array)).transpose();
        Ok(Self {
            spec: Arc::clone(&spec.loss),
            logits: taken("teacher_logits", logits.as_ref())?,
            logp: taken("teacher_logp", logp.as_ref())?,
            ids: taken("teacher_ids", ids.as_ref())?,
            mask: taken("mask", mask)?,
        })
    }

    /// Prepares the operation for students `[B,T,V]` of these extents.
    fn op(&self, student: &[usize]) -> Result<DivergenceOp<'_>, String> {
        let teacher = match (&self.logits, &self.logp, &self.ids) {
            (Some(logits), None, None) => OpTeacher::Logits(logits.lent()),
            (None, Some(logp), Some(ids)) => OpTeacher::TopK { logp: logp.lent(), ids: ids.lent() },
            _ => {
                return Err("`teacher_logits`, `teacher_logp`, `teacher_ids`: got others, expected either the first or both of the \
                            other two"
                    .into());
            }
        };
        let [batch, tokens, _] = *student else {
            return Err(format!("`logits`: got shape {student:?}, expected [B,T,V]"));
        };
        let mask = self.mask.as_ref().map(TensorArgument::lent);
        DivergenceOp::new(&self.spec, teacher, mask.as_ref(), [batch, tokens]).map_err(|reason| reason.to_string())
    }
}

/// Computes the divergence of each token, `[B,T]`, and what its gradient needs, `[B,T,6]` of f64.
#[pyfunction]
pub(crate) fn op_divergence(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    teacher: TeacherArguments,
    mask: Option<&Bound<'_, PyAny>>,
) -> PyResult<(LentArray, LentArray)> {
    let given = DivergenceArguments::read(&spec, teacher, mask)?;
    let logits = TensorArgument::read("logits", logits)?;
    let divergences = done(py, || {
        let student = logits.lent();
        given.op(student.shape())?.values(&student).map_err(|reason| reason.to_string())
    })?;
    let values = lent(Element::Float(Dtype::F32), divergences.values.clone());
    Ok((values, lent(Element::Float(Dtype::F64), divergences.kept())))
}

/// Computes the gradient of the divergences by the student's logits, of cotangents `[B,T]`, into `dlogits`, or over the logits if that
/// is `None`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are the operation's")]
pub(crate) fn op_divergence_gradient(
    py: Python<'_>,
    spec: Spec,
    logits: &Bound<'_, PyAny>,
    dlogits: Option<&Bound<'_, PyAny>>,
    teacher: TeacherArguments,
    mask: Option<&Bound<'_, PyAny>>,
    kept: &Bound<'_, PyAny>,
    cotangents: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let given = DivergenceArguments::read(&spec, teacher, mask)?;
    let (kept, sent) = (TensorArgument::read("kept", kept)?, TensorArgument::read("cotangents", cotangents)?);
    let mut logits = TensorArgument::read("logits", logits)?;
    let mut dlogits = dlogits.map(|dlogits| TensorArgument::read("dlogits", dlogits)).transpose()?;
    let kept = kept.floats::<Ix3>("floats [B,T,6]").map_err(|reason| error::problem_error(py, reason))?.to_f64();
    done(py, || {
        let op = given.op(logits.lent().shape())?;
        let written = match &mut dlogits {
            Some(dlogits) => op.gradient(&logits.lent(), dlogits.lent_mut()?, kept, &sent.lent()),
            None => op.gradient_in_place(logits.lent_mut()?, kept, &sent.lent()),
        };
        written.map_err(|reason| reason.to_string())
    })
}
