//! TRL 1.16.0: `_compute_loss` of `GRPOTrainer` in `trainer/grpo_trainer.py` and of `GMPOTrainer` in `experimental/gmpo`;
//! `compute_loss` of `AsyncGRPOTrainer` in `experimental/async_grpo`, `_compute_loss` of `RLOOTrainer` in `trainer/rloo_trainer.py`.

use super::loss_type::{
    ClipNames, LossType, MODES, fold_weights, off_policy_mask, own_means, ratio_level, weights_of_mode,
};
use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, WeightShape, ready_made};
use crate::spec::{
    AdvantageLevel, DroppedTerm, ImportanceSampling, Kl, KlEstimator, KlImportance, LogClip, LogitsTransform, LossSpec,
    Objective, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, RolloutLevel, RolloutWeights, Rows, TopEntropy,
};

pub(super) const FUNCTIONS: &[&str] = &["GRPOTrainer", "GMPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer"];

/// The options of `GRPOConfig`, and those by which a recorded run describes the model's head. Options about the making
/// of a batch have no effect on its loss.
const KNOWN: &str = "
    beta cast_lm_head_to_fp32 delta disable_dropout ds3_gather_for_generation entropy_coef entropy_coef_delta
    entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high fused_lm_head.chunk_size
    fused_lm_head.final_logit_softcapping fused_lm_head.logit_scale generation_batch_size
    gradient_accumulation_steps importance_sampling_level learning_rate loss_type mask_truncated_completions
    max_completion_length min_p mode multi_objective_aggregation num_generations num_generations_eval num_iterations
    num_processes off_policy_mask_threshold per_device_train_batch_size ref_model_mixup_alpha ref_model_sync_steps
    repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos scale_rewards
    shuffle_dataset steps_per_generation sync_ref_model temperature top_entropy_quantile top_k top_p
    use_adaptive_entropy use_bias_correction_kl use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_mode
";

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    reader.off("router_aux_loss_coef", "the loss of a router is the model's, not the batch's")?;
    reader.off("generation_batch_size", "say `steps_per_generation`")?;
    match function {
        "GMPOTrainer" => gmpo(reader, given),
        "AsyncGRPOTrainer" => asynchronous(reader, given),
        "RLOOTrainer" => rloo(reader, given),
        _ => grpo(reader, given),
    }
}

fn grpo(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    reader.off("use_adaptive_entropy", "an adaptive coefficient changes from step to step")?;
    let loss_type = LossType::read(reader, LossType::Dapo)?;
    let clip = ClipNames { low: ("epsilon", 0.2), high: ("epsilon_high", None) };
    let steps = Steps::read(reader)?;
    // Only Dr. GRPO divides by a fixed length; the default of the option is 512.
    let max_completion_length = match loss_type {
        LossType::DrGrpo if reader.is_given("max_completion_length") => {
            reader.count_or_null("max_completion_length")?
        }
        _ => Some(512),
    };
    // A loss that counts items is divided by the items of the batch that was generated: `items_factor` turns their
    // number into that of one accumulation window of one process. Every other loss is divided by the number of
    // accumulation steps.
    let (items, scale) = match given.num_items_in_batch {
        Some(items) if loss_type.counts_items() => (Some(items.max(1.0) * steps.items_factor()), 1.0),
        None if loss_type.counts_items() => (None, 1.0 / steps.items_factor()),
        _ => (None, steps.per_step()),
    };
    let bonus = reader.number("entropy_coef", 0.0)?;
    let mut spec = LossSpec {
        objective: loss_type.objective(reader, &clip)?,
        ratio: Ratio { level: ratio_level(reader)?, ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Sequence),
        old_logp: given.old_logp(),
        logits: logits_transform(reader)?,
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout: rollout(reader, given, loss_type)?,
        off_policy_mask: off_policy_mask(reader, given)?,
        top_entropy: top_entropy(reader, given, DroppedTerm::PolicyTerm)?,
        kl: kl(reader, true)?,
        // The bonus is divided by the accumulation steps whatever the loss is divided by.
        entropy_coef: bonus * (steps.per_step() / scale),
        reduction: loss_type.reduction(max_completion_length, items),
        scale,
        ..LossSpec::default()
    };
    fold_weights(&mut spec);
    let mut notes = own_means(&spec);
    notes.extend(corrected_by_default(reader, &spec));
    notes.extend(loss_type.note(given.num_items_in_batch.is_some()));
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Resolves GMPO: PPO's clip in log space, the geometric mean of a sequence's ratios, and the mean over all sequences. It reads
/// the clip, the KL penalty and the entropy mask of `GRPOConfig`; a sequence without a token counts with `−A`.
fn gmpo(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    if given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]"));
    }
    // GMPO clips log-ratios, so its widths are nats and not distances from 1.
    let (low, high) = ClipNames { low: ("epsilon", 0.4), high: ("epsilon_high", None) }.read(reader)?;
    let beta = reader.number("beta", 0.0)?;
    let spec = LossSpec {
        objective: Objective::ImportanceSampling(ImportanceSampling { empty_rows: true }),
        // The clip is applied to each token's log-ratio, before their mean.
        ratio: Ratio { level: RatioLevel::Sequence, clip: Some(LogClip { low, high }), ..Ratio::default() },
        old_logp: given.old_logp(),
        logits: logits_transform(reader)?,
        temperature: reader.number("temperature", 1.0)?.into(),
        top_entropy: top_entropy(reader, given, DroppedTerm::Ratio)?,
        kl: (beta != 0.0).then(|| Kl::plain(beta, KlEstimator::K3)),
        reduction: Reduction::SequenceMean { rows: Rows::All },
        // The trainer divides by the accumulation steps after the reduction.
        scale: Steps::read(reader)?.per_step(),
        ..LossSpec::default()
    };
    Ok(ProjectLoss::new(spec, KNOWN))
}

