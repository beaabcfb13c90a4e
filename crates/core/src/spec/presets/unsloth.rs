//! Unsloth Zoo 2026.10.9: `rl_replacements.py`, `grpo_compute_loss`.

use super::loss_type::{
    ClipNames, LossType, MODES, fold_weights, off_policy_mask, own_means, ratio_level, weights_of_mode,
};
use super::options::OptionReader;
use super::verl::{RejectionTextError, rejections};
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{
    AdvantageLevel, DroppedTerm, KeptSupport, Kl, KlEstimator, KlImportance, LogitsTransform, LossSpec, LossTerms,
    OldLogp, OutOfBounds, Ratio, Reduction, Rejection, RolloutLevel, RolloutWeights, Support, TokenWeights, TopEntropy,
};

pub(super) const FUNCTIONS: &[&str] = &["grpo_compute_loss"];

const KNOWN: &str = "
    beta current_gradient_accumulation_steps delta entropy_coef epsilon_high epsilon_low importance_sampling_level
    logit_scale_divide logit_scale_multiply logit_softcapping loss_type max_completion_length num_processes
    off_policy_mask_threshold rollout_logps_as_old rollout_rs rollout_rs_threshold sapo_temperature_neg
    sapo_temperature_pos steps_per_generation support_excluded_ids support_min_p support_top_k support_top_p
    temperature top_entropy_quantile use_adaptive_entropy use_bias_correction_kl use_vllm vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
";

const GEOMETRIC_MODES: [(&str, (RolloutLevel, OutOfBounds)); 2] = [
    ("geometric_truncate", (RolloutLevel::Geometric, OutOfBounds::Truncate)),
    ("geometric_mask", (RolloutLevel::Geometric, OutOfBounds::Mask)),
];

/// Resolves TRL's losses with the KL difference clamped to ±20 and its value to ±10 after the bias correction, weights
/// of a geometric mean, and verl's rejections, whose tokens still count in the denominators.
pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    let loss_type = LossType::read(reader, LossType::Grpo)?;
    let clip = ClipNames { low: ("epsilon_low", 0.2), high: ("epsilon_high", Some(0.2)) };
    // The sampler's log-probabilities may replace the old ones, which excludes rejections between the two.
    let as_old = reader.flag("rollout_logps_as_old", false)?;
    if as_old && !given.sampling_logps {
        return Err(reader.lacks("sampling_per_token_logps", "nothing", "it, as `rollout_logps_as_old` is on"));
    }
    if as_old && reader.is_given("rollout_rs") {
        return Err(
            reader.refuse("rollout_rs", "null with `rollout_logps_as_old`: it would reject by the current policy")
        );
    }
    // A loss over the items of a generation batch is not divided by the accumulation steps; every other loss is.
    let count = |name| Ok(reader.count_or_null(name)?.map(|steps| steps as f64));
    let accumulation = count("current_gradient_accumulation_steps")?.unwrap_or(1.0);
    let window = count("steps_per_generation")?.map_or(1.0, |generation| accumulation / generation);
    let items_factor = window / count("num_processes")?.unwrap_or(1.0);
    let (items, scale) = match given.num_items_in_batch {
        Some(items) if loss_type.counts_items() => (Some(items.max(1.0) * items_factor), 1.0),
        None if loss_type.counts_items() => (None, 1.0 / items_factor),
        _ => (None, 1.0 / accumulation),
    };
    // Dr. GRPO divides by a fixed length, 8192 unless it is given.
    let max_completion_length = match loss_type {
        LossType::DrGrpo if reader.is_given("max_completion_length") => {
            reader.count_or_null("max_completion_length")?
        }
        _ => Some(8192),
    };
    // An adaptive coefficient is not implemented there and turns the bonus off.
    let adaptive = reader.flag("use_adaptive_entropy", false)?;
    let bonus = if adaptive { 0.0 } else { reader.number("entropy_coef", 0.0)? };
    // The entropy mask, as in TRL: a fraction of 1 leaves it out.
    let fraction = reader.number("top_entropy_quantile", 1.0)?;
    let top = TopEntropy { fraction, drops: DroppedTerm::PolicyTerm, precision: given.quantile_precision() };
    let mut spec = LossSpec {
        objective: loss_type.objective(reader, &clip)?,
        ratio: Ratio { level: ratio_level(reader)?, clamp: as_old.then_some(20.0), ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Sequence),
        old_logp: if as_old { OldLogp::Rollout } else { given.old_logp() },
        logits: LogitsTransform {
            scale: scale_of_logits(reader)?,
            softcap: positive(reader, "logit_softcapping")?,
            bias: false,
        },
        support: support(reader, given)?,
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout: if as_old { None } else { rollout(reader, given)? },
        off_policy_mask: off_policy_mask(reader, given)?,
        top_entropy: (fraction < 1.0).then_some(top),
        kl: kl(reader)?,
        // The bonus is divided by the accumulation steps whatever the loss is divided by.
        entropy_coef: bonus / (accumulation * scale),
        reduction: loss_type.reduction(max_completion_length, items),
        scale,
        ..LossSpec::default()
    };
    if given.token_weights {
        // `sample_weight` replaces the reduction: a sequence of weight 0 leaves the loss.
        spec.token_weights = Some(TokenWeights { applies_to: LossTerms::PolicyAndKl });
        spec.reduction = Reduction::Normalizer(items_factor);
        (spec.entropy_coef, spec.scale) = (bonus / accumulation, 1.0);
    }
    // Rejections are only made where weights are; two combinations with other terms are not reproduced.
    spec.rejection = if spec.rollout.is_some() { rejection(reader)? } else { Vec::new() };
    if loss_type == LossType::Vespo && !spec.rejection.is_empty() {
        return Err(
            reader.refuse("rollout_rs", "null for vespo: a rejected token would count in the row's weight as 1e-8")
        );
    }
    if bonus != 0.0 && !spec.rejection.is_empty() {
        return Err(reader.refuse(
            "rollout_rs",
            "null with `entropy_coef`: a rejected token would leave the entropy bonus, and its normaliser would keep it",
        ));
    }
    // VESPO reads given weights of masked tokens too.
    fold_weights(&mut spec);
    let mut notes = own_means(&spec);
    notes.extend(loss_type.note(given.num_items_in_batch.is_some()).filter(|_| !given.token_weights));
    if as_old {
        notes.push(
            "a token that the sampler did not score has the ratio 1 there: here a NaN among them is an error".into(),
        );
    }
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Reads the vocabulary entries that vLLM never samples, and the options of its sampler; a sampled id is put back for its own token.
///
/// The sets of top-k, top-p and min-p are those of the batch: the project makes them again from the logits.
fn support(reader: &OptionReader, given: &BatchInputs) -> Result<Support, PresetError> {
    const WHY: &str =
        "a support that is made again from the logits is not reproduced: hand over each token's `kept_ids`";
    if given.kept_ids {
        reader.number_or_null("support_top_k", None)?;
        reader.number_or_null("support_min_p", None)?;
        reader.number("support_top_p", 1.0)?;
    } else {
        reader.off("support_top_k", WHY)?;
        reader.off("support_min_p", WHY)?;
        if reader.number("support_top_p", 1.0)? != 1.0 {
            return Err(reader.refuse("support_top_p", format!("1: {WHY}")));
        }
    }
    let excluded_ids = reader.ids("support_excluded_ids")?;
    let keep_sampled = given.kept_ids || !excluded_ids.is_empty();
    Ok(Support { excluded_ids, keep_sampled, kept: given.kept_ids.then(KeptSupport::default), ..Support::default() })
}

