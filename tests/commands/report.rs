//! `assay report`: a part of the page for what each command writes, strangers' text as text, and what is refused.

use std::fs;
use std::path::Path;

use crate::common::command::{assay, assert_refused};
use assay::schema::ab::{AbArm, AbComparison, AbVerdict, TrainingRun, TrainingStep};
use serde_json::{Value, json};
use tempfile::TempDir;

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// What `args --json` writes, and the code that the command ends with.
fn result_of(folder: &TempDir, name: &str, args: &[&str]) -> (String, i32) {
    let path = text(&folder.path().join(name));
    let output = assay(&[args, &["--quiet", "--json", &path]].concat());
    assert_ne!(output.code, 2, "{args:?}: {}", output.stderr);
    (path, output.code)
}

/// The page of `inputs`.
#[track_caller]
fn page(folder: &TempDir, inputs: &[&str]) -> String {
    let path = text(&folder.path().join("page.html"));
    let output = assay(&[&["report"], inputs, &["-o", &path]].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    fs::read_to_string(path).unwrap()
}

fn written(folder: &TempDir, name: &str, value: &Value) -> String {
    let path = folder.path().join(name);
    fs::write(&path, value.to_string()).unwrap();
    text(&path)
}

/// Every `<tag` of the page, closed or empty.
fn tags(page: &str) -> std::collections::BTreeSet<&str> {
    let tag = |rest: &'_ str| rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
    page.split('<')
        .skip(1)
        .filter(|rest| rest.starts_with(char::is_alphabetic))
        .map(|rest| &rest[..tag(rest)])
        .collect()
}

fn problem(folder: &TempDir) -> String {
    let path = text(&folder.path().join("problem.safetensors"));
    let shape = ["--shape", "2x3x65", "--dtype", "f32", "--regime", "normal", "--seed", "5"];
    assert_eq!(assay(&[&["generate", "-o", &path], &shape[..]].concat()).code, 0);
    path
}

fn step(step: u64, loss: f64) -> TrainingStep {
    TrainingStep {
        step,
        loss,
        reward: 0.5,
        entropy: 1.25,
        grad_norm: 2.0,
        loss_step_s: 0.01,
        update_s: 0.1,
        loss_step_bytes: f64::from(1 << 20),
    }
}

fn comparison() -> AbComparison {
    let arm = |name: &str, implementation: &str| AbArm {
        name: name.into(),
        implementation: implementation.into(),
        runs: vec![TrainingRun { seed: 0, steps: vec![step(1, 0.5), step(2, f64::NAN), step(3, 0.25)] }],
    };
    let verdict = |what: &str, pass: Option<bool>| AbVerdict {
        what: what.into(),
        baseline: Some(1.0),
        kernel: Some(1.5),
        difference: Some(0.5),
        limit: pass.map(|_| 0.75),
        pass,
    };
    AbComparison {
        pass: true,
        arms: [arm("baseline", "candle"), arm("kernel", "native")],
        verdicts: vec![verdict("loss, worst step", Some(true)), verdict("time of the loss step", None)],
        controls: Vec::new(),
    }
}

#[test]
fn report_has_a_part_and_the_command_of_each_result() {
    let folder = TempDir::new().unwrap();
    let problem = problem(&folder);
    let (replay, _) = result_of(&folder, "replay.json", &["replay", &problem, "--impl", "native"]);
    let (bench, _) =
        result_of(&folder, "bench.json", &["bench", "--impl", "native", "--shape", "1x4x65", "--against", "copy"]);
    let (peers, _) = result_of(&folder, "peers.json", &["peers", "fixtures/peers/trl_grpo_basic.json"]);
    let ab = written(&folder, "ab.json", &serde_json::to_value(comparison()).unwrap());
    let page = page(&folder, &[&replay, &bench, &peers, &ab]);

    for part in ["Verdicts", "Time and memory", "Recorded runs of others", "Kernel off and on"] {
        assert!(page.contains(&format!("<h2>{part}")), "{part}");
    }
    for command in ["assay replay ", "assay bench --impl native --shape 1x4x65 --against copy", "assay peers fixtures"]
    {
        assert!(page.contains(&format!("<pre><code>{command}")), "{command}");
    }
    for said in [
        "Contents",
        "href=\"#part-3\"",
        "error / limit, by output",
        "Errors in ulp",
        "dlogits row_l2",
        "copy",
        "gradient norm",
    ] {
        assert!(page.contains(said), "{said}");
    }
    let checks = serde_json::from_str::<Value>(&fs::read_to_string(&replay).unwrap()).unwrap()["checks"]
        .as_array()
        .unwrap()
        .len();
    assert!(page.contains(&format!("{checks} checks passed, 0 failed")), "{checks}");
    assert!(!page.contains("could not be drawn"));

    for outside in ["src=", "url(", "@import", "<link", "<script"] {
        assert!(!page.contains(outside), "the page needs a network: {outside}");
    }
    assert_eq!(page.matches("http").count(), page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count() + 1);
}

/// Tolerances are so tight that the kernel fails: the page says where.
#[test]
fn report_shows_a_failed_check_first() {
    let folder = TempDir::new().unwrap();
    let check = |output: &str, verdict: &str, worst: Option<f64>| json!({"fixture": "p", "impl": "mine", "devices": 4, "output": output, "worst": worst, "limit": 1e-6, "at": "[0,1,2]", "verdict": verdict});
    let checks = json!([
        check("loss", "pass", Some(0.0)),
        check("logp", "pass", Some(8e-7)),
        check("dlogits", "fail", Some(2e-6)),
        check("entropy", "nonfinite", None)
    ]);
    let report = json!({"pass": false, "checks": checks, "ignored": [{"what": "xla", "why": "no plugin"}], "command": "assay replay p"});
    let page = page(&folder, &[&written(&folder, "r.json", &report)]);
    assert!(page.contains("class=\"badge bad\">fail"), "{page}");
    assert!(page.contains("2 checks passed, 2 failed, 1 not made"));
    let failures = &page[page.find("What failed").unwrap()..page.find("<h3>Verdicts").unwrap()];
    assert_eq!(failures.matches("mine ×4").count(), 2, "{failures}");
    assert!(failures.contains("[0,1,2]") && failures.contains("nonfinite"), "{failures}");
    for (class, cell) in [("exact", "exact"), ("tight", "1.25×"), ("bad", "0.500×"), ("bad", "NaN or ∞")] {
        let cell = format!("{cell}</td>");
        let before = &page[..page.find(&cell).unwrap_or_else(|| panic!("{cell}"))];
        let open = &before[before.rfind("<td").unwrap()..];
        assert!(open.contains(&format!("class=\"number {class}\"")), "{open}{cell}");
    }
    assert!(page.contains("no plugin"));
    assert!(!page.contains("Contents"), "of one result there are none");
}

#[test]
fn report_has_parts_of_mutants_and_compiled_programs() {
    let folder = TempDir::new().unwrap();
    let mutant = |name: &str, gate: Option<&str>, cell: &str| {
        json!({"name": name, "class": "clip", "does": "d", "seen": "", "killed_by": gate, "gate": gate, "case": null, "devices": null,
               "cases": 3, "peers": {"TRL": cell}, "passes_peers": []})
    };
    let mutants = json!({"total": 2, "killed": 1, "survived": ["survivor"], "cases": 9, "ignored": [],
                         "mutants": [mutant("caught", Some("dlogits"), "passes"), mutant("survivor", None, "not_exercised")]});
    let program = |id: &str, ms: f64| {
        json!({"target": "v6e:2x4", "devices": 8, "impl": id, "shape": [1, 4096, 151_936], "dtype": "bf16", "cycles": 5_530_190, "hbm_bytes": 7_468_259_989u64,
               "memory": {"argument_bytes": 1, "output_bytes": 1, "temp_bytes": 1, "alias_bytes": 1, "code_bytes": 1, "peak_bytes": 3_734_701_088u64},
               "kernels": [], "hbm_uncounted": [], "clock_ghz": 1.75, "compile_s": 3.0,
               "bound": {"cycles_ms": 3.16, "hbm_ms": ms, "predicted_ms": ms, "limit": "hbm"},
               "recorded": {"program": "log_softmax and autodiff", "shape": "1x4096x151936", "step_ms": [9.01, 9.01], "peak_bytes_in_use": 6_226_795_008u64,
                            "peak_bytes_reserved": null, "ratio": 0.51},
               "recorded_kernel": {"program": "MLLM-JAX's Pallas kernels", "shape": "1x4096x151936", "step_ms": [52.9, 55.2],
                            "peak_bytes_in_use": null, "peak_bytes_reserved": null}})
    };
    let of_gpu = |id: &str, launches: Value, pipe: &str| {
        json!({"target": "h100", "devices": 1, "impl": id, "shape": [1, 4096, 151_936], "dtype": "bf16", "launches": launches,
               "memory": {"argument_bytes": 1, "output_bytes": 1, "temp_bytes": 1, "alias_bytes": 1, "code_bytes": 1, "peak_bytes": 1_245_024_944u64},
               "hbm_bytes": 2_490_020_100u64, "clock_ghz": 1.98,
               "bound": {"hbm_ms": 0.743, "pipe_ms": if pipe.is_empty() { 0.0 } else { 0.31 }, "pipe": pipe, "predicted_ms": 0.743, "limit": "hbm"}})
    };
    let launch = json!([{"name": "grpo_one_pass", "runs": 1, "grid": [32_768, 1, 1], "block": [256, 1, 1], "cluster": 8, "registers": 76, "spill_bytes": 0,
                         "shared_bytes": 38_464, "resident": 5, "resident_by": "registers", "instructions": 1.0, "pipes": []}]);
    let of_gpus =
        json!({"gpu_rows": [of_gpu("xla", json!([]), ""), of_gpu("gpu-one-pass", launch.clone(), "<issue>")]});
    let one = written(&folder, "gpu.json", &of_gpu("gpu-one-pass", launch, "xu"));
    let gpus = self::page(&folder, &[&written(&folder, "gpus.json", &of_gpus), &one]);
    assert_eq!(gpus.matches("<h2>Compiled for a GPU").count(), 2, "{gpus}");
    for said in [
        "2 programs for GPUs",
        "gpu-one-pass, &lt;issue&gt;",
        "stalls are in neither",
        "0.417",
        "at least 743 µs (HBM)",
    ] {
        assert!(gpus.contains(said), "{said}: {gpus}");
    }
    let table = json!({"rows": [program("xla", 4.559), program("tile-one-pass", 1.52)]});
    let inputs = [
        written(&folder, "m.json", &mutants),
        written(&folder, "c.json", &program("xla", 4.559)),
        written(&folder, "t.json", &table),
    ];
    let page = page(&folder, &[&inputs[0], &inputs[1], &inputs[2]]);
    for said in [
        "1 of 2 wrong kernels rejected, 9 cases",
        "Accepted though wrong: survivor",
        "tile-one-pass, HBM traffic",
        "52.9 ms to 55.2 ms",
        "4.56 ms",
        "3.73 GB",
        "0.506",
    ] {
        assert!(page.contains(said), "{said}");
    }
    assert!(!page.contains("could not be drawn"));
}

#[test]
fn report_escapes_text_and_draws_or_omits_odd_numbers() {
    let folder = TempDir::new().unwrap();
    let evil = "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&";
    let check = |verdict: &str, worst: Value| {
        json!({"fixture": evil, "impl": evil, "output": evil, "worst": worst, "limit": 1e-300, "at": evil, "verdict": verdict, "dtype": evil,
               "ulp": [1, 2, 18_446_744_073_709_551_615u64]})
    };
    let checks = json!([check("fail", json!(1e300)), check("pass", json!(1e-308)), check("nonfinite", Value::Null)]);
    let report = json!({"pass": false, "checks": checks, "ulp_edges": [0.5, 1e300], "command": evil, "ignored": [{"what": evil, "why": evil}],
                        "invariance": [{"fixture": evil, "impl": evil, "devices": [1, 2], "same": [evil], "other": [evil]}]});
    let mut odd = comparison();
    odd.arms[0].implementation = evil.into();
    odd.verdicts[0].what = evil.into();
    odd.arms[0].runs[0].steps = vec![step(0, f64::MAX), step(u64::MAX, -1e308)];
    odd.arms[1].runs.clear();
    let inputs =
        [written(&folder, "r.json", &report), written(&folder, "ab.json", &serde_json::to_value(odd).unwrap())];
    let page = page(&folder, &[&inputs[0], &inputs[1]]);
    let tags = tags(&page);
    for tag in ["script", "img"] {
        assert!(!tags.contains(tag), "{tags:?}");
    }
    assert_eq!(page.matches("</style>").count(), 1);
    assert!(page.contains("&lt;script&gt;"));
}

#[test]
fn report_of_what_is_no_result_is_refused_unwritten() {
    let folder = TempDir::new().unwrap();
    let output = text(&folder.path().join("page.html"));
    let refuse = |name: &str, content: &[u8], parts: &[&str]| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        assert_refused(&["report", &text(&path), "-o", &output], &[&[name], parts].concat());
        assert!(!Path::new(&output).exists());
        fs::remove_file(path).unwrap();
    };
    refuse("a.json", b"{\"checks\": [}", &["expected JSON"]);
    refuse("a.json", b"[1]", &["got an array", "replay, gradcheck or judge (`checks`)", "ab (`arms`)"]);
    refuse("a.json", b"{}", &["got an empty object"]);
    refuse(
        "a.json",
        b"{\"a\": 1, \"b\": 2}",
        &["got an object with `a`, `b`, expected the JSON of an `assay` command"],
    );
    refuse(
        "a.json",
        b"{\"checks\": []}",
        &["missing field `pass`", "what `assay replay, gradcheck or judge --json` writes"],
    );
    refuse("a.json", b"{\"arms\": [], \"pass\": true, \"verdicts\": []}", &["ab --json"]);
    refuse("a.json", &"[".repeat(100_000).into_bytes(), &["expected JSON"]);
    refuse("a.json", &vec![b' '; (assay::report::LONGEST + 1) as usize], &["got more than 16777216 bytes"]);
    refuse("a.json", &[0xff, 0xfe], &["expected JSON"]);
    assert_refused(&["report", "nowhere.json", "-o", &output], &["nowhere.json", "cannot read"]);

    let good = written(&folder, "ab.json", &serde_json::to_value(comparison()).unwrap());
    let nowhere = text(&folder.path().join("no/page.html"));
    assert_refused(&["report", &good, "-o", &nowhere], &["no/page.html", "cannot write"]);
    // An input that is refused leaves the last page as it was.
    fs::write(&output, "old").unwrap();
    assert_refused(&["report", &good, "nowhere.json", "-o", &output], &["nowhere.json"]);
    assert_eq!(fs::read_to_string(&output).unwrap(), "old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
}
