//! [`judge_head`]: a fused LM head's outputs against the reference.
//!
//! Each logit is a sum of `H` products, and each gradient a sum over `V` columns or `N` tokens of dlogits that carry errors of their
//! own. Errors of random signs add up as the root of their squares' sum: with `λ` the standard deviations allowed and
//! `λ′ = λ/√3`, as a rounding error is uniform,
//!
//! | | how far it may be off, beyond its own half ulp |
//! |---|---|
//! | logit `x` | `ε_v = λ′·u·√H·(|x_v| + ‖hidden·lm_head_v‖₂)` |
//! | `dhidden[n,h]` | `|Σ_v c_v w_hv| + √Σ_v o_v² w_hv² + Σ_v f |w_hv| + R + λ′·u·√V·(|dhidden| + √Σ_v dx_v² w_hv²)` |
//! | `dlm_head[h,v]` | `√Σ_n x_nh² (c + o − s)_nv² + Σ_n (f_n + s_nv) |x_nh| + R + λ′·u·√N·(|dlm_head| + √Σ_n x_nh² dx_nv²)` |
//!
//! with `x` the hidden states and `w` the head; `c` how far dlogits may be off in what all columns of a token but its target share, in
//! proportion to their probabilities; `o` what is a column's own; `f` what f32 flushes to 0 of one, always toward 0; `s` of
//! `c` and `o` what follows from a ratio that the tokens of a row share; and `R` their rounding to the dtype of the products, the smaller
//! of `Σ r·|w|` and `λ′·√Σ r²w²` with `r` half an ulp. A walk to `x` in `H` steps `t` has partial sums of at most about
//! `|x| + ‖t‖₂` in the root of their mean square, and each is rounded once (Higham and Mary 2019). Equal logits round alike: where
//! many columns of a token are equal, or hidden states, their errors add up first, and for √V, or √N, stands their number.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, ArrayView1, Axis, Ix2, Zip, s};
use rayon::prelude::*;

use super::U;
use super::condition::{ColumnBound, FLUSHED};
use super::gate::{Edge, Gate, Model, Output};
use super::judge::{
    Case, JudgeError, PerToken, Stored, Tallies, Verdict, cases, exactly_zero, graded, judge_metrics, judge_per_token,
    shared_edge,
};
use super::metric::{Allowance, Position, Tally, half_ulp};
use super::tolerance::Limits;
use assay_core::problem::{Candidate, Dtype, FloatView, HeadGradientView, HeadProblem, HeadShape, Lend};
use assay_core::spec::{LossSpec, TemperatureDivides};
use assay_reference::{HeadReference, Reference};

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
pub fn judge_head<'c, G: Lend<'c, View = HeadGradientView<'c>>>(
    reference: &HeadReference,
    problem: &HeadProblem,
    outcome: &'c Candidate<G>,
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    let outcome = &outcome.lend();
    check_shapes(reference, outcome)?;
    let (on_logits, tokens) = (reference.on_logits(), reference.shape().tokens);
    let rounding = problem.logits.rounds_logits.then_some(problem.dtype());
    let errors = logit_errors(reference, rounding, limits);
    let errors_of = |b: usize, t: usize| Arc::clone(&errors[b * tokens + t]);
    let dhidden = reference.dhidden(|columns| reference.dlogits(columns));
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
        verdicts.extend(judge_gradients(reference, (problem, &dhidden), outcome, &cases, limits));
        if let Some(metrics) = &outcome.metrics {
            verdicts.extend(judge_metrics(on_logits, metrics, &cases, limits));
        }
        verdicts
    }))
}

