//! `assay gradcheck`: one implementation against the reference on one batch.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{CliError, Passed, PluginChoice, Printing, config};
use crate::conformance::generate::Recipe;
use crate::conformance::judge::{Status, judge};
use crate::conformance::report::{Check, Report, explain};
use crate::conformance::tolerance::Tolerances;
use crate::fixture::{ProblemFile, verify};
use crate::implementation::{FILE_PREFIX, Implementation, find, registry};
use crate::problem::{Candidate, Problem};
use crate::reference::{self, Reference};
use crate::spec::LossSpec;

/// What `kernel.enabled: false` runs, the first that this machine can.
const BASELINES: [&str; 2] = ["xla", "native"];

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

/// A gradcheck file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    /// Why the case is kept, for the cases that are.
    #[serde(default, rename = "reason")]
    _reason: String,
    batch: Batch,
    #[serde(default)]
    spec: LossSpec,
    #[serde(default)]
    kernel: Kernel,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Batch {
    Generate(Recipe),
    Fixture(FixtureBatch),
}

/// A problem from a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FixtureBatch {
    /// Relative to the folder of the config.
    path: PathBuf,
    #[serde(default = "default_logits")]
    logits: String,
    #[serde(default = "default_old_logp")]
    old_logp: Option<String>,
}

fn default_logits() -> String {
    "logits".into()
}

#[expect(clippy::unnecessary_wraps, reason = "serde's default has the field's type")]
fn default_old_logp() -> Option<String> {
    Some("old_logps".into())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kernel {
    enabled: bool,
    /// An id; the path of a manifest in it is relative to the folder of the config.
    #[serde(rename = "impl", default = "default_implementation")]
    implementation: String,
    #[serde(default = "one_device")]
    devices: usize,
}

fn one_device() -> usize {
    1
}

impl Default for Kernel {
    fn default() -> Self {
        Self { enabled: true, implementation: default_implementation(), devices: one_device() }
    }
}

fn default_implementation() -> String {
    "native".into()
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
        let config: Config = config::read(&self.config)?;
        let in_config = |reason| CliError::Problem { path: self.config.clone(), reason };
        let problem = config.batch.problem(&config.spec, &self.config)?;
        let implementation = config.kernel.implementation(&self.config, self.plugin.checked_path()?)?;
        let reference = reference::evaluate(&config.spec, &problem).map_err(in_config)?;
        implementation.available().map_err(|why| CliError::Usage(format!("{}: {why}", implementation.id())))?;
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

impl Batch {
    fn problem(&self, spec: &LossSpec, config: &Path) -> Result<Problem, CliError> {
        match self {
            Batch::Generate(recipe) => Ok(recipe.problem(spec)?),
            Batch::Fixture(batch) => {
                let path = beside(config, &batch.path);
                verify(&path)?;
                Ok(ProblemFile::open(&path)?.problem(&batch.logits, batch.old_logp.as_deref())?)
            }
        }
    }
}

/// `path`, relative to the folder of the config.
fn beside(config: &Path, path: impl AsRef<Path>) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(path)
}

impl Kernel {
    fn implementation(&self, config: &Path, plugin: Option<&Path>) -> Result<Arc<dyn Implementation>, CliError> {
        if self.enabled {
            let id = match self.implementation.strip_prefix(FILE_PREFIX) {
                Some(manifest) => format!("{FILE_PREFIX}{}", beside(config, manifest).display()),
                None => self.implementation.clone(),
            };
            return find(&id, plugin).map_err(CliError::Usage);
        }
        let all = registry(plugin);
        let baseline = |id: &&str| all.iter().find(|i| i.id() == *id && i.available().is_ok()).cloned();
        BASELINES.iter().find_map(baseline).ok_or_else(|| CliError::Usage("kernel: no baseline runs here".into()))
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
