//! [`CandidateOutputs`]: the outputs of one candidate, borrowed, and the check of their shapes.

use ndarray::{Ix0, Ix2, Ix3};

use super::verdict::{JudgeError, Verdict};
use crate::gate::Output;
use assay_core::problem::{
    Candidate, Dtype, FloatArray, FloatView, HeadGradientView, HeadLayout, HeadShape, Metrics, Shape,
};
use assay_core::spec::LossSpec;

/// The outputs of one candidate, borrowed; `None` for each that it lacks.
#[derive(Clone)]
pub(crate) struct CandidateOutputs<'c> {
    pub(crate) loss: Option<&'c FloatArray<Ix0>>,
    pub(crate) logp: Option<&'c FloatArray<Ix2>>,
    pub(crate) logp_of_others: Option<&'c FloatArray<Ix3>>,
    pub(crate) entropy: Option<&'c FloatArray<Ix2>>,
    pub(crate) token_loss: Option<&'c FloatArray<Ix2>>,
    pub(crate) metrics: Option<&'c Metrics>,
    pub(crate) dlogits: Option<FloatView<'c, Ix3>>,
    pub(crate) head: Option<HeadOutputs<'c>>,
}

/// The gradients of a fused LM head that are to be judged.
#[derive(Clone)]
pub(crate) struct HeadOutputs<'c> {
    pub(crate) dhidden: Option<FloatView<'c, Ix3>>,
    pub(crate) dlm_head: Option<FloatView<'c, Ix2>>,
    /// The dtype that dlogits were rounded to before the two products.
    pub(crate) dlogits_dtype: Dtype,
}

impl<'c> CandidateOutputs<'c> {
    /// Borrows everything but the gradient.
    fn from_forward<G>(candidate: &'c Candidate<G>) -> Self {
        Self {
            loss: candidate.loss.as_ref(),
            logp: candidate.logp.as_ref(),
            logp_of_others: candidate.logp_of_others.as_ref(),
            entropy: candidate.entropy.as_ref(),
            token_loss: candidate.token_loss.as_ref(),
            metrics: candidate.metrics.as_ref(),
            dlogits: None,
            head: None,
        }
    }

    /// Borrows the outputs of a candidate without a gradient, whose metrics are not judged.
    pub(crate) fn without_gradient(
        candidate: &'c Candidate<()>,
        spec: &LossSpec,
        shape: Shape,
    ) -> Result<Self, JudgeError> {
        let outputs = Self { metrics: None, ..Self::from_forward(candidate) };
        outputs.check(spec, shape)?;
        Ok(outputs)
    }

    /// Borrows the outputs of a kernel on logits.
    pub(crate) fn with_dlogits(
        candidate: &'c Candidate<FloatView<'_, Ix3>>,
        spec: &LossSpec,
        shape: Shape,
    ) -> Result<Self, JudgeError> {
        let outputs = Self { dlogits: Some(candidate.gradient.view()), ..Self::from_forward(candidate) };
        outputs.check_presence(spec)?;
        expect_shape("dlogits", candidate.gradient.shape(), &[shape.batch, shape.tokens, shape.vocab])?;
        outputs.check_tokens(spec, shape)?;
        Ok(outputs)
    }

    /// Borrows the outputs of a kernel with a fused LM head.
    pub(crate) fn with_head(
        candidate: &'c Candidate<HeadGradientView<'_>>,
        spec: &LossSpec,
        shape: HeadShape,
        layout: HeadLayout,
    ) -> Result<Self, JudgeError> {
        let HeadShape { batch, tokens, hidden, vocab } = shape;
        let HeadGradientView { dhidden, dlm_head, dlogits_dtype } = &candidate.gradient;
        let head = HeadOutputs {
            dhidden: Some(dhidden.view()),
            dlm_head: Some(dlm_head.view()),
            dlogits_dtype: *dlogits_dtype,
        };
        let outputs = Self { head: Some(head), ..Self::from_forward(candidate) };
        outputs.check(spec, Shape { batch, tokens, vocab })?;
        expect_shape("dhidden", dhidden.shape(), &[batch, tokens, hidden])?;
        expect_shape("dlm_head", dlm_head.shape(), &layout.extents(hidden, vocab))?;
        Ok(outputs)
    }

    /// Drops the gradients of an LM head that pass in `verdicts`, so that they are not judged again.
    pub(super) fn without_passed_gradients(self, verdicts: &[Verdict]) -> Self {
        let fails = |output| verdicts.iter().any(|verdict| verdict.gate.output == output && verdict.status.failed());
        let head = self.head.map(|head| HeadOutputs {
            dhidden: head.dhidden.filter(|_| fails(Output::Dhidden)),
            dlm_head: head.dlm_head.filter(|_| fails(Output::DlmHead)),
            ..head
        });
        Self { head, ..self }
    }

    fn check(&self, spec: &LossSpec, shape: Shape) -> Result<(), JudgeError> {
        self.check_presence(spec)?;
        self.check_tokens(spec, shape)
    }

    /// Checks that the main result is there: a loss, or logp if the spec asks for logp by its cotangents.
    fn check_presence(&self, spec: &LossSpec) -> Result<(), JudgeError> {
        let missing = |output, because| Err(JudgeError::Missing { output, because });
        match (self.loss, self.logp) {
            (None, None) if spec.is_from_cotangents() => missing("logp", "it is what the spec asks for"),
            (None, _) if !spec.is_from_cotangents() => missing("loss", "only logp and entropy by themselves have none"),
            _ => Ok(()),
        }
    }

    /// Checks that per-token outputs are `[B,T]`, and logp `[B,T]` or, with K ids per token, `[B,T,K]`.
    fn check_tokens(&self, spec: &LossSpec, Shape { batch, tokens, .. }: Shape) -> Result<(), JudgeError> {
        if let Some(logp) = self.logp {
            // The candidate holds the first id apart from the K − 1 others; the user sees one array.
            let given = match self.logp_of_others {
                Some(others) => [&others.shape()[..2], &[others.shape()[2] + 1]].concat(),
                None => logp.shape().to_vec(),
            };
            let of_ids = (spec.ids_per_token > 1).then_some(spec.ids_per_token);
            expect_shape("logp", &given, &[batch, tokens].into_iter().chain(of_ids).collect::<Vec<_>>())?;
        }
        for (output, values) in [("logp", self.logp), ("entropy", self.entropy), ("token_loss", self.token_loss)] {
            if let Some(values) = values {
                expect_shape(output, values.shape(), &[batch, tokens])?;
            }
        }
        Ok(())
    }
}

/// Compares the shape of an output with the one that the problem requires.
fn expect_shape(output: &'static str, given: &[usize], expected: &[usize]) -> Result<(), JudgeError> {
    if given == expected {
        return Ok(());
    }
    Err(JudgeError::Shape { output, given: given.to_vec(), expected: expected.to_vec() })
}
