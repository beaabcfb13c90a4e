//! A fused LM head's outputs against the reference.
//!
//! Each logit is a sum of `H` products, and each gradient a sum over `V` columns or `N` tokens of dlogits that carry errors of their
//! own. Errors of random signs add up as the root of their squares' sum: with `λ` the standard deviations allowed and
//! `λ′ = λ/√3`, as a rounding error is uniform,
//!
//! | | how far it may be off, beyond its own half ulp |
//! |---|---|
//! | logit `x` | `ε_v = λ′·u·√H·(|x_v| + ‖hidden·lm_head_v‖₂)` |
//! | `dhidden[n,h]` | `|Σ_v c_v w_hv| + √Σ_v o_v² w_hv² + Σ_v (f + i_v) |w_hv| + R + λ′·u·√V·(|dhidden| + √Σ_v dx_v² w_hv²)` |
//! | `dlm_head[h,v]` | `√Σ_n x_nh² (c + o + i − s)_nv² + Σ_n (f_n + s_nv) |x_nh| + R + λ′·u·√N·(|dlm_head| + √Σ_n x_nh² dx_nv²)` |
//!
//! with `x` the hidden states and `w` the head; `c` how far dlogits may be off in what all columns of a token but its target share, in
//! proportion to their probabilities; `o` what is a column's own; `i` that of a token's ids instead, where it has several; `f` what f32 flushes to 0 of one, always toward 0; `s` of
//! `c` and `o` what follows from a ratio that the tokens of a row share; and `R` their rounding to the dtype of the products. A walk to
//! `x` in `H` steps `t` has partial sums of at most about `|x| + ‖t‖₂` in the root of their mean square, and each is rounded once
//! (Higham and Mary 2019). Equal logits err alike: where many columns of a token are equal, or hidden states, their errors add up
//! first, and for √V, or √N, stands their number.
//!
//! Dlogits that lie within a step of the products' dtype round alike, equal or not: with an entropy bonus they are `p·(a + b·ln p)`,
//! which has a minimum, about which half of a row may crowd. With `r` half an ulp and `ρ` by how much rounding moves a dlogit,
//!
//! `R = min(Σ r·|w|, √(λ′²·Σ r²w² + max(|Σ ρ·w|, |Σ r·w·e^(πi·dx/r)|)²))`
//!
//! The last sum is the most that rounding may move those that lie close together, wherever between two values of the dtype they lie,
//! and next to nothing where they fill a step: a kernel that scales its sums rounds at other places than one that scales its dlogits,
//! and what dlogits are off may carry all of them over a tie.

use std::collections::HashMap;
use std::f64::consts::PI;
use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView2, Axis, Ix2, Ix3, concatenate, s};
use rayon::prelude::*;

use super::U;
use super::column_bounds::{ColumnBounds, DlogitsCondition};
use super::condition::{FLUSHED, LogitErrors};
use super::gate::{Edge, Gate, Model, Output};
use super::judge::{
    self, Asked, Case, JudgeError, PerToken, Stored, Tallies, Verdict, cases, exactly_zero, expect_outputs,
    expect_per_token, graded, judge_metrics, judge_per_token, on_each_set, shared_edge,
};
use super::metric::{Allowance, Allowances, Position, Tally, half_ulp};
use super::tolerance::Limits;
use assay_core::problem::{Candidate, Dtype, FloatView, HeadGradientView, HeadProblem, HeadShape};
use assay_core::spec::{LossSpec, TemperatureDivides};
use assay_reference::{HeadReference, Reference};

/// From so many equal logits on in a row, their errors are added up before they are squared.
const ALIKE: usize = 8;

/// Sums of terms that come to more in all may overflow f32 before they cancel.
const LARGEST_SUM: f64 = f32::MAX as f64 / 2.0;

/// Judges `candidates` against `reference`, by `limits`. Outputs that a candidate lacks get no verdict.
///
/// The hidden states of masked tokens must have a gradient of exactly 0. Where a token's reference is not finite, or
/// overflows f32, or its dlogits, with what they may be off, the dtype in which they go into the products, values of its dhidden
/// and of `dlm_head` may be NaN or ∞; and so may a value whose own sum overflows f32 before its terms cancel.
///
/// # Errors
/// [`JudgeError`] where an output has the wrong shape.
pub(super) fn judge_all(
    reference: &HeadReference,
    problem: &HeadProblem,
    candidates: &[HeadCandidate],
    limits: &Limits,
) -> Result<Vec<Vec<Verdict>>, JudgeError> {
    for candidate in candidates {
        expect_outputs(reference.on_logits().spec(), candidate)?;
        check_shapes(reference, candidate)?;
    }
    let (on_logits, tokens) = (reference.on_logits(), reference.shape().tokens);
    let errors = errors_of_problem(reference, problem, limits);
    let errors_of = |b: usize, t: usize| errors[b * tokens + t].clone();
    let judge_by = |reference: &HeadReference, candidates: &[HeadCandidate]| {
        let on_logits = reference.on_logits();
        let dhidden = reference.dhidden(|columns| reference.dlogits(columns));
        graded(limits, on_logits, candidates, |limits, asked| {
            let cases = cases(on_logits, limits, &errors_of);
            let per_token: Vec<PerToken> =
                asked.iter().map(|asked| PerToken::without_gradient(asked.candidate)).collect();
            let mut all = judge_per_token(on_logits, &per_token, &cases, limits);
            let gradients = judge_gradients(reference, (problem, &dhidden), asked, &cases, limits);
            for ((verdicts, of_gradients), asked) in all.iter_mut().zip(gradients).zip(asked) {
                verdicts.extend(of_gradients);
                if let Some(metrics) = &asked.candidate.metrics {
                    verdicts.extend(judge_metrics(on_logits, metrics, &cases, limits));
                }
            }
            all
        })
    };
    Ok(on_each_set(reference, on_logits, candidates, (limits, &errors_of), |high| reference.keeping(high), judge_by))
}

