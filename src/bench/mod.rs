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

mod timed;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;

use self::timed::Timed;
use crate::case::{BenchCase, CaseBatch, KernelSettings, StepCounts};
use crate::gpu::GpuChip;
use crate::implementation::{
    Answer, Implementation, KernelTiming, KernelTimings, Prepared, ProblemFormat, ResidentProblem, RunError, RunsOn,
    Step, Unavailable, Workload,
};
use crate::judge::generate::RecipeError;
use crate::judge::judge::{JudgeError, Verdict};
use crate::judge::judgeable::Judgeable;
use crate::judge::report::{self, on_devices};
use crate::judge::tolerance::{Grade, Limits};
use crate::judge::trial::Known;
use crate::memory::{CompiledMemory, DeviceMemory, Shortage, available_host_bytes, expect_room};
use crate::problem::Candidate;
use crate::schema::bench::{BenchFigures, BenchKernel, KernelFigures, Ratios};
use crate::schema::verdicts::Verdicts;
use crate::spec::LossSpec;

/// Launches of kernels that are timed alone at least, so that neither a clock nor a single launch decides.
const LEAST_LAUNCHES: usize = 20;

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
    /// One step has ended, of [`StepCounts::all`] steps.
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
}

/// Measures the kernel of `case` on its batch; `progress` hears how far it is.
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
        CaseBatch::Generate(recipe) => measure_timed(case, recipe, options, progress),
        CaseBatch::GenerateHead(recipe) => measure_timed(case, recipe, options, progress),
        CaseBatch::Fixture(_) => {
            let expected = "`generate` or `generate_head`: a bench is of a shape";
            Err(BenchError::Setting { field: "batch".into(), given: "`fixture`", expected })
        }
    }
}

