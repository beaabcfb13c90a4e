//! Programs and the verdicts on them: examples, wrong programs, several devices, and the commands that take a manifest.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use assay::fixture::write_problem;
use assay::implementation::{Implementation, Workload as _};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::judge::Cancellation;
use assay::problem::{CuSeqlens, Dtype, Sequences};
use assay::spec::LossSpec;
use assert_cmd::cargo::cargo_bin_cmd;

use super::super::cpu_plugins;
use super::{BF16, Copy, F32, PACKED, failed, full_problem, judge, read, recipe, run, verdicts};
use crate::common::command::{assay, assert_refused};

#[test]
fn exported_examples_pass_every_gate_in_every_regime() {
    for plugin in cpu_plugins() {
        for (manifest, dtype, gates) in [(F32, Dtype::F32, 7), (BF16, Dtype::Bf16, 4)] {
            let exported = read(manifest, plugin);
            for regime in Regime::FINITE {
                for seed in 0..3 {
                    let problem = recipe(regime, dtype, seed).problem(&LossSpec::default()).unwrap();
                    let verdicts = verdicts(&exported, &problem);
                    let what = format!("{manifest} {regime:?} {seed} on {}", plugin.display());
                    assert_eq!(failed(&verdicts), Vec::<String>::new(), "{what}");
                    let plain = verdicts.iter().filter(|verdict| verdict.gate.edge.is_none());
                    assert_eq!(plain.count(), gates, "{what}");
                }
            }
        }
    }
}

/// `G − G·p_y` for a target with `1 − p_y` below f32's unit roundoff: the difference is rounding, or 0.
#[test]
fn exported_autodiff_of_a_confident_target_is_standard_alone() {
    for plugin in cpu_plugins() {
        for (manifest, dtype) in [(F32, Dtype::F32), (BF16, Dtype::Bf16)] {
            let problem = recipe(Regime::Confident, dtype, 2).problem(&LossSpec::default()).unwrap();
            let verdicts = verdicts(&read(manifest, plugin), &problem);
            let what = format!("{manifest} on {}", plugin.display());
            assert_eq!(failed(&verdicts), Vec::<String>::new(), "{what}");
            let short = verdicts.iter().filter_map(|verdict| Some((verdict.gate.to_string(), verdict.short_of_exact?)));
            let short: Vec<_> = short.map(|(gate, short)| (gate, short.cancellation)).collect();
            let target = |gate: &str| (gate.to_string(), Cancellation::Target);
            assert_eq!(short, ["dlogits", "dlogits row_sum"].map(target), "{what}");
        }
    }
}

#[test]
fn exported_wrong_programs_fail_the_gate_of_their_fault() {
    let zero_dlogits = (
        "stablehlo.select %arg0, %arg1, %0 : tensor<2x5x1031xi1>",
        "stablehlo.select %arg0, %0, %0 : tensor<2x5x1031xi1>",
    );
    let other_clip = ("dense<1.200000e+00>", "dense<1.100000e+00>");
    for plugin in cpu_plugins() {
        assert_eq!(failed(&verdicts(&read(F32, plugin), &full_problem())), Vec::<String>::new());
        let failed_with =
            |(from, to)| failed(&verdicts(&read(Copy::with_program(from, to).manifest(), plugin), &full_problem()));
        assert_eq!(failed_with(zero_dlogits), ["dlogits", "dlogits row_l2"]);
        let clipped = failed_with(other_clip);
        for gate in ["loss", "token_loss", "dlogits", "dlogits row_l2"] {
            assert!(clipped.iter().any(|failed| failed == gate), "{gate} not in {clipped:?}");
        }
    }
}

/// The example of packed sequences, on sequences of all lengths; and without its boundaries.
#[test]
fn exported_packed_example_passes_every_gate() {
    let spec = LossSpec::default();
    let recipe = Recipe { shape: [4, 5, 131], masked_garbage: true, ..recipe(Regime::Normal, Dtype::F32, 3) };
    let problem = recipe.problem(&spec).unwrap().laid_out(CuSeqlens::from_lengths([0, 7, 2, 9]));
    let plugin = cpu_plugins()[0];
    assert_eq!(failed(&verdicts(&read(PACKED, plugin), &problem)), Vec::<String>::new());
    let mut other = problem.clone();
    other.extra.sequences = Sequences::Packed(CuSeqlens::from_lengths([0, 6, 3, 9]));
    let candidate = run(&read(PACKED, plugin), &other).unwrap();
    assert!(failed(&judge(candidate, &problem)).contains(&"dlogits".to_string()));
}

