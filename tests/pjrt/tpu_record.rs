//! `setup/tpu-record.sh`, run dry on a plugin that says it is a TPU. A CPU has no Mosaic kernel, so that a record made
//! there must say that the kernels failed: what can be shown is the order of the steps, what each outcome says, and
//! that nothing is lost.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::cpu_plugins;
use super::on_a_tpu::fake;
use serde_json::Value;
use tempfile::TempDir;

/// A folder with the script, the command and what stands for the test of devices, as a copied bundle has them.
struct Bundle {
    folder: TempDir,
}

impl Bundle {
    fn new(devices: Option<&str>) -> Self {
        let folder = TempDir::new().unwrap();
        let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("setup");
        for file in ["tpu-record.sh", "tpu_record_jax.py"] {
            fs::copy(setup.join(file), folder.path().join(file)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_assay"), folder.path().join("assay")).unwrap();
        fs::create_dir(folder.path().join("fixtures")).unwrap();
        if let Some(script) = devices {
            let path = folder.path().join("devices");
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with_logits(self) -> Self {
        let mut generate = Command::new(env!("CARGO_BIN_EXE_assay"));
        generate.args(["generate", "--shape", "2x5x300", "-q", "-o"]).arg(self.at("fixtures/small.safetensors"));
        assert!(generate.status().unwrap().success());
        self
    }

    fn script(&self, plugin: &Path, args: &[&str]) -> Command {
        let mut script = Command::new(self.at("tpu-record.sh"));
        script.args(["--shape", "1x8x300", "--python", "/nowhere/python", "--into"]).arg(self.at("record"));
        script.arg("--plugin").arg(plugin).args(args);
        script.env("ASSAY_FAKE_TPU_PLUGIN", fs::canonicalize(cpu_plugins()[0]).unwrap());
        script.env("ASSAY_FAKE_TPU_PROGRAM", self.at("program.mlir")).env_remove("ASSAY_LOOPS");
        script.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        script
    }

    fn record(&self) -> Option<Value> {
        let text = fs::read_to_string(self.at("record/record.json")).ok()?;
        Some(serde_json::from_str(&text).expect("a record is whole at any time"))
    }

    /// The record, where the archive holds it too.
    fn archived(&self) -> Value {
        let mut tar = Command::new("tar");
        tar.arg("-xzOf").arg(self.at("record.tar.gz")).arg("record/record.json");
        let Output { status, stdout, .. } = tar.output().unwrap();
        assert!(status.success(), "the archive has no record");
        let record = self.record().expect("a record");
        assert_eq!(serde_json::from_slice::<Value>(&stdout).unwrap(), record);
        record
    }
}

/// Name and outcome of each step.
fn steps(record: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("a text").to_string();
    let steps = record["steps"].as_array().expect("steps");
    steps.iter().map(|step| (text(&step["name"]), text(&step["outcome"]))).collect()
}

/// What kernels need a TPU for fails, what XLA computes passes, and what is missing reads ignored.
#[test]
fn tpu_record_on_a_fake_tpu_says_what_failed() {
    let bundle = Bundle::new(Some("echo 'test match_reference: tile-one-pass ... ok'")).with_logits();
    let output = bundle.script(&fake(), &[]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    let record = bundle.archived();
    let expected = [
        ("list", "passed"),
        ("replay-tile-one-pass", "failed: ended with 2"),
        ("replay-tile-two-pass", "failed: ended with 2"),
        ("devices", "passed"),
        ("bench-tile-one-pass", "failed: ended with 2"),
        ("bench-tile-two-pass", "failed: ended with 2"),
        ("bench-xla", "passed"),
        ("bench-xla-online", "passed"),
        ("bench-xla-seed", "passed"),
        ("memory", "ignored: the device says nothing of its memory, memory.txt has why"),
        ("jax", "ignored: no /nowhere/python"),
        ("seed", "ignored: --shape 1x8x300 is not one of MLLM-JAX's"),
        ("bench-tile-one-pass-f32", "failed: ended with 2"),
        ("bench-tile-two-pass-f32", "failed: ended with 2"),
        ("bench-tile-one-pass-f16", "failed: ended with 2"),
        ("bench-tile-two-pass-f16", "failed: ended with 2"),
        ("replay-tile-one-pass-rows", "failed: ended with 2"),
        ("replay-tile-two-pass-vocab", "failed: ended with 2"),
    ];
    let expected = expected.map(|(name, outcome)| (name.to_string(), outcome.to_string()));
    assert_eq!(steps(&record), expected, "{printed}");
    let said = [&record["device"], &record["outcome"], &record["lowering"], &record["running"]];
    assert_eq!(said, ["TPU v6 lite", "failed", "", ""]);
    let why = fs::read_to_string(bundle.at("record/memory.txt")).unwrap();
    assert!(why.contains("bench-xla: no peak_bytes_in_use, read the memory of device 0: UNIMPLEMENTED"), "{why}");
    // Nothing of this machine's folders is in a record.
    let commands = record["steps"].to_string();
    assert!(!commands.contains(bundle.folder.path().to_str().unwrap()), "{commands}");
}

/// Loops pass the judge, and are no Mosaic kernels. A run that is ended keeps its record, and leaves nothing running.
#[test]
fn tpu_record_ended_by_a_signal_keeps_what_it_has() {
    // A number that no other process waits for.
    const SLEEPS: &str = "61.6180339";
    let bundle = Bundle::new(Some(&format!("sleep {SLEEPS} & wait"))).with_logits();
    let script = bundle.script(&fake(), &[]).env("ASSAY_LOOPS", "1").spawn().unwrap();
    wait_until("the test of devices runs", || bundle.record().is_some_and(|record| record["running"] == "devices"));
    wait_until("it sleeps", || sleepers(SLEEPS) == 1);
    let output = terminated(script);
    assert_eq!(output.status.code(), Some(143), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(sleepers(SLEEPS), 0, "what a step started is ended with it");
    let record = bundle.archived();
    let loops = "failed: loops were taken, not Mosaic kernels (ASSAY_LOOPS)";
    let expected = [
        ("list", "passed"),
        ("replay-tile-one-pass", loops),
        ("replay-tile-two-pass", loops),
        ("devices", "failed: ended by SIGTERM"),
    ];
    assert_eq!(steps(&record), expected.map(|(name, outcome)| (name.to_string(), outcome.to_string())));
    let said = [&record["outcome"], &record["lowering"], &record["running"]];
    assert_eq!(said, ["failed: ended by SIGTERM", "loops", ""]);
}

/// A run that is killed leaves the record of the steps before, and nothing running.
#[test]
fn tpu_record_killed_leaves_a_whole_record() {
    const SLEEPS: &str = "171.6180339";
    let bundle = Bundle::new(Some(&format!("sleep {SLEEPS} & wait")));
    let mut script = bundle.script(&fake(), &[]).spawn().unwrap();
    wait_until("the test of devices sleeps", || sleepers(SLEEPS) == 1);
    script.kill().unwrap();
    script.wait().unwrap();
    wait_until("the step ends with the script", || sleepers(SLEEPS) == 0);
    let record = bundle.record().expect("a record");
    assert_eq!([&record["outcome"], &record["running"]], ["running", "devices"]);
    let names: Vec<String> = steps(&record).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["list", "replay-tile-one-pass", "replay-tile-two-pass"]);
}

/// A step gets what is left of the budget, and what there is no time for is not begun.
#[test]
fn tpu_record_without_time_left_says_what_was_not_run() {
    let bundle = Bundle::new(Some("sleep 71.6180339"));
    let began = Instant::now();
    let output = bundle.script(&fake(), &["--budget", "8"]).output().unwrap();
    assert!(began.elapsed() < Duration::from_secs(40), "the budget is 8 s");
    assert_eq!(output.status.code(), Some(1));
    let steps = steps(&bundle.archived());
    let outcome = |name: &str| {
        let (_, outcome) = steps.iter().find(|(step, _)| step == name).unwrap_or_else(|| panic!("no step {name}"));
        outcome.as_str()
    };
    assert!(outcome("replay-tile-one-pass").starts_with("ignored: there are no recorded logits"));
    assert_eq!(outcome("devices"), "failed: it took longer than its time limit or the budget");
    for name in ["bench-tile-one-pass", "bench-xla-seed", "bench-tile-two-pass-f16"] {
        assert_eq!(outcome(name), "not run: the budget of 8 s is spent", "{name}");
    }
}

#[test]
fn tpu_record_called_wrongly_is_refused_in_a_line() {
    let bundle = Bundle::new(None);
    let text = bundle.at("text.so");
    fs::write(&text, "no library").unwrap();
    let cpu = fs::canonicalize(cpu_plugins()[0]).unwrap();
    let nowhere = PathBuf::from("/nowhere/libtpu.so");
    let refused: [(&Path, &[&str], &str); 9] = [
        (&nowhere, &[], "--plugin: got `/nowhere/libtpu.so`, expected a libtpu.so; `make setup-tpu` installs one"),
        (&text, &[], "cannot be loaded"),
        (&cpu, &[], "whose platform is cpu, expected a TPU's"),
        (&cpu, &["--colour", "x"], "got `--colour`, expected --into, --budget, --shape"),
        (&cpu, &["--fixtures", "/nowhere"], "--fixtures: got `/nowhere`, expected a folder of recorded"),
        (&cpu, &["--budget"], "--budget: a value is missing"),
        (&cpu, &["--budget", "0"], "--budget: got `0`, expected seconds, 1 to 999999"),
        (&cpu, &["--shape", "1x2"], "--shape: got `1x2`, expected BxTxV"),
        (&cpu, &["--into", "fixtures/.."], "is not empty, expected a new folder"),
    ];
    for (plugin, args, wanted) in refused {
        let output = bundle.script(plugin, args).current_dir(bundle.folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(wanted) && said.lines().count() == 1, "{args:?}: {said}");
        assert_eq!(bundle.record(), None, "{args:?}: nothing is recorded");
    }
}

/// Sends SIGTERM, and waits for the end.
fn terminated(script: Child) -> Output {
    assert!(Command::new("kill").arg(script.id().to_string()).status().unwrap().success());
    script.wait_with_output().unwrap()
}

/// How many processes sleep for so long.
fn sleepers(seconds: &str) -> usize {
    let wanted = format!("sleep\0{seconds}\0");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|entry| fs::read(entry.path().join("cmdline")).is_ok_and(|line| line == wanted.as_bytes())).count()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_mins(2), "not within two minutes: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}
