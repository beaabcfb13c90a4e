//! Bad files, options, kernels and signals against every command: no panic, no hang, nothing left, no character that drives a terminal,
//! and each failure one clear error whose exit code is not that of a failed verdict.
//!
//! `make hostile` runs all of it, for minutes; `make test` a few of each kind. `ASSAY_UNDER_TEST` names another build of the command.
//! Trials, mutants and moments are seeded, so that a finding is found again.

mod entries;
mod kills;
mod kinds;
mod mutants;
mod options;
mod sandbox;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use entries::ENTRIES;
use sandbox::{Finding, Trial, note_shared_folders};

/// The most findings that are printed.
const SHOWN: usize = 400;

/// The number of runs of each kind.
struct Extent {
    /// Every which bad input is run.
    every: usize,
    kills: u64,
    mutants: u64,
}

/// Every bad input by hand: files, options, outputs, folders and kernels.
fn inputs() -> Vec<Trial> {
    let of_files = ENTRIES.iter().flat_map(|entry| entry.trials().into_iter().chain(entry.awkward()));
    of_files.chain(options::trials()).chain(workers::trials()).collect()
}

/// Runs `count` trials by their numbers, some at the same time, and returns what was found of each that has a fault.
fn run_all(count: usize, run: impl Fn(usize) -> (String, Vec<Finding>) + Sync) -> Vec<(usize, String, Finding)> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from).min(8) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    let (name, findings) = run(i);
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    found.extend(findings.into_iter().map(|finding| (i, name.clone(), finding)));
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(i, ..)| *i);
    found
}

/// Runs everything to an extent, prints the table of entry points and kinds, and every finding.
fn try_all(extent: &Extent) {
    note_shared_folders();
    let of_all = inputs();
    let trials: Vec<Trial> = of_all.iter().step_by(extent.every).cloned().collect();
    println!("{}", table(&trials));
    let shown = |trial: &Trial| format!("{}, {}: {}", trial.entry, trial.kind, trial.name);
    let mut found = run_all(trials.len(), |i| (shown(&trials[i]), trials[i].run()));
    found.extend(run_all(usize::try_from(extent.kills).unwrap(), |i| kills::kill_number(i as u64)));
    found.extend(run_all(usize::try_from(extent.mutants).unwrap(), |i| {
        // Where a few are run, they are of all entries.
        let trial = mutants::trial((i as u64).wrapping_mul(37));
        (shown(&trial), trial.run())
    }));
    for (_, name, Finding { fault, what }) in found.iter().take(SHOWN) {
        println!("point {} {fault}: {}: {}", *fault as u8, name.escape_debug(), what.escape_debug());
    }
    let mut points = BTreeMap::<u8, usize>::new();
    found.iter().for_each(|(.., finding)| *points.entry(finding.fault as u8).or_default() += 1);
    let points = points.iter().map(|(point, count)| format!("{count} of point {point}")).collect::<Vec<_>>().join(", ");
    let counts = format!("{} inputs, {} kills, {} mutants", trials.len(), extent.kills, extent.mutants);
    println!(
        "hostile, {}: {counts}: {} findings{}{points}",
        entries::version(),
        found.len(),
        if points.is_empty() { "" } else { ": " }
    );
    assert!(found.is_empty(), "{} findings", found.len());
}

/// The number of inputs of each entry point and kind.
fn table(trials: &[Trial]) -> String {
    let kinds: BTreeSet<&str> = trials.iter().map(|trial| trial.kind).collect();
    let mut rows = BTreeMap::<&str, BTreeMap<&str, usize>>::new();
    for trial in trials {
        *rows.entry(trial.entry).or_default().entry(trial.kind).or_default() += 1;
    }
    let cells = |name: &str, cell: &dyn Fn(&str) -> String, sum: usize| {
        let cells: String = kinds.iter().map(|kind| format!("{:>9}", cell(kind))).collect();
        format!("{name:<34}{cells}{sum:>9}\n")
    };
    let head: String = kinds.iter().map(|kind| format!("{kind:>9}")).collect();
    let mut text = format!("{:<34}{head}{:>9}\n", "entry point", "all");
    for (name, row) in &rows {
        text += &cells(name, &|kind| row.get(kind).map_or("–".into(), usize::to_string), row.values().sum());
    }
    let of_kind = |kind: &str| trials.iter().filter(|trial| trial.kind == kind).count().to_string();
    text + &cells("all", &of_kind, trials.len())
}

#[test]
fn hostile_valid_files_are_taken() {
    let found = run_all(ENTRIES.len(), |i| {
        let mut trial = ENTRIES[i].valid();
        // What is valid here in the file is not enough for these: there is no such library, and no Python.
        if matches!(ENTRIES[i].format, kinds::Format::Library) || ENTRIES[i].name == "panel LIST" {
            trial.ends = sandbox::Ends::Refused;
        }
        let sandbox = sandbox::Sandbox::new(&trial.files);
        let ran = sandbox.wait(sandbox.start(&trial.args, &trial.environment));
        let expected = if trial.ends == sandbox::Ends::Refused { 2 } else { 0 };
        assert!(ran.status.is_some_and(|status| status.code() == Some(expected)), "{}: {}", trial.entry, ran.text());
        (trial.entry.into(), trial.run())
    });
    let shown: Vec<String> = found.iter().map(|(_, name, finding)| format!("{name}: {}", finding.what)).collect();
    assert!(shown.is_empty(), "{shown:#?}");
}

#[test]
fn hostile_few_inputs_kills_and_mutants_find_nothing() {
    try_all(&Extent { every: 29, kills: 4, mutants: 50 });
}

#[test]
#[ignore = "minutes: make hostile"]
fn hostile_inputs_kills_and_mutants_find_nothing() {
    let count = inputs().len();
    assert!(count >= 700, "{count}");
    try_all(&Extent { every: 1, kills: 240, mutants: 10_000 });
}
