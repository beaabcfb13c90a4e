//! The prompts file: JSON lines.

use std::path::Path;

use serde::Deserialize;

use super::{CompletionSampling, RecordError, Recording, reward};
use crate::checkpoint::{Qwen2Checkpoint, first_line};
use assay_core::files::read_named_text;
use assay_fixture::FixtureError;

/// No prompts file is longer.
pub(super) const LONGEST: u64 = 64 << 20;

/// The longest prompt or completion, in bytes: a tokenizer would take minutes over one that no model has the positions for.
const LONGEST_TEXT: usize = 1 << 20;

/// A line of the prompts file, tokenised.
pub(super) struct PromptLine {
    pub(super) prompt: String,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) completion_ids: Option<Vec<u32>>,
    pub(super) answer: Option<f64>,
    pub(super) reward: Option<f64>,
}

impl PromptLine {
    /// Sequences that it becomes: what was given, or a group.
    pub(super) fn completions(&self, sampling: Option<CompletionSampling>) -> usize {
        if self.completion_ids.is_some() { 1 } else { sampling.unwrap_or_default().group }
    }
}

/// One line, as it stands in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptLineText {
    /// The text that the model sees, template and special tokens included.
    prompt: String,
    #[serde(default)]
    completion: Option<String>,
    #[serde(default)]
    answer: Option<PromptAnswer>,
    #[serde(default)]
    reward: Option<f64>,
}

/// A number, or a text that ends in one, as GSM8K's answers do.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptAnswer {
    Number(f64),
    Text(String),
}

/// Reads and tokenises the lines of `path`.
pub(super) fn read(
    path: &Path,
    checkpoint: &Qwen2Checkpoint,
    asked: &Recording,
) -> Result<Vec<PromptLine>, RecordError> {
    let invalid = |field: &str, given: String, expected: &str| FixtureError::invalid(path, field, given, expected);
    let text = read_named_text(path, LONGEST).map_err(|reason| FixtureError::io(path, "read", reason))?;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let field = |name: &str| format!("line {}{name}", number + 1);
        let written: PromptLineText = serde_json::from_str(line).map_err(|error| {
            let expected = "a JSON object with `prompt`, and `completion`, `answer`, `reward` where there are any";
            invalid(&field(""), format!("`{error}`"), expected)
        })?;
        // Special tokens are in the prompt's text already, so that none are added.
        let encode = |name: &str, text: &str| -> Result<Vec<u32>, RecordError> {
            if text.len() > LONGEST_TEXT {
                let expected = format!("at most {LONGEST_TEXT}");
                return Err(invalid(&field(name), format!("{} bytes", text.len()), &expected).into());
            }
            let encoding = checkpoint.vocabulary.tokenizer.encode_fast(text, false);
            let encoding = encoding.map_err(|error| {
                invalid(&field(name), format!("`{}`", first_line(&error)), "text that the tokenizer takes")
            })?;
            if encoding.get_ids().is_empty() {
                return Err(invalid(&field(name), "no token".into(), "at least one").into());
            }
            Ok(encoding.get_ids().to_vec())
        };
        // An answer in words ends in its number, as GSM8K's answers do after the marker.
        let answer = match written.answer {
            None => None,
            Some(PromptAnswer::Number(number)) => Some(number),
            Some(PromptAnswer::Text(text)) => {
                let last = reward::numbers(&text).last().copied();
                Some(last.ok_or_else(|| {
                    invalid(&field(", `answer`"), format!("`{text}`"), "a number, or a text that ends in one")
                })?)
            }
        };
        let prompt_ids = encode(", `prompt`", &written.prompt)?;
        // The longest sequence is known before anything is sampled: prompt and as many tokens as may come.
        let (longest, positions) = (prompt_ids.len().saturating_add(asked.max_tokens), checkpoint.positions);
        if longest > positions {
            let given = format!("{} tokens, with {} more to come", prompt_ids.len(), asked.max_tokens);
            return Err(
                invalid(&field(", `prompt`"), given, &format!("at most the model's {positions} positions")).into()
            );
        }
        let completion_ids = written.completion.as_deref().map(|text| encode(", `completion`", text)).transpose()?;
        lines.push(PromptLine { prompt: written.prompt, prompt_ids, completion_ids, answer, reward: written.reward });
        // Either every line has a completion or none: a file is recorded or sampled as a whole.
        let first_given = lines[0].completion_ids.is_some();
        if lines[lines.len() - 1].completion_ids.is_some() != first_given {
            let (given, expected) = if first_given {
                ("none", "one, as the first line has")
            } else {
                ("one", "none, as the first line has none")
            };
            return Err(invalid(&field(", `completion`"), given.into(), expected).into());
        }
    }
    let given = match lines.first() {
        None => return Err(invalid("lines", "none".into(), "at least one prompt").into()),
        Some(line) => line.completion_ids.is_some(),
    };
    // A group, a temperature or a seed would have no effect where nothing is sampled.
    if given && asked.sampling.is_some() {
        let expected = "no group, temperature or seed: nothing is sampled";
        return Err(invalid("completions", "one on each line".into(), expected).into());
    }
    // A reward belongs to a text, which sampling has yet to draw.
    if !given && let Some(at) = lines.iter().position(|line| line.reward.is_some()) {
        let expected = "none: what will be sampled is not known yet; give an `answer`";
        return Err(invalid("`reward`", format!("one for prompt {}", at + 1), expected).into());
    }
    Ok(lines)
}
