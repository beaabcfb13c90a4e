//! Compiling with XLA's CUDA plugin, in a child process: [`assay_pjrt::ahead`]; its kernels of PTX are assembled beside it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use assay_core::memory::CompiledMemory;
use assay_pjrt::ahead::{AheadError, HLO, Job, Worker};
use assay_pjrt::runtime::find_installed;
use assay_ptx::PtxKernel;
use assay_schema::gpu::{Bound, Launch, Limit};
use assay_tpu::traffic::Traffic;

use crate::assemble::Toolkit;
use crate::error::GpuError;
use crate::target::{Chip, Target};

/// Names the plugin where no option does.
pub const PLUGIN_VARIABLE: &str = "ASSAY_CUDA_PLUGIN";

/// The custom call by which a program calls a kernel of PTX.
pub const CALL: &str = "__gpu$xla.gpu.ptx";

/// How names of files with optimized HLO end.
const SUFFIX: &str = "gpu_after_optimizations.txt";

/// What to compile.
#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    /// StableHLO text.
    pub code: &'r str,
    /// The kernels of PTX that it calls.
    pub kernels: &'r [PtxKernel],
    /// For which devices, each of which runs a copy.
    pub target: &'r Target,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Of one run, on one device.
    pub memory: CompiledMemory,
    /// Seconds that the plugin took.
    pub compile_s: f64,
    /// The kernels of PTX, assembled.
    pub launches: Vec<Launch>,
    /// Bytes through HBM.
    pub traffic: Traffic,
}

impl Compiled {
    /// The bounds of one run on `chip`.
    pub fn bound(&self, chip: &Chip) -> Bound {
        let hbm_ms = chip.hbm_ms(self.traffic.hbm_bytes);
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
        let limit = if pipe_ms > hbm_ms { Limit::Pipe } else { Limit::Hbm };
        Bound { hbm_ms, pipe_ms, pipe: pipe.into(), predicted_ms: hbm_ms.max(pipe_ms), limit }
    }
}

/// A plugin, what it needs of NVIDIA's toolkit, and the executable that loads it.
#[derive(Clone, Debug)]
pub struct Compiler {
    plugin: PathBuf,
    toolkit: Toolkit,
    worker: Worker,
}

/// XLA's CUDA plugin: `given`, else what [`PLUGIN_VARIABLE`] names, else what `make setup-gpu` installed.
///
/// # Errors
/// [`GpuError::Absent`], saying where was looked.
pub fn locate(given: Option<&Path>) -> Result<PathBuf, GpuError> {
    let variable = || env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let absent =
        |looked| GpuError::Absent { what: "XLA's CUDA plugin", looked, instead: "--cuda-plugin or ASSAY_CUDA_PLUGIN" };
    match given.map(Path::to_path_buf).or_else(variable) {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(absent(vec![path])),
        None => find_installed("xla_cuda_plugin.so").map_err(absent),
    }
}

impl Compiler {
    /// With the plugin at `plugin`, loaded by `worker`: an `assay` executable.
    pub fn new(plugin: PathBuf, toolkit: Toolkit, worker: PathBuf) -> Compiler {
        Compiler { plugin, toolkit, worker: Worker::new(worker) }
    }

