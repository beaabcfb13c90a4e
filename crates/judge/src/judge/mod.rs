//! Judges candidates against the reference: one [`Verdict`] per gate.
//!
//! Judging is four loops, one inside the other:
//!
//! ```text
//! for each set of tokens that may be kept          judge_candidates
//!     for each grade, the better first             judge_grades
//!         for each token                           token.rs
//!             for each branch of its loss          branch.rs, dlogits.rs
//! ```
//!
//! All candidates of a problem walk together, since the limits, which are most of the work, are the same for all of them.

mod branch;
mod cancellation;
mod dlogits;
mod gates;
mod metrics;
mod outputs;
mod token;
mod verdict;

use ndarray::{Array2, Ix3};

use super::condition::{self, LogitErrors};
use super::gate::Output;
use super::lm_head::{self, JudgedHead};
use super::quantile::{self, KeptSets};
use super::tolerance::{Grade, Limits};
use assay_core::problem::{Candidate, FloatView, ProblemError};
use assay_core::spec::Objective;
use assay_reference::{HeadReference, Reference};
use verdict::failures;

pub use cancellation::Cancellation;
pub(super) use dlogits::compare_with_zero;
pub(super) use gates::{GateTallies, StoredDtype};
pub(super) use outputs::CandidateOutputs;
pub(super) use token::{JudgedToken, judged_tokens, shared_edge};
pub use verdict::{JudgeError, ShortOfExact, Status, Verdict};

/// The exact values that candidates are judged against.
#[derive(Clone, Copy)]
pub(super) struct JudgedReference<'r> {
    /// The loss on logits.
    pub(super) reference: &'r Reference<'r>,
    /// The errors that each token's logits have of their own, if they are a product; empty if logits are given.
    pub(super) errors: &'r [LogitErrors],
    /// The LM head, if its gradients are judged.
    pub(super) head: Option<JudgedHead<'r>>,
}

/// Judges `candidates`, whose dlogits may be borrowed, against `reference`. Outputs that a candidate lacks get no verdict.
///
/// Masked tokens must have dlogits of exactly 0; their other outputs are not looked at. A token whose reference is not
/// finite must be reported as such; a token that overflows f32 may be. If `limits` are those of [`Grade::Standard`], each
/// verdict is of the better grade that its gate reaches.
///
/// # Errors
/// [`JudgeError`] if an output has the wrong shape, or one that the spec asks for is missing.
pub(super) fn judge_all(
    reference: &Reference,
    candidates: &[Candidate<FloatView<Ix3>>],
    limits: &Limits,
) -> Result<Vec<Vec<Verdict>>, JudgeError> {
    let outputs = |candidate| CandidateOutputs::with_dlogits(candidate, reference.spec(), reference.shape());
    let candidates = candidates.iter().map(outputs).collect::<Result<Vec<_>, _>>()?;
    Ok(judge_candidates(JudgedReference { reference, errors: &[], head: None }, &candidates, limits))
}

/// Judges a candidate without a gradient; `errors` are those of each token's logits, empty if logits are given.
///
/// # Errors
/// [`JudgeError`] if an output has the wrong shape, or one that the spec asks for is missing.
pub(super) fn judge_forward(
    reference: &Reference,
    candidate: &Candidate<()>,
    limits: &Limits,
    errors: &[LogitErrors],
) -> Result<Vec<Verdict>, JudgeError> {
    let outputs = CandidateOutputs::without_gradient(candidate, reference.spec(), reference.shape())?;
    let judged = JudgedReference { reference, errors, head: None };
    Ok(judge_candidates(judged, &[outputs], limits).into_iter().next().expect("one list of verdicts per candidate"))
}