/// Judges a candidate without gradients, on what else it has.
///
/// # Errors
/// As [`judge_all`].
pub(super) fn judge_forward(
    reference: &HeadReference,
    problem: &HeadProblem,
    candidate: &Candidate<()>,
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    let (errors, tokens) = (errors_of_problem(reference, problem, limits), reference.shape().tokens);
    judge::judge_forward(reference.on_logits(), candidate, limits, &|b, t| errors[b * tokens + t].clone())
}

/// How far each logit may be off.
fn errors_of_problem(reference: &HeadReference, problem: &HeadProblem, limits: &Limits) -> Vec<LogitErrors> {
    let rounding = problem.logits.rounds_logits.then_some(problem.dtype());
    logit_errors(reference, rounding, limits)
}

/// What came of a problem, its gradients borrowed.
type HeadCandidate<'v> = Candidate<HeadGradientView<'v>>;

fn check_shapes(reference: &HeadReference, outcome: &HeadCandidate) -> Result<(), JudgeError> {
    let HeadShape { batch, tokens, hidden, vocab } = reference.shape();
    let gradients = [
        ("dhidden", outcome.gradient.dhidden.shape(), vec![batch, tokens, hidden]),
        ("dlm_head", outcome.gradient.dlm_head.shape(), reference.layout().extents(hidden, vocab).to_vec()),
    ];
    expect_per_token(reference.on_logits().shape(), outcome, reference.on_logits().spec().ids_per_token)?;
    for (output, given, expected) in gradients {
        if given != expected {
            return Err(JudgeError::Shape { output, given: given.to_vec(), expected });
        }
    }
    Ok(())
}

/// `ε`, one a token. Where logits are rounded to a dtype, the product's own error is rounded away, but for one that it may carry over
/// a tie between two values of that dtype: it is off by their step.
fn logit_errors(reference: &HeadReference, rounding: Option<Dtype>, limits: &Limits) -> Vec<LogitErrors> {
    let (on_logits, HeadShape { tokens, hidden, vocab, .. }) = (reference.on_logits(), reference.shape());
    let each = limits.spread() * U * f64::sqrt(hidden as f64);
    let hidden2 = reference.hidden().mapv(square);
    let mut errors = vec![Vec::with_capacity(vocab); hidden2.nrows()];
    for columns in reference.column_chunks() {
        let weights = reference.columns(columns.clone());
        let product = |a: &Array2<f64>, of: fn(f64) -> f64| {
            let mut product = Array2::zeros((a.nrows(), columns.len()));
            add_product(&mut product, a, weights.t(), of);
            product
        };
        let norms2 = product(&hidden2, square);
        let unrounded = rounding.map(|dtype| (dtype, product(reference.hidden(), |w| w)));
        for (n, errors) in errors.iter_mut().enumerate() {
            let of_sum = |x: f64, norm2: &f64| each * (x.abs() + norm2.sqrt());
            if let Some((dtype, exact)) = &unrounded {
                let step = |(&x, norm2)| {
                    let off = of_sum(x, norm2);
                    (dtype.round(x + off) - dtype.round(x - off)) as f32
                };
                errors.extend(exact.row(n).iter().zip(norms2.row(n)).map(step));
            } else {
                let logits = on_logits.problem().logits.row_part(n / tokens, n % tokens, columns.clone());
                errors.extend(logits.into_iter().zip(norms2.row(n)).map(|(x, norm2)| of_sum(x, norm2) as f32));
            }
        }
    }
    let spec = on_logits.spec();
    let of_token = |(n, each): (usize, Vec<f32>)| {
        let temperature = on_logits.problem().tokens().temperature(spec, (n / tokens, n % tokens));
        LogitErrors { each: each.into(), rate: rounding.map(|_| steepest_exponent(spec, temperature)) }
    };
    errors.into_iter().enumerate().map(of_token).collect()
}

/// By how much at most an exponent of a softmax, or the log-probability, grows with a logit.
fn steepest_exponent(spec: &LossSpec, temperature: f64) -> f64 {
    let of_logp = match spec.temperature_divides {
        TemperatureDivides::Logits => 0.0,
        TemperatureDivides::Logp => 1.0,
    };
    spec.logits.scale.abs() * f64::max(of_logp, 1.0 / temperature)
}

/// How far an honest kernel's dlogits may be off, `[cases,columns]`.
struct Dlogits {
    /// That of the products.
    dtype: Dtype,
    exact: Array2<f64>,
    /// `c`: what all columns of a token share.
    common: Array2<f64>,
    /// `o`: what is a column's own.
    own: Array2<f64>,
    /// `r`: of rounding to the dtype of the products.
    rounding: Array2<f64>,
    /// `f`, and how far the other pieces are that a token may be on: what has no random sign.
    one_sided: Array2<f64>,
    /// `s`: of `c` and `o`, what the tokens of a row have in common.
    of_ratio: Array2<f64>,
    /// `i`: of a token's ids, where it has several: of whatever sign, but of one softmax.
    of_ids: Array2<f64>,
}

