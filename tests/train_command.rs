//! `assay train` and `assay ab` as they are run: killed and gone on, and with input that is wrong.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use assay::train::metrics::Record;

/// A run of some seconds.
const SETTINGS: &str = "
steps: 8
out: OUT
threads: 1
model: {init: {vocab_size: 257, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: true}}
task: {arithmetic: {train: 32, evaluate: 4, largest: 5}}
warm_start: {steps: 4, batch: 4, learning_rate: 3.0e-3}
rollout: {prompts: 2, group: 4, max_new_tokens: 6}
update: {ppo_epochs: 2, micro_batches: 2}
evaluate_every: 4
checkpoint_every: 3
";

fn settings(folder: &Path, out: &str) -> String {
    SETTINGS.replace("OUT", folder.join(out).to_str().unwrap())
}

fn command(name: &str, config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.arg(name).arg("--config").arg(config);
    command
}

fn run(folder: &Path, settings: &str) -> Output {
    let config = folder.join("config.yaml");
    fs::write(&config, settings).unwrap();
    command("train", &config).output().unwrap()
}

/// The curve, without what a clock or an allocator said.
fn curve(out: &Path) -> Vec<Record> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let timeless = |line: &str| Record {
        unix_time: 0.0,
        rollout_s: 0.0,
        update_s: 0.0,
        loss_step_s: 0.0,
        step_s: 0.0,
        loss_step_bytes: None,
        update_bytes: None,
        ..serde_json::from_str(line).unwrap()
    };
    text.lines().map(timeless).collect()
}

#[test]
fn a_killed_run_goes_on_to_the_same_curve() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run(folder.path(), &settings(folder.path(), "whole"));
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let config = folder.path().join("killed.yaml");
    fs::write(&config, settings(folder.path(), "killed")).unwrap();
    let out = folder.path().join("killed");
    // Killed twice, after the first checkpoint and before it.
    for lines in [2, 5] {
        let mut child = command("train", &config).arg("-q").spawn().unwrap();
        let started = Instant::now();
        let written = || fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        while written() < lines && child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < Duration::from_secs(300), "no step is made");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let rest = command("train", &config).output().unwrap();
    assert!(rest.status.success(), "{}", String::from_utf8_lossy(&rest.stderr));
    let (expected, given) = (curve(&folder.path().join("whole")), curve(&out));
    assert_eq!(expected.len(), 8);
    assert!(expected[3].evaluation.is_some() && expected.iter().any(|record| record.grad_norm > 0.0));
    assert_eq!(given, expected);
    let weights = |out: &str| {
        let read = candle_core::safetensors::load(
            folder.path().join(out).join("checkpoint.safetensors"),
            &candle_core::Device::Cpu,
        );
        let mut all: Vec<_> = read.unwrap().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        let bits = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        all.into_iter().map(|(name, tensor)| (name, bits(tensor))).collect::<Vec<_>>()
    };
    assert_eq!(weights("killed"), weights("whole"));
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
    let left: Vec<_> =
        fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| !name.starts_with(".tmp")), "{left:?}");
}

#[test]
fn what_is_wrong_is_named_and_the_last_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let whole = settings(folder.path(), "out");
    let expect = |settings: &str, reason: &str| {
        let output = run(folder.path(), settings);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(reason), "{error}, expected {reason}");
    };
    expect(&whole.replace("steps: 8", "stops: 8"), "stops");
    expect(&whole.replace("group: 4", "group: 1"), "`rollout.group`: got 1, expected at least 2");
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
    assert!(run(folder.path(), &short).status.success());
    let checkpoint = folder.path().join("out/checkpoint.safetensors");
    let bytes = fs::read(&checkpoint).unwrap();
    expect(&whole.replace("group: 4", "group: 2"), "checkpoint.safetensors: written under other settings");
    assert_eq!(fs::read(&checkpoint).unwrap(), bytes);
    fs::write(&checkpoint, &bytes[..bytes.len() - 1]).unwrap();
    expect(&whole, "checkpoint.safetensors: ");
    fs::write(&checkpoint, &bytes).unwrap();
    fs::write(folder.path().join("out/metrics.jsonl"), "").unwrap();
    expect(&whole, "metrics.jsonl: expected steps 1 to 1");
}

/// Both arms, judged at each step; `make test-extensive` runs the shipped one too.
#[test]
fn both_arms_agree_in_a_short_run() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ab.yaml");
    fs::write(&config, settings(folder.path(), "ab").replace("steps: 8", "steps: 2")).unwrap();
    let json = folder.path().join("ab.json");
    let output = command("ab", &config).arg("--json").arg(&json).output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let written: serde_json::Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let pair = &written["pairs"][0];
    assert!(pair["equal_steps"].as_u64().unwrap() >= 1);
    for side in ["baseline", "kernel"] {
        let judged = &pair["runs"][side]["judged"];
        assert_eq!((judged["losses"].as_u64(), judged["failed"].as_u64()), (Some(2), Some(0)), "{side}: {judged}");
        assert!(judged["gates"].as_u64().unwrap() >= 6, "{judged}");
    }
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("baseline / kernel") && table.contains("ignored  final evaluation reward"), "{table}");
}
