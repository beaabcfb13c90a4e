//! Compiling with libtpu, in a child process: [`assay_pjrt::ahead`], with the environment that libtpu reads when it loads and with
//! its dumps of schedules.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::error::TpuError;
use super::files::failed;
use super::links::Links;
use super::schedule::{self, Launch};
use super::target::{Chip, Target};
use super::traffic::{self, Traffic};
use assay_core::memory::CompiledMemory;
use assay_pjrt::ahead::{AheadError, HLO, Job, Worker, after_those_of};
use assay_pjrt::runtime::find_installed;
use assay_schema::compile::{Bound, Limit};

/// Names the library where no option does; JAX reads the same.
pub const LIBRARY_VARIABLE: &str = "TPU_LIBRARY_PATH";

/// What libtpu reads of its own when it loads.
const LIBTPU_VARIABLE: &str = "LIBTPU_INIT_ARGS";

/// The folder of its schedules, within the worker's.
const SCHEDULES: &str = "schedules";

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
            |kernel: &&Launch| self.traffic.moved.iter().any(|moved| moved.name == kernel.name && moved.is_alone());
        self.kernels.iter().filter(exposed).map(Launch::all_cycles).fold(0, u64::saturating_add)
    }

    /// The bounds of one run on `chip`. What collectives take between chips while something is computed bounds it beside cycles and HBM;
    /// the rest comes on top of what is left without them.
    pub fn bound(&self, chip: &Chip) -> Bound {
        let (links, cycles, bytes) = (&self.links, self.cycles(), self.traffic.hbm_bytes);
        let (exposed_cycles, exposed_bytes) = (self.exposed_cycles(), self.traffic.exposed_bytes);
        let all = chip.bound(cycles, bytes);
        let alone = chip.bound(exposed_cycles, exposed_bytes);
        let rest = chip.bound(cycles.saturating_sub(exposed_cycles), bytes.saturating_sub(exposed_bytes));
        let hidden_ms = links.all_ms - links.exposed_ms;
        let computing_ms = rest.predicted_ms.max(hidden_ms);
        let collectives_ms = alone.predicted_ms.max(links.exposed_ms - links.stalled_ms) + links.stalled_ms;
        let predicted_ms = all.predicted_ms.max(computing_ms + collectives_ms);
        let limit = if links.all_ms > all.predicted_ms { Limit::Links } else { all.limit };
        let (links_ms, links_exposed_ms, links) = (links.all_ms, links.exposed_ms, links.narrowest.clone());
        Bound { links_ms, links_exposed_ms, links, predicted_ms, limit, ..all }
    }
}

/// A libtpu, and the executable that loads it.
#[derive(Clone, Debug)]
pub struct Compiler {
    library: PathBuf,
    worker: Worker,
    flags: String,
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
        Compiler { library, worker: Worker::new(worker), flags: String::new() }
    }

    /// The same with another time limit.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Compiler {
        Compiler { worker: self.worker.limit(limit), ..self }
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
        let schedules = folder.join(SCHEDULES);
        fs::create_dir(&schedules).map_err(failed("create", &schedules))?;
        let job = Job {
            library: &self.library,
            topology: &request.target.topology_name(),
            options: &[],
            code: request.code,
            replicas: request.replicas,
            partitions: request.partitions,
        };
        let answer = self.worker.compile(&job, folder, |worker| self.configure(request.target, worker));
        let target = request.target.to_string();
        let (memory, compile_s, chips) = match answer {
            Ok(compiled) => (compiled.memory, compiled.compile_s, compiled.chips),
            Err(error) => return Err(of_target(target, error)),
        };
        let unread = |reason| TpuError::Unread { target: target.clone(), memory, reason: Box::new(reason) };
        let mut kernels = schedule::read(&schedules, request.target.chip).map_err(unread)?;
        let traffic = traffic::read(&folder.join(HLO)).map_err(unread)?;
        if chips.len() != request.replicas * request.partitions || chips.iter().any(Vec::is_empty) {
            return Err(unread(TpuError::Dump {
                file: "answer.json".into(),
                line: 0,
                given: format!("places of {} devices", chips.iter().filter(|chip| !chip.is_empty()).count()),
                expected: "where each device stands",
            }));
        }
        let uncounted = traffic.launch(&mut kernels);
        let flags = after_those_of(LIBTPU_VARIABLE, &self.flags);
        let chip = request.target.chip;
        let took = |name: &str| {
            let kernel = kernels.iter().find(|kernel| kernel.name == name);
            chip.bound(kernel.map_or(0, Launch::all_cycles), traffic.bytes_of.get(name).copied().unwrap_or(0))
        };
        let links = Links::of(request.target, &chips, &traffic, |name| took(name).predicted_ms);
        Ok(Compiled { memory, compile_s, kernels, traffic, uncounted, links, flags })
    }

    /// What libtpu reads of its own. Dumps go to a name in the folder where the worker runs.
    fn configure(&self, target: &Target, worker: &mut Command) {
        let dump_schedules = format!(
            "{} --xla_jf_dump_to={SCHEDULES} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={}",
            self.flags,
            schedule::PASSES
        );
        worker
            .envs(target.environment())
            .env(LIBTPU_VARIABLE, after_those_of(LIBTPU_VARIABLE, dump_schedules.trim_start()));
    }
}

/// The same of `target`.
fn of_target(target: String, error: AheadError) -> TpuError {
    match error {
        AheadError::Io { path, action, reason } => TpuError::Io { path, action, reason },
        AheadError::Refused(message) => TpuError::Refused { target, message },
        AheadError::Died { status, stderr } => TpuError::Died { target, status, stderr },
        AheadError::TimedOut { limit, stderr } => TpuError::TimedOut { target, limit, stderr },
        AheadError::Malformed { file, line, given, expected } => {
            TpuError::Dump { file: file.into(), line, given, expected }
        }
    }
}
