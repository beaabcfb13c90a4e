//! Compiling with XLA's CUDA plugin in a child process; the program's kernels of PTX are assembled as well.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use assay_core::memory::CompiledMemory;
use assay_pjrt::compile_worker::{CompileJob, CompileWorker, HLO};
use assay_schema::gpu::{GpuLaunch, GpuLimit, GpuTimeBound};

use super::assemble::CudaToolkit;
use super::target::{GpuChip, GpuTarget};
use crate::error::AheadError;
use crate::files::{failed, guarded_folder};
use crate::plugin::{self, StableHloModule, worker_error};
use crate::traffic::{Traffic, read_optimized};

/// The environment variable that names the plugin if no option does.
pub const PLUGIN_VARIABLE: &str = "ASSAY_CUDA_PLUGIN";

/// The custom call by which a program calls a kernel of PTX.
pub const CALL: &str = "__gpu$xla.gpu.ptx";

/// The end of the name of the plugin's file with optimized HLO.
const OPTIMIZED: &str = "gpu_after_optimizations.txt";

/// The result of compiling one program with XLA's CUDA plugin and `ptxas`.
#[derive(Clone, Debug)]
pub struct GpuCompilation {
    /// The memory of one run on one device, as the plugin reports it.
    pub memory: CompiledMemory,
    /// The seconds that the plugin took, without starting the worker.
    pub compile_s: f64,
    /// The assembled kernels of PTX, with their number of launches.
    pub launches: Vec<GpuLaunch>,
    /// The bytes that one run moves through HBM, and its collectives.
    pub traffic: Traffic,
}

impl GpuCompilation {
    /// Returns the lower bounds of one run on `chip`: HBM's, and that of the busiest pipe over all launches.
    pub fn bound(&self, chip: &GpuChip) -> GpuTimeBound {
        let hbm_ms = chip.hbm_ms(self.traffic.hbm_bytes);
        // Adds up each pipe over all launches; the launches run one after another.
        let mut pipes: Vec<(&str, f64)> = Vec::new();
        for launch in &self.launches {
            for pipe in &launch.pipes {
                let ms = pipe.ms * launch.runs as f64;
                match pipes.iter_mut().find(|(name, _)| *name == pipe.name) {
                    Some((_, sum)) => *sum += ms,
                    None => pipes.push((&pipe.name, ms)),
                }
            }
        }
        let busiest = pipes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let (pipe, pipe_ms) = busiest.unwrap_or_default();
        // Computing and HBM overlap in the best case.
        let limit = if pipe_ms > hbm_ms { GpuLimit::Pipe } else { GpuLimit::Hbm };
        GpuTimeBound { hbm_ms, pipe_ms, pipe: pipe.into(), predicted_ms: hbm_ms.max(pipe_ms), limit }
    }
}

/// The CUDA plugin, NVIDIA's tools, and the executable that loads the plugin.
#[derive(Clone, Debug)]
pub struct GpuCompiler {
    plugin: PathBuf,
    toolkit: CudaToolkit,
    worker: CompileWorker,
}

/// Returns the CUDA plugin `given`, else the one that [`PLUGIN_VARIABLE`] names, else the one that `make setup-gpu` installed.
///
/// # Errors
/// [`AheadError::Absent`] with every path that was tried.
pub fn locate(given: Option<&Path>) -> Result<PathBuf, AheadError> {
    plugin::locate(given, PLUGIN_VARIABLE, "xla_cuda_plugin.so", |looked| AheadError::Absent {
        what: "XLA's CUDA plugin",
        looked,
        setup: "setup-gpu",
        instead: "--cuda-plugin or ASSAY_CUDA_PLUGIN",
    })
}

impl GpuCompiler {
    /// Creates a compiler from the file of the plugin, a toolkit, and the `assay` executable that loads the plugin as a worker.
    pub fn new(plugin: PathBuf, toolkit: CudaToolkit, worker: PathBuf) -> GpuCompiler {
        GpuCompiler { plugin, toolkit, worker: CompileWorker::new(worker) }
    }

