//! Training with a kernel off and on: the JSON of `assay ab`, as it is written and as it is shown.

use maud::{Markup, html};
use serde::{Deserialize, Deserializer, Serialize};

use super::number::{bytes, clipped, milliseconds, short};
use super::part::Part;
use super::plot::{Axis, Curve, Tone, curves, key};

/// Both arms, and what was decided of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Whether every verdict passed.
    pub pass: bool,
    /// The baseline, then the kernel.
    pub arms: [Arm; 2],
    /// What was compared, in the order to be read.
    pub verdicts: Vec<Verdict>,
}

/// One arm: the same training on every seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// `baseline` or `kernel`.
    pub name: String,
    /// What computes the loss: an implementation's id, or the framework's own operations.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// A run for each seed, the same seeds in both arms.
    pub runs: Vec<Run>,
}

/// One training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Of parameters, data and sampling.
    pub seed: u64,
    /// In order.
    pub steps: Vec<Step>,
}

/// What one step of training logs. A value that is no number is `null` in JSON and NaN here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counted from 1.
    pub step: u64,
    /// The loss that was differentiated.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Mean total reward of the step's completions.
    #[serde(deserialize_with = "number")]
    pub reward: f64,
    /// Mean entropy of the policy, in nats a token.
    #[serde(deserialize_with = "number")]
    pub entropy: f64,
    /// L2 norm of the gradient before it is clipped.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Seconds of the loss step: from logits (or hidden states) to their gradient.
    #[serde(deserialize_with = "number")]
    pub loss_step_s: f64,
    /// Seconds of the whole update: forward, loss step, backward and optimizer.
    #[serde(deserialize_with = "number")]
    pub update_s: f64,
    /// The most bytes that the loss step held beyond what there was; no number where nobody counted.
    #[serde(deserialize_with = "number")]
    pub loss_step_bytes: f64,
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// One line of the verdict: a figure of both arms, and how far apart they may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// What was compared, its unit included.
    pub what: String,
    /// Of the baseline; `None` where there is but a difference.
    pub baseline: Option<f64>,
    /// Of the kernel.
    pub kernel: Option<f64>,
    /// What is held against the limit: a difference, or a ratio.
    pub difference: Option<f64>,
    /// The limit; `None` where the line only informs.
    pub limit: Option<f64>,
    /// The decision; `None` where the line only informs.
    pub pass: Option<bool>,
}

const TONES: [Tone; 2] = [Tone::Second, Tone::First];

/// What is drawn of every step, and the axis that suits it.
type Quantity = (&'static str, fn(&Step) -> f64, Axis);

const QUANTITIES: [Quantity; 7] = [
    ("loss", |step| step.loss, Axis { format: short, from_zero: false }),
    ("reward", |step| step.reward, Axis { format: short, from_zero: false }),
    ("entropy, nats", |step| step.entropy, Axis { format: short, from_zero: false }),
    ("gradient norm", |step| step.grad_norm, Axis { format: short, from_zero: true }),
    ("loss step", |step| step.loss_step_s * 1e3, Axis { format: milliseconds, from_zero: true }),
    ("update", |step| step.update_s * 1e3, Axis { format: milliseconds, from_zero: true }),
    ("bytes of the loss step", |step| step.loss_step_bytes, Axis { format: bytes, from_zero: true }),
];

impl Comparison {
    fn curves(&self, (name, of, axis): &Quantity) -> Markup {
        let curve = |(run, tone): (&Run, Tone)| Curve {
            tone,
            points: run.steps.iter().map(|step| (step.step as f64, of(step))).collect(),
        };
        let runs = self.arms.iter().zip(TONES).flat_map(|(arm, tone)| arm.runs.iter().map(move |run| (run, tone)));
        curves(&runs.map(curve).collect::<Vec<_>>(), axis, &html! { (name) })
    }
}

impl Part for Comparison {
    fn passed(&self) -> Option<bool> {
        Some(self.pass)
    }

    fn summary(&self) -> String {
        let [baseline, kernel] = &self.arms;
        let steps = kernel.runs.iter().map(|run| run.steps.len()).max().unwrap_or(0);
        let (off, on) = (&baseline.implementation, &kernel.implementation);
        let seeds = match kernel.runs.len() {
            1 => "one seed".into(),
            many => format!("{many} seeds"),
        };
        format!("{on} against {off}: {seeds} of {steps} steps")
    }

    fn body(&self) -> Markup {
        let arms: Vec<String> =
            self.arms.iter().map(|arm| format!("{}: {}", arm.name, clipped(&arm.implementation))).collect();
        let shown = |x: Option<f64>| x.map_or("–".into(), short);
        html! {
            div.scroll { table {
                thead { tr {
                    th { "compared" } th.number { "baseline" } th.number { "kernel" } th.number { "difference" } th.number { "limit" } th { "verdict" }
                } }
                tbody { @for verdict in &self.verdicts { tr {
                    td { (clipped(&verdict.what)) } td.number { (shown(verdict.baseline)) } td.number { (shown(verdict.kernel)) }
                    td.number { (shown(verdict.difference)) } td.number { (shown(verdict.limit)) }
                    @match verdict.pass { Some(true) => td.well { "pass" }, Some(false) => td.bad { "fail" }, None => td.none { "·" } }
                } } }
            } }
            h3 { "Curves" }
            p { "Over the steps of training, one curve a seed." }
            (key(&[(TONES[0], &arms[0]), (TONES[1], &arms[1])]))
            div.several { @for quantity in &QUANTITIES { (self.curves(quantity)) } }
        }
    }
}
