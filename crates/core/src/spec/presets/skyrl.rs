//! SkyRL 0.3.0: `skyrl_train/utils/ppo_utils.py`, `utils/off_policy_correction_utils.py` and `workers/worker.py`.
//!
//! `trainer` is the loss of one mini-batch that is one micro-batch on one worker, with `loss_reduction` folded into the
//! advantages as the trainer does it. The policy losses alone take advantages scaled in this way, and sum. SkyRL rounds
//! ratios to f32 whatever the dtype.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, weights_from};
use crate::spec::{
    AdvantageLevel, Averaging, Cispo, ClipCov, CovarianceBand, Divergence, ImportanceSampling, Kl, KlCov, KlEstimator,
    LossSpec, LossTerms, MaskedRatio, Objective, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, Rejection,
    RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo, TokenWeights,
    TopCovariance, TrustRegion,
};

const TRAINER: &str = "trainer";

pub(super) const FUNCTIONS: &[&str] = &[
    TRAINER,
    "ppo_policy_loss",
    "sapo_policy_loss",
    "gspo_policy_loss",
    "compute_policy_loss_cispo",
    "rollout_is_policy_loss",
    "dppo_policy_loss",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "importance_sampling_loss",
];

const KNOWN: &str = "
    advantage_batch_normalize advantage_estimator cispo.cispo_eps_clip_high cispo.cispo_eps_clip_low
    clip_cov.clip_cov_lb clip_cov.clip_cov_ub clip_cov.clip_ratio clip_ratio_c dppo.delta_high dppo.delta_low
    dppo.dppo_type entropy_loss_coef eps_clip_high eps_clip_low gamma grpo_norm_by_std kl_cov.kl_cov_frac
    kl_cov.ppo_kl_coef kl_estimator_type kl_loss_coef lambd loss_reduction max_seq_len
    off_policy_correction.geo_mask_high off_policy_correction.geo_mask_low
    off_policy_correction.outlier_token_is_threshold_high off_policy_correction.outlier_token_is_threshold_low
    off_policy_correction.product_mask_high off_policy_correction.product_mask_low
    off_policy_correction.sequence_mask_metric off_policy_correction.sequence_tis_ratio_clip_high
    off_policy_correction.tis_ratio_type off_policy_correction.token_mask_is_threshold_high
    off_policy_correction.token_mask_is_threshold_low off_policy_correction.token_tis_ratio_clip_high
    policy_loss_type sapo.tau_neg sapo.tau_pos temperature use_entropy_loss use_kl_loss value_clip
    zero_variance_filter
";

/// The values of `policy_loss_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SkyrlLoss {
    Regular,
    DualClip,
    Sapo,
    Gspo,
    Cispo,
    RolloutIs,
    Dppo,
    ClipCov,
    KlCov,
    ImportanceSampling,
}

const LOSSES: [(&str, SkyrlLoss); 10] = [
    ("regular", SkyrlLoss::Regular),
    ("dual_clip", SkyrlLoss::DualClip),
    ("sapo", SkyrlLoss::Sapo),
    ("gspo", SkyrlLoss::Gspo),
    ("cispo", SkyrlLoss::Cispo),
    ("rollout_is", SkyrlLoss::RolloutIs),
    ("dppo", SkyrlLoss::Dppo),
    ("clip_cov", SkyrlLoss::ClipCov),
    ("kl_cov", SkyrlLoss::KlCov),
    ("importance_sampling", SkyrlLoss::ImportanceSampling),
];

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    // Options that would change the inputs, and so cannot be a part of the loss.
    reader.off("use_tis", "say `off_policy_correction.tis_ratio_type`")?;
    reader.off("use_kl_in_reward", "it changes the advantages; give those")?;
    let loss = loss(reader, function)?;
    let (objective, ratio) = objective(reader, loss)?;
    // The covariance losses and plain importance sampling ignore the correction for the sampler.
    let corrects =
        given.sampling_logps && !matches!(loss, SkyrlLoss::ClipCov | SkyrlLoss::KlCov | SkyrlLoss::ImportanceSampling);
    // Two losses take their ratio against the sampler instead of the old policy.
    let behaviour = match loss {
        SkyrlLoss::RolloutIs if !given.sampling_logps => {
            return Err(reader.lacks("rollout_logprobs", "nothing", "it, as the loss is rollout_is"));
        }
        SkyrlLoss::RolloutIs => OldLogp::Rollout,
        SkyrlLoss::Dppo if given.sampling_logps => OldLogp::Rollout,
        _ => OldLogp::Given,
    };
    // The policy loss alone sums over tokens: its advantages contain the reduction.
    let policy = LossSpec {
        objective,
        ratio,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: behaviour,
        temperature: reader.number_or_null("temperature", None)?.unwrap_or(1.0).into(),
        rollout: if corrects { weights(reader)? } else { None },
        rejection: if corrects { rejections(reader)? } else { Vec::new() },
        reduction: Reduction::Normalizer(1.0),
        ..LossSpec::default()
    };
    // The trainer adds KL and entropy, and takes the reduction out of the advantages again.
    let spec = if function == TRAINER { trainer(reader, loss, policy)? } else { policy };
    let mut found = ProjectLoss::new(spec, KNOWN);
    if found.spec.kl.is_some() || found.spec.entropy_coef != 0.0 {
        let means = "the KL and entropy terms are means of each micro-batch: parts of a batch do not add up to them";
        found.notes.push(means.into());
    }
    if found.spec.token_weights.is_some() {
        let weights = "token_weights are 1/(P·Σ n) of a row's prompt: of P prompts, n the tokens of its rows";
        found.notes.push(weights.into());
    }
    Ok(found)
}

