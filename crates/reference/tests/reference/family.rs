//! The f64 reference of the whole loss family against the same losses in 640-bit arithmetic, and its closed-form
//! dlogits against central differences of the whole loss ([`crate::common::exact`]), on random cases of every objective.

use crate::common::cases;
use crate::common::coverage::note;
use crate::common::exact::{Exact, OF_EVERY_SPEC, Record, Scale, sweep};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

/// Checks cases of the objective `name`, and that some had a gradient of the policy term, unless there is none, and of the KL penalty.
fn check_objective(name: &str) {
    let (_, objective) = cases::objectives().into_iter().find(|(arm, _)| *arm == name).expect("an arm");
    let Record { seen, .. } = sweep(name, "reference_family", &cases::of_family(objective), &OF_EVERY_SPEC);
    let reached = |what: &str| seen.get(what).is_some_and(|cases| *cases > 0);
    assert_eq!(reached("policy"), name != "none", "{name}: {seen:?}");
    assert!(reached("kl.gradient own"), "{name}: {seen:?}");
}

/// Defines a test for each objective, so that they run at the same time.
macro_rules! objectives_match_640_bits {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            check_objective($name);
        }
    )*};
}

objectives_match_640_bits! {
    ppo_clip_matches_640_bits: "ppo_clip",
    cispo_matches_640_bits: "cispo",
    sapo_matches_640_bits: "sapo",
    vespo_matches_640_bits: "vespo",
    policy_gradient_matches_640_bits: "policy_gradient",
    importance_sampling_matches_640_bits: "importance_sampling",
    masked_ratio_matches_640_bits: "masked_ratio",
    trust_region_matches_640_bits: "trust_region",
    dro_matches_640_bits: "dro",
    kl_cov_matches_640_bits: "kl_cov",
    clip_cov_matches_640_bits: "clip_cov",
    none_matches_640_bits: "none",
}

/// The cases of [`check_objective`] have every option, on tokens that it changes.
#[test]
fn cases_have_every_option_with_a_gradient() {
    let mut record = Record::default();
    for (name, objective) in cases::objectives() {
        let mut runner = TestRunner::deterministic();
        let cases = cases::of_family(objective);
        for _ in 0..50 {
            let case = cases.new_tree(&mut runner).expect("a case").current();
            let Ok(exact) = Exact::of(&case) else { continue };
            let scale = Scale::of(&exact);
            let by_logp = scale.by_logp();
            note(&case.spec, &exact, &by_logp, &mut record);
        }
        println!("{name}: {:?}", record.seen);
    }
    let rare: Vec<_> = record.seen.iter().filter(|(_, cases)| **cases < 3).collect();
    assert!(rare.is_empty(), "too few cases: {rare:?}");
}
