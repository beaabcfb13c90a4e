//! Files and answers of strangers: names that would drive a terminal, and files that are none or too large.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command as Tool;
use std::time::Duration;

use assay_core::text::drives_terminal;
use serde_json::{Value, json};

use super::workplace::Workplace;
use crate::common::command::{Output, assay, assert_refused, command};

/// A name with the controls of a terminal, of C0 and C1, one that turns the direction of writing, and a line that would read like a verdict.
const HOSTILE: &str = "x\u{1b}]0;owned\u{7}\u{9b}2J\u{7f}\u{202e}\u{2028}\r\nPASS  everything";

/// A safetensors file of zeros with these tensors, each of 32 bits, and metadata.
fn safetensors(tensors: &[(&str, &str, &[usize])], metadata: &Value) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    header.insert("__metadata__".into(), metadata.clone());
    for (name, dtype, shape) in tensors {
        let begin = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; end]].concat()
}

/// The outcome of a command whose output drives no terminal, which ends within a minute.
#[track_caller]
fn quiet(args: &[&str]) -> Output {
    let output: Output = command().args(args).timeout(Duration::from_mins(1)).output().unwrap().into();
    for text in [&output.stdout, &output.stderr] {
        let raw = text.chars().find(|&c| drives_terminal(c) && c != '\n');
        assert_eq!(raw, None, "{args:?}: {text:?}");
        assert!(!text.lines().any(|line| line.starts_with("PASS  everything")), "{args:?}: {text}");
    }
    output
}

/// Runs a command that refuses its input in one line with all of `parts`, and shows no raw control character.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let output = quiet(args);
    assert_eq!((output.code, output.stderr.lines().count()), (2, 1), "{args:?}: {}", output.stderr);
    for part in parts {
        assert!(output.stderr.contains(part), "{args:?}: `{part}` not in {}", output.stderr);
    }
}

