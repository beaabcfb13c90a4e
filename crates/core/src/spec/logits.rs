//! The transform of logits before the softmax, and the vocabulary entries that the softmax runs over.

use serde::{Deserialize, Serialize};

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
