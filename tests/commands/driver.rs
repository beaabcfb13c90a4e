//! Kernels launched by CUDA's driver: what a driver is handed, shown by one whose launches the interpreter of PTX runs, and judged; and
//! what is said where a driver, a device or its memory cannot be had.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

/// The driver that `crates/cuda/examples/fake_cuda.rs` is, which `cargo test` builds beside the commands.
fn fake() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_assay")).parent().unwrap();
    let driver = folder.join("examples/libfake_cuda.so");
    assert!(driver.is_file(), "{} is missing: `cargo build --workspace --examples`", driver.display());
    driver
}

/// What a command came to, and what it called of the driver.
struct Ran {
    code: i32,
    text: String,
    stderr: String,
    calls: Vec<String>,
}

/// `assay ARGS` with a driver of these settings.
fn assay(settings: &str, args: &[&str]) -> Ran {
    let folder = TempDir::new().unwrap();
    let record = folder.path().join("calls");
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).env("ASSAY_CUDA_DRIVER", fake()).env("ASSAY_FAKE_CUDA", settings);
    let output = command.env("ASSAY_FAKE_CUDA_RECORD", &record).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let calls = fs::read_to_string(record).unwrap_or_default().lines().map(String::from).collect();
    let code = output.status.code().expect("not killed");
    Ran { code, text: text(output.stdout), stderr: text(output.stderr), calls }
}

/// `assay gradcheck` of a small batch.
fn gradcheck(settings: &str, id: &str, spec: &Value, shape: [usize; 3], dtype: &str) -> Ran {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.json");
    let recipe = json!({"shape": shape, "dtype": dtype, "regime": "normal", "seed": 1, "old_logp_noise_scale": 0.3, "masked_garbage": true});
    let kernel = json!({"enabled": true, "impl": id});
    fs::write(&config, json!({"batch": {"generate": recipe}, "spec": spec, "kernel": kernel}).to_string()).unwrap();
    assay(settings, &["gradcheck", "-q", "--config", config.to_str().unwrap()])
}

/// All that was made has been given back, once.
#[track_caller]
fn assert_freed(calls: &[String]) {
    let mut held = BTreeMap::<String, i32>::new();
    for call in calls {
        for (sign, by) in [('+', 1), ('-', -1)] {
            if let Some((_, made)) = call.split_once(sign) {
                let what: Vec<&str> = made.split(' ').take(2).collect();
                let what = if ["current", "context"].contains(&what[0]) { what[0].into() } else { what.join(" ") };
                *held.entry(what).or_default() += by;
            }
        }
    }
    held.retain(|_, count| *count != 0);
    assert!(held.is_empty(), "{held:?}\n{}", calls.join("\n"));
}

#[test]
fn what_a_driver_is_handed_computes_the_loss() {
    let sequence = json!({"ratio": {"level": "sequence"}, "entropy_coef": 0.01});
    let tempered = json!({"temperature": 0.7, "entropy_coef": 0.02});
    let cases = [
        ("gpu-one-pass-driver", &tempered, [2, 3, 300], "bf16", 1),
        ("gpu-one-pass-driver", &json!({}), [1, 2, 33_001], "f32", 1),
        ("gpu-two-pass-driver", &sequence, [2, 3, 1031], "f16", 2),
        ("gpu-two-pass-driver", &tempered, [2, 3, 257], "f32", 2),
    ];
    for (id, spec, shape, dtype, launches) in cases {
        let ran = gradcheck("shuffled=3", id, spec, shape, dtype);
        assert_eq!(ran.code, 0, "{id} {dtype}: {}{}\n{}", ran.text, ran.stderr, ran.calls.join("\n"));
        let launched: Vec<&String> = ran.calls.iter().filter(|call| call.starts_with("cuLaunchKernelEx")).collect();
        assert_eq!(launched.len(), launches, "{launched:?}");
        // A row of 132 KB lies over several CTAs. dlogits lie over the logits: one array is two arguments.
        assert_eq!(launched[0].contains("cluster [1, 1, 1]"), shape[2] < 33_001, "{launched:?}");
        let last = launched.last().unwrap();
        let arguments: Vec<&str> =
            last.split_once("arguments ").unwrap().1.trim_matches(['[', ']']).split(", ").collect();
        let distinct: BTreeSet<&&str> = arguments.iter().collect();
        assert_eq!(distinct.len() + 1, arguments.len(), "{last}");
        assert_freed(&ran.calls);
    }
}