/// The options of `AsyncGRPOConfig` that the loss reads, or that are about the making of a batch.
const KNOWN_OF_ASYNC: &str = "
    epsilon epsilon_high gradient_accumulation_steps learning_rate max_completion_length max_staleness min_p
    num_generations num_processes per_device_train_batch_size repetition_penalty temperature token_budget top_k
    top_p
";

/// Resolves PPO's clip against the sampler, over the tokens of all ranks, divided by the accumulation steps.
fn asynchronous(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    if !given.sampling_logps {
        return Err(reader.lacks("old_log_probs", "no sampling logps", "them: the old policy is the sampler's"));
    }
    let (epsilon_low, epsilon_high) = ClipNames { low: ("epsilon", 0.2), high: ("epsilon_high", None) }.read(reader)?;
    let steps = Steps::read(reader)?;
    // The count is of all ranks, whose gradients are averaged afterwards: one rank divides by its part.
    let items = given.num_items_in_batch.map(|items| (items / steps.processes).max(1.0));
    let spec = LossSpec {
        objective: Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() }),
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: OldLogp::Rollout,
        temperature: reader.number("temperature", 1.0)?.into(),
        reduction: items.map_or(Reduction::TokenMean, Reduction::Normalizer),
        scale: 1.0 / steps.accumulation,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN_OF_ASYNC);
    found.notes.push("a count of tokens is of one row of each rank: micro-batches do not add up to their batch".into());
    Ok(found)
}

/// The options of `RLOOConfig` that the loss reads, or that are about the making of a batch or its advantages: `beta`
/// is of a KL in the reward.
const KNOWN_OF_RLOO: &str = "
    beta disable_dropout epsilon epsilon_high generation_batch_size gradient_accumulation_steps learning_rate
    mask_truncated_completions max_completion_length min_p normalize_advantages num_generations num_generations_eval
    num_iterations per_device_train_batch_size ref_model_mixup_alpha ref_model_sync_steps repetition_penalty
    reward_clip_range reward_weights router_aux_loss_coef shuffle_dataset steps_per_generation sync_ref_model
    temperature top_k top_p use_vllm vllm_mode
";

/// Resolves RLOO: PPO's clip of the product of a sequence's ratios, and the mean over all sequences. The division by
/// the accumulation steps is outside.
fn rloo(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    if given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]"));
    }
    if !given.old_logps {
        return Err(reader.lacks("old_logps", "nothing", "them: the trainer has them always"));
    }
    let (epsilon_low, epsilon_high) = ClipNames { low: ("epsilon", 0.2), high: ("epsilon_high", None) }.read(reader)?;
    let spec = LossSpec {
        objective: Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() }),
        ratio: Ratio { level: RatioLevel::SequenceProduct, ..Ratio::default() },
        temperature: reader.number("temperature", 1.0)?.into(),
        // All tokens of a sequence have the same loss, so that their mean is that loss.
        reduction: Reduction::SequenceMean { rows: Rows::All },
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN_OF_RLOO);
    let empty = "a row without a token counts with −A/B in RLOOTrainer's loss, without a gradient, and with 0 here";
    found.notes.push(empty.into());
    Ok(found)
}

/// The division of a loss over accumulation steps, which evaluation does not have.
struct Steps {
    train: bool,
    accumulation: f64,
    generation: f64,
    processes: f64,
}

