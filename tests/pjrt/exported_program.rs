//! Users' own programs: the shipped examples are judged right and broken ones are not, on every CPU plugin that set-up
//! installs; and every way that a manifest can be wrong is refused by name.
use super::cpu_plugins;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::command::{assay, assert_refused};
use assay::device_dtype::DeviceDtype;
use assay::exported::ExportedProgram;
use assay::fixture::write_problem;
use assay::implementation::{Implementation, RunError};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::judge::{Cancels, Verdict};
use assay::judge::tolerance::Limits;
use assay::problem::{Advantages, Candidate, CuSeqlens, Dtype, Extra, FloatArray, Problem, Sequences};
use assay::registry::find;
use assay::spec::{
    Kl, KlCov, KlEstimator, LossSpec, LossTerms, Objective, OffPolicyMask, OldLogp, PpoClip, Reduction, Rows,
    TokenWeights,
};
use assay_testkit::Known;
use assert_cmd::cargo::cargo_bin_cmd;
use ndarray::{Array1, Array2, Array3, arr1, arr2, arr3};
use tempfile::TempDir;

const F32: &str = "fixtures/exported/grpo_f32.toml";
const BF16: &str = "fixtures/exported/grpo_bf16.toml";
const PACKED: &str = "fixtures/exported/grpo_f32_packed.toml";
const SHAPE: [usize; 3] = [2, 5, 1031];

