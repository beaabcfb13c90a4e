//! [`KernelUnderTest`]: what a campaign asks, and [`Fault`], why it has no answer.

use std::sync::Arc;

use crate::worker::{ShardCut, Worker, WorkerAnswer, WorkerError};
use assay_core::implementation::{Implementation, ProblemFormat};
use assay_core::problem::{Candidate, Problem};
use assay_core::spec::LossSpec;
use assay_core::text::{ForeignLines, ForeignText};

use crate::subject::Subject;

/// A way of calling a kernel in which callers differ, such as with logits that are a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallWay {
    /// The way in words, as reports have it after "called".
    pub words: String,
    /// Whether it is for problems in which every token counts and has the same cotangent.
    pub equal_cotangents: bool,
    /// Whether it is how callers call the kernel, or a form of it that must have the same numbers.
    pub kind: CallWayKind,
}

/// The kind of a [`CallWay`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallWayKind {
    /// The way in which some callers call it.
    Caller,
    /// Another variant of the kernel, which is asked only for what must be the same in both.
    Variant,
    /// The kernel on one rank, where it has several.
    OneRank,
}

/// Somebody's kernel, wherever it runs.
pub trait KernelUnderTest<P: Subject = Problem> {
    /// Returns the ways of calling it, besides the plain one. One that the kernel refuses for a problem is a
    /// [`Fault::Unsupported`].
    fn ways(&self) -> &[CallWay] {
        &[]
    }

    /// Sets the way of all further calls, by its place in [`ways`](Self::ways); `None` is the plain one.
    fn call_by(&mut self, way: Option<usize>) {
        let _ = way;
    }

    /// Returns the axis that the kernel's ranks share; `None` for a kernel of one process.
    fn cut(&self) -> Option<ShardCut> {
        None
    }

    /// Computes `problem` under `spec`, and shows what came of it to `read`, once. What is shown may be borrowed from arrays
    /// that are gone afterwards.
    ///
    /// # Errors
    /// [`Fault`] where there is nothing to show; `read` is not called then.
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault>;
}

/// The reason why a kernel has no answer that could be judged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The kernel raised an error, which is its text.
    #[error("the kernel failed: {0}")]
    Raised(ForeignLines),
    /// An output is missing, unknown, or is not what an output is.
    #[error("output `{field}`: got {given}, expected {expected}")]
    Output {
        /// The name of the output.
        field: ForeignText,
        /// The value or shape that the kernel returned.
        given: ForeignText,
        /// The value or shape that the output must have.
        expected: ForeignLines,
    },
    /// The kernel wrote to an input array, which is named.
    #[error("input `{0}` has other content after the call: inputs are to be read")]
    InputMutated(ForeignText),
    /// The kernel's process ended by itself or by a signal.
    #[error("{reason}")]
    Crashed {
        /// A description of how the process ended.
        reason: ForeignLines,
        /// The number of the signal that ended it; `None` where it exited by itself.
        signal: Option<i32>,
    },
    /// The kernel took too long, and its process was killed.
    #[error("{0}")]
    TimedOut(ForeignLines),
    /// The kernel reports that it does not compute this problem, which is no failure.
    #[error("not supported: {0}")]
    Unsupported(ForeignText),
    /// The user asked the campaign to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Fault {
    /// Returns the fault's name, by which a campaign can allow it.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Raised(_) => "raised",
            Fault::Output { .. } => "output",
            Fault::InputMutated(_) => "input-mutated",
            Fault::Crashed { .. } => "crashed",
            Fault::TimedOut(_) => "timed-out",
            Fault::Unsupported(_) => "unsupported",
            Fault::Interrupted => "interrupted",
        }
    }

    /// Returns the fault with the rank that it is of.
    pub(crate) fn at_rank(self, rank: usize) -> Self {
        let with_rank = |text: ForeignLines| ForeignLines::from(format!("rank {rank}: {}", text.raw()));
        match self {
            Fault::Raised(text) => Fault::Raised(with_rank(text)),
            Fault::TimedOut(text) => Fault::TimedOut(with_rank(text)),
            Fault::Crashed { reason, signal } => Fault::Crashed { reason: with_rank(reason), signal },
            Fault::Output { field, given, expected } => {
                Fault::Output { field, given: format!("{} on rank {rank}", given.raw()).into(), expected }
            }
            other => other,
        }
    }

    /// The signal that ended its process.
    pub(crate) fn signal(&self) -> Option<i32> {
        if let Fault::Crashed { signal, .. } = self { *signal } else { None }
    }
}

/// An implementation of this project, on one device.
pub struct LocalKernel<'i, P: Subject = Problem>(pub &'i dyn Implementation<P>);

impl<P: Subject> KernelUnderTest<P> for LocalKernel<'_, P> {
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let given =
            ProblemFormat::from_problem(spec, &**problem).map_err(|error| Fault::Raised(error.to_string().into()))?;
        self.0
            .supports_given(spec, given, 1)
            .map_err(|unsupported| Fault::Unsupported(unsupported.to_string().into()))?;
        let candidate =
            self.0.run(spec, (**problem).clone(), 1).map_err(|error| Fault::Raised(error.to_string().into()))?;
        read(&candidate.lend());
        Ok(())
    }
}

/// A kernel in a process of its own.
impl<P: Subject> KernelUnderTest<P> for Worker {
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        // A worker's error is a finding about the kernel if the kernel caused it. A process that could not be started,
        // died or broke the protocol counts as a crash, so that the campaign can go on with the next problem.
        match self.ask(spec, &**problem) {
            Ok(WorkerAnswer::Candidate(candidate)) => {
                read(&candidate.lend());
                Ok(())
            }
            Ok(WorkerAnswer::Unsupported(what)) => Err(Fault::Unsupported(what)),
            Err(error) => Err(worker_fault(error)),
        }
    }
}

/// Returns the fault of a kernel whose process gave no answer.
pub(crate) fn worker_fault(error: WorkerError) -> Fault {
    match error {
        error @ WorkerError::TimedOut { .. } => Fault::TimedOut(error.to_string().into()),
        error @ (WorkerError::Died { .. } | WorkerError::Start { .. } | WorkerError::Protocol { .. }) => {
            Fault::Crashed { reason: error.to_string().into(), signal: error.signal() }
        }
        WorkerError::Stopped { .. } => Fault::Interrupted,
        error @ WorkerError::Failed { .. } => Fault::Raised(error.to_string().into()),
        WorkerError::Output { field, given, expected, .. } => Fault::Output { field, given, expected },
        WorkerError::InputMutated { field, .. } => Fault::InputMutated(field),
        WorkerError::File { reason, .. } => Fault::Output {
            field: "candidate".into(),
            given: reason.to_string().into(),
            expected: "a file as `assay judge` reads it".into(),
        },
    }
}
