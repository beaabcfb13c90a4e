//! The bench engine: how long one implementation takes for one batch, how much memory, and how much longer than others, than a
//! mere copy of the logits, or with an LM head than its three products.
//!
//! A step is one evaluation of the loss and all its gradients. Before every step the problem is put in place again:
//! for PJRT on the devices, else in a fresh copy. That is not timed, and neither is fetching the outputs; a step ends
//! when all of them are there. The logits have to be put back, because dlogits lie over them, and the last step's
//! dlogits would be another problem: all but uniform, with clipped ratios and rows of zeros, which a kernel may leave
//! early. Where an implementation [holds](crate::implementation::ResidentProblem) the problem on its device, it is restored from
//! there, and its kernels are timed alone as well: back to back, at least 20 times, with nothing but the restoring
//! copies between them, which are timed too.
//!
//! Every token of a bench counts, whatever mask the recipe draws.
//!
//! The outputs of the first step are judged, whole, before any other is made; with an LM head, those of a few tokens with
//! the whole head, as the reference takes minutes for more. A wrong answer is not timed. Others take turns with it, step
//! by step, and are judged like it.

mod figures;
mod subject;
mod timed;
mod turns;
mod worker;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::subject::{BenchSubject, Opponent};
use self::timed::Timed;
use crate::case::{BenchCase, CaseBatch, KernelSettings};
use crate::implementation::RunError;
use crate::judge::generate::RecipeError;
use crate::judge::judge::JudgeError;
use crate::memory::{Shortage, available_host_bytes};
use crate::registry::{FoundImplementation, find, find_head};
use crate::schema::bench::BenchFigures;
use crate::schema::programs::ProgramBench;
use crate::schema::verdicts::Verdicts;
use crate::worker::WorkerError;

pub use self::worker::WorkerTrial;

/// The options of a bench in addition to its [`BenchCase`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// The file that the case was read from; paths in it are relative to its folder.
    pub file: PathBuf,
    /// Ids of implementations that take turns with it, `copy` for a copy of the logits, `gemm` for the products of an LM head.
    pub against: Vec<String>,
    /// Threads of kernels on this machine's cores, of the copy and of the products; all cores if `None`.
    pub threads: Option<NonZeroUsize>,
    /// The PJRT plugin of implementations that need one; as in [`registry`](crate::registry::registry) if `None`.
    pub plugin: Option<PathBuf>,
    /// The command that makes the same bench again, for the words on a wrong answer.
    pub command: String,
}

/// The progress of a bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchProgress {
    /// The name of the step that begins.
    Doing(&'static str),
    /// One step has ended, of `StepCounts::all` steps.
    Step,
}

/// The function that a bench reports its progress to.
type ProgressListener<'t> = &'t mut (dyn FnMut(BenchProgress) + Send);

/// The result of a bench.
#[derive(Debug)]
pub enum BenchResult {
    /// The answer was right, and this is what it cost.
    Right(Box<BenchFigures>),
    /// The answer failed its judgement, and nothing was timed.
    Wrong {
        /// The verdicts on the first step.
        verdicts: Verdicts,
        /// The gates that failed, as text.
        failures: Vec<String>,
    },
}

