//! [`LossSpec`]: which member of the GRPO loss family is meant.
//!
//! Plain serde data (YAML, TOML, JSON), with no behaviour that needs arrays. What each choice computes is written
//! once in `assay-reference` and once, apart, for the kernels. [`presets`] turns the options of published projects
//! into it.

mod check;
mod describe;
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
pub use kl::{Kl, KlEstimator, KlGradient, KlImportance};
pub use logits::{LogitsTransform, Support};
pub use objective::{
    Aspo, Cispo, ClipCov, ClipWidths, CovarianceBand, Divergence, Dro, ImportanceSampling, KlCov, MaskedRatio,
    Objective, PositiveTokens, PpoClip, Sapo, TopCovariance, Topr, TrustRegion, Vespo,
};
pub use ratio::{LogClip, OldLogp, Ratio, RatioLevel};
pub use reduction::{Averaging, Reduction, Rows};
pub use rejection::{
    DroppedTerm, OffPolicyMask, QuantilePrecision, Rejection, RejectionEstimator, RejectionLevel, TopEntropy,
};
pub use rollout::{LossTerms, OutOfBounds, RolloutLevel, RolloutSource, RolloutWeights, TokenWeights, UnscoredWeight};
pub use temperature::{Temperature, TemperatureDivides};

/// One GRPO loss, in full.
///
/// With `m` the mask, `ℓ = logp` and `H = entropy`, both of the softmax over [`Support`] of the logits after their
/// [`LogitsTransform`], at the temperature, the loss is
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
/// or, with [`dentropy`](Self::dentropy), `+ Σ m · dentropy · H` for the last term; and with [`ids_per_token`](Self::ids_per_token) the cotangents of
/// more ids than one.
///
/// In a file every field may be left out and takes its value from [`LossSpec::default`]; an unknown field is an
/// error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// The policy term.
    pub objective: Objective,
    /// What the policy term takes for the ratio.
    pub ratio: Ratio,
    /// Whether `advantages` holds one value a sequence, `[B]`, or one a token, `[B,T]`.
    pub advantages: AdvantageLevel,
    /// Where the ratio's denominator comes from.
    pub old_logp: OldLogp,
    /// What becomes of logits before the temperature. Older files call it `head`.
    // What is read under two names has a third, which messages call it by: both in one file are a duplicate field.
    #[serde(rename(deserialize = "logits (old key: head)"), alias = "logits", alias = "head")]
    pub logits: LogitsTransform,
    /// Which columns the softmax runs over.
    pub support: Support,
    /// Softmax temperature `T > 0`, dimensionless: a number, or the problem's `temperature`.
    pub temperature: Temperature,
    /// What the temperature divides.
    pub temperature_divides: TemperatureDivides,
    /// Weights that correct for the sampler's own policy.
    pub rollout: Option<RolloutWeights>,
    /// Tokens and sequences that are rejected because the sampler's policy was too far away.
    pub rejection: Vec<Rejection>,
    /// Weights of tokens that the trainer gives.
    pub token_weights: Option<TokenWeights>,
    /// Leaves out the policy term of sequences that the policy has moved away from.
    pub off_policy_mask: Option<OffPolicyMask>,
    /// Keeps the policy term of the tokens with the highest entropy only.
    pub top_entropy: Option<TopEntropy>,
    /// The KL penalty against a reference policy; `None` leaves the term out and `ref_logp` unread.
    pub kl: Option<Kl>,
    /// Entropy bonus `coef`: the loss gets `−coef · mean(H)`, with its gradient.
    pub entropy_coef: f64,
    /// Which mean: `None` is over the unmasked tokens whose policy term [`TopEntropy`] keeps, `max(Σ m, 1)` of them.
    pub entropy_averaging: Option<Averaging>,
    /// Whether the problem's `dentropy`, `[B,T]`, comes in: `∂loss/∂H` of each token, but for [`scale`](Self::scale), in place
    /// of an entropy bonus.
    pub dentropy: bool,
    /// How many ids of a token logp is asked of, `K ≥ 1`; more than one of [logp by its cotangents](Self::from_cotangents) alone, and
    /// none of them outside the [`Support`].
    #[serde(
        rename(deserialize = "ids_per_token (old key: top)"),
        alias = "ids_per_token",
        alias = "top",
        skip_serializing_if = "is_one"
    )]
    pub ids_per_token: usize,
    /// How token losses become one number.
    pub reduction: Reduction,
    /// Added to token counts in [`Reduction::TokenMean`] and [`Reduction::SequenceMean`], `≥ 0`: 1e-8 in verl and Tunix.
    pub denominator_epsilon: f64,
    /// What the whole loss is multiplied by, `> 0`: the data-parallel size in verl, the reciprocal of the accumulation
    /// steps in TRL.
    pub scale: f64,
}

impl Default for LossSpec {
    /// PPO-clip at 0.2/0.2, temperature 1, no KL, no entropy bonus, mean over all unmasked tokens.
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

    /// Logp without a loss: the sum `Σ m · dlogp · ℓ`, with `entropy` `+ Σ m · dentropy · H`, whose gradient sends the given
    /// cotangents back through the softmax,
    ///
    /// ```text
    /// dlogits_j = (dlogp · (1[j = y] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    ///
    /// which is [`Objective::PolicyGradient`] with the advantages `A = −dlogp`. With [`ids_per_token`](Self::ids_per_token) `K > 1`, each token has `K` ids,
    /// some of them perhaps the same, and a cotangent of the logp `ℓ_k` of each: the sum is `Σ m (Σ_k dlogp_k · ℓ_k + dentropy · H)`, and
    ///
    /// ```text
    /// dlogits_j = (Σ_k dlogp_k · (1[j = y_k] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    pub fn from_cotangents(entropy: bool) -> Self {
        Self {
            objective: Objective::PolicyGradient,
            advantages: AdvantageLevel::Token,
            old_logp: OldLogp::Current,
            dentropy: entropy,
            reduction: Reduction::Normalizer(1.0),
            ..Self::default()
        }
    }

    /// Whether it is [`from_cotangents`](Self::from_cotangents), whatever becomes of logits before their softmax: there is no loss that
    /// anybody asks for, and logp and entropy are the result.
    pub fn is_from_cotangents(&self) -> bool {
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
fn is_one(count: &usize) -> bool {
    *count == 1
}

/// Shape of `advantages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageLevel {
    /// One value a sequence, `[B]`.
    Sequence,
    /// One value a token, `[B,T]`.
    Token,
}
