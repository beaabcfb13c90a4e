//! [`record`]: a model's own logits as a fixture.
//!
//! ```text
//! prompts ─▶ completions (sampled, or given) ─▶ teacher-forced forward ─▶ logits [B,T,V], a row at a time ─▶ file
//! ```
//!
//! The model is Qwen2 or Qwen2.5 in f32, by the training loop's own forward, from a folder of safetensors or from a GGUF file that is
//! dequantised. Sampling runs token by token with a KV cache and keeps the log-probability of each token as it was drawn:
//! `old_logps`. The training forward then runs over the same tokens in chunks, padding included, so that `r ≠ 1` is a
//! real mismatch between two forwards and the rounding of the logits. Completions that are given have no sampler: their
//! `old_logps` are those of the f32 logits.
//!
//! Memory holds the model, the KV cache of one sequence and the logits of [`CHUNK`] positions, whatever `B·T` is.

mod expected;
mod prompts;
mod qwen2;
mod reward;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Tensor;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use self::expected::{BatchScalars, CLIP, TokenScalars, log_softmax};
use self::prompts::{PromptLine, read};
use self::qwen2::{Prefilled, load, logits};
use crate::checkpoint::{Qwen2Checkpoint, Vocabulary, first_line, hash_of};
use crate::train::reward::AdvantageConfig;
use crate::train::{Qwen2, TrainError};
use assay_core::problem::Dtype;
use assay_core::spec::{LossSpec, Objective, PpoClip};
use assay_core::text::{ForeignText, ShownPath};
use assay_fixture::{FixtureError, SafetensorsStream, StoredDtype};

pub use self::qwen2::CHUNK;

/// The reason why nothing was recorded. The message is one line and names the file.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A file that cannot be read, written or believed.
    #[error(transparent)]
    File(#[from] FixtureError),
    /// candle failed while it computed the model.
    #[error("{path}: {reason}")]
    Model {
        /// The path of the checkpoint.
        path: ShownPath,
        /// The first line of candle's error.
        reason: ForeignText,
    },
    /// The stop flag was set, by Ctrl-C.
    #[error("{path}: interrupted, nothing was written")]
    Interrupted {
        /// The file that was being made.
        path: ShownPath,
    },
}

/// The number of completions of each prompt, and how their tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompletionSampling {
    /// The number of completions of each prompt.
    pub group: usize,
    /// `> 0`; 1 is the model's own distribution. No top-k, no top-p.
    pub temperature: f64,
    /// Completion `b` of a file draws from stream `b` of ChaCha8 under this seed.
    pub seed: u64,
}

impl Default for CompletionSampling {
    /// Eight completions at temperature 1.
    fn default() -> Self {
        Self { group: 8, temperature: 1.0, seed: 0 }
    }
}

/// A recording to be made: model, prompts, sampling and the file to write.
#[derive(Clone, Debug)]
pub struct Recording {
    /// A folder with `config.json`, `tokenizer.json` and `*.safetensors`, or a GGUF file.
    pub model: PathBuf,
    /// JSON lines of `prompt`, and `completion`, `answer`, `reward` where there are any.
    pub prompts: PathBuf,
    /// The path of the fixture to write.
    pub out: PathBuf,
    /// `None` takes the prompts' completions; [`CompletionSampling::default`] where they have none.
    pub sampling: Option<CompletionSampling>,
    /// Most tokens of a completion; longer ones are cut.
    pub max_tokens: usize,
    /// The dtype of the logits in the file.
    pub dtype: Dtype,
    /// Entries about the origin of the file, in addition to those that are known here.
    pub provenance: BTreeMap<String, String>,
}

impl Recording {
    /// Returns the temperature of the loss that the file is of: that of the sampler, 1 where completions are given.
    fn temperature(&self) -> f64 {
        self.sampling.map_or(1.0, |sampling| sampling.temperature)
    }

    /// Whether the file has expected scalars, which are those of a loss at temperature 1.
    fn has_scalars(&self) -> bool {
        self.temperature() == 1.0
    }
}

