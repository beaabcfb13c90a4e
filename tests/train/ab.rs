//! An A/B run lets a right kernel through, and nothing that is wrong on purpose.

use std::sync::atomic::AtomicBool;

use crate::common::training::{config, settings, with};
use assay::schema::ab::AbVerdict;
use assay::train::ab::{AbControl, AbPlan, AbRun, AbSide, Contestant, comparison, pairs, runs};
use serde_json::json;

/// The gate that tells a run that does not learn.
const LEARNING: &str = "training reward, second half of the steps, mean of the seeds";

/// The gates that fail.
fn failed(verdicts: &[AbVerdict]) -> Vec<&str> {
    verdicts.iter().filter(|verdict| verdict.pass == Some(false)).map(|verdict| verdict.what.as_str()).collect()
}

/// The baseline is run once: what stands against it is the kernel, and four arms that are wrong.
#[test]
fn ab_controls_fail_their_gates_and_the_kernel_fails_none() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(with(
        settings(folder.path(), "ab"),
        json!({
            "seed": 1,
            "steps": 32,
            "task": {"arithmetic": {"train": 256, "evaluate": 16, "largest": 9, "verbs": ["wants"]}},
            "warm_start": {"steps": 40, "cache": null},
            "rollout": {"group": 8, "max_new_tokens": 10},
            "update": {"ppo_epochs": 2, "micro_batches": 2, "optimizer": {"learning_rate": 5e-3}},
        }),
    ));
    let run = |plan: AbPlan, contestant: Contestant| -> Vec<AbRun> {
        runs(&config, plan, contestant, None, &AtomicBool::new(false), &mut |_| ()).unwrap()
    };
    let (whole, unjudged) = (AbPlan { seeds: 3, judge_every: Some(16) }, AbPlan { seeds: 3, judge_every: None });
    let baseline = run(unjudged, Contestant::Side(AbSide::Baseline));
    let moved = baseline.iter().filter(|run| run.summary.before != run.summary.evaluation).count();
    assert_eq!(moved, 3, "greedy completions move: {:?}", baseline.iter().map(|run| &run.summary).collect::<Vec<_>>());

    let redrawn = run(unjudged, Contestant::Redrawn);
    let against = |runs: &[AbRun]| comparison(&config, &pairs(&config, &baseline, &redrawn, runs), &[]);
    let kernel = against(&run(whole, Contestant::Side(AbSide::Kernel)));
    let decided = kernel.verdicts.iter().filter(|verdict| verdict.pass == Some(true)).count();
    assert_eq!((failed(&kernel.verdicts).len(), decided), (0, 5), "{:#?}", kernel.verdicts);
    for control in AbControl::ALL {
        // A wrong loss shows at once; a run that does not learn, in its curve alone.
        let plan =
            control.plan(if control.fails_to_learn() { whole } else { AbPlan { seeds: 1, judge_every: Some(1) } });
        let settings =
            assay::train::TrainConfig { steps: if control.fails_to_learn() { 32 } else { 1 }, ..config.clone() };
        let of_control =
            runs(&settings, plan, Contestant::Control(control), None, &AtomicBool::new(false), &mut |_| ()).unwrap();
        let compared = against(&of_control);
        let failed = failed(&compared.verdicts);
        println!("{}: {failed:?}", control.name());
        if control.fails_to_learn() {
            assert_eq!(failed, [LEARNING], "{}: {:#?}", control.name(), compared.verdicts);
        } else {
            for output in ["dhidden, worst error / limit", "dlm_head, worst error / limit"] {
                assert!(failed.iter().any(|what| what.starts_with(output)), "{}: {failed:?}", control.name());
            }
        }
        assert!(!compared.pass);
    }
    for verdict in &kernel.verdicts {
        println!("{verdict:?}");
    }
}
