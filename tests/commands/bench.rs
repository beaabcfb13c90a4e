//! `assay bench`: its keys, figures that agree with each other and with the shape, and what it refuses. No test looks at
//! how long a step takes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use crate::common::command::command;
use assay::implementation::{Implementation, ProblemFormat, Workload};
use assay::native::Isa;
use assay::problem::{Dtype, Shape};
use assay::registry::{find, head_registry, registry};
use assay::spec::LossSpec;
use serde_json::Value;
use tempfile::TempDir;

const KEYS: [&str; 27] = [
    "command",
    "impl",
    "devices",
    "shape",
    "dtype",
    "warmup",
    "steps",
    "first_call_s",
    "avg_step_ms",
    "step_s_mean",
    "step_s_p50",
    "step_s_p90",
    "step_s_min",
    "step_s_max",
    "gb_per_s",
    "threads",
    "isa",
    "roofline_share",
    "mem_after_alloc",
    "mem_after_run",
    "peak_bytes_in_use",
    "peak_bytes_reserved",
    "argument_bytes",
    "output_bytes",
    "temp_bytes",
    "alias_bytes",
    "why_null",
];

/// Exit code, stdout and stderr of a bench of `config`, and its JSON where it wrote one.
fn bench(config: &str, args: &[&str]) -> (i32, String, String, Option<Value>) {
    let folder = TempDir::new().unwrap();
    let (path, json) = (folder.path().join("bench.yaml"), folder.path().join("bench.json"));
    fs::write(&path, config).unwrap();
    let mut command = command();
    command.args(["bench", "--config"]).arg(&path).arg("--json").arg(&json).args(args);
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let json = fs::read_to_string(&json).ok().map(|text| serde_json::from_str(&text).unwrap());
    (output.status.code().expect("not killed"), text(output.stdout), text(output.stderr), json)
}

fn config(implementation: &str, devices: usize, shape: [usize; 3], dtype: Dtype) -> String {
    format!(
        "batch: {{generate: {{shape: {shape:?}, dtype: {dtype}, regime: peaked}}}}\n\
         spec: {{kl: {{beta: 0.04, estimator: k3}}}}\n\
         kernel: {{enabled: true, impl: {implementation}, devices: {devices}}}\n\
         bench: {{warmup: 1, steps: 3}}\n"
    )
}

/// The same without a file.
fn bench_of(args: &[&str]) -> (i32, String, String, Option<Value>) {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("bench.json");
    let output = command().arg("bench").args(args).arg("--json").arg(&json).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let json = fs::read_to_string(&json).ok().map(|text| serde_json::from_str(&text).unwrap());
    (output.status.code().expect("not killed"), text(output.stdout), text(output.stderr), json)
}

/// The last implementation of each class that can run here, the one that is cut most: what a bench says of them is said in one place.
fn one_of_each_class<P: Workload>(all: Vec<Arc<dyn Implementation<P>>>) -> Vec<Arc<dyn Implementation<P>>> {
    let all = all.into_iter().filter(|implementation| implementation.available().is_ok());
    let by_class: BTreeMap<_, _> =
        all.map(|implementation| (implementation.class().to_string(), implementation)).collect();
    // The CPU's own, XLA's and the tile kernels'; without a plugin the first alone.
    assert!([1, 3].contains(&by_class.len()), "{:?}", by_class.keys());
    by_class.into_values().collect()
}

/// `xla-online` has no digits of `1 − p_y` left at a peak: it is held to `standard`, and timed.
#[cfg(feature = "pjrt")]
#[test]
fn bench_times_other_ways_to_write_xla_at_standard() {
    for id in ["xla-online", "xla-seed"] {
        let (code, stdout, stderr, json) = bench_of(&["--impl", id, "--shape", "1x64x3000", "--against", "xla"]);
        assert_eq!((code, stderr.as_str()), (0, ""), "{id}: {stdout}");
        assert!(json.unwrap()["ratio_to_xla"].as_f64().is_some_and(|ratio| ratio > 0.0), "{id}");
    }
}

