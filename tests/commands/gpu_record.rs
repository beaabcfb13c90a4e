//! The script that records a run on a GPU, tried on the driver of the tests with small shapes: its steps and their order, its budget, what it
//! leaves when it is ended, and what it says of tools that are missing.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{env, iter};

use serde_json::Value;
use tempfile::TempDir;

use super::driver::fake;

/// Programs that the script starts, but for those of NVIDIA and Python.
const TOOLS: [&str; 18] = [
    "bash", "cat", "cp", "date", "dirname", "env", "grep", "gzip", "mkdir", "mktemp", "mv", "realpath", "rm", "sed",
    "setpriv", "sleep", "tail", "tar",
];

/// A machine to record on: a bundle, recorded logits, and a search path with nothing of this machine's GPU or Python.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { folder: TempDir::new().unwrap() };
        for folder in ["bundle", "fixtures", "bin", "records"] {
            fs::create_dir(machine.path(folder)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_assay"), machine.path("bundle/assay")).unwrap();
        machine.program("bundle/devices", "echo \"trial of $* ... ok\"");
        for tool in TOOLS.into_iter().chain(iter::once("timeout")) {
            // `setpriv` alone may be missing.
            if let Some(found) = on_path(tool) {
                symlink(found, machine.path("bin").join(tool)).unwrap();
            }
        }
        let mut generate = Command::new(env!("CARGO_BIN_EXE_assay"));
        generate.args(["generate", "-q", "--shape", "1x2x257", "-o"]).arg(machine.path("fixtures/small.safetensors"));
        assert!(generate.status().unwrap().success());
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a shell script, in place of what is there.
    fn program(&self, name: &str, text: &str) {
        let path = self.path(name);
        let _ = fs::remove_file(&path);
        fs::write(&path, format!("#!/usr/bin/env bash\n{text}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    /// The script with the small shapes, and what else is asked.
    fn command(&self, settings: &str, args: &[&str]) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("setup/gpu-record.sh"));
        command.arg("--small").arg("--bundle").arg(self.path("bundle")).arg("--fixtures").arg(self.path("fixtures"));
        command.arg("--into").arg(self.path("records")).args(args);
        command.env_clear().env("PATH", self.path("bin")).env("TMPDIR", self.folder.path());
        command.env("ASSAY_CUDA_DRIVER", fake()).env("ASSAY_FAKE_CUDA", settings);
        command
    }

    fn run(&self, settings: &str, args: &[&str]) -> Output {
        self.command(settings, args).output().unwrap()
    }

    /// Starts the script, and returns once its first replay runs, with the process that it has started.
    fn start_to_replay(&self) -> (Child, u32) {
        let pid = self.path("pid");
        // What a step has started in turn is to end with it.
        let assay = env!("CARGO_BIN_EXE_assay");
        let text = format!("[ \"$1\" = replay ] || exec {assay} \"$@\"\nsleep 600 & echo $! >{}\nwait", pid.display());
        self.program("bundle/assay", &text);
        let mut command = self.command("", &[]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("a replay runs", || fs::read_to_string(&pid).is_ok_and(|text| text.ends_with('\n')));
        (child, fs::read_to_string(&pid).unwrap().trim().parse().unwrap())
    }

    /// The folder of the one record.
    fn record_folder(&self) -> PathBuf {
        let devices = fs::read_dir(self.path("records")).unwrap().map(|entry| entry.unwrap().path());
        let device = devices.into_iter().find(|path| path.is_dir()).expect("a device's folder");
        fs::read_dir(device).unwrap().next().expect("a record").unwrap().path()
    }

    fn record(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.record_folder().join("record.json")).unwrap()).unwrap()
    }

    fn log(&self, step: &str) -> String {
        fs::read_to_string(self.record_folder().join(format!("{step}.log"))).unwrap()
    }

    /// The names in the record's archive, without the folder they are in.
    fn archived(&self) -> Vec<String> {
        let mut tar = Command::new("tar");
        let output = tar.arg("-tzf").arg(self.path("records/gpu-record.tar.gz")).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let inside = |name: &str| name.splitn(3, '/').nth(2).map(String::from);
        text(&output.stdout).lines().filter_map(inside).collect()
    }
}

fn on_path(tool: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH").unwrap()).map(|folder| folder.join(tool)).find(|path| path.is_file())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_mins(1);
    while !holds() {
        assert!(Instant::now() < end, "after a minute it is not so that {what}");
        sleep(Duration::from_millis(20));
    }
}

/// Whether a process is there and is not waited for by its parent alone.
fn lives(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn names(record: &Value) -> Vec<&str> {
    record["steps"].as_array().unwrap().iter().map(|step| step["name"].as_str().unwrap()).collect()
}

fn outcome<'r>(record: &'r Value, name: &str) -> &'r str {
    let steps = record["steps"].as_array().unwrap();
    steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name}"))["outcome"]
        .as_str()
        .unwrap()
}