fn recipe(regime: Regime, dtype: Dtype, seed: u64) -> Recipe {
    Recipe { shape: SHAPE, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

/// A problem in which whatever a program gets wrong shows: every token counts and learns, at a ratio of 1 or, the first,
/// of 1.15.
fn full_problem() -> Problem {
    let recipe = Recipe { masked_garbage: false, old_logp_noise_scale: 0.0, ..recipe(Regime::Normal, Dtype::F32, 1) };
    let mut problem = recipe.problem(&LossSpec::default()).unwrap();
    problem.mask.fill(true);
    problem.advantages = Advantages::Sequence(arr1(&[1.0, -0.5]));
    problem.old_logp.as_mut().unwrap()[[0, 0]] -= 0.14;
    problem
}

fn read(manifest: impl AsRef<Path>, plugin: &Path) -> ExportedProgram {
    ExportedProgram::read(manifest, Some(plugin)).unwrap_or_else(|error| panic!("{error}"))
}

fn run(exported: &ExportedProgram, problem: &Problem) -> Result<Candidate, RunError> {
    exported.run(&LossSpec::default(), problem.clone(), 1)
}

fn verdicts(exported: &ExportedProgram, problem: &Problem) -> Vec<Verdict> {
    let candidate = run(exported, problem).unwrap_or_else(|error| panic!("{error}"));
    let spec = LossSpec::default();
    Known::of(&spec, problem).unwrap().judge(candidate, &Limits::of(exported.class()).unwrap()).unwrap().verdicts
}

fn failed(verdicts: &[Verdict]) -> Vec<String> {
    verdicts.iter().filter(|verdict| !verdict.passed()).map(|verdict| verdict.gate.to_string()).collect()
}

/// The f32 example in a folder of its own, to be changed.
struct Copy {
    folder: TempDir,
}

impl Copy {
    fn new() -> Self {
        let copy = Self { folder: TempDir::new().unwrap() };
        for name in ["grpo_f32.toml", "grpo_f32.mlir"] {
            fs::copy(Path::new("fixtures/exported").join(name), copy.path(name)).unwrap();
        }
        copy
    }

    /// One whose program has `from`, which it holds, replaced by `to`.
    #[track_caller]
    fn with_program(from: &str, to: &str) -> Self {
        let copy = Self::new();
        copy.edit("grpo_f32.mlir", from, to);
        copy
    }

    /// One whose manifest has `from`, which it holds, replaced by `to`.
    #[track_caller]
    fn with_manifest(from: &str, to: &str) -> Self {
        let copy = Self::new();
        copy.edit("grpo_f32.toml", from, to);
        copy
    }

    #[track_caller]
    fn edit(&self, name: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "{name} does not hold `{from}`");
        fs::write(self.path(name), text.replacen(from, to, 1)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn manifest(&self) -> PathBuf {
        self.path("grpo_f32.toml")
    }

    /// The manifest is refused in one line that starts with its folder and says all of `parts`.
    #[track_caller]
    fn assert_refused(&self, parts: &[&str]) {
        let error = ExportedProgram::read(self.manifest(), None).err().expect("a manifest that is wrong").to_string();
        assert!(error.starts_with(self.folder.path().to_str().unwrap()) && error.lines().count() == 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "`{part}` not in: {error}");
        }
    }
}

#[test]
fn shipped_examples_pass_every_gate_in_every_regime() {
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
fn automatic_differentiation_loses_a_confident_targets_gradient_and_is_no_better_than_standard() {
    for plugin in cpu_plugins() {
        for (manifest, dtype) in [(F32, Dtype::F32), (BF16, Dtype::Bf16)] {
            let problem = recipe(Regime::Confident, dtype, 2).problem(&LossSpec::default()).unwrap();
            let verdicts = verdicts(&read(manifest, plugin), &problem);
            let what = format!("{manifest} on {}", plugin.display());
            assert_eq!(failed(&verdicts), Vec::<String>::new(), "{what}");
            let short = verdicts.iter().filter_map(|verdict| Some((verdict.gate.to_string(), verdict.short_of_exact?)));
            let short: Vec<_> = short.map(|(gate, short)| (gate, short.cancels)).collect();
            let target = |gate: &str| (gate.to_string(), Cancels::Target);
            assert_eq!(short, ["dlogits", "dlogits row_sum"].map(target), "{what}");
        }
    }
}

#[test]
fn wrong_programs_are_rejected_by_the_gate_of_what_is_wrong() {
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

/// Every input comes back out: logits as dlogits, advantages as the loss, `old_logp` as logp, mask as entropy, ids as
/// the token loss.
fn mirror(mask: DeviceDtype, ids: DeviceDtype) -> Copy {
    let copy = Copy::new();
    let (mask_type, ids_type) = (mask.mlir(), ids.mlir());
    let program = format!(
        "module {{ func.func public @main(%old: tensor<1x2xf16>, %ids: tensor<1x2x{ids_type}>, %x: tensor<1x2x3xbf16>,
            %mask: tensor<1x2x{mask_type}>, %a: tensor<1xbf16>)
            -> (tensor<1x2xf32>, tensor<1x2x3xbf16>, tensor<bf16>, tensor<1x2xf16>, tensor<1x2xf32>) {{
          %i = stablehlo.convert %ids : (tensor<1x2x{ids_type}>) -> tensor<1x2xf32>
          %m = stablehlo.convert %mask : (tensor<1x2x{mask_type}>) -> tensor<1x2xf32>
          %loss = stablehlo.reshape %a : (tensor<1xbf16>) -> tensor<bf16>
          return %i, %x, %loss, %old, %m : tensor<1x2xf32>, tensor<1x2x3xbf16>, tensor<bf16>, tensor<1x2xf16>, tensor<1x2xf32>
        }} }}"
    );
    fs::write(copy.path("grpo_f32.mlir"), program).unwrap();
    let mask_dtype = mask.to_string();
    let ids_dtype = ids.to_string();
    let entries = [
        ("input", "old_logp", "f16"),
        ("input", "ids", &ids_dtype),
        ("input", "logits", "bf16"),
        ("input", "mask", &mask_dtype),
        ("input", "advantages", "bf16"),
        ("output", "token_loss", "f32"),
        ("output", "dlogits", "bf16"),
        ("output", "loss", "bf16"),
        ("output", "logp", "f16"),
        ("output", "entropy", "f32"),
    ];
    let entries = entries.map(|(kind, name, dtype)| format!("[[{kind}]]\nname = \"{name}\"\ndtype = \"{dtype}\"\n"));
    let manifest = format!("program = \"grpo_f32.mlir\"\nshape = [1, 2, 3]\n{}", entries.concat());
    fs::write(copy.manifest(), manifest).unwrap();
    copy
}

#[test]
fn inputs_any_order_any_dtype_arrive_as_the_problem_holds_them() {
    let logits = arr3(&[[[0.5, -1.0, 2.0], [f64::NAN, f64::INFINITY, 3.0]]]);
    let problem = Problem {
        logits: FloatArray::rounded_from(&logits, Dtype::Bf16),
        // The second token is masked: its id is beyond i32.
        ids: arr2(&[[2, -5_000_000_000]]),
        mask: arr2(&[[true, false]]),
        // Halfway between two bf16, and between two f16: to even.
        advantages: Advantages::Sequence(arr1(&[1.0 + 2_f64.powi(-8)])),
        old_logp: Some(arr2(&[[-1.0 - 3.0 * 2_f64.powi(-11), f64::NAN]])),
        ref_logp: None,
        extra: Extra::default(),
    };
    for plugin in cpu_plugins() {
        for mask in DeviceDtype::ALL {
            for ids in [DeviceDtype::I32, DeviceDtype::I64] {
                let candidate = run(&read(mirror(mask, ids).manifest(), plugin), &problem).unwrap();
                let what = format!("mask {mask}, ids {ids} on {}", plugin.display());
                let masked_id = if ids == DeviceDtype::I32 { f64::from(i32::MIN) } else { f64::from(-5e9_f32) };
                assert_eq!(candidate.token_loss.unwrap().to_f64(), arr2(&[[2.0, masked_id]]), "{what}");
                assert_eq!(candidate.entropy.unwrap().to_f64(), arr2(&[[1.0, 0.0]]), "{what}");
                let loss = candidate.loss.expect("every manifest has it");
                assert_eq!((loss.dtype(), loss.value()), (Dtype::Bf16, 1.0), "{what}");
                let logp = candidate.logp.unwrap();
                assert_eq!((logp.dtype(), logp.at(0, 0)), (Dtype::F16, -1.0 - 2_f64.powi(-9)), "{what}");
                assert!(logp.at(0, 1).is_nan(), "{what}");
                assert_eq!(candidate.gradient.row(0, 0), [0.5, -1.0, 2.0], "{what}");
                let masked = candidate.gradient.row(0, 1);
                assert!(masked[0].is_nan() && masked[1..] == [f64::INFINITY, 3.0], "{what}");
                assert!(candidate.metrics.is_none());
            }
        }
    }
}

/// What only some specs ask for comes back out: `rollout_logp` as logp, weights of a sequence in all of its places plus those of
/// tokens as the entropy, what is selected as the token loss, the bias in each token's dlogits; on two devices, each with half of the columns.
#[test]
fn arrays_that_only_some_specs_ask_for_arrive_as_the_problem_holds_them() {
    let copy = Copy::new();
    let program = "module { func.func public @main(%x: tensor<1x2x2xf32>, %ids: tensor<1x2xi32>, %a: tensor<1xf32>, %old: tensor<1x2xf32>,
            %rollout: tensor<1x2xf32>, %weights: tensor<1x2xf32>, %own: tensor<1x2xf32>, %selected: tensor<1x2xi1>, %bias: tensor<2xf32>)
            -> (tensor<f32>, tensor<1x2x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>) {
          %loss = stablehlo.reshape %a : (tensor<1xf32>) -> tensor<f32>
          %s = stablehlo.convert %selected : (tensor<1x2xi1>) -> tensor<1x2xf32>
          %b = stablehlo.broadcast_in_dim %bias, dims = [2] : (tensor<2xf32>) -> tensor<1x2x2xf32>
          %sum = stablehlo.add %weights, %own : tensor<1x2xf32>
          return %loss, %b, %rollout, %sum, %s : tensor<f32>, tensor<1x2x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>
        } }";
    fs::write(copy.path("grpo_f32.mlir"), program).unwrap();
    let entry = |kind: &str, name: &str, dtype: &str, cut: &str| {
        format!("[[{kind}]]\nname = \"{name}\"\ndtype = \"{dtype}\"\n{cut}")
    };
    let of_columns = "cut = \"V\"\n";
    let entries = [
        entry("input", "logits", "f32", of_columns),
        entry("input", "ids", "i32", ""),
        entry("input", "advantages", "f32", ""),
        entry("input", "old_logp", "f32", ""),
        entry("input", "rollout_logp", "f32", ""),
        entry("input", "rollout_weights", "f32", ""),
        entry("input", "token_weights", "f32", ""),
        entry("input", "selected", "pred", ""),
        entry("input", "bias", "f32", of_columns),
        entry("output", "loss", "f32", ""),
        entry("output", "dlogits", "f32", of_columns),
        entry("output", "logp", "f32", ""),
        entry("output", "entropy", "f32", ""),
        entry("output", "token_loss", "f32", ""),
    ];
    let spec = "[spec]\nlogits = {bias = true}\nobjective = {kl_cov = {coefficient = 1.0}}\nrollout = {source = \"given\"}\n\
                token_weights = {applies_to = \"policy\"}\n\
                off_policy_mask = {threshold = 1.0, behaviour = \"rollout\"}\n";
    let head = "program = \"grpo_f32.mlir\"\nshape = [1, 2, 4]\ndevices = 2\ndevices_are = \"replicas\"\n";
    fs::write(copy.manifest(), format!("{head}{spec}{}", entries.concat())).unwrap();
    let exported = read(copy.manifest(), cpu_plugins()[0]);
    let mut spec = LossSpec::default();
    spec.logits.bias = true;
    spec.objective = Objective::KlCov(KlCov { coefficient: 1.0, selection: None });
    spec.rollout = serde_json::from_value(serde_json::json!({"source": "given"})).unwrap();
    spec.token_weights = Some(TokenWeights { applies_to: LossTerms::Policy });
    spec.off_policy_mask = Some(OffPolicyMask { threshold: 1.0, behaviour: OldLogp::Rollout });
    let problem = Problem {
        logits: FloatArray::rounded_from(&Array3::zeros((1, 2, 4)), Dtype::F32),
        ids: arr2(&[[2, 0]]),
        mask: arr2(&[[true, true]]),
        advantages: Advantages::Sequence(arr1(&[1.0])),
        old_logp: Some(arr2(&[[-1.0, -2.0]])),
        ref_logp: None,
        extra: Extra {
            rollout_logp: Some(arr2(&[[-0.5, f64::NAN]])),
            rollout_weights: Some(arr2(&[[0.75]])),
            token_weights: Some(arr2(&[[2.0, 0.5]])),
            selected: Some(arr2(&[[false, true]])),
            bias: Some(arr1(&[0.5, -1.0, 2.0, 4.0])),
            ..Extra::default()
        },
    };
    let candidate = exported.run(&spec, problem, 2).unwrap();
    let logp = candidate.logp.unwrap();
    assert!(logp.at(0, 0) == -0.5 && logp.at(0, 1).is_nan());
    assert_eq!(candidate.entropy.unwrap().to_f64(), arr2(&[[2.75, 1.25]]));
    assert_eq!(candidate.token_loss.unwrap().to_f64(), arr2(&[[0.0, 1.0]]));
    assert_eq!(candidate.gradient.row(0, 1), [0.5, -1.0, 2.0, 4.0]);
}