/// Returns the policy loss that a function computes.
fn loss(reader: &OptionReader, function: &'static str) -> Result<SkyrlLoss, PresetError> {
    Ok(match function {
        TRAINER => reader.word("policy_loss_type", SkyrlLoss::Regular, &LOSSES)?,
        "ppo_policy_loss" => reader.word("policy_loss_type", SkyrlLoss::Regular, &LOSSES[..2])?,
        "sapo_policy_loss" => SkyrlLoss::Sapo,
        "gspo_policy_loss" => SkyrlLoss::Gspo,
        "compute_policy_loss_cispo" => SkyrlLoss::Cispo,
        "rollout_is_policy_loss" => SkyrlLoss::RolloutIs,
        "dppo_policy_loss" => SkyrlLoss::Dppo,
        "compute_policy_loss_clip_cov" => SkyrlLoss::ClipCov,
        "compute_policy_loss_kl_cov" => SkyrlLoss::KlCov,
        _ => SkyrlLoss::ImportanceSampling,
    })
}

fn objective(reader: &OptionReader, loss: SkyrlLoss) -> Result<(Objective, Ratio), PresetError> {
    // Every clipped loss reads the same two widths; only the losses that use them read the options.
    let clip = || {
        let epsilon_low = reader.number("eps_clip_low", 0.2)?;
        let epsilon_high = reader.number("eps_clip_high", 0.2)?;
        Ok(PpoClip { epsilon_low, epsilon_high, delta: None, dual_clip: None })
    };
    // Most losses of SkyRL clamp the log-ratio to ±20 before its exponential.
    let clamped = Ratio { clamp: Some(20.0), ..Ratio::default() };
    Ok(match loss {
        SkyrlLoss::Regular => (Objective::PpoClip(clip()?), clamped),
        SkyrlLoss::DualClip => {
            let dual_clip = Some(reader.number("clip_ratio_c", 3.0)?);
            (Objective::PpoClip(PpoClip { dual_clip, ..clip()? }), clamped)
        }
        SkyrlLoss::Sapo => {
            let tau_positive = reader.number("sapo.tau_pos", 1.0)?;
            (Objective::Sapo(Sapo { tau_positive, tau_negative: reader.number("sapo.tau_neg", 1.05)? }), clamped)
        }
        SkyrlLoss::Gspo => {
            // SkyRL's GSPO bounds the mean log-ratio from above only, and each token has the gradient of its own logp.
            let ratio = Ratio { level: RatioLevel::SequenceToken, cap: Some(10.0), ..Ratio::default() };
            (Objective::PpoClip(clip()?), ratio)
        }
        SkyrlLoss::Cispo => {
            // Both options are distances from 1.
            let lower = Some(1.0 - reader.number("cispo.cispo_eps_clip_low", 0.0)?);
            let upper = 1.0 + reader.number("cispo.cispo_eps_clip_high", 5.0)?;
            (Objective::Cispo(Cispo { lower, upper }), clamped)
        }
        SkyrlLoss::RolloutIs => {
            let PpoClip { epsilon_low, epsilon_high, .. } = clip()?;
            let masked = MaskedRatio { lower: 1.0 - epsilon_low, upper: 1.0 + epsilon_high, surrogate: false };
            (Objective::MaskedRatio(masked), clamped)
        }
        SkyrlLoss::Dppo => {
            let kinds = [("binary_tv", Divergence::TotalVariation), ("binary_kl", Divergence::BinaryKl)];
            let region = TrustRegion {
                divergence: reader.word("dppo.dppo_type", Divergence::TotalVariation, &kinds)?,
                low: reader.number("dppo.delta_low", 0.2)?,
                high: reader.number("dppo.delta_high", 0.2)?,
                two_sided: false,
                truncate: None,
                penalty: 0.0,
            };
            (Objective::TrustRegion(region), clamped)
        }
        SkyrlLoss::ClipCov => {
            let selection = Some(CovarianceBand {
                fraction: reader.number("clip_cov.clip_ratio", 0.0002)?,
                lower: reader.number("clip_cov.clip_cov_lb", 1.0)?,
                upper: reader.number("clip_cov.clip_cov_ub", 5.0)?,
            });
            (Objective::ClipCov(ClipCov { clip: clip()?, selection }), Ratio::default())
        }
        SkyrlLoss::KlCov => {
            let fraction = reader.number("kl_cov.kl_cov_frac", 0.2)?;
            let coefficient = reader.number("kl_cov.ppo_kl_coef", 1.0)?;
            (Objective::KlCov(KlCov { coefficient, selection: Some(TopCovariance { fraction }) }), Ratio::default())
        }
        SkyrlLoss::ImportanceSampling => {
            (Objective::ImportanceSampling(ImportanceSampling::default()), Ratio::default())
        }
    })
}

