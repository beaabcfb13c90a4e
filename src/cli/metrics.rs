//! `assay metrics`: what trainers would log of a problem.

use clap::Args;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};

use super::problem_choice::{AnyProblem, ProblemChoice};
use super::{CliError, Passed, Printing, one_of};
use crate::judge::judgeable::Judgeable;
use crate::reference::metrics::MetricsProject;

#[derive(Args)]
pub(super) struct MetricsCommand {
    #[command(flatten)]
    choice: ProblemChoice,
    /// Project whose names and definitions are used
    #[arg(long, value_name = "PROJECT", value_parser = one_of(&MetricsProject::ALL), default_value = "trl")]
    names: MetricsProject,
    #[command(flatten)]
    printing: Printing,
}

impl MetricsCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let (spec, problem) = self.choice.read()?;
        let wrong = |reason| self.choice.wrong(reason);
        let metrics = match &problem {
            AnyProblem::Logits(problem) => self.names.metrics(&problem.evaluate(&spec).map_err(wrong)?),
            AnyProblem::Head(problem) => self.names.metrics(problem.evaluate(&spec).map_err(wrong)?.on_logits()),
        };
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(["metric", "value", "definition"]);
        for metric in &metrics {
            table.add_row([metric.name.to_string(), format!("{:.9e}", metric.value), metric.definition.to_string()]);
        }
        self.printing.finish_list(&format!("{table}\n"), &metrics)?;
        Ok(Passed::Yes)
    }
}
