//! [`LossSpec`]: one member of the family of GRPO losses, as plain data.
//!
//! A spec is read from YAML, TOML or JSON and has no behaviour that needs arrays. The formula of each choice is implemented twice: in
//! `assay-reference`, and independently for the kernels. [`presets`] turns the options of published projects into specs.
//!
//! ```
//! # use assay_core as assay;
//! use assay::spec::{LossSpec, Objective};
//!
//! let spec: LossSpec = serde_saphyr::from_str(
//!     "objective: {ppo_clip: {epsilon_low: 0.2, epsilon_high: 0.28}}
//! temperature: 0.7
//! kl: {beta: 0.04}
//! reduction: {sequence_mean: {rows: all}}",
//! )?;
//! spec.check()?;
//! let Objective::PpoClip(clip) = &spec.objective else { panic!("a PPO clip") };
//! assert_eq!(clip.epsilon_high, 0.28);
//! assert!(spec.describe().contains("ℓ = log_softmax(logits / 0.7)[id]"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod check;
mod describe;
mod distillation;
mod inputs;
mod kl;
mod logits;
mod objective;
pub mod presets;
mod ratio;
mod reduction;
mod rejection;
mod rollout;
mod temperature;

use serde::{Deserialize, Serialize};

pub use check::SpecError;
pub use distillation::{Distillation, DistillationKind, TopKRest};
pub use kl::{Kl, KlEstimator, KlGradient, KlImportance};
pub use logits::{KeptSupport, LogitsTransform, SoftmaxRange, Support};
pub use objective::{
    Aspo, Cispo, ClipCov, ClipWidths, CovarianceBand, CrossEntropy, Divergence, Dro, ImportanceSampling, KlCov,
    MaskedRatio, Objective, PositiveTokens, PpoClip, Sapo, TopCovariance, Topr, TrustRegion, Vespo,
};
pub use ratio::{LogClip, OldLogp, Ratio, RatioLevel};
pub use reduction::{Averaging, Reduction, Rows};
pub use rejection::{
    DroppedTerm, OffPolicyMask, QuantilePrecision, Rejection, RejectionEstimator, RejectionLevel, TopEntropy,
};
pub use rollout::{LossTerms, OutOfBounds, RolloutLevel, RolloutSource, RolloutWeights, TokenWeights, UnscoredWeight};
pub use temperature::{Temperature, TemperatureDivides};

