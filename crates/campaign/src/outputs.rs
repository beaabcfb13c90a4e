//! The values of an output of a candidate, in one list.

use assay_core::problem::{Candidate, FloatArray, FloatView, Gradient};
use assay_judge::gate::{Gate, Output};
use ndarray::Ix2;

/// The output that a gate is of, as it was returned.
pub(crate) fn values<G: Gradient>(candidate: &Candidate<G>, gate: Gate) -> Vec<f64> {
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
