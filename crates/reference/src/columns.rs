//! [`TokenColumns`]: the softmaxes of one token over the vocabulary.

use super::logits_transform::{TransformedLogits, divided};
use super::{ScaledSoftmax, Token};
use assay_core::spec::SoftmaxRange;

/// The transformed logits and the softmaxes of one token, over all vocabulary entries or a range of them.
pub struct TokenColumns {
    first: usize,
    /// The transformed logits; `None` if they equal `z` of the softmax of logp.
    logits: Option<Vec<f64>>,
    slopes: Option<Vec<f64>>,
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
    fn new(softmax: &ScaledSoftmax, logits: Vec<f64>) -> Self {
        let z = divided(logits, softmax.divisor);
        let probabilities = softmax.stats.probabilities(&z);
        Self { z, probabilities }
    }
}

impl TokenColumns {
    pub(super) fn new(scaled: TransformedLogits, token: &Token) -> Self {
        let TransformedLogits { first, logits, over_vocabulary, slopes } = scaled;
        let another = |softmax: &ScaledSoftmax| {
            let logits = match (softmax.range, &over_vocabulary) {
                (SoftmaxRange::Vocabulary, Some(logits)) => logits,
                _ => &logits,
            };
            (!softmax.is_same_function(&token.logp_softmax)).then(|| SoftmaxColumns::new(softmax, logits.clone()))
        };
        let (entropy, kl) = (another(&token.entropy_softmax), another(&token.kl_softmax));
        // The softmax of logp takes the logits over, as most often nothing divides them.
        let kept_logits = (token.logp_softmax.divisor != 1.0).then(|| logits.clone());
        let logp = SoftmaxColumns::new(&token.logp_softmax, logits);
        Self { first, logits: kept_logits, slopes, logp, entropy, kl }
    }

    /// Returns the first vocabulary entry of the range.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Returns the transformed logits `h_j = softcap · tanh(scale · (x_j + bias_j) / softcap)`; −∞ outside the
    /// support and the token's kept set.
    pub fn logits(&self) -> &[f64] {
        self.logits.as_ref().unwrap_or(&self.logp.z)
    }

    /// Returns the derivatives `∂h_j/∂x_j`; `None` if all are 1.
    pub fn slopes(&self) -> Option<&[f64]> {
        self.slopes.as_deref()
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
