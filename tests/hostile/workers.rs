//! Hostile kernels for `assay check --exec`, each a shell script.

use super::entries::VALID;
use super::kinds::ESCAPES;
use super::sandbox::{Content, Ends, Fault, Look, Trial};

const HELLO: &str = r#"say '{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": []}'"#;

/// The functions that scripts may use: `say` prints a line, `hear` reads a request and sets `id`, `problem` and `candidate`, `answer` says
/// that the candidate is there.
const PRELUDE: &str = r#"
say() { printf '%s\n' "$1"; }
hear() {
  read -r line || exit 0
  id=${line#*'"id":'}; id=${id%%,*}
  problem=${line#*'"problem":"'}; problem=${problem%%'"'*}
  candidate=${line#*'"candidate":"'}; candidate=${candidate%%'"'*}
}
answer() { say "{\"id\":$id}"; }
"#;

/// The kernel's end must be told as what it is.
const TOLD: Look = |_, ran| {
    let told = ran.text().split_whitespace().collect::<Vec<_>>().join(" ");
    let is_told = ["exit status: 7", "exit code 7", "no first line in 1s", "SIGKILL", "signal: 9"]
        .iter()
        .any(|end| told.contains(end));
    is_told.then_some(()).ok_or((Fault::Worker, format!("does not say how the kernel ended: {told:.300}")))
};

/// Scripts after the prelude. `[E]` stands for escapes.
#[rustfmt::skip]
const SCRIPTS: &[(&str, &str, Option<Look>)] = &[
    // Before the first line.
    ("says nothing and ends", "exit 0", None),
    ("says nothing and fails", "exit 7", Some(TOLD)),
    ("is killed at once", "kill -s KILL $$", Some(TOLD)),
    ("says nothing and waits", "sleep 300", Some(TOLD)),
    ("says nothing while a child holds its pipes", "sleep 300 & exit 7", Some(TOLD)),
    ("closes its output and waits", "exec >&-; sleep 300", None),
    ("says no JSON", "say hello; sleep 300", None),
    ("says an empty line", "say ''; sleep 300", None),
    ("says escapes", "say '[E]'; sleep 300", None),
    ("says bytes that are no text", r"printf '\377\376\n'; sleep 300", None),
    ("says a line without an end", "printf '{'; exit 0", None),
    ("says an endless line", "cat /dev/zero", None),
    ("says endless lines", "yes", None),
    ("says deep JSON", "head -c 60000 /dev/zero | tr '\\0' '['; say ''", None),
    ("speaks another protocol", r#"say '{"protocol": "[J]", "dtypes": ["f32"], "outputs": []}'; sleep 300"#, None),
    ("has no dtype", r#"say '{"protocol": "assay-check/1", "dtypes": [], "outputs": []}'; sleep 300"#, None),
    ("has an unknown dtype", r#"say '{"protocol": "assay-check/1", "dtypes": ["[J]"], "outputs": []}'; sleep 300"#, None),
    ("promises an unknown output", r#"say '{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": ["[J]"]}'; sleep 300"#, None),
    ("is about escapes", r#"say '{"protocol": "assay-check/1", "dtypes": ["f32", "bf16"], "outputs": [], "about": "[J]"}'; hear; exit 7"#, None),
    ("floods stderr with escapes", "i=0; while [ $i -lt 2000 ]; do say '[E]' >&2; i=$((i + 1)); done; exit 7", None),
    // After a request.
    ("ends at a request", "[H]; hear; exit 7", Some(TOLD)),
    ("is killed at a request", "[H]; hear; kill -s KILL $$", Some(TOLD)),
    ("ends at a request while a child holds its pipes", "[H]; hear; sleep 300 & exit 7", Some(TOLD)),
    ("ends at a request and says escapes", "[H]; hear; say '[E]' >&2; exit 7", None),
    ("never answers", "[H]; hear; sleep 300", None),
    ("never answers, deaf to signals", "trap '' INT TERM HUP; [H]; hear; while :; do sleep 1; done", None),
    ("answers with endless blanks", "[H]; hear; tr '\\0' ' ' </dev/zero", None),
    ("answers another request", r#"[H]; hear; say '{"id": 77}'; sleep 300"#, None),
    ("answers a negative request", r#"[H]; hear; say '{"id": -1}'; sleep 300"#, None),
    ("answers before it is asked", r#"[H]; say '{"id": 1}'; hear; sleep 300"#, None),
    ("answers an error of escapes", r#"[H]; while hear; do say "{\"id\":$id, \"error\": \"[J]\"}"; done"#, None),
    ("answers an error of 60,000 lines", r#"[H]; hear; printf '{"id":%s, "error": "' "$id"; yes 'a\n' | head -c 60000 | tr -d '\n'; say '"}'; sleep 300"#, None),
    ("answers that escapes are unsupported", r#"[H]; while hear; do say "{\"id\":$id, \"unsupported\": \"[J]\"}"; done"#, None),
    ("answers an output of escapes", r#"[H]; while hear; do say "{\"id\":$id, \"output\": {\"field\": \"[J]\", \"given\": \"[J]\", \"expected\": \"[J]\"}}"; done"#, None),
    ("answers that it wrote to escapes", r#"[H]; while hear; do say "{\"id\":$id, \"mutated\": \"[J]\"}"; done"#, None),
    // Candidates.
    ("writes no candidate", "[H]; while hear; do answer; done", None),
    ("writes an empty candidate", "[H]; while hear; do : >\"$candidate\"; answer; done", None),
    ("writes zeros", "[H]; while hear; do head -c 4096 /dev/zero >\"$candidate\"; answer; done", None),
    ("makes the candidate a folder", "[H]; while hear; do mkdir \"$candidate\"; answer; done", None),
    ("makes the candidate a FIFO", "[H]; while hear; do mkfifo \"$candidate\"; answer; done", None),
    ("makes the candidate a device", "[H]; while hear; do ln -s /dev/zero \"$candidate\"; answer; done", None),
    ("makes the candidate the problem", "[H]; while hear; do ln -s \"$problem\" \"$candidate\"; answer; done", None),
    ("makes the candidate a TiB", "[H]; while hear; do truncate -s 1T \"$candidate\"; answer; done", None),
    ("makes the candidate a link to a secret", "[H]; while hear; do ln -s /etc/passwd \"$candidate\"; answer; done", None),
    ("writes a header of a GiB", r#"[H]; while hear; do printf '\000\000\000\100\000\000\000\000' >"$candidate"; truncate -s 2G "$candidate"; answer; done"#, None),
    ("answers with another problem's candidate", "[H]; while hear; do cp answers/0000.safetensors \"$candidate\"; answer; done", None),
    ("removes the problem", "[H]; while hear; do rm \"$problem\"; answer; done", None),
    ("removes the folder", "[H]; while hear; do rm -r \"${problem%/*}\"; answer; done", None),
    ("fills the folder", "[H]; while hear; do i=0; while [ $i -lt 200 ]; do : >\"${problem%/*}/$i\"; i=$((i + 1)); done; answer; done", None),
    ("makes the folder read-only", "[H]; while hear; do chmod 500 \"${problem%/*}\"; answer; done", None),
    ("starts a child that stays", "sleep 300 & [H]; while hear; do answer; done", None),
];

/// A run for each script.
pub(super) fn trials() -> Vec<Trial> {
    let in_json: String = ESCAPES.chars().fold(String::new(), |text, c| text + &format!("\\u{:04x}", u32::from(c)));
    let answers = VALID.iter().filter(|(name, _)| name.starts_with("answers/"));
    let answers: Vec<_> = answers.map(|(name, content)| (name.clone(), content.clone())).collect();
    let trial = |&(name, script, look): &(&'static str, &str, Option<Look>)| {
        let script = script.replace("[H]", HELLO).replace("[E]", ESCAPES).replace("[J]", &in_json);
        let kernel = ("kernel.sh".into(), Content::of(format!("{PRELUDE}{script}\n")));
        let args =
            ["check", "--exec", "sh kernel.sh", "--cases", "2", "--wide", "0", "--shapes", "1x2x9", "--timeout", "1"];
        let args = args.into_iter().chain(["--no-power", "--no-shrink"]);
        Trial {
            entry: "check --exec",
            kind: "workers",
            name: name.into(),
            args: args.map(String::from).collect(),
            files: answers.iter().cloned().chain([kernel]).collect(),
            environment: Vec::new(),
            ends: Ends::Verdict,
            mentions: None,
            outputs: Vec::new(),
            hang: Fault::Worker,
            look,
        }
    };
    SCRIPTS.iter().map(trial).collect()
}
