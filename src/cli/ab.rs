//! `assay ab`: the same run by candle's own operations and by a kernel.
//!
//! Every judged loss step of either arm stands against the f64 reference on that step's own hidden states, so that two arms
//! that pass agree within the sum of their limits. The arms' weights are equal at first; rounding parts them, and from the
//! step at which the tokens differ nothing but statistics can be compared.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use clap::Args;
use comfy_table::Table;
use ndarray::arr0;
use serde::Serialize;

use super::train::{Trained, read_settings, stopped_by_ctrl_c, trained};
use super::{CliError, Passed, PluginChoice, Printing};
use crate::conformance::judge::Status;
use crate::conformance::lm_head::judge_head;
use crate::conformance::tolerance::{Output, Tolerances};
use crate::problem::{Dtype, FloatArray, HeadOutcome, Metrics};
use crate::reference::evaluate_head;
use crate::spec::LossSpec;
use crate::train::metrics::Record;
use crate::train::{LossStep, Summary, TrainConfig};

/// The class whose limits both arms are held to: f32 logits, products summed in f32, one pass over each row.
const CLASS: &str = "native-lm-head";

/// Which outputs of a loss step there are to judge.
const JUDGED: [Output; 3] = [Output::Loss, Output::Dhidden, Output::DlmHead];

/// Each run starts anew; only the warm start is kept.
#[derive(Args)]
pub(super) struct Ab {
    /// Settings of the runs; `kernel.impl` is the kernel arm's
    #[arg(long, value_name = "FILE.yaml")]
    config: PathBuf,
    /// How many pairs of runs, of consecutive seeds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Judge the first loss of every Nth step against the reference, from step 1 on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    judge_every: u64,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    Baseline,
    Kernel,
}

impl Side {
    const BOTH: [Side; 2] = [Side::Baseline, Side::Kernel];

    fn name(self) -> &'static str {
        match self {
            Side::Baseline => "baseline",
            Side::Kernel => "kernel",
        }
    }
}

/// One arm of one seed.
#[derive(Serialize)]
struct Run {
    summary: Summary,
    judged: Judged,
    records: Vec<Record>,
}

/// How the judged loss steps of a run stand against the reference.
#[derive(Default, Serialize)]
struct Judged {
    losses: usize,
    gates: usize,
    failed: usize,
    /// The largest error of each output, as a multiple of its limit.
    worst: BTreeMap<&'static str, f64>,
}

/// Both arms of one seed.
#[derive(Serialize)]
struct Pair {
    seed: u64,
    runs: BTreeMap<Side, Run>,
    /// Over how many steps, from the first on, both arms sampled the same tokens.
    equal_steps: usize,
    /// The largest difference of the loss over these steps.
    loss_difference: f64,
    /// The largest difference of the gradient's norm over these steps, as a share of it.
    grad_norm_difference: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Decision {
    Pass,
    Fail,
    Ignored,
}

/// One line of the verdict.
#[derive(Serialize)]
struct Finding {
    claim: String,
    decision: Decision,
    found: String,
}

#[derive(Serialize)]
struct Comparison {
    config: TrainConfig,
    pairs: Vec<Pair>,
    findings: Vec<Finding>,
}

impl Ab {
    pub(super) fn run(self) -> Result<Passed, CliError> {
        let config = read_settings(&self.config)?;
        let plugin = self.plugin.checked_path()?;
        let stop = stopped_by_ctrl_c()?;
        let pairs = (0..self.seeds)
            .map(|i| self.pair(&config, config.seed + i, plugin, &stop))
            .collect::<Result<Vec<_>, _>>()?;
        let findings = findings(&pairs);
        let passed = !findings.iter().any(|finding| matches!(finding.decision, Decision::Fail));
        let text = text(&pairs, &findings);
        self.printing.finish(&text, &Comparison { config, pairs, findings })?;
        Ok(Passed::from(passed))
    }

