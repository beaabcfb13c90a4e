//! The distance between the reference and the recorded outputs of a published implementation.

use ndarray::Array3;

use assay_core::problem::Dtype;
use assay_reference::Reference;

/// Relative errors of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerDifference {
    /// `|Δ| / max(|expected|, 1e-12)` of the loss.
    pub loss: f64,
    /// `max |Δ| / max(max |expected|, 1e-12)` over all of dlogits.
    pub dlogits: f64,
}

/// The magnitude below which an expected value counts as 0.
const FLOOR: f64 = 1e-12;

impl PeerDifference {
    /// Compares the loss and dlogits of `reference` with the expected ones.
    ///
    /// ```
    /// use assay_core::problem::Dtype;
    /// use assay_core::spec::LossSpec;
    /// use assay_judge::generate::{Recipe, Regime};
    /// use assay_suites::peers::{PeerDifference, limit};
    ///
    /// let spec = LossSpec::default();
    /// let recipe = Recipe {
    ///     shape: [2, 3, 32],
    ///     dtype: Dtype::F32,
    ///     regime: Regime::Normal,
    ///     seed: 0,
    ///     old_logp_noise_scale: 0.3,
    ///     masked_garbage: false,
    /// };
    /// let problem = recipe.problem(&spec).unwrap();
    /// let reference = assay_reference::evaluate(&spec, &problem).unwrap();
    /// let exact = reference.outcome();
    /// let difference = PeerDifference::new(&reference, reference.loss(), &exact.gradient.to_f64());
    /// assert!(difference.within(limit(Dtype::F32)));
    /// ```
    pub fn new(reference: &Reference, loss: f64, dlogits: &Array3<f64>) -> Self {
        let (batch, tokens, _) = dlogits.dim();
        let largest = dlogits.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        let mut worst = 0.0_f64;
        for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))) {
            for (got, expected) in reference.dlogits_row(b, t).iter().zip(&dlogits.slice(ndarray::s![b, t, ..])) {
                worst = larger(worst, (got - expected).abs());
            }
        }
        Self { loss: (reference.loss() - loss).abs() / loss.abs().max(FLOOR), dlogits: worst / largest.max(FLOOR) }
    }

    /// The larger of the two errors, NaN if either is.
    pub fn worst(self) -> f64 {
        larger(self.loss, self.dlogits)
    }

    /// Whether both are within `limit`; NaN is not.
    pub fn within(self, limit: f64) -> bool {
        self.worst() <= limit
    }
}

/// `max` that keeps a NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The largest relative error that still passes: in f64 the order of summation is the only freedom; f32 carries its own
/// rounding through every step.
///
/// ```
/// use assay_core::problem::Dtype;
/// use assay_suites::peers::limit;
///
/// assert!(limit(Dtype::F64) < limit(Dtype::F32));
/// ```
pub fn limit(dtype: Dtype) -> f64 {
    if dtype == Dtype::F64 { 1e-9 } else { 1e-5 }
}
