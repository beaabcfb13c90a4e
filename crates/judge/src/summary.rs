//! [`ImplementationSummary`]: the checks of one implementation in one line, and a report on several in a few lines.

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets::NOTHING, presets::UTF8_FULL_CONDENSED};

use super::judge::Status;
use super::report::{compared_runs, on_devices, total, with_lowering};
use assay_schema::verdicts::{BitComparison, GateCheck, IgnoredCheck, ImplementationSummary, Verdicts, WorstCheck};

/// The width of a terminal that tables and lists keep to, in characters.
pub const COLUMNS: u16 = 100;

/// The number of checks ignored for one reason that are named; the others are counted.
const NAMED: usize = 4;

/// Summarizes those `checks` that are of `implementation` on `devices` devices, whose runs took `run`.
pub fn summarize(
    implementation: &str,
    devices: usize,
    checks: &[GateCheck],
    run: Option<Duration>,
) -> ImplementationSummary {
    let own: Vec<&GateCheck> = checks
        .iter()
        .filter(|check| (check.implementation.as_str(), check.devices) == (implementation, devices))
        .collect();
    let quotient = |check: &GateCheck| match check.error_over_limit {
        None if check.verdict == Status::NotCompared => None,
        // A value that is NaN or ∞ and should not be, or is finite and should not be, has no error: it is worse than any.
        None => Some(f64::INFINITY),
        quotient => quotient,
    };
    let quotients = own.iter().filter_map(|check| Some((quotient(check)?, check)));
    // Of several equal ones the first is named.
    let worst = quotients.rev().max_by(|(a, _), (b, _)| a.total_cmp(b));
    ImplementationSummary {
        implementation: implementation.into(),
        devices,
        lowering: own.iter().find_map(|check| check.lowering.clone()),
        checks: own.len(),
        failed: own.iter().filter(|check| check.verdict.failed()).count(),
        not_compared: own.iter().filter(|check| check.verdict == Status::NotCompared).count(),
        worst: worst.map(|(error_over_limit, check)| WorstCheck {
            error_over_limit,
            output: check.output.clone(),
            fixture: check.fixture.clone(),
        }),
        run_s: run.map(|run| run.as_secs_f64()),
    }
}

/// Draws a table with a line per implementation; where a line would be too long, its worst check is not named.
pub fn summary(verdicts: &Verdicts) -> String {
    let implementations = &verdicts.implementations;
    if implementations.is_empty() {
        return String::new();
    }
    // Names are dropped one by one, the longest first, until every line fits.
    let mut named: Vec<bool> = implementations.iter().map(|of| of.worst.is_some()).collect();
    loop {
        let table = summary_table(implementations, &named);
        // The table draws its own columns, so that its width is known only after it is drawn: each round drops one name
        // and draws again.
        let too_wide = table.lines().any(|line| line.chars().count() > COLUMNS.into());
        let length = |i: &usize| implementations[*i].worst.as_ref().map(|worst| check_name(worst).len());
        match (0..named.len()).filter(|&i| named[i]).max_by_key(length) {
            Some(longest) if too_wide => named[longest] = false,
            _ => return table,
        }
    }
}

/// Draws the table, with the worst check of each line named if `named` says so.
fn summary_table(implementations: &[ImplementationSummary], named: &[bool]) -> String {
    let any = |count: fn(&ImplementationSummary) -> usize| implementations.iter().any(|of| count(of) > 0);
    // A column whose entries are all 0 is left out.
    let (failed, nothing) = (any(|of| of.failed), any(|of| of.not_compared));
    let mut header = vec!["impl", "checks"];
    header.extend(failed.then_some("failed"));
    header.extend(nothing.then_some("not compared"));
    header.push("run, s");
    let numbers = 1..header.len();
    header.push("worst error / limit");
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(header);
    for column in numbers {
        table.column_mut(column).expect("in the header").set_cell_alignment(CellAlignment::Right);
    }
    for (of, &named) in implementations.iter().zip(named) {
        let ran = with_lowering(on_devices(&of.implementation, of.devices), of.lowering.as_deref());
        let mut row = vec![ran, of.checks.to_string()];
        row.extend(failed.then(|| of.failed.to_string()));
        row.extend(nothing.then(|| of.not_compared.to_string()));
        row.push(of.run_s.map_or("–".into(), |seconds| format!("{seconds:.2}")));
        row.push(match &of.worst {
            _ if of.checks == of.not_compared => "nothing compared".into(),
            None => "–".into(),
            Some(worst) if named => format!("{}  {}", quotient(worst), check_name(worst)),
            Some(worst) => quotient(worst),
        });
        table.add_row(row);
    }
    format!("{table}\n")
}