/// Resolves `policy + kl_loss_coef · kl − entropy_loss_coef · entropy`: the KL mean is over sequences, the entropy mean
/// over tokens.
fn trainer(reader: &OptionReader, loss: SkyrlLoss, policy: LossSpec) -> Result<LossSpec, PresetError> {
    // Covariances are of the scaled advantages, which a spec with a separate reduction does not have.
    if matches!(loss, SkyrlLoss::ClipCov | SkyrlLoss::KlCov) {
        let expected = "another loss: here `loss_reduction` changes the advantages that covariances and penalties are \
                        measured by; ask for the function alone";
        return Err(reader.refuse("policy_loss_type", expected));
    }
    let rows = Rows::All;
    let length = reader.count_or_null("max_seq_len")?;
    // Refused before the known reductions are read, to give its own reason.
    if reader.text("loss_reduction")?.as_deref() == Some("token_mean_legacy") {
        let expected =
            "another: a mean of micro-batches' means depends on how the batch is cut, and is not a loss of the batch";
        return Err(reader.refuse("loss_reduction", expected));
    }
    let reductions = [
        ("token_mean", Reduction::TokenMean),
        ("sequence_mean", Reduction::SequenceMean { rows }),
        ("seq_mean_token_sum_norm", Reduction::FixedLength { rows, length }),
        ("prompt_mean", Reduction::Normalizer(1.0)),
    ];
    let reduction = reader.word("loss_reduction", Reduction::TokenMean, &reductions)?;
    let by_prompts = matches!(reduction, Reduction::Normalizer(_));
    if matches!(reduction, Reduction::FixedLength { length: None, .. }) {
        return Err(reader.refuse("max_seq_len", "a whole number ≥ 1 for seq_mean_token_sum_norm"));
    }
    // The other two terms have fixed means, whatever `loss_reduction` is.
    let averaging = |reduction| Some(Averaging { reduction, denominator_epsilon: 0.0 });
    let kl = reader.flag("use_kl_loss", true)?.then(|| kl(reader)).transpose()?;
    let kl = kl.map(|kl| Kl { averaging: averaging(Reduction::SequenceMean { rows }), ..kl });
    let bonus = reader.flag("use_entropy_loss", false)?;
    Ok(LossSpec {
        reduction,
        token_weights: by_prompts.then_some(TokenWeights { applies_to: LossTerms::Policy }),
        kl,
        entropy_coef: if bonus { reader.number("entropy_loss_coef", 0.01)? } else { 0.0 },
        entropy_averaging: if bonus { averaging(Reduction::TokenMean) } else { None },
        ..policy
    })
}

