//! Programs compiled for TPUs that were not there, beside what hardware took: results of `assay compile`.

use maud::{Markup, html};
use serde::Deserialize;

use super::number::{bytes, clipped, count, milliseconds, shape, short};
use super::part::Part;
use super::plot::{Bar, Tone, bars, key};

#[derive(Deserialize)]
pub(super) struct Compiled {
    target: String,
    #[serde(rename = "impl")]
    implementation: String,
    shape: Vec<usize>,
    dtype: String,
    memory: Memory,
    cycles: u64,
    hbm_bytes: f64,
    bound: Bound,
    clock_ghz: f64,
    /// The recorded baseline, and whatever else was recorded at this shape.
    #[serde(default)]
    recorded: Option<Recorded>,
    #[serde(default)]
    recorded_kernel: Option<Recorded>,
}

#[derive(Deserialize)]
struct Memory {
    peak_bytes: f64,
}

#[derive(Deserialize)]
struct Bound {
    cycles_ms: f64,
    hbm_ms: f64,
    predicted_ms: f64,
    limit: String,
}

#[derive(Deserialize)]
struct Recorded {
    program: String,
    step_ms: [f64; 2],
    #[serde(default)]
    peak_bytes_in_use: Option<f64>,
}

/// `assay compile --table`.
#[derive(Deserialize)]
pub(super) struct Table {
    rows: Vec<Compiled>,
}

impl Compiled {
    fn size(&self) -> String {
        format!("{} {}, each device of {}", shape(&self.shape), self.dtype, self.target)
    }

    fn records(&self) -> impl Iterator<Item = &Recorded> {
        [&self.recorded, &self.recorded_kernel].into_iter().flatten()
    }
}

/// Programs of one shape, dtype and target.
fn together(programs: &[&Compiled]) -> Markup {
    let Some(first) = programs.first() else { return html! {} };
    let mut times = Vec::new();
    let mut memory = Vec::new();
    for program in programs {
        let Bound { cycles_ms, hbm_ms, .. } = program.bound;
        let of = |what: &str| format!("{}, {what}", program.implementation);
        times.push(Bar::of(of("HBM traffic"), hbm_ms, Tone::First, milliseconds(hbm_ms)));
        times.push(Bar::of(of("cycles"), cycles_ms, Tone::Third, milliseconds(cycles_ms)));
        let peak = program.memory.peak_bytes;
        memory.push(Bar::of(program.implementation.as_str(), peak, Tone::First, bytes(peak)));
    }
    for Recorded { program, step_ms: [least, most], peak_bytes_in_use } in first.records() {
        let note = if least == most {
            milliseconds(*least)
        } else {
            format!("{} to {}", milliseconds(*least), milliseconds(*most))
        };
        times.push(Bar::of(program.as_str(), *least, Tone::Second, note));
        memory.extend(peak_bytes_in_use.map(|peak| Bar::of(program.as_str(), peak, Tone::Second, bytes(peak))));
    }
    // An LM head has four extents, and then no logits need to lie anywhere.
    let width = if first.dtype == "f32" { 4.0 } else { 2.0 };
    let logits = (first.shape.len() == 3).then(|| first.shape.iter().map(|&n| n as f64).product::<f64>() * width);
    html! {
        h3 { (clipped(&first.size())) }
        (bars(&times, None, &html! { "time of one step: the longer of a program's two is its lower bound" }))
        (bars(&memory, logits, &html! { "peak memory" @if logits.is_some() { "; the line is the size of the logits" } }))
    }
}

/// Runs of rows that share shape, dtype and target.
fn body(rows: &[&Compiled]) -> Markup {
    html! {
        p {
            "Compiled ahead of time: bytes are facts, times are lower bounds at the assumed clock and the documented bandwidth."
        }
        (key(&[(Tone::First, "HBM traffic, memory"), (Tone::Third, "cycles"), (Tone::Second, "recorded on hardware by the seed project")]))
        @for group in rows.chunk_by(|a, b| a.size() == b.size()) { (together(group)) }
        div.scroll { table {
            thead { tr {
                th { "shape a device" } th { "program" } th.number { "peak" } th.number { "cycles" } th.number { "clock" } th.number { "HBM" }
                th.number { "bound" } th { "by" } th.number { "recorded" } th.number { "bound / recorded" }
            } }
            tbody { @for row in rows { tr {
                td { (shape(&row.shape)) " " (clipped(&row.dtype)) } td { (clipped(&row.implementation)) }
                td.number { (bytes(row.memory.peak_bytes)) } td.number { (count(row.cycles)) }
                td.number { (short(row.clock_ghz)) " GHz" } td.number { (bytes(row.hbm_bytes)) }
                td.number { (milliseconds(row.bound.predicted_ms)) } td { (clipped(&row.bound.limit)) }
                td.number { (row.recorded.as_ref().map_or("–".into(), |recorded| milliseconds(recorded.step_ms[0]))) }
                td.number { (row.recorded.as_ref().map_or("–".into(), |recorded| short(row.bound.predicted_ms / recorded.step_ms[0]))) }
            } } }
        } }
    }
}

impl Part for Compiled {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let Bound { predicted_ms, limit, .. } = &self.bound;
        let peak = bytes(self.memory.peak_bytes);
        format!("{}, {}: at least {} ({limit}), {peak}", self.implementation, self.size(), milliseconds(*predicted_ms))
    }

    fn body(&self) -> Markup {
        body(&[self])
    }
}

impl Part for Table {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        format!("{} programs beside what hardware took", self.rows.len())
    }

    fn body(&self) -> Markup {
        body(&self.rows.iter().collect::<Vec<_>>())
    }
}
