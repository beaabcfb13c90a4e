//! Training with a kernel off and on: results of `assay ab`.

use assay_schema::ab::{AbComparison, TrainingRun, TrainingStep};
use maud::{Markup, html};

use super::number::{bytes, clipped, milliseconds, short};
use super::part::ReportPart;
use super::plot::{Axis, Curve, Tone, curves, key};

const TONES: [Tone; 2] = [Tone::Second, Tone::First];

/// A quantity that is drawn for every step, with its axis.
type Quantity = (&'static str, fn(&TrainingStep) -> f64, Axis);

const QUANTITIES: [Quantity; 7] = [
    ("loss", |step| step.loss, Axis { format: short, from_zero: false }),
    ("reward", |step| step.reward, Axis { format: short, from_zero: false }),
    ("entropy, nats", |step| step.entropy, Axis { format: short, from_zero: false }),
    ("gradient norm", |step| step.grad_norm, Axis { format: short, from_zero: true }),
    ("loss step", |step| step.loss_step_s * 1e3, Axis { format: milliseconds, from_zero: true }),
    ("update", |step| step.update_s * 1e3, Axis { format: milliseconds, from_zero: true }),
    ("bytes of the loss step", |step| step.loss_step_bytes, Axis { format: bytes, from_zero: true }),
];

fn curves_of(comparison: &AbComparison, (name, of, axis): &Quantity) -> Markup {
    let curve = |(run, tone): (&TrainingRun, Tone)| Curve {
        tone,
        points: run.steps.iter().map(|step| (step.step as f64, of(step))).collect(),
    };
    let runs = comparison.arms.iter().zip(TONES).flat_map(|(arm, tone)| arm.runs.iter().map(move |run| (run, tone)));
    curves(&runs.map(curve).collect::<Vec<_>>(), axis, &html! { (name) })
}

impl ReportPart for AbComparison {
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
        // The names come from the kernels' own records, and are cut to a length that a legend holds.
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
            div.several { @for quantity in &QUANTITIES { (curves_of(self, quantity)) } }
        }
    }
}