impl Steps {
    fn read(reader: &OptionReader) -> Result<Self, PresetError> {
        // Every count is 1 by default, except that a generation batch is one accumulation window.
        let count = |name| Ok(reader.count_or_null(name)?.map(|steps| steps as f64));
        let accumulation = count("gradient_accumulation_steps")?.unwrap_or(1.0);
        Ok(Self {
            train: reader.word("mode", true, &[("train", true), ("eval", false)])?,
            accumulation,
            generation: count("steps_per_generation")?.unwrap_or(accumulation),
            processes: count("num_processes")?.unwrap_or(1.0),
        })
    }

    fn per_step(&self) -> f64 {
        if self.train { 1.0 / self.accumulation } else { 1.0 }
    }

    /// Returns the factor from the tokens of a generation batch to those of one accumulation window of one process.
    fn items_factor(&self) -> f64 {
        let window = if self.train { self.accumulation / self.generation } else { 1.0 };
        window / self.processes
    }
}

/// Reads the transform of the streamed LM head's logits: `logit_scale`, then the soft cap.
fn logits_transform(reader: &OptionReader) -> Result<LogitsTransform, PresetError> {
    Ok(LogitsTransform {
        scale: reader.number_or_null("fused_lm_head.logit_scale", None)?.unwrap_or(1.0),
        softcap: reader.number_or_null("fused_lm_head.final_logit_softcapping", None)?,
        bias: false,
    })
}

fn top_entropy(
    reader: &OptionReader,
    given: &BatchInputs,
    drops: DroppedTerm,
) -> Result<Option<TopEntropy>, PresetError> {
    let fraction = reader.number("top_entropy_quantile", 1.0)?;
    let top = TopEntropy { fraction, drops, precision: given.quantile_precision() };
    Ok((fraction < 1.0).then_some(top))
}

/// Returns a note if the KL penalty is multiplied by the ratio and no option asks for it: 1.10.0 changed the default, and code written
/// for an older release computes another loss.
fn corrected_by_default(reader: &OptionReader, spec: &LossSpec) -> Option<String> {
    let corrected = spec.kl.as_ref().is_some_and(|kl| kl.importance == KlImportance::Ratio);
    (corrected && !reader.is_given("use_bias_correction_kl")).then(|| {
        "the KL penalty is multiplied by the ratio, which is TRL's default since 1.10.0; \
         before, it was not: use_bias_correction_kl=false"
            .into()
    })
}

/// Reads the KL term, which the ratio multiplies if that is asked for, or `corrects` by default.
pub(super) fn kl(reader: &OptionReader, corrects: bool) -> Result<Option<Kl>, PresetError> {
    let beta = reader.number("beta", 0.0)?;
    // TRL does not even compute the reference's log-probabilities then.
    if beta == 0.0 {
        return Ok(None);
    }
    let corrected = reader.flag("use_bias_correction_kl", corrects)?;
    let importance = if corrected { KlImportance::Ratio } else { KlImportance::One };
    Ok(Some(Kl { importance, ..Kl::plain(beta, KlEstimator::K3) }))
}

/// Reads the trainer's own weights if the batch has them, else those computed from both log-probabilities. VESPO reads
/// the array whether vLLM is used or not.
fn rollout(
    reader: &OptionReader,
    given: &BatchInputs,
    loss_type: LossType,
) -> Result<Option<RolloutWeights>, PresetError> {
    const INPUT: &str = "importance_sampling_ratio";
    // Weights exist only with vLLM and its correction; VESPO multiplies by whatever array the batch has.
    let corrects = reader.flag("use_vllm", false)? && reader.flag("vllm_importance_sampling_correction", true)?;
    if !corrects && loss_type != LossType::Vespo {
        return Ok(None);
    }
    match given.rollout_weights {
        Some(WeightShape::Flat) => Err(reader.lacks(INPUT, "[B]", "[B,T] or [B,1]")),
        Some(_) => Ok(Some(ready_made())),
        None if !corrects => Ok(None),
        None if !(given.sampling_logps && given.old_logps) => {
            Err(reader.lacks(INPUT, "nothing", "it, or sampling and old logps to make it of, as `use_vllm` is on"))
        }
        None => {
            let mut weights = weights_of_mode(reader, &MODES)?;
            if let Some(cap) = reader.number_or_null("vllm_importance_sampling_cap", None)? {
                weights.max = Some(cap);
            }
            if loss_type == LossType::Vespo && weights.level != RolloutLevel::Token {
                return Err(reader.refuse("vllm_importance_sampling_mode", "token_truncate or token_mask for VESPO"));
            }
            Ok(Some(weights))
        }
    }
}
