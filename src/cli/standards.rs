//! [`CandidateStandards`]: the options that choose the grade and the edges that a candidate is held to.

use clap::Args;

use super::CliError;
use super::check::CampaignStandards;
use crate::judge::gate::Edge;
use crate::judge::judge::Verdict;
use crate::judge::judgeable::Judgeable;
use crate::judge::tolerance::Limits;
use crate::judge::trial::Known;
use crate::problem::Candidate;
use crate::schema::verdicts::Grade;

/// The standards that a candidate is held to.
#[derive(Args, Clone, Default)]
pub(super) struct CandidateStandards {
    /// Accuracy to demand: `standard`, as textbook formulas are, carefully evaluated in f32; `exact`, with every
    /// avoidable cancellation avoided. Kernels of others are held to `standard` if none is given, this project's own to
    /// `exact`
    #[arg(long, value_name = "GRADE")]
    grade: Option<Grade>,
    /// Waive what fails at an edge: `overflow`, `minus_infinity`, `lowest_float` or `masked`
    #[arg(long, value_name = "EDGE", value_delimiter = ',')]
    allow: Vec<Edge>,
}

impl CandidateStandards {
    /// Judges `outcome`, of an implementation of `class`.
    pub(super) fn judge<P: Judgeable>(
        &self,
        known: &Known<P>,
        outcome: &Candidate<P::Gradient>,
        class: &str,
    ) -> Result<Vec<Verdict>, CliError> {
        let verdicts = known.verdicts(&outcome.lend(), &self.limits(class)?)?;
        Ok(verdicts.into_iter().map(|verdict| verdict.waive(&self.allow)).collect())
    }

    /// Judges `outcome`, which has no gradient.
    pub(super) fn judge_forward<P: Judgeable>(
        &self,
        known: &Known<P>,
        outcome: &Candidate<()>,
        class: &str,
    ) -> Result<Vec<Verdict>, CliError> {
        let verdicts = known.verdicts_of_forward(outcome, &self.limits(class)?)?;
        Ok(verdicts.into_iter().map(|verdict| verdict.waive(&self.allow)).collect())
    }

    fn limits(&self, class: &str) -> Result<Limits<'static>, CliError> {
        let limits = Limits::for_class(class)?;
        Ok(self.grade.map_or(limits, |grade| limits.at(grade)))
    }

    /// Returns the same standards for a campaign of many problems.
    pub(super) fn for_campaign(&self) -> CampaignStandards {
        CampaignStandards {
            grade: self.grade.unwrap_or(Grade::Standard),
            allow: self.allow.iter().map(ToString::to_string).collect(),
        }
    }

    /// The options again, for a command that is shown.
    pub(super) fn options(&self) -> String {
        let grade = self.grade.map_or_else(String::new, |grade| format!(" --grade {grade}"));
        let allowed = self.allow.iter().map(|edge| format!(" --allow {edge}"));
        grade + &allowed.collect::<String>()
    }
}
