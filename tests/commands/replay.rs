//! `assay replay`: recorded and generated problems through implementations.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::workplace::{SOME, SOME_HEADS, Workplace, assert_narrow, read_json, summary_lines};
use crate::common::command::{assay, assert_refused};
use assay::fixture::{ProblemFile, write_problem};
use assay::judge::report::{on_devices, with_lowering};
use assay::problem::{CuSeqlens, Sequences};
use serde_json::Value;
use tempfile::TempDir;

/// Checks in `report` of each output of `id`.
fn assert_every_output(report: &Value, id: &str, count: usize) {
    for output in ["loss", "logp", "entropy", "token_loss", "dlogits", "dlogits row_l2", "dlogits row_sum"] {
        let of = |check: &&Value| check["impl"] == id && check["output"] == output;
        assert_eq!(report["checks"].as_array().unwrap().iter().filter(of).count(), count, "{id} {output}");
    }
}

/// A small problem: programs of a whole vocabulary take long to compile, and `make replay` gives all of them the fixtures.
#[test]
fn replay_without_a_choice_reports_all_of_all_implementations() {
    let workplace = Workplace::new();
    let (problem, json) = (workplace.path("problem.safetensors"), workplace.path("report.json"));
    let output = assay(&["replay", &problem, "--json", &json]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let report = read_json(Path::new(&json));
    for implementation in assay::registry::registry(None).iter().filter(|i| i.available().is_ok()) {
        assert_every_output(&report, implementation.id(), 1);
    }
}

#[test]
fn replay_of_a_recorded_fixture_passes_and_reports_every_output() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("report.json");
    let fixed = ["replay", "fixtures/qwen_tiny.safetensors", "--json", json.to_str().unwrap()];
    let output = assay(&[&fixed, SOME, SOME_HEADS].concat());
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.lines().last().unwrap().starts_with("PASS"), "{}", output.stdout);

    let report = read_json(&json);
    assert_eq!(report["pass"], true);
    assert_eq!(report["ignored"], serde_json::json!([]));
    let checks = report["checks"].as_array().unwrap();
    for id in SOME.iter().filter(|id| !id.starts_with("--")) {
        // Two logits tensors, each with two arrays of old log-probabilities.
        assert_every_output(&report, id, 4);
    }
    // Every number that the file's metadata records, and the two arrays of both logits under both old_logps.
    let file = ProblemFile::open("fixtures/qwen_tiny.safetensors").unwrap();
    let is_number = |(key, text): &(&String, &String)| key.starts_with("expected.") && text.parse::<f64>().is_ok();
    let numbers = file.metadata().iter().filter(is_number).count();
    let recorded = checks.iter().filter(|check| check["output"].as_str().unwrap().starts_with("recorded ")).count();
    assert_eq!(recorded, numbers + 2 * 4);
    for key in ["fixture", "worst", "limit", "verdict"] {
        assert!(checks.iter().all(|check| check.get(key).is_some()), "{key}");
    }

    // What a person reads is short: a line for each implementation on its device count, the reference among them.
    let total = format!("PASS  {} checks passed, 0 failed, 0 ignored\n", checks.len());
    assert!(output.stdout.ends_with(&total), "{}", output.stdout);
    assert!(output.stdout.lines().count() <= 60, "{}", output.stdout);
    assert_narrow(&output.stdout);
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for check in checks {
        let (id, devices) = (check["impl"].as_str().unwrap(), check["devices"].as_u64().unwrap());
        let ran = with_lowering(on_devices(id, devices as usize), check["lowering"].as_str());
        *counts.entry(ran).or_default() += 1;
    }
    let lines = summary_lines(&output.stdout);
    assert_eq!(lines.len(), counts.len(), "{}", output.stdout);
    for (name, count) in counts {
        let line = lines.iter().find(|line| line[0] == name).unwrap_or_else(|| panic!("{name} in {}", output.stdout));
        assert_eq!(line[1], count.to_string(), "{line:?}");
        let (seconds, worst) = (&line[2], &line[3]);
        assert_eq!(seconds.parse::<f64>().is_ok(), name != "reference", "{line:?}");
        let share: f64 = worst.split(' ').next().unwrap().parse().unwrap();
        assert!((0.0..=1.0).contains(&share) && (worst.len() <= 4 || worst.contains(" of qwen_tiny ")), "{line:?}");
    }
    let worst = |entry: &Value| {
        let own = checks.iter().filter(|check| check["impl"] == entry["impl"] && check["devices"] == entry["devices"]);
        own.filter_map(|check| check["share"].as_f64()).fold(0.0, f64::max)
    };
    for entry in report["implementations"].as_array().unwrap() {
        assert!((entry["worst_kappa"]["share"].as_f64().unwrap() - worst(entry)).abs() < 1e-12, "{entry}");
    }
}

