//! [`StandardsChoice`]: the options that choose the grade and the edges that a candidate is held to.

use clap::Args;

use super::check::CampaignStandards;
use crate::judge::gate::Edge;
use crate::judge::standards::CandidateStandards;
use crate::schema::verdicts::Grade;

/// The options that choose [`CandidateStandards`].
#[derive(Args)]
pub(super) struct StandardsChoice {
    /// Accuracy to demand: `standard`, as textbook formulas are, carefully evaluated in f32; `exact`, with every
    /// avoidable cancellation avoided. Kernels of others are held to `standard` if none is given, this project's own to
    /// `exact`
    #[arg(long, value_name = "GRADE")]
    grade: Option<Grade>,
    /// Waive what fails at an edge: `overflow`, `minus_infinity`, `lowest_float` or `masked`
    #[arg(long, value_name = "EDGE", value_delimiter = ',')]
    allow: Vec<Edge>,
}

impl StandardsChoice {
    /// Returns the standards that were chosen.
    pub(super) fn standards(&self) -> CandidateStandards {
        CandidateStandards { grade: self.grade, allow: self.allow.clone() }
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