/// Reads a number that 0 turns off.
fn positive(reader: &OptionReader, name: &'static str) -> Result<Option<f64>, PresetError> {
    Ok(reader.number_or_null(name, None)?.filter(|x| *x != 0.0))
}

fn scale_of_logits(reader: &OptionReader) -> Result<f64, PresetError> {
    let times = positive(reader, "logit_scale_multiply")?.unwrap_or(1.0);
    Ok(times / positive(reader, "logit_scale_divide")?.unwrap_or(1.0))
}

fn kl(reader: &OptionReader) -> Result<Option<Kl>, PresetError> {
    let beta = reader.number("beta", 0.0)?;
    if beta == 0.0 {
        return Ok(None);
    }
    let corrected = reader.flag("use_bias_correction_kl", false)?;
    Ok(Some(Kl {
        importance: if corrected { KlImportance::Ratio } else { KlImportance::One },
        difference_clamp: Some(20.0),
        value_clamp: Some(10.0),
        clamp_after_importance: true,
        ..Kl::plain(beta, KlEstimator::K3)
    }))
}

/// Reads the weights, computed from both log-probabilities if the batch has them and vLLM's correction is on.
fn rollout(reader: &OptionReader, given: &BatchInputs) -> Result<Option<RolloutWeights>, PresetError> {
    // Both switches have to be on, and both log-probabilities there.
    let corrects = reader.flag("use_vllm", false)? && reader.flag("vllm_importance_sampling_correction", false)?;
    if given.rollout_weights.is_some() {
        let expected = "nothing: it is made of the sampling logps";
        return Err(reader.lacks("importance_sampling_ratio", "an array", expected));
    }
    if !corrects || !given.sampling_logps {
        return Ok(None);
    }
    if !given.old_logps {
        return Err(reader.lacks("old_logps", "nothing", "it, as vLLM's correction is on"));
    }
    let modes: Vec<_> = MODES.into_iter().chain(GEOMETRIC_MODES).collect();
    weights_of_mode(reader, &modes).map(Some)
}

fn rejection(reader: &OptionReader) -> Result<Vec<Rejection>, PresetError> {
    let Some(modes) = reader.text("rollout_rs")? else { return Ok(Vec::new()) };
    let thresholds = reader.text("rollout_rs_threshold")?;
    // verl's syntax, with rejected tokens that still count.
    let found = rejections(&modes, thresholds.as_deref()).map_err(|wrong| match wrong {
        RejectionTextError::Mode => reader.refuse("rollout_rs", "verl's statistics, such as token_k3 or seq_mean_k1"),
        RejectionTextError::Threshold => {
            reader.refuse("rollout_rs_threshold", "a threshold > 0, or one for each of `rollout_rs`")
        }
    })?;
    Ok(found.into_iter().map(|rejection| Rejection { counts: true, ..rejection }).collect())
}