#[test]
fn bench_opponents_take_turns_and_give_ratios() {
    let args = ["--impl", "native", "--shape", "1x4x513", "--dtype", "f16", "--threads", "2"];
    let (code, stdout, stderr, json) = bench_of(&[&args[..], &["--against", "copy", "--against", "native"]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let result = json.unwrap();
    let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
    assert_eq!((&result["shape"], &result["dtype"]), (&serde_json::json!([1, 4, 513]), &"f16".into()));
    assert_eq!(result["threads"], 2);
    assert!(Isa::NAMES.contains(&result["isa"].as_str().unwrap()));
    assert!(number("ratio_to_copy") > 0.0 && number("ratio_to_native") > 0.0);
    assert!((number("roofline_share") * number("ratio_to_copy") - 1.0).abs() < 1e-9);
    let traffic = 2.0 * 4.0 * 513.0 * 2.0;
    assert!((number("gb_per_s") * number("step_s_p50") * 1e9 / traffic - 1.0).abs() < 1e-9);
    assert!(stdout.contains("ratio_to_copy") && stdout.contains("ratio_to_native"), "{stdout}");
}

#[test]
fn bench_lm_head_takes_turns_with_its_products() {
    let args =
        ["--impl", "native-lm-head", "--shape", "3x4x17x513", "--dtype", "bf16", "--layout", "vh", "--threads", "2"];
    let against = ["--against", "gemm", "--against", "native-lm-head"];
    let (code, stdout, stderr, json) = bench_of(&[&args[..], &against].concat());
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let result = json.unwrap();
    let mut keys: BTreeSet<&str> = KEYS.into_iter().filter(|key| *key != "gb_per_s").collect();
    let of_heads =
        ["gflop_per_s", "ratio_to_gemm", "ratio_to_native-lm-head", "layout", "rounds_logits", "judged_shape"];
    keys.extend(of_heads);
    assert_eq!(result.as_object().unwrap().keys().map(String::as_str).collect::<BTreeSet<_>>(), keys);
    assert_eq!(result["shape"], serde_json::json!([3, 4, 17, 513]));
    assert_eq!(result["judged_shape"], serde_json::json!([2, 3, 17, 513]));
    assert_eq!((&result["layout"], &result["rounds_logits"]), (&"vh".into(), &true.into()));
    let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
    assert!((number("roofline_share") * number("ratio_to_gemm") - 1.0).abs() < 1e-9);
    let operations = f64::from(6 * 3 * 4 * 17 * 513);
    assert!((number("gflop_per_s") * number("step_s_p50") * 1e9 / operations - 1.0).abs() < 1e-9);
    assert!(stdout.contains("ratio_to_gemm"), "{stdout}");
}

#[test]
fn bench_lm_head_in_a_config_gives_the_seeds_keys() {
    for head in one_of_each_class(head_registry(None)) {
        let devices = *head.device_counts().last().expect("it is available");
        let config = format!(
            "batch: {{generate_head: {{hidden: 9, layout: hv, rounds_logits: false, \
             recipe: {{shape: [2, 4, 130], dtype: f32, regime: peaked}}}}}}\n\
             kernel: {{enabled: true, impl: {}, devices: {devices}}}\nbench: {{warmup: 1, steps: 3}}\n",
            head.id()
        );
        let (code, stdout, stderr, json) = bench(&config, &[]);
        assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        let result = json.expect("it was asked for");
        assert_eq!((&result["impl"], &result["devices"]), (&head.id().into(), &devices.into()));
        assert_eq!(result["rounds_logits"], false);
        let of_seed = KEYS.into_iter().filter(|key| *key != "gb_per_s");
        of_seed.for_each(|key| assert!(result.get(key).is_some(), "{key} of {}", head.id()));
    }
}

#[test]
fn bench_impossible_turns_are_refused() {
    let native = ["--impl", "native", "--shape", "1x2x9"];
    for (args, part) in [
        (&["--against", "nobody"][..], "nobody"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["--threads", "100000"], "100000 is not in 1..=1024"),
        (&["--shape", "1x2"], "shape: got `1x2`, expected BxTxV"),
        (&["--dtype", "f8"], "dtype: got `f8`, expected f64, f32, bf16 or f16"),
        (&["--dtype", "f64"], "does not support logits dtype f64"),
        (&["--config", "some.yaml"], "cannot be used with"),
        (&["--layout", "vh"], "--layout: got a shape without an LM head, expected --shape BxTxHxV"),
        (&["--f32-logits"], "--f32-logits: got a shape without an LM head"),
        (&["--against", "gemm"], "got `gemm`, expected one of: native"),
        (&["--against", "native-lm-head"], "with an LM head: native-lm-head"),
    ] {
        let given = if part.contains("BxTxV") { &native[..2] } else { &native[..] };
        let (code, stdout, stderr, json) = bench_of(&[given, args].concat());
        assert_eq!((code, stdout.as_str(), json), (2, "", None), "{args:?}: {stderr}");
        assert!(stderr.contains(part), "{args:?}: {stderr}");
    }
}

#[track_caller]
fn assert_refused(config: &str, parts: &[&str]) {
    let (code, stdout, stderr, json) = bench(config, &[]);
    assert_eq!((code, stdout.as_str(), json), (2, "", None), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "`{part}` not in: {stderr}");
    }
}

#[test]
fn bench_every_class_gives_the_seeds_keys_and_agrees() {
    let (shape, dtype) = ([2, 4, 130], Dtype::Bf16);
    for implementation in one_of_each_class(registry(None)) {
        let devices = *implementation.device_counts().last().expect("it is available");
        let (code, stdout, stderr, json) = bench(&config(implementation.id(), devices, shape, dtype), &[]);
        assert_eq!(code, 0, "{stdout}{stderr}");
        assert_eq!(stderr, "", "nothing but the table, in a pipe");
        let result = json.expect("it was asked for");
        let object = result.as_object().unwrap();
        let keys = object.keys().map(String::as_str).filter(|&key| key != "lowering" && key != "plugins");
        assert_eq!(keys.collect::<Vec<_>>(), KEYS, "in this order");
        // A command that has loaded a plugin lists it at the end.
        assert!(object.keys().position(|key| key == "plugins").is_none_or(|at| at + 1 == object.len()), "{result}");
        assert_eq!(object.get("lowering").and_then(|lowering| lowering.as_str()), implementation.lowering());
        assert_eq!((&result["impl"], &result["devices"]), (&implementation.id().into(), &devices.into()));
        assert_eq!((&result["warmup"], &result["steps"]), (&1.into(), &3.into()));

        let number = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("{key} is a number"));
        let sorted = ["step_s_min", "step_s_p50", "step_s_p90", "step_s_max"].map(number);
        assert!(sorted.is_sorted() && sorted[0] > 0.0, "{sorted:?}");
        let mean = number("step_s_mean");
        assert!((number("step_s_min")..=number("step_s_max")).contains(&mean), "{mean} of {sorted:?}");
        assert!((number("avg_step_ms") - mean * 1e3).abs() <= 1e-12 * mean * 1e3);
        assert!(number("first_call_s") > 0.0);

        let null: BTreeSet<&str> = object.iter().filter(|(_, value)| value.is_null()).map(|(key, _)| &**key).collect();
        let reasons = result["why_null"].as_object().unwrap();
        assert_eq!(null, reasons.keys().map(String::as_str).collect(), "a reason for each, and no other");
        assert!(reasons.values().all(|why| !why.as_str().unwrap().is_empty()));
        assert!(null.iter().all(|key| stdout.contains(key)), "{stdout}");
    }
}

