//! [`CandidateStandards`]: the grade that a candidate must reach, and the edges at which it may fail.

use assay_core::problem::Candidate;
use assay_schema::verdicts::Grade;

use crate::gate::Edge;
use crate::judge::{JudgeError, Verdict};
use crate::judgeable::Judgeable;
use crate::tolerance::Limits;
use crate::trial::JudgedProblem;

/// The standards that a candidate is held to.
#[derive(Clone, Debug, Default)]
pub struct CandidateStandards {
    /// The grade of accuracy; `None` means the grade of the implementation's arithmetic class.
    pub grade: Option<Grade>,
    /// The edges at which a failure is waived.
    pub allow: Vec<Edge>,
}

impl CandidateStandards {
    /// Judges `outcome`, of an implementation of the arithmetic class `class`.
    ///
    /// # Errors
    /// [`JudgeError`] if an output has the wrong shape or the class has no limits.
    pub fn judge<P: Judgeable>(
        &self,
        known: &JudgedProblem<P>,
        outcome: &Candidate<P::Gradient>,
        class: &str,
    ) -> Result<Vec<Verdict>, JudgeError> {
        let verdicts = known.verdicts(&outcome.lend(), &self.limits(class)?)?;
        Ok(verdicts.into_iter().map(|verdict| verdict.waive(&self.allow)).collect())
    }

    /// Judges `outcome`, which has no gradient.
    ///
    /// # Errors
    /// The errors of [`judge`](Self::judge).
    pub fn judge_forward<P: Judgeable>(
        &self,
        known: &JudgedProblem<P>,
        outcome: &Candidate<()>,
        class: &str,
    ) -> Result<Vec<Verdict>, JudgeError> {
        let verdicts = known.verdicts_of_forward(outcome, &self.limits(class)?)?;
        Ok(verdicts.into_iter().map(|verdict| verdict.waive(&self.allow)).collect())
    }

    fn limits(&self, class: &str) -> Result<Limits<'static>, JudgeError> {
        let limits = Limits::for_class(class)?;
        Ok(self.grade.map_or(limits, |grade| limits.at(grade)))
    }
}