/// A complete GRPO loss: every choice and every number that its value depends on.
///
/// `m` is the mask; `ℓ = logp` and `H = entropy` are of the softmax over the [`Support`] of the logits after their
/// [`LogitsTransform`], at the temperature. The loss is
///
/// ```text
/// x    = ℓ − old_logp, clamped                                     [`Ratio::clamp`], [`Ratio::clip`]
/// ρ    = exp of x, or of its mean or sum over the row              [`Ratio::level`]
/// f    = policy(ρ, ℓ, A)                                           [`Objective`]
/// f′   = f · off_policy_mask · top_entropy_mask · rollout weight   each for the terms that it applies to
/// token_loss = f′ + beta · kl(ref_logp − ℓ)                        [`Kl`]
/// loss = scale · (Σ_b w_b Σ_t m · token_loss − entropy_coef · mean(H))    [`Reduction`]
/// ```
///
/// With [`dentropy`](Self::dentropy) the last term is `+ Σ m · dentropy · H` instead; with
/// [`ids_per_token`](Self::ids_per_token) above 1 each token has several ids and a cotangent of each logp.
///
/// A file may leave out any field, which then has its value of [`LossSpec::default`]; an unknown field is an error.
///
/// ```
/// # use assay_core as assay;
/// use assay::spec::{Kl, KlEstimator, LossSpec, Objective, PpoClip, Reduction, Rows};
///
/// let spec = LossSpec {
///     objective: Objective::PpoClip(PpoClip { epsilon_high: 0.28, ..PpoClip::default() }),
///     kl: Some(Kl::plain(0.04, KlEstimator::K3)),
///     reduction: Reduction::SequenceMean { rows: Rows::All },
///     ..LossSpec::default()
/// };
/// assert!(spec.check().is_ok() && spec.reads_old_logp() && !spec.reads_rollout_logp());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// The policy term of a token, such as PPO's clipped surrogate.
    pub objective: Objective,
    /// The ratio `ρ` that the policy term reads.
    pub ratio: Ratio,
    /// Whether `advantages` holds one value a sequence, `[B]`, or one a token, `[B,T]`.
    pub advantages: AdvantageLevel,
    /// The source of the log-probability that the ratio divides by.
    pub old_logp: OldLogp,
    /// The transform of the logits before the temperature: scale, softcap and bias. Older files call it `head`.
    // A key that is read under two names has a third, which messages show: both in one file are a duplicate field.
    #[serde(rename(deserialize = "logits (old key: head)"), alias = "logits", alias = "head")]
    #[cfg_attr(feature = "schema", schemars(rename = "logits"))]
    pub logits: LogitsTransform,
    /// The vocabulary entries that the softmax runs over.
    pub support: Support,
    /// Softmax temperature `T > 0`, dimensionless: a number, or the problem's `temperature`.
    pub temperature: Temperature,
    /// The value that the temperature divides, logits or log-probabilities.
    pub temperature_divides: TemperatureDivides,
    /// Importance weights that correct for the difference between the sampler's policy and the old one.
    pub rollout: Option<RolloutWeights>,
    /// Rules that reject tokens and sequences on which the old policy is too far from the sampler's.
    pub rejection: Vec<Rejection>,
    /// Weights of tokens that the trainer gives, `[B,T]` or one per sequence.
    pub token_weights: Option<TokenWeights>,
    /// A mask that removes the policy term of sequences from which the policy has moved away.
    pub off_policy_mask: Option<OffPolicyMask>,
    /// A mask that keeps the policy term of the tokens with the highest entropy only.
    pub top_entropy: Option<TopEntropy>,
    /// The KL penalty against a reference policy; with `None` the loss has no such term and does not read `ref_logp`.
    pub kl: Option<Kl>,
    /// Coefficient of the entropy bonus: the loss gets `−entropy_coef · mean(H)`, with its gradient; any finite number.
    pub entropy_coef: f64,
    /// The mean of the entropy bonus; `None` is the mean over the unmasked tokens whose policy term [`TopEntropy`]
    /// keeps, `max(Σ m, 1)` of them.
    pub entropy_averaging: Option<Averaging>,
    /// Whether the loss has the term `scale · Σ m · dentropy · H` with the problem's `dentropy`, `[B,T]`, instead of an
    /// entropy bonus.
    pub dentropy: bool,
    /// The number `K ≥ 1` of ids per token whose logp is computed. More than one is for [logp by its
    /// cotangents](Self::from_cotangents) only, with all ids inside the [`Support`]. Older files call it `top`.
    #[serde(
        rename(deserialize = "ids_per_token (old key: top)"),
        alias = "ids_per_token",
        alias = "top",
        skip_serializing_if = "is_one"
    )]
    #[cfg_attr(feature = "schema", schemars(rename = "ids_per_token"))]
    pub ids_per_token: usize,
    /// The reduction of token losses to one number: the weight of each token.
    pub reduction: Reduction,
    /// A number `≥ 0` that is added to token counts in [`Reduction::TokenMean`] and [`Reduction::SequenceMean`]: 1e-8
    /// in verl and Tunix.
    pub denominator_epsilon: f64,
    /// The factor of the whole loss, `> 0`: the data-parallel size in verl, the reciprocal of the accumulation steps in
    /// TRL.
    pub scale: f64,
}

impl Default for LossSpec {
    /// Returns PPO-clip at 0.2/0.2, temperature 1, no KL, no entropy bonus, and the mean over all unmasked tokens.
    fn default() -> Self {
        Self {
            objective: Objective::PpoClip(PpoClip::default()),
            ratio: Ratio::default(),
            advantages: AdvantageLevel::Sequence,
            old_logp: OldLogp::Given,
            logits: LogitsTransform::default(),
            support: Support::default(),
            temperature: Temperature::ONE,
            temperature_divides: TemperatureDivides::Logits,
            rollout: None,
            rejection: Vec::new(),
            token_weights: None,
            off_policy_mask: None,
            top_entropy: None,
            kl: None,
            entropy_coef: 0.0,
            entropy_averaging: None,
            dentropy: false,
            ids_per_token: 1,
            reduction: Reduction::TokenMean,
            denominator_epsilon: 0.0,
            scale: 1.0,
        }
    }
}

