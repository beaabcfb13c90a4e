//! `tolerances.toml` keeps its own rules: every entry is used, argued, measured, and no looser than its measurement.

use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::judge::judge::judge;
use assay::judge::lm_head::judge_head;
use assay::judge::metric::Position;
use assay::judge::recorded::{Scalar, judge_recorded};
use assay::judge::tolerance::{Tolerance, Tolerances};
use assay::problem::{Dtype, FloatArray, HeadLayout};
use assay::reference;
use assay::registry::{find, find_head, lm_head_registry, registry};
use assay::spec::{Kl, KlEstimator, LossSpec};

/// A limit may be this many times the worst error seen.
const SLACK: f64 = 4.0;

fn text() -> String {
    std::fs::read_to_string("tolerances.toml").unwrap()
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
fn every_entry_is_used() {
    let tolerances = Tolerances::parse(&text()).unwrap();
    let spec = LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..LossSpec::default() };
    for dtype in Dtype::KERNEL {
        let recipe = Recipe {
            shape: [2, 3, 65],
            dtype,
            regime: Regime::Normal,
            seed: 1,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        };
        let problem = recipe.problem(&spec).unwrap();
        let reference = reference::evaluate(&spec, &problem).unwrap();
        for implementation in registry(None) {
            let Some(&devices) = implementation.device_counts().first() else { continue };
            let outcome = implementation.run(&spec, problem.clone(), devices).unwrap();
            judge(&reference, &outcome, implementation.class(), &tolerances).unwrap();
        }
        let recipe = HeadRecipe { hidden: 5, layout: HeadLayout::VocabByHidden, rounds_logits: true, recipe };
        let problem_of_head = recipe.problem(&spec).unwrap();
        let of_head = reference::evaluate_head(&spec, &problem_of_head).unwrap();
        for head in lm_head_registry(None) {
            let Some(&devices) = head.device_counts().first() else { continue };
            let outcome = head.run(&spec, problem_of_head.clone(), devices).unwrap();
            judge_head(&of_head, &problem_of_head, &outcome, head.class(), &tolerances).unwrap();
        }
        // What `assay judge` reads from a file has no metrics, and gradients of any dtype.
        let mut external = find_head("native-lm-head", None).unwrap().run(&spec, problem_of_head.clone(), 1).unwrap();
        external.metrics = None;
        external.dlm_head = FloatArray::rounded_from(&external.dlm_head.to_f64(), dtype);
        judge_head(&of_head, &problem_of_head, &external, "external-lm-head", &tolerances).unwrap();
        let mut external = find("native", None).unwrap().run(&spec, problem.clone(), 1).unwrap();
        external.metrics = None;
        judge(&reference, &external, "external", &tolerances).unwrap();
    }
    judge_recorded(&[(Position::default(), Scalar { value: 1.0, scale: 1.0 }, 1.0)], &tolerances).unwrap();
    // What needs a plugin cannot be shown where there is none.
    let absent = |class: &str| {
        let family = class.trim_end_matches("-lm-head");
        ["xla", "tile"].contains(&family)
            && !registry(None).iter().any(|i| i.class() == family && i.available().is_ok())
    };
    let (ignored, unused): (Vec<_>, Vec<_>) = tolerances.unused().partition(|entry| absent(&entry.class));
    if !ignored.is_empty() {
        println!("ignored: {} entries of classes that this machine cannot run", ignored.len());
    }
    assert!(unused.is_empty(), "{unused:#?}");
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