/// The same of one token, `[columns]`.
struct Row {
    exact: Vec<f64>,
    common: Vec<f64>,
    own: Vec<f64>,
    rounding: Vec<f64>,
    one_sided: Vec<f64>,
    of_ratio: Vec<f64>,
    of_ids: Vec<f64>,
}

impl Row {
    fn of(reference: &Reference, case: &Case, columns: Range<usize>, dtype: Dtype, limits: &Limits) -> Self {
        let (b, t, kappa) = (case.b, case.t, limits.kappa(Output::Dlogits) * U);
        let row = reference.columns(b, t, case.token, columns.clone());
        let dlogits = |branch, coupling| {
            reference.dlogits_of(&row, case.token, reference.grad_logp(case.token, branch, coupling))
        };
        let exact = dlogits(&case.token.branch, case.token.coupling);
        let [mut common, mut own, mut rounding, mut one_sided, mut of_ratio, mut of_ids] =
            [(); 6].map(|()| vec![0.0; columns.len()]);
        // Of a column that is not the target.
        let mut flushed = 0.0;
        let ids: Vec<usize> = case.ids(reference).collect();
        for on in &case.condition.alternatives {
            let there = dlogits(&on.branch, on.coupling);
            let bounds = DlogitsCondition::of(&case.condition, reference, case.token, on).parts(&row);
            let ColumnBounds { whole, common: shared, of_ratio: shared_by_row, flushed: lost } = bounds;
            for (v, x) in there.into_iter().enumerate() {
                let (whole, shared, shared_by_row) = (whole.at(v), shared.at(v), shared_by_row.at(v));
                let mut alone = kappa * (whole.scale - shared.scale) + (whole.floor - shared.floor);
                // Of the target that is more, and one column's own.
                if !ids.contains(&(columns.start + v)) {
                    alone -= lost[v];
                    flushed = f64::max(flushed, lost[v]);
                }
                common[v] = f64::max(common[v], kappa * shared.scale + shared.floor);
                own[v] = f64::max(own[v], alone);
                rounding[v] = f64::max(rounding[v], half_ulp(x, dtype));
                one_sided[v] = f64::max(one_sided[v], (x - exact[v]).abs());
                of_ratio[v] = f64::max(of_ratio[v], kappa * shared_by_row.scale + shared_by_row.floor);
            }
        }
        for x in &mut one_sided {
            *x += flushed;
        }
        // Of another sign than the others.
        for v in ids.iter().filter(|id| columns.contains(id)).map(|id| id - columns.start) {
            own[v] += std::mem::take(&mut common[v]);
            if ids.len() > 1 {
                of_ids[v] += std::mem::take(&mut own[v]);
            }
        }
        Self { exact, common, own, rounding, one_sided, of_ratio, of_ids }
    }

    /// How far the dlogit of column `v` of these may be off before it is rounded.
    fn off(&self, v: usize) -> f64 {
        self.common[v] + self.own[v] + self.of_ids[v] + self.one_sided[v]
    }
}

impl Dlogits {
    fn of(reference: &Reference, cases: &[Case], columns: &Range<usize>, dtype: Dtype, limits: &Limits) -> Self {
        let row = |case: &Case| Row::of(reference, case, columns.clone(), dtype, limits);
        let rows: Vec<Row> = cases.par_iter().map(row).collect();
        let of_rows = |of: fn(&Row) -> &Vec<f64>| {
            let values = rows.iter().flat_map(of).copied().collect();
            Array2::from_shape_vec((cases.len(), columns.len()), values).expect("a value a column")
        };
        Self {
            dtype,
            exact: of_rows(|row| &row.exact),
            common: of_rows(|row| &row.common),
            own: of_rows(|row| &row.own),
            rounding: of_rows(|row| &row.rounding),
            one_sided: of_rows(|row| &row.one_sided),
            of_ratio: of_rows(|row| &row.of_ratio),
            of_ids: of_rows(|row| &row.of_ids),
        }
    }
}

/// What a token's dlogits come to in the products, beside what its columns may be off.
#[derive(Clone, Copy)]
struct OfProducts {
    /// Whether one may overflow the dtype of the products.
    overflow: bool,
    /// By how much of its size the token's gradient may be off, beside.
    relative: f64,
}

/// One a case.
fn of_tokens(reference: &HeadReference, cases: &[Case], dtype: Dtype, limits: &Limits) -> Vec<OfProducts> {
    let on_logits = reference.on_logits();
    let overflows = |case: &Case, columns| {
        let row = Row::of(on_logits, case, columns, dtype, limits);
        (0..row.exact.len()).any(|v| !dtype.round(2.0 * (row.exact[v].abs() + row.off(v))).is_finite())
    };
    let of = |case: &Case| {
        let of_entropy = case.token.grad_entropy != 0.0;
        let mean_gap = case.token.entropy_softmax.stats.mean_gap;
        OfProducts {
            overflow: reference.column_chunks().any(|columns| overflows(case, columns)),
            relative: if of_entropy { limits.kappa(Output::Dlogits) * U * (1.0 + mean_gap) } else { 0.0 },
        }
    };
    cases.par_iter().map(of).collect()
}