#[test]
fn exported_in_replay_and_gradcheck_sets_the_exit_code() {
    let right = Copy::new();
    let wrong = Copy::with_program("dense<1.200000e+00>", "dense<1.100000e+00>");
    let text = |path: PathBuf| path.to_str().unwrap().to_string();
    for copy in [&right, &wrong] {
        let metadata = [("spec".to_string(), serde_json::to_string(&LossSpec::default()).unwrap())];
        write_problem(copy.path("problem.safetensors"), &full_problem(), &metadata.into()).unwrap();
    }
    let problem = text(right.path("problem.safetensors"));
    let id = |copy: &Copy| format!("file:{}", text(copy.manifest()));

    let passed = assay(&["replay", &problem, "--impl", &id(&right)]);
    assert_eq!(passed.code, 0, "{}{}", passed.stdout, passed.stderr);
    assert!(passed.stdout.contains("PASS  7 checks passed, 0 failed, 0 ignored"), "{}", passed.stdout);
    let failed = assay(&["replay", &problem, "--impl", &id(&wrong)]);
    assert_eq!(failed.code, 1, "{}{}", failed.stdout, failed.stderr);
    assert!(failed.stdout.contains(&format!("--impl {}", id(&wrong))), "the line runs again: {}", failed.stdout);
    assert_refused(&["replay", &problem, "--impl", "file:gone.toml"], &["gone.toml: cannot read"]);
    let tiny = assay(&["replay", "fixtures/qwen_tiny.safetensors", "--logits", "logits_f32", "--impl", &id(&right)]);
    // The reason is broken over lines.
    let words = tiny.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("does not support shape 2x4x151936; it supports 2x5x1031"), "{}", tiny.stdout);
    assert!(words.contains(&format!("│ {} ┆ 0 ┆ – ┆ nothing compared", id(&right))), "{}", tiny.stdout);

    // The config names the problem and the manifest beside it.
    let fixture = "{fixture: {path: problem.safetensors}}";
    let config = |copy: &Copy, batch: &str| {
        let path = copy.path("config.yaml");
        fs::write(&path, format!("batch: {batch}\nkernel: {{enabled: true, impl: \"file:grpo_f32.toml\"}}\n")).unwrap();
        text(path)
    };
    let passed = assay(&["gradcheck", "--config", &config(&right, fixture)]);
    assert_eq!(passed.code, 0, "{}{}", passed.stdout, passed.stderr);
    let failed = assay(&["gradcheck", "--config", &config(&wrong, fixture)]);
    assert_eq!(failed.code, 1, "{}{}", failed.stdout, failed.stderr);
    assert_refused(
        &["gradcheck", "--config", &config(&right, "{generate: {shape: [2, 5, 1030], dtype: f32, regime: normal}}")],
        &["does not support shape 2x5x1030", "2x5x1031"],
    );
}

const TWO_DEVICES: &str = "fixtures/exported/grpo_f32_2_devices.toml";

/// What `jax.export` writes for two devices, of which each has half of the sequences.
#[test]
fn exported_partitioned_program_passes_every_gate() {
    for plugin in cpu_plugins() {
        let exported = read(TWO_DEVICES, plugin);
        assert_eq!(exported.device_counts(), [2]);
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            let problem = recipe(regime, Dtype::F32, seed).problem(&LossSpec::default()).unwrap();
            let candidate =
                exported.run(&LossSpec::default(), problem.clone(), 2).unwrap_or_else(|error| panic!("{error}"));
            let failed = failed(&judge(candidate, &problem));
            assert_eq!(failed, Vec::<String>::new(), "{regime:?} on {}", plugin.display());
        }
        let alone = exported.run(&LossSpec::default(), full_problem(), 1).unwrap_err().to_string();
        assert!(alone.contains("device count 1") && alone.contains('2'), "{alone}");
    }
    let devices = |from: &str, to: &str| {
        let copy = Copy::new();
        fs::copy(TWO_DEVICES, copy.manifest()).unwrap();
        copy.edit("grpo_f32.toml", from, to);
        copy
    };
    devices("cut = \"B\"", "cut = \"V\"").assert_refused(&[
        "input `logits`: cut",
        "V of 1031",
        "2 devices cut in equal parts",
    ]);
    let many = devices("devices = 2", "devices = 16");
    many.edit("grpo_f32.toml", "shape = [2,", "shape = [16,");
    fs::copy("fixtures/exported/grpo_f32_2_devices.mlirbc", many.path("grpo_f32_2_devices.mlirbc")).unwrap();
    let many = read(many.manifest(), cpu_plugins()[0]);
    assert!(many.device_counts().is_empty());
    assert!(many.available().unwrap_err().reason.contains("got 16, expected 1 to 8"));
}

