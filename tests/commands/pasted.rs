//! The commands that reports show, pasted into a shell.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use assay::problem::FloatArray;
use tempfile::TempDir;

use super::workplace::Workplace;
use crate::common::command::{Output, assay};

/// Text that a shell would split, expand or run, and that would move a terminal's cursor.
const AWKWARD: &str = "it's $(touch pwned) `touch pwned`; touch pwned | \u{1b}[2J > \"pwned\"";

/// A folder of an awkward name with a problem whose logits have an awkward name, and a wrong answer to it.
struct AwkwardCase {
    _parent: TempDir,
    folder: PathBuf,
    logits: String,
}

impl AwkwardCase {
    fn new() -> Self {
        let workplace = Workplace::new();
        workplace.write_candidate(|candidate| {
            let FloatArray::Bf16(dlogits) = &mut candidate.gradient else { panic!("generate writes bf16") };
            let (at, _) = dlogits.indexed_iter().find(|(_, x)| x.to_f32() != 0.0).expect("some token learns");
            dlogits[at] = -dlogits[at];
        });
        let parent = TempDir::new().unwrap();
        let folder = parent.path().join(AWKWARD);
        fs::create_dir(&folder).unwrap();
        let logits = format!("logits {AWKWARD}");
        // The header names the tensors: one gets another name, and a recorded number that no run has.
        let bytes = fs::read(workplace.path("problem.safetensors")).unwrap();
        let (length, rest) = bytes.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        let mut header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
        let tensor = header.remove("logits").unwrap();
        header.insert(logits.clone(), tensor);
        // Only files without a spec have recorded numbers.
        let metadata = header["__metadata__"].as_object_mut().unwrap();
        metadata.remove("spec").unwrap();
        metadata.insert(format!("expected.{logits}.n_tokens"), "999".into());
        fs::write(folder.join("spec.yaml"), "{}").unwrap();
        let mut header = serde_json::to_vec(&header).unwrap();
        header.resize(header.len().next_multiple_of(8), b' ');
        let whole = [&(header.len() as u64).to_le_bytes()[..], &header, data].concat();
        fs::write(folder.join("problem.safetensors"), whole).unwrap();
        fs::copy(workplace.path("candidate.safetensors"), folder.join("candidate.safetensors")).unwrap();
        Self { _parent: parent, folder, logits }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().into()
    }
}

/// Runs the first command that `shown` has, in a shell whose `assay` is the command under test.
fn pasted(shown: &str, folder: &Path) -> Output {
    let line = shown.lines().find_map(|line| line.find("assay ").map(|at| &line[at..])).expect(shown);
    let script = format!("assay() {{ \"$ASSAY\" \"$@\"; }}\n{line}");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).env("ASSAY", env!("CARGO_BIN_EXE_assay")).current_dir(folder);
    shell.output().unwrap().into()
}

#[test]
fn judge_command_pasted_into_a_shell_judges_the_same() {
    let case = AwkwardCase::new();
    let [problem, candidate, spec] =
        ["problem.safetensors", "candidate.safetensors", "spec.yaml"].map(|name| case.path(name));
    let given = ["--problem", &problem, "--candidate", &candidate, "--logits", &case.logits, "--spec", &spec];
    let shown = assay(&[&["judge"], &given[..], &["-q"]].concat());
    assert_eq!(shown.code, 1, "{}", shown.stderr);
    let again = pasted(&shown.stdout, &case.folder);
    assert_eq!((again.code, again.stderr.as_str()), (1, ""));
    assert!(again.stdout.starts_with(&shown.stdout), "{}\nfrom\n{}", again.stdout, shown.stdout);
    assert!(!case.folder.join("pwned").exists());
}

#[test]
fn replay_command_pasted_into_a_shell_replays_the_same() {
    let case = AwkwardCase::new();
    let shown = assay(&["replay", &case.path("problem.safetensors"), "--impl", "native", "-q"]);
    assert_eq!(shown.code, 1, "{}{}", shown.stdout, shown.stderr);
    let again = pasted(&shown.stdout, &case.folder);
    assert_eq!((again.code, again.stderr.as_str()), (1, ""));
    assert!(again.stdout.contains("recorded n_tokens"), "{}", again.stdout);
    assert!(!case.folder.join("pwned").exists());
}

#[test]
fn suite_command_pasted_into_a_shell_finds_the_suite() {
    let case = AwkwardCase::new();
    let suite = case.path("suite");
    let written = assay(&["suite", "--cases", "2", "--wide", "0", "-o", &suite]);
    assert_eq!(written.code, 0, "{}", written.stderr);
    // No answer is in the folder DIR: that is what is said, and not that the suite is missing.
    let judged = pasted(&written.stdout, &case.folder);
    assert!(judged.stdout.contains("DIR: it has no file for this problem"), "{}{}", judged.stdout, judged.stderr);
    assert!(!case.folder.join("pwned").exists());
}
