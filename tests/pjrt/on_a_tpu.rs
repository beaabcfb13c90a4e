//! What a TPU is given, shown by a plugin that says it is one: kernels, not loops.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cpu_plugins;
use serde_json::{Value, json};

/// The plugin that `crates/pjrt/examples/fake_tpu.rs` is, which `cargo test` builds beside the commands.
pub(super) fn fake() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_assay")).parent().unwrap();
    let plugin = folder.join("examples/libfake_tpu.so");
    assert!(plugin.is_file(), "{} is missing: `cargo build --examples --all-features`", plugin.display());
    plugin
}

/// What `assay gradcheck` of `implementation` has the plugin compile, and what it reports if that runs.
fn given_to_a_tpu(implementation: &str, spec: &Value, dtype: &str, loops: bool) -> (String, Option<Value>) {
    given_to(
        [("ASSAY_FAKE_TPU_PLATFORM", "tpu"), ("ASSAY_FAKE_TPU_KIND", "TPU v6 lite")],
        implementation,
        spec,
        dtype,
        loops,
    )
}

/// The same of another device.
fn given_to(
    device: impl IntoIterator<Item = (&'static str, &'static str)>,
    implementation: &str,
    spec: &Value,
    dtype: &str,
    loops: bool,
) -> (String, Option<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let recipe = json!({"shape": [2, 3, 300], "dtype": dtype, "regime": "small", "seed": 1, "old_logp_noise_scale": 0.3, "masked_garbage": false});
    let batch = if implementation.contains("lm-head") {
        json!({"generate_head": {"hidden": 16, "layout": "hv", "rounds_logits": true, "recipe": recipe}})
    } else {
        json!({"generate": recipe})
    };
    let config = json!({"batch": batch, "spec": spec, "kernel": {"enabled": true, "impl": implementation}});
    fs::write(at("config.json"), config.to_string()).unwrap();
    let mut gradcheck = Command::new(env!("CARGO_BIN_EXE_assay"));
    gradcheck.arg("gradcheck").arg("--config").arg(at("config.json")).arg("--plugin").arg(fake());
    gradcheck.arg("-q").arg("--json").arg(at("report.json"));
    gradcheck.env("ASSAY_FAKE_TPU_PLUGIN", fs::canonicalize(cpu_plugins()[0]).unwrap());
    gradcheck.env("ASSAY_FAKE_TPU_PROGRAM", at("program.mlir")).envs(device);
    if loops {
        gradcheck.env("ASSAY_LOOPS", "1");
    }
    let output = gradcheck.output().unwrap();
    let program = fs::read_to_string(at("program.mlir"));
    let program = program.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let report = fs::read_to_string(at("report.json")).ok().map(|text| serde_json::from_str(&text).unwrap());
    (program, report)
}

#[test]
fn tpu_runs_kernels_as_compiled_ahead_of_time() {
    for (implementation, kernels) in [("tile-one-pass", 1), ("tile-two-pass", 2)] {
        for (dtype, element) in [("bf16", "bf16"), ("f16", "i16"), ("f32", "f32")] {
            let (program, report) = given_to_a_tpu(implementation, &json!({}), dtype, false);
            let calls = program.matches("stablehlo.custom_call @tpu_custom_call").count();
            assert_eq!(calls, kernels, "{implementation} {dtype}");
            assert!(!program.contains("stablehlo.while"), "{implementation} {dtype} has loops");
            // Logits are rows, row-major, and dlogits are written over them, by the kernel and by the program.
            let parameter = format!("@main(%0: tensor<1x6x300x{element}> {{");
            let parameters = program.lines().find(|line| line.contains(&parameter)).expect("logits in rows");
            for part in ["tf.aliasing_output = 0 : i32", "mhlo.layout_mode = \"{2,1,0}\""] {
                assert!(parameters.contains(part), "{implementation} {dtype}: no {part} in {parameters}");
            }
            assert!(program.contains("#stablehlo.output_operand_alias<"), "{implementation} {dtype}");
            // A CPU has no such kernel.
            assert_eq!(report, None, "{implementation} {dtype}");
        }
    }
}

