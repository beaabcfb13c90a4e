//! The reference against what twenty-four projects returned, TRL and verl among them: `fixtures/peers/` holds the inputs, options
//! and outputs of their own functions, the presets make a spec of the options, and `assay peers` compares.
//!
//! float64 files differ from the reference by the order of summation only, float32 files by f32's rounding of every
//! step: both are held to four times what was measured, far below the limits of the command.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::command::{Output, assay, assert_refused};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Relative error of float64 files; worst seen 1.6e-14, the loss of `mllm_clip_higher`, whose terms cancel.
const LIMIT_F64: f64 = 6.4e-14;
/// The same of dlogits, which cancel less; worst seen 1.6e-15 (`verl_entropy_token_mean`).
const DLOGITS_F64: f64 = 6.4e-15;
/// Of float32 files; worst seen 2.5e-6, the loss of `skyrl_tis_token`, whose terms cancel.
const LIMIT_F32: f64 = 7.2e-6;
/// Worst seen 5.0e-7 (`liger_triton_grpo_kl_bias`).
const DLOGITS_F32: f64 = 2.0e-6;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/peers")
}

fn path(name: &str) -> String {
    folder().join(name).to_str().unwrap().into()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The report of `assay peers` on `path`, and what it printed.
fn peers(path: &str) -> (Value, Output) {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("report.json");
    let output = assay(&["peers", path, "--json", json.to_str().unwrap()]);
    (read_json(&json), output)
}

/// A recorded run in a file of its own, changed by `change`.
struct Changed {
    folder: TempDir,
}

impl Changed {
    fn new(name: &str, change: impl FnOnce(&mut Value)) -> Self {
        let changed = Self { folder: TempDir::new().unwrap() };
        changed.add(name, change);
        changed
    }

    fn add(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut run = read_json(&folder().join(name));
        change(&mut run);
        fs::write(self.folder.path().join(name), run.to_string()).unwrap();
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    fn folder(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }
}

#[test]
fn peers_outcome_of_every_recorded_run_matches_reference() {
    let (report, output) = peers(folder().to_str().unwrap());
    assert_eq!(output.code, 0, "{}", output.stdout);
    assert_eq!(report["pass"], true);

    let files = report["files"].as_array().unwrap();
    let recorded: BTreeSet<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| path.file_name().unwrap().to_str().unwrap().into())
        .collect();
    let compared: BTreeSet<String> = files.iter().map(|file| file["file"].as_str().unwrap().into()).collect();
    assert_eq!(compared, recorded);
    assert_eq!(recorded.len(), 260);

    for file in files.iter().filter(|file| file["quirk"] == false) {
        let (loss, dlogits) = if file["dtype"] == "f64" { (LIMIT_F64, DLOGITS_F64) } else { (LIMIT_F32, DLOGITS_F32) };
        assert!(file["loss_rel"].as_f64().unwrap() <= loss, "{file}");
        assert!(file["dlogits_rel"].as_f64().unwrap() <= dlogits, "{file}");
    }
}

#[test]
fn peers_quirks_are_shown_with_size_and_counted_neither_way() {
    let (report, output) = peers(&path("liger_triton_delta_quirk.json"));
    assert_eq!(output.code, 0);
    let file = &report["files"][0];
    assert_eq!(file["verdict"], "known_difference");
    assert!(file["loss_rel"].as_f64().unwrap() < 1e-6, "the loss of that release is right: {file}");
    assert!(file["dlogits_rel"].as_f64().unwrap() > 1.0, "{file}");
    assert!(file["notes"][0].as_str().unwrap().contains("no gradient where delta"), "{file}");
    assert!(output.stdout.contains("known difference"), "{}", output.stdout);
    assert_eq!(file["caught_by"], json!(["dlogits", "dlogits row_l2"]));
    assert_eq!(
        file["gates"],
        json!(["loss", "logp", "dlogits", "dlogits at masked", "dlogits row_l2", "dlogits row_sum"])
    );
    assert!(output.stdout.contains("dlogits, dlogits row_l2"), "{}", output.stdout);
    assert!(report["worst"].as_array().unwrap().is_empty(), "a quirk is nobody's worst error");
}

#[test]
fn peers_wrong_dlogit_fails_and_is_named() {
    let name = "trl_grpo_kl.json";
    let changed = Changed::new(name, |run| {
        let dlogit = &mut run["expected"]["dlogits"][0][0][0];
        *dlogit = json!(dlogit.as_f64().unwrap() + 1e-8);
    });
    changed.add("trl_grpo_basic.json", |_| {});
    let (report, output) = peers(changed.folder());
    assert_eq!((output.code, &report["pass"]), (1, &json!(false)));
    let verdict = |file: &str| {
        let files = report["files"].as_array().unwrap();
        files.iter().find(|found| found["file"] == file).unwrap()["verdict"].clone()
    };
    assert_eq!((verdict("trl_grpo_kl.json"), verdict("trl_grpo_basic.json")), (json!("fail"), json!("pass")));

    let quiet = assay(&["peers", changed.folder(), "--quiet"]);
    assert_eq!(quiet.code, 1);
    assert!(quiet.stdout.starts_with("trl_grpo_kl.json: loss off by"), "{}", quiet.stdout);
    assert_eq!(quiet.stdout.lines().count(), 1);
}

#[test]
fn peers_wrong_loss_fails() {
    let changed = Changed::new("verl_sapo.json", |run| {
        let loss = run["expected"]["loss"].as_f64().unwrap();
        run["expected"]["loss"] = json!(loss * (1.0 + 1e-8));
    });
    assert_eq!(peers(changed.folder()).1.code, 1);
}

/// Its loss and dlogits still agree with the reference: the gate of logp alone can tell.
#[test]
fn peers_wrong_logp_fails_its_gate() {
    let name = "trl_grpo_kl.json";
    let changed = Changed::new(name, |run| {
        let logp = &mut run["expected"]["logps"][0][0];
        *logp = json!(logp.as_f64().unwrap() + 1e-5);
    });
    let (report, output) = peers(changed.folder());
    assert_eq!(report["files"][0]["caught_by"], json!(["logp"]));
    assert!(output.stdout.contains("1 fail a gate of the judge"), "{}", output.stdout);
}

#[test]
fn peers_options_decide_what_is_compared() {
    // TRL's default, which the file says too; without the correction its KL is another.
    let changed = Changed::new("trl_grpo_kl_biascorr.json", |run| {
        run["options"].as_object_mut().unwrap().remove("use_bias_correction_kl");
    });
    assert_eq!(peers(changed.folder()).1.code, 0);
    changed.add("trl_grpo_kl_biascorr.json", |run| run["options"]["use_bias_correction_kl"] = json!(false));
    assert_eq!(peers(changed.folder()).1.code, 1);
}

#[test]
fn peers_bad_input_is_refused_in_a_line_with_file_and_field() {
    let name = "trl_grpo_kl.json";
    let refused = |change: fn(&mut Value), parts: &[&str]| {
        let changed = Changed::new(name, change);
        assert_refused(&["peers", &changed.file(name)], &[&[name], parts].concat());
    };
    refused(|run| run["dtype"] = json!("float16"), &["dtype", "float16", "float64 or float32"]);
    refused(|run| run["peer"] = json!("nobody"), &["preset", "nobody", "trl"]);
    refused(|run| run["function"] = json!("f"), &["function", "`f`", "GRPOTrainer"]);
    refused(|run| run["options"]["bogus"] = json!(1), &["option `bogus`", "epsilon_high"]);
    refused(|run| run["options"]["use_adaptive_entropy"] = json!(true), &["option `use_adaptive_entropy`", "true"]);
    refused(|run| run["options"]["temperature"] = json!(0.0), &["temperature", "got 0"]);
    refused(|run| run["inputs"]["logits"][1][2] = json!([1.0]), &["inputs.logits[1][2]", "1 elements", "17"]);
    refused(|run| run["inputs"]["logits"] = json!([]), &["inputs.logits", "an empty array"]);
    refused(|run| run["inputs"]["ids"][0][0] = json!(0.5), &["inputs.ids", "0.5", "whole"]);
    refused(|run| run["inputs"]["ids"][0][0] = json!(17), &["ids[0,0]", "got 17"]);
    refused(|run| run["inputs"]["mask"][0][0] = json!(0.5), &["inputs.mask[0,0]", "0.5"]);
    refused(|run| run["inputs"]["old_logps"][0][0] = json!("x"), &["inputs.old_logps[0][0]", "\"x\""]);
    refused(|run| run["inputs"]["old_logps"][0][0] = json!(null), &["old_logp[0,0]", "NaN"]);
    refused(|run| run["inputs"]["ref_logps"] = json!(null), &["ref_logp", "not given"]);
    refused(|run| run["inputs"]["surprise"] = json!(1), &["inputs.surprise"]);
    refused(|run| run["inputs"]["advantages"] = json!([1.0]), &["inputs.advantages", "shape [1]"]);
    refused(|run| run["expected"]["loss"] = json!(null), &["expected.loss", "null"]);
    refused(|run| run["expected"]["dlogits"][0][0][0] = json!(null), &["expected.dlogits", "null at element 0"]);
    refused(|run| run["expected"]["logps"] = json!([[1.0]]), &["expected.logps", "shape [1, 1]"]);
    refused(|run| run["expected"]["entropy"] = json!("none"), &["expected.entropy", "\"none\"", "nested 2 deep"]);
    refused(|run| *run = json!([1]), &["an array of 1", "an object"]);
}

#[test]
fn peers_bad_teacher_is_refused_in_a_line_with_file_and_field() {
    let refused = |name: &str, change: fn(&mut Value), parts: &[&str]| {
        let changed = Changed::new(name, change);
        assert_refused(&["peers", &changed.file(name)], &[&[name], parts].concat());
    };
    let logits = "divergence_trl_gkd_0.json";
    refused(logits, |run| run["inputs"]["teacher_logits"] = json!(null), &["teacher_logits", "not given"]);
    refused(logits, |run| run["inputs"]["teacher_logits"] = json!([[[1.0]]]), &["teacher_logits", "shape [1, 1, 1]"]);
    refused(logits, |run| run["inputs"]["teacher_logits"][0][0][0] = json!(null), &["teacher_logits[0,0,0]", "NaN"]);
    refused(logits, |run| run["inputs"]["teacher_logp"] = json!([[[1.0]]]), &["teacher_logp", "a second name"]);
    let entries = "divergence_trl_iw_opd_tail.json";
    refused(entries, |run| run["inputs"]["teacher_ids"] = json!(null), &["teacher_ids", "nothing", "teacher_logp"]);
    refused(entries, |run| run["inputs"]["teacher_ids"] = json!([[[1.0]]]), &["teacher_ids", "shape [1, 1, 1]"]);
    refused(entries, |run| run["inputs"]["teacher_ids"][0][0][0] = json!(0.5), &["teacher_ids", "0.5", "whole"]);
    refused(entries, |run| run["inputs"]["teacher_ids"][0][0][0] = json!(17), &["teacher_ids[0,0,0]", "got 17"]);
    refused(entries, |run| run["inputs"]["teacher_logp"] = json!(null), &["teacher_logp", "not given"]);
    refused(entries, |run| run["options"]["top_k"] = json!(5), &["teacher_ids", "5"]);
}

#[test]
fn peers_file_that_is_no_recorded_run_is_refused() {
    let empty = TempDir::new().unwrap();
    let folder = empty.path().to_str().unwrap();
    assert_refused(&["peers", folder], &[folder, "no .json file"]);
    assert_refused(&["peers", "nowhere"], &["nowhere", "cannot read"]);
    fs::write(empty.path().join("broken.json"), "{\"peer\": NaN}").unwrap();
    assert_refused(&["peers", folder], &["broken.json", "expected JSON"]);
}

#[test]
fn peers_bad_file_does_not_hide_the_others() {
    let changed = Changed::new("trl_grpo_kl.json", |_| {});
    fs::write(changed.file("broken.json"), "{").unwrap();
    let (report, output) = peers(changed.folder());
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("broken.json"), "{}", output.stderr);
    assert_eq!((&report["pass"], &report["files"][0]["verdict"]), (&json!(false), &json!("pass")));
    assert_eq!(report["refused"].as_array().unwrap().len(), 1);
}

#[test]
fn peers_numbers_of_f32_files_are_rounded_first() {
    // Off by less than half an ulp of f32, and so the same file.
    let name = "liger_triton_grpo.json";
    let changed = Changed::new(name, |run| {
        for field in ["logits", "old_logps", "advantages"] {
            let mut number = &mut run["inputs"][field];
            while number.is_array() {
                number = &mut number[0];
            }
            *number = json!(number.as_f64().unwrap() * (1.0 + 1e-9));
        }
    });
    let same = |report: &Value| (report["files"][0]["loss_rel"].clone(), report["files"][0]["dlogits_rel"].clone());
    assert_eq!(same(&peers(changed.folder()).0), same(&peers(&path(name)).0));
}
