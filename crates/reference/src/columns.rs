//! [`TokenColumns`]: what a token's softmaxes say of its columns.

use super::logits_transform::TransformedLogits;
use super::{ScaledSoftmax, Token};

/// A token's transformed logits and its softmaxes, or those of some columns of it.
pub struct TokenColumns {
    scaled: TransformedLogits,
    logp: SoftmaxColumns,
    /// `None` where it is the same.
    entropy: Option<SoftmaxColumns>,
}

/// Columns of a softmax.
pub struct SoftmaxColumns {
    /// `z_j`, the logits divided by what the softmax divides them by.
    pub z: Vec<f64>,
    /// Their probabilities.
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
        let (logp, entropy) = (&token.logp_softmax, &token.entropy_softmax);
        let entropy = (logp.divisor != entropy.divisor).then(|| SoftmaxColumns::new(entropy, &scaled.logits));
        Self { logp: SoftmaxColumns::new(logp, &scaled.logits), entropy, scaled }
    }

    /// The first column.
    pub fn first(&self) -> usize {
        self.scaled.first
    }

    /// From that on `h_j = softcap · tanh(scale · (x_j + bias_j) / softcap)`; −∞ outside the support.
    pub fn logits(&self) -> &[f64] {
        &self.scaled.logits
    }

    /// `∂h_j/∂x_j`; `None` where it is 1 for all.
    pub fn slopes(&self) -> Option<&[f64]> {
        self.scaled.slopes.as_deref()
    }

    /// Where the sampled id stands among them, if it does.
    pub fn place_of(&self, id: usize) -> Option<usize> {
        id.checked_sub(self.first()).filter(|&at| at < self.logits().len())
    }

    /// Of the softmax that logp is taken from: `z` and `p`.
    pub fn logp(&self) -> &SoftmaxColumns {
        &self.logp
    }

    /// Of the softmax that entropy is taken from: `z` and `q`.
    pub fn entropy(&self) -> &SoftmaxColumns {
        self.entropy.as_ref().unwrap_or(&self.logp)
    }
}
