//! `assay bench`: how long one implementation takes for one batch, how much memory, and how much longer than others, than a
//! mere copy of the logits, or with an LM head than its three products.
//!
//! A step is one evaluation of the loss and all its gradients. Before every step the problem is put in place again: for
//! PJRT on the devices, else in a fresh copy. That is not timed, and neither is fetching the outputs; a step ends when
//! all of them are there. The logits have to be put back, because dlogits lie over them, and the last step's dlogits
//! would be another problem: all but uniform, with clipped ratios and rows of zeros, which a kernel may leave early.
//!
//! Every token of a bench counts, whatever mask the recipe draws.
//!
//! The outputs of the first step are judged, whole, before any other is made; with an LM head, those of a few tokens with
//! the whole head, as the reference takes minutes for more. A wrong answer is not timed. Others take turns with it, step
//! by step, and are judged like it.

mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args, value_parser};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use self::workload::Workload;
use super::case::{Batch, Case, Counts, Kernel};
use super::head_choice::HeadChoice;
use super::{CliError, Passed, PluginChoice, Printing, config};
use crate::implementation::{Answer, Implementation, Input, Prepared, RunError, Step, Unavailable};
use crate::judge::generate::{Recipe, Regime};
use crate::judge::judge::{Status, Verdict};
use crate::judge::judgeable::Judgeable;
use crate::judge::report::{Check, Report, explain, on_devices};
use crate::judge::tolerance::Tolerances;
use crate::memory::{CompiledMemory, DeviceMemory, available_host_bytes, expect_room};
use crate::problem::{Dtype, Extents};
use crate::schema::verdicts::Verdicts;
use crate::spec::LossSpec;

#[derive(Args)]
#[command(group(ArgGroup::new("what").required(true).args(["config", "implementation"])))]
pub(super) struct Bench {
    /// The batch, the loss, the kernel and how many steps, in YAML, TOML or JSON
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The implementation, with the default loss
    #[arg(long = "impl", value_name = "ID")]
    implementation: Option<String>,
    /// Extents of the logits, half a gigabyte in bf16 if none are given; with an LM head `BxTxHxV`
    #[arg(long, value_name = "BxTxV", requires = "implementation", default_value = "1x1792x151936")]
    shape: Extents,
    /// Dtype of the logits, or of hidden states and head
    #[arg(long, requires = "implementation", default_value = "bf16")]
    dtype: Dtype,
    #[command(flatten)]
    head: HeadChoice,
    /// Take turns with another implementation, with a copy of the logits, or with the products of an LM head
    #[arg(long, value_name = "ID|copy|gemm")]
    against: Vec<String>,
    /// Threads of kernels on this machine's cores, of the copy and of the products; all cores if none are given
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

impl Bench {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let file = self.config.clone().unwrap_or_default();
        let (case, command) = self.case()?;
        match &case.batch {
            Batch::Generate(recipe) => self.bench(&file, &case, recipe, &command),
            Batch::GenerateHead(recipe) => self.bench(&file, &case, recipe, &command),
            Batch::Fixture(_) => {
                let reason = "`batch`: got `fixture`, expected `generate` or `generate_head`: a bench is of a shape";
                Err(CliError::Config { path: file, reason: reason.into() })
            }
        }
    }

