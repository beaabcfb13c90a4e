//! What a kernel computes, where it is not what is asked for.

use std::sync::Arc;

use assay_campaign::{ComputedLoss, DeckShapes, Fault, computed, neighbours};
use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, Problem};
use assay_core::spec::LossSpec;
use assay_core::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::{Grade, Limits};
use assay_native::Native;

use super::finds::{Does, campaign, right, run, trl};

/// Computes `spec`, whatever is asked.
struct Other(LossSpec);

impl assay_campaign::KernelUnderTest for Other {
    fn answer(
        &mut self,
        _: &LossSpec,
        problem: &std::sync::Arc<Problem>,
        read: &mut dyn FnMut(&assay_core::problem::Candidate<assay_core::problem::FloatView<'_, ndarray::Ix3>>),
    ) -> Result<(), assay_campaign::Fault> {
        let candidate = Native::default().run(&self.0, (**problem).clone(), 1);
        read(&candidate.map_err(|error| assay_campaign::Fault::Raised(error.to_string().into()))?.lend());
        Ok(())
    }
}

fn trl_with(options: &[&str]) -> LossSpec {
    presets::spec(Preset::Trl, None, &PresetOptions::from_pairs(options).unwrap(), &BatchInputs::default())
        .unwrap()
        .spec
}

#[test]
fn computes_names_another_aggregation() {
    let mut asked = campaign(trl(), 60);
    asked.project = Some((Preset::Trl, Vec::new()));
    let found = run(&asked, &mut Other(trl_with(&["loss_type=grpo"])));
    let computes: Vec<_> = found.causes.iter().flat_map(|cause| &cause.computes).collect();
    assert!(!found.passed && !computes.is_empty(), "{:#?}", found.causes);
    assert!(computes.iter().all(|names| names.contains(&"loss_type=grpo".to_string())), "{computes:#?}");
    assert!(found.causes.iter().all(|cause| cause.computes.is_empty() || !cause.computes_one_of));
    assert_eq!(found.causes.iter().filter(|cause| !cause.computes.is_empty()).count(), 1, "one cause by all its gates");
}

/// A forgotten temperature fails logp here, and dlogits alone where all logits are equal: both are numbers of one loss. Where its ratios
/// overflow, what is left is no number of any loss.
#[test]
fn computes_a_forgotten_temperature_by_one_cause() {
    let mut spec = trl();
    spec.temperature = 0.7.into();
    let forgotten = LossSpec { temperature: 1.0.into(), ..spec.clone() };
    let mut asked = campaign(spec, 48);
    asked.deck.regimes = vec![Regime::Normal, Regime::Ties, Regime::FarColumn];
    asked.deck.shapes = DeckShapes::Given(vec![[2, 3, 33], [3, 4, 17]]);
    let kernel = |_: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
        let mut candidate = right(&forgotten, problem);
        if problem.logits.to_f64().iter().any(|x| *x > 80.0) {
            candidate.loss = Some(ndarray::arr0(f32::NAN).into());
        }
        Ok(candidate)
    };
    let found = run(&asked, &mut Does(kernel));
    let text = assay_campaign::text(&found, &assay_campaign::TextForm::default());
    let [cause] = &found.causes[..] else { panic!("{text}") };
    assert!(cause.computes.iter().any(|names| names.contains(&"temperature: 1".to_string())), "{text}");
}

/// Every project's loss under every other's spec: what it computes is among those that are named, under its own name.
#[test]
fn computes_distinguishes_every_preset_under_every_spec() {
    let specs: Vec<(String, LossSpec)> = Preset::ALL
        .into_iter()
        .filter_map(|preset| {
            let resolved = presets::spec(preset, None, &PresetOptions::default(), &BatchInputs::default()).ok()?;
            Some((format!("the default of {}", preset.versioned()), resolved.spec))
        })
        .collect();
    let native = Native::default();
    let limits = Limits::external(Grade::Standard);
    let mut compared = 0;
    for (asked_name, asked) in &specs {
        let candidates = neighbours(asked, None);
        for (name, other) in specs.iter().filter(|(_, other)| other != asked) {
            let problems: Vec<Problem> = (0..3)
                .filter_map(|seed| {
                    let recipe = Recipe {
                        shape: [4, 7, 33],
                        dtype: Dtype::F32,
                        regime: Regime::Normal,
                        seed,
                        old_logp_noise_scale: 0.5,
                        masked_garbage: false,
                    };
                    let problem = recipe.problem(asked).ok()?.with_advantages_for(asked);
                    (problem.check(other).is_ok() && problem.check(asked).is_ok()).then_some(problem)
                })
                .collect();
            let answers: Vec<_> = problems
                .iter()
                .filter_map(|problem| Some((problem, native.run(other, problem.clone(), 1).ok()?)))
                .collect();
            if answers.is_empty() {
                continue;
            }
            let answers: Vec<_> = answers.iter().map(|(problem, candidate)| (*problem, candidate)).collect();
            let found = computed(candidates.clone(), &answers, &limits);
            let is_named = |of: &ComputedLoss| of.names.iter().any(|of| of.starts_with(name.as_str()));
            assert!(found.iter().any(is_named), "{name} under {asked_name}: {found:#?}");
            assert!(
                found.len() * 4 < candidates.len(),
                "{name} under {asked_name}: {} of {}",
                found.len(),
                candidates.len()
            );
            compared += 1;
        }
    }
    assert!(compared >= 40, "{compared}");
}
