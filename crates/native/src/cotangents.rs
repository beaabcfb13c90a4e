//! [`OutputCotangents`]: what the outputs are differentiated for.

use ndarray::Array2;

use assay_core::problem::ProblemError;

/// The derivatives, by each output, of what a framework minimises. They go into what multiplies a row's exponentials, in
/// f64: dlogits are rounded once whatever they are.
#[derive(Clone, Copy, Debug)]
pub struct OutputCotangents<'c> {
    /// By the loss: 1, or what accumulation and loss scaling make of it.
    pub loss: f64,
    /// `[B,T]`, by logp, beside its part in the loss; `None` is 0. Masked tokens' are not read.
    pub logp: Option<&'c Array2<f64>>,
    /// `[B,T]`, by entropy, beside its part in the loss; likewise.
    pub entropy: Option<&'c Array2<f64>>,
}

impl Default for OutputCotangents<'_> {
    /// Of the loss itself.
    fn default() -> Self {
        Self::from_loss(1.0)
    }
}

impl OutputCotangents<'_> {
    /// Of `factor` times the loss.
    pub fn from_loss(factor: f64) -> Self {
        Self { loss: factor, logp: None, entropy: None }
    }

    /// Checks the extents against `[B,T]` of the logits.
    pub(super) fn check(&self, extents: [usize; 2]) -> Result<(), ProblemError> {
        for (field, cotangent) in [("cotangent of logp", self.logp), ("cotangent of entropy", self.entropy)] {
            if let Some(cotangent) = cotangent.filter(|cotangent| cotangent.shape() != extents) {
                let expected = format!("{extents:?} ([B,T] of the logits)");
                return Err(ProblemError::Shape { field, given: cotangent.shape().to_vec(), expected });
            }
        }
        Ok(())
    }
}