    fn bench<W: Workload>(&self, file: &Path, case: &Case, recipe: &W, command: &str) -> Result<Passed, CliError> {
        let invalid = |reason: &str| CliError::Config { path: file.into(), reason: reason.into() };
        if recipe.recipe().masked_garbage {
            let given = "masked_garbage`: got true, expected false: every token of a bench counts";
            return Err(invalid(&format!("`{}.{given}", W::FIELD)));
        }
        if case.bench.steps == 0 {
            return Err(invalid("`bench.steps`: got 0, expected at least 1"));
        }
        let plugin = self.plugin.checked_path()?;
        let implementation = case.kernel.implementation(file, plugin)?;
        let opponents = self
            .against
            .iter()
            .map(|id| {
                if id == W::BOUND {
                    return Ok(Opponent::Bound);
                }
                Ok(Opponent::Implementation(Kernel::of(id).implementation(file, plugin)?))
            })
            .collect::<Result<_, CliError>>()?;
        let subject = Subject {
            implementation: &*implementation,
            spec: &case.spec,
            recipe,
            devices: case.kernel.devices,
            opponents,
        };
        let measure = || subject.measure(case.bench, available_host_bytes(), command, &self.printing);
        let measured = match self.threads {
            None => measure()?,
            Some(threads) => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build();
                pool.map_err(|error| CliError::Usage(format!("--threads {threads}: {error}")))?.install(measure)?
            }
        };
        match measured {
            Measured::Right(figures) => {
                self.printing.finish(&figures.table(), &figures)?;
                Ok(Passed::Yes)
            }
            Measured::Wrong { report, failures } => {
                for failure in failures {
                    super::print(&format!("{failure}\n"))?;
                }
                self.printing.finish(&report.table(), &Verdicts::from(report))?;
                Ok(Passed::No)
            }
        }
    }

    /// What to measure, and the command that says so.
    fn case(&self) -> Result<(Case, String), CliError> {
        let Some(id) = &self.implementation else {
            let config = self.config.as_ref().expect("one of the two is required");
            return Ok((config::read(config)?, format!("assay bench --config {}", config.display())));
        };
        let recipe = Recipe {
            shape: self.shape.logits(),
            dtype: self.dtype,
            regime: Regime::Peaked,
            seed: 0,
            // So near to the policy that no token is clipped: one that is costs less.
            old_logp_noise_scale: 0.03,
            masked_garbage: false,
        };
        let recipe = self.head.recipe(self.shape, recipe)?;
        let (shape, dtype, head) = (self.shape, self.dtype, self.head.options());
        let command = format!("assay bench --impl {id} --shape {shape} --dtype {dtype}{head}");
        Ok((Case::of(recipe, id), command))
    }
}

/// What takes turns with the subject.
enum Opponent<P: Input> {
    /// [`Workload::BOUND`]
    Bound,
    Implementation(Arc<dyn Implementation<P>>),
}

/// What is measured.
struct Subject<'s, W: Workload> {
    implementation: &'s dyn Implementation<W::Problem>,
    spec: &'s LossSpec,
    recipe: &'s W,
    devices: usize,
    opponents: Vec<Opponent<W::Problem>>,
}

enum Measured {
    Right(Box<Figures>),
    /// The verdicts on the first step, and those that failed in words.
    Wrong {
        report: Report,
        failures: Vec<String>,
    },
}

