//! `assay generate`: a problem in a file, for a kernel of the user's own.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::head_choice::{AnyRecipe, HeadChoice};
use super::spec_choice::SpecChoice;
use super::{CliError, Passed, Printing, one_of, output};
use crate::fixture::{SPEC_KEY, write_problem};
use crate::judge::coverage::Coverage;
use crate::judge::generate::{Recipe, Regime};
use crate::judge::judgeable::Judgeable;
use crate::problem::{Dtype, ProblemShape};
use crate::spec::LossSpec;
use crate::text::ShownPath;

#[derive(Args)]
pub(super) struct GenerateCommand {
    #[command(flatten)]
    spec: SpecChoice,
    /// Sequences, tokens and vocabulary; with an LM head `BxTxHxV`
    #[arg(long, value_name = "BxTxV")]
    shape: ProblemShape,
    /// Dtype of the logits, or of hidden states and head: f32, bf16, f16 or f64
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    #[command(flatten)]
    head: HeadChoice,
    /// Way in which logits are drawn
    #[arg(long, value_parser = one_of(&Regime::ALL), default_value = "sampled")]
    regime: Regime,
    /// Seed of every random draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// `old_logp = logp + SCALE · N(0,1)`
    #[arg(long, value_name = "SCALE", default_value_t = 0.3)]
    old_logp_noise_scale: f64,
    /// Put NaN logits or hidden states, NaN log-probabilities and the id -100 under the mask
    #[arg(long)]
    masked_garbage: bool,
    /// Pack the sequences into one row, each without the tokens behind the last that counts
    #[arg(long)]
    packed: bool,
    /// Write the problem even if no token of it has a gradient
    #[arg(long)]
    without_gradient: bool,
    /// Problem file to write; `-` is stdout
    #[arg(short, long, value_name = "PROBLEM.safetensors")]
    output: PathBuf,
    #[command(flatten)]
    printing: Printing,
}

/// Plain data, for the metadata of a file.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data has a JSON form")
}

#[derive(Serialize)]
struct Generated<'g> {
    output: &'g PathBuf,
    recipe: &'g AnyRecipe,
    spec: &'g LossSpec,
    coverage: &'g Coverage,
}

impl GenerateCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let [_, width, _] = self.shape.logits();
        let spec = self.spec.read()?;
        // A mean over the padded width has no meaning in a packed row: the width is written into the spec before
        // packing.
        let spec = if self.packed { spec.with_width(width) } else { spec };
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
            (SPEC_KEY.to_string(), json(&spec)),
            ("recipe".to_string(), json(&recipe)),
            ("generator".to_string(), format!("grpo-assay {}", env!("CARGO_PKG_VERSION"))),
        ]);
        let coverage = match &recipe {
            AnyRecipe::Logits(recipe) => {
                let problem = self.laid_out(recipe.problem(&spec)?);
                let coverage = self.covered(&problem, &spec)?;
                output::write_seekable(&self.output, |path| write_problem(path, &problem, &metadata))?;
                coverage
            }
            AnyRecipe::Head(recipe) => {
                let problem = self.laid_out(recipe.problem(&spec)?);
                let coverage = self.covered(&problem, &spec)?;
                output::write_seekable(&self.output, |path| write_problem(path, &problem, &metadata))?;
                coverage
            }
        };
        let Self { output, shape, dtype, regime, seed, .. } = self;
        let packed = if self.packed { ", packed" } else { "" };
        let text = format!("{}: {shape} {dtype} {regime}, seed {seed}{packed}\n{coverage}\n", ShownPath(&output));
        self.printing.finish(&text, &Generated { output, recipe: &recipe, spec: &spec, coverage: &coverage })?;
        Ok(Passed::Yes)
    }

    /// Packed, where that is asked for.
    fn laid_out<P: Judgeable>(&self, problem: P) -> P {
        if self.packed { problem.pack().0 } else { problem }
    }

    /// Returns the coverage of the problem, which must not be empty.
    fn covered<P: Judgeable>(&self, problem: &P, spec: &LossSpec) -> Result<Coverage, CliError> {
        let wrong = |reason| CliError::Problem { path: self.output.clone().into(), reason };
        let coverage = Coverage::from_reference(P::on_logits(&problem.evaluate(spec).map_err(wrong)?));
        // A problem in which all advantages or weights are 0 would let any gradient of 0 pass.
        if coverage.with_gradient == 0 && !self.without_gradient {
            let given = format!("--seed {}: got {coverage}, expected a token with a gradient", self.seed);
            return Err(CliError::Usage(
                format!("{given}: take another seed, more tokens, or --without-gradient").into(),
            ));
        }
        Ok(coverage)
    }
}