fn check_shapes(reference: &HeadReference, outcome: &Candidate<HeadGradientView>) -> Result<(), JudgeError> {
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

/// `ε`, a row a token. Where logits are rounded to a dtype, the product's own error is rounded away, but for one that it may
/// carry over a tie between two values of that dtype: it has their step for an error.
fn logit_errors(reference: &HeadReference, rounding: Option<Dtype>, limits: &Limits) -> Vec<Arc<[f64]>> {
    let each = limits.spread() * U * f64::sqrt(reference.shape().hidden as f64);
    let rate = steepest_exponent(reference.on_logits().spec());
    let of_one = |x: f64, norm2: f64| {
        let of_sum = each * (x.abs() + norm2.sqrt());
        match rounding {
            None => of_sum,
            Some(dtype) => step_error(dtype.round(x + of_sum) - dtype.round(x - of_sum), rate),
        }
    };
    let hidden2 = reference.hidden().mapv(|x| x * x);
    let mut errors = vec![Vec::with_capacity(reference.shape().vocab); hidden2.nrows()];
    for columns in reference.column_chunks() {
        let columns = reference.columns(columns);
        let (exact, norms2) = (reference.hidden().dot(&columns.t()), hidden2.dot(&columns.mapv(|x| x * x).t()));
        for ((errors, exact), norms2) in errors.iter_mut().zip(exact.rows()).zip(norms2.rows()) {
            errors.extend(exact.iter().zip(norms2).map(|(x, norm2)| of_one(*x, *norm2)));
        }
    }
    errors.into_iter().map(Arc::from).collect()
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

/// The dlogits of the reference and how far an honest kernel's may be off, `[N,columns]`; zeros where a token is masked.
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
    /// `s`: of `c` and `o`, what the tokens of a row have in common; `None` where each has a ratio of its own.
    of_ratio: Option<Array2<f64>>,
    /// `f`, `[N]`: what f32 flushes to 0 of a column that is not the target.
    flushed: Array1<f64>,
}

/// The same of one token, `[columns]`.
struct Row {
    exact: Vec<f64>,
    common: Vec<f64>,
    own: Vec<f64>,
    rounding: Vec<f64>,
    pieces: Vec<f64>,
    of_ratio: Vec<f64>,
    flushed: f64,
}

impl Row {
    fn of(reference: &Reference, case: &Case, columns: Range<usize>, dtype: Dtype, limits: &Limits) -> Self {
        let (b, t, kappa) = (case.b, case.t, limits.kappa(Output::Dlogits) * U);
        let scaled = reference.scaled_columns(b, t, case.token, columns.clone());
        let exact = reference.dlogits_columns(b, t, columns.clone());
        let [mut common, mut own, mut rounding, mut pieces, mut of_ratio] = [(); 5].map(|()| vec![0.0; columns.len()]);
        let mut flushed = 0.0;
        for on in &case.condition.alternatives {
            let grad_logp = reference.grad_logp(case.token, &on.branch, on.coupling);
            let there = reference.dlogits_columns_with(b, t, grad_logp, columns.clone());
            let bounds = case.condition.dlogits(reference, case.token, &scaled, on);
            for (v, (x, ColumnBound { whole, common: shared, of_ratio: shared_by_row, flushed: lost })) in
                there.into_iter().zip(bounds).enumerate()
            {
                let mut alone = kappa * (whole.scale - shared.scale) + (whole.floor - shared.floor);
                // Of the target that is more, and one column's own.
                if columns.start + v != case.token.id {
                    alone -= lost;
                    flushed = f64::max(flushed, lost);
                }
                common[v] = f64::max(common[v], kappa * shared.scale + shared.floor);
                own[v] = f64::max(own[v], alone);
                rounding[v] = f64::max(rounding[v], half_ulp(x, dtype));
                pieces[v] = f64::max(pieces[v], (x - exact[v]).abs());
                of_ratio[v] = f64::max(of_ratio[v], kappa * shared_by_row.scale + shared_by_row.floor);
            }
        }
        // Of another sign than the others.
        if columns.contains(&case.token.id) {
            let v = case.token.id - columns.start;
            own[v] += std::mem::take(&mut common[v]);
        }
        Self { exact, common, own, rounding, pieces, of_ratio, flushed }
    }
}

impl Dlogits {
    fn of(reference: &HeadReference, cases: &[Case], columns: &Range<usize>, dtype: Dtype, limits: &Limits) -> Self {
        let HeadShape { batch, tokens, .. } = reference.shape();
        let row = |case: &Case| Row::of(reference.on_logits(), case, columns.clone(), dtype, limits);
        let rows: Vec<Row> = cases.par_iter().map(row).collect();
        let [mut exact, mut common, mut own, mut rounding, mut pieces, mut of_ratio] =
            [(); 6].map(|()| Array2::zeros((batch * tokens, columns.len())));
        let mut flushed = Array1::zeros(batch * tokens);
        for (case, row) in cases.iter().zip(rows) {
            let n = case.b * tokens + case.t;
            flushed[n] = row.flushed;
            for (array, row) in [
                (&mut exact, row.exact),
                (&mut common, row.common),
                (&mut own, row.own),
                (&mut rounding, row.rounding),
                (&mut pieces, row.pieces),
                (&mut of_ratio, row.of_ratio),
            ] {
                array.row_mut(n).assign(&ArrayView1::from(&row));
            }
        }
        let [pieces, of_ratio] = [pieces, of_ratio].map(|array| array.iter().any(|x| *x != 0.0).then_some(array));
        Self { exact, common, own, rounding, pieces, of_ratio, flushed }
    }
}

/// What a token's dlogits come to in the products, beside what its columns may be off.
#[derive(Clone, Copy, Default)]
struct OfProducts {
    /// Whether one may overflow the dtype of the products.
    overflow: bool,
    /// By how much of its size the token's gradient may be off, beside.
    relative: f64,
}

/// `[N]`.
fn of_tokens(reference: &HeadReference, cases: &[Case], dtype: Dtype, limits: &Limits) -> Vec<OfProducts> {
    let HeadShape { batch, tokens, .. } = reference.shape();
    let on_logits = reference.on_logits();
    let of = |case: &Case| {
        let row = on_logits.dlogits_row(case.b, case.t);
        let of_entropy = on_logits.grad_entropy(case.token) != 0.0;
        let mean_gap = case.token.entropy_softmax.stats.mean_gap;
        OfProducts {
            overflow: row.iter().any(|x| !dtype.round(2.0 * x.abs()).is_finite()),
            relative: if of_entropy { limits.kappa(Output::Dlogits) * U * (1.0 + mean_gap) } else { 0.0 },
        }
    };
    let mut all = vec![OfProducts::default(); batch * tokens];
    let found: Vec<OfProducts> = cases.par_iter().map(of).collect();
    for (case, found) in cases.iter().zip(found) {
        all[case.b * tokens + case.t] = found;
    }
    all
}

/// A gradient under its two gates: of each element, and of each row's norm.
#[derive(Clone, Copy)]
struct Gradient {
    output: Output,
    stored: Stored,
    kappa: f64,
}

/// What one row of a gradient came to.
#[derive(Default)]
struct GradientTallies {
    elements: Tally,
    nonfinite: Tally,
    l2: Tally,
}

impl Gradient {
    fn of(output: Output, stored: Stored, limits: &Limits) -> Self {
        Self { output, stored, kappa: limits.kappa(output) }
    }

    /// Compares a row: `(where, exact, limit beyond half an ulp, actual)` of each element. Where it is `open`, a value that is not
    /// finite is an honest one.
    fn row(self, at: Position, open: bool, row: impl Iterator<Item = (Position, [f64; 3])>) -> GradientTallies {
        let Self { stored, kappa, .. } = self;
        let mut tallies = GradientTallies::default();
        let (mut error2, mut rounding2, mut limit2) = (0.0, 0.0, 0.0);
        for (at, [exact, limit, actual]) in row {
            let tally = if actual.is_finite() { &mut tallies.elements } else { &mut tallies.nonfinite };
            let unlimited = exact.is_finite() && !limit.is_finite();
            if open && (unlimited || !actual.is_finite()) {
                tally.report(at);
                error2 = f64::NAN;
                continue;
            }
            // Another branch may be larger, and is rounded at its own size.
            let rounding = stored.rounding(exact.abs() + limit);
            let own = Allowance { rounding, unit: 1.0, scale: limit / kappa, floor: FLUSHED };
            tally.compare(at, exact, actual, kappa, own, stored.given);
            error2 += (actual - exact).powi(2);
            rounding2 += rounding.powi(2);
            limit2 += limit.powi(2);
        }
        if f64::is_finite(error2) {
            let norms =
                Allowance { rounding: rounding2.sqrt(), unit: 1.0, scale: limit2.sqrt() / kappa, floor: FLUSHED };
            tallies.l2.compare(at, 0.0, error2.sqrt(), kappa, norms, Dtype::F64);
        } else {
            tallies.l2.not_compared += 1;
        }
        tallies
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

/// The gradients of both factors, whose sums over columns, and whose columns, are gone through a few at a time.
fn judge_gradients(
    reference: &HeadReference,
    (problem, exact): (&HeadProblem, &Array2<f64>),
    outcome: &Candidate<HeadGradientView>,
    cases: &[Case],
    limits: &Limits,
) -> Vec<Verdict> {
    let dtype = outcome.gradient.dlogits_dtype;
    let of_tokens = of_tokens(reference, cases, dtype, limits);
    let mut dhidden = Dhidden::new(reference, limits);
    let mut dlm_head = DlmHead::new(reference, problem, outcome, cases, &of_tokens, limits);
    for columns in reference.column_chunks() {
        let dlogits = Dlogits::of(reference, cases, &columns, dtype, limits);
        dhidden.add(&dlogits, &reference.columns(columns.clone()));
        dlm_head.judge(&dlogits, columns);
    }
    dhidden.add_alike(dtype, cases);
    let mut verdicts = dhidden.judge((problem, exact), outcome, cases, &of_tokens);
    verdicts.extend(dlm_head.tallies.verdicts());
    verdicts
}

/// Sums over columns, `[N,H]`, and what follows from them for `dhidden`.
struct Dhidden<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    /// `Σ_v c_v w_hv`.
    common: Array2<f64>,
    /// `Σ_v o_v² w_hv²`.
    own2: Array2<f64>,
    /// `Σ_v r_v |w_hv|`, and of the squares of its terms.
    rounding: Array2<f64>,
    rounding2: Array2<f64>,
    /// `Σ_v dx_v² w_hv²`.
    exact2: Array2<f64>,
    /// `Σ_v f |w_hv|`, and of other pieces.
    one_sided: Array2<f64>,
    /// What equal logits make of the roots of `own2` and `rounding2`, where they do.
    alike: Array2<f64>,
    /// `[N]`: by how much of its size a sum over columns may be off.
    each: Vec<f64>,
}
impl<'r> Dhidden<'r> {
    fn new(reference: &'r HeadReference<'r>, limits: &'r Limits<'r>) -> Self {
        let zeros = || Array2::zeros(reference.hidden().dim());
        let each = limits.spread() * U * f64::sqrt(reference.shape().vocab as f64);
        Self {
            reference,
            limits,
            common: zeros(),
            own2: zeros(),
            rounding: zeros(),
            rounding2: zeros(),
            exact2: zeros(),
            one_sided: zeros(),
            alike: zeros(),
            each: vec![each; reference.hidden().nrows()],
        }
    }

    /// Adds up some columns, whose weights are `[columns,H]`.
    fn add(&mut self, dlogits: &Dlogits, weights: &Array2<f64>) {
        let [sizes, squares] = [f64::abs, |x: f64| x * x].map(|of: fn(f64) -> f64| weights.mapv(of));
        let of_squares = |terms: &Array2<f64>| terms.mapv(|x| x * x).dot(&squares);
        self.common += &dlogits.common.dot(weights);
        self.own2 += &of_squares(&dlogits.own);
        self.rounding += &dlogits.rounding.dot(&sizes);
        self.rounding2 += &of_squares(&dlogits.rounding);
        self.exact2 += &of_squares(&dlogits.exact);
        self.one_sided += &(&dlogits.flushed.view().insert_axis(Axis(1)) * &sizes.sum_axis(Axis(0)));
        if let Some(pieces) = &dlogits.pieces {
            self.one_sided += &pieces.dot(&sizes);
        }
    }

    /// Adds up the columns of equal logits before they are squared, some hidden units at a time.
    fn add_alike(&mut self, dtype: Dtype, cases: &[Case]) {
        let of = |case| Alike::of(self.reference, case, dtype, self.limits).map(|alike| (case, alike));
        let tokens_alike: Vec<(&Case, Alike)> = cases.par_iter().filter_map(of).collect();
        if tokens_alike.is_empty() {
            return;
        }
        let HeadShape { tokens, .. } = self.reference.shape();
        for units in self.reference.unit_chunks() {
            let weights = self.reference.units(units.clone());
            let squares: Vec<_> = tokens_alike.par_iter().map(|(_, alike)| alike.squares(&weights)).collect();
            for ((case, _), squares) in tokens_alike.iter().zip(squares) {
                self.alike.slice_mut(s![case.b * tokens + case.t, units.clone()]).assign(&squares);
            }
        }
        for (case, alike) in &tokens_alike {
            // Equal terms that are added one after the other are rounded alike too.
            let each = &mut self.each[case.b * tokens + case.t];
            *each = each.max(U * alike.most as f64);
        }
    }

    /// How far element `[n,h]`, exactly `exact`, may be off.
    fn limit(&self, (n, h): (usize, usize), exact: f64, of_token: OfProducts) -> f64 {
        let rounding = self.rounding[[n, h]].min(self.limits.spread() * self.rounding2[[n, h]].sqrt());
        let off = self.own2[[n, h]].sqrt() + rounding + self.one_sided[[n, h]];
        self.common[[n, h]].abs()
            + off.max(self.alike[[n, h]].sqrt())
            + of_token.relative * exact.abs()
            + self.each[n] * (exact.abs() + self.exact2[[n, h]].sqrt())
    }

    fn judge(
        &self,
        (problem, exact): (&HeadProblem, &Array2<f64>),
        outcome: &Candidate<HeadGradientView>,
        cases: &[Case],
        of_tokens: &[OfProducts],
    ) -> Vec<Verdict> {
        let HeadShape { batch, tokens, .. } = self.reference.shape();
        let actual = &outcome.gradient.dhidden;
        let stored = Stored::gradient(actual.dtype(), problem.logits.hidden.dtype());
        let mut tallies = Tallies::new(self.limits.grade);
        let gradient = Gradient::of(Output::Dhidden, stored, self.limits);
        gradient.open(&mut tallies);
        for (b, t) in ndarray::indices((batch, tokens)) {
            let (row, n) = (actual.row(b, t), b * tokens + t);
            let Ok(i) = cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)) else {
                let gate = Gate::of(Output::Dhidden, Model::Elementwise).at(Some(Edge::Masked));
                exactly_zero(tallies.of(gate, stored, None), &row, |h| Position::hidden(b, t, h));
                continue;
            };
            let case = &cases[i];
            let elements = row.iter().enumerate().map(|(h, &x)| {
                let exact = exact[[n, h]];
                (Position::hidden(b, t, h), [exact, self.limit((n, h), exact, of_tokens[n]), x])
            });
            let open = case.open() || of_tokens[n].overflow;
            gradient.add(&mut tallies, case.edge, case.edge, gradient.row(case.at(), open, elements));
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
    /// The largest `o² + (λ′r)²` of one of them.
    own2: f64,
}

impl Alike {
    /// Those of a token; `None` where no logit is frequent.
    fn of(reference: &HeadReference, case: &Case, dtype: Dtype, limits: &Limits) -> Option<Self> {
        let reference = reference.on_logits();
        let logits = reference.problem().logits.row(case.b, case.t);
        let mut groups: HashMap<u64, Vec<usize>> = HashMap::new();
        for (v, x) in logits.iter().enumerate().filter(|(v, _)| *v != case.token.id) {
            groups.entry(x.to_bits()).or_default().push(v);
        }
        let most = groups.values().map(Vec::len).max().filter(|most| *most >= ALIKE)?;
        let row = Row::of(reference, case, 0..logits.len(), dtype, limits);
        let own2 = |v: usize| row.own[v].powi(2) + (limits.spread() * row.rounding[v]).powi(2);
        let group = |columns: Vec<usize>| Group { own2: columns.iter().map(|&v| own2(v)).fold(0.0, f64::max), columns };
        Some(Self { groups: groups.into_values().map(group).collect(), most })
    }

    /// `Σ own2·w²`, with the weights of a group added up first where that is more; `weights` are `[V,units]`.
    fn squares(&self, weights: &Array2<f64>) -> Array1<f64> {
        let mut all = Array1::zeros(weights.ncols());
        for Group { columns, own2 } in &self.groups {
            let (mut sum, mut squares) = (Array1::<f64>::zeros(all.dim()), Array1::<f64>::zeros(all.dim()));
            for &v in columns {
                sum += &weights.row(v);
                squares.zip_mut_with(&weights.row(v), |sum, x| *sum += x * x);
            }
            Zip::from(&mut all).and(&sum).and(&squares).for_each(|all, sum, squares| {
                *all += own2 * f64::max(*squares, sum * sum);
            });
        }
        all
    }
}

/// What `dlm_head` is judged by, a few columns at a time.
struct DlmHead<'r> {
    reference: &'r HeadReference<'r>,
    limits: &'r Limits<'r>,
    actual: FloatView<'r, Ix2>,
    gradient: Gradient,
    tallies: Tallies,
    /// Squares of the hidden states, and their sizes, `[N,H]`.
    hidden2: Array2<f64>,
    sizes: Array2<f64>,
    /// Of each token the first of the same hidden state.
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
        problem: &HeadProblem,
        outcome: &'r Candidate<HeadGradientView>,
        cases: &[Case],
        of_tokens: &[OfProducts],
        limits: &'r Limits<'r>,
    ) -> Self {
        let actual = outcome.gradient.dlm_head.view();
        // Tokens of one hidden state have one softmax, whose errors add up.
        let first = first_alike(reference.hidden());
        let mut frequency = vec![0_usize; first.len()];
        for case in cases {
            frequency[first[case.b * reference.shape().tokens + case.t]] += 1;
        }
        let most = frequency.into_iter().max().filter(|most| *most >= ALIKE).unwrap_or(0);
        let open = cases.iter().any(Case::open) || of_tokens.iter().any(|of| of.overflow);
        let stored = Stored::gradient(actual.dtype(), problem.logits.lm_head.dtype());
        let gradient = Gradient::of(Output::DlmHead, stored, limits);
        let mut tallies = Tallies::new(limits.grade);
        gradient.open(&mut tallies);
        Self {
            reference,
            limits,
            actual,
            gradient,
            tallies,
            hidden2: reference.hidden().mapv(|x| x * x),
            sizes: reference.hidden().mapv(f64::abs),
            first,
            each: U * f64::max(limits.spread() * f64::sqrt(cases.len() as f64), most as f64),
            relative: of_tokens.iter().map(|of| of.relative).fold(0.0, f64::max),
            open,
            of_nonfinite: if open { None } else { shared_edge(cases) },
        }
    }

    /// `Σ_n x_nh² terms_nv²`, terms of equal hidden states added up first.
    fn squares(&self, mut terms: Array2<f64>) -> Array2<f64> {
        for (n, &first) in self.first.iter().enumerate().filter(|(n, first)| n != *first) {
            let (mut into, mut from) = terms.multi_slice_mut((s![first, ..], s![n, ..]));
            into += &from;
            from.fill(0.0);
        }
        terms.mapv(|x| x * x).t().dot(&self.hidden2)
    }

    fn judge(&mut self, dlogits: &Dlogits, columns: Range<usize>) {
        let HeadShape { hidden: width, .. } = self.reference.shape();
        let exact = self.reference.dlm_head(&dlogits.exact);
        let actual = self.reference.layout().part(&self.actual, columns.clone(), 0..width);
        let exact2 = dlogits.exact.mapv(|x| x * x).t().dot(&self.hidden2);
        let mut own = &dlogits.common + &dlogits.own;
        if let Some(of_ratio) = &dlogits.of_ratio {
            own -= of_ratio;
        }
        let own2 = self.squares(own);
        let rounding2 = self.squares(dlogits.rounding.clone());
        let mut off = dlogits.rounding.t().dot(&self.sizes);
        Zip::from(&mut off).and(&own2).and(&rounding2).for_each(|off, own2, rounding2| {
            *off = own2.sqrt() + off.min(self.limits.spread() * rounding2.sqrt());
        });
        // What has no random sign: that of all tokens may add up.
        off += &dlogits.flushed.dot(&self.sizes);
        for one_sided in [&dlogits.of_ratio, &dlogits.pieces].into_iter().flatten() {
            off += &one_sided.t().dot(&self.sizes);
        }
        let row = |i: usize| {
            let v = columns.start + i;
            let elements = (0..width).map(|h| {
                let x = exact[[i, h]];
                let limit = off[[i, h]] + self.relative * x.abs() + self.each * (x.abs() + exact2[[i, h]].sqrt());
                (Position::weight(h, v), [x, limit, actual[[i, h]]])
            });
            self.gradient.row(Position { v: Some(v), ..Position::default() }, self.open, elements)
        };
        let rows: Vec<GradientTallies> = (0..columns.len()).into_par_iter().map(row).collect();
        for row in rows {
            self.gradient.add(&mut self.tallies, None, self.of_nonfinite, row);
        }
    }
}

/// Of each row the first that is equal to it.
fn first_alike(rows: &Array2<f64>) -> Vec<usize> {
    let mut first: HashMap<Vec<u64>, usize> = HashMap::new();
    let rows = rows.rows().into_iter().enumerate();
    rows.map(|(n, row)| *first.entry(row.iter().map(|x| x.to_bits()).collect()).or_insert(n)).collect()
}
