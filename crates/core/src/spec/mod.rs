//! [`LossSpec`]: which member of the GRPO loss family is meant.
//!
//! Plain serde data (YAML, TOML, JSON), with no behaviour that needs arrays. What each choice computes is written
//! once in `assay-reference` and once, apart, for the kernels. [`presets`] turns the options of published projects
//! into it.

mod check;
mod describe;
mod objective;
pub mod presets;
mod temperature;

use serde::{Deserialize, Serialize};

pub use check::SpecError;
pub use objective::{
    Aspo, Cispo, ClipCov, CovarianceBand, Divergence, Dro, ImportanceSampling, KlCov, MaskedRatio, Objective, Positive,
    PpoClip, Sapo, TopCovariance, Topr, TrustRegion, Vespo, Widths,
};
pub use temperature::Temperature;

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
/// or, with [`dentropy`](Self::dentropy), `+ Σ m · dentropy · H` for the last term; and with [`top`](Self::top) the cotangents of
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
    /// How many ids of a token logp is asked of, `K ≥ 1`; more than one of [logp by its cotangents](Self::of_cotangents) alone, and
    /// none of them outside the [`Support`].
    #[serde(skip_serializing_if = "is_one")]
    pub top: usize,
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
            top: 1,
            reduction: Reduction::TokenMean,
            denominator_epsilon: 0.0,
            scale: 1.0,
        }
    }
}

impl LossSpec {
    /// Logp without a loss: the sum `Σ m · dlogp · ℓ`, with `entropy` `+ Σ m · dentropy · H`, whose gradient sends the given
    /// cotangents back through the softmax,
    ///
    /// ```text
    /// dlogits_j = (dlogp · (1[j = y] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    ///
    /// which is [`Objective::PolicyGradient`] with the advantages `A = −dlogp`. With [`top`](Self::top) `K > 1`, each token has `K` ids,
    /// some of them perhaps the same, and a cotangent of the logp `ℓ_k` of each: the sum is `Σ m (Σ_k dlogp_k · ℓ_k + dentropy · H)`, and
    ///
    /// ```text
    /// dlogits_j = (Σ_k dlogp_k · (1[j = y_k] − p_j) − dentropy · p_j (ln p_j + H)) / T
    /// ```
    pub fn of_cotangents(entropy: bool) -> Self {
        Self {
            objective: Objective::PolicyGradient,
            advantages: AdvantageLevel::Token,
            old_logp: OldLogp::Current,
            dentropy: entropy,
            reduction: Reduction::Normalizer(1.0),
            ..Self::default()
        }
    }

    /// Whether it is [`of_cotangents`](Self::of_cotangents), whatever becomes of logits before their softmax: there is no loss that
    /// anybody asks for, and logp and entropy are the result.
    pub fn is_of_cotangents(&self) -> bool {
        let Self { logits, support, temperature, temperature_divides, dentropy, top, .. } = self.clone();
        *self == Self { logits, support, temperature, temperature_divides, top, ..Self::of_cotangents(dentropy) }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(count: &usize) -> bool {
    *count == 1
}

/// The ratio `ρ` of a token, from the log-ratios `x_t = ℓ_t − old_logp_t` of its row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ratio {
    /// From which log-ratios, and with which gradient.
    pub level: RatioLevel,
    /// `|x_t| ≤ clamp`, of [`RatioLevel::SequenceProduct`] `|Σ m x| ≤ clamp`, without gradient beyond; `> 0`, nats. 20 in
    /// verl, Tunix, SkyRL and OpenRLHF.
    pub clamp: Option<f64>,
    /// GMPO's clip of every token's log-ratio.
    pub clip: Option<LogClip>,
    /// Upper bound of the level's log-ratio, without gradient beyond; nats. 10 in verl's and Tunix's GSPO.
    pub cap: Option<f64>,
    /// Added to the token count of [`RatioLevel::Sequence`] and [`RatioLevel::SequenceToken`], `≥ 0`; 0 of a product, which has
    /// none.
    pub denominator_epsilon: f64,
}

/// Which log-ratios a token's ratio is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// `ρ_t = exp(x_t)`
    #[default]
    Token,
    /// `ρ = exp(Σ m x / Σ m)` for all tokens of the row, with the gradient of the mean (GSPO, GMPO).
    Sequence,
    /// The same value, but `∂ln ρ_t/∂ℓ_u = 1[t=u]` (GSPO-token).
    SequenceToken,
    /// `ρ = exp(Σ m x)` for all tokens of the row, with the gradient of the sum (TRL's RLOO, verl's `bypass_mode`).
    SequenceProduct,
}