/// Every device has all of a problem and computes all of it, the second with a bound that its number lowers to 1.1.
#[test]
fn exported_replicas_that_disagree_are_an_error() {
    let replicas = |copy: Copy| {
        copy.edit("grpo_f32.toml", "shape =", "devices = 2\ndevices_are = \"replicas\"\nshape =");
        copy
    };
    let number = "%id = stablehlo.replica_id : tensor<ui32>
    %number = stablehlo.convert %id : (tensor<ui32>) -> tensor<f32>
    %tenth = stablehlo.constant dense<0.1> : tensor<f32>
    %less = stablehlo.multiply %tenth, %number : tensor<f32>
    %high = stablehlo.constant dense<1.2> : tensor<f32>
    %cst_1 = stablehlo.subtract %high, %less : tensor<f32> loc(#loc7)";
    let high = "%cst_1 = stablehlo.constant dense<1.200000e+00> : tensor<f32> loc(#loc7)";
    let (right, wrong) = (replicas(Copy::new()), replicas(Copy::with_program(high, number)));
    for plugin in cpu_plugins() {
        let run = |copy: &Copy| read(copy.manifest(), plugin).run(&LossSpec::default(), full_problem(), 2);
        assert_eq!(failed(&judge(run(&right).unwrap(), &full_problem())), Vec::<String>::new());
        let error = run(&wrong).unwrap_err().to_string();
        assert!(error.contains("on device 1 element") && error.contains("which another device holds"), "{error}");
    }
}

/// From 0 by twos to 1.
const ENDLESS: &str = "%one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %turns = stablehlo.while(%turn = %c) : tensor<i32> cond {
      %goes_on = stablehlo.compare NE, %turn, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %goes_on : tensor<i1>
    } do {
      %next = stablehlo.add %turn, %two : tensor<i32>
      stablehlo.return %next : tensor<i32>
    }
    %high = stablehlo.convert %turns : (tensor<i32>) -> tensor<f32>
    %cst = ";

#[test]
fn exported_endless_program_times_out() {
    let endless = Copy::with_program("%cst = ", ENDLESS);
    endless.edit("grpo_f32.mlir", "@clip(%8, %cst_2, %cst_1)", "@clip(%8, %cst_2, %high)");
    let metadata = [("spec".to_string(), serde_json::to_string(&LossSpec::default()).unwrap())];
    write_problem(endless.path("problem.safetensors"), &full_problem(), &metadata.into()).unwrap();
    let id = format!("file:{}", endless.manifest().display());
    for plugin in cpu_plugins() {
        let run = |seconds: &str| {
            let mut command = cargo_bin_cmd!("assay");
            command
                .arg("replay")
                .arg(endless.path("problem.safetensors"))
                .args(["--impl", &id])
                .arg("--plugin")
                .arg(plugin);
            let output = command.env("ASSAY_RUN_SECONDS", seconds).timeout(Duration::from_mins(1)).output().unwrap();
            assert!(output.status.code().is_some(), "it does not end either: {output:?}");
            let all = [output.stdout, output.stderr].concat();
            String::from_utf8(all).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let given_up = run("1");
        assert!(given_up.contains("execute on device 0: not finished after 1s, and given up"), "{given_up}");
        let no_limit = run("soon");
        assert!(no_limit.contains("ASSAY_RUN_SECONDS: got `soon`, expected whole seconds"), "{no_limit}");
    }
}
