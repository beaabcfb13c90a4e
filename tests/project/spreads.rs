//! Generated logits against recorded ones: a regime that says it is like a trained model's is.

use assay::fixture::ProblemFile;
use assay::judge::generate::{Recipe, Regime};
use assay::problem::{Dtype, FloatArray};
use assay::spec::LossSpec;
use ndarray::Ix3;

/// By how many nats the largest logit of a row is above its tenth, its hundredth and its median.
fn gaps(logits: &FloatArray<Ix3>) -> Vec<[f64; 3]> {
    let [batch, tokens, vocab] = *logits.shape() else { unreachable!("[B,T,V]") };
    let gaps = |(b, t)| {
        let mut row = logits.row(b, t);
        row.sort_unstable_by(|a, b| b.total_cmp(a));
        [10, 100, vocab / 2].map(|rank| row[0] - row[rank])
    };
    ndarray::indices((batch, tokens)).into_iter().map(gaps).collect()
}

/// The least, the middle and the largest.
fn spread(gaps: &[[f64; 3]], of: usize) -> [f64; 3] {
    let mut gaps: Vec<f64> = gaps.iter().map(|row| row[of]).collect();
    gaps.sort_unstable_by(f64::total_cmp);
    [gaps[0], gaps[gaps.len() / 2], gaps[gaps.len() - 1]]
}

#[test]
fn regime_sampled_is_spread_as_logits_of_qwen() {
    let file = ProblemFile::open("fixtures/qwen_tiny.safetensors").unwrap();
    let recorded = gaps(&file.problem(file.logits_names()[0], None).unwrap().logits);
    let recipe = Recipe {
        shape: [4, 16, 151_936],
        dtype: Dtype::Bf16,
        regime: Regime::Sampled,
        seed: 3,
        old_logp_noise_scale: 0.1,
        masked_garbage: false,
    };
    let sampled = gaps(&recipe.unmasked_problem(&LossSpec::default()).unwrap().logits);
    for of in 0..3 {
        let ([least, _, most], [_, of_qwen, _]) = (spread(&sampled, of), spread(&recorded, of));
        assert!((least..most).contains(&of_qwen), "{of_qwen}, expected {least} to {most}");
    }
}