#[test]
fn foreign_text_drives_no_terminal_whatever_it_names() {
    let workplace = Workplace::new();
    let put = |name: &str, content: &[u8]| {
        let path = workplace.path(name);
        fs::write(&path, content).unwrap();
        path
    };
    let folder = |name: &str| {
        let path = workplace.path(name);
        fs::create_dir(&path).unwrap();
        path
    };
    // Shown as it is escaped, on one line.
    let shown = r"x\u{1b}]0;owned\u{7}\u{9b}2J\u{7f}\u{202e} PASS";
    let problem = workplace.path("problem.safetensors");
    assert_eq!(assay(&["generate", "--shape", "1x2x3", "--dtype", "f32", "-o", &problem]).code, 0);

    // Tensors that no output is, in a file of that name.
    let outputs: [(&str, &str, &[usize]); 3] =
        [("loss", "F32", &[]), ("dlogits", "F32", &[1, 2, 3]), (HOSTILE, "F32", &[1])];
    let named = put(&format!("{HOSTILE}.safetensors"), &safetensors(&outputs, &json!({})));
    for json in ["-", "/dev/null"] {
        let judged = quiet(&[
            "judge",
            "--problem",
            &problem,
            "--candidate",
            &named,
            "--json",
            json,
            "--markdown",
            &workplace.path("page.md"),
        ]);
        assert_eq!(judged.code, 1, "{}", judged.stderr);
        assert!(format!("{}{}", judged.stdout, judged.stderr).contains(r"\u{9b}"), "{}", judged.stderr);
    }
    assert!(!fs::read_to_string(workplace.path("page.md")).unwrap().contains(|c| drives_terminal(c) && c != '\n'));
    let missing = put("missing.safetensors", &safetensors(&[(HOSTILE, "F32", &[1])], &json!({})));
    refused(&["judge", "--problem", &problem, "--candidate", &missing], &["not in the file", shown]);
    refused(&["judge", "--problem", &problem, "--candidate", &format!("{missing}{HOSTILE}")], &[r"\u{1b}]0;owned"]);
    let shape = put("shape.safetensors", &safetensors(&[("loss", HOSTILE, &[])], &json!({})));
    refused(&["judge", "--problem", &problem, "--candidate", &shape], &["header: got"]);

    // Problems: other tensors, metadata, and a manifest beside them.
    let other = put(
        "other.safetensors",
        &safetensors(
            &[("logits", "F32", &[1, 1, 2]), ("old_logps", "F32", &[1, 1]), (HOSTILE, "F32", &[1])],
            &json!({HOSTILE: HOSTILE}),
        ),
    );
    refused(&["replay", &other], &["tensor `ids`: not in the file", r"\u{1b}]0;owned"]);
    refused(&["replay", &other, "--logits", HOSTILE], &[r"\u{9b}"]);
    let spec = put(
        "spec.safetensors",
        &safetensors(&[("logits", "F32", &[1, 2, 3])], &json!({"spec": format!("{{\"{HOSTILE}\": 1}}")})),
    );
    refused(&["replay", &spec], &["metadata `spec`"]);
    let listed = folder("listed");
    fs::copy(&problem, format!("{listed}/problem.safetensors")).unwrap();
    let entry = |bytes: u64, sha256: &str| {
        let text = json!(sha256).to_string().replace('\u{7f}', "\\u007f");
        format!(
            "[[file]]\nname = \"problem.safetensors\"\nbytes = {bytes}\nsha256 = {text}\nsource = \"\"\nlicence = \"\"\n"
        )
    };
    let bytes = fs::metadata(&problem).unwrap().len();
    fs::write(format!("{listed}/manifest.toml"), entry(bytes, HOSTILE)).unwrap();
    refused(&["replay", &format!("{listed}/problem.safetensors")], &["sha256", r"\u{9b}2j"]);

    // Recorded runs of other projects.
    let run: Value = serde_json::from_str(&fs::read_to_string(a_run()).unwrap()).unwrap();
    for at in ["/peer", "/function", "/dtype"] {
        let mut run = run.clone();
        *run.pointer_mut(at).unwrap() = HOSTILE.into();
        refused(&["peers", &put("run.json", run.to_string().as_bytes())], &[r"\u{1b}]0;owned"]);
    }
    for at in ["/options", "/inputs", "/expected"] {
        let mut run = run.clone();
        run.pointer_mut(at).unwrap().as_object_mut().unwrap().insert(HOSTILE.into(), json!(1));
        assert_ne!(quiet(&["peers", &put("run.json", run.to_string().as_bytes())]).code, 101);
    }
    let mut broken = run.clone();
    broken["expected"]["loss"] = HOSTILE.into();
    refused(&["peers", &put("run.json", broken.to_string().as_bytes())], &["expected.loss: got", r"owned"]);
    quiet(&["peers", &put(&format!("{HOSTILE}.json"), run.to_string().as_bytes())]);

    // A suite, specs, limits and results.
    let suite = workplace.path("suite");
    assert_eq!(assay(&["suite", "--cases", "1", "--wide", "0", "-o", &suite]).code, 0);
    let whole: Value = serde_json::from_str(&fs::read_to_string(format!("{suite}/suite.json")).unwrap()).unwrap();
    for (field, value) in [("version", json!(HOSTILE)), ("project", json!([HOSTILE, []])), (HOSTILE, json!(1))] {
        let mut changed = whole.clone();
        changed[field] = value;
        fs::write(format!("{suite}/suite.json"), changed.to_string()).unwrap();
        refused(&["judge", &suite, "--candidates", &suite], &[r"\u{1b}]0;owned"]);
    }
    let field = json!({HOSTILE: 1}).to_string();
    for name in ["spec.json", "spec.yaml", "spec.toml"] {
        let text = if name.ends_with("toml") { format!("{} = 1", json!(HOSTILE)) } else { field.clone() };
        refused(&["spec", "--spec", &put(name, text.as_bytes())], &["spec."]);
    }
    refused(&["spec", "--preset", "trl", &format!("{HOSTILE}=1")], &[r"\u{1b}]0;owned"]);
    refused(&["report", &put("result.json", field.as_bytes()), "-o", "-"], &["got an object with", r"\u{1b}]0;owned"]);
    let replayed =
        json!({"command": HOSTILE, "pass": true, "checks": [], "ignored": [{"check": HOSTILE, "reason": HOSTILE}]});
    quiet(&["report", &put("replayed.json", replayed.to_string().as_bytes()), "-o", "-"]);
}

