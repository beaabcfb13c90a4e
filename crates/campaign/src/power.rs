//! Wrong kernels beside the one that is judged: which fail as it does, and how many its campaign would catch.

use std::ops::Range;

use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView, Gradient};
use assay_core::spec::LossSpec;
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::invariance::Invariance;
use assay_judge::judge::Verdict;
use assay_judge::metric::half_ulp;
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_schema::campaign as schema;
use assay_suites::mutants::{BANK, Mutant, Specimen};
use ndarray::Ix2;
use rayon::prelude::*;

use crate::campaign::{Campaign, CampaignError};
use crate::examine::FailureKind;
use crate::subject::Subject;

/// Problems that wrong kernels are run on, and their elements: small ones show what large ones do, many times sooner.
const CASES: usize = 50;
const ELEMENTS: usize = 1 << 13;

/// Elements of larger ones: more than 16 bits count.
const LARGER: Range<usize> = 1 << 16..1 << 18;

/// And of one of Qwen's vocabulary.
const WIDE: Range<usize> = 1 << 18..1 << 20;

/// The largest difference between the kernel's value and a mutant's that counts as equal, as a share of their largest
/// error.
const ALIKE: f64 = 0.05;

/// The mutants that are of such problems, packed or not, and of what the loss has, at all.
pub(crate) fn shown<P: Subject>(spec: &LossSpec, packed: bool) -> Vec<&'static Mutant> {
    BANK.iter().filter(|mutant| P::is_of(mutant.kind) && mutant.kind.is_reached(spec, packed)).collect()
}

/// Runs a mutant and judges it; returns `None` if it does not compute the problem.
fn run<P: Subject>(
    known: &JudgedProblem<P>,
    mutant: &Mutant,
    limits: &Limits,
) -> Option<(Candidate<P::Gradient>, Vec<Verdict>)> {
    let specimen = Specimen::with(mutant.bug);
    let candidate = P::mutant(&specimen).run(known.spec, known.problem.clone(), 1).ok()?;
    let verdicts = known.verdicts(&candidate.lend(), limits).ok()?;
    Some((candidate, verdicts))
}

/// Whether a mutant fails no gate.
pub(crate) fn passes<P: Subject>(known: &JudgedProblem<P>, mutant: &Mutant, limits: &Limits) -> bool {
    run(known, mutant, limits).is_some_and(|(_, verdicts)| verdicts.iter().all(Verdict::passed))
}

/// Whether a mutant fails as `candidate` does: by the gate of `kind`, with the same values.
pub(crate) fn fails_alike<P: Subject>(
    known: &JudgedProblem<P>,
    candidate: &Candidate<P::Gradient>,
    mutant: &Mutant,
    kind: &FailureKind,
    limits: &Limits,
) -> bool {
    let FailureKind::Gate(_, gate, _) = kind else { return false };
    let Some((other, verdicts)) = run(known, mutant, limits) else { return false };
    if !verdicts.iter().any(|verdict| verdict.gate == *gate && !verdict.passed()) {
        return false;
    }
    let dtype = known.problem.dtype();
    let counting = |candidate: &Candidate<P::Gradient>| counting_values(known.problem, candidate, *gate);
    let (given, wrong, exact) = (counting(candidate), counting(&other), counting(&P::outcome(&known.reference)));
    are_alike(&given, &wrong, &exact, if gate.output.is_gradient() { dtype } else { Dtype::F32 })
}

/// Whether `wrong` are the values `given`, both being off from `exact`: NaN in the same places, and elsewhere no further apart than
/// two roundings and a small part of the largest error.
fn are_alike(given: &[f64], wrong: &[f64], exact: &[f64], dtype: Dtype) -> bool {
    if given.len() != wrong.len() {
        return false;
    }
    // The largest finite error of the kernel is the scale on which two wrong values are compared.
    let off = given.iter().zip(exact).map(|(x, y)| (x - y).abs()).filter(|error| error.is_finite());
    let largest = off.fold(0.0, f64::max);
    given.iter().zip(wrong).all(|(x, y)| match (x.is_finite(), y.is_finite()) {
        (true, true) => (x - y).abs() <= f64::max(ALIKE * largest, 4.0 * half_ulp(*x, dtype)),
        (finite, other) => finite == other,
    })
}

