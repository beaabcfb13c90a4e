//! Programs that compute one loss, side by side: what `assay.bench` measured.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use assay_core::text::markdown_escaped;
use assay_schema::programs::{BenchedProgram, BenchedSize, BoundTimes, CallMemory, ProgramBench};
use maud::{Markup, html};

use super::number::{bytes, clipped, milliseconds, shape, short};
use super::part::ReportPart;
use super::plot::{Axis, Bar, Curve, Tone, bars, curves, key};

/// The tones of the curves of a plot, in the order of the programs.
const TONES: [Tone; 4] = [Tone::First, Tone::Second, Tone::Third, Tone::Faint];

/// A line of the table: the program, its times, how many times as long as the bound it takes, and its memory in units of the logits.
type ProgramLine = [String; 8];

const HEAD: [&str; 8] = ["program", "median", "90 %", "of the bound", "forward", "backward", "peak", "kept"];

/// Programs of which a page draws curves: there are no more tones.
const DRAWN: usize = TONES.len();

/// Writes the bench as text for a terminal.
///
/// ```
/// # let json = r#"{"kernel": "mine", "loss": "trl", "shape": [1, 2, 8], "dtype": "f32", "device": "cpu", "versions": [], "threads": 2,
/// #   "logits_bytes": 64, "bound": {"name": "a copy of the logits", "times": {"calls": 3, "median": 1e-3, "least": 1e-3, "p90": 1e-3}},
/// #   "programs": [{"name": "mine", "outcome": "timed", "times": {"calls": 3, "median": 2e-3, "least": 2e-3, "p90": 2e-3}}]}"#;
/// let bench: assay_schema::programs::ProgramBench = serde_json::from_str(json).unwrap();
/// assert!(assay_report::programs_text(&bench).contains("2.00 ms"));
/// ```
pub fn programs_text(bench: &ProgramBench) -> String {
    let mut text = format!("{}\n\n", bench.summary());
    let rows: Vec<ProgramLine> = std::iter::once(HEAD.map(String::from)).chain(table(bench)).collect();
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    for row in &rows {
        let mut line = format!("{:<1$}", row[0], width(0));
        for (i, cell) in row.iter().enumerate().skip(1) {
            let _ = write!(line, "  {cell:>0$}", width(i));
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for note in notes(bench) {
        let _ = write!(text, "\n{note}");
    }
    text + "\n"
}

/// Writes the bench as Markdown.
///
/// ```
/// # let json = r#"{"kernel": "mine", "loss": "trl", "shape": [1, 2, 8], "dtype": "f32", "device": "cpu", "versions": [], "threads": 2,
/// #   "logits_bytes": 64, "bound": {"name": "a copy of the logits", "times": {"calls": 3, "median": 1e-3, "least": 1e-3, "p90": 1e-3}},
/// #   "programs": [{"name": "mine", "outcome": "timed", "times": {"calls": 3, "median": 2e-3, "least": 2e-3, "p90": 2e-3}}]}"#;
/// let bench: assay_schema::programs::ProgramBench = serde_json::from_str(json).unwrap();
/// assert!(assay_report::programs_markdown(&bench).contains("| mine | 2.00 ms |"));
/// ```
pub fn programs_markdown(bench: &ProgramBench) -> String {
    let line = |row: &ProgramLine| format!("| {} |\n", row.each_ref().map(|cell| markdown_escaped(cell)).join(" | "));
    let heading = line(&HEAD.map(String::from));
    let mut text = format!("{}\n\n{heading}|---|--:|--:|--:|--:|--:|--:|--:|\n", markdown_escaped(&bench.summary()));
    for row in table(bench) {
        text += &line(&row);
    }
    for note in notes(bench) {
        let _ = write!(text, "\n- {}", markdown_escaped(&note));
    }
    text + "\n"
}

/// The rows of the table: the programs that were timed, and the bound.
fn table(bench: &ProgramBench) -> Vec<ProgramLine> {
    let time = |seconds: f64| milliseconds(seconds * 1e3);
    let dash = || "–".to_string();
    let of_logits = |n: u64| bench.in_logits(n).map_or_else(dash, |x| format!("{x:.2}"));
    let program = |BenchedProgram { name, times, memory, .. }: &BenchedProgram| {
        let times = times.as_ref()?;
        let of_memory = |of: fn(&CallMemory) -> Option<u64>| memory.as_ref().and_then(of).map_or_else(dash, of_logits);
        let share = share_of_bound(bench, times.median).unwrap_or_else(dash);
        Some([
            clipped(name),
            time(times.median),
            time(times.p90),
            share,
            of_memory(|memory| memory.forward),
            of_memory(|memory| memory.backward),
            of_memory(|memory| Some(memory.peak)),
            of_memory(|memory| memory.kept),
        ])
    };
    let mut rows: Vec<ProgramLine> = bench.programs.iter().filter_map(program).collect();
    if let Some(BoundTimes { name, times, .. }) = &bench.bound {
        let nothing = [dash(), dash(), dash(), dash()];
        let [forward, backward, peak, kept] = nothing;
        rows.push([clipped(name), time(times.median), time(times.p90), "1 ×".into(), forward, backward, peak, kept]);
    }
    rows
}

/// Returns how many times as long as the bound a program takes.
fn share_of_bound(bench: &ProgramBench, median: f64) -> Option<String> {
    bench.bound.as_ref().map(|bound| format!("{} ×", short(median / bound.times.median)))
}

/// The sentences below the table.
fn notes(bench: &ProgramBench) -> Vec<String> {
    let mut notes = Vec::new();
    for BenchedProgram { name, outcome, why_untimed, memory, .. } in &bench.programs {
        if let Some(why) = why_untimed {
            notes.push(format!("{}  {}: {}", outcome.word(), clipped(name), clipped(why)));
        }
        if let Some(leaked) = memory.as_ref().and_then(|memory| memory.leaked).filter(|leaked| *leaked > 0) {
            let of_logits = bench.in_logits(leaked).map_or("–".into(), short);
            let each = bytes(leaked as f64);
            notes.push(format!("leak  {}: each call leaves {each} behind, {of_logits} × the logits", clipped(name)));
        }
    }
    let of_bound = |of: fn(&BoundTimes) -> Option<f64>| bench.bound.as_ref().and_then(of);
    let rates = [
        ("the copy moves", of_bound(|bound| bound.gb_per_s)),
        ("the device's memory gives at most", of_bound(|bound| bound.device_gb_per_s)),
    ];
    let rates: Vec<String> =
        rates.into_iter().filter_map(|(what, rate)| Some(format!("{what} {} GB/s", short(rate?)))).collect();
    if !rates.is_empty() {
        notes.push(rates.join("; "));
    }
    if bench.programs.iter().any(|program| program.memory.is_some()) {
        let unit = bytes(bench.logits_bytes as f64);
        notes.push(format!(
            "memory: beyond the inputs, over the logits' {unit}; kept is what the first call left behind"
        ));
    }
    if let Some(why) = &bench.no_memory {
        notes.push(format!("ignored  memory: {}", clipped(why)));
    }
    for growth in &bench.growths {
        let exponent = short(growth.exponent);
        notes.push(format!(
            "{}: time grows as {}^{exponent}, by {} sizes",
            clipped(&growth.program),
            clipped(&growth.size),
            growth.sizes
        ));
    }
    notes
}

/// Draws the time of each program over one size; the other is as in the main problem.
fn sweep(bench: &ProgramBench, name: &str) -> Markup {
    let sizes = |point: &BenchedSize| {
        if name == "tokens" { [point.tokens, point.vocabulary] } else { [point.vocabulary, point.tokens] }
    };
    let tokens = bench.shape.iter().take(2).fold(1, |all: usize, extent| all.saturating_mul(*extent));
    let vocabulary = bench.shape.last().copied().unwrap_or(0);
    let others = if name == "tokens" { vocabulary } else { tokens };
    let at = |program: &str| -> Vec<(f64, f64)> {
        let own = bench.sizes.iter().filter(|point| point.program == program).map(|point| (sizes(point), point.median));
        let mut points: Vec<(f64, f64)> = own
            .filter(|([_, other], _)| *other == others)
            .map(|([size, _], median)| (size as f64, median * 1e3))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let programs: Vec<&str> = bench
        .programs
        .iter()
        .take(DRAWN)
        .map(|program| program.name.as_str())
        .filter(|name| at(name).len() > 1)
        .collect();
    if programs.is_empty() {
        return html! {};
    }
    let drawn: Vec<(Tone, &str)> = TONES.into_iter().zip(programs).collect();
    let all: Vec<Curve> = drawn.iter().map(|(tone, program)| Curve { tone: *tone, points: at(program) }).collect();
    let axis = Axis { format: milliseconds, from_zero: true };
    html! { (key(&drawn)) (curves(&all, &axis, &html! { "median time by " (name) })) }
}

impl ReportPart for ProgramBench {
    fn passed(&self) -> Option<bool> {
        None
    }

    fn summary(&self) -> String {
        let Self { kernel, loss, dtype, device, threads, .. } = self;
        let clock = self.clock_mhz.map_or(String::new(), |mhz| format!(" at {mhz:.0} MHz"));
        let on = if device == "cpu" { format!("{threads} threads") } else { format!("{}{clock}", clipped(device)) };
        let versions: BTreeSet<&String> = self.versions.iter().collect();
        let extents = shape(&self.shape);
        let mut said = format!("{}, loss {}, {extents} {}, {on}", clipped(kernel), clipped(loss), clipped(dtype));
        for version in versions {
            let _ = write!(said, ", {}", clipped(version));
        }
        said
    }

    fn body(&self) -> Markup {
        let timed = |i: usize, program: &BenchedProgram| {
            let median = program.times.as_ref()?.median;
            let tone = if i == 0 { Tone::First } else { Tone::Second };
            let of_bound = share_of_bound(self, median).map_or(String::new(), |share| format!(": {share}"));
            let note = format!("{}{of_bound}", milliseconds(median * 1e3));
            Some(Bar::single(program.name.as_str(), median, tone, note))
        };
        let mut times: Vec<Bar> = self.programs.iter().enumerate().filter_map(|(i, each)| timed(i, each)).collect();
        let bound = self.bound.as_ref();
        let of_bound = |BoundTimes { name, times, .. }: &BoundTimes| {
            Bar::single(name.as_str(), times.median, Tone::Faint, milliseconds(times.median * 1e3))
        };
        times.extend(bound.map(of_bound));
        let held = |program: &BenchedProgram| {
            let n = program.memory.as_ref()?.peak as f64;
            let of_logits = self.in_logits(program.memory.as_ref()?.peak).map_or("–".into(), short);
            let note = format!("{}: {of_logits} × the logits", bytes(n));
            Some(Bar::single(program.name.as_str(), n, Tone::First, note))
        };
        let held: Vec<Bar> = self.programs.iter().filter_map(held).collect();
        html! {
            (bars(&times, bound.map(|bound| bound.times.median), &html! { "median time, forward and backward, in turns; the line is the bound" }))
            (bars(&held, Some(self.logits_bytes as f64), &html! { "peak beyond the inputs; the line is the logits' own size" }))
            (sweep(self, "tokens"))
            (sweep(self, "vocabulary"))
            div.scroll { table {
                thead { tr { @for name in HEAD { th { (name) } } } }
                tbody { @for [name, figures @ ..] in table(self) {
                    tr { th { (clipped(&name)) } @for figure in figures { td.number { (figure) } } }
                } }
            } }
            ul { @for note in notes(self) { li { (note) } } }
        }
    }
}