/// The columns of a product that a thread takes at once.
const AT_ONCE: usize = 128;

/// And those of a head whose gradient it judges: of 4,096 hidden units there are 64 in all that are widened at a time.
const ROWS_AT_ONCE: usize = 32;

/// Adds `a · of(b)` to `sums`. It is a limit, and no value: its sums are plain.
fn add_product(sums: &mut Array2<f64>, a: &Array2<f64>, b: ArrayView2<f64>, of: fn(f64) -> f64) {
    let parts: Vec<_> = sums.axis_chunks_iter_mut(Axis(1), AT_ONCE).zip(b.axis_chunks_iter(Axis(1), AT_ONCE)).collect();
    parts.into_par_iter().for_each(|(mut sums, b)| general_mat_mul(1.0, a, &b.mapv(of), 1.0, &mut sums));
}

/// One above the other.
fn stacked(parts: &[&Array2<f64>]) -> Array2<f64> {
    let parts: Vec<_> = parts.iter().map(|part| part.view()).collect();
    concatenate(Axis(0), &parts).expect("as many columns each")
}

fn square(x: f64) -> f64 {
    x * x
}

/// What is summed of roundings: `ρ`, and the two parts of `r·e^(πi·dx/r)`.
const OF_ROUNDING: usize = 3;

/// These of all of `exact`, one above the other.
fn roundings(exact: &Array2<f64>, dtype: Dtype) -> Array2<f64> {
    let each = exact.iter().map(|&x| {
        let (moved, half) = (dtype.round(x) - x, half_ulp(x, dtype));
        let (sin, cos) = f64::sin_cos(PI * moved / half);
        (moved, (half * cos, half * sin))
    });
    let (moved, (cos, sin)): (Vec<_>, (Vec<_>, Vec<_>)) = each.unzip();
    let shape = [OF_ROUNDING * exact.nrows(), exact.ncols()];
    Array2::from_shape_vec(shape, [moved, cos, sin].concat()).expect("three of each")
}

/// `R` of `Σ r·|w|`, `Σ r²w²`, and the sums of [`roundings`] times `w`.
fn rounding_of_sum(by_size: f64, by_square: f64, [moved, cos, sin]: [f64; OF_ROUNDING], limits: &Limits) -> f64 {
    let alike2 = f64::max(square(moved), square(cos) + square(sin));
    by_size.min(f64::sqrt(square(limits.spread()) * by_square + alike2))
}

/// A gradient under its two gates: of each element, and of each row's norm.
#[derive(Clone, Copy)]
struct Gradient {
    output: Output,
    stored: Stored,
    kappa: f64,
}

/// What one row of a gradient came to.
struct GradientTallies {
    elements: Tally,
    nonfinite: Tally,
    l2: Tally,
}

/// The elements of a row.
#[derive(Clone, Copy)]
struct Elements<'e> {
    exact: &'e [f64],
    /// How far each may be off beyond half an ulp.
    limits: &'e [f64],
    actual: &'e [f64],
}

impl Gradient {
    fn of(output: Output, stored: Stored, limits: &Limits) -> Self {
        Self { output, stored, kappa: limits.kappa(output) }
    }

    /// Compares the row at `row`, with its elements `at`. Where one is `open`, a value that is not finite is an honest one.
    fn row(
        self,
        row: Position,
        at: impl Fn(usize) -> Position,
        open: impl Fn(usize) -> bool,
        Elements { exact, limits, actual }: Elements,
    ) -> GradientTallies {
        let Self { stored, kappa, .. } = self;
        let [mut elements, mut nonfinite, mut l2] = [(); 3].map(|()| Tally::default());
        let (mut error2, mut rounding2, mut limit2) = (0.0, 0.0, 0.0);
        // What a limit is beyond half an ulp counts as `κ·u·scale`.
        let unit = 1.0 / kappa;
        // Another branch may be larger, and is rounded at its own size.
        let rounding = stored.roundings(exact.iter().zip(limits).map(|(x, limit)| x.abs() + limit));
        let own = Allowances { rounding, unit, scale: limits.to_vec(), floor: vec![FLUSHED; exact.len()] };
        let dtype = stored.given;
        let finite = |values: &[f64]| values.iter().all(|x| x.is_finite());
        if [exact, limits, actual].into_iter().all(finite) {
            elements.compare_all(&at, exact, actual, kappa, &own, dtype);
        } else {
            for (i, ((&exact, limit), &actual)) in exact.iter().zip(limits).zip(actual).enumerate() {
                let unlimited = exact.is_finite() && !limit.is_finite();
                let tally = if actual.is_finite() { &mut elements } else { &mut nonfinite };
                if (unlimited || !actual.is_finite()) && open(i) {
                    tally.report(at(i));
                    error2 = f64::NAN;
                } else {
                    tally.compare(at(i), exact, actual, kappa, own.at(i), dtype);
                }
            }
        }
        for (((x, y), limit), rounding) in exact.iter().zip(actual).zip(limits).zip(&own.rounding) {
            error2 += square(y - x);
            rounding2 += square(*rounding);
            limit2 += square(*limit);
        }
        if f64::is_finite(error2) {
            let norms = Allowance { rounding: rounding2.sqrt(), unit, scale: limit2.sqrt(), floor: FLUSHED };
            l2.compare(row, 0.0, error2.sqrt(), kappa, norms, Dtype::F64);
        } else {
            l2.not_compared += 1;
        }
        GradientTallies { elements, nonfinite, l2 }
    }

