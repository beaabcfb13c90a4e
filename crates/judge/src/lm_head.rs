//! [`judge_head`]: a fused LM head's outputs against the reference.
//!
//! Each logit is a sum of `H` products, and each gradient a sum over `V` columns or `N` tokens of dlogits that carry errors of their
//! own. Errors of random signs add up as the root of their squares' sum: with `λ` the standard deviations allowed and
//! `λ′ = λ/√3`, as a rounding error is uniform,
//!
//! | | how far it may be off, beyond its own half ulp |
//! |---|---|
//! | logit `x` | `ε_v = λ′·u·√H·(|x_v| + ‖hidden·lm_head_v‖₂)` |
//! | `dhidden[n,h]` | `|Σ_v c_v w_hv| + √Σ_v o_v² w_hv² + R + λ′·u·√V·(|dhidden| + √Σ_v dx_v² w_hv²)` |
//! | `dlm_head[h,v]` | `√Σ_n x_nh² (c + o)_nv² + R + λ′·u·√N·(|dlm_head| + √Σ_n x_nh² dx_nv²)` |
//!
//! with `x` the hidden states and `w` the head; `c` how far dlogits may be off in what all columns of a token but its target share, in
//! proportion to their probabilities; `o` what is a column's own; and `R` their rounding to the dtype of the products, the smaller
//! of `Σ r·|w|` and `λ′·√Σ r²w²` with `r` half an ulp. A walk to `x` in `H` steps `t` has partial sums of at most about
//! `|x| + ‖t‖₂` in the root of their mean square, and each is rounded once (Higham and Mary 2019). Equal logits round alike: where
//! many columns of a token are equal, or hidden states, their errors add up first, and for √V, or √N, stands their number.

use std::collections::HashMap;

use ndarray::{Array1, Array2, ArrayView1, Zip};
use rayon::prelude::*;

use super::U;
use super::condition::FLUSHED;
use super::gate::{Edge, Gate, Model, Output};
use super::judge::{
    Case, JudgeError, PerToken, Stored, Tallies, Verdict, cases, exactly_zero, graded, judge_metrics, judge_per_token,
    shared_edge,
};
use super::metric::{Allowance, Position, Tally, half_ulp};
use super::tolerance::Limits;
use assay_core::problem::{Dtype, HeadCandidate, HeadProblem, HeadShape};
use assay_core::spec::{LossSpec, TemperatureDivides};
use assay_reference::HeadReference;

/// From so many equal logits on in a row, their errors are added up before they are squared.
const ALIKE: usize = 8;

