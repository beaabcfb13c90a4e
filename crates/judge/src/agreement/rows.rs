//! [`AgreementRows`]: the logits that both sides are compared by, row by row.

use ndarray::{Array2, Ix3};

use super::SharedLogits;
use super::computation::{ComparedRow, LimitFactors, LogpComputation, PredictedLogp};
use crate::condition::LogitErrors;
use crate::judgeable::Judgeable;
use crate::lm_head::logit_errors;
use crate::tolerance::Limits;
use assay_core::problem::{Advantages, Dtype, FloatArray, HeadProblem, Problem, ProblemError};
use assay_core::spec::{LossSpec, SpecError};

/// The dtypes that an LM head may be rounded to on one side.
pub(super) const HEAD_DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// The logits, and those of an LM head whose weights are rounded first.
pub(super) struct AgreementRows {
    spec: LossSpec,
    /// The tokens, with the logits that are given or a product.
    problem: Problem,
    /// The errors of logits that are a product; empty if logits are given.
    errors: Vec<LogitErrors>,
    /// The logits of rounded heads.
    of_rounded_heads: Vec<(Dtype, FloatArray<Ix3>)>,
}

impl AgreementRows {
    /// Takes the logits, or multiplies hidden states and head in f64. Only the transform of logits, the support and the temperature of
    /// the spec are read.
    ///
    /// # Errors
    /// [`ProblemError`] if the problem does not fit the spec, or the spec has kept sets.
    pub(super) fn new(spec: &LossSpec, logits: SharedLogits, limits: &Limits) -> Result<Self, ProblemError> {
        // The comparison itself looks for the entries that a sampler dropped.
        if spec.reads_kept_ids() {
            let expected = "none: sets that one side dropped are among the causes that are looked for";
            return Err(SpecError { field: "support.kept", given: "given".into(), expected }.into());
        }
        let spec = LossSpec {
            logits: spec.logits.clone(),
            support: spec.support.clone(),
            temperature: spec.temperature,
            temperature_divides: spec.temperature_divides,
            ..LossSpec::from_cotangents(false)
        };
        match logits {
            SharedLogits::Logits(problem) => {
                let problem = forward_only(problem);
                problem.check(&spec)?;
                Ok(Self { spec, problem, errors: Vec::new(), of_rounded_heads: Vec::new() })
            }
            SharedLogits::Head(problem) => {
                let problem = forward_only(problem);
                let reference = problem.evaluate(&spec)?;
                let errors = logit_errors(&reference, &problem, limits);
                let on_logits = reference.on_logits().problem().clone();
                let finer = |dtype: &Dtype| dtype.size() < problem.dtype().size();
                let of_rounded_heads = HEAD_DTYPES
                    .into_iter()
                    .filter(finer)
                    .map(|dtype| {
                        let rounded = with_rounded_head(&problem, dtype);
                        Ok((dtype, rounded.evaluate(&spec)?.on_logits().problem().logits.clone()))
                    })
                    .collect::<Result<_, ProblemError>>()?;
                Ok(Self { spec, problem: on_logits, errors, of_rounded_heads })
            }
        }
    }

    pub(super) fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(super) fn spec(&self) -> &LossSpec {
        &self.spec
    }

    /// Returns the dtypes that the head can have been rounded to.
    pub(super) fn head_dtypes(&self) -> impl Iterator<Item = Dtype> + '_ {
        self.of_rounded_heads.iter().map(|(dtype, _)| *dtype)
    }

    /// Returns what a computation needs of token `[b,t]`; `None` if its row or its id is beyond the sequence or the vocabulary.
    pub(super) fn row(&self, computation: &LogpComputation, (b, t): (usize, usize)) -> Option<ComparedRow<'_>> {
        let Problem { ids, mask, extra, .. } = &self.problem;
        let shift = computation.shift;
        let width = mask.ncols();
        let moved = |by: isize| t.checked_add_signed(by).filter(|t| *t < width);
        let (row, of_id) = (moved(shift.row)?, moved(shift.id)?);
        // A neighbour belongs to the same sequence, and its id counts.
        if extra.sequences.owner((b, row)) != extra.sequences.owner((b, t)) || !mask[[b, of_id]] {
            return None;
        }
        let id = usize::try_from(ids[[b, of_id]].checked_add(shift.plus)?).ok()?;
        let logits = match computation.head {
            None => &self.problem.logits,
            Some(dtype) => &self.of_rounded_heads.iter().find(|(of, _)| *of == dtype)?.1,
        };
        let logits = logits.row(b, row);
        let errors = self.errors.get(b * width + row).map_or(&[][..], |errors| &errors.each);
        (id < logits.len()).then(|| ComparedRow {
            logits,
            errors,
            bias: self.problem.extra.bias.as_ref().and_then(|bias| bias.as_slice()),
            temperature: self.problem.tokens().temperature(&self.spec, (b, row)),
            id,
        })
    }

    /// Evaluates a computation at token `[b,t]`.
    pub(super) fn predict(
        &self,
        computation: &LogpComputation,
        at: (usize, usize),
        factors: LimitFactors,
    ) -> Option<PredictedLogp> {
        Some(computation.evaluate(&self.row(computation, at)?, factors))
    }
}

/// Leaves out of a problem what only losses read.
fn forward_only<L>(mut problem: Problem<L>) -> Problem<L> {
    problem.advantages = Advantages::Dlogp(Array2::zeros(problem.ids.raw_dim()));
    problem
}

/// Rounds the LM head of a problem to `dtype`, and keeps it in the problem's own.
fn with_rounded_head(problem: &HeadProblem, dtype: Dtype) -> HeadProblem {
    let mut rounded = problem.clone();
    let head = &mut rounded.logits.lm_head;
    let (values, own) = (head.to_f64().mapv(|weight| dtype.round(weight)), head.dtype());
    *head = FloatArray::rounded_from(&values, own);
    rounded
}