/// A summary of the fixture that was written.
#[derive(Clone, Debug, Serialize)]
pub struct RecordingSummary {
    /// The path of the fixture.
    pub out: PathBuf,
    /// The extents of the logits, `[B,T,V]`.
    pub shape: [usize; 3],
    /// The number of unmasked tokens.
    pub tokens: usize,
    /// The reward of each completion.
    pub rewards: Vec<f64>,
    /// Whether every advantage is 0, so that the loss has no gradient.
    pub all_advantages_are_zero: bool,
}

/// One sequence of the batch.
struct RecordedCompletion {
    prompt: usize,
    ids: Vec<u32>,
    /// The log-probabilities of the sampler in nats, if tokens were sampled.
    old_logps: Option<Vec<f32>>,
    ended: bool,
    text: String,
    reward: f64,
}

/// Samples or scores the completions of all prompts and writes the fixture. `done` is called twice for every sequence, once
/// drawn and once scored, with the number of calls in all.
///
/// # Errors
/// [`RecordError`]; then nothing lies at [`Recording::out`] that was not there before, and nothing beside it.
pub fn record(asked: &Recording, stop: &AtomicBool, done: impl Fn(usize)) -> Result<RecordingSummary, RecordError> {
    // Everything that can be wrong with the inputs is found before the weights are read.
    let checkpoint = Qwen2Checkpoint::open(&asked.model)?;
    let lines = read(&asked.prompts, &checkpoint, asked)?;
    let vocab = checkpoint.config.vocab_size;
    let provenance = provenance(asked, &checkpoint, &lines)?;
    let vocabulary = checkpoint.vocabulary.clone();
    let model = load(checkpoint)?;
    // Every sequence is reported twice: once sampled, once scored.
    let completions = lines.iter().map(|line| line.completions(asked.sampling));
    let steps = completions.fold(0, usize::saturating_add).saturating_mul(2);
    let scribe = Scribe { asked, stop, model: &model, vocabulary: &vocabulary, steps };

    let completions = scribe.complete(&lines, &done)?;
    // The batch is as wide as its longest completion, so that widths are known only after all of them are drawn.
    let tokens = completions.iter().map(|completion| completion.ids.len()).max().unwrap_or(0);
    let advantages = advantages(&lines, &completions);
    let shape = [completions.len(), tokens, vocab];
    scribe.write(shape, &lines, &completions, &advantages, provenance, &done)?;
    Ok(RecordingSummary {
        out: asked.out.clone(),
        shape,
        tokens: completions.iter().map(|completion| completion.ids.len()).sum(),
        rewards: completions.iter().map(|completion| completion.reward).collect(),
        all_advantages_are_zero: advantages.iter().all(|advantage| *advantage == 0.0),
    })
}

/// `(r − mean)/(std + 1e-4)` over the completions of one prompt, population standard deviation, rounded to f32.
fn advantages(lines: &[PromptLine], completions: &[RecordedCompletion]) -> Vec<f32> {
    let text = |completion: &RecordedCompletion| &lines[completion.prompt].prompt;
    // Neighbouring completions of one prompt are a group, whether they were given or sampled.
    let groups = completions.chunk_by(|a, b| text(a) == text(b));
    let of_group = |group: &[RecordedCompletion]| {
        let rewards: Vec<f64> = group.iter().map(|completion| completion.reward).collect();
        let tokens: Vec<usize> = group.iter().map(|completion| completion.ids.len()).collect();
        let advantages = AdvantageConfig::default().advantages(&rewards, &tokens, rewards.len());
        advantages.into_iter().map(|advantage| advantage as f32)
    };
    groups.flat_map(of_group).collect()
}

struct Scribe<'r> {
    asked: &'r Recording,
    stop: &'r AtomicBool,
    model: &'r Qwen2,
    vocabulary: &'r Vocabulary,
    /// The number of times that `done` is called: twice a sequence.
    steps: usize,
}