/// The first step of each kind, in the order of their worth.
const ORDER: [&str; 17] = [
    "device",
    "driver",
    "list",
    "replay-gpu-one-pass-driver",
    "replay-gpu-two-pass-driver",
    "devices",
    "bench-gpu-one-pass-driver-bf16",
    "bench-gpu-two-pass-driver-bf16",
    "bench-gpu-one-pass-driver-bf16-stores",
    "torch-campaign",
    "torch-step",
    "torch-graph",
    "jax-default",
    "bench-gpu-one-pass-driver-f32",
    "bench-gpu-logp-bf16",
    "memcheck-gpu-one-pass-driver",
    "ncu-gpu-one-pass-driver",
];

/// Runs every step: programs that write down their arguments stand for those of NVIDIA and Python.
#[test]
fn gpu_record_whole_run_leaves_every_step_in_order() {
    let machine = Machine::new();
    let asked = machine.path("asked");
    let note = format!("echo \"${{0##*/}} $*\" >>{}", asked.display());
    let query = "case $* in *=name*) echo 'NVIDIA Fake' ;; *driver_version*) echo 575.1 ;; *compute_cap*) echo 9.0 ;; *) echo '1980 MHz, 2619 MHz' ;; esac";
    machine.program("bin/nvidia-smi", &format!("{note}\n{query}"));
    let exec = "until [[ $1 = */assay ]]; do shift; done\nexec \"$@\"";
    machine.program("bin/compute-sanitizer", &format!("{note}\n{exec}"));
    machine.program(
        "bin/ncu",
        &format!("{note}\necho '==PROF== Profiling \"grpo_one\"'\n[ \"$1\" != --import ] || exit 0\n{exec}"),
    );
    machine.program("bin/python3", "[ \"$1\" = -c ] || echo \"[$XLA_FLAGS] $* \\\"passed\\\": true\"");
    let output = machine.run("", &[]);
    let (said, record) = (text(&output.stdout) + &text(&output.stderr), machine.record());
    assert_eq!((output.status.code(), &record["outcome"]), (Some(0), &"passed".into()), "{said}");
    let steps = names(&record);
    let places: Vec<usize> = ORDER.iter().map(|name| steps.iter().position(|step| step == name).expect(name)).collect();
    assert!(places.is_sorted(), "{steps:?}");
    assert_eq!(steps.last(), Some(&"page"));
    // Nothing but a plugin is missing.
    for step in &steps {
        let outcome = outcome(&record, step);
        assert!(outcome == "passed" || outcome.starts_with("ignored: no plugin"), "{step}: {outcome}");
    }
    assert_eq!(
        (&record["device"], &record["driver"], &record["capability"]),
        (&"NVIDIA Fake".into(), &"575.1".into(), &"9.0".into())
    );
    // No path of this machine, and no setting of the device.
    let whole = fs::read_to_string(machine.record_folder().join("record.json")).unwrap();
    assert!(
        !whole.contains(machine.folder.path().to_str().unwrap()) && !whole.contains(env!("CARGO_MANIFEST_DIR")),
        "{whole}"
    );
    for line in fs::read_to_string(&asked).unwrap().lines() {
        let (tool, arguments) = line.split_once(' ').unwrap();
        match tool {
            "nvidia-smi" => assert!(
                arguments.is_empty() || arguments.starts_with("--query-gpu=") || arguments.starts_with("-q -d "),
                "{line}"
            ),
            "ncu" if arguments.starts_with("--import ") => {}
            "ncu" => {
                for part in [
                    "--clock-control none",
                    "--kernel-name regex:grpo_",
                    "--launch-skip 3",
                    "--section SpeedOfLight",
                    "--section Occupancy",
                ] {
                    assert!(line.contains(part), "{part} not in: {line}");
                }
                assert!(!line.contains("--set"), "{line}");
            }
            _ => assert!(line.starts_with("compute-sanitizer --tool memcheck --error-exitcode 1 "), "{line}"),
        }
    }
    let flags = |step: &str| machine.log(step).split_once(']').unwrap().0.to_owned();
    assert_eq!(
        (flags("jax-default").as_str(), flags("jax-no-command-buffers").as_str()),
        ("[", "[--xla_gpu_enable_command_buffer=")
    );
    assert!(flags("jax-command-buffers").contains("CUSTOM_CALL"));
    let archived = machine.archived();
    for name in [
        "record.json",
        "clocks.csv",
        "page.html",
        "bench-gpu-two-pass-driver-f16.json",
        "replay-gpu-one-pass-driver.log",
    ] {
        assert!(archived.iter().any(|file| file == name), "{name} not in {archived:?}");
    }
    // A second record of the day is put beside the first.
    assert_eq!(machine.run("", &["--budget", "1"]).status.code(), Some(0));
    assert_eq!(fs::read_dir(machine.path("records/nvidia-fake")).unwrap().count(), 2);
}

