//! [`judge_head`]: a fused LM head's outputs against the reference.
//!
//! Each logit is a sum of `H` products and has an error of its own, `e_v = √H · Σ_h |hidden_h · lm_head_hv|` in units of `u`,
//! and each gradient is a sum over `V` columns or `N` tokens of dlogits that carry theirs:
//!
//! | output | rounding | scale |
//! |---|---|---|
//! | logits `x` | none | `e_v` |
//! | `dhidden[n,h]` | `½ulp + Σ_v ½ulp(dx_nv) |lm_head_hv|` | `Σ_v (scale(dx_nv) + √V |dx_nv|) |lm_head_hv|` |
//! | `dlm_head[h,v]` | `½ulp + Σ_n |hidden_nh| ½ulp(dx_nv)` | `Σ_n |hidden_nh| (scale(dx_nv) + √N |dx_nv|)` |
//!
//! with `½ulp(dx)` that of the dtype in which dlogits go into the products. Rounding errors of a sum of `K` terms grow as `√K`
//! (Higham and Mary 2019: below `λ√K·u·Σ|terms|` but for a share `2·exp(−λ²/2)`).

use ndarray::{Array2, ArrayView1};
use rayon::prelude::*;

use super::U;
use super::condition::FLUSHED;
use super::judge::{
    Case, JudgeError, Limits, PerToken, Verdict, allowance, cases, judge_metrics, judge_per_token, verdict,
};
use super::metric::{Allowance, Position, Tally, half_ulp};
use super::tolerance::{Model, Output, Tolerances};
use assay_core::problem::{Dtype, HeadCandidate, HeadProblem, HeadShape};
use assay_core::spec::{LossSpec, TemperatureDivides};
use assay_reference::HeadReference;

/// Judges `outcome` against `reference`, by the limits of `class`. Outputs that the candidate lacks get no verdict.
///
/// The hidden states of masked tokens must have a gradient of exactly 0. Where a token's reference is not finite, or
/// overflows f32, or its dlogits the dtype in which they go into the products, its dhidden and all of `dlm_head` may be
/// NaN or ∞.
///
/// # Errors
/// [`JudgeError`] where an output has the wrong shape, or a dtype that `tolerances` has no limit for.
pub fn judge_head(
    reference: &HeadReference,
    problem: &HeadProblem,
    outcome: &HeadCandidate,
    class: &str,
    tolerances: &Tolerances,
) -> Result<Vec<Verdict>, JudgeError> {
    check_shapes(reference, outcome)?;
    let limits = Limits { tolerances, class };
    let (on_logits, tokens) = (reference.on_logits(), reference.shape().tokens);
    let bands = limits.bands()?;
    let rounding = problem.logits.rounds_logits.then_some(problem.dtype());
    let (errors, tie) = logit_errors(reference, rounding, bands.logp);
    let errors_of = |b: usize, t: usize| errors.row(b * tokens + t).to_vec();
    let cases = cases(on_logits, bands, &errors_of, tie);
    let per_token = PerToken {
        loss: &outcome.loss,
        logp: outcome.logp.as_ref(),
        entropy: outcome.entropy.as_ref(),
        token_loss: outcome.token_loss.as_ref(),
    };
    let mut verdicts = judge_per_token(on_logits, &per_token, &cases, &limits)?;
    let dlogits = Dlogits::of(reference, &cases, outcome.gradient.dlogits_dtype);
    verdicts.extend(judge_dhidden(reference, outcome, &cases, &dlogits, &limits)?);
    verdicts.extend(judge_dlm_head(reference, outcome, &cases, &dlogits, &limits)?);
    if let Some(metrics) = &outcome.metrics {
        verdicts.extend(judge_metrics(on_logits, metrics, &cases, &limits)?);
    }
    Ok(verdicts)
}

fn check_shapes(reference: &HeadReference, outcome: &HeadCandidate) -> Result<(), JudgeError> {
    let HeadShape { batch, tokens, hidden, vocab } = reference.shape();
    let gradients = [
        ("dhidden", outcome.gradient.dhidden.shape(), vec![batch, tokens, hidden]),
        ("dlm_head", outcome.gradient.dlm_head.shape(), reference.layout().extents(hidden, vocab).to_vec()),
    ];
    let per_token = [("logp", &outcome.logp), ("entropy", &outcome.entropy), ("token_loss", &outcome.token_loss)];
    let per_token =
        per_token.into_iter().filter_map(|(name, array)| Some((name, array.as_ref()?.shape(), vec![batch, tokens])));
    for (output, given, expected) in per_token.chain(gradients) {
        if given != expected {
            return Err(JudgeError::Shape { output, given: given.to_vec(), expected });
        }
    }
    Ok(())
}

