//! The option `loss_type` as TRL, Liger and Unsloth name its values.

use super::options::OptionReader;
use super::{BatchInputs, PresetError};
use crate::spec::{
    Cispo, LossSpec, Objective, OffPolicyMask, OldLogp, OutOfBounds, PpoClip, RatioLevel, Reduction, RolloutLevel,
    RolloutSource, RolloutWeights, Rows, Sapo, Vespo,
};

/// The values of `loss_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LossType {
    Grpo,
    Bnpo,
    DrGrpo,
    Dapo,
    Luspo,
    Cispo,
    Sapo,
    Vespo,
}

const LOSS_TYPES: [(&str, LossType); 8] = [
    ("grpo", LossType::Grpo),
    ("bnpo", LossType::Bnpo),
    ("dr_grpo", LossType::DrGrpo),
    ("dapo", LossType::Dapo),
    ("luspo", LossType::Luspo),
    ("cispo", LossType::Cispo),
    ("sapo", LossType::Sapo),
    ("vespo", LossType::Vespo),
];

/// The names and defaults of the two clip widths of one function.
pub(super) struct ClipNames {
    pub(super) low: (&'static str, f64),
    /// The name and default of the upper width; without a default, or if it is null, it equals the lower one.
    pub(super) high: (&'static str, Option<f64>),
}

impl ClipNames {
    pub(super) fn read(&self, reader: &OptionReader) -> Result<(f64, f64), PresetError> {
        let (name, default) = self.low;
        let low = reader.number(name, default)?;
        let high = match self.high {
            (name, Some(default)) => reader.number(name, default)?,
            (name, None) => reader.number_or_null(name, None)?.unwrap_or(low),
        };
        Ok((low, high))
    }
}

impl LossType {
    pub(super) fn read(reader: &OptionReader, default: Self) -> Result<Self, PresetError> {
        reader.word("loss_type", default, &LOSS_TYPES)
    }

    /// Whether the policy term is one of PPO's clips.
    pub(super) fn clips(self) -> bool {
        matches!(self, Self::Grpo | Self::Bnpo | Self::DrGrpo | Self::Dapo | Self::Luspo)
    }

    /// Whether the loss is divided by the tokens of the whole generation batch.
    pub(super) fn counts_items(self) -> bool {
        matches!(self, Self::Dapo | Self::Cispo | Self::Vespo)
    }

    /// Returns the note about the denominator, with or without `num_items_in_batch`.
    pub(super) fn note(self, items: bool) -> Option<String> {
        let note = match self {
            _ if self.counts_items() && !items => {
                "num_items_in_batch is not given: it is taken as the batch's own unmasked tokens, so that parts of a batch do not add up to it"
            }
            Self::Bnpo => {
                "bnpo divides by the unmasked tokens of what it is called with: parts of a batch do not add up to it"
            }
            _ => return None,
        };
        Some(note.into())
    }

    /// Returns the policy term. The upper bound of CISPO is `epsilon_high` itself, not one more.
    pub(super) fn objective(self, reader: &OptionReader, clip: &ClipNames) -> Result<Objective, PresetError> {
        Ok(match self {
            // Each loss reads only the options that it uses, so that others are reported as without effect.
            Self::Cispo => Objective::Cispo(Cispo { lower: None, upper: clip.read(reader)?.1 }),
            Self::Sapo => {
                let usual = Sapo::default();
                Objective::Sapo(Sapo {
                    tau_positive: reader.number("sapo_temperature_pos", usual.tau_positive)?,
                    tau_negative: reader.number("sapo_temperature_neg", usual.tau_negative)?,
                })
            }
            Self::Vespo => {
                let usual = Vespo::default();
                Objective::Vespo(Vespo {
                    k_positive: reader.number("vespo_k_pos", usual.k_positive)?,
                    lambda_positive: reader.number("vespo_lambda_pos", usual.lambda_positive)?,
                    k_negative: reader.number("vespo_k_neg", usual.k_negative)?,
                    lambda_negative: reader.number("vespo_lambda_neg", usual.lambda_negative)?,
                    weights_of_masked_tokens: false,
                })
            }
            _ => {
                // The other types are all clipped alike, and differ in their reduction.
                let (epsilon_low, epsilon_high) = clip.read(reader)?;
                let delta = reader.number_or_null("delta", None)?;
                Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta, dual_clip: None })
            }
        })
    }