    /// Adds rows at `edge`; values that are not finite, and should be, are at another.
    fn add(self, tallies: &mut Tallies, edge: Option<Edge>, of_nonfinite: Option<Edge>, row: GradientTallies) {
        for (model, edge, tally) in [
            (Model::Elementwise, edge, row.elements),
            (Model::RowL2, edge, row.l2),
            (Model::Elementwise, of_nonfinite, row.nonfinite),
        ] {
            if !tally.is_empty() {
                tallies.of(Gate::of(self.output, model).at(edge), self.stored, Some(self.kappa)).absorb(tally);
            }
        }
    }

    /// Both gates, though nothing may be compared.
    fn open(self, tallies: &mut Tallies) {
        for model in [Model::Elementwise, Model::RowL2] {
            tallies.of(Gate::of(self.output, model), self.stored, Some(self.kappa));
        }
    }
}

/// The gradients of both factors that are asked for, a list a candidate: sums over columns, and columns, are gone through a few at a
/// time, once for all candidates whose dlogits are of one dtype.
fn judge_gradients(
    reference: &HeadReference,
    (problem, exact): (&HeadProblem, &Array2<f64>),
    asked: &[Asked<HeadCandidate>],
    cases: &[Case],
    limits: &Limits,
) -> Vec<Vec<Verdict>> {
    let mut verdicts: Vec<Vec<Verdict>> = asked.iter().map(|_| Vec::new()).collect();
    for dtype in Dtype::KERNEL.into_iter().chain([Dtype::F64]) {
        let is_of = |asked: &Asked<HeadCandidate>| {
            asked.candidate.gradient.dlogits_dtype == dtype && !asked.gradients.is_empty()
        };
        let of_dtype = asked.iter().zip(&mut verdicts).filter(|(asked, _)| is_of(asked));
        let (given, places): (Vec<GivenGradients>, Vec<&mut Vec<Verdict>>) =
            of_dtype.map(|(asked, place)| (GivenGradients::of(asked, problem, limits), place)).unzip();
        if !given.is_empty() {
            let of_given = judge_given(reference, exact, dtype, &given, cases, limits);
            places.into_iter().zip(of_given).for_each(|(place, verdicts)| *place = verdicts);
        }
    }
    verdicts
}

/// The gradients of a candidate that are asked for.
struct GivenGradients<'c> {
    dhidden: Option<(FloatView<'c, Ix3>, Gradient)>,
    dlm_head: Option<(FloatView<'c, Ix2>, Gradient)>,
}

impl<'c> GivenGradients<'c> {
    fn of(asked: &Asked<'c, HeadCandidate<'_>>, problem: &HeadProblem, limits: &Limits) -> Self {
        let (gradient, of) = (&asked.candidate.gradient, &problem.logits);
        let gradient_of = |output, given, dtype| {
            asked.gradients.contains(&output).then(|| Gradient::of(output, Stored::gradient(given, dtype), limits))
        };
        let dhidden = gradient_of(Output::Dhidden, gradient.dhidden.dtype(), of.hidden.dtype());
        let dlm_head = gradient_of(Output::DlmHead, gradient.dlm_head.dtype(), of.lm_head.dtype());
        Self {
            dhidden: dhidden.map(|of| (gradient.dhidden.view(), of)),
            dlm_head: dlm_head.map(|of| (gradient.dlm_head.view(), of)),
        }
    }
}

/// The same of candidates whose dlogits go into the products in `dtype`.
fn judge_given(
    reference: &HeadReference,
    exact: &Array2<f64>,
    dtype: Dtype,
    given: &[GivenGradients],
    cases: &[Case],
    limits: &Limits,
) -> Vec<Vec<Verdict>> {
    let of_tokens = of_tokens(reference, cases, dtype, limits);
    let of_hidden = given.iter().any(|given| given.dhidden.is_some());
    let mut dhidden = of_hidden.then(|| Dhidden::new(reference, cases, limits));
    let of_head: Vec<_> =
        given.iter().filter_map(|given| given.dlm_head.as_ref()).map(|(actual, of)| (actual.view(), *of)).collect();
    let mut dlm_head = (!of_head.is_empty()).then(|| DlmHead::new(reference, of_head, cases, &of_tokens, limits));
    for columns in reference.column_chunks() {
        let dlogits = Dlogits::of(reference.on_logits(), cases, &columns, dtype, limits);
        if let Some(dhidden) = &mut dhidden {
            dhidden.add(&dlogits, &reference.columns(columns.clone()));
        }
        if let Some(dlm_head) = &mut dlm_head {
            dlm_head.judge(&dlogits, columns);
        }
    }
    if let Some(dhidden) = &mut dhidden {
        dhidden.add_alike(dtype, cases);
    }
    let mut of_head = dlm_head.into_iter().flat_map(|dlm_head| dlm_head.tallies);
    let verdicts = |given: &GivenGradients| {
        let of_hidden = given.dhidden.as_ref().zip(dhidden.as_ref());
        let of_hidden = of_hidden.map(|((actual, of), sums)| sums.judge(exact, actual, *of, cases, &of_tokens));
        let of_head = given.dlm_head.as_ref().and_then(|_| of_head.next()).map(Tallies::verdicts);
        of_hidden.into_iter().chain(of_head).flatten().collect()
    };
    given.iter().map(verdicts).collect()
}

/// Sums over columns, a row a case, and what follows from them for `dhidden`.
struct Dhidden<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    /// `Σ_v c_v w_hv`, `[cases,H]`.
    common: Array2<f64>,
    /// `Σ_v r_v |w_hv|` of all cases, and then `Σ_v f |w_hv|` with that of other pieces.
    by_size: Array2<f64>,
    /// `Σ_v o_v² w_hv²` of all cases, then `Σ_v r_v² w_hv²`, and then `Σ_v dx_v² w_hv²`.
    by_square: Array2<f64>,
    /// [`roundings`], times `w_hv`, of all cases, one after the other.
    roundings: Array2<f64>,
    /// What equal logits make of the first of the squares, where they do, `[cases,H]`.
    alike: Array2<f64>,
    /// By how much of its size a sum over columns may be off.
    each: Vec<f64>,
}
impl<'r> Dhidden<'r> {
    fn new(reference: &'r HeadReference<'r>, cases: &[Case], limits: &'r Limits<'r>) -> Self {
        let HeadShape { hidden, vocab, .. } = reference.shape();
        let zeros = |sums: usize| Array2::zeros((sums * cases.len(), hidden));
        Self {
            reference,
            limits,
            common: zeros(1),
            by_size: zeros(2),
            by_square: zeros(3),
            roundings: zeros(OF_ROUNDING),
            alike: zeros(1),
            each: vec![limits.spread() * U * f64::sqrt(vocab as f64); cases.len()],
        }
    }

