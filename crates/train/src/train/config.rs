//! [`TrainConfig`]: the settings of `assay train`, in YAML.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::TrainError;
use super::optimizer::AdamWConfig;
use super::reward::{AdvantageConfig, GroupBaseline, ScaleRewards};
use super::task::ArithmeticTask;
use crate::checkpoint::Qwen2Config;
use assay_algebra::parts::expect_separable;
use assay_core::problem::ProblemError;
use assay_core::spec::{LossSpec, Objective, RolloutSource, Temperature, TemperatureDivides};
use assay_core::text::ShownNumber;

/// The settings of a whole run. Paths of inputs are relative to the folder of the file, that of the results to where the command runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The seed of everything that is drawn: weights, exercises, completions.
    #[serde(default)]
    pub seed: u64,
    /// Threads of this machine; all where none are given. With 1, a run gives the same bits again.
    #[serde(default)]
    pub threads: Option<usize>,
    /// The number of GRPO steps.
    pub steps: usize,
    /// The folder of the results.
    pub out: PathBuf,
    /// The policy that is trained.
    pub model: ModelSource,
    /// A tokenizer; where none is given that of the checkpoint, or one token a byte.
    #[serde(default)]
    pub tokenizer: Option<TokenizerFile>,
    /// The exercises that the policy learns.
    pub task: TrainTask,
    /// Supervised steps before those of GRPO.
    #[serde(default)]
    pub warm_start: Option<WarmStart>,
    /// The number and the length of completions, and how they are sampled.
    pub rollout: Rollout,
    /// The formula from rewards to advantages.
    #[serde(default)]
    pub advantages: AdvantageConfig,
    /// The update of the weights by the completions.
    #[serde(default)]
    pub update: Update,
    /// The number of steps between greedy evaluations of the policy; there is always one after the last.
    #[serde(default = "default_evaluate_every")]
    pub evaluate_every: usize,
    /// The number of steps between checkpoints; there is always one after the last.
    #[serde(default = "default_checkpoint_every")]
    pub checkpoint_every: usize,
    /// The loss. Completions are sampled from the distribution that it scores. With a `kl` term the reference is the policy
    /// as it was before the first step.
    #[serde(default)]
    pub loss: LossSpec,
    /// The implementation that computes the loss.
    #[serde(default)]
    pub kernel: KernelChoice,
}

fn default_evaluate_every() -> usize {
    20
}

fn default_checkpoint_every() -> usize {
    10
}

/// The origin of the initial weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelSource {
    /// Random weights of these extents, drawn from the seed.
    Init(Qwen2Config),
    /// A folder as Hugging Face writes it, or a GGUF file; with its tokenizer.
    Path(PathBuf),
}

/// A `tokenizer.json` and its end token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerFile {
    /// The path of the `tokenizer.json`.
    pub path: PathBuf,
    /// The token that ends a completion.
    pub end: String,
}

/// The exercises that are to be learnt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainTask {
    /// Word problems from the seed.
    Arithmetic(ArithmeticTask),
    /// Grade-school word problems from GSM8K's own files.
    Gsm8k(Gsm8k),
}

/// The paths of GSM8K's own files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gsm8k {
    /// The path of `train.jsonl`, the exercises to train on.
    pub train: PathBuf,
    /// The path of `test.jsonl`, the exercises to evaluate on.
    pub evaluate: PathBuf,
}

/// Supervised steps: cross-entropy of the exercises' solutions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmStart {
    /// The number of supervised steps.
    pub steps: usize,
    /// The number of exercises of a step.
    pub batch: usize,
    /// The learning rate of AdamW, whose other settings are those of [`Update`].
    pub learning_rate: f64,
    /// The file that keeps the weights for the next run; by default one in the folder of the results.
    #[serde(default)]
    pub cache: Option<PathBuf>,
}

/// The largest count in the settings. Products of counts are addresses and numbers of exercises, so that each is limited.
const MOST_COUNT: usize = 1 << 31;

/// The largest number of sequences of a step.
const MOST_SEQUENCES: usize = 1 << 20;

/// The largest number of times that a step draws other exercises.
const MOST_ATTEMPTS: usize = 1 << 10;

/// The largest number of threads: each takes memory before any work is done.
const MOST_THREADS: usize = 1 << 12;

/// The number and the length of completions, and how they are sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// The number of exercises of a step.
    pub prompts: usize,
    /// Completions of each, the group of its advantages.
    pub group: usize,
    /// The most tokens of a completion.
    pub max_new_tokens: usize,
    /// The dtype that the sampler's weights are rounded to; it computes in f32. Its log-probabilities are the loss's `rollout_logp`, those
    /// of the unrounded policy its `old_logp`.
    #[serde(default)]
    pub dtype: RolloutDtype,
    /// The number of the draw: another one has the same weights and exercises, and other random numbers.
    #[serde(default)]
    pub draw: u64,
    /// Whether groups whose rewards are all equal are sampled again, as other exercises.
    #[serde(default)]
    pub dynamic_sampling: Option<DynamicSampling>,
    /// Whether completions that found no end are left out of the loss; they stay in their group's advantages.
    #[serde(default)]
    pub mask_truncated: bool,
}