fn measure_timed<W: Timed>(
    case: &BenchCase,
    recipe: &W,
    options: &Options,
    progress: ProgressListener,
) -> Result<BenchResult, BenchError> {
    if recipe.recipe().masked_garbage {
        let field = format!("{}.masked_garbage", W::FIELD);
        return Err(BenchError::Setting { field, given: "true", expected: "false: every token of a bench counts" });
    }
    if case.bench.steps == 0 {
        return Err(BenchError::Setting { field: "bench.steps".into(), given: "0", expected: "at least 1" });
    }
    let found = |kernel: &KernelSettings| {
        kernel.implementation(&options.file, options.plugin.as_deref()).map_err(BenchError::Implementation)
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

/// A program that takes turns with the subject.
enum Opponent<P: Workload> {
    /// The bound of the subject, [`Timed::BOUND`].
    Bound,
    Implementation(Arc<dyn Implementation<P>>),
}

/// The implementation that is measured, with its problem.
struct BenchSubject<'s, W: Timed> {
    implementation: &'s dyn Implementation<W::Problem>,
    spec: &'s LossSpec,
    recipe: &'s W,
    devices: usize,
    opponents: Vec<Opponent<W::Problem>>,
}

impl<W: Timed> BenchSubject<'_, W> {
    /// `available` are the bytes that this machine has left.
    fn measure(
        &self,
        counts: StepCounts,
        available: Option<usize>,
        command: &str,
        progress: ProgressListener,
    ) -> Result<BenchResult, BenchError> {
        let Self { implementation, spec, recipe, devices, ref opponents } = *self;
        let given = recipe.given();
        self.expect_room(0, available)?;
        recipe.check(spec)?;

        progress(BenchProgress::Doing("compiling"));
        let started = Instant::now();
        let prepared = implementation.prepare(spec, given, devices)?;
        let compiling = started.elapsed();
        let mut ready = Vec::new();
        for opponent in opponents {
            ready.push(match opponent {
                Opponent::Bound => None,
                Opponent::Implementation(implementation) => Some(implementation.prepare(spec, given, 1)?),
            });
        }
        let bounds = ready.iter().filter(|ready| ready.is_none()).count();
        let others = ready.iter().flatten().map(|prepared| prepared.host_bytes()).max().unwrap_or(0);
        let of_bound = if bounds > 0 { recipe.bound_bytes() } else { 0 };
        self.expect_room(prepared.host_bytes().max(others) + of_bound, available)?;

        progress(BenchProgress::Doing("judging"));
        let part = recipe.judged_part(devices);
        if let Some(part) = &part
            && let Some(wrong) = self.judge_part(part, command)?
        {
            return Ok(wrong);
        }
        progress(BenchProgress::Doing("generating"));
        let problem = recipe.unmasked_problem(spec)?;
        progress(BenchProgress::Doing("the first step"));
        let placed = Placed::new(&*prepared, &problem)?;
        let step = placed.load()?;
        let after_alloc = prepared.device_memory();
        let (answer, first) = timed::<W::Problem>(step)?;
        let mut kernels = None;
        let whole = part.is_none();
        if whole {
            progress(BenchProgress::Doing("judging"));
            let answer = answer()?;
            // What kernels leave when they are timed is compared with the answer that was judged.
            let judged = placed.held.as_ref().map(|held| (held, answer.clone()));
            if let Some(wrong) = judge_answer(implementation, spec, &problem, devices, answer, command)? {
                return Ok(wrong);
            }
            if let Some((held, judged)) = judged {
                progress(BenchProgress::Doing("timing the kernels"));
                kernels = Some(held.time_kernels(&judged, counts.steps.max(LEAST_LAUNCHES))?);
            }
        }
        let mut rivals = Vec::new();
        for (opponent, ready) in opponents.iter().zip(&ready) {
            let (Opponent::Implementation(implementation), Some(prepared)) = (opponent, ready) else {
                rivals.push(Rival::Bound(recipe.bound(&problem)));
                continue;
            };
            let placed = Placed::new(&**prepared, &problem)?;
            if whole {
                let outcome = timed::<W::Problem>(placed.load()?)?.0()?;
                if let Some(wrong) = judge_answer(&**implementation, spec, &problem, 1, outcome, command)? {
                    return Ok(wrong);
                }
            }
            rivals.push(Rival::Implementation(placed));
        }
        progress(BenchProgress::Step);

        progress(BenchProgress::Doing("steps"));
        let (mut times, after_run) = take_turns(counts, &placed, &mut rivals, progress)?;
        times.first = compiling + first;
        times.kernels = kernels;
        let after_run = after_run.unwrap_or_else(|| after_alloc.clone());
        let memory = MemorySeen { after_alloc, after_run, compiled: prepared.compiled_memory() };
        Ok(BenchResult::Right(Box::new(self.figures(counts, times, memory, prepared.runs_on()))))
    }

    /// Judges all answers to a part of the problem, and returns the verdicts on the first that is wrong.
    fn judge_part(&self, part: &W, command: &str) -> Result<Option<BenchResult>, BenchError> {
        let problem = part.unmasked_problem(self.spec)?;
        for (implementation, devices) in self.implementations() {
            let prepared = implementation.prepare(self.spec, part.given(), devices)?;
            let outcome = timed::<W::Problem>(prepared.load(&problem)?)?.0()?;
            if let Some(wrong) = judge_answer(implementation, self.spec, &problem, devices, outcome, command)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    /// The subject and those of its opponents that have an answer, with the devices that they run on.
    fn implementations(&self) -> impl Iterator<Item = (&dyn Implementation<W::Problem>, usize)> {
        let others = self.opponents.iter().filter_map(|opponent| match opponent {
            Opponent::Bound => None,
            Opponent::Implementation(implementation) => Some((&**implementation, 1)),
        });
        std::iter::once((self.implementation, self.devices)).chain(others)
    }

    /// Checks that this machine has room for the problem while it is made and judged, and then for its outcome and
    /// `beside` more bytes.
    fn expect_room(&self, beside: usize, available: Option<usize>) -> Result<(), BenchError> {
        let Self { recipe, implementation, devices, .. } = *self;
        let running = recipe.running_bytes().saturating_add(beside);
        let ProblemFormat { shape, dtype, .. } = recipe.given();
        let what = || format!("a bench of {shape} {dtype} with {}", on_devices(implementation.id(), devices));
        Ok(expect_room(what, recipe.making_bytes(devices).max(running), available)?)
    }

    fn figures(&self, counts: StepCounts, times: Times, memory: MemorySeen, runs_on: Option<RunsOn>) -> BenchFigures {
        let steps = sorted(&times.steps);
        let mean = steps.iter().sum::<f64>() / steps.len() as f64;
        let median = percentile(&steps, 50);
        let ratio = |times: &Vec<Duration>| median / percentile(&sorted(times), 50);
        let name = |opponent: &Opponent<W::Problem>| match opponent {
            Opponent::Bound => W::BOUND.to_string(),
            Opponent::Implementation(implementation) => implementation.id().into(),
        };
        let ratios = self.opponents.iter().zip(&times.of_opponents);
        let ratios = Ratios(ratios.map(|(opponent, times)| (name(opponent), ratio(times))).collect());
        let mut why_null = BTreeMap::new();
        let isa = self.implementation.isa();
        if isa.is_none() {
            why_null
                .insert("isa".into(), "only kernels on this machine's cores say which instructions they use".into());
        }
        let roofline_share = ratios.0.get(W::BOUND).map(|ratio| 1.0 / ratio);
        if roofline_share.is_none() {
            why_null.insert("roofline_share".into(), format!("the bound is {}: --against {}", W::BOUND_IS, W::BOUND));
        }
        let mut keep = |key: &str, figure: Result<i64, Unavailable>| {
            figure.map_err(|why| why_null.insert(key.into(), why.reason)).ok()
        };
        let unreported = || Unavailable { reason: "the device's allocator does not report it".into() };
        let in_use = |memory: &Result<DeviceMemory, Unavailable>| memory.clone().map(|memory| memory.bytes_in_use);
        let peak = |of: fn(DeviceMemory) -> Option<i64>| {
            memory.after_run.clone().and_then(|memory| of(memory).ok_or_else(unreported))
        };
        let compiled = |of: fn(CompiledMemory) -> i64| memory.compiled.clone().map(of);
        let mut figures = BenchFigures {
            implementation: self.implementation.id().into(),
            devices: self.devices,
            shape: self.recipe.extents(),
            dtype: self.recipe.recipe().dtype.to_string(),
            judged_shape: None,
            layout: None,
            rounds_logits: None,
            warmup: counts.warmup,
            steps: counts.steps,
            first_call_s: times.first.as_secs_f64(),
            avg_step_ms: mean * 1e3,
            step_s_mean: mean,
            step_s_p50: median,
            step_s_p90: percentile(&steps, 90),
            step_s_min: percentile(&steps, 0),
            step_s_max: percentile(&steps, 100),
            gb_per_s: None,
            device: None,
            kernel_launches: None,
            kernel_s_p50: None,
            kernel_s_min: None,
            kernel_gb_per_s: None,
            device_copy_s_p50: None,
            device_copy_gb_per_s: None,
            device_copy_share: None,
            kernels: Vec::new(),
            device_gb_per_s: None,
            device_gb_per_s_from: None,
            device_share: None,
            gflop_per_s: None,
            threads: rayon::current_num_threads(),
            isa: isa.map(String::from),
            lowering: self.implementation.lowering().map(String::from),
            ratios,
            roofline_share,
            mem_after_alloc: keep("mem_after_alloc", in_use(&memory.after_alloc)),
            mem_after_run: keep("mem_after_run", in_use(&memory.after_run)),
            peak_bytes_in_use: keep("peak_bytes_in_use", peak(|memory| memory.peak_bytes_in_use)),
            peak_bytes_reserved: keep("peak_bytes_reserved", peak(|memory| memory.peak_bytes_reserved)),
            argument_bytes: keep("argument_bytes", compiled(|memory| memory.argument_bytes)),
            output_bytes: keep("output_bytes", compiled(|memory| memory.output_bytes)),
            temp_bytes: keep("temp_bytes", compiled(|memory| memory.temp_bytes)),
            alias_bytes: keep("alias_bytes", compiled(|memory| memory.alias_bytes)),
            why_null,
        };
        self.recipe.add_own(self.devices, &mut figures);
        if let Some(kernels) = &times.kernels {
            add_kernels(&mut figures, kernels);
        }
        if let Some(runs_on) = runs_on {
            add_device(&mut figures, runs_on, self.devices);
        }
        figures
    }
}

/// Adds what was seen of a step's kernels, and of the copies between them.
fn add_kernels(figures: &mut BenchFigures, KernelTimings { kernels, copies, copied_bytes }: &KernelTimings) {
    // A launch of all kernels takes what each of them takes.
    let launch = |i: usize| kernels.iter().map(|kernel| kernel.took[i]).sum();
    let launches: Vec<Duration> = (0..copies.len()).map(launch).collect();
    let (launches, copies) = (sorted(&launches), sorted(copies));
    let (kernel, copy) = (percentile(&launches, 50), percentile(&copies, 50));
    figures.kernel_launches = Some(launches.len());
    figures.kernel_s_p50 = Some(kernel);
    figures.kernel_s_min = Some(percentile(&launches, 0));
    figures.kernel_gb_per_s = figures.gb_per_s.map(|rate| rate * figures.step_s_p50 / kernel);
    let of_copy = 2.0 * *copied_bytes as f64 / 1e9 / copy;
    figures.device_copy_s_p50 = Some(copy);
    figures.device_copy_gb_per_s = Some(of_copy);
    figures.device_copy_share = figures.kernel_gb_per_s.map(|rate| rate / of_copy);
    figures.kernels = kernels.iter().map(figures_of_kernel).collect();
}

fn figures_of_kernel(KernelTiming { kernel, took }: &KernelTiming) -> BenchKernel {
    let took = sorted(took);
    BenchKernel {
        name: kernel.name.clone(),
        s_p50: percentile(&took, 50),
        s_min: percentile(&took, 0),
        assembled: KernelFigures {
            registers: kernel.registers,
            local_bytes: kernel.local_bytes,
            static_shared_bytes: kernel.static_shared_bytes,
            dynamic_shared_bytes: kernel.dynamic_shared_bytes,
            most_threads: kernel.most_threads,
            ptx_version: kernel.ptx_version,
            binary_version: kernel.binary_version,
            ctas_a_multiprocessor: kernel.ctas_a_multiprocessor,
            clusters: kernel.clusters,
        },
    }
}

/// Adds the largest rate of `devices` devices of one kind, as they report it or as NVIDIA's datasheet gives it, and the
/// share that was reached.
fn add_device(figures: &mut BenchFigures, RunsOn { device, bytes_per_s }: RunsOn, devices: usize) {
    let by_datasheet = || GpuChip::with_device_name(&device).map(|chip| (chip.hbm_tb_per_s * 1e12, "datasheet"));
    if let Some((bytes_per_s, from)) = bytes_per_s.map(|own| (own, "device")).or_else(by_datasheet) {
        let most = bytes_per_s / 1e9 * devices as f64;
        let took = figures.kernel_s_p50.unwrap_or(figures.step_s_p50);
        figures.device_gb_per_s = Some(most);
        figures.device_gb_per_s_from = Some(from.into());
        figures.device_share = figures.gb_per_s.map(|rate| rate * figures.step_s_p50 / took / most);
    }
    figures.device = Some(device);
}

/// The verdicts on an answer, if one of them failed.
fn judge_answer<P: Judgeable>(
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
    devices: usize,
    outcome: Candidate<P::Gradient>,
    command: &str,
) -> Result<Option<BenchResult>, BenchError> {
    let id = implementation.id();
    let known = Known::of(spec, problem).map_err(RunError::from)?;
    let limits = Limits::for_class(implementation.class()).map_err(JudgeError::from)?;
    let limits = if implementation.keeps_digits() { limits } else { limits.at(Grade::Standard) };
    let judged = known.judge(outcome, &limits)?;
    let failures = known.failures(&judged, id, command);
    if failures.is_empty() {
        return Ok(None);
    }
    let label = format!("{} {}", problem.checked_shape(spec).map_err(RunError::from)?, problem.dtype());
    let check = |verdict: &Verdict| report::check(&label, id, &verdict.gate.to_string(), verdict);
    let checks =
        judged.verdicts.iter().map(|verdict| check(verdict).on_devices(devices, implementation.lowering())).collect();
    Ok(Some(BenchResult::Wrong { verdicts: report::verdicts(checks, Vec::new()), failures }))
}

/// A problem where an implementation's steps are loaded from: its device's memory, or this machine's.
struct Placed<'p, P: Workload> {
    prepared: &'p dyn Prepared<P>,
    problem: &'p P,
    held: Option<Box<dyn ResidentProblem<'p, P> + 'p>>,
}

impl<'p, P: Workload> Placed<'p, P> {
    fn new(prepared: &'p dyn Prepared<P>, problem: &'p P) -> Result<Self, RunError> {
        Ok(Self { prepared, problem, held: prepared.hold(problem)? })
    }

    fn load(&self) -> Result<Step<'p, P>, RunError> {
        match &self.held {
            Some(held) => held.load(),
            None => self.prepared.load(self.problem),
        }
    }
}