    /// Sets the time after which the worker is killed.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> GpuCompiler {
        GpuCompiler { worker: self.worker.with_limit(limit), ..self }
    }

    /// Compiles a program, assembles its kernels, and collects what both compilers report.
    ///
    /// # Errors
    /// As of [`CudaToolkit::assemble`]; [`AheadError::Refused`] with the plugin's message where it does not compile and
    /// [`AheadError::NoPtx`] where it does not know kernels of PTX; [`AheadError::Died`] or [`AheadError::TimedOut`] where the worker gave
    /// no answer; [`AheadError::Unread`], with the memory, where its HLO is not understood.
    pub fn compile(&self, target: &GpuTarget, module: &StableHloModule) -> Result<GpuCompilation, AheadError> {
        // Kernels first: the plugin embeds PTX unread, so that only the assembler finds what is wrong with it.
        let assembled = module.kernels.iter().map(|kernel| self.toolkit.assemble(kernel, target));
        let mut launches = assembled.collect::<Result<Vec<_>, _>>()?;
        let mut guardian = guarded_folder("assay-gpu-")?;
        // The plugin looks for a toolkit in `cuda_sdk_lib` of its working folder first.
        let (root, sdk) = (self.toolkit.root(), guardian.folder().join("cuda_sdk_lib"));
        let root = fs::canonicalize(root).map_err(failed("find", root))?;
        symlink(root, &sdk).map_err(failed("create", &sdk))?;
        let job = CompileJob {
            library: &self.plugin,
            topology: "cuda",
            options: &target.options(),
            code: module.code,
            replicas: module.replicas,
            partitions: module.partitions,
        };
        let compiled = self.worker.compile(&job, &mut guardian, |_| ());
        let compiled = compiled.map_err(|error| with_unknown_call(worker_error(target.to_string(), error)))?;
        let memory = compiled.memory;
        let (file, text) = read_optimized(&guardian.folder().join(HLO), OPTIMIZED)?;
        let unread = |reason| AheadError::Unread {
            target: target.to_string(),
            memory,
            unknown: "HBM bytes",
            reason: Box::new(reason),
            writer: "",
        };
        // The HLO has the bytes, and how often each kernel is called.
        let traffic = Traffic::parse(&file, &text).map_err(unread)?;
        for launch in &mut launches {
            launch.runs = runs(&text, &launch.name, &traffic);
        }
        Ok(GpuCompilation { memory, compile_s: compiled.compile_s, launches, traffic })
    }
}

/// Returns how often a program calls the kernel called `name`.
fn runs(hlo: &str, name: &str, traffic: &Traffic) -> u64 {
    let named = format!("\"{name}\"");
    let calls = hlo.lines().filter(|line| line.contains(CALL) && line.contains(&named));
    // A call inside of a loop runs as often as the loop turns.
    let instruction = |line: &str| {
        let (name, _) = line.trim_start().trim_start_matches("ROOT ").split_once(" = ")?;
        Some(traffic.runs.get(name.trim_start_matches('%')).copied().unwrap_or(1))
    };
    calls.filter_map(instruction).sum()
}

/// Returns [`AheadError::NoPtx`] instead of a refusal that is about [`CALL`].
fn with_unknown_call(error: AheadError) -> AheadError {
    match error {
        AheadError::Refused { target, message } if is_unknown_call(message.raw()) => {
            AheadError::NoPtx { target, call: CALL }
        }
        error => error,
    }
}

/// Whether a plugin says that it does not know [`CALL`].
fn is_unknown_call(message: &str) -> bool {
    message.contains(CALL)
        && ["No registered implementation", "UNIMPLEMENTED", "NOT_FOUND", "not found"]
            .iter()
            .any(|words| message.contains(words))
}
