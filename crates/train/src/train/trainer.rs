//! [`Trainer`]: the GRPO loop, one step at a time.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use candle_core::DType;
use ndarray::{Array1, Array2, s};
use sha2::{Digest, Sha256};

use super::checkpoint;
use super::config::{ModelSource, RolloutDtype, TrainConfig, TrainTask};
use super::disk::Disk;
use super::fingerprint::Fingerprints;
use super::loss_step::{LossStepInputs, LossStepResult, PartSums};
use super::meter::Meter;
use super::metrics::{GreedyEvaluation, Journal, StepRecord};
use super::optimizer::{AdamW, WeightGradients};
use super::qwen2::{PolicyWeights, Qwen2, initial_weights, read_checkpoint};
use super::reward::Reward;
use super::rollout::{Distribution, SampledCompletion, TokenSampling, generate};
use super::scores::{logp_of, off_policy, sampler_gap};
use super::sequences::PromptedSequences;
use super::task::{Exercise, Prompted, read_gsm8k};
use super::tokenizer::Tokenizer;
use super::warm::{drawn, warm};
use super::{LossArm, LossStep, Observer, TrainBatch, TrainError};
use crate::checkpoint::Qwen2Config;
use assay_algebra::parts::SeparableBatch;
use assay_core::memory::{Shortage, expect_host_room};
use assay_core::problem::ProblemError;
use assay_core::problem::{HeadShape, Metrics};
use assay_fixture::hexadecimal;

/// The file that a run goes on from.
pub(super) const CHECKPOINT: &str = "checkpoint.safetensors";

/// The most exercises of an evaluation that go through the policy together.
const EVALUATED_AT_ONCE: usize = 64;

/// A training run between two steps.
pub struct Trainer {
    disk: Disk,
    fingerprint: String,
    config: TrainConfig,
    arm: LossArm,
    tokenizer: Tokenizer,
    model: Qwen2Config,
    weights: PolicyWeights,
    /// The weights of the policy before the first step, if the loss has a KL term.
    reference: Option<PolicyWeights>,
    optimizer: AdamW,
    step: usize,
    train: Vec<Prompted>,
    evaluate: Vec<Prompted>,
    journal: Journal,
}

/// The completions of a step.
#[derive(Default)]
struct RolledOut {
    /// The exercise of each completion.
    exercises: Vec<usize>,
    completions: Vec<SampledCompletion>,
    rewards: Vec<Reward>,
    /// The rewards of all that were sampled, those that dynamic sampling left out too.
    sampled: Vec<Reward>,
}

impl RolledOut {
    fn totals(&self) -> Vec<f64> {
        self.rewards.iter().map(|reward| reward.total()).collect()
    }
}

