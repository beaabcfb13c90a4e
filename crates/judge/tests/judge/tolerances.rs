//! `tolerances.toml` keeps its own rules: every entry is used, argued, measured, and no looser than its measurement.

use assay_judge::tolerance::{Tolerance, Tolerances};

/// A limit may be this many times the worst error seen.
const SLACK: f64 = 4.0;

fn text() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tolerances.toml")).unwrap()
}

/// What is wrong with an entry, if anything.
fn fault(entry: &Tolerance) -> Option<String> {
    let name = format!("{:?} {:?} {} {}", entry.output, entry.model, entry.dtype, entry.class);
    if entry.why.split_whitespace().count() < 4 {
        return Some(format!("{name}: `why` gives no reason"));
    }
    if entry.measured_on.split_whitespace().count() < 3 {
        return Some(format!("{name}: `measured_on` does not say what was measured"));
    }
    if entry.accepted.as_ref().is_some_and(|reason| reason.split_whitespace().count() < 4) {
        return Some(format!("{name}: `accepted` gives no reason"));
    }
    let limit = entry.derived.min(SLACK * entry.worst_seen);
    // Figures are written with four digits.
    (entry.kappa > limit * (1.0 + 1e-9))
        .then(|| format!("{name}: κ = {} is over min(derived, {SLACK} × worst_seen) = {limit}", entry.kappa))
}

#[test]
fn every_entry_is_argued_measured_and_tight() {
    let faults: Vec<_> = Tolerances::parse(&text()).unwrap().entries().filter_map(fault).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn loose_or_unargued_entries_are_found() {
    let tolerances = Tolerances::parse(&text()).unwrap();
    let entry = tolerances.entries().next().unwrap();
    assert!(fault(entry).is_none());
    assert!(fault(&Tolerance { kappa: entry.worst_seen * 4.1, ..entry.clone() }).is_some());
    assert!(fault(&Tolerance { derived: entry.kappa * 0.9, ..entry.clone() }).is_some());
    assert!(fault(&Tolerance { why: String::new(), ..entry.clone() }).is_some());
    assert!(fault(&Tolerance { measured_on: "x".into(), ..entry.clone() }).is_some());
    assert!(fault(&Tolerance { accepted: Some("so what".into()), ..entry.clone() }).is_some());
}

#[test]
fn unused_duplicate_and_unknown_entries_are_found() {
    let entry = "[[tolerance]]\noutput = \"loss\"\nmodel = \"elementwise\"\ndtype = \"f32\"\nclass = \"nobody\"\n\
        kappa = 1.0\nderived = 1.0\nworst_seen = 1.0\nmeasured_on = \"a b c\"\nwhy = \"a b c d\"\n";
    let extended = Tolerances::parse(&format!("{}\n{entry}", text())).unwrap();
    assert!(extended.unused().any(|entry| entry.class == "nobody"));
    let twice = Tolerances::parse(&format!("{entry}{entry}")).unwrap_err().to_string();
    assert_eq!(twice, "tolerances: `loss`, dtype f32, class `nobody` is listed twice");
    assert!(Tolerances::parse(&format!("{entry}slack = 2.0\n")).unwrap_err().to_string().contains("slack"));
}
