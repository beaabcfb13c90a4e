//! Compiling in a child process.
//!
//! libtpu may abort the process on an internal error, or never return. So the program, in a folder of its own under the
//! system's temporary one, is compiled by a worker: the `assay` executable with the hidden command `tpu-worker FOLDER`,
//! with the environment that libtpu reads when it loads. The worker writes its answer to the folder, libtpu its dumps;
//! a worker that dies or outlasts the limit becomes an error with the last lines of its stderr.
//!
//! Whoever waits holds the worker's standard input open. Where that is closed, since nobody waits any more, or the limit and
//! [`GRACE`] have passed, the worker takes its folder away and ends itself. It is in a process group of its own, so that Ctrl-C
//! ends who waits first.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::TpuError;
use super::files::{failed, read_text};
use super::links::Links;
use super::schedule::{self, Launch};
use super::target::{Chip, Exposed, Target};
use super::traffic::{self, Traffic};
use assay_core::memory::CompiledMemory;
use assay_pjrt::runtime::{Plugin, Program, RuntimeError, Topology, find_installed};
use assay_schema::compile::Bound;

/// The hidden command that makes the `assay` executable a worker.
pub const WORKER_COMMAND: &str = "tpu-worker";

/// Names the library where no option does; JAX reads the same.
pub const LIBRARY_VARIABLE: &str = "TPU_LIBRARY_PATH";

/// How long one program may take to compile unless a [`Compiler`] says otherwise: it is there to end what hangs. The largest program
/// of docs/tpu.md takes a minute, and many times that on a machine that does other things.
pub const TIME_LIMIT: Duration = Duration::from_mins(30);

/// How much longer than its limit a worker lives by itself.
pub const GRACE: Duration = Duration::from_secs(10);

/// What libtpu reads of its own when it loads, and what every XLA reads.
const LIBTPU_VARIABLE: &str = "LIBTPU_INIT_ARGS";
const XLA_VARIABLE: &str = "XLA_FLAGS";

/// How much of a dead worker's stderr is told.
const LAST_BYTES: u64 = 4 << 10;
const LAST_LINES: usize = 12;

/// The files of a folder that a worker is given.
const JOB: &str = "job.json";
const PROGRAM: &str = "program.mlir";
const ANSWER: &str = "answer.json";
const STDERR: &str = "stderr.txt";
const SCHEDULES: &str = "schedules";
const HLO: &str = "hlo";

/// What to compile.
#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    /// StableHLO text.
    pub code: &'r str,
    /// For which devices.
    pub target: &'r Target,
    /// Copies joined by collectives, one a device.
    pub replicas: usize,
    /// The same, for programs that count their devices as partitions.
    pub partitions: usize,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Of one run, on one device.
    pub memory: CompiledMemory,
    /// Seconds that libtpu took.
    pub compile_s: f64,
    /// Every kernel's final program.
    pub kernels: Vec<Launch>,
    /// Bytes through HBM.
    pub traffic: Traffic,
    /// Collectives whose cycles are in no kernel.
    pub uncounted: Vec<String>,
    /// What its collectives take between chips.
    pub links: Links,
    /// What libtpu was told of its own, by the environment's `LIBTPU_INIT_ARGS` and after it by [`Compiler::flags`].
    pub flags: String,
}

impl Compiled {
    /// Cycles of all kernels, one after another, each as often as it is launched.
    pub fn cycles(&self) -> u64 {
        self.kernels.iter().map(Launch::all_cycles).fold(0, u64::saturating_add)
    }

    /// Of these, cycles of collectives during which nothing else is computed.
    fn exposed_cycles(&self) -> u64 {
        let exposed =
            |kernel: &&Launch| self.traffic.moved.iter().any(|moved| moved.name == kernel.name && !moved.overlapped);
        self.kernels.iter().filter(exposed).map(Launch::all_cycles).fold(0, u64::saturating_add)
    }

    /// The bounds of one run on `chip`.
    pub fn bound(&self, chip: &Chip) -> Bound {
        let exposed = Exposed { cycles: self.exposed_cycles(), hbm_bytes: self.traffic.exposed_bytes };
        chip.bound_with_links(self.cycles(), self.traffic.hbm_bytes, &exposed, &self.links)
    }
}

/// A libtpu, and the executable that loads it.
#[derive(Clone, Debug)]
pub struct Compiler {
    library: PathBuf,
    /// Called as `worker tpu-worker FOLDER`.
    worker: PathBuf,
    limit: Duration,
    flags: String,
}

/// What a worker is to do.
#[derive(Serialize, Deserialize)]
struct Job {
    library: PathBuf,
    topology: String,
    replicas: usize,
    partitions: usize,
    limit: Duration,
}

