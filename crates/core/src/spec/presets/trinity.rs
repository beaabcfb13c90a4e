//! Trinity-RFT 0.6.0: `algorithm/policy_loss_fn`, `algorithm/kl_fn` and `algorithm/entropy_loss_fn`, as `TrinityPolicyLoss` of
//! `trainer/verl/losses.py` adds them up.

use super::options::OptionReader;
use super::{BatchInputs, PresetError, ProjectLoss};
use crate::spec::{
    AdvantageLevel, Averaging, Cispo, Dro, ImportanceSampling, Kl, KlEstimator, LossSpec, MaskedRatio, Objective,
    OffPolicyMask, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, Rows, Topr,
};

const PPO: &str = "PPOPolicyLossFn";
const GSPO: &str = "GSPOLossFn";
const CISPO: &str = "CISPOPolicyLossFn";
const TOPR: &str = "TOPRPolicyLossFn";
const OPMD: &str = "OPMDPolicyLossFn";
const REC: &str = "RECPolicyLossFn";
const IMPORTANCE: &str = "ImportanceSamplingLossFn";
const SFT: &str = "SFTLossFn";

pub(super) const FUNCTIONS: &[&str] = &[PPO, GSPO, CISPO, TOPR, OPMD, REC, IMPORTANCE, SFT];

/// The prefix that option names may have.
pub(super) const ALGORITHM: &str = "algorithm.";

const KNOWN: &str = "
    advantage_fn algorithm_type entropy_loss_fn entropy_loss_fn_args.entropy_coef kl_loss_fn kl_loss_fn_args.adaptive
    kl_loss_fn_args.kl_coef kl_penalty_fn loss_agg_mode policy_loss_fn policy_loss_fn_args.advantage_threshold
    policy_loss_fn_args.clip_mode policy_loss_fn_args.clip_range policy_loss_fn_args.clip_range_high
    policy_loss_fn_args.clip_range_low policy_loss_fn_args.clip_ratio_c policy_loss_fn_args.delta_sequence_masking
    policy_loss_fn_args.enable_mask_clip policy_loss_fn_args.enable_sequence_masking policy_loss_fn_args.epsilon_high
    policy_loss_fn_args.epsilon_high_prime policy_loss_fn_args.epsilon_low policy_loss_fn_args.epsilon_low_prime
    policy_loss_fn_args.fallback_to_policy_gradient policy_loss_fn_args.loss_agg_mode
    policy_loss_fn_args.mask_clip_range_high policy_loss_fn_args.mask_clip_range_low policy_loss_fn_args.regularizer
    policy_loss_fn_args.regularizer_coef policy_loss_fn_args.tau policy_loss_fn_args.temp policy_loss_fn_args.weight
    repeat_times sample_strategy temperature
";

/// The group of the policy loss's own options.
const ARGS: &str = "policy_loss_fn_args";

/// Algorithms, each with its policy loss and whether it has a KL penalty.
const ALGORITHMS: [(&str, (&str, bool)); 15] = [
    ("ppo", (PPO, true)),
    ("grpo", (PPO, true)),
    ("rloo", (PPO, true)),
    ("reinforceplusplus", (PPO, true)),
    ("multi_step_grpo", (PPO, true)),
    ("gigpo", (PPO, true)),
    ("dapo", (PPO, false)),
    ("on_policy_distill", (PPO, false)),
    ("gspo", (GSPO, true)),
    ("cispo", (CISPO, true)),
    ("topr", (TOPR, true)),
    ("opmd", (OPMD, true)),
    ("asymre", (OPMD, false)),
    ("rec", (REC, true)),
    ("raft", (SFT, false)),
];

/// The values of `policy_loss_fn`, each with its class.
const POLICY_LOSSES: [(&str, &str); 8] = [
    ("ppo", PPO),
    ("gspo", GSPO),
    ("cispo", CISPO),
    ("topr", TOPR),
    ("opmd", OPMD),
    ("rec", REC),
    ("importance_sampling", IMPORTANCE),
    ("sft", SFT),
];

