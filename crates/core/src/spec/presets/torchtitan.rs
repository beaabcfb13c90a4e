//! torchtitan 0.3.0: `DAPOLoss` and `GRPOLoss` of `experiments/rl/losses`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, sampler_or_old};
use crate::spec::{AdvantageLevel, LossSpec, Objective, PpoClip, Ratio, Reduction};

pub(super) const FUNCTIONS: &[&str] = &["GRPOLoss", "DAPOLoss"];

const KNOWN: &str = "clip_eps global_valid_tokens ratio_clip_high ratio_clip_low";

/// Resolves PPO's clip of a log-ratio clamped to ±10 against the generator, as a sum over tokens divided by the global
/// count of them.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let (epsilon_low, epsilon_high) = if function == "GRPOLoss" {
        let width = reader.number("clip_eps", 0.2)?;
        (width, width)
    } else {
        (reader.number("ratio_clip_low", 0.2)?, reader.number("ratio_clip_high", 0.2)?)
    };
    // Without a count the loss is a sum; a count of 0 is taken as 1.
    let tokens = reader.number_or_null("global_valid_tokens", given.num_items_in_batch)?;
    let spec = LossSpec {
        objective: Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() }),
        ratio: Ratio { clamp: Some(10.0), ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: sampler_or_old(given),
        reduction: Reduction::Normalizer(tokens.map_or(1.0, |tokens| tokens.max(1.0))),
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if tokens.is_none() {
        found.notes.push("global_valid_tokens is not given: the loss is a sum".into());
    }
    if given.sampling_logps {
        let unscored = "a token whose generator log-probability is not finite leaves loss and count there: mask it";
        found.notes.push(unscored.into());
    }
    Ok(found)
}
