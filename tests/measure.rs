//! Measures `worst_seen`: the largest `κ` that each gate needs over fixed seeds. `make measure` runs it; its output goes
//! into `tolerances.toml` by hand, with the limit at no more than 4 times as much.

#[path = "common/recipes.rs"]
mod recipes;

use std::collections::BTreeMap;

use assay::conformance::generate::{Recipe, Regime};
use assay::conformance::judge::judge;
use assay::conformance::tolerance::Tolerances;
use assay::implementation::registry;
use assay::problem::Dtype;
use assay::reference;
use assay::spec::LossSpec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const RANDOM_CASES: usize = 20_000;

#[test]
#[ignore = "a measurement of minutes, not a check: run by `make measure`"]
fn kappa_of_every_gate() {
    let mut seen = Seen::default();
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let cases = (recipes::any_spec(), recipes::any_recipe());
    let mut next = || cases.new_tree(&mut runner).expect("no filter rejects").current();
    for _ in 0..RANDOM_CASES {
        let (spec, recipe) = next();
        seen.run(&spec, &recipe);
    }
    for dtype in Dtype::KERNEL {
        // One non-target column: an error there is the whole row's, with nothing to average it away.
        // Equal logits round alike, so that a row's sum gathers their errors.
        for vocab in [2, 3, 5] {
            for seed in 0..100 {
                let (spec, recipe) = next();
                let narrow = Recipe { shape: [64, 64, vocab], dtype, seed, ..recipe };
                seen.run(&spec, &narrow);
                seen.run(&spec, &Recipe { regime: Regime::Ties, ..narrow });
            }
        }
        for regime in Regime::ALL {
            for seed in 0..3 {
                let (spec, recipe) = next();
                seen.run(&spec, &Recipe { shape: [1, 4, 151_936], dtype, regime, seed, ..recipe });
            }
        }
    }
    for (gate, (kappa, case)) in seen.0 {
        println!("{gate:40} {kappa:8.4}   {case}");
    }
}

/// The largest `κ` by gate, and the case that needed it.
#[derive(Default)]
struct Seen(BTreeMap<String, (f64, String)>);

impl Seen {
    fn run(&mut self, spec: &LossSpec, recipe: &Recipe) {
        let problem = recipe.problem(spec).expect("a valid recipe");
        let reference = reference::evaluate(spec, &problem).expect("a valid problem");
        for implementation in registry(None) {
            let outcome = implementation.run(spec, problem.clone(), 1).expect("supported");
            let verdicts = judge(&reference, &outcome.into(), implementation.class(), Tolerances::builtin());
            for verdict in verdicts.expect("every output has a tolerance") {
                let gate = format!("{} {} {}", implementation.class(), verdict.gate, verdict.dtype);
                let worst = self.0.entry(gate).or_default();
                if verdict.tally.kappa_seen > worst.0 {
                    *worst = (verdict.tally.kappa_seen, format!("{recipe:?} {spec:?}"));
                }
            }
        }
    }
}