/// Packed sequences come back out: where each ends and its advantage in the places of dlogits' first token, weights of a sequence in its
/// tokens' places as logp, segment ids as the token loss.
#[test]
fn packed_sequences_arrive_as_the_problem_holds_them_and_no_others_are_taken() {
    let copy = Copy::new();
    let program = "module { func.func public @main(%x: tensor<1x4x3xf32>, %ids: tensor<1x4xi32>, %a: tensor<3xf32>, %old: tensor<1x4xf32>,
            %ends: tensor<4xi64>, %segments: tensor<1x4xi32>, %own: tensor<1x4xf32>)
            -> (tensor<f32>, tensor<1x4x3xf32>, tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>) {
          %loss = stablehlo.constant dense<0.0> : tensor<f32>
          %d = stablehlo.broadcast_in_dim %a, dims = [2] : (tensor<3xf32>) -> tensor<1x4x3xf32>
          %e = stablehlo.convert %ends : (tensor<4xi64>) -> tensor<4xf32>
          %entropy = stablehlo.reshape %e : (tensor<4xf32>) -> tensor<1x4xf32>
          %s = stablehlo.convert %segments : (tensor<1x4xi32>) -> tensor<1x4xf32>
          return %loss, %d, %own, %entropy, %s : tensor<f32>, tensor<1x4x3xf32>, tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>
        } }";
    fs::write(copy.path("grpo_f32.mlir"), program).unwrap();
    let entry = |kind: &str, name: &str, dtype: &str| format!("[[{kind}]]\nname = \"{name}\"\ndtype = \"{dtype}\"\n");
    let entries = [
        entry("input", "logits", "f32"),
        entry("input", "ids", "i32"),
        entry("input", "advantages", "f32"),
        entry("input", "old_logp", "f32"),
        entry("input", "cu_seqlens", "i64"),
        entry("input", "segment_ids", "i32"),
        entry("input", "token_weights", "f32"),
    ];
    let outputs = ["loss", "dlogits", "logp", "entropy", "token_loss"].map(|name| entry("output", name, "f32"));
    let head = "program = \"grpo_f32.mlir\"\nshape = [1, 4, 3]\nsequences = 3\n[spec]\ntoken_weights = {applies_to = \"policy\"}\n";
    fs::write(copy.manifest(), format!("{head}{}{}", entries.concat(), outputs.concat())).unwrap();
    let exported = read(copy.manifest(), cpu_plugins()[0]);
    let spec = LossSpec { token_weights: Some(TokenWeights { applies_to: LossTerms::Policy }), ..LossSpec::default() };
    let problem = |cu_seqlens: &[i64]| Problem {
        logits: FloatArray::rounded_from(&Array3::zeros((1, 4, 3)), Dtype::F32),
        ids: arr2(&[[2, 0, 1, 0]]),
        mask: arr2(&[[true, true, true, false]]),
        advantages: Advantages::Sequence(Array1::from_iter((1..cu_seqlens.len()).map(|s| s as f64))),
        old_logp: Some(arr2(&[[-1.0, -2.0, -1.0, 0.0]])),
        ref_logp: None,
        extra: Extra {
            token_weights: Some(Array2::from_shape_fn((cu_seqlens.len() - 1, 1), |(s, _)| 0.5 + s as f64)),
            sequences: Sequences::Packed(CuSeqlens::new(cu_seqlens).unwrap()),
            ..Extra::default()
        },
    };
    assert!(exported.takes_packed());
    let candidate = exported.run(&spec, problem(&[0, 2, 2, 3]), 1).unwrap();
    assert_eq!(candidate.gradient.row(0, 0), [1.0, 2.0, 3.0]);
    assert_eq!(candidate.entropy.unwrap().to_f64(), arr2(&[[0.0, 2.0, 2.0, 3.0]]));
    // The second is empty, and the token behind the last is nobody's.
    assert_eq!(candidate.token_loss.unwrap().to_f64(), arr2(&[[1.0, 1.0, 3.0, 0.0]]));
    assert_eq!(candidate.logp.unwrap().to_f64(), arr2(&[[0.5, 0.5, 2.5, 0.0]]));

    let refused = |exported: &ExportedProgram, spec: &LossSpec, problem: Problem| {
        exported.run(spec, problem, 1).unwrap_err().to_string().split_once(' ').expect("its id").1.to_string()
    };
    let says =
        |given, supported| format!("does not support sequences {given}; it supports {supported}, as its manifest says");
    assert_eq!(refused(&exported, &spec, problem(&[0, 2, 3])), says("2 packed into one row", "3 packed into one row"));
    let padded = Problem { advantages: Advantages::Sequence(arr1(&[1.0])), ..problem(&[0, 3]) };
    let extra = Extra { sequences: Sequences::Rows, ..padded.extra.clone() };
    assert_eq!(refused(&exported, &spec, Problem { extra, ..padded }), says("one a row", "3 packed into one row"));
    let of_rows =
        read(Copy::with_manifest("shape = [2, 5, 1031]", "shape = [1, 10, 1031]").manifest(), cpu_plugins()[0]);
    let packed = full_problem().laid_out(CuSeqlens::from_lengths([4, 6]));
    assert_eq!(refused(&of_rows, &LossSpec::default(), packed), says("2 packed into one row", "one a row"));
}

