//! `assay gradcheck`: one implementation against the reference on one batch.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::case::Case;
use super::{CliError, Passed, PluginChoice, Printing, config};
use crate::conformance::judge::{Status, judge};
use crate::conformance::report::{Check, Report, explain};
use crate::conformance::tolerance::Tolerances;
use crate::problem::Candidate;
use crate::reference::{self, Reference};

#[derive(Args)]
pub(super) struct Gradcheck {
    /// The batch, the loss and the kernel, in YAML, TOML or JSON
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

/// The seed project's keys, and the verdicts.
#[derive(Serialize)]
struct Outcomes {
    #[serde(rename = "impl")]
    implementation: String,
    devices: usize,
    loss_ref: f64,
    loss_kernel: f64,
    abs_diff_loss: f64,
    max_abs_diff_dlogits: f64,
    max_rel_diff_dlogits: f64,
    mean_abs_diff_dlogits: f64,
    #[serde(flatten)]
    report: Report,
}

impl Gradcheck {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let config: Case = config::read(&self.config)?;
        let in_config = |reason| CliError::Problem { path: self.config.clone(), reason };
        let problem = config.batch.problem(&config.spec, &self.config)?;
        let implementation = config.kernel.implementation(&self.config, self.plugin.checked_path()?)?;
        let reference = reference::evaluate(&config.spec, &problem).map_err(in_config)?;
        let outcome = implementation.run(&config.spec, problem.clone(), config.kernel.devices)?;
        let differences = Differences::between(&reference, &outcome);
        let (loss_ref, loss_kernel) = (reference.loss(), outcome.loss.value());

        let command = format!("assay gradcheck --config {}", self.config.display());
        let label = self.config.file_stem().unwrap_or_default().to_string_lossy();
        let mut checks = Vec::new();
        for verdict in judge(&reference, &outcome, implementation.class(), Tolerances::builtin())? {
            if verdict.status != Status::Pass {
                super::print(&format!("{}\n", explain(&verdict, &reference, &problem, implementation.id(), &command)))?;
            }
            let check = Check::new(&label, implementation.id(), &verdict.gate.to_string(), &verdict);
            checks.push(check.on_devices(config.kernel.devices));
        }
        let result = Outcomes {
            implementation: implementation.id().into(),
            devices: config.kernel.devices,
            loss_ref,
            loss_kernel,
            abs_diff_loss: (loss_ref - loss_kernel).abs(),
            max_abs_diff_dlogits: differences.max_abs,
            max_rel_diff_dlogits: differences.max_rel,
            mean_abs_diff_dlogits: differences.mean_abs,
            report: Report::new(checks, Vec::new()),
        };
        self.printing.finish(&result.text(), &result)?;
        Ok(result.report.pass.into())
    }
}

/// Plain differences of dlogits over unmasked tokens, as the seed project reports them.
#[derive(Default)]
struct Differences {
    max_abs: f64,
    /// Over the elements with `|reference| > 1e-6`.
    max_rel: f64,
    mean_abs: f64,
}

impl Differences {
    fn between(reference: &Reference, outcome: &Candidate) -> Self {
        const SMALLEST: f64 = 1e-6;
        let shape = reference.shape();
        let mut all = Self::default();
        let mut total = 0.0;
        for b in 0..shape.batch {
            for t in 0..shape.tokens {
                for (x, y) in reference.dlogits_row(b, t).into_iter().zip(outcome.dlogits.row(b, t)) {
                    let error = (x - y).abs();
                    // `max` would pass over a NaN.
                    let worse = |max: f64, x: f64| if x > max || x.is_nan() { x } else { max };
                    all.max_abs = worse(all.max_abs, error);
                    if x.abs() > SMALLEST {
                        all.max_rel = worse(all.max_rel, error / x.abs());
                    }
                    total += error;
                }
            }
        }
        all.mean_abs = total / shape.elements().map_or(1.0, |n| n as f64);
        all
    }
}

impl Outcomes {
    fn text(&self) -> String {
        let mut text = self.report.table();
        let lines = [
            ("loss_ref", self.loss_ref),
            ("loss_kernel", self.loss_kernel),
            ("abs_diff_loss", self.abs_diff_loss),
            ("max_abs_diff_dlogits", self.max_abs_diff_dlogits),
            ("max_rel_diff_dlogits", self.max_rel_diff_dlogits),
            ("mean_abs_diff_dlogits", self.mean_abs_diff_dlogits),
        ];
        for (name, value) in lines {
            let _ = writeln!(text, "{name:<22} {value:e}");
        }
        text
    }
}
