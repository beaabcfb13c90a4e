//! Times and memory of one implementation on this machine: results of `assay bench`.

use std::collections::BTreeMap;

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;

use super::number::{bytes, clipped, milliseconds, shape, short};
use super::part::Part;
use super::plot::{Bar, Tone, bars, key};

/// How keys of ratios begin, and the opponents that are bounds rather than rivals.
const RATIO: &str = "ratio_to_";
const BOUNDS: [&str; 2] = ["copy", "gemm"];

#[derive(Deserialize)]
pub(super) struct Bench {
    #[serde(rename = "impl")]
    implementation: String,
    devices: u64,
    shape: Vec<usize>,
    dtype: String,
    steps: u64,
    first_call_s: f64,
    step_s_p50: f64,
    step_s_p90: f64,
    step_s_min: f64,
    step_s_max: f64,
    #[serde(default)]
    gb_per_s: Option<f64>,
    threads: u64,
    #[serde(default)]
    isa: Option<String>,
    #[serde(default)]
    argument_bytes: Option<f64>,
    #[serde(default)]
    output_bytes: Option<f64>,
    #[serde(default)]
    temp_bytes: Option<f64>,
    #[serde(default)]
    alias_bytes: Option<f64>,
    #[serde(default)]
    peak_bytes_in_use: Option<f64>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl Bench {
    /// The opponents, and how many of their steps one step takes.
    fn ratios(&self) -> impl Iterator<Item = (&str, f64)> {
        self.rest.iter().filter_map(|(key, value)| Some((key.strip_prefix(RATIO)?, value.as_f64()?)))
    }

    fn times(&self) -> Vec<Bar> {
        let own = &self.implementation;
        let mut all = vec![Bar::of(own.as_str(), self.step_s_p50, Tone::First, milliseconds(self.step_s_p50 * 1e3))];
        all.extend(self.ratios().map(|(opponent, ratio)| {
            let tone = if BOUNDS.contains(&opponent) { Tone::Faint } else { Tone::Second };
            let seconds = self.step_s_p50 / ratio;
            let note = format!("{}: {own} takes {} ×", milliseconds(seconds * 1e3), short(ratio));
            Bar::of(opponent, seconds, tone, note)
        }));
        all
    }

    fn memory(&self) -> Vec<Bar> {
        let parts = [
            ("arguments", self.argument_bytes),
            ("outputs", self.output_bytes),
            ("outputs that lie over arguments", self.alias_bytes),
            ("scratch", self.temp_bytes),
            ("peak in use", self.peak_bytes_in_use),
        ];
        let known = parts.into_iter().filter_map(|(name, n)| Some((name, n?)));
        known.map(|(name, n)| Bar::of(name, n, Tone::First, bytes(n))).collect()
    }
}

impl Part for Bench {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let Self { implementation, devices, dtype, step_s_p50, .. } = self;
        let on = if *devices == 1 { String::new() } else { format!(" ×{devices}") };
        format!("{implementation}{on}, {} {dtype}: {} a step", shape(&self.shape), milliseconds(step_s_p50 * 1e3))
    }

    fn body(&self) -> Markup {
        let seconds = |s: f64| milliseconds(s * 1e3);
        let rows = [
            ("median step", seconds(self.step_s_p50)),
            ("90th percentile", seconds(self.step_s_p90)),
            ("fastest and slowest", format!("{} and {}", seconds(self.step_s_min), seconds(self.step_s_max))),
            ("first call", seconds(self.first_call_s)),
            ("steps timed", self.steps.to_string()),
            (
                "logits read and dlogits written",
                self.gb_per_s.map_or("–".into(), |rate| format!("{} GB/s", short(rate))),
            ),
            ("threads", self.threads.to_string()),
            ("instruction set", self.isa.as_deref().map_or("–".into(), clipped)),
        ];
        let memory = self.memory();
        html! {
            h3 { "Time" }
            p { "Medians of steps that took turns, after the first answer was judged." }
            (key(&[(Tone::First, "measured"), (Tone::Second, "taken turns with"), (Tone::Faint, "the bound of this machine")]))
            (bars(&self.times(), None, &html! { "time of one step" }))
            h3 { "Memory" }
            @if memory.is_empty() {
                p.note { "Nothing here reports its memory." }
            } @else {
                (bars(&memory, None, &html! { "bytes on the first device" }))
            }
            div.scroll { table { tbody {
                @for (name, value) in &rows { tr { th { (name) } td.number { (value) } } }
            } } }
        }
    }
}