/// The example of packed sequences, on sequences of all lengths; and without its boundaries.
#[test]
fn shipped_example_of_packed_sequences_passes_every_gate() {
    let spec = LossSpec::default();
    let recipe = Recipe { shape: [4, 5, 131], masked_garbage: true, ..recipe(Regime::Normal, Dtype::F32, 3) };
    let problem = recipe.problem(&spec).unwrap().laid_out(CuSeqlens::from_lengths([0, 7, 2, 9]));
    let plugin = cpu_plugins()[0];
    assert_eq!(failed(&verdicts(&read(PACKED, plugin), &problem)), Vec::<String>::new());
    let mut other = problem.clone();
    other.extra.sequences = Sequences::Packed(CuSeqlens::from_lengths([0, 6, 3, 9]));
    let candidate = run(&read(PACKED, plugin), &other).unwrap();
    let judged = Known::of(&spec, &problem).unwrap().judge(candidate, &Limits::of("external").unwrap()).unwrap();
    assert!(judged.failed().any(|verdict| verdict.gate.to_string() == "dlogits"));
}

#[test]
fn a_loss_in_a_coarser_dtype_is_judged_by_the_ulp_of_f32() {
    let problem = Recipe { shape: [1, 2, 3], masked_garbage: false, ..recipe(Regime::Normal, Dtype::Bf16, 1) };
    let problem = problem.problem(&LossSpec::default()).unwrap();
    let plugin = cpu_plugins()[0];
    let candidate = run(&read(mirror(DeviceDtype::Pred, DeviceDtype::I32).manifest(), plugin), &problem).unwrap();
    let spec = LossSpec::default();
    let judged = Known::of(&spec, &problem).unwrap().judge(candidate, &Limits::of("external").unwrap()).unwrap();
    let loss = judged.failed().find(|verdict| verdict.gate.to_string() == "loss").expect("a bf16 loss is no f32 loss");
    assert_eq!((loss.dtype, loss.promised), (Dtype::Bf16, Dtype::F32));
}