impl RatioLevel {
    /// Whether the tokens of a row share a ratio, and what each owes to it.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Sequence | Self::SequenceProduct)
    }
}

/// GMPO: `x_t` is held to `≤ high` where `A > 0` and to `≥ −low` where `A < 0`, without gradient beyond; 0 where `A = 0`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogClip {
    /// Nats, `≥ 0`.
    pub low: f64,
    /// Nats, `≥ 0`.
    pub high: f64,
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

/// Where the denominator of the ratio comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogp {
    /// The problem's `old_logp`.
    Given,
    /// `stop_gradient(logp)`: the ratio is exactly 1 and keeps its gradient. What TRL does when `old_logps` is `None`.
    Current,
    /// The problem's `rollout_logp`: the policy that sampled is the one that is corrected for.
    Rollout,
}

/// What becomes of logits `a` before the temperature: `softcap · tanh(scale · (a + bias) / softcap)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogitsTransform {
    /// `≠ 0`.
    pub scale: f64,
    /// `> 0`; `None` leaves the `tanh` out.
    pub softcap: Option<f64>,
    /// Whether the problem's `bias`, `[V]`, is added.
    pub bias: bool,
}

impl Default for LogitsTransform {
    fn default() -> Self {
        Self { scale: 1.0, softcap: None, bias: false }
    }
}

/// The columns that the softmax runs over. A column outside has probability 0 and gradient 0, whatever its logit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Support {
    /// How many columns are tokens, `≥ 1`; the rest is padding. `None`: all of them.
    pub vocab: Option<usize>,
    /// Ids that the sampler never returns.
    pub excluded_ids: Vec<usize>,
    /// Whether a sampled id outside the support is put back for its own token (unsloth), or is an error.
    pub keep_sampled: bool,
}

impl Support {
    /// Whether every column is in.
    pub fn is_whole(&self) -> bool {
        self.vocab.is_none() && self.excluded_ids.is_empty()
    }
}

/// What the temperature divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemperatureDivides {
    /// `logp = log_softmax(logits / T)[id]`: every published project but one.
    Logits,
    /// `logp = log_softmax(logits)[id] / T`, while entropy keeps `softmax(logits / T)`: MLLM-JAX.
    Logp,
}

/// Importance weights of the trainer's old policy against the sampler's: constants that multiply terms of the loss.
///
/// [`Vespo`] takes their logarithms into its own weight instead of multiplying its policy term.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutWeights {
    /// What they are made of.
    pub source: RolloutSource,
    /// One weight a token or a sequence.
    #[serde(default)]
    pub level: RolloutLevel,
    /// What becomes of a weight out of bounds.
    #[serde(default)]
    pub outside: Outside,
    /// Lower bound of a computed weight, `≥ 0`.
    #[serde(default)]
    pub min: Option<f64>,
    /// Upper bound of a computed weight, `> 0`.
    #[serde(default)]
    pub max: Option<f64>,
    /// `|log weight| ≤ clamp` of a computed weight, before `exp`; 20 in verl.
    #[serde(default)]
    pub clamp: Option<f64>,
    /// Divides every weight by their mean, unless that is 1e-8 or less: `Σ m·weight / (Σ m + 1e-8)` over the batch's
    /// tokens, or for the sequence levels the mean of the same over each row that has any, as in verl.
    #[serde(default)]
    pub normalize: bool,
    /// What a token that the sampler did not score adds.
    #[serde(default)]
    pub unscored: Unscored,
    /// What they multiply.
    #[serde(default)]
    pub applies_to: Terms,
}

/// What a token with a NaN `rollout_logp` adds to computed rollout weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unscored {
    /// `y = 0`: nothing (TRL, Unsloth).
    #[default]
    One,
    /// The weight that it has a part in is 0, before bounds: its own, or its sequence's. A gate by the geometric mean takes
    /// `y = 0` (NeMo).
    Zero,
}

/// Where rollout weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutSource {
    /// The problem's `rollout_weights`, `[B,T]` or `[B,1]`, taken as they are but for `level: geometric`: bounds and a
    /// clamp are refused.
    Given,
    /// `exp(old_logp − rollout_logp)`; a NaN `rollout_logp` is a token that was not scored: see [`Unscored`].
    Logp,
}

/// Of what a rollout weight is the `exp`, with `y_t = old_logp_t − rollout_logp_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutLevel {
    /// `y_t`
    #[default]
    Token,
    /// `Σ m y`
    Sequence,
    /// `Σ m y / Σ m`; of given weights `y = ln(weight + 1e-10)` and the count is `Σ m + 1e-8`, as in verl's `geo_mean`.
    Geometric,
    /// `y_t`, or 0 for the weight where the geometric mean is out of bounds (NeMo's `seq-mask-tis`).
    TokenGatedByGeometric,
}