/// Resolves `policy − entropy_coef · entropy + kl_coef · kl`. The last two are aggregated by `loss_agg_mode`; the policy term
/// too, unless `policy_loss_fn_args` are given without it.
pub(super) fn resolve(
    reader: &OptionReader,
    function: &'static str,
    given: &BatchInputs,
) -> Result<ProjectLoss, PresetError> {
    let penalized = !matches!(function, IMPORTANCE | SFT);
    let (usual, penalized) = reader.word("algorithm_type", (function, penalized), &ALGORITHMS)?;
    let function = reader.word("policy_loss_fn", usual, &POLICY_LOSSES)?;
    let averaging = averaging(reader, "loss_agg_mode", "token-mean")?;
    let mut notes = Vec::new();
    let policy = policy_loss(reader, function, &mut notes)?;
    // Options of the policy loss that leave its mean out keep that of its class.
    let own = match policy.averaging {
        Some(own) => own,
        None if reader.any_within(ARGS) && !reader.is_given("policy_loss_fn_args.loss_agg_mode") => {
            let class = if function == GSPO { "seq-mean-token-mean" } else { "token-mean" };
            averaging_of(class)
        }
        None => averaging,
    };
    let widths = [own, averaging].iter().any(|mean| matches!(mean.reduction, Reduction::FixedLength { .. }));
    if widths {
        notes.push(
            "seq-mean-token-sum-norm adds 1e-8 to the width, which is lost in float32: it is not added here".into(),
        );
    }
    // The scale is of the policy loss alone, and the other terms are divided by it.
    let scale = policy.scale;
    let kl = kl(reader, penalized)?.map(|kl| Kl {
        beta: kl.beta / scale,
        averaging: (own != averaging).then_some(averaging),
        ..kl
    });
    let has_bonus = reader.word("entropy_loss_fn", true, &[("default", true), ("none", false)])?;
    let entropy_coef = if has_bonus { reader.number("entropy_loss_fn_args.entropy_coef", 0.0)? } else { 0.0 };
    let old_logp = match (policy.current, given.old_logps) {
        (true, _) => OldLogp::Current,
        (false, true) => OldLogp::Given,
        (false, false) => OldLogp::Rollout,
    };
    let spec = LossSpec {
        objective: policy.objective,
        ratio: policy.ratio,
        advantages: given.advantages_or(AdvantageLevel::Token),
        old_logp,
        temperature: reader.number("temperature", 1.0)?.into(),
        off_policy_mask: policy.off_policy_mask,
        kl,
        entropy_coef: entropy_coef / scale,
        entropy_averaging: (entropy_coef != 0.0).then_some(averaging),
        reduction: own.reduction,
        denominator_epsilon: own.denominator_epsilon,
        scale,
        ..LossSpec::default()
    };
    Ok(ProjectLoss { spec, known: KNOWN, notes })
}

/// One policy loss, with the mean and the factor that it has.
struct PolicyLoss {
    objective: Objective,
    ratio: Ratio,
    /// Whether the ratio is that of the current policy with itself, or is not read.
    current: bool,
    off_policy_mask: Option<OffPolicyMask>,
    /// The mean that the loss always has; `None` if its options choose one.
    averaging: Option<Averaging>,
    /// The factor of the policy loss.
    scale: f64,
}

impl PolicyLoss {
    fn new(objective: Objective) -> Self {
        let current = objective == Objective::PolicyGradient;
        Self { objective, ratio: Ratio::default(), current, off_policy_mask: None, averaging: None, scale: 1.0 }
    }
}

