//! An A/B run: one training run by candle's own operations and one by a kernel.
//!
//! Two things are decided. The losses of judged steps, the parts of a batch summed, are compared with the f64 reference on that
//! step's own hidden states, and a first update's ratio must be 1: that reveals a wrong loss. The rewards of the second half of
//! the steps are compared with the baseline's, within the baseline's own spread (`learning`): that reveals a run that does not
//! learn. [`AbControl`]s are arms that are wrong on purpose; the gates that reject each of them show what a verdict is worth.

mod controls;
mod learning;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use ndarray::arr0;
use serde::{Deserialize, Serialize};

pub use controls::AbControl;

use super::complete::{RunProgress, TrainedRun, complete_by};
use super::disk::Disk;
use super::metrics::{GreedyEvaluation, StepRecord};
use super::trainer::CHECKPOINT;
use super::{LossArm, LossStep, Observer, OffPolicy, RunSummary, TrainConfig, TrainError};
use assay_core::problem::{Dtype, HeadCandidate, HeadGradient};
use assay_core::spec::LossSpec;
use assay_judge::judge::{self, JudgeError};
use assay_judge::trial::JudgedProblem;
use assay_judge::{gate::Output, tolerance::Limits};
use assay_schema::ab::{self as schema, AbComparison, AbVerdict, TrainingStep};

/// The class whose limits candle's own operations are held to: that of any kernel not made here. They sum a row in f32.
const BASELINE_CLASS: &str = "external-lm-head";

/// The outputs of a loss step that are judged.
const JUDGED: [Output; 3] = [Output::Loss, Output::Dhidden, Output::DlmHead];

/// The number of seeds of an A/B run, and the steps that are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbPlan {
    /// The number of pairs of runs, of consecutive seeds from the settings' own on.
    pub seeds: u64,
    /// The losses of every so many steps are judged, from step 1 on; `None`: of none.
    pub judge_every: Option<u64>,
}

/// A contestant of an A/B run: an arm, the redrawn baseline or a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    /// One of the two arms.
    Side(AbSide),
    /// The baseline, with other random numbers in its rollouts: how far two runs of one seed come apart.
    Redrawn,
    /// An arm that is wrong on purpose.
    Control(AbControl),
}

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Contestant::Side(side) => side.name(),
            Contestant::Redrawn => "redrawn",
            Contestant::Control(control) => control.name(),
        }
    }
}

/// One of the two arms of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AbSide {
    /// The loss by candle's own operations.
    Baseline,
    /// The loss by the kernel under test.
    Kernel,
}

impl AbSide {
    /// Both sides, in the order of `AbComparison::arms`.
    pub const BOTH: [AbSide; 2] = [AbSide::Baseline, AbSide::Kernel];

    /// Returns its name in tables, folders and JSON.
    pub fn name(self) -> &'static str {
        match self {
            AbSide::Baseline => "baseline",
            AbSide::Kernel => "kernel",
        }
    }
}

/// One arm of one seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AbRun {
    /// The run in a few numbers.
    pub summary: RunSummary,
    /// The verdicts on its loss steps against the reference.
    pub judged: JudgedLossSteps,
    /// The record of each step.
    pub records: Vec<StepRecord>,
}

/// The errors of the judged loss steps of a run against the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JudgedLossSteps {
    /// The arithmetic class whose limits apply.
    pub class: String,
    /// The number of loss steps that were judged.
    pub steps: usize,
    /// The worst comparison of each output.
    pub outputs: BTreeMap<&'static str, WorstError>,
    /// The first updates whose ratio was not 1, of all steps.
    pub off_policy: Vec<String>,
}

/// The comparison of one output that went furthest beyond its limit, or came closest to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorstError {
    /// The largest error, as a multiple of its limit.
    pub share: f64,
    /// Whether every gate was passed.
    pub passed: bool,
    /// The step, epoch and gate of that error, in words.
    pub at: String,
}

/// Both arms of one seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AbPair {
    /// The seed of parameters, data and sampling.
    pub seed: u64,
    /// The runs of both arms, in the order of [`AbSide::BOTH`].
    pub runs: [AbRun; 2],
    /// The run of the baseline, [redrawn](Contestant::Redrawn).
    pub redrawn: Option<AbRun>,
}

