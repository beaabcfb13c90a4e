//! One run of the command in a folder of its own, and every fault in how it ended and in what it left.

use std::collections::BTreeSet;
use std::env;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The address space of a run in KiB, as a container or a batch system limits it.
const ADDRESS_SPACE: u64 = 3 << 20;

/// The longest error, in bytes: some list the names of all mutants.
const LONGEST_ERROR: usize = 16_000;

/// The most digits of a number in an error.
const MOST_DIGITS: usize = 100;

/// The pause between two looks at a run.
const PAUSE: Duration = Duration::from_millis(2);

/// The time for which a run is watched before it is said to wait for something else than a processor.
const GLANCE: Duration = Duration::from_secs(1);

/// The time that what is removed in the background may take.
const AFTERMATH: Duration = Duration::from_secs(20);

/// The seconds after which a run hangs: `ASSAY_HOSTILE_SECONDS`, or two minutes.
static PATIENCE: LazyLock<Duration> = LazyLock::new(|| {
    let seconds = env::var("ASSAY_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(120))
});

/// The command under test: that which `ASSAY_UNDER_TEST` names, or the one that is built with these tests.
pub(super) fn command_path() -> PathBuf {
    env::var_os("ASSAY_UNDER_TEST").map_or_else(|| env!("CARGO_BIN_EXE_assay").into(), PathBuf::from)
}

/// Something at a path of a run's folder.
#[derive(Clone)]
pub(super) enum Content {
    /// A regular file of these bytes.
    Bytes(Arc<[u8]>),
    /// A regular file of these bytes, and a hole behind them up to this length.
    Sparse(Arc<[u8]>, u64),
    /// A symbolic link.
    Link(String),
    Folder,
    /// A FIFO at whose other end is nobody.
    Fifo,
    /// A FIFO that is held open at both ends while the command runs.
    OpenFifo,
    Absent,
}

impl Content {
    pub(super) fn of(bytes: impl AsRef<[u8]>) -> Self {
        Self::Bytes(bytes.as_ref().into())
    }

    pub(super) fn place(&self, path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match self {
            Self::Bytes(bytes) => fs::write(path, bytes).unwrap(),
            Self::Sparse(bytes, length) => {
                fs::write(path, bytes).unwrap();
                File::options().append(true).open(path).unwrap().set_len(*length).unwrap();
            }
            Self::Link(to) => symlink(to, path).unwrap(),
            Self::Folder => fs::create_dir_all(path).unwrap(),
            Self::Fifo | Self::OpenFifo => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            Self::Absent => {}
        }
    }
}

/// A fault that a run may have, numbered as the kinds that were found when this was first done by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// Code of the working directory was loaded or run.
    ForeignCode = 1,
    /// An output replaced what is no regular file, or lost a mode or a link.
    Output = 2,
    /// A process, a folder in shared memory or a temporary file was left.
    Leftover = 3,
    /// A command that is shown does something else when it is pasted into a shell.
    Unquoted = 4,
    /// A character that drives a terminal was printed.
    Escape = 5,
    /// A panic, or an end by a signal.
    Panic = 6,
    /// A file decided how long the run took or how much memory it held, or a file was overwritten that is no output.
    Unbounded = 7,
    /// Bad input was accepted.
    Silence = 8,
    /// A kernel's end was reported as something else.
    Worker = 9,
    /// A wrong exit code, or an error that is not one clear line.
    Message = 10,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// The ends that a run may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// Exit code 2 and an error.
    Refused,
    /// Exit code 0.
    Success,
    /// A refusal, or success: there is no verdict.
    Work,
    /// A refusal, success, or exit code 1 for a verdict that fails.
    Verdict,
}

/// A check of what a run printed and of its folder, by which it returns what is wrong.
pub(super) type Look = fn(&Path, &Ran) -> Result<(), (Fault, String)>;