    /// Adds up some columns, whose weights are `[columns,H]`.
    fn add(&mut self, dlogits: &Dlogits, weights: &Array2<f64>) {
        let Dlogits { exact, common, own, rounding, one_sided, of_ids, dtype, .. } = dlogits;
        add_product(&mut self.common, common, weights.view(), |w| w);
        add_product(&mut self.by_size, &stacked(&[rounding, &(one_sided + of_ids)]), weights.view(), f64::abs);
        let squares = stacked(&[own, rounding, exact]).mapv_into(square);
        add_product(&mut self.by_square, &squares, weights.view(), square);
        add_product(&mut self.roundings, &roundings(exact, *dtype), weights.view(), |w| w);
    }

    /// Adds up the columns of equal logits before they are squared, some hidden units at a time.
    fn add_alike(&mut self, dtype: Dtype, cases: &[Case]) {
        let of = |case| Alike::of(self.reference, case, dtype, self.limits);
        let tokens_alike: Vec<(usize, Alike)> =
            cases.par_iter().enumerate().filter_map(|(i, case)| Some((i, of(case)?))).collect();
        if tokens_alike.is_empty() {
            return;
        }
        for units in self.reference.unit_chunks() {
            let weights = self.reference.units(units.clone());
            let squares: Vec<_> = tokens_alike.par_iter().map(|(_, alike)| alike.squares(&weights)).collect();
            for ((i, _), squares) in tokens_alike.iter().zip(squares) {
                self.alike.slice_mut(s![*i, units.clone()]).assign(&squares);
            }
        }
        for (i, alike) in &tokens_alike {
            // Equal terms that are added one after the other are rounded alike too.
            self.each[*i] = self.each[*i].max(U * alike.most as f64);
        }
    }

    /// How far element `h` of case `i`, exactly `exact`, may be off.
    fn limit(&self, (i, h): (usize, usize), exact: f64, of_token: OfProducts) -> f64 {
        let cases = self.each.len();
        let [rounding, one_sided] = [0, 1].map(|sum| self.by_size[[sum * cases + i, h]]);
        let [own2, rounding2, exact2] = [0, 1, 2].map(|sum| self.by_square[[sum * cases + i, h]]);
        let roundings = std::array::from_fn(|sum| self.roundings[[sum * cases + i, h]]);
        self.common[[i, h]].abs()
            + own2.max(self.alike[[i, h]]).sqrt()
            + rounding_of_sum(rounding, rounding2, roundings, self.limits)
            + one_sided
            + of_token.relative * exact.abs()
            + self.each[i] * (exact.abs() + exact2.sqrt())
    }

    /// For which hidden units a sum over columns may overflow f32 on its way to a value that does not; `None`: for none.
    fn sums_overflow(&self, i: usize, case: &Case) -> Option<Vec<bool>> {
        let HeadShape { vocab, hidden, .. } = self.reference.shape();
        // No sum of sizes is more than `√V` times that of the squares' root.
        let sum2 = |h: usize| self.by_square[[2 * self.each.len() + i, h]] * vocab as f64;
        if (0..hidden).all(|h| sum2(h).sqrt() <= LARGEST_SUM) {
            return None;
        }
        let mut sizes = Array1::<f64>::zeros(hidden);
        for columns in self.reference.column_chunks() {
            let dlogits = self.reference.on_logits().dlogits_columns(case.b, case.t, columns.clone());
            let weights = self.reference.columns(columns).mapv_into(f64::abs);
            sizes += &Array1::from(dlogits).mapv_into(f64::abs).dot(&weights);
        }
        Some(sizes.iter().map(|size| *size > LARGEST_SUM).collect())
    }