/// What becomes of a rollout weight out of bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outside {
    /// It is set to the bound.
    #[default]
    Truncate,
    /// It is set to 0.
    Mask,
}

/// Which terms of a token's loss a factor multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Terms {
    /// The policy term alone.
    #[default]
    Policy,
    /// The policy term and the KL penalty.
    PolicyAndKl,
}

/// What the problem's `token_weights` multiply, before the reduction. A weight of 0 leaves its token out, as if masked;
/// [`RolloutWeights`] and rejections are made of all unmasked tokens, this one too.
///
/// Over [`Reduction::Normalizer`] of 1 they are the reduction: `1/(P · Σ n_b)`, the sum over a prompt's rows, is the mean over
/// `P` prompts of their token means (SkyRL's `prompt_mean`); a row's own weight is Unsloth's `sample_weight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TokenWeights {
    /// Which terms.
    pub applies_to: Terms,
}

/// Leaves tokens out where a statistic of `y_t = old_logp_t − rollout_logp_t` is not within bounds. A token that was not
/// scored has `y = 0`, and both probabilities its old one. [`RolloutWeights`] are made of all unmasked tokens, those that are
/// rejected too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// Of one token.
    pub estimator: RejectionEstimator,
    /// Over which tokens.
    pub level: RejectionLevel,
    /// Smallest value that stays.
    #[serde(default)]
    pub min: Option<f64>,
    /// Largest value that stays.
    pub max: f64,
    /// Whether a rejected token only loses the terms of `drops_from`, and still counts in denominators, in the row's ratio
    /// and in the entropy bonus (SkyRL; Unsloth but for the bonus), or is as if masked (verl).
    #[serde(default)]
    pub counts: bool,
    /// What a rejected token that counts has no part in.
    #[serde(default = "both_terms")]
    pub drops_from: Terms,
}

fn both_terms() -> Terms {
    Terms::PolicyAndKl
}

/// Divergence of one token between old and sampler's policy, with `p = exp(rollout_logp)` and `q = exp(old_logp)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectionEstimator {
    /// `−y`, with `|y| ≤ 20`.
    K1,
    /// `y²/2`, with `|y| ≤ 20`.
    K2,
    /// `e^y − 1 − y`, with `|y| ≤ 20`.
    K3,
    /// `p·ln(p/q) + (1−p)·ln((1−p)/(1−q))`, both held to `[1e-6, 1 − 1e-6]` (OpenRLHF).
    BinaryKl,
    /// `|p − q|`, both so held (OpenRLHF's `tv`).
    TotalVariation,
    /// `q − p` (ROLL).
    Probability,
    /// `e^|y|` (NeMo's `seq_logprob_error_threshold`, as a row's mean).
    AbsoluteRatio,
}

/// Over which tokens of a row a rejection looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectionLevel {
    /// Each by itself.
    Token,
    /// Their sum.
    SequenceSum,
    /// Their mean.
    SequenceMean,
    /// The largest.
    SequenceMax,
    /// The smallest: of K1 with a minimum alone, the other end of [`SequenceMax`](Self::SequenceMax) (SkyRL's outliers).
    SequenceMin,
    /// The mean of `y²` over the batch, `y` as it is: the fewest of the largest leave that bring the mean of the rest below
    /// `max`, the earlier of equal ones first; one token stays (M2PO). Asks for [`RejectionEstimator::K2`], no `min` and
    /// `counts: false`.
    SecondMoment,
}

/// DeepSeek-V3.2's off-policy sequence mask: a token keeps its policy term where `A ≥ 0` or
/// `Σ m (behaviour − ℓ) / Σ m ≤ threshold`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffPolicyMask {
    /// Nats.
    pub threshold: f64,
    /// Whose log-probabilities are `behaviour`: `given` for `old_logp`, `rollout` for `rollout_logp`. A NaN
    /// `rollout_logp` adds 0.
    pub behaviour: OldLogp,
}

/// A token keeps its policy term where its entropy is at least the `1 − fraction` quantile of the batch's unmasked
/// tokens, interpolated linearly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopEntropy {
    /// The share of tokens that stay, above 0 and below 1.
    pub fraction: f64,
    /// What the others are left out of.
    #[serde(default)]
    pub drops: Drops,
    /// What is rounded to f32 on the way, which shows where the quantile is a token's own entropy.
    #[serde(default)]
    pub precision: QuantilePrecision,
}

