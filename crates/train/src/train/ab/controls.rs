//! [`Control`]: arms that are wrong on purpose, and that an A/B run must not let through.

use std::sync::Arc;

use super::Plan;
use crate::train::{Arm, GrpoLoss, TrainConfig};
use assay_core::implementation::{Implementation, RunError, Unavailable, Unsupported};
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, Shape};
use assay_core::spec::{LossSpec, Reduction, Rows, Support};
use assay_native::Native;

/// Columns of the tile that [`Control::DroppedTail`] forgets.
const TILE: usize = 128;

/// An arm that is wrong on purpose, instead of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// A learning rate of 0.
    NoLearning,
    /// A gradient of the wrong sign.
    FlippedSign,
    /// Another reduction: every sequence has the same weight, or if that is the loss asked for, every token.
    OtherLoss,
    /// The last columns of the vocabulary are left out, but for the sampled one.
    DroppedTail,
}

impl Control {
    /// Every control, in the order of the tables.
    pub const ALL: [Control; 4] = [Control::NoLearning, Control::FlippedSign, Control::OtherLoss, Control::DroppedTail];

    /// Returns its name in tables, folders and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Control::NoLearning => "no-learning",
            Control::FlippedSign => "flipped-sign",
            Control::OtherLoss => "other-loss",
            Control::DroppedTail => "dropped-tail",
        }
    }

    /// Whether the curve of the rewards must reveal it; else its losses against the reference must.
    pub fn fails_to_learn(self) -> bool {
        matches!(self, Control::NoLearning | Control::FlippedSign)
    }

    /// Returns the plan of its runs: without the reference if the curve of the rewards must reveal it.
    pub fn plan(self, plan: Plan) -> Plan {
        Plan { judge_every: plan.judge_every.filter(|_| !self.fails_to_learn()), ..plan }
    }

    /// The settings that it is trained under, instead of `config`.
    pub(super) fn settings(self, config: &TrainConfig) -> TrainConfig {
        let mut settings = config.clone();
        match self {
            Control::NoLearning => settings.update.optimizer.learning_rate = 0.0,
            Control::OtherLoss => {
                settings.loss.reduction = match settings.loss.reduction {
                    Reduction::SequenceMean { .. } => Reduction::TokenMean,
                    _ => Reduction::SequenceMean { rows: Rows::All },
                };
            }
            Control::FlippedSign | Control::DroppedTail => {}
        }
        settings
    }

    /// Returns the arm that computes its loss, based on the CPU kernel.
    pub(super) fn arm(self, loss: &LossSpec) -> Arm {
        Arm::Kernel(Box::new(match self {
            Control::NoLearning | Control::OtherLoss => GrpoLoss::native(loss.clone()),
            Control::FlippedSign | Control::DroppedTail => GrpoLoss::by(loss.clone(), Arc::new(Wrong(self))),
        }))
    }
}

/// The CPU kernel, wrong in the way of a control.
struct Wrong(Control);

impl Implementation for Wrong {
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
        if self.0 == Control::DroppedTail {
            let tail = problem.shape().vocab.saturating_sub(1) / TILE * TILE;
            spec.support = Support { vocab: Some(tail.max(1)), keep_sampled: true, ..spec.support };
        }
        let mut candidate = Native::default().run(&spec, problem, devices)?;
        if let (Control::FlippedSign, FloatArray::F32(gradient)) = (self.0, &mut candidate.gradient) {
            gradient.mapv_inplace(|g| -g);
        }
        Ok(candidate)
    }
}
