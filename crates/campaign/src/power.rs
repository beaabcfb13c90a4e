//! Wrong kernels beside the one that is judged: which fail as it does, and how many its campaign would catch.

use assay_core::problem::{Candidate, Dtype, FloatArray};
use assay_judge::gate::{Gate, Output};
use assay_judge::invariance::Invariance;
use assay_judge::judge::Verdict;
use assay_judge::metric::half_ulp;
use assay_judge::tolerance::Limits;
use assay_judge::trial::Known;
use assay_schema::campaign as schema;
use assay_suites::mutants::{BANK, Mutant, Specimen};
use ndarray::Ix2;
use rayon::prelude::*;

use crate::deck::Deals;
use crate::run::{Campaign, CampaignError, Kind, reseeded};
use crate::subject::{Dealt, Subject};

/// Problems that wrong kernels are run on, and their elements: small ones show what large ones do, many times sooner.
const CASES: usize = 50;
const ELEMENTS: usize = 1 << 13;

/// How far from the judged kernel's value a wrong kernel's may be to be the same, in units of how far both are off.
const ALIKE: f64 = 0.05;

/// Whether a mutant is one of such problems at all.
pub(crate) fn shows<P: Subject>(mutant: &Mutant) -> bool {
    P::is_of(mutant.class)
}

/// What a mutant returns, with its verdicts; `None` where it does not compute that.
fn run<P: Subject>(
    known: &Known<P>,
    mutant: &Mutant,
    limits: &Limits,
) -> Option<(Candidate<P::Gradient>, Vec<Verdict>)> {
    let specimen = Specimen::with(mutant.bug);
    let candidate = P::mutant(&specimen).run(known.spec, known.problem.clone(), 1).ok()?;
    let verdicts = known.verdicts(&candidate.lend(), limits).ok()?;
    Some((candidate, verdicts))
}

/// Whether a mutant fails no gate.
pub(crate) fn passes<P: Subject>(known: &Known<P>, mutant: &Mutant, limits: &Limits) -> bool {
    run(known, mutant, limits).is_some_and(|(_, verdicts)| verdicts.iter().all(Verdict::passed))
}

/// Whether a mutant fails as `candidate` does: by the gate of `kind`, with the same values.
pub(crate) fn fails_alike<P: Subject>(
    known: &Known<P>,
    candidate: &Candidate<P::Gradient>,
    mutant: &Mutant,
    kind: &Kind,
    limits: &Limits,
) -> bool {
    let Kind::Gate(_, gate, _) = kind else { return false };
    let Some((other, verdicts)) = run(known, mutant, limits) else { return false };
    if !verdicts.iter().any(|verdict| verdict.gate == *gate && !verdict.passed()) {
        return false;
    }
    let (given, wrong, dtype) = (values::<P>(candidate, *gate), values::<P>(&other, *gate), known.problem.dtype());
    let exact = values::<P>(&P::outcome(&known.reference), *gate);
    are_alike(&given, &wrong, &exact, if gate.output.is_gradient() { dtype } else { Dtype::F32 })
}

/// Whether `wrong` are the values `given`, both being off from `exact`: NaN in the same places, and elsewhere no further apart than
/// two roundings and a small part of the largest error.
fn are_alike(given: &[f64], wrong: &[f64], exact: &[f64], dtype: Dtype) -> bool {
    if given.len() != wrong.len() {
        return false;
    }
    let off = given.iter().zip(exact).map(|(x, y)| (x - y).abs()).filter(|error| error.is_finite());
    let largest = off.fold(0.0, f64::max);
    given.iter().zip(wrong).all(|(x, y)| match (x.is_finite(), y.is_finite()) {
        (true, true) => (x - y).abs() <= f64::max(ALIKE * largest, 4.0 * half_ulp(*x, dtype)),
        (finite, other) => finite == other,
    })
}

