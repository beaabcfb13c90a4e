//! `assay panel`, with shell scripts where Python would be.

use std::fs;

use crate::common::command::assay;

/// A list of one kernel, and the script that serves it.
fn panel(expected: &str, script: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let list =
        format!("[[kernel]]\nname = \"shell\"\nserve = [\"a\", \"b\"]\nexpected = \"{expected}\"\nis = \"a script\"\n");
    fs::write(folder.path().join("panel.toml"), list).unwrap();
    fs::write(folder.path().join("serve.py"), script).unwrap();
    folder
}

const HELLO: &str = r#"echo '{"protocol":"assay-check/1","dtypes":["f32","bf16","f16"],"outputs":[]}'"#;

/// The exit code, and what is printed.
fn run(folder: &tempfile::TempDir, more: &[&str]) -> (i32, String) {
    let list = folder.path().join("panel.toml");
    let output = assay(&[&["panel", list.to_str().unwrap(), "--python", "sh"], more].concat());
    (output.code, output.stdout + &output.stderr)
}

#[test]
fn panel_kernel_that_answers_nothing_is_not_right() {
    let unsupported = format!(
        r#"{HELLO}; while read -r line; do
        id=$(printf '%s' "$line" | sed 's/.*"id":\([0-9]*\).*/\1/'); echo "{{\"id\":$id,\"unsupported\":\"kl k2\"}}"; done"#
    );
    let (code, text) = run(&panel("right", &unsupported), &["--cases", "4", "--wide", "0"]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("UNEXPECTED") && text.contains("4 problems and 0 of"), "{text}");
    assert!(text.contains("shell does not compute kl k2: 4 problems"), "{text}");
}

#[test]
fn panel_kernel_that_dies_fails_all_and_says_what_repeats_it() {
    let folder = panel("right", &format!("{HELLO}; read -r line; echo \"$@\" >&2; kill -SEGV $$"));
    let json = folder.path().join("panel.json");
    let (code, text) = run(&folder, &["--cases", "3", "--wide", "0", "--json", json.to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("SIGSEGV") && text.contains("a b"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let kernel = &json["kernels"][0];
    assert_eq!((&kernel["unanswered"], &kernel["judged"]), (&3.into(), &0.into()));
    let failure = &kernel["failures"][1];
    let list = folder.path().join("panel.toml");
    assert_eq!(failure["replay"], format!("assay panel {} --kernel shell --case 1", list.display()));
    assert_eq!(failure["recipe"]["seed"], 1);
    // A kernel that dies has not been seen to be wrong.
    let wrong = panel("wrong", &format!("{HELLO}; read -r line; exit 1"));
    assert_eq!(run(&wrong, &["--case", "1"]).0, 1);
}

#[test]
fn panel_kernel_unstartable_or_unlisted_is_bad_input() {
    let folder = panel("right", "echo no torch here >&2; exit 1");
    let (code, text) = run(&folder, &[]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("no torch here") && text.contains("exit status: 1"), "{text}");
    let (code, text) = run(&folder, &["--kernel", "other"]);
    assert_eq!(code, 2);
    assert!(text.contains("--kernel: got `other`, expected one of: shell"), "{text}");
}
