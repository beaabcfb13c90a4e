//! Kernels launched by CUDA's driver: what a driver is handed, shown by one whose launches the interpreter of PTX runs, and judged; and
//! what is said where a driver, a device or its memory cannot be had.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

/// The driver that `crates/cuda/examples/fake_cuda.rs` is, which `cargo test` builds beside the commands.
pub(crate) fn fake() -> PathBuf {
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
fn driver_computes_the_loss_from_what_it_is_handed() {
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
fn driver_of_an_older_chip_runs_what_it_can() {
    let ran = gradcheck("capability=8.0", "gpu-two-pass-driver", &json!({}), [1, 3, 300], "bf16");
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    assert_freed(&ran.calls);
    let list = assay("capability=8.0", &["list"]);
    let words = list.text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("gpu-one-pass-driver needs sm_90 and up"), "{words}");
}

#[test]
fn driver_that_cannot_be_had_is_one_error_with_a_remedy() {
    let wide: [usize; 3] = [1, 2, 33_001];
    let small: [usize; 3] = [1, 3, 300];
    let vast = [1, 1, 400_000];
    let (one, two) = ("gpu-one-pass-driver", "gpu-two-pass-driver");
    let cases: [(&str, &str, [usize; 3], &[&str]); 17] = [
        ("devices=0", one, small, &["has no device", "CUDA_VISIBLE_DEVICES", "native"]),
        ("version=11040", one, small, &["of CUDA 11.4", "expected 12.0 or newer", "PTX 8.0"]),
        ("capability=8.0", one, small, &["sm_80", one, "needs sm_90 and up", "gpu-two-pass-driver"]),
        ("capability=7.5", "gpu-two-pass-driver", small, &["sm_75", "needs sm_80 and up", "native"]),
        ("shared=20000", one, wide, &["grpo_one_pass", "bytes of shared memory", "up to 20000", "gpu-two-pass-driver"]),
        ("refuses=1", one, small, &["refused its PTX", "CUDA_ERROR_INVALID_PTX", "fatal: no PTX"]),
        ("memory=1700", one, small, &["the logits needs 1800 bytes", "1700 of 1700 are free", "fewer tokens"]),
        ("odd=1", one, small, &["array ids", "0x7f", "a multiple of 4", "copy it"]),
        ("fail=cuLaunchKernelEx:1", one, small, &["launch grpo_one_pass", "CUDA_ERROR_UNKNOWN"]),
        ("fail=cuFuncSetAttribute:1", one, vast, &["ask for", "bytes of dynamic shared memory", "CUDA_ERROR_UNKNOWN"]),
        (
            "capability=10.0,version=12040",
            one,
            small,
            &["of CUDA 12.4", "expected 12.7", "PTX 8.6", "sm_100", "update"],
        ),
        (
            "capability=10.3,version=12040",
            two,
            small,
            &["of CUDA 12.4", "expected 12.7", "PTX 8.6", "sm_100", "update"],
        ),
        ("clusters=0", one, wide, &["NVIDIA Fake", "grpo_one_pass", "no room for a cluster of", "MIG", two]),
        ("fail=cuOccupancyMaxActiveClusters:1:912", one, wide, &["no room for a cluster of", "MIG", two]),
        ("fail=cuCtxPushCurrent_v2:2:709", one, small, &["CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaDeviceReset"]),
        (
            "fail=cuModuleLoadDataEx:1:201",
            one,
            small,
            &["load the kernel", "CUDA_ERROR_INVALID_CONTEXT", "start the process"],
        ),
        ("fail=cuLaunchKernelEx:1:709", one, small, &["launch grpo_one_pass", "cuDevicePrimaryCtxReset"]),
    ];
    for (settings, id, shape, parts) in cases {
        let ran = gradcheck(settings, id, &json!({}), shape, "bf16");
        assert_eq!((ran.code, ran.stderr.lines().count()), (2, 1), "{settings}: {}", ran.stderr);
        for part in parts {
            assert!(ran.stderr.contains(part), "{settings}: `{part}` not in: {}", ran.stderr);
        }
        let launched = ran.calls.iter().filter(|call| call.starts_with("cuLaunchKernelEx grpo")).count();
        assert_eq!(launched, 0, "{settings}");
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

/// A B200 is given the text for `sm_100`, with two f32 at a time, by a driver that takes it.
#[test]
fn b200_runs_its_own_text() {
    let spec = json!({"temperature": 0.7, "entropy_coef": 0.02});
    for (id, shape, launches) in [("gpu-one-pass-driver", [1, 2, 33_001], 1), ("gpu-two-pass-driver", [2, 3, 257], 2)] {
        let ran = gradcheck("capability=10.0,version=12080", id, &spec, shape, "bf16");
        assert_eq!(ran.code, 0, "{id}: {}{}", ran.text, ran.stderr);
        let count = |start: &str| ran.calls.iter().filter(|call| call.starts_with(start)).count();
        assert_eq!((count("cuLaunchKernelEx"), count("cuModuleLoadDataEx 8.6 sm_100")), (launches, launches), "{id}");
        assert_freed(&ran.calls);
    }
}

/// A kernel with dynamic shared memory wishes that none of it is kept as a cache, and one without does not.
#[test]
fn carveout_is_asked_for_where_shared_memory_is_dynamic() {
    for (id, wishes) in [("gpu-one-pass-driver", 1), ("gpu-two-pass-driver", 0)] {
        let ran = gradcheck("", id, &json!({}), [1, 2, 64], "f32");
        let wished = ran.calls.iter().filter(|call| call.starts_with("cuFuncSetAttribute grpo_one_pass 9 100")).count();
        assert_eq!((ran.code, wished), (0, wishes), "{id}: {}", ran.calls.join("\n"));
        // A device that knows no such thing runs it as well.
        let ran = gradcheck("fail=cuFuncSetAttribute:1", id, &json!({}), [1, 2, 64], "f32");
        assert_eq!(ran.code, 0, "{id}: {}{}", ran.text, ran.stderr);
    }
}

/// A kernel that needs no cluster runs where none has room.
#[test]
fn cluster_without_room_leaves_what_needs_none() {
    for (id, shape) in [("gpu-two-pass-driver", [1, 2, 33_001]), ("gpu-one-pass-driver", [1, 2, 64])] {
        let ran = gradcheck("clusters=0", id, &json!({}), shape, "bf16");
        assert_eq!(ran.code, 0, "{id}: {}{}", ran.text, ran.stderr);
    }
}

/// Each kind of call fails in turn, at its first and at its last use: one error, and all that was made is given back.
#[test]
fn driver_gives_back_all_that_was_made_whatever_fails() {
    for (id, shape) in [("gpu-one-pass-driver", [1, 1, 33_001]), ("gpu-two-pass-driver", [1, 2, 64])] {
        let all = gradcheck("", id, &json!({}), shape, "f32");
        assert_eq!(all.code, 0, "{}{}", all.text, all.stderr);
        let mut uses = BTreeMap::<&str, usize>::new();
        for call in &all.calls {
            *uses.entry(call.split(' ').next().unwrap()).or_default() += 1;
        }
        // What gives back is tried once, and what fails then is lost. A wish may be refused.
        let spared = [
            "cuFuncSetAttribute",
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            "cuOccupancyMaxActiveClusters",
            "cuMemFree_v2",
            "cuModuleUnload",
            "cuEventDestroy_v2",
            "cuCtxPopCurrent_v2",
            "cuDevicePrimaryCtxRelease_v2",
        ];
        // These are asked again when all is done, or of what need not be known.
        let once = [
            "cuFuncGetAttribute",
            "cuDeviceGetAttribute",
            "cuDeviceGetCount",
            "cuDeviceGet",
            "cuDeviceGetName",
            "cuCtxPushCurrent_v2",
        ];
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
        assert!(tried >= if id == "gpu-one-pass-driver" { 21 } else { 6 }, "{tried} calls");
    }
}

/// `assay bench` of a small batch, and what it wrote.
fn bench(settings: &str, id: &str, folder: &TempDir) -> (Ran, Value) {
    let json = folder.path().join("bench.json");
    let args = ["bench", "-q", "--impl", id, "--shape", "1x2x257", "--dtype", "f32", "--json", json.to_str().unwrap()];
    let ran = assay(settings, &args);
    let figures = fs::read_to_string(&json).map_or(Value::Null, |text| serde_json::from_str(&text).unwrap());
    (ran, figures)
}

#[track_caller]
fn assert_near(value: &Value, expected: f64) {
    let value = value.as_f64().unwrap_or_else(|| panic!("{value}, expected {expected}"));
    assert!((value / expected - 1.0).abs() < 1e-5, "{value}, expected {expected}");
}

/// The kernels' own clock, the device's bandwidth, a copy on the device, and the page that shows them.
#[test]
fn bench_counts_against_the_devices_own_figures() {
    let folder = TempDir::new().unwrap();
    let (ran, bench_of_two) = bench("clock=2619000", "gpu-two-pass-driver", &folder);
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    assert_freed(&ran.calls);
    let of = |key: &str| &bench_of_two[key];
    assert_eq!((of("device"), of("device_gb_per_s_from")), (&json!("NVIDIA Fake"), &json!("device")));
    // Each kernel takes a millisecond of that clock, a copy a quarter; the bus has 5120 bits, twice a clock.
    let moved = 2.0 * 2.0 * 257.0 * 4.0;
    assert_near(of("kernel_s_p50"), 2e-3);
    assert_near(of("kernel_s_min"), 2e-3);
    assert_near(of("kernel_gb_per_s"), moved / 2e-3 / 1e9);
    assert_near(of("device_gb_per_s"), 3352.32);
    assert_near(of("device_share"), moved / 2e-3 / 3352.32e9);
    assert_near(of("device_copy_s_p50"), 0.25e-3);
    assert_near(of("device_copy_gb_per_s"), moved / 0.25e-3 / 1e9);
    assert_near(of("device_copy_share"), 0.125);
    assert_eq!((of("kernel_launches"), of("argument_bytes")), (&json!(20), &json!(2 * 257 * 4 + 2 * 4 + 4 + 4)));
    assert_eq!((of("alias_bytes"), of("temp_bytes")), (&json!(2056), &json!(2 * 2 * 32)));
    // The copy from which steps are restored is not counted: no step of a program has one.
    assert_eq!(of("mem_after_run"), &json!(2056 + 2 * 4 + 4 + 4 + 2 * 2 * 32));
    let names: Vec<&Value> = of("kernels").as_array().unwrap().iter().map(|kernel| &kernel["name"]).collect();
    assert_eq!(names, ["grpo_statistics", "grpo_dlogits"]);
    for kernel in of("kernels").as_array().unwrap() {
        assert_near(&kernel["s_p50"], 1e-3);
        let said = ["registers", "local_bytes", "binary_version", "ptx_version", "clusters"].map(|key| &kernel[key]);
        assert_eq!(said, [&json!(64), &json!(0), &json!(90), &json!(80), &Value::Null], "{kernel}");
    }
    let page = folder.path().join("page.html");
    let report =
        assay("", &["report", folder.path().join("bench.json").to_str().unwrap(), "-o", page.to_str().unwrap()]);
    assert_eq!(report.code, 0, "{}", report.stderr);
    let page = fs::read_to_string(page).unwrap();
    let said =
        ["NVIDIA Fake", "kernels alone", "GB/s (device)", "of the copy's rate", "grpo_dlogits", "sm_90", "12.5 %"];
    for said in said {
        assert!(page.contains(said), "{said}");
    }
    // A driver that does not say what its memory gives, and of a kernel only what must be known.
    let (ran, silent) = bench("clock=0,silent=1", "gpu-one-pass-driver", &folder);
    assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
    assert!(silent.get("device_share").is_none() && silent.get("kernel_s_p50").is_some(), "{silent}");
    let kernel = &silent["kernels"][0];
    let unknown = ["registers", "local_bytes", "binary_version", "ctas_a_multiprocessor"].map(|key| &kernel[key]);
    assert_eq!((unknown, &kernel["dynamic_shared_bytes"]), ([&Value::Null; 4], &json!(1040)), "{kernel}");
}

/// Logits are sent to the device once; every launch has them again from a copy there, and the device waits for nobody
/// between launches.
#[test]
fn bench_restores_logits_on_the_device() {
    for (id, kernels) in [("gpu-one-pass-driver", 1), ("gpu-two-pass-driver", 2)] {
        let folder = TempDir::new().unwrap();
        let (ran, figures) = bench("", id, &folder);
        assert_eq!(ran.code, 0, "{}{}", ran.text, ran.stderr);
        let logits = |call: &&String| call.starts_with("cuMemcpyHtoD_v2") && call.ends_with(" 2056");
        assert_eq!(ran.calls.iter().filter(logits).count(), 1, "{id}");
        let names: Vec<&str> = ran.calls.iter().map(|call| call.split(' ').next().unwrap()).collect();
        let waits = |calls: &[&str]| calls.iter().filter(|&&call| call == "cuEventSynchronize").count();
        // Between two waits: what was timed alone, with as many copies as there are launches of all kernels.
        let timed = names.split(|&call| call == "cuEventSynchronize").max_by_key(|calls| calls.len()).unwrap();
        let count = |of: &str| timed.iter().filter(|&&call| call == of).count();
        let launches = 5 + figures["kernel_launches"].as_u64().unwrap() as usize;
        assert_eq!(
            (waits(timed), count("cuMemcpyDtoDAsync_v2"), count("cuLaunchKernelEx")),
            (0, launches, launches * kernels),
            "{id}"
        );
        // So it is of every step; one copy more made what all are restored from.
        let all = |of: &str| names.iter().filter(|&&call| call == of).count();
        assert_eq!(all("cuMemcpyDtoDAsync_v2"), 1 + all("cuLaunchKernelEx") / kernels, "{id}");
        assert!(["cuMemcpyHtoD_v2", "cuMemAlloc_v2"].iter().all(|call| count(call) == 0), "{id}: {timed:?}");
    }
}

/// Launches that leave another answer than the one that was judged: in dlogits, and in what is given of each token.
#[test]
fn bench_of_launches_that_differ_is_refused() {
    let cases = [
        ("gpu-one-pass-driver", 4, "dlogits has 1 of 514 numbers"),
        ("gpu-one-pass-driver", 5, "logp has 1 of 2 numbers"),
        ("gpu-two-pass-driver", 5, "dlogits has 1 of 514 numbers"),
        ("gpu-two-pass-driver", 4, " of 2 numbers"),
    ];
    for (id, argument, said) in cases {
        let folder = TempDir::new().unwrap();
        let (ran, figures) = bench(&format!("flips={argument}"), id, &folder);
        assert_eq!((ran.code, ran.stderr.lines().count(), &figures), (2, 1, &Value::Null), "{id}: {}", ran.stderr);
        for part in [id, said, "after 20 launches", "expected the same bits", "nothing is reported"] {
            assert!(ran.stderr.contains(part), "{id}: `{part}` not in: {}", ran.stderr);
        }
        assert_freed(&ran.calls);
    }
}

/// Each kind of call that only a bench makes, or makes more often, fails at its last use.
#[test]
fn bench_that_fails_gives_all_back() {
    let folder = TempDir::new().unwrap();
    let (all, _) = bench("", "gpu-two-pass-driver", &folder);
    for name in ["cuMemcpyDtoDAsync_v2", "cuEventCreate", "cuEventRecord", "cuEventElapsedTime", "cuLaunchKernelEx"] {
        let uses = all.calls.iter().filter(|call| call.split(' ').next() == Some(name)).count();
        let (ran, _) = bench(&format!("fail={name}:{uses}"), "gpu-two-pass-driver", &folder);
        assert_eq!((ran.code, ran.stderr.lines().count()), (2, 1), "{name}:{uses}: {}", ran.stderr);
        assert!(ran.stderr.contains("CUDA_ERROR_UNKNOWN"), "{name}: {}", ran.stderr);
        assert_freed(&ran.calls);
    }
}
