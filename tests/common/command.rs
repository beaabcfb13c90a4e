//! The `assay` command in a process of its own.

use std::env;

use assert_cmd::Command;
use assert_cmd::cargo::cargo_bin_cmd;

pub(crate) struct Output {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The command, whose programs XLA's CPU compiler optimises as little as those of tests themselves (`assay_testkit::plugins`).
pub(crate) fn command() -> Command {
    let mut command = cargo_bin_cmd!("assay");
    if env::var_os("ASSAY_FULL_OPTIMIZATION").is_none() {
        let own = env::var("XLA_FLAGS").unwrap_or_default();
        let least = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true";
        command.env("XLA_FLAGS", format!("{own} {least}"));
    }
    command
}

pub(crate) fn assay(args: &[&str]) -> Output {
    command().args(args).output().unwrap().into()
}

impl From<std::process::Output> for Output {
    fn from(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().expect("not killed");
        Output { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// Bad input: exit code 2, nothing on stdout, and one line that says all of `parts`.
#[track_caller]
pub(crate) fn assert_refused(args: &[&str], parts: &[&str]) {
    let output = assay(args);
    assert_eq!((output.code, output.stdout.as_str()), (2, ""), "{args:?}: {}", output.stderr);
    assert_eq!(output.stderr.lines().count(), 1, "{args:?}: {}", output.stderr);
    for part in parts {
        assert!(output.stderr.contains(part), "{args:?}: `{part}` not in: {}", output.stderr);
    }
}