fn policy_loss(
    reader: &OptionReader,
    function: &'static str,
    notes: &mut Vec<String>,
) -> Result<PolicyLoss, PresetError> {
    let clamped = Ratio { clamp: Some(20.0), ..Ratio::default() };
    Ok(match function {
        GSPO => PolicyLoss {
            ratio: Ratio { level: RatioLevel::SequenceToken, ..Ratio::default() },
            ..PolicyLoss::new(Objective::PpoClip(clip(reader, [0.0003, 0.0004])?))
        },
        CISPO => {
            reader.off(
                "policy_loss_fn_args.enable_mask_clip",
                "the family has no CISPO without the tokens that PPO clips",
            )?;
            let lower = 1.0 - reader.number("policy_loss_fn_args.clip_range_low", 1.0)?;
            let upper = 1.0 + reader.number("policy_loss_fn_args.clip_range_high", 0.28)?;
            PolicyLoss::new(Objective::Cispo(Cispo { lower: (lower > 0.0).then_some(lower), upper }))
        }
        TOPR => {
            const THRESHOLD: &str = "policy_loss_fn_args.advantage_threshold";
            if reader.number(THRESHOLD, 0.0)? != 0.0 {
                return Err(reader.refuse(THRESHOLD, "0: the family parts tokens by the sign of the advantage"));
            }
            PolicyLoss::new(Objective::Topr(Topr::default()))
        }
        OPMD => {
            let tau = reader.number("policy_loss_fn_args.tau", 1.0)?;
            PolicyLoss { scale: 1.0 / (1.0 + tau), ..PolicyLoss::new(Objective::PolicyGradient) }
        }
        REC => PolicyLoss { averaging: Some(averaging_of("token-mean")), ..PolicyLoss::new(rec(reader, notes)?) },
        IMPORTANCE => PolicyLoss {
            ratio: clamped,
            ..PolicyLoss::new(Objective::ImportanceSampling(ImportanceSampling::default()))
        },
        SFT => {
            notes.push("advantages have no part in the function: with 1 for each token the loss is the same".into());
            PolicyLoss::new(Objective::PolicyGradient)
        }
        _ => {
            let dual_clip = Some(reader.number("policy_loss_fn_args.clip_ratio_c", 3.0)?);
            let clip = PpoClip { dual_clip, ..clip(reader, [0.2, 0.2])? };
            let off_policy_mask = sequence_mask(reader, notes)?;
            let current = reader.flag("policy_loss_fn_args.fallback_to_policy_gradient", false)?;
            PolicyLoss { ratio: clamped, current, off_policy_mask, ..PolicyLoss::new(Objective::PpoClip(clip)) }
        }
    })
}

/// Reads both widths of the clip. The defaults are of a configuration that gives no option of the policy loss.
fn clip(reader: &OptionReader, usual: [f64; 2]) -> Result<PpoClip, PresetError> {
    const RANGE: &str = "policy_loss_fn_args.clip_range";
    let both = reader.number_or_null(RANGE, None)?;
    let width = |name, usual: f64| {
        let default = both.or((!reader.any_within(ARGS)).then_some(usual));
        let width = reader.number_or_null(name, None)?.or(default);
        width.ok_or_else(|| reader.refuse(RANGE, format!("a number, or `{name}`: options without it have no default")))
    };
    let epsilon_low = width("policy_loss_fn_args.clip_range_low", usual[0])?;
    let epsilon_high = width("policy_loss_fn_args.clip_range_high", usual[1])?;
    Ok(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() })
}

/// Reads the mask of sequences with a negative advantage whose mean `old_logp − ℓ` is above a threshold.
fn sequence_mask(reader: &OptionReader, notes: &mut Vec<String>) -> Result<Option<OffPolicyMask>, PresetError> {
    if !reader.flag("policy_loss_fn_args.enable_sequence_masking", false)? {
        return Ok(None);
    }
    if reader.flag("policy_loss_fn_args.fallback_to_policy_gradient", false)? {
        let expected = "false with `fallback_to_policy_gradient`, which leaves no log-ratio";
        return Err(reader.refuse("policy_loss_fn_args.enable_sequence_masking", expected));
    }
    notes.push("the log-ratios of the sequence mask are clamped to ±20 there".into());
    let threshold = reader.number("policy_loss_fn_args.delta_sequence_masking", 0.1)?;
    Ok(Some(OffPolicyMask { threshold, behaviour: OldLogp::Given }))
}

