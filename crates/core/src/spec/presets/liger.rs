//! Liger Kernel 0.8.5: `chunked_loss/grpo_loss.py` and `transformers/grpo_loss.py`.
//!
//! Two of its defects are not reproduced: LUSPO weights every token, masked ones included, by its row's count over the padded
//! width, and the Triton kernel has no gradient where `delta < ρ ≤ 1 + eps_high` and `A < 0`.

use super::loss_type::{ClipNames, LossType, fold_weights, ratio_level};
use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, WeightShape, ready_made};
use crate::spec::{
    AdvantageLevel, Kl, KlEstimator, KlImportance, LossSpec, Objective, PpoClip, Ratio, RatioLevel, RolloutWeights,
};

const TORCH: &str = "ppo_loss_fn";
const LINEAR: &str = "LigerFusedLinearGRPOLoss";
const TRITON: &str = "triton_grpo_loss";

pub(super) const FUNCTIONS: &[&str] = &[LINEAR, TORCH, TRITON];

const KNOWN: &str = "
    beta chunk_size compiled delta epsilon_high epsilon_low importance_sampling_level loss_type
    max_completion_length sapo_temperature_neg sapo_temperature_pos temperature use_bias_correction_kl use_ref_model
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
";

const KNOWN_OF_TRITON: &str = "
    beta delta eps_high eps_low importance_sampling_level inplace loss_type max_completion_length reduce
    sapo_temperature_neg sapo_temperature_pos temperature use_bias_correction_kl vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos
";

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    if given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]"));
    }
    // The Triton kernel has other names and defaults of options.
    let triton = function == TRITON;
    let clip = if triton {
        ClipNames { low: ("eps_low", 0.2), high: ("eps_high", Some(0.4)) }
    } else {
        ClipNames { low: ("epsilon_low", 0.2), high: ("epsilon_high", Some(0.2)) }
    };
    // Combinations of options that are refused.
    let loss_type = LossType::read(reader, LossType::Dapo)?;
    let level = ratio_level(reader)?;
    if level == RatioLevel::Sequence && matches!(loss_type, LossType::Cispo | LossType::Sapo | LossType::Vespo) {
        return Err(reader.refuse("importance_sampling_level", "token for cispo, sapo and vespo"));
    }
    if triton && !loss_type.clips() && reader.is_given("delta") {
        return Err(reader.refuse("delta", "null for cispo, sapo and vespo"));
    }
    // The PyTorch function has no default for the length of Dr. GRPO; the kernel uses the padded width.
    let max_completion_length = if loss_type == LossType::DrGrpo {
        let length = reader.count_or_null("max_completion_length")?;
        if length.is_none() && !triton {
            return Err(reader.refuse("max_completion_length", "a whole number ≥ 1 for dr_grpo"));
        }
        length
    } else {
        None
    };
    let mut found = ProjectLoss::new(LossSpec::default(), if triton { KNOWN_OF_TRITON } else { KNOWN });
    // KL first, as it may add a note.
    let kl = kl(reader, function, given, &mut found.notes)?;
    let items = given.num_items_in_batch.filter(|_| loss_type.counts_items()).map(|items| items.max(1.0));
    found.spec = LossSpec {
        objective: loss_type.objective(reader, &clip)?,
        ratio: Ratio { level, ..Ratio::default() },
        old_logp: given.old_logp(),
        temperature: reader.number("temperature", if triton { 0.9 } else { 1.0 })?.into(),
        rollout: rollout(reader, function, given)?,
        kl,
        reduction: loss_type.reduction(max_completion_length, items),
        ..LossSpec::default()
    };
    fold_weights(&mut found.spec);
    note_defects(loss_type, triton, &mut found);
    found.notes.extend(loss_type.note(items.is_some()));
    Ok(found)
}

fn kl(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
    notes: &mut Vec<String>,
) -> Result<Option<Kl>, PresetError> {
    let beta = reader.number("beta", 0.04)?;
    if beta == 0.0 {
        return Ok(None);
    }
    // Without a reference model the reference is the current policy.
    let reads_reference = function != LINEAR || reader.flag("use_ref_model", true)?;
    if function == TORCH && !given.ref_logps || !reads_reference {
        notes.push("the reference is the current policy itself: the KL term and its gradient are 0".into());
        return Ok(None);
    }
    let corrected = reader.flag("use_bias_correction_kl", false)?;
    let importance = if corrected { KlImportance::Ratio } else { KlImportance::One };
    Ok(Some(Kl { importance, ..Kl::plain(beta, KlEstimator::K3) }))
}

/// Reads `vllm_is_ratio`, used unchanged; the pure function alone does not turn `[B]` into `[B,1]`.
fn rollout(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<Option<RolloutWeights>, PresetError> {
    if function == TORCH && given.rollout_weights == Some(WeightShape::Flat) {
        return Err(reader.lacks("vllm_is_ratio", "[B]", "[B,T] or [B,1]"));
    }
    Ok(given.rollout_weights.map(|_| ready_made()))
}

fn note_defects(loss_type: LossType, triton: bool, found: &mut ProjectLoss) {
    if loss_type == LossType::Luspo {
        found
            .notes
            .push("Liger 0.8.5 weighs rows of a ragged mask otherwise (huggingface/trl#6654): not reproduced".into());
    }
    if let Objective::PpoClip(PpoClip { delta: Some(delta), epsilon_high, .. }) = &found.spec.objective
        && triton
        && *delta < 1.0 + epsilon_high
    {
        let defect = "the kernel has no gradient where delta < ratio ≤ 1 + eps_high and A < 0: not reproduced";
        found.notes.push(defect.into());
    }
}
