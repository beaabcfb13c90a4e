//! [`AbControl`]: arms that are wrong on purpose, and that an A/B run must not let through.

use std::sync::Arc;

use super::AbPlan;
use crate::train::{GrpoLoss, LossArm, TrainConfig};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay_core::spec::{LossSpec, Reduction, Rows, Support};
use assay_native::Native;

/// Columns of the tile that [`AbControl::DroppedTail`] forgets.
const TILE: usize = 128;

/// An arm that is wrong on purpose, instead of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AbControl {
    /// A learning rate of 0.
    NoLearning,
    /// A gradient of the wrong sign.
    FlippedSign,
    /// Another reduction: every sequence has the same weight, or if that is the loss asked for, every token.
    OtherLoss,
    /// The last columns of the vocabulary are left out, but for the sampled one.
    DroppedTail,
}

impl AbControl {
    /// Every control, in the order of the tables.
    pub const ALL: [AbControl; 4] =
        [AbControl::NoLearning, AbControl::FlippedSign, AbControl::OtherLoss, AbControl::DroppedTail];

    /// Returns its name in tables, folders and JSON.
    pub fn name(self) -> &'static str {
        match self {
            AbControl::NoLearning => "no-learning",
            AbControl::FlippedSign => "flipped-sign",
            AbControl::OtherLoss => "other-loss",
            AbControl::DroppedTail => "dropped-tail",
        }
    }

    /// Whether the curve of the rewards must reveal it; else its losses against the reference must.
    pub fn fails_to_learn(self) -> bool {
        matches!(self, AbControl::NoLearning | AbControl::FlippedSign)
    }

    /// Returns the plan of its runs: without the reference if the curve of the rewards must reveal it.
    pub fn plan(self, plan: AbPlan) -> AbPlan {
        AbPlan { judge_every: plan.judge_every.filter(|_| !self.fails_to_learn()), ..plan }
    }

    /// The settings that it is trained under, instead of `config`.
    pub(super) fn settings(self, config: &TrainConfig) -> TrainConfig {
        let mut settings = config.clone();
        match self {
            AbControl::NoLearning => settings.update.optimizer.learning_rate = 0.0,
            AbControl::OtherLoss => {
                settings.loss.reduction = match settings.loss.reduction {
                    Reduction::SequenceMean { .. } => Reduction::TokenMean,
                    _ => Reduction::SequenceMean { rows: Rows::All },
                };
            }
            AbControl::FlippedSign | AbControl::DroppedTail => {}
        }
        settings
    }

    /// Returns the arm that computes its loss, based on the CPU kernel.
    pub(super) fn arm(self, loss: &LossSpec) -> LossArm {
        LossArm::Kernel(Box::new(match self {
            AbControl::NoLearning | AbControl::OtherLoss => GrpoLoss::native(loss.clone()),
            AbControl::FlippedSign | AbControl::DroppedTail => GrpoLoss::by(loss.clone(), Arc::new(WrongKernel(self))),
        }))
    }
}

/// The CPU kernel, wrong in the way of a control.
struct WrongKernel(AbControl);

impl Implementation for WrongKernel {
    fn id(&self) -> &str {
        self.0.name()
    }

    fn summary(&self) -> &'static str {
        "wrong on purpose"
    }

    fn class(&self) -> &'static str {
        "native"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        Native::default().supports(spec, shape, dtype, devices)
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let mut spec = spec.clone();
        if self.0 == AbControl::DroppedTail {
            let tail = problem.shape().vocab.saturating_sub(1) / TILE * TILE;
            spec.support = Support { vocab: Some(tail.max(1)), keep_sampled: true, ..spec.support };
        }
        let mut candidate = Native::default().run(&spec, problem, devices)?;
        if let (AbControl::FlippedSign, FloatArray::F32(gradient)) = (self.0, &mut candidate.gradient) {
            gradient.mapv_inplace(|g| -g);
        }
        Ok(candidate)
    }
}
