//! [`Summary`]: what many checks of one implementation came to, and a report of several in a few lines.

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets::NOTHING, presets::UTF8_FULL_CONDENSED};

use super::judge::Status;
use super::report::{Check, Compared, Ignored, Report, on_devices, with_lowering};
use assay_schema::verdicts::{Summary, WorstKappa};

/// TokenColumns of a terminal that lists for a person to read keep to.
pub const COLUMNS: u16 = 100;

/// What was ignored for one reason is named up to here, and counted beyond.
const NAMED: usize = 4;

/// The summary of those `checks` that are of `implementation` on `devices` devices, whose runs took `run`.
pub fn summary_of(implementation: &str, devices: usize, checks: &[Check], run: Option<Duration>) -> Summary {
    let own: Vec<&Check> = checks
        .iter()
        .filter(|check| (check.implementation.as_str(), check.devices) == (implementation, devices))
        .collect();
    let share = |check: &Check| {
        let allowed = check.kappa_allowed.filter(|&allowed| allowed > 0.0 && check.verdict != Status::NotCompared)?;
        // A value that is NaN or ∞ where it should not be, or finite where it should be neither, leaves no worst error.
        Some(if check.worst.is_some() { check.kappa_needed / allowed } else { f64::INFINITY })
    };
    let shares = own.iter().filter_map(|check| Some((share(check)?, check)));
    // Of several the first.
    let worst = shares.rev().max_by(|(a, _), (b, _)| a.total_cmp(b));
    Summary {
        implementation: implementation.into(),
        devices,
        lowering: own.iter().find_map(|check| check.lowering).map(String::from),
        checks: own.len(),
        failed: own.iter().filter(|check| check.verdict.failed()).count(),
        not_compared: own.iter().filter(|check| check.verdict == Status::NotCompared).count(),
        worst_kappa: worst.map(|(share, check)| WorstKappa {
            share,
            output: check.output.clone(),
            fixture: check.fixture.clone(),
        }),
        run_s: run.map(|run| run.as_secs_f64()),
    }
}

impl Report {
    /// A line an implementation. Where one would be too long, the check that is its worst goes unnamed.
    pub fn summary(&self) -> String {
        if self.implementations.is_empty() {
            return String::new();
        }
        let mut placed: Vec<bool> = self.implementations.iter().map(|of| of.worst_kappa.is_some()).collect();
        loop {
            let table = self.summary_table(&placed);
            let too_wide = table.lines().any(|line| line.chars().count() > COLUMNS.into());
            let length = |i: &usize| self.implementations[*i].worst_kappa.as_ref().map(|worst| place(worst).len());
            match (0..placed.len()).filter(|&i| placed[i]).max_by_key(length) {
                Some(longest) if too_wide => placed[longest] = false,
                _ => return table,
            }
        }
    }

    /// Those lines, with the worst check named where `placed` says so.
    fn summary_table(&self, placed: &[bool]) -> String {
        let any = |count: fn(&Summary) -> usize| self.implementations.iter().any(|of| count(of) > 0);
        let (failed, nothing) = (any(|of| of.failed), any(|of| of.not_compared));
        let mut header = vec!["impl", "checks"];
        header.extend(failed.then_some("failed"));
        header.extend(nothing.then_some("not compared"));
        header.push("run, s");
        let numbers = 1..header.len();
        header.push("worst κ, of the κ allowed");
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header(header);
        for column in numbers {
            table.column_mut(column).expect("in the header").set_cell_alignment(CellAlignment::Right);
        }
        for (of, &placed) in self.implementations.iter().zip(placed) {
            let ran = with_lowering(on_devices(&of.implementation, of.devices), of.lowering.as_deref());
            let mut row = vec![ran, of.checks.to_string()];
            row.extend(failed.then(|| of.failed.to_string()));
            row.extend(nothing.then(|| of.not_compared.to_string()));
            row.push(of.run_s.map_or("–".into(), |seconds| format!("{seconds:.2}")));
            row.push(match &of.worst_kappa {
                _ if of.checks == of.not_compared => "nothing compared".into(),
                None => "–".into(),
                Some(worst) if placed => format!("{}  {}", share(worst), place(worst)),
                Some(worst) => share(worst),
            });
            table.add_row(row);
        }
        format!("{table}\n")
    }

    /// The ignored checks by their reason, the comparisons of two runs by implementation, and the total line.
    pub fn below_summary(&self) -> String {
        let ignored = self.ignored_by_reason().into_iter().map(|text| ("ignored", text));
        let bits = self.bits_by_implementation().into_iter().map(|text| ("bits", text));
        format!("{}{}\n", notes(ignored.chain(bits)), self.total())
    }

    fn ignored_by_reason(&self) -> Vec<String> {
        let line = |of_reason: Vec<&Ignored>| {
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
        grouped(&self.ignored, |ignored| &ignored.why).into_iter().map(line).collect()
    }

    fn bits_by_implementation(&self) -> Vec<String> {
        let line = |of_pair: Vec<&Compared>| {
            let implementation = &of_pair[0].implementation;
            let outputs = distinct(of_pair.iter().flat_map(|compared| compared.invariance.outputs()));
            let problems = of_pair.len();
            let (mut always, mut sometimes, mut never) = (Vec::new(), Vec::new(), Vec::new());
            for output in outputs {
                match of_pair.iter().filter(|compared| compared.invariance.same.contains(&output)).count() {
                    0 => never.push(output.to_string()),
                    same if same == problems => always.push(output.to_string()),
                    same => sometimes.push(format!("{output} ({same} of {problems} problems)")),
                }
            }
            let list = |names: &[String]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
            let same = list(&[always, sometimes].concat());
            format!("{implementation}: {} in {same}; others in {}", of_pair[0].runs(), list(&never))
        };
        let pair = |compared: &Compared| (compared.implementation.clone(), compared.devices, compared.packed);
        grouped(&self.invariance, pair).into_iter().map(line).collect()
    }
}

/// A number of two digits after the point while it is one that is read so.
fn share(worst: &WorstKappa) -> String {
    match worst.share {
        share if share < 1000.0 => format!("{share:.2}"),
        f64::INFINITY => "∞".into(),
        share => format!("{share:.0e}"),
    }
}

fn place(worst: &WorstKappa) -> String {
    format!("{} of {}", worst.output, worst.fixture)
}

/// `items` of one key together, in the order of their first.
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

/// `names` without those that were there before.
fn distinct<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// Lines below a table, each a word on what it is of and a text, broken at [`COLUMNS`].
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