#[test]
fn programs_that_are_not_what_the_manifest_says_are_refused_on_every_plugin() {
    let entry = |kind: &str, name: &str| format!("[[{kind}]]\nname = \"{name}\"\ndtype = \"f32\"\n");
    let cases: [(Copy, &[&str]); 8] = [
        (
            Copy::with_manifest(&entry("output", "entropy"), ""),
            &["grpo_f32.toml: output: got 4 listed, expected 5, as many as the program returns"],
        ),
        (
            Copy::with_manifest("name = \"logp\"\ndtype = \"f32\"", "name = \"logp\"\ndtype = \"bf16\""),
            &["grpo_f32.toml: output `logp`", "returned f32 [2, 5], expected bf16 [2, 5]"],
        ),
        (
            Copy::with_manifest(
                "name = \"loss\"\ndtype = \"f32\"\n\n[[output]]\nname = \"dlogits\"",
                "name = \"dlogits\"\ndtype = \"f32\"\n\n[[output]]\nname = \"loss\"",
            ),
            &["grpo_f32.toml: output `loss`", "returned f32 [2, 5, 1031], expected f32 []"],
        ),
        (
            Copy::with_manifest("[[input]]\nname = \"mask\"\ndtype = \"pred\"\n", ""),
            &["grpo_f32.toml: execute", "supplied 4", "expected 5"],
        ),
        (
            Copy::with_manifest("name = \"ids\"\ndtype = \"i32\"", "name = \"ids\"\ndtype = \"i64\""),
            &["grpo_f32.toml: execute", "parameter 1 of size 40", "size 80"],
        ),
        (Copy::with_program("stablehlo.negate", "stablehlo.neglect"), &["grpo_f32.mlir: compile", "neglect"]),
        (Copy::with_program("func.func public @main", "func.func public @grpo"), &["grpo_f32.mlir: compile", "main"]),
        (Copy::with_program("module @jit_program", "module @"), &["grpo_f32.mlir: compile", "expected"]),
    ];
    for plugin in cpu_plugins() {
        for (copy, parts) in &cases {
            let error = run(&read(copy.manifest(), plugin), &full_problem()).unwrap_err().to_string();
            assert!(error.starts_with(copy.folder.path().to_str().unwrap()) && error.lines().count() == 1, "{error}");
            for part in *parts {
                assert!(error.contains(part), "{}: `{part}` not in: {error}", plugin.display());
            }
        }
    }
}

