//! Times and memory of one implementation on this machine: results of `assay bench`.

use assay_schema::bench::{BenchFigures, BenchKernel};
use maud::{Markup, html};

use super::number::{bytes, clipped, milliseconds, ran, shape, short};
use super::part::ReportPart;
use super::plot::{Bar, Tone, bars, key};

/// The opponents that are bounds rather than rivals.
const BOUNDS: [&str; 2] = ["copy", "gemm"];

fn times(bench: &BenchFigures) -> Vec<Bar> {
    let (own, median) = (&bench.implementation, bench.step_s_p50);
    let mut all = vec![Bar::single(own.as_str(), median, Tone::First, milliseconds(median * 1e3))];
    all.extend(bench.ratios.0.iter().map(|(opponent, ratio)| {
        let tone = if BOUNDS.contains(&opponent.as_str()) { Tone::Faint } else { Tone::Second };
        let seconds = median / ratio;
        let note = format!("{}: {own} takes {} ×", milliseconds(seconds * 1e3), short(*ratio));
        Bar::single(opponent.as_str(), seconds, tone, note)
    }));
    all
}

fn memory(bench: &BenchFigures) -> Vec<Bar> {
    let parts = [
        ("arguments", bench.argument_bytes),
        ("outputs", bench.output_bytes),
        ("outputs that lie over arguments", bench.alias_bytes),
        ("scratch", bench.temp_bytes),
        ("peak in use", bench.peak_bytes_in_use),
    ];
    let known = parts.into_iter().filter_map(|(name, n)| Some((name, n? as f64)));
    known.map(|(name, n)| Bar::single(name, n, Tone::First, bytes(n))).collect()
}

/// Describes the largest rate of the device's memory, with its source.
fn device_rate(bench: &BenchFigures) -> String {
    let Some(rate) = bench.device_gb_per_s else { return "–".into() };
    let from = bench.device_gb_per_s_from.as_deref().map_or(String::new(), |from| format!(" ({})", clipped(from)));
    format!("{} GB/s{from}", short(rate))
}

/// A line for each kernel that was timed alone.
fn kernels(kernels: &[BenchKernel]) -> Markup {
    // A driver that does not report a figure leaves a dash, not a 0.
    let known = |figure: Option<u32>| figure.map_or("–".to_string(), |figure| figure.to_string());
    html! {
        h3 { "Kernels" }
        p { "As the GPU's driver has assembled them. Local memory is where registers are spilled to." }
        div.scroll { table {
            thead { tr {
                @for head in [
                    "kernel", "median", "fastest", "registers", "local bytes", "static shared bytes",
                    "dynamic shared bytes", "architecture", "CTAs a multiprocessor", "clusters",
                ] { th { (head) } }
            } }
            tbody { @for kernel in kernels {
                @let assembled = &kernel.assembled;
                tr {
                    th { (clipped(&kernel.name)) }
                    td.number { (milliseconds(kernel.s_p50 * 1e3)) }
                    td.number { (milliseconds(kernel.s_min * 1e3)) }
                    td.number { (known(assembled.registers)) }
                    td.number { (known(assembled.local_bytes)) }
                    td.number { (assembled.static_shared_bytes) }
                    td.number { (assembled.dynamic_shared_bytes) }
                    td.number { (assembled.binary_version.map_or("–".into(), |version| format!("sm_{version}"))) }
                    td.number { (known(assembled.ctas_a_multiprocessor)) }
                    td.number { (known(assembled.clusters)) }
                }
            } }
        } }
    }
}

impl ReportPart for BenchFigures {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let Self { implementation, devices, lowering, dtype, step_s_p50, .. } = self;
        let ran = ran(implementation, *devices, lowering.as_deref());
        format!("{ran}, {} {dtype}: {} a step", shape(&self.shape), milliseconds(step_s_p50 * 1e3))
    }

    fn body(&self) -> Markup {
        let seconds = |s: f64| milliseconds(s * 1e3);
        let rate = |rate: f64| format!("{} GB/s", short(rate));
        let percent = |share: f64| format!("{} %", short(100.0 * share));
        // Units are those of a reader: seconds of the record become a time with its unit, and shares become percents.
        let rows = [
            ("median step", seconds(self.step_s_p50)),
            ("90th percentile", seconds(self.step_s_p90)),
            ("fastest and slowest", format!("{} and {}", seconds(self.step_s_min), seconds(self.step_s_max))),
            ("first call", seconds(self.first_call_s)),
            ("steps timed", self.steps.to_string()),
            ("logits read and dlogits written", self.gb_per_s.map_or("–".into(), rate)),
            ("device", self.device.as_deref().map_or("–".into(), clipped)),
            ("kernels alone, by the device's clock", self.kernel_s_p50.map_or("–".into(), seconds)),
            ("their fastest launch", self.kernel_s_min.map_or("–".into(), seconds)),
            ("launches timed", self.kernel_launches.map_or("–".into(), |launches| launches.to_string())),
            ("by them logits read and dlogits written", self.kernel_gb_per_s.map_or("–".into(), rate)),
            ("by a copy on the device, between them", self.device_copy_gb_per_s.map_or("–".into(), rate)),
            ("of the copy's rate is reached", self.device_copy_share.map_or("–".into(), percent)),
            ("the device's memory gives at most", device_rate(self)),
            ("of which is reached", self.device_share.map_or("–".into(), percent)),
            ("threads", self.threads.to_string()),
            ("instruction set", self.isa.as_deref().map_or("–".into(), clipped)),
        ];
        let memory = memory(self);
        html! {
            h3 { "Time" }
            p { "Medians of steps that took turns, after the first answer was judged." }
            (key(&[(Tone::First, "measured"), (Tone::Second, "taken turns with"), (Tone::Faint, "the bound of this machine")]))
            (bars(&times(self), None, &html! { "time of one step" }))
            h3 { "Memory" }
            @if memory.is_empty() {
                p.note { "Nothing here reports its memory." }
            } @else {
                (bars(&memory, None, &html! { "bytes on the first device" }))
            }
            div.scroll { table { tbody {
                @for (name, value) in &rows { tr { th { (name) } td.number { (value) } } }
            } } }
            @if !self.kernels.is_empty() { (kernels(&self.kernels)) }
        }
    }
}
