//! `assay train` and `assay ab` as they are run: killed and gone on, and with input that is wrong.

use crate::common::checkpoint;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::checkpoint::{HIDDEN, VOCAB};
use crate::common::command::{Output, assay, assert_refused};
use crate::common::interruption::{interrupted, limited, stopped};
use assay::schema::ab::AbComparison;
use assay::train::candle_core::{DType, Device, Tensor};
use assay::train::metrics::StepRecord;
use serde_json::json;

/// A run of some seconds.
const SETTINGS: &str = "
steps: 8
out: OUT
threads: 1
model: {init: {vocab_size: 257, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: true}}
task: {arithmetic: {train: 32, evaluate: 4, largest: 5}}
warm_start: {steps: 100, batch: 8, learning_rate: 1.0e-2}
rollout: {prompts: 2, group: 4, max_new_tokens: 8}
update: {ppo_epochs: 2, micro_batches: 2}
evaluate_every: 4
checkpoint_every: 3
";

fn settings(folder: &Path, out: &str) -> String {
    SETTINGS.replace("OUT", folder.join(out).to_str().unwrap())
}

fn args(name: &str, config: &Path) -> Vec<String> {
    [name, "-q", "--config", config.to_str().unwrap()].map(String::from).to_vec()
}

/// The arguments that train as `settings` say.
fn train(folder: &Path, settings: &str) -> Vec<String> {
    let config = folder.join("config.yaml");
    fs::write(&config, settings).unwrap();
    args("train", &config)
}

fn run(args: &[String]) -> Output {
    assay(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

#[track_caller]
fn expect_success(args: &[String]) {
    let output = run(args);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
}

/// How many steps have been written down.
fn written(out: &Path) -> usize {
    fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

#[track_caller]
fn expect_no_temporary_file(out: &Path) {
    let names: Vec<_> = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with(".tmp")), "{names:?}");
}

/// The curve, without what a clock or an allocator said.
fn curve(out: &Path) -> Vec<StepRecord> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let timeless = |line: &str| StepRecord {
        unix_time: 0.0,
        rollout_s: 0.0,
        score_s: 0.0,
        update_s: 0.0,
        loss_step_s: 0.0,
        step_s: 0.0,
        loss_step_bytes: None,
        update_bytes: None,
        ..serde_json::from_str(line).unwrap()
    };
    text.lines().map(timeless).collect()
}

/// The weights and moments of the last checkpoint, by name.
fn state(out: &Path) -> Vec<(String, Vec<f32>)> {
    let read = assay::train::candle_core::safetensors::load(out.join("checkpoint.safetensors"), &Device::Cpu).unwrap();
    let values = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let mut all: Vec<_> = read.into_iter().map(|(name, tensor)| (name, values(tensor))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn train_killed_run_goes_on_to_the_same_curve() {
    let folder = tempfile::tempdir().unwrap();
    expect_success(&train(folder.path(), &settings(folder.path(), "whole")));
    let killed = train(folder.path(), &settings(folder.path(), "killed"));
    let out = folder.path().join("killed");
    // In the warm start, before the first checkpoint, and after every step from then on.
    stopped("-KILL", &killed, || out.exists());
    for lines in 1..8 {
        let before = fs::read(out.join("metrics.jsonl")).ok();
        stopped("-KILL", &killed, || written(&out) >= lines && fs::read(out.join("metrics.jsonl")).ok() != before);
    }
    expect_success(&killed);
    let (expected, given) = (curve(&folder.path().join("whole")), curve(&out));
    assert_eq!(expected.len(), 8);
    assert!(expected[3].evaluation.is_some() && expected.iter().any(|record| record.grad_norm > 0.0));
    assert_eq!(given, expected);
    assert_eq!(state(&out), state(&folder.path().join("whole")));
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(out.join("summary.json")).unwrap()).unwrap();
    for key in [
        "time/train/step_avg_last10_s",
        "time/train/update_s",
        "time/train/rollout_generate_s",
        "throughput/train/valid_tokens_per_s_update",
        "train-other/total_valid_token_count",
        "eval/reward/total/mean",
        "bytes/train/loss_step",
    ] {
        assert!(summary[key].as_f64().is_some_and(|value| value >= 0.0), "{key}: {summary}");
    }
}

/// A limit on the size of files stands for a full disk: both end a write with an error.
#[cfg(unix)]
#[test]
fn train_full_disk_leaves_the_last_checkpoint_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, out) = (settings(folder.path(), "whole"), folder.path().join("out"));
    expect_success(&train(folder.path(), &whole));
    let begun = settings(folder.path(), "out");
    expect_success(&train(folder.path(), &begun.replace("steps: 8", "steps: 1")));
    let before = fs::read(out.join("checkpoint.safetensors")).unwrap();
    let rest = train(folder.path(), &begun);
    let output = limited("trap '' XFSZ && ulimit -f 64", &rest);
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("checkpoint.safetensors: cannot write: File too large"), "{}", output.stderr);
    assert_eq!(fs::read(out.join("checkpoint.safetensors")).unwrap(), before);
    expect_no_temporary_file(&out);
    expect_success(&rest);
    // The first step was the last of its run, and therefore evaluated.
    assert_eq!(curve(&out)[1..], curve(&folder.path().join("whole"))[1..]);
    assert_eq!(state(&out), state(&folder.path().join("whole")));
}

