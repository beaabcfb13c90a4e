//! [`Trainer`]: the loop.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use candle_core::Tensor;
use ndarray::Array1;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use super::checkpoint;
use super::config::{Model, Task, TrainConfig, WarmStart};
use super::loss_step::{Graded, GradedStep, Summed};
use super::meter::Meter;
use super::metrics::{Evaluation, Journal, Record};
use super::optimizer::{AdamW, AdamWConfig, Gradients};
use super::qwen2::{Qwen2, Weights, initial_weights, read_checkpoint};
use super::reward::{Reward, advantages};
use super::rollout::{Completion, Sampling, generate};
use super::sequences::Sequences;
use super::task::{Exercise, read_gsm8k};
use super::tokenizer::Tokenizer;
use super::{Baseline, Batch, Evaluated, GrpoLoss, LossStep, Observer, TrainError, Whole};
use crate::checkpoint::Qwen2Config;
use assay_core::problem::Metrics;
use assay_core::spec::{LossSpec, Objective, OldLogp};
use assay_fixture::hexadecimal;

/// The most exercises of an evaluation that go through the policy together.
const EVALUATED_AT_ONCE: usize = 64;

/// What computes the loss.
#[derive(Clone)]
pub enum Arm {
    /// An implementation of this crate.
    Kernel(Box<GrpoLoss>),
    /// candle's own operations.
    Candle(Baseline),
}

impl Arm {
    /// The arm that `config` chooses; a PJRT implementation uses `plugin`.
    ///
    /// # Errors
    /// [`TrainError`] where there is none, it does not run here, or does not compute this loss.
    pub fn of(config: &TrainConfig, plugin: Option<&Path>) -> Result<Self, TrainError> {
        if !config.kernel.enabled {
            return Baseline::of(&config.loss).map(Arm::Candle);
        }
        let grpo = GrpoLoss::by_id(config.loss.clone(), &config.kernel.implementation, plugin)?;
        Ok(Arm::Kernel(Box::new(grpo)))
    }

    /// The same for the loss `spec`.
    fn under(&self, spec: &LossSpec) -> Result<Self, TrainError> {
        Ok(match self {
            Arm::Kernel(grpo) => Arm::Kernel(Box::new(grpo.under(spec.clone()))),
            Arm::Candle(_) => Arm::Candle(Baseline::of(spec)?),
        })
    }

    pub(super) fn on_hidden(&self, hidden: &Tensor, lm_head: &Tensor, batch: &Batch) -> Result<Evaluated, TrainError> {
        match self {
            Arm::Kernel(grpo) => grpo.on_hidden(hidden, lm_head, batch),
            Arm::Candle(baseline) => baseline.on_hidden(hidden, lm_head, batch),
        }
    }
}

/// A run between two steps.
pub struct Trainer {
    config: TrainConfig,
    arm: Arm,
    tokenizer: Tokenizer,
    model: Qwen2Config,
    weights: Weights,
    optimizer: AdamW,
    step: usize,
    train: Vec<Prompted>,
    evaluate: Vec<Prompted>,
    journal: Journal,
}

/// An exercise in tokens.
struct Prompted {
    prompt: Vec<u32>,
    solution: Vec<u32>,
    answer: i64,
}

impl Trainer {
    /// A run from its beginning, or from the checkpoint in its folder: after a warm start, if there is to be one.
    ///
    /// # Errors
    /// [`TrainError`] naming the setting or file that is wrong; [`TrainError::Interrupted`] where `stop` was set before the
    /// warm start was done.
    pub fn start(config: TrainConfig, arm: Arm, stop: &AtomicBool) -> Result<Self, TrainError> {
        config.check()?;
        fs::create_dir_all(&config.out).map_err(|reason| TrainError::io(&config.out, "create", reason))?;
        let (model, weights, own) = match &config.model {
            Model::Init(model) => (model.clone(), initial_weights(model, config.seed)?, Tokenizer::Bytes),
            Model::Path(path) => read_checkpoint(path)?,
        };
        let tokenizer = match &config.tokenizer {
            Some(file) => Tokenizer::read(&file.path, &file.end)?,
            None => own,
        };
        tokenizer.expect_within(model.vocab_size)?;
        let (train, evaluate) = match &config.task {
            Task::Arithmetic(task) => task.exercises(config.seed)?,
            Task::Gsm8k(files) => (read_gsm8k(&files.train)?, read_gsm8k(&files.evaluate)?),
        };
        let in_tokens = |exercises: Vec<Exercise>| {
            let in_tokens = |exercise: Exercise| {
                let mut solution = tokenizer.encode(&exercise.solution)?;
                solution.push(tokenizer.end());
                Ok(Prompted { prompt: tokenizer.encode(&exercise.question)?, solution, answer: exercise.answer })
            };
            exercises.into_iter().map(in_tokens).collect::<Result<Vec<_>, TrainError>>()
        };
        let (train, evaluate) = (in_tokens(train)?, in_tokens(evaluate)?);
        let path = checkpoint_path(&config.out);
        let (step, weights, optimizer) = if path.exists() {
            let found = checkpoint::read(&path, &model, &config.fingerprint())?;
            (found.step, found.weights, found.optimizer)
        } else {
            (0, warm(&config, &model, weights, &train, stop)?, AdamW::default())
        };
        let journal = Journal::open(&config.out, step)?;
        Ok(Self { config, arm, tokenizer, model, weights, optimizer, step, train, evaluate, journal })
    }