/// What of [`TopEntropy`] is rounded to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantilePrecision {
    /// Nothing.
    #[default]
    Exact,
    /// The share, the entropies that the quantile is taken of, and the quantile; not the entropies that are compared with
    /// it: TRL in f64.
    F32Threshold,
    /// Those too: TRL as it usually runs.
    F32,
}

/// What a token of low entropy is left out of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drops {
    /// The policy loss; denominators and the row's ratio keep it.
    #[default]
    PolicyTerm,
    /// The row's mean log-ratio; the policy loss keeps it (TRL's GMPO).
    Ratio,
}

/// The KL penalty `beta · kl(d)` with `d = ref_logp − logp`.
///
/// ```text
/// d   = clamp(ref_logp − ℓ, ±difference_clamp)
/// kl  = estimator(d) · importance            clamped to ±value_clamp after the estimator, or after the product
/// ```
///
/// Beyond a clamp the gradient is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kl {
    /// Weight, `≥ 0`.
    pub beta: f64,
    /// The estimator.
    #[serde(default)]
    pub estimator: KlEstimator,
    /// Whose gradient it has.
    #[serde(default)]
    pub gradient: KlGradient,
    /// What it is multiplied by.
    #[serde(default)]
    pub importance: KlImportance,
    /// Bound of `|d|`, `> 0`, nats. 20 in verl.
    #[serde(default)]
    pub difference_clamp: Option<f64>,
    /// Bound of `|kl|`, `> 0`, nats. 10 in verl.
    #[serde(default)]
    pub value_clamp: Option<f64>,
    /// Whether `value_clamp` bounds the product with the importance (unsloth), or the estimate before it.
    #[serde(default)]
    pub clamp_after_importance: bool,
    /// How it becomes one number; `None`: with the weights of the policy term.
    #[serde(default)]
    pub averaging: Option<Averaging>,
}

impl Kl {
    /// `beta · estimator`, and nothing more.
    pub fn plain(beta: f64, estimator: KlEstimator) -> Self {
        Self {
            beta,
            estimator,
            gradient: KlGradient::Own,
            importance: KlImportance::One,
            difference_clamp: None,
            value_clamp: None,
            clamp_after_importance: false,
            averaging: None,
        }
    }
}

/// Estimators of `KL(policy ‖ reference)` from one sampled token, with `d = ref_logp − logp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `−d`
    K1,
    /// `d² / 2`
    K2,
    /// `exp(d) − d − 1`
    #[default]
    K3,
    /// `|d|`
    Abs,
}

/// Whose gradient the KL estimate has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlGradient {
    /// Its own.
    #[default]
    Own,
    /// That of `k2` without clamps, `−(ref_logp − ℓ)`: unbiased, whatever the value (verl's `k1+`, `k3+`).
    K2,
    /// The same times `sg(min(exp(ℓ − old_logp), bound))` of the token, the bound given, `> 0`: 10 in OpenRLHF.
    K2Weighted(f64),
}

/// What the KL estimate is multiplied by, with its gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlImportance {
    /// Nothing.
    #[default]
    One,
    /// The ratio `ρ` of the token's level, before any clip: DeepSeek-V3.2's bias correction.
    Ratio,
    /// `exp(x)` of the token's own log-ratio after its clamp and clip, whatever the level (slime's GSPO).
    TokenRatio,
    /// `exp(ℓ − rollout_logp)`, without gradient where `difference_clamp` holds the difference; 0 where `rollout_logp` is NaN
    /// (NeMo's `use_on_policy_kl_approximation`).
    Rollout,
    /// `exp(ℓ − stop_gradient(ℓ))`: 1, whose derivative is 1, or 0 where `difference_clamp` holds the difference (NeMo).
    Score,
}

/// How token losses become one number: the weight `w_b` of every token of row `b`, with `n_b = Σ_t m[b,t]` and `ε` the
/// `denominator_epsilon`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reduction {
    /// `1 / (Σ n_b + ε)`: mean over the batch's unmasked tokens (bnpo; dapo on one device).
    TokenMean,
    /// `1 / (B′ · (n_b + ε))`: mean over rows of each row's token mean (grpo).
    SequenceMean {
        /// What is `B′`.
        rows: Rows,
    },
    /// `1 / B′`: mean over rows of each row's token sum (luspo, verl's `seq-mean-token-sum`).
    SequenceSum {
        /// What is `B′`.
        rows: Rows,
    },
    /// `1 / (B′ · length)` (`dr_grpo`).
    FixedLength {
        /// What is `B′`.
        rows: Rows,
        /// The completion length that every row is divided by, `≥ 1`; `None`: the padded width `T`.
        #[serde(default)]
        length: Option<usize>,
    },
    /// `1 / normalizer`, a count taken elsewhere, such as the tokens of the global batch (dapo).
    Normalizer(f64),
}