    fn judge(
        &self,
        exact: &Array2<f64>,
        actual: &FloatView<Ix3>,
        gradient: Gradient,
        cases: &[Case],
        of_tokens: &[OfProducts],
    ) -> Vec<Verdict> {
        let (HeadShape { batch, tokens, .. }, stored) = (self.reference.shape(), gradient.stored);
        let mut tallies = Tallies::new(self.limits.grade);
        gradient.open(&mut tallies);
        for (b, t) in ndarray::indices((batch, tokens)) {
            let (row, n) = (actual.row(b, t), b * tokens + t);
            let Ok(i) = cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)) else {
                let gate = Gate::of(Output::Dhidden, Model::Elementwise).at(Some(Edge::Masked));
                exactly_zero(tallies.of(gate, stored, None), &row, |h| Position::hidden(b, t, h));
                continue;
            };
            let case = &cases[i];
            let exact: Vec<f64> = exact.row(n).to_vec();
            let limits: Vec<f64> =
                exact.iter().enumerate().map(|(h, &x)| self.limit((i, h), x, of_tokens[i])).collect();
            let elements = Elements { exact: &exact, limits: &limits, actual: &row };
            let at = |h| Position::hidden(b, t, h);
            let all_open = case.open() || of_tokens[i].overflow;
            let overflows = if all_open { None } else { self.sums_overflow(i, case) };
            let open = |h: usize| all_open || overflows.as_ref().is_some_and(|overflows| overflows[h]);
            gradient.add(&mut tallies, case.edge, case.edge, gradient.row(case.at(), at, open, elements));
        }
        tallies.verdicts()
    }
}

/// The columns of a token, but its target, by their logits.
struct Alike {
    groups: Vec<Group>,
    /// How many columns the most frequent logit has.
    most: usize,
}

/// Columns of one logit.
struct Group {
    columns: Vec<usize>,
    /// The largest `o²` of one of them.
    own2: f64,
}

impl Alike {
    /// Those of a token; `None` where no logit is frequent.
    fn of(reference: &HeadReference, case: &Case, dtype: Dtype, limits: &Limits) -> Option<Self> {
        let reference = reference.on_logits();
        let logits = reference.problem().logits.row(case.b, case.t);
        let mut groups: HashMap<u64, Vec<usize>> = HashMap::new();
        for (v, x) in logits.iter().enumerate().filter(|(v, _)| case.ids(reference).all(|id| id != *v)) {
            groups.entry(x.to_bits()).or_default().push(v);
        }
        let most = groups.values().map(Vec::len).max().filter(|most| *most >= ALIKE)?;
        let row = Row::of(reference, case, 0..logits.len(), dtype, limits);
        let own2 = |columns: &[usize]| columns.iter().map(|&v| square(row.own[v])).fold(0.0, f64::max);
        let group = |columns: Vec<usize>| Group { own2: own2(&columns), columns };
        Some(Self { groups: groups.into_values().map(group).collect(), most })
    }

    /// `Σ own2·w²`, with the weights of a group added up first where that is more; `weights` are `[V,units]`.
    fn squares(&self, weights: &Array2<f64>) -> Array1<f64> {
        let mut all = Array1::zeros(weights.ncols());
        for Group { columns, own2 } in &self.groups {
            let mut sums = vec![(0.0, 0.0); all.len()];
            for &v in columns {
                for ((sum, squares), x) in sums.iter_mut().zip(weights.row(v)) {
                    *sum += x;
                    *squares += square(*x);
                }
            }
            for (all, (sum, squares)) in all.iter_mut().zip(sums) {
                *all += own2 * f64::max(squares, square(sum));
            }
        }
        all
    }
}

/// What `dlm_head` is judged by, a few columns at a time.
struct DlmHead<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    given: Vec<(FloatView<'r, Ix2>, Gradient)>,
    /// One a given.
    tallies: Vec<Tallies>,
    /// The hidden states, their squares, and their sizes, `[cases,H]`.
    hidden: Array2<f64>,
    hidden2: Array2<f64>,
    sizes: Array2<f64>,
    /// Of each case the first of the same hidden state.
    first: Vec<usize>,
    /// By how much of its size a sum over tokens may be off.
    each: f64,
    /// By how much of its size a gradient may be off, beside.
    relative: f64,
    /// Whether values that are not finite are honest, and of which edge they are where they are not.
    open: bool,
    of_nonfinite: Option<Edge>,
}