fn kl(reader: &OptionReader) -> Result<Kl, PresetError> {
    let kinds = [("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3), ("abs", KlEstimator::Abs)];
    let estimator = reader.word("kl_estimator_type", KlEstimator::K3, &kinds)?;
    let clamped = estimator == KlEstimator::K3;
    Ok(Kl {
        difference_clamp: clamped.then_some(20.0),
        value_clamp: clamped.then_some(10.0),
        ..Kl::plain(reader.number("kl_loss_coef", 0.001)?, estimator)
    })
}

fn weights(reader: &OptionReader) -> Result<Option<RolloutWeights>, PresetError> {
    const TOKEN_MASK: &str = "off_policy_correction.token_mask_is_threshold_low";
    const NAME: &str = "off_policy_correction.tis_ratio_type";
    if !reader.is_given(NAME) {
        return Ok(None);
    }
    let levels = [("token", RolloutLevel::Token), ("sequence", RolloutLevel::Sequence)];
    let level = reader.word(NAME, RolloutLevel::Token, &levels)?;
    // The family computes weights from all unmasked tokens, and SkyRL from those that a token mask leaves.
    if level == RolloutLevel::Sequence && reader.is_given(TOKEN_MASK) {
        return Err(
            reader.refuse(NAME, "token or null with a token mask: a sequence's ratio would be of the tokens left")
        );
    }
    let max = if level == RolloutLevel::Token {
        reader.number("off_policy_correction.token_tis_ratio_clip_high", 2.0)?
    } else {
        reader.number("off_policy_correction.sequence_tis_ratio_clip_high", 5.0)?
    };
    Ok(Some(RolloutWeights { level, max: Some(max), clamp: Some(20.0), ..weights_from(RolloutSource::Logp) }))
}

/// Reads the rejections. A rejected token loses its policy term and still counts, as the advantages were scaled before. `k1` is
/// the logarithm of the inverse of the sampler's ratio: a ratio within `[low, high]` is a `k1` within `[−ln high, −ln low]`.
fn rejections(reader: &OptionReader) -> Result<Vec<Rejection>, PresetError> {
    const METRIC: &str = "off_policy_correction.sequence_mask_metric";
    let within = |level, low: f64, high: f64| Rejection {
        estimator: RejectionEstimator::K1,
        level,
        min: Some(-high.ln()),
        max: -low.ln(),
        counts: true,
        drops_from: LossTerms::Policy,
    };
    // Only both ends together define a token mask.
    let low = reader.number_or_null("off_policy_correction.token_mask_is_threshold_low", None)?;
    let high = reader.number_or_null("off_policy_correction.token_mask_is_threshold_high", None)?;
    let mut found: Vec<Rejection> =
        low.zip(high).map(|(low, high)| within(RejectionLevel::Token, low, high)).into_iter().collect();
    // A sequence mask has its own pair of bounds for each metric.
    if reader.is_given(METRIC) {
        // The same holds for a statistic of the sequence.
        if !found.is_empty() {
            return Err(reader.refuse(METRIC, "null with a token mask: it would look at the tokens that are left"));
        }
        let metrics = [("product", RejectionLevel::SequenceSum), ("geometric", RejectionLevel::SequenceMean)];
        let level = reader.word(METRIC, RejectionLevel::SequenceSum, &metrics)?;
        let (low, high) = if level == RejectionLevel::SequenceSum {
            let low = reader.number("off_policy_correction.product_mask_low", 0.5)?;
            (low, reader.number("off_policy_correction.product_mask_high", 2.0)?)
        } else {
            let low = reader.number("off_policy_correction.geo_mask_low", 0.99)?;
            (low, reader.number("off_policy_correction.geo_mask_high", 1.01)?)
        };
        found.push(within(level, low, high));
    }
    found.extend(outliers(reader)?);
    Ok(found)
}

/// Reads the rejection of a sequence for one token whose ratio is out of bounds: by its largest `k1` and its smallest.
fn outliers(reader: &OptionReader) -> Result<Vec<Rejection>, PresetError> {
    let of = |level, min, max| Rejection {
        estimator: RejectionEstimator::K1,
        level,
        min,
        max,
        counts: true,
        drops_from: LossTerms::Policy,
    };
    let low = reader.number_or_null("off_policy_correction.outlier_token_is_threshold_low", None)?;
    let high = reader.number_or_null("off_policy_correction.outlier_token_is_threshold_high", None)?;
    // The smallest ratio of a sequence is its largest `k1`.
    let below = low.map(|low| of(RejectionLevel::SequenceMax, None, -low.ln()));
    // No k1 is above 20.
    let above = high.map(|high| of(RejectionLevel::SequenceMin, Some(-high.ln()), 20.0));
    Ok(below.into_iter().chain(above).collect())
}