impl<W: Workload> Subject<'_, W> {
    /// `available` are the bytes that this machine has left.
    fn measure(
        &self,
        counts: Counts,
        available: Option<usize>,
        command: &str,
        printing: &Printing,
    ) -> Result<Measured, CliError> {
        let Self { implementation, spec, recipe, devices, ref opponents } = *self;
        let (shape, dtype) = (recipe.shape(), recipe.recipe().dtype);
        self.expect_room(0, available)?;
        recipe.check(spec)?;

        let progress = printing.progress(counts.warmup + counts.steps + 1);
        progress.set_message("compiling");
        let started = Instant::now();
        let prepared = implementation.prepare(spec, shape, dtype, devices)?;
        let compiling = started.elapsed();
        let mut ready = Vec::new();
        for opponent in opponents {
            ready.push(match opponent {
                Opponent::Bound => None,
                Opponent::Implementation(implementation) => Some(implementation.prepare(spec, shape, dtype, 1)?),
            });
        }
        let bounds = ready.iter().filter(|ready| ready.is_none()).count();
        let others = ready.iter().flatten().map(|prepared| prepared.host_bytes()).max().unwrap_or(0);
        let of_bound = if bounds > 0 { recipe.bound_bytes() } else { 0 };
        self.expect_room(prepared.host_bytes().max(others) + of_bound, available)?;

        progress.set_message("judging");
        let part = recipe.judged_part(devices);
        if let Some(part) = &part {
            let problem = part.unmasked_problem(spec)?;
            for (implementation, devices) in self.implementations() {
                let prepared = implementation.prepare(spec, part.shape(), dtype, devices)?;
                let outcome = timed::<W::Problem>(prepared.load(&problem)?)?.0()?;
                if let Some(wrong) = judge_answer(implementation, spec, &problem, devices, outcome, command)? {
                    return Ok(wrong);
                }
            }
        }
        progress.set_message("generating");
        let problem = recipe.unmasked_problem(spec)?;
        progress.set_message("the first step");
        let step = prepared.load(&problem)?;
        let after_alloc = prepared.device_memory();
        let (answer, first) = timed::<W::Problem>(step)?;
        if part.is_none() {
            progress.set_message("judging");
            if let Some(wrong) = judge_answer(implementation, spec, &problem, devices, answer()?, command)? {
                return Ok(wrong);
            }
            for (opponent, ready) in opponents.iter().zip(&ready) {
                if let (Opponent::Implementation(implementation), Some(prepared)) = (opponent, ready) {
                    let outcome = timed::<W::Problem>(prepared.load(&problem)?)?.0()?;
                    if let Some(wrong) = judge_answer(&**implementation, spec, &problem, 1, outcome, command)? {
                        return Ok(wrong);
                    }
                }
            }
        }
        let mut bound = (bounds > 0).then(|| recipe.bound(&problem));
        let mut turn = |ready: &Option<Box<dyn Prepared<W::Problem> + '_>>| -> Result<Duration, CliError> {
            match (ready, &mut bound) {
                (Some(prepared), _) => Ok(timed::<W::Problem>(prepared.load(&problem)?)?.1),
                (None, Some(bound)) => Ok(bound()),
                (None, None) => unreachable!("there is one where it takes a turn"),
            }
        };
        progress.inc(1);

        progress.set_message("steps");
        for _ in 0..counts.warmup {
            drop(timed::<W::Problem>(prepared.load(&problem)?)?);
            ready.iter().try_for_each(|ready| turn(ready).map(drop))?;
            progress.inc(1);
        }
        let mut steps = Vec::new();
        let mut of_opponents = vec![Vec::new(); opponents.len()];
        let mut after_run = after_alloc.clone();
        for _ in 0..counts.steps {
            let (answer, took) = timed::<W::Problem>(prepared.load(&problem)?)?;
            steps.push(took);
            after_run = prepared.device_memory();
            drop(answer);
            for (ready, times) in ready.iter().zip(&mut of_opponents) {
                times.push(turn(ready)?);
            }
            progress.inc(1);
        }
        progress.finish_and_clear();
        let times = Times { first: compiling + first, steps, of_opponents };
        let memory = MemorySeen { after_alloc, after_run, compiled: prepared.compiled_memory() };
        Ok(Measured::Right(Box::new(self.figures(counts, times, memory))))
    }

    /// The subject and those of its opponents that have an answer, with the devices that they run on.
    fn implementations(&self) -> impl Iterator<Item = (&dyn Implementation<W::Problem>, usize)> {
        let others = self.opponents.iter().filter_map(|opponent| match opponent {
            Opponent::Bound => None,
            Opponent::Implementation(implementation) => Some((&**implementation, 1)),
        });
        std::iter::once((self.implementation, self.devices)).chain(others)
    }

    /// Checks that this machine holds the problem while it is made and judged, and then with its outcome and `beside` bytes.
    fn expect_room(&self, beside: usize, available: Option<usize>) -> Result<(), CliError> {
        let Self { recipe, implementation, devices, .. } = *self;
        let running = recipe.running_bytes().saturating_add(beside);
        let (shape, dtype) = (recipe.shape(), recipe.recipe().dtype);
        let what = || format!("a bench of {shape} {dtype} with {}", on_devices(implementation.id(), devices));
        Ok(expect_room(what, recipe.making_bytes(devices).max(running), available)?)
    }

    fn figures(&self, counts: Counts, times: Times, memory: MemorySeen) -> Figures {
        let steps = sorted(&times.steps);
        let mean = steps.iter().sum::<f64>() / steps.len() as f64;
        let median = percentile(&steps, 50);
        let ratio = |times: &Vec<Duration>| median / percentile(&sorted(times), 50);
        let name = |opponent: &Opponent<W::Problem>| match opponent {
            Opponent::Bound => W::BOUND.to_string(),
            Opponent::Implementation(implementation) => implementation.id().into(),
        };
        let ratios = self.opponents.iter().zip(&times.of_opponents);
        let mut why_null = BTreeMap::new();
        let isa = self.implementation.isa();
        if isa.is_none() {
            why_null.insert("isa", "only kernels on this machine's cores say which instructions they use".into());
        }
        let ratios: BTreeMap<String, f64> =
            ratios.map(|(opponent, times)| (format!("ratio_to_{}", name(opponent)), ratio(times))).collect();
        let roofline_share = ratios.get(&format!("ratio_to_{}", W::BOUND)).map(|ratio| 1.0 / ratio);
        if roofline_share.is_none() {
            why_null.insert("roofline_share", format!("the bound is {}: --against {}", W::BOUND_IS, W::BOUND));
        }
        let mut keep =
            |key, figure: Result<i64, Unavailable>| figure.map_err(|why| why_null.insert(key, why.reason)).ok();
        let unreported = || Unavailable { reason: "the device's allocator does not report it".into() };
        let in_use = |memory: &Result<DeviceMemory, Unavailable>| memory.clone().map(|memory| memory.bytes_in_use);
        let peak = |of: fn(DeviceMemory) -> Option<i64>| {
            memory.after_run.clone().and_then(|memory| of(memory).ok_or_else(unreported))
        };
        let compiled = |of: fn(CompiledMemory) -> i64| memory.compiled.clone().map(of);
        Figures {
            implementation: self.implementation.id().into(),
            devices: self.devices,
            shape: self.recipe.extents(),
            dtype: self.recipe.recipe().dtype,
            problem: self.recipe.says(self.devices),
            warmup: counts.warmup,
            steps: counts.steps,
            first_call_s: times.first.as_secs_f64(),
            avg_step_ms: mean * 1e3,
            step_s_mean: mean,
            step_s_p50: median,
            step_s_p90: percentile(&steps, 90),
            step_s_min: percentile(&steps, 0),
            step_s_max: percentile(&steps, 100),
            mem_after_alloc: keep("mem_after_alloc", in_use(&memory.after_alloc)),
            mem_after_run: keep("mem_after_run", in_use(&memory.after_run)),
            peak_bytes_in_use: keep("peak_bytes_in_use", peak(|memory| memory.peak_bytes_in_use)),
            peak_bytes_reserved: keep("peak_bytes_reserved", peak(|memory| memory.peak_bytes_reserved)),
            rate: BTreeMap::from([(W::RATE, self.recipe.rate() / median)]),
            threads: rayon::current_num_threads(),
            isa,
            ratios,
            roofline_share,
            argument_bytes: keep("argument_bytes", compiled(|memory| memory.argument_bytes)),
            output_bytes: keep("output_bytes", compiled(|memory| memory.output_bytes)),
            temp_bytes: keep("temp_bytes", compiled(|memory| memory.temp_bytes)),
            alias_bytes: keep("alias_bytes", compiled(|memory| memory.alias_bytes)),
            why_null,
        }
    }
}