/// Lists the ignored checks by their reason, the comparisons of two runs by implementation, and the total.
pub fn below_summary(verdicts: &Verdicts) -> String {
    let ignored = ignored_by_reason(&verdicts.ignored).into_iter().map(|text| ("ignored", text));
    let bits = bits_by_implementation(&verdicts.invariance).into_iter().map(|text| ("bits", text));
    format!("{}{}\n", notes(ignored.chain(bits)), total(verdicts))
}

/// Describes the ignored checks, one text per reason.
fn ignored_by_reason(ignored: &[IgnoredCheck]) -> Vec<String> {
    let line = |of_reason: Vec<&IgnoredCheck>| {
        let why = &of_reason[0].why;
        let runs = distinct(of_reason.iter().filter_map(|ignored| ignored.not_run.as_deref()));
        if let [one] = of_reason.as_slice() {
            return format!("{}: {why}", one.what);
        }
        if !runs.is_empty() {
            return format!("{} runs of {}: {why}", of_reason.len(), runs.join(", "));
        }
        let named: Vec<&str> = of_reason.iter().take(NAMED).map(|ignored| ignored.what.as_str()).collect();
        let more = of_reason.len() - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}: {why}", named.join(", "))
    };
    grouped(ignored, |ignored| &ignored.why).into_iter().map(line).collect()
}

/// Describes the comparisons of two runs, one text per implementation and pair of device counts.
fn bits_by_implementation(comparisons: &[BitComparison]) -> Vec<String> {
    let line = |of_pair: Vec<&BitComparison>| {
        let implementation = &of_pair[0].implementation;
        let outputs = distinct(
            of_pair.iter().flat_map(|compared| compared.same.iter().chain(&compared.other).map(String::as_str)),
        );
        let problems = of_pair.len();
        let (mut always, mut sometimes, mut never) = (Vec::new(), Vec::new(), Vec::new());
        for output in outputs {
            match of_pair.iter().filter(|compared| compared.same.iter().any(|same| same == output)).count() {
                0 => never.push(output.to_string()),
                same if same == problems => always.push(output.to_string()),
                same => sometimes.push(format!("{output} ({same} of {problems} problems)")),
            }
        }
        let list = |names: &[String]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
        let same = list(&[always, sometimes].concat());
        format!("{implementation}: {} in {same}; others in {}", compared_runs(of_pair[0]), list(&never))
    };
    let pair = |compared: &BitComparison| (compared.implementation.clone(), compared.devices, compared.packed);
    grouped(comparisons, pair).into_iter().map(line).collect()
}

/// Writes error / limit with two decimals, or in scientific notation from 1000 on.
fn quotient(worst: &WorstCheck) -> String {
    match worst.error_over_limit {
        x if x < 1000.0 => format!("{x:.2}"),
        f64::INFINITY => "∞".into(),
        x => format!("{x:.0e}"),
    }
}

fn check_name(worst: &WorstCheck) -> String {
    format!("{} of {}", worst.output, worst.fixture)
}

/// Groups `items` by a key, in the order in which the keys first occur.
pub fn grouped<'i, T, K: PartialEq>(items: &'i [T], key: impl Fn(&'i T) -> K) -> Vec<Vec<&'i T>> {
    let mut groups: Vec<(K, Vec<&T>)> = Vec::new();
    for item in items {
        let key = key(item);
        match groups.iter_mut().find(|(of, _)| *of == key) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Drops every name that occurred before.
fn distinct<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// Formats the lines below a table, each a keyword and a text, broken at [`COLUMNS`].
pub fn notes(lines: impl IntoIterator<Item = (&'static str, String)>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS);
    for (of, text) in lines {
        table.add_row([format!("{of:<7}"), text]);
    }
    if table.is_empty() {
        return String::new();
    }
    table.column_mut(0).expect("two columns").set_padding((0, 1));
    table.column_mut(1).expect("two columns").set_padding((1, 0));
    format!("{}\n", table.trim_fmt())
}
