//! The transform of logits before the softmax, and the vocabulary entries that the softmax runs over.

use serde::{Deserialize, Serialize};

/// The transform of logits `a` before the temperature: `softcap · tanh(scale · (a + bias) / softcap)`.
///
/// ```
/// # use assay_core as assay;
/// use assay::spec::{LogitsTransform, LossSpec};
///
/// let logits = LogitsTransform { softcap: Some(30.0), ..LogitsTransform::default() };
/// let spec = LossSpec { logits, temperature: 0.7.into(), ..LossSpec::default() };
/// assert!(spec.describe().contains("30·tanh(logits / 30)"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct LogitsTransform {
    /// The factor of the logits, finite and not 0.
    pub scale: f64,
    /// The bound of the logits' magnitude, `> 0`; `None` leaves the `tanh` out.
    pub softcap: Option<f64>,
    /// Whether the problem's `bias`, `[V]`, is added to the logits first.
    pub bias: bool,
}

impl Default for LogitsTransform {
    fn default() -> Self {
        Self { scale: 1.0, softcap: None, bias: false }
    }
}

/// The vocabulary entries that the softmax runs over. An entry outside the support has probability 0 and gradient 0,
/// whatever its logit is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Support {
    /// The number of entries that are tokens, `≥ 1`; the entries after them are padding. `None` means all entries.
    pub vocab: Option<usize>,
    /// Ids that the sampler never returns, such as tokens of images.
    pub excluded_ids: Vec<usize>,
    /// Whether a sampled id outside the support is put back for its own token (Unsloth); otherwise such an id is an
    /// error.
    pub keep_sampled: bool,
    /// Whether the problem has a kept set of each token, its `kept_ids`, outside of which an
    /// entry has probability 0; `None` means that it has not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<KeptSupport>,
}

/// The softmaxes of a batch whose sampler has kept a set of vocabulary entries for each token, as top-k and top-p do.
///
/// Log-probability and ratio are of the softmax over the token's set: its `kept_ids` that are in the rest of the [`Support`].
///
/// ```
/// # use assay_core as assay;
/// use assay::spec::{KeptSupport, LossSpec, SoftmaxRange, Support};
///
/// let kept = KeptSupport { entropy: SoftmaxRange::Vocabulary, ..KeptSupport::default() };
/// let spec = LossSpec { support: Support { kept: Some(kept), ..Support::default() }, ..LossSpec::default() };
/// assert!(spec.describe().contains("over each token's kept_ids, entropy over the vocabulary"));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct KeptSupport {
    /// The softmax whose entropy is computed.
    pub entropy: SoftmaxRange,
    /// The softmax whose log-probability the KL penalty compares with `ref_logp`.
    pub kl: SoftmaxRange,
}

/// The vocabulary entries that a softmax runs over, if the sampler has kept a set of them for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SoftmaxRange {
    /// The vocabulary entries in the token's kept set.
    #[default]
    Set,
    /// The support without regard to the set: the whole vocabulary, less what `vocab` and `excluded_ids` leave out.
    Vocabulary,
}

impl Support {
    /// Whether every vocabulary entry is in the support of every token.
    pub fn is_whole(&self) -> bool {
        self.vocab.is_none() && self.excluded_ids.is_empty() && self.kept.is_none()
    }

    /// Whether the vocabulary entry `id` is in the support, kept sets aside.
    pub fn has(&self, id: usize) -> bool {
        self.vocab.is_none_or(|vocab| id < vocab) && !self.excluded_ids.contains(&id)
    }
}
