//! verl 0.9.1: `trainer/ppo/core_algos.py`, `workers/utils/losses.py` and `trainer/ppo/rollout_corr_helper.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, WeightShape, ready_made, weights_from};
use crate::spec::{
    AdvantageLevel, Averaging, Cispo, ClipCov, CovarianceBand, Divergence, Dro, ImportanceSampling, Kl, KlCov,
    KlEstimator, KlGradient, LogClip, LossSpec, LossTerms, MaskedRatio, Objective, OldLogp, OutOfBounds, PpoClip,
    Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource,
    RolloutWeights, Rows, Sapo, Temperature, TopCovariance, TrustRegion,
};

/// The prefix of the names of the policy losses.
pub(super) const POLICY_LOSS: &str = "compute_policy_loss_";

pub(super) const FUNCTIONS: &[&str] = &[
    "ppo_loss",
    "compute_policy_loss_vanilla",
    "compute_policy_loss_gspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_gpg",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_dro",
    "compute_policy_loss_cispo",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_bypass_mode",
    "kl_penalty",
    "compute_entropy_loss",
];

const KNOWN: &str = "
    calculate_entropy clip_cov_lb clip_cov_ratio clip_cov_ub clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low
    data.batch_num_tokens data.dp_size data.global_batch_size dro_beta entropy_coeff
    global_batch_info.batch_num_tokens global_batch_info.dp_size global_batch_info.global_batch_size
    global_batch_info.loss_scale_factor kl_cov_ratio kl_loss_coef kl_loss_type kl_penalty loss_agg_mode loss_mode
    loss_scale_factor ppo_epochs ppo_kl_coef ppo_micro_batch_size_per_gpu ppo_mini_batch_size
    rollout_correction.bypass_mode rollout_correction.loss_type rollout_correction.rollout_is
    rollout_correction.rollout_is_batch_normalize rollout_correction.rollout_is_threshold
    rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold rollout_n shuffle strategy tau_neg tau_pos
    temperature use_dynamic_bsz use_fused_kernels use_kl_loss use_torch_compile
";

/// The number that verl's means, and GMPO's, add to their denominators.
const EPSILON: f64 = 1e-8;

pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let temperature = reader.temperature("temperature")?;
    if temperature == Temperature::Given && reader.flag("use_fused_kernels", false)? {
        return Err(reader.refuse("use_fused_kernels", "false: the fused kernels take one temperature"));
    }
    // The three kinds of functions: the actor's whole loss, one of its other two terms, or a policy loss alone.
    let spec = match function {
        "ppo_loss" => ppo_loss(reader, given)?,
        "kl_penalty" => LossSpec {
            objective: Objective::None,
            old_logp: OldLogp::Current,
            kl: Some(kl(reader, "kl_penalty", 1.0)?),
            ..aggregated(&VerlBatch::read(reader, "global_batch_info", "token-mean")?)?
        },
        // The mean entropy itself: a bonus of −1.
        "compute_entropy_loss" => LossSpec {
            objective: Objective::None,
            old_logp: OldLogp::Current,
            entropy_coef: -1.0,
            entropy_averaging: Some(VerlBatch::read(reader, "", "token-mean")?.averaging()?),
            ..LossSpec::default()
        },
        _ => {
            let mode = function.strip_prefix(POLICY_LOSS).unwrap_or(function);
            let usual = match mode {
                "gspo" | "sapo" => "seq-mean-token-mean",
                "reinforce" => "seq-mean-token-sum",
                _ => "token-mean",
            };
            policy_loss(reader, given, mode, &VerlBatch::read(reader, "global_batch_info", usual)?)?
        }
    };
    let advantages = given.advantages_or(AdvantageLevel::Token);
    let mut found = ProjectLoss::new(LossSpec { advantages, temperature, ..spec }, KNOWN);
    // Only geo_mean clips log-ratios.
    if found.spec.ratio.clip.is_some() {
        let defect = "geo_mean is a mean of each micro-batch, and nothing divides by their number: not reproduced";
        found.notes.push(defect.into());
    }
    if matches!(found.spec.objective, Objective::MaskedRatio(_)) {
        let closed = "a ratio at a bound of rollout_is_threshold, exactly, is kept there and masked here";
        found.notes.push(closed.into());
    }
    Ok(found)
}