/// Judges `outcome` against `reference`, by `limits`. Outputs that the candidate lacks get no verdict.
///
/// The hidden states of masked tokens must have a gradient of exactly 0. Where a token's reference is not finite, or
/// overflows f32, or its dlogits the dtype in which they go into the products, values of its dhidden and of `dlm_head` may be
/// NaN or ∞.
///
/// # Errors
/// [`JudgeError`] where an output has the wrong shape.
pub fn judge_head(
    reference: &HeadReference,
    problem: &HeadProblem,
    outcome: &HeadCandidate,
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    check_shapes(reference, outcome)?;
    let (on_logits, tokens) = (reference.on_logits(), reference.shape().tokens);
    let rounding = problem.logits.rounds_logits.then_some(problem.dtype());
    let errors = logit_errors(reference, rounding, limits);
    let errors_of = |b: usize, t: usize| errors.row(b * tokens + t).to_vec();
    let per_token = PerToken {
        loss: &outcome.loss,
        logp: outcome.logp.as_ref(),
        entropy: outcome.entropy.as_ref(),
        token_loss: outcome.token_loss.as_ref(),
        dlogits: None,
    };
    Ok(graded(limits, on_logits, |limits| {
        let cases = cases(on_logits, limits, &errors_of);
        let mut verdicts = judge_per_token(on_logits, &per_token, &cases, limits);
        let dlogits = Dlogits::of(reference, &cases, outcome.gradient.dlogits_dtype, limits);
        verdicts.extend(judge_dhidden(reference, problem, outcome, &cases, &dlogits, limits));
        verdicts.extend(judge_dlm_head(reference, problem, outcome, &cases, &dlogits, limits));
        if let Some(metrics) = &outcome.metrics {
            verdicts.extend(judge_metrics(on_logits, metrics, &cases, limits));
        }
        verdicts
    }))
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

/// `ε`, `[N,V]`. Where logits are rounded to a dtype, the product's own error is rounded away, but for one that it may
/// carry over a tie between two values of that dtype: it has their step for an error.
fn logit_errors(reference: &HeadReference, rounding: Option<Dtype>, limits: &Limits) -> Array2<f64> {
    let each = limits.spread() * U * f64::sqrt(reference.shape().hidden as f64);
    let [hidden2, columns2] = [reference.hidden(), reference.columns()].map(|factor| factor.mapv(|x| x * x));
    let mut errors = hidden2.dot(&columns2.t());
    let exact = reference.hidden().dot(&reference.columns().t());
    let rate = steepest_exponent(reference.on_logits().spec());
    errors.zip_mut_with(&exact, |error, &x| {
        let of_sum = each * (x.abs() + error.sqrt());
        *error = match rounding {
            None => of_sum,
            Some(dtype) => step_error(dtype.round(x + of_sum) - dtype.round(x - of_sum), rate),
        };
    });
    errors
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

/// The dlogits of the reference and how far an honest kernel's may be off, `[N,V]`; zeros where a token is masked.
struct Dlogits {
    exact: Array2<f64>,
    /// `c`: what all columns of a token share.
    common: Array2<f64>,
    /// `o`: what is a column's own.
    own: Array2<f64>,
    /// `r`: of rounding to the dtype of the products.
    rounding: Array2<f64>,
    /// How far the other pieces are that a token may be on; `None` where each has but one.
    pieces: Option<Array2<f64>>,
    /// `[N]`: whether one may overflow the dtype of the products.
    overflow: Vec<bool>,
    /// `[N]`: by how much of its size a token's gradient may be off, beside.
    relative: Vec<f64>,
}

impl Dlogits {
    fn of(reference: &HeadReference, cases: &[Case], dtype: Dtype, limits: &Limits) -> Self {
        let HeadShape { batch, tokens, vocab, .. } = reference.shape();
        let on_logits = reference.on_logits();
        let kappa = limits.kappa(Output::Dlogits) * U;
        let rows: Vec<_> = cases
            .par_iter()
            .map(|case| {
                let scaled = on_logits.scaled_row(case.b, case.t, case.token);
                let exact = on_logits.dlogits_row(case.b, case.t);
                let [mut common, mut own, mut rounding, mut pieces] = [(); 4].map(|()| vec![0.0; vocab]);
                for on in &case.condition.alternatives {
                    let grad_logp = on_logits.grad_logp(case.token, &on.branch, on.coupling);
                    let there = on_logits.dlogits_row_with(case.b, case.t, grad_logp);
                    let bounds = case.condition.dlogits(on_logits, case.token, &scaled, on);
                    for (v, (x, bound)) in there.into_iter().zip(bounds).enumerate() {
                        let shared = kappa * bound.common.scale + bound.common.floor;
                        let alone =
                            kappa * (bound.whole.scale - bound.common.scale) + (bound.whole.floor - bound.common.floor);
                        common[v] = f64::max(common[v], shared);
                        own[v] = f64::max(own[v], alone);
                        rounding[v] = f64::max(rounding[v], half_ulp(x, dtype));
                        pieces[v] = f64::max(pieces[v], (x - exact[v]).abs());
                    }
                }
                // Of another sign than the others.
                own[case.token.id] += std::mem::take(&mut common[case.token.id]);
                (exact, [common, own, rounding, pieces])
            })
            .collect();
        let [mut exact, mut common, mut own, mut rounding, mut pieces] =
            [(); 5].map(|()| Array2::zeros((batch * tokens, vocab)));
        let mut overflow = vec![false; batch * tokens];
        let mut relative = vec![0.0; batch * tokens];
        for (case, (row, bounds)) in cases.iter().zip(rows) {
            let n = case.b * tokens + case.t;
            overflow[n] = row.iter().any(|x| !dtype.round(2.0 * x.abs()).is_finite());
            if on_logits.grad_entropy(case.token) != 0.0 {
                relative[n] = kappa * (1.0 + case.token.entropy_softmax.stats.mean_gap);
            }
            exact.row_mut(n).assign(&ArrayView1::from(&row));
            for (array, row) in [&mut common, &mut own, &mut rounding, &mut pieces].into_iter().zip(&bounds) {
                array.row_mut(n).assign(&ArrayView1::from(row));
            }
        }
        let pieces = pieces.iter().any(|x| *x != 0.0).then_some(pieces);
        Self { exact, common, own, rounding, pieces, overflow, relative }
    }
}

/// The two gates of a gradient: of each element, and of each row's norm.
struct Gates<'a> {
    tallies: &'a mut Tallies,
    output: Output,
    stored: Stored,
    kappa: f64,
}

impl<'a> Gates<'a> {
    fn of(tallies: &'a mut Tallies, output: Output, stored: Stored, limits: &Limits) -> Self {
        let mut gates = Self { tallies, output, stored, kappa: limits.kappa(output) };
        gates.at(Model::Elementwise, None);
        gates.at(Model::RowL2, None);
        gates
    }

    fn at(&mut self, model: Model, edge: Option<Edge>) -> &mut Tally {
        self.tallies.of(Gate::of(self.output, model).at(edge), self.stored, Some(self.kappa))
    }

    /// Compares a row: `(where, exact, limit beyond half an ulp, actual)` of each element. Where it is `open`, a value that is not
    /// finite is an honest one.
    fn row(
        &mut self,
        at: Position,
        edges: [Option<Edge>; 2],
        open: bool,
        row: impl Iterator<Item = (Position, [f64; 3])>,
    ) {
        let (mut error2, mut rounding2, mut limit2) = (0.0, 0.0, 0.0);
        let (kappa, stored) = (self.kappa, self.stored);
        let [edge, of_nonfinite] = edges;
        for (at, [exact, limit, actual]) in row {
            let finite = actual.is_finite();
            let tally = self.at(Model::Elementwise, if finite { edge } else { of_nonfinite });
            let unlimited = exact.is_finite() && !limit.is_finite();
            if open && (unlimited || !finite) {
                tally.report(at);
                error2 = f64::NAN;
                continue;
            }
            // Another branch may be larger, and is rounded at its own size.
            let bound = super::condition::Bound { scale: 0.0, floor: FLUSHED };
            let rounding = stored.allowance(exact.abs() + limit, bound).rounding;
            let own = Allowance { rounding, unit: 1.0, scale: limit / kappa, floor: FLUSHED };
            tally.compare(at, exact, actual, kappa, own, stored.given);
            error2 += (actual - exact).powi(2);
            rounding2 += rounding.powi(2);
            limit2 += limit.powi(2);
        }
        let tally = self.at(Model::RowL2, edge);
        if f64::is_finite(error2) {
            let norms =
                Allowance { rounding: rounding2.sqrt(), unit: 1.0, scale: limit2.sqrt() / kappa, floor: FLUSHED };
            tally.compare(at, 0.0, error2.sqrt(), kappa, norms, Dtype::F64);
        } else {
            tally.skipped += 1;
        }
    }
}

fn judge_dhidden(
    reference: &HeadReference,
    problem: &HeadProblem,
    outcome: &HeadCandidate,
    cases: &[Case],
    dlogits: &Dlogits,
    limits: &Limits,
) -> Vec<Verdict> {
    let HeadShape { batch, tokens, vocab, .. } = reference.shape();
    let actual = &outcome.gradient.dhidden;
    let stored = Stored::gradient(actual.dtype(), problem.logits.hidden.dtype());
    let mut tallies = Tallies::new(limits.grade);
    let columns = reference.columns();
    let columns2 = columns.mapv(|x| x * x);
    let exact = reference.dhidden(&dlogits.exact);
    let common = dlogits.common.dot(columns);
    let squares = |terms: &Array2<f64>| terms.mapv(|x| x * x).dot(&columns2);
    let (own2, rounding2, sums2) = (squares(&dlogits.own), squares(&dlogits.rounding), squares(&dlogits.exact));
    let mut off = dlogits.rounding.dot(&columns.mapv(f64::abs));
    Zip::from(&mut off).and(&own2).and(&rounding2).for_each(|off, own2, rounding2| {
        *off = own2.sqrt() + off.min(limits.spread() * rounding2.sqrt());
    });
    if let Some(pieces) = &dlogits.pieces {
        off += &pieces.dot(&columns.mapv(f64::abs));
    }
    let mut each = vec![limits.spread() * U * f64::sqrt(vocab as f64); batch * tokens];
    for case in cases {
        let n = case.b * tokens + case.t;
        let mut own = dlogits.own.row(n).to_owned();
        own.zip_mut_with(&dlogits.rounding.row(n), |own, rounding| *own = own.hypot(limits.spread() * rounding));
        if let Some((alike, most)) = alike(reference, case, &own) {
            // Equal terms that are added one after the other are rounded alike too.
            each[n] = each[n].max(U * most as f64);
            off.row_mut(n).zip_mut_with(&alike, |off, alike2| *off = off.max(alike2.sqrt()));
        }
    }
    for (b, t) in ndarray::indices((batch, tokens)) {
        let (row, n) = (actual.row(b, t), b * tokens + t);
        let Ok(i) = cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)) else {
            let gate = Gate::of(Output::Dhidden, Model::Elementwise).at(Some(Edge::Masked));
            exactly_zero(tallies.of(gate, stored, None), &row, |h| Position::hidden(b, t, h));
            continue;
        };
        let case = &cases[i];
        let limit = |h: usize| {
            common[[n, h]].abs()
                + off[[n, h]]
                + dlogits.relative[n] * exact[[n, h]].abs()
                + each[n] * (exact[[n, h]].abs() + sums2[[n, h]].sqrt())
        };
        let elements = row.iter().enumerate();
        let elements = elements.map(|(h, &x)| (Position::hidden(b, t, h), [exact[[n, h]], limit(h), x]));
        let open = case.open() || dlogits.overflow[n];
        Gates::of(&mut tallies, Output::Dhidden, stored, limits).row(case.at(), [case.edge; 2], open, elements);
    }
    Gates::of(&mut tallies, Output::Dhidden, stored, limits);
    tallies.verdicts()
}