/// The output that a gate is of, as it was returned.
fn values<P: Subject>(candidate: &Candidate<P::Gradient>, gate: Gate) -> Vec<f64> {
    let of_tokens = |array: &Option<FloatArray<Ix2>>| {
        array.as_ref().map_or_else(Vec::new, |array| array.to_f64().into_iter().collect())
    };
    match gate.output {
        Output::Loss => vec![candidate.loss.value()],
        Output::Logp => of_tokens(&candidate.logp),
        Output::Entropy => of_tokens(&candidate.entropy),
        Output::TokenLoss => of_tokens(&candidate.token_loss),
        _ => P::values(&candidate.gradient),
    }
}

/// Without the outputs that the judged kernel does not have.
fn limited<G>(mut candidate: Candidate<G>, outputs: &[&'static str]) -> Candidate<G> {
    let Candidate { logp, entropy, token_loss, metrics, .. } = &mut candidate;
    for (name, output) in [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)] {
        if !outputs.contains(&name) {
            *output = None;
        }
    }
    *metrics = None;
    candidate
}

/// What became of a mutant.
enum Fate {
    Rejected,
    Accepted,
    NotExercised,
}

/// Runs the mutants on the first small problems of the deck, judged by the outputs that the kernel has. `None` where the correct kernel
/// does not compute the loss.
pub(crate) fn power<P: Subject>(
    campaign: &Campaign,
    deals: &dyn Deals<P>,
    outputs: &[&'static str],
) -> Result<Option<schema::Power>, CampaignError> {
    let (spec, limits) = (&campaign.spec, Limits::external(campaign.grade));
    let small = (0..deals.deck().cases).map(|index| reseeded::<P>(deals.deal(index), 0));
    let small = small.filter(|recipe| recipe.of_logits().shape.iter().product::<usize>() <= ELEMENTS).take(CASES);
    let problems = small.map(|recipe| Ok((recipe.label(), P::draw(&recipe, spec)?)));
    let problems: Vec<(String, P)> = problems.collect::<Result<_, CampaignError>>()?;
    let correct = Specimen::default();
    let mut cases: Vec<(Known<P>, Candidate<P::Gradient>)> = Vec::new();
    for (label, problem) in &problems {
        let Ok(known) = Known::of(spec, problem) else { continue };
        let Ok(candidate) = P::mutant(&correct).run(spec, problem.clone(), 1) else { return Ok(None) };
        let candidate = limited(candidate, outputs);
        let verdicts = known.verdicts(&candidate.lend(), &limits).unwrap_or_default();
        if let Some(failed) = verdicts.iter().find(|verdict| !verdict.passed()) {
            return Err(CampaignError::FalseAlarm { gate: failed.gate.to_string(), case: label.clone() });
        }
        cases.push((known, candidate));
    }
    let fate = |mutant: &&Mutant| {
        let mut fate = Fate::NotExercised;
        for (known, correct) in &cases {
            let specimen = Specimen::with(mutant.bug);
            let Ok(candidate) = P::mutant(&specimen).run(spec, known.problem.clone(), 1) else { continue };
            let candidate = limited(candidate, outputs);
            if Invariance::between(correct, &candidate).other.is_empty() {
                continue;
            }
            match known.verdicts(&candidate.lend(), &limits) {
                Ok(verdicts) if verdicts.iter().all(Verdict::passed) => fate = Fate::Accepted,
                _ => return Fate::Rejected,
            }
        }
        fate
    };
    let mutants: Vec<&Mutant> = BANK.iter().filter(|mutant| shows::<P>(mutant)).collect();
    let fates: Vec<Fate> = mutants.par_iter().map(fate).collect();
    let mut power = schema::Power { rejected: 0, exercised: 0, accepted: Vec::new(), cases: cases.len() };
    for (mutant, fate) in mutants.into_iter().zip(fates) {
        match fate {
            Fate::NotExercised => continue,
            Fate::Rejected => power.rejected += 1,
            Fate::Accepted => power.accepted.push(named(mutant)),
        }
        power.exercised += 1;
    }
    Ok(Some(power))
}

/// A mutant by its name.
pub(crate) fn named(mutant: &Mutant) -> schema::Name {
    schema::Name { mutant: mutant.name.into(), does: mutant.does.into() }
}
