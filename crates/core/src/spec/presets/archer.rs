//! Archer2.0, commit b08d963d: `verl/trainer/ppo/core_algos.py`, `compute_policy_loss_archer`: ASPO.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{AdvantageLevel, Aspo, Averaging, ClipWidths, LossSpec, Objective, Ratio, Reduction, Rows};

pub(super) const FUNCTIONS: &[&str] = &["compute_policy_loss_archer"];

const KNOWN: &str = "
    loss_agg_mode negative_clip_ratio_c negative_high_entropy_clip_ratio_low negative_low_entropy_clip_ratio_low
    positive_clip_ratio_c positive_high_entropy_clip_ratio_high positive_low_entropy_clip_ratio_high temperature
    use_dynamic_clip
";

/// Resolves the policy term alone. Tokens of `high_entropy_mask`, which are those of the lower entropies, have the
/// widths named `low`.
pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    // Two pairs of widths: for the tokens of the mask, and for the others.
    let widths = |low, high, usual| {
        let [epsilon_low, epsilon_high] = [reader.number(low, usual)?, reader.number(high, usual)?];
        Ok(ClipWidths { epsilon_low, epsilon_high })
    };
    let masked = widths("negative_low_entropy_clip_ratio_low", "positive_low_entropy_clip_ratio_high", 0.2)?;
    let others = widths("negative_high_entropy_clip_ratio_low", "positive_high_entropy_clip_ratio_high", 0.4)?;
    let Averaging { reduction, denominator_epsilon } = averaging(reader)?;
    let spec = LossSpec {
        objective: Objective::Aspo(Aspo {
            epsilon_low: others.epsilon_low,
            epsilon_high: others.epsilon_high,
            // Equal widths make the mask irrelevant, and the loss does not ask for it then.
            selected: (masked != others).then_some(masked),
            dual_clip_positive: reader.number("positive_clip_ratio_c", 3.0)?,
            dual_clip_negative: reader.number("negative_clip_ratio_c", 3.0)?,
        }),
        ratio: Ratio { clamp: Some(20.0), ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Token),
        temperature: reader.number("temperature", 1.0)?.into(),
        reduction,
        denominator_epsilon,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if masked != others {
        let mask = "`selected` is the function's high_entropy_mask: in its trainer a row's tokens up to the 0.8 quantile of its entropies";
        found.notes.push(mask.into());
    }
    Ok(found)
}

/// Reads `agg_loss`; a mean over sequences counts those without a token, whose own mean is 0/0 there.
fn averaging(reader: &OptionReader) -> Result<Averaging, PresetError> {
    // Only the token mean has an epsilon in its denominator.
    let modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"];
    let plain = |reduction| Averaging { reduction, denominator_epsilon: 0.0 };
    Ok(match reader.word("loss_agg_mode", "token-mean", &modes.map(|mode| (mode, mode)))? {
        "token-mean" => Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 1e-8 },
        "seq-mean-token-sum" => plain(Reduction::SequenceSum { rows: Rows::All }),
        "seq-mean-token-mean" => plain(Reduction::SequenceMean { rows: Rows::All }),
        _ => plain(Reduction::FixedLength { rows: Rows::Given(1.0), length: None }),
    })
}
