//! The names of causes: mutants that fail as the kernel does, and none that fails alike by chance.

use std::collections::BTreeSet;
use std::sync::Arc;

use assay_campaign::{Campaign, DeckShapes, Fault, LocalKernel};
use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, FloatArray, Problem};
use assay_core::spec::LossSpec;
use assay_schema::campaign::CampaignReport;
use assay_suites::mutants::{BANK, MutantKind, Specimen};

use crate::finds::{Does, campaign, right, run, trl};

fn names(found: &CampaignReport) -> BTreeSet<&str> {
    let all = found.causes.iter().chain(&found.allowed).flat_map(|cause| &cause.like);
    all.map(|name| name.mutant.as_str()).collect()
}

fn of_mutant(name: &str, campaign: &Campaign) -> CampaignReport {
    let mutant = BANK.iter().find(|mutant| mutant.name == name).unwrap_or_else(|| panic!("no mutant {name}"));
    run(campaign, &mut LocalKernel::<Problem>(&Specimen::with(mutant.bug)))
}

fn changed(campaign: &Campaign, change: impl Fn(&Problem, &mut Candidate)) -> CampaignReport {
    let kernel = |spec: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
        let mut candidate = right(spec, problem);
        change(problem, &mut candidate);
        Ok(candidate)
    };
    run(campaign, &mut Does(kernel))
}

/// A tail's bug once lost its name at 20, 40 and 41 problems.
#[test]
fn name_does_not_depend_on_the_number_of_cases() {
    // The second loses whole tiles of tokens, whose size only a few problems of a deck have.
    for name in ["last-tile-skipped", "token-tail-of-32-lost"] {
        for cases in [20, 41] {
            let found = of_mutant(name, &campaign(trl(), cases));
            assert!(
                names(&found).contains(name),
                "{name} at {cases}: {}",
                assay_campaign::text(&found, &assay_campaign::TextForm::default())
            );
        }
    }
}

/// A kernel that cuts its vocabulary over two devices, and loses what one of them has.
#[test]
fn name_of_a_lost_shard_is_told() {
    for name in ["gradient-of-targets-shard", "gradient-with-own-sum", "sum-not-exchanged"] {
        let mutant = BANK.iter().find(|mutant| mutant.name == name).unwrap();
        let specimen = Specimen::with(mutant.bug);
        let kernel = |spec: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
            let candidate = specimen.run(spec, (**problem).clone(), 2);
            candidate.map_err(|error| Fault::Raised(error.to_string().into()))
        };
        let found = run(&campaign(trl(), 30), &mut Does(kernel));
        assert!(
            names(&found).contains(name),
            "{name}: {}",
            assay_campaign::text(&found, &assay_campaign::TextForm::default())
        );
    }
}

/// Two kernels agree by chance on one problem with two vocabulary entries.
#[test]
fn name_of_one_problem_over_two_entries_is_none() {
    for (shape, is_named) in [([1, 2, 2], false), ([1, 2, 3], true)] {
        let mut campaign = campaign(trl(), 1);
        campaign.deck.shapes = DeckShapes::Given(vec![shape]);
        let found = of_mutant("non-target-dlogits-dropped", &campaign);
        assert!(!found.passed);
        assert_eq!(
            !names(&found).is_empty(),
            is_named,
            "{}",
            assay_campaign::text(&found, &assay_campaign::TextForm::default())
        );
    }
}