#[test]
fn another_shape_dtype_device_count_or_spec_is_refused_by_name() {
    let exported = find::<Problem>(&format!("file:{F32}"), None).unwrap();
    assert_eq!((exported.id(), exported.class()), ("file:fixtures/exported/grpo_f32.toml", "external"));
    let problem = full_problem();
    let supports = |spec: &LossSpec, shape: &str, dtype, devices| {
        exported.supports(spec, shape.parse().unwrap(), dtype, devices).map_err(|error| error.to_string())
    };
    let refused = |given: &str, supported: &str| {
        Err(format!("file:{F32} does not support {given}; it supports {supported}, as its manifest says"))
    };
    let plain = LossSpec::default();
    assert_eq!(exported.supports(&plain, problem.shape(), Dtype::F32, 1), Ok(()));
    assert_eq!(supports(&plain, "2x5x1030", Dtype::F32, 1), refused("shape 2x5x1030", "2x5x1031"));
    assert_eq!(supports(&plain, "2x5x1031", Dtype::Bf16, 1), refused("logits dtype bf16", "f32"));
    assert_eq!(supports(&plain, "2x5x1031", Dtype::F32, 2), refused("device count 2", "1"));
    let clip = PpoClip { epsilon_high: 0.3, ..PpoClip::default() };
    let cases = [
        (
            LossSpec { objective: Objective::PpoClip(clip), temperature: 0.7.into(), ..plain.clone() },
            "`objective.ppo_clip.epsilon_high` = 0.3",
            "0.2",
        ),
        (LossSpec { temperature: 0.7.into(), ..plain.clone() }, "`temperature` = 0.7", "1.0"),
        (LossSpec { old_logp: OldLogp::Current, ..plain.clone() }, "`old_logp` = \"current\"", "\"given\""),
        (
            LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..plain.clone() },
            concat!(
                "`kl` = {\"beta\":0.1,\"estimator\":\"k3\",\"gradient\":\"own\",\"importance\":\"one\",",
                "\"difference_clamp\":null,\"value_clamp\":null,\"clamp_after_importance\":false,\"averaging\":null}"
            ),
            "null",
        ),
        (
            LossSpec { reduction: Reduction::FixedLength { rows: Rows::All, length: Some(8) }, ..plain.clone() },
            "`reduction` = {\"fixed_length\":{\"rows\":\"all\",\"length\":8}}",
            "\"token_mean\"",
        ),
    ];
    for (spec, given, supported) in cases {
        assert_eq!(supports(&spec, "2x5x1031", Dtype::F32, 1), refused(&format!("spec field {given}"), supported));
    }
    let bf16 = recipe(Regime::Normal, Dtype::Bf16, 1).problem(&plain).unwrap();
    assert!(matches!(exported.run(&plain, bf16, 1), Err(RunError::Unsupported(_))));
}