/// Reads the members of REC that the family has: the policy gradient, with a squared log-ratio, and the masked score function.
fn rec(reader: &OptionReader, notes: &mut Vec<String>) -> Result<Objective, PresetError> {
    const MODE: &str = "policy_loss_fn_args.clip_mode";
    const WEIGHT: &str = "policy_loss_fn_args.weight";
    const REGULARIZER: &str = "policy_loss_fn_args.regularizer";
    let clips = reader.word(MODE, false, &[("none", false), ("two-side", true)])?;
    let weighs = reader.word(WEIGHT, false, &[("none", false), ("importance_sampling", true)])?;
    let squares = reader.word(REGULARIZER, false, &[("none", false), ("k2", true)])?;
    match (clips, weighs) {
        (false, false) => {
            let coefficient = if squares { reader.number("policy_loss_fn_args.regularizer_coef", 0.0)? } else { 0.0 };
            // DRO halves its square.
            Ok(if coefficient == 0.0 {
                Objective::PolicyGradient
            } else {
                Objective::Dro(Dro { beta: 2.0 * coefficient })
            })
        }
        (true, true) if !squares => {
            notes.push("a ratio at a bound, exactly, is kept there and masked here".into());
            Ok(Objective::MaskedRatio(MaskedRatio {
                lower: 1.0 - reader.number("policy_loss_fn_args.epsilon_low", 0.2)?,
                upper: 1.0 + reader.number("policy_loss_fn_args.epsilon_high", 0.2)?,
                surrogate: false,
            }))
        }
        (true, true) => Err(reader.refuse(REGULARIZER, "none with `clip_mode`")),
        (true, false) => Err(reader.refuse(WEIGHT, "importance_sampling with `clip_mode` two-side")),
        (false, true) => Err(reader.refuse(MODE, "two-side with `weight` importance_sampling")),
    }
}

fn averaging(reader: &OptionReader, name: &'static str, usual: &'static str) -> Result<Averaging, PresetError> {
    let modes = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"];
    Ok(averaging_of(reader.word(name, usual, &modes.map(|mode| (mode, mode)))?))
}

/// Returns the mean of `aggregate_loss`; means over sequences count those without a token. Counts are of a boolean mask, so
/// that the 1e-8 added to them is lost in float32, whatever the dtype of the loss.
fn averaging_of(mode: &str) -> Averaging {
    let rows = Rows::All;
    let reduction = match mode {
        "seq-mean-token-sum" => Reduction::SequenceSum { rows },
        "seq-mean-token-mean" => Reduction::SequenceMean { rows },
        // The sum over sequences, divided by the width alone.
        "seq-mean-token-sum-norm" => Reduction::FixedLength { rows: Rows::Given(1.0), length: None },
        _ => Reduction::TokenMean,
    };
    Averaging { reduction, denominator_epsilon: 0.0 }
}

/// Reads the KL penalty, k2 by default.
fn kl(reader: &OptionReader, penalized: bool) -> Result<Option<Kl>, PresetError> {
    const KIND: &str = "kl_loss_fn";
    reader.off("kl_loss_fn_args.adaptive", "an adaptive coefficient changes from step to step")?;
    let usual = penalized.then_some("k2");
    let kinds = ["k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"].map(|kind| (kind, Some(kind)));
    let kinds: Vec<_> = kinds.into_iter().chain([("none", None)]).collect();
    let Some(kind) = reader.word(KIND, usual, &kinds)? else { return Ok(None) };
    let beta = reader.number("kl_loss_fn_args.kl_coef", 0.001)?;
    Ok(Some(match kind {
        "k1" => Kl::plain(beta, KlEstimator::K1),
        "k3" => Kl::plain(beta, KlEstimator::K3),
        "abs" => Kl::plain(beta, KlEstimator::Abs),
        // Both the difference and the estimate are clamped.
        "low_var_kl" => {
            Kl { difference_clamp: Some(20.0), value_clamp: Some(10.0), ..Kl::plain(beta, KlEstimator::K3) }
        }
        "corrected_k3" => {
            return Err(reader.refuse(KIND, "another: the family has no ratio held within [0, 2] as its weight"));
        }
        _ => Kl::plain(beta, KlEstimator::K2),
    }))
}
