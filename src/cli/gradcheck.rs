//! `assay gradcheck`: one implementation against the reference on one batch.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::problem_choice::AnyProblem;
use super::standards::StandardsChoice;
use super::{CliError, Passed, PluginChoice, Printing};
use crate::case::BenchCase;
use crate::config;
use crate::judge::report;
use crate::judge::trial::JudgedProblem;
use crate::registry::{FoundImplementation, find, find_head};
use crate::schema::verdicts::Verdicts;
use crate::suites::differences::{DifferencedOutputs, Differences};
use crate::text::ForeignText;
use crate::text::shell_option;

#[derive(Args)]
pub(super) struct GradcheckCommand {
    /// The batch, the loss and the kernel, in YAML, TOML or JSON
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    standards: StandardsChoice,
    #[command(flatten)]
    printing: Printing,
}

/// MLLM-JAX's keys, and the verdicts.
#[derive(Serialize)]
struct Outcomes {
    #[serde(rename = "impl")]
    implementation: String,
    devices: usize,
    loss_ref: f64,
    loss_kernel: f64,
    abs_diff_loss: f64,
    /// `max_abs_diff_dlogits` and the like; with an LM head those of `dhidden` and `dlm_head`.
    #[serde(flatten)]
    differences: BTreeMap<String, f64>,
    #[serde(flatten)]
    verdicts: Verdicts,
}

impl GradcheckCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let config: BenchCase = config::read(&self.config)?;
        match AnyProblem::from_batch(&config.batch, &config.spec, &self.config)? {
            AnyProblem::Logits(problem) => self.check(&config, &problem, find),
            AnyProblem::Head(problem) => self.check(&config, &problem, find_head),
        }
    }

    fn check<P: DifferencedOutputs>(
        &self,
        config: &BenchCase,
        problem: &P,
        find: fn(&str, Option<&Path>) -> FoundImplementation<P>,
    ) -> Result<Passed, CliError> {
        let in_config = |reason| CliError::Problem { path: self.config.clone().into(), reason };
        let plugin = self.plugin.checked_path()?;
        let found = config.kernel.implementation(&self.config, |id| find(id, plugin));
        let implementation = found.map_err(CliError::usage)?;
        let known = JudgedProblem::new(&config.spec, problem).map_err(in_config)?;
        let outcome = implementation.run(&config.spec, problem.clone(), config.kernel.devices)?;
        let (loss_ref, loss_kernel) = (
            P::on_logits(&known.reference).loss(),
            outcome.loss.as_ref().expect("an implementation returns its loss").value(),
        );

        let command = format!("assay gradcheck{}{}", shell_option("--config", &self.config), self.standards.options());
        let label = ForeignText::from(self.config.file_stem().unwrap_or_default().to_string_lossy()).to_string();
        let mut checks = Vec::new();
        for verdict in self.standards.standards().judge(&known, &outcome, implementation.class())? {
            if verdict.status.failed() {
                super::print(&format!("{}\n", known.explain(&verdict, implementation.id(), &command)))?;
            }
            let check = report::check(&label, implementation.id(), &verdict.gate.to_string(), &verdict);
            checks.push(check.on_devices(config.kernel.devices, implementation.lowering()));
        }
        // The differences are MLLM-JAX's own measures, given for comparison; the verdict is by the gates alone.
        let differences = P::differences(&known.reference, &outcome).into_iter().flat_map(|(output, of)| {
            let Differences { max_abs, max_rel, mean_abs } = of;
            [("max_abs", max_abs), ("max_rel", max_rel), ("mean_abs", mean_abs)]
                .map(|(which, x)| (format!("{which}_diff_{output}"), x))
        });
        let verdicts = report::verdicts(checks, Vec::new());
        let table = report::table(&verdicts);
        let result = Outcomes {
            implementation: implementation.id().into(),
            devices: config.kernel.devices,
            loss_ref,
            loss_kernel,
            abs_diff_loss: (loss_ref - loss_kernel).abs(),
            differences: differences.collect(),
            verdicts,
        };
        self.printing.finish(&(table + &result.text()), &result)?;
        Ok(result.verdicts.pass.into())
    }
}

impl Outcomes {
    /// The differences, a line each.
    fn text(&self) -> String {
        let mut text = String::new();
        let losses =
            [("loss_ref", self.loss_ref), ("loss_kernel", self.loss_kernel), ("abs_diff_loss", self.abs_diff_loss)];
        let differences = self.differences.iter().map(|(name, x)| (name.as_str(), *x));
        for (name, value) in losses.into_iter().chain(differences) {
            let _ = writeln!(text, "{name:<22} {value:e}");
        }
        text
    }
}
