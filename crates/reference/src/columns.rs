//! [`Columns`]: what a token's softmaxes say of its columns.

use super::Token;
use super::logits_transform::Scaled;

/// A token's transformed logits and their probabilities, or those of some columns of it.
pub struct Columns {
    scaled: Scaled,
    /// `p`, of the softmax that logp is taken from.
    p: Vec<f64>,
    /// `q`, of the softmax that entropy is taken from; `None` where it is `p`.
    q: Option<Vec<f64>>,
}

impl Columns {
    pub(super) fn of(scaled: Scaled, token: &Token) -> Self {
        let (logp, entropy) = (&token.logp_softmax, &token.entropy_softmax);
        let p = logp.probabilities(&scaled.logits);
        let q = (logp.divisor != entropy.divisor).then(|| entropy.probabilities(&scaled.logits));
        Self { scaled, p, q }
    }

    /// The first column.
    pub fn first(&self) -> usize {
        self.scaled.first
    }

    /// From that on `h_j = softcap · tanh(scale · (x_j + bias_j) / softcap)`; −∞ outside the support.
    pub fn logits(&self) -> &[f64] {
        &self.scaled.logits
    }

    /// `∂h_j/∂x_j` of column `j`.
    pub fn slope(&self, j: usize) -> f64 {
        self.scaled.slope(j)
    }

    /// `p_j`, of the softmax that logp is taken from.
    pub fn probabilities(&self) -> &[f64] {
        &self.p
    }

    /// `q_j`, of the softmax that entropy is taken from.
    pub fn probabilities_of_entropy(&self) -> &[f64] {
        self.q.as_ref().unwrap_or(&self.p)
    }
}
