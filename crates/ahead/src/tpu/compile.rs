//! Compiling with libtpu in a child process, with the environment that libtpu reads when it loads and with its dumps of schedules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use assay_core::memory::CompiledMemory;
use assay_pjrt::compile_worker::{CompileJob, CompileWorker, HLO, append_flags};
use assay_schema::compile::{TpuLimit, TpuTimeBound};

use super::links::LinkTimes;
use super::schedule::{self, TpuLaunch};
use super::target::{TpuChip, TpuTarget};
use crate::error::AheadError;
use crate::files::{failed, guarded_folder};
use crate::plugin::{self, StableHloModule, worker_error};
use crate::traffic::{Traffic, read_optimized};

/// The environment variable that names the library if no option does; JAX reads the same one.
pub const LIBRARY_VARIABLE: &str = "TPU_LIBRARY_PATH";

/// The environment variable from which libtpu reads its flags when it loads.
const LIBTPU_VARIABLE: &str = "LIBTPU_INIT_ARGS";

/// The end of the name of libtpu's file with optimized HLO.
const OPTIMIZED: &str = ".after_optimizations.txt";

/// The folder of libtpu's schedules, relative to the worker's.
const SCHEDULES: &str = "schedules";

/// The result of compiling one program with libtpu.
#[derive(Clone, Debug)]
pub struct TpuCompilation {
    /// The memory of one run on one device, as libtpu reports it.
    pub memory: CompiledMemory,
    /// The seconds that libtpu took, without starting the worker.
    pub compile_s: f64,
    /// The final VLIW program of every kernel, with its number of launches.
    pub kernels: Vec<TpuLaunch>,
    /// The bytes that one run moves through HBM, and its collectives.
    pub traffic: Traffic,
    /// The names of collectives whose cycles are in no kernel.
    pub uncounted: Vec<String>,
    /// The time that the collectives take on the links between chips.
    pub links: LinkTimes,
    /// The flags that libtpu read: those of the environment's `LIBTPU_INIT_ARGS`, then those of [`TpuCompiler::with_flags`].
    pub flags: String,
}

impl TpuCompilation {
    /// Sums the cycles of all kernels, each as often as it is launched.
    pub fn cycles(&self) -> u64 {
        self.kernels.iter().map(TpuLaunch::all_cycles).fold(0, u64::saturating_add)
    }

    /// Sums the cycles of collectives during which nothing else is computed.
    fn exposed_cycles(&self) -> u64 {
        // A kernel has the name of the collective that it serves.
        let exposed =
            |kernel: &&TpuLaunch| self.traffic.moved.iter().any(|moved| moved.name == kernel.name && moved.is_alone());
        self.kernels.iter().filter(exposed).map(TpuLaunch::all_cycles).fold(0, u64::saturating_add)
    }

    /// Returns the lower bounds of one run on `chip`. A collective that runs during other work overlaps with cycles and HBM; the time of
    /// the other collectives is added to the bound of the remaining work.
    pub fn bound(&self, chip: &TpuChip) -> TpuTimeBound {
        let (links, cycles, bytes) = (&self.links, self.cycles(), self.traffic.hbm_bytes);
        let (exposed_cycles, exposed_bytes) = (self.exposed_cycles(), self.traffic.exposed_bytes);
        // Three bounds without links: of everything, of the exposed collectives, and of everything else.
        let all = chip.bound(cycles, bytes);
        let alone = chip.bound(exposed_cycles, exposed_bytes);
        let rest = chip.bound(cycles.saturating_sub(exposed_cycles), bytes.saturating_sub(exposed_bytes));
        // Hidden links are busy during the other work, so that the longer of both counts.
        let hidden_ms = links.all_ms - links.exposed_ms;
        let computing_ms = rest.predicted_ms.max(hidden_ms);
        // An exposed collective moves its HBM bytes while its links are busy; the stalls of overlapping collectives are added, since their
        // HBM bytes are part of the other work.
        let collectives_ms = alone.predicted_ms.max(links.exposed_ms - links.stalled_ms) + links.stalled_ms;
        // Never below the bound that ignores links.
        let predicted_ms = all.predicted_ms.max(computing_ms + collectives_ms);
        let limit = if links.all_ms > all.predicted_ms { TpuLimit::Links } else { all.limit };
        let (links_ms, links_exposed_ms, links) = (links.all_ms, links.exposed_ms, links.narrowest.clone());
        TpuTimeBound { links_ms, links_exposed_ms, links, predicted_ms, limit, ..all }
    }
}

/// The file of libtpu, and the executable that loads it.
#[derive(Clone, Debug)]
pub struct TpuCompiler {
    library: PathBuf,
    worker: CompileWorker,
    flags: Option<String>,
}

