//! `assay record`: a model's own logits as a fixture.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::Args;
use time::OffsetDateTime;

use super::{CliError, Passed, Printing, command_line, output, stop_flag};
use crate::problem::Dtype;
use crate::record::{CompletionSampling, Recording, RecordingSummary, record};
use crate::text::{ShownNumber, ShownPath};

/// The most completions of one prompt: more are a slip of the keyboard.
const MOST_COMPLETIONS: usize = 65_536;

#[derive(Args)]
pub(super) struct RecordCommand {
    /// A Qwen2 or Qwen2.5 model: a folder with config.json, tokenizer.json and *.safetensors, or a GGUF file
    #[arg(long, value_name = "DIR|FILE.gguf")]
    model: PathBuf,
    /// JSON lines of `prompt`, the text that the model sees, template included; `answer`, the number that is right; or
    /// `completion`, which is then scored instead of sampled, with `reward` or `answer`
    #[arg(long, value_name = "FILE.jsonl")]
    prompts: PathBuf,
    /// Fixture file to write; `-` is stdout
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    /// Completions of each prompt; 8 if none is given
    #[arg(long, value_name = "G")]
    group: Option<NonZeroUsize>,
    /// Temperature of sampling; 1 if none is given
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Seed of sampling; 0 if none is given
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Most tokens of a completion
    #[arg(long, value_name = "N", default_value = "64")]
    max_tokens: NonZeroUsize,
    /// Dtype of the logits in the file
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    #[command(flatten)]
    printing: Printing,
}

impl RecordCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let asked = |out: &Path| -> Result<Recording, CliError> {
            Ok(Recording {
                model: self.model.clone(),
                prompts: self.prompts.clone(),
                out: out.into(),
                sampling: self.sampling()?,
                max_tokens: self.max_tokens.get(),
                dtype: self.dtype,
                provenance: BTreeMap::from([
                    ("command".into(), command_line()),
                    ("date".into(), OffsetDateTime::now_utc().date().to_string()),
                    ("assay".into(), env!("CARGO_PKG_VERSION").into()),
                ]),
            })
        };
        let progress = self.printing.progress(0);
        progress.set_message("sequences drawn and scored");
        let stop = stop_flag()?;
        let recorded = output::write_seekable(&self.out, |path| -> Result<RecordingSummary, CliError> {
            let recorded = record(&asked(path)?, &stop, |steps| {
                progress.set_length(steps as u64);
                progress.inc(1);
            });
            Ok(RecordingSummary { out: self.out.clone(), ..recorded? })
        });
        progress.finish_and_clear();
        let recorded = recorded?;
        self.printing.finish(&text(&recorded), &recorded)?;
        Ok(Passed::Yes)
    }

    fn sampling(&self) -> Result<Option<CompletionSampling>, CliError> {
        if self.group.is_none() && self.temperature.is_none() && self.seed.is_none() {
            return Ok(None);
        }
        let default = CompletionSampling::default();
        let temperature = self.temperature.unwrap_or(default.temperature);
        if !(temperature.is_finite() && temperature > 0.0) {
            let given = ShownNumber(temperature);
            return Err(CliError::Usage(format!("--temperature: got {given}, expected a number > 0").into()));
        }
        let group = self.group.map_or(default.group, NonZeroUsize::get);
        if group > MOST_COMPLETIONS {
            let expected = format!("expected at most {MOST_COMPLETIONS} completions of a prompt");
            return Err(CliError::Usage(format!("--group: got {group}, {expected}").into()));
        }
        Ok(Some(CompletionSampling { group, temperature, seed: self.seed.unwrap_or(default.seed) }))
    }
}

fn text(recorded: &RecordingSummary) -> String {
    let RecordingSummary { out, shape: [b, t, v], tokens, rewards, all_advantages_are_zero } = recorded;
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    let mut text = format!("{}: {b}x{t}x{v}, {tokens} tokens, mean reward {mean:.3}\n", ShownPath(&out));
    if *all_advantages_are_zero {
        text += "every advantage is 0, as every completion of a prompt has the same reward: the loss has no gradient\n";
    }
    text
}