/// `Σ own² lm_head²` of a token, over its columns, with those of equal logits added up first as they round alike, and how many
/// columns the most frequent logit has; `None` where none is that frequent.
fn alike(reference: &HeadReference, case: &Case, own: &Array1<f64>) -> Option<(Array1<f64>, usize)> {
    let logits = reference.on_logits().problem().logits.row(case.b, case.t);
    let mut groups: HashMap<u64, Vec<usize>> = HashMap::new();
    for (v, x) in logits.iter().enumerate().filter(|(v, _)| *v != case.token.id) {
        groups.entry(x.to_bits()).or_default().push(v);
    }
    let most = groups.values().map(Vec::len).max().filter(|most| *most >= ALIKE)?;
    let columns = reference.columns();
    let mut all = Array1::zeros(columns.ncols());
    for group in groups.values() {
        let (mut sum, mut squares) = (Array1::<f64>::zeros(columns.ncols()), Array1::<f64>::zeros(columns.ncols()));
        for &v in group {
            sum += &columns.row(v);
            squares.zip_mut_with(&columns.row(v), |sum, x| *sum += x * x);
        }
        let own = group.iter().map(|&v| own[v]).fold(0.0, f64::max);
        squares.zip_mut_with(&sum, |squares, sum| *squares = own * own * f64::max(*squares, sum * sum));
        all += &squares;
    }
    Some((all, most))
}

