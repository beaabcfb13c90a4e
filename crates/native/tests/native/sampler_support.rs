//! Logits of −∞ outside a sampler's support: a softmax over the set of each token.

use assay_core::implementation::Implementation as _;
use assay_core::problem::{Dtype, Problem};
use assay_core::spec::{LossSpec, Temperature};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_native::Native;
use assay_suites::sampler::within_top_k_and_top_p;

/// Of f64 sums over at most 51 columns.
const ROUNDING: f64 = 100.0 * f64::EPSILON;

/// `ℓ` and `H` of the softmax over the columns of a token that are not −∞, term by term.
fn over_the_set(spec: &LossSpec, problem: &Problem, (b, t): (usize, usize)) -> (f64, f64, usize) {
    let temperature = problem.tokens().temperature(spec, (b, t));
    let row = problem.logits.row(b, t);
    let set: Vec<f64> = row.iter().filter(|x| x.is_finite()).map(|x| x / temperature).collect();
    let largest = set.iter().copied().fold(f64::MIN, f64::max);
    let log_sum = largest + set.iter().map(|z| (z - largest).exp()).sum::<f64>().ln();
    let id = usize::try_from(problem.ids[[b, t]]).unwrap();
    let entropy = -set.iter().map(|z| (z - log_sum).exp() * (z - log_sum)).sum::<f64>();
    (row[id] / temperature - log_sum, entropy, set.len())
}

#[test]
fn top_k_top_p_outputs_are_of_softmax_over_the_set() {
    let spec = LossSpec { temperature: Temperature::Given, entropy_coef: 0.02, ..LossSpec::default() };
    let native = Native::default();
    for (seed, dtype) in (0..).zip(Dtype::KERNEL) {
        let recipe = Recipe {
            shape: [3, 6, 517],
            dtype,
            regime: Regime::Normal,
            seed,
            old_logp_noise_scale: 0.3,
            masked_garbage: true,
        };
        let whole = recipe.problem(&spec).unwrap();
        let problem = within_top_k_and_top_p(&spec, &whole, 50, 0.9);
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let outcome = native.run(&spec, problem.clone(), 1).unwrap();
        let mut sizes = Vec::new();
        for (at, _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
            let (logp, entropy, size) = over_the_set(&spec, &problem, at);
            let token = known.reference.token(at.0, at.1).unwrap();
            for (found, expected) in [(token.inputs.logp, logp), (token.entropy, entropy)] {
                assert!((found - expected).abs() <= ROUNDING * (1.0 + expected.abs()), "{found} for {expected}");
            }
            let (logits, dlogits) = (problem.logits.row(at.0, at.1), outcome.gradient.row(at.0, at.1));
            let outside = logits.iter().zip(&dlogits).filter(|(x, _)| !x.is_finite());
            assert!(outside.map(|(_, dx)| *dx).all(|dx| dx == 0.0), "{dtype}: a column outside has a gradient");
            sizes.push(size);
        }
        assert!(sizes.iter().all(|&size| (1..=51).contains(&size)) && sizes.iter().any(|&size| size < 50), "{sizes:?}");
        let judged = known.run(&native, 1).unwrap();
        assert!(known.failures(&judged, "native", "this test").is_empty(), "{dtype}");
        // Who takes the whole softmax is told.
        let of_whole = native.run(&spec, whole, 1).unwrap();
        let judged = known.judge(of_whole, &Limits::for_class("native").unwrap()).unwrap();
        assert!(!known.failures(&judged, "native", "this test").is_empty(), "{dtype}");
    }
}
