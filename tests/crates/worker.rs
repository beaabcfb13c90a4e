//! Workers that are right, that refuse, that fail, and that break the protocol in every way, in a few lines of shell.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use assay::fixture::write_candidate;
use assay::implementation::Implementation;
use assay::judge::generate::{Recipe, Regime};
use assay::native::Native;
use assay::problem::{Candidate, Dtype, Problem};
use assay::spec::LossSpec;
use assay::worker::{Worker, WorkerAnswer, WorkerError, WorkerLaunch};

const HELLO: &str = r#"echo '{"protocol":"assay-check/1","dtypes":["f32"],"outputs":["logp","entropy"],"about":"sh"}'"#;

/// Takes a request apart into `$id`, `$problem` and `$candidate`.
const READ: &str = r#"
read -r line || exit 0
part() { printf '%s' "$line" | sed "s/.*\"$1\":\"*\([^,\"]*\).*/\1/"; }
id=$(part id) problem=$(part problem) candidate=$(part candidate)
"#;

/// A folder with what the native kernel makes of a problem.
struct Fixture {
    folder: tempfile::TempDir,
    problem: Problem,
    expected: Candidate,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe {
        shape: [2, 3, 17],
        dtype: Dtype::F32,
        regime: Regime::Peaked,
        seed: 1,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    let spec = LossSpec::default();
    let problem = recipe.problem(&spec).unwrap();
    let expected = Native::default().run(&spec, problem.clone(), 1).unwrap();
    write_candidate(folder.path().join("expected"), &expected, &BTreeMap::new()).unwrap();
    Fixture { folder, problem, expected }
}

impl Fixture {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A worker that does as `script` says, in which `$folder` is that of the fixture.
    fn launch(&self, script: &str) -> WorkerLaunch {
        let mut launch = WorkerLaunch::new(["sh", "-c", script]);
        launch.environment.push(("folder".into(), self.folder.path().into()));
        launch.answer = Duration::from_millis(500);
        launch
    }

    fn start(&self, script: &str) -> Worker {
        Worker::start(self.launch(script)).unwrap()
    }

    fn ask(&self, worker: &mut Worker) -> Result<WorkerAnswer<assay::problem::FloatArray<ndarray::Ix3>>, WorkerError> {
        worker.ask(&LossSpec::default(), &self.problem)
    }

    /// The error of a worker that says hello, reads one request, and goes on with `script`.
    fn error(&self, script: &str) -> WorkerError {
        let mut worker = self.start(&format!("{HELLO}; {READ}{script}"));
        self.ask(&mut worker).map(|_| ()).expect_err(script)
    }

    /// The message of it, which takes no longer than the limit and a second.
    fn message(&self, script: &str) -> String {
        let started = Instant::now();
        let message = self.error(script).to_string();
        assert!(started.elapsed() < Duration::from_secs(3), "{script}: {:?}", started.elapsed());
        message
    }

