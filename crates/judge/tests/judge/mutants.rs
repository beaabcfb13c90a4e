//! Deliberately wrong kernels: all of them are rejected, each by the property of its class alone too, and the kernel that
//! they are made of never is.

use std::collections::BTreeSet;

use rayon::prelude::*;

use assay_core::implementation::Implementation;
use assay_core::problem::HeadProblem;
use assay_judge::judge::Status;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_suites::mutants::{
    AtWidth, BANK, Mutant, MutantCase, MutantKind, MutantOutcome, MutantSuite, PROJECTS, PeerOutcome, PeerProject,
    ProductionPart, ProductionRun, Specimen, Trial, head_cases, head_property, property, property_cases,
};

#[test]
fn mutants_all_fall_and_the_correct_kernel_passes() {
    let (of_heads, on_logits): (Vec<&Mutant>, Vec<&Mutant>) = BANK.iter().partition(|mutant| mutant.kind.is_of_heads());
    let (mut trial, mut heads) = (Trial::new(&on_logits, Grade::Standard), Trial::new(&of_heads, Grade::Standard));
    assert_eq!(trial.run(&property_cases()), Ok(()), "the correct kernel passes every case");
    assert_eq!(heads.run(&head_cases()), Ok(()), "so does the correct head");
    let score = trial.score(&[]).and(heads.score(&[]));
    assert!(score.cases > 900, "{} cases", score.cases);
    assert_eq!(score.survived, Vec::<&str>::new());
    assert_eq!(score.admitted, ["target-collapses"]);
    assert_eq!((score.killed, score.total), (428, 429));
    assert!(score.mutants.iter().all(|mutant| mutant.cases <= score.cases));
}

#[test]
fn mutant_that_nothing_rejects_is_a_survivor() {
    let score = Trial::new(&[&BANK[0]], Grade::Standard).score(&[]);
    assert_eq!((score.total, score.killed, score.survived), (1, 0, vec![BANK[0].name]));
    assert!(score.mutants[0].killed_by.is_none());
}

#[test]
fn mutants_names_are_unique_and_say_what_is_computed() {
    let names: BTreeSet<&str> = BANK.iter().map(|mutant| mutant.name).collect();
    assert_eq!(names.len(), BANK.len());
    for mutant in BANK.iter() {
        let kebab = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(mutant.name.chars().all(kebab), "{}", mutant.name);
        assert!(!mutant.does.is_empty(), "{}", mutant.name);
    }
}

#[test]
fn mutants_of_every_class_fall_to_its_property() {
    let missed: Vec<&str> = MutantKind::ALL
        .into_iter()
        .flat_map(|class| {
            if class.is_of_heads() {
                missed_by(class, &head_property(class))
            } else {
                missed_by(class, &property(class))
            }
        })
        .collect();
    assert_eq!(missed, Vec::<&str>::new());
}

fn missed_by<P: Judgeable>(class: MutantKind, cases: &[MutantCase<P>]) -> Vec<&'static str>
where
    Specimen: Implementation<P>,
{
    let suite =
        MutantSuite::new(cases, Grade::Exact).unwrap_or_else(|false_alarm| panic!("{class:?}: {false_alarm:?}"));
    assert_eq!(suite.len(), cases.len(), "{class:?} has a case that the specimen does not support");
    let of_class: Vec<_> = BANK.iter().filter(|mutant| mutant.kind == class).collect();
    assert!(!of_class.is_empty(), "{class:?} has no mutant");
    let fates = of_class.iter().zip(suite.run(&of_class));
    fates.filter(|(_, fate)| !matches!(fate, MutantOutcome::Killed(_))).map(|(mutant, _)| mutant.name).collect()
}

/// What a class is said not to be reached by is not run: the bits of the correct kernel are taken for granted.
#[test]
fn mutants_of_a_class_are_unreached_by_a_loss_without_it() {
    let bits = |specimen: &Specimen, case: &MutantCase| {
        let candidate = specimen.run(&case.spec, case.problem.clone(), 2).unwrap();
        (candidate.loss.unwrap().value().to_bits(), candidate.gradient)
    };
    for class in MutantKind::ALL.into_iter().filter(|class| !class.is_of_heads()) {
        let case = &property(class)[0];
        let packed = case.problem.extra.sequences.packed().is_some();
        let correct = bits(&Specimen::default(), case);
        for mutant in BANK.iter().filter(|mutant| !mutant.kind.is_reached(&case.spec, packed)) {
            assert_eq!(bits(&Specimen::with(mutant.bug), case), correct, "{} is reached by {class:?}", mutant.name);
        }
    }
}