/// Returns the libtpu `given`, else the one that [`LIBRARY_VARIABLE`] names, else the one that `make setup-tpu` installed.
///
/// # Errors
/// [`AheadError::Absent`] with every path that was tried.
pub fn locate(given: Option<&Path>) -> Result<PathBuf, AheadError> {
    plugin::locate(given, LIBRARY_VARIABLE, "libtpu.so", |looked| AheadError::Absent {
        what: "libtpu",
        looked,
        setup: "setup-tpu",
        instead: "--libtpu or TPU_LIBRARY_PATH",
    })
}

impl TpuCompiler {
    /// Creates a compiler from the file of libtpu and the `assay` executable that loads it as a worker.
    pub fn new(library: PathBuf, worker: PathBuf) -> TpuCompiler {
        TpuCompiler { library, worker: CompileWorker::new(worker), flags: None }
    }

    /// Sets the time after which the worker is killed.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> TpuCompiler {
        TpuCompiler { worker: self.worker.with_limit(limit), ..self }
    }

    /// Sets flags of libtpu as a job sets them in `LIBTPU_INIT_ARGS`: `--xla_tpu_scoped_vmem_limit_kib=61440 …`. libtpu aborts on an
    /// unknown flag.
    #[must_use]
    pub fn with_flags(self, flags: &str) -> TpuCompiler {
        TpuCompiler { flags: Some(flags.into()), ..self }
    }

    /// Sets `flags` unless [`with_flags`](Self::with_flags) has set others.
    pub(super) fn or_flags(&self, flags: &str) -> TpuCompiler {
        if self.flags.is_some() { self.clone() } else { self.clone().with_flags(flags) }
    }

    /// Compiles a program and collects what libtpu reports about it.
    ///
    /// # Errors
    /// [`AheadError::Refused`] with libtpu's message where it does not compile; [`AheadError::Died`] or
    /// [`AheadError::TimedOut`] where the worker gave no answer; [`AheadError::Unread`], with the memory, where what libtpu wrote is
    /// not understood; [`AheadError::Io`].
    pub fn compile(&self, target: &TpuTarget, module: &StableHloModule) -> Result<TpuCompilation, AheadError> {
        // libtpu writes its schedules to a folder within the worker's, where the worker runs.
        let mut guardian = guarded_folder("assay-tpu-")?;
        let folder = guardian.folder().to_path_buf();
        let schedules = folder.join(SCHEDULES);
        fs::create_dir(&schedules).map_err(failed("create", &schedules))?;
        let flags = self.flags.as_deref().unwrap_or_default();
        let job = CompileJob {
            library: &self.library,
            topology: &target.topology_name(),
            options: &[],
            code: module.code,
            replicas: module.replicas,
            partitions: module.partitions,
        };
        let answer = self.worker.compile(&job, &mut guardian, |worker| configure(target, flags, worker));
        let compiled = answer.map_err(|error| worker_error(target.to_string(), error))?;
        let (memory, compile_s, chips) = (compiled.memory, compiled.compile_s, compiled.chips);

        // From here on the memory is known, so that every error carries it.
        let unread = |reason| AheadError::Unread {
            target: target.to_string(),
            memory,
            unknown: "cycles and HBM bytes",
            reason: Box::new(reason),
            writer: "; libtpu 0.0.51 writes what this reads",
        };
        let mut kernels = schedule::read(&schedules, target.chip).map_err(unread)?;
        let (file, hlo) = read_optimized(&folder.join(HLO), OPTIMIZED).map_err(unread)?;
        let traffic = Traffic::parse(&file, &hlo).map_err(unread)?;
        if chips.len() != module.replicas * module.partitions || chips.iter().any(Vec::is_empty) {
            let given = format!("places of {} devices", chips.iter().filter(|chip| !chip.is_empty()).count());
            return Err(unread(AheadError::malformed("answer.json", 0, given, "the coordinates of each device")));
        }
        // The dumps have one launch of each kernel; HLO has the number of launches.
        let uncounted = traffic.launch(&mut kernels);
        // Computing hides the collectives that it overlaps with, so the links need the time of every other instruction.
        let chip = target.chip;
        let took = |name: &str| {
            let kernel = kernels.iter().find(|kernel| kernel.name == name);
            chip.bound(kernel.map_or(0, TpuLaunch::all_cycles), traffic.bytes_of.get(name).copied().unwrap_or(0))
        };
        let links = LinkTimes::new(target, &chips, &traffic, |name| took(name).predicted_ms);
        let flags = append_flags(LIBTPU_VARIABLE, flags);
        Ok(TpuCompilation { memory, compile_s, kernels, traffic, uncounted, links, flags })
    }
}

/// Sets the environment that libtpu reads. Its dumps go to a name in the folder where the worker runs.
fn configure(target: &TpuTarget, flags: &str, worker: &mut Command) {
    let dump_schedules = format!(
        "{flags} --xla_jf_dump_to={SCHEDULES} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={}",
        schedule::PASSES
    );
    worker.envs(target.environment()).env(LIBTPU_VARIABLE, append_flags(LIBTPU_VARIABLE, dump_schedules.trim_start()));
}