/// The dtype that the sampler's weights are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "they are known by their names")]
pub enum RolloutDtype {
    #[default]
    F32,
    Bf16,
    F16,
}

/// DAPO's dynamic sampling, which leaves out groups of equal rewards: their advantages are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicSampling {
    /// The most times that a step samples to fill its batch with groups whose rewards differ. If these are too few, the first
    /// of the other groups fill it.
    pub attempts: usize,
}

/// The update of the weights by a batch of completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Update {
    /// The number of epochs over each batch of completions.
    pub ppo_epochs: usize,
    /// The number of parts in which the gradient of a batch is computed.
    pub micro_batches: usize,
    /// The optimizer, which makes one step an epoch.
    pub optimizer: AdamWConfig,
}

impl Default for Update {
    fn default() -> Self {
        Self { ppo_epochs: 1, micro_batches: 1, optimizer: AdamWConfig::default() }
    }
}

/// The implementation that computes the loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelChoice {
    /// `false`: candle's own operations and autograd.
    pub enabled: bool,
    /// An implementation on logits or with the LM head; see `assay list`.
    #[serde(rename = "impl", default = "default_implementation")]
    pub implementation: String,
}

fn default_implementation() -> String {
    "native".into()
}

impl Default for KernelChoice {
    fn default() -> Self {
        Self { enabled: true, implementation: default_implementation() }
    }
}

impl Rollout {
    /// Returns the most times that a step samples.
    pub fn attempts(&self) -> usize {
        self.dynamic_sampling.map_or(1, |sampling| sampling.attempts)
    }
}

impl TrainConfig {
    /// Makes the paths of inputs relative to `folder`.
    pub fn beside(&mut self, folder: &Path) {
        // Inputs are found from the settings' folder, so that a run does not depend on where it is started.
        let paths = [
            match &mut self.model {
                ModelSource::Path(path) => Some(path),
                ModelSource::Init(_) => None,
            },
            self.tokenizer.as_mut().map(|tokenizer| &mut tokenizer.path),
            self.warm_start.as_mut().and_then(|warm_start| warm_start.cache.as_mut()),
        ];
        let of_task = match &mut self.task {
            TrainTask::Gsm8k(Gsm8k { train, evaluate }) => vec![train, evaluate],
            TrainTask::Arithmetic(_) => Vec::new(),
        };
        for path in paths.into_iter().flatten().chain(of_task) {
            *path = folder.join(&*path);
        }
    }