/// One run of the command.
#[derive(Clone)]
pub(super) struct Trial {
    /// The entry point, a line of the table.
    pub(super) entry: &'static str,
    /// The kind of input, a column of the table.
    pub(super) kind: &'static str,
    /// A description of the hostile part of the input.
    pub(super) name: String,
    pub(super) args: Vec<String>,
    pub(super) files: Vec<(String, Content)>,
    pub(super) environment: Vec<(&'static str, String)>,
    pub(super) ends: Ends,
    /// The word that an error must contain, such as the file's name.
    pub(super) mentions: Option<String>,
    /// The files and folders that the command may write.
    pub(super) outputs: Vec<String>,
    /// The fault that a hang shows.
    pub(super) hang: Fault,
    pub(super) look: Option<Look>,
}

/// The output of a run, and its end; `None` if it hung.
pub(super) struct Ran {
    pub(super) status: Option<ExitStatus>,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl Ran {
    pub(super) fn text(&self) -> String {
        [&self.stdout, &self.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
    }
}

/// A run whose end is a fault.
pub(super) struct Finding {
    pub(super) fault: Fault,
    pub(super) what: String,
}

/// A folder with the files of one run, and another for its temporary files.
pub(super) struct Sandbox {
    folder: TempDir,
    given: Vec<(String, Content)>,
    /// The FIFOs that are held open.
    open: Vec<File>,
}

impl Sandbox {
    pub(super) fn new(files: &[(String, Content)]) -> Self {
        let mut sandbox = Self { folder: TempDir::new().unwrap(), given: files.to_vec(), open: Vec::new() };
        for folder in ["work", "tmp"] {
            fs::create_dir(sandbox.folder.path().join(folder)).unwrap();
        }
        for (name, content) in files {
            content.place(&sandbox.path(name));
            if matches!(content, Content::OpenFifo) {
                sandbox.open.push(File::options().read(true).write(true).open(sandbox.path(name)).unwrap());
            }
        }
        sandbox
    }

    pub(super) fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.work().join(name)
    }

    /// Starts the command with `args` in the folder, its output into files.
    pub(super) fn start(&self, args: &[String], environment: &[(&str, String)]) -> Child {
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| File::create(self.folder.path().join(name)).unwrap());
        let mut command = Command::new("sh");
        command.args(["-c", r#"ulimit -v "$0"; exec "$@""#, &ADDRESS_SPACE.to_string()]);
        command.arg(command_path()).args(args).current_dir(self.work()).process_group(0);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        for name in ["ASSAY_PJRT_PLUGIN", "TPU_LIBRARY_PATH", "ASSAY_CUDA_DRIVER", "ASSAY_CUDA_PLUGIN", "XLA_FLAGS"] {
            command.env_remove(name);
        }
        command
            .env("TMPDIR", self.folder.path().join("tmp"))
            .env("RAYON_NUM_THREADS", "2")
            .env("CANDLE_NUM_THREADS", "1");
        command.envs(environment.iter().map(|(name, value)| (name, value))).spawn().unwrap()
    }

    /// Waits for a run that [`Sandbox::start`] began; kills one that hangs.
    pub(super) fn wait(&self, mut child: Child) -> Ran {
        let mut status = None;
        // A loaded machine may leave a run without a processor for minutes: it hangs if it waits for none, or has had one for long enough.
        while status.is_none() {
            status = wait_until(*PATIENCE, || child.try_wait().unwrap());
            if status.is_none() && wait_until(GLANCE, || is_starved(child.id()).then_some(())).is_none() {
                break;
            }
        }
        if status.is_none() {
            kill("KILL", &format!("-{}", child.id()));
            child.wait().unwrap();
        }
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| fs::read(self.folder.path().join(name)).unwrap());
        Ran { status, stdout, stderr }
    }

    /// Returns the faults that a run left: processes, folders in shared memory, temporary files, and changed inputs.
    pub(super) fn left(&self, outputs: &[String]) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut left = |what: String| findings.push(Finding { fault: Fault::Leftover, what });
        if let Some(processes) = never(|| self.processes()) {
            left(format!("processes {processes}"));
        }
        if let Some(folder) = never(shared_folder) {
            // Each is told once, whoever left it.
            TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.clone().into());
            left(folder);
        }
        let temporary =
            |name: &String| !outputs.iter().any(|output| name.starts_with(&**output) && !is_temporary(name));
        let given: BTreeSet<&str> = self.given.iter().map(|(name, _)| &**name).collect();
        let names = names_in(&self.work()).into_iter().filter(|name| !given.contains(&**name)).filter(temporary);
        if let Some(name) = names.chain(names_in(&self.folder.path().join("tmp"))).next() {
            left(format!("file {name}"));
        }
        for (name, content) in &self.given {
            if let Content::Bytes(bytes) = content
                && !outputs.iter().any(|output| name.starts_with(&**output))
                && fs::read(self.path(name)).ok().as_deref() != Some(bytes)
            {
                findings.push(Finding { fault: Fault::Unbounded, what: format!("input {name} was changed") });
            }
        }
        findings
    }