/// How many rows a reduction divides by, `B′`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// `B`: a fully masked row counts with loss 0 (TRL, Liger).
    All,
    /// The number of rows with at least one token (verl, Tunix).
    NonEmpty,
    /// A count taken elsewhere, `> 0`: the sequences of the global batch.
    Given(f64),
}

/// A reduction of its own for one term.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Averaging {
    /// The weights.
    pub reduction: Reduction,
    /// As [`LossSpec::denominator_epsilon`].
    #[serde(default)]
    pub denominator_epsilon: f64,
}

impl LossSpec {
    /// The reduction of the policy term.
    pub fn averaging(&self) -> Averaging {
        Averaging { reduction: self.reduction, denominator_epsilon: self.denominator_epsilon }
    }

    /// Whether the loss needs the problem's `old_logp`.
    pub fn reads_old_logp(&self) -> bool {
        self.old_logp == OldLogp::Given
            || self.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Given)
            || self.compares_with_sampler()
    }

    /// Whether it needs the problem's `rollout_logp`.
    pub fn reads_rollout_logp(&self) -> bool {
        self.old_logp == OldLogp::Rollout
            || self.off_policy_mask.is_some_and(|mask| mask.behaviour == OldLogp::Rollout)
            || self.compares_with_sampler()
            || self.weighs_kl_by_rollout()
    }

    /// Whether it needs the problem's `rollout_weights`.
    pub fn reads_rollout_weights(&self) -> bool {
        self.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given)
    }

    /// Whether it needs the problem's `selected`.
    pub fn reads_selected(&self) -> bool {
        match &self.objective {
            Objective::KlCov(cov) => cov.selection.is_none(),
            Objective::ClipCov(cov) => cov.selection.is_none(),
            Objective::Topr(topr) => topr.positive == Positive::Selected,
            Objective::Aspo(aspo) => aspo.selected.is_some(),
            _ => false,
        }
    }

    /// Whether the KL penalty is weighed against the sampler by the current policy.
    pub fn weighs_kl_by_rollout(&self) -> bool {
        self.kl.as_ref().is_some_and(|kl| kl.importance == KlImportance::Rollout)
    }

    /// Whether it compares `old_logp` with `rollout_logp`.
    pub fn compares_with_sampler(&self) -> bool {
        let of_logp = |rollout: &RolloutWeights| rollout.source == RolloutSource::Logp;
        self.rollout.as_ref().is_some_and(of_logp) || !self.rejection.is_empty()
    }

    /// The averagings that are asked for, by the name of the length that each may have.
    fn averagings(&mut self) -> impl Iterator<Item = (&'static str, &mut Reduction)> {
        let kl = self.kl.as_mut().and_then(|kl| kl.averaging.as_mut());
        let entropy = self.entropy_averaging.as_mut();
        let own = [("kl.averaging", kl), ("entropy_averaging", entropy)];
        let own = own.into_iter().filter_map(|(field, of)| Some((field, &mut of?.reduction)));
        std::iter::once(("reduction", &mut self.reduction)).chain(own)
    }

    /// Checks that no mean is over the padded width, which packed sequences do not have.
    ///
    /// # Errors
    /// The setting that has one.
    pub fn expect_no_width(&self) -> Result<(), &'static str> {
        let mut spec = self.clone();
        let wide = spec.averagings().find(|(_, of)| matches!(of, Reduction::FixedLength { length: None, .. }));
        wide.map_or(Ok(()), |(field, _)| {
            Err(match field {
                "kl.averaging" => "kl.averaging.reduction.fixed_length.length",
                "entropy_averaging" => "entropy_averaging.reduction.fixed_length.length",
                _ => "reduction.fixed_length.length",
            })
        })
    }

    /// The same loss of a batch that is padded to `width`, whatever the width of the batch it is asked of.
    #[must_use]
    pub fn of_width(mut self, width: usize) -> Self {
        for (_, of) in self.averagings() {
            if let Reduction::FixedLength { length: length @ None, .. } = of {
                *length = Some(width);
            }
        }
        self
    }

    /// The reduction of the KL penalty.
    pub fn kl_averaging(&self) -> Averaging {
        self.kl.as_ref().and_then(|kl| kl.averaging).unwrap_or_else(|| self.averaging())
    }
}
