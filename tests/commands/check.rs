//! `assay check`, `assay suite` and the judgement of a folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use assay::fixture::{ProblemFile, write_candidate};
use assay::registry::find;
use assay::spec::LossSpec;
use assay::spec::presets::{BatchInputs, Preset, PresetOptions, spec};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::{assay, assert_refused, command};

fn trl(options: &[&str]) -> LossSpec {
    spec(Preset::Trl, None, &PresetOptions::from_pairs(options).unwrap(), &BatchInputs::default()).unwrap().spec
}

/// A suite of TRL's default loss, and what the native kernel returns under `computed`.
fn answered(computed: &LossSpec) -> (TempDir, [String; 2]) {
    let folder = TempDir::new().unwrap();
    let [suite, candidates] =
        ["suite", "candidates"].map(|name| folder.path().join(name).to_str().unwrap().to_string());
    let output = assay(&["suite", "--preset", "trl", "--cases", "8", "--wide", "0", "-o", &suite]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    fs::create_dir(&candidates).unwrap();
    let native = find("native", None).unwrap();
    for entry in fs::read_dir(&suite).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let problem = ProblemFile::open(&path).unwrap().problem("logits", Some("old_logps")).unwrap();
            let candidate = native.run(computed, problem, 1).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap();
            write_candidate(format!("{candidates}/{name}"), &candidate, &BTreeMap::new()).unwrap();
        }
    }
    (folder, [suite, candidates])
}

#[test]
fn check_passes_a_right_kernel_and_says_what_it_would_catch() {
    let folder = TempDir::new().unwrap();
    let [json, page] = ["check.json", "page.html"].map(|name| folder.path().join(name).to_str().unwrap().to_string());
    let fixed = ["check", "--impl", "native", "--preset", "trl", "--cases", "24", "--wide", "0"];
    let output = assay(&[&fixed[..], &["--json", &json, "--html", &page]].concat());
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.lines().last().unwrap().starts_with("PASS  native: 24 problems"), "{}", output.stdout);
    let found: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!((&found["passed"], &found["tried"]), (&true.into(), &24.into()));
    assert!(fs::read_to_string(page).unwrap().contains("What the problems had in them"));
    if cfg!(feature = "mutants") {
        assert!(found["power"]["rejected"].as_u64().unwrap() > 30, "{found}");
    }
}

#[test]
fn packed_check_is_a_word_and_refuses_a_mean_over_the_width() {
    let packed = ["check", "--packed", "--impl", "native", "--cases", "6", "--wide", "0", "--no-power"];
    let output = assay(&packed);
    let said = output.stdout.lines().last().unwrap_or_default();
    assert!(output.code == 0 && said.starts_with("PASS  native: 6 packed problems"), "{said}{}", output.stderr);
    let of_width = ["--preset", "verl", "--option", "loss_agg_mode=seq-mean-token-sum-norm"];
    assert_refused(&[&packed[..], &of_width].concat(), &["`reduction.fixed_length.length`", "no padded width"]);
}

#[test]
fn check_options_of_a_loss_are_taken_as_words_or_options() {
    let folder = TempDir::new().unwrap();
    let words = ["--preset", "trl", "loss_type=bnpo", "beta=0.04"];
    let named = ["--preset", "trl", "--option", "loss_type=bnpo", "--option", "beta=0.04"];
    let wanted = trl(&["loss_type=bnpo", "beta=0.04"]);
    for (form, options) in [("words", &words[..]), ("named", &named)] {
        let check = ["check", "--impl", "native", "--cases", "2", "--wide", "0", "--no-power", "-q"];
        let output = assay(&[&check, options].concat());
        assert_eq!(output.code, 0, "{form}: {}{}", output.stdout, output.stderr);

        let suite = folder.path().join(form);
        let suite = suite.to_str().unwrap();
        let output = assay(&[&["suite", "--cases", "1", "--wide", "0", "-o", suite], options].concat());
        assert_eq!(output.code, 0, "{form}: {}", output.stderr);
        let json: Value = serde_json::from_str(&fs::read_to_string(format!("{suite}/suite.json")).unwrap()).unwrap();
        assert_eq!(json["project"], serde_json::json!(["trl", ["loss_type=bnpo", "beta=0.04"]]), "{form}");
        assert_eq!(serde_json::from_value::<LossSpec>(json["spec"].clone()).unwrap(), wanted, "{form}");

        let problem = folder.path().join(format!("{form}.safetensors"));
        let problem = problem.to_str().unwrap();
        let output = assay(&[&["generate", "--shape", "2x4x33", "-o", problem], options].concat());
        assert_eq!(output.code, 0, "{form}: {}", output.stderr);
        assert_eq!(ProblemFile::open(problem).unwrap().spec().unwrap(), Some(wanted.clone()), "{form}");
    }
}