    /// Checks every count and range.
    ///
    /// # Errors
    /// [`TrainError`] naming the first that is out of range.
    pub fn check(&self) -> Result<(), TrainError> {
        let counts = [
            ("steps", self.steps),
            ("threads", self.threads.unwrap_or(1)),
            ("rollout.prompts", self.rollout.prompts),
            ("rollout.max_new_tokens", self.rollout.max_new_tokens),
            ("rollout.dynamic_sampling.attempts", self.rollout.attempts()),
            ("update.ppo_epochs", self.update.ppo_epochs),
            ("update.micro_batches", self.update.micro_batches),
            ("evaluate_every", self.evaluate_every),
            ("checkpoint_every", self.checkpoint_every),
            ("warm_start.batch", self.warm_start.as_ref().map_or(1, |warm_start| warm_start.batch)),
        ];
        let wrong = |field, given: String, expected: &str| {
            Err(TrainError::Setting { field, given: given.into(), expected: expected.into() })
        };
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return wrong(field, "0".into(), "at least 1");
        }
        let warm_steps = self.warm_start.as_ref().map_or(1, |warm_start| warm_start.steps);
        let most = |field: &str| match field {
            "warm_start.batch" => MOST_SEQUENCES,
            "rollout.dynamic_sampling.attempts" => MOST_ATTEMPTS,
            "threads" => MOST_THREADS,
            _ => MOST_COUNT,
        };
        let mut counts = counts.into_iter().chain([("warm_start.steps", warm_steps)]);
        if let Some((field, count)) = counts.find(|(field, count)| *count > most(field)) {
            return wrong(field, count.to_string(), &format!("at most {}", most(field)));
        }
        if self.rollout.group < 2 {
            return wrong("rollout.group", self.rollout.group.to_string(), "at least 2: advantages are within a group");
        }
        let sequences = self.rollout.prompts.saturating_mul(self.rollout.group);
        if sequences > MOST_SEQUENCES {
            let given = format!("{} for {} prompts", self.rollout.group, self.rollout.prompts);
            return wrong("rollout.group", given, &format!("at most {MOST_SEQUENCES} sequences a step"));
        }
        // The parts of a batch have equally many sequences, which the division needs.
        if !sequences.is_multiple_of(self.update.micro_batches) {
            let expected = format!("a divisor of prompts·group = {sequences}");
            return wrong("update.micro_batches", self.update.micro_batches.to_string(), &expected);
        }
        let optimizer = &self.update.optimizer;
        let positive = [
            ("update.optimizer.epsilon", optimizer.epsilon),
            ("update.optimizer.max_grad_norm", optimizer.max_grad_norm),
            ("warm_start.learning_rate", self.warm_start.as_ref().map_or(1.0, |warm_start| warm_start.learning_rate)),
        ];
        if let Some((field, given)) = positive.into_iter().find(|(_, x)| !(x.is_finite() && *x > 0.0)) {
            return wrong(field, ShownNumber(given).to_string(), "a finite number above 0");
        }
        let at_least_0 = [
            // With 0 nothing is learned, which is how to see what a run without learning looks like.
            ("update.optimizer.learning_rate", optimizer.learning_rate),
            ("advantages.epsilon", self.advantages.epsilon),
        ];
        if let Some((field, given)) = at_least_0.into_iter().find(|(_, x)| !(x.is_finite() && *x >= 0.0)) {
            return wrong(field, ShownNumber(given).to_string(), "a finite number, at least 0");
        }
        // A floor and an absent baseline belong to advantages that are scaled over tokens.
        let over_tokens = self.advantages.scale_rewards == ScaleRewards::Tokens;
        if !over_tokens && (self.advantages.floor || self.advantages.baseline == GroupBaseline::None) {
            let (field, given) =
                if self.advantages.floor { ("advantages.floor", "true") } else { ("advantages.baseline", "none") };
            return wrong(field, given.into(), "another, or `scale_rewards: tokens`");
        }
        let betas = [("update.optimizer.beta1", optimizer.beta1), ("update.optimizer.beta2", optimizer.beta2)];
        if let Some((field, given)) = betas.into_iter().find(|(_, x)| !(0.0..1.0).contains(x)) {
            return wrong(field, ShownNumber(given).to_string(), "0 ≤ beta < 1");
        }
        self.loss.check().map_err(ProblemError::from)?;
        expect_separable(&self.loss).map_err(ProblemError::from)?;
        self.expect_provided()?;
        if let ModelSource::Init(model) = &self.model {
            model.check()?;
        }
        Ok(())
    }

    /// Checks that the loss reads nothing that a run here has not.
    fn expect_provided(&self) -> Result<(), TrainError> {
        // A loss may read arrays that a trainer gives; this one has only what its own sampler and policy produce.
        let loss = &self.loss;
        if loss.logits.bias {
            return Err(TrainError::setting("loss.logits.bias", true, "false: no policy here has one"));
        }
        if loss.temperature == Temperature::Given {
            return Err(TrainError::setting("loss.temperature", "given", "a number: one samples all completions"));
        }
        if loss.temperature_divides == TemperatureDivides::Logp && loss.temperature != Temperature::ONE {
            let expected =
                "logits, or a temperature of 1: nothing can be sampled with probabilities that do not sum to 1";
            return Err(TrainError::setting("loss.temperature_divides", "logp", expected));
        }
        if loss.rollout.as_ref().is_some_and(|weights| weights.source == RolloutSource::Given) {
            let expected = "logp: the sampler returns log-probabilities and no weights";
            return Err(TrainError::setting("loss.rollout.source", "given", expected));
        }
        if loss.token_weights.is_some() {
            return Err(TrainError::setting("loss.token_weights", "given", "none: nothing makes them here"));
        }
        if loss.reads_kept_ids() {
            return Err(TrainError::setting("loss.support.kept", "given", "none: the sampler here keeps every column"));
        }
        if loss.reads_teacher() {
            return Err(TrainError::setting("loss.objective", "distillation", "another: there is no teacher here"));
        }
        if loss.dentropy {
            let expected = "false: no cotangents of entropy are given here, take `entropy_coef` for a bonus";
            return Err(TrainError::setting("loss.dentropy", true, expected));
        }
        if loss.reads_selected() {
            let expected = "one that reads no `selected`: nothing here marks tokens before the loss";
            let given = match &loss.objective {
                Objective::KlCov(_) => "kl_cov without a selection",
                Objective::ClipCov(_) => "clip_cov without a selection",
                Objective::Topr(_) => "topr with `positive: selected`",
                Objective::Aspo(_) => "aspo with `selected`",
                _ => "one that reads `selected`",
            };
            return Err(TrainError::setting("loss.objective", given, expected));
        }
        Ok(())
    }
}
