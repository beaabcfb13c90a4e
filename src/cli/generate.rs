//! `assay generate`: a problem in a file, for a kernel of the user's own.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::head_choice::{AnyRecipe, HeadChoice};
use super::{CliError, Passed, Printing, config, one_of};
use crate::fixture::{write_head_problem, write_problem};
use crate::judge::generate::{Recipe, Regime};
use crate::problem::{Dtype, Extents};
use crate::spec::LossSpec;

#[derive(Args)]
pub(super) struct Generate {
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Sequences, tokens and vocabulary; with an LM head `BxTxHxV`
    #[arg(long, value_name = "BxTxV")]
    shape: Extents,
    /// Dtype of the logits, or of hidden states and head: f32, bf16, f16 or f64
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    #[command(flatten)]
    head: HeadChoice,
    /// How logits are drawn
    #[arg(long, value_parser = one_of(&Regime::ALL), default_value = "peaked")]
    regime: Regime,
    /// Seed of every draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// `old_logp = logp + SCALE · N(0,1)`
    #[arg(long, value_name = "SCALE", default_value_t = 0.3)]
    old_logp_noise_scale: f64,
    /// Put NaN logits or hidden states, NaN log-probabilities and the id -100 under the mask
    #[arg(long)]
    masked_garbage: bool,
    /// The file to write
    #[arg(short, long, value_name = "PROBLEM.safetensors")]
    output: PathBuf,
    #[command(flatten)]
    printing: Printing,
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data has a JSON form")
}

#[derive(Serialize)]
struct Generated<'g> {
    output: &'g PathBuf,
    recipe: &'g AnyRecipe,
    spec: &'g LossSpec,
}

impl Generate {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?.unwrap_or_default();
        let recipe = Recipe {
            shape: self.shape.logits(),
            dtype: self.dtype,
            regime: self.regime,
            seed: self.seed,
            old_logp_noise_scale: self.old_logp_noise_scale,
            masked_garbage: self.masked_garbage,
        };
        let recipe = self.head.recipe(self.shape, recipe)?;
        let metadata = BTreeMap::from([
            (config::SPEC_KEY.to_string(), json(&spec)),
            ("recipe".to_string(), json(&recipe)),
            ("generator".to_string(), format!("grpo-assay {}", env!("CARGO_PKG_VERSION"))),
        ]);
        match &recipe {
            AnyRecipe::Logits(recipe) => write_problem(&self.output, &recipe.problem(&spec)?, &metadata)?,
            AnyRecipe::Head(recipe) => write_head_problem(&self.output, &recipe.problem(&spec)?, &metadata)?,
        }
        let text =
            format!("{}: {} {} {}, seed {}\n", self.output.display(), self.shape, self.dtype, self.regime, self.seed);
        self.printing.finish(&text, &Generated { output: &self.output, recipe: &recipe, spec: &spec })?;
        Ok(Passed::Yes)
    }
}
