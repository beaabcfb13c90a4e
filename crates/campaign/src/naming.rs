//! Names a cause after the mutants that fail as the kernel does.

use std::sync::Arc;

use assay_core::problem::{Candidate, Dtype};
use assay_core::spec::LossSpec;
use assay_judge::gate::{Gate, Model, Output};
use assay_judge::judge::Verdict;
use assay_judge::metric::half_ulp;
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_schema::campaign as schema;
use assay_schema::verdicts::Status;
use assay_suites::mutants::{BANK, Mutant, MutantKind, Specimen};
use rayon::prelude::*;

use crate::examine::{Examiner, FailedStatus, FailureKind};
use crate::outputs::values;
use crate::power::{named, sizes};
use crate::subject::Subject;

/// Problems of a cause that mutants are run on.
const NAMING: usize = 3;

/// The largest difference between the kernel's value and a mutant's that counts as equal, as a share of the kernel's largest error.
const ALIKE: f64 = 0.05;

/// The factor by which two kernels' errors may differ where one is just within a limit and the other just beyond it.
const MARGIN: f64 = 2.0;

/// The error of a value, in half ulps, from which on its rounding alone does not explain it.
const BEYOND_ROUNDING: f64 = 1.05;

/// The error of a value, in half ulps, from which on roundings in another order do not explain it.
const FEW_ROUNDINGS: f64 = 16.0;

/// The log-probability of an id from which on f32 keeps few digits of 1 − p.
const COLLAPSED: f64 = -1e-5;

/// Returns the mutants that fail as the kernel does: by the same gate, with the same values to within a small part of
/// the error, on every problem of the cause; and that pass where the kernel passes.
pub(crate) fn names<P: Subject>(
    bench: &mut Examiner<P>,
    mutants: Vec<&'static Mutant>,
    kind: &FailureKind,
    smallest: (&Arc<P>, Candidate<P::Gradient>),
    cases: &[Arc<P>],
    passing: &[Arc<P>],
) -> Vec<schema::MutantName> {
    // Two values agree by chance: one problem of two columns is no evidence.
    if cases.len() < 2 && cases.iter().all(|problem| problem.shape().into().vocab <= 2) {
        return Vec::new();
    }
    // Collect the kernel's answers to a few problems of the cause, the shrunk one first.
    let mut failing = vec![(Arc::clone(smallest.0), smallest.1)];
    for problem in cases.iter().take(NAMING) {
        if let Ok(candidate) = bench.candidate(problem) {
            failing.push((Arc::clone(problem), candidate));
        }
    }
    // Evaluate the reference once for each problem: every mutant is judged against it.
    let failing: Vec<(JudgedProblem<P>, &Candidate<P::Gradient>)> = failing
        .iter()
        .filter_map(|(problem, candidate)| Some((JudgedProblem::new(bench.spec, &**problem).ok()?, candidate)))
        .collect();
    let passing: Vec<JudgedProblem<P>> =
        passing.iter().filter_map(|problem| JudgedProblem::new(bench.spec, &**problem).ok()).collect();
    // A name must explain every failure and contradict no passing problem.
    let is_alike = |mutant: &&Mutant| {
        let mut evidence = Likeness::default();
        let alike = failing.iter().all(|(known, candidate)| {
            let of_problem = likeness(known, candidate, mutant, kind, &bench.limits);
            of_problem.map(|of_problem| evidence.add(&of_problem)).is_some()
        });
        alike && evidence.is_enough() && passing.iter().all(|known| passes(known, mutant, &bench.limits))
    };
    let alike = |mutants: Vec<&'static Mutant>| -> Vec<schema::MutantName> {
        mutants.into_par_iter().filter(is_alike).map(named).collect()
    };
    let of_masks = || mutants.iter().copied().filter(|mutant| mutant.kind == MutantKind::Mask).collect();
    match kind {
        FailureKind::MaskedGarbage => alike(of_masks()),
        // NaN hides every number behind it, so that many mutants fail alike: those of masks are asked first.
        FailureKind::Gate(_, _, FailedStatus::Nonfinite) => {
            let found = alike(of_masks());
            if found.is_empty() { alike(mutants) } else { found }
        }
        _ => alike(mutants),
    }
}

