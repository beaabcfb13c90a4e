//! ROLL, commit 8eb27cc2: `loss_func` of `ActorWorker` in `pipeline/rlvr/actor_worker.py` and in
//! `pipeline/agentic/agentic_actor_pg_worker.py`, with `agg_loss` and `compute_approx_kl` of `utils/functionals.py`.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss, ready_made, weights_from};
use crate::spec::{
    AdvantageLevel, Averaging, Cispo, Dro, Kl, KlEstimator, LossSpec, LossTerms, Objective, PositiveTokens, PpoClip,
    Ratio, RatioLevel, Reduction, RolloutLevel, RolloutSource, RolloutWeights, Rows, TokenWeights, Topr,
};

const AGENTIC: &str = "agentic_actor_pg_worker";

/// The modules whose `ActorWorker.loss_func` is reproduced.
pub(super) const FUNCTIONS: &[&str] = &["actor_worker", AGENTIC];

/// The prefix that option names may have.
pub(super) const ACTOR_TRAIN: &str = "actor_train.";

const KNOWN: &str = "
    cispo_epsilon_high cispo_epsilon_low difficulty_loss_weight dual_clip_loss enable_old_logprobs_recompute
    entropy_loss_coef importance_sampling kimi15_tau kl_loss_coef length_loss_weight loss_agg_mode pg_clip
    pg_clip_high pg_clip_low pg_variant postive_loss_coef ratio_type rl_loss_coef temperature tis_lower_bound
    tis_upper_bound topr_negative_weight topr_positive_weight train_infer_correction.is_weight.detach
    train_infer_correction.is_weight.enabled train_infer_correction.is_weight.upper_bound
    train_infer_correction.is_weight.weight_type use_kl_loss use_pg_clip_range use_topr_loss use_topr_neg_loss_coef
";

/// Resolves a loss in which every term has the mean of `loss_agg_mode`. Masks and counts are integers there, so that
/// the 1e-8 added to them is lost in float32.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let agentic = function == AGENTIC;
    // Options that are not reproduced.
    let filters = "a filtered token keeps its loss under token-mean; elsewhere say it as a `rejection`";
    reader.off("train_infer_correction.filters", filters)?;
    let (averaging, missing) = averaging(reader)?;
    let (objective, ratio) = if agentic { variant(reader)? } else { (clip(reader)?, ratio_of_rlvr(reader)?) };
    // The weights of samples depend on rewards and lengths, so the batch has to provide them.
    let weighted = !agentic && weighs_samples(reader)?;
    if weighted && !given.token_weights {
        let expected = "them, `[B,1]`: `difficulty_loss_weight` and `length_loss_weight` make them of the batch";
        return Err(reader.lacks("sample_weights", "nothing", expected));
    }
    let scale = if agentic { 1.0 } else { reader.number("rl_loss_coef", 1.0)? };
    let entropy_coef = reader.number("entropy_loss_coef", 0.0)?.max(0.0);
    // The estimate is clamped to ±10.
    let kl = if reader.flag("use_kl_loss", false)? {
        let plain = Kl::plain(reader.number("kl_loss_coef", 0.0)?, KlEstimator::K3);
        Some(Kl { value_clamp: Some(10.0), ..plain })
    } else {
        None
    };
    let spec = LossSpec {
        objective,
        ratio,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp: given.old_logp(),
        temperature: reader.number("temperature", 1.0)?.into(),
        rollout: rollout(reader, given)?,
        token_weights: weighted.then_some(TokenWeights { applies_to: LossTerms::Policy }),
        kl,
        // `rl_loss_coef` multiplies the other terms only.
        entropy_coef: entropy_coef / scale,
        entropy_averaging: (entropy_coef > 0.0).then_some(averaging),
        reduction: averaging.reduction,
        scale,
        ..LossSpec::default()
    };
    let mut found = ProjectLoss::new(spec, KNOWN);
    // Name the counts that were assumed, and the defect that token-mean has.
    found.notes.extend(missing.map(|count| format!("{count} is not given: it is taken as the batch's own")));
    if averaging.reduction == Reduction::TokenMean || matches!(averaging.reduction, Reduction::Normalizer(_)) {
        let unmasked = "token-mean does not multiply by the mask: what the batch has under it, with an advantage other than \
                        0, is in ROLL's loss and not here";
        found.notes.push(unmasked.into());
    }
    Ok(found)
}