impl Scribe<'_> {
    fn check_stop(&self) -> Result<(), RecordError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(RecordError::Interrupted { path: self.asked.out.clone().into() });
        }
        Ok(())
    }

    fn failed(&self, error: &TrainError) -> RecordError {
        RecordError::Model { path: self.asked.model.clone().into(), reason: first_line(error).into() }
    }

    fn logits(&self, hidden: &Tensor) -> Result<Vec<f32>, RecordError> {
        logits(self.model, hidden).map_err(|error| self.failed(&error.into()))
    }

    /// Returns the completions of the prompts file, or draws them.
    fn complete(&self, lines: &[PromptLine], done: &dyn Fn(usize)) -> Result<Vec<RecordedCompletion>, RecordError> {
        let mut completions = Vec::new();
        for (prompt, line) in lines.iter().enumerate() {
            if let Some(ids) = &line.completion_ids {
                // Given completions are cut as sampled ones would be.
                let ids = ids[..ids.len().min(self.asked.max_tokens)].to_vec();
                completions.push(self.completion(prompt, line, ids, None));
                done(self.steps);
                continue;
            }
            let CompletionSampling { temperature, seed, .. } = self.asked.sampling.unwrap_or_default();
            // The prompt is read once; each completion continues from a clone of its cache.
            let prefilled = self.prefill(line)?;
            for _ in 0..line.completions(self.asked.sampling) {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                // A stream for each completion: the tokens do not depend on how many others are drawn.
                rng.set_stream(completions.len() as u64);
                let (ids, old_logps) = self.draw(prefilled.clone(), temperature, &mut rng)?;
                completions.push(self.completion(prompt, line, ids, Some(old_logps)));
                done(self.steps);
            }
        }
        Ok(completions)
    }

    fn completion(
        &self,
        prompt: usize,
        line: &PromptLine,
        ids: Vec<u32>,
        old_logps: Option<Vec<f32>>,
    ) -> RecordedCompletion {
        let ended = ids.last().is_some_and(|id| self.vocabulary.end.contains(id));
        let text = self.text(&ids);
        let reward = line.reward.unwrap_or_else(|| reward::score(&text, ended, line.answer));
        RecordedCompletion { prompt, ids, old_logps, ended, text, reward }
    }

    fn text(&self, ids: &[u32]) -> String {
        // Only ids of the tokenizer have text: a head may have more columns than there are tokens.
        self.vocabulary.tokenizer.decode(ids, false).unwrap_or_default()
    }

    fn prefill(&self, line: &PromptLine) -> Result<Prefilled<'_>, RecordError> {
        let check = || self.check_stop();
        Prefilled::new(self.model, &line.prompt_ids, &check, &|error| self.failed(error))
    }

    /// One completion, token by token, and each token's log-probability under the distribution that it was drawn from.
    fn draw(
        &self,
        mut state: Prefilled<'_>,
        temperature: f64,
        rng: &mut ChaCha8Rng,
    ) -> Result<(Vec<u32>, Vec<f32>), RecordError> {
        let (mut ids, mut logps) = (Vec::new(), Vec::new());
        loop {
            self.check_stop()?;
            let logits = self.logits(&state.last)?;
            // The distribution is that of the f32 logits at the sampling temperature, in f64: `old_logps` are what the
            // sampler saw.
            let logp = self.finite(log_softmax(&logits, temperature))?;
            let id = choose(&logp, rng.random());
            ids.push(id as u32);
            logps.push(logp[id] as f32);
            if ids.len() == self.asked.max_tokens || self.vocabulary.end.contains(&(id as u32)) {
                return Ok((ids, logps));
            }
            state.last = state.forward(&[id as u32]).map_err(|error| self.failed(&error))?;
        }
    }

    fn finite(&self, values: Vec<f64>) -> Result<Vec<f64>, RecordError> {
        if values.iter().all(|x| x.is_finite()) {
            return Ok(values);
        }
        Err(RecordError::Model {
            path: self.asked.model.clone().into(),
            reason: "got logits that are NaN or ∞, expected numbers".into(),
        })
    }

    /// The training forward, and every tensor of the fixture.
    fn write(
        &self,
        [batch, tokens, vocab]: [usize; 3],
        lines: &[PromptLine],
        completions: &[RecordedCompletion],
        advantages: &[f32],
        mut metadata: BTreeMap<String, String>,
        done: &dyn Fn(usize),
    ) -> Result<(), RecordError> {
        let width = self.model.config().hidden_size;
        let of_tokens = [batch, tokens];
        let dtype = match self.asked.dtype {
            Dtype::F64 => StoredDtype::F64,
            Dtype::F32 => StoredDtype::F32,
            Dtype::Bf16 => StoredDtype::BF16,
            Dtype::F16 => StoredDtype::F16,
        };
        let layout: [(&str, StoredDtype, &[usize]); 9] = [
            ("advantages", StoredDtype::F32, &[batch]),
            ("rewards", StoredDtype::F32, &[batch]),
            ("ids", StoredDtype::I32, &of_tokens),
            ("mask", StoredDtype::U8, &of_tokens),
            ("old_logps", StoredDtype::F32, &of_tokens),
            ("hidden", StoredDtype::F32, &[batch, tokens, width]),
            ("logits", dtype, &[batch, tokens, vocab]),
            ("expected_logp_of_logits", StoredDtype::F64, &of_tokens),
            ("expected_entropy_of_logits", StoredDtype::F64, &of_tokens),
        ];
        let list =
            |of: &dyn Fn(&RecordedCompletion) -> String| completions.iter().map(of).collect::<Vec<_>>().join(", ");
        metadata.extend([
            ("title".into(), format!("GRPO batch, B={batch} T={tokens} V={vocab}")),
            ("completion_lengths".into(), format!("[{}]", list(&|completion| completion.ids.len().to_string()))),
            ("ended_by_itself".into(), format!("[{}]", list(&|completion| completion.ended.to_string()))),
            (
                "completions_text".into(),
                json(&completions.iter().map(|completion| &completion.text).collect::<Vec<_>>()),
            ),
        ]);
        // Tensors are streamed a row at a time: the logits of the whole file are never in memory.
        let mut stream = SafetensorsStream::create(&self.asked.out, &layout, metadata)?;
        let mut expected = BatchScalars::default();
        let mut prefilled: Option<(usize, Prefilled)> = None;
        for (completion, &advantage) in completions.iter().zip(advantages) {
            // Completions of one prompt share its cache.
            let state = match &prefilled {
                Some((prompt, state)) if lines[*prompt].prompt == lines[completion.prompt].prompt => state.clone(),
                _ => self.prefill(&lines[completion.prompt])?,
            };
            prefilled = Some((completion.prompt, state.clone()));
            let sequence = ScoredSequence { completion, advantage, padded: self.padded(completion, tokens) };
            self.score(&mut stream, &mut expected, &sequence, state)?;
            done(self.steps);
        }
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        stream.append("advantages", &bytes(advantages))?;
        stream.append(
            "rewards",
            &bytes(&completions.iter().map(|completion| completion.reward as f32).collect::<Vec<_>>()),
        )?;
        // The recorded scalars are of a loss at temperature 1. Another temperature has a spec in the metadata instead,
        // and no scalars.
        let temperature = self.asked.temperature();
        let more = if self.asked.has_scalars() { expected.scalars() } else { BTreeMap::from([spec_at(temperature)]) };
        Ok(stream.finish(more)?)
    }

    fn padded(&self, completion: &RecordedCompletion, tokens: usize) -> Vec<u32> {
        let mut ids = completion.ids.clone();
        ids.resize(tokens, self.vocabulary.padding);
        ids
    }

    /// The training forward over one sequence, a chunk of positions at a time.
    fn score(
        &self,
        stream: &mut SafetensorsStream,
        expected: &mut BatchScalars,
        ScoredSequence { completion, advantage, padded }: &ScoredSequence,
        mut state: Prefilled<'_>,
    ) -> Result<(), RecordError> {
        let mut t = 0;
        // The last token of the prompt predicts the first of the completion, which predicts the next.
        let mut hidden = state.last.clone();
        loop {
            self.check_stop()?;
            let values = hidden.flatten_all().and_then(|hidden| hidden.to_vec1::<f32>());
            let values = values.map_err(|error| self.failed(&error.into()))?;
            stream.append("hidden", &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
            let logits = self.logits(&hidden)?;
            for logits in logits.chunks(self.model.config().vocab_size) {
                // The scalars are those of the stored numbers, after rounding to the dtype of the file.
                let (bytes, stored) = rounded(logits, self.asked.dtype);
                stream.append("logits", &bytes)?;
                let id = padded[t] as usize;
                let row = TokenScalars::from_logits(&self.finite(stored)?, id);
                stream.append("expected_logp_of_logits", &row.logp.to_le_bytes())?;
                stream.append("expected_entropy_of_logits", &row.entropy.to_le_bytes())?;
                let counts = t < completion.ids.len();
                // The sampler's log-probability if there is one, else that of the f32 logits; 0 where masked.
                let old_logp = match &completion.old_logps {
                    _ if !counts => 0.0,
                    Some(old_logps) => old_logps[t],
                    None => log_softmax(logits, 1.0)[id] as f32,
                };
                stream.append("ids", &(id as i32).to_le_bytes())?;
                stream.append("mask", &[u8::from(counts)])?;
                stream.append("old_logps", &old_logp.to_le_bytes())?;
                if counts {
                    expected.add(row, f64::from(old_logp), f64::from(*advantage));
                }
                t += 1;
            }
            if t == padded.len() {
                return Ok(());
            }
            // The next chunk of inputs, each of which predicts the token after it.
            // Position t − 1 is the input whose hidden state predicts token t.
            let chunk = &padded[t - 1..(t - 1 + CHUNK).min(padded.len() - 1)];
            hidden = state.forward(chunk).map_err(|error| self.failed(&error))?;
        }
    }
}

