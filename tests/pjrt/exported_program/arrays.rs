//! The arrays of a problem arrive in programs as they are, and outputs are judged in their dtypes.

use assay::device_dtype::DeviceDtype;
use assay::exported::ExportedProgram;
use assay::implementation::{Implementation, Workload as _};
use assay::judge::generate::{Recipe, Regime};
use assay::problem::{Advantages, CuSeqlens, Dtype, Extra, FloatArray, Problem, Sequences};
use assay::spec::{KlCov, LossSpec, LossTerms, Objective, OffPolicyMask, OldLogp, TokenWeights};
use ndarray::{Array1, Array2, Array3, arr1, arr2, arr3};

use super::super::cpu_plugins;
use super::{Copy, full_problem, judge, read, recipe, run};

/// Every input comes back out: logits as dlogits, advantages as the loss, `old_logp` as logp, mask as entropy, ids as
/// the token loss.
fn mirror(mask: DeviceDtype, ids: DeviceDtype) -> Copy {
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
    let inputs = ["old_logp f16", &format!("ids {ids}"), "logits bf16", &format!("mask {mask}"), "advantages bf16"];
    let outputs = ["token_loss f32", "dlogits bf16", "loss bf16", "logp f16", "entropy f32"];
    Copy::written(&program, "shape = [1, 2, 3]", &inputs, &outputs)
}

#[test]
fn exported_inputs_in_any_order_and_dtype_arrive_unchanged() {
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
fn exported_optional_arrays_arrive_unchanged() {
    let program = "module { func.func public @main(%x: tensor<1x2x2xf32>, %ids: tensor<1x2xi32>, %a: tensor<1xf32>, %old: tensor<1x2xf32>,
            %rollout: tensor<1x2xf32>, %weights: tensor<1x2xf32>, %own: tensor<1x2xf32>, %selected: tensor<1x2xi1>, %bias: tensor<2xf32>)
            -> (tensor<f32>, tensor<1x2x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>) {
          %loss = stablehlo.reshape %a : (tensor<1xf32>) -> tensor<f32>
          %s = stablehlo.convert %selected : (tensor<1x2xi1>) -> tensor<1x2xf32>
          %b = stablehlo.broadcast_in_dim %bias, dims = [2] : (tensor<2xf32>) -> tensor<1x2x2xf32>
          %sum = stablehlo.add %weights, %own : tensor<1x2xf32>
          return %loss, %b, %rollout, %sum, %s : tensor<f32>, tensor<1x2x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>, tensor<1x2xf32>
        } }";
    let inputs = [
        "logits f32 V",
        "ids i32",
        "advantages f32",
        "old_logp f32",
        "rollout_logp f32",
        "rollout_weights f32",
        "token_weights f32",
        "selected pred",
        "bias f32 V",
    ];
    let outputs = ["loss f32", "dlogits f32 V", "logp f32", "entropy f32", "token_loss f32"];
    let head = "shape = [1, 2, 4]\ndevices = 2\ndevices_are = \"replicas\"\n\
                [spec]\nlogits = {bias = true}\nobjective = {kl_cov = {coefficient = 1.0}}\nrollout = {source = \"given\"}\n\
                token_weights = {applies_to = \"policy\"}\n\
                off_policy_mask = {threshold = 1.0, behaviour = \"rollout\"}";
    let copy = Copy::written(program, head, &inputs, &outputs);
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
fn exported_packed_sequences_arrive_and_others_are_refused() {
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
    let inputs = [
        "logits f32",
        "ids i32",
        "advantages f32",
        "old_logp f32",
        "cu_seqlens i64",
        "segment_ids i32",
        "token_weights f32",
    ];
    let outputs = ["loss f32", "dlogits f32", "logp f32", "entropy f32", "token_loss f32"];
    let head = "shape = [1, 4, 3]\nsequences = 3\n[spec]\ntoken_weights = {applies_to = \"policy\"}";
    let copy = Copy::written(program, head, &inputs, &outputs);
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

#[test]
fn exported_loss_in_bf16_is_judged_by_the_ulp_of_f32() {
    let problem = Recipe { shape: [1, 2, 3], masked_garbage: false, ..recipe(Regime::Normal, Dtype::Bf16, 1) };
    let problem = problem.problem(&LossSpec::default()).unwrap();
    let plugin = cpu_plugins()[0];
    let candidate = run(&read(mirror(DeviceDtype::Pred, DeviceDtype::I32).manifest(), plugin), &problem).unwrap();
    let verdicts = judge(candidate, &problem);
    let loss = verdicts.iter().find(|verdict| verdict.gate.to_string() == "loss").expect("a loss is judged");
    assert!(!loss.passed(), "a bf16 loss is no f32 loss");
    assert_eq!((loss.dtype, loss.promised), (Dtype::Bf16, Dtype::F32));
}
