//! The bench of a worker: somebody's kernel in a process of its own, which times its calls itself.

use super::timed::Timed;
use super::{BenchError, BenchProgress, ProgressListener};
use crate::campaign::Subject;
use crate::implementation::RunError;
use crate::judge::judge::JudgeError;
use crate::judge::judgeable::Judgeable;
use crate::judge::tolerance::{EXTERNAL, Grade, Limits};
use crate::judge::trial::JudgedProblem;
use crate::memory::expect_host_room;
use crate::schema::programs::{BenchedProgram, BoundTimes, CallMemory, CallTimes, ProgramBench, ProgramOutcome};
use crate::spec::LossSpec;
use crate::text::shown_lines;
use crate::worker::{Worker, WorkerAnswer, WorkerLaunch, WorkerMemory};

/// A worker that is timed, and the loss that it is asked for.
pub struct WorkerTrial<'t> {
    /// The command, as reports name it.
    pub name: String,
    /// The loss that the worker is asked for.
    pub spec: &'t LossSpec,
    /// The loss in words, as reports have it.
    pub loss: String,
    /// The command that starts the process.
    pub launch: WorkerLaunch,
    /// The number of calls that it times.
    pub calls: usize,
    /// The grade that its answer is held to.
    pub grade: Grade,
}

impl WorkerTrial<'_> {
    /// Judges the worker's answer to the problem of `recipe`, and lets it time its calls if that is right.
    ///
    /// # Errors
    /// [`BenchError::Worker`] if it does not answer; [`BenchError::Recipe`] and [`BenchError::Memory`] for a problem that cannot be made.
    pub(super) fn measure<W: Timed>(self, recipe: &W, progress: ProgressListener) -> Result<ProgramBench, BenchError>
    where
        W::Problem: Subject,
    {
        let Self { name, spec, loss, launch, calls, grade } = self;
        recipe.check(spec)?;
        let needed = recipe.making_bytes(1).max(recipe.running_bytes()).saturating_add(recipe.bound_bytes());
        let what = || format!("a bench of {} {} with {name}", recipe.given().shape, recipe.recipe().dtype);
        expect_host_room(what, needed)?;
        progress(BenchProgress::Doing("starting"));
        let mut worker = Worker::start(launch)?;
        let device = worker.hello().about.clone().unwrap_or_else(|| "its own process".into());

        // The look before the first call makes a workspace that the kernel keeps from then on a part of its memory.
        let before = worker.memory();
        progress(BenchProgress::Doing("judging"));
        let mut program = BenchedProgram { name: name.clone(), ..untimed() };
        let judged = recipe.judged_part(1);
        let part = judged.as_ref().unwrap_or(recipe).unmasked_problem(spec)?;
        let answer = worker.ask(spec, &part)?;
        (program.outcome, program.why_untimed) = judge(answer, spec, &part, grade)?;
        drop(part);

        let mut bound = None;
        let mut no_memory = None;
        if program.why_untimed.is_none() {
            progress(BenchProgress::Doing("generating"));
            let problem = recipe.unmasked_problem(spec)?;
            let mut time_bound = recipe.bound(&problem);
            let mut of_bound: Vec<f64> = (0..calls.max(1)).map(|_| time_bound().as_secs_f64()).collect();
            progress(BenchProgress::Doing("timing"));
            let (answer, mut seconds) = worker.time(spec, &problem, calls)?;
            let after = worker.memory();
            if judged.is_none() || matches!(answer, WorkerAnswer::Unsupported(_)) {
                (program.outcome, program.why_untimed) = judge(answer, spec, &problem, grade)?;
            }
            if program.why_untimed.is_none() && seconds.is_empty() {
                let why = "its answer has no `seconds`: it times nothing (docs/file-formats.md says how a worker does)";
                (program.outcome, program.why_untimed) = (ProgramOutcome::Ignored, Some(why.into()));
            }
            if program.why_untimed.is_none() {
                program.grade = Some(grade.to_string());
                program.times = Some(spread(&mut seconds));
                let inputs = recipe.input_bytes() as u64;
                let held = |(before, after): (WorkerMemory, WorkerMemory)| {
                    // The worker reads its problem within the call: an array of its size is an input, and left out.
                    let peak = after.peak.saturating_sub(before.held).saturating_sub(inputs);
                    CallMemory { forward: None, backward: None, peak, kept: None, leaked: None }
                };
                program.memory = before.zip(after).map(held);
                if program.memory.is_none() {
                    no_memory = Some("this system does not tell the high-water mark of another process".into());
                }
            }
            // Both halves of the bound's turns, before and after the worker's: it ran alone.
            of_bound.extend((0..calls.max(1)).map(|_| time_bound().as_secs_f64()));
            let times = spread(&mut of_bound);
            let moved = 2 * logits_bytes(recipe);
            let is_copy = recipe.extents().len() == 3;
            bound = Some(BoundTimes {
                name: if is_copy { "a copy of the logits".into() } else { "the three products of the head".into() },
                gb_per_s: is_copy.then(|| moved as f64 / times.median / 1e9),
                device_gb_per_s: None,
                times,
            });
        }
        Ok(ProgramBench {
            kernel: name,
            loss,
            shape: recipe.extents(),
            dtype: recipe.recipe().dtype.to_string(),
            device,
            versions: Vec::new(),
            threads: rayon::current_num_threads(),
            clock_mhz: None,
            logits_bytes: logits_bytes(recipe),
            bound,
            programs: vec![program],
            sizes: Vec::new(),
            growths: Vec::new(),
            no_memory,
        })
    }
}

