//! OpenRLHF 0.11.2: `models/loss.py`, `PolicyLoss`, with the KL and entropy terms of `trainer/ray/ppo_actor.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, weights_from};
use crate::spec::{
    AdvantageLevel, Averaging, Kl, KlEstimator, KlGradient, LossSpec, LossTerms, Objective, OldLogp, OutOfBounds,
    PpoClip, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource,
    RolloutWeights, Rows,
};

pub(super) const FUNCTIONS: &[&str] = &["PolicyLoss"];

const KNOWN: &str = "
    batch_num_tokens clip_eps_high clip_eps_low dp_size dual_clip entropy_coef global_batch_size
    is_correction_gating is_correction_level is_correction_mode is_correction_threshold_high
    is_correction_threshold_low kl.estimator kl.init_coef kl.unbiased_gradient kl.use_loss policy_loss_type
    temperature token_level_loss
";

pub(super) fn resolve(reader: &OptionReader, _: &'static str, given: &BatchInputs) -> Result<ProjectLoss, PresetError> {
    // The two switches that the rest depends on: the loss, and the correction for the sampler.
    let gspo = reader.word("policy_loss_type", false, &[("ppo", false), ("gspo", true)])?;
    let levels =
        [("off", None), ("token", Some(RolloutLevel::Token)), ("seq", Some(RolloutLevel::TokenGatedByGeometric))];
    let level = reader.word("is_correction_level", None, &levels)?;
    if level.is_some() && !given.sampling_logps {
        return Err(reader.lacks("rollout_log_probs", "nothing", "it, as `is_correction_level` is on"));
    }
    // GSPO takes the geometric mean of the sequence without a clamp.
    let ratio = if gspo {
        Ratio { level: RatioLevel::Sequence, ..Ratio::default() }
    } else {
        Ratio { clamp: Some(20.0), ..Ratio::default() }
    };
    let clip = PpoClip {
        epsilon_low: reader.number("clip_eps_low", 0.2)?,
        epsilon_high: reader.number("clip_eps_high", 0.2)?,
        delta: None,
        dual_clip: reader.number_or_null("dual_clip", None)?,
    };
    // GSPO is a mean over rows, whatever `token_level_loss` says; the KL and entropy terms never are.
    let by_token = !gspo && reader.flag("token_level_loss", true)?;
    let token_mean = averaging(reader, true)?;
    let own = averaging(reader, by_token)?;
    let kl = kl(reader)?.map(|kl| Kl { averaging: (own != token_mean).then_some(token_mean), ..kl });
    let entropy_coef = reader.number_or_null("entropy_coef", None)?.unwrap_or(0.0);
    // GSPO uses the sampler as the old policy instead of weights.
    let (rollout, rejection) = match level.filter(|_| !gspo) {
        Some(level) => correction(reader, level)?,
        None => (None, Vec::new()),
    };
    let spec = LossSpec {
        objective: Objective::PpoClip(clip),
        ratio,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: if gspo && level.is_some() { OldLogp::Rollout } else { OldLogp::Given },
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout,
        rejection,
        kl,
        entropy_coef,
        entropy_averaging: (entropy_coef != 0.0).then_some(token_mean),
        reduction: own.reduction,
        denominator_epsilon: own.denominator_epsilon,
        ..LossSpec::default()
    };
    Ok(ProjectLoss::new(spec, KNOWN))
}

/// Reads `aggregate_loss`: per token, or per sequence with 1e-8 added to its count.
fn averaging(reader: &OptionReader, by_token: bool) -> Result<Averaging, PresetError> {
    let dp_size = reader.number("dp_size", 1.0)?;
    let count = |name| Ok(reader.number_or_null(name, None)?.map(|count| count / dp_size));
    Ok(if by_token {
        let reduction = count("batch_num_tokens")?.map_or(Reduction::TokenMean, Reduction::Normalizer);
        Averaging { reduction, denominator_epsilon: 0.0 }
    } else {
        let rows = count("global_batch_size")?.map_or(Rows::NonEmpty, Rows::Given);
        Averaging { reduction: Reduction::SequenceMean { rows }, denominator_epsilon: 1e-8 }
    })
}

/// Reads the correction: tokens or sequences outside the band lose their weight, and those inside keep
/// `exp(old_logp − rollout_logp)`. The band is of the ratio, for a sequence its geometric mean, or of a divergence, for a
/// sequence its mean.
fn correction(
    reader: &OptionReader,
    level: RolloutLevel,
) -> Result<(Option<RolloutWeights>, Vec<Rejection>), PresetError> {
    const LOW: &str = "is_correction_threshold_low";
    // The band is of the ratio, or of a divergence.
    let gates = [
        ("ratio", None),
        ("binary_kl", Some(RejectionEstimator::BinaryKl)),
        ("tv", Some(RejectionEstimator::TotalVariation)),
    ];
    let gate = reader.word("is_correction_gating", None, &gates)?;
    let modes = [("mask", OutOfBounds::Mask), ("clip", OutOfBounds::Truncate)];
    let outside = reader.word("is_correction_mode", OutOfBounds::Mask, &modes)?;
    if outside == OutOfBounds::Truncate && (level != RolloutLevel::Token || gate.is_some()) {
        let expected = "mask with `is_correction_level` seq, and with another `is_correction_gating` than ratio";
        return Err(reader.refuse("is_correction_mode", expected));
    }
    let (low, high) = (reader.number(LOW, 0.5)?, reader.number("is_correction_threshold_high", 5.0)?);
    // A band of the ratio is one of the weight itself.
    let plain = weights_from(RolloutSource::Logp);
    let Some(estimator) = gate else {
        return Ok((Some(RolloutWeights { level, outside, min: Some(low), max: Some(high), ..plain }), Vec::new()));
    };
    if low > 0.0 {
        return Err(reader.refuse(LOW, "0 with a divergence, which is bounded from above only"));
    }
    // A band of a divergence is a rejection, which leaves the weight as it is.
    let by_row = level == RolloutLevel::TokenGatedByGeometric;
    let gate = Rejection {
        estimator,
        level: if by_row { RejectionLevel::SequenceMean } else { RejectionLevel::Token },
        min: None,
        max: high,
        counts: true,
        drops_from: LossTerms::Policy,
    };
    Ok((Some(plain), vec![gate]))
}

/// Reads the KL penalty, of which every estimate is clamped to ±10.
fn kl(reader: &OptionReader) -> Result<Option<Kl>, PresetError> {
    let used = reader.flag("kl.use_loss", false)?;
    let beta = reader.number("kl.init_coef", 0.01)?;
    if !used || beta <= 0.0 {
        return Ok(None);
    }
    let unbiased = reader.flag("kl.unbiased_gradient", false)?;
    let gradient = if unbiased { KlGradient::K2Weighted(10.0) } else { KlGradient::Own };
    let kinds = [("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3)];
    let estimator = reader.word("kl.estimator", KlEstimator::K1, &kinds)?;
    Ok(Some(Kl { value_clamp: Some(10.0), gradient, ..Kl::plain(beta, estimator) }))
}
