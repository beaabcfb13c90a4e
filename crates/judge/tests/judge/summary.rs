//! What each implementation came to, in a table.

use std::time::Duration;

use assay_core::problem::Dtype;
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::invariance::Invariance;
use assay_judge::judge::{Status, Verdict};
use assay_judge::metric::{Allowance, Position, Tally};
use assay_judge::report::{Check, Compared, Ignored, Report};
use assay_judge::summary::{COLUMNS, notes, summary_of};

/// A check of `fixture` that needs `needed` of the `κ` of 4 that it is allowed; one that compares nothing.
fn check(fixture: &str, needed: Option<f64>) -> Check {
    let mut tally = Tally::default();
    if let Some(needed) = needed {
        let allowance = Allowance { unit: 1.0, scale: 1.0, ..Allowance::default() };
        tally.compare(Position::default(), 1.0, 1.0 + needed, 4.0, allowance, Dtype::F64);
    }
    let status = match needed {
        Some(needed) if needed.is_nan() => Status::Nonfinite,
        Some(needed) if needed > 4.0 => Status::Fail,
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
    Check::new(fixture, "native", "logp", &verdict)
}

fn without_kappa(mut check: Check) -> Check {
    check.kappa_allowed = None;
    check
}

fn report(checks: Vec<Check>) -> Report {
    let summary = summary_of("native", 1, &checks, Some(Duration::from_millis(1234)));
    Report { implementations: vec![summary], ..Report::new(checks, Vec::new()) }
}

/// The cells of the one row.
fn row(report: &Report) -> Vec<String> {
    let text = report.summary();
    let row = text.lines().nth(3).expect("a border, the header, a line, the row");
    row.trim_matches('│').split('┆').map(|cell| cell.trim().to_string()).collect()
}

#[test]
fn the_worst_share_of_kappa_is_named() {
    let two = report(vec![check("a", Some(1.0)), check("b", Some(2.0)), check("c", Some(2.0))]);
    assert_eq!(row(&two), ["native", "3", "1.23", "0.50  logp of b"]);
    assert_eq!(two.total(), "PASS  3 checks passed, 0 failed, 0 ignored");
    let of_one = report(vec![check("a", Some(1.0)), without_kappa(check("b", Some(2.0)))]);
    assert_eq!(row(&of_one)[3], "0.25  logp of a");
    assert_eq!(row(&report(vec![without_kappa(check("a", Some(1.0)))]))[3], "–");
}

#[test]
fn failures_are_counted_and_what_no_kappa_allows_is_the_worst() {
    let failed = report(vec![check("a", Some(6.0)), check("b", Some(1.0))]);
    assert_eq!(row(&failed), ["native", "2", "1", "1.23", "1.50  logp of a"]);
    let wild = report(vec![check("a", Some(5e6)), check("b", Some(1.0))]);
    assert_eq!(row(&wild)[4], "1e6  logp of a");
    let nan = report(vec![check("a", Some(6.0)), check("b", Some(f64::NAN))]);
    assert_eq!(row(&nan), ["native", "2", "2", "1.23", "∞  logp of b"]);
}

#[test]
fn what_compared_nothing_is_counted_apart() {
    let one = report(vec![check("a", None), check("b", Some(1.0))]);
    assert_eq!(row(&one), ["native", "2", "1", "1.23", "0.25  logp of b"]);
    assert_eq!(one.total(), "PASS  1 checks passed, 0 failed, 0 ignored, 1 not compared");
    assert_eq!(row(&report(vec![check("a", None)]))[3..], ["1.23", "nothing compared"]);
    assert_eq!(row(&report(Vec::new())), ["native", "0", "1.23", "nothing compared"]);
    assert!(!report(Vec::new()).pass);
}

#[test]
fn a_check_whose_name_does_not_fit_goes_unnamed() {
    let mut both = report(vec![check("short", Some(1.0))]);
    both.implementations.push(summary_of("native", 1, &[check(&"long ".repeat(20), Some(2.0))], None));
    let text = both.summary();
    assert!(text.lines().all(|line| line.chars().count() <= COLUMNS.into()), "{text}");
    assert!(text.contains("0.25  logp of short") && text.contains("┆      – ┆ 0.50 "), "{text}");
}

#[test]
fn what_was_ignored_for_one_reason_is_one_line() {
    let ignored = |what: &str, why: &str, not_run: Option<&str>| Ignored {
        what: what.into(),
        why: why.into(),
        not_run: not_run.map(String::from),
    };
    let run = |what: &str, id: &str| ignored(&format!("{what} with {id}"), "no plugin", Some(id));
    let mut all = vec![run("a", "xla"), run("a", "xla-rows ×2"), ignored("c with xla", "too large", Some("xla"))];
    all.extend([run("b", "xla"), run("b", "xla-rows ×2")]);
    all.extend((0..6).map(|i| ignored(&format!("scalar_{i}"), "unknown", None)));
    let text = Report::new(vec![check("a", Some(1.0))], all).below_summary();
    let expected = [
        "ignored  4 runs of xla, xla-rows ×2: no plugin",
        "ignored  c with xla: too large",
        "ignored  scalar_0, scalar_1, scalar_2, scalar_3 and 2 more: unknown",
        "PASS  1 checks passed, 0 failed, 11 ignored",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn bits_of_several_problems_are_one_line_and_long_lines_are_broken() {
    let compared = |same: &[&'static str], other: &[&'static str]| Compared {
        fixture: "a".into(),
        implementation: "xla-rows".into(),
        devices: [1, 2],
        packed: false,
        invariance: Invariance { same: same.into(), other: other.into() },
    };
    let invariance = vec![compared(&["logp", "entropy"], &["loss"]), compared(&["logp"], &["entropy", "loss"])];
    let text = Report { invariance, ..Report::new(Vec::new(), Vec::new()) }.below_summary();
    let line = "bits     xla-rows: ×2 has those of ×1 in logp, entropy (1 of 2 problems); others in loss\n";
    assert!(text.starts_with(line), "{text}");
    let long = notes([("bits", "word ".repeat(40))]);
    assert!(long.lines().count() == 3 && long.lines().all(|line| line.chars().count() <= 100), "{long}");
    assert!(long.lines().skip(1).all(|line| line.starts_with("         word")), "{long}");
    assert_eq!(notes([]), "");
}
