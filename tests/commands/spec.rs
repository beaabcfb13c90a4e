//! `assay spec`: a preset or a file in full, and in words.

use std::fs;

use crate::common::command::{assay, assert_refused};
use assay::spec::{LossSpec, Objective, Rows};
use assay::spec::{PpoClip, Reduction};
use serde_json::Value;
use tempfile::TempDir;

fn shown(args: &[&str]) -> String {
    let output = assay(&[&["spec"], args].concat());
    assert_eq!(output.code, 0, "{args:?}: {}", output.stderr);
    output.stdout
}

#[test]
fn spec_that_is_printed_is_a_spec_file() {
    let text = shown(&["--preset", "trl", "loss_type=grpo", "epsilon_high=0.28", "gradient_accumulation_steps=4"]);
    let spec: LossSpec = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(spec.objective, Objective::PpoClip(PpoClip { epsilon_high: 0.28, ..PpoClip::default() }));
    assert_eq!(spec.reduction, Reduction::SequenceMean { rows: Rows::All });
    assert_eq!(spec.scale, 0.25);
    for line in [
        "# policy     −min(ρ·A, clip(ρ, 0.8, 1.28)·A); one A per sequence",
        "# reduction  w = 1/(B·n_b): mean over rows of their token means, empty rows counted",
        "# loss       0.25 · (Σ w·m·policy)",
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }

    let folder = TempDir::new().unwrap();
    let file = folder.path().join("spec.yaml");
    fs::write(&file, &text).unwrap();
    let again = shown(&["--spec", file.to_str().unwrap()]);
    assert_eq!(serde_saphyr::from_str::<LossSpec>(&again).unwrap(), spec);
}

#[test]
fn spec_options_in_both_forms_mean_the_same() {
    let words = shown(&["--preset", "trl", "loss_type=grpo", "epsilon_high=0.28"]);
    let named = shown(&["--preset", "trl", "--option", "loss_type=grpo", "--option", "epsilon_high=0.28"]);
    assert_eq!(words, named);
    assert_eq!(words, shown(&["--preset", "trl", "--option", "loss_type=grpo", "epsilon_high=0.28"]));
    // Of an option in both forms, that behind `--option` counts.
    assert_eq!(words, shown(&["--preset", "trl", "--option", "loss_type=grpo", "loss_type=bnpo", "epsilon_high=0.28"]));
}

#[test]
fn spec_options_without_a_preset_are_refused_in_both_forms() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("spec.yaml");
    fs::write(&file, "{}").unwrap();
    for option in [&["loss_type=grpo"][..], &["--option", "loss_type=grpo"]] {
        let of_file = [&["spec", "--spec", file.to_str().unwrap()], option].concat();
        assert_refused(&of_file, &["`loss_type=grpo`", "--preset"]);
        assert_refused(&[&["check", "--impl", "native"], option].concat(), &["`loss_type=grpo`", "--preset"]);
    }
}

#[test]
fn spec_is_said_in_formulas() {
    let verl = ["--preset", "verl", "loss_mode=gspo", "use_kl_loss=True", "kl_loss_type=k3+", "entropy_coeff=0.01"];
    let text = shown(&verl);
    for part in [
        "ρ = exp(min(Σ m·x / n_b, 10))",
        "the gradient of the token's own ℓ",
        "0.001·kl, kl = clamp(e^d − d − 1, ±10), d = clamp(ref_logp − ℓ, ±20); the gradient is that of d²/2",
        "Σ w·m·policy + Σ w·m·0.001·kl − 0.01·mean(H)",
    ] {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
    assert!(shown(&["--preset", "mllm-jax", "temperature=0.7"]).contains("log_softmax(logits)[id] / 0.7"));
    assert!(shown(&["--preset", "verl", "--function", "compute_entropy_loss"]).contains("# loss       mean(H)"));
}

#[test]
fn spec_options_without_effect_and_notes_are_listed() {
    let text = shown(&["--preset", "trl", "loss_type=dapo", "sapo_temperature_pos=2", "num_generations=8"]);
    assert!(text.contains("without effect on the loss: num_generations, sapo_temperature_pos"), "{text}");
    assert!(text.contains("note: num_items_in_batch is not given"), "{text}");
    assert!(!shown(&["--preset", "trl", "loss_type=dapo", "--num-items", "64"]).contains("note:"));
    assert!(shown(&["--preset", "liger"]).contains("parts of a batch do not add up to it"));
    for preset in ["trl", "liger", "unsloth"] {
        let bnpo = shown(&["--preset", preset, "loss_type=bnpo", "--num-items", "64"]);
        assert!(bnpo.contains("parts of a batch do not add up to it"), "{preset}: {bnpo}");
    }
    assert!(
        shown(&["--preset", "verl", "loss_mode=geo_mean"]).contains("note: geo_mean is a mean of each micro-batch")
    );
}

#[test]
fn spec_of_a_project_names_its_release_and_a_changed_default() {
    assert!(shown(&["--preset", "trl"]).starts_with("# trl 1.16.0, GRPOTrainer\n"));
    assert!(shown(&["--preset", "roll"]).starts_with("# roll commit 8eb27cc2, "));
    let note = "which is TRL's default since 1.10.0";
    assert!(shown(&["--preset", "trl", "beta=0.04"]).contains(note));
    for settled in [&["beta=0"][..], &["beta=0.04", "use_bias_correction_kl=true"]] {
        assert!(!shown(&[&["--preset", "trl"], settled].concat()).contains(note), "{settled:?}");
    }
    let help = assay(&["check", "--help"]).stdout;
    assert!(help.contains("trl 1.16.0, verl 0.9.1, "), "{help}");
}

#[test]
fn spec_json_holds_the_spec_and_the_words() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("spec.json");
    let printed = shown(&["--preset", "tunix", "beta=0", "--json", path.to_str().unwrap(), "--quiet"]);
    assert_eq!(printed, "");
    let json: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!((&json["preset"], &json["function"]), (&"tunix".into(), &"grpo_loss_fn".into()));
    assert_eq!(json["release"], "0.1.7");
    let spec: LossSpec = serde_json::from_value(json["spec"].clone()).unwrap();
    assert_eq!(json["description"], spec.describe());
}