/// An opponent that was made ready.
enum Rival<'p, P: Workload> {
    Bound(Box<dyn FnMut() -> Duration + 'p>),
    Implementation(Placed<'p, P>),
}

impl<P: Workload> Rival<'_, P> {
    fn take_a_turn(&mut self) -> Result<Duration, BenchError> {
        match self {
            Self::Bound(bound) => Ok(bound()),
            Self::Implementation(placed) => Ok(timed::<P>(placed.load()?)?.1),
        }
    }
}

/// The memory of a device when outputs are there; `None` where no step was timed.
type AfterRun = Option<Result<DeviceMemory, Unavailable>>;

/// Makes all steps but the first, and says how long those took that are not for warming up.
fn take_turns<P: Workload>(
    counts: StepCounts,
    placed: &Placed<P>,
    rivals: &mut [Rival<P>],
    progress: ProgressListener,
) -> Result<(Times, AfterRun), BenchError> {
    for _ in 0..counts.warmup {
        drop(timed::<P>(placed.load()?)?);
        rivals.iter_mut().try_for_each(|rival| rival.take_a_turn().map(drop))?;
        progress(BenchProgress::Step);
    }
    let of_opponents = vec![Vec::new(); rivals.len()];
    let mut times = Times { first: Duration::ZERO, steps: Vec::new(), kernels: None, of_opponents };
    let mut after_run = None;
    for _ in 0..counts.steps {
        let (answer, took) = timed::<P>(placed.load()?)?;
        times.steps.push(took);
        after_run = Some(placed.prepared.device_memory());
        drop(answer);
        for (rival, took) in rivals.iter_mut().zip(&mut times.of_opponents) {
            took.push(rival.take_a_turn()?);
        }
        progress(BenchProgress::Step);
    }
    Ok((times, after_run))
}

