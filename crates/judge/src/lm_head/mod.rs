//! Judges a fused LM head's gradients against the reference.
//!
//! Each logit is a sum of `H` products, and each gradient a sum over `V` vocabulary entries or `N` tokens of dlogits that carry errors
//! of their own. Errors of random signs add up as the root of their squares' sum: with `λ` the standard deviations allowed and
//! `λ′ = λ/√3`, as a rounding error is uniform,
//!
//! | value | limit, beyond its own half ulp |
//! |---|---|
//! | logit `x` | `ε_v = λ′·u·√H·(|x_v| + ‖hidden·lm_head_v‖₂)` |
//! | `dhidden[n,h]` | `|Σ_v c_v w_hv| + √Σ_v o_v² w_hv² + Σ_v (f + i_v) |w_hv| + R + λ′·u·√V·(|dhidden| + √Σ_v dx_v² w_hv²)` |
//! | `dlm_head[h,v]` | `√Σ_n x_nh² (c + o + i − s)_nv² + Σ_n (f_n + s_nv) |x_nh| + R + λ′·u·√N·(|dlm_head| + √Σ_n x_nh² dx_nv²)` |
//!
//! with
//!
//! | symbol | means |
//! |---|---|
//! | `x`, `w` | the hidden states and the head |
//! | `c` | the error of dlogits that all entries of a token but its target share, in proportion to their probabilities |
//! | `o` | the error that an entry has of its own |
//! | `i` | the error of a token's ids, in place of `o`, if it has several |
//! | `f` | the part of a dlogit that f32 flushes to 0, which always points toward 0 |
//! | `s` | the part of `c` and `o` that follows from a ratio that the tokens of a sequence share |
//! | `R` | the rounding of dlogits to the dtype of the products |
//!
//! A walk to `x` in `H` steps `t` has partial sums of about `|x| + ‖t‖₂` in the root of their mean square, and each is rounded once
//! (Higham and Mary 2019). Equal logits have equal errors: if many entries of a token are equal, or hidden states, their errors add up
//! before they are squared, and √V, or √N, is replaced by their number.
//!
//! Dlogits that are within a step of the products' dtype round alike, equal or not: with an entropy bonus they are `p·(a + b·ln p)`,
//! which has a minimum, about which half of a row may crowd. With `r` half an ulp and `ρ` by how much rounding moves a dlogit,
//!
//! `R = min(Σ r·|w|, √(λ′²·Σ r²w² + max(|Σ ρ·w|, |Σ r·w·e^(πi·dx/r)|)²))`
//!
//! The last sum is the most that rounding may move those that are close together, wherever between two values of the dtype they are,
//! and nearly 0 if they fill a step: a kernel that scales its sums rounds at other places than one that scales its dlogits,
//! and the errors of dlogits may carry all of them over a tie.

mod dhidden;
mod dlm_head;
mod dlogits;
mod gradient;
mod logits;
mod sums;

use ndarray::{Array2, Ix2, Ix3};

use super::gate::Output;
use super::judge::{
    self, CandidateOutputs, GateTallies, JudgeError, JudgedReference, JudgedToken, StoredDtype, Verdict,
};
use super::tolerance::Limits;
use assay_core::problem::{Candidate, Dtype, FloatView, HeadGradientView, HeadProblem};
use assay_reference::HeadReference;
use dhidden::DhiddenLimits;
use dlm_head::DlmHeadLimits;
use dlogits::{DlogitsErrors, token_product_errors};
use gradient::GradientGates;
pub(crate) use logits::logit_errors;

/// The least number of equal logits in a row, or of equal hidden states, whose errors are added up before they are squared.
const ALIKE: usize = 8;

/// The largest sum of the terms' sizes that cannot overflow f32 before the terms cancel.
const LARGEST_SUM: f64 = f32::MAX as f64 / 2.0;

/// The LM head behind a problem's logits, whose gradients are judged.
#[derive(Clone, Copy)]
pub(super) struct JudgedHead<'r> {
    pub(super) reference: &'r HeadReference<'r>,
    pub(super) problem: &'r HeadProblem,
    /// The exact gradient of the hidden states, `[B·T,H]`.
    pub(super) dhidden: &'r Array2<f64>,
}

