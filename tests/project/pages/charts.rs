//! The charts of tables that are data: one of each, next to a summary.

use std::fs;

use assay::report::plot::{Bar, Markup, Tone, bars};

use super::{hold, standalone};

#[test]
fn pages_charts_are_of_the_data() {
    hold("docs/data/mutants.svg", &standalone(bars(&suites(), None, &Markup::default())));
    hold("docs/data/support.svg", &standalone(bars(&support(), None, &Markup::default())));
    hold("docs/data/kappas.svg", &standalone(bars(&kappas(), Some(1.0), &Markup::default())));
    hold("docs/data/gpu-programs.svg", &standalone(bars(&programs(), None, &Markup::default())));
    hold("docs/data/judge-times.svg", &standalone(bars(&judge_times(), None, &Markup::default())));
    hold("docs/data/native-times.svg", &standalone(bars(&native_times(), Some(1.0), &Markup::default())));
    hold("docs/data/settings-times.svg", &standalone(bars(&settings_times(), Some(1.0), &Markup::default())));
    hold("docs/data/loss-times.svg", &standalone(bars(&loss_times(), Some(1.0), &Markup::default())));
}

/// Returns the rows of the first table of a page that has this head, in cells without marks.
fn table(page: &str, head: &str) -> Vec<Vec<String>> {
    let text = fs::read_to_string(page).unwrap();
    let rows = text.lines().skip_while(|line| !line.starts_with(head)).skip(2).take_while(|line| line.starts_with('|'));
    let cell = |cell: &str| cell.trim().replace("**", "");
    let rows: Vec<Vec<String>> = rows.map(|row| row.trim_matches('|').split('|').map(cell).collect()).collect();
    assert!(!rows.is_empty(), "{page}: no table `{head}`");
    rows
}

/// Mutants that each suite catches, and those that it accepts.
fn suites() -> Vec<Bar> {
    let rows = table("docs/mutants.md", "| tests | caught |");
    let bar = |cells: &Vec<String>| {
        let [caught, passes] = [1, 2].map(|at| cells[at].parse::<f64>().unwrap());
        Bar {
            name: cells[0].clone(),
            parts: vec![(caught, Tone::First), (passes, Tone::Bad)],
            note: format!("{caught} caught, {passes} accepted"),
        }
    };
    rows.iter().map(bar).collect()
}

/// Choices of a spec that each implementation computes.
fn support() -> Vec<Bar> {
    let text = fs::read_to_string("docs/data/support.csv").unwrap();
    let (head, rows) = text.split_once('\n').unwrap();
    let rows: Vec<Vec<&str>> = rows.lines().map(|row| row.rsplit(',').collect()).collect();
    // Choices have commas in quotes: columns are counted from the end.
    let ids: Vec<&str> = head.rsplit(',').collect();
    let columns = ids.iter().enumerate().take(ids.len() - 2).rev();
    let bar = |(at, ids): (usize, &&str)| {
        let computed = rows.iter().filter(|row| row[at] == "yes").count();
        let (first, others) = ids.split_once(' ').unwrap_or((ids, ""));
        let name = if others.is_empty() { first.to_string() } else { format!("{first} and its cuts") };
        Bar::single(name, computed as f64, Tone::First, format!("{computed} of {}", rows.len()))
    };
    columns.map(bar).collect()
}

/// The largest share of what is allowed that a gate of each class has needed.
fn kappas() -> Vec<Bar> {
    let rows = table("docs/tolerances.md", "| class          | gates |");
    let bar = |cells: &Vec<String>| {
        let [needed, allowed] = [3, 4].map(|at| cells[at].parse::<f64>().unwrap());
        Bar::single(cells[0].clone(), needed / allowed, Tone::First, format!("{needed} of {allowed}: {}", cells[2]))
    };
    rows.iter().map(bar).collect()
}

/// Lower bounds of time of the programs for GPUs at one size.
fn programs() -> Vec<Bar> {
    let rows = table("docs/gpu.md", "| target | shape | dtype | program |");
    let bar = |cells: &Vec<String>| {
        let ms: f64 = cells.last().unwrap().parse().unwrap();
        Bar::single(format!("{} {}", cells[0], cells[3]), ms, Tone::First, format!("{ms:.2} ms"))
    };
    rows.iter().map(bar).collect()
}

/// Returns the largest of the numbers in a cell of times, such as `5.2 to 6.0` and `1.3 and 1.4 ×`.
fn largest(cell: &str) -> f64 {
    let numbers = cell.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    numbers.reduce(f64::max).unwrap_or_else(|| panic!("{cell}: no number"))
}

/// The processor time, in ns, that the reference and the judge take for a logit.
fn judge_times() -> Vec<Bar> {
    let rows = table("docs/benches.md", "| shape | dtype | reference |");
    let bars = |cells: &Vec<String>| {
        let bar = |what: &str, cell: &String, tone| {
            Bar::single(format!("{what}, {} {}", cells[0], cells[1]), largest(cell), tone, format!("{cell} ns"))
        };
        [bar("reference", &cells[2], Tone::First), bar("judge", &cells[4], Tone::Second)]
    };
    rows.iter().flat_map(bars).collect()
}

/// The native kernel's time to that of a copy of the logits.
fn native_times() -> Vec<Bar> {
    let rows = table("docs/benches.md", "| dtype | fwd + bwd, 2 threads |");
    let bar = |cells: &Vec<String>| {
        Bar::single(&*cells[0], largest(&cells[2]), Tone::First, format!("{}, {}", cells[2], cells[1]))
    };
    rows.iter().map(bar).collect()
}

/// The largest ratio of a setting's time to that of the plain row.
fn settings_times() -> Vec<Bar> {
    let rows = table("docs/benches.md", "| setting | | f32, forward |");
    let bar = |cells: &Vec<String>| {
        let most = cells[2..].iter().map(|cell| largest(cell)).fold(0.0, f64::max);
        let name = format!("{}, {}", cells[0].replace('`', ""), cells[1]);
        Bar::single(name, most, Tone::First, format!("at most {most:.2} ×"))
    };
    rows.iter().map(bar).collect()
}

/// The time of each program of the record to that of its bound, which is 1 itself and has no bar.
fn loss_times() -> Vec<Bar> {
    let rows = table("docs/benches.md", "| program | ms | × its bound |");
    let bar = |cells: &Vec<String>| {
        let tone = match cells[0].split_once(": ") {
            Some((_, "assay" | "native" | "native-lm-head")) => Tone::First,
            _ => Tone::Second,
        };
        // A ratio to another program than the table's bound names it.
        let (ratio, of) = cells[2].split_once(' ').unwrap_or((&cells[2], "(bound)"));
        Bar::single(&*cells[0], largest(ratio), tone, format!("{ratio} × {of}, {} ms", cells[1]))
    };
    rows.iter().filter(|cells| cells[2] != "1").map(bar).collect()
}
