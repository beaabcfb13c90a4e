//! Tunix 0.1.7: `rl/algo_core.py`, with `rl/common.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, WeightShape, ready_made, weights_from};
use crate::spec::{
    AdvantageLevel, Averaging, Kl, KlEstimator, LossSpec, Objective, PpoClip, Ratio, RatioLevel, Reduction,
    RolloutSource, RolloutWeights, Rows,
};

pub(super) const FUNCTIONS: &[&str] = &["grpo_loss_fn", "ppo_policy_loss_fn"];

const KNOWN: &str = "
    advantage_estimator algo_variant beta clip_range_value degenerate_group_masking entropy_coef epsilon epsilon_c
    epsilon_high epsilon_low force_compute_kl gae_lambda gamma kl_clamp_value kl_coef kl_loss_mode kl_method
    loss_agg_mode loss_algo max_concurrency num_generations num_iterations off_policy_steps policy_loss_fn
    reward_manager sampler_is sampler_is_threshold system_prompt temperature use_rollout_logps value_loss_fn
";

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    // Both functions run under the same optimizer, whose accumulation is noted for both.
    let mut found = if function == "ppo_policy_loss_fn" { ppo(reader, given)? } else { grpo(reader, given)? };
    let means = "optax.MultiSteps takes the mean of micro-batches' own means: parts of a batch do not add up to it";
    found.notes.push(means.into());
    Ok(found)
}

fn grpo(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    let epsilon = reader.number("epsilon", 0.2)?;
    let clip = PpoClip {
        epsilon_low: epsilon,
        epsilon_high: reader.number_or_null("epsilon_high", None)?.unwrap_or(epsilon),
        delta: None,
        dual_clip: reader.number_or_null("epsilon_c", None)?,
    };
    // GSPO-token has the sequence's value with the token's gradient, and a cap on its logarithm.
    let ratio = if reader.word("loss_algo", false, &[("grpo", false), ("gspo-token", true)])? {
        Ratio { level: RatioLevel::SequenceToken, clamp: Some(20.0), cap: Some(10.0), ..Ratio::default() }
    } else {
        Ratio { clamp: Some(20.0), ..Ratio::default() }
    };
    // Sequences without a token do not count in any mean.
    let rows = Rows::NonEmpty;
    let modes = [
        ("token-mean", Reduction::TokenMean),
        ("sequence-mean-token-mean", Reduction::SequenceMean { rows }),
        ("sequence-mean-token-scale", Reduction::FixedLength { rows, length: None }),
        ("seq-mean-token-sum", Reduction::SequenceSum { rows }),
        ("sequence-mean-token-sum-norm", Reduction::SequenceSum { rows }),
    ];
    // Without reference log-probabilities the project drops the KL term silently.
    let mut notes = Vec::new();
    let beta = reader.number_or_null("beta", Some(0.04))?.unwrap_or(0.0);
    if beta != 0.0 && !given.ref_logps {
        notes.push("the batch has no reference logps: the KL term is left out, whatever `beta` says".into());
    }
    let estimators = [("kl", KlEstimator::K1), ("mse_kl", KlEstimator::K2), ("low_var_kl", KlEstimator::K3)];
    let kl = (beta != 0.0 && given.ref_logps)
        .then(|| {
            let estimator = reader.word("kl_loss_mode", KlEstimator::K1, &estimators)?;
            let value_clamp = reader.number_or_null("kl_clamp_value", None)?;
            Ok(Kl { value_clamp, ..Kl::plain(beta, estimator) })
        })
        .transpose()?;
    // A temperature of 0 means greedy decoding there, and divides nothing.
    let temperature = reader.number("temperature", 1.0)?;
    let spec = LossSpec {
        objective: Objective::PpoClip(clip),
        ratio,
        advantages: given.advantages_or(AdvantageLevel::Sequence),
        old_logp: given.old_logp(),
        temperature: if temperature == 0.0 { 1.0 } else { temperature }.into(),
        rollout: rollout(reader, given)?,
        kl,
        reduction: reader.word("loss_agg_mode", Reduction::SequenceMean { rows }, &modes)?,
        ..LossSpec::default()
    };
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// Reads `sampler_is_weights` of the batch, or the weights that the learner computes for `sampler_is: token`.
fn rollout(reader: &OptionReader, given: &BatchInputs) -> Result<Option<RolloutWeights>, PresetError> {
    match given.rollout_weights {
        Some(WeightShape::Flat) => Err(reader.lacks("sampler_is_weights", "[B]", "[B,T] or [B,1]")),
        Some(_) => Ok(Some(ready_made())),
        // Without the option there are no weights, even if the batch has the sampler's log-probabilities.
        None if !reader.is_given("sampler_is") => Ok(None),
        None if !given.sampling_logps => Err(reader.lacks("sampling_logps", "nothing", "it, as `sampler_is` is on")),
        None => {
            reader.word("sampler_is", (), &[("token", ())])?;
            let max = Some(reader.number("sampler_is_threshold", 2.0)?);
            Ok(Some(RolloutWeights { max, clamp: Some(20.0), ..weights_from(RolloutSource::Logp) }))
        }
    }
}

/// Resolves a loss whose three terms are token means with 1e-8 in the denominator; the temperature is not passed on.
fn ppo(reader: &OptionReader, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    if !given.old_logps {
        return Err(reader.lacks("old_logps", "nothing", "[B,T]"));
    }
    let epsilon = reader.number("epsilon", 0.2)?;
    // A width that is not set, or is 0, equals `epsilon`.
    let width = |name| Ok(reader.number_or_null(name, None)?.filter(|width| *width != 0.0).unwrap_or(epsilon));
    let clip = PpoClip {
        epsilon_low: width("epsilon_low")?,
        epsilon_high: width("epsilon_high")?,
        delta: None,
        dual_clip: reader.number_or_null("epsilon_c", None)?,
    };
    // One mean for policy, KL and entropy.
    let averaging = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 1e-8 };
    let entropy_coef = reader.number_or_null("entropy_coef", None)?.unwrap_or(0.0);
    let kl_coef = reader.number("kl_coef", 0.0)?;
    let kl = (kl_coef > 0.0 && given.ref_logps)
        .then(|| {
            let value_clamp = reader.number_or_null("kl_clamp_value", None)?;
            Ok(Kl { value_clamp, ..Kl::plain(kl_coef, KlEstimator::K1) })
        })
        .transpose()?;
    let spec = LossSpec {
        objective: Objective::PpoClip(clip),
        advantages: given.advantages_or(AdvantageLevel::Token),
        kl,
        entropy_coef,
        entropy_averaging: (entropy_coef != 0.0).then_some(averaging),
        reduction: averaging.reduction,
        denominator_epsilon: averaging.denominator_epsilon,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if kl_coef > 0.0 && !given.ref_logps {
        found.notes.push("the batch has no reference logps: the KL term is left out, whatever `kl_coef` says".into());
    }
    Ok(found)
}