#[test]
fn check_folder_with_a_missing_answer_is_no_pass() {
    let (_folder, [suite, candidates]) = answered(&trl(&[]));
    let judged = |more: &[&str]| assay(&[&["judge", &suite, "--candidates", &candidates], more].concat());
    let output = judged(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("covered") && output.stdout.contains("PASS"), "{}", output.stdout);
    fs::remove_file(format!("{candidates}/0003.safetensors")).unwrap();
    let output = judged(&["-q"]);
    assert_eq!(output.code, 1);
    assert!(output.stdout.contains("raised, in 1 problem\n"), "{}", output.stdout);
    let json = format!("{suite}/suite.json");
    fs::write(&json, fs::read_to_string(&json).unwrap().replace("grpo-assay 0", "grpo-assay 9")).unwrap();
    assert_refused(
        &["judge", &suite, "--candidates", &candidates],
        &["suite.json", "version", "write the suite again"],
    );
}

#[test]
fn check_folder_names_a_truncated_answer_and_judges_the_others() {
    let (_folder, [suite, candidates]) = answered(&trl(&[]));
    let path = format!("{candidates}/0003.safetensors");
    let whole = fs::read(&path).unwrap();
    for (length, field) in [(100, "header"), (whole.len() - 1, "data_offsets")] {
        fs::write(&path, &whole[..length]).unwrap();
        let output = assay(&["judge", &suite, "--candidates", &candidates]);
        assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
        // A line may break between two words.
        let said = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, said) = said.split_once(&path).expect(&output.stdout);
        let said = said.split(" gate ").next().unwrap();
        assert!(said.contains(field) && said.contains("expected"), "{said}");
        assert!(output.stdout.contains(": 8 problems at grade standard, seed 0, 1 failed"), "{}", output.stdout);
    }
}

#[test]
fn check_names_the_loss_that_a_candidate_computes() {
    let (_folder, [suite, candidates]) = answered(&trl(&["loss_type=grpo"]));
    let output = assay(&["judge", &suite, "--candidates", &candidates]);
    assert_eq!(output.code, 1);
    assert!(output.stdout.contains("loss_type=grpo"), "{}", output.stdout);
    let one = |folder: &str| format!("{folder}/0000.safetensors");
    let output = assay(&["judge", "--problem", &one(&suite), "--candidate", &one(&candidates)]);
    assert_eq!(output.code, 1);
    assert!(output.stdout.contains("these are the numbers of another loss: "), "{}", output.stdout);
    assert!(output.stdout.contains("loss_type=grpo"), "{}", output.stdout);
}

#[test]
fn check_bad_options_are_refused_by_name() {
    let native = ["check", "--impl", "native"];
    assert_refused(&[&native[..], &["--shapes", "0x1x4"]].concat(), &["--shapes", "0x1x4", "many, few"]);
    assert_refused(&[&native[..], &["--shapes", "1x2x3,1x2x4x3"]].concat(), &["--shapes", "BxTxV beside BxTxHxV"]);
    assert_refused(&[&native[..], &["--shapes", "1x2x4x3"]].concat(), &["--shapes", "expected BxTxV", "--hidden"]);
    assert_refused(&[&native[..], &["--cases", "0"]].concat(), &["cases", "at least one problem"]);
    assert_refused(&[&native[..], &["--seconds", "0"]].concat(), &["--seconds", "0"]);
    assert_refused(&[&native[..], &["--allow", "rounding"]].concat(), &["allow", "rounding", "overflow"]);
    assert_refused(&["check", "--exec", "/nonexistent/worker"], &["/nonexistent/worker", "cannot be started"]);
    assert_refused(&["check", "--exec", "'"], &["--exec", "quoted"]);
    assert_refused(&["check", "--impl", "nothing"], &["nothing"]);
}

