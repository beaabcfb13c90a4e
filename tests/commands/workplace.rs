//! Generated problems and their answers in files, for the tests of commands.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::command::{Output, assay};
use assay::fixture::{ProblemFile, write_candidate};
use assay::problem::{Candidate, HeadCandidate};
use assay::registry::{find, find_head};
use assay::spec::LossSpec;
use serde_json::Value;
use tempfile::TempDir;

/// Of the implementations one that runs at once and one that compiles: what all give is in the suites of kernels and devices.
pub(super) const SOME: &[&str] =
    if cfg!(feature = "pjrt") { &["--impl", "native", "--impl", "xla-mesh"] } else { &["--impl", "native"] };

/// The same with an LM head.
pub(super) const SOME_HEADS: &[&str] = if cfg!(feature = "pjrt") {
    &["--impl", "native-lm-head", "--impl", "tile-lm-head"]
} else {
    &["--impl", "native-lm-head"]
};

pub(super) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A generated problem and the native kernel's answer to it, in files.
pub(super) struct Workplace {
    folder: TempDir,
}

impl Workplace {
    pub(super) fn new() -> Self {
        let workplace = Self { folder: TempDir::new().unwrap() };
        let problem = workplace.path("problem.safetensors");
        let output = assay(&["generate", "--shape", "2x3x129", "--regime", "normal", "--seed", "4", "-o", &problem]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        workplace.write_candidate(|_| {});
        workplace
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    pub(super) fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// The native kernel's answer, changed by `break_it`.
    pub(super) fn write_candidate(&self, break_it: impl FnOnce(&mut Candidate)) {
        let file = ProblemFile::open(self.path("problem.safetensors")).unwrap();
        let problem = file.problem("logits", Some("old_logps")).unwrap();
        let mut candidate = find("native", None).unwrap().run(&LossSpec::default(), problem, 1).unwrap();
        break_it(&mut candidate);
        write_candidate(self.path("candidate.safetensors"), &candidate, &BTreeMap::new()).unwrap();
    }

    pub(super) fn judge(&self, more: &[&str]) -> Output {
        let (problem, candidate) = (self.path("problem.safetensors"), self.path("candidate.safetensors"));
        assay(&[&["judge", "--problem", &problem, "--candidate", &candidate], more].concat())
    }
}

/// The cells of a table's rows.
pub(super) fn summary_lines(stdout: &str) -> Vec<Vec<String>> {
    let rows = stdout.lines().filter_map(|line| line.strip_prefix('│')?.strip_suffix('│'));
    rows.skip(1).map(|row| row.split('┆').map(|cell| cell.trim().to_string()).collect()).collect()
}

#[track_caller]
pub(super) fn assert_narrow(stdout: &str) {
    for line in stdout.lines() {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
    }
}

/// A generated problem with an LM head and the CPU's answer to it, in files.
pub(super) struct HeadWorkplace {
    folder: TempDir,
}

impl HeadWorkplace {
    pub(super) fn new(options: &[&str]) -> Self {
        let workplace = Self { folder: TempDir::new().unwrap() };
        let problem = workplace.path("problem.safetensors");
        let args = ["generate", "--shape", "2x3x7x129", "--regime", "normal", "--seed", "4", "-o", &problem];
        let output = assay(&[&args, options].concat());
        assert_eq!(output.code, 0, "{}", output.stderr);
        workplace.write_candidate(|_| {});
        workplace
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().into()
    }

    pub(super) fn write_candidate(&self, break_it: impl FnOnce(&mut HeadCandidate)) {
        let file = ProblemFile::open(self.path("problem.safetensors")).unwrap();
        let problem = file.head_problem(Some("old_logps")).unwrap();
        let mut candidate = find_head("native-lm-head", None).unwrap().run(&LossSpec::default(), problem, 1).unwrap();
        break_it(&mut candidate);
        let path = self.path("candidate.safetensors");
        write_candidate(path, &candidate, &BTreeMap::new()).unwrap();
    }

    pub(super) fn judge(&self, more: &[&str]) -> Output {
        let (problem, candidate) = (self.path("problem.safetensors"), self.path("candidate.safetensors"));
        assay(&[&["judge", "--problem", &problem, "--candidate", &candidate], more].concat())
    }
}
