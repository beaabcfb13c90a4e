//! RL-Kernel, commit 202f0e30: `NativeGRPOLossOp` and `TritonGRPOLossOp` of `rl_engine/kernels/ops`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, PpoClip, Reduction};

pub(super) const FUNCTIONS: &[&str] = &["NativeGRPOLossOp", "TritonGRPOLossOp"];

const KNOWN: &str = "beta clip_eps eps group_boundaries samples_per_prompt";

/// Resolves PPO's clip with one width and the k3 penalty, both as means over all tokens. The function makes the
/// advantages of rewards; here they are given.
pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    if given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]"));
    }
    if !given.old_logps {
        return Err(reader.lacks("old_logps", "nothing", "[B,T]"));
    }
    let width = reader.number("clip_eps", 0.2)?;
    let beta = reader.number("beta", 0.0)?;
    let spec = LossSpec {
        objective: Objective::PpoClip(PpoClip { epsilon_low: width, epsilon_high: width, ..PpoClip::default() }),
        kl: (beta != 0.0).then(|| Kl::plain(beta, KlEstimator::K3)),
        reduction: Reduction::TokenMean,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    let own = "the mean is over the tokens of one call: parts of a batch do not add up to it";
    found.notes.push(own.into());
    Ok(found)
}
