//! [`TokenColumns`]: the softmaxes of one token over the vocabulary.

use super::logits_transform::TransformedLogits;
use super::{ScaledSoftmax, Token};
use assay_core::spec::SoftmaxRange;

/// The transformed logits and the softmaxes of one token, over all vocabulary entries or a range of them.
pub struct TokenColumns {
    scaled: TransformedLogits,
    logp: SoftmaxColumns,
    /// The softmax of the entropy; `None` if it equals that of logp.
    entropy: Option<SoftmaxColumns>,
    /// The softmax of the KL penalty's log-probability; `None` if it equals that of logp.
    kl: Option<SoftmaxColumns>,
}

/// A softmax over a range of vocabulary entries.
pub struct SoftmaxColumns {
    /// The logits divided by the softmax's divisor, `z_j`.
    pub z: Vec<f64>,
    /// The probabilities `p_j` of the entries.
    pub probabilities: Vec<f64>,
}

impl SoftmaxColumns {
    fn new(softmax: &ScaledSoftmax, logits: &[f64]) -> Self {
        let z: Vec<f64> = logits.iter().map(|h| h / softmax.divisor).collect();
        let probabilities = z.iter().map(|&z| softmax.stats.probability(z)).collect();
        Self { z, probabilities }
    }
}

impl TokenColumns {
    pub(super) fn new(scaled: TransformedLogits, token: &Token) -> Self {
        let over = |softmax: &ScaledSoftmax| {
            let logits = match (softmax.range, &scaled.over_vocabulary) {
                (SoftmaxRange::Vocabulary, Some(logits)) => logits,
                _ => &scaled.logits,
            };
            SoftmaxColumns::new(softmax, logits)
        };
        let logp = &token.logp_softmax;
        let another = |softmax: &ScaledSoftmax| (!softmax.is_same_function(logp)).then(|| over(softmax));
        Self { logp: over(logp), entropy: another(&token.entropy_softmax), kl: another(&token.kl_softmax), scaled }
    }

    /// Returns the first vocabulary entry of the range.
    pub fn first(&self) -> usize {
        self.scaled.first
    }

    /// Returns the transformed logits `h_j = softcap · tanh(scale · (x_j + bias_j) / softcap)`; −∞ outside the
    /// support and the token's kept set.
    pub fn logits(&self) -> &[f64] {
        &self.scaled.logits
    }

    /// Returns the derivatives `∂h_j/∂x_j`; `None` if all are 1.
    pub fn slopes(&self) -> Option<&[f64]> {
        self.scaled.slopes.as_deref()
    }

    /// Returns the index of `id` in the range; `None` if it is outside.
    pub fn place_of(&self, id: usize) -> Option<usize> {
        id.checked_sub(self.first()).filter(|&at| at < self.logits().len())
    }

    /// Returns `z` and `p` of the softmax that logp is taken from.
    pub fn logp(&self) -> &SoftmaxColumns {
        &self.logp
    }

    /// Returns `z` and `q` of the softmax that entropy is taken from.
    pub fn entropy(&self) -> &SoftmaxColumns {
        self.entropy.as_ref().unwrap_or(&self.logp)
    }

    /// Returns `z` and `p` of the softmax that the KL penalty's log-probability is taken from.
    pub fn kl(&self) -> &SoftmaxColumns {
        self.kl.as_ref().unwrap_or(&self.logp)
    }
}
