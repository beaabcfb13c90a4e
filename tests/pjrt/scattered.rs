//! Gradients that come back in parts, one a device: a part that is lost or is another device's is rejected.

use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::problem::{Dtype, HeadLayout, HeadProblem};
use assay::programs::{HeadProgram, ProgramOutput, Programs};
use assay::spec::LossSpec;
use assay::xla::Runner;
use assay_testkit::JudgedProblem;

use super::cpu_plugins;
use super::rewritten::{Rewrite, Rewritten};

/// The first device's part is 0 times what it is, the second's once.
const DROPPED: &str = "multiply";

/// Two devices in the wrong order.
fn swapped(collective: &'static str) -> Rewrite {
    Rewrite::Lines(collective, "[[0, 1]]", "[[1, 0]]")
}

#[test]
fn scattered_part_dropped_or_swapped_is_rejected() {
    let spec = LossSpec::default();
    let recipe = Recipe {
        shape: [4, 6, 64],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 8,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    let plugins = cpu_plugins();
    let judge = |id: &str, layout, rewrite| {
        let recipe = HeadRecipe { hidden: 16, layout, rounds_logits: false, recipe: recipe.clone() };
        let problem: HeadProblem = recipe.problem(&spec).unwrap();
        let program = HeadProgram::all().into_iter().find(|program| program.id() == id).unwrap();
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let judged = known.run(&Runner::new(Rewritten { program, rewrite }, Some(plugins[0])), 2).unwrap();
        known.failures(&judged, id, "this test")
    };
    let (dhidden, dlm_head) = (ProgramOutput::Gradient as usize, ProgramOutput::DlmHead as usize);
    let by_rows = [Rewrite::Output(dlm_head, DROPPED), swapped("stablehlo.reduce_scatter")];
    let by_columns =
        [Rewrite::Output(dhidden, DROPPED), swapped("stablehlo.reduce_scatter"), swapped("stablehlo.all_gather")];
    for (id, output, rewrites) in [
        ("tile-lm-head-rows-scattered", "dlm_head", by_rows.as_slice()),
        ("xla-lm-head-rows-scattered", "dlm_head", &by_rows),
        ("tile-lm-head-vocab-scattered", "dhidden", &by_columns),
        ("xla-lm-head-vocab-scattered", "dhidden", &by_columns),
    ] {
        for (&rewrite, layout) in
            rewrites.iter().zip([HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden].into_iter().cycle())
        {
            let failures = judge(id, layout, rewrite);
            assert!(failures.iter().any(|failure| failure.contains(output)), "{id}, {rewrite:?}: {failures:?}");
        }
        // The same in the same numbers, changed nowhere.
        let unchanged = Rewrite::Lines("module", "@grpo", "@same");
        assert_eq!(judge(id, HeadLayout::HiddenByVocab, unchanged), Vec::<String>::new(), "{id}");
    }
}