/// `e`, `[N,V]`. Where logits are rounded to a dtype, the product's own error is rounded away, but for one that it may
/// carry over a tie between two values of that dtype: it has their step for an error, of which a unit comes to what is
/// returned beside, and which no `kappa` is to make less of.
fn logit_errors(reference: &HeadReference, rounding: Option<Dtype>, kappa: f64) -> (Array2<f64>, Option<f64>) {
    let depth = f64::sqrt(reference.shape().hidden as f64);
    let sizes = reference.hidden().mapv(f64::abs).dot(&reference.columns().mapv(f64::abs).t());
    let mut errors = sizes * depth;
    let Some(dtype) = rounding else { return (errors, None) };
    let exact = reference.hidden().dot(&reference.columns().t());
    // Which branches a tie opens is asked of `kappa` times the errors.
    let unit = U * kappa.min(1.0);
    let rate = steepest_exponent(reference.on_logits().spec());
    errors.zip_mut_with(&exact, |error, &x| {
        let by = kappa * U * *error;
        let step = dtype.round(x + by) - dtype.round(x - by);
        *error = step_error(step, rate) / unit;
    });
    (errors, Some(unit))
}

/// By how much at most an exponent of a softmax, or the log-probability, grows with a logit.
fn steepest_exponent(spec: &LossSpec) -> f64 {
    let of_logp = match spec.temperature_divides {
        TemperatureDivides::Logits => 0.0,
        TemperatureDivides::Logp => 1.0,
    };
    spec.logits.scale.abs() * f64::max(of_logp, 1.0 / spec.temperature)
}

/// The error of a logit that may be off by `step`, which may be many nats: `(e^(2·rate·step) − 1)/rate`.
///
/// A probability becomes `e^a(1 + Σ p_v(e^(a_v) − 1))⁻¹` of itself, where logits are off by `a` and `a_v`, times `rate`. That
/// is at most `1 + (e^2|a| − 1) + Σ p_v(e^2|a_v| − 1)`, which is what errors that are added up come to.
fn step_error(step: f64, rate: f64) -> f64 {
    if step == 0.0 { 0.0 } else { f64::exp_m1((2.0 * rate * step).min(160.0)) / rate }
}

/// The dlogits of the reference and what an honest kernel's may be off by, `[N,V]`; zeros where a token is masked.
struct Dlogits {
    exact: Array2<f64>,
    /// Beyond any multiple of `u`: rounding to the dtype of the products, underflow, ties of rounded logits, and another
    /// branch inside a tie band.
    rounding: Array2<f64>,
    scale: Array2<f64>,
    /// `[N]`: whether one may overflow the dtype of the products.
    overflow: Vec<bool>,
}

impl Dlogits {
    fn of(reference: &HeadReference, cases: &[Case], dtype: Dtype) -> Self {
        let HeadShape { batch, tokens, vocab, .. } = reference.shape();
        let on_logits = reference.on_logits();
        let rows: Vec<_> = cases
            .par_iter()
            .map(|case| {
                let scaled = on_logits.scaled_row(case.b, case.t, case.token);
                let own = on_logits.dlogits_row(case.b, case.t);
                let mut rounding = vec![0.0; vocab];
                let mut scale = vec![0.0; vocab];
                for on in &case.condition.alternatives {
                    let grad_logp = on_logits.grad_logp(case.token, &on.branch, on.coupling);
                    let there = on_logits.dlogits_row_with(case.b, case.t, grad_logp);
                    let conditions = case.condition.dlogits(on_logits, case.token, &scaled, on);
                    let untied = case
                        .untied
                        .as_ref()
                        .map(|(condition, unit)| (condition.dlogits(on_logits, case.token, &scaled, on), *unit));
                    for (v, (x, (s, floor))) in there.into_iter().zip(conditions).enumerate() {
                        let (s, of_ties) = match &untied {
                            None => (s, 0.0),
                            Some((untied, unit)) => (untied[v].0, unit * (s - untied[v].0).max(0.0)),
                        };
                        rounding[v] = f64::max(rounding[v], half_ulp(x, dtype) + floor + of_ties + (x - own[v]).abs());
                        scale[v] = f64::max(scale[v], s);
                    }
                }
                (own, rounding, scale)
            })
            .collect();
        let [mut exact, mut rounding, mut scale] = [(); 3].map(|()| Array2::zeros((batch * tokens, vocab)));
        let mut overflow = vec![false; batch * tokens];
        for (case, row) in cases.iter().zip(rows) {
            let n = case.b * tokens + case.t;
            overflow[n] = row.0.iter().any(|x| !dtype.round(2.0 * x.abs()).is_finite());
            exact.row_mut(n).assign(&ArrayView1::from(&row.0));
            rounding.row_mut(n).assign(&ArrayView1::from(&row.1));
            scale.row_mut(n).assign(&ArrayView1::from(&row.2));
        }
        Self { exact, rounding, scale, overflow }
    }

    /// `scale + √terms·|dlogits|`.
    fn scale_in_sum_of(&self, terms: usize) -> Array2<f64> {
        let depth = f64::sqrt(terms as f64);
        let mut scale = self.exact.mapv(|x| depth * x.abs());
        scale += &self.scale;
        scale
    }
}

/// The two gates of a gradient: of each element, and of each row's norm.
struct Gates {
    elements: (f64, Tally),
    norms: (f64, Tally),
    output: Output,
    dtype: Dtype,
}