/// The output that a gate is of, without the values of masked tokens, which nobody looks at. Masked dlogits must be 0, and stay.
fn counting_values<P: Subject>(problem: &P, candidate: &Candidate<P::Gradient>, gate: Gate) -> Vec<f64> {
    let mut all = values(candidate, gate);
    let mask = &problem.batch().mask;
    if matches!(gate.output, Output::Logp | Output::Entropy | Output::TokenLoss) && all.len().is_multiple_of(mask.len())
    {
        // Logp of a token's other ids follows that of the first ids, token by token.
        let (tokens, ids) = (mask.len(), all.len() / mask.len());
        let counts: Vec<bool> = mask.iter().copied().collect();
        for (place, value) in all.iter_mut().enumerate() {
            let token = if place < tokens { place } else { (place - tokens) / (ids - 1) };
            if !counts[token] {
                *value = 0.0;
            }
        }
    }
    all
}

/// The output that a gate is of, as it was returned.
fn values<G: Gradient>(candidate: &Candidate<G>, gate: Gate) -> Vec<f64> {
    let of_tokens = |array: &Option<FloatArray<Ix2>>| {
        array.as_ref().map_or_else(Vec::new, |array| array.to_f64().into_iter().collect())
    };
    // The absent optional outputs are empty, and thus equal.
    match gate.output {
        Output::Loss => candidate.loss.iter().map(FloatArray::value).collect(),
        Output::Logp => {
            let others = candidate.logp_of_others.iter().flat_map(FloatArray::to_f64);
            of_tokens(&candidate.logp).into_iter().chain(others).collect()
        }
        Output::Entropy => of_tokens(&candidate.entropy),
        Output::TokenLoss => of_tokens(&candidate.token_loss),
        _ => G::arrays(&candidate.gradient.lend()).iter().flat_map(FloatView::to_f64).collect(),
    }
}

/// Removes the outputs that the judged kernel does not have.
fn limited<G>(mut candidate: Candidate<G>, outputs: &[&'static str]) -> Candidate<G> {
    let Candidate { logp, logp_of_others, entropy, token_loss, metrics, .. } = &mut candidate;
    *logp_of_others = logp_of_others.take().filter(|_| outputs.contains(&"logp"));
    for (name, output) in [("logp", logp), ("entropy", entropy), ("token_loss", token_loss)] {
        if !outputs.contains(&name) {
            *output = None;
        }
    }
    *metrics = None;
    candidate
}

/// The fate of one mutant in the campaign.
#[derive(Clone, Copy)]
enum MutantFate {
    Rejected,
    Accepted,
    NotExercised,
}

/// A problem, and what the correct kernel returns for it.
struct MutantTrial<'p, P: Subject> {
    known: JudgedProblem<'p, P>,
    correct: Candidate<P::Gradient>,
}

impl<P: Subject> MutantTrial<'_, P> {
    /// Returns the fate of each mutant on this problem. A mutant whose numbers equal the correct kernel's shows
    /// nothing, unless a second call returns other numbers.
    fn fates(&self, mutants: &[&Mutant], limits: &Limits, outputs: &[&'static str]) -> Vec<MutantFate> {
        let JudgedProblem { spec, problem, .. } = self.known;
        // A second call is one of the same kernel, with the state that the first has left.
        let kernels: Vec<Specimen> = mutants.iter().map(|mutant| Specimen::with(mutant.bug)).collect();
        let run = |kernel: &Specimen| {
            let candidate = P::mutant(kernel).run(spec, problem.clone(), 1).ok()?;
            Some(limited(candidate, outputs))
        };
        let first = |kernel: &Specimen| {
            let candidate = run(kernel)?;
            Some((same_numbers(&self.correct, &candidate), candidate))
        };
        // Run every mutant once. Equal numbers need no verdict, so only the differing candidates are judged, all in
        // one pass over the reference.
        let runs: Vec<Option<(bool, Candidate<P::Gradient>)>> = kernels.par_iter().map(first).collect();
        let others = runs.iter().flatten().filter(|(same, _)| !same).map(|(_, candidate)| candidate.lend());
        let verdicts = self.known.verdicts_of_all(&others.collect::<Vec<_>>(), limits).unwrap_or_default();
        let mut passes = verdicts.iter().map(|verdicts| verdicts.iter().all(Verdict::passed));
        let fate = |run: &Option<(bool, _)>| match run {
            Some((false, _)) if passes.next().unwrap_or(false) => MutantFate::Accepted,
            Some((false, _)) => MutantFate::Rejected,
            Some((true, _)) | None => MutantFate::NotExercised,
        };
        let fates: Vec<MutantFate> = runs.iter().map(fate).collect();
        // Run the mutants that were not rejected once more: some keep state, and differ only in the second call.
        kernels
            .par_iter()
            .zip(runs)
            .zip(fates)
            .map(|((kernel, first), fate)| match (first, fate) {
                (Some((_, candidate)), MutantFate::Accepted | MutantFate::NotExercised) => {
                    let again = run(kernel);
                    let agrees = again.is_some_and(|again| Invariance::between(&candidate, &again).other.is_empty());
                    if agrees { fate } else { MutantFate::Rejected }
                }
                _ => fate,
            })
            .collect()
    }
}