/// A completion of the batch with its advantage and padded ids.
struct ScoredSequence<'c> {
    completion: &'c RecordedCompletion,
    advantage: f32,
    padded: Vec<u32>,
}

/// The smallest id whose cumulative probability exceeds `uniform`, in `[0,1)`.
fn choose(logp: &[f64], uniform: f64) -> usize {
    let mut sum = 0.0;
    let chosen = logp.iter().position(|logp| {
        sum += logp.exp();
        sum > uniform
    });
    // The sum may end a rounding short of 1: then the likeliest.
    let likeliest = || (0..logp.len()).max_by(|&a, &b| logp[a].total_cmp(&logp[b])).unwrap_or(0);
    chosen.unwrap_or_else(likeliest)
}

/// The bytes of logits in their stored dtype, and the numbers that they are.
fn rounded(logits: &[f32], dtype: Dtype) -> (Vec<u8>, Vec<f64>) {
    fn each<const N: usize>(logits: &[f32], round: impl Fn(f32) -> ([u8; N], f64)) -> (Vec<u8>, Vec<f64>) {
        let mut bytes = Vec::with_capacity(logits.len() * N);
        let mut stored = Vec::with_capacity(logits.len());
        for &logit in logits {
            let (raw, value) = round(logit);
            bytes.extend(raw);
            stored.push(value);
        }
        (bytes, stored)
    }
    match dtype {
        // The expected values are computed from the stored numbers, which a reader of the file has, and not from those
        // before their rounding.
        Dtype::F64 => each(logits, |x| (f64::from(x).to_le_bytes(), f64::from(x))),
        Dtype::F32 => each(logits, |x| (x.to_le_bytes(), f64::from(x))),
        Dtype::Bf16 => each(logits, |x| (bf16::from_f32(x).to_le_bytes(), bf16::from_f32(x).to_f64())),
        Dtype::F16 => each(logits, |x| (f16::from_f32(x).to_le_bytes(), f16::from_f32(x).to_f64())),
    }
}