impl Trainer {
    /// Starts a run from the checkpoint in its folder, or from its beginning, with a warm start if the settings have one.
    ///
    /// # Errors
    /// [`TrainError`] naming the setting or file that is wrong; [`TrainError::Interrupted`] where `stop` was set before the
    /// warm start was done.
    pub fn start(disk: Disk, config: TrainConfig, arm: LossArm, stop: &AtomicBool) -> Result<Self, TrainError> {
        config.check()?;
        let (model, weights, own) = match &config.model {
            ModelSource::Init(model) => {
                expect_trainable(model, &config)?;
                (model.clone(), initial_weights(model, config.seed)?, Tokenizer::Bytes)
            }
            ModelSource::Path(path) => read_checkpoint(path)?,
        };
        let tokenizer = match &config.tokenizer {
            Some(file) => Tokenizer::read(&file.path, &file.end)?,
            None => own,
        };
        tokenizer.expect_within(model.vocab_size)?;
        let (train, evaluate) = match &config.task {
            TrainTask::Arithmetic(task) => task.exercises(config.seed)?,
            TrainTask::Gsm8k(files) => (read_gsm8k(&files.train)?, read_gsm8k(&files.evaluate)?),
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
        // The sampler can never draw an id outside the support of the loss: such a task could not be learnt.
        let distribution = Distribution::from_spec(&config.loss);
        let taught = || train.iter().flat_map(|exercise| &exercise.solution);
        if let Some(id) = [tokenizer.end()].iter().chain(taught()).find(|id| !distribution.has(**id)) {
            let expected = "a support that has the end of a completion and every token of the solutions";
            return Err(TrainError::setting("loss.support", format!("one without id {id}"), expected));
        }
        // The kernel is asked for a micro-batch of full length now, and not after the first completions have been
        // drawn.
        arm.expect_supported(HeadShape {
            batch: config.rollout.prompts * config.rollout.group / config.update.micro_batches,
            tokens: config.rollout.max_new_tokens,
            hidden: model.hidden_size,
            vocab: model.vocab_size,
        })?;
        let Fingerprints { run: fingerprint, warm_start } = Fingerprints::from_config(&config)?;
        // A checkpoint in the folder is resumed if it was written under the same fingerprint; else the run begins.
        let path = disk.folder().join(CHECKPOINT);
        let (step, weights, optimizer) = if path.exists() {
            let found = checkpoint::read(&path, &model, &fingerprint)?;
            (found.step, found.weights, found.optimizer)
        } else {
            (0, warm(&disk, &warm_start, &config, &model, weights, &train, stop)?, AdamW::default())
        };
        // Only a KL penalty needs a reference policy, which is a copy of all weights.
        let reference = config
            .loss
            .kl
            .is_some()
            .then(|| reference_policy(&disk, &fingerprint, &model, &weights, step))
            .transpose()?;
        let journal = Journal::open(&disk, step)?;
        Ok(Self {
            disk,
            fingerprint,
            config,
            arm,
            tokenizer,
            model,
            weights,
            reference,
            optimizer,
            step,
            train,
            evaluate,
            journal,
        })
    }

    /// Returns the number of steps that it has made.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// Whether all steps have been made.
    pub fn finished(&self) -> bool {
        self.step >= self.config.steps
    }

    /// Returns the records of all steps, the curve of the run.
    pub fn records(&self) -> &[StepRecord] {
        self.journal.records()
    }

    /// Makes a step, writes it down, and a checkpoint where one is due. `observer` is shown the losses that it wants.
    ///
    /// # Errors
    /// [`TrainError`] where a loss fails, the ratio of the first update is not 1, training diverges, or a file cannot be
    /// written; the last checkpoint stands.
    pub fn advance(&mut self, observer: &mut dyn Observer) -> Result<&StepRecord, TrainError> {
        // The first step evaluates the policy that it starts from, so that the curve has a beginning.
        let step = self.step + 1;
        let before = if step == 1 { Some(self.evaluation()?) } else { None };
        let started = Instant::now();
        let rolled_out = self.roll_out(step)?;
        let rollout_s = started.elapsed().as_secs_f64();

        // Score: log-probabilities before the update and under the reference policy, and advantages from the rewards.
        let score_started = Instant::now();
        let group = self.config.rollout.group;
        let RolledOut { exercises, completions, sampled, .. } = &rolled_out;
        let truncated = completions.iter().filter(|completion| !completion.ended).count();
        let sequences = PromptedSequences {
            prompts: exercises.iter().map(|&i| self.train[i].prompt.as_slice()).collect(),
            completions: completions.iter().map(|completion| completion.ids.as_slice()).collect(),
            counts: completions.iter().map(|one| one.ended || !self.config.rollout.mask_truncated).collect(),
        };
        let totals = rolled_out.totals();
        let counts = sequences.completions.iter().zip(&sequences.counts);
        let tokens: Vec<usize> = counts.map(|(ids, counts)| if *counts { ids.len() } else { 0 }).collect();
        let advantages = self.config.advantages.advantages(&totals, &tokens, group);
        let (batch, logp_gap) = self.scored(step, &sequences, completions, advantages)?;
        let score_s = score_started.elapsed().as_secs_f64();

        // Update: the batch is cut into parts whose losses and gradients add up to those of the whole.
        let update_started = Instant::now();
        let whole = SeparableBatch::new(&self.config.loss, batch).map_err(ProblemError::from)?;
        // The optimizer is taken out while the update borrows the trainer, and put back even if the update fails.
        let mut optimizer = std::mem::take(&mut self.optimizer);
        let updated = self.update(&mut optimizer, &sequences, &whole, observer);
        self.optimizer = optimizer;
        let updated = updated?;
        let update_s = update_started.elapsed().as_secs_f64() - updated.observed_s;
        let step_s = started.elapsed().as_secs_f64() - updated.observed_s;
        self.step = step;
        let due = |every: usize| step.is_multiple_of(every) || step == self.config.steps;
        let evaluation = if due(self.config.evaluate_every) { Some(self.evaluation()?) } else { None };
        let mean = |of: fn(&Reward) -> f64| sampled.iter().map(of).sum::<f64>() / sampled.len() as f64;
        let record = StepRecord {
            step,
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            tokens_sha256: digest(completions),
            loss: updated.loss,
            entropy: updated.metrics.entropy_mean,
            clip_low: updated.metrics.clip_low,
            clip_high: updated.metrics.clip_high,
            clip_region: updated.metrics.clip_region,
            kl: updated.metrics.kl_mean,
            grad_norm: updated.grad_norm,
            reward: mean(|reward| reward.total()),
            reward_answer: mean(|reward| reward.answer),
            reward_format: mean(|reward| reward.format),
            completions: sampled.len(),
            even_groups: totals.chunks(group).filter(|group| is_even(group)).count(),
            truncated,
            logp_gap,
            valid_tokens: whole.batch().mask.iter().filter(|counts| **counts).count(),
            rollout_s,
            score_s,
            update_s,
            loss_step_s: updated.loss_step_s,
            step_s,
            loss_step_bytes: updated.loss_step_bytes,
            update_bytes: updated.bytes,
            before,
            evaluation,
        };
        // The curve is written before the checkpoint: a resumed run then misses no step.
        self.journal.push(record)?;
        if due(self.config.checkpoint_every) {
            self.save()?;
        }
        Ok(self.records().last().expect("just pushed"))
    }

    /// Writes a checkpoint, after the steps up to it are sure to be written down.
    ///
    /// # Errors
    /// [`TrainError`] where the system refuses; the one before then stands.
    pub fn save(&self) -> Result<(), TrainError> {
        self.journal.sync()?;
        let path = self.disk.folder().join(CHECKPOINT);
        checkpoint::write(&self.disk, &path, self.step, &self.weights, &self.optimizer, &self.fingerprint)
    }

    /// The completions of step `step`, and what they are worth. Exercises and random numbers are functions of the seed, the
    /// step and the attempt; each epoch over all exercises has an order of its own.
    fn roll_out(&self, step: usize) -> Result<RolledOut, TrainError> {
        // The sampler may have rounded weights, as an inference engine in bf16 has.
        let policy = Qwen2::detached(&self.model, &self.weights);
        let policy = match self.config.rollout.dtype {
            RolloutDtype::F32 => policy,
            RolloutDtype::Bf16 => policy.rounded(DType::BF16)?,
            RolloutDtype::F16 => policy.rounded(DType::F16)?,
        };
        let (wanted, group, attempts) =
            (self.config.rollout.prompts, self.config.rollout.group, self.config.rollout.attempts());
        let (mut chosen, mut even) = (RolledOut::default(), RolledOut::default());
        // Dynamic sampling draws other exercises until enough groups have rewards that differ.
        for attempt in 1..=attempts {
            let number = (step - 1) * attempts + attempt;
            let exercises = drawn(self.train.len(), (number - 1) * wanted, wanted, self.config.seed);
            let exercises: Vec<usize> = exercises.into_iter().flat_map(|i| vec![i; group]).collect();
            let prompts: Vec<&[u32]> = exercises.iter().map(|&i| self.train[i].prompt.as_slice()).collect();
            // The seed is a function of run, draw and attempt: a resumed run samples the same tokens.
            let draw = self.config.rollout.draw.rotate_right(8);
            let seed = self.config.seed ^ draw ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (room, end) = (self.config.rollout.max_new_tokens, self.tokenizer.end());
            let distribution = Distribution::from_spec(&self.config.loss);
            let completions = generate(&policy, &prompts, room, end, &distribution, TokenSampling::Random { seed })?;
            let rewards = completions
                .iter()
                .zip(&exercises)
                .map(|(completion, &i)| self.reward(completion, self.train[i].answer));
            let rewards = rewards.collect::<Result<Vec<_>, _>>()?;
            chosen.sampled.extend(&rewards);
            for first in (0..exercises.len()).step_by(group) {
                let rows = first..first + group;
                let totals: Vec<f64> = rewards[rows.clone()].iter().map(|reward| reward.total()).collect();
                let into = if attempts > 1 && is_even(&totals) { &mut even } else { &mut chosen };
                into.exercises.extend(&exercises[rows.clone()]);
                into.completions.extend_from_slice(&completions[rows.clone()]);
                into.rewards.extend(&rewards[rows]);
            }
            if chosen.exercises.len() >= wanted * group {
                break;
            }
        }
        // If too few groups differ, the first of the others fill the batch.
        chosen.exercises.extend(even.exercises);
        chosen.completions.extend(even.completions);
        chosen.rewards.extend(even.rewards);
        let size = wanted * group;
        chosen.exercises.truncate(size);
        chosen.completions.truncate(size);
        chosen.rewards.truncate(size);
        Ok(chosen)
    }

    /// Returns the batch that the loss is given, and the distance of the sampler's log-probabilities from those before the update:
    /// a part at a time, as the update will be.
    fn scored(
        &self,
        step: usize,
        sequences: &PromptedSequences,
        completions: &[SampledCompletion],
        advantages: Vec<f64>,
    ) -> Result<(TrainBatch, f64), TrainError> {
        let scored = |weights: &PolicyWeights| -> Result<Array2<f64>, TrainError> {
            let policy = Qwen2::detached(&self.model, weights);
            let mut all = Array2::zeros((completions.len(), sequences.width()));
            for rows in self.parts(sequences) {
                let part = logp_of(&self.config.loss, &policy, &sequences.rows(rows.clone()))?;
                all.slice_mut(s![rows, ..part.ncols()]).assign(&part);
            }
            Ok(all)
        };
        // The old log-probabilities are those of the unrounded weights, so that the ratio of the first update is 1.
        let old_logp = scored(&self.weights)?;
        let rollout_logp = sequences.per_token(|row, t| completions[row].logp[t]);
        let mut batch = sequences.batch(Array1::from(advantages), None).with_advantages_for(&self.config.loss);
        // With f32 rollouts sampler and loss have the same weights, and only rounding may separate them.
        let same_weights = self.config.rollout.dtype == RolloutDtype::F32;
        let gap = sampler_gap(step, &sequences.places(), [&old_logp, &rollout_logp], same_weights)?;
        batch.ref_logp = self.reference.as_ref().map(scored).transpose()?;
        batch.old_logp = Some(old_logp);
        batch.extra.rollout_logp = Some(rollout_logp);
        Ok((batch, gap))
    }

    fn reward(&self, completion: &SampledCompletion, answer: i64) -> Result<Reward, TrainError> {
        let ids = completion.ids.strip_suffix(&[self.tokenizer.end()]).unwrap_or(&completion.ids);
        Ok(Reward::from_text(&self.tokenizer.decode(ids)?, completion.ended, answer))
    }

    fn evaluation(&self) -> Result<GreedyEvaluation, TrainError> {
        let policy = Qwen2::detached(&self.model, &self.weights);
        let (room, end) = (self.config.rollout.max_new_tokens, self.tokenizer.end());
        let distribution = Distribution::from_spec(&self.config.loss);
        let mut sum = Reward::default();
        // Greedy completions make the evaluation one of the weights alone: no draw has a part in it.
        for exercises in self.evaluate.chunks(EVALUATED_AT_ONCE) {
            let prompts: Vec<&[u32]> = exercises.iter().map(|exercise| exercise.prompt.as_slice()).collect();
            let completions = generate(&policy, &prompts, room, end, &distribution, TokenSampling::Greedy)?;
            for (completion, exercise) in completions.iter().zip(exercises) {
                let reward = self.reward(completion, exercise.answer)?;
                sum.answer += reward.answer;
                sum.format += reward.format;
            }
        }
        let count = self.evaluate.len() as f64;
        let (answer, format) = (sum.answer / count, sum.format / count);
        Ok(GreedyEvaluation { reward: answer + format, answer, format })
    }

    /// New weights from completions and what their losses are told of them.
    fn update(
        &self,
        optimizer: &mut AdamW,
        sequences: &PromptedSequences,
        whole: &SeparableBatch,
        observer: &mut dyn Observer,
    ) -> Result<Updated, TrainError> {
        let mut meter = Meter::start();
        let mut updated = Updated::default();
        let (epochs, step) = (self.config.update.ppo_epochs, self.step + 1);
        let policy = Qwen2::recorded(&self.model, &self.weights);
        let counted = |batch: &TrainBatch| batch.mask.iter().filter(|counts| **counts).count() as f64;
        let tokens = counted(whole.batch()).max(1.0);
        for epoch in 0..epochs {
            // An epoch adds up the gradients of its parts and makes one step of the optimizer.
            let mut gradients = WeightGradients::new();
            let kept = || PartSums::zeros(whole.batch().mask.dim(), (self.model.vocab_size, self.model.hidden_size));
            let mut kept = observer.wants(step, epoch).then(|| meter.apart(kept));
            for (part, rows) in self.parts(sequences).enumerate() {
                let sequences = sequences.rows(rows.clone());
                let (spec, batch) = whole.part(rows.clone(), sequences.width());
                // Forward through the layers, recorded for autograd; the loss step then starts from the hidden states.
                let hidden = sequences.hidden(&policy)?;
                let arm = self.arm.under(&spec)?;
                let work = LossStepInputs { arm: &arm, hidden: &hidden, lm_head: policy.lm_head(), batch: &batch };
                let started = Instant::now();
                let (graded, bytes) = meter.most_bytes(|| work.step());
                let graded = graded?;
                updated.loss_step_s += started.elapsed().as_secs_f64();
                updated.loss_step_bytes = updated.loss_step_bytes.max(bytes);
                // In the first epoch nothing has changed since the rollout: each token must have its old log-probability.
                if epoch == 0 {
                    let Some(logp) = &graded.logp else {
                        return Err(TrainError::NoLogp);
                    };
                    let states = (&hidden, policy.lm_head());
                    if let Some(found) = meter.apart(|| off_policy((step, part), &spec, states, &batch, logp))? {
                        observer.off_policy(found)?;
                    }
                }
                updated.add(&graded, counted(&batch) / tokens / epochs as f64, 1.0 / epochs as f64);
                if let Some(kept) = &mut kept {
                    let started = Instant::now();
                    meter.apart(|| kept.add(rows, &hidden, &graded))?;
                    updated.observed_s += started.elapsed().as_secs_f64();
                }
                // Backward through the layers: autograd continues from the gradient of the hidden states.
                graded.through(&hidden, policy.lm_head(), &mut gradients, &self.weights)?;
            }
            if let Some(sum) = &kept {
                let shown = LossStep { step, epoch, sum, lm_head: policy.lm_head(), batch: whole.batch() };
                let started = Instant::now();
                meter.apart(|| observer.see(&shown))?;
                updated.observed_s += started.elapsed().as_secs_f64();
            }
            // The norm is logged before clipping, as the mean over epochs.
            let norm = optimizer.step(&self.config.update.optimizer, &self.weights, gradients)?;
            updated.grad_norm += norm / epochs as f64;
        }
        updated.bytes = meter.finish();
        Ok(updated)
    }

    /// The rows of each part of a batch.
    fn parts(&self, sequences: &PromptedSequences) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = sequences.completions.len();
        let part = rows / self.config.update.micro_batches;
        (0..rows).step_by(part).map(move |first| first..first + part)
    }
}

