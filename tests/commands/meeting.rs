//! The way in which the CTAs of a cluster meet, which `ASSAY_GPU_MEETING` chooses.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;
use tempfile::TempDir;

/// Runs `assay ARGS` with this value of the variable, and with the driver without a device.
fn assay_meeting(by: Option<&str>, args: &[&str]) -> Output {
    let folder = Path::new(env!("CARGO_BIN_EXE_assay")).parent().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).env_remove("ASSAY_GPU_MEETING").envs(by.map(|by| ("ASSAY_GPU_MEETING", by)));
    command.env("ASSAY_CUDA_DRIVER", folder.join("examples/libfake_cuda.so")).env("ASSAY_FAKE_CUDA", "shuffled=5");
    command.output().unwrap()
}

/// The text of the one-pass kernel that `assay emit` writes.
fn emitted(by: Option<&str>) -> String {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("kernel");
    let mut args = vec!["emit", "--target", "h100", "--impl", "gpu-one-pass", "--shape", "1x2x33001", "-o"];
    args.push(to.to_str().unwrap());
    let output = assay_meeting(by, &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(to.join("grpo_one_pass.ptx")).unwrap()
}

#[test]
fn meeting_variable_changes_the_emitted_kernel() {
    let by_default = emitted(None);
    assert!(by_default.contains("barrier.cluster.arrive.release") && by_default.contains(".version 8.0"));
    assert_eq!(emitted(Some("barrier")), by_default);
    let by_stores = emitted(Some("stores"));
    assert!(by_stores.contains("st.async") && by_stores.contains(".version 8.1"));
    assert!(!by_stores.contains("arrive.release"));
}

#[test]
fn meeting_variable_of_another_value_is_refused() {
    let args = ["emit", "--target", "h100", "--impl", "gpu-one-pass", "--shape", "1x2x33001", "-o", "/nowhere"];
    let output = assay_meeting(Some("both"), &args);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{told}");
    let expected = "gpu-one-pass does not support ASSAY_GPU_MEETING both; it supports `barrier` and `stores`";
    assert!(told.contains(expected), "{told}");
}

/// The kernel that the driver is given meets so too, and computes the loss.
#[test]
fn meeting_by_stores_through_the_driver_is_right() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.json");
    let recipe = json!({"shape": [1, 2, 33_001], "dtype": "f32", "regime": "normal", "seed": 1,
        "old_logp_noise_scale": 0.3, "masked_garbage": true});
    let kernel = json!({"enabled": true, "impl": "gpu-one-pass-driver"});
    let spec = json!({"entropy_coef": 0.02});
    fs::write(&config, json!({"batch": {"generate": recipe}, "spec": spec, "kernel": kernel}).to_string()).unwrap();
    let gradcheck = |by| assay_meeting(Some(by), &["gradcheck", "-q", "--config", config.to_str().unwrap()]);
    let output = gradcheck("stores");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = gradcheck("fences");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && told.contains("ASSAY_GPU_MEETING fences"), "{told}");
}
