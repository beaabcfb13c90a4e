//! Compiling ahead of time in a child process.
//!
//! A compiler may abort the process on an internal error, or never return. So every program is compiled in a separate folder by a
//! worker: the `assay` executable with the hidden command `compile-worker FOLDER`, and with the environment that the plugin reads
//! when it loads. The worker writes its answer to the folder, the compiler its dumps; a worker that dies or exceeds the limit
//! becomes an error with the last lines of its stderr.
//!
//! A [`Guardian`] ends the worker and removes the folder when the waiting process ends, however it does. The worker is in a
//! separate process group, so that Ctrl-C ends the waiting process first.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use assay_core::guardian::Guardian;
use assay_core::memory::CompiledMemory;
use assay_core::text::{ForeignLines, ForeignText, ShownPath};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::runtime::{PjrtProgram, Plugin, RuntimeError, Topology, XLA_VARIABLE};

/// The hidden command that makes the `assay` executable a worker.
pub const WORKER_COMMAND: &str = "compile-worker";

/// The time that one program may take to compile unless a [`CompileWorker`] has another limit. It exists to end compilers that hang: the
/// largest program of docs/tpu.md takes a minute, and many times that on a busy machine.
pub const TIME_LIMIT: Duration = Duration::from_mins(30);

/// The folder inside of a worker's folder where every XLA writes its HLO.
pub const HLO: &str = "hlo";

/// The end of a dead worker's stderr that errors quote, in bytes and lines.
const LAST_BYTES: u64 = 4 << 10;
const LAST_LINES: usize = 12;

/// The files in a worker's folder: its input, its answer and its stderr.
const JOB: &str = "job.json";
const PROGRAM: &str = "program.mlir";
const ANSWER: &str = "answer.json";
const STDERR: &str = "stderr.txt";

/// The program and the devices that a worker compiles it for.
#[derive(Clone, Copy, Debug)]
pub struct CompileJob<'j> {
    /// The file of the PJRT plugin.
    pub library: &'j Path,
    /// The name that the plugin has for the topology.
    pub topology: &'j str,
    /// The other options of the topology, as name and value.
    pub options: &'j [(&'j str, String)],
    /// The program as StableHLO text, in MLIR's syntax.
    pub code: &'j str,
    /// The number of copies joined by collectives, one on each device.
    pub replicas: usize,
    /// The number of copies of a program that counts its devices as partitions.
    pub partitions: usize,
}

/// The part of a [`CompileJob`] that is written to `job.json`; the code is a file next to it.
#[derive(Serialize, Deserialize)]
struct JobFile {
    library: PathBuf,
    topology: String,
    #[serde(default)]
    options: Vec<(String, String)>,
    replicas: usize,
    partitions: usize,
}

/// The figures that the plugin reports for a compiled program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CompiledJob {
    /// The memory of one run on one device.
    pub memory: CompiledMemory,
    /// The seconds that the plugin took to compile.
    pub compile_s: f64,
    /// The coordinates of each device's chip; empty where the plugin gives none.
    pub chips: Vec<Vec<usize>>,
}

/// The content of `answer.json`, which a worker writes last.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum JobAnswer {
    Compiled(CompiledJob),
    Refused(String),
}

/// The reason why a worker gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CompileWorkerError {
    /// A file or a process of this program failed.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// The file or folder concerned.
        path: ShownPath,
        /// The failed action as a verb: `read`, `create`.
        action: &'static str,
        /// The error of the operating system.
        reason: io::Error,
    },
    /// The plugin rejected the program with this message.
    #[error("{0}")]
    Refused(ForeignLines),
    /// The worker died without an answer.
    #[error("the compiling process ended with {status} and no answer; the last it wrote:\n{stderr}")]
    Died {
        /// The exit status or the signal.
        status: String,
        /// The last lines of the worker's stderr.
        stderr: ForeignLines,
    },
    /// The worker exceeded its time limit and was killed.
    #[error("no answer within {limit:?}, so the compiling process was ended; the last it wrote:\n{stderr}")]
    TimedOut {
        /// The time limit that was exceeded.
        limit: Duration,
        /// The last lines of the worker's stderr.
        stderr: ForeignLines,
    },
    /// A job or an answer that is not valid JSON of its kind.
    #[error("{file}, line {line}: got {given}, expected {expected}")]
    Malformed {
        /// The file's name, without its folder.
        file: &'static str,
        /// The line number, from 1.
        line: usize,
        /// The error of the JSON parser.
        given: ForeignText,
        /// A description of the valid content.
        expected: &'static str,
    },
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CompileWorkerError {
    let path = path.to_path_buf();
    move |reason| CompileWorkerError::Io { path: path.into(), action, reason }
}

fn malformed(file: &'static str, error: &serde_json::Error, expected: &'static str) -> CompileWorkerError {
    CompileWorkerError::Malformed { file, line: error.line(), given: error.to_string().into(), expected }
}

/// Returns the flags that the environment's `variable` has, followed by `flags`.
pub fn append_flags(variable: &str, flags: &str) -> String {
    let own = env::var(variable).unwrap_or_default();
    format!("{} {flags}", own.trim()).trim().into()
}

/// The executable that compiles, and its time limit.
#[derive(Clone, Debug)]
pub struct CompileWorker {
    /// The executable, which is called as `executable compile-worker FOLDER`.
    executable: PathBuf,
    limit: Duration,
}

impl CompileWorker {
    /// Creates a worker that runs an `assay` executable.
    pub fn new(executable: PathBuf) -> Self {
        Self { executable, limit: TIME_LIMIT }
    }