#[test]
fn manifests_that_are_wrong_are_refused_by_file_and_field() {
    let logits = "[[input]]\nname = \"logits\"\ndtype = \"f32\"\n";
    let loss = "[[output]]\nname = \"loss\"\ndtype = \"f32\"\n";
    let old_logp = "[[input]]\nname = \"old_logp\"\ndtype = \"f32\"\n";
    let with_kl = "[spec.kl]\nbeta = 0.1\n\n[spec.objective.ppo_clip]";
    let ref_logp = format!("{old_logp}\n[[input]]\nname = \"ref_logp\"\ndtype = \"f32\"\n");
    let beside = |name: &str| format!("{old_logp}{}", old_logp.replace("old_logp", name));
    let twice = |entry: &str| format!("{entry}\n{entry}");
    let ends = format!("{old_logp}[[input]]\nname = \"cu_seqlens\"\ndtype = \"i32\"\n");
    let cases: &[(&str, &str, &[&str])] = &[
        ("program = ", "= ", &["line 1", "`= \"grpo_f32.mlir\"`"]),
        ("program = \"grpo_f32.mlir\"\n", "", &["missing field `program`"]),
        ("program = ", "programme = ", &["line 1", "`programme`", "`program`"]),
        ("\"grpo_f32.mlir\"", "\"gone.mlir\"", &["gone.mlir", "cannot read", "No such file"]),
        ("\"grpo_f32.mlir\"", "\".\"", &["cannot read", "directory"]),
        ("\"grpo_f32.mlir\"", "7", &["line 1", "integer `7`", "`program = 7`"]),
        ("shape = [2, 5, 1031]\n", "", &["missing field `shape`"]),
        ("[2, 5, 1031]", "[2, 5]", &["line 2", "length 2", "3"]),
        ("[2, 5, 1031]", "[2, 0, 1031]", &["shape", "got [2, 0, 1031]", "≥ 1"]),
        ("[2, 5, 1031]", "[2, -5, 1031]", &["line 2", "-5", "shape"]),
        ("[2, 5, 1031]", "[4294967296, 4294967296, 2]", &["shape", "4294967296", "≥ 1"]),
        ("[2, 5, 1031]", "[1, 1, 2147483648]", &["input `ids`: dtype", "got i32", "expected i64"]),
        ("shape =", "devices = 0\nshape =", &["devices", "got 0", "expected at least 1"]),
        ("shape =", "devices_are = \"hosts\"\nshape =", &["devices_are", "`partitions` or `replicas`"]),
        (
            "dtype = \"i32\"",
            "dtype = \"i32\"\ncut = \"V\"",
            &["input `ids`: cut", "got V", "expected an axis that it has"],
        ),
        ("[[output]]\n", "[[output]]\ncut = \"B\"\n", &["output `loss`: cut", "got B", "expected an axis that it has"]),
        ("epsilon_low", "epsilon", &["`epsilon`", "`epsilon_low`"]),
        ("0.2", "-0.2", &["`objective.ppo_clip.epsilon_low`", "got -0.2", "≥ 0"]),
        ("\"logits\"", "\"logit\"", &["`logit`", "`logits`"]),
        ("\"f32\"", "\"f8\"", &["`f8`", "`f32`"]),
        ("\"f32\"", "\"f\\u001b[31m\"", &["`f\\u{1b}[31m`"]),
        ("\"f32\"", "\"i32\"", &["input `logits`: dtype", "got i32", "expected f64, f32, bf16 or f16"]),
        ("\"i32\"", "\"f32\"", &["input `ids`: dtype", "got f32", "expected i32 or i64"]),
        ("\"i32\"", "\"u8\"", &["input `ids`: dtype", "got u8", "expected i32 or i64"]),
        ("dtype = \"i32\"", "dtype = \"i32\"\nshape = [2, 5]", &["unknown field `shape`", "`dtype`"]),
        (logits, &twice(logits), &["input", "`logits` twice", "each name once"]),
        (loss, &twice(loss), &["output", "`loss` twice", "each name once"]),
        (logits, "", &["input: got no `logits`", "`advantages`"]),
        ("[[input]]\nname = \"ids\"\ndtype = \"i32\"\n", "", &["input: got no `ids`"]),
        (old_logp, "", &["input: got no `old_logp`", "`old_logp: given`"]),
        (old_logp, &ref_logp, &["input: got an `ref_logp`", "no `kl` term"]),
        ("[spec.objective.ppo_clip]", with_kl, &["input: got no `ref_logp`", "a `kl` term"]),
        ("[spec", "[spec]\nold_logp = \"current\"\n[spec", &["input: got an `old_logp`", "`old_logp: current`"]),
        ("[spec", "[spec]\nold_logp = \"rollout\"\n[spec", &["input: got an `old_logp`", "`old_logp: rollout`"]),
        (old_logp, &old_logp.replace("old_logp", "rollout_logp"), &["input: got no `old_logp`", "`old_logp: given`"]),
        (old_logp, &beside("rollout_logp"), &["input: got an `rollout_logp`", "none, as the spec does not read it"]),
        (old_logp, &beside("rollout_weights"), &["input: got an `rollout_weights`", "`rollout.source: given`"]),
        (old_logp, &beside("token_weights"), &["input: got an `token_weights`", "no `token_weights`"]),
        (old_logp, &beside("selected"), &["input: got an `selected`", "`selection`"]),
        (old_logp, &beside("bias"), &["input: got an `bias`", "`logits.bias: false`"]),
        (old_logp, &ends, &["input: got an `cu_seqlens`", "no `sequences`"]),
        ("shape =", "sequences = 2\nshape =", &["sequences: got 2 in 2 rows", "[1, N, V]"]),
        ("shape = [2, 5,", "sequences = 2\nshape = [1, 10,", &["input: got no `cu_seqlens`", "or `segment_ids`"]),
        ("[spec", "[spec.logits]\nbias = true\n[spec", &["input: got no `bias`", "`logits.bias: true`"]),
        ("[spec", "[spec.rollout]\nsource = \"given\"\n[spec", &["input: got no `rollout_weights`"]),
        ("[spec", "[spec.token_weights]\n[spec", &["input: got no `token_weights`"]),
        ("[spec", "[spec.rollout]\nsource = \"logp\"\n[spec", &["input: got no `rollout_logp`"]),
        ("[spec", "[spec]\ndentropy = true\n[spec", &["spec.dentropy", "no cotangent of the entropy"]),
        (loss, "", &["output: got no `loss`", "`dlogits`"]),
        ("\"dlogits\"", "\"dlogit\"", &["`dlogit`", "`dlogits`"]),
        ("name = \"loss\"\ndtype = \"f32\"", "name = \"loss\"\ndtype = \"i32\"", &["`i32`", "`f32`"]),
    ];
    for (from, to, parts) in cases {
        Copy::with_manifest(from, to).assert_refused(parts);
    }
}