/// What a worker says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Compiled {
        memory: CompiledMemory,
        compile_s: f64,
        /// Of each device the chip that it is on.
        chips: Vec<Vec<usize>>,
    },
    Refused(String),
}

/// libtpu: `given`, else what [`LIBRARY_VARIABLE`] names, else what `make setup-tpu` installed.
///
/// # Errors
/// [`TpuError::Absent`], saying where was looked.
pub fn locate(given: Option<&Path>) -> Result<PathBuf, TpuError> {
    let variable = || env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    match given.map(Path::to_path_buf).or_else(variable) {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(TpuError::Absent { looked: vec![path] }),
        None => find_installed("libtpu.so").map_err(|looked| TpuError::Absent { looked }),
    }
}

impl Compiler {
    /// With the library at `library`, loaded by `worker`: an `assay` executable.
    pub fn new(library: PathBuf, worker: PathBuf) -> Compiler {
        Compiler { library, worker, limit: TIME_LIMIT, flags: String::new() }
    }

    /// The same with another time limit.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Compiler {
        Compiler { limit, ..self }
    }

    /// The same with flags of libtpu's own, as a job sets them in `LIBTPU_INIT_ARGS`:
    /// `--xla_tpu_scoped_vmem_limit_kib=61440 …`. libtpu dies of one that it does not know.
    #[must_use]
    pub fn flags(self, flags: &str) -> Compiler {
        Compiler { flags: flags.into(), ..self }
    }

    /// Compiles a program and reads what the compiler says of it.
    ///
    /// # Errors
    /// [`TpuError::Refused`] with libtpu's message where it does not compile; [`TpuError::Died`] or
    /// [`TpuError::TimedOut`] where the worker gave no answer; [`TpuError::Unread`], with the memory, where what libtpu wrote is
    /// not understood; [`TpuError::Io`].
    pub fn compile(&self, request: &Request) -> Result<Compiled, TpuError> {
        let temporary = env::temp_dir();
        let folder = tempfile::Builder::new().prefix("assay-tpu-").tempdir().map_err(failed("write to", &temporary))?;
        let folder = folder.path();
        let job = Job {
            // The worker runs elsewhere.
            library: fs::canonicalize(&self.library).map_err(failed("find", &self.library))?,
            topology: request.target.topology_name(),
            replicas: request.replicas,
            partitions: request.partitions,
            limit: self.limit,
        };
        for dumps in [SCHEDULES, HLO].map(|name| folder.join(name)) {
            fs::create_dir(&dumps).map_err(failed("create", &dumps))?;
        }
        write(&folder.join(JOB), &serde_json::to_vec(&job).expect("plain data has a JSON form"))?;
        write(&folder.join(PROGRAM), request.code.as_bytes())?;
        let status = self.work(request.target, folder)?;

        let target = request.target.to_string();
        let answer = folder.join(ANSWER);
        let (true, Some(status)) = (answer.is_file(), status) else {
            let stderr = last_lines(&folder.join(STDERR));
            return Err(match status {
                Some(status) => TpuError::Died { target, status: status.to_string(), stderr },
                None => TpuError::TimedOut { target, limit: self.limit, stderr },
            });
        };
        if !status.success() {
            let stderr = last_lines(&folder.join(STDERR));
            return Err(TpuError::Died { target, status: status.to_string(), stderr });
        }
        let answer = serde_json::from_str(&read_text(&answer)?).map_err(|error| TpuError::Dump {
            file: ANSWER.into(),
            line: error.line(),
            given: error.to_string(),
            expected: "a worker's answer",
        })?;
        match answer {
            Answer::Refused(message) => Err(TpuError::Refused { target, message }),
            Answer::Compiled { memory, compile_s, chips } => {
                let unread = |reason| TpuError::Unread { target: target.clone(), memory, reason: Box::new(reason) };
                let mut kernels = schedule::read(&folder.join(SCHEDULES), request.target.chip).map_err(unread)?;
                let traffic = traffic::read(&folder.join(HLO)).map_err(unread)?;
                if chips.len() != request.replicas * request.partitions || chips.iter().any(Vec::is_empty) {
                    return Err(unread(TpuError::Dump {
                        file: ANSWER.into(),
                        line: 0,
                        given: format!("places of {} devices", chips.iter().filter(|chip| !chip.is_empty()).count()),
                        expected: "where each device stands",
                    }));
                }
                let uncounted = traffic.launch(&mut kernels);
                let flags = after_those_of(LIBTPU_VARIABLE, &self.flags);
                let links = Links::of(request.target, &chips, &traffic);
                Ok(Compiled { memory, compile_s, kernels, traffic, uncounted, links, flags })
            }
        }
    }

    /// Runs a worker to its end; `None` where it did not come to one in time.
    fn work(&self, target: &Target, folder: &Path) -> Result<Option<ExitStatus>, TpuError> {
        let stderr = folder.join(STDERR);
        let stderr = File::create(&stderr).map_err(failed("create", &stderr))?;
        let worker = fs::canonicalize(&self.worker).map_err(failed("run", &self.worker))?;
        let dump_schedules = format!(
            "{} --xla_jf_dump_to={SCHEDULES} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={}",
            self.flags,
            schedule::PASSES
        );
        // Flags are split at blanks, which the folder's name may have: dumps go to names in it, where the worker runs.
        let mut worker = Command::new(worker)
            .arg(WORKER_COMMAND)
            .arg(folder)
            .current_dir(folder)
            .process_group(0)
            .envs(target.environment())
            .env(LIBTPU_VARIABLE, after_those_of(LIBTPU_VARIABLE, dump_schedules.trim_start()))
            .env(XLA_VARIABLE, after_those_of(XLA_VARIABLE, &format!("--xla_dump_to={HLO} --xla_dump_hlo_as_text")))
            // Errors only: they are what is told of a worker that died. A compile cache would suppress the dumps.
            .env("TF_CPP_MIN_LOG_LEVEL", "2")
            .env_remove("JAX_COMPILATION_CACHE_DIR")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .map_err(failed("run", &self.worker))?;
        // `try_wait` leaves it open, as `wait` would not.
        let _held_open = worker.stdin.take();
        let started = Instant::now();
        loop {
            if let Some(status) = worker.try_wait().map_err(failed("wait for", &self.worker))? {
                return Ok(Some(status));
            }
            if started.elapsed() >= self.limit {
                // It may have ended since; either way it is gone after this.
                let _ = worker.kill();
                worker.wait().map_err(failed("wait for", &self.worker))?;
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The worker's part: compiles the job in `folder` and leaves the answer there.
///
/// # Errors
/// [`TpuError::Io`] where the job cannot be read or the answer not be written. A program that does not compile is an
/// answer.
pub fn work(folder: &Path) -> Result<(), TpuError> {
    let job = read_text(&folder.join(JOB))?;
    let job: Job = serde_json::from_str(&job).map_err(|error| TpuError::Dump {
        file: JOB.into(),
        line: error.line(),
        given: error.to_string(),
        expected: "a job, as `assay compile` writes it",
    })?;
    let code = read_text(&folder.join(PROGRAM))?;
    end_with_who_waits(folder, job.limit + GRACE);
    let answer = compile_here(&job, &code).unwrap_or_else(|error| Answer::Refused(error.to_string()));
    write(&folder.join(ANSWER), &serde_json::to_vec(&answer).expect("plain data has a JSON form"))
}

/// Ends this process, and takes `folder` away, when standard input ends or `limit` has passed.
fn end_with_who_waits(folder: &Path, limit: Duration) {
    let end = |folder: PathBuf| {
        // libtpu may be writing to it.
        let _ = (0..10).find(|_| fs::remove_dir_all(&folder).is_ok());
        // Without what libtpu would do at an exit, which may never end.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    let [until_input_ends, until_limit] = [folder.to_path_buf(), folder.to_path_buf()];
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        end(until_input_ends);
    });
    thread::spawn(move || {
        thread::sleep(limit);
        end(until_limit);
    });
}

fn compile_here(job: &Job, code: &str) -> Result<Answer, RuntimeError> {
    let topology = Topology::named(Plugin::load(&job.library)?, &job.topology)?;
    let program = Program { code: code.as_bytes(), replicas: job.replicas, partitions: job.partitions };
    let started = Instant::now();
    let unloaded = topology.compile(&program)?;
    let compile_s = started.elapsed().as_secs_f64();
    let place = |coordinates: &Vec<i64>| coordinates.iter().map(|&at| usize::try_from(at).unwrap_or(0)).collect();
    let chips = topology.coordinates().iter().take(job.replicas * job.partitions).map(place).collect();
    Ok(Answer::Compiled { compile_s, memory: unloaded.memory()?, chips })
}

/// `flags` behind those that `variable` has in this process.
fn after_those_of(variable: &str, flags: &str) -> String {
    let own = env::var(variable).unwrap_or_default();
    format!("{} {flags}", own.trim()).trim().into()
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), TpuError> {
    fs::write(path, bytes).map_err(failed("write", path))
}

/// The last lines of a file, or why there are none.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_behind_those_of_the_environment() {
        assert_eq!(after_those_of("CARGO_PKG_NAME", "--one=1 --two"), "assay-tpu --one=1 --two");
        assert_eq!(after_those_of("ASSAY_IS_NEVER_SET", "--one=1"), "--one=1");
    }
}