    /// Sets the time after which the worker is killed.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Compiles a job in the guarded folder, where its dumps remain; HLO goes to [`HLO`]. `configure` sets the environment that the
    /// plugin reads.
    ///
    /// # Errors
    /// [`CompileWorkerError`].
    pub fn compile(
        &self,
        job: &CompileJob,
        guardian: &mut Guardian,
        configure: impl FnOnce(&mut Command),
    ) -> Result<CompiledJob, CompileWorkerError> {
        let written = JobFile {
            // The worker runs elsewhere.
            library: fs::canonicalize(job.library).map_err(failed("find", job.library))?,
            topology: job.topology.into(),
            options: job.options.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
            replicas: job.replicas,
            partitions: job.partitions,
        };
        let folder = guardian.folder().to_path_buf();
        let hlo = folder.join(HLO);
        fs::create_dir(&hlo).map_err(failed("create", &hlo))?;
        write(&folder.join(JOB), &serde_json::to_vec(&written).expect("plain data has a JSON form"))?;
        write(&folder.join(PROGRAM), job.code.as_bytes())?;
        let status = self.work(guardian, configure)?;

        // A worker writes its answer last. It counts only if the worker then ended well: the plugin may still have been writing dumps.
        let answer = folder.join(ANSWER);
        let stderr = || last_lines(&folder.join(STDERR));
        match status {
            None => return Err(CompileWorkerError::TimedOut { limit: self.limit, stderr: stderr().into() }),
            Some(status) if !status.success() || !answer.is_file() => {
                return Err(CompileWorkerError::Died { status: status.to_string(), stderr: stderr().into() });
            }
            Some(_) => {}
        }
        let text = fs::read_to_string(&answer).map_err(failed("read", &answer))?;
        match serde_json::from_str(&text).map_err(|error| malformed(ANSWER, &error, "a worker's answer"))? {
            JobAnswer::Refused(message) => Err(CompileWorkerError::Refused(message.into())),
            JobAnswer::Compiled(compiled) => Ok(compiled),
        }
    }

    /// Runs a worker until it ends, or kills it after the limit and returns `None`.
    fn work(
        &self,
        guardian: &mut Guardian,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Option<ExitStatus>, CompileWorkerError> {
        let folder = guardian.folder();
        let stderr = folder.join(STDERR);
        let stderr = File::create(&stderr).map_err(failed("create", &stderr))?;
        let executable = fs::canonicalize(&self.executable).map_err(failed("run", &self.executable))?;
        // Flags are split at blanks, which the folder's name may have: dumps go to names in it, where the worker runs.
        let mut worker = Command::new(executable);
        worker
            .arg(WORKER_COMMAND)
            .arg(folder)
            .current_dir(folder)
            .process_group(0)
            .env(XLA_VARIABLE, append_flags(XLA_VARIABLE, &format!("--xla_dump_to={HLO} --xla_dump_hlo_as_text")))
            // Errors only: they are quoted if a worker dies. A compile cache would suppress the dumps.
            .env("TF_CPP_MIN_LOG_LEVEL", "2")
            .env_remove("JAX_COMPILATION_CACHE_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        configure(&mut worker);
        let mut worker = worker.spawn().map_err(failed("run", &self.executable))?;
        guardian.watch(Some(Pid::from_child(&worker)));
        let started = Instant::now();
        let status = loop {
            if let Some(status) = worker.try_wait().map_err(failed("wait for", &self.executable))? {
                break Some(status);
            }
            if started.elapsed() >= self.limit {
                // It may have ended since; either way it is gone after this.
                let _ = worker.kill();
                worker.wait().map_err(failed("wait for", &self.executable))?;
                break None;
            }
            thread::sleep(Duration::from_millis(10));
        };
        guardian.watch(None);
        Ok(status)
    }
}

/// Compiles the job in `folder` and writes the answer there. This runs in the worker.
///
/// # Errors
/// [`CompileWorkerError`] where the job cannot be read or the answer not be written. A program that does not compile is an answer.
pub fn work(folder: &Path) -> Result<(), CompileWorkerError> {
    let read = |name| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(failed("read", &path))
    };
    let expected = "a job, as `assay compile` writes it";
    let job: JobFile = serde_json::from_str(&read(JOB)?).map_err(|error| malformed(JOB, &error, expected))?;
    let code = read(PROGRAM)?;
    let answer = compile_here(&job, &code).unwrap_or_else(|error| JobAnswer::Refused(error.to_string()));
    write(&folder.join(ANSWER), &serde_json::to_vec(&answer).expect("plain data has a JSON form"))
}

fn compile_here(job: &JobFile, code: &str) -> Result<JobAnswer, RuntimeError> {
    // The plugin loads here, with the environment that the parent has set.
    let topology = Topology::with_options(Plugin::load(&job.library)?, &job.topology, &job.options)?;
    let program = PjrtProgram { code: code.as_bytes(), replicas: job.replicas, partitions: job.partitions };
    let started = Instant::now();
    let unloaded = topology.compile(&program)?;
    let compile_s = started.elapsed().as_secs_f64();
    // Programs count devices in the topology's order.
    let place = |coordinates: &Vec<i64>| coordinates.iter().map(|&at| usize::try_from(at).unwrap_or(0)).collect();
    let chips = topology.coordinates().iter().take(job.replicas * job.partitions).map(place).collect();
    Ok(JobAnswer::Compiled(CompiledJob { compile_s, memory: unloaded.memory()?, chips }))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CompileWorkerError> {
    fs::write(path, bytes).map_err(failed("write", path))
}

/// Returns the last lines of a file, or why it cannot be read.
fn last_lines(path: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LAST_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LAST_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        Ok(lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"))
    };
    match read() {
        Ok(text) if text.trim().is_empty() => "(nothing)".into(),
        Ok(text) => text,
        Err(error) => format!("(unreadable: {error})"),
    }
}