#[test]
fn replay_shows_every_check_with_verbose() {
    let workplace = Workplace::new();
    let problem = workplace.path("problem.safetensors");
    let args = ["replay", &problem, "--impl", "native"];
    let [short, long] = [&args[..], &[&args[..], &["-v"]].concat()].map(assay);
    assert_eq!((short.code, long.code), (0, 0), "{}{}", short.stderr, long.stderr);
    assert_eq!(summary_lines(&short.stdout).len(), 1, "{}", short.stdout);
    for output in ["loss", "logp", "entropy", "token_loss", "dlogits", "dlogits row_l2", "dlogits row_sum"] {
        let row = format!("│ problem logits old_logps ┆ native ┆ {output} ");
        assert!(long.stdout.contains(&row) && !short.stdout.contains(&row), "{row}: {}{}", long.stdout, short.stdout);
    }
    assert!(long.stdout.ends_with("PASS  13 checks passed, 0 failed, 0 ignored\n"), "{}", long.stdout);
    assert_eq!(assay(&[&args[..], &["-v", "-q"]].concat()).code, 2);
}

#[test]
fn replay_implementation_that_compared_nothing_is_no_pass() {
    let workplace = Workplace::new();
    let problem = workplace.path("problem.safetensors");
    // Asked for, beside one that can be run.
    let output = assay(&["replay", &problem, "--impl", "native", "--impl", "native-lm-head"]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let lines = summary_lines(&output.stdout);
    assert_eq!(lines.len(), 2, "{}", output.stdout);
    assert_eq!(lines[1], ["native-lm-head", "0", "–", "nothing compared"]);
    // Alone.
    let output = assay(&["replay", &problem, "--impl", "native-lm-head"]);
    assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
    assert_eq!(summary_lines(&output.stdout), [["native-lm-head", "0", "–", "nothing compared"]]);
    assert!(output.stdout.ends_with("FAIL  0 checks passed, 0 failed, 0 ignored\n"), "{}", output.stdout);
}

#[test]
fn replay_without_a_counting_token_says_what_it_did_not_compare() {
    let workplace = Workplace::new();
    let path = workplace.path("problem.safetensors");
    let file = ProblemFile::open(&path).unwrap();
    let mut problem = file.problem("logits", Some("old_logps")).unwrap();
    problem.mask.fill(false);
    let masked = workplace.path("masked.safetensors");
    write_problem(&masked, &problem, file.metadata()).unwrap();
    let output = assay(&["replay", &masked, "--impl", "native"]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    // No token has a logp, an entropy, a loss or dlogits; the loss of the batch and the gradient under the mask are 0.
    assert_eq!(summary_lines(&output.stdout)[0][..3], ["native", "13", "6"], "{}", output.stdout);
    assert!(output.stdout.contains("┆ not compared ┆"), "{}", output.stdout);
    let total = "PASS  7 checks passed, 0 failed, 0 ignored, 6 not compared\n";
    assert!(output.stdout.ends_with(total), "{}", output.stdout);
}

#[test]
fn replay_device_count_that_nothing_takes_is_refused() {
    let parts = ["--devices", "got 1000", "expected counts that some implementation takes here: 1"];
    assert_refused(&["replay", "--devices", "1000"], &parts);
    let args = ["replay", "fixtures/qwen_tiny.safetensors", "--impl", "native", "--devices", "1,2"];
    assert_refused(&args, &["--devices: got 2, expected counts that native takes here: 1"]);
}

#[test]
fn replay_under_another_spec_judges_without_recorded_scalars() {
    let workplace = Workplace::new();
    let spec = workplace.write("spec.toml", "temperature = 0.7\nkl = { beta = 0.1 }\nold_logp = \"current\"\n");
    let args = ["replay", "fixtures/qwen_tiny.safetensors", "--spec", &spec, "--logits", "logits", "-v"];
    let output = assay(&[&args[..], SOME].concat());
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("qwen_tiny logits current") && !output.stdout.contains("recorded"));
}

#[test]
fn replay_of_a_generated_problem_uses_the_spec_it_carries() {
    let workplace = Workplace::new();
    let problem = workplace.path("token.safetensors");
    let spec = workplace.write("spec.yaml", "advantages: token\n");
    let generated = assay(&["generate", "--spec", &spec, "--shape", "2x3x65", "-o", &problem]);
    assert_eq!(generated.code, 0, "{}", generated.stderr);
    // The recorded spec has one advantage a sequence and would refuse the file.
    let output = assay(&[&["replay", &problem], SOME].concat());
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
}

/// The group that Qwen answered, its sequences in one row.
#[test]
fn packed_replay_passes_and_native_has_the_bits_of_padded() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("replay.json");
    let run = |more: &[&str]| {
        let fixed =
            ["replay", "fixtures/qwen_gsm8k.safetensors", "--packed", "--old-logp", "old_logps_stale", "--json"];
        assay(&[&fixed[..], &[json.to_str().unwrap()], more].concat())
    };
    let output = run(SOME);
    assert_eq!(output.code, 0, "{}", output.stdout);
    assert!(
        output.stdout.contains("reference: packed on ×1 has those of padded in loss, logp, entropy"),
        "{}",
        output.stdout
    );
    let replayed = read_json(&json);
    let of =
        |id: &str| replayed["invariance"].as_array().unwrap().iter().find(|run| run["impl"] == id).unwrap().clone();
    for id in ["reference", "native"] {
        assert_eq!((of(id)["other"].as_array().unwrap().len(), &of(id)["packed"]), (0, &Value::Bool(true)), "{id}");
        assert_eq!(of(id)["same"].as_array().unwrap().len(), 5, "{id}");
    }
}

