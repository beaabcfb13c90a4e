//! `assay generate`: a problem in a file, for a kernel of the user's own.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{CliError, Passed, Printing, config};
use crate::conformance::generate::{Recipe, Regime};
use crate::fixture::write_problem;
use crate::problem::{Dtype, Shape};
use crate::spec::LossSpec;

#[derive(Args)]
pub(super) struct Generate {
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Sequences, tokens and vocabulary
    #[arg(long, value_name = "BxTxV")]
    shape: Shape,
    /// Dtype of the logits: f32, bf16, f16 or f64
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    /// How logits are drawn
    #[arg(long, value_enum, default_value = "peaked")]
    regime: Regime,
    /// Seed of every draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// `old_logp = logp + SCALE · N(0,1)`
    #[arg(long, value_name = "SCALE", default_value_t = 0.3)]
    old_logp_noise_scale: f64,
    /// Put NaN logits and log-probabilities and the id -100 under the mask
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
    recipe: &'g Recipe,
    spec: &'g LossSpec,
}

impl Generate {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?.unwrap_or_default();
        let Shape { batch, tokens, vocab } = self.shape;
        let recipe = Recipe {
            shape: [batch, tokens, vocab],
            dtype: self.dtype,
            regime: self.regime,
            seed: self.seed,
            old_logp_noise_scale: self.old_logp_noise_scale,
            masked_garbage: self.masked_garbage,
        };
        let problem = recipe.problem(&spec)?;
        let metadata = BTreeMap::from([
            (config::SPEC_KEY.to_string(), json(&spec)),
            ("recipe".to_string(), json(&recipe)),
            ("generator".to_string(), format!("grpo-assay {}", env!("CARGO_PKG_VERSION"))),
        ]);
        write_problem(&self.output, &problem, &metadata)?;
        let text =
            format!("{}: {} {} {:?}, seed {}\n", self.output.display(), self.shape, self.dtype, self.regime, self.seed);
        self.printing.finish(&text, &Generated { output: &self.output, recipe: &recipe, spec: &spec })?;
        Ok(Passed::Yes)
    }
}
