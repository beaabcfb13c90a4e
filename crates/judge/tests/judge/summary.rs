//! The summary of each implementation, in a table.

use std::time::Duration;

use assay_core::problem::Dtype;
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::invariance::Invariance;
use assay_judge::judge::{Status, Verdict};
use assay_judge::metric::{Allowance, Position, Tally};
use assay_judge::report::{self, bit_comparison, total};
use assay_judge::summary::{COLUMNS, below_summary, notes, summarize, summary};
use assay_schema::verdicts::{GateCheck, IgnoredCheck, Verdicts};

/// Makes a check of `fixture` with an error of `error` and a limit of 4; without an error it compares nothing.
fn check(fixture: &str, error: Option<f64>) -> GateCheck {
    let mut tally = Tally::default();
    if let Some(error) = error {
        let allowance = Allowance { unit: 1.0, scale: 1.0, ..Allowance::default() };
        tally.compare(Position::default(), 1.0, 1.0 + error, 4.0, allowance, Dtype::F64);
    }
    let status = match error {
        Some(error) if error.is_nan() => Status::Nonfinite,
        Some(error) if error > 4.0 => Status::Fail,
        Some(_) => Status::Pass,
        None => Status::NotCompared,
    };
    let gate = Gate::new(Output::Logp, Model::Elementwise);
    let verdict = Verdict {
        gate,
        dtype: Dtype::F64,
        promised: Dtype::F64,
        status,
        kappa: Some(4.0),
        tally,
        grade: None,
        short_of_exact: None,
        open_entropies: None,
    };
    report::check(fixture, "native", "logp", &verdict)
}

fn without_kappa(check: GateCheck) -> GateCheck {
    GateCheck { kappa_allowed: None, ..check }
}

fn verdicts(checks: Vec<GateCheck>) -> Verdicts {
    let summary = summarize("native", 1, &checks, Some(Duration::from_millis(1234)));
    Verdicts { implementations: vec![summary], ..report::verdicts(checks, Vec::new()) }
}

/// Returns the cells of the only line.
fn row(verdicts: &Verdicts) -> Vec<String> {
    let text = summary(verdicts);
    let row = text.lines().nth(3).expect("a border, the header, a line, the row");
    row.trim_matches('│').split('┆').map(|cell| cell.trim().to_string()).collect()
}

#[test]
fn summary_names_the_worst_error_over_limit() {
    let two = verdicts(vec![check("a", Some(1.0)), check("b", Some(2.0)), check("c", Some(2.0))]);
    assert_eq!(row(&two), ["native", "3", "1.23", "0.50  logp of b"]);
    assert_eq!(total(&two), "PASS  3 checks passed, 0 failed, 0 ignored");
    assert!(summary(&two).contains("worst error / limit"));
    let counted = verdicts(vec![check("a", Some(1.0)), without_kappa(check("b", Some(2.0)))]);
    assert_eq!(row(&counted)[3], "0.50  logp of b", "a limit without κ is one too");
}

#[test]
fn summary_counts_failures_and_nan_is_the_worst() {
    let failed = verdicts(vec![check("a", Some(6.0)), check("b", Some(1.0))]);
    assert_eq!(row(&failed), ["native", "2", "1", "1.23", "1.50  logp of a"]);
    let wild = verdicts(vec![check("a", Some(5e6)), check("b", Some(1.0))]);
    assert_eq!(row(&wild)[4], "1e6  logp of a");
    let nan = verdicts(vec![check("a", Some(6.0)), check("b", Some(f64::NAN))]);
    assert_eq!(row(&nan), ["native", "2", "2", "1.23", "∞  logp of b"]);
}

#[test]
fn summary_counts_what_compared_nothing_apart() {
    let one = verdicts(vec![check("a", None), check("b", Some(1.0))]);
    assert_eq!(row(&one), ["native", "2", "1", "1.23", "0.25  logp of b"]);
    assert_eq!(total(&one), "PASS  1 checks passed, 0 failed, 0 ignored, 1 not compared");
    assert_eq!(row(&verdicts(vec![check("a", None)]))[3..], ["1.23", "nothing compared"]);
    assert_eq!(row(&verdicts(Vec::new())), ["native", "0", "1.23", "nothing compared"]);
    assert!(!verdicts(Vec::new()).pass);
}

#[test]
fn summary_leaves_out_a_name_that_does_not_fit() {
    let mut both = verdicts(vec![check("short", Some(1.0))]);
    both.implementations.push(summarize("native", 1, &[check(&"long ".repeat(20), Some(2.0))], None));
    let text = summary(&both);
    assert!(text.lines().all(|line| line.chars().count() <= COLUMNS.into()), "{text}");
    assert!(text.contains("0.25  logp of short") && text.contains("┆      – ┆ 0.50 "), "{text}");
}

#[test]
fn summary_lists_ignored_checks_by_reason() {
    let ignored = |what: &str, why: &str, not_run: Option<&str>| IgnoredCheck {
        what: what.into(),
        why: why.into(),
        not_run: not_run.map(String::from),
    };
    let run = |what: &str, id: &str| ignored(&format!("{what} with {id}"), "no plugin", Some(id));
    let mut all = vec![run("a", "xla"), run("a", "xla-rows ×2"), ignored("c with xla", "too large", Some("xla"))];
    all.extend([run("b", "xla"), run("b", "xla-rows ×2")]);
    all.extend((0..6).map(|i| ignored(&format!("scalar_{i}"), "unknown", None)));
    let text = below_summary(&report::verdicts(vec![check("a", Some(1.0))], all));
    let expected = [
        "ignored  4 runs of xla, xla-rows ×2: no plugin",
        "ignored  c with xla: too large",
        "ignored  scalar_0, scalar_1, scalar_2, scalar_3 and 2 more: unknown",
        "PASS  1 checks passed, 0 failed, 11 ignored",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn summary_joins_bits_of_problems_and_breaks_long_lines() {
    let compared = |same: &[&'static str], other: &[&'static str]| {
        bit_comparison("a", "xla-rows", [1, 2], false, &Invariance { same: same.into(), other: other.into() })
    };
    let invariance = vec![compared(&["logp", "entropy"], &["loss"]), compared(&["logp"], &["entropy", "loss"])];
    let text = below_summary(&Verdicts { invariance, ..report::verdicts(Vec::new(), Vec::new()) });
    let line = "bits     xla-rows: ×2 has those of ×1 in logp, entropy (1 of 2 problems); others in loss\n";
    assert!(text.starts_with(line), "{text}");
    let long = notes([("bits", "word ".repeat(40))]);
    assert!(long.lines().count() == 3 && long.lines().all(|line| line.chars().count() <= 100), "{long}");
    assert!(long.lines().skip(1).all(|line| line.starts_with("         word")), "{long}");
    assert_eq!(notes([]), "");
}
