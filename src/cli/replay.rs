//! `assay replay`: recorded problems through every implementation.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::standards::StandardsChoice;
use super::{CliError, Passed, PluginChoice, Printing};
use crate::config;
use crate::fixture::manifest_files;
use crate::judge::{report, summary};
use crate::project;
use crate::replay::{Replay, ReplayOutcome, ReplayRequest, ReplayedImplementations};
use crate::text::{ShownPath, shell_option};

/// The folder of fixtures that is used when none is named.
const DEFAULT_FOLDER: &str = "fixtures";

#[derive(Args)]
pub(super) struct ReplayCommand {
    /// Problem files; all that `fixtures/manifest.toml` lists if none is named
    #[arg(value_name = "FIXTURE.safetensors")]
    fixtures: Vec<PathBuf>,
    /// Run only these implementations; `file:MANIFEST.toml` is a program of your own
    #[arg(long = "impl", value_name = "ID")]
    implementations: Vec<String>,
    /// Run on these device counts; each implementation's largest if none is given
    #[arg(long, value_name = "D,…", value_delimiter = ',')]
    devices: Vec<NonZeroUsize>,
    #[command(flatten)]
    plugin: PluginChoice,
    /// The loss, in YAML, TOML or JSON, instead of the problem's own: the one it was generated with, or that its recorded
    /// scalars belong to
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Use only this logits tensor
    #[arg(long, value_name = "NAME")]
    logits: Option<String>,
    /// Use only these old log-probabilities
    #[arg(long, value_name = "NAME")]
    old_logp: Option<String>,
    /// Pack the sequences of each problem into one row, and compare what comes of it with what comes of the padded one
    #[arg(long)]
    packed: bool,
    /// Show every check, not one line an implementation alone
    #[arg(short, long, conflicts_with = "quiet")]
    verbose: bool,
    #[command(flatten)]
    standards: StandardsChoice,
    #[command(flatten)]
    printing: Printing,
}

impl ReplayCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?;
        let implementations = ReplayedImplementations::with_ids(&self.implementations, self.plugin.checked_path()?)?;
        let fixtures = if self.fixtures.is_empty() {
            manifest_files(project::find(DEFAULT_FOLDER).unwrap_or_else(|_| DEFAULT_FOLDER.into()))?
        } else {
            self.fixtures.clone()
        };
        let mut replay = Replay::new(ReplayRequest {
            spec,
            implementations,
            devices: self.devices.iter().map(|devices| devices.get()).collect(),
            logits: self.logits.clone(),
            old_logp: self.old_logp.clone(),
            packed: self.packed,
            standards: self.standards.standards(),
            options: self.options(),
        })?;
        let progress = self.printing.progress(fixtures.len());
        for path in &fixtures {
            progress.set_message(ShownPath(&path).to_string());
            replay.replay(path)?;
            progress.inc(1);
        }
        progress.finish_and_clear();
        self.print(&replay.finish())
    }

    /// Prints one line an implementation, and every check where that is asked for; then what failed.
    fn print(&self, outcome: &ReplayOutcome) -> Result<Passed, CliError> {
        let ReplayOutcome { verdicts, failures } = outcome;
        if !self.printing.quiet {
            let every_check = if self.verbose { report::checks_table(verdicts) } else { String::new() };
            super::print(&(every_check + &summary::summary(verdicts)))?;
        }
        for failure in failures {
            super::print(&format!("{failure}\n"))?;
        }
        let rest = if self.verbose {
            super::code_lines() + &report::below_table(verdicts)
        } else {
            summary::below_summary(verdicts)
        };
        self.printing.finish(&rest, verdicts)?;
        Ok(verdicts.pass.into())
    }

    /// The options that a command which shows one check again has too.
    fn options(&self) -> String {
        let mut options = String::new();
        if let Some(spec) = &self.spec {
            options += &shell_option("--spec", spec);
        }
        if let Some(plugin) = self.plugin.path() {
            options += &shell_option("--plugin", plugin);
        }
        if self.packed {
            options += " --packed";
        }
        options + &self.standards.options()
    }
}
