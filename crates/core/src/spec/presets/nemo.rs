//! NeMo RL: `nemo_rl/algorithms/loss/loss_functions.py`, `ClippedPGLossFn`, with `calculate_kl` and `masked_mean` of
//! `nemo_rl/algorithms/utils.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, weights_from};
use crate::spec::{
    AdvantageLevel, Cispo, KeptSupport, Kl, KlEstimator, KlImportance, LossSpec, LossTerms, Objective, OldLogp,
    OutOfBounds, PpoClip, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, Rows, SoftmaxRange, UnscoredWeight,
};

pub(super) const FUNCTIONS: &[&str] = &["ClippedPGLossFn"];

const KNOWN: &str = "
    disable_ppo_ratio force_on_policy_ratio global_valid_seqs global_valid_toks kl_input_clamp_value
    kl_output_clamp_value ratio_clip_c ratio_clip_max ratio_clip_min reference_policy_kl_penalty
    reference_policy_kl_type seq_logprob_error_threshold sequence_level_importance_ratios temperature
    token_level_loss truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min
    truncated_importance_sampling_type use_cispo use_importance_sampling_correction use_kl_in_reward
    use_on_policy_kl_approximation
";

/// The number that `masked_mean` adds to its denominators.
const EPSILON: f64 = 1e-8;

pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    reader.off("positive_example_nll_weight", "it needs rewards")?;
    let token_level = reader.flag("token_level_loss", true)?;
    let by_sequence = reader.flag("sequence_level_importance_ratios", false)?;
    // A ratio of the sequence needs a mean over sequences.
    if by_sequence && token_level {
        return Err(reader.refuse("token_level_loss", "false with `sequence_level_importance_ratios`"));
    }
    // On-policy the ratio is 1 with its gradient, whatever the level.
    let on_policy = reader.flag("force_on_policy_ratio", false)?;
    let level = if by_sequence && !on_policy { RatioLevel::Sequence } else { RatioLevel::Token };
    let mut spec = LossSpec {
        objective: objective(reader, token_level, by_sequence, on_policy)?,
        ratio: Ratio { level, denominator_epsilon: EPSILON, ..Ratio::default() },
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: if on_policy { OldLogp::Current } else { OldLogp::Given },
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout: rollout(reader, given, by_sequence, on_policy)?,
        rejection: rejection(reader, given, on_policy)?,
        kl: kl(reader, given)?,
        ..LossSpec::default()
    };
    // Counts of the global batch replace the batch's own; `masked_mean` adds its epsilon to both.
    let tokens = reader.number_or_null("global_valid_toks", given.num_items_in_batch)?;
    let rows = reader.number_or_null("global_valid_seqs", None)?;
    spec.denominator_epsilon = EPSILON;
    spec.reduction = if token_level {
        tokens.map_or(Reduction::TokenMean, |tokens| Reduction::Normalizer(tokens + EPSILON))
    } else {
        Reduction::SequenceMean { rows: rows.map_or(Rows::NonEmpty, |rows| Rows::Given(rows + EPSILON)) }
    };
    // The trainer masks a token that is outside its set; its KL term takes the log-probability of the whole softmax.
    if given.kept_ids {
        spec.support.kept = Some(KeptSupport { entropy: SoftmaxRange::Set, kl: SoftmaxRange::Vocabulary });
    }
    let mut found = ProjectLoss::new(spec, KNOWN);
    if found.spec.rollout.is_some() {
        let overflow =
            "a weight beyond the range of its dtype is 0 there, before it is truncated: here it is the bound";
        found.notes.push(overflow.into());
    }
    if !token_level && rows.is_none() {
        let taken = "global_valid_seqs is not given: it is taken as the rows that have a token, without the 1e-8";
        found.notes.push(taken.into());
    }
    Ok(found)
}

fn objective(
    reader: &OptionReader,
    token_level: bool,
    by_sequence: bool,
    on_policy: bool,
) -> Result<Objective, PresetError> {
    let plain = reader.flag("disable_ppo_ratio", false)?;
    let dual_clip = reader.number_or_null("ratio_clip_c", None)?;
    let cispo = reader.flag("use_cispo", false)?;
    // CISPO is combined with none of these options.
    if cispo && (plain || on_policy || by_sequence || dual_clip.is_some() || !token_level) {
        let expected = "false with disable_ppo_ratio, force_on_policy_ratio, sequence_level_importance_ratios, \
                        ratio_clip_c or without token_level_loss";
        return Err(reader.refuse("use_cispo", expected));
    }
    // An on-policy ratio is 1 and has a gradient, so that the clipped loss below is right for it even with
    // `disable_ppo_ratio`.
    if plain && !on_policy {
        if dual_clip.is_some() {
            return Err(reader.refuse("ratio_clip_c", "null with `disable_ppo_ratio`"));
        }
        return Ok(Objective::PolicyGradient);
    }
    let epsilon_low = reader.number("ratio_clip_min", 0.2)?;
    let epsilon_high = reader.number("ratio_clip_max", 0.2)?;
    Ok(if cispo {
        Objective::Cispo(Cispo { lower: Some(1.0 - epsilon_low), upper: 1.0 + epsilon_high })
    } else {
        Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta: None, dual_clip })
    })
}