#[test]
fn gpu_record_missing_tools_read_ignored_with_why() {
    let machine = Machine::new();
    fs::remove_file(machine.path("bundle/devices")).unwrap();
    fs::remove_file(machine.path("fixtures/small.safetensors")).unwrap();
    machine.program("bin/python3", "echo 'no framework on this machine'");
    let output = machine.run("capability=8.0", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    let record = machine.record();
    for (step, why) in [
        ("device", "ignored: no nvidia-smi"),
        ("replay-gpu-two-pass-driver", "ignored: no *.safetensors in "),
        ("devices", "ignored: the bundle has no program devices"),
        ("bench-gpu-one-pass-driver-bf16", "ignored: gpu-one-pass-driver does not run here"),
        ("torch-step", "ignored: no framework on this machine"),
        ("jax-default", "ignored: no framework on this machine"),
        ("bench-xla-bf16", "ignored: no plugin"),
        ("memcheck-gpu-two-pass-driver", "ignored: no compute-sanitizer"),
        ("ncu-gpu-two-pass-driver", "ignored: no ncu"),
        ("bench-gpu-two-pass-driver-bf16", "passed"),
    ] {
        assert!(outcome(&record, step).starts_with(why), "{step}: {}", outcome(&record, step));
    }
}

/// A machine whose administrator keeps the counters to himself.
#[test]
fn gpu_record_counters_not_permitted_read_ignored() {
    let machine = Machine::new();
    machine.program("bin/ncu", "echo '==PROF== Profiling \"grpo_one\"'; echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1");
    assert_eq!(machine.run("", &[]).status.code(), Some(0));
    let record = machine.record();
    assert!(outcome(&record, "ncu-gpu-one-pass-driver").starts_with("ignored: this machine does not let"), "{record}");
}

#[test]
fn gpu_record_budget_that_ends_leaves_steps_not_run() {
    let machine = Machine::new();
    // The list of implementations takes longer than all that there is.
    let assay = env!("CARGO_BIN_EXE_assay");
    machine.program("bundle/assay", &format!("[ \"$1\" = list ] || exec {assay} \"$@\"\nsleep 600"));
    let output = machine.run("", &["--budget", "6"]);
    let record = machine.record();
    assert_eq!((output.status.code(), &record["budget_s"]), (Some(0), &6.into()), "{}", text(&output.stdout));
    assert!(outcome(&record, "list").starts_with("stopped: the budget ended after "), "{record}");
    let later = outcome(&record, "replay-gpu-one-pass-driver");
    assert!(later.starts_with("not run: ") && later.ends_with(" s of the budget are left, 10 s are needed"), "{later}");
    assert!(record["spent_s"].as_u64().unwrap() < 20, "{record}");
    assert!(machine.archived().contains(&"record.json".into()));
}

#[test]
fn gpu_record_interrupted_run_keeps_what_it_has() {
    for (signal, code, ended) in [("TERM", Some(143), "interrupted"), ("KILL", None, "running")] {
        let machine = Machine::new();
        let (mut script, step) = machine.start_to_replay();
        assert!(lives(step));
        assert!(Command::new("kill").args(["-s", signal, &script.id().to_string()]).status().unwrap().success());
        assert_eq!(script.wait().unwrap().code(), code);
        let record = machine.record();
        assert_eq!((outcome(&record, "list"), record["outcome"].as_str()), ("passed", Some(ended)));
        let during = outcome(&record, "replay-gpu-one-pass-driver");
        assert!(during.starts_with(if signal == "TERM" { "stopped: " } else { "not finished: " }), "{during}");
        assert_eq!(outcome(&record, "page"), "not run: the run ended before it");
        // A script that was killed outright ends its step where the machine has `setpriv`.
        if signal == "TERM" || machine.path("bin/setpriv").exists() {
            wait_until("the step's own process has ended", || !lives(step));
        }
        assert_eq!(machine.path("records/gpu-record.tar.gz").exists(), signal == "TERM");
    }
}

#[test]
fn gpu_record_failed_step_fails_the_run_and_no_other() {
    let launches_fail = "fail=cuLaunchKernelEx:1";
    for (settings, trials, failed, why) in [
        (launches_fail, "echo 'a trial ... ok'", "replay-gpu-one-pass-driver", "failed: exit code "),
        ("", "echo 'no trial has run'", "devices", "failed: nothing in devices.log reads"),
        ("", "echo 'a trial ... ok'; exit 101", "devices", "failed: exit code 101"),
    ] {
        let machine = Machine::new();
        machine.program("bundle/devices", trials);
        let output = machine.run(settings, &[]);
        let record = machine.record();
        assert_eq!((output.status.code(), &record["outcome"]), (Some(1), &"failed".into()), "{}", text(&output.stdout));
        assert!(outcome(&record, failed).starts_with(why), "{record}");
        let other = if settings.is_empty() { "bench-gpu-two-pass-driver-f16" } else { "devices" };
        assert_eq!((outcome(&record, "list"), outcome(&record, other)), ("passed", "passed"));
        assert!(outcome(&record, "torch-step").starts_with("ignored: no python3"), "{record}");
        assert!(machine.archived().contains(&format!("{failed}.log")));
    }
}

#[test]
fn gpu_record_archives_of_the_bundle_are_unpacked() {
    let machine = Machine::new();
    fs::rename(machine.path("bundle"), machine.path("gpu-bundle")).unwrap();
    fs::create_dir_all(machine.path("gpu-bundle/python/assay")).unwrap();
    fs::write(machine.path("gpu-bundle/python/assay/_native.abi3.so"), "").unwrap();
    let archive = machine.path("carried.tar.gz");
    for (packed, what, without) in [
        (&archive, "gpu-bundle", "--exclude=gpu-bundle/python"),
        (&machine.path("carried-python.tar.gz"), "gpu-bundle/python", "--exclude=nothing"),
    ] {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(machine.folder.path()).arg(without).arg("-czf").arg(packed).arg(what);
        assert!(tar.status().unwrap().success());
    }
    fs::remove_dir_all(machine.path("gpu-bundle")).unwrap();
    machine.program("bin/python3", "[ \"$1\" = -c ] || echo \"$PYTHONPATH \\\"passed\\\": true\"");
    let output = machine.run("", &["--bundle", archive.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(outcome(&machine.record(), "devices"), "passed");
    assert!(machine.log("torch-step").contains("/gpu-bundle/python \"passed\""), "{}", machine.log("torch-step"));
    // What was unpacked is gone.
    let unpacked = fs::read_dir(machine.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let unpacked: Vec<_> = unpacked.filter(|name| name.to_string_lossy().starts_with("tmp.")).collect();
    assert!(unpacked.is_empty(), "{unpacked:?}");
    fs::write(&archive, "no archive").unwrap();
    fs::remove_file(machine.path("bin/python3")).unwrap();
    let output = machine.run("", &["--bundle", archive.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("`--bundle`: got `") && text(&output.stderr).contains("can unpack"));
}

#[test]
fn gpu_record_bad_usage_is_refused_naming_the_option() {
    let machine = Machine::new();
    let cases: [(&[&str], &[&str]); 6] = [
        (&["--budget", "0"], &["`--budget`: got `0`", "whole seconds"]),
        (&["--shape", "4096x151936"], &["`--shape`: got `4096x151936`", "BxTxV"]),
        (&["--fixtures", "/nowhere"], &["`--fixtures`: got `/nowhere`", "*.safetensors"]),
        (&["--bundle", "/nowhere"], &["`--bundle`: got `/nowhere`", "make gpu-bundle"]),
        (&["--plugin", "/nowhere.so"], &["`--plugin`: got `/nowhere.so`", "xla_cuda_plugin.so"]),
        (&["--clocks"], &["got `--clocks`", "--budget"]),
    ];
    for (args, parts) in cases {
        let output = machine.run("", args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "{args:?}: `{part}` not in: {said}");
        }
    }
    assert_eq!(fs::read_dir(machine.path("records")).unwrap().count(), 0);
}