/// On a chip of `sm_80` there are no clusters: `gpu-two-pass` runs, and `gpu-one-pass` is refused with it.
#[test]
fn an_older_chip_runs_what_it_can() {
    let ran = gradcheck("capability=8.0", "gpu-two-pass-driver", &json!({}), [1, 3, 300], "bf16");
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    assert_freed(&ran.calls);
    let list = assay("capability=8.0", &["list"]);
    let words = list.text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("gpu-one-pass-driver needs sm_90 and up"), "{words}");
}

#[test]
fn what_cannot_be_had_is_one_error_that_says_what_would_do() {
    let wide: [usize; 3] = [1, 2, 33_001];
    let small: [usize; 3] = [1, 3, 300];
    let one = "gpu-one-pass-driver";
    let cases: [(&str, &str, [usize; 3], &[&str]); 9] = [
        ("devices=0", one, small, &["has no device", "CUDA_VISIBLE_DEVICES", "native"]),
        ("version=11040", one, small, &["of CUDA 11.4", "expected 12.0 or newer", "PTX 8.0"]),
        ("capability=8.0", one, small, &["sm_80", one, "needs sm_90 and up", "gpu-two-pass-driver"]),
        ("capability=7.5", "gpu-two-pass-driver", small, &["sm_75", "needs sm_80 and up", "native"]),
        ("shared=20000", one, wide, &["grpo_one_pass", "bytes of shared memory", "up to 20000", "gpu-two-pass-driver"]),
        ("refuses=1", one, small, &["refused its PTX", "CUDA_ERROR_INVALID_PTX", "fatal: no PTX"]),
        ("memory=1700", one, small, &["the logits needs 1800 bytes", "1700 of 1700 are free", "fewer tokens"]),
        ("odd=1", one, small, &["array ids", "0x7f", "a multiple of 16"]),
        ("fail=cuLaunchKernelEx:1", one, small, &["launch grpo_one_pass", "CUDA_ERROR_UNKNOWN"]),
    ];
    for (settings, id, shape, parts) in cases {
        let ran = gradcheck(settings, id, &json!({}), shape, "bf16");
        assert_eq!((ran.code, ran.stderr.lines().count()), (2, 1), "{settings}: {}", ran.stderr);
        for part in parts {
            assert!(ran.stderr.contains(part), "{settings}: `{part}` not in: {}", ran.stderr);
        }
        assert_freed(&ran.calls);
    }
    let mut none = Command::new(env!("CARGO_BIN_EXE_assay"));
    none.args(["bench", "--impl", one, "--shape", "1x2x64"]).env("ASSAY_CUDA_DRIVER", "/nowhere/libcuda.so.1");
    let output = none.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for part in ["/nowhere/libcuda.so.1", "cannot be loaded", "ASSAY_CUDA_DRIVER", "native"] {
        assert!(stderr.contains(part), "`{part}` not in: {stderr}");
    }
}

