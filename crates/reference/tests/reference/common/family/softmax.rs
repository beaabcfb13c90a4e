//! The softmax of one row of logits, exactly.

use assay_core::problem::Problem;
use assay_core::spec::{LossSpec, Temperature, TemperatureDivides};

use crate::common::real::Real;

/// One row of logits; `None` is −∞, or a column outside the support.
pub(crate) type Row = Vec<Option<Real>>;

/// The finite logits of token `[b,t]`, exactly, as the LM head made them.
pub(crate) fn logits(problem: &Problem, b: usize, t: usize) -> Row {
    let row = problem.logits.row(b, t);
    row.into_iter().map(|x| (x != f64::NEG_INFINITY).then(|| Real::from(x))).collect()
}

/// Whether column `j` is in the softmax of a token whose id is `id`.
pub(crate) fn in_support(spec: &LossSpec, j: usize, id: usize) -> bool {
    let support = &spec.support;
    let inside = support.vocab.is_none_or(|vocab| j < vocab) && !support.excluded_ids.contains(&j);
    inside || (support.keep_sampled && j == id)
}

/// `softcap · tanh(scale · (a + bias) / softcap)` of the columns in the support.
pub(crate) fn scaled(spec: &LossSpec, problem: &Problem, row: &Row, id: usize) -> Row {
    let bias = |j: usize| match &problem.extra.bias {
        Some(bias) if spec.logits.bias => Real::from(bias[j]),
        _ => Real::from(0.0),
    };
    let column = |(j, a): (usize, &Option<Real>)| {
        let linear = Real::from(spec.logits.scale) * (a.clone()? + bias(j));
        let capped = |cap: f64| Real::from(cap) * tanh(&(linear.clone() / Real::from(cap)));
        in_support(spec, j, id).then(|| spec.logits.softcap.map_or(linear.clone(), capped))
    };
    row.iter().enumerate().map(column).collect()
}

fn tanh(x: &Real) -> Real {
    let (up, down) = (x.exp(), (-x.clone()).exp());
    (up.clone() - down.clone()) / (up + down)
}

/// `ln Σ exp z_j`
fn log_sum_exp(z: &Row) -> Real {
    z.iter().flatten().map(Real::exp).sum::<Real>().ln()
}

fn divided(row: &Row, divisor: f64) -> Row {
    row.iter().map(|x| x.clone().map(|x| x / Real::from(divisor))).collect()
}

/// `T` of token `[b,t]`.
pub(crate) fn temperature(spec: &LossSpec, problem: &Problem, b: usize, t: usize) -> f64 {
    match (spec.temperature, &problem.extra.temperature) {
        (Temperature::Number(temperature), _) => temperature,
        (Temperature::Given, Some(given)) => given[[b, if given.ncols() == 1 { 0 } else { t }]],
        (Temperature::Given, None) => panic!("the spec reads it"),
    }
}

/// `log_softmax(x / T)[y]`, or `log_softmax(x)[y] / T`, of a row of [`scaled`] logits.
pub(crate) fn logp(spec: &LossSpec, row: &Row, id: usize, temperature: f64) -> Real {
    let log_softmax = |z: &Row| z[id].clone().expect("a finite logit on the sampled id") - log_sum_exp(z);
    match spec.temperature_divides {
        TemperatureDivides::Logits => log_softmax(&divided(row, temperature)),
        TemperatureDivides::Logp => log_softmax(row) / Real::from(temperature),
    }
}

/// `−Σ q_j ln q_j = ln S − Σ e_j z_j / S` with `z = x / T`, `e = exp(z)` and `S = Σ e_j`, of a row of [`scaled`] logits.
pub(crate) fn entropy(row: &Row, temperature: f64) -> Real {
    let z: Vec<Real> = divided(row, temperature).into_iter().flatten().collect();
    let e: Vec<Real> = z.iter().map(Real::exp).collect();
    let s = e.iter().cloned().sum::<Real>();
    s.ln() - e.into_iter().zip(z).map(|(e, z)| e * z).sum::<Real>() / s
}
