//! MLLM-JAX, commit 04809656: `plugins/training/kernels/grpo_loss_pallas.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{AdvantageLevel, LossSpec, Objective, PpoClip, Reduction, TemperatureDivides};

pub(super) const FUNCTIONS: &[&str] = &["grpo_per_token_loss_reference", "grpo_per_token_loss_pallas"];

const KNOWN: &str =
    "block_size bwd_impl compute_dtype epsilon_high epsilon_low interpret reduction temperature time_block";

const MEAN: &str = "sum(per_token_loss * mask) / sum(mask)";

/// Resolves a loss whose temperature divides the log-probability. The functions return losses per token; the caller
/// takes the mean over the mask, or over `total_valid_token_count` if it is given.
pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    // The kernel takes one advantage per sequence and always old log-probabilities.
    if given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]"));
    }
    if !given.old_logps {
        return Err(reader.lacks("old_logps", "nothing", "[B,T]"));
    }
    // Options that a recorded run has, and that must have these values.
    reader.word("reduction", (), &[(MEAN, ()), ("mean", ())])?;
    reader.word("compute_dtype", (), &[("f32", ()), ("float32", ())])?;
    let clip = PpoClip {
        epsilon_low: reader.number("epsilon_low", 0.2)?,
        epsilon_high: reader.number("epsilon_high", 0.2)?,
        ..PpoClip::default()
    };
    let spec = LossSpec {
        objective: Objective::PpoClip(clip),
        temperature: reader.number("temperature", 1.0)?.into(),
        temperature_divides: TemperatureDivides::Logp,
        reduction: given.num_items_in_batch.map_or(Reduction::TokenMean, Reduction::Normalizer),
        ..LossSpec::default()
    };
    Ok(ProjectLoss::new(spec, KNOWN))
}
