//! `AReaL` 1.0.4: `trainer/ppo/actor.py`, `grpo_loss_fn`, with `ppo_actor_loss_fn` and `sapo_loss_fn` of
//! `utils/functional/functional.py`, and `PPOActorConfig`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, weights_from};
use crate::spec::{
    AdvantageLevel, LossSpec, LossTerms, Objective, OldLogp, PpoClip, Ratio, RatioLevel, Rejection, RejectionEstimator,
    RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Sapo,
};

const SAPO: &str = "sapo_loss_fn";

pub(super) const FUNCTIONS: &[&str] = &["grpo_loss_fn", "ppo_actor_loss_fn", SAPO];

/// The options of `PPOActorConfig`. Those that make advantages, KL in the reward among them, have no effect on a loss
/// of given ones.
const KNOWN: &str = "
    adv_norm c_clip discount eps_clip eps_clip_higher gae_lambda importance_sampling_level kl_ctl kl_estimator
    m2_threshold mask_no_eos_with_zero max_new_tokens overlong_penalty_factor overlong_reward_penalty
    overlong_tokens ppo_n_minibatches prox_logp_method recompute_logprob rejection_sampling.action
    rejection_sampling.agg rejection_sampling.level rejection_sampling.lower rejection_sampling.metric
    rejection_sampling.upper reward_bias reward_clip reward_norm reward_scaling sapo_tau_neg sapo_tau_pos
    temperature use_decoupled_loss use_sapo_loss
";

const LEVEL: &str = "importance_sampling_level";

/// Resolves the mean over the tokens of a micro-batch, which the engine weights by their number.
///
/// In the decoupled loss `old_logp` is the proximal policy and `rollout_logp` the behaviour policy; otherwise both are the same.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    for teacher in ["distill_loss_weight", "rl_loss_weight"] {
        reader.off(teacher, "a sum with distillation is two specs")?;
    }
    let decoupled = reader.flag("use_decoupled_loss", false)?;
    let recomputed = reader.flag("recompute_logprob", false)?;
    // The decoupled loss needs the behaviour policy, and a proximal policy that does not depend on the current one.
    if decoupled && !given.sampling_logps {
        return Err(reader.lacks("logprobs", "nothing", "the sampler's, as `use_decoupled_loss` is on"));
    }
    // `metrics` computes the same as `recompute`.
    let methods = [("recompute", true), ("metrics", true), ("loglinear", false)];
    if decoupled && !reader.word("prox_logp_method", true, &methods)? {
        let expected = "recompute or metrics: loglinear makes the proximal policy of the current one";
        return Err(reader.refuse("prox_logp_method", expected));
    }
    // A ratio of the sequence is used with the mean of its advantages.
    let levels = [("token", RatioLevel::Token), ("sequence", RatioLevel::Sequence)];
    let level = reader.word(LEVEL, RatioLevel::Token, &levels)?;
    if level == RatioLevel::Sequence && given.advantages == Some(AdvantageLevel::Token) {
        return Err(reader.lacks("advantages", "[B,T]", "[B]: of a sequence's ratio they are its mean"));
    }
    let usual = if level == RatioLevel::Sequence { AdvantageLevel::Sequence } else { AdvantageLevel::Token };
    // SAPO is chosen by its function or by an option.
    let by_sapo = reader.flag("use_sapo_loss", function == SAPO)?;
    if by_sapo && decoupled {
        return Err(reader.refuse("use_decoupled_loss", "false with SAPO"));
    }
    // Corrections for the behaviour policy exist in the decoupled loss only: first the gate of a token or sequence,
    // then M2PO's over the batch.
    let (mut rollout, mut rejection) = (None, Vec::new());
    let m2 = reader.number_or_null("m2_threshold", None)?.filter(|_| decoupled);
    if decoupled && reader.any_within("rejection_sampling") {
        let (weights, gate) = correction(reader, level, m2.is_some())?;
        rollout = Some(weights);
        rejection.extend(gate);
    }
    rejection.extend(m2.map(|max| Rejection {
        estimator: RejectionEstimator::K2,
        level: RejectionLevel::SecondMoment,
        min: None,
        max,
        counts: false,
        drops_from: LossTerms::Policy,
    }));
    let spec = LossSpec {
        objective: if by_sapo { sapo(reader)? } else { clip(reader)? },
        ratio: Ratio { level, ..Ratio::default() },
        advantages: given.advantages_or(usual),
        old_logp: if given.sampling_logps && !(decoupled || recomputed) { OldLogp::Rollout } else { OldLogp::Given },
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout,
        rejection,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if m2.is_some() {
        let parts = "M2PO chooses within a micro-batch, whose mean counts the tokens left and whose weight all: parts do \
                     not add up to their batch";
        found.notes.push(parts.into());
    }
    Ok(found)
}