/// Resolves `policy − entropy_coeff · entropy + kl_loss_coef · kl`, each term aggregated by `loss_agg_mode` except
/// policy losses that have their own mode.
fn ppo_loss(reader: &OptionReader, given: &BatchInputs) -> Result<LossSpec, PresetError> {
    // The policy term, in whatever reduction its mode has.
    let names: Vec<(&str, &str)> = MODES.iter().map(|mode| (*mode, *mode)).collect();
    let mode = reader.word("loss_mode", "vanilla", &names)?;
    let batch = VerlBatch::read(reader, "data", "token-mean")?;
    let mut spec = policy_loss(reader, given, mode, &batch)?;
    // The entropy and KL terms always have the mean of `loss_agg_mode`.
    let averaging = batch.averaging()?;
    let entropy_coeff = reader.number("entropy_coeff", 0.0)?;
    if entropy_coeff != 0.0 {
        spec.entropy_coef = entropy_coeff;
        spec.entropy_averaging = Some(averaging);
    }
    if reader.flag("use_kl_loss", false)? {
        let own = (averaging != spec.averaging()).then_some(averaging);
        let beta = reader.number("kl_loss_coef", 0.001)?;
        spec.kl = Some(Kl { averaging: own, ..kl(reader, "kl_loss_type", beta)? });
    }
    Ok(spec)
}

/// The values of `loss_mode`.
const MODES: [&str; 12] = [
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "bypass_mode",
];

/// Resolves the policy loss alone, of one `loss_mode`.
fn policy_loss(
    reader: &OptionReader,
    given: &BatchInputs,
    mode: &str,
    batch: &VerlBatch,
) -> Result<LossSpec, PresetError> {
    if mode == "bypass_mode" {
        return bypass(reader, given, batch);
    }
    // Most modes clamp the log-ratio of a token to ±20.
    let clamped = Ratio { clamp: Some(20.0), ..Ratio::default() };
    let (objective, ratio) = match mode {
        // Only the usual loss and the bypass have a dual clip.
        "vanilla" => {
            let dual_clip = Some(reader.number("clip_ratio_c", 3.0)?);
            (Objective::PpoClip(PpoClip { dual_clip, ..clip(reader)? }), clamped)
        }
        // The value is the sequence's, the gradient the token's; the cap of 10 is on the log-ratio.
        "gspo" => {
            let ratio = Ratio { level: RatioLevel::SequenceToken, cap: Some(10.0), ..Ratio::default() };
            (Objective::PpoClip(clip(reader)?), ratio)
        }
        "sapo" => (
            Objective::Sapo(Sapo {
                tau_positive: reader.number("tau_pos", 1.0)?,
                tau_negative: reader.number("tau_neg", 1.05)?,
            }),
            clamped,
        ),
        "gpg" | "reinforce" => (Objective::PolicyGradient, Ratio::default()),
        // Options that are null fall back to the function's own defaults.
        "clip_cov" => {
            let fraction = reader.number_or_null("clip_cov_ratio", None)?.unwrap_or(0.0002);
            let lower = reader.number_or_null("clip_cov_lb", None)?.unwrap_or(1.0);
            let upper = reader.number_or_null("clip_cov_ub", None)?.unwrap_or(5.0);
            let selection = Some(CovarianceBand { fraction, lower, upper });
            (Objective::ClipCov(ClipCov { clip: clip(reader)?, selection }), Ratio::default())
        }
        "kl_cov" => {
            let fraction = reader.number_or_null("kl_cov_ratio", Some(0.0002))?.unwrap_or(0.0002);
            // The default of the configuration is 0.1, and that of the function 1 if the configuration has null.
            let coefficient = reader.number_or_null("ppo_kl_coef", Some(0.1))?.unwrap_or(1.0);
            (Objective::KlCov(KlCov { coefficient, selection: Some(TopCovariance { fraction }) }), Ratio::default())
        }
        // GMPO has its own reduction and denominators, so nothing below applies to it.
        "geo_mean" => return geo_mean(reader, given),
        // DRO has no default for its only number.
        "dro" => {
            let beta = reader.number_or_null("dro_beta", None)?.filter(|beta| *beta > 0.0);
            let beta = beta.ok_or_else(|| reader.refuse("dro_beta", "a number > 0"))?;
            (Objective::Dro(Dro { beta }), Ratio::default())
        }
        "cispo" => {
            // verl's widths are distances from 1; the family's bounds are on the ratio itself.
            let PpoClip { epsilon_low, epsilon_high, .. } = clip(reader)?;
            (Objective::Cispo(Cispo { lower: Some(1.0 - epsilon_low), upper: 1.0 + epsilon_high }), clamped)
        }
        _ => (Objective::TrustRegion(dppo(reader, mode)?), clamped),
    };
    // A loss without a ratio runs without old log-probabilities.
    let reads_old = !matches!(objective, Objective::PolicyGradient);
    // SAPO ignores `loss_agg_mode`.
    let averaged =
        if mode == "sapo" { VerlBatch { mode: "seq-mean-token-mean", ..batch.clone() } } else { batch.clone() };
    Ok(LossSpec {
        objective,
        ratio,
        old_logp: if reads_old { OldLogp::Given } else { given.old_logp() },
        rollout: rollout(reader, given)?,
        rejection: rejection(reader)?,
        ..aggregated(&averaged)?
    })
}

