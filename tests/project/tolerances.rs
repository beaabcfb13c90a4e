//! Every entry of `tolerances.toml` is a limit of something.

use assay::judge::generate::{HeadRecipe, Recipe, Regime};
use assay::judge::judge::judge;
use assay::judge::lm_head::judge_head;
use assay::judge::metric::Position;
use assay::judge::recorded::{Scalar, judge_recorded};
use assay::judge::tolerance::Tolerances;
use assay::problem::{Dtype, FloatArray, HeadLayout, HeadProblem, Problem};
use assay::reference;
use assay::registry::{find, registry};
use assay::spec::{Kl, KlEstimator, LossSpec};

#[test]
fn every_entry_is_used() {
    let tolerances = Tolerances::parse(&std::fs::read_to_string("tolerances.toml").unwrap()).unwrap();
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
        for implementation in registry::<Problem>(None) {
            let Some(&devices) = implementation.device_counts().first() else { continue };
            let outcome = implementation.run(&spec, problem.clone(), devices).unwrap();
            judge(&reference, &outcome, implementation.class(), &tolerances).unwrap();
        }
        let recipe = HeadRecipe { hidden: 5, layout: HeadLayout::VocabByHidden, rounds_logits: true, recipe };
        let problem_of_head = recipe.problem(&spec).unwrap();
        let of_head = reference::evaluate_head(&spec, &problem_of_head).unwrap();
        for head in registry::<HeadProblem>(None) {
            let Some(&devices) = head.device_counts().first() else { continue };
            let outcome = head.run(&spec, problem_of_head.clone(), devices).unwrap();
            judge_head(&of_head, &problem_of_head, &outcome, head.class(), &tolerances).unwrap();
        }
        // What `assay judge` reads from a file has no metrics, and gradients of any dtype.
        let mut external =
            find::<HeadProblem>("native-lm-head", None).unwrap().run(&spec, problem_of_head.clone(), 1).unwrap();
        external.metrics = None;
        external.gradient.dlm_head = FloatArray::rounded_from(&external.gradient.dlm_head.to_f64(), dtype);
        judge_head(&of_head, &problem_of_head, &external, "external-lm-head", &tolerances).unwrap();
        let mut external = find::<Problem>("native", None).unwrap().run(&spec, problem.clone(), 1).unwrap();
        external.metrics = None;
        judge(&reference, &external, "external", &tolerances).unwrap();
    }
    judge_recorded(&[(Position::default(), Scalar { value: 1.0, scale: 1.0 }, 1.0)], &tolerances).unwrap();
    // What needs a plugin cannot be shown where there is none.
    let absent = |class: &str| {
        let family = class.trim_end_matches("-lm-head");
        ["xla", "tile"].contains(&family)
            && !registry::<Problem>(None).iter().any(|i| i.class() == family && i.available().is_ok())
    };
    let (ignored, unused): (Vec<_>, Vec<_>) = tolerances.unused().partition(|entry| absent(&entry.class));
    if !ignored.is_empty() {
        println!("ignored: {} entries of classes that this machine cannot run", ignored.len());
    }
    assert!(unused.is_empty(), "{unused:#?}");
}
