//! The `assay` command as a user meets it: results, exit codes, and one line for every bad input.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::command::{Output, assay, assert_refused};
use assay::fixture::{ProblemFile, write_candidate, write_problem};
use assay::judge::report::{on_devices, with_lowering};
use assay::problem::{Candidate, CuSeqlens, FloatArray, HeadCandidate, HeadProblem, Problem, Sequences};
use assay::registry::find;
use assay::spec::LossSpec;
use serde_json::Value;
use tempfile::TempDir;

/// Of the implementations one that runs at once and one that compiles: what all give is in the suites of kernels and devices.
const SOME: &[&str] =
    if cfg!(feature = "pjrt") { &["--impl", "native", "--impl", "xla-mesh"] } else { &["--impl", "native"] };

/// The same with an LM head.
const SOME_HEADS: &[&str] = if cfg!(feature = "pjrt") {
    &["--impl", "native-lm-head", "--impl", "tile-lm-head"]
} else {
    &["--impl", "native-lm-head"]
};

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A generated problem and the native kernel's answer to it, in files.
struct Workplace {
    folder: TempDir,
}

impl Workplace {
    fn new() -> Self {
        let workplace = Self { folder: TempDir::new().unwrap() };
        let problem = workplace.path("problem.safetensors");
        let output = assay(&["generate", "--shape", "2x3x129", "--regime", "normal", "--seed", "4", "-o", &problem]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        workplace.write_candidate(|_| {});
        workplace
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// The native kernel's answer, changed by `break_it`.
    fn write_candidate(&self, break_it: impl FnOnce(&mut Candidate)) {
        let file = ProblemFile::open(self.path("problem.safetensors")).unwrap();
        let problem = file.problem("logits", Some("old_logps")).unwrap();
        let mut candidate = find::<Problem>("native", None).unwrap().run(&LossSpec::default(), problem, 1).unwrap();
        break_it(&mut candidate);
        write_candidate(self.path("candidate.safetensors"), &candidate, &BTreeMap::new()).unwrap();
    }

    fn judge(&self, more: &[&str]) -> Output {
        let (problem, candidate) = (self.path("problem.safetensors"), self.path("candidate.safetensors"));
        assay(&[&["judge", "--problem", &problem, "--candidate", &candidate], more].concat())
    }
}

/// Checks in `report` of each output of `id`.
fn assert_every_output(report: &Value, id: &str, count: usize) {
    for output in ["loss", "logp", "entropy", "token_loss", "dlogits", "dlogits row_l2", "dlogits row_sum"] {
        let of = |check: &&Value| check["impl"] == id && check["output"] == output;
        assert_eq!(report["checks"].as_array().unwrap().iter().filter(of).count(), count, "{id} {output}");
    }
}

/// A small problem: programs of a whole vocabulary take long to compile, and `make replay` gives all of them the fixtures.
#[test]
fn replay_with_no_choice_reports_every_output_of_every_implementation() {
    let workplace = Workplace::new();
    let (problem, json) = (workplace.path("problem.safetensors"), workplace.path("report.json"));
    let output = assay(&["replay", &problem, "--json", &json]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let report = read_json(Path::new(&json));
    for implementation in assay::registry::registry::<Problem>(None).iter().filter(|i| i.available().is_ok()) {
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

/// The cells of a table's rows.
fn summary_lines(stdout: &str) -> Vec<Vec<String>> {
    let rows = stdout.lines().filter_map(|line| line.strip_prefix('│')?.strip_suffix('│'));
    rows.skip(1).map(|row| row.split('┆').map(|cell| cell.trim().to_string()).collect()).collect()
}

#[track_caller]
fn assert_narrow(stdout: &str) {
    for line in stdout.lines() {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
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
fn an_implementation_that_compared_nothing_is_no_pass() {
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
fn a_run_without_a_gradient_to_compare_is_no_pass() {
    let workplace = Workplace::new();
    let path = workplace.path("problem.safetensors");
    let file = ProblemFile::open(&path).unwrap();
    let mut problem = file.problem("logits", Some("old_logps")).unwrap();
    problem.mask.fill(false);
    let masked = workplace.path("masked.safetensors");
    write_problem(&masked, &problem, file.metadata()).unwrap();
    let output = assay(&["replay", &masked, "--impl", "native"]);
    assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
    // No token has a logp, an entropy, a loss or dlogits.
    assert_eq!(summary_lines(&output.stdout)[0][..3], ["native", "13", "6"], "{}", output.stdout);
    assert!(output.stdout.contains("┆ not compared ┆"), "{}", output.stdout);
    let total = "FAIL  7 checks passed, 0 failed, 0 ignored, 6 not compared; \
        no gradient of masked logits old_logps with native was compared\n";
    assert!(output.stdout.ends_with(total), "{}", output.stdout);
}

#[test]
fn a_device_count_that_no_implementation_takes_is_refused() {
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
fn replay_of_a_packed_group_has_the_bits_of_the_padded_one_in_native_and_passes_everywhere() {
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
fn a_generated_packed_problem_is_replayed_and_its_cu_seqlens_are_checked() {
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
fn a_changed_recorded_scalar_fails_the_replay() {
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
        "  reference 1.40449798628877",
        "  recorded  1.50449798628877",
        "times the limit",
        "κ         ",
        &replay,
        ", 1 failed, 0 ignored\n",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    // Its checks, and how many failed.
    assert_eq!(summary_lines(&output.stdout)[0][..3], ["reference", "15", "1"], "{}", output.stdout);
}

#[test]
fn a_changed_fixture_that_the_manifest_lists_is_refused() {
    let workplace = Workplace::new();
    let mut bytes = fs::read("fixtures/qwen_tiny.safetensors").unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let path = workplace.path("qwen_tiny.safetensors");
    fs::write(&path, bytes).unwrap();
    fs::copy("fixtures/manifest.toml", workplace.path("manifest.toml")).unwrap();
    assert_refused(&["replay", &path], &["qwen_tiny.safetensors", "sha256", "got", "expected"]);
}

#[test]
fn gradcheck_writes_the_keys_of_the_seed_project() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("gradcheck.json");
    let output = assay(&["gradcheck", "--config", "configs/gradcheck_qwen.yaml", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    let result = read_json(&json);
    let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
    assert!((number("loss_ref") - 0.320_339_144_479_898_5).abs() < 1e-12, "the recorded loss");
    assert_eq!((number("loss_ref") - number("loss_kernel")).abs(), number("abs_diff_loss"));
    assert!(number("max_abs_diff_dlogits") > 0.0 && number("max_abs_diff_dlogits") < 1e-3);
    assert!(number("max_rel_diff_dlogits") > 0.0 && number("max_rel_diff_dlogits") < 4e-3, "half an ulp of bf16");
    assert!(number("mean_abs_diff_dlogits") > 0.0);
    assert_eq!((&result["pass"], &result["impl"]), (&Value::from(true), &Value::from("native")));
}

#[test]
fn gradcheck_of_the_baseline_runs_the_best_one_here() {
    let workplace = Workplace::new();
    let config = "batch: {generate: {shape: [2, 3, 65], dtype: f32, regime: small}}\nkernel: {enabled: false}\n";
    let output = assay(&["gradcheck", "--config", &workplace.write("c.yaml", config)]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
}

#[test]
fn shipped_gradcheck_configs_pass() {
    for entry in fs::read_dir("configs").unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with("gradcheck_") {
            continue;
        }
        let output = assay(&["gradcheck", "--quiet", "--config", path.to_str().unwrap()]);
        assert_eq!((output.code, output.stdout.as_str()), (0, ""), "{}: {}", path.display(), output.stderr);
    }
}

#[test]
fn generated_problems_are_the_same_bytes_for_the_same_seed() {
    let workplace = Workplace::new();
    for (name, seed) in [("a", "1"), ("b", "1"), ("c", "2")] {
        let path = workplace.path(name);
        let output = assay(&["generate", "--shape", "2x3x65", "--dtype", "f16", "--seed", seed, "-o", &path]);
        assert_eq!(output.code, 0, "{}", output.stderr);
    }
    let bytes = |name| fs::read(workplace.path(name)).unwrap();
    assert_eq!(bytes("a"), bytes("b"));
    assert_ne!(bytes("a"), bytes("c"));
}

#[test]
fn judge_passes_a_right_candidate() {
    let workplace = Workplace::new();
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.ends_with("PASS  8 checks passed, 0 failed, 0 ignored\n"), "{}", output.stdout);
}

#[test]
fn judge_reads_a_candidate_with_only_loss_and_dlogits_and_says_what_it_lacks() {
    let workplace = Workplace::new();
    workplace
        .write_candidate(|candidate| (candidate.logp, candidate.entropy, candidate.token_loss) = (None, None, None));
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("ignored  entropy: not in the candidate"), "{}", output.stdout);
}

#[test]
fn judge_rejects_a_wrong_candidate_and_shows_where() {
    let workplace = Workplace::new();
    workplace.write_candidate(|candidate| {
        let FloatArray::Bf16(dlogits) = &mut candidate.gradient else { panic!("generate writes bf16") };
        let (at, _) = dlogits.indexed_iter().find(|(_, x)| x.to_f32() != 0.0).expect("some token learns");
        dlogits[at] = -dlogits[at];
    });
    let output = workplace.judge(&["--quiet"]);
    assert_eq!(output.code, 1);
    for part in [
        "FAIL candidate: dlogits, bf16",
        "at  ",
        "expected  ",
        "actual  ",
        "0x",
        "limit",
        "inputs  ",
        "ulp  ",
        "assay judge --problem",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
}

#[test]
fn judge_under_another_spec_rejects() {
    let workplace = Workplace::new();
    let spec = workplace.write("spec.yaml", "reduction: {sequence_mean: {rows: all}}\ntemperature: 2.0\n");
    assert_eq!(workplace.judge(&["--spec", &spec, "-q"]).code, 1);
}

/// A generated problem with an LM head and the CPU's answer to it, in files.
struct HeadWorkplace {
    folder: TempDir,
}

impl HeadWorkplace {
    fn new(options: &[&str]) -> Self {
        let workplace = Self { folder: TempDir::new().unwrap() };
        let problem = workplace.path("problem.safetensors");
        let args = ["generate", "--shape", "2x3x7x129", "--regime", "normal", "--seed", "4", "-o", &problem];
        let output = assay(&[&args, options].concat());
        assert_eq!(output.code, 0, "{}", output.stderr);
        workplace.write_candidate(|_| {});
        workplace
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    fn write_candidate(&self, break_it: impl FnOnce(&mut HeadCandidate)) {
        let file = ProblemFile::open(self.path("problem.safetensors")).unwrap();
        let problem = file.head_problem(Some("old_logps")).unwrap();
        let mut candidate =
            find::<HeadProblem>("native-lm-head", None).unwrap().run(&LossSpec::default(), problem, 1).unwrap();
        break_it(&mut candidate);
        let path = self.path("candidate.safetensors");
        write_candidate(path, &candidate, &BTreeMap::new()).unwrap();
    }

    fn judge(&self, more: &[&str]) -> Output {
        let (problem, candidate) = (self.path("problem.safetensors"), self.path("candidate.safetensors"));
        assay(&[&["judge", "--problem", &problem, "--candidate", &candidate], more].concat())
    }
}

#[test]
fn a_head_in_files_is_judged_replayed_and_checked() {
    for options in [&["--dtype", "f32", "--layout", "vh"][..], &["--dtype", "bf16", "--f32-logits"]] {
        let workplace = HeadWorkplace::new(options);
        let output = workplace.judge(&[]);
        assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
        assert!(output.stdout.contains("dlm_head row_l2") && output.stdout.contains("dhidden"), "{}", output.stdout);

        let problem = workplace.path("problem.safetensors");
        let replayed = assay(&[&["replay", &problem], SOME_HEADS].concat());
        assert_eq!(replayed.code, 0, "{}{}", replayed.stdout, replayed.stderr);
        assert!(replayed.stdout.contains("native-lm-head"), "{}", replayed.stdout);
        let metrics = assay(&["metrics", "--problem", &problem]);
        assert_eq!(metrics.code, 0, "{}", metrics.stderr);

        let (config, json) = (workplace.path("case.yaml"), workplace.path("case.json"));
        let text = "batch: {fixture: {path: problem.safetensors}}\nkernel: {enabled: true, impl: native-lm-head}\n";
        fs::write(&config, text).unwrap();
        let checked = assay(&["gradcheck", "--config", &config, "--json", &json]);
        assert_eq!(checked.code, 0, "{}{}", checked.stdout, checked.stderr);
        let result = read_json(Path::new(&json));
        assert!(result["max_abs_diff_dhidden"].as_f64().unwrap() < 1e-2, "{result}");
        assert!(result["max_rel_diff_dlm_head"].as_f64().unwrap() < 1e-2, "{result}");
        assert!(result.get("max_abs_diff_dlogits").is_none());
    }
}

#[test]
fn a_wrong_head_is_explained() {
    let workplace = HeadWorkplace::new(&["--dtype", "f32", "--layout", "vh"]);
    let sign = |x: &mut f32| *x = -*x;
    workplace.write_candidate(|candidate| {
        let FloatArray::F32(dhidden) = &mut candidate.gradient.dhidden else { panic!("generated in f32") };
        sign(dhidden.iter_mut().find(|x| **x != 0.0).expect("some token learns"));
    });
    let output = workplace.judge(&["--quiet"]);
    assert_eq!(output.code, 1);
    for part in [
        "FAIL candidate: dhidden, f32",
        "at  ",
        "expected  ",
        "actual  ",
        "times the limit",
        "inputs    mask true, id ",
        ", hidden ",
        "in the reference logp",
        "replay    assay judge --problem",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    workplace.write_candidate(|candidate| {
        let FloatArray::F32(dlm_head) = &mut candidate.gradient.dlm_head else { panic!("f32") };
        sign(&mut dlm_head[[128, 6]]);
    });
    let output = workplace.judge(&["--quiet"]);
    for part in
        ["FAIL candidate: dlm_head, f32", "at        [6,128]", "weight ", "column 128 of a head [V,H]", "tokens that"]
    {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
}

#[test]
fn heads_in_files_that_do_not_fit_are_refused_by_field() {
    let workplace = HeadWorkplace::new(&["--dtype", "f32"]);
    let candidate = workplace.path("candidate.safetensors");
    let refused = |metadata: &[(&str, &str)], parts: &[&str]| {
        let file = ProblemFile::open(workplace.path("problem.safetensors")).unwrap();
        let problem = file.head_problem(Some("old_logps")).unwrap();
        let path = workplace.path("changed.safetensors");
        write_problem(&path, &problem, file.metadata()).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        for (from, to) in metadata {
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("in the header");
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        }
        fs::write(&path, bytes).unwrap();
        assert_refused(
            &["judge", "--problem", &path, "--candidate", &candidate],
            &[&["changed.safetensors"], parts].concat(),
        );
    };
    refused(&[("\"layout\":\"hv\"", "\"layout\":\"xx\"")], &["metadata `layout`", "got `xx`", "hv, which is [H,V]"]);
    refused(&[("\"layout\":\"hv\"", "\"layoux\":\"hv\"")], &["metadata `layout`", "got nothing"]);
    refused(&[("\"layout\":\"hv\"", "\"layout\":\"vh\"")], &["`lm_head`", "[7, 129]", "[V,H] with H = 7"]);
    let rounds = ("\"rounds_logits\":\"true\"", "\"rounds_logits\":\"trve\"");
    refused(&[rounds], &["metadata `rounds_logits`", "got `trve`", "true or false"]);

    workplace.write_candidate(|candidate| {
        candidate.gradient.dlm_head = FloatArray::zeros((129, 7), assay::problem::Dtype::F32);
    });
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("candidate `dlm_head`: got shape [129, 7], expected [7, 129]"), "{}", output.stderr);
    let without = HeadWorkplace::new(&[]);
    without.write_candidate(|candidate| (candidate.logp, candidate.entropy) = (None, None));
    let output = without.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("ignored  entropy: not in the candidate"), "{}", output.stdout);
}

#[test]
fn the_matrix_has_every_variant_and_implementation_in_table_markdown_and_json() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("matrix.json");
    let table = assay(&["list", "--matrix", "--json", json.to_str().unwrap()]);
    let markdown = assay(&["list", "--markdown"]);
    assert_eq!((table.code, markdown.code), (0, 0), "{}{}", table.stderr, markdown.stderr);
    let rows = read_json(&json);
    let variants = assay::judge::variants::variants();
    // And one for how a batch lies.
    let (of_batch, rows) = rows.as_array().unwrap().split_last().unwrap();
    assert_eq!((of_batch["field"].as_str(), of_batch["choice"].as_str()), (Some("sequences"), Some("packed")));
    assert_eq!(rows.len(), variants.len());
    assert_eq!(markdown.stdout.lines().count(), variants.len() + 1 + 2);
    assert!(markdown.stdout.contains("| objective | ppo_clip | yes | yes |"), "{}", markdown.stdout);
    assert!(markdown.stdout.contains("no: `top_entropy`"), "{}", markdown.stdout);
    for (row, variant) in rows.iter().zip(variants) {
        assert_eq!((row["field"].as_str(), row["choice"].as_str()), (Some(variant.field), Some(variant.choice)));
        assert_eq!(row["support"]["reference"], "yes");
        for implementation in assay::registry::registry::<Problem>(None) {
            assert!(!row["support"][implementation.id()].is_null(), "{} {row}", implementation.id());
            assert!(table.stdout.contains(implementation.id()));
        }
        assert!(table.stdout.contains(variant.choice), "{}", variant.choice);
    }
}

#[test]
fn the_matrix_goes_between_its_marks_in_a_document() {
    let workplace = Workplace::new();
    let document = workplace.path("support.md");
    let list = || assay(&["list", "--quiet", "--markdown", "--into", &document]);
    fs::write(&document, "before\n<!-- assay list --markdown -->\nold\n<!-- end of matrix -->\nafter\n").unwrap();
    assert_eq!(list().code, 0);
    let matrix = assay(&["list", "--markdown"]).stdout;
    let expected = format!("before\n<!-- assay list --markdown -->\n{matrix}<!-- end of matrix -->\nafter\n");
    assert_eq!(fs::read_to_string(&document).unwrap(), expected);
    if cfg!(feature = "pjrt") {
        let shipped = fs::read_to_string("docs/support.md").unwrap();
        let cells = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(cells(&shipped).contains(&cells(&matrix)), "`assay list --markdown --into docs/support.md`");
    }
    fs::write(&document, "nothing to fill\n").unwrap();
    let refused = list();
    assert!(refused.code == 2 && refused.stderr.contains("`<!-- assay list --markdown -->`"), "{}", refused.stderr);
    assert_eq!(fs::read_to_string(&document).unwrap(), "nothing to fill\n");
}

#[test]
fn metrics_go_by_the_names_and_definitions_of_each_project() {
    let workplace = Workplace::new();
    let problem = workplace.path("problem.safetensors");
    let json = workplace.path("metrics.json");
    for (names, metric) in [
        ("trl", "clip_ratio/low_mean"),
        ("verl", "actor/pg_clipfrac"),
        ("tunix", "is_ratio/mean"),
        ("liger", "clip_ratio"),
    ] {
        let output = assay(&["metrics", "--problem", &problem, "--names", names, "--json", &json]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        let metrics = read_json(Path::new(&json));
        let metrics = metrics.as_array().unwrap();
        assert!(metrics.iter().any(|found| found["name"] == metric), "{metric} is not among {metrics:?}");
        for found in metrics {
            assert!(found["value"].is_number(), "{found}");
            assert!(output.stdout.contains(found["name"].as_str().unwrap()), "{}", output.stdout);
        }
    }
    let missing = workplace.path("nothing.safetensors");
    assert_refused(&["metrics", "--problem", &missing], &["nothing.safetensors"]);
}

#[test]
fn list_shows_every_implementation() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("list.json");
    let output = assay(&["list", "--json", json.to_str().unwrap()]);
    assert_eq!(output.code, 0);
    let listed = read_json(&json);
    for implementation in assay::registry::registry::<Problem>(None) {
        assert!(output.stdout.contains(&format!("│ {} ", implementation.id())), "{}", output.stdout);
        assert!(listed.as_array().unwrap().iter().any(|entry| entry["id"] == implementation.id()));
    }
    assert_narrow(&output.stdout);
    // Descriptions and refused options are broken over lines; those of several implementations are said once.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (table, below) = output.stdout.split_once('└').expect("a table");
    let descriptions: Vec<&str> = table.lines().filter_map(|line| line.rsplit_once('┆')?.1.strip_suffix('│')).collect();
    let descriptions = words(&descriptions.join(" "));
    let below = words(below);
    #[cfg(feature = "pjrt")]
    if let Ok(path) = assay::runtime::locate(None) {
        let client = assay::runtime::Client::shared(&path).unwrap();
        let said = format!("devices {} of {}, platform cpu plugin ", client.device_count(), client.device_kind());
        assert!(below.contains(&said) && below.contains("(C API 0."), "{below}");
    }
    for entry in listed.as_array().unwrap() {
        assert!(descriptions.contains(entry["summary"].as_str().unwrap()), "{entry} {descriptions}");
        let options: Vec<&str> = entry["unsupported"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        // What stands before the first says what is not here.
        let groups = below.split("refused by ").skip(1).filter_map(|group| group.trim().split_once(": "));
        let own: Vec<&str> =
            groups.filter(|(ids, _)| ids.split(", ").any(|id| entry["id"] == id)).map(|(_, of_them)| of_them).collect();
        assert_eq!(own, [options.join(", ")], "{entry} {below}");
    }
}

#[test]
fn bad_usage_exits_with_2() {
    for args in [&["frobnicate"][..], &["replay", "--frob"], &["generate"], &["judge", "--problem", "p"]] {
        assert_eq!(assay(args).code, 2, "{args:?}");
    }
    assert_eq!(assay(&["--help"]).code, 0);
}

#[test]
fn bad_shapes_dtypes_and_names_are_refused() {
    let out = ["-o", "/nonexistent/problem.safetensors"];
    for shape in ["0x3x5", "2x3x0", "2x3", "2x3x5x0", "2x3x5x7x9", "axbxc", "-1x2x3", "99999999999999999999x1x1"] {
        let output = assay(&[&["generate", "--shape", shape], &out[..]].concat());
        assert_eq!(output.code, 2);
        assert!(
            output.stderr.contains("expected BxT") || output.stderr.contains("unexpected argument"),
            "{}",
            output.stderr
        );
    }
    for shape in ["99999x99999x99999", "4294967295x4294967295x1", "1000000x1000000x8x4"] {
        assert_refused(&[&["generate", "--shape", shape], &out[..]].concat(), &["`shape`", "memory"]);
    }
    assert_refused(
        &[&["generate", "--shape", "2x3x5"], &out[..]].concat(),
        &["/nonexistent/problem.safetensors", "write"],
    );
    assert_refused(
        &[&["generate", "--shape", "2x3x5", "--old-logp-noise-scale", "NaN"], &out[..]].concat(),
        &["`old_logp_noise_scale`", "got NaN", "≥ 0"],
    );
    assert_refused(
        &["replay", "--impl", "cuda", "fixtures/qwen_tiny.safetensors"],
        &["got `cuda`", "expected one of: native", "with an LM head: native-lm-head"],
    );
    assert_refused(
        &[&["generate", "--shape", "2x3x5", "--layout", "vh"], &out[..]].concat(),
        &["--layout", "without an LM head", "expected --shape BxTxHxV"],
    );
    assert_refused(&[&["generate", "--shape", "2x3x4x5", "--regime", "holes"], &out[..]].concat(), &["`regime`", "−∞"]);
    assert_refused(&["replay", "no/such.safetensors"], &["no/such.safetensors", "cannot"]);
    assert_refused(&["replay", "Cargo.toml"], &["Cargo.toml", "expected"]);
    assert_refused(
        &["replay", "fixtures/qwen_tiny.safetensors", "--logits", "nothing"],
        &["`nothing`", "not in the file"],
    );
}

#[test]
fn bad_specs_are_refused_by_file_and_field() {
    let workplace = Workplace::new();
    let cases: [(&str, &str, &[&str]); 12] = [
        ("unknown.yaml", "temprature: 1.0\n", &["temprature", "temperature"]),
        ("unknown.toml", "temprature = 1.0\n", &["temprature", "temperature"]),
        ("unknown.json", "{\"temprature\": 1.0}", &["temprature", "temperature"]),
        ("typed.yaml", "temperature: warm\n", &["a number > 0 or `given`", "`temperature: warm`"]),
        ("nested.yaml", "objective: {ppo_clip: {epsilon: 0.2}}\n", &["epsilon", "epsilon_low"]),
        ("cold.yaml", "temperature: 0.0\n", &["`temperature`", "got 0", "> 0"]),
        ("hot.yaml", "temperature: .inf\n", &["`temperature`", "got inf", "finite"]),
        ("clip.yaml", "objective: {ppo_clip: {epsilon_low: -0.1}}\n", &["epsilon_low", "got -0.1", "≥ 0"]),
        ("dual.yaml", "objective: {ppo_clip: {dual_clip: 1.0}}\n", &["dual_clip", "got 1", "> 1"]),
        ("kl.yaml", "kl: {beta: .nan}\n", &["kl.beta", "got NaN", "≥ 0"]),
        ("norm.yaml", "reduction: {normalizer: 0.0}\n", &["reduction.normalizer", "got 0", "> 0"]),
        ("length.yaml", "reduction: {fixed_length: {rows: all, length: 0}}\n", &["length", "got 0", "≥ 1"]),
    ];
    for (name, text, parts) in cases {
        let path = workplace.write(name, text);
        let args = ["generate", "--spec", &path, "--shape", "1x2x3", "-o", &workplace.path("never.safetensors")];
        assert_refused(&args, &[&[name][..], parts].concat());
    }
    assert!(!Path::new(&workplace.path("never.safetensors")).exists());
}

#[test]
fn bad_gradcheck_configs_are_refused() {
    let workplace = Workplace::new();
    let batch = "batch: {generate: {shape: [1, 2, 3], dtype: f32, regime: small}}\n";
    let cases: [(&str, String, &[&str]); 6] = [
        ("unknown.yaml", format!("{batch}kernels: {{}}\n"), &["kernels", "kernel"]),
        ("implementation.yaml", format!("{batch}kernel: {{enabled: true, impl: cuda}}\n"), &["`cuda`", "native"]),
        ("regime.yaml", batch.replace("small", "smalll"), &["smalll", "small"]),
        ("empty.yaml", batch.replace("[1, 2, 3]", "[1, 0, 3]"), &["`shape`", "[1, 0, 3]", "≥ 1"]),
        ("nothing.yaml", String::new(), &["nothing.yaml", "end of input"]),
        ("fixture.yaml", "batch: {fixture: {path: gone.safetensors}}\n".into(), &["gone.safetensors"]),
    ];
    for (name, text, parts) in cases {
        let path = workplace.write(name, &text);
        assert_refused(&["gradcheck", "--config", &path], parts);
    }
}

#[test]
fn problems_that_do_not_fit_their_spec_are_refused_by_file_and_index() {
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