/// Returns the mutants that a cause may be named after: those that such problems and the loss can show, on one device or cut over two.
pub(crate) fn nameable<P: Subject>(spec: &LossSpec, packed: bool) -> Vec<&'static Mutant> {
    // A kernel that is called on whole problems may cut them over devices itself.
    let is_cut = |kind: MutantKind| is_of_devices(kind) && kind.is_of_heads() == P::is_of(MutantKind::HeadChunks);
    let is_of = |kind| P::is_of(kind) || is_cut(kind);
    BANK.iter().filter(|mutant| is_of(mutant.kind) && mutant.kind.is_reached(spec, packed)).collect()
}

fn is_of_devices(kind: MutantKind) -> bool {
    matches!(kind, MutantKind::Devices | MutantKind::HeadDevices)
}

/// Runs a mutant and judges it; returns `None` if it does not compute the problem.
fn run<P: Subject>(
    known: &JudgedProblem<P>,
    mutant: &Mutant,
    limits: &Limits,
) -> Option<(Candidate<P::Gradient>, Vec<Verdict>)> {
    let specimen = Specimen::with(mutant.bug);
    let devices = if is_of_devices(mutant.kind) { 2 } else { 1 };
    let candidate = P::mutant(&specimen).run(known.spec, known.problem.clone(), devices).ok()?;
    let verdicts = known.verdicts(&candidate.lend(), limits).ok()?;
    Some((candidate, verdicts))
}

/// Whether the sizes of a problem alone say that the mutant is right there.
fn is_right_by_size<P: Subject>(known: &JudgedProblem<P>, mutant: &Mutant) -> bool {
    mutant.bug.is_shown_by(sizes(known.problem)) == Some(false)
}

/// Whether a mutant fails no gate, or so little that the kernel may be just within the limit.
fn passes<P: Subject>(known: &JudgedProblem<P>, mutant: &Mutant, limits: &Limits) -> bool {
    is_right_by_size(known, mutant)
        || run(known, mutant, limits)
            .is_some_and(|(_, verdicts)| verdicts.iter().all(|verdict| is_below(verdict, MARGIN)))
}

/// Whether all errors of a verdict are finite and below `times` their limits, or within them.
fn is_below(verdict: &Verdict, times: f64) -> bool {
    let is_finite = verdict.status != Status::Nonfinite;
    is_finite && verdict.worst().map_or(verdict.passed(), |worst| worst.error_over_limit() < times)
}

/// The share of a mutant's wrong values that are those of the kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Likeness {
    /// Whether the mutant fails on the problem.
    fails: bool,
    /// The number of values that are off by more than their rounding.
    beyond: usize,
    /// The number of them of which kernel and mutant are nearer to each other than to the exact one.
    explained: usize,
    /// Whether some value is off by more than a few roundings.
    is_large: bool,
}

/// The number of values that are off by few roundings from which on agreement is no chance.
const ROUNDED: usize = 8;

impl Likeness {
    fn add(&mut self, other: &Self) {
        self.fails |= other.fails;
        self.beyond += other.beyond;
        self.explained += other.explained;
        self.is_large |= other.is_large;
    }

    /// Whether all problems together show that the mistake is one.
    fn is_enough(&self) -> bool {
        self.fails && 4 * self.explained >= 3 * self.beyond && (self.is_large || self.beyond >= ROUNDED)
    }
}