#[cfg(unix)]
#[test]
fn train_interrupted_run_keeps_its_steps_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, out) = (settings(folder.path(), "whole"), folder.path().join("out"));
    expect_success(&train(folder.path(), &whole));
    let begun = settings(folder.path(), "out");
    let long = train(folder.path(), &begun.replace("steps: 8", "steps: 1000000"));
    let output = interrupted(&long, || {
        let begun = written(&out) >= 2;
        if begun {
            assert_refused(&long.iter().map(String::as_str).collect::<Vec<_>>(), &["another run writes here"]);
        }
        begun
    });
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("of 1000000 steps; the same command goes on"), "{}", output.stderr);
    let kept = written(&out);
    expect_no_temporary_file(&out);
    let rest = begun.replace("steps: 8", &format!("steps: {}", kept.max(8)));
    expect_success(&train(folder.path(), &rest));
    let whole_curve = curve(&folder.path().join("whole"));
    // The last step is evaluated, wherever it is.
    assert_eq!(curve(&out)[..7], whole_curve[..7]);

    let warming = settings(folder.path(), "warming");
    let warming_out = folder.path().join("warming");
    let endless = train(folder.path(), &warming.replace("warm_start: {steps: 100", "warm_start: {steps: 100000000"));
    let output = interrupted(&endless, || warming_out.exists());
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("interrupted in the warm start"), "{}", output.stderr);
    let left: Vec<_> = fs::read_dir(warming_out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"]);
}

/// The loop on a checkpoint with its own tokenizer, and what of one is refused.
#[test]
fn train_checkpoint_uses_its_own_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    checkpoint::write(&folder.path().join("model"), VOCAB, true);
    let lines = [json!({"question": "what is 7 plus 5 ", "answer": "it is\n#### 12"}).to_string()];
    fs::write(folder.path().join("gsm8k.jsonl"), lines.concat()).unwrap();
    let (start, end) = (SETTINGS.find("model:").unwrap(), SETTINGS.find("warm_start:").unwrap());
    let chosen = "model: {path: model}\ntask: {gsm8k: {train: gsm8k.jsonl, evaluate: gsm8k.jsonl}}\n";
    let text = format!("{}{chosen}{}", &SETTINGS[..start], &SETTINGS[end..]).replace("steps: 8", "steps: 1");
    let text = text.replace("OUT", folder.path().join("out").to_str().unwrap());
    expect_success(&train(folder.path(), &text));
    let embedding = &state(&folder.path().join("out")).into_iter().find(|(name, _)| name.contains("embed")).unwrap().1;
    assert_eq!(embedding.len(), VOCAB * HIDDEN);
    assert!(curve(&folder.path().join("out"))[0].loss.is_finite());

    let refused = |part: &str| {
        let args = train(folder.path(), &text.replace("/out", "/refused"));
        assert_refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[part]);
        assert!(!folder.path().join("refused/checkpoint.safetensors").exists());
    };
    let whole = checkpoint::weights(VOCAB, true);
    let without: checkpoint::Weights = whole.iter().filter(|(name, _)| name != "model.norm.weight").cloned().collect();
    checkpoint::write_weights(&folder.path().join("model"), &without);
    refused("`model.norm.weight`: got none, expected one");
    let mut misshaped = without;
    misshaped.push(("model.norm.weight".into(), Tensor::zeros(HIDDEN - 1, DType::F32, &Device::Cpu).unwrap()));
    checkpoint::write_weights(&folder.path().join("model"), &misshaped);
    refused("`model.norm.weight`: got shape [63], expected [64]");
    checkpoint::write_weights(&folder.path().join("model"), &whole);
    fs::write(folder.path().join("model/config.json"), checkpoint::settings(40, true).to_string()).unwrap();
    refused("ids below the model's vocabulary of 40");
}

