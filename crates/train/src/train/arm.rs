//! [`Arm`]: what computes the loss of a run.

use std::path::Path;

use candle_core::Tensor;

use super::{Baseline, Batch, Evaluated, GrpoLoss, TrainConfig, TrainError};
use assay_core::problem::HeadShape;
use assay_core::spec::LossSpec;

/// What computes the loss.
#[derive(Clone)]
pub enum Arm {
    /// An implementation of this crate.
    Kernel(Box<GrpoLoss>),
    /// candle's own operations.
    Candle(Baseline),
}

impl Arm {
    /// The arm that `config` chooses; a PJRT implementation uses `plugin`.
    ///
    /// # Errors
    /// [`TrainError`] where there is none, it does not run here, or does not compute this loss.
    pub fn of(config: &TrainConfig, plugin: Option<&Path>) -> Result<Self, TrainError> {
        if !config.kernel.enabled {
            return Baseline::of(&config.loss).map(Arm::Candle);
        }
        let grpo = GrpoLoss::by_id(config.loss.clone(), &config.kernel.implementation, plugin)?;
        Ok(Arm::Kernel(Box::new(grpo)))
    }

    /// The same for the loss `spec`.
    pub(super) fn under(&self, spec: &LossSpec) -> Result<Self, TrainError> {
        Ok(match self {
            Arm::Kernel(grpo) => Arm::Kernel(Box::new(grpo.under(spec.clone()))),
            Arm::Candle(_) => Arm::Candle(Baseline::of(spec)?),
        })
    }

    /// Checks that it computes its loss from hidden states of `shape` in f32.
    ///
    /// # Errors
    /// [`TrainError::Run`], naming the setting that it does not do.
    pub fn expect_supported(&self, shape: HeadShape) -> Result<(), TrainError> {
        match self {
            Arm::Kernel(grpo) => grpo.expect_supported(shape),
            // What it computes was asked when it was made.
            Arm::Candle(_) => Ok(()),
        }
    }

    pub(super) fn on_hidden(&self, hidden: &Tensor, lm_head: &Tensor, batch: &Batch) -> Result<Evaluated, TrainError> {
        match self {
            Arm::Kernel(grpo) => grpo.on_hidden(hidden, lm_head, batch),
            Arm::Candle(baseline) => baseline.on_hidden(hidden, lm_head, batch),
        }
    }
}
