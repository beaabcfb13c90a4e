//! The values of an output of a candidate, in one list.

use assay_core::problem::{Candidate, FloatArray, FloatView, Gradient};
use assay_judge::gate::{Gate, Output};
use ndarray::{Dimension, Ix2};

/// The output that a gate is of, as it was returned.
pub(crate) fn values<G: Gradient>(candidate: &Candidate<G>, gate: Gate) -> Vec<f64> {
    let of_tokens = |array: &Option<FloatArray<Ix2>>| array.as_ref().map_or_else(Vec::new, |array| list(&array.view()));
    // The absent optional outputs are empty, and thus equal.
    match gate.output {
        Output::Loss => candidate.loss.iter().map(FloatArray::value).collect(),
        Output::Logp => {
            let others = candidate.logp_of_others.iter().flat_map(|array| list(&array.view()));
            of_tokens(&candidate.logp).into_iter().chain(others).collect()
        }
        Output::Entropy => of_tokens(&candidate.entropy),
        Output::TokenLoss => of_tokens(&candidate.token_loss),
        _ => G::arrays(&candidate.gradient.lend()).iter().map(list).collect::<Vec<_>>().concat(),
    }
}

/// Lists the numbers of an array in row-major order.
fn list<D: Dimension>(array: &FloatView<D>) -> Vec<f64> {
    // Iterating over a reference walks the memory; an array of unknown rank that is consumed looks each number up by its indices.
    array.to_f64().iter().copied().collect()
}