fn judge_dlm_head(
    reference: &HeadReference,
    problem: &HeadProblem,
    outcome: &HeadCandidate,
    cases: &[Case],
    dlogits: &Dlogits,
    limits: &Limits,
) -> Vec<Verdict> {
    let HeadShape { tokens, hidden: width, vocab, .. } = reference.shape();
    let actual = &outcome.gradient.dlm_head;
    let stored = Stored::gradient(actual.dtype(), problem.logits.lm_head.dtype());
    let mut tallies = Tallies::new(limits.grade);
    let exact = reference.dlm_head(&dlogits.exact);
    let hidden2 = reference.hidden().mapv(|x| x * x);
    let sums2 = dlogits.exact.mapv(|x| x * x).t().dot(&hidden2);
    // Tokens of one hidden state have one softmax, whose errors add up.
    let first = first_alike(reference.hidden());
    let added_up = |mut terms: Array2<f64>| {
        for (n, &first) in first.iter().enumerate().filter(|(n, first)| n != *first) {
            let (mut into, mut from) = terms.multi_slice_mut((ndarray::s![first, ..], ndarray::s![n, ..]));
            into += &from;
            from.fill(0.0);
        }
        terms
    };
    let squares = |terms: Array2<f64>| added_up(terms).mapv(|x| x * x).t().dot(&hidden2);
    let (own2, rounding2) = (squares(&dlogits.common + &dlogits.own), squares(dlogits.rounding.clone()));
    let mut off = dlogits.rounding.t().dot(&reference.hidden().mapv(f64::abs));
    Zip::from(&mut off).and(&own2).and(&rounding2).for_each(|off, own2, rounding2| {
        *off = own2.sqrt() + off.min(limits.spread() * rounding2.sqrt());
    });
    // Pieces have no random signs: those of all tokens may add up.
    if let Some(pieces) = &dlogits.pieces {
        off += &pieces.t().dot(&reference.hidden().mapv(f64::abs));
    }
    let relative = dlogits.relative.iter().copied().fold(0.0, f64::max);
    let mut frequency = vec![0_usize; first.len()];
    for case in cases {
        frequency[first[case.b * tokens + case.t]] += 1;
    }
    let most = frequency.into_iter().max().filter(|most| *most >= ALIKE).unwrap_or(0);
    let each = U * f64::max(limits.spread() * f64::sqrt(cases.len() as f64), most as f64);
    let actual = actual.to_f64();
    let open = cases.iter().any(Case::open) || dlogits.overflow.contains(&true);
    let edges = [None, if open { None } else { shared_edge(cases) }];
    let mut gates = Gates::of(&mut tallies, Output::DlmHead, stored, limits);
    for v in 0..vocab {
        let row = (0..width).map(|h| {
            let exact = exact[[v, h]];
            let limit = off[[v, h]] + relative * exact.abs() + each * (exact.abs() + sums2[[v, h]].sqrt());
            (Position::weight(h, v), [exact, limit, actual[reference.layout().at(h, v)]])
        });
        gates.row(Position { v: Some(v), ..Position::default() }, edges, open, row);
    }
    tallies.verdicts()
}

/// Of each row the first that is equal to it.
fn first_alike(rows: &Array2<f64>) -> Vec<usize> {
    let mut first: HashMap<Vec<u64>, usize> = HashMap::new();
    let rows = rows.rows().into_iter().enumerate();
    rows.map(|(n, row)| *first.entry(row.iter().map(|x| x.to_bits()).collect()).or_insert(n)).collect()
}
