//! `assay spec`: what a loss computes, in full and in words.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::spec_choice::{LossOptions, preset_help};
use super::{CliError, Passed, Printing};
use crate::config;
use crate::spec::presets::{self, BatchInputs, Preset, PresetLoss, WeightShape};
use crate::spec::{AdvantageLevel, LossSpec};

/// The JSON Schema of a spec file, which a test compares with the types.
const SCHEMA: &str = include_str!("../../docs/data/loss-spec.schema.json");

#[derive(Args)]
pub(super) struct SpecCommand {
    #[command(flatten)]
    options: LossOptions,
    /// The project whose loss this is, by name, each as in one release
    #[arg(long, value_name = "NAME", help = preset_help("The project"))]
    preset: Option<String>,
    /// Name of the project's function; the usual one if none is given
    #[arg(long, value_name = "NAME", requires = "preset")]
    function: Option<String>,
    /// A spec in YAML, TOML or JSON, instead of a project's
    #[arg(
        long = "spec",
        value_name = "FILE",
        conflicts_with = "preset",
        required_unless_present_any = ["preset", "schema"]
    )]
    file: Option<PathBuf>,
    /// Print the JSON Schema of spec files, by which editors complete and check them
    #[arg(long, conflicts_with_all = ["preset", "file"])]
    schema: bool,
    #[command(flatten)]
    batch: BatchOptions,
    #[command(flatten)]
    printing: Printing,
}

/// The optional inputs of the batch, by which some projects choose what they compute.
#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each says whether one input is there")]
struct BatchOptions {
    /// The batch has no old log-probabilities
    #[arg(long)]
    no_old_logps: bool,
    /// The batch has no reference log-probabilities
    #[arg(long)]
    no_ref_logps: bool,
    /// The batch has the sampler's log-probabilities
    #[arg(long)]
    sampling_logps: bool,
    /// The batch has importance weights against the sampler, one a `token` or one a `sequence`
    #[arg(long, value_name = "LEVEL", value_parser = ["token", "sequence"])]
    rollout_weights: Option<String>,
    /// The batch has weights of tokens or rows that the trainer gives
    #[arg(long)]
    token_weights: bool,
    /// The batch has the set of vocabulary entries that the sampler has kept for each token
    #[arg(long)]
    kept_ids: bool,
    /// Tokens of the whole generation batch
    #[arg(long, value_name = "N")]
    num_items: Option<f64>,
    /// One advantage a `token` or one a `sequence`; as the project has it if none is given
    #[arg(long, value_name = "LEVEL", value_parser = ["token", "sequence"])]
    advantages: Option<String>,
}

#[derive(Serialize)]
struct DescribedSpec<'s> {
    #[serde(skip_serializing_if = "Option::is_none")]
    preset: Option<&'static str>,
    /// The release of the project that the loss is of, such as `1.16.0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    release: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<&'static str>,
    spec: &'s LossSpec,
    description: String,
    without_effect: &'s [String],
    notes: &'s [String],
}

impl SpecCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if self.schema {
            return self.show_schema();
        }
        let Some(name) = &self.preset else {
            self.options.expect_none()?;
            let spec = config::read_spec(self.file.as_deref())?.unwrap_or_default();
            let notes = config::spec_notes(self.file.as_deref())?;
            return self.show(None, &PresetLoss { spec, function: "", without_effect: Vec::new(), notes });
        };
        let preset: Preset = name.parse()?;
        let options = self.options.read()?;
        self.show(Some(preset), &presets::spec(preset, self.function.as_deref(), &options, &self.batch.given())?)
    }

    fn show_schema(&self) -> Result<Passed, CliError> {
        self.options.expect_none()?;
        let schema: serde_json::Value = serde_json::from_str(SCHEMA)
            .map_err(|error| CliError::Usage(format!("the schema of specs cannot be read: {error}").into()))?;
        self.printing.finish_list(SCHEMA, &schema)?;
        Ok(Passed::Yes)
    }

    fn show(&self, preset: Option<Preset>, resolved: &PresetLoss) -> Result<Passed, CliError> {
        let PresetLoss { spec, function, without_effect, notes } = resolved;
        let yaml = serde_saphyr::to_string(spec)
            .map_err(|error| CliError::Usage(format!("the spec cannot be written as YAML: {error}").into()))?;
        // The text is YAML that can be read as a spec again: everything else in it is a comment.
        let mut text = preset.map_or(String::new(), |preset| format!("# {}, {function}\n", preset.versioned()));
        text += &format!("{}\n\n{}", yaml.trim_end(), comments(&spec.describe()));
        if !without_effect.is_empty() {
            text += &comments(&format!("without effect on the loss: {}", without_effect.join(", ")));
        }
        for note in notes {
            text += &comments(&format!("note: {note}"));
        }
        let described = DescribedSpec {
            preset: preset.map(Preset::name),
            release: preset.map(Preset::release),
            function: preset.map(|_| *function),
            spec,
            description: spec.describe(),
            without_effect,
            notes,
        };
        self.printing.finish(&text, &described)?;
        Ok(Passed::Yes)
    }
}

impl BatchOptions {
    fn given(&self) -> BatchInputs {
        let is_token = |level: &String| level == "token";
        BatchInputs {
            old_logps: !self.no_old_logps,
            ref_logps: !self.no_ref_logps,
            sampling_logps: self.sampling_logps,
            rollout_weights: self
                .rollout_weights
                .as_ref()
                .map(|level| if is_token(level) { WeightShape::Token } else { WeightShape::Sequence }),
            token_weights: self.token_weights,
            kept_ids: self.kept_ids,
            num_items_in_batch: self.num_items,
            advantages: self
                .advantages
                .as_ref()
                .map(|level| if is_token(level) { AdvantageLevel::Token } else { AdvantageLevel::Sequence }),
            float64: false,
        }
    }
}

/// Each line as a comment of YAML, so that what is printed is still a spec file.
fn comments(text: &str) -> String {
    text.lines().fold(String::new(), |commented, line| commented + "# " + line + "\n")
}