/// Reads the KL penalty, whose estimate is multiplied by `exp(ℓ − sg(ℓ))`, which has the gradient of the sampling,
/// before its value is clamped; or by `exp(ℓ − rollout_logp)` against the sampler.
fn kl(reader: &OptionReader, given: &BatchInputs) -> Result<Option<Kl>, PresetError> {
    let beta = reader.number("reference_policy_kl_penalty", 0.01)?;
    if beta == 0.0 || reader.flag("use_kl_in_reward", false)? {
        return Ok(None);
    }
    let kinds = [("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3)];
    let estimator = reader.word("reference_policy_kl_type", KlEstimator::K3, &kinds)?;
    // The importance weight makes the estimate one under the current policy, from samples of the sampler.
    let against_sampler = reader.flag("use_on_policy_kl_approximation", false)?;
    if against_sampler && !given.sampling_logps {
        let expected = "it, as `use_on_policy_kl_approximation` is on";
        return Err(reader.lacks("generation_logprobs", "nothing", expected));
    }
    Ok(Some(Kl {
        importance: if against_sampler { KlImportance::Rollout } else { KlImportance::Score },
        difference_clamp: reader.number_or_null("kl_input_clamp_value", Some(20.0))?,
        value_clamp: reader.number_or_null("kl_output_clamp_value", Some(10.0))?,
        clamp_after_importance: true,
        ..Kl::plain(beta, estimator)
    }))
}

/// Reads the trainer's own rejection: sequences whose mean `e^|y|` is above the threshold leave the sample mask.
fn rejection(reader: &OptionReader, given: &BatchInputs, on_policy: bool) -> Result<Vec<Rejection>, PresetError> {
    const NAME: &str = "seq_logprob_error_threshold";
    let Some(max) = reader.number_or_null(NAME, None)? else { return Ok(Vec::new()) };
    // On-policy the statistic would be of the current policy, which changes with every step.
    if on_policy {
        return Err(reader.refuse(NAME, "null with `force_on_policy_ratio`: it would reject by the current policy"));
    }
    if !given.sampling_logps {
        return Err(reader.lacks("generation_logprobs", "nothing", format!("it, as `{NAME}` is given")));
    }
    Ok(vec![Rejection {
        estimator: RejectionEstimator::AbsoluteRatio,
        level: RejectionLevel::SequenceMean,
        min: None,
        max,
        counts: false,
        drops_from: LossTerms::PolicyAndKl,
    }])
}

fn rollout(
    reader: &OptionReader,
    given: &BatchInputs,
    by_sequence: bool,
    on_policy: bool,
) -> Result<Option<RolloutWeights>, PresetError> {
    const TYPE: &str = "truncated_importance_sampling_type";
    const MIN: &str = "truncated_importance_sampling_ratio_min";
    const MAX: &str = "truncated_importance_sampling_ratio";
    if !reader.flag("use_importance_sampling_correction", false)? {
        reader.off(TYPE, "`use_importance_sampling_correction` is")?;
        return Ok(None);
    }
    if on_policy {
        let expected = "false with `force_on_policy_ratio`: the weights would be the current policy's";
        return Err(reader.refuse("use_importance_sampling_correction", expected));
    }
    if !given.sampling_logps {
        let expected = "it, as `use_importance_sampling_correction` is on";
        return Err(reader.lacks("generation_logprobs", "nothing", expected));
    }
    // The weights have the level of the ratio. A token that the sampler did not score weighs 0.
    let level = if by_sequence { RolloutLevel::Sequence } else { RolloutLevel::Token };
    let plain = RolloutWeights { level, unscored: UnscoredWeight::Zero, ..weights_from(RolloutSource::Logp) };
    let (min, max) = (reader.number_or_null(MIN, None)?, reader.number_or_null(MAX, None)?);
    // The weights have no bounds without a type. An upper bound would have no effect then, so that it is refused.
    if !reader.is_given(TYPE) {
        return if max.is_some() { Err(reader.refuse(TYPE, "tis, icepop or seq-mask-tis")) } else { Ok(Some(plain)) };
    }
    let kinds = [
        ("tis", (level, OutOfBounds::Truncate)),
        ("icepop", (level, OutOfBounds::Mask)),
        ("seq-mask-tis", (RolloutLevel::TokenGatedByGeometric, OutOfBounds::Mask)),
    ];
    let (level, outside) = reader.word(TYPE, kinds[0].1, &kinds)?;
    if by_sequence && level == RolloutLevel::TokenGatedByGeometric {
        return Err(reader.refuse(TYPE, "tis or icepop with `sequence_level_importance_ratios`"));
    }
    if max.is_none() {
        return Err(reader.refuse(MAX, "a number > 0"));
    }
    if outside == OutOfBounds::Mask && min.is_none() {
        return Err(reader.refuse(MIN, "a number for icepop and seq-mask-tis"));
    }
    Ok(Some(RolloutWeights { level, outside, min, max, ..plain }))
}
