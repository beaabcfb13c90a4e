//! The loss step: from hidden states to the gradients of hidden states and LM head, a part of a batch at a time.

use std::ops::Range;

use candle_core::{Tensor, Var};
use ndarray::{Array2, Array3, s};

use super::loss::{array2, array3, widened};
use super::optimizer::{WeightGradients, accumulate};
use super::qwen2::PolicyWeights;
use super::{LossArm, LossEvaluation, OffPolicy, TrainBatch, TrainError};
use assay_core::memory::expect_host_room;
use assay_core::problem::{HeadLayout, HeadProblem, Metrics, Projection};

/// An observer of the losses of a run.
pub trait Observer {
    /// Whether the loss of `epoch`, from 0 on, of `step`, from 1 on, is kept to be shown.
    fn wants(&self, step: usize, epoch: usize) -> bool;

    /// Receives a loss step that it wanted.
    ///
    /// # Errors
    /// [`TrainError`], which ends the run.
    fn see(&mut self, step: &LossStep) -> Result<(), TrainError>;

    /// Is told that the loss of a rollout's first update is not of the policy that was sampled.
    ///
    /// # Errors
    /// The error `found`, which ends the run, unless the observer handles it.
    fn off_policy(&mut self, found: OffPolicy) -> Result<(), TrainError> {
        Err(found.into())
    }
}

/// An observer that wants to see no loss.
pub struct NoObserver;

impl Observer for NoObserver {
    fn wants(&self, _: usize, _: usize) -> bool {
        false
    }

    fn see(&mut self, _: &LossStep) -> Result<(), TrainError> {
        Ok(())
    }
}

/// A whole batch's loss and gradients, as the parts of an epoch added up to them.
pub struct LossStep<'s> {
    /// The step, from 1 on.
    pub step: usize,
    /// The epoch within it, from 0 on.
    pub epoch: usize,
    pub(super) sum: &'s PartSums,
    pub(super) lm_head: &'s Tensor,
    pub(super) batch: &'s TrainBatch,
}

impl LossStep<'_> {
    /// Returns the problem of which it is the loss: hidden states, LM head and the whole batch.
    ///
    /// # Errors
    /// [`TrainError`] where candle fails.
    pub fn problem(&self) -> Result<HeadProblem, TrainError> {
        let (hidden, lm_head) = (self.sum.hidden.clone().into(), array2("lm_head", self.lm_head)?);
        let layout = HeadLayout::VocabByHidden;
        Ok(self.batch.with_logits(Projection { hidden, lm_head, layout, rounds_logits: false }))
    }

    /// Returns the loss, summed over the parts in their order.
    pub fn loss(&self) -> f32 {
        self.sum.loss as f32
    }

    /// Returns the gradient of the hidden states, `[B,T,H]`, 0 beyond the width of a part.
    pub fn dhidden(&self) -> &Array3<f32> {
        &self.sum.dhidden
    }

    /// Returns the gradient of the LM head, `[V,H]`, summed over the parts in their order. It excludes the gradient that a tied
    /// embedding gets from the layers below.
    pub fn dlm_head(&self) -> &Array2<f32> {
        &self.sum.dlm_head
    }
}

/// The sums over the parts of a batch: the loss, and the gradients side by side or added.
pub(super) struct PartSums {
    loss: f64,
    hidden: Array3<f32>,
    dhidden: Array3<f32>,
    dlm_head: Array2<f32>,
}

impl PartSums {
    /// Creates the sums of no parts yet, for a batch `[B,T]` and an LM head `[V,H]`.
    pub(super) fn zeros((rows, width): (usize, usize), (vocab, hidden): (usize, usize)) -> Self {
        let states = Array3::zeros((rows, width, hidden));
        Self { loss: 0.0, dhidden: states.clone(), hidden: states, dlm_head: Array2::zeros((vocab, hidden)) }
    }

    /// Adds the part of a batch that has the sequences `rows`.
    pub(super) fn add(
        &mut self,
        rows: Range<usize>,
        hidden: &Tensor,
        graded: &LossStepResult,
    ) -> Result<(), TrainError> {
        let width = hidden.dim(1)?;
        self.loss += f64::from(graded.loss);
        for (all, part) in [(&mut self.hidden, hidden), (&mut self.dhidden, &graded.dhidden)] {
            all.slice_mut(s![rows.clone(), ..width, ..]).assign(&widened(array3("hidden", part)?));
        }
        self.dlm_head += &widened(array2("dlm_head", &graded.dlm_head)?);
        Ok(())
    }
}

/// The inputs of a loss step, which an arm evaluates.
pub(super) struct LossStepInputs<'s> {
    pub(super) arm: &'s LossArm,
    pub(super) hidden: &'s Tensor,
    pub(super) lm_head: &'s Tensor,
    pub(super) batch: &'s TrainBatch,
}

/// The results of a loss step: the loss, its metrics and the gradients.
pub(super) struct LossStepResult {
    pub(super) loss: f32,
    pub(super) metrics: Metrics,
    pub(super) logp: Option<Array2<f64>>,
    dhidden: Tensor,
    dlm_head: Tensor,
}

impl LossStepInputs<'_> {
    /// Checks that there is memory for the logits and their gradient, if they are made at all.
    fn expect_room(&self) -> Result<(), TrainError> {
        let (rows, tokens, _) = self.hidden.dims3()?;
        let bytes = [rows, tokens, self.lm_head.dim(0)?, 2 * size_of::<f32>()];
        let needed = if self.arm.makes_logits() { bytes.into_iter().fold(1, usize::saturating_mul) } else { 0 };
        let what = || {
            format!(
                "the loss, for the logits of {rows} sequences of {tokens} tokens and their gradient, by a kernel without an LM head,"
            )
        };
        Ok(expect_host_room(what, needed)?)
    }

    pub(super) fn step(&self) -> Result<LossStepResult, TrainError> {
        self.expect_room()?;
        // Leaves: the graph of the loss ends here.
        let hidden = Var::from_tensor(&self.hidden.detach())?;
        let LossEvaluation { loss, metrics, logp } = self.arm.on_hidden(&hidden, self.lm_head, self.batch)?;
        // Both gradients come from one backward pass of the loss, which does not reach the layers below.
        let mut gradients = loss.backward()?;
        let mut gradient = |of: &Tensor| gradients.remove(of).expect("the loss depends on it");
        let (dhidden, dlm_head) = (gradient(&hidden), gradient(self.lm_head));
        let loss = loss.to_scalar::<f32>()?;
        if !loss.is_finite() {
            return Err(TrainError::Diverged { what: "the loss", given: f64::from(loss) });
        }
        Ok(LossStepResult { loss, metrics: metrics.unwrap_or_default(), logp, dhidden, dlm_head })
    }
}

impl LossStepResult {
    /// Adds the gradients of all weights, through the layers below `hidden`.
    pub(super) fn through(
        self,
        hidden: &Tensor,
        lm_head: &Tensor,
        gradients: &mut WeightGradients,
        weights: &PolicyWeights,
    ) -> Result<(), TrainError> {
        // The sum of hidden · dhidden has the gradient dhidden: its backward pass is that of the layers below.
        let mut store = (hidden * self.dhidden)?.sum_all()?.backward()?;
        // A tied head is the embedding too.
        let dlm_head = match store.remove(lm_head) {
            Some(embedding) => (embedding + self.dlm_head)?,
            None => self.dlm_head,
        };
        store.insert(lm_head, dlm_head);
        accumulate(gradients, &mut store, weights)
    }
}
