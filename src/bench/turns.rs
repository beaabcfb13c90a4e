//! Steps that are timed: the subject's and its opponents' in turns.

use std::time::{Duration, Instant};

use super::{BenchError, BenchProgress, ProgressListener};
use crate::case::StepCounts;
use crate::implementation::{Answer, KernelTimings, Prepared, ResidentProblem, RunError, Step, Unavailable, Workload};
use crate::memory::DeviceMemory;

/// A problem where an implementation's steps are loaded from: its device's memory, or this machine's.
pub(super) struct Placed<'p, P: Workload> {
    pub(super) prepared: &'p dyn Prepared<P>,
    pub(super) problem: &'p P,
    pub(super) held: Option<Box<dyn ResidentProblem<'p, P> + 'p>>,
}

impl<'p, P: Workload> Placed<'p, P> {
    pub(super) fn new(prepared: &'p dyn Prepared<P>, problem: &'p P) -> Result<Self, RunError> {
        Ok(Self { prepared, problem, held: prepared.hold(problem)? })
    }

    pub(super) fn load(&self) -> Result<Step<'p, P>, RunError> {
        match &self.held {
            Some(held) => held.load(),
            None => self.prepared.load(self.problem),
        }
    }
}

/// An opponent that was made ready.
pub(super) enum Rival<'p, P: Workload> {
    Bound(Box<dyn FnMut() -> Duration + 'p>),
    Implementation(Placed<'p, P>),
}

impl<P: Workload> Rival<'_, P> {
    pub(super) fn take_a_turn(&mut self) -> Result<Duration, BenchError> {
        match self {
            Self::Bound(bound) => Ok(bound()),
            Self::Implementation(placed) => Ok(timed::<P>(placed.load()?)?.1),
        }
    }
}

/// The memory of a device when outputs are there; `None` where no step was timed.
pub(super) type AfterRun = Option<Result<DeviceMemory, Unavailable>>;

/// Makes all steps but the first, and says how long those took that are not for warming up.
pub(super) fn take_turns<P: Workload>(
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
pub(super) fn timed<P: Workload>(step: Step<P>) -> Result<(Answer<P>, Duration), BenchError> {
    let started = Instant::now();
    let answer = step()?;
    Ok((answer, started.elapsed()))
}

pub(super) struct Times {
    pub(super) first: Duration,
    pub(super) steps: Vec<Duration>,
    /// Kernels alone, where a device's driver times them.
    pub(super) kernels: Option<KernelTimings>,
    /// The times of the opponents, in their order.
    pub(super) of_opponents: Vec<Vec<Duration>>,
}
