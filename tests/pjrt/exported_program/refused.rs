//! Programs, manifests and problems that are refused, and the words of the refusal.

use std::fs::{self, File};

use assay::implementation::RunError;
use assay::judge::generate::Regime;
use assay::problem::Dtype;
use assay::registry::find;
use assay::spec::{Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows};

use super::super::cpu_plugins;
use super::{Copy, F32, full_problem, read, recipe, run};

#[test]
fn exported_program_unlike_its_manifest_is_refused() {
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
fn exported_other_shape_dtype_devices_or_spec_is_refused() {
    let exported = find(&format!("file:{F32}"), None).unwrap();
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
fn manifest_with_a_wrong_field_is_refused_by_file_and_field() {
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
        ("\"grpo_f32.mlir\"", "\".\"", &["cannot read", "got a folder, expected a regular file"]),
        ("\"grpo_f32.mlir\"", "7", &["line 1", "integer `7`", "`program = 7`"]),
        ("shape = [2, 5, 1031]\n", "", &["missing field `shape`"]),
        ("[2, 5, 1031]", "[2, 5]", &["line 2", "length 2", "3"]),
        ("[2, 5, 1031]", "[2, 0, 1031]", &["shape", "got [2, 0, 1031]", "≥ 1"]),
        ("[2, 5, 1031]", "[2, -5, 1031]", &["line 2", "-5", "shape"]),
        ("[2, 5, 1031]", "[4294967296, 4294967296, 2]", &["shape", "4294967296", "a product that fits"]),
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
fn manifest_or_program_of_another_form_is_refused() {
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
    longer_than("grpo_f32.toml", 1 << 20)
        .assert_refused(&["cannot read: got more than 1048576 bytes", "at most 1048576"]);
    longer_than("grpo_f32.mlir", 64 << 20)
        .assert_refused(&["grpo_f32.mlir: cannot read: got more than", "at most 67108864"]);
    let gone = Copy::new();
    fs::remove_file(gone.manifest()).unwrap();
    gone.assert_refused(&["grpo_f32.toml: cannot read: No such file"]);
}