#[cfg(feature = "pjrt")]
#[test]
fn bench_program_bytes_are_those_of_the_shape() {
    let [b, t, v] = [2, 4, 130];
    for dtype in Dtype::KERNEL {
        let (code, _, stderr, json) = bench(&config("xla", 1, [b, t, v], dtype), &["-q"]);
        assert_eq!(code, 0, "{stderr}");
        let result = json.unwrap();
        let logits = (b * t * v * dtype.size()) as i64;
        let tokens = (b * t) as i64;
        // ids i32, mask, advantages, old_logp and ref_logp f32, and nine numbers.
        assert_eq!(result["argument_bytes"], logits + tokens * (4 + 1 + 4 + 4 + 4) + 9 * 4);
        assert_eq!(result["alias_bytes"], logits, "dlogits lie over the logits");
        // logp, entropy and token_loss f32, seven scalars, and a pointer to each of the five outputs.
        let per_token = 3 * 4 * tokens + 7 * 4;
        let beyond = result["output_bytes"].as_i64().unwrap() - logits - per_token;
        assert!((0..=5 * 8).contains(&beyond), "{beyond}");
        assert!(result["temp_bytes"].as_i64().unwrap() > 0);
    }
}

#[cfg(feature = "pjrt")]
#[test]
fn bench_host_bytes_are_of_every_device_that_shares_it() {
    let (spec, shape) = (LossSpec::default(), Shape { batch: 2, tokens: 4, vocab: 130 });
    for (id, devices) in [("xla", 1), ("xla-rows", 4), ("xla-vocab", 8)] {
        let implementation = find(id, None).unwrap();
        if implementation.device_counts().last().is_none_or(|&most| most < devices) {
            continue;
        }
        let prepared = implementation
            .prepare(&spec, ProblemFormat { shape, dtype: Dtype::F32, form: (), packed: None }, devices)
            .unwrap();
        let one = prepared.compiled_memory().unwrap().peak_bytes();
        assert_eq!(prepared.host_bytes() as i64, one * devices as i64, "{id} on {devices}");
    }
}

#[test]
fn bench_shape_that_does_not_fit_is_refused_with_both_numbers() {
    let [b, t, v] = [4096, 65_536, 151_936];
    for implementation in registry(None).iter().filter(|implementation| implementation.available().is_ok()) {
        let devices = implementation.device_counts()[0];
        let text = config(implementation.id(), devices, [b, t, v], Dtype::Bf16);
        // Logits in f64 and in bf16.
        let needed = format!("needs {} bytes, ", b * t * v * (8 + 2));
        assert_refused(
            &text,
            &["memory: a bench of 4096x65536x151936 bf16", implementation.id(), &needed, "are available"],
        );
    }
}

