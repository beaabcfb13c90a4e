//! [`OutputCotangents`]: the factors by which a framework differentiates the outputs.

use ndarray::Array2;

use assay_core::problem::ProblemError;

/// The derivatives of a framework's objective by each output. They enter the factors of a row's exponentials, in f64,
/// so that dlogits are rounded once.
#[derive(Clone, Copy, Debug)]
pub struct OutputCotangents<'c> {
    /// Derivative by the loss: 1, or the factor of gradient accumulation and loss scaling.
    pub loss: f64,
    /// Derivatives by logp, `[B,T]`, in addition to its part in the loss; `None` is 0. Those of masked tokens are not
    /// read.
    pub logp: Option<&'c Array2<f64>>,
    /// Derivatives by entropy, `[B,T]`, in addition to its part in the loss; `None` is 0. Those of masked tokens are
    /// not read.
    pub entropy: Option<&'c Array2<f64>>,
}

impl Default for OutputCotangents<'_> {
    /// Returns the cotangents of the loss alone: 1, and 0 for the rest.
    fn default() -> Self {
        Self::from_loss(1.0)
    }
}

impl OutputCotangents<'_> {
    /// Returns the cotangents of `factor` times the loss.
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