    /// How many steps it has made.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// Whether it has made all of them.
    pub fn finished(&self) -> bool {
        self.step >= self.config.steps
    }

    /// The curve.
    pub fn records(&self) -> &[Record] {
        self.journal.records()
    }

    /// Makes a step, writes it down, and a checkpoint where one is due. `observer` is shown the losses that it wants.
    ///
    /// # Errors
    /// [`TrainError`] where a loss fails, training diverges, or a file cannot be written; the last checkpoint stands.
    pub fn advance(&mut self, observer: &mut dyn Observer) -> Result<&Record, TrainError> {
        let started = Instant::now();
        let step = self.step + 1;
        let exercises = self.exercises_of(step);
        let group = self.config.rollout.group;
        let prompts: Vec<&[u32]> =
            exercises.iter().flat_map(|&i| vec![self.train[i].prompt.as_slice(); group]).collect();
        let seed = self.config.seed ^ (step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sampling = Sampling::Softmax { temperature: self.config.loss.temperature, seed };
        let policy = Qwen2::detached(&self.model, &self.weights);
        let completions =
            generate(&policy, &prompts, self.config.rollout.max_new_tokens, self.tokenizer.end(), sampling)?;
        let rollout_s = started.elapsed().as_secs_f64();

        let rewards = completions
            .iter()
            .enumerate()
            .map(|(i, completion)| self.reward(completion, self.train[exercises[i / group]].answer));
        let rewards = rewards.collect::<Result<Vec<_>, _>>()?;
        let totals: Vec<f64> = rewards.iter().map(|reward| reward.total()).collect();
        let advantages: Vec<f64> = totals.chunks(group).flat_map(advantages).collect();

        let update_started = Instant::now();
        let sequences = Sequences {
            prompts: prompts.clone(),
            completions: completions.iter().map(|completion| completion.ids.as_slice()).collect(),
        };
        let old_logp = sequences.per_token(|row, t| completions[row].logp[t]);
        let batch = sequences.batch(Array1::from(advantages), Some(old_logp)).with_advantages_for(&self.config.loss);
        let whole = Whole::of(&self.config.loss, batch)?;
        let mut optimizer = std::mem::take(&mut self.optimizer);
        let updated = self.update(&mut optimizer, &sequences, &whole, observer);
        self.optimizer = optimizer;
        let updated = updated?;
        let update_s = update_started.elapsed().as_secs_f64() - updated.observed_s;
        let step_s = started.elapsed().as_secs_f64() - updated.observed_s;
        self.step = step;
        let due = |every: usize| step.is_multiple_of(every) || step == self.config.steps;
        let evaluation = if due(self.config.evaluate_every) { Some(self.evaluation()?) } else { None };
        let mean = |of: fn(&Reward) -> f64| rewards.iter().map(of).sum::<f64>() / rewards.len() as f64;
        let record = Record {
            step,
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            tokens_sha256: digest(&completions),
            loss: updated.loss,
            entropy: updated.metrics.entropy_mean,
            clip_low: updated.metrics.clip_low,
            clip_high: updated.metrics.clip_high,
            clip_region: updated.metrics.clip_region,
            grad_norm: updated.grad_norm,
            reward: mean(|reward| reward.total()),
            reward_answer: mean(|reward| reward.answer),
            reward_format: mean(|reward| reward.format),
            valid_tokens: completions.iter().map(|completion| completion.ids.len()).sum(),
            rollout_s,
            update_s,
            loss_step_s: updated.loss_step_s,
            step_s,
            loss_step_bytes: updated.loss_step_bytes,
            update_bytes: updated.bytes,
            evaluation,
        };
        self.journal.push(record)?;
        if due(self.config.checkpoint_every) {
            self.save()?;
        }
        Ok(self.records().last().expect("just pushed"))
    }

    /// Writes a checkpoint.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses; the one before then stands.
    pub fn save(&self) -> Result<(), TrainError> {
        let path = checkpoint_path(&self.config.out);
        checkpoint::write(&path, self.step, &self.weights, &self.optimizer, &self.config.fingerprint())
    }

    /// Which exercises step `step` is of: each epoch over all of them has an order of its own.
    fn exercises_of(&self, step: usize) -> Vec<usize> {
        drawn(self.train.len(), (step - 1) * self.config.rollout.prompts, self.config.rollout.prompts, self.config.seed)
    }

    fn reward(&self, completion: &Completion, answer: i64) -> Result<Reward, TrainError> {
        let ids = completion.ids.strip_suffix(&[self.tokenizer.end()]).unwrap_or(&completion.ids);
        Ok(Reward::of(&self.tokenizer.decode(ids)?, completion.ended, answer))
    }

    fn evaluation(&self) -> Result<Evaluation, TrainError> {
        let policy = Qwen2::detached(&self.model, &self.weights);
        let (room, end) = (self.config.rollout.max_new_tokens, self.tokenizer.end());
        let mut sum = Reward::default();
        for exercises in self.evaluate.chunks(EVALUATED_AT_ONCE) {
            let prompts: Vec<&[u32]> = exercises.iter().map(|exercise| exercise.prompt.as_slice()).collect();
            let completions = generate(&policy, &prompts, room, end, Sampling::Greedy)?;
            for (completion, exercise) in completions.iter().zip(exercises) {
                let reward = self.reward(completion, exercise.answer)?;
                sum.answer += reward.answer;
                sum.format += reward.format;
            }
        }
        let count = self.evaluate.len() as f64;
        let (answer, format) = (sum.answer / count, sum.format / count);
        Ok(Evaluation { reward: answer + format, answer, format })
    }

    /// New weights from completions and what their losses are told of them.
    fn update(
        &self,
        optimizer: &mut AdamW,
        sequences: &Sequences,
        whole: &Whole,
        observer: &mut dyn Observer,
    ) -> Result<Updated, TrainError> {
        let mut meter = Meter::start();
        let mut updated = Updated::default();
        let (epochs, step) = (self.config.update.ppo_epochs, self.step + 1);
        let policy = Qwen2::recorded(&self.model, &self.weights);
        let counted = |batch: &Batch| batch.mask.iter().filter(|counts| **counts).count() as f64;
        let tokens = counted(whole.batch()).max(1.0);
        for epoch in 0..epochs {
            let mut gradients = Gradients::new();
            let kept = || Summed::of(whole.batch().mask.dim(), (self.model.vocab_size, self.model.hidden_size));
            let mut kept = observer.wants(step, epoch).then(|| meter.apart(kept));
            for rows in self.parts(sequences) {
                let sequences = sequences.rows(rows.clone());
                let (spec, batch) = whole.part(rows.clone(), sequences.width());
                let hidden = sequences.hidden(&policy)?;
                let arm = self.arm.under(&spec)?;
                let work = Graded { arm: &arm, hidden: &hidden, lm_head: policy.lm_head(), batch: &batch };
                let started = Instant::now();
                let (graded, bytes) = meter.most_bytes(|| work.step());
                let graded = graded?;
                updated.loss_step_s += started.elapsed().as_secs_f64();
                updated.loss_step_bytes = updated.loss_step_bytes.max(bytes);
                updated.add(&graded, counted(&batch) / tokens / epochs as f64, 1.0 / epochs as f64);
                if let Some(kept) = &mut kept {
                    let started = Instant::now();
                    meter.apart(|| kept.add(rows, &hidden, &graded))?;
                    updated.observed_s += started.elapsed().as_secs_f64();
                }
                graded.through(&hidden, policy.lm_head(), &mut gradients, &self.weights)?;
            }
            if let Some(sum) = &kept {
                let shown = LossStep { step, epoch, sum, lm_head: policy.lm_head(), batch: whole.batch() };
                let started = Instant::now();
                meter.apart(|| observer.see(&shown))?;
                updated.observed_s += started.elapsed().as_secs_f64();
            }
            let norm = optimizer.step(&self.config.update.optimizer, &self.weights, gradients)?;
            updated.grad_norm += norm / epochs as f64;
        }
        updated.bytes = meter.finish();
        Ok(updated)
    }

    /// The rows of each part of a batch.
    fn parts(&self, sequences: &Sequences) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = sequences.completions.len();
        let part = rows / self.config.update.micro_batches;
        (0..rows).step_by(part).map(move |first| first..first + part)
    }
}