/// The verdicts on an answer, if one of them failed.
fn judge_answer<P: Judgeable>(
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
    devices: usize,
    outcome: P::Outcome,
    command: &str,
) -> Result<Option<Measured>, CliError> {
    let id = implementation.id();
    let reference = problem.evaluate(spec).map_err(RunError::from)?;
    let verdicts = problem.judge(&reference, &outcome, implementation.class(), Tolerances::builtin())?;
    let failed = verdicts.iter().filter(|verdict| verdict.status != Status::Pass);
    let failures: Vec<_> = failed.map(|verdict| explain(verdict, &reference, problem, id, command)).collect();
    if failures.is_empty() {
        return Ok(None);
    }
    let label = format!("{} {}", problem.checked_shape(spec).map_err(RunError::from)?, problem.dtype());
    let check = |verdict: &Verdict| Check::new(&label, id, &verdict.gate.to_string(), verdict);
    let checks = verdicts.iter().map(|verdict| check(verdict).on_devices(devices)).collect();
    Ok(Some(Measured::Wrong { report: Report::new(checks, Vec::new()), failures }))
}

/// Makes a step, and says how long it took.
fn timed<P: Input>(step: Step<P>) -> Result<(Answer<P>, Duration), CliError> {
    let started = Instant::now();
    let answer = step()?;
    Ok((answer, started.elapsed()))
}

struct Times {
    first: Duration,
    steps: Vec<Duration>,
    /// In the order of the opponents.
    of_opponents: Vec<Vec<Duration>>,
}

/// Seconds, ascending.
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

