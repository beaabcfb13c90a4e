//! The LM head with the loss against other ways to the same numbers.

use assay_core::problem::{FloatArray, HeadLayout, HeadProblem, HeadShape};
use assay_core::spec::{Distillation, LogitsTransform, LossSpec};
use assay_reference::{evaluate, evaluate_head};
use assay_suites::cases;

/// Central differences of the loss by every hidden state and every weight.
#[test]
fn lm_head_gradients_match_differences_of_the_loss() {
    let logits = LogitsTransform { scale: 0.7, softcap: Some(3.0), bias: true };
    let specs = [
        LossSpec { entropy_coef: 0.03, temperature: 0.8.into(), ..LossSpec::default() },
        LossSpec { logits, ..LossSpec::default() },
        // Tokens without a gradient by the log-probability of their id.
        LossSpec::cross_entropy(1.0, 0.0),
        LossSpec::distillation(Distillation::default()),
    ];
    for spec in specs {
        for layout in [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden] {
            let problem = f64_problem(&spec, layout);
            let outcome = evaluate_head(&spec, &problem).unwrap().outcome();
            let loss = |problem: &HeadProblem| evaluate_head(&spec, problem).unwrap().on_logits().loss();
            let step = 1e-5;
            let difference = |change: &dyn Fn(&mut HeadProblem, f64)| {
                let [mut up, mut down] = [problem.clone(), problem.clone()];
                change(&mut up, step);
                change(&mut down, -step);
                (loss(&up) - loss(&down)) / (2.0 * step)
            };
            for ((b, t, h), &x) in outcome.gradient.dhidden.to_f64().indexed_iter() {
                let expected = difference(&|problem, by| {
                    let FloatArray::F64(hidden) = &mut problem.logits.hidden else { unreachable!("made of f64") };
                    hidden[[b, t, h]] += by;
                });
                assert!((x - expected).abs() < 1e-8, "dhidden[{b},{t},{h}]: {x} but the loss says {expected}");
            }
            for ((i, j), &x) in outcome.gradient.dlm_head.to_f64().indexed_iter() {
                let expected = difference(&|problem, by| {
                    let FloatArray::F64(lm_head) = &mut problem.logits.lm_head else { unreachable!("made of f64") };
                    lm_head[[i, j]] += by;
                });
                assert!((x - expected).abs() < 1e-8, "dlm_head[{i},{j}]: {x} but the loss says {expected}");
            }
        }
    }
}

fn f64_problem(spec: &LossSpec, layout: HeadLayout) -> HeadProblem {
    let mut recipe = cases::head_recipe(HeadShape { batch: 2, tokens: 3, hidden: 4, vocab: 7 });
    recipe.layout = layout;
    let mut problem = recipe.problem(spec).unwrap();
    problem.logits.hidden = problem.logits.hidden.to_f64().into();
    problem.logits.lm_head = problem.logits.lm_head.to_f64().into();
    problem
}

/// Logits, loss and log-probabilities are those of the logits-level reference on the product.
#[test]
fn lm_head_loss_is_that_of_its_logits() {
    let spec = LossSpec::default();
    for layout in [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden] {
        let problem = f64_problem(&spec, layout);
        let HeadShape { batch, tokens, hidden: width, vocab } = problem.shape();
        let hidden = problem.logits.hidden.to_f64();
        let lm_head = problem.logits.lm_head.to_f64();
        let logits = ndarray::Array3::from_shape_fn((batch, tokens, vocab), |(b, t, v)| {
            (0..width).map(|h| hidden[[b, t, h]] * lm_head[layout.at(h, v)]).sum::<f64>()
        });
        let on_logits = problem.with_logits(FloatArray::F64(logits));
        let expected = evaluate(&spec, &on_logits).unwrap();
        let reference = evaluate_head(&spec, &problem).unwrap();
        assert!((reference.on_logits().loss() - expected.loss()).abs() < 1e-14);
        for (at, &x) in reference.outcome().logp.to_f64().indexed_iter() {
            let token = expected.token(at.0, at.1).map_or(0.0, |token| token.inputs.logp);
            assert!((x - token).abs() < 1e-13, "{at:?}");
        }
    }
}
