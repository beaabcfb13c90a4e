//! The `assay` command when the system stands in its way, or somebody stops it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::cargo::cargo_bin;

use super::command::Output;

/// With the shell's `limits`.
pub(crate) fn limited(limits: &str, args: &[String]) -> Output {
    let args = args.iter().map(|arg| format!("'{arg}'")).collect::<Vec<_>>().join(" ");
    let script = format!("{limits} && exec '{}' {args}", cargo_bin!("assay").display());
    Command::new("sh").args(["-c", &script]).output().unwrap().into()
}

/// Stopped by a signal, as `kill` names it, once `begun`; what was printed, and the exit code where there is one.
#[track_caller]
pub(crate) fn stopped(signal: &str, args: &[String], begun: impl Fn() -> bool) -> std::process::Output {
    let mut process =
        Command::new(cargo_bin!("assay")).args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !begun() {
        assert!(process.try_wait().unwrap().is_none(), "ended early: {:?}", process.wait_with_output());
        assert!(started.elapsed() < Duration::from_mins(5), "nothing begins");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args([signal, &process.id().to_string()]).status().unwrap().success());
    process.wait_with_output().unwrap()
}

/// Stopped by Ctrl-C.
#[track_caller]
pub(crate) fn interrupted(args: &[String], begun: impl Fn() -> bool) -> Output {
    stopped("-INT", args, begun).into()
}