/// Judges each candidate on the set of kept tokens on which it fails the fewest gates.
///
/// A spec that keeps the tokens of high entropy (`top_entropy`) selects them by a quantile. Rounding may move a token across it, and
/// with it a mean over the kept tokens, so a correct kernel may have kept another set than the reference.
pub(super) fn judge_candidates(
    judged: JudgedReference,
    candidates: &[CandidateOutputs],
    limits: &Limits,
) -> Vec<Vec<Verdict>> {
    // The reference's own set comes first: for nearly every problem it is the only one.
    let mut best = judge_grades(judged, candidates, limits);
    // Other sets matter only to a candidate that fails.
    let all_pass = best.iter().all(|verdicts| failures(verdicts) == 0);
    if all_pass || !quantile::is_counted(judged.reference.spec()) {
        return best;
    }
    let sets = match other_sets(&judged, limits) {
        Ok(sets) => sets,
        Err(open) => {
            // More sets than can be tried: a failure proves nothing.
            best.iter_mut().flatten().for_each(|verdict| verdict.leave_open(open));
            return best;
        }
    };
    for set in &sets {
        let failing: Vec<usize> = (0..candidates.len()).filter(|&i| failures(&best[i]) > 0).collect();
        if failing.is_empty() {
            break;
        }
        // Only failing candidates are compared again; a set that is better for one of them is no reason to change the
        // others.
        let outputs: Vec<CandidateOutputs> = failing.iter().map(|&i| candidates[i].clone()).collect();
        let on_set = match set {
            ReferenceOnSet::Logits(reference) => {
                judge_grades(JudgedReference { reference, ..judged }, &outputs, limits)
            }
            // The gradient of the hidden states follows from the dlogits, which are different ones on this set.
            ReferenceOnSet::Head(reference, head) => {
                let dhidden = lm_head::exact_dhidden(reference);
                let head = Some(JudgedHead { reference, dhidden: &dhidden, ..*head });
                judge_grades(JudgedReference { reference: reference.on_logits(), head, ..judged }, &outputs, limits)
            }
        };
        for (i, verdicts) in failing.into_iter().zip(on_set) {
            if failures(&verdicts) < failures(&best[i]) {
                best[i] = verdicts;
            }
        }
    }
    best
}

/// The reference of a problem, had it kept another set of tokens.
enum ReferenceOnSet<'r> {
    Logits(Reference<'r>),
    /// With the LM head, of which all but the reference is the same for every set.
    Head(HeadReference<'r>, JudgedHead<'r>),
}

/// Evaluates the reference for every set of kept tokens that rounding allows.
///
/// The error is the number of tokens whose side of the quantile is open, if they allow more sets than are tried, or if a set cannot be
/// evaluated: with other tokens a covariance may select more than there are.
fn other_sets<'r>(judged: &JudgedReference<'r>, limits: &Limits) -> Result<Vec<ReferenceOnSet<'r>>, usize> {
    let errors = condition::entropy_errors(judged.reference, limits.into(), judged.errors);
    let on_set = |kept: &Array2<bool>| -> Result<ReferenceOnSet, ProblemError> {
        Ok(match judged.head {
            Some(head) => ReferenceOnSet::Head(head.reference.keeping(kept)?, head),
            None => ReferenceOnSet::Logits(judged.reference.keeping(kept)?),
        })
    };
    match quantile::kept_sets(judged.reference, &errors) {
        KeptSets::Known(sets) => sets
            .iter()
            .map(on_set)
            .collect::<Result<_, _>>()
            .map_err(|_| quantile::open_tokens(judged.reference, &errors).len()),
        KeptSets::TooMany { open } => Err(open),
    }
}

