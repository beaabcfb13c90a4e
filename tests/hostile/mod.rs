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
use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

use entries::{ENTRIES, VALID};
use sandbox::{Ends, Finding, Trial, note_shared_folders};

/// The numbers of kills and of mutants.
const KILLS: usize = 240;
const MUTANTS: usize = 10_000;

/// The share of all inputs, kills and mutants that is run: one of so many.
#[derive(Clone, Copy)]
struct OneOf(usize);

/// Bad inputs by hand: files, options and kernels, one of so many of those that have many like them, and all others.
fn inputs(OneOf(every): OneOf) -> Vec<Trial> {
    let of_files = ENTRIES.iter().flat_map(|entry| entry.trials().into_iter().chain(entry.awkward()));
    let (told, workers): (Vec<_>, Vec<_>) = workers::trials().into_iter().partition(|trial| trial.look.is_some());
    let many = of_files.chain(options::trials()).chain(workers);
    many.step_by(every).chain(options::singular()).chain(told).collect()
}

/// Runs `count` trials by their numbers, some at the same time, and prints and returns what was found of each that has a fault.
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
                    // At once, as what comes later may take minutes.
                    for Finding { fault, what } in &findings {
                        println!("point {} {fault}: {}: {}", *fault as u8, name.escape_debug(), what.escape_debug());
                    }
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

/// Runs everything to an extent, prints the table of entry points and kinds, and every finding. With another seed, only mutants are others.
fn try_all(share: OneOf) {
    note_shared_folders();
    LazyLock::force(&VALID);
    let mutants = MUTANTS.div_ceil(share.0);
    let (trials, kills) =
        if mutants::seed().is_some() { (Vec::new(), 0) } else { (inputs(share), KILLS.div_ceil(share.0)) };
    println!("{}", table(&trials));
    let shown = |trial: &Trial| format!("{}, {}: {}", trial.entry, trial.kind, trial.name);
    let mut found = run_all(trials.len(), |i| (shown(&trials[i]), trials[i].run()));
    found.extend(run_all(kills, |i| kills::kill_number(i as u64)));
    found.extend(run_all(mutants, |i| {
        // Where a few are run, they are of all entries.
        let trial = mutants::trial((i as u64) * 37);
        (shown(&trial), trial.run())
    }));
    let mut points = BTreeMap::<u8, usize>::new();
    for (.., finding) in &found {
        *points.entry(finding.fault as u8).or_default() += 1;
    }
    let points = points.iter().map(|(point, count)| format!("{count} of point {point}")).collect::<Vec<_>>().join(", ");
    let counts = format!("{} inputs, {} kills, {} mutants", trials.len(), kills, mutants);
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
        let cells = kinds.iter().fold(String::new(), |cells, kind| cells + &format!("{:>9}", cell(kind)));
        format!("{name:<34}{cells}{sum:>9}\n")
    };
    let head = kinds.iter().fold(String::new(), |head, kind| head + &format!("{kind:>9}"));
    let mut text = format!("{:<34}{head}{:>9}\n", "entry point", "all");
    for (name, row) in &rows {
        text += &cells(name, &|kind| row.get(kind).map_or("–".into(), usize::to_string), row.values().sum());
    }
    let of_kind = |kind: &str| trials.iter().filter(|trial| trial.kind == kind).count().to_string();
    text + &cells("all", &of_kind, trials.len())
}

#[test]
fn hostile_valid_files_are_taken() {
    LazyLock::force(&VALID);
    let found = run_all(ENTRIES.len(), |i| {
        let mut trial = ENTRIES[i].valid();
        trial.ends = Ends::Success;
        // What is valid here in the file is not enough for these: there is no such library, and no Python.
        if matches!(ENTRIES[i].format, kinds::Format::Library) || ENTRIES[i].name == "panel LIST" {
            trial.ends = Ends::Refused;
        }
        (trial.entry.into(), trial.run())
    });
    let shown: Vec<String> = found.iter().map(|(_, name, finding)| format!("{name}: {}", finding.what)).collect();
    assert!(shown.is_empty(), "{shown:#?}");
}

#[test]
fn hostile_few_inputs_kills_and_mutants_find_nothing() {
    try_all(OneOf(79));
}

/// `ASSAY_HOSTILE_EVERY=9` runs a ninth of it.
#[test]
#[ignore = "minutes: make hostile"]
fn hostile_inputs_kills_and_mutants_find_nothing() {
    let every = env::var("ASSAY_HOSTILE_EVERY").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let count = inputs(OneOf(1)).len();
    assert!(count >= 700, "{count}");
    try_all(OneOf(every));
}
