//! The same run by candle's own operations and by a kernel.
//!
//! Judged loss steps of either arm stand against the f64 reference on that step's own hidden states; those of the kernel
//! decide. The arms' weights are equal at first; rounding parts them, and from the step at which the tokens differ nothing but
//! statistics can be compared.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use ndarray::arr0;
use serde::{Deserialize, Serialize};

use super::complete::{Progress, Trained, complete};
use super::metrics::Record;
use super::{GrpoLoss, LossStep, Observer, Summary, TrainConfig, TrainError};
use assay_core::problem::{Dtype, HeadCandidate, HeadGradient};
use assay_core::spec::LossSpec;
use assay_judge::judge::{self, JudgeError};
use assay_judge::trial::Known;
use assay_judge::{gate::Output, tolerance::Limits};
use assay_schema::ab::{self as schema, Arm, Comparison, Step, Verdict};

/// The class whose limits candle's own operations are held to: that of any kernel not made here. They sum a row in f32.
const BASELINE_CLASS: &str = "external-lm-head";

/// Which outputs of a loss step there are to judge.
const JUDGED: [Output; 3] = [Output::Loss, Output::Dhidden, Output::DlmHead];

/// How an A/B run is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// How many pairs of runs, of consecutive seeds from the settings' own on.
    pub seeds: u64,
    /// The losses of every so many steps are judged, from step 1 on.
    pub judge_every: u64,
}

/// Which of the two arms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// candle's own operations.
    Baseline,
    /// The kernel.
    Kernel,
}

impl Side {
    /// In the order of [`Comparison::arms`].
    pub const BOTH: [Side; 2] = [Side::Baseline, Side::Kernel];

    /// Its name in tables, folders and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Side::Baseline => "baseline",
            Side::Kernel => "kernel",
        }
    }
}

/// One arm of one seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// What it came to.
    pub summary: Summary,
    /// Its loss steps against the reference.
    pub judged: Judged,
    /// Its steps.
    pub records: Vec<Record>,
}

/// How the judged loss steps of a run stand against the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// Whose limits they are held to.
    pub class: String,
    /// How many were judged.
    pub steps: usize,
    /// Of each output.
    pub outputs: BTreeMap<&'static str, Worst>,
}

/// How one output of a run's loss steps did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// The largest error, as a multiple of its limit.
    pub share: f64,
    /// Whether every gate was passed.
    pub passed: bool,
    /// Where that was, in words.
    pub at: String,
}

/// Both arms of one seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Of parameters, data and sampling.
    pub seed: u64,
    /// In the order of [`Side::BOTH`].
    pub runs: [Run; 2],
}