/// What an update came to.
#[derive(Default)]
struct Updated {
    loss: f64,
    metrics: Metrics,
    grad_norm: f64,
    loss_step_s: f64,
    /// What whoever watched took: no part of the update.
    observed_s: f64,
    loss_step_bytes: Option<usize>,
    bytes: Option<usize>,
}

impl Updated {
    fn add(&mut self, graded: &GradedStep, of_tokens: f64, of_losses: f64) {
        self.loss += f64::from(graded.loss) * of_losses;
        let (sum, metrics) = (&mut self.metrics, &graded.metrics);
        sum.entropy_mean += of_tokens * metrics.entropy_mean;
        sum.clip_low += of_tokens * metrics.clip_low;
        sum.clip_high += of_tokens * metrics.clip_high;
        sum.clip_region += of_tokens * metrics.clip_region;
    }
}

/// Weights after the supervised steps: from the cache, or made and cached.
fn warm(
    config: &TrainConfig,
    model: &Qwen2Config,
    weights: Weights,
    train: &[Prompted],
    stop: &AtomicBool,
) -> Result<Weights, TrainError> {
    let Some(WarmStart { steps, batch, learning_rate, cache }) = &config.warm_start else { return Ok(weights) };
    let path = cache.clone().unwrap_or_else(|| config.out.join("warm_start.safetensors"));
    let fingerprint = config.warm_fingerprint();
    if path.exists() {
        return Ok(checkpoint::read(&path, model, &fingerprint)?.weights);
    }
    // −A·logp with A = 1: cross-entropy.
    let cross_entropy =
        LossSpec { objective: Objective::PolicyGradient, old_logp: OldLogp::Current, ..LossSpec::default() };
    let arm = Arm::Kernel(Box::new(GrpoLoss::native(cross_entropy)));
    let settings = AdamWConfig { learning_rate: *learning_rate, ..config.update.optimizer.clone() };
    let mut optimizer = AdamW::default();
    let policy = Qwen2::recorded(model, &weights);
    for step in 0..*steps {
        if stop.load(Ordering::Relaxed) {
            return Err(TrainError::Interrupted {
                done: format!("in the warm start, after {step} of {steps} steps; it begins anew"),
            });
        }
        let exercises = drawn(train.len(), step * batch, *batch, !config.seed);
        let sequences = Sequences {
            prompts: exercises.iter().map(|&i| train[i].prompt.as_slice()).collect(),
            completions: exercises.iter().map(|&i| train[i].solution.as_slice()).collect(),
        };
        let batch = sequences.batch(Array1::ones(exercises.len()), None);
        let hidden = sequences.hidden(&policy)?;
        let graded = Graded { arm: &arm, hidden: &hidden, lm_head: policy.lm_head(), batch: &batch }.step()?;
        let mut gradients = Gradients::new();
        graded.through(&hidden, policy.lm_head(), &mut gradients, &weights)?;
        optimizer.step(&settings, &weights, gradients)?;
    }
    checkpoint::write(&path, 0, &weights, &AdamW::default(), &fingerprint)?;
    Ok(weights)
}

/// `count` of `0..all` from place `first` on, in an order of each round over all of them that is drawn from `seed`.
fn drawn(all: usize, first: usize, count: usize, seed: u64) -> Vec<usize> {
    let round_of = |round: usize| {
        let mut order: Vec<usize> = (0..all).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(round as u64);
        order.shuffle(&mut rng);
        order
    };
    let mut round = first / all;
    let mut order = round_of(round);
    (first..first + count)
        .map(|place| {
            if place / all != round {
                round = place / all;
                order = round_of(round);
            }
            order[place % all]
        })
        .collect()
}

fn digest(completions: &[Completion]) -> String {
    let mut hash = Sha256::new();
    for completion in completions {
        hash.update((completion.ids.len() as u64).to_le_bytes());
        for id in &completion.ids {
            hash.update(id.to_le_bytes());
        }
    }
    hexadecimal(hash)
}

fn checkpoint_path(folder: &Path) -> PathBuf {
    folder.join("checkpoint.safetensors")
}
