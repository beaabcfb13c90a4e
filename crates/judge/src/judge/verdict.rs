//! [`Verdict`]: the decision on one gate of one candidate, with the comparisons behind it.

use std::fmt;

use super::cancellation::Cancellation;
use crate::gate::{Edge, Gate, Output};
use crate::metric::{Comparison, Position, Tally};
use crate::tolerance::{Grade, ToleranceError};
use assay_core::problem::Dtype;
pub use assay_schema::verdicts::Status;

/// The decision on one gate, with the comparisons behind it.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The output that was judged, the way it was compared, and the edge its tokens are at.
    pub gate: Gate,
    /// The dtype that the candidate returned the output in.
    pub dtype: Dtype,
    /// The dtype that the problem promises: a coarser output is judged as if it were of this one.
    pub promised: Dtype,
    /// The decision: pass, fail, not finite, not compared or waived.
    pub status: Status,
    /// The `κ` of the limit; `None` if no tolerance applies, as for counts and masked tokens.
    pub kappa: Option<f64>,
    /// The tally of all comparisons that the decision is made from.
    pub tally: Tally,
    /// The better of the grades that the values reach; `None` if they reach none, or nothing was compared.
    pub grade: Option<Grade>,
    /// The reason why the values are not of grade `exact`; present if grade `standard` was asked for and is the better one reached.
    pub short_of_exact: Option<ShortOfExact>,
    /// The number of tokens whose entropy equals the quantile within rounding; present if they allow more sets of kept tokens than
    /// are tried, so that nothing was compared.
    pub open_entropies: Option<usize>,
}

/// The reason why values of grade `standard` are not of grade `exact`.
#[derive(Clone, Copy, Debug)]
pub struct ShortOfExact {
    /// The comparison with the largest error / limit at grade `exact`.
    pub worst: Option<Comparison>,
    /// The cancellation that explains its error.
    pub cancellation: Cancellation,
}

impl fmt::Display for ShortOfExact {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if let Some(worst) = &self.worst {
            let at = if worst.at == Position::default() { String::new() } else { format!(" at {}", worst.at) };
            write!(f, "{:.3} times its limit{at}: ", worst.error_over_limit())?;
        }
        self.cancellation.fmt(f)
    }
}

/// The reason why a candidate cannot be judged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum JudgeError {
    /// An output has another shape than the problem requires.
    #[error("candidate `{output}`: got shape {given:?}, expected {expected:?} as in the problem")]
    Shape {
        /// The name of the output.
        output: &'static str,
        /// The shape that the candidate returned.
        given: Vec<usize>,
        /// The shape that the problem requires.
        expected: Vec<usize>,
    },
    /// An output that the spec asks for is missing.
    #[error("candidate `{output}`: not given, expected it: {because}")]
    Missing {
        /// The name of the output.
        output: &'static str,
        /// The reason why the spec asks for it.
        because: &'static str,
    },
    /// The tolerance file has no limits for the candidate's arithmetic class.
    #[error(transparent)]
    Tolerance(#[from] ToleranceError),
}

impl Verdict {
    /// Returns the comparison with the largest error / limit; `None` if nothing was compared.
    pub fn worst(&self) -> Option<Comparison> {
        self.tally.worst
    }

    /// Whether the gate was passed, waived, or had nothing to compare.
    pub fn passed(&self) -> bool {
        !self.status.failed()
    }

    /// Marks the verdict as [`Status::Waived`] if it failed at one of `edges`.
    #[must_use]
    pub fn waive(self, edges: &[Edge]) -> Self {
        let waived = self.status.failed() && self.gate.edge.is_some_and(|edge| edges.contains(&edge));
        Self { status: if waived { Status::Waived } else { self.status }, ..self }
    }

    /// Whether dlogits, or the gradient of a head, were held against a limit.
    pub fn compared_a_gradient(&self) -> bool {
        self.gate.output.is_gradient() && self.gate.edge != Some(Edge::Masked) && self.status != Status::NotCompared
    }

    /// Withdraws a failure that may be due to another choice among `open` tokens: nothing is compared then.
    ///
    /// Log-probabilities, entropies and masked tokens do not depend on that choice, and a finite value where the reference is not
    /// finite is wrong under every choice: such failures stay.
    pub(super) fn leave_open(&mut self, open: usize) {
        let depends = !matches!(self.gate.output, Output::Logp | Output::Entropy | Output::EntropyMean)
            && self.gate.edge != Some(Edge::Masked);
        if depends && self.status == Status::Fail && self.tally.silent.is_none() {
            (self.status, self.tally, self.grade) = (Status::NotCompared, Tally::default(), None);
            self.tally.not_compared = 1;
            self.open_entropies = Some(open);
        }
    }
}

/// Counts the verdicts that failed.
pub(super) fn failures(verdicts: &[Verdict]) -> usize {
    verdicts.iter().filter(|verdict| verdict.status.failed()).count()
}