/// Reads `agg_loss`; also returns the count of the global batch that is missing.
fn averaging(reader: &OptionReader) -> Result<(Averaging, Option<&'static str>), PresetError> {
    const TOKENS: &str = "batch_num_tokens";
    const SAMPLES: &str = "global_valid_samples";
    let modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"];
    let mode = reader.word("loss_agg_mode", "seq-mean-token-mean", &modes.map(|mode| (mode, mode)))?;
    let tokens = reader.number_or_null(TOKENS, None)?;
    let samples = reader.number_or_null(SAMPLES, None)?;
    let rows = samples.map_or(Rows::NonEmpty, Rows::Given);
    let unless = |given: Option<f64>, name| if given.is_some() { None } else { Some(name) };
    let (reduction, missing) = match mode {
        "token-mean" => (tokens.map_or(Reduction::TokenMean, Reduction::Normalizer), unless(tokens, TOKENS)),
        "seq-mean-token-sum" => (Reduction::SequenceSum { rows }, unless(samples, SAMPLES)),
        "seq-mean-token-mean" => (Reduction::SequenceMean { rows }, unless(samples, SAMPLES)),
        // The sum over sequences, divided by the width alone.
        _ => (Reduction::FixedLength { rows: Rows::Given(1.0), length: None }, None),
    };
    Ok((Averaging { reduction, denominator_epsilon: 0.0 }, missing))
}

fn clip(reader: &OptionReader) -> Result<Objective, PresetError> {
    let width = reader.number("pg_clip", 0.2)?;
    let (epsilon_low, epsilon_high) = if reader.flag("use_pg_clip_range", false)? {
        (reader.number("pg_clip_low", 0.2)?, reader.number("pg_clip_high", 0.2)?)
    } else {
        (width, width)
    };
    // The dual clip follows from the width and has no option.
    let dual_clip = reader.flag("dual_clip_loss", false)?.then_some(1.0 + 2.0 * width);
    Ok(Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, delta: None, dual_clip }))
}

fn ratio_of_rlvr(reader: &OptionReader) -> Result<Ratio, PresetError> {
    let levels = [("token", RatioLevel::Token), ("seq", RatioLevel::Sequence)];
    Ok(Ratio { level: reader.word("importance_sampling", RatioLevel::Token, &levels)?, ..Ratio::default() })
}

fn weighs_samples(reader: &OptionReader) -> Result<bool, PresetError> {
    Ok(reader.flag("difficulty_loss_weight", false)? | reader.flag("length_loss_weight", false)?)
}

/// Reads `pg_variant` of the agentic pipeline.
fn variant(reader: &OptionReader) -> Result<(Objective, Ratio), PresetError> {
    const SEGMENTS: &str = "token: a ratio of each run of the mask is one of sequences, packed";
    // Segments are runs of the mask within a row. The spec has no such level, but packing has: every run becomes a
    // sequence.
    if !reader.word("ratio_type", true, &[("token", true), ("segment", false)])? {
        return Err(reader.refuse("ratio_type", SEGMENTS));
    }
    // Every variant has its own options.
    let variants = ["vanilla", "ppo", "tis", "topr", "cispo", "kimi15"].map(|variant| (variant, variant));
    let objective = match reader.word("pg_variant", "vanilla", &variants)? {
        "ppo" => clip(reader)?,
        "tis" => Objective::Cispo(Cispo {
            lower: Some(reader.number("tis_lower_bound", 0.0)?),
            upper: reader.number("tis_upper_bound", 1.0)?,
        }),
        "topr" => Objective::Topr(Topr {
            positive_weight: reader.number("topr_positive_weight", 1.0)?,
            negative_weight: reader.number("topr_negative_weight", 1.0)?,
            upper: 1.0,
            positive: PositiveTokens::Selected,
        }),
        "cispo" => {
            reader.off("cispo_use_unified_mask", "of one project, and off by default")?;
            let lower = Some(1.0 - reader.number("cispo_epsilon_low", 0.1)?);
            Objective::Cispo(Cispo { lower, upper: 1.0 + reader.number("cispo_epsilon_high", 0.1)? })
        }
        "kimi15" => Objective::Dro(Dro { beta: reader.number("kimi15_tau", 0.1)? }),
        _ => Objective::PolicyGradient,
    };
    Ok((objective, Ratio::default()))
}

/// Reads `train_infer_correction.is_weight`, a weight of the policy term.
fn rollout(reader: &OptionReader, given: &BatchInputs) -> Result<Option<RolloutWeights>, PresetError> {
    const TYPE: &str = "train_infer_correction.is_weight.weight_type";
    if !reader.flag("train_infer_correction.is_weight.enabled", false)? {
        return Ok(None);
    }
    // Weights of the batch replace computed ones.
    if given.rollout_weights.is_some() {
        return Ok(Some(ready_made()));
    }
    if !given.sampling_logps {
        return Err(reader.lacks("infer_logprobs", "nothing", "them, as `is_weight` is on"));
    }
    // A word of the project that the spec has no level for is known here, so that it is refused with its reason.
    let levels = [
        ("token", Some(RolloutLevel::Token)),
        ("geometric", Some(RolloutLevel::Geometric)),
        ("sequence", Some(RolloutLevel::Sequence)),
        ("segment", None),
    ];
    let level = reader.word(TYPE, Some(RolloutLevel::Token), &levels)?;
    let level = level
        .ok_or_else(|| reader.refuse(TYPE, "token, geometric or sequence: a run of the mask is not a sequence"))?;
    let max = reader.number_or_null("train_infer_correction.is_weight.upper_bound", Some(1.2))?;
    Ok(Some(RolloutWeights { level, max, ..weights_from(RolloutSource::Logp) }))
}