    /// Returns the processes whose working directory is in this folder.
    fn processes(&self) -> Option<String> {
        let entries = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let is_here =
            |path: &PathBuf| fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd.starts_with(self.folder.path()));
        let name = |path: PathBuf| fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_string();
        let here: Vec<String> = entries.filter(is_here).map(name).collect();
        (!here.is_empty()).then(|| here.join(", "))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // What a hang or a fault left must not disturb what comes next.
        if let Ok(entries) = fs::read_dir("/proc") {
            for path in entries.flatten().map(|entry| entry.path()) {
                if fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd.starts_with(self.folder.path())) {
                    kill("KILL", &path.file_name().unwrap().to_string_lossy());
                }
            }
        }
    }
}

impl Trial {
    /// Runs it and returns its faults.
    pub(super) fn run(&self) -> Vec<Finding> {
        let sandbox = Sandbox::new(&self.files);
        let ran = sandbox.wait(sandbox.start(&self.args, &self.environment));
        let mut findings = self.faults_of(&ran);
        findings.extend(sandbox.left(&self.outputs));
        if let (Some(look), Some(_)) = (self.look, ran.status)
            && let Err((fault, what)) = look(&sandbox.work(), &ran)
        {
            findings.push(Finding { fault, what });
        }
        findings
    }

    fn faults_of(&self, ran: &Ran) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut found = |fault, what: String| findings.push(Finding { fault, what });
        let stderr = String::from_utf8_lossy(&ran.stderr);
        let Some(status) = ran.status else {
            return vec![Finding { fault: self.hang, what: "hangs".into() }];
        };
        if let Some(c) = raw_character(&ran.stdout).or_else(|| raw_character(&ran.stderr)) {
            found(Fault::Escape, format!("prints {}", c.escape_unicode()));
        }
        let last = stderr.lines().last().unwrap_or_default();
        match status.code() {
            // An allocation that is refused aborts.
            None if stderr.contains("memory allocation of") => found(Fault::Unbounded, format!("aborts: {last}")),
            None => found(Fault::Panic, format!("ends by signal {}: {last}", status.signal().unwrap_or_default())),
            _ if stderr.contains("panicked at") => {
                let at = stderr.lines().find(|line| line.contains("panicked at")).unwrap_or_default();
                found(Fault::Panic, at.into());
            }
            Some(0) if self.ends == Ends::Refused => found(Fault::Silence, "is accepted".into()),
            Some(0) => {}
            Some(code) if self.ends == Ends::Success => {
                found(Fault::Message, format!("exit code {code}: {}", ran.text()));
            }
            Some(1) if self.ends == Ends::Verdict => {}
            Some(2) => {
                if let Some(what) = self.unclear(&stderr) {
                    found(Fault::Message, what);
                }
            }
            Some(code) => found(Fault::Message, format!("exit code {code}: {last}")),
        }
        findings
    }

    /// Returns the unclear part of a refusal's error.
    fn unclear(&self, stderr: &str) -> Option<String> {
        let starts = |start: &str| stderr.lines().filter(|line| line.starts_with(start)).count();
        let (own, of_usage) = (starts("assay: "), starts("error: "));
        let is_digits = |word: &str| word.len() > MOST_DIGITS && word.chars().all(|c| c.is_ascii_digit());
        if own + of_usage != 1 {
            return Some(format!("{} errors: {stderr:?}", own + of_usage));
        }
        // What a kernel wrote to its stderr is told after the error.
        let is_last = stderr.lines().last().is_some_and(|line| line.starts_with("assay: "));
        if own == 1 && !is_last && self.kind != "workers" {
            return Some(format!("the error has several lines: {stderr:?}"));
        }
        if stderr.len() > LONGEST_ERROR {
            return Some(format!("an error of {} bytes", stderr.len()));
        }
        if stderr.split(|c: char| !c.is_ascii_digit()).any(is_digits) {
            return Some(format!("a number of more than {MOST_DIGITS} digits"));
        }
        let mentioned = self.mentions.as_ref().is_none_or(|word| stderr.contains(&**word));
        (!mentioned).then(|| format!("no {:?} in: {}", self.mentions.as_deref().unwrap_or_default(), stderr.trim_end()))
    }
}

