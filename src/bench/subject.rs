//! [`BenchSubject`]: one implementation, compiled, judged and timed in turns with its opponents.

use std::sync::Arc;
use std::time::Instant;

use super::timed::Timed;
use super::turns::{Placed, Rival, take_turns, timed};
use super::{BenchError, BenchProgress, BenchResult, ProgressListener};
use crate::case::StepCounts;
use crate::implementation::{Implementation, ProblemFormat, RunError, Unavailable, Workload};
use crate::judge::judge::{JudgeError, Verdict};
use crate::judge::judgeable::Judgeable;
use crate::judge::report::{self, on_devices};
use crate::judge::tolerance::{Grade, Limits};
use crate::judge::trial::JudgedProblem;
use crate::memory::{CompiledMemory, DeviceMemory, expect_room};
use crate::problem::Candidate;
use crate::spec::LossSpec;

/// Launches of kernels that are timed alone at least, so that neither a clock nor a single launch decides.
const LEAST_LAUNCHES: usize = 20;

/// A program that takes turns with the subject.
pub(super) enum Opponent<P: Workload> {
    /// The bound of the subject, [`Timed::BOUND`].
    Bound,
    Implementation(Arc<dyn Implementation<P>>),
}

/// The implementation that is measured, with its problem.
pub(super) struct BenchSubject<'s, W: Timed> {
    pub(super) implementation: &'s dyn Implementation<W::Problem>,
    pub(super) spec: &'s LossSpec,
    pub(super) recipe: &'s W,
    pub(super) devices: usize,
    pub(super) opponents: Vec<Opponent<W::Problem>>,
}

impl<W: Timed> BenchSubject<'_, W> {
    /// `available` are the bytes that this machine has left.
    pub(super) fn measure(
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
            // The outputs of the timed runs are compared with the answer that was judged.
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
    /// `more` bytes.
    fn expect_room(&self, more: usize, available: Option<usize>) -> Result<(), BenchError> {
        let Self { recipe, implementation, devices, .. } = *self;
        let running = recipe.running_bytes().saturating_add(more);
        let ProblemFormat { shape, dtype, .. } = recipe.given();
        let what = || format!("a bench of {shape} {dtype} with {}", on_devices(implementation.id(), devices));
        Ok(expect_room(what, recipe.making_bytes(devices).max(running), available)?)
    }
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
    let known = JudgedProblem::new(spec, problem).map_err(RunError::from)?;
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

pub(super) struct MemorySeen {
    /// The arguments lie on the devices.
    pub(super) after_alloc: Result<DeviceMemory, Unavailable>,
    /// The last step's outputs do.
    pub(super) after_run: Result<DeviceMemory, Unavailable>,
    pub(super) compiled: Result<CompiledMemory, Unavailable>,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::implementation::{Answer, Prepared, Step, Unsupported};
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
            let mut outcome = find("native", None).unwrap().run(spec, problem, devices)?;
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
    fn bench_makes_every_step_and_writes_every_figure() {
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
    fn bench_reports_a_wrong_answer_and_does_not_time_it() {
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
    fn bench_refuses_a_batch_that_does_not_fit_unmade() {
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
}