#[test]
fn bench_bad_configs_are_refused_by_file_and_field() {
    let right = config("native", 1, [1, 2, 3], Dtype::F32);
    let with = |from: &str, to: &str| {
        assert!(right.contains(from), "{from}");
        right.replace(from, to)
    };
    assert_refused(&with("steps: 3", "steps: 0"), &["bench.yaml", "`bench.steps`", "got 0", "at least 1"]);
    assert_refused(&with("steps: 3", "steps: -1"), &["bench.yaml", "steps: -1"]);
    assert_refused(&with("steps: 3", "stepps: 3"), &["bench.yaml", "stepps", "expected", "steps"]);
    assert_refused(&with("bench:", "benches:"), &["bench.yaml", "benches", "expected", "bench"]);
    assert_refused(&with("regime: peaked", "regime: peaky"), &["bench.yaml", "peaky", "peaked"]);
    assert_refused(
        &with("regime: peaked", "regime: peaked, masked_garbage: true"),
        &["`batch.generate.masked_garbage`"],
    );
    assert_refused(&with("shape: [1, 2, 3]", "shape: [1, 0, 3]"), &["`shape`", "[1, 0, 3]", "≥ 1"]);
    assert_refused(&with("impl: native", "impl: cuda"), &["got `cuda`", "native"]);
    assert_refused(&with("devices: 1", "devices: 3"), &["native does not support device count 3", "supports 1"]);
    assert_refused(&with("dtype: f32", "dtype: f64"), &["native does not support logits dtype f64"]);
    assert_refused(&with("beta: 0.04", "beta: -1.0"), &["kl.beta", "got -1", "≥ 0"]);
    assert_refused(
        "batch: {fixture: {path: fixtures/qwen_tiny.safetensors}}\n",
        &["bench.yaml", "`batch`", "got `fixture`", "expected `generate`"],
    );
}

#[test]
fn bench_quiet_prints_nothing_and_counts_have_defaults() {
    let text = "batch: {generate: {shape: [1, 2, 33], dtype: f16, regime: small}}\n";
    let (code, stdout, stderr, json) = bench(text, &["--quiet"]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "", ""));
    let result = json.unwrap();
    assert_eq!((&result["impl"], &result["warmup"], &result["steps"]), (&"native".into(), &2.into(), &10.into()));
}

#[test]
fn bench_steps_of_every_implementation_equal_a_run() {
    #[cfg(feature = "pjrt")]
    assay_testkit::plugins::cpu_clients();
    let spec = LossSpec::default();
    let recipe = assay::judge::generate::Recipe {
        shape: [2, 4, 130],
        dtype: Dtype::Bf16,
        regime: assay::judge::generate::Regime::Normal,
        seed: 3,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    };
    let problem = recipe.problem(&spec).unwrap();
    for implementation in registry(None).iter().filter(|implementation| implementation.available().is_ok()) {
        let devices = *implementation.device_counts().last().expect("it is available");
        let run = implementation.run(&spec, problem.clone(), devices).unwrap();
        let prepared =
            implementation.prepare(&spec, ProblemFormat::from_problem(&spec, &problem).unwrap(), devices).unwrap();
        for step in 0..3 {
            let outcome = prepared.load(&problem).unwrap()().unwrap()().unwrap();
            assert_eq!(outcome.gradient, run.gradient, "{} step {step}", implementation.id());
            assert_eq!((outcome.loss, outcome.logp), (run.loss.clone(), run.logp.clone()));
        }
    }
}

#[test]
fn bench_problem_of_another_shape_or_dtype_is_refused() {
    let spec = LossSpec::default();
    for implementation in one_of_each_class(registry(None)) {
        let devices = implementation.device_counts()[0];
        let prepared = implementation
            .prepare(
                &spec,
                ProblemFormat {
                    shape: Shape { batch: 2, tokens: 4, vocab: 130 },
                    dtype: Dtype::Bf16,
                    form: (),
                    packed: None,
                },
                devices,
            )
            .unwrap();
        let other = assay::judge::generate::Recipe {
            shape: [2, 4, 130],
            dtype: Dtype::F16,
            regime: assay::judge::generate::Regime::Normal,
            seed: 3,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        };
        let problem = other.problem(&spec).unwrap();
        let Err(error) = prepared.load(&problem) else { panic!("{}: f16 for bf16", implementation.id()) };
        assert!(error.to_string().contains("got f16 logits of 2x4x130"), "{error}");
    }
    assert!(
        find("native", None)
            .unwrap()
            .prepare(
                &spec,
                ProblemFormat {
                    shape: Shape { batch: 1, tokens: 1, vocab: 1 },
                    dtype: Dtype::F64,
                    form: (),
                    packed: None
                },
                1
            )
            .is_err()
    );
}