    /// The same with another time limit.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Compiler {
        Compiler { worker: self.worker.limit(limit), ..self }
    }

    /// Compiles a program, assembles its kernels and reads what the compilers say of both.
    ///
    /// # Errors
    /// As of [`Toolkit::assemble`]; [`GpuError::Refused`] with the plugin's message where it does not compile and
    /// [`GpuError::NoPtx`] where it does not know kernels of PTX; [`GpuError::Died`] or [`GpuError::TimedOut`] where the worker gave
    /// no answer; [`GpuError::Unread`], with the memory, where its HLO is not understood.
    pub fn compile(&self, request: &Request) -> Result<Compiled, GpuError> {
        let target = request.target;
        let assembled = request.kernels.iter().map(|kernel| self.toolkit.assemble(kernel, target));
        let mut launches = assembled.collect::<Result<Vec<_>, _>>()?;
        let temporary = env::temp_dir();
        let failed = |action, path: PathBuf| move |reason| GpuError::Io { path, action, reason };
        let folder = tempfile::Builder::new().prefix("assay-gpu-").tempdir();
        let folder = folder.map_err(failed("write to", temporary))?;
        // Where a plugin looks for a toolkit first.
        let (root, sdk) = (self.toolkit.root(), folder.path().join("cuda_sdk_lib"));
        let root = fs::canonicalize(root).map_err(failed("find", root.into()))?;
        symlink(root, &sdk).map_err(failed("create", sdk.clone()))?;
        let job = Job {
            library: &self.plugin,
            topology: "cuda",
            options: &target.options(),
            code: request.code,
            replicas: target.devices(),
            partitions: 1,
        };
        let compiled = self.worker.compile(&job, folder.path(), |_| ());
        let compiled = compiled.map_err(|error| of_target(target, error))?;
        let memory = compiled.memory;
        let (file, text) = optimized(&folder.path().join(HLO))?;
        let unread = |reason| GpuError::Unread { target: target.to_string(), memory, reason: Box::new(reason) };
        let traffic = Traffic::parse(&file, &text).map_err(unread)?;
        for launch in &mut launches {
            launch.runs = runs(&text, &launch.name, &traffic);
        }
        Ok(Compiled { memory, compile_s: compiled.compile_s, launches, traffic })
    }
}

/// The optimized HLO that lies in `folder`, and its file's name.
fn optimized(folder: &Path) -> Result<(String, String), GpuError> {
    let failed = |path: &Path, reason| GpuError::Io { path: path.into(), action: "read", reason };
    let files = fs::read_dir(folder).map_err(|reason| failed(folder, reason))?;
    let files = files.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let module = files.filter(|name| name.ends_with(SUFFIX)).min().ok_or_else(|| GpuError::Text {
        from: folder.display().to_string(),
        line: 0,
        given: "no such file".into(),
        expected: "a module's optimized HLO, …gpu_after_optimizations.txt",
    })?;
    let path = folder.join(&module);
    let text = fs::read_to_string(&path).map_err(|reason| failed(&path, reason))?;
    Ok((module, text))
}

/// How often a program calls the kernel called `name`.
fn runs(hlo: &str, name: &str, traffic: &Traffic) -> u64 {
    let named = format!("\"{name}\"");
    let calls = hlo.lines().filter(|line| line.contains(CALL) && line.contains(&named));
    let instruction = |line: &str| {
        let (name, _) = line.trim_start().trim_start_matches("ROOT ").split_once(" = ")?;
        Some(traffic.runs.get(name.trim_start_matches('%')).copied().unwrap_or(1))
    };
    calls.filter_map(instruction).sum()
}

/// The same of `target`.
fn of_target(target: &Target, error: AheadError) -> GpuError {
    let target = target.to_string();
    match error {
        AheadError::Io { path, action, reason } => GpuError::Io { path, action, reason },
        AheadError::Refused(message) if is_unknown_call(&message) => GpuError::NoPtx { target, call: CALL },
        AheadError::Refused(message) => GpuError::Refused { target, message },
        AheadError::Died { status, stderr } => GpuError::Died { target, status, stderr },
        AheadError::TimedOut { limit, stderr } => GpuError::TimedOut { target, limit, stderr },
        AheadError::Malformed { file, line, given, expected } => {
            GpuError::Text { from: file.into(), line, given, expected }
        }
    }
}

/// Whether a plugin says that it does not know [`CALL`].
fn is_unknown_call(message: &str) -> bool {
    message.contains(CALL)
        && ["No registered implementation", "UNIMPLEMENTED", "NOT_FOUND", "not found"]
            .iter()
            .any(|words| message.contains(words))
}