#[test]
fn spec_bad_options_are_refused_by_name() {
    assert_refused(&["spec", "--preset", "nobody"], &["`nobody`", "trl", "openrlhf"]);
    assert_refused(&["spec", "--preset", "trl", "--function", "f"], &["`f`", "GMPOTrainer"]);
    assert_refused(&["spec", "--preset", "trl", "epsilon"], &["`epsilon`", "name=value"]);
    assert_refused(&["spec", "--preset", "trl", "epsilom=0.2"], &["`epsilom`", "(given 0.2)", "epsilon"]);
    assert_refused(&["spec", "--preset", "trl", "loss_type=ppo"], &["`loss_type`", "\"ppo\"", "vespo"]);
    assert_refused(&["spec", "--preset", "trl", "epsilon=-1"], &["epsilon_low", "got -1"]);
    assert_refused(&["spec", "--preset", "trl", "use_vllm=true"], &["importance_sampling_ratio", "`use_vllm`"]);
}

#[test]
fn spec_file_with_old_keys_is_read_and_noted() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("spec.yaml");
    let file = path.to_str().unwrap();
    for name in ["logits", "head"] {
        fs::write(&path, format!("{name}: {{scale: 0.5, softcap: 30}}\n")).unwrap();
        let text = shown(&["--spec", file]);
        assert!(text.contains("# logp       ℓ = log_softmax(30·tanh(0.5·logits / 30))[id]"), "{text}");
        assert!(text.contains("\nlogits:\n") && !text.contains("\nhead:"), "{text}");
        assert_eq!(text.contains("# note: `head` is the old name of `logits`"), name == "head", "{text}");
    }
    fs::write(&path, "head: {scale: 0.5}\nlogits: {scale: 0.5}\n").unwrap();
    assert_refused(&["spec", "--spec", file], &[file, "duplicate field", "logits (old key: head)"]);
    let cotangents = "objective: policy_gradient\nadvantages: token\nold_logp: current\nreduction: {normalizer: 1.0}\n";
    fs::write(&path, format!("{cotangents}top: 3\n")).unwrap();
    let text = shown(&["--spec", file]);
    assert!(text.contains("\nids_per_token: 3\n") && text.contains("note: `top` is the old name"), "{text}");
    fs::write(&path, "head: {scale: 0}\n").unwrap();
    assert_refused(&["spec", "--spec", file], &["`logits.scale`", "got 0"]);
}

#[test]
fn spec_schema_is_json_and_excludes_a_loss() {
    let output = assay(&["spec", "--schema"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let schema: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(schema["properties"]["kl"]["default"], serde_json::Value::Null);
    for wrong in [["spec", "--schema", "--preset", "trl"].as_slice(), &["spec", "--schema", "loss_type=dapo"]] {
        let output = assay(wrong);
        assert_eq!(output.code, 2, "{wrong:?}");
        assert!(output.stderr.contains("--preset"), "{}", output.stderr);
    }
}