/// The results of an update.
#[derive(Default)]
struct Updated {
    loss: f64,
    metrics: Metrics,
    grad_norm: f64,
    loss_step_s: f64,
    /// The time that the observer took, s, which is no part of the update.
    observed_s: f64,
    loss_step_bytes: Option<usize>,
    bytes: Option<usize>,
}

impl Updated {
    fn add(&mut self, graded: &LossStepResult, of_tokens: f64, of_losses: f64) {
        self.loss += f64::from(graded.loss) * of_losses;
        let (sum, metrics) = (&mut self.metrics, &graded.metrics);
        if let Some(kl) = metrics.kl_mean {
            *sum.kl_mean.get_or_insert(0.0) += of_tokens * kl;
        }
        sum.entropy_mean += of_tokens * metrics.entropy_mean;
        sum.clip_low += of_tokens * metrics.clip_low;
        sum.clip_high += of_tokens * metrics.clip_high;
        sum.clip_region += of_tokens * metrics.clip_region;
    }
}

fn digest(completions: &[SampledCompletion]) -> String {
    let mut hash = Sha256::new();
    for completion in completions {
        hash.update((completion.ids.len() as u64).to_le_bytes());
        for id in &completion.ids {
            hash.update(id.to_le_bytes());
        }
    }
    hexadecimal(hash)
}