/// Makes a step, and says how long it took.
fn timed<P: Workload>(step: Step<P>) -> Result<(Answer<P>, Duration), BenchError> {
    let started = Instant::now();
    let answer = step()?;
    Ok((answer, started.elapsed()))
}

struct Times {
    first: Duration,
    steps: Vec<Duration>,
    /// Kernels alone, where a device's driver times them.
    kernels: Option<KernelTimings>,
    /// The times of the opponents, in their order.
    of_opponents: Vec<Vec<Duration>>,
}

/// Returns the times in seconds, in ascending order.
fn sorted(times: &[Duration]) -> Vec<f64> {
    let mut seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

struct MemorySeen {
    /// The arguments lie on the devices.
    after_alloc: Result<DeviceMemory, Unavailable>,
    /// The last step's outputs do.
    after_run: Result<DeviceMemory, Unavailable>,
    compiled: Result<CompiledMemory, Unavailable>,
}

/// The smallest of `sorted` that so many percent of them do not exceed.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (percent * sorted.len()).div_ceil(100);
    sorted[rank.max(1) - 1]
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::implementation::Unsupported;
    use crate::judge::generate::{Recipe, Regime};
    use crate::problem::{Dtype, Problem, Shape};
    use crate::registry::find;

    fn recipe(shape: [usize; 3]) -> Recipe {
        Recipe {
            shape,
            dtype: Dtype::Bf16,
            regime: Regime::Normal,
            seed: 1,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        }
    }

    /// The native kernel, with a loss that is off by `error`; its first device has an allocator that counts.
    #[derive(Default)]
    struct CountedSteps {
        error: f32,
        steps: AtomicUsize,
    }

    impl Implementation for CountedSteps {
        fn id(&self) -> &'static str {
            "counting"
        }
        fn summary(&self) -> &'static str {
            "for tests"
        }
        fn class(&self) -> &'static str {
            "native"
        }
        fn available(&self) -> Result<(), Unavailable> {
            Ok(())
        }
        fn supports(&self, _: &LossSpec, _: Shape, _: Dtype, _: usize) -> Result<(), Unsupported> {
            Ok(())
        }
        fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
            assert!(problem.mask.iter().all(|&counts| counts), "every token counts");
            self.steps.fetch_add(1, Ordering::Relaxed);
            let mut outcome = find::<Problem>("native", None).unwrap().run(spec, problem, devices)?;
            let loss = outcome.loss.expect("native returns it").value() as f32;
            outcome.loss = Some(ndarray::arr0(loss + self.error).into());
            Ok(outcome)
        }
        fn prepare<'s>(
            &'s self,
            spec: &'s LossSpec,
            _: ProblemFormat,
            devices: usize,
        ) -> Result<Box<dyn Prepared + 's>, RunError> {
            Ok(Box::new(CountingReady { implementation: self, spec, devices }))
        }
    }

    struct CountingReady<'s> {
        implementation: &'s CountedSteps,
        spec: &'s LossSpec,
        devices: usize,
    }

    impl Prepared for CountingReady<'_> {
        fn load<'p>(&'p self, problem: &'p Problem) -> Result<Step<'p>, RunError> {
            let problem = problem.clone();
            Ok(Box::new(move || {
                let outcome = self.implementation.run(self.spec, problem, self.devices)?;
                let answer: Answer<'p> = Box::new(move || Ok(outcome));
                Ok(answer)
            }))
        }
        fn host_bytes(&self) -> usize {
            1000
        }
        fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
            Ok(CompiledMemory { argument_bytes: 1, output_bytes: 2, temp_bytes: 3, alias_bytes: 4, code_bytes: 5 })
        }
        fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
            let steps = self.implementation.steps.load(Ordering::Relaxed) as i64;
            Ok(DeviceMemory { bytes_in_use: steps, peak_bytes_in_use: Some(7), ..DeviceMemory::default() })
        }
    }

    fn measure(subject: &CountedSteps, shape: [usize; 3], available: Option<usize>) -> Result<BenchResult, BenchError> {
        let (spec, recipe) = (LossSpec::default(), recipe(shape));
        let subject =
            BenchSubject { implementation: subject, spec: &spec, recipe: &recipe, devices: 1, opponents: Vec::new() };
        subject.measure(StepCounts { warmup: 2, steps: 4 }, available, "again", &mut |_| {})
    }

    #[test]
    fn every_step_is_made_and_every_figure_stands_under_its_key() {
        let subject = CountedSteps::default();
        let Ok(BenchResult::Right(figures)) = measure(&subject, [2, 3, 65], None) else { panic!("a right answer") };
        assert_eq!(subject.steps.load(Ordering::Relaxed), 1 + 2 + 4);
        assert_eq!((figures.mem_after_alloc, figures.mem_after_run), (Some(0), Some(7)), "before any step, after all");
        assert_eq!((figures.peak_bytes_in_use, figures.peak_bytes_reserved), (Some(7), None));
        assert_eq!(figures.why_null.keys().collect::<Vec<_>>(), ["isa", "peak_bytes_reserved", "roofline_share"]);
        let program = [figures.argument_bytes, figures.output_bytes, figures.temp_bytes, figures.alias_bytes];
        assert_eq!(program, [1, 2, 3, 4].map(Some));
    }

    #[test]
    fn a_wrong_answer_is_reported_and_not_timed() {
        let subject = CountedSteps { error: 1e-3, ..CountedSteps::default() };
        let Ok(BenchResult::Wrong { verdicts, failures }) = measure(&subject, [2, 3, 65], None) else {
            panic!("a wrong answer")
        };
        assert_eq!(subject.steps.load(Ordering::Relaxed), 1, "the one that was judged");
        assert!(!verdicts.pass && failures.len() == 1 && failures[0].contains("FAIL counting: loss"), "{failures:?}");
        assert!(failures[0].contains("replay    again"), "{failures:?}");
    }

    /// 2·3·65 elements: 10 bytes each while they are made, then 4 and the 1000 of the implementation.
    #[test]
    fn a_batch_that_does_not_fit_is_refused_before_it_is_made() {
        for (available, fits) in [(3899, false), (3900, true)] {
            let subject = CountedSteps::default();
            match measure(&subject, [2, 3, 65], Some(available)) {
                Ok(_) => assert!(fits),
                Err(error) => {
                    assert!(!fits, "{error}");
                    let message = "memory: a bench of 2x3x65 bf16 with counting needs 3900 bytes, 3899 are available";
                    assert_eq!(error.to_string(), message);
                    assert_eq!(subject.steps.load(Ordering::Relaxed), 0);
                }
            }
        }
        let error = measure(&CountedSteps::default(), [1, 2, 3], Some(1023)).expect_err("1024 bytes do not fit");
        assert!(error.to_string().contains("needs 1024 bytes, 1023 are"), "{error}");
        let error = measure(&CountedSteps::default(), [usize::MAX, 2, 3], Some(usize::MAX - 1)).expect_err("too many");
        assert!(error.to_string().contains("needs 18446744073709551615 bytes"), "{error}");
    }

    #[test]
    fn percentiles_are_samples() {
        let sorted = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0];
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&sorted, percent)), [1.0, 5.0, 9.0, 10.0]);
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&[3.0], percent)), [3.0; 4]);
        assert_eq!([50, 90].map(|percent| percentile(&[1.0, 2.0, 3.0], percent)), [2.0, 3.0]);
    }
}
