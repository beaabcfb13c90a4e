//! The warm start: supervised steps before those of GRPO.

use std::sync::atomic::{AtomicBool, Ordering};

use ndarray::Array1;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::checkpoint;
use super::config::{TrainConfig, WarmStart};
use super::disk::Disk;
use super::loss_step::LossStepInputs;
use super::optimizer::{AdamW, AdamWConfig, WeightGradients};
use super::qwen2::{PolicyWeights, Qwen2};
use super::sequences::PromptedSequences;
use super::task::Prompted;
use super::{GrpoLoss, LossArm, TrainError};
use crate::checkpoint::Qwen2Config;
use assay_core::spec::{LossSpec, Objective, OldLogp};

/// Weights after the supervised steps: from the cache, or made and cached.
pub(super) fn warm(
    disk: &Disk,
    fingerprint: &str,
    config: &TrainConfig,
    model: &Qwen2Config,
    weights: PolicyWeights,
    train: &[Prompted],
    stop: &AtomicBool,
) -> Result<PolicyWeights, TrainError> {
    let Some(WarmStart { steps, batch, learning_rate, cache }) = &config.warm_start else { return Ok(weights) };
    // A warm start that was made before is read: it has a fingerprint of its own, without the settings of GRPO.
    let path = cache.clone().unwrap_or_else(|| config.out.join("warm_start.safetensors"));
    if path.exists() {
        return Ok(checkpoint::read(&path, model, fingerprint)?.weights);
    }
    // −A·logp with A = 1: cross-entropy, of the distribution that is trained afterwards.
    let LossSpec { logits, support, temperature, temperature_divides, .. } = config.loss.clone();
    let cross_entropy = LossSpec {
        objective: Objective::PolicyGradient,
        old_logp: OldLogp::Current,
        logits,
        support,
        temperature,
        temperature_divides,
        ..LossSpec::default()
    };
    let arm = LossArm::Kernel(Box::new(GrpoLoss::native(cross_entropy)));
    let settings = AdamWConfig { learning_rate: *learning_rate, ..config.update.optimizer.clone() };
    let mut optimizer = AdamW::default();
    let policy = Qwen2::recorded(model, &weights);
    // Each step is one loss step of the whole batch, by the kernel that GRPO uses afterwards.
    for step in 0..*steps {
        if stop.load(Ordering::Relaxed) {
            return Err(TrainError::Interrupted {
                done: format!("in the warm start, after {step} of {steps} steps; it begins again"),
            });
        }
        // Another order of the exercises than that of the rollouts: the seed is inverted.
        let exercises = drawn(train.len(), step * batch, *batch, !config.seed);
        let sequences = PromptedSequences {
            prompts: exercises.iter().map(|&i| train[i].prompt.as_slice()).collect(),
            completions: exercises.iter().map(|&i| train[i].solution.as_slice()).collect(),
            counts: vec![true; exercises.len()],
        };
        let batch = sequences.batch(Array1::ones(exercises.len()), None);
        let hidden = sequences.hidden(&policy)?;
        let graded = LossStepInputs { arm: &arm, hidden: &hidden, lm_head: policy.lm_head(), batch: &batch }.step()?;
        let mut gradients = WeightGradients::new();
        graded.through(&hidden, policy.lm_head(), &mut gradients, &weights)?;
        optimizer.step(&settings, &weights, gradients)?;
    }
    checkpoint::write(disk, &path, 0, &weights, &AdamW::default(), fingerprint)?;
    Ok(weights)
}

/// `count` of `0..all` from place `first` on, in an order of each round over all of them that is drawn from `seed`.
pub(super) fn drawn(all: usize, first: usize, count: usize, seed: u64) -> Vec<usize> {
    // Each round has its own stream of the generator, so that a resumed run finds the order of its round without
    // drawing those before.
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