#[test]
fn foreign_lines_and_arguments_drive_no_terminal() {
    // The lines of a worker, and arguments, which clap quotes.
    let line = HOSTILE.replace("\r\n", " ");
    quiet(&["check", "--cases", "1", "--exec", &format!("printf '%s\\n' '{line}'")]);
    let told = quiet(&["check", "--cases", "1", "--exec", &format!("sh -c 'printf \"%s\" \"{line}\" >&2; exit 1'")]);
    assert_eq!(told.code, 2, "{}{}", told.stdout, told.stderr);
    for args in [&[HOSTILE][..], &["spec", HOSTILE], &["generate", "--shape", HOSTILE], &["check", "--impl", HOSTILE]] {
        assert_eq!(quiet(args).code, 2);
    }
}

/// A recorded run of another project.
fn a_run() -> std::path::PathBuf {
    let mut paths: Vec<_> = fs::read_dir("fixtures/peers").unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths.swap_remove(0)
}

fn fifo(path: &str) {
    assert!(Tool::new("mkfifo").arg(path).status().unwrap().success());
}

fn link_to_device(path: &str) {
    symlink("/dev/zero", path).unwrap();
}

#[test]
fn files_found_that_are_pipes_or_devices_are_refused() {
    let workplace = Workplace::new();
    let folder = |name: &str| {
        let path = workplace.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    };
    let problem = workplace.path("problem.safetensors");
    assert_eq!(assay(&["generate", "--shape", "1x2x3", "-o", &problem]).code, 0);
    // Beside a problem, in the folders of results, and of a checkpoint; and what a user names and no reader can seek in.
    let [piped, endless] = ["piped", "endless"].map(folder);
    for beside in [&piped, &endless] {
        fs::copy(&problem, format!("{beside}/problem.safetensors")).unwrap();
    }
    fifo(&format!("{piped}/manifest.toml"));
    symlink("/dev/zero", format!("{endless}/manifest.toml")).unwrap();
    refused(
        &["replay", &format!("{piped}/problem.safetensors")],
        &["manifest.toml: cannot read: got a pipe, expected a regular file"],
    );
    refused(&["replay", &format!("{endless}/problem.safetensors")], &["manifest.toml: cannot read: got a device"]);
    let runs = folder("runs");
    fifo(&format!("{runs}/run.json"));
    refused(&["peers", &runs], &["run.json: cannot read: got a pipe"]);
    let repros = folder("repros");
    fifo(&format!("{repros}/kept.safetensors"));
    refused(
        &["check", "--impl", "native", "--cases", "1", "--repros", &repros],
        &["kept.safetensors: cannot open: got a pipe"],
    );
    refused(&["judge", "--problem", &problem, "--candidate", &format!("{repros}/kept.safetensors")], &["got a pipe"]);
    refused(&["judge", "--problem", "/dev/zero", "--candidate", &problem], &["/dev/zero: cannot open: got a device"]);
    refused(&["spec", "--spec", "/dev/zero"], &["/dev/zero: cannot read: got more than 1048576 bytes"]);
    if cfg!(feature = "train") {
        let model = folder("model");
        fifo(&format!("{model}/config.json"));
        let prompts = workplace.path("prompts.jsonl");
        fs::write(&prompts, "{\"prompt\": \"a\"}\n").unwrap();
        let args = ["record", "--model", &model, "--prompts", &prompts, "--out", &workplace.path("out.safetensors")];
        refused(&args, &["config.json: cannot read: got a pipe"]);
    }
    // The description of a suite, which is unpacked as it came.
    let [suite, answers] = [workplace.path("suite"), folder("answers")];
    assert_eq!(assay(&["suite", "--cases", "1", "--wide", "0", "-o", &suite]).code, 0);
    let description = format!("{suite}/suite.json");
    let kept = fs::read(&description).unwrap();
    for (make, given) in [(fifo as fn(&str), "a pipe"), (link_to_device as fn(&str), "a device")] {
        fs::remove_file(&description).unwrap();
        make(&description);
        let reason = format!("suite.json: cannot read: got {given}, expected a regular file");
        refused(&["judge", &suite, "--candidates", &answers], &[&reason]);
    }
    fs::remove_file(&description).unwrap();
    fs::write(&description, kept).unwrap();
    // An answer that is a pipe is a fault of the kernel.
    fifo(&format!("{answers}/0000.safetensors"));
    let judged = quiet(&["judge", &suite, "--candidates", &answers]);
    assert!(judged.code == 1 && judged.stdout.contains("got a pipe"), "{}{}", judged.stdout, judged.stderr);
}