/// What was measured, under the seed project's keys.
#[derive(Serialize)]
struct Figures {
    #[serde(rename = "impl")]
    implementation: String,
    devices: usize,
    /// `[B, T, V]` or `[B, T, H, V]`.
    shape: Vec<usize>,
    dtype: Dtype,
    /// How an LM head lies, whether its logits are rounded, and how much of it was judged.
    #[serde(flatten)]
    problem: BTreeMap<&'static str, serde_json::Value>,
    warmup: usize,
    steps: usize,
    /// Compiling, where the implementation does, and the first step.
    first_call_s: f64,
    avg_step_ms: f64,
    step_s_mean: f64,
    step_s_p50: f64,
    step_s_p90: f64,
    step_s_min: f64,
    step_s_max: f64,
    /// Over the median step: `gb_per_s`, of logits read and dlogits written; `gflop_per_s`, of the three products of an LM
    /// head.
    #[serde(flatten)]
    rate: BTreeMap<&'static str, f64>,
    /// Of kernels on this machine's cores.
    threads: usize,
    /// The instruction set, where it runs on them.
    isa: Option<&'static str>,
    /// Under `ratio_to_copy` and the like: the median step over the opponent's.
    #[serde(flatten)]
    ratios: BTreeMap<String, f64>,
    /// The copy's median over the median step: what part of the time memory would need in any case.
    roofline_share: Option<f64>,
    /// Of the first device, as is every figure of memory: bytes in use when the arguments lie there.
    mem_after_alloc: Option<i64>,
    /// Bytes in use when the outputs of the last step lie there.
    mem_after_run: Option<i64>,
    peak_bytes_in_use: Option<i64>,
    peak_bytes_reserved: Option<i64>,
    /// Of the compiled program, as are the next three.
    argument_bytes: Option<i64>,
    output_bytes: Option<i64>,
    temp_bytes: Option<i64>,
    alias_bytes: Option<i64>,
    /// Why a figure is absent.
    why_null: BTreeMap<&'static str, String>,
}