#[test]
fn train_error_is_named_and_the_last_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let whole = settings(folder.path(), "out");
    let expect = |settings: &str, reason: &str| {
        let args = train(folder.path(), settings);
        assert_refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[reason]);
    };
    expect(&whole.replace("steps: 8", "stops: 8"), "stops");
    expect(&whole.replace("group: 4", "group: 1"), "`rollout.group`: got 1, expected at least 2");
    let huge = 1_u64 << 63;
    let too_many = format!("`rollout.group`: got {huge} for 2 prompts, expected at most 1048576 sequences a step");
    expect(&whole.replace("group: 4", &format!("group: {huge}")), &too_many);
    let most = format!("`rollout.prompts`: got {huge}, expected at most 2147483648");
    expect(&whole.replace("prompts: 2", &format!("prompts: {huge}")), &most);
    expect(&whole.replace("micro_batches: 2", "micro_batches: 3"), "`update.micro_batches`: got 3, expected a divisor");
    expect(&whole.replace("vocab_size: 257", "vocab_size: 256"), "`vocab_size`: got 256, expected at least 257");
    expect(&format!("{whole}kernel: {{enabled: true, impl: pallas}}"), "kernel `pallas`: expected one of: native, ");
    expect(
        &format!("{whole}kernel: {{enabled: false}}\nloss: {{entropy_coef: 0.1}}"),
        "`spec`: candle's own operations",
    );
    expect(&format!("{whole}tokenizer: {{path: none.json, end: x}}"), "none.json: ");
    expect(
        &whole
            .replace("arithmetic: {train: 32, evaluate: 4, largest: 5}", "gsm8k: {train: a.jsonl, evaluate: a.jsonl}"),
        "a.jsonl: cannot read",
    );
    fs::write(folder.path().join("a.jsonl"), "{\"question\": \"How many?\", \"answer\": \"four\"}\n").unwrap();
    expect(
        &whole
            .replace("arithmetic: {train: 32, evaluate: 4, largest: 5}", "gsm8k: {train: a.jsonl, evaluate: a.jsonl}"),
        "a.jsonl: line 1: `answer`: got no `#### N`",
    );
    fs::write(folder.path().join("a.jsonl"), "").unwrap();
    expect(
        &whole
            .replace("arithmetic: {train: 32, evaluate: 4, largest: 5}", "gsm8k: {train: a.jsonl, evaluate: a.jsonl}"),
        "a.jsonl: got no exercise",
    );
    expect(&whole.replace("model: {init:", "model: {path: nowhere}\n_unused: {init:"), "_unused");

    let short = whole.replace("steps: 8", "steps: 1");
    expect_success(&train(folder.path(), &short));
    let checkpoint = folder.path().join("out/checkpoint.safetensors");
    let bytes = fs::read(&checkpoint).unwrap();
    expect(&whole.replace("group: 4", "group: 2"), "checkpoint.safetensors: written under other settings (`rollout`)");
    assert_eq!(fs::read(&checkpoint).unwrap(), bytes);
    fs::write(&checkpoint, &bytes[..bytes.len() - 1]).unwrap();
    expect(&whole, "checkpoint.safetensors: ");
    fs::write(&checkpoint, &bytes).unwrap();
    fs::write(folder.path().join("out/metrics.jsonl"), "").unwrap();
    expect(&short, "metrics.jsonl: none of 1 steps, all of which were made");
}

