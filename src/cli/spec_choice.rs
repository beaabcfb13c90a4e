//! The loss that a command is about, in a file or in a project's own words.

use std::path::PathBuf;

use clap::Args;

use super::CliError;
use crate::config;
use crate::spec::LossSpec;
use crate::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use crate::text::{ForeignText, ShownPath};

/// Returns the help of an option that names a project: `begin`, then the names with the releases whose losses they are.
pub(super) fn preset_help(begin: &str) -> String {
    format!("{begin}; its losses and defaults are those of {}", Preset::catalogue())
}

#[derive(Args)]
pub(super) struct SpecChoice {
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    spec: Option<PathBuf>,
    /// No loss, but logp and entropy, and their backward pass by given cotangents `dlogp` and `dentropy`
    #[arg(long, conflicts_with_all = ["spec", "preset"])]
    logp: bool,
    /// Number of ids per token, K (old name: --top): `ids`, `dlogp` and `logp` are then `[B,T,K]`
    #[arg(long, alias = "top", value_name = "K", requires = "logp", default_value_t = 1)]
    ids_per_token: usize,
    /// The project whose loss this is, by name, each as in one release
    #[arg(long, value_name = "NAME", help = preset_help("The loss that a project computes, by the project's name"))]
    preset: Option<Preset>,
    #[command(flatten)]
    options: LossOptions,
}

/// The options of a project's loss, in two forms that mean the same.
#[derive(Args)]
pub(super) struct LossOptions {
    /// Options of the project that `--preset` names, such as `loss_type=grpo` or `policy_loss.loss_mode=gspo`
    #[arg(value_name = "NAME=VALUE")]
    words: Vec<String>,
    /// One such option, as `--option NAME=VALUE`. Of an option that is given twice the last value counts, words before `--option`
    #[arg(long = "option", value_name = "NAME=VALUE")]
    named: Vec<String>,
}

impl LossOptions {
    /// Returns the pairs `name=value` of both forms, the words first.
    fn pairs(&self) -> Vec<String> {
        [&self.words[..], &self.named].concat()
    }

    /// Returns the options of a project's loss.
    pub(super) fn read(&self) -> Result<PresetOptions, CliError> {
        Ok(PresetOptions::from_pairs(&self.pairs())?)
    }

    /// Refuses options if no project is named that could have them.
    pub(super) fn expect_none(&self) -> Result<(), CliError> {
        self.pairs().first().map_or(Ok(()), |given| {
            let expected = "expected --preset NAME with it, the project that has this option";
            Err(CliError::Usage(
                format!("NAME=VALUE: got `{}` and no --preset, {expected}", ForeignText::from(given)).into(),
            ))
        })
    }
}

impl SpecChoice {
    pub(super) fn read(&self) -> Result<LossSpec, CliError> {
        if self.preset.is_none() {
            self.options.expect_none()?;
        }
        if self.logp {
            return Ok(LossSpec { ids_per_token: self.ids_per_token, ..LossSpec::from_cotangents(true) });
        }
        let Some(preset) = self.preset else { return Ok(config::read_spec(self.spec.as_deref())?.unwrap_or_default()) };
        Ok(presets::spec(preset, None, &self.options.read()?, &BatchInputs::default())?.spec)
    }

    /// The project and its options, where the loss is one's.
    pub(super) fn project(&self) -> Option<(Preset, Vec<String>)> {
        Some((self.preset?, self.options.pairs()))
    }

    /// Refuses a loss where none can be chosen.
    pub(super) fn expect_none(&self, expected: &str) -> Result<(), CliError> {
        let given = [
            ("--spec", self.spec.is_some()),
            ("--logp", self.logp),
            ("--preset", self.preset.is_some()),
            ("NAME=VALUE", !self.options.pairs().is_empty()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map_or(Ok(()), |(option, _)| {
            Err(CliError::Usage(format!("{option}: got a loss, expected {expected}").into()))
        })
    }

    /// Returns the loss as reports name it: its project with the options, or its file.
    pub(super) fn name(&self) -> String {
        match (self.preset, &self.spec) {
            (Some(preset), _) => [&[preset.to_string()], &self.options.pairs()[..]].concat().join(" "),
            (None, Some(path)) => ShownPath(path).to_string(),
            (None, None) if self.logp => "logp".into(),
            (None, None) => "PPO-clip".into(),
        }
    }
}