fn dppo(reader: &OptionReader, mode: &str) -> Result<TrustRegion, PresetError> {
    let PpoClip { epsilon_low: low, epsilon_high: high, .. } = clip(reader)?;
    let divergence = if mode == "dppo_tv" { Divergence::TotalVariation } else { Divergence::BinaryKl };
    // `ActorConfig` sets 3; the function's own 20 is for configurations without the field.
    let truncate = Some(reader.number("clip_ratio_c", 3.0)?);
    Ok(TrustRegion { divergence, low, high, two_sided: false, truncate, penalty: 0.0 })
}

/// Resolves GMPO, which does not use `loss_agg_mode` and the global batch, and counts every sequence.
fn geo_mean(reader: &OptionReader, given: &BatchInputs) -> Result<LossSpec, PresetError> {
    let PpoClip { epsilon_low: low, epsilon_high: high, .. } = clip(reader)?;
    // GMPO multiplies by the geometric mean of the sequence's weights.
    let mut rollout = rollout(reader, given)?;
    if let Some(rollout) = &mut rollout {
        if rollout.source != RolloutSource::Given {
            return Err(reader.refuse("rollout_correction.rollout_is", "ready-made weights for geo_mean, or null"));
        }
        rollout.level = RolloutLevel::Geometric;
    }
    // The geometric mean of a sequence's ratios is the ratio of its mean log-ratio. The two widths are bounds of
    // log-ratios here, in nats, and not distances of a ratio from 1.
    Ok(LossSpec {
        objective: Objective::ImportanceSampling(ImportanceSampling { empty_rows: false }),
        ratio: Ratio {
            level: RatioLevel::Sequence,
            clip: Some(LogClip { low, high }),
            denominator_epsilon: EPSILON,
            ..Ratio::default()
        },
        rollout,
        rejection: rejection(reader)?,
        reduction: Reduction::SequenceMean { rows: Rows::All },
        denominator_epsilon: EPSILON,
        ..LossSpec::default()
    })
}

/// Resolves losses whose old policy is the sampler's: PPO's clip without weights, or REINFORCE weighted by the
/// truncated ratio.
fn bypass(reader: &OptionReader, given: &BatchInputs, batch: &VerlBatch) -> Result<LossSpec, PresetError> {
    const NAME: &str = "rollout_correction.rollout_is";
    let weighs = reader.word("rollout_correction.loss_type", false, &[("ppo_clip", false), ("reinforce", true)])?;
    reader.off("rollout_correction.rollout_rs", "here it would reject by the current policy")?;
    // PPO's clip against the sampler, without further weights.
    if !weighs {
        let dual_clip = Some(reader.number("clip_ratio_c", 3.0)?);
        let ratio = Ratio { clamp: Some(20.0), ..Ratio::default() };
        let objective = Objective::PpoClip(PpoClip { dual_clip, ..clip(reader)? });
        return Ok(LossSpec { objective, ratio, ..aggregated(batch)? });
    }
    reader
        .off("rollout_correction.rollout_is_batch_normalize", "here it would divide by a mean of the current policy")?;
    // `rollout_is: null` switches the weight off and leaves plain REINFORCE.
    if reader.names(NAME) && !reader.is_given(NAME) {
        return Ok(LossSpec { objective: Objective::PolicyGradient, old_logp: given.old_logp(), ..aggregated(batch)? });
    }
    let levels = [("token", RatioLevel::Token), ("sequence", RatioLevel::SequenceProduct)];
    let level = reader.word(NAME, RatioLevel::SequenceProduct, &levels)?;
    // One threshold truncates the ratio, two mask it.
    let objective = match is_threshold(reader)? {
        (None, upper) => Objective::Cispo(Cispo { lower: None, upper }),
        (Some(lower), upper) => Objective::MaskedRatio(MaskedRatio { lower, upper, surrogate: false }),
    };
    Ok(LossSpec { objective, ratio: Ratio { level, clamp: Some(20.0), ..Ratio::default() }, ..aggregated(batch)? })
}