/// Whether all numbers of two candidates are the same: −0 is 0.
fn same_numbers<G: Gradient>(a: &Candidate<G>, b: &Candidate<G>) -> bool {
    let gates = [Output::Loss, Output::Logp, Output::Entropy, Output::TokenLoss, Output::Dlogits];
    gates.into_iter().all(|output| {
        let gate = Gate::new(output, Model::Elementwise);
        let (a, b) = (values(a, gate), values(b, gate));
        a.len() == b.len() && a.iter().zip(&b).all(|(x, y)| x == y || (x.is_nan() && y.is_nan()))
    })
}

/// Runs the mutants on the deck, judged by the outputs that the kernel has: on its first small problems, and those that these do
/// not reject on a few larger ones; what is accepted there on the wide ones too. `None` where the correct kernel does not compute
/// the loss.
pub(crate) fn power<P: Subject>(
    campaign: &Campaign,
    outputs: &[&'static str],
) -> Result<Option<schema::MutationScore>, CampaignError> {
    let (spec, limits) = (&campaign.spec, Limits::external(campaign.grade).alone());
    let mutants = shown::<P>(spec, campaign.deck.packed);
    let mut fates = vec![MutantFate::NotExercised; mutants.len()];
    let mut cases = 0;
    for (sizes, most, accepted_only) in [(0..ELEMENTS, CASES, false), (LARGER, 1, false), (WIDE, 1, true)] {
        // Draw the problems of this size from the campaign's own deck.
        // What the campaign does not hold against a kernel does not count against a mutant.
        let is_noted = campaign.deck.masked_garbage.is_none();
        let recipes = campaign.deck.recipes().map(|dealt| if is_noted { dealt.without_garbage() } else { dealt });
        let recipes = recipes.filter(|dealt| sizes.contains(&dealt.recipe.shape.iter().product())).take(most);
        let problems = recipes.map(|dealt| Ok((dealt.label(), campaign.deck.draw(&dealt, spec)?)));
        let problems: Vec<(String, P)> = problems.collect::<Result<_, CampaignError>>()?;
        let mut trials = Vec::new();
        // Evaluate the reference and the correct kernel. A failure of the correct kernel is a false alarm of the
        // judge, which would make the score worthless.
        for (label, problem) in &problems {
            let Ok(known) = JudgedProblem::new(spec, problem) else { continue };
            let Ok(correct) = P::mutant(&Specimen::default()).run(spec, problem.clone(), 1) else { return Ok(None) };
            let correct = limited(correct, outputs);
            let verdicts = known.verdicts(&correct.lend(), &limits).unwrap_or_default();
            if let Some(failed) = verdicts.iter().find(|verdict| !verdict.passed()) {
                return Err(CampaignError::FalseAlarm { gate: failed.gate.to_string(), case: label.clone() });
            }
            trials.push(MutantTrial { known, correct });
        }
        cases += trials.len();
        let is_settled =
            |fate| matches!(fate, MutantFate::Rejected) || (accepted_only && matches!(fate, MutantFate::NotExercised));
        let mut left: Vec<(&mut MutantFate, &Mutant)> =
            fates.iter_mut().zip(mutants.iter().copied()).filter(|(fate, _)| !is_settled(**fate)).collect();
        // Run only the mutants that are not yet rejected, and drop each as soon as one problem rejects it.
        for trial in &trials {
            let of_left: Vec<&Mutant> = left.iter().map(|(_, mutant)| *mutant).collect();
            for ((fate, _), here) in left.iter_mut().zip(trial.fates(&of_left, &limits, outputs)) {
                if !matches!(here, MutantFate::NotExercised) {
                    **fate = here;
                }
            }
            left.retain(|(fate, _)| !matches!(fate, MutantFate::Rejected));
        }
    }
    // Count a mutant if any problem exercised it, and list the accepted ones by name.
    let mut power = schema::MutationScore { rejected: 0, exercised: 0, accepted: Vec::new(), cases };
    for (mutant, fate) in mutants.into_iter().zip(fates) {
        match fate {
            MutantFate::NotExercised => continue,
            MutantFate::Rejected => power.rejected += 1,
            MutantFate::Accepted => power.accepted.push(named(mutant)),
        }
        power.exercised += 1;
    }
    Ok(Some(power).filter(|power| power.cases > 0))
}

/// A mutant by its name.
pub(crate) fn named(mutant: &Mutant) -> schema::MutantName {
    schema::MutantName { mutant: mutant.name.into(), does: mutant.does.into() }
}
