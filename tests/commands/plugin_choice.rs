//! The command line with plugins and devices that cannot be had, and with those that can.
use std::env;
use std::fs;
use std::path::Path;

use crate::common::command::command;

const FIXTURE: &str = "fixtures/qwen_tiny.safetensors";

/// Runs `assay` and returns its exit code, stdout and stderr.
fn assay(args: &[&str], plugin: Option<&str>) -> (i32, String, String) {
    let mut command = command();
    command.args(args).env_remove("ASSAY_PJRT_PLUGIN");
    if let Some(plugin) = plugin {
        command.env("ASSAY_PJRT_PLUGIN", plugin);
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn expect_refused(args: &[&str], plugin: Option<&str>, wanted: &[&str]) {
    let (code, stdout, stderr) = assay(args, plugin);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    for wanted in wanted {
        assert!(stderr.contains(wanted), "`{wanted}` in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn plugin_asked_for_that_cannot_be_loaded_is_refused() {
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
fn plugin_option_goes_before_the_environment() {
    let args = ["replay", FIXTURE, "--plugin", ".plugins/pjrt_cpu.so", "--impl", "xla", "-q"];
    assert_eq!(assay(&args, Some("/nowhere/plugin.so")).0, 0);
}

#[test]
fn list_of_a_plugin_that_does_not_load_exits_with_2() {
    for more in [&["-q"][..], &["--matrix", "-q"]] {
        let args = [&["list", "--plugin", "/nowhere/plugin.so"], more].concat();
        expect_refused(&args, None, &["PJRT plugin /nowhere/plugin.so: cannot be loaded"]);
    }
}

#[test]
fn list_says_why_an_implementation_cannot_run() {
    let (code, stdout, stderr) = assay(&["list"], Some("/nowhere/plugin.so"));
    assert_eq!(code, 2);
    assert!(stderr.contains("/nowhere/plugin.so: cannot be loaded"), "{stderr}");
    // Once, in full, though broken over lines, and for all that share it.
    let words = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let reason =
        "tile-lm-head-vocab-scattered: PJRT plugin /nowhere/plugin.so: cannot be loaded: No such file or directory";
    assert_eq!(words.matches(reason).count(), 1, "{stdout}");
    assert_eq!(words.matches("plugin.so: cannot be loaded").count(), 1, "{stdout}");
    assert!(words.contains("│ xla ┆ no ┆ f32,bf16,f16 ┆ – ┆"), "{stdout}");
    assert!(stdout.lines().all(|line| line.chars().count() <= 100), "{stdout}");
}

/// A folder that somebody else has packed: nothing in it may be loaded or run.
#[test]
fn plugin_of_the_working_directory_is_never_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let stranger = folder.path().join(".plugins");
    fs::create_dir(&stranger).unwrap();
    let fake = Path::new(env!("CARGO_BIN_EXE_assay")).with_file_name("examples").join("libfake_tpu.so");
    for name in ["pjrt_cpu.so", "libtpu.so", "xla_cuda_plugin.so"] {
        fs::copy(&fake, stranger.join(name)).unwrap();
    }
    for name in ["pjrt_cpu.so", "pjrt_cpu_0_81.so"] {
        fs::copy(&fake, folder.path().join(name)).unwrap();
    }
    let installed = env::current_dir().unwrap().join(".plugins/pjrt_cpu.so");
    let mut list = command();
    list.arg("list").env_remove("ASSAY_PJRT_PLUGIN").env("ASSAY_FAKE_TPU_PLUGIN", &installed).current_dir(&folder);
    let listed = list.output().unwrap();
    let stdout = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.status.success() && stdout.contains("devices   8 of cpu"), "{stdout}");
    let words = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(&format!("plugin {} (C API", installed.display())), "{stdout}");
}

#[test]
fn run_seconds_beyond_the_clock_are_a_long_limit() {
    let mut replay = command();
    replay.args(["replay", FIXTURE, "--logits", "logits", "--impl", "xla", "-q"]);
    let output = replay.env("ASSAY_RUN_SECONDS", u64::MAX.to_string()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn replay_says_which_plugin_it_has_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("replay.json");
    let args = ["replay", FIXTURE, "--logits", "logits", "--impl", "xla", "-v", "--json", json.to_str().unwrap()];
    let (code, stdout, stderr) = assay(&args, None);
    assert_eq!(code, 0, "{stdout}{stderr}");
    let installed = fs::canonicalize(".plugins/pjrt_cpu.so").unwrap();
    assert!(stdout.contains(&format!("plugin   {}\n", installed.display())), "{stdout}");
    let written: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    assert_eq!(written["plugins"], serde_json::json!([installed]));
}

#[test]
fn devices_count_that_nothing_here_takes_is_refused() {
    let args = |id| ["replay", FIXTURE, "--impl", id, "--devices", "4,16"];
    let expected = ["--devices: got 16, expected counts that xla-vocab takes here: 1, 2, 4, 8\n"];
    expect_refused(&args("xla-vocab"), None, &expected);
    expect_refused(&args("xla-mesh"), None, &["--devices: got 16", "xla-mesh takes here: 4, 8\n"]);
    expect_refused(&args("xla"), None, &["--devices: got 4, expected counts that xla takes here: 1\n"]);
    expect_refused(
        &["replay", "--devices", "1000"],
        None,
        &["got 1000", "some implementation takes here: 1, 2, 4, 8\n"],
    );
}

#[test]
fn devices_count_never_taken_by_an_implementation_is_ignored() {
    let args =
        ["replay", FIXTURE, "--logits", "logits", "--impl", "xla-mesh", "--impl", "xla-rows", "--devices", "2,4"];
    let (code, stdout, _) = assay(&args, None);
    assert_eq!(code, 0, "{stdout}");
    assert!(stdout.contains("ignored  2 runs of xla-mesh ×2: xla-mesh does not support device count 2;"), "{stdout}");
    let words = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("│ xla-mesh ×2 ┆ 0 ┆ – ┆ nothing compared │"), "{stdout}");
    assert!(words.contains("│ xla-rows ×2 ┆ 26 ┆"), "{stdout}");
    let (_, stdout, _) = assay(&[&args[..], &["--verbose"]].concat(), None);
    assert!(stdout.contains("ignored  qwen_tiny logits old_logps with xla-mesh ×2:"), "{stdout}");
}

#[test]
fn replay_on_several_counts_says_which_outputs_keep_their_bits() {
    let args = ["replay", FIXTURE, "--logits", "logits", "--impl", "xla-rows", "--devices", "1,2,4"];
    let (code, stdout, stderr) = assay(&args, None);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    // A line for both problems; with --verbose one for each.
    let (_, verbose, _) = assay(&[&args[..], &["--verbose"]].concat(), None);
    assert_eq!([&stdout, &verbose].map(|text| text.matches("bits  ").count()), [2, 4], "{stdout}{verbose}");
    for devices in ["×2", "×4"] {
        assert!(stdout.contains(&format!("bits     xla-rows: {devices} has those of ×1 in ")), "{stdout}");
        let line = format!("bits     qwen_tiny logits old_logps with xla-rows: {devices} has those of ×1 in ");
        assert!(verbose.contains(&line), "{verbose}");
    }
}

#[test]
fn devices_count_of_zero_is_refused() {
    expect_refused(&["replay", "--devices", "0"], None, &["--devices", "zero"]);
}

#[test]
fn flags_that_xla_does_not_know_are_an_error_that_names_them() {
    for args in
        [&["check", "--impl", "xla", "--cases", "1", "--no-power"][..], &["list", "--plugin", ".plugins/pjrt_cpu.so"]]
    {
        // An unknown flag, and known ones with values of another type.
        for flag in [
            "--xla_nonsense=1",
            "--xla_backend_optimization_level=high",
            "--xla_force_host_platform_device_count=x",
            "--xla_dump_hlo_as_text=maybe",
        ] {
            let output = command().args(args).env("XLA_FLAGS", flag).output().unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
            assert!(stderr.contains(&format!("`XLA_FLAGS`: got `{flag}`, expected flags that")), "{args:?}: {stderr}");
            let says_why =
                stderr.contains("Unknown flag in XLA_FLAGS: --xla_nonsense=1") || stderr.contains("parsing failed");
            assert!(says_why, "{args:?}: {stderr}");
        }
    }
}