fn clip(reader: &OptionReader) -> Result<Objective, PresetError> {
    let epsilon_low = reader.number("eps_clip", 0.2)?;
    let epsilon_high = reader.number_or_null("eps_clip_higher", None)?.unwrap_or(epsilon_low);
    let dual_clip = reader.number_or_null("c_clip", None)?;
    Ok(Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta: None, dual_clip }))
}

fn sapo(reader: &OptionReader) -> Result<Objective, PresetError> {
    Ok(Objective::Sapo(Sapo {
        tau_positive: reader.number("sapo_tau_pos", 1.0)?,
        tau_negative: reader.number("sapo_tau_neg", 1.05)?,
    }))
}

/// Reads `rejection_sampling`: weights `exp(y)` of tokens, or with `ratio` and `sequence` their geometric mean. `mask` removes
/// the policy term of a token that is out of bounds and still counts; `clamp` bounds its weight.
fn correction(
    reader: &OptionReader,
    of_ratio: RatioLevel,
    thinned: bool,
) -> Result<(RolloutWeights, Option<Rejection>), PresetError> {
    const AGG: &str = "rejection_sampling.agg";
    const METRIC: &str = "rejection_sampling.metric";
    // The options: what is compared, over which tokens, with which bounds, and what happens outside.
    let masks = reader.word("rejection_sampling.action", true, &[("mask", true), ("clamp", false)])?;
    let whole = reader.word("rejection_sampling.level", false, &[("token", false), ("sequence", true)])?;
    let metrics = [
        ("ratio", ArealMetric::Ratio),
        ("kl_k1", ArealMetric::K1),
        ("kl_k2", ArealMetric::K2),
        ("kl_k3", ArealMetric::K3),
    ];
    let metric = reader.word(METRIC, ArealMetric::Ratio, &metrics)?;
    let agg = reader.word(AGG, Agg::Mean, &[("sum", Agg::Sum), ("mean", Agg::Mean), ("max", Agg::Max)])?;
    let upper = reader.number("rejection_sampling.upper", 5.0)?;
    let lower = reader.number_or_null("rejection_sampling.lower", None)?;
    // Statistics of a sequence would be of the tokens that another rule leaves.
    if whole && thinned {
        let expected = "token with `m2_threshold`: a sequence's statistic would be of the tokens that it leaves";
        return Err(reader.refuse("rejection_sampling.level", expected));
    }
    // The weight is the statistic itself only for the ratio; other metrics gate a plain weight.
    let geometric = whole && metric == ArealMetric::Ratio;
    let level = if geometric { RolloutLevel::Geometric } else { RolloutLevel::Token };
    let weights = RolloutWeights { level, ..weights_from(RolloutSource::Logp) };
    // `clamp` bounds the weight, which must therefore be the statistic that is compared.
    if !masks {
        if whole && !(geometric && agg == Agg::Mean) {
            let expected =
                "mean and the metric ratio with clamp: weights would be held by the bounds of something else";
            return Err(reader.refuse(AGG, expected));
        }
        return Ok((RolloutWeights { min: lower, max: Some(upper), ..weights }, None));
    }
    // `mask` turns into a rejection, in the family's sign of `k1`.
    if metric == ArealMetric::K3 {
        let expected = "ratio, kl_k1 or kl_k2 with mask: AReaL's k3 is that of the ratio upside down";
        return Err(reader.refuse(METRIC, expected));
    }
    if !whole && of_ratio == RatioLevel::Sequence {
        let expected =
            "token where `rejection_sampling` masks tokens: the sequence's ratio would be of the tokens left";
        return Err(reader.refuse(LEVEL, expected));
    }
    // The family's k1 is −y, never beyond ±20.
    let upside_down = |lower: Option<f64>, upper: f64| (Some(-upper), lower.map_or(20.0, |lower| -lower));
    let (estimator, (min, max)) = match metric {
        ArealMetric::Ratio => (RejectionEstimator::K1, upside_down(lower.map(f64::ln), upper.ln())),
        ArealMetric::K1 => (RejectionEstimator::K1, upside_down(lower, upper)),
        ArealMetric::K2 | ArealMetric::K3 => (RejectionEstimator::K2, (lower, upper)),
    };
    // Negated `k1` turns the largest into the smallest.
    let level = match agg {
        _ if !whole => RejectionLevel::Token,
        Agg::Sum => RejectionLevel::SequenceSum,
        Agg::Mean => RejectionLevel::SequenceMean,
        Agg::Max if estimator == RejectionEstimator::K1 => RejectionLevel::SequenceMin,
        Agg::Max => RejectionLevel::SequenceMax,
    };
    Ok((weights, Some(Rejection { estimator, level, min, max, counts: true, drops_from: LossTerms::Policy })))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ArealMetric {
    Ratio,
    K1,
    K2,
    K3,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Agg {
    Sum,
    Mean,
    Max,
}