impl<'r> DlmHead<'r> {
    fn new(
        reference: &'r HeadReference<'r>,
        given: Vec<(FloatView<'r, Ix2>, Gradient)>,
        cases: &[Case],
        of_tokens: &[OfProducts],
        limits: &'r Limits<'r>,
    ) -> Self {
        let places: Vec<usize> = cases.iter().map(|case| case.b * reference.shape().tokens + case.t).collect();
        let hidden = reference.hidden().select(Axis(0), &places);
        // Tokens of one hidden state have one softmax, whose errors add up.
        let first = first_alike(&hidden);
        let mut frequency = vec![0_usize; first.len()];
        for first in &first {
            frequency[*first] += 1;
        }
        let most = frequency.into_iter().max().filter(|most| *most >= ALIKE).unwrap_or(0);
        let open = cases.iter().any(Case::open) || of_tokens.iter().any(|of| of.overflow);
        let tallies = given.iter().map(|(_, gradient)| {
            let mut tallies = Tallies::new(limits.grade);
            gradient.open(&mut tallies);
            tallies
        });
        Self {
            reference,
            limits,
            tallies: tallies.collect(),
            given,
            hidden2: hidden.mapv(square),
            sizes: hidden.mapv(f64::abs),
            hidden,
            first,
            each: U * f64::max(limits.spread() * f64::sqrt(cases.len() as f64), most as f64),
            relative: of_tokens.iter().map(|of| of.relative).fold(0.0, f64::max),
            open,
            of_nonfinite: if open { None } else { shared_edge(cases) },
        }
    }

    fn judge(&mut self, dlogits: &Dlogits, columns: Range<usize>) {
        let exact = self.reference.dlm_head(&self.reference.dlogits(columns.clone()));
        let parts: Vec<usize> = (0..columns.len()).step_by(ROWS_AT_ONCE).collect();
        let rows = parts.into_par_iter().flat_map_iter(|first| {
            let part = first..columns.len().min(first + ROWS_AT_ONCE);
            self.rows(dlogits, &exact.slice(s![part.clone(), ..]), columns.start, part)
        });
        let rows: Vec<Vec<GradientTallies>> = rows.collect();
        for row in rows {
            for ((_, gradient), (tallies, row)) in self.given.iter().zip(self.tallies.iter_mut().zip(row)) {
                gradient.add(tallies, None, self.of_nonfinite, row);
            }
        }
    }

    /// The columns `part` of those that begin at `start`, each a row of `exact`; of each column one tally a given.
    fn rows(
        &self,
        dlogits: &Dlogits,
        exact: &ArrayView2<f64>,
        start: usize,
        part: Range<usize>,
    ) -> Vec<Vec<GradientTallies>> {
        let HeadShape { hidden: width, .. } = self.reference.shape();
        let count = part.len();
        let of = |terms: &Array2<f64>| terms.slice(s![.., part.clone()]).t().to_owned();
        let of_ratio = of(&dlogits.of_ratio);
        let own = self.alike(of(&dlogits.common) + of(&dlogits.own) + of(&dlogits.of_ids) - &of_ratio);
        let (rounding, exact_dlogits) = (of(&dlogits.rounding), of(&dlogits.exact));
        // Each `[count,H]`, one above the other.
        let by_size = stacked(&[&rounding, &(of(&dlogits.one_sided) + of_ratio)]).dot(&self.sizes);
        let squares = stacked(&[&own, &rounding, &exact_dlogits]).mapv_into(square);
        let by_square = squares.dot(&self.hidden2);
        let roundings = roundings(&exact_dlogits, dlogits.dtype).dot(&self.hidden);
        let columns = start + part.start..start + part.end;
        let of_given =
            |(given, _): &(FloatView<Ix2>, _)| self.reference.layout().part(given, columns.clone(), 0..width);
        let given: Vec<Array2<f64>> = self.given.iter().map(of_given).collect();

        let row = |i: usize| {
            let (v, exact) = (columns.start + i, exact.row(i).to_slice().expect("dense"));
            let [rounding, one_sided] = [0, 1].map(|sum| by_size.row(sum * count + i).to_slice().expect("dense"));
            let [own2, rounding2, exact2] =
                [0, 1, 2].map(|sum| by_square.row(sum * count + i).to_slice().expect("dense"));
            let roundings: [&[f64]; OF_ROUNDING] =
                std::array::from_fn(|sum| roundings.row(sum * count + i).to_slice().expect("dense"));
            let limit = |h: usize| {
                let x = exact[h].abs();
                let roundings = roundings.map(|sum| sum[h]);
                let rounding = rounding_of_sum(rounding[h], rounding2[h], roundings, self.limits);
                // What has no random sign: that of all tokens may add up.
                own2[h].sqrt() + rounding + one_sided[h] + self.relative * x + self.each * (x + exact2[h].sqrt())
            };
            let limits: Vec<f64> = (0..width).map(limit).collect();
            let judged = |(actual, (_, gradient)): (&Array2<f64>, &(_, Gradient))| {
                let actual = actual.row(i).to_slice().expect("dense");
                let elements = Elements { exact, limits: &limits, actual };
                let at = |h| Position::weight(h, v);
                // Asked of a value that is not finite alone.
                let sum = |h: usize| {
                    let dlogits = dlogits.exact.column(part.start + i);
                    dlogits.iter().zip(self.sizes.column(h)).map(|(x, size)| x.abs() * size).sum::<f64>()
                };
                let open = |h: usize| self.open || sum(h) > LARGEST_SUM;
                gradient.row(Position { v: Some(v), ..Position::default() }, at, open, elements)
            };
            given.iter().zip(&self.given).map(judged).collect()
        };
        (0..count).map(row).collect()
    }

    /// `terms`, `[columns,cases]`, with those of equal hidden states added up in the first of them.
    fn alike(&self, mut terms: Array2<f64>) -> Array2<f64> {
        for (n, &first) in self.first.iter().enumerate().filter(|(n, first)| n != *first) {
            let (mut into, mut from) = terms.multi_slice_mut((s![.., first], s![.., n]));
            into += &from;
            from.fill(0.0);
        }
        terms
    }
}

/// Of each row the first that is equal to it.
fn first_alike(rows: &Array2<f64>) -> Vec<usize> {
    let mut first: HashMap<Vec<u64>, usize> = HashMap::new();
    let rows = rows.rows().into_iter().enumerate();
    rows.map(|(n, row)| *first.entry(row.iter().map(|x| x.to_bits()).collect()).or_insert(n)).collect()
}
