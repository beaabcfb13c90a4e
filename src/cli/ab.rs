//! `assay ab`: the same run by candle's own operations and by a kernel.

use std::path::PathBuf;

use clap::Args;
use comfy_table::Table;

use super::train::{read_settings, told};
use super::{CliError, Passed, PluginChoice, Printing, stop_flag};
use crate::schema::ab::{AbComparison, AbVerdict};
use crate::train::RunSummary;
use crate::train::ab::{AbControl, AbPair, AbPlan, AbSide, Contestant, comparison, pairs, runs};
use crate::train::metrics::GreedyEvaluation;

/// Each run starts again from the model; only the warm start is kept.
#[derive(Args)]
pub(super) struct AbCommand {
    /// Settings of the runs; `kernel.impl` is the kernel arm's
    #[arg(long, value_name = "FILE.yaml")]
    config: PathBuf,
    /// Number of pairs of runs, of consecutive seeds
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first of them, in place of the settings' own
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Judge the losses of every Nth step against the reference, from step 1 on; 0 judges none
    #[arg(long, value_name = "N", default_value_t = 1)]
    judge_every: u64,
    /// Run arms that are wrong on purpose too: each must fail
    #[arg(long)]
    controls: bool,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

impl AbCommand {
    pub(super) fn run(self) -> Result<Passed, CliError> {
        let mut config = read_settings(&self.config)?;
        config.seed = self.seed.unwrap_or(config.seed);
        let plugin = self.plugin.checked_path()?;
        let stop = stop_flag()?;
        let plan = AbPlan { seeds: self.seeds, judge_every: Some(self.judge_every).filter(|every| *every > 0) };
        let mut told = told(&self.printing);
        let mut run = |plan: AbPlan, contestant: Contestant| runs(&config, plan, contestant, plugin, &stop, &mut told);
        // Every contestant runs the seeds of the plan, so that run i of one is compared with run i of another.
        let baseline = run(plan, Contestant::Side(AbSide::Baseline))?;
        // One seed decides nothing of learning.
        let unjudged = AbPlan { judge_every: None, ..plan };
        let redrawn = if self.seeds > 1 { run(unjudged, Contestant::Redrawn)? } else { Vec::new() };
        let made = pairs(&config, &baseline, &redrawn, &run(plan, Contestant::Side(AbSide::Kernel))?);
        let mut controls = Vec::new();
        // A control is wrong on purpose: if the comparison did not fail it, it would not be able to fail a wrong kernel
        // either.
        for control in AbControl::ALL.into_iter().filter(|_| self.controls) {
            let of_control = run(control.plan(plan), Contestant::Control(control))?;
            controls.push((control, pairs(&config, &baseline, &redrawn, &of_control)));
        }
        let comparison = comparison(&config, &made, &controls);
        self.printing.finish(&text(&made, &comparison), &comparison)?;
        Ok(Passed::from(comparison.pass))
    }
}

fn text(pairs: &[AbPair], AbComparison { verdicts, controls, .. }: &AbComparison) -> String {
    let mut arms = Table::new();
    arms.load_style(comfy_table::presets::ASCII_MARKDOWN);
    arms.set_header([
        "seed",
        "arm",
        "eval reward",
        "eval answers",
        "last entropy",
        "last loss",
        "steps with equal tokens",
    ]);
    for (pair, side) in pairs.iter().flat_map(|pair| AbSide::BOTH.map(|side| (pair, side))) {
        let RunSummary { evaluation, entropy, loss, .. } = &pair.runs[side as usize].summary;
        let evaluated =
            |of: fn(&GreedyEvaluation) -> f64| evaluation.as_ref().map_or("–".into(), |it| format!("{:.4}", of(it)));
        arms.add_row([
            pair.seed.to_string(),
            side.name().into(),
            evaluated(|evaluation| evaluation.reward),
            evaluated(|evaluation| evaluation.answer),
            format!("{entropy:.4}"),
            format!("{loss:+.5}"),
            format!("{} of {}", pair.equal_steps(), pair.runs[side as usize].records.len()),
        ]);
    }
    let mut compared = Table::new();
    compared.load_style(comfy_table::presets::ASCII_MARKDOWN);
    compared.set_header(["compared", "baseline", "kernel", "difference or ratio", "limit", "verdict"]);
    let shown = |value: Option<f64>| value.map_or(String::new(), short);
    for AbVerdict { what, baseline, kernel, difference, limit, pass } in verdicts {
        let decided = match pass {
            Some(true) => "PASS",
            Some(false) => "FAIL",
            None => "",
        };
        compared.add_row([
            what.clone(),
            shown(*baseline),
            shown(*kernel),
            shown(*difference),
            shown(*limit),
            decided.into(),
        ]);
    }
    let mut wrong = Table::new();
    wrong.load_style(comfy_table::presets::ASCII_MARKDOWN);
    wrong.set_header(["wrong on purpose", "training reward", "difference", "limit", "fails"]);
    for control in controls {
        let failed = if control.failed.is_empty() { "nothing: FAIL".into() } else { control.failed.join("; ") };
        let AbVerdict { kernel, difference, limit, .. } = &control.learning;
        wrong.add_row([control.name.clone(), shown(*kernel), shown(*difference), shown(*limit), failed]);
    }
    let wrong = if controls.is_empty() { String::new() } else { format!("\n{wrong}\n") };
    let mut beyond = String::new();
    // An output beyond its limit is listed with its step, whatever the verdict on learning is.
    for (pair, side) in pairs.iter().flat_map(|pair| AbSide::BOTH.map(|side| (pair, side))) {
        for worst in pair.runs[side as usize].judged.outputs.values().filter(|worst| worst.share > 1.0) {
            beyond += &format!("beyond its limit: {}, seed {}, {}\n", side.name(), pair.seed, worst.at);
        }
    }
    for run in pairs.iter().flat_map(|pair| &pair.runs) {
        beyond.extend(run.judged.off_policy.iter().take(1).map(|found| format!("{found}\n")));
    }
    format!("{arms}\n\n{compared}\n{beyond}{wrong}")
}

/// Whole numbers in full, four digits of others.
fn short(x: f64) -> String {
    match x {
        x if x.fract() == 0.0 && x.abs() < 1e15 => format!("{x}"),
        x if x.abs() < 1e-3 => format!("{x:.3e}"),
        x => format!("{x:.4}"),
    }
}
