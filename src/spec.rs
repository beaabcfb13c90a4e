//! [`LossSpec`]: which member of the GRPO loss family is meant.
//!
//! Plain serde data (YAML, TOML, JSON), with no behaviour that needs arrays. What each choice computes is written
//! once in [`crate::reference`] and once, apart, for the kernels.

use serde::{Deserialize, Serialize};

/// One GRPO loss, in full.
///
/// With `ℓ = logp`, `r = exp(ℓ − old_logp)` and `m` the mask, the loss is
///
/// ```text
/// token_loss[b,t] = policy(r, A) + beta · kl(ref_logp − ℓ)
/// loss            = Σ_b w_b Σ_t m · token_loss  −  entropy_coef · Σ m · entropy / Σ m
/// ```
///
/// `policy` is [`Objective`], `kl` is [`Kl`], the weights `w_b` are [`Reduction`].
///
/// In a file every field may be left out and takes its value from [`LossSpec::default`]; an unknown field is an
/// error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSpec {
    /// The policy term.
    pub objective: Objective,
    /// Whether `advantages` holds one value a sequence, `[B]`, or one a token, `[B,T]`.
    pub advantages: AdvantageLevel,
    /// Where the ratio's denominator comes from.
    pub old_logp: OldLogp,
    /// Softmax temperature `T > 0`, dimensionless.
    pub temperature: f64,
    /// What the temperature divides.
    pub temperature_divides: TemperatureDivides,
    /// The KL penalty against a reference policy; `None` leaves the term out and `ref_logp` unread.
    pub kl: Option<Kl>,
    /// Entropy bonus `coef`: the loss gets `−coef · Σ m·H / Σ m`, with its gradient.
    pub entropy_coef: f64,
    /// How token losses become one number.
    pub reduction: Reduction,
}

impl Default for LossSpec {
    /// PPO-clip at 0.2/0.2, temperature 1, no KL, no entropy bonus, mean over all unmasked tokens.
    fn default() -> Self {
        Self {
            objective: Objective::PpoClip(PpoClip::default()),
            advantages: AdvantageLevel::Sequence,
            old_logp: OldLogp::Given,
            temperature: 1.0,
            temperature_divides: TemperatureDivides::Logits,
            kl: None,
            entropy_coef: 0.0,
            reduction: Reduction::TokenMean,
        }
    }
}

/// The policy term of one token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// PPO's clipped surrogate, with the optional bounds that GRPO code adds to it.
    PpoClip(PpoClip),
}

/// PPO-clip: `−min(min(r, delta)·A, clip(r, 1 − epsilon_low, 1 + epsilon_high)·A)`, and for `A < 0` with a dual clip
/// `c` the smaller of that and `−c·A`.
///
/// Exactly at a bound the unclipped branch, and so its gradient, is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PpoClip {
    /// Lower clip width, `≥ 0`: the ratio is clipped at `1 − epsilon_low` where `A < 0`.
    pub epsilon_low: f64,
    /// Upper clip width, `≥ 0`: the ratio is clipped at `1 + epsilon_high` where `A > 0`.
    pub epsilon_high: f64,
    /// Two-sided clip (INTELLECT-2): an upper bound on the unclipped ratio, `> 0`.
    pub delta: Option<f64>,
    /// Dual-clip PPO: for `A < 0` the loss stops at `−c·A`, `c > 1`.
    pub dual_clip: Option<f64>,
}

impl Default for PpoClip {
    fn default() -> Self {
        Self { epsilon_low: 0.2, epsilon_high: 0.2, delta: None, dual_clip: None }
    }
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

/// Where `old_logp` comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogp {
    /// The problem's `old_logp`.
    Given,
    /// `stop_gradient(logp)`: the ratio is exactly 1 and keeps its gradient. What TRL does when `old_logps` is `None`.
    Current,
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

/// The KL penalty `beta · kl(d)` with `d = ref_logp − logp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kl {
    /// Weight, `≥ 0`.
    pub beta: f64,
    /// The estimator.
    #[serde(default)]
    pub estimator: KlEstimator,
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

/// How token losses become one number: the weight `w_b` of every token of row `b`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reduction {
    /// `1 / Σ m`: mean over the batch's unmasked tokens (bnpo; dapo on one device).
    TokenMean,
    /// `1 / (B′ · Σ_t m[b,t])`: mean over rows of each row's token mean (grpo).
    SequenceMean {
        /// `true`: `B′ = B`, a fully masked row counts with loss 0 (TRL, Liger). `false`: `B′` is the number of rows
        /// with at least one token (verl, Tunix).
        count_empty_rows: bool,
    },
    /// `1 / (B · max_length)` (`dr_grpo`).
    TokenSum {
        /// The completion length that every row is divided by, `≥ 1`.
        max_length: usize,
    },
    /// `1 / normalizer`, a count taken elsewhere, such as the tokens of the global batch (dapo).
    Normalizer(f64),
}

/// A [`LossSpec`] that means nothing: which field, what it held, what it may hold.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("spec field `{field}`: got {given}, expected {expected}")]
pub struct SpecError {
    /// Path of the field, as a file spells it.
    pub field: &'static str,
    /// The value found.
    pub given: f64,
    /// What would have been accepted.
    pub expected: &'static str,
}

impl LossSpec {
    /// Checks every number's range.
    ///
    /// # Errors
    /// [`SpecError`] naming the first field outside its range.
    pub fn check(&self) -> Result<(), SpecError> {
        const POSITIVE: &str = "a finite number > 0";
        const NON_NEGATIVE: &str = "a finite number ≥ 0";
        let ensure = |ok: bool, field, given, expected| {
            if ok { Ok(()) } else { Err(SpecError { field, given, expected }) }
        };
        let positive = |field, x: f64| ensure(x > 0.0 && x.is_finite(), field, x, POSITIVE);
        let non_negative = |field, x: f64| ensure(x >= 0.0 && x.is_finite(), field, x, NON_NEGATIVE);

        positive("temperature", self.temperature)?;
        let Objective::PpoClip(clip) = &self.objective;
        non_negative("objective.ppo_clip.epsilon_low", clip.epsilon_low)?;
        non_negative("objective.ppo_clip.epsilon_high", clip.epsilon_high)?;
        if let Some(delta) = clip.delta {
            positive("objective.ppo_clip.delta", delta)?;
        }
        if let Some(c) = clip.dual_clip {
            ensure(c > 1.0 && c.is_finite(), "objective.ppo_clip.dual_clip", c, "a finite number > 1")?;
        }
        if let Some(kl) = &self.kl {
            non_negative("kl.beta", kl.beta)?;
        }
        ensure(self.entropy_coef.is_finite(), "entropy_coef", self.entropy_coef, "a finite number")?;
        match self.reduction {
            Reduction::TokenMean | Reduction::SequenceMean { .. } => Ok(()),
            Reduction::TokenSum { max_length } => {
                ensure(max_length >= 1, "reduction.token_sum.max_length", max_length as f64, "an integer ≥ 1")
            }
            Reduction::Normalizer(value) => positive("reduction.normalizer", value),
        }
    }
}