/// Makes the runs of `contestant` under `plan`, one a seed, each in a folder of its own within that of `config`. Each starts
/// from the beginning; only the warm start is kept. A PJRT implementation uses `plugin`; `stop` ends the run in good order; `progress` hears of
/// every step.
///
/// # Errors
/// As of [`complete`](super::complete()); [`TrainError::Judge`] where a step cannot be judged.
pub fn runs(
    config: &TrainConfig,
    plan: AbPlan,
    contestant: Contestant,
    plugin: Option<&Path>,
    stop: &AtomicBool,
    progress: &mut (dyn FnMut(RunProgress) + Send),
) -> Result<Vec<AbRun>, TrainError> {
    // The folders are by seed and contestant, so that runs of one seed share a warm start and nothing else.
    let mut run = |seed: u64| {
        let folder = config.out.join(format!("seed-{seed}"));
        let mut settings = config.clone();
        settings.seed = seed;
        settings.out = folder.join(contestant.name());
        settings.kernel.enabled = ![Contestant::Side(AbSide::Baseline), Contestant::Redrawn].contains(&contestant);
        // Another number of the draw has other random numbers in its rollouts, with the same weights and exercises.
        if contestant == Contestant::Redrawn {
            settings.rollout.draw = settings.rollout.draw.wrapping_add(1);
        }
        if let Some(warm_start) = &mut settings.warm_start {
            // The first run of a seed makes the warm start, and all others of it begin from the same weights.
            warm_start.cache.get_or_insert_with(|| folder.join("warm_start.safetensors"));
        }
        // The run begins again, with no checkpoint of an earlier one; only the warm start is shared.
        let disk = Disk::open(&settings.out)?;
        disk.forget(&settings.out.join(CHECKPOINT))?;
        let (settings, arm) = match contestant {
            Contestant::Side(_) | Contestant::Redrawn => (settings.clone(), LossArm::from_config(&settings, plugin)?),
            Contestant::Control(control) => {
                let settings = control.settings(&settings);
                let arm = control.arm(&settings.loss);
                (settings, arm)
            }
        };
        let class = match &arm {
            LossArm::Kernel(grpo) => grpo.class_on_hidden(),
            LossArm::Candle(_) => BASELINE_CLASS.into(),
        };
        let judged = JudgedLossSteps { class, steps: 0, outputs: BTreeMap::new(), off_policy: Vec::new() };
        // Every contestant is judged by the loss that was asked for, whatever its arm makes of it.
        let mut judge = LossStepJudge { loss: config.loss.clone(), every: plan.judge_every, judged };
        let TrainedRun { trainer, summary } = complete_by(disk, &settings, arm, stop, &mut judge, progress)?;
        Ok(AbRun { summary, judged: judge.judged, records: trainer.records().to_vec() })
    };
    // After the largest seed comes 0.
    (0..plan.seeds).map(|i| run(config.seed.wrapping_add(i))).collect()
}

/// The runs of both arms by their seeds, the first of which is that of `config`, and the baseline's redrawn where there are any.
pub fn pairs(config: &TrainConfig, baseline: &[AbRun], redrawn: &[AbRun], kernel: &[AbRun]) -> Vec<AbPair> {
    let runs = baseline.iter().zip(kernel).map(|(baseline, kernel)| [baseline.clone(), kernel.clone()]);
    let pair = |(i, runs): (usize, _)| {
        let seed = config.seed.wrapping_add(i as u64);
        AbPair { seed, runs, redrawn: redrawn.get(i).cloned() }
    };
    runs.enumerate().map(pair).collect()
}

/// Holds the whole batch's loss of every so many steps against the reference, in each of their epochs.
struct LossStepJudge {
    loss: LossSpec,
    every: Option<u64>,
    judged: JudgedLossSteps,
}

impl Observer for LossStepJudge {
    fn wants(&self, step: usize, _: usize) -> bool {
        self.every.is_some_and(|every| (step as u64 - 1).is_multiple_of(every))
    }

    fn see(&mut self, step: &LossStep) -> Result<(), TrainError> {
        self.judged.add(&self.loss, step)
    }

    fn off_policy(&mut self, found: OffPolicy) -> Result<(), TrainError> {
        self.judged.off_policy.push(found.to_string());
        Ok(())
    }
}

/// Describes the comparison that went furthest beyond its limit.
fn words(verdict: &judge::Verdict) -> String {
    match (verdict.tally.nonfinite, verdict.worst()) {
        (Some((at, value)), _) => format!("{value} at {at}"),
        (None, None) => "finite where the reference is not".into(),
        (None, Some(worst)) => {
            format!("at {} expected {:e}, actual {:e}, limit {:e}", worst.at, worst.expected, worst.actual, worst.limit)
        }
    }
}