/// Judges an answer: the outcome, and if it is not right, what is wrong in one line.
fn judge<P: Judgeable>(
    answer: WorkerAnswer<P::Gradient>,
    spec: &LossSpec,
    problem: &P,
    grade: Grade,
) -> Result<(ProgramOutcome, Option<String>), BenchError> {
    let candidate = match answer {
        WorkerAnswer::Candidate(candidate) => candidate,
        WorkerAnswer::Unsupported(why) => return Ok((ProgramOutcome::Ignored, Some(why.to_string()))),
    };
    let known = JudgedProblem::new(spec, problem).map_err(RunError::from)?;
    let limits = Limits::for_class(EXTERNAL).map_err(JudgeError::from)?.at(grade);
    let judged = known.judge(*candidate, &limits)?;
    let failures = known.failures(&judged, "kernel", "");
    let Some(failure) = failures.first() else { return Ok((ProgramOutcome::Timed, None)) };
    // The place, the expected and the actual value, and the error.
    let told = |line: &&str| ["expected", "actual", "error"].iter().any(|word| line.trim_start().starts_with(word));
    let lines = failure.trim().lines();
    let first = lines.clone().take(1).map(|line| line.trim_start_matches("FAIL kernel: "));
    let parts: Vec<String> =
        first.chain(lines.filter(told)).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    Ok((ProgramOutcome::Wrong, Some(shown_lines(&parts.join("; ")).to_string())))
}

fn untimed() -> BenchedProgram {
    let (name, outcome) = (String::new(), ProgramOutcome::Timed);
    BenchedProgram { name, outcome, why_untimed: None, grade: None, times: None, memory: None }
}

fn logits_bytes<W: Timed>(recipe: &W) -> u64 {
    let extents = recipe.extents();
    let vocab = extents.last().copied().unwrap_or(0);
    (extents[0] * extents[1] * vocab * recipe.recipe().dtype.size()) as u64
}

/// Sorts times, and says where their middle and their ends are.
fn spread(seconds: &mut [f64]) -> CallTimes {
    seconds.sort_by(f64::total_cmp);
    let place = |percent: usize| seconds[(percent * seconds.len()).div_ceil(100).max(1) - 1];
    CallTimes { calls: seconds.len(), median: place(50), least: seconds[0], p90: place(90) }
}
