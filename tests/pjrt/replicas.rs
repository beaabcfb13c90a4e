//! What several devices hold: a program whose collectives are right on the first device alone.

use std::path::Path;

use assay::implementation::{Given, Implementation, RunError, Unsupported, Workload};
use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::problem::{Dtype, HeadLayout, HeadProblem, Problem};
use assay::programs::{Device, HeadProgram, LossProgram, Programs, Shaped, Sharding};
use assay::spec::LossSpec;
use assay::xla::Runner;

use super::cpu_plugins;

/// A program that adds a device's number to output `place`.
#[derive(Clone, Copy)]
struct RightOnTheFirst<P> {
    program: P,
    place: usize,
}

impl<P: Programs> Programs for RightOnTheFirst<P> {
    type Problem = P::Problem;

    fn all() -> Vec<Self> {
        Vec::new()
    }

    fn id(self) -> &'static str {
        self.program.id()
    }

    fn summary(self) -> &'static str {
        self.program.summary()
    }

    fn class(self) -> &'static str {
        self.program.class()
    }

    fn sharding(self) -> Sharding {
        self.program.sharding()
    }

    fn supports(
        self,
        spec: &LossSpec,
        shape: <P::Problem as Workload>::Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<(), Unsupported> {
        self.program.supports(spec, shape, dtype, devices)
    }

    fn has_kernels(self) -> bool {
        self.program.has_kernels()
    }

    fn text(
        self,
        loss: Shaped,
        given: Given<P::Problem>,
        devices: usize,
        device: Device,
    ) -> Result<String, Unsupported> {
        let text = self.program.text(loss, given, devices, device)?;
        // The last line but the brackets: `return %a, … : tensor<…>, …`.
        let (body, returned) = text.rsplit_once("    return ").expect("a program returns");
        let (returned, end) = returned.split_once('\n').expect("brackets follow");
        let (names, types) = returned.split_once(" : ").expect("types follow the names");
        let mut names: Vec<&str> = names.split(", ").collect();
        let name = std::mem::replace(&mut names[self.place], "%wrong");
        let ty = types.split(", ").nth(self.place).expect("a type each");
        let element = ty.trim_end_matches('>').rsplit('x').next().expect("an element type");
        let scalar = format!("tensor<{}>", element.trim_start_matches("tensor<"));
        let wrong = format!(
            "    %replica = stablehlo.replica_id : tensor<ui32>\n    %number = stablehlo.convert %replica : (tensor<ui32>) -> {scalar}\n    \
             %numbers = stablehlo.broadcast_in_dim %number, dims = [] : ({scalar}) -> {ty}\n    \
             %wrong = stablehlo.add {name}, %numbers : {ty}\n"
        );
        Ok(format!("{body}{wrong}    return {} : {types}\n{end}", names.join(", ")))
    }
}

fn run<P: Programs>(
    program: P,
    place: usize,
    devices: usize,
    plugin: &Path,
    problem: &P::Problem,
) -> Result<(), RunError>
where
    Runner<RightOnTheFirst<P>>: Implementation<P::Problem>,
{
    let runner = Runner::of(RightOnTheFirst { program, place }, Some(plugin));
    runner.run(&LossSpec::default(), problem.clone(), devices).map(|_| ())
}

fn expect_seen(outcome: Result<(), RunError>, output: &str) {
    let error = outcome.expect_err(output).to_string();
    let parts = [output, "device 1", "expected 0x", "which another device holds"];
    assert!(parts.iter().all(|part| error.contains(part)), "{output}: {error}");
}

#[test]
fn outputs_that_devices_hold_differently_are_errors_that_name_them() {
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