impl JudgedLossSteps {
    fn add(&mut self, loss: &LossSpec, step: &LossStep) -> Result<(), TrainError> {
        // The reference evaluates the batch on the hidden states that this arm had: the arms may have drifted apart.
        let problem = step.problem()?;
        let candidate = HeadCandidate {
            loss: Some(arr0(step.loss()).into()),
            gradient: HeadGradient {
                dhidden: step.dhidden().clone().into(),
                dlm_head: step.dlm_head().clone().into(),
                dlogits_dtype: Dtype::F32,
            },
            // A loss step returns none of these.
            logp: None,
            logp_of_others: None,
            entropy: None,
            token_loss: None,
            metrics: None,
        };
        let limits = Limits::for_class(&self.class).map_err(JudgeError::from)?;
        let verdicts = JudgedProblem::new(loss, &problem)?.judge(candidate, &limits)?.verdicts;
        // Each output keeps its largest error over its limit, with its place.
        self.steps += 1;
        for verdict in verdicts.iter().filter(|verdict| JUDGED.contains(&verdict.gate.output)) {
            let worst = self.outputs.entry(verdict.gate.output.name()).or_insert_with(|| WorstError {
                share: 0.0,
                passed: true,
                at: String::new(),
            });
            worst.passed &= verdict.passed();
            let share = verdict.tally.badness();
            if share > worst.share {
                worst.share = share;
                worst.at =
                    format!("step {}, epoch {}, {}: {}", step.step, step.epoch + 1, verdict.gate, words(verdict));
            }
        }
        Ok(())
    }
}

impl AbPair {
    /// Counts the steps, from the first on, in which both arms sampled the same tokens.
    pub fn equal_steps(&self) -> usize {
        let [baseline, kernel] = &self.runs;
        // Once the tokens differ the batches are different ones, and their losses cannot be compared.
        let both = baseline.records.iter().zip(&kernel.records);
        both.take_while(|(a, b)| a.tokens_sha256 == b.tokens_sha256).count()
    }

    /// The largest difference of what `of` says of these steps.
    fn largest_difference(&self, of: fn(&StepRecord) -> f64) -> f64 {
        let [baseline, kernel] = &self.runs;
        let both = baseline.records.iter().zip(&kernel.records).take(self.equal_steps());
        both.map(|(a, b)| (of(a) - of(b)).abs()).fold(0.0, f64::max)
    }
}

/// Compares `pairs` of runs, which were made under `config`, and decides every gate.
///
/// Loss and gradients of the kernel's judged steps have to be within their derived limits, the ratios of its first updates 1, and
/// its rewards those of the baseline within the baseline's spread, where there is more than one seed. `controls` have to fail.
/// The rest informs.
pub fn comparison(config: &TrainConfig, pairs: &[AbPair], controls: &[(AbControl, Vec<AbPair>)]) -> AbComparison {
    let implementation = |side: AbSide| match side {
        AbSide::Baseline => "candle's log_softmax, gather and autograd".to_string(),
        AbSide::Kernel => config.kernel.implementation.clone(),
    };
    let curve = |run: &AbRun| run.records.iter().map(step_of).collect();
    let arm = |side: AbSide| schema::AbArm {
        name: side.name().into(),
        implementation: implementation(side),
        runs: pairs
            .iter()
            .map(|pair| schema::TrainingRun { seed: pair.seed, steps: curve(&pair.runs[side as usize]) })
            .collect(),
    };
    let controls: Vec<schema::WrongKernelArm> = controls.iter().map(|(control, pairs)| told(*control, pairs)).collect();
    let verdicts = verdicts(pairs);
    // A verdict that decides nothing is no failure; a control that nothing fails is one.
    let pass = verdicts.iter().all(|verdict| verdict.pass != Some(false));
    let told = controls.iter().all(|control| !control.failed.is_empty());
    AbComparison { pass: pass && told, arms: AbSide::BOTH.map(arm), verdicts, controls }
}

/// Decides which gates a control fails, and how its rewards compare with the baseline's.
fn told(control: AbControl, pairs: &[AbPair]) -> schema::WrongKernelArm {
    let verdicts = verdicts(pairs);
    let failed = verdicts.iter().filter(|verdict| verdict.pass == Some(false)).map(|verdict| verdict.what.clone());
    schema::WrongKernelArm { name: control.name().into(), failed: failed.collect(), learning: learning::verdict(pairs) }
}

fn step_of(record: &StepRecord) -> TrainingStep {
    TrainingStep {
        step: record.step as u64,
        loss: record.loss,
        reward: record.reward,
        entropy: record.entropy,
        grad_norm: record.grad_norm,
        loss_step_s: record.loss_step_s,
        update_s: record.update_s,
        loss_step_bytes: record.loss_step_bytes.map_or(f64::NAN, |bytes| bytes as f64),
    }
}