/// Makes the pairs of runs of `plan`, each in a folder of its own within that of `config`. Each run starts anew; only the warm
/// start is kept. A PJRT implementation uses `plugin`; `stop` ends the run in good order; `progress` hears of every step.
///
/// # Errors
/// As of [`complete`]; [`TrainError::Judge`] where a step cannot be judged.
pub fn run(
    config: &TrainConfig,
    plan: Plan,
    plugin: Option<&Path>,
    stop: &AtomicBool,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Vec<Pair>, TrainError> {
    let mut pair = |seed: u64| {
        let folder = config.out.join(format!("seed-{seed}"));
        let mut arm = |side: Side| {
            let mut settings = config.clone();
            settings.seed = seed;
            settings.kernel.enabled = side == Side::Kernel;
            settings.out = folder.join(side.name());
            if let Some(warm_start) = &mut settings.warm_start {
                warm_start.cache.get_or_insert_with(|| folder.join("warm_start.safetensors"));
            }
            forget(&settings.out.join("checkpoint.safetensors"))?;
            judged_run(&settings, plan.judge_every, plugin, stop, progress)
        };
        Ok(Pair { seed, runs: [arm(Side::Baseline)?, arm(Side::Kernel)?] })
    };
    (0..plan.seeds).map(|i| pair(config.seed + i)).collect()
}

fn judged_run(
    settings: &TrainConfig,
    judge_every: u64,
    plugin: Option<&Path>,
    stop: &AtomicBool,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Run, TrainError> {
    let class = if settings.kernel.enabled {
        GrpoLoss::by_id(settings.loss.clone(), &settings.kernel.implementation, plugin)?.class_on_hidden()
    } else {
        BASELINE_CLASS.into()
    };
    let mut judge = Judge {
        loss: settings.loss.clone(),
        every: judge_every,
        judged: Judged { class, steps: 0, outputs: BTreeMap::new() },
    };
    let Trained { trainer, summary } = complete(settings, plugin, stop, &mut judge, progress)?;
    Ok(Run { summary, judged: judge.judged, records: trainer.records().to_vec() })
}

/// Holds the whole batch's loss of every so many steps against the reference, in each of their epochs.
struct Judge {
    loss: LossSpec,
    every: u64,
    judged: Judged,
}

impl Observer for Judge {
    fn wants(&self, step: usize, _: usize) -> bool {
        (step as u64 - 1).is_multiple_of(self.every)
    }

    fn see(&mut self, step: &LossStep) -> Result<(), TrainError> {
        self.judged.add(&self.loss, step)
    }
}

/// The comparison that went furthest beyond its limit.
fn words(verdict: &judge::Verdict) -> String {
    match (verdict.tally.nonfinite, verdict.worst()) {
        (Some((at, value)), _) => format!("{value} at {at}"),
        (None, None) => "finite where the reference is not".into(),
        (None, Some(worst)) => {
            format!("at {} expected {:e}, actual {:e}, limit {:e}", worst.at, worst.expected, worst.actual, worst.limit)
        }
    }
}

/// Removes a file that may not be there.
fn forget(path: &Path) -> Result<(), TrainError> {
    match fs::remove_file(path) {
        Err(reason) if reason.kind() != ErrorKind::NotFound => Err(TrainError::io(path, "remove", reason)),
        _ => Ok(()),
    }
}

impl Judged {
    fn add(&mut self, loss: &LossSpec, step: &LossStep) -> Result<(), TrainError> {
        let problem = step.problem()?;
        let candidate = HeadCandidate {
            loss: arr0(step.loss()).into(),
            gradient: HeadGradient {
                dhidden: step.dhidden().clone().into(),
                dlm_head: step.dlm_head().clone().into(),
                dlogits_dtype: Dtype::F32,
            },
            // A loss step returns none of these.
            logp: None,
            entropy: None,
            token_loss: None,
            metrics: None,
        };
        let limits = Limits::of(&self.class).map_err(JudgeError::from)?;
        let verdicts = Known::of(loss, &problem)?.judge(candidate, &limits)?.verdicts;
        self.steps += 1;
        for verdict in verdicts.iter().filter(|verdict| JUDGED.contains(&verdict.gate.output)) {
            let worst = self.outputs.entry(verdict.gate.output.name()).or_insert_with(|| Worst {
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

impl Pair {
    /// Over how many steps, from the first on, both arms sampled the same tokens.
    pub fn equal_steps(&self) -> usize {
        let [baseline, kernel] = &self.runs;
        let both = baseline.records.iter().zip(&kernel.records);
        both.take_while(|(a, b)| a.tokens_sha256 == b.tokens_sha256).count()
    }

    /// The largest difference of what `of` says of these steps.
    fn largest_difference(&self, of: fn(&Record) -> f64) -> f64 {
        let [baseline, kernel] = &self.runs;
        let both = baseline.records.iter().zip(&kernel.records).take(self.equal_steps());
        both.map(|(a, b)| (of(a) - of(b)).abs()).fold(0.0, f64::max)
    }
}

/// What is decided of `pairs`, which were made under `config`.
///
/// Loss and gradients of the kernel's judged steps have to be within their derived limits. Mean reward and entropy at the end
/// have to differ by no more than the runs of one arm do, where there is more than one seed. The rest informs.
pub fn comparison(config: &TrainConfig, pairs: &[Pair]) -> Comparison {
    let implementation = |side: Side| match side {
        Side::Baseline => "candle's log_softmax, gather and autograd".to_string(),
        Side::Kernel => config.kernel.implementation.clone(),
    };
    let curve = |run: &Run| run.records.iter().map(step_of).collect();
    let arm = |side: Side| Arm {
        name: side.name().into(),
        implementation: implementation(side),
        runs: pairs
            .iter()
            .map(|pair| schema::Run { seed: pair.seed, steps: curve(&pair.runs[side as usize]) })
            .collect(),
    };
    let verdicts = verdicts(pairs);
    Comparison { pass: verdicts.iter().all(|verdict| verdict.pass != Some(false)), arms: Side::BOTH.map(arm), verdicts }
}

fn step_of(record: &Record) -> Step {
    Step {
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

/// What a step cost, and what that is called.
type Measured = (&'static str, fn(&Record) -> f64);

/// Agreement, which is decided, and cost, which is shown.
fn verdicts(pairs: &[Pair]) -> Vec<Verdict> {
    let mut all: Vec<Verdict> = JUDGED.iter().map(|output| within_limits(pairs, output.name())).collect();
    let informed = |what: &str, difference: f64| Verdict {
        what: what.into(),
        baseline: None,
        kernel: None,
        difference: Some(difference),
        limit: None,
        pass: None,
    };
    let least = pairs.iter().map(Pair::equal_steps).min().unwrap_or(0);
    let largest = |of: fn(&Record) -> f64| pairs.iter().map(|pair| pair.largest_difference(of)).fold(0.0, f64::max);
    all.push(informed("steps from the first on with the same tokens in both arms", least as f64));
    all.push(informed("loss of these steps, largest difference", largest(|record| record.loss)));
    all.push(informed("gradient norm of these steps, largest difference", largest(|record| record.grad_norm)));
    let reward = |run: &Run| run.summary.evaluation.map_or(f64::NAN, |evaluation| evaluation.reward);
    all.push(within_spread("final evaluation reward, mean of the seeds", pairs, reward));
    all.push(within_spread("final entropy, mean of the seeds", pairs, |run| run.summary.entropy));
    let costs: [Measured; 5] = [
        ("loss step, s, median; baseline / kernel", |record| record.loss_step_s),
        ("update, s, median; baseline / kernel", |record| record.update_s),
        ("whole step, s, median; baseline / kernel", |record| record.step_s),
        ("loss step, bytes, median; baseline / kernel", |record| bytes(record.loss_step_bytes)),
        ("update, bytes, median; baseline / kernel", |record| bytes(record.update_bytes)),
    ];
    all.extend(costs.map(|(what, of)| {
        let [baseline, kernel] = Side::BOTH
            .map(|side| median(pairs.iter().flat_map(|pair| &pair.runs[side as usize].records).map(of).collect()));
        let difference = Some(baseline / kernel);
        let (baseline, kernel) = (Some(baseline), Some(kernel));
        Verdict { what: what.into(), baseline, kernel, difference, limit: None, pass: None }
    }));
    all
}

fn bytes(counted: Option<usize>) -> f64 {
    counted.map_or(f64::NAN, |bytes| bytes as f64)
}

/// `NaN` of nothing.
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
fn within_limits(pairs: &[Pair], output: &str) -> Verdict {
    let of = |side: Side| pairs.iter().map(move |pair| &pair.runs[side as usize].judged);
    let mut of_kernel = of(Side::Kernel).map(|judged| judged.outputs.get(output));
    let [baseline, kernel] = Side::BOTH.map(|side| {
        of(side).filter_map(|judged| judged.outputs.get(output)).map(|worst| worst.share).fold(0.0, f64::max)
    });
    let steps: usize = Side::BOTH.into_iter().flat_map(of).map(|judged| judged.steps).sum();
    Verdict {
        what: format!("{output}, worst error / limit of {steps} losses of a whole batch against the reference"),
        baseline: Some(baseline),
        kernel: Some(kernel),
        difference: Some(kernel),
        limit: Some(1.0),
        pass: Some(of_kernel.all(|output| output.is_some_and(|worst| worst.passed))),
    }
}

/// Whether the means of two sets of runs differ by no more than the runs of one set do; one run says nothing of that.
fn within_spread(what: &str, pairs: &[Pair], of: fn(&Run) -> f64) -> Verdict {
    let [baseline, kernel] =
        Side::BOTH.map(|side| pairs.iter().map(|pair| of(&pair.runs[side as usize])).collect::<Vec<_>>());
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let range = |values: &[f64]| {
        let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        largest - values.iter().copied().fold(f64::INFINITY, f64::min)
    };
    let difference = (mean(&baseline) - mean(&kernel)).abs();
    let spread = (pairs.len() > 1).then(|| range(&baseline).max(range(&kernel)));
    Verdict {
        what: what.into(),
        baseline: Some(mean(&baseline)),
        kernel: Some(mean(&kernel)),
        difference: Some(difference),
        limit: spread,
        pass: spread.map(|spread| difference <= spread),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 8.0]), 3.0);
        assert!(median(Vec::new()).is_nan());
    }
}