fn clip(reader: &OptionReader) -> Result<PpoClip, PresetError> {
    let both = reader.number("clip_ratio", 0.2)?;
    // The configuration's default of 0.2 hides `clip_ratio` unless both are null.
    let epsilon_low = reader.number_or_null("clip_ratio_low", Some(0.2))?.unwrap_or(both);
    let epsilon_high = reader.number_or_null("clip_ratio_high", Some(0.2))?.unwrap_or(both);
    Ok(PpoClip { epsilon_low, epsilon_high, delta: None, dual_clip: None })
}

/// Reads `kl_penalty`: `k3` clamps the difference to ±20 and the value to ±10; a `+` takes the gradient of `k2`.
fn kl(reader: &OptionReader, name: &'static str, beta: f64) -> Result<Kl, PresetError> {
    const EXPECTED: &str = "kl, k1, abs, mse, k2, low_var_kl or k3, and + for the gradient of k2";
    // A name is an estimator, and after it an optional `+` for the gradient.
    let kind = reader.text(name)?.unwrap_or_else(|| "low_var_kl".into());
    let (kind, gradient) = match kind.strip_suffix('+') {
        Some(kind) => (kind, KlGradient::K2),
        None => (kind.as_str(), KlGradient::Own),
    };
    let estimator = match kind {
        "kl" | "k1" => KlEstimator::K1,
        "abs" => KlEstimator::Abs,
        "mse" | "k2" => KlEstimator::K2,
        "low_var_kl" | "k3" => KlEstimator::K3,
        _ => return Err(reader.refuse(name, EXPECTED)),
    };
    // Only K3 is clamped: its exponential can overflow.
    let clamped = estimator == KlEstimator::K3;
    Ok(Kl {
        gradient,
        difference_clamp: clamped.then_some(20.0),
        value_clamp: clamped.then_some(10.0),
        ..Kl::plain(beta, estimator)
    })
}

/// The counts of the global batch that `agg_loss` gets.
#[derive(Clone)]
struct VerlBatch {
    mode: &'static str,
    dp_size: f64,
    tokens: Option<f64>,
    sequences: Option<f64>,
    length: Option<usize>,
    /// The error for a count that is missing.
    missing: PresetError,
}