    /// Returns the reduction, with the item count if the caller has one.
    pub(super) fn reduction(self, max_completion_length: Option<usize>, items: Option<f64>) -> Reduction {
        let rows = Rows::All;
        match self {
            Self::Grpo | Self::Sapo => Reduction::SequenceMean { rows },
            Self::Bnpo => Reduction::TokenMean,
            Self::DrGrpo => Reduction::FixedLength { rows, length: max_completion_length },
            Self::Luspo => Reduction::SequenceSum { rows },
            Self::Dapo | Self::Cispo | Self::Vespo => items.map_or(Reduction::TokenMean, Reduction::Normalizer),
        }
    }
}

/// Lists the parts of TRL's and Unsloth's losses that are means over each micro-batch.
pub(super) fn own_means(spec: &LossSpec) -> Vec<String> {
    let bonus = (spec.entropy_coef != 0.0)
        .then_some("the entropy bonus is a mean of each micro-batch: parts of a batch do not add up to it");
    let top = spec.top_entropy.map(|_| "the threshold of top_entropy_quantile is each micro-batch's own");
    bonus.into_iter().chain(top).map(Into::into).collect()
}

/// Reads `importance_sampling_level`, token or sequence.
pub(super) fn ratio_level(reader: &OptionReader) -> Result<RatioLevel, PresetError> {
    let levels = [("token", RatioLevel::Token), ("sequence", RatioLevel::Sequence)];
    reader.word("importance_sampling_level", RatioLevel::Token, &levels)
}

/// Reads `off_policy_mask_threshold`, against the sampler's log-probabilities if the batch has them, else the old ones.
///
/// The divergence is 0 without either, and the mask then keeps every token if the threshold is `≥ 0`.
pub(super) fn off_policy_mask(
    reader: &OptionReader,
    given: &BatchInputs,
) -> Result<Option<OffPolicyMask>, PresetError> {
    const NAME: &str = "off_policy_mask_threshold";
    let Some(threshold) = reader.number_or_null(NAME, None)? else { return Ok(None) };
    // The sampler's log-probabilities are preferred.
    let behaviour = match (given.sampling_logps, given.old_logps) {
        (true, _) => OldLogp::Rollout,
        (false, true) => OldLogp::Given,
        (false, false) if threshold >= 0.0 => return Ok(None),
        (false, false) => {
            return Err(reader.refuse(NAME, "a number ≥ 0 where the batch has neither sampling nor old logps"));
        }
    };
    Ok(Some(OffPolicyMask { threshold, behaviour }))
}

/// Reads `vllm_importance_sampling_mode` with its bounds: weights that a trainer computes from both log-probabilities.
pub(super) fn weights_of_mode(
    reader: &OptionReader,
    modes: &[(&str, (RolloutLevel, OutOfBounds))],
) -> Result<RolloutWeights, PresetError> {
    let usual = (RolloutLevel::Sequence, OutOfBounds::Mask);
    let (level, outside) = reader.word("vllm_importance_sampling_mode", usual, modes)?;
    let min = reader.number_or_null("vllm_importance_sampling_clip_min", None)?;
    let max = reader.number_or_null("vllm_importance_sampling_clip_max", Some(3.0))?;
    Ok(RolloutWeights { level, outside, min, max, ..super::weights_from(RolloutSource::Logp) })
}

/// The modes of TRL's weights, with level and treatment of weights that are out of bounds.
pub(super) const MODES: [(&str, (RolloutLevel, OutOfBounds)); 4] = [
    ("token_truncate", (RolloutLevel::Token, OutOfBounds::Truncate)),
    ("token_mask", (RolloutLevel::Token, OutOfBounds::Mask)),
    ("sequence_truncate", (RolloutLevel::Sequence, OutOfBounds::Truncate)),
    ("sequence_mask", (RolloutLevel::Sequence, OutOfBounds::Mask)),
];

/// Lets VESPO's weight include rollout weights of masked tokens, if they are given as an array.
pub(super) fn fold_weights(spec: &mut LossSpec) {
    let given = spec.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given);
    if let Objective::Vespo(vespo) = &mut spec.objective {
        vespo.weights_of_masked_tokens = given;
    }
}