impl LossSpec {
    /// Old names of fields that files may still use, each with the name that is written now.
    pub const OLD_KEYS: [(&str, &str); 2] = [("head", "logits"), ("top", "ids_per_token")];

    /// Returns logp without a loss: the sum `Σ m · dlogp · ℓ`, and with `entropy` the term `Σ m · dentropy · H` as
    /// well. Its gradient sends the given cotangents back through the softmax:
    ///
    /// ```text
    /// dlogits_j = (dlogp · (1[j = y] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    ///
    /// This is [`Objective::PolicyGradient`] with the advantages `A = −dlogp`. With [`ids_per_token`](Self::ids_per_token) `K > 1` each
    /// token has `K` ids, possibly with repetitions, and a cotangent of the logp `ℓ_k` of each: the sum is
    /// `Σ m (Σ_k dlogp_k · ℓ_k + dentropy · H)`, and
    ///
    /// ```text
    /// dlogits_j = (Σ_k dlogp_k · (1[j = y_k] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    ///
    /// ```
    /// # use assay_core as assay;
    /// use assay::spec::LossSpec;
    ///
    /// let spec = LossSpec { temperature: 0.7.into(), ids_per_token: 8, ..LossSpec::from_cotangents(false) };
    /// assert!(spec.is_from_cotangents() && spec.check().is_ok());
    /// ```
    pub fn from_cotangents(entropy: bool) -> Self {
        Self {
            // `−A·ℓ` with `A = −dlogp` is `dlogp·ℓ`; the current policy as the old one makes old log-probabilities
            // unnecessary.
            objective: Objective::PolicyGradient,
            advantages: AdvantageLevel::Token,
            old_logp: OldLogp::Current,
            dentropy: entropy,
            reduction: Reduction::Normalizer(1.0),
            ..Self::default()
        }
    }

    /// Returns the mean cross-entropy of the unmasked tokens, with this share of the target distribution uniform, and this weight of the
    /// squared log-sum-exp: see [`CrossEntropy`].
    ///
    /// ```
    /// # use assay_core as assay;
    /// use assay::spec::LossSpec;
    ///
    /// let spec = LossSpec { temperature: 0.7.into(), ..LossSpec::cross_entropy(0.1, 1e-4) };
    /// assert!(spec.check().is_ok() && !spec.reads_old_logp());
    /// ```
    pub fn cross_entropy(label_smoothing: f64, z_loss: f64) -> Self {
        Self {
            objective: Objective::CrossEntropy(CrossEntropy { label_smoothing, z_loss }),
            old_logp: OldLogp::Current,
            ..Self::default()
        }
    }

    /// Returns the JSON Schema of a spec file as the types have it: keys, choices, defaults and descriptions.
    #[cfg(feature = "schema")]
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Self).into()
    }

    /// Whether the spec is [`from_cotangents`](Self::from_cotangents), with any transform, support, temperature and
    /// number of ids: the result is logp and entropy, and there is no loss.
    pub fn is_from_cotangents(&self) -> bool {
        // Everything that may differ is taken from the spec itself, so that equality compares the rest.
        let Self { logits, support, temperature, temperature_divides, dentropy, ids_per_token, .. } = self.clone();
        *self
            == Self {
                logits,
                support,
                temperature,
                temperature_divides,
                ids_per_token,
                ..Self::from_cotangents(dentropy)
            }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(count: &usize) -> bool {
    *count == 1
}

/// The shape of the problem's `advantages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AdvantageLevel {
    /// One advantage per sequence, an array `[B]`.
    Sequence,
    /// One advantage per token, an array `[B,T]`.
    Token,
}
