//! The errors of logits that are a product of hidden states and a head.

use ndarray::Array2;

use super::sums::{add_product, square};
use crate::U;
use crate::condition::LogitErrors;
use crate::tolerance::Limits;
use assay_core::problem::{HeadProblem, HeadShape};
use assay_core::spec::{LossSpec, TemperatureDivides};
use assay_reference::HeadReference;

/// Bounds the error `ε` of each logit; one entry per token.
///
/// If logits are rounded to a dtype, rounding removes the product's own error, except where the error carries the logit over a tie
/// between two values of that dtype: the logit is then off by their step.
pub(crate) fn logit_errors(reference: &HeadReference, problem: &HeadProblem, limits: &Limits) -> Vec<LogitErrors> {
    let rounding = problem.logits.rounds_logits.then_some(problem.dtype());
    let (on_logits, HeadShape { tokens, hidden, vocab, .. }) = (reference.on_logits(), reference.shape());
    // A logit is a walk of H steps, whose partial sums are about |x| + ‖terms‖₂ each, and each is rounded once.
    let each = limits.spread() * U * f64::sqrt(hidden as f64);
    let hidden2 = reference.hidden().mapv(square);
    let mut errors = vec![Vec::with_capacity(vocab); hidden2.nrows()];
    for columns in reference.column_chunks() {
        let weights = reference.columns(columns.clone());
        let product = |a: &Array2<f64>, map: fn(f64) -> f64| {
            let mut product = Array2::zeros((a.nrows(), columns.len()));
            add_product(&mut product, a, weights.t(), map);
            product
        };
        // ‖hidden·lm_head_v‖₂ of each token and column, from the products of squares.
        let norms2 = product(&hidden2, square);
        let unrounded = rounding.map(|dtype| (dtype, product(reference.hidden(), |w| w)));
        for (n, errors) in errors.iter_mut().enumerate() {
            let sum_error = |x: f64, norm2: &f64| each * (x.abs() + norm2.sqrt());
            // Rounded logits hide the product's error, unless x − off and x + off round to different values: the
            // difference of the two is the step.
            if let Some((dtype, exact)) = &unrounded {
                let step = |(&x, norm2)| {
                    let off = sum_error(x, norm2);
                    (dtype.round(x + off) - dtype.round(x - off)) as f32
                };
                errors.extend(exact.row(n).iter().zip(norms2.row(n)).map(step));
            } else {
                let logits = on_logits.problem().logits.row_part(n / tokens, n % tokens, columns.clone());
                errors.extend(logits.into_iter().zip(norms2.row(n)).map(|(x, norm2)| sum_error(x, norm2) as f32));
            }
        }
    }
    let spec = on_logits.spec();
    let token_errors = |(n, each): (usize, Vec<f32>)| {
        let temperature = on_logits.problem().tokens().temperature(spec, (n / tokens, n % tokens));
        LogitErrors { each: each.into(), rate: rounding.map(|_| steepest_exponent(spec, temperature)) }
    };
    errors.into_iter().enumerate().map(token_errors).collect()
}

/// Bounds the derivative of a softmax exponent, or of the log-probability, by a logit.
fn steepest_exponent(spec: &LossSpec, temperature: f64) -> f64 {
    let by_logp = match spec.temperature_divides {
        TemperatureDivides::Logits => 0.0,
        TemperatureDivides::Logp => 1.0,
    };
    spec.logits.scale.abs() * f64::max(by_logp, 1.0 / temperature)
}
