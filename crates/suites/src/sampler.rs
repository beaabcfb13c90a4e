//! Logits after a sampler's top-k and top-p, handed over as trainers do it: −∞ in the columns outside.

use ndarray::Ix3;

use assay_core::problem::{FloatArray, Problem};
use assay_core::spec::LossSpec;

/// The columns that are drawn from `logits` over `temperature`: the `k` largest, and of these the fewest that have `p` of their
/// probability; and `sampled`, which was drawn. Of equal ones the first.
fn support(logits: &[f64], temperature: f64, sampled: usize, (k, p): (usize, f64)) -> Vec<bool> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&i, &j| logits[j].total_cmp(&logits[i]));
    order.truncate(k);
    // Weights are relative to the largest logit, so that none overflows.
    let weight = |j: usize| ((logits[j] - logits[order[0]]) / temperature).exp();
    let all: f64 = order.iter().map(|&j| weight(j)).sum();
    let (mut inside, mut before) = (vec![false; logits.len()], 0.0);
    for &j in &order {
        // A column is inside while the columns before it have less than p of the probability: the one that crosses p is
        // inside too.
        inside[j] = before < p * all;
        before += weight(j);
    }
    inside[sampled] = true;
    inside
}

/// `problem` with −∞ where a sampler by top-`k` and top-`p`, at each token's temperature, draws no column. The sampled one stays.
///
/// ```
/// use assay_core::problem::Dtype;
/// use assay_core::spec::LossSpec;
/// use assay_judge::generate::{Recipe, Regime};
/// use assay_suites::sampler::within_top_k_and_top_p;
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
/// // At most four columns are drawn, and the sampled one stays.
/// let drawn = within_top_k_and_top_p(&spec, &problem, 4, 1.0);
/// let row = drawn.logits.row(0, 0);
/// assert!(!problem.mask[[0, 0]] || (1..=5).contains(&row.iter().filter(|x| x.is_finite()).count()));
/// ```
pub fn within_top_k_and_top_p(spec: &LossSpec, problem: &Problem, k: usize, p: f64) -> Problem {
    let dtype = problem.logits.dtype();
    let mut logits = problem.logits.to_f64();
    for (at, _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        let row = problem.logits.row(at.0, at.1);
        let sampled = usize::try_from(problem.ids[at]).expect("an id of the vocabulary");
        let inside = support(&row, problem.tokens().temperature(spec, at), sampled, (k, p));
        for (j, _) in inside.iter().enumerate().filter(|(_, inside)| !**inside) {
            logits[[at.0, at.1, j]] = f64::NEG_INFINITY;
        }
    }
    let logits: FloatArray<Ix3> = FloatArray::rounded_from(&logits, dtype);
    problem.with_logits(logits)
}