/// Settings whose arrays are larger than the addresses of a process.
#[test]
fn train_settings_beyond_a_limit_of_memory_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let whole = settings(folder.path(), "out").replace("warm_start: {steps: 100,", "warm_start: {steps: 1,");
    let expect = |given: &str, hostile: &str, parts: &[&str]| {
        let settings = whole.replace(given, hostile);
        assert_ne!(settings, whole);
        let output = limited("ulimit -v 3145728", &train(folder.path(), &settings));
        assert_eq!((output.code, output.stderr.lines().count()), (2, 1), "{hostile}: {}", output.stderr);
        for part in parts {
            assert!(output.stderr.contains(part), "{hostile}: `{part}` not in {}", output.stderr);
        }
    };
    // 4 copies of 10⁹ · 16 + 3,000 weights in f32, and of 15 tensors' names.
    let extents =
        "`model.init`: got vocab_size 1000000000, hidden_size 16, intermediate_size 24, num_hidden_layers 1, expected";
    expect("vocab_size: 257", "vocab_size: 1000000000", &[extents, " need 2560000", " bytes, ", " are available"]);
    expect("intermediate_size: 24", "intermediate_size: 2147483647", &["`model.init`: got vocab_size 257, "]);
    expect("num_hidden_layers: 1", "num_hidden_layers: 2147483647", &["num_hidden_layers 2147483647, expected"]);
    // The sequences that go through the policy together, with weights that fit.
    expect("batch: 8", "batch: 1048576", &["memory: ", " 1048576 sequences", " are available"]);
    expect("prompts: 2, group: 4", "prompts: 1, group: 1048576", &["memory: ", " 1048576 ", " are available"]);
}

/// Numbers at the ends of their types.
#[test]
fn train_numbers_at_the_ends_of_types_are_taken_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let whole = settings(folder.path(), "out").replace("steps: 8", "steps: 1").replace("steps: 100", "steps: 1");
    let expect = |settings: &str, reason: &str| {
        let args = train(folder.path(), settings);
        assert_refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[reason]);
    };
    let largest = i64::MAX.to_string();
    let reason = format!("`task.arithmetic.largest`: got {largest}, expected at most 1000000000000000000");
    expect(&whole.replace("largest: 5", &format!("largest: {largest}")), &reason);
    let reason = "`task.arithmetic.verbs`: got gets twice, expected each verb once";
    expect(&whole.replace("largest: 5", "largest: 5, verbs: [gets, loses, gets]"), reason);
    expect(&whole.replace("threads: 1", "threads: 100000"), "`threads`: got 100000, expected at most 4096");
    expect(&format!("{whole}advantages: {{epsilon: -1.0e308}}"), "`advantages.epsilon`: got -1e308, expected");
    // The seed and the draw after the largest are 0.
    let config = folder.path().join("ab.yaml");
    let text = whole.replace("max_new_tokens: 8", "max_new_tokens: 2, draw: 18446744073709551615");
    fs::write(&config, format!("{text}seed: 18446744073709551615\n")).unwrap();
    let output = assay(&["ab", "-q", "--config", config.to_str().unwrap(), "--seeds", "2", "--judge-every", "0"]);
    assert!(output.code < 2, "{}", output.stderr);
}

/// Both arms, judged at each step; `make test-extensive` runs the shipped one too.
#[test]
fn ab_arms_agree_in_a_short_run() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ab.yaml");
    fs::write(&config, settings(folder.path(), "ab").replace("steps: 8", "steps: 2")).unwrap();
    let [json, page]: [PathBuf; 2] = ["ab.json", "page.html"].map(|name| folder.path().join(name));
    let [config, json_path, page_path] = [&config, &json, &page].map(|path| path.to_str().unwrap());
    let output = assay(&["ab", "--config", config, "--json", json_path]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    for said in ["| kernel ", "against the reference", "baseline / kernel", "final evaluation reward"] {
        assert!(output.stdout.contains(said), "`{said}` not in {}", output.stdout);
    }
    let compared: AbComparison = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert!(compared.pass);
    assert_eq!(compared.arms.each_ref().map(|arm| arm.runs[0].steps.len()), [2, 2]);
    let decided: Vec<_> = compared.verdicts.iter().filter(|verdict| verdict.pass == Some(true)).collect();
    assert_eq!(decided.len(), 4, "loss, dhidden, dlm_head, and the ratios of first updates: {decided:?}");
    for verdict in &decided[..3] {
        assert!(verdict.baseline.unwrap() > 0.0 && verdict.kernel.unwrap() > 0.0, "{verdict:?}");
        assert!(verdict.what.contains("of 8 losses of a whole batch"), "{verdict:?}");
    }
    assert!(compared.arms.iter().flat_map(|arm| &arm.runs[0].steps).all(|step| step.loss_step_bytes > 0.0));
    assert_eq!(assay(&["report", json_path, "-o", page_path, "-q"]).code, 0);
    assert!(fs::read_to_string(&page).unwrap().contains("Kernel off and on"));
}