    /// The process whose number the script left in `$folder/NAME`.
    fn pid(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap().trim().into()
    }
}

/// Whether it runs: what is dead may wait for somebody to fetch its exit code.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// Killing returns before the killed are gone.
fn expect_gone(pid: &str) {
    let deadline = Instant::now() + Duration::from_secs(2);
    while runs(pid) {
        assert!(Instant::now() < deadline, "{pid} is an orphan");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn expect_in(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn worker_answer_is_the_candidate_and_leaves_no_file() {
    let fixture = fixture();
    let mut worker = fixture.start(&format!(
        r#"{HELLO}; while true; do {READ}
        [ -f "$problem" ] || exit 3
        echo "$problem" > "$folder/asked"
        cp "$folder/expected" "$candidate" && echo "{{\"id\":$id}}"; done"#
    ));
    assert_eq!(worker.hello().dtypes, [Dtype::F32]);
    assert_eq!(worker.hello().about.as_deref(), Some("sh"));
    let mut problems = Vec::new();
    for _ in 0..3 {
        let Ok(WorkerAnswer::Candidate(candidate)) = fixture.ask(&mut worker) else { panic!("no candidate") };
        assert!(candidate.gradient.same_bits(&fixture.expected.gradient));
        assert!(candidate.logp.unwrap().same_bits(fixture.expected.logp.as_ref().unwrap()));
        let problem = PathBuf::from(fixture.pid("asked"));
        assert_eq!(fs::read_dir(problem.parent().unwrap()).unwrap().count(), 0, "both files are gone");
        problems.push(problem);
    }
    problems.dedup();
    assert_eq!(problems.len(), 3, "no name is used twice");
    drop(worker);
    assert!(!problems[0].parent().unwrap().exists(), "and the folder with the worker");
}

#[test]
fn worker_times_its_calls_in_numbers_above_0() {
    let fixture = fixture();
    let answer = r#"cp "$folder/expected" "$candidate"; printf '{"id":%s,"seconds":[1e-6,2e-6]}\n' "$id""#;
    let mut worker = fixture.start(&format!("{HELLO}; {READ}{answer}"));
    let (answer, seconds) = worker.time(&LossSpec::default(), &fixture.problem, 2).unwrap();
    assert!(matches!(answer, WorkerAnswer::Candidate(_)));
    assert_eq!(seconds, [1e-6, 2e-6]);
    // The request says how many calls are asked for.
    let said = r#"case "$line" in *'"calls":7'*) echo "{\"id\":$id,\"error\":\"seven\"}";; *) exit 3;; esac"#;
    let mut worker = fixture.start(&format!("{HELLO}; {READ}{said}"));
    let error = worker.time(&LossSpec::default(), &fixture.problem, 7).map(|_| ()).expect_err("it says so");
    assert!(error.to_string().contains("seven"), "{error}");
    for (seconds, expected) in [
        ("[1e-6,0]", "expected numbers of seconds above 0"),
        ("[1e-6,-1e-6]", "expected numbers of seconds above 0"),
        ("[1e-6]", "expected 2 times"),
        ("[1e-6,1e-6,1e-6]", "expected 2 times"),
        // Milliseconds, say: longer than the answer was waited for.
        ("[1e-6,9.0]", "expected at most 0."),
    ] {
        let script = format!(r#"{HELLO}; {READ}printf '{{"id":%s,"seconds":{seconds}}}\n' "$id""#);
        let answer = fixture.start(&script).time(&LossSpec::default(), &fixture.problem, 2);
        expect_in(&answer.map(|_| ()).expect_err(seconds).to_string(), &["seconds: got", expected]);
    }
}

#[test]
fn worker_that_does_not_compute_a_spec_answers_and_goes_on() {
    let fixture = fixture();
    let unsupported = r#"echo "{\"id\":$id,\"unsupported\":\"kl k2\"}""#;
    let mut worker = fixture.start(&format!("{HELLO}; while true; do {READ} {unsupported}; done"));
    for _ in 0..2 {
        assert!(matches!(fixture.ask(&mut worker), Ok(WorkerAnswer::Unsupported(what)) if what == "kl k2".into()));
    }
}

#[test]
fn worker_is_not_asked_for_a_dtype_it_does_not_take() {
    let fixture = fixture();
    let hello = HELLO.replace("f32", "bf16");
    let mut worker = fixture.start(&format!("{hello}; {READ} touch \"$folder/asked\""));
    assert!(matches!(fixture.ask(&mut worker), Ok(WorkerAnswer::Unsupported(what)) if what == "logits in f32".into()));
    drop(worker);
    assert!(!fixture.path("asked").exists());
}

#[test]
fn worker_error_is_shown_in_its_words_and_it_goes_on() {
    let fixture = fixture();
    let failing = r#"printf '%s\n' "{\"id\":$id,\"error\":\"line 1\\nno \\u001b[31mred\"}""#;
    let mut worker = fixture.start(&format!("{HELLO}; while true; do {READ} {failing}; done"));
    for _ in 0..2 {
        let error = fixture.ask(&mut worker).map(|_| ()).unwrap_err();
        assert!(matches!(error, WorkerError::Failed { .. }));
        expect_in(&error.to_string(), &["line 1\nno \\u{1b}[31mred"]);
    }
}

#[test]
fn worker_bad_output_or_written_input_is_named() {
    let fixture = fixture();
    let output = r#"echo '{"id":1,"output":{"field":"logp","given":"shape [3]","expected":"[2, 3]"}}'"#;
    let error = fixture.error(output);
    assert!(matches!(&error, WorkerError::Output { field, .. } if field.raw() == "logp"), "{error}");
    expect_in(&error.to_string(), &["output `logp`: got shape [3], expected [2, 3]"]);
    let error = fixture.error(r#"echo '{"id":1,"mutated":"logits"}'"#);
    assert!(matches!(&error, WorkerError::InputMutated { field, .. } if field.raw() == "logits"), "{error}");
}

#[test]
fn worker_crash_shows_signal_and_last_lines_of_stderr() {
    let fixture = fixture();
    let message = fixture.message("for i in $(seq 5000); do echo \"line $i\" >&2; done; kill -SEGV $$");
    expect_in(&message, &["SIGSEGV", "\nline 4989\n", "line 5000"]);
    assert!(!message.contains("line 4988\n"), "only the last of them");
    expect_in(&fixture.message("exit 3"), &["it exited by itself, exit status: 3"]);
    // An interpreter with a framework takes a while to end after it has closed its stdout.
    expect_in(&fixture.message("exec 1>&-; sleep 1; exit 5"), &["it exited by itself, exit status: 5"]);
}

#[test]
fn worker_that_ended_is_restarted_by_the_next_question() {
    let fixture = fixture();
    let mut worker = fixture.start(&format!(
        r#"{HELLO}; {READ}
        if mkdir "$folder/second"; then kill -ABRT $$; fi
        cp "$folder/expected" "$candidate"; echo "{{\"id\":$id}}""#
    ));
    let died = fixture.ask(&mut worker).map(|_| ()).unwrap_err();
    expect_in(&died.to_string(), &["SIGABRT"]);
    assert!(matches!(fixture.ask(&mut worker), Ok(WorkerAnswer::Candidate(_))));
}

#[test]
fn worker_hang_is_killed_on_time_with_all_it_started() {
    let fixture = fixture();
    let started = Instant::now();
    let error = fixture.error("echo waiting >&2; sleep 600 & echo $! > $folder/child; echo $$ > $folder/pid; wait");
    assert!(matches!(error, WorkerError::TimedOut { .. }), "{error}");
    expect_in(&error.to_string(), &["no answer in 500ms: killed", "waiting"]);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    expect_gone(&fixture.pid("child"));
    expect_gone(&fixture.pid("pid"));
}

#[test]
fn worker_that_never_says_what_it_is_is_killed() {
    let fixture = fixture();
    let mut launch = fixture.launch("sleep 600");
    launch.start = Duration::from_millis(200);
    let error = Worker::start(launch).map(|_| ()).unwrap_err().to_string();
    expect_in(&error, &["no first line in 200ms: killed"]);
}

#[test]
fn worker_dropped_ends_even_unwilling_and_leaves_no_orphan() {
    let fixture = fixture();
    let deaf = fixture.start(&format!("sleep 600 & echo $! > $folder/child; trap '' TERM INT HUP; {HELLO}; sleep 600"));
    drop(deaf);
    expect_gone(&fixture.pid("child"));
    // One that ends by itself, but not what it started.
    let gone = fixture.start(&format!("sleep 600 & echo $! > $folder/child; {HELLO}"));
    drop(gone);
    expect_gone(&fixture.pid("child"));
}

#[test]
fn worker_that_dies_while_a_child_holds_its_pipes_is_dead() {
    let fixture = fixture();
    let mut launch =
        fixture.launch(&format!("{HELLO}; {READ} sleep 600 & echo $! > $folder/child; echo why >&2; exit 7"));
    launch.answer = Duration::from_secs(20);
    let mut worker = Worker::start(launch).unwrap();
    let error = fixture.ask(&mut worker).map(|_| ()).unwrap_err();
    assert!(matches!(error, WorkerError::Died { .. }), "{error}");
    expect_in(&error.to_string(), &["it exited by itself, exit status: 7", "why"]);
    expect_gone(&fixture.pid("child"));
    // Before the first line, too.
    let mut launch = fixture.launch("sleep 600 & exit 8");
    launch.start = Duration::from_secs(20);
    let error = Worker::start(launch).map(|_| ()).unwrap_err().to_string();
    expect_in(&error, &["exit status: 8"]);
}

#[test]
fn worker_line_outside_the_protocol_is_shown_with_what_is_due() {
    let fixture = fixture();
    let expected = r#"expected {"id": …}"#;
    for (script, parts) in [
        ("echo Loading weights", ["`Loading weights`", expected]),
        ("echo '{\"id\":0}'", ["id: got 0", "expected 1"]),
        ("echo '{\"id\":'", ["got `{\"id\":`", expected]),
        ("echo '{\"id\":\"1\"}'", ["got `{\"id\":\"1\"}`", expected]),
        ("echo '[]'", ["got `[]`", expected]),
        ("printf '\\377\\n'", ["not UTF-8", expected]),
        ("printf '{\"id\":1}'", ["a line without an end: {\"id\":1}", expected]),
        ("head -c 100000 /dev/zero | tr '\\0' x; echo", ["a line of more than 65536 bytes", expected]),
        ("yes no", ["got `no`", expected]),
        ("yes | tr -d '\\n'", ["a line of more than 65536 bytes", expected]),
    ] {
        expect_in(&fixture.message(script), &parts);
    }
}

#[test]
fn worker_of_another_protocol_is_refused() {
    let fixture = fixture();
    for (hello, parts) in [
        (HELLO.replace("check/1", "check/2"), ["protocol: got `assay-check/2`", "expected assay-check/1"]),
        (HELLO.replace("f32", "int8"), ["first line: got", "\"dtypes\": […]"]),
        (HELLO.replace("entropy", "perplexity"), ["outputs: got `perplexity`", "token_loss"]),
        ("echo hello".into(), ["got `hello`", "assay-check/1"]),
    ] {
        let error = Worker::start(fixture.launch(&hello)).map(|_| ()).expect_err(&hello).to_string();
        expect_in(&error, &parts);
    }
    let error = Worker::start(fixture.launch("echo no module >&2; exit 1")).map(|_| ()).unwrap_err().to_string();
    expect_in(&error, &["exit status: 1", "no module"]);
    let error = Worker::start(WorkerLaunch::new(["/nowhere/kernel"])).map(|_| ()).unwrap_err().to_string();
    expect_in(&error, &["`/nowhere/kernel`: cannot be started"]);
    assert!(Worker::start(WorkerLaunch::new(Vec::<String>::new())).is_err());
}

#[test]
fn worker_candidate_missing_or_half_written_is_an_error() {
    let fixture = fixture();
    let done = "echo \"{\\\"id\\\":$id}\"";
    for (script, parts) in [
        (done.to_string(), ["1-candidate.safetensors", "cannot read"]),
        (format!("head -c 100 $folder/expected > $candidate; {done}"), ["1-candidate.safetensors", "expected"]),
        (format!("mkfifo $candidate; {done}"), ["no regular file", "expected one"]),
        (format!("ln -s $folder/expected $candidate; {done}"), ["no regular file", "expected one"]),
        (format!("truncate -s 1T $candidate; {done}"), ["length: got 1099511627776 bytes", "expected at most"]),
        (format!("cp $problem $candidate; {done}"), ["tensor `dlogits`: not in the file", "[advantages"]),
    ] {
        let error = fixture.error(&script);
        assert!(matches!(error, WorkerError::File { .. }), "{error}");
        expect_in(&error.to_string(), &parts);
    }
}

#[test]
fn worker_output_promised_and_missing_is_an_error() {
    let mut fixture = fixture();
    fixture.expected.entropy = None;
    write_candidate(fixture.path("expected"), &fixture.expected, &BTreeMap::new()).unwrap();
    let error = fixture.error("cp $folder/expected $candidate; echo \"{\\\"id\\\":$id}\"").to_string();
    expect_in(&error, &["entropy: got nothing", "expected what the worker promised"]);
}

#[test]
fn worker_that_does_not_read_a_long_request_ends_on_time() {
    let fixture = fixture();
    let mut spec = LossSpec::default();
    spec.support.excluded_ids = (0..200_000).map(|_| 1).collect();
    let mut worker = fixture.start(&format!("{HELLO}; sleep 600"));
    let started = Instant::now();
    let error = worker.ask(&spec, &fixture.problem).map(|_| ()).unwrap_err();
    assert!(matches!(error, WorkerError::TimedOut { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[test]
fn worker_files_are_in_shared_memory_where_there_is_some() {
    let fixture = fixture();
    let mut worker = fixture.start(&format!("{HELLO}; {READ} echo $problem > $folder/asked; exit 1"));
    assert!(fixture.ask(&mut worker).is_err());
    let problem = fixture.pid("asked");
    assert!(!Path::new("/dev/shm").is_dir() || problem.starts_with("/dev/shm/assay-worker-"), "{problem}");
}

#[test]
fn worker_folder_of_a_dead_campaign_is_removed_by_the_next() {
    let made = |locked: bool| {
        let folder = tempfile::Builder::new().prefix("assay-worker-").tempdir().unwrap();
        let lock = fs::File::open(folder.path()).unwrap();
        if locked {
            lock.lock().unwrap();
        }
        (folder, locked.then_some(lock))
    };
    let (dead, alive) = (made(false), made(true));
    let fixture = fixture();
    drop(Worker::start(fixture.launch(&format!("{HELLO}; cat >/dev/null"))).unwrap());
    assert!(!dead.0.path().exists());
    assert!(alive.0.path().exists());
}