impl Figures {
    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        let shape: Vec<String> = self.shape.iter().map(usize::to_string).collect();
        let name = on_devices(&self.implementation, self.devices);
        table.set_header([name, format!("{} {}", shape.join("x"), self.dtype)]);
        table.column_mut(1).expect("two columns").set_cell_alignment(CellAlignment::Right);
        for (key, value) in &self.problem {
            table.add_row([key.to_string(), value.to_string()]);
        }
        table.add_row(["avg_step_ms".into(), format!("{:.3}", self.avg_step_ms)]);
        let seconds = [
            ("first_call_s", self.first_call_s),
            ("step_s_mean", self.step_s_mean),
            ("step_s_p50", self.step_s_p50),
            ("step_s_p90", self.step_s_p90),
            ("step_s_min", self.step_s_min),
            ("step_s_max", self.step_s_max),
        ];
        for (key, seconds) in seconds {
            table.add_row([key.into(), format!("{seconds:.6}")]);
        }
        for (key, rate) in &self.rate {
            table.add_row([key.to_string(), format!("{rate:.2}")]);
        }
        table.add_row(["threads".into(), self.threads.to_string()]);
        table.add_row(["isa", self.isa.unwrap_or("–")]);
        for (key, ratio) in &self.ratios {
            table.add_row([key.into(), format!("{ratio:.3}")]);
        }
        table.add_row(["roofline_share".into(), self.roofline_share.map_or("–".into(), |share| format!("{share:.3}"))]);
        let bytes = [
            ("mem_after_alloc", self.mem_after_alloc),
            ("mem_after_run", self.mem_after_run),
            ("peak_bytes_in_use", self.peak_bytes_in_use),
            ("peak_bytes_reserved", self.peak_bytes_reserved),
            ("argument_bytes", self.argument_bytes),
            ("output_bytes", self.output_bytes),
            ("temp_bytes", self.temp_bytes),
            ("alias_bytes", self.alias_bytes),
        ];
        for (key, bytes) in bytes {
            table.add_row([key.into(), bytes.map_or("–".into(), |bytes| bytes.to_string())]);
        }
        let mut text = format!("{table}\n");
        let reasons: BTreeSet<&String> = self.why_null.values().collect();
        for reason in reasons {
            let keys = self.why_null.iter().filter(|(_, why)| *why == reason).map(|(key, _)| *key);
            let _ = writeln!(text, "ignored  {}: {reason}", keys.collect::<Vec<_>>().join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::implementation::Unsupported;
    use crate::problem::{Candidate, Problem, Shape};
    use crate::registry::find;

    const QUIET: Printing = Printing { json: None, quiet: true };

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
    struct Counting {
        error: f32,
        steps: AtomicUsize,
    }

    impl Implementation for Counting {
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
            let mut outcome = find("native", None).unwrap().run(spec, problem, devices)?;
            outcome.loss = ndarray::arr0(outcome.loss.value() as f32 + self.error).into();
            Ok(outcome)
        }
        fn prepare<'s>(
            &'s self,
            spec: &'s LossSpec,
            _: Shape,
            _: Dtype,
            devices: usize,
        ) -> Result<Box<dyn Prepared + 's>, RunError> {
            Ok(Box::new(CountingReady { implementation: self, spec, devices }))
        }
    }

    struct CountingReady<'s> {
        implementation: &'s Counting,
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

    fn measure(subject: &Counting, shape: [usize; 3], available: Option<usize>) -> Result<Measured, CliError> {
        let (spec, recipe) = (LossSpec::default(), recipe(shape));
        let subject =
            Subject { implementation: subject, spec: &spec, recipe: &recipe, devices: 1, opponents: Vec::new() };
        subject.measure(Counts { warmup: 2, steps: 4 }, available, "again", &QUIET)
    }

    #[test]
    fn every_step_is_made_and_every_figure_stands_under_its_key() {
        let subject = Counting::default();
        let Ok(Measured::Right(figures)) = measure(&subject, [2, 3, 65], None) else { panic!("a right answer") };
        assert_eq!(subject.steps.load(Ordering::Relaxed), 1 + 2 + 4);
        assert_eq!((figures.mem_after_alloc, figures.mem_after_run), (Some(0), Some(7)), "before any step, after all");
        assert_eq!((figures.peak_bytes_in_use, figures.peak_bytes_reserved), (Some(7), None));
        assert_eq!(
            figures.why_null.keys().copied().collect::<Vec<_>>(),
            ["isa", "peak_bytes_reserved", "roofline_share"]
        );
        let program = [figures.argument_bytes, figures.output_bytes, figures.temp_bytes, figures.alias_bytes];
        assert_eq!(program, [1, 2, 3, 4].map(Some));
    }

    #[test]
    fn a_wrong_answer_is_reported_and_not_timed() {
        let subject = Counting { error: 1e-3, ..Counting::default() };
        let Ok(Measured::Wrong { report, failures }) = measure(&subject, [2, 3, 65], None) else {
            panic!("a wrong answer")
        };
        assert_eq!(subject.steps.load(Ordering::Relaxed), 1, "the one that was judged");
        assert!(!report.pass && failures.len() == 1 && failures[0].contains("FAIL counting: loss"), "{failures:?}");
        assert!(failures[0].contains("replay    again"), "{failures:?}");
    }

    /// 2·3·65 elements: 10 bytes each while they are made, then 4 and the 1000 of the implementation.
    #[test]
    fn a_batch_that_does_not_fit_is_refused_before_it_is_made() {
        for (available, fits) in [(3899, false), (3900, true)] {
            let subject = Counting::default();
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
        let error = measure(&Counting::default(), [1, 2, 3], Some(1023)).err().expect("1024 bytes do not fit");
        assert!(error.to_string().contains("needs 1024 bytes, 1023 are"), "{error}");
        let error = measure(&Counting::default(), [usize::MAX, 2, 3], Some(usize::MAX - 1)).err().expect("too many");
        assert!(error.to_string().contains("needs 18446744073709551615 bytes"), "{error}");
    }

    #[test]
    fn percentiles_are_samples() {
        let sorted = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0];
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&sorted, percent)), [1.0, 5.0, 9.0, 10.0]);
        assert_eq!([0, 50, 90, 100].map(|percent| percentile(&[3.0], percent)), [3.0; 4]);
        assert_eq!([50, 90].map(|percent| percentile(&[1.0, 2.0, 3.0], percent)), [2.0, 3.0]);
    }

    /// The large ones are too large to run here.
    #[test]
    fn shipped_bench_configs_are_valid() {
        let mut shapes = Vec::new();
        for entry in fs::read_dir("configs").unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("bench_") {
                let case: Case = config::read(&path).unwrap_or_else(|error| panic!("{error}"));
                let (checked, recipe) = match &case.batch {
                    Batch::Generate(recipe) => (recipe.check(&case.spec), recipe),
                    Batch::GenerateHead(head) => (head.check(&case.spec), &head.recipe),
                    Batch::Fixture(_) => panic!("{}: a bench is of a shape", path.display()),
                };
                checked.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert!(case.bench.steps > 0 && !recipe.masked_garbage, "{}", path.display());
                shapes.push(recipe.shape);
            }
        }
        for shape in [[1, 2048, 151_643], [4, 1024, 151_643], [1, 4096, 151_936]] {
            assert!(shapes.contains(&shape), "the seed project's {shape:?} is shipped");
        }
    }
}
