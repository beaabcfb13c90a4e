//! The command line with plugins and devices that cannot be had, and with those that can.
#![cfg(feature = "pjrt")]

use assert_cmd::cargo::cargo_bin_cmd;

const FIXTURE: &str = "fixtures/qwen_tiny.safetensors";

/// Runs `assay` and returns its exit code, stdout and stderr.
fn assay(args: &[&str], plugin: Option<&str>) -> (i32, String, String) {
    let mut command = cargo_bin_cmd!("assay");
    command.args(args).env_remove("ASSAY_PJRT_PLUGIN");
    if let Some(plugin) = plugin {
        command.env("ASSAY_PJRT_PLUGIN", plugin);
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn expect_refused(args: &[&str], plugin: Option<&str>, wanted: &[&str]) {
    let (code, _, stderr) = assay(args, plugin);
    assert_eq!(code, 2, "{stderr}");
    for wanted in wanted {
        assert!(stderr.contains(wanted), "`{wanted}` in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn a_plugin_that_was_asked_for_and_cannot_be_loaded_is_refused() {
    let missing = &["PJRT plugin /nowhere/plugin.so: cannot be loaded", "No such file"];
    expect_refused(&["replay", FIXTURE, "--plugin", "/nowhere/plugin.so"], None, missing);
    expect_refused(&["replay", FIXTURE], Some("/nowhere/plugin.so"), missing);
    expect_refused(&["replay", FIXTURE, "--plugin", "Cargo.toml"], None, &["Cargo.toml: cannot be loaded"]);
    expect_refused(
        &["gradcheck", "--config", "configs/gradcheck_qwen.yaml", "--plugin", "/nowhere/plugin.so"],
        None,
        missing,
    );
}

#[test]
fn the_option_goes_before_the_environment() {
    let args = ["replay", FIXTURE, "--plugin", ".plugins/pjrt_cpu.so", "--impl", "xla", "-q"];
    assert_eq!(assay(&args, Some("/nowhere/plugin.so")).0, 0);
}

#[test]
fn list_says_why_an_implementation_cannot_run() {
    let (code, stdout, _) = assay(&["list"], Some("/nowhere/plugin.so"));
    assert_eq!(code, 0);
    assert!(stdout.contains("cannot be"), "{stdout}");
}

#[test]
fn a_device_count_that_the_plugin_cannot_give_is_refused() {
    let args = ["replay", FIXTURE, "--impl", "xla-vocab", "--devices", "16"];
    expect_refused(&args, None, &["device count: got 16, expected 1 to 8 (platform cpu)"]);
}

#[test]
fn a_device_count_that_the_implementation_never_takes_is_ignored_by_name() {
    let (code, stdout, _) = assay(&["replay", FIXTURE, "--impl", "xla-mesh", "--devices", "3,4"], None);
    assert_eq!(code, 0, "{stdout}");
    assert!(stdout.contains("ignored  qwen_tiny logits old_logps with xla-mesh ×3:"), "{stdout}");
}

#[test]
fn replay_on_several_counts_says_which_outputs_keep_their_bits() {
    let (code, stdout, stderr) = assay(&["replay", FIXTURE, "--impl", "xla-rows", "--devices", "1,2,4"], None);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    for devices in ["×2", "×4"] {
        let line = format!("bits     qwen_tiny logits old_logps with xla-rows: {devices} has those of ×1 in ");
        assert!(stdout.contains(&line), "{stdout}");
    }
}

#[test]
fn a_device_count_of_zero_is_refused() {
    expect_refused(&["replay", "--devices", "0"], None, &["--devices", "zero"]);
}