/// A file with packed sequences is one as any other, but cannot be packed again.
#[test]
fn packed_generated_problem_replays_and_cu_seqlens_are_checked() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("packed.safetensors");
    let path = path.to_str().unwrap();
    let output = assay(&["generate", "--shape", "4x5x65", "--regime", "normal", "--packed", "-o", path]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let output = assay(&["replay", path, "--impl", "native"]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert_refused(&["replay", path, "--packed"], &[&format!("--packed: {path} has packed sequences already")]);

    let mut problem = ProblemFile::open(path).unwrap().problem("logits", Some("old_logps")).unwrap();
    let tokens = problem.mask.ncols() as i64;
    problem.extra.sequences = Sequences::Packed(CuSeqlens::new(&[0, 1, 1, 2, tokens + 1]).unwrap());
    write_problem(path, &problem, &BTreeMap::new()).unwrap();
    let beyond = format!("`cu_seqlens[4]`: got {}, expected at most N = {tokens}, the number of tokens", tokens + 1);
    assert_refused(&["replay", path, "--impl", "native"], &[&beyond]);
}

#[test]
fn replay_of_a_changed_recorded_scalar_fails() {
    let workplace = Workplace::new();
    let bytes = fs::read("fixtures/qwen_tiny.safetensors").unwrap();
    // The same length, so that the header's prefix stays true: 0.14044… becomes 0.15044….
    let (old, new) = (b"\"0.14044979862887758\"", b"\"0.15044979862887758\"");
    let at = bytes.windows(old.len()).position(|window| window == old).expect("the loss of logits with old_logps");
    let mut changed = bytes;
    changed[at..at + new.len()].copy_from_slice(new);
    let path = workplace.path("changed.safetensors");
    fs::write(&path, changed).unwrap();
    let args = ["replay", &path, "--logits", "logits", "--old-logp", "old_logps"];
    let output = assay(&[&args[..], &["--impl", "native"]].concat());
    assert_eq!(output.code, 1, "{}", output.stdout);
    let replay = format!("  replay    assay {}\n", args.join(" "));
    for part in [
        "FAIL reference: recorded loss, f64\n",
        "  reference 0.14045\n",
        "  recorded  0.15045\n",
        "times the limit",
        &replay,
        ", 1 failed, 0 ignored\n",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    // Its checks, and how many failed.
    assert_eq!(summary_lines(&output.stdout)[0][..3], ["reference", "15", "1"], "{}", output.stdout);
}

#[test]
fn replay_of_a_changed_listed_fixture_is_refused() {
    let workplace = Workplace::new();
    let mut bytes = fs::read("fixtures/qwen_tiny.safetensors").unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let path = workplace.path("qwen_tiny.safetensors");
    fs::write(&path, bytes).unwrap();
    fs::copy("fixtures/manifest.toml", workplace.path("manifest.toml")).unwrap();
    assert_refused(&["replay", &path], &["qwen_tiny.safetensors", "sha256", "got", "expected"]);
}

#[test]
fn replay_of_problems_unlike_their_spec_is_refused_by_index() {
    let workplace = Workplace::new();
    let problem = workplace.path("problem.safetensors");
    let file = ProblemFile::open(&problem).unwrap();
    let mut right = file.problem("logits", Some("old_logps")).unwrap();
    right.mask.fill(true);
    let spec = workplace.write("spec.yaml", "temperature: 1.0\n");
    let refused = |change: fn(&mut assay::problem::Problem), parts: &[&str]| {
        let mut wrong = right.clone();
        change(&mut wrong);
        let path = workplace.path("wrong.safetensors");
        write_problem(&path, &wrong, &BTreeMap::new()).unwrap();
        assert_refused(&["replay", &path, "--spec", &spec], &[&["wrong.safetensors"], parts].concat());
    };
    refused(|problem| problem.ids[[1, 2]] = 129, &["`ids[1,2]`", "got 129", "V = 129"]);
    refused(|problem| problem.ids[[0, 1]] = -100, &["`ids[0,1]`", "got -100"]);
    refused(
        |problem| problem.advantages = assay::problem::Advantages::Sequence(ndarray::arr1(&[1.0, f64::NAN])),
        &["`advantages[1,0]`", "got NaN", "finite"],
    );
    refused(
        |problem| problem.advantages = assay::problem::Advantages::Token(ndarray::Array2::zeros((2, 3))),
        &["`advantages`", "[2, 3]", "[2]"],
    );
    refused(|problem| problem.old_logp.as_mut().unwrap()[[0, 2]] = f64::NAN, &["`old_logp[0,2]`", "got NaN"]);
}
