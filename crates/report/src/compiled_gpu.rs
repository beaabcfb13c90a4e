//! Programs compiled for GPUs that were not there: results of `assay compile` of a GPU.

use assay_schema::gpu::{GpuLaunch, GpuLimit, GpuProgramReport, GpuTable, GpuTimeBound};
use maud::{Markup, html};

use super::number::{bytes, clipped, count, milliseconds, shape, short};
use super::part::ReportPart;
use super::plot::{Bar, Tone, bars, key};

fn size(program: &GpuProgramReport) -> String {
    format!("{} {}, for {}", shape(&program.shape), program.dtype, program.target)
}

/// Returns a program's name with the options that its loss adds.
fn name(program: &GpuProgramReport) -> String {
    let bonus = if program.entropy_coef == 0.0 { "" } else { ", entropy bonus" };
    format!("{}{bonus}", program.implementation)
}

/// The pipe that is busiest; a program without a kernel of PTX has none.
fn pipe(bound: &GpuTimeBound) -> Option<&str> {
    Some(bound.pipe.as_str()).filter(|pipe| !pipe.is_empty())
}

fn limit(bound: &GpuTimeBound) -> String {
    match bound.limit {
        GpuLimit::Hbm => "HBM".into(),
        GpuLimit::Pipe => clipped(&bound.pipe),
    }
}

/// Programs of one shape, dtype and target.
fn together(programs: &[&GpuProgramReport]) -> Markup {
    let Some(first) = programs.first() else { return html! {} };
    let (mut times, mut memory) = (Vec::new(), Vec::new());
    for program in programs {
        let (bound, name) = (&program.bound, name(program));
        times.push(Bar::single(format!("{name}, HBM traffic"), bound.hbm_ms, Tone::First, milliseconds(bound.hbm_ms)));
        if let Some(pipe) = pipe(bound) {
            times.push(Bar::single(format!("{name}, {pipe}"), bound.pipe_ms, Tone::Third, milliseconds(bound.pipe_ms)));
        }
        let peak = program.memory.peak_bytes as f64;
        memory.push(Bar::single(name, peak, Tone::First, bytes(peak)));
    }
    // An LM head has four extents, and then no logits need to lie anywhere.
    let width = if first.dtype == "f32" { 4.0 } else { 2.0 };
    let logits = (first.shape.len() == 3).then(|| first.shape.iter().map(|&n| n as f64).product::<f64>() * width);
    html! {
        h3 { (clipped(&size(first))) }
        (bars(&times, None, &html! { "time of one step: the longer of a program's two is its lower bound; stalls are in neither" }))
        (bars(&memory, logits, &html! { "peak memory" @if logits.is_some() { "; the line is the size of the logits" } }))
    }
}

/// A figure of each launch.
fn launch_figures(program: &GpuProgramReport, figure: impl Fn(&GpuLaunch) -> String) -> String {
    let figures: Vec<String> = program.launches.iter().map(figure).collect();
    if figures.is_empty() { "–".into() } else { figures.join(", ") }
}

/// Runs of rows that share shape, dtype and target.
fn body(rows: &[&GpuProgramReport]) -> Markup {
    html! {
        p {
            "Compiled ahead of time, run on no device: memory, registers and spills are facts of these compilers, times are lower bounds at the boost clock and the documented bandwidth."
        }
        (key(&[(Tone::First, "HBM traffic, memory"), (Tone::Third, "the busiest pipe")]))
        @for group in rows.chunk_by(|a, b| size(a) == size(b)) { (together(group)) }
        div.scroll { table {
            thead { tr {
                th { "target" } th { "shape" } th { "program" } th.number { "peak" } th.number { "registers" } th.number { "spills" }
                th.number { "shared a CTA" } th.number { "CTAs an SM" } th.number { "HBM" } th.number { "bound" } th { "by" }
                th.number { "pipe / HBM" }
            } }
            tbody { @for row in rows { tr {
                td { (clipped(&row.target)) } td { (shape(&row.shape)) " " (clipped(&row.dtype)) } td { (clipped(&name(row))) }
                td.number { (bytes(row.memory.peak_bytes as f64)) }
                td.number { (launch_figures(row, |launch| launch.registers.to_string())) }
                td.number { (launch_figures(row, |launch| count(launch.spill_bytes.into()))) }
                td.number { (launch_figures(row, |launch| bytes(launch.shared_bytes.into()))) }
                td.number { (launch_figures(row, |launch| launch.resident.to_string())) }
                td.number { (bytes(row.hbm_bytes as f64)) } td.number { (milliseconds(row.bound.predicted_ms)) } td { (limit(&row.bound)) }
                td.number { (pipe(&row.bound).map_or("–".into(), |_| short(row.bound.pipe_ms / row.bound.hbm_ms))) }
            } } }
        } }
    }
}

impl ReportPart for GpuProgramReport {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let peak = bytes(self.memory.peak_bytes as f64);
        let least = milliseconds(self.bound.predicted_ms);
        format!("{}, {}: at least {least} ({}), {peak}", name(self), size(self), limit(&self.bound))
    }

    fn body(&self) -> Markup {
        body(&[self])
    }
}

impl ReportPart for GpuTable {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        format!("{} programs for GPUs, compiled ahead of time", self.gpu_rows.len())
    }

    fn body(&self) -> Markup {
        body(&self.gpu_rows.iter().collect::<Vec<_>>())
    }
}