/// The metadata entry of the loss whose `old_logps` were drawn at another temperature than 1.
fn spec_at(temperature: f64) -> (String, String) {
    let [epsilon_low, epsilon_high] = CLIP;
    let clip = PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() };
    let spec = LossSpec { objective: Objective::PpoClip(clip), temperature: temperature.into(), ..LossSpec::default() };
    ("spec".into(), json(&spec))
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data becomes JSON")
}

/// Collects the entries about the origin of the numbers that are known before the model runs.
fn provenance(
    asked: &Recording,
    checkpoint: &Qwen2Checkpoint,
    lines: &[PromptLine],
) -> Result<BTreeMap<String, String>, RecordError> {
    let given = lines.iter().any(|line| line.completion_ids.is_some());
    let dtype = asked.dtype;
    let old_logps = if given {
        "log-prob of the given token from the f32 logits of the training forward, temperature 1; the text was not sampled here"
    } else {
        "log-prob of the sampled token at the moment of sampling, f32 logits of a token-by-token forward with KV cache, \
         log-softmax in float64 at the sampling temperature, rounded to f32"
    };
    let mut metadata = asked.provenance.clone();
    metadata.extend(checkpoint.provenance.clone());
    let mut say = |key: &str, value: String| {
        metadata.insert(key.into(), value);
    };
    say("fixture_format", "1".into());
    say("vocab_size", checkpoint.config.vocab_size.to_string());
    say("max_completion_length", asked.max_tokens.to_string());
    say("prompts_sha256", hash_of(&asked.prompts, prompts::LONGEST)?);
    say("prompt_lengths", json(&lines.iter().map(|line| line.prompt_ids.len()).collect::<Vec<_>>()));
    say("prompt_ids", json(&lines.iter().map(|line| &line.prompt_ids).collect::<Vec<_>>()));
    say(
        "training_forward",
        "the training loop's qwen2 on candle, f32, teacher-forced in chunks with KV cache, padding fed".into(),
    );
    if given {
        say("sampling", "none: completions were given".into());
    } else {
        let CompletionSampling { group, temperature, seed } = asked.sampling.unwrap_or_default();
        say("temperature", format!("{temperature:?}"));
        say("group", group.to_string());
        say("sampling", "no top-k, top-p, min-p or penalties; completion b draws from stream b of ChaCha8".into());
        say("sampling_seed", seed.to_string());
    }
    // Only a file of temperature 1 has the scalars that this defines; any other carries its loss as `spec`.
    if asked.has_scalars() {
        let [low, high] = CLIP;
        say(
            "expected.definition",
            format!("as in fixtures/README.md: PPO-clip at eps_low={low} eps_high={high}, beta=0, temperature=1"),
        );
    }
    let tensors = [
        ("logits", format!("{dtype} [B,T,V]: hidden @ lm_head^T in f32, rounded to nearest even; position t predicts ids[b,t]")),
        ("hidden", "f32 [B,T,H]: output of the final RMSNorm, input of lm_head".into()),
        ("ids", "i32 [B,T]: completion tokens; the padding id where mask=0, which was really fed to the model".into()),
        ("mask", "u8 [B,T]: 1 for completion tokens (the end token included), else 0".into()),
        ("old_logps", format!("f32 [B,T], nats: {old_logps}; 0 where mask=0")),
        ("rewards", "f32 [B]: as the prompts give them, else 1.0 if the last number of the completion is the answer, +0.25 if it \
                     starts with \"#### <number>\", +0.25 if it ended by itself".into()),
        ("advantages", "f32 [B]: (r-mean)/(std+1e-4) over the completions of one prompt, population std, float64 rounded to f32".into()),
        ("expected_logp_of_logits", "f64 [B,T], nats: log-softmax of logits at ids, in float64, all positions".into()),
        ("expected_entropy_of_logits", "f64 [B,T], nats: entropy of softmax of logits, in float64, all positions".into()),
    ];
    for (name, text) in tensors {
        say(&format!("tensor.{name}"), text);
    }
    Ok(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_tokens_are_chosen_by_their_share() {
        let logp = [0.25f64.ln(), 0.5f64.ln(), 0.25f64.ln()];
        assert_eq!([0.0, 0.24, 0.26, 0.74, 0.76, 0.999_999].map(|u| choose(&logp, u)), [0, 0, 1, 1, 2, 2]);
        assert_eq!(choose(&[0.2f64.ln(), 0.5f64.ln()], 0.9), 1, "a sum that ends short");
    }

    #[test]
    fn advantages_are_those_within_a_prompt() {
        let line = |prompt: &str| PromptLine {
            prompt: prompt.into(),
            prompt_ids: vec![0],
            completion_ids: None,
            answer: None,
            reward: None,
        };
        let completion = |prompt, reward| RecordedCompletion {
            prompt,
            ids: vec![0],
            old_logps: None,
            ended: false,
            text: String::new(),
            reward,
        };
        // Two lines of one prompt are one group, as two samples of one line are.
        let lines = [line("a"), line("a"), line("b")];
        let completions = [completion(0, 0.0), completion(1, 1.0), completion(2, 5.0), completion(2, 5.0)];
        let got = advantages(&lines, &completions);
        let one = (0.5 / (0.5 + 1e-4)) as f32;
        assert_eq!(got, [-one, one, 0.0, 0.0]);
    }
}
