//! Plain differences of gradients, beside the verdicts on them.

use assay_core::problem::{Candidate, HeadCandidate, HeadProblem, Problem};
use assay_judge::judgeable::Judgeable;
use assay_reference::{HeadReference, Reference};

/// A problem whose gradients are compared plainly.
///
/// ```
/// use assay_core::implementation::Implementation;
/// use assay_core::problem::{Dtype, Problem};
/// use assay_core::spec::LossSpec;
/// use assay_judge::generate::{Recipe, Regime};
/// use assay_native::Native;
/// use assay_suites::differences::DifferencedOutputs;
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
/// let candidate = Native::default().run(&spec, problem.clone(), 1).unwrap();
/// let reference = assay_reference::evaluate(&spec, &problem).unwrap();
/// let [(output, differences)] = <Problem>::differences(&reference, &candidate)[..] else { panic!("one gradient") };
/// assert!(output == "dlogits" && differences.max_abs < 1e-6);
/// ```
pub trait DifferencedOutputs: Judgeable {
    /// Returns the differences between a candidate and its twin, by output.
    fn differences(
        reference: &Self::Reference<'_>,
        outcome: &Candidate<Self::Gradient>,
    ) -> Vec<(&'static str, Differences)>;
}

impl DifferencedOutputs for Problem {
    fn differences(reference: &Reference, outcome: &Candidate) -> Vec<(&'static str, Differences)> {
        let shape = reference.shape();
        let tokens = || ndarray::indices((shape.batch, shape.tokens)).into_iter();
        let pairs = tokens().flat_map(|(b, t)| reference.dlogits_row(b, t).into_iter().zip(outcome.gradient.row(b, t)));
        vec![("dlogits", Differences::from_pairs(pairs))]
    }
}

impl DifferencedOutputs for HeadProblem {
    fn differences(reference: &HeadReference, outcome: &HeadCandidate) -> Vec<(&'static str, Differences)> {
        let exact = reference.outcome();
        let pairs = |exact: Vec<f64>, actual: Vec<f64>| Differences::from_pairs(exact.into_iter().zip(actual));
        let [dhidden, actual] =
            [&exact.gradient.dhidden, &outcome.gradient.dhidden].map(|array| array.to_f64().into_iter().collect());
        let of_hidden = pairs(dhidden, actual);
        let [dlm_head, actual] =
            [&exact.gradient.dlm_head, &outcome.gradient.dlm_head].map(|array| array.to_f64().into_iter().collect());
        vec![("dhidden", of_hidden), ("dlm_head", pairs(dlm_head, actual))]
    }
}

/// Plain differences of a gradient, as MLLM-JAX reports them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Differences {
    /// The largest absolute difference.
    pub max_abs: f64,
    /// The largest over the size of the reference, of the elements with `|reference| > 1e-6`.
    pub max_rel: f64,
    /// The mean of the absolute differences.
    pub mean_abs: f64,
}

impl Differences {
    /// Collects the differences of pairs `(reference, candidate)`, one for each element.
    fn from_pairs(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        const SMALLEST: f64 = 1e-6;
        let mut all = Self::default();
        let (mut total, mut count) = (0.0, 0_usize);
        for (x, y) in pairs {
            let error = (x - y).abs();
            // The method `f64::max` would pass over a NaN.
            let worse = |max: f64, x: f64| if x > max || x.is_nan() { x } else { max };
            all.max_abs = worse(all.max_abs, error);
            if x.abs() > SMALLEST {
                all.max_rel = worse(all.max_rel, error / x.abs());
            }
            total += error;
            count += 1;
        }
        all.mean_abs = total / count.max(1) as f64;
        all
    }
}