/// Judges each gate at the better grade that it reaches, on one set of kept tokens.
fn judge_grades(judged: JudgedReference, candidates: &[CandidateOutputs], limits: &Limits) -> Vec<Vec<Verdict>> {
    let Some(exact) = limits.better() else { return judge_grade(judged, candidates, limits) };
    let mut best = judge_grade(judged, candidates, &exact);
    // Only candidates that fail grade `exact` are judged again, and of an LM head only the gradients that fail.
    let failing: Vec<usize> = (0..candidates.len()).filter(|&i| failures(&best[i]) > 0).collect();
    if failing.is_empty() {
        return best;
    }
    let again: Vec<CandidateOutputs> =
        failing.iter().map(|&i| candidates[i].clone().without_passed_gradients(&best[i])).collect();
    take_standard(judged, &mut best, &failing, &again, &limits.at(Grade::Standard));
    // The bound of sums in lanes takes walks along each row, so it is computed only for candidates that fail without it. In a short row
    // an entropy's gradient alone can lose so much, and that of a smoothed cross-entropy: one of the terms, the cotangent of logp, may be
    // far larger than all others.
    let standard = limits.at(Grade::Standard).with_sums_in_lanes();
    let long = judged.reference.shape().vocab > condition::LONG_ROW;
    let smooths =
        matches!(&judged.reference.spec().objective, Objective::CrossEntropy(of) if of.label_smoothing != 0.0);
    let by_entropy = |verdicts: &[Verdict]| fails_by_entropy(judged.reference, verdicts);
    take_forgiven(judged, candidates, &mut best, &standard, |verdicts| long || smooths || by_entropy(verdicts));
    // An entropy as a difference of two large numbers has such sums in it, of rows of any length.
    take_forgiven(judged, candidates, &mut best, &standard.with_entropy_as_difference(), by_entropy);
    best
}

/// Judges once more, by `limits`, the candidates that fail and that `asked` is true of.
fn take_forgiven(
    judged: JudgedReference,
    candidates: &[CandidateOutputs],
    best: &mut [Vec<Verdict>],
    limits: &Limits,
    asked: impl Fn(&[Verdict]) -> bool,
) {
    let failing: Vec<usize> = (0..candidates.len()).filter(|&i| failures(&best[i]) > 0 && asked(&best[i])).collect();
    if !failing.is_empty() {
        let again: Vec<CandidateOutputs> =
            failing.iter().map(|&i| candidates[i].clone().without_passed_gradients(&best[i])).collect();
        take_standard(judged, best, &failing, &again, limits);
    }
}

/// Whether an error of the entropies may be why one of `verdicts` failed.
fn fails_by_entropy(reference: &Reference, verdicts: &[Verdict]) -> bool {
    let has_gradient = reference.spec().entropy_coef != 0.0 || reference.spec().dentropy;
    verdicts.iter().filter(|verdict| verdict.status == Status::Fail).any(|verdict| match verdict.gate.output {
        Output::Entropy | Output::EntropyMean => true,
        Output::Loss => has_gradient,
        output => has_gradient && output.is_gradient(),
    })
}

/// Replaces the failed verdicts of the candidates `failing` by those of `limits`, and notes of each that passes what kept it from `exact`.
fn take_standard(
    judged: JudgedReference,
    best: &mut [Vec<Verdict>],
    failing: &[usize],
    candidates: &[CandidateOutputs],
    limits: &Limits,
) {
    let standard = judge_grade(judged, candidates, limits);
    for (&i, standard) in failing.iter().zip(standard) {
        for verdict in best[i].iter_mut().filter(|verdict| verdict.status.failed()) {
            let Some(other) = standard.iter().find(|other| other.gate == verdict.gate) else { continue };
            // A failure keeps the limits without sums in lanes.
            if (limits.sums_in_lanes() || limits.entropy_as_difference()) && !other.passed() {
                continue;
            }
            // A gate that passes at `standard` tells what kept it from `exact`.
            let short_of_exact = other.passed().then(|| {
                let worst = verdict.tally.worst;
                let cancellation = Cancellation::explaining(judged.reference, verdict.gate, worst, limits);
                ShortOfExact { worst, cancellation }
            });
            *verdict = Verdict { short_of_exact, ..other.clone() };
        }
    }
}

/// Judges every gate at the grade of `limits`.
fn judge_grade(judged: JudgedReference, candidates: &[CandidateOutputs], limits: &Limits) -> Vec<Vec<Verdict>> {
    let tokens = judged_tokens(judged.reference, limits, judged.errors);
    let mut tallies = token::judge_tokens(judged, candidates, &tokens, limits);
    if let Some(head) = judged.head {
        lm_head::judge_gradients(head, candidates, &tokens, limits, &mut tallies);
    }
    tallies.into_iter().map(GateTallies::into_verdicts).collect()
}
