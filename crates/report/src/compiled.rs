//! Programs compiled for TPUs that were not there, beside what hardware took: results of `assay compile`.

use assay_schema::compile::{SeedMeasurement, TpuProgramReport, TpuTable, TpuTimeBound};
use maud::{Markup, html};

use super::number::{bytes, clipped, count, milliseconds, shape, short};
use super::part::ReportPart;
use super::plot::{Bar, Tone, bars, key};

fn size(program: &TpuProgramReport) -> String {
    format!("{} {}, each device of {}", shape(&program.shape), program.dtype, program.target)
}

/// The recorded baseline, and whatever else was recorded at this shape.
fn records(program: &TpuProgramReport) -> impl Iterator<Item = &SeedMeasurement> {
    let baseline = program.recorded.as_ref().map(|beside| &beside.recorded);
    [baseline, program.recorded_kernel.as_ref()].into_iter().flatten()
}

/// Programs of one shape, dtype and target.
fn together(programs: &[&TpuProgramReport]) -> Markup {
    // Both bounds of a program are bars of the same plot, since the longer of them is its lower bound, next to the time
    // that hardware took.
    let Some(first) = programs.first() else { return html! {} };
    let mut times = Vec::new();
    let mut memory = Vec::new();
    for program in programs {
        let TpuTimeBound { cycles_ms, hbm_ms, .. } = program.bound;
        let of = |what: &str| format!("{}, {what}", program.implementation);
        times.push(Bar::single(of("HBM traffic"), hbm_ms, Tone::First, milliseconds(hbm_ms)));
        times.push(Bar::single(of("cycles"), cycles_ms, Tone::Third, milliseconds(cycles_ms)));
        let peak = program.memory.peak_bytes as f64;
        memory.push(Bar::single(program.implementation.as_str(), peak, Tone::First, bytes(peak)));
    }
    for SeedMeasurement { program, step_ms: [least, most], peak_bytes_in_use, .. } in records(first) {
        let note = if least == most {
            milliseconds(*least)
        } else {
            format!("{} to {}", milliseconds(*least), milliseconds(*most))
        };
        times.push(Bar::single(program.as_str(), *least, Tone::Second, note));
        memory.extend(
            peak_bytes_in_use
                .map(|peak| peak as f64)
                .map(|peak| Bar::single(program.as_str(), peak, Tone::Second, bytes(peak))),
        );
    }
    // An LM head has four extents, and then no logits need to lie anywhere.
    let width = if first.dtype == "f32" { 4.0 } else { 2.0 };
    let logits = (first.shape.len() == 3).then(|| first.shape.iter().map(|&n| n as f64).product::<f64>() * width);
    html! {
        h3 { (clipped(&size(first))) }
        (bars(&times, None, &html! { "time of one step: the longer of a program's two is its lower bound" }))
        (bars(&memory, logits, &html! { "peak memory" @if logits.is_some() { "; the line is the size of the logits" } }))
    }
}

/// Runs of rows that share shape, dtype and target.
fn body(rows: &[&TpuProgramReport]) -> Markup {
    html! {
        p {
            "Compiled ahead of time: bytes are facts, times are lower bounds at the assumed clock and the documented bandwidth."
        }
        (key(&[(Tone::First, "HBM traffic, memory"), (Tone::Third, "cycles"), (Tone::Second, "recorded on hardware by MLLM-JAX")]))
        @for group in rows.chunk_by(|a, b| size(a) == size(b)) { (together(group)) }
        div.scroll { table {
            thead { tr {
                th { "shape a device" } th { "program" } th.number { "peak" } th.number { "cycles" } th.number { "clock" } th.number { "HBM" }
                th.number { "bound" } th { "by" } th.number { "recorded" } th.number { "bound / recorded" }
            } }
            tbody { @for row in rows { tr {
                td { (shape(&row.shape)) " " (clipped(&row.dtype)) } td { (clipped(&row.implementation)) }
                td.number { (bytes(row.memory.peak_bytes as f64)) } td.number { (count(row.cycles)) }
                td.number { (short(row.clock_ghz)) " GHz" } td.number { (bytes(row.hbm_bytes as f64)) }
                td.number { (milliseconds(row.bound.predicted_ms)) } td { (row.bound.limit.name()) }
                td.number { (row.recorded.as_ref().map_or("–".into(), |beside| milliseconds(beside.recorded.step_ms[0]))) }
                td.number { (row.recorded.as_ref().map_or("–".into(), |beside| short(row.bound.predicted_ms / beside.recorded.step_ms[0]))) }
            } } }
        } }
    }
}

impl ReportPart for TpuProgramReport {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let TpuTimeBound { predicted_ms, limit, .. } = &self.bound;
        let peak = bytes(self.memory.peak_bytes as f64);
        let (least, limit) = (milliseconds(*predicted_ms), limit.name());
        format!("{}, {}: at least {least} ({limit}), {peak}", self.implementation, size(self))
    }

    fn body(&self) -> Markup {
        body(&[self])
    }
}

impl ReportPart for TpuTable {
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