/// Checks that there is memory to train a policy of the extents in `model.init`.
fn expect_trainable(model: &Qwen2Config, config: &TrainConfig) -> Result<(), TrainError> {
    // The weights, their gradients and two moments of each, and with a KL term the weights of the reference policy.
    let arrays = 4 + usize::from(config.loss.kl.is_some());
    let needed = model.weight_bytes().saturating_mul(arrays);
    expect_host_room(String::new, needed).map_err(|Shortage { needed, available, .. }| {
        let expected = format!(
            "a model that can be trained here: its weights, gradients and moments need {needed} bytes, {available} are available"
        );
        TrainError::setting("model.init", model.extents(), &expected)
    })
}

/// Whether a group has nothing to tell its completions apart by.
fn is_even(rewards: &[f64]) -> bool {
    rewards.iter().all(|reward| *reward == rewards[0])
}

/// The policy as it was before the first step: written down then, and read where the run goes on.
fn reference_policy(
    disk: &Disk,
    fingerprint: &str,
    model: &Qwen2Config,
    weights: &PolicyWeights,
    step: usize,
) -> Result<PolicyWeights, TrainError> {
    let path = disk.folder().join("reference.safetensors");
    if step == 0 {
        checkpoint::write(disk, &path, 0, weights, &AdamW::default(), fingerprint)?;
    }
    Ok(checkpoint::read(&path, model, fingerprint)?.weights)
}