#[test]
fn suite_of_many_problems_deals_them_one_at_a_time() {
    let workplace = Workplace::new();
    let suite = workplace.path("suite");
    assert_eq!(assay(&["suite", "--cases", "1", "--wide", "0", "-o", &suite]).code, 0);
    let path = format!("{suite}/suite.json");
    let mut whole: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    whole["deck"]["cases"] = json!(1000);
    fs::write(&path, whole.to_string()).unwrap();
    let empty = workplace.path("empty");
    fs::create_dir(&empty).unwrap();
    let judged = quiet(&["judge", &suite, "--candidates", &empty]);
    assert_eq!(judged.code, 1, "{}", judged.stderr);
    assert!(judged.stdout.contains("after 10 of 1000 problems"), "{}", judged.stdout);
    assert!(judged.stdout.contains("it has no file for this problem"), "{}", judged.stdout);
    // More than a folder of answers can be of is refused.
    whole["deck"]["cases"] = json!(10_000_000);
    fs::write(&path, whole.to_string()).unwrap();
    let judged = quiet(&["judge", &suite, "--candidates", &empty]);
    assert!(judged.code == 2 && judged.stderr.contains("expected at most 1000 for 0 answers"), "{}", judged.stderr);
}

#[test]
fn candidate_larger_than_its_problem_is_refused_by_its_header() {
    let workplace = Workplace::new();
    let [problem, candidate] = ["problem.safetensors", "candidate.safetensors"].map(|name| workplace.path(name));
    assert_eq!(assay(&["generate", "--shape", "2x2x3", "--dtype", "f32", "-o", &problem]).code, 0);
    // 4 TB, of which the file has none: to read them would be seen.
    for (name, dims) in [
        ("dlogits", vec![2, 2, 250_000_000_000_u64]),
        ("logp", vec![2, 2, 250_000_000_000]),
        ("entropy", vec![2, 500_000_000_000]),
    ] {
        let end = 4 * dims.iter().product::<u64>();
        let header = json!({name: {"dtype": "F32", "shape": dims, "data_offsets": [0, end]}}).to_string();
        fs::write(&candidate, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        fs::OpenOptions::new().write(true).open(&candidate).unwrap().set_len(8 + header.len() as u64 + end).unwrap();
        let parts =
            [format!("tensor `{name}`: got shape {dims:?}"), "expected [2, 2".to_string(), "of the problem's".into()];
        refused(&["judge", "--problem", &problem, "--candidate", &candidate], &parts.each_ref().map(String::as_str));
    }
}

#[test]
fn problem_beyond_a_limit_of_memory_is_an_error() {
    let workplace = Workplace::new();
    let suite = workplace.path("suite");
    assert_eq!(assay(&["suite", "--cases", "1", "--wide", "0", "--dtypes", "f32", "-o", &suite]).code, 0);
    let path = format!("{suite}/suite.json");
    let mut whole: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    whole["deck"]["shapes"] = json!({"given": [[1, 1, 200_000_000]]});
    fs::write(&path, whole.to_string()).unwrap();
    // 800 MB of logits fit, and the row of f64 that they are drawn in does not.
    let mut limited = Tool::new("sh");
    limited.args(["-c", "ulimit -v 2000000; exec \"$0\" \"$@\""]).arg(assert_cmd::cargo::cargo_bin!("assay"));
    let output = limited.args(["judge", &suite, "--candidates", &suite]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}: {stderr}", output.status);
    assert!(stderr.contains("`shape`: got [1, 1, 200000000], which takes 4000000"), "{stderr}");
}

#[test]
fn unfinished_files_of_ended_processes_are_removed() {
    let workplace = Workplace::new();
    let made = |name: &str, locked: bool| {
        let path = workplace.path(name);
        let file = fs::File::create(&path).unwrap();
        if locked {
            file.lock().unwrap();
        }
        (path, file)
    };
    let (ended, (alive, _lock), (others, _)) =
        (made(".assay-unfinished-abc123", false).0, made(".assay-unfinished-def456", true), made(".tmpabc123", false));
    let target = workplace.path("target");
    fs::write(&target, "kept").unwrap();
    let link = workplace.path(".assay-unfinished-link00");
    symlink(&target, &link).unwrap();
    assert_eq!(assay(&["spec", "--preset", "trl", "-q", "--json", &workplace.path("spec.json")]).code, 0);
    assert!(!Path::new(&ended).exists(), "nobody writes it any more");
    assert!(
        [&alive, &others, &target, &link].iter().all(|path| Path::new(path).exists()),
        "those are in use, or not of this program"
    );
}

#[test]
fn numbers_and_products_in_messages_are_short_and_exact() {
    let workplace = Workplace::new();
    let spec = workplace.path("spec.json");
    fs::write(&spec, r#"{"temperature": -1e300}"#).unwrap();
    refused(&["spec", "--spec", &spec], &["spec.json", "got -1e300"]);
    for option in ["--seconds", "--timeout"] {
        let wanted = format!("{option}: got 1e308, expected a number of seconds above 0\n");
        refused(&["check", "--exec", "true", "--cases", "1", option, "1e308"], &[&wanted]);
    }
    // A text in the place of what is expected is cut as one in the place of what is given.
    let listed = workplace.path("listed");
    fs::create_dir(&listed).unwrap();
    fs::copy("fixtures/exported/grpo_f32.toml", format!("{listed}/problem.safetensors")).unwrap();
    let bytes = fs::metadata(format!("{listed}/problem.safetensors")).unwrap().len();
    let entry = format!("name = \"problem.safetensors\"\nbytes = {bytes}\nsource = \"\"\nlicence = \"\"");
    fs::write(format!("{listed}/manifest.toml"), format!("[[file]]\n{entry}\nsha256 = \"{}\"\n", "x".repeat(100_000)))
        .unwrap();
    let output = quiet(&["replay", &format!("{listed}/problem.safetensors")]);
    assert_eq!((output.code, output.stderr.len() < 1000), (2, true), "{:.2000}", output.stderr);
    let manifest = workplace.path("program.toml");
    let text = fs::read_to_string("fixtures/exported/grpo_f32.toml").unwrap();
    let at = text.lines().find(|line| line.starts_with("shape")).unwrap();
    fs::write(&manifest, text.replace(at, "shape = [4294967296, 4294967296, 4]")).unwrap();
    if cfg!(feature = "pjrt") {
        let implementation = format!("file:{manifest}");
        assert_refused(
            &["check", "--impl", &implementation, "--cases", "1"],
            &["shape: got [4294967296, 4294967296, 4]", "a product that fits"],
        );
    }
}

#[test]
fn timeout_holds_for_the_first_line_of_a_worker() {
    refused(
        &["check", "--exec", "sleep 600", "--timeout", "0.25", "--cases", "1"],
        &["`sleep 600`: no first line in 250ms: killed"],
    );
}
