//! [`LossArm`]: a kernel or candle's own operations, which computes the loss of a run.

use std::path::Path;

use candle_core::Tensor;

use super::{Baseline, GrpoLoss, LossEvaluation, TrainBatch, TrainConfig, TrainError};
use assay_core::problem::HeadShape;
use assay_core::spec::LossSpec;

/// The implementation that computes the loss of a run.
#[derive(Clone)]
pub enum LossArm {
    /// An implementation of this crate.
    Kernel(Box<GrpoLoss>),
    /// The baseline: candle's own operations and autograd.
    Candle(Baseline),
}

impl LossArm {
    /// Creates the arm that `config` chooses; a PJRT implementation uses `plugin`.
    ///
    /// # Errors
    /// [`TrainError`] where there is none, it does not run here, or does not compute this loss.
    pub fn from_config(config: &TrainConfig, plugin: Option<&Path>) -> Result<Self, TrainError> {
        if !config.kernel.enabled {
            return Baseline::from_spec(&config.loss).map(LossArm::Candle);
        }
        let grpo = GrpoLoss::by_id(config.loss.clone(), &config.kernel.implementation, plugin)?;
        Ok(LossArm::Kernel(Box::new(grpo)))
    }

    /// Whether it makes the logits of all tokens of a batch at once.
    pub(super) fn makes_logits(&self) -> bool {
        match self {
            LossArm::Kernel(grpo) => grpo.makes_logits(),
            LossArm::Candle(_) => true,
        }
    }

    /// Returns the arm for the loss `spec` instead of its own.
    pub(super) fn under(&self, spec: &LossSpec) -> Result<Self, TrainError> {
        Ok(match self {
            LossArm::Kernel(grpo) => LossArm::Kernel(Box::new(grpo.under(spec.clone()))),
            LossArm::Candle(_) => LossArm::Candle(Baseline::from_spec(spec)?),
        })
    }

    /// Checks that it computes its loss from hidden states of `shape` in f32.
    ///
    /// # Errors
    /// [`TrainError::Run`], naming the setting that it does not do.
    pub fn expect_supported(&self, shape: HeadShape) -> Result<(), TrainError> {
        match self {
            LossArm::Kernel(grpo) => grpo.expect_supported(shape),
            // What it computes was asked when it was made.
            LossArm::Candle(_) => Ok(()),
        }
    }

    pub(super) fn on_hidden(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        batch: &TrainBatch,
    ) -> Result<LossEvaluation, TrainError> {
        match self {
            LossArm::Kernel(grpo) => grpo.on_hidden(hidden, lm_head, batch),
            LossArm::Candle(baseline) => baseline.on_hidden(hidden, lm_head, batch),
        }
    }
}