/// A measurement of a step, and its name in tables.
type StepMeasurement = (&'static str, fn(&StepRecord) -> f64);

/// Agreement, which is decided, and cost, which is shown.
fn verdicts(pairs: &[AbPair]) -> Vec<AbVerdict> {
    // Without a judged step there is no verdict on losses, and not one that passes.
    let is_judged = pairs.iter().any(|pair| pair.runs[AbSide::Kernel as usize].judged.steps > 0);
    let judged = JUDGED.iter().filter(|_| is_judged);
    let mut all: Vec<AbVerdict> = judged.map(|output| within_limits(pairs, output.name())).collect();
    let informed = |what: &str, difference: f64| AbVerdict {
        what: what.into(),
        baseline: None,
        kernel: None,
        difference: Some(difference),
        limit: None,
        pass: None,
    };
    // Agreement is shown over the steps that all seeds have in common.
    let least = pairs.iter().map(AbPair::equal_steps).min().unwrap_or(0);
    let largest = |of: fn(&StepRecord) -> f64| pairs.iter().map(|pair| pair.largest_difference(of)).fold(0.0, f64::max);
    all.push(informed("steps from the first on with the same tokens in both arms", least as f64));
    all.push(informed("loss of these steps, largest difference", largest(|record| record.loss)));
    all.push(informed("gradient norm of these steps, largest difference", largest(|record| record.grad_norm)));
    all.push(first_updates(pairs));
    all.push(learning::verdict(pairs));
    let shown = |what: &str, of: fn(&AbRun) -> f64| {
        let [baseline, kernel] =
            [0, 1].map(|side| pairs.iter().map(|pair| of(&pair.runs[side])).sum::<f64>() / pairs.len() as f64);
        let (difference, baseline, kernel) = (Some(kernel - baseline), Some(baseline), Some(kernel));
        AbVerdict { what: what.into(), baseline, kernel, difference, limit: None, pass: None }
    };
    all.push(shown("evaluation reward at step 0, mean of the seeds", |run| evaluated(run.summary.before)));
    all.push(shown("final evaluation reward, mean of the seeds", |run| evaluated(run.summary.evaluation)));
    all.push(shown("final entropy, mean of the seeds", |run| run.summary.entropy));
    // Costs are medians, so that a step during which the machine was busy does not count.
    let costs: [StepMeasurement; 5] = [
        ("loss step, s, median; baseline / kernel", |record| record.loss_step_s),
        ("update, s, median; baseline / kernel", |record| record.update_s),
        ("whole step, s, median; baseline / kernel", |record| record.step_s),
        ("loss step, bytes, median; baseline / kernel", |record| bytes(record.loss_step_bytes)),
        ("update, bytes, median; baseline / kernel", |record| bytes(record.update_bytes)),
    ];
    all.extend(costs.map(|(what, of)| {
        let [baseline, kernel] = AbSide::BOTH
            .map(|side| median(pairs.iter().flat_map(|pair| &pair.runs[side as usize].records).map(of).collect()));
        let difference = Some(baseline / kernel);
        let (baseline, kernel) = (Some(baseline), Some(kernel));
        AbVerdict { what: what.into(), baseline, kernel, difference, limit: None, pass: None }
    }));
    all
}

fn bytes(counted: Option<usize>) -> f64 {
    counted.map_or(f64::NAN, |bytes| bytes as f64)
}

/// Returns the median, or `NaN` of no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Whether every judged loss step of the kernel is within the derived bound. The baseline's are shown beside: what autograd
/// in f32 loses is not the kernel's fault.
fn within_limits(pairs: &[AbPair], output: &str) -> AbVerdict {
    let of = |side: AbSide| pairs.iter().map(move |pair| &pair.runs[side as usize].judged);
    let mut of_kernel = of(AbSide::Kernel).map(|judged| judged.outputs.get(output));
    let [baseline, kernel] = AbSide::BOTH.map(|side| {
        of(side).filter_map(|judged| judged.outputs.get(output)).map(|worst| worst.share).fold(0.0, f64::max)
    });
    let steps: usize = AbSide::BOTH.into_iter().flat_map(of).map(|judged| judged.steps).sum();
    AbVerdict {
        what: format!("{output}, worst error / limit of {steps} losses of a whole batch against the reference"),
        baseline: Some(baseline),
        kernel: Some(kernel),
        difference: Some(kernel),
        limit: Some(1.0),
        pass: Some(of_kernel.all(|output| output.is_some_and(|worst| worst.passed))),
    }
}

/// Whether the ratio of every rollout's first update was 1 within rounding.
fn first_updates(pairs: &[AbPair]) -> AbVerdict {
    let [baseline, kernel] =
        [0, 1].map(|side| pairs.iter().map(|pair| pair.runs[side].judged.off_policy.len()).sum::<usize>() as f64);
    AbVerdict {
        what: "parts of first updates whose ratio is not 1".into(),
        baseline: Some(baseline),
        kernel: Some(kernel),
        difference: Some(kernel),
        limit: Some(0.0),
        pass: Some(kernel == 0.0),
    }
}

fn evaluated(evaluation: Option<GreedyEvaluation>) -> f64 {
    evaluation.map_or(f64::NAN, |evaluation| evaluation.reward)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ab_medians_are_of_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 8.0]), 3.0);
        assert!(median(Vec::new()).is_nan());
    }
}