/// Returns the first character that drives a terminal: C0 but line breaks and tabs, C1, and those that turn the direction of writing.
pub(super) fn raw_character(bytes: &[u8]) -> Option<char> {
    let drives = |c: &char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    String::from_utf8_lossy(bytes).chars().find(drives)
}

/// Whether a thread of a process group waits for a processor, and the group had less time on one than a run has before it hangs.
fn is_starved(group: u32) -> bool {
    /// The clock ticks of a second, in which Linux counts processor time.
    const TICKS: u64 = 100;
    let (mut runnable, mut ticks) = (false, 0);
    let folders = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    for process in folders(Path::new("/proc")).filter(|path| path.join("task").is_dir()) {
        for thread in folders(&process.join("task")) {
            // `id (name) state parent group …`, and the times in user and system mode at the 12th and 13th place after the name.
            let text = fs::read_to_string(thread.join("stat")).unwrap_or_default();
            let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            if fields.get(2) == Some(&&*group.to_string()) {
                runnable |= matches!(fields[0], "R" | "D");
                ticks += fields[11..13].iter().filter_map(|time| time.parse::<u64>().ok()).sum::<u64>();
            }
        }
    }
    runnable && ticks < PATIENCE.as_secs() * TICKS
}

/// Sends a signal; who is gone gets none.
pub(super) fn kill(signal: &str, process: &str) {
    let command = Command::new("kill").args(["-s", signal, "--", process]).stderr(Stdio::null()).status();
    command.expect("the system has kill");
}

/// Returns what `look` finds before `patience` is over.
pub(super) fn wait_until<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
    loop {
        let found = look();
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        thread::sleep(PAUSE);
    }
}

/// Returns what `look` finds for as long as anything may take to be removed; `None` once it finds nothing.
fn never(look: impl Fn() -> Option<String>) -> Option<String> {
    let mut found = look();
    wait_until(AFTERMATH.min(*PATIENCE), || {
        found = look();
        found.is_none().then_some(())
    });
    found
}

/// The folders of campaigns in shared memory before this process ran any.
static EARLIER: LazyLock<BTreeSet<PathBuf>> = LazyLock::new(worker_folders);

/// Notes the folders that are in shared memory already.
pub(super) fn note_shared_folders() {
    LazyLock::force(&EARLIER);
}

/// The folders that were told as left.
static TOLD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Returns a folder in shared memory that no campaign has locked any more, or which was left by one that locks none.
fn shared_folder() -> Option<String> {
    let unused = |path: &&PathBuf| File::open(path).is_ok_and(|folder| folder.try_lock().is_ok());
    let folders = worker_folders();
    let told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let mut new = folders.difference(&EARLIER).filter(|path| !told.contains(*path)).filter(unused);
    new.next().map(|path| path.display().to_string())
}

fn worker_folders() -> BTreeSet<PathBuf> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return BTreeSet::new() };
    let of_worker =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("assay-worker-"));
    entries.flatten().map(|entry| entry.path()).filter(of_worker).collect()
}

/// Whether a file is named as one that is to be renamed once it is whole: hidden, and not the lock of a run.
fn is_temporary(name: &str) -> bool {
    name.rsplit('/').next().is_some_and(|last| last.starts_with('.') && last != ".lock")
}

/// Returns the paths of all that is below a folder and is no folder, relative to it.
pub(super) fn names_in(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for path in fs::read_dir(next).into_iter().flatten().flatten().map(|entry| entry.path()) {
            match fs::symlink_metadata(&path) {
                Ok(of) if of.is_dir() => folders.push(path),
                Ok(of) if of.file_type().is_socket() => {}
                _ => names.push(path.strip_prefix(folder).unwrap().to_string_lossy().into_owned()),
            }
        }
    }
    names.sort();
    names
}