#[test]
fn suite_json_with_an_empty_list_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let suite = folder.path().join("suite").to_str().unwrap().to_string();
    assert_eq!(assay(&["suite", "--cases", "2", "--wide", "0", "-o", &suite]).code, 0);
    let path = format!("{suite}/suite.json");
    let whole: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let huge = serde_json::json!({"given": [[1, 1, u64::MAX]]});
    for (field, value, said) in [
        ("dtypes", Value::from(Vec::<Value>::new()), "deck.dtypes: got none, expected one of f32"),
        ("regimes", Value::from(Vec::<Value>::new()), "deck.regimes: got none, expected one that"),
        ("shapes", serde_json::json!({"given": []}), "deck.shapes: got none, expected [B,T,V]"),
        ("cases", Value::from(0), "deck.cases: got 0, expected at least one problem"),
        ("shapes", huge.clone(), "`shape`: got [1, 1, 18446744073709551615], which takes"),
    ] {
        let mut broken = whole.clone();
        broken["deck"][field] = value;
        fs::write(&path, broken.to_string()).unwrap();
        assert_refused(&["judge", &suite, "--candidates", &suite], &[said]);
    }
    // Widths that the deck chooses depend on the extents.
    let mut broken = whole;
    broken["deck"]["shapes"] = huge;
    broken["deck"]["head"] = serde_json::json!({"hidden": [], "layout": "vh", "rounds_logits": false});
    fs::write(&path, broken.to_string()).unwrap();
    assert_refused(&["judge", &suite, "--candidates", &suite], &["18446744073709551615"]);
}

#[test]
fn suite_that_is_refused_leaves_no_folder() {
    let folder = TempDir::new().unwrap();
    let suite = folder.path().join("suite");
    let path = suite.to_str().unwrap();
    assert_refused(&["suite", "--cases", "0", "-o", path], &["cases: got 0"]);
    assert_refused(&["suite", "--shapes", "1x1x18446744073709551615", "-o", path], &["`shape`: got [1, 1, "]);
    assert!(!suite.exists());
}

#[test]
fn timeout_beyond_the_clock_is_a_long_one() {
    let hello = r#"{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": ["loss", "dlogits"]}"#;
    let script = format!("sh -c 'echo '\\''{hello}'\\''; read question; exit 3'");
    let output = assay(&["check", "--exec", &script, "--timeout", "1e19", "--cases", "1", "--wide", "0", "--no-power"]);
    assert!(
        output.stdout.contains("exit code 3") || output.stdout.contains("exit status: 3"),
        "{}{}",
        output.stdout,
        output.stderr
    );
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
}

#[test]
fn threads_of_the_environment_have_a_limit() {
    let output = command().args(["list", "-q"]).env("RAYON_NUM_THREADS", "100000").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr, "assay: RAYON_NUM_THREADS: got 100000, expected at most 4096\n");
}

#[test]
fn check_ended_by_any_signal_leaves_no_process_and_no_folder() {
    const HELLO: &str = r#"{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": []}"#;
    for signal in ["INT", "TERM", "HUP", "KILL"] {
        let folder = TempDir::new().unwrap();
        let said = |name: &str| fs::read_to_string(folder.path().join(name)).ok().filter(|text| text.ends_with('\n'));
        // The kernel notes its number and the request, and hangs, deaf to what asks it to end.
        let script = format!(
            "#!/bin/sh\ntrap '' INT TERM HUP\necho '{HELLO}'\nread -r line\ncd {0}\necho $$ >pid\necho \"$line\" >request\nwhile :; do sleep 1; done\n",
            folder.path().display()
        );
        let path = folder.path().join("kernel.sh");
        fs::write(&path, script).unwrap();
        let campaign = std::process::Command::new(env!("CARGO_BIN_EXE_assay"))
            .args(["check", "--cases", "2", "--wide", "0", "--no-power", "--exec"])
            .arg(format!("sh {}", path.display()))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        wait_for("a request", || said("request").is_some());
        let kill = std::process::Command::new("kill").args(["-s", signal, &campaign.id().to_string()]).status();
        assert!(kill.unwrap().success());
        let output = campaign.wait_with_output().unwrap();
        // A signal that can be caught ends the campaign with its report.
        if signal != "KILL" {
            assert_eq!(output.status.code(), Some(1), "{signal}");
            let report = String::from_utf8(output.stdout).unwrap();
            assert!(report.contains("it was interrupted"), "{signal}: {report}");
        }
        let request: Value = serde_json::from_str(&said("request").unwrap()).unwrap();
        let shared = Path::new(request["problem"].as_str().unwrap()).parent().unwrap();
        let kernel = Path::new("/proc").join(said("pid").unwrap().trim());
        wait_for("the kernel's end", || !kernel.exists());
        wait_for("the folder's removal", || !shared.exists());
    }
}

/// Waits until something holds that takes milliseconds, and fails after a time that only what never happens takes.
#[track_caller]
fn wait_for(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..6_000 {
        if holds() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("waited a minute for {what}");
}