/// Roundings to TF32 and by chance have errors of the size of other roundings, and not their values.
#[test]
fn names_of_roundings_are_not_those_of_others() {
    let tf32 = |x: f64| f64::from(f32::from_bits(((x as f32).to_bits() + 0x1000) & 0xffff_e000));
    let found = changed(&campaign(trl(), 60), |problem, candidate| {
        let logp = candidate.logp.take().unwrap().to_f64();
        let rounded =
            ndarray::Zip::from(&logp).and(&problem.mask).map_collect(|x, counts| if *counts { tf32(*x) } else { *x });
        candidate.logp = Some(FloatArray::from(rounded.mapv(|x| x as f32)));
    });
    assert!(
        !found.passed && !names(&found).contains("logp-in-logits-dtype"),
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );

    let mut narrow = campaign(trl(), 60);
    narrow.deck.dtypes = vec![Dtype::Bf16];
    let found = of_mutant("stochastic-rounding", &narrow);
    let text = assay_campaign::text(&found, &assay_campaign::TextForm::default());
    assert!(!found.passed && !names(&found).contains("probability-rounded"), "{text}");
    let mut said = found.causes.iter().flat_map(|cause| &cause.diagnoses);
    assert!(said.any(|sentence| sentence.contains("rounded twice, or by chance")), "{text}");
    // The rounding of the mutant itself still has its name.
    let found = of_mutant("probability-rounded", &narrow);
    assert!(
        names(&found).contains("probability-rounded"),
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
}

/// An error of just more than one rounding is as near to a right kernel's values as to a wrong one's.
#[test]
fn names_of_one_rounding_are_none() {
    use assay_judge::judgeable::Judgeable;
    let mut narrow = campaign(trl(), 12);
    narrow.deck.dtypes = vec![Dtype::Bf16];
    let found = changed(&narrow, |problem, candidate| {
        let spec = trl();
        let reference = problem.evaluate(&spec).unwrap();
        let mut values = candidate.gradient.to_f64();
        values.indexed_iter_mut().for_each(|((b, t, v), x)| {
            if reference.token(b, t).is_none() {
                return;
            }
            // A value near the middle of its two neighbours goes to the farther one.
            let exact = reference.dlogits_row(b, t)[v];
            let half = assay_judge::metric::half_ulp(exact, Dtype::Bf16);
            let farther = *x + 2.0 * half * (exact - *x).signum();
            *x = if (farther - exact).abs() < 1.04 * half { farther } else { *x };
        });
        candidate.gradient = FloatArray::rounded_from(&values, Dtype::Bf16);
    });
    let text = assay_campaign::text(&found, &assay_campaign::TextForm::default());
    assert!(!found.passed && names(&found).is_empty(), "{text}");
}

/// NaN under the mask that reaches an output is what a mask lets through, whatever else gives NaN.
#[test]
fn name_of_masked_garbage_is_a_mutant_of_masks() {
    let mut campaign = campaign(trl(), 40);
    campaign.deck.masked_garbage = Some(true);
    let found = of_mutant("mask-multiplied", &campaign);
    let cause = found.causes.iter().find(|cause| cause.gate == "masked-garbage");
    let cause =
        cause.unwrap_or_else(|| panic!("{}", assay_campaign::text(&found, &assay_campaign::TextForm::default())));
    let of_masks = |name: &str| BANK.iter().any(|mutant| mutant.name == name && mutant.kind == MutantKind::Mask);
    assert!(cause.like.iter().any(|name| name.mutant == "mask-multiplied"), "{cause:#?}");
    assert!(
        names(&found).into_iter().all(of_masks),
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
}

/// A deck without a mutant's size misses it, and the score tells the shape that rejects it.
#[test]
fn mutation_score_names_the_option_that_rejects_what_is_missed() {
    let native = assay_native::Native::default();
    let score = |change: &dyn Fn(&mut Campaign)| {
        let mut campaign = Campaign { power: true, ..campaign(trl(), 30) };
        change(&mut campaign);
        let found = run(&campaign, &mut LocalKernel::<Problem>(&native));
        let text = assay_campaign::text(&found, &assay_campaign::TextForm::default());
        (found.power.unwrap(), text)
    };
    let few = |campaign: &mut Campaign| campaign.deck.shapes = DeckShapes::Few;
    let (missed, text) = score(&few);
    let accepted: Vec<&str> = missed.accepted.iter().map(|name| name.mutant.as_str()).collect();
    assert!(accepted.contains(&"token-tail-of-32-lost"), "{text}");
    let option = missed.options.iter().find(|option| option.option == "shapes=many cases=200");
    assert!(option.is_some_and(|option| option.mutants.iter().any(|name| name == "token-tail-of-32-lost")), "{text}");
    // The mutant is rejected on another shape of that size.
    let (with_shape, text) = score(&|campaign| campaign.deck.shapes = DeckShapes::Given(vec![[3, 63, 8], [4, 16, 32]]));
    assert!(with_shape.accepted.iter().all(|name| name.mutant != "token-tail-of-32-lost"), "{text}");
    // A mutant is told under one option alone, and only what is missed is told.
    let told: Vec<&String> = missed.options.iter().flat_map(|option| &option.mutants).collect();
    assert_eq!(told.iter().collect::<BTreeSet<_>>().len(), told.len());
    assert!(told.iter().all(|name| accepted.contains(&name.as_str())), "{told:?} {accepted:?}");
}