/// Six tokens over Qwen's vocabulary. What they do not reach is named, and so is what is accepted there.
#[test]
fn mutants_are_rejected_at_production_width() {
    let of_part = |part: ProductionPart| {
        part.run(Grade::Standard).unwrap_or_else(|false_alarm| panic!("{part}: {false_alarm:?}"))
    };
    let parts: Vec<ProductionPart> = ProductionRun::Short.parts().collect();
    let fates: Vec<AtWidth> = parts.into_par_iter().flat_map_iter(of_part).collect();
    let named = |of: fn(&MutantOutcome) -> bool| -> Vec<&str> {
        fates.iter().filter(|at| of(&at.fate)).map(|at| at.mutant.name).collect()
    };
    let [killed, accepted, not_exercised]: [fn(&MutantOutcome) -> bool; 3] = [
        |fate| matches!(fate, MutantOutcome::Killed(_)),
        |fate| *fate == MutantOutcome::Accepted,
        |fate| *fate == MutantOutcome::NotExercised,
    ];
    let at_width = |class: MutantKind| !class.is_of_heads() && class.is_of_columns();
    let changed = |class: MutantKind| matches!(class, MutantKind::Logits | MutantKind::Support);
    let on_logits = BANK.iter().filter(|mutant| at_width(mutant.kind) && !changed(mutant.kind)).count();
    assert_eq!(named(accepted), ACCEPTED);
    assert_eq!(named(not_exercised), NOT_EXERCISED);
    assert_eq!(named(killed).len() + ACCEPTED.len() + NOT_EXERCISED.len(), on_logits);
}

/// One by design; two whose shift is not the maximum, which is right until logits are further apart than f32's exponents reach;
/// and one that drops other rows of few only.
const ACCEPTED: [&str; 4] = ["max-of-first-tile", "target-collapses", "off-policy-mean-over-width", "stale-max"];

/// The mutants whose bits no problem of this width changes: they need more sequences, more tokens, or logits in f32.
const NOT_EXERCISED: [&str; 11] = [
    "logits-in-tf32",
    "logits-in-bf16-in-forward",
    "dual-clip-for-positive",
    "zero-advantage-times-ratio",
    "dentropy-of-first-token",
    "masked-tokens-in-loss",
    "mean-of-row-means",
    "token-gradient-of-sequence",
    "advantage-of-first-token",
    "old-logp-shifted",
    "device-rows-permuted",
];

/// A NaN is seen by any test; these have to be seen without.
#[test]
fn lm_head_mutants_are_rejected_for_a_wrong_number() {
    for class in MutantKind::ALL.into_iter().filter(|class| class.is_of_heads()) {
        let cases = head_property(class);
        for mutant in BANK.iter().filter(|mutant| mutant.kind == class) {
            let specimen = Specimen::with(mutant.bug);
            assert!(cases.iter().any(|case| fails_by_a_number(&specimen, case)), "{}", mutant.name);
        }
    }
}

fn fails_by_a_number(kernel: &dyn Implementation<HeadProblem>, case: &MutantCase<HeadProblem>) -> bool {
    let reference = case.problem.evaluate(&case.spec).unwrap();
    kernel.device_counts().into_iter().any(|devices| {
        let outcome = kernel.run(&case.spec, case.problem.clone(), devices).unwrap();
        let verdicts = case.problem.judge(&reference, &outcome.lend(), &Limits::external(Grade::Standard)).unwrap();
        let any = |status| verdicts.iter().any(|verdict| verdict.status == status);
        any(Status::Fail) && !any(Status::Nonfinite)
    })
}

/// Those that are named here and every sixth: `assay mutants` gives them all of them.
#[test]
fn mutants_accepted_by_tests_of_others_are_some_not_all() {
    const NAMED: [&str; 3] = ["max-starts-at-zero", "mask-of-first-row", "non-target-dlogits-dropped"];
    let peers: Vec<_> = PROJECTS.into_iter().map(PeerProject::prepare).collect();
    for tests in &peers {
        assert!(tests.accept_the_correct_kernel(), "{}", tests.project.name);
    }
    let on_logits = BANK.iter().filter(|mutant| !mutant.kind.is_of_heads()).enumerate();
    let chosen = on_logits.filter(|(i, mutant)| i.is_multiple_of(6) || NAMED.contains(&mutant.name));
    let chosen: Vec<&Mutant> = chosen.map(|(_, mutant)| mutant).collect();
    let score = Trial::new(&chosen, Grade::Standard).score(&peers);
    let mut pass = 0;
    for (project, [caught, passes, not_exercised]) in score.peers() {
        assert!(caught > 3, "{project}: {caught} caught");
        assert_eq!(caught + passes + not_exercised, chosen.len(), "{project}");
        pass += passes;
    }
    assert!(pass > 10, "{pass} pass");
    let cell = |mutant: &str, project: &str| {
        score.mutants.iter().find(|other| other.name == mutant).expect("in the bank").peers[project]
    };
    // Their inputs are drawn around 0, and their masks are all ones.
    for project in PROJECTS {
        assert_eq!(cell("max-starts-at-zero", project.name), PeerOutcome::NotExercised, "{}", project.name);
        assert_eq!(cell("mask-of-first-row", project.name), PeerOutcome::NotExercised, "{}", project.name);
    }
    assert_eq!(cell("non-target-dlogits-dropped", "Liger bf16"), PeerOutcome::Passes);
    assert_eq!(cell("non-target-dlogits-dropped", "Liger f32"), PeerOutcome::Caught);
}
