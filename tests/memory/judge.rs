//! What the reference and the judge take beside a problem and what a kernel made of it.

use assay::implementation::Implementation;
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::judge::tolerance::{Grade, Limits};
use assay::judge::trial::JudgedProblem;
use assay::native::NativeHead;
use assay::problem::{Dtype, HeadLayout};
use assay::spec::LossSpec;

use super::native::most_bytes;

/// Tokens of the problem.
const TOKENS: usize = 4;

/// Less than the head takes in f64, of which every column is widened once and more.
pub(crate) fn of_a_head() {
    // `make test-extensive`: the width that the bound is there for.
    let [hidden, vocab] = if std::env::var_os("ASSAY_PRODUCTION").is_some() { [4096, 151_936] } else { [512, 32_768] };
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [1, TOKENS, vocab],
        dtype: Dtype::Bf16,
        regime: Regime::Normal,
        seed: 0,
        old_logp_noise_scale: 0.03,
        masked_garbage: false,
    };
    let recipe = HeadRecipe { hidden, layout: HeadLayout::VocabByHidden, rounds_logits: true, recipe };
    let problem = recipe.unmasked_problem(&spec).expect("a valid recipe");
    let outcome = NativeHead::default().run(&spec, problem.clone(), 1).expect("supported");
    let taken = most_bytes(|| {
        let known = JudgedProblem::new(&spec, &problem).expect("a valid problem");
        let judged = known.judge(outcome, &Limits::external(Grade::Standard)).expect("as many elements");
        assert_eq!(judged.failed().count(), 0);
    });
    println!("judge of a head of {hidden} x {vocab}: {taken} bytes");
    let limit = (hidden * vocab * 8 / 2).min(2 << 30);
    assert!(taken <= limit, "{taken} bytes, expected at most {limit}");
}