    fn pair(
        &self,
        config: &TrainConfig,
        seed: u64,
        plugin: Option<&Path>,
        stop: &AtomicBool,
    ) -> Result<Pair, CliError> {
        let folder = config.out.join(format!("seed-{seed}"));
        let mut runs = BTreeMap::new();
        for side in Side::BOTH {
            let mut settings = config.clone();
            settings.seed = seed;
            settings.kernel.enabled = side == Side::Kernel;
            settings.out = folder.join(side.name());
            if let Some(warm_start) = &mut settings.warm_start {
                warm_start.cache.get_or_insert_with(|| folder.join("warm_start.safetensors"));
            }
            forget(&settings.out.join("checkpoint.safetensors"))?;
            runs.insert(side, self.one(&settings, plugin, stop)?);
        }
        Ok(Pair::of(seed, runs))
    }

    fn one(&self, settings: &TrainConfig, plugin: Option<&Path>, stop: &AtomicBool) -> Result<Run, CliError> {
        let mut judged = Judged::default();
        let mut failure = None;
        let mut observe = |step: &LossStep| {
            let due = (step.step as u64 - 1).is_multiple_of(self.judge_every);
            if due && step.epoch == 0 && step.micro_batch == 0 && failure.is_none() {
                failure = judged.add(&settings.loss, step).err();
            }
            Ok(())
        };
        let Trained { trainer, summary } = trained(settings, plugin, &self.printing, stop, &mut observe)?;
        failure.map_or(Ok(()), Err)?;
        Ok(Run { summary, judged, records: trainer.records().to_vec() })
    }
}

/// Removes a file that may not be there.
fn forget(path: &Path) -> Result<(), CliError> {
    match fs::remove_file(path) {
        Err(reason) if reason.kind() != ErrorKind::NotFound => {
            Err(CliError::Io { path: path.into(), action: "remove", reason })
        }
        _ => Ok(()),
    }
}

impl Judged {
    fn add(&mut self, loss: &LossSpec, step: &LossStep) -> Result<(), CliError> {
        let spec = LossSpec { scale: loss.scale * step.share, ..loss.clone() };
        let problem = step.problem()?;
        let reference = evaluate_head(&spec, &problem).map_err(crate::implementation::RunError::from)?;
        let nothing = || FloatArray::zeros(problem.ids.dim(), Dtype::F32);
        let outcome = HeadOutcome {
            loss: arr0(step.loss).into(),
            dhidden: step.dhidden()?,
            dlm_head: step.dlm_head()?,
            dlogits_dtype: Dtype::F32,
            // A loss step returns none of these, and they are not judged.
            logp: nothing(),
            entropy: nothing(),
            token_loss: nothing(),
            metrics: Metrics::default(),
        };
        let verdicts = judge_head(&reference, &problem, &outcome, CLASS, Tolerances::builtin())?;
        self.losses += 1;
        for verdict in verdicts.iter().filter(|verdict| JUDGED.contains(&verdict.gate.output)) {
            self.gates += 1;
            self.failed += usize::from(verdict.status != Status::Pass);
            let worst = self.worst.entry(verdict.gate.output.name()).or_default();
            *worst = worst.max(verdict.tally.badness());
        }
        Ok(())
    }
}

impl Pair {
    fn of(seed: u64, runs: BTreeMap<Side, Run>) -> Self {
        let [baseline, kernel] = Side::BOTH.map(|side| &runs[&side].records);
        let both = || baseline.iter().zip(kernel).take_while(|(a, b)| a.tokens_sha256 == b.tokens_sha256);
        let largest = |of: fn(&Record, &Record) -> f64| both().map(|(a, b)| of(a, b)).fold(0.0, f64::max);
        let (equal_steps, loss_difference, grad_norm_difference) = (
            both().count(),
            largest(|a, b| (a.loss - b.loss).abs()),
            largest(
                |a, b| if a.grad_norm == 0.0 { b.grad_norm } else { (a.grad_norm - b.grad_norm).abs() / a.grad_norm },
            ),
        );
        Self { seed, runs, equal_steps, loss_difference, grad_norm_difference }
    }
}

/// What of the runs is decided.
fn findings(pairs: &[Pair]) -> Vec<Finding> {
    let of = |side: Side| pairs.iter().map(move |pair| &pair.runs[&side]);
    let mut findings: Vec<Finding> = Side::BOTH
        .into_iter()
        .map(|side| {
            let (gates, failed, losses) = of(side).fold((0, 0, 0), |(gates, failed, losses), run| {
                (gates + run.judged.gates, failed + run.judged.failed, losses + run.judged.losses)
            });
            Finding {
                claim: format!("{}: loss, dhidden and dlm_head within the derived bound", side.name()),
                decision: if failed == 0 { Decision::Pass } else { Decision::Fail },
                found: format!("{} of {gates} gates of {losses} loss steps", gates - failed),
            }
        })
        .collect();
    let reward = |run: &Run| run.summary.evaluation.map_or(f64::NAN, |evaluation| evaluation.reward);
    let statistics: [(&str, &dyn Fn(&Run) -> f64); 2] =
        [("final evaluation reward", &reward), ("final entropy", &|run| run.summary.entropy)];
    for (what, value) in statistics {
        let [baseline, kernel] = Side::BOTH.map(|side| of(side).map(value).collect::<Vec<_>>());
        findings.push(within_spread(what, &baseline, &kernel));
    }
    findings
}

/// Whether the means of two sets of runs differ by no more than the runs of one set do.
fn within_spread(what: &str, baseline: &[f64], kernel: &[f64]) -> Finding {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let range = |values: &[f64]| {
        let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        largest - values.iter().copied().fold(f64::INFINITY, f64::min)
    };
    let (difference, spread) = ((mean(baseline) - mean(kernel)).abs(), range(baseline).max(range(kernel)));
    let decision = match baseline.len() {
        1 => Decision::Ignored,
        _ if difference <= spread => Decision::Pass,
        _ => Decision::Fail,
    };
    let against =
        if baseline.len() == 1 { "one seed has no spread".into() } else { format!("spread of seeds {spread:.4}") };
    Finding {
        claim: format!("{what} within the spread of the seeds"),
        decision,
        found: format!("{:.4} and {:.4}, difference {difference:.4}, {against}", mean(baseline), mean(kernel)),
    }
}

fn text(pairs: &[Pair], findings: &[Finding]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header([
        "seed",
        "arm",
        "eval reward",
        "entropy",
        "loss step, s",
        "update, s",
        "step, s",
        "loss step, bytes",
        "update, bytes",
    ]);
    for pair in pairs {
        for (side, Run { summary, .. }) in &pair.runs {
            let bytes = |bytes: Option<usize>| bytes.map_or("–".into(), |bytes| bytes.to_string());
            table.add_row([
                pair.seed.to_string(),
                side.name().into(),
                summary.evaluation.map_or("–".into(), |evaluation| format!("{:.4}", evaluation.reward)),
                format!("{:.4}", summary.entropy),
                format!("{:.4}", summary.loss_step_s),
                format!("{:.4}", summary.update_s),
                format!("{:.4}", summary.step_s),
                bytes(summary.loss_step_bytes),
                bytes(summary.update_bytes),
            ]);
        }
        let [baseline, kernel] = Side::BOTH.map(|side| &pair.runs[&side].summary);
        let bytes = |of: fn(&Summary) -> Option<usize>| match (of(baseline), of(kernel)) {
            (Some(baseline), Some(kernel)) => format!("{:.2} ×", baseline as f64 / kernel as f64),
            _ => "–".into(),
        };
        let time = |of: fn(&Summary) -> f64| format!("{:.2} ×", of(baseline) / of(kernel));
        table.add_row([
            pair.seed.to_string(),
            "baseline / kernel".into(),
            String::new(),
            String::new(),
            time(|summary| summary.loss_step_s),
            time(|summary| summary.update_s),
            time(|summary| summary.step_s),
            bytes(|summary| summary.loss_step_bytes),
            bytes(|summary| summary.update_bytes),
        ]);
    }
    let mut text = format!("{table}\n\n");
    for pair in pairs {
        text += &format!(
            "seed {}: the same tokens for {} steps; there losses differ by at most {:.3e}, norms of the gradient by {:.3e} of it\n",
            pair.seed, pair.equal_steps, pair.loss_difference, pair.grad_norm_difference
        );
    }
    for finding in findings {
        let decision = match finding.decision {
            Decision::Pass => "PASS",
            Decision::Fail => "FAIL",
            Decision::Ignored => "ignored",
        };
        text += &format!("{decision}  {}: {}\n", finding.claim, finding.found);
    }
    text
}