impl Gates {
    fn of(output: Output, dtype: Dtype, limits: &Limits) -> Result<Self, JudgeError> {
        let elements = (limits.kappa(output, Model::Elementwise, dtype)?, Tally::default());
        let norms = (limits.kappa(output, Model::RowL2, dtype)?, Tally::default());
        Ok(Self { elements, norms, output, dtype })
    }

    /// Compares a row: `(where, exact, rounding, scale, actual)` of each element.
    fn row(&mut self, at: Position, row: impl Iterator<Item = (Position, [f64; 4])>) {
        let (mut error2, mut rounding2, mut scale2) = (0.0, 0.0, 0.0);
        for (at, [exact, rounding, scale, actual]) in row {
            // Another branch may be larger, and is rounded at its own size.
            let output = half_ulp(exact.abs() + rounding, self.dtype);
            let own = Allowance { rounding: output, ..allowance(exact, scale, rounding + FLUSHED, self.dtype) };
            self.elements.1.compare(at, exact, actual, self.elements.0, own, self.dtype);
            error2 += (actual - exact).powi(2);
            rounding2 += (own.rounding + own.floor).powi(2);
            scale2 += own.scale.powi(2);
        }
        if f64::is_finite(error2) {
            let norms = Allowance { rounding: rounding2.sqrt(), unit: U, scale: scale2.sqrt(), floor: 0.0 };
            self.norms.1.compare(at, 0.0, error2.sqrt(), self.norms.0, norms, Dtype::F64);
        }
    }

    fn verdicts(self) -> [Verdict; 2] {
        let verdict = |model, (kappa, tally)| verdict(self.output, model, self.dtype, Some(kappa), tally);
        [verdict(Model::Elementwise, self.elements), verdict(Model::RowL2, self.norms)]
    }
}

fn judge_dhidden(
    reference: &HeadReference,
    outcome: &HeadCandidate,
    cases: &[Case],
    dlogits: &Dlogits,
    limits: &Limits,
) -> Result<[Verdict; 2], JudgeError> {
    let HeadShape { batch, tokens, vocab, .. } = reference.shape();
    let mut gates = Gates::of(Output::Dhidden, outcome.gradient.dhidden.dtype(), limits)?;
    let sizes = reference.columns().mapv(f64::abs);
    let exact = reference.dhidden(&dlogits.exact);
    let rounding = dlogits.rounding.dot(&sizes);
    let scale = dlogits.scale_in_sum_of(vocab).dot(&sizes);
    for (b, t) in ndarray::indices((batch, tokens)) {
        let actual = outcome.gradient.dhidden.row(b, t);
        let n = b * tokens + t;
        let Ok(i) = cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)) else {
            if let Some((h, &x)) = actual.iter().enumerate().find(|(_, x)| **x != 0.0) {
                gates.elements.1.compare(Position::hidden(b, t, h), 0.0, x, 0.0, Allowance::default(), Dtype::F64);
            }
            continue;
        };
        if actual.iter().any(|x| !x.is_finite()) && (may_be_nonfinite(&cases[i]) || dlogits.overflow[n]) {
            gates.elements.1.report(cases[i].at());
            continue;
        }
        let of = |h: usize, actual| [exact[[n, h]], rounding[[n, h]], scale[[n, h]], actual];
        let row = actual.iter().enumerate().map(|(h, &actual)| (Position::hidden(b, t, h), of(h, actual)));
        gates.row(cases[i].at(), row);
    }
    Ok(gates.verdicts())
}

fn judge_dlm_head(
    reference: &HeadReference,
    outcome: &HeadCandidate,
    cases: &[Case],
    dlogits: &Dlogits,
    limits: &Limits,
) -> Result<[Verdict; 2], JudgeError> {
    let HeadShape { hidden: width, vocab, .. } = reference.shape();
    let mut gates = Gates::of(Output::DlmHead, outcome.gradient.dlm_head.dtype(), limits)?;
    let sizes = reference.hidden().mapv(f64::abs);
    let exact = reference.dlm_head(&dlogits.exact);
    let rounding = dlogits.rounding.t().dot(&sizes);
    let scale = dlogits.scale_in_sum_of(cases.len()).t().dot(&sizes);
    let actual = outcome.gradient.dlm_head.to_f64();
    let open = cases.iter().any(may_be_nonfinite) || dlogits.overflow.contains(&true);
    if open && actual.iter().any(|x| !x.is_finite()) {
        gates.elements.1.report(Position::default());
        return Ok(gates.verdicts());
    }
    for v in 0..vocab {
        let row = (0..width).map(|h| {
            let actual = actual[reference.layout().at(h, v)];
            (Position::weight(h, v), [exact[[v, h]], rounding[[v, h]], scale[[v, h]], actual])
        });
        gates.row(Position { v: Some(v), ..Position::default() }, row);
    }
    Ok(gates.verdicts())
}

/// Whether an honest kernel's gradients of a token may be NaN or ∞.
fn may_be_nonfinite(case: &Case) -> bool {
    case.condition.overflows || !case.finite
}
