//! Axolotl 0.19.0: `AxolotlGRPOTrainer`, which is TRL 1.9.0's `GRPOTrainer` with its loss, and `AxolotlAsyncGRPOTrainer` with
//! `_compute_loss` of `core/trainers/grpo/async_trainer.py`.

use super::loss_type::{ClipNames, LossType, MODES, off_policy_mask, own_means, ratio_level, weights_of_mode};
use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, WeightShape, ready_made, trl};
use crate::spec::{AdvantageLevel, LossSpec, OutOfBounds, Ratio, RatioLevel, RolloutLevel, RolloutWeights};

const ASYNC: &str = "AxolotlAsyncGRPOTrainer";

pub(super) const FUNCTIONS: &[&str] = &["AxolotlGRPOTrainer", ASYNC];

/// The prefix that option names may have.
pub(super) const TRL: &str = "trl.";

/// The options that Axolotl hands to TRL, and those about the making of a batch.
const KNOWN: &str = "
    async_prefetch beta chat_template_kwargs entropy_coef epsilon epsilon_high generation_batch_size generation_kwargs
    gradient_accumulation_steps importance_sampling_level log_completions loss_type mask_truncated_completions
    max_completion_length min_p multi_objective_aggregation num_generations num_iterations num_processes
    off_policy_mask_threshold prefetch_depth ref_model_mixup_alpha ref_model_sync_steps repetition_penalty
    replay_buffer_size reroll_start_fraction reward_funcs reward_weights scale_rewards skip_zero_advantage_batches
    streaming_partial_batch sync_ref_model temperature top_k top_p use_adaptive_entropy use_bias_correction_kl
    use_data_producer use_liger_loss use_vllm vllm_importance_sampling_cap vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_mode
";

/// Resolves TRL's loss as of 1.9.0: no correction of the KL penalty by default, and a count of the generation batch that
/// is divided by the processes alone.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let asynchronous = function == ASYNC;
    for (name, why) in [
        ("use_liger_loss", "Liger's loss is the preset `liger`"),
        ("use_adaptive_entropy", "an adaptive coefficient changes from step to step"),
        ("entropy_coef", "Axolotl does not hand it to TRL"),
    ] {
        reader.off(name, why)?;
    }
    let loss_type = LossType::read(reader, LossType::Dapo)?;
    if asynchronous && loss_type == LossType::Vespo {
        return Err(reader.refuse("loss_type", "another than vespo, which this trainer does not have"));
    }
    let level = ratio_level(reader)?;
    let kl = trl::kl(reader, false)?;
    // The mean of LUSPO is over what its terms broadcast to, masked tokens too.
    if loss_type == LossType::Luspo && (level == RatioLevel::Token || kl.is_some()) {
        let expected =
            "another, or `importance_sampling_level=sequence` without `beta`: else masked tokens have a loss there";
        return Err(reader.refuse("loss_type", expected));
    }
    let clip = ClipNames { low: ("epsilon", 0.2), high: ("epsilon_high", None) };
    let count = |name| Ok::<_, PresetError>(reader.count_or_null(name)?.map_or(1.0, |count| count as f64));
    let (accumulation, processes) = (count("gradient_accumulation_steps")?, count("num_processes")?);
    let max_completion_length = reader.count_or_null("max_completion_length")?;
    if loss_type == LossType::DrGrpo && max_completion_length.is_none() {
        return Err(reader.refuse("max_completion_length", "a whole number: Axolotl has no default"));
    }
    // A loss that counts items is divided by a process's part of them, every other one by the accumulation steps.
    let (items, scale) = match given.num_items_in_batch {
        Some(items) if loss_type.counts_items() => (Some(items.max(1.0) / processes), 1.0),
        None if loss_type.counts_items() => (None, processes),
        _ => (None, 1.0 / accumulation),
    };
    let rollout = rollout(reader, given, loss_type, asynchronous)?;
    let spec = LossSpec {
        objective: loss_type.objective(reader, &clip)?,
        ratio: Ratio { level, ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Sequence),
        old_logp: given.old_logp(),
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout,
        off_policy_mask: off_policy_mask(reader, given)?,
        kl,
        reduction: loss_type.reduction(max_completion_length, items),
        scale,
        ..LossSpec::default()
    };
    let mut notes = own_means(&spec);
    notes.extend(loss_type.note(given.num_items_in_batch.is_some()));
    if spec.off_policy_mask.is_some() && given.sampling_logps {
        notes.push(
            "a token without a sampler's log-probability removes its sequence from the mask there, and adds 0 here"
                .into(),
        );
    }
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Reads the trainer's own weights if the batch has them, else those computed from both log-probabilities.
fn rollout(
    reader: &OptionReader,
    given: &BatchInputs,
    loss_type: LossType,
    asynchronous: bool,
) -> Result<Option<RolloutWeights>, PresetError> {
    const INPUT: &str = "importance_sampling_ratio";
    const MODE: &str = "vllm_importance_sampling_mode";
    let corrects = reader.flag("use_vllm", false)? && reader.flag("vllm_importance_sampling_correction", true)?;
    if !corrects || loss_type == LossType::Vespo {
        return Ok(None);
    }
    match given.rollout_weights {
        Some(WeightShape::Flat) => return Err(reader.lacks(INPUT, "[B]", "[B,T] or [B,1]")),
        Some(_) => return Ok(Some(ready_made())),
        None if !(given.sampling_logps && given.old_logps) => {
            return Err(reader.lacks(
                INPUT,
                "nothing",
                "it, or sampling and old logps to make it of, as `use_vllm` is on",
            ));
        }
        None => {}
    }
    let cap = reader.number_or_null("vllm_importance_sampling_cap", None)?.unwrap_or(3.0);
    if !asynchronous {
        return Ok(Some(RolloutWeights { max: Some(cap), ..weights_of_mode(reader, &MODES)? }));
    }
    // The other trainer has another default, and a floor of the reciprocal of the cap.
    let (level, outside) = reader.word(MODE, (RolloutLevel::Token, OutOfBounds::Truncate), &MODES)?;
    if outside == OutOfBounds::Mask {
        let expected = "token_truncate or sequence_truncate: a masked weight is raised to 1/cap there";
        return Err(reader.refuse(MODE, expected));
    }
    let (min, max) = (Some(1.0 / cap), Some(cap));
    Ok(Some(RolloutWeights { level, outside, min, max, ..super::weights_from(crate::spec::RolloutSource::Logp) }))
}