/// Compares how a mutant and `candidate` fail: by the gate of `kind`, with the same values; or for garbage under the mask, with NaN in
/// the same places of every output. Returns `None` if they do not fail alike.
fn likeness<P: Subject>(
    known: &JudgedProblem<P>,
    candidate: &Candidate<P::Gradient>,
    mutant: &Mutant,
    kind: &FailureKind,
    limits: &Limits,
) -> Option<Likeness> {
    if is_right_by_size(known, mutant) {
        return None;
    }
    let (other, verdicts) = run(known, mutant, limits)?;
    let counting = |candidate: &Candidate<P::Gradient>, gate| counting_values(known.problem, candidate, gate);
    let gate = match kind {
        FailureKind::Gate(_, gate, _) => *gate,
        FailureKind::MaskedGarbage => {
            let all = [Output::Loss, Output::Logp, Output::Entropy, Output::TokenLoss, Output::Dlogits];
            let same = |output| {
                let gate = Gate::new(output, Model::Elementwise);
                let (given, wrong) = (counting(candidate, gate), counting(&other, gate));
                // An output that the kernel does not return says nothing.
                given.is_empty()
                    || (given.len() == wrong.len()
                        && given.iter().zip(&wrong).all(|(x, y)| x.is_finite() == y.is_finite()))
            };
            let fails = verdicts.iter().any(|verdict| !verdict.passed());
            return (fails && all.into_iter().all(same)).then_some(Likeness {
                fails,
                is_large: true,
                ..Likeness::default()
            });
        }
        _ => return None,
    };
    if !verdicts.iter().any(|verdict| verdict.gate == gate && !is_below(verdict, 1.0 / MARGIN)) {
        return None;
    }
    let dtype = known.problem.dtype();
    let exact = P::outcome(&known.reference);
    let (mut given, mut wrong, mut exact_values) =
        (counting(candidate, gate), counting(&other, gate), counting(&exact, gate));
    if matches!(gate.output, Output::Dlogits | Output::Dhidden)
        && let Some(logp) = &exact.logp
    {
        // The gradient of a token whose id has nearly all the mass is of the size 1 − p, of which f32 keeps few digits.
        let logp: Vec<f64> = logp.to_f64().into_iter().collect();
        let width = exact_values.len() / logp.len().max(1);
        for (token, _) in logp.iter().enumerate().filter(|(_, logp)| **logp > COLLAPSED) {
            let row = token * width..(token + 1) * width;
            for values in [&mut given, &mut wrong, &mut exact_values] {
                values.get_mut(row.clone()).into_iter().for_each(|row| row.fill(0.0));
            }
        }
    }
    let exact = exact_values;
    let fails = verdicts.iter().any(|verdict| verdict.gate == gate && !verdict.passed());
    let alike = compared(&given, &wrong, &exact, if gate.output.is_gradient() { dtype } else { Dtype::F32 });
    alike.map(|alike| Likeness { fails, ..alike })
}

/// Compares the wrong values `given` and `wrong`, both being off from `exact`. Returns `None` unless NaN is in the same places, and
/// the others are no further apart than two roundings and a small part of the largest error. Of the values that are off by more than a
/// rounding most must be nearer to each other than to the exact one: two kernels that both round once too often are not alike for that.
fn compared(given: &[f64], wrong: &[f64], exact: &[f64], dtype: Dtype) -> Option<Likeness> {
    if given.len() != wrong.len() {
        return None;
    }
    // The largest finite error of the kernel is the scale on which two wrong values are compared.
    let off = given.iter().zip(exact).map(|(x, y)| (x - y).abs()).filter(|error| error.is_finite());
    let largest = off.fold(0.0, f64::max);
    let mut found = Likeness::default();
    for ((x, y), exact) in given.iter().zip(wrong).zip(exact) {
        if x.is_finite() != y.is_finite() {
            return None;
        }
        let half = half_ulp(*exact, dtype);
        if !x.is_finite() {
            found.is_large |= exact.is_finite();
            continue;
        }
        if (x - y).abs() > f64::max(ALIKE * largest, 4.0 * half_ulp(*x, dtype)) {
            return None;
        }
        let error = f64::max((x - exact).abs(), (y - exact).abs());
        found.is_large |= (x - exact).abs() > FEW_ROUNDINGS * half;
        if error > f64::max(ALIKE * largest, BEYOND_ROUNDING * half) {
            found.beyond += 1;
            found.explained += usize::from((x - y).abs() < error / 2.0);
        }
    }
    Some(found)
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
