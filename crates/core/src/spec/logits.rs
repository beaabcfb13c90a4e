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
}

impl Support {
    /// Whether every vocabulary entry is in the support.
    pub fn is_whole(&self) -> bool {
        self.vocab.is_none() && self.excluded_ids.is_empty()
    }
}