/// libtpu lays out what it is sent as pads least, and a program whose logits are row-major must not be given any other.
#[test]
fn tpu_logits_laid_out_in_columns_are_copied_row_major() {
    let v6e = [("ASSAY_FAKE_TPU_PLATFORM", "tpu"), ("ASSAY_FAKE_TPU_KIND", "TPU v6 lite")];
    let (program, report) = given_to(v6e, "xla", &json!({}), "f32", false);
    assert!(program.contains("module @grpo") && report.is_some(), "row-major as they come: nothing is copied");
    let in_columns = v6e.into_iter().chain([("ASSAY_FAKE_TPU_LAYOUT", "columns")]);
    let (program, report) = given_to(in_columns, "xla", &json!({}), "f32", false);
    // The program compiled last.
    let copy = "@main(%0: tensor<2x3x300xf32>) -> (tensor<2x3x300xf32> {mhlo.layout_mode = \"{2,1,0}\"})";
    assert!(program.contains(copy), "{program}");
    assert!(report.is_some(), "and the program runs on the copy");
}

/// A GPU that kernels are written for is given PTX, in place, its tile kernels as loops.
#[test]
fn gpu_runs_ptx() {
    let h100 = [("ASSAY_FAKE_TPU_PLATFORM", "cuda"), ("ASSAY_FAKE_TPU_KIND", "NVIDIA H100 80GB HBM3")];
    for dtype in ["bf16", "f16", "f32"] {
        let (program, report) = given_to(h100, "gpu-one-pass", &json!({}), dtype, false);
        assert_eq!(program.matches("stablehlo.custom_call @__gpu$xla.gpu.ptx").count(), 1, "{dtype}");
        assert!(program.contains(".visible .entry") && program.contains("#stablehlo.output_operand_alias<"), "{dtype}");
        // A CPU has no such kernel.
        assert_eq!(report, None, "{dtype}");
    }
    // In the loop over the chunks of an LM head.
    let (program, report) = given_to(h100, "gpu-lm-head", &json!({}), "bf16", false);
    assert!(program.contains("stablehlo.while") && program.contains(".entry grpo_one_pass"));
    assert_eq!(program.matches("stablehlo.custom_call @__gpu$xla.gpu.ptx").count(), 1);
    assert_eq!(report, None);
    let (program, report) = given_to(h100, "tile-one-pass", &json!({}), "f32", false);
    assert!(program.contains("stablehlo.while") && !program.contains("custom_call @"));
    let report = report.expect("a CPU runs loops");
    assert!(report["checks"].as_array().expect("checks").iter().all(|check| check["lowering"] == "loops"), "{report}");
}

#[test]
fn tpu_runs_loops_if_asked_and_reports_say_so() {
    let (program, report) = given_to_a_tpu("tile-one-pass", &json!({}), "f32", true);
    assert!(!program.contains("tpu_custom_call") && program.contains("stablehlo.while"));
    let report = report.expect("a CPU runs loops");
    let checks = report["checks"].as_array().expect("checks");
    assert!(!checks.is_empty() && checks.iter().all(|check| check["lowering"] == "loops"), "{report}");
    // What has no tile kernel is written in one way alone.
    let (program, report) = given_to_a_tpu("xla", &json!({}), "f32", false);
    assert!(!program.contains("tpu_custom_call"));
    let report = report.expect("a CPU runs XLA's operations");
    assert!(report["checks"].as_array().expect("checks").iter().all(|check| check["lowering"].is_null()), "{report}");
}

/// A CPU plugin that knows no `cpu_device_count` runs on the devices that it has, which are fewer than are asked for.
#[test]
fn cpu_plugin_without_the_option_has_its_default_devices() {
    let devices = |platform: &str| {
        let mut list = Command::new(env!("CARGO_BIN_EXE_assay"));
        list.arg("list").arg("--plugin").arg(if platform == "cpu" { fake() } else { cpu_plugins()[0].into() });
        list.env("ASSAY_FAKE_TPU_PLUGIN", fs::canonicalize(cpu_plugins()[0]).unwrap());
        list.env("ASSAY_FAKE_TPU_PLATFORM", platform);
        let output = list.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        let line = text.lines().find(|line| line.contains(" xla-rows ") && line.contains(" yes ")).expect("it runs");
        line.split('┆').nth(3).expect("device counts").trim().to_string()
    };
    assert_eq!(devices("any, and not asked for"), "1,2,4,8");
    let own = devices("cpu");
    assert!(["1", "1,2", "1,2,4"].contains(&own.as_str()), "{own}");
}