/// Each kind of call fails in turn, at its first and at its last use: one error, and all that was made is given back.
#[test]
fn whatever_fails_all_that_was_made_is_given_back() {
    for (id, shape) in [("gpu-one-pass-driver", [1, 1, 33_001]), ("gpu-two-pass-driver", [1, 2, 64])] {
        let all = gradcheck("", id, &json!({}), shape, "f32");
        assert_eq!(all.code, 0, "{}{}", all.text, all.stderr);
        let mut uses = BTreeMap::<&str, usize>::new();
        for call in &all.calls {
            *uses.entry(call.split(' ').next().unwrap()).or_default() += 1;
        }
        // What gives back is tried once, and what fails then is lost; a device may not know its memory's clock.
        let spared = [
            "cuMemFree_v2",
            "cuModuleUnload",
            "cuEventDestroy_v2",
            "cuCtxPopCurrent_v2",
            "cuDevicePrimaryCtxRelease_v2",
        ];
        // These are asked again when all is done, where nobody minds.
        let once =
            ["cuDeviceGetAttribute", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuCtxPushCurrent_v2"];
        let mut tried = 0;
        for (name, uses) in uses.iter().filter(|(name, _)| !spared.contains(name)) {
            let last = if once.contains(name) { 1 } else { *uses };
            // What the other kernel has shown is not tried again.
            let places = if id == "gpu-one-pass-driver" { BTreeSet::from([1, last]) } else { BTreeSet::from([last]) };
            for place in places.into_iter().filter(|&place| id == "gpu-one-pass-driver" || place > 1) {
                let ran = gradcheck(&format!("fail={name}:{place}"), id, &json!({}), shape, "f32");
                let what = format!("{id}, {name}:{place}: {}\n{}", ran.stderr, ran.calls.join("\n"));
                assert_eq!((ran.code, ran.stderr.lines().count()), (2, 1), "{what}");
                assert!(ran.stderr.contains("CUDA_ERROR_UNKNOWN"), "{what}");
                assert_freed(&ran.calls);
                tried += 1;
            }
        }
        println!("{id}: {tried} calls failed");
        assert!(tried >= if id == "gpu-one-pass-driver" { 22 } else { 6 }, "{tried} calls");
    }
}

/// The launch's own clock, the device's bandwidth, and the page that shows both.
#[test]
fn a_bench_counts_against_the_devices_own_figure() {
    let folder = TempDir::new().unwrap();
    let json = folder.path().join("bench.json");
    let args = ["bench", "-q", "--impl", "gpu-two-pass-driver", "--shape", "1x2x257", "--dtype", "f32", "--json"];
    let ran = assay("clock=2619000", &[&args, &[json.to_str().unwrap()][..]].concat());
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    assert_freed(&ran.calls);
    let bench: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(
        (&bench["device"], &bench["device_gb_per_s_from"]),
        (&json!("NVIDIA Fake"), &json!("device")),
        "{bench}"
    );
    // Each kernel takes a millisecond of that clock; the bus has 5120 bits, twice a clock.
    assert!((bench["kernel_s_p50"].as_f64().unwrap() - 2e-3).abs() < 1e-9, "{bench}");
    assert!((bench["device_gb_per_s"].as_f64().unwrap() - 3352.32).abs() < 1e-6, "{bench}");
    let moved = 2.0 * 2.0 * 257.0 * 4.0;
    let share = moved / 2e-3 / 3352.32e9;
    assert!((bench["device_share"].as_f64().unwrap() / share - 1.0).abs() < 1e-9, "{bench}");
    assert_eq!(bench["argument_bytes"], json!(2 * 257 * 4 + 2 * 4 + 4 + 4));
    assert_eq!((&bench["alias_bytes"], &bench["temp_bytes"]), (&json!(2056), &json!(2 * 2 * 32)));
    let page = folder.path().join("page.html");
    let report = assay("", &["report", json.to_str().unwrap(), "-o", page.to_str().unwrap()]);
    assert_eq!(report.code, 0, "{}", report.stderr);
    let page = fs::read_to_string(page).unwrap();
    for said in ["NVIDIA Fake", "kernels alone", "GB/s (device)", "of which is reached"] {
        assert!(page.contains(said), "{said}");
    }
    // A driver that does not say what its memory gives.
    let ran = assay("clock=0", &[&args, &[json.to_str().unwrap()][..]].concat());
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    let bench: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert!(bench.get("device_share").is_none() && bench.get("kernel_s_p50").is_some(), "{bench}");
}