#[test]
fn files_that_are_no_manifest_or_program_are_refused() {
    let replaced = |name: &str, bytes: &[u8]| {
        let copy = Copy::new();
        fs::write(copy.path(name), bytes).unwrap();
        copy
    };
    let longer_than = |name: &str, length: u64| {
        let copy = Copy::new();
        File::create(copy.path(name)).unwrap().set_len(length + 1).unwrap();
        copy
    };
    replaced("grpo_f32.toml", b"\xff\xfe").assert_refused(&["no UTF-8", "TOML"]);
    replaced("grpo_f32.toml", b"").assert_refused(&["missing field"]);
    replaced("grpo_f32.mlir", b"\xff\xfe").assert_refused(&[
        "grpo_f32.mlir: program",
        "`mlir_module()`",
        "`serialize()`",
    ]);
    replaced("grpo_f32.mlir", b" \n").assert_refused(&["grpo_f32.mlir: program", "neither"]);
    longer_than("grpo_f32.toml", 1 << 20).assert_refused(&["length", "more than 1048576 bytes", "at most 1048576"]);
    longer_than("grpo_f32.mlir", 64 << 20).assert_refused(&["grpo_f32.mlir: length", "at most 67108864"]);
    let gone = Copy::new();
    fs::remove_file(gone.manifest()).unwrap();
    gone.assert_refused(&["grpo_f32.toml: cannot read: No such file"]);
}

#[test]
fn replay_and_gradcheck_take_a_manifest_and_exit_with_0_1_or_2() {
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
fn a_program_that_is_partitioned_passes_every_gate() {
    for plugin in cpu_plugins() {
        let exported = read(TWO_DEVICES, plugin);
        assert_eq!(exported.device_counts(), [2]);
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            let problem = recipe(regime, Dtype::F32, seed).problem(&LossSpec::default()).unwrap();
            let spec = LossSpec::default();
            let candidate = exported.run(&spec, problem.clone(), 2).unwrap_or_else(|error| panic!("{error}"));
            let judged = Known::of(&spec, &problem).unwrap().judge(candidate, &Limits::of(exported.class()).unwrap());
            assert_eq!(failed(&judged.unwrap().verdicts), Vec::<String>::new(), "{regime:?} on {}", plugin.display());
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
fn replicas_that_do_not_agree_are_an_error() {
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
        let (candidate, problem, spec) = (run(&right).unwrap(), full_problem(), LossSpec::default());
        let judged = Known::of(&spec, &problem).unwrap().judge(candidate, &Limits::of("external").unwrap()).unwrap();
        assert_eq!(failed(&judged.verdicts), Vec::<String>::new());
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
fn a_program_that_does_not_end_is_given_up() {
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