/// Judges `candidates` against `reference`. Outputs that a candidate lacks get no verdict.
///
/// The hidden states of masked tokens must have a gradient of exactly 0. Values of `dhidden` and of `dlm_head` may be NaN or ∞ if a
/// token's reference is not finite or overflows f32, if its dlogits, with their errors, overflow the dtype in which they go into the
/// products, or if the value's own sum overflows f32 before its terms cancel.
///
/// # Errors
/// [`JudgeError`] if an output has the wrong shape, or one that the spec asks for is missing.
pub(super) fn judge_all(
    reference: &HeadReference,
    problem: &HeadProblem,
    candidates: &[Candidate<HeadGradientView<'_>>],
    limits: &Limits,
) -> Result<Vec<Vec<Verdict>>, JudgeError> {
    let on_logits = reference.on_logits();
    let outputs =
        |candidate| CandidateOutputs::with_head(candidate, on_logits.spec(), reference.shape(), reference.layout());
    let candidates = candidates.iter().map(outputs).collect::<Result<Vec<_>, _>>()?;
    let errors = logit_errors(reference, problem, limits);
    let dhidden = exact_dhidden(reference);
    let head = Some(JudgedHead { reference, problem, dhidden: &dhidden });
    let judged = JudgedReference { reference: on_logits, errors: &errors, head };
    Ok(judge::judge_candidates(judged, &candidates, limits))
}

/// Judges a candidate without gradients.
///
/// # Errors
/// [`JudgeError`] if an output has the wrong shape, or one that the spec asks for is missing.
pub(super) fn judge_forward(
    reference: &HeadReference,
    problem: &HeadProblem,
    candidate: &Candidate<()>,
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    judge::judge_forward(reference.on_logits(), candidate, limits, &logit_errors(reference, problem, limits))
}

/// Evaluates the exact gradient of the hidden states, `[B·T,H]`.
pub(super) fn exact_dhidden(reference: &HeadReference) -> Array2<f64> {
    reference.dhidden(|columns| reference.dlogits(columns))
}

/// Judges the gradients of hidden states and head, once for all candidates whose dlogits were rounded to one dtype.
pub(super) fn judge_gradients(
    head: JudgedHead,
    candidates: &[CandidateOutputs],
    tokens: &[JudgedToken],
    limits: &Limits,
    tallies: &mut [GateTallies],
) {
    // The limits depend on the dtype that dlogits were rounded to, so candidates are grouped by it, and each group
    // walks the vocabulary once.
    for dtype in Dtype::KERNEL.into_iter().chain([Dtype::F64]) {
        let mut gradients = HeadGradients::default();
        for (i, outputs) in candidates.iter().enumerate() {
            let Some(outputs) = outputs.head.as_ref().filter(|head| head.dlogits_dtype == dtype) else { continue };
            let shape = head.reference.shape();
            let gates = |output, given, of| GradientGates::new(output, StoredDtype::gradient(given, of), limits, shape);
            if let Some(actual) = &outputs.dhidden {
                let gates = gates(Output::Dhidden, actual.dtype(), head.problem.logits.hidden.dtype());
                gradients.dhidden.push(CandidateGradient { candidate: i, actual: actual.view(), gates });
            }
            if let Some(actual) = &outputs.dlm_head {
                let gates = gates(Output::DlmHead, actual.dtype(), head.problem.logits.lm_head.dtype());
                gradients.dlm_head.push(CandidateGradient { candidate: i, actual: actual.view(), gates });
            }
        }
        if !(gradients.dhidden.is_empty() && gradients.dlm_head.is_empty()) {
            compare_gradients(head, dtype, &gradients, tokens, limits, tallies);
        }
    }
}

/// A gradient that one candidate returned: `[B,T,H]` of hidden states, or `[H,V]` or `[V,H]` of a head.
struct CandidateGradient<'c, D: ndarray::Dimension> {
    /// The candidate's number.
    candidate: usize,
    actual: FloatView<'c, D>,
    gates: GradientGates,
}

/// The gradients of all candidates whose dlogits were rounded to one dtype.
#[derive(Default)]
struct HeadGradients<'c> {
    dhidden: Vec<CandidateGradient<'c, Ix3>>,
    dlm_head: Vec<CandidateGradient<'c, Ix2>>,
}

/// Compares gradients whose dlogits went into the products in `dtype`.
///
/// Neither the dlogits nor the head fit into memory as f64. The vocabulary is walked a few columns at a time: each adds to the sums
/// behind the limits of `dhidden`, while a column of `dlm_head` is finished at once.
fn compare_gradients(
    head: JudgedHead,
    dtype: Dtype,
    gradients: &HeadGradients,
    tokens: &[JudgedToken],
    limits: &Limits,
    tallies: &mut [GateTallies],
) {
    let HeadGradients { dhidden, dlm_head } = gradients;
    let reference = head.reference;
    for (candidate, gates) in
        dhidden.iter().map(|g| (g.candidate, g.gates)).chain(dlm_head.iter().map(|g| (g.candidate, g.gates)))
    {
        gates.enter(&mut tallies[candidate]);
    }
    let products = token_product_errors(reference, tokens, dtype, limits);
    let mut dhidden_limits = (!dhidden.is_empty()).then(|| DhiddenLimits::new(reference, tokens, limits));
    let dlm_head_limits = (!dlm_head.is_empty()).then(|| DlmHeadLimits::new(reference, tokens, &products, limits));
    for columns in reference.column_chunks() {
        let dlogits = DlogitsErrors::new(reference.on_logits(), tokens, &columns, dtype, limits);
        if let Some(dhidden_limits) = &mut dhidden_limits {
            dhidden_limits.add(&dlogits, &reference.columns(columns.clone()));
        }
        if let Some(dlm_head_limits) = &dlm_head_limits {
            dlm_head_limits.compare(&dlogits, columns, dlm_head, tallies);
        }
    }
    // The limits of dhidden are complete only after the last columns; equal logits are looked for over the whole row,
    // which no chunk has.
    if let Some(dhidden_limits) = &mut dhidden_limits {
        dhidden_limits.add_equal_logits(dtype, tokens);
        for gradient in dhidden {
            dhidden_limits.compare(head.dhidden, gradient, tokens, &products, &mut tallies[gradient.candidate]);
        }
    }
}