impl VerlBatch {
    fn read(reader: &OptionReader, info: &'static str, usual: &'static str) -> Result<Self, PresetError> {
        // The actor's `ppo_loss` reads the counts from `data`, the registered functions from `global_batch_info`, and
        // the entropy loss from nowhere.
        let modes = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"];
        let modes: Vec<(&str, &'static str)> = modes.into_iter().map(|mode| (mode, mode)).collect();
        let mode = reader.word("loss_agg_mode", usual, &modes)?;
        let names: [&'static str; 4] = match info {
            "data" => ["data.dp_size", "data.batch_num_tokens", "data.global_batch_size", "loss_scale_factor"],
            _ => [
                "global_batch_info.dp_size",
                "global_batch_info.batch_num_tokens",
                "global_batch_info.global_batch_size",
                "global_batch_info.loss_scale_factor",
            ],
        };
        let told = !info.is_empty();
        let number = |name| if told { reader.number_or_null(name, None) } else { Ok(None) };
        Ok(Self {
            mode,
            dp_size: number(names[0])?.unwrap_or(1.0),
            tokens: number(names[1])?,
            sequences: number(names[2])?,
            length: if told { reader.count_or_null(names[3])? } else { None },
            // The error is made here, where the option that is missing is known, and returned only if it is needed.
            missing: reader.refuse(
                if mode == "token-mean" { names[1] } else { names[2] },
                "the count of the global batch where `dp_size` is above 1",
            ),
        })
    }

    /// Returns the weights of `agg_loss` with `dp_size` included: it multiplies a sum that the ranks then average.
    fn averaging(&self) -> Result<Averaging, PresetError> {
        // Gradients are averaged over the ranks, so that each divides by its part of a global count; without a count
        // one rank's own tokens are the batch.
        let global = |count: Option<f64>| match count {
            Some(count) => Ok(Some(count / self.dp_size)),
            None if self.dp_size > 1.0 => Err(self.missing.clone()),
            None => Ok(None),
        };
        let rows = || Ok(global(self.sequences)?.map_or(Rows::NonEmpty, Rows::Given));
        let plain = |reduction| Averaging { reduction, denominator_epsilon: 0.0 };
        Ok(match self.mode {
            "token-mean" => plain(global(self.tokens)?.map_or(Reduction::TokenMean, Reduction::Normalizer)),
            "token-sum" => plain(Reduction::Normalizer(1.0 / self.dp_size)),
            "seq-mean-token-sum" => plain(Reduction::SequenceSum { rows: rows()? }),
            "seq-mean-token-sum-norm" => plain(Reduction::FixedLength { rows: rows()?, length: self.length }),
            _ => Averaging { reduction: Reduction::SequenceMean { rows: rows()? }, denominator_epsilon: EPSILON },
        })
    }
}

fn aggregated(batch: &VerlBatch) -> Result<LossSpec, PresetError> {
    let Averaging { reduction, denominator_epsilon } = batch.averaging()?;
    Ok(LossSpec { reduction, denominator_epsilon, ..LossSpec::default() })
}

/// Reads `rollout_is_weights` of the batch, or the weights that `rollout_correction` computes.
fn rollout(reader: &OptionReader, given: &BatchInputs) -> Result<Option<RolloutWeights>, PresetError> {
    const NAME: &str = "rollout_correction.rollout_is";
    // `rollout_is: null` switches the weights off; leaving the option out keeps its default.
    let switched_off = reader.names(NAME) && !reader.is_given(NAME);
    let corrects = reader.any_within("rollout_correction") && !switched_off;
    // The batch's own array comes first, and an option that would compute another one is refused.
    match given.rollout_weights {
        Some(WeightShape::Flat) => Err(reader.lacks("rollout_is_weights", "[B]", "[B,T] or [B,1]")),
        Some(_) if corrects => Err(reader.refuse(NAME, "null where the batch has `rollout_is_weights`")),
        Some(_) => Ok(Some(ready_made())),
        None if !corrects => Ok(None),
        None => {
            let levels = [("token", RolloutLevel::Token), ("sequence", RolloutLevel::Sequence)];
            let level = reader.word(NAME, RolloutLevel::Sequence, &levels)?;
            let (min, max) = is_threshold(reader)?;
            Ok(Some(RolloutWeights {
                level,
                // A lower bound means that weights outside are 0; an upper bound alone truncates them.
                outside: if min.is_some() { OutOfBounds::Mask } else { OutOfBounds::Truncate },
                min,
                max: Some(max),
                clamp: Some(20.0),
                normalize: reader.flag("rollout_correction.rollout_is_batch_normalize", false)?,
                ..weights_from(RolloutSource::Logp)
            }))
        }
    }
}

/// Reads a threshold, `upper` or `lower_upper`.
fn is_threshold(reader: &OptionReader) -> Result<(Option<f64>, f64), PresetError> {
    const NAME: &str = "rollout_correction.rollout_is_threshold";
    let expected = "a number > 0, or lower_upper such as 0.5_5.0";
    // One number bounds from above and truncates; two numbers mask outside both.
    let text = reader.text(NAME)?.unwrap_or_else(|| "2.0".into());
    let number = |text: &str| text.trim().parse().ok().filter(|x: &f64| *x > 0.0);
    // Both ends have to parse and be positive.
    let bounds = match text.split_once('_') {
        Some((lower, upper)) => number(lower).zip(number(upper)).map(|(lower, upper)| (Some(lower), upper)),
        None => number(&text).map(|upper| (None, upper)),
    };
    bounds.ok_or_else(|| reader.refuse(NAME, expected))
}

/// Reads `rollout_rs`: comma-separated statistics, all of which must be within their thresholds; bounds of a ratio are
/// converted to bounds of its logarithm.
fn rejection(reader: &OptionReader) -> Result<Vec<Rejection>, PresetError> {
    let Some(modes) = reader.text("rollout_correction.rollout_rs")? else { return Ok(Vec::new()) };
    let thresholds = reader.text("rollout_correction.rollout_rs_threshold")?;
    rejections(&modes, thresholds.as_deref()).map_err(|wrong| match wrong {
        RejectionTextError::Mode => {
            let expected =
                "token_k1, token_k2, token_k3, seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2 or seq_max_k3";
            reader.refuse("rollout_correction.rollout_rs", expected)
        }
        RejectionTextError::Threshold => {
            let expected = "one threshold > 0, or one for each of `rollout_rs`; lower_upper for k1";
            reader.refuse("rollout_correction.rollout_rs_threshold", expected)
        }
    })
}

/// The option that is wrong, of the two about rejections.
pub(super) enum RejectionTextError {
    Mode,
    Threshold,
}

/// Parses both options about rejections as verl does, and Unsloth after it.
pub(super) fn rejections(modes: &str, thresholds: Option<&str>) -> Result<Vec<Rejection>, RejectionTextError> {
    let parts = |text: &str| -> Vec<String> {
        text.split(',').map(|part| part.trim().to_string()).filter(|part| !part.is_empty()).collect()
    };
    // A statistic that is named twice counts once, in the place of its first mention.
    let mut seen: Vec<String> = Vec::new();
    for mode in parts(modes) {
        if !seen.contains(&mode) {
            seen.push(mode);
        }
    }
    // One threshold is for all statistics; otherwise each has its own.
    let thresholds = parts(thresholds.ok_or(RejectionTextError::Threshold)?);
    if thresholds.is_empty() || (thresholds.len() != 1 && thresholds.len() != seen.len()) {
        return Err(RejectionTextError::Threshold);
    }
    let threshold = |i: usize| thresholds.get(i).unwrap_or(&thresholds[0]).as_str();
    seen.iter().enumerate().map(|(i, mode)| one_rejection(mode, threshold(i))).collect()
}

fn one_rejection(mode: &str, threshold: &str) -> Result<Rejection, RejectionTextError> {
    // A mode is `level_estimator`, such as `seq_mean_k3`.
    let (level, estimator) = mode.rsplit_once('_').ok_or(RejectionTextError::Mode)?;
    let level = match level {
        "token" => RejectionLevel::Token,
        "seq_sum" => RejectionLevel::SequenceSum,
        "seq_mean" => RejectionLevel::SequenceMean,
        "seq_max" if estimator != "k1" => RejectionLevel::SequenceMax,
        _ => return Err(RejectionTextError::Mode),
    };
    let estimator = match estimator {
        "k1" => RejectionEstimator::K1,
        "k2" => RejectionEstimator::K2,
        "k3" => RejectionEstimator::K3,
        _ => return Err(RejectionTextError::Mode),
    };
    let number = |text: &str| text.parse().ok().filter(|x: &f64| *x > 0.0).ok_or(RejectionTextError::Threshold);
    // Thresholds of `k1` are ratios: one number is symmetric, `1/x` to `x`. The other estimators are never negative
    // and have an upper bound only.
    let (min, max) = match (estimator, threshold.split_once('_')) {
        (RejectionEstimator::K1, Some((lower, upper))) => (Some(number(lower)?.ln()), number(upper)?.ln()),
        (RejectionEstimator::K1, None) => (Some((1.0 / number(threshold)?).ln()), number(threshold)?.ln()),
        (_, None) => (None, number(threshold)?),
        (_, Some(_)) => return Err(RejectionTextError::Threshold),
    };
    Ok(Rejection { estimator, level, min, max, counts: false, drops_from: LossTerms::PolicyAndKl })
}