/// The reason why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The case says something that no bench is of.
    #[error("`{field}`: got {given}, expected {expected}")]
    Setting {
        /// The name of the field.
        field: String,
        /// The value of the field.
        given: &'static str,
        /// The values that the field may have.
        expected: &'static str,
    },
    /// An implementation is not there, or does not run here.
    #[error("{0}")]
    Implementation(String),
    /// The pool of threads could not be made.
    #[error("threads: got {given}: {reason}")]
    Threads {
        /// The number of threads that was asked for.
        given: NonZeroUsize,
        /// The reason that the system gives.
        reason: String,
    },
    /// The recipe makes no problem.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The machine has too little memory.
    #[error(transparent)]
    Memory(#[from] Shortage),
    /// The implementation failed to run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The answer cannot be judged.
    #[error(transparent)]
    Judge(#[from] JudgeError),
    /// A worker does not answer.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// Lets a worker time its calls on the problem of `batch`, once its answer was judged.
///
/// # Errors
/// [`BenchError::Setting`] for a batch from a file; [`BenchError::Worker`] if the worker does not answer; otherwise as [`run`].
pub fn time_worker(
    batch: &CaseBatch,
    trial: WorkerTrial,
    progress: &mut (dyn FnMut(BenchProgress) + Send),
) -> Result<ProgramBench, BenchError> {
    match batch {
        CaseBatch::Generate(recipe) => trial.measure(recipe, progress),
        CaseBatch::GenerateHead(recipe) => trial.measure(recipe, progress),
        CaseBatch::Fixture(_) => Err(recorded_batch()),
    }
}

fn recorded_batch() -> BenchError {
    let expected = "`generate` or `generate_head`: a bench is of a shape";
    BenchError::Setting { field: "batch".into(), given: "`fixture`", expected }
}

/// Measures the kernel of `case` on its batch; `progress` hears how far it is.
///
/// ```
/// use assay::bench::{BenchResult, Options, run};
/// use assay::case::{BenchCase, CaseBatch, StepCounts};
/// use assay::judge::generate::{Recipe, Regime};
/// use assay::problem::Dtype;
///
/// let recipe = Recipe {
///     shape: [2, 3, 32],
///     dtype: Dtype::F32,
///     regime: Regime::Normal,
///     seed: 0,
///     old_logp_noise_scale: 0.3,
///     masked_garbage: false,
/// };
/// let mut case = BenchCase::new(CaseBatch::Generate(recipe), "native");
/// case.bench = StepCounts { warmup: 0, steps: 2 };
/// let BenchResult::Right(figures) = run(&case, &Options::default(), &mut |_| ())? else { panic!("a wrong answer") };
/// assert!(figures.step_s_p50 > 0.0);
/// # Ok::<(), assay::bench::BenchError>(())
/// ```
///
/// # Errors
/// [`BenchError::Setting`] for a batch from a file, for one with garbage under its mask and for no step;
/// [`BenchError::Implementation`] where one is not there; [`BenchError::Memory`] before anything large is made, and again
/// when it is known what the implementations need; what the implementations return.
pub fn run(
    case: &BenchCase,
    options: &Options,
    progress: &mut (dyn FnMut(BenchProgress) + Send),
) -> Result<BenchResult, BenchError> {
    match &case.batch {
        CaseBatch::Generate(recipe) => measure_timed(case, recipe, options, progress, find),
        CaseBatch::GenerateHead(recipe) => measure_timed(case, recipe, options, progress, find_head),
        CaseBatch::Fixture(_) => Err(recorded_batch()),
    }
}

fn measure_timed<W: Timed>(
    case: &BenchCase,
    recipe: &W,
    options: &Options,
    progress: ProgressListener,
    find: fn(&str, Option<&Path>) -> FoundImplementation<W::Problem>,
) -> Result<BenchResult, BenchError> {
    if recipe.recipe().masked_garbage {
        let field = format!("{}.masked_garbage", W::FIELD);
        return Err(BenchError::Setting { field, given: "true", expected: "false: every token of a bench counts" });
    }
    if case.bench.steps == 0 {
        return Err(BenchError::Setting { field: "bench.steps".into(), given: "0", expected: "at least 1" });
    }
    let found = |kernel: &KernelSettings| {
        let by_id = |id: &str| find(id, options.plugin.as_deref());
        kernel.implementation(&options.file, by_id).map_err(BenchError::Implementation)
    };
    let implementation = found(&case.kernel)?;
    let opponent = |id: &String| {
        if id == W::BOUND {
            return Ok(Opponent::Bound);
        }
        Ok(Opponent::Implementation(found(&KernelSettings::with_id(id))?))
    };
    let subject = BenchSubject {
        implementation: &*implementation,
        spec: &case.spec,
        recipe,
        devices: case.kernel.devices,
        opponents: options.against.iter().map(opponent).collect::<Result<_, BenchError>>()?,
    };
    let mut measure = || subject.measure(case.bench, available_host_bytes(), &options.command, progress);
    let Some(given) = options.threads else { return measure() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(given.get()).build();
    pool.map_err(|error| BenchError::Threads { given, reason: error.to_string() })?.install(measure)
}
