//! What several devices hold: a program whose collectives are right on the first device alone.

use std::path::Path;

use assay::implementation::{Implementation, RunError};
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::problem::{Dtype, HeadLayout, HeadProblem, Problem};
use assay::programs::{HeadProgram, LossProgram, Programs};
use assay::spec::LossSpec;
use assay::xla::Runner;

use super::cpu_plugins;
use super::rewritten::{Rewrite, Rewritten};

fn run<P: Programs>(
    program: P,
    place: usize,
    devices: usize,
    plugin: &Path,
    problem: &P::Problem,
) -> Result<(), RunError>
where
    Runner<Rewritten<P>>: Implementation<P::Problem>,
{
    let runner = Runner::new(Rewritten { program, rewrite: Rewrite::Output(place, "add") }, Some(plugin));
    runner.run(&LossSpec::default(), problem.clone(), devices).map(|_| ())
}

fn expect_seen(outcome: Result<(), RunError>, output: &str) {
    let error = outcome.expect_err(output).to_string();
    let parts = [output, "device 1", "expected 0x", "which another device holds"];
    assert!(parts.iter().all(|part| error.contains(part)), "{output}: {error}");
}

#[test]
fn replicas_that_differ_are_errors_that_name_them() {
    let recipe = Recipe {
        shape: [4, 6, 64],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 8,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    let problem: Problem = recipe.problem(&LossSpec::default()).unwrap();
    let layout = HeadLayout::HiddenByVocab;
    let head = HeadRecipe { hidden: 16, layout, rounds_logits: false, recipe };
    let head: HeadProblem = head.problem(&LossSpec::default()).unwrap();
    let (losses, heads) = (LossProgram::all(), HeadProgram::all());
    let loss = |id| *losses.iter().find(|program| program.id() == id).unwrap();
    let of_head = |id| *heads.iter().find(|program| program.id() == id).unwrap();
    let plugins = cpu_plugins();
    let plugin = plugins[0];
    let programs = [
        ("xla-vocab", vec![(1, "logp"), (2, "entropy"), (3, "token_loss"), (4, "scalars")]),
        ("xla-rows", vec![(4, "scalars")]),
    ];
    for (id, outputs) in programs {
        for (place, output) in outputs {
            expect_seen(run(loss(id), place, 2, plugin, &problem), output);
        }
    }
    // Each device has rows of its own: none is held twice.
    run(loss("xla-rows"), 1, 2, plugin, &problem).unwrap();
    for (id, place, output) in [("xla-lm-head-vocab", 0, "dhidden"), ("xla-lm-head-rows", 5, "dlm_head")] {
        expect_seen(run(of_head(id), place, 2, plugin, &head), output);
    }
}
