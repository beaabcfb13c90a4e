//! A candidate's outputs against the reference, one [`Verdict`] a gate.

use std::collections::BTreeMap;
use std::fmt;

use ndarray::{Array2, Ix0, Ix2, Ix3};
use rayon::prelude::*;

use super::U;
use super::arm;
use super::column_bounds::{Bounds, DlogitsCondition};
use super::condition::{self, Alternative, Bound, Condition, ErrorsOf, FLUSHED, GIVEN};
use super::gate::{Edge, Gate, Model, Output};
use super::metric::{Allowance, Allowances, Comparison, Position, Spacing, Tally, half_ulp, min_normal};
use super::quantile::{self, Sets};
use super::tolerance::{Grade, Limits, ToleranceError};
use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView, Metrics, ProblemError, Shape};
use assay_core::spec::{LossSpec, Objective};
use assay_reference::{Reference, Token, TokenColumns};
pub use assay_schema::verdicts::Status;

/// What one gate found.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// What was judged and how.
    pub gate: Gate,
    /// Dtype of the output.
    pub dtype: Dtype,
    /// Dtype that the problem promises: what is coarser is judged as if it were of this one.
    pub promised: Dtype,
    /// The decision.
    pub status: Status,
    /// `κ` of the limit; `None` where no tolerance applies.
    pub kappa: Option<f64>,
    /// The comparisons behind it.
    pub tally: Tally,
    /// The better of the grades that its values reach; `None` where they reach none, or nothing was compared.
    pub grade: Option<Grade>,
    /// Where grade `standard` was asked for and is the better one: what keeps it from `exact`.
    pub short_of_exact: Option<ShortOfExact>,
    /// Where nothing was compared for it: the tokens whose entropies are the quantile to within rounding, more than sets of which
    /// are told apart.
    pub open_entropies: Option<usize>,
}

/// What keeps values of grade `standard` from `exact`.
#[derive(Clone, Copy, Debug)]
pub struct ShortOfExact {
    /// The comparison furthest beyond the limit of grade `exact`.
    pub worst: Option<Comparison>,
    /// What cancels there.
    pub cancels: Cancels,
}

/// What textbook formulas lose to cancellation, and need not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancels {
    /// `G − G·p` at the target.
    Target,
    /// `−p·(log p + H)` of an entropy bonus.
    EntropyGradient,
    /// `x − logsumexp(x)`, or `x/T`.
    Offset,
    /// `σ(1 − σ)` of SAPO's gate.
    Gate,
    /// Two equal arguments of PPO's `min`, of which automatic differentiation takes a part each.
    Bound,
}

impl fmt::Display for Cancels {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Cancels::Target => "the target's gradient cancels: 1 − p is computed as a difference",
            Cancels::EntropyGradient => "the entropy gradient cancels: −p·(log p + H), for p·(gap − mean gap)",
            Cancels::Offset => {
                "logits are rounded at the size of the largest before it is subtracted: x − logsumexp(x), or x/T"
            }
            Cancels::Bound => {
                "the ratio is at a bound of the clip, and automatic differentiation takes a part of each of two equal arguments"
            }
            Cancels::Gate => "SAPO's gate is open, and the slope of its sigmoid cancels: σ·(1 − σ), for σ(x)·σ(−x)",
        })
    }
}

impl fmt::Display for ShortOfExact {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if let Some(worst) = &self.worst {
            let at = if worst.at == Position::default() { String::new() } else { format!(" at {}", worst.at) };
            write!(f, "{:.3} times its limit{at}: ", worst.share())?;
        }
        self.cancels.fmt(f)
    }
}

/// A candidate that cannot be judged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum JudgeError {
    /// An output has the wrong shape.
    #[error("candidate `{output}`: got shape {given:?}, expected {expected:?} as in the problem")]
    Shape {
        /// The output.
        output: &'static str,
        /// Its shape.
        given: Vec<usize>,
        /// The problem's.
        expected: Vec<usize>,
    },
    /// An output is missing.
    #[error("candidate `{output}`: not given, expected it: {because}")]
    Missing {
        /// The output.
        output: &'static str,
        /// Why it must be there.
        because: &'static str,
    },
    /// There are no limits for its class.
    #[error(transparent)]
    Tolerance(#[from] ToleranceError),
}

/// One unmasked token under judgement.
pub(super) struct Case<'r> {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) token: &'r Token,
    pub(super) condition: Condition,
    pub(super) finite: bool,
    pub(super) edge: Option<Edge>,
}

impl Case<'_> {
    pub(super) fn at(&self) -> Position {
        Position::token(self.b, self.t)
    }

    /// The ids of the token.
    pub(super) fn ids(&self, reference: &Reference) -> impl Iterator<Item = usize> {
        std::iter::once(self.token.id).chain(reference.others(self.token).iter().map(|other| other.id))
    }

    /// Whether an honest kernel's values of the token may be NaN or ∞.
    pub(super) fn open(&self) -> bool {
        self.condition.overflows || !self.finite
    }
}

/// Judges `candidates`, whose dlogits may be borrowed, against `reference`, by `limits`. Outputs that a candidate lacks get no verdict.
///
/// Masked tokens must have dlogits of exactly 0; their other outputs are not looked at. A token whose reference is not
/// finite must be reported as such; a token that overflows f32 may be. Where the limits are those of [`Grade::Standard`], each
/// verdict is of the better grade that its gate reaches.
///
/// # Errors
/// [`JudgeError`] where an output has the wrong shape.
pub(super) fn judge_all(
    reference: &Reference,
    candidates: &[Candidate<FloatView<Ix3>>],
    limits: &Limits,
) -> Result<Vec<Vec<Verdict>>, JudgeError> {
    for candidate in candidates {
        expect_outputs(reference.spec(), candidate)?;
        check_shapes(reference, candidate)?;
    }
    let judge_by = |reference: &Reference, candidates: &[Candidate<FloatView<Ix3>>]| {
        graded(limits, reference, candidates, |limits, asked| judge_asked(reference, asked, limits))
    };
    Ok(on_each_set(reference, reference, candidates, (limits, GIVEN), |high| reference.keeping(high), judge_by))
}

fn judge_asked(
    reference: &Reference,
    asked: &[Asked<Candidate<FloatView<Ix3>>>],
    limits: &Limits,
) -> Vec<Vec<Verdict>> {
    let cases = cases(reference, limits, GIVEN);
    let given = asked.iter().map(|Asked { candidate, .. }| PerToken {
        dlogits: Some(candidate.gradient.view()),
        ..PerToken::without_gradient(candidate)
    });
    let mut all = judge_per_token(reference, &given.collect::<Vec<_>>(), &cases, limits);
    for (verdicts, asked) in all.iter_mut().zip(asked) {
        if let Some(metrics) = &asked.candidate.metrics {
            verdicts.extend(judge_metrics(reference, metrics, &cases, limits));
        }
    }
    all
}

/// The verdicts of `judge_by` on `candidates`: where tokens of high entropy are counted, and one fails, on each set of them that a
/// right kernel may have. Of each candidate those of the set that it fails the fewest gates on.
///
/// Where there are more sets than are told apart, what depends on them is not compared unless it is right for the reference's own.
pub(super) fn on_each_set<R, C>(
    own: &R,
    on_logits: &Reference,
    candidates: &[C],
    (limits, errors): (&Limits, ErrorsOf),
    keeping: impl Fn(&Array2<bool>) -> Result<R, ProblemError>,
    judge_by: impl Fn(&R, &[C]) -> Vec<Vec<Verdict>>,
) -> Vec<Vec<Verdict>> {
    let mut all = judge_by(own, candidates);
    let failed = |verdicts: &[Verdict]| verdicts.iter().filter(|verdict| verdict.status.failed()).count();
    if !quantile::is_counted(on_logits.spec()) || all.iter().all(|verdicts| failed(verdicts) == 0) {
        return all;
    }
    let errors = condition::errors_of_entropies(on_logits, limits.into(), errors);
    let references = match quantile::sets(on_logits, &errors) {
        // With other tokens a covariance may select more than there are to be taken.
        Sets::Known(sets) => sets
            .iter()
            .map(keeping)
            .collect::<Result<Vec<R>, _>>()
            .map_err(|_| quantile::open(on_logits, &errors).len()),
        Sets::Unknown(open) => Err(open),
    };
    match references {
        Ok(references) => {
            for (verdicts, candidate) in all.iter_mut().zip(candidates) {
                for reference in &references {
                    if failed(verdicts) == 0 {
                        break;
                    }
                    let others = judge_by(reference, std::slice::from_ref(candidate));
                    let others = others.into_iter().next().expect("verdicts a candidate");
                    if failed(&others) < failed(verdicts) {
                        *verdicts = others;
                    }
                }
            }
        }
        Err(open) => all.iter_mut().flatten().for_each(|verdict| verdict.leave_open(open)),
    }
    all
}

/// Judges a candidate without a gradient, of a reference whose logits have `errors` of their own: on what else it has.
///
/// # Errors
/// As [`judge_all`].
pub(super) fn judge_forward(
    reference: &Reference,
    candidate: &Candidate<()>,
    limits: &Limits,
    errors: ErrorsOf,
) -> Result<Vec<Verdict>, JudgeError> {
    expect_outputs(reference.spec(), candidate)?;
    expect_per_token(reference.shape(), candidate, reference.spec().ids_per_token)?;
    let judge_by = |reference: &Reference, candidates: &[Candidate<()>]| {
        graded(limits, reference, candidates, |limits, asked| {
            let cases = cases(reference, limits, errors);
            let given: Vec<PerToken> = asked.iter().map(|asked| PerToken::without_gradient(asked.candidate)).collect();
            judge_per_token(reference, &given, &cases, limits)
        })
    };
    let candidates = std::slice::from_ref(candidate);
    let all = on_each_set(reference, reference, candidates, (limits, errors), |high| reference.keeping(high), judge_by);
    Ok(all.into_iter().next().expect("verdicts a candidate"))
}

/// That what a spec asks for is there: a loss; or logp, where there is none.
pub(super) fn expect_outputs<G>(spec: &LossSpec, candidate: &Candidate<G>) -> Result<(), JudgeError> {
    let missing = |output, because| Err(JudgeError::Missing { output, because });
    match (&candidate.loss, &candidate.logp) {
        (None, None) if spec.is_from_cotangents() => missing("logp", "it is what the spec asks for"),
        (None, _) if !spec.is_from_cotangents() => missing("loss", "only logp and entropy by themselves have none"),
        _ => Ok(()),
    }
}

/// A candidate, and those of its gradients that verdicts are asked of.
pub(super) struct Asked<'c, C> {
    pub(super) candidate: &'c C,
    pub(super) gradients: Vec<Output>,
}

/// The verdicts of `judge_by`, a list a candidate: of grade `exact` where a gate reaches it; where it does not, and `limits` ask for
/// no more, of `standard`. Only those candidates, and gradients, are asked for again that do not reach `exact`.
pub(super) fn graded<'c, C>(
    limits: &Limits,
    reference: &Reference,
    candidates: &'c [C],
    judge_by: impl Fn(&Limits, &[Asked<'c, C>]) -> Vec<Vec<Verdict>>,
) -> Vec<Vec<Verdict>> {
    let gradients: Vec<Output> = Output::ALL.into_iter().filter(|output| output.is_gradient()).collect();
    let first = candidates.iter().map(|candidate| Asked { candidate, gradients: gradients.clone() });
    let first: Vec<Asked<C>> = first.collect();
    let Some(better) = limits.better() else { return judge_by(limits, &first) };
    let mut all = judge_by(&better, &first);
    let fails = |verdicts: &[Verdict], output| {
        verdicts.iter().any(|verdict| verdict.gate.output == output && verdict.status.failed())
    };
    let short = all.iter_mut().zip(candidates).filter(|(exact, _)| exact.iter().any(|verdict| verdict.status.failed()));
    let (short, asked): (Vec<&mut Vec<Verdict>>, Vec<Asked<C>>) = short
        .map(|(exact, candidate)| {
            let gradients = gradients.iter().copied().filter(|output| fails(exact, *output)).collect();
            (exact, Asked { candidate, gradients })
        })
        .unzip();
    if asked.is_empty() {
        return all;
    }
    let better = |exact: Verdict, standard: &[Verdict]| match standard.iter().find(|other| other.gate == exact.gate) {
        Some(standard) if exact.status.failed() => {
            if standard.status.failed() {
                return standard.clone();
            }
            let worst = exact.tally.worst;
            let cancels = cancels(reference, exact.gate, worst, limits);
            Verdict { short_of_exact: Some(ShortOfExact { worst, cancels }), ..standard.clone() }
        }
        _ => exact,
    };
    for (exact, standard) in short.into_iter().zip(judge_by(&limits.at(Grade::Standard), &asked)) {
        *exact = std::mem::take(exact).into_iter().map(|verdict| better(verdict, &standard)).collect();
    }
    all
}

/// What of the formulas that grade `standard` forgives is behind an error beyond the limits of `exact`.
fn cancels(reference: &Reference, gate: Gate, worst: Option<Comparison>, limits: &Limits) -> Cancels {
    let token = worst.and_then(|worst| reference.token(worst.at.b?, worst.at.t?));
    let is_id = |token: &Token, v| v == token.id || reference.others(token).iter().any(|other| other.id == v);
    let of_target = token.is_none_or(|token| worst.is_some_and(|worst| worst.at.v.is_none_or(|v| is_id(token, v))));
    let offset = token.map_or(0.0, |token| token.logp_softmax.stats.max.abs()) * limits.at(Grade::Standard).offset();
    let open_gate = |token: &Token| match &reference.spec().objective {
        Objective::Sapo(sapo) => {
            let (ratio, advantage) = (token.inputs.ratio(reference.spec()), token.inputs.advantage);
            arm::gate(sapo, ratio, advantage) > 0.99
        }
        _ => false,
    };
    if gate.output.is_gradient() && token.is_some_and(open_gate) {
        return Cancels::Gate;
    }
    // As near as a hundred roundings of a log-probability bring it.
    let at_bound = |token: &Token| {
        let ratio = token.inputs.ratio(reference.spec());
        token.branch.held_by_clip(reference.spec(), ratio * (1.0 - 1e-5)..=ratio * (1.0 + 1e-5)).is_some()
    };
    if gate.output.is_gradient() && token.is_some_and(at_bound) {
        return Cancels::Bound;
    }
    // Beyond a few roundings of a probability, an offset is what shows.
    if !gate.output.is_gradient() || (!of_target && offset > limits.kappa(gate.output)) {
        Cancels::Offset
    } else if of_target && gate.model != Model::RowL2 {
        Cancels::Target
    } else {
        Cancels::EntropyGradient
    }
}

/// The unmasked tokens of a reference, in order, whose logits have `errors` of their own.
pub(super) fn cases<'r>(reference: &'r Reference, limits: &Limits, errors: ErrorsOf) -> Vec<Case<'r>> {
    let mut conditions = Condition::all(reference, limits.into(), errors);
    let case = |(b, t): (usize, usize)| {
        let (token, condition) = (reference.token(b, t)?, conditions[[b, t]].take()?);
        let finite = reference.finite(token);
        let edge = edge(reference, (b, t), condition.overflows || !finite);
        Some(Case { b, t, token, condition, finite, edge })
    };
    let Shape { batch, tokens, .. } = reference.shape();
    ndarray::indices((batch, tokens)).into_iter().filter_map(case).collect()
}

/// The edge that a token is at.
fn edge(reference: &Reference, (b, t): (usize, usize), overflows: bool) -> Option<Edge> {
    let logits = &reference.problem().logits;
    let lowest = match logits.dtype() {
        Dtype::F16 => f64::from(half::f16::MIN) / 2.0,
        Dtype::Bf16 | Dtype::F32 | Dtype::F64 => f64::from(f32::MIN) / 2.0,
    };
    match logits.at_most(b, t, lowest) {
        true if logits.at_most(b, t, f64::NEG_INFINITY) => Some(Edge::MinusInfinity),
        true => Some(Edge::LowestFloat),
        false => overflows.then_some(Edge::Overflow),
    }
}

/// The edge of what all tokens go into, where it is NaN or ∞ and may not be.
pub(super) fn shared_edge(cases: &[Case]) -> Option<Edge> {
    cases.iter().filter_map(|case| case.edge).min()
}

/// What is judged token by token.
pub(super) struct PerToken<'c> {
    pub(super) loss: Option<&'c FloatArray<Ix0>>,
    pub(super) logp: Option<&'c FloatArray<Ix2>>,
    pub(super) logp_of_others: Option<&'c FloatArray<Ix3>>,
    pub(super) entropy: Option<&'c FloatArray<Ix2>>,
    pub(super) token_loss: Option<&'c FloatArray<Ix2>>,
    /// `None` where logits are a product.
    pub(super) dlogits: Option<FloatView<'c, Ix3>>,
}

impl<'c> PerToken<'c> {
    pub(super) fn without_gradient<G>(candidate: &'c Candidate<G>) -> Self {
        Self {
            loss: candidate.loss.as_ref(),
            logp: candidate.logp.as_ref(),
            logp_of_others: candidate.logp_of_others.as_ref(),
            entropy: candidate.entropy.as_ref(),
            token_loss: candidate.token_loss.as_ref(),
            dlogits: None,
        }
    }
}

fn check_shapes(reference: &Reference, candidate: &Candidate<FloatView<Ix3>>) -> Result<(), JudgeError> {
    let shape @ Shape { batch, tokens, vocab } = reference.shape();
    let (given, expected) = (candidate.gradient.shape(), [batch, tokens, vocab]);
    if given != expected {
        return Err(JudgeError::Shape { output: "dlogits", given: given.to_vec(), expected: expected.to_vec() });
    }
    expect_per_token(shape, candidate, reference.spec().ids_per_token)
}

/// That what there is of each token is `[B,T]`, but for logp of `top` ids.
pub(super) fn expect_per_token<G>(shape: Shape, candidate: &Candidate<G>, top: usize) -> Result<(), JudgeError> {
    let expected = [shape.batch, shape.tokens];
    expect_logps(shape, candidate, top)?;
    let per_token = [("logp", &candidate.logp), ("entropy", &candidate.entropy), ("token_loss", &candidate.token_loss)];
    let per_token = per_token.iter().filter_map(|(name, array)| Some((*name, array.as_ref()?.shape())));
    for (output, given) in per_token {
        if given != expected {
            return Err(JudgeError::Shape { output, given: given.to_vec(), expected: expected.to_vec() });
        }
    }
    Ok(())
}

/// That logp is of as many ids as are asked for.
fn expect_logps<G>(shape: Shape, candidate: &Candidate<G>, top: usize) -> Result<(), JudgeError> {
    let Some(logp) = &candidate.logp else { return Ok(()) };
    let mut expected = vec![shape.batch, shape.tokens];
    let given = match &candidate.logp_of_others {
        Some(others) => {
            let mut given = others.shape().to_vec();
            given[2] += 1;
            given
        }
        None => logp.shape().to_vec(),
    };
    if top > 1 {
        expected.push(top);
    }
    if given == expected { Ok(()) } else { Err(JudgeError::Shape { output: "logp", given, expected }) }
}

/// The dtype of an output, and that which the problem promises for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) given: Dtype,
    pub(super) promised: Dtype,
}

impl Stored {
    /// A gradient has the dtype of what it is a gradient of; but for f64, which is f32's arithmetic stored wider.
    pub(super) fn gradient(given: Dtype, of: Dtype) -> Self {
        Self { given, promised: if of == Dtype::F64 { Dtype::F32 } else { of } }
    }

    /// What is not a gradient is f32.
    pub(super) fn scalar(given: Dtype) -> Self {
        Self { given, promised: Dtype::F32 }
    }

    /// `½ulp` of the finer of the two.
    pub(super) fn rounding(self, expected: f64) -> f64 {
        let [given, promised] = [self.given, self.promised].map(Spacing::of);
        given.half_ulp(expected).min(promised.half_ulp(expected))
    }

    /// The same of many.
    pub(super) fn roundings(self, expected: impl Iterator<Item = f64>) -> Vec<f64> {
        let [given, promised] = [self.given, self.promised].map(Spacing::of);
        if self.given == self.promised {
            expected.map(|x| given.half_ulp(x)).collect()
        } else {
            expected.map(|x| given.half_ulp(x).min(promised.half_ulp(x))).collect()
        }
    }

    /// That, and `u·scale` with the scale no smaller than the output's smallest normal number.
    pub(super) fn allowance(self, expected: f64, Bound { scale, floor }: Bound) -> Allowance {
        Allowance { rounding: self.rounding(expected), unit: U, scale: scale.max(self.smallest()), floor }
    }

    /// The same of many.
    fn allowances(self, expected: &[f64], bounds: &Bounds) -> Allowances {
        let smallest = self.smallest();
        Allowances {
            rounding: self.roundings(expected.iter().copied()),
            unit: U,
            scale: bounds.scale.iter().map(|scale| scale.max(smallest)).collect(),
            floor: bounds.floor.clone(),
        }
    }

    fn smallest(self) -> f64 {
        min_normal(self.given).min(min_normal(self.promised))
    }
}

/// Tallies by gate, in the order of gates.
pub(super) struct Tallies {
    grade: Grade,
    by_gate: BTreeMap<Gate, (Stored, Option<f64>, Tally)>,
}

impl Tallies {
    pub(super) fn new(grade: Grade) -> Self {
        Self { grade, by_gate: BTreeMap::new() }
    }

    /// The tally of `gate`, whose limit has this `κ`.
    pub(super) fn of(&mut self, gate: Gate, stored: Stored, kappa: Option<f64>) -> &mut Tally {
        &mut self.by_gate.entry(gate).or_insert_with(|| (stored, kappa, Tally::default())).2
    }

    pub(super) fn verdicts(self) -> Vec<Verdict> {
        let grade = self.grade;
        let verdict = |(gate, (stored, kappa, tally)): (Gate, (Stored, Option<f64>, Tally))| {
            let status = tally.status();
            let grade = (status == Status::Pass).then_some(grade);
            let Stored { given: dtype, promised } = stored;
            Verdict { gate, dtype, promised, status, kappa, tally, grade, short_of_exact: None, open_entropies: None }
        };
        self.by_gate.into_iter().map(verdict).collect()
    }
}

/// What one token came to on the piece of the loss that fits it best.
struct OfToken {
    token_loss: Tally,
    row: RowTallies,
    /// Its loss on each piece that fits it, less that on its own: by how much the loss may be off for it.
    kink: f64,
}

/// Loss, logp, entropies, token losses and dlogits, of each of those given. A token is on one side of each tie that rounding may have
/// put it on, for its loss and its gradient alike.
pub(super) fn judge_per_token(
    reference: &Reference,
    given: &[PerToken],
    cases: &[Case],
    limits: &Limits,
) -> Vec<Vec<Verdict>> {
    let of_tokens: Vec<Vec<OfToken>> =
        cases.par_iter().map(|case| judge_token(reference, given, case, limits)).collect();
    let mut of_given: Vec<Vec<OfToken>> = given.iter().map(|_| Vec::with_capacity(cases.len())).collect();
    for of_token in of_tokens {
        of_given.iter_mut().zip(of_token).for_each(|(of_given, of_token)| of_given.push(of_token));
    }
    given.iter().zip(of_given).map(|(given, of)| judge_given(reference, given, cases, of, limits)).collect()
}

/// The same of one of them, whose tokens came to `of_tokens`.
fn judge_given(
    reference: &Reference,
    given: &PerToken,
    cases: &[Case],
    of_tokens: Vec<OfToken>,
    limits: &Limits,
) -> Vec<Verdict> {
    let mut tallies = Tallies::new(limits.grade);
    let values: [(Output, Option<&FloatArray<Ix2>>, Expected); 2] = [
        (Output::Logp, given.logp, |case| (case.token.inputs.logp, case.condition.logp)),
        (Output::Entropy, given.entropy, |case| (case.token.entropy, case.condition.entropy)),
    ];
    for (output, values, expected) in values {
        let Some(values) = values else { continue };
        let (gate, stored, kappa) = plain(output, Stored::scalar(values.dtype()), limits);
        tallies.of(gate, stored, Some(kappa));
        for case in cases {
            let (exact, bound) = expected(case);
            let tally = tallies.of(gate.at(case.edge), stored, Some(kappa));
            compare(tally, case, case.at(), exact, values.at(case.b, case.t), kappa, bound, stored);
        }
    }
    if let Some(values) = given.logp_of_others {
        let (gate, stored, kappa) = plain(Output::Logp, Stored::scalar(values.dtype()), limits);
        for case in cases {
            let expected = reference.others(case.token).iter().zip(&case.condition.others);
            let tally = tallies.of(gate.at(case.edge), stored, Some(kappa));
            for (k, ((other, bound), actual)) in (1..).zip(expected.zip(values.row(case.b, case.t))) {
                let at = Position { k: Some(k), ..case.at() };
                compare(tally, case, at, other.logp, actual, kappa, *bound, stored);
            }
        }
    }

    let kinks: Vec<f64> = of_tokens.iter().map(|of| of.kink).collect();
    let token_loss = given.token_loss.map(|values| plain(Output::TokenLoss, Stored::scalar(values.dtype()), limits));
    if let Some((gate, stored, kappa)) = token_loss {
        tallies.of(gate, stored, Some(kappa));
    }
    let rows = given.dlogits.as_ref().map(|dlogits| {
        let stored = Stored::gradient(dlogits.dtype(), reference.problem().logits.dtype());
        let kappa = limits.kappa(Output::Dlogits);
        for model in [Model::Elementwise, Model::RowL2, Model::RowSum] {
            tallies.of(Gate::of(Output::Dlogits, model), stored, Some(kappa));
        }
        masked_rows(dlogits, cases, reference.shape(), stored, &mut tallies);
        (stored, kappa)
    });
    for (case, of_token) in cases.iter().zip(of_tokens) {
        if let Some((gate, stored, kappa)) = token_loss {
            tallies.of(gate.at(case.edge), stored, Some(kappa)).absorb(of_token.token_loss);
        }
        if let Some((stored, kappa)) = rows {
            let RowTallies { elements, l2, sum } = of_token.row;
            for (model, tally) in [(Model::Elementwise, elements), (Model::RowL2, l2), (Model::RowSum, sum)] {
                let gate = Gate::of(Output::Dlogits, model).at(case.edge);
                tallies.of(gate, stored, Some(kappa)).absorb(tally);
            }
        }
    }
    if let Some(loss) = given.loss {
        judge_loss(reference, loss, cases, &kinks, limits, &mut tallies);
    }
    tallies.verdicts()
}

/// The value that is right for a token, and how far one may be off.
type Expected = fn(&Case) -> (f64, Bound);

/// An output, element by element, at no edge: its gate, how it is stored, its `κ`.
fn plain(output: Output, stored: Stored, limits: &Limits) -> (Gate, Stored, f64) {
    (Gate::of(output, Model::Elementwise), stored, limits.kappa(output))
}

#[allow(clippy::too_many_arguments, reason = "a value, what it should be, and what it is of")]
fn compare(
    tally: &mut Tally,
    case: &Case,
    at: Position,
    exact: f64,
    actual: f64,
    kappa: f64,
    bound: Bound,
    stored: Stored,
) {
    if case.condition.overflows && !actual.is_finite() {
        tally.report(at);
    } else {
        tally.compare(at, exact, actual, kappa, stored.allowance(exact, bound), stored.given);
    }
}

/// Masked rows are exactly 0.
fn masked_rows(dlogits: &FloatView<Ix3>, cases: &[Case], shape: Shape, stored: Stored, tallies: &mut Tallies) {
    let Shape { batch, tokens, .. } = shape;
    let counts = |b, t| cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)).is_ok();
    let masked = (0..batch * tokens).map(|i| (i / tokens, i % tokens)).filter(|&(b, t)| !counts(b, t));
    for (b, t) in masked {
        let gate = Gate::of(Output::Dlogits, Model::Elementwise).at(Some(Edge::Masked));
        exactly_zero(tallies.of(gate, stored, None), &dlogits.row(b, t), |v| Position::column(b, t, v));
    }
}

/// Compares a masked token's gradient with 0.
pub(super) fn exactly_zero(tally: &mut Tally, values: &[f64], at: impl Fn(usize) -> Position) {
    let (i, x) = values.iter().copied().enumerate().find(|(_, x)| *x != 0.0).unwrap_or((0, 0.0));
    tally.compare(at(i), 0.0, x, 0.0, Allowance::default(), Dtype::F64);
}

/// The three gates of one row of dlogits.
#[derive(Default)]
struct RowTallies {
    elements: Tally,
    l2: Tally,
    sum: Tally,
}

impl RowTallies {
    fn badness(&self) -> f64 {
        self.elements.badness().max(self.l2.badness()).max(self.sum.badness())
    }
}

/// A token's gradient as it is given.
struct GivenRow<'g, 'd> {
    case: &'g Case<'g>,
    actual: &'g FloatView<'d, Ix3>,
    stored: Stored,
    kappa: f64,
    /// Whether one of its values is not finite where none need be: it excuses no other that has a number to be.
    says_so: bool,
}

/// Where a token may be: on a piece of its loss, or at the kink between it and another, where any gradient between theirs is one.
/// Automatic differentiation takes halves of halves: of two equal arguments of `minimum`, and of a value at the bound of `clip`.
#[derive(Clone, Copy)]
struct Piece<'c> {
    on: &'c Alternative,
    towards: Option<(&'c Alternative, f64)>,
    /// The token's loss there.
    loss: f64,
}

impl<'c> Piece<'c> {
    /// The pieces of a token, its own first, and between that and each other whose loss is its own within the limits: where the loss
    /// jumps, as a token may be selected or not, nothing between two gradients is one.
    fn all(reference: &Reference, case: &'c Case, limits: &Limits) -> Vec<Self> {
        let alternatives = &case.condition.alternatives;
        let loss = |on: &Alternative| reference.token_loss(&case.token.inputs, &on.branch) + case.token.of_others;
        let whole = |on| Self { on, towards: None, loss: loss(on) };
        let own = whole(&alternatives[0]);
        let Bound { scale, floor } = case.condition.token_loss;
        let meets = |other: &Self| (other.loss - own.loss).abs() <= limits.kappa(Output::TokenLoss) * U * scale + floor;
        let others: Vec<Self> = alternatives[1..].iter().map(whole).collect();
        let between = |other: &Self| [0.25, 0.5, 0.75].map(|by| Self { towards: Some((other.on, by)), ..own });
        let kinks: Vec<Self> = others.iter().filter(|other| meets(other)).flat_map(between).collect();
        std::iter::once(own).chain(others).chain(kinks).collect()
    }

    fn dlogits(&self, reference: &'c Reference, case: &'c Case) -> PieceDlogits<'c> {
        let grad = |on: &Alternative| reference.grad_logp(case.token, &on.branch, on.coupling);
        let condition = |on| DlogitsCondition::of(&case.condition, reference, case.token, on);
        let mut of = PieceDlogits { grad: grad(self.on), condition: condition(self.on), towards: None };
        if let Some((other, by)) = self.towards {
            of.grad += by * (grad(other) - of.grad);
            of.towards = Some(condition(other));
        }
        of
    }
}

/// A token's dlogits on a piece: what its columns have in common.
struct PieceDlogits<'c> {
    /// `∂loss/∂ℓ`.
    grad: f64,
    condition: DlogitsCondition<'c>,
    towards: Option<DlogitsCondition<'c>>,
}

impl PieceDlogits<'_> {
    /// The exact ones of `columns`, and how far each may be off.
    fn of(&self, reference: &Reference, case: &Case, columns: &TokenColumns) -> (Vec<f64>, Bounds) {
        let bounds = self.condition.whole(columns);
        let bounds = match &self.towards {
            Some(other) => bounds.or(&other.whole(columns)),
            None => bounds,
        };
        (reference.dlogits_of(columns, case.token, self.grad), bounds)
    }
}

/// The columns of a row that are judged at once: few enough to stay in a cache.
const AT_ONCE: usize = 4096;

impl<'g, 'd> GivenRow<'g, 'd> {
    fn of(case: &'g Case, actual: &'g FloatView<'d, Ix3>, reference: &Reference, limits: &Limits) -> Self {
        let stored = Stored::gradient(actual.dtype(), reference.problem().logits.dtype());
        let says_so = case.open() && actual.row(case.b, case.t).iter().any(|y| !y.is_finite());
        Self { case, actual, stored, kappa: limits.kappa(Output::Dlogits), says_so }
    }

    /// The same row of each of `given` on each of `pieces`, column by column.
    fn all_on(reference: &Reference, case: &Case, given: &[Self], pieces: &[Piece]) -> Vec<Vec<RowTallies>> {
        let mut sums = vec![vec![RowSums::default(); pieces.len()]; given.len()];
        let vocab = reference.shape().vocab;
        let on_pieces: Vec<_> = pieces.iter().map(|piece| piece.dlogits(reference, case)).collect();
        for first in (0..vocab).step_by(AT_ONCE) {
            let range = first..vocab.min(first + AT_ONCE);
            let columns = reference.columns(case.b, case.t, case.token, range.clone());
            let expected: Vec<_> = on_pieces.iter().map(|piece| piece.of(reference, case, &columns)).collect();
            for (given, sums) in given.iter().zip(&mut sums) {
                let actual = given.actual.row_part(case.b, case.t, range.clone());
                for ((exact, bounds), sums) in expected.iter().zip(sums) {
                    given.add(reference, sums, first, exact, bounds, &actual);
                }
            }
        }
        let tallies = |(given, sums): (&Self, Vec<RowSums>)| sums.into_iter().map(|sums| given.tallies(sums)).collect();
        given.iter().zip(sums).map(tallies).collect()
    }

    /// Adds columns from `first` on: what is expected, by how much it may be off, what is given.
    fn add(
        &self,
        reference: &Reference,
        sums: &mut RowSums,
        first: usize,
        exact: &[f64],
        bounds: &Bounds,
        actual: &[f64],
    ) {
        let Self { case, stored, kappa, .. } = *self;
        let at = |v| Position::column(case.b, case.t, first + v);
        let allowed = stored.allowances(exact, bounds);
        if case.open() {
            for (v, (&x, &y)) in exact.iter().zip(actual).enumerate() {
                let unlimited = x.is_finite() && !(bounds.scale[v] + bounds.floor[v]).is_finite();
                let said_elsewhere = !x.is_finite() && self.says_so;
                if unlimited || said_elsewhere || !y.is_finite() {
                    sums.elements.report(at(v));
                    sums.error = f64::NAN;
                } else {
                    sums.elements.compare(at(v), x, y, kappa, allowed.at(v), stored.given);
                }
            }
        } else {
            sums.elements.compare_all(at, exact, actual, kappa, &allowed, stored.given);
        }
        let ids = case.ids(reference).filter_map(|id| id.checked_sub(first)).filter(|&y| y < exact.len());
        sums.add(exact, actual, &allowed, &ids.collect::<Vec<_>>());
    }

    fn tallies(&self, sums: RowSums) -> RowTallies {
        let mut row = RowTallies { elements: sums.elements, ..RowTallies::default() };
        if sums.error.is_finite() {
            let at = self.case.at();
            let of = |rounding, scale, floor| Allowance { rounding, unit: U, scale, floor };
            let l2 = of(sums.rounding2.sqrt(), sums.scale2.sqrt(), sums.floor2.sqrt());
            row.l2.compare(at, 0.0, sums.error2.sqrt(), self.kappa, l2, Dtype::F64);
            let sum = of(sums.rounding, sums.scale, sums.floor);
            row.sum.compare(at, 0.0, sums.error, self.kappa, sum, Dtype::F64);
        } else {
            (row.l2.not_compared, row.sum.not_compared) = (1, 1);
        }
        row
    }
}

/// What a row comes to so far: plain sums of everything, and squares of everything but the targets.
#[derive(Clone, Default)]
struct RowSums {
    elements: Tally,
    error: f64,
    rounding: f64,
    scale: f64,
    floor: f64,
    error2: f64,
    rounding2: f64,
    scale2: f64,
    floor2: f64,
}

impl RowSums {
    /// Adds columns, those of the token's ids among them at `targets`.
    fn add(&mut self, exact: &[f64], actual: &[f64], allowed: &Allowances, targets: &[usize]) {
        let allowances = allowed.rounding.iter().zip(&allowed.scale).zip(&allowed.floor);
        for (v, ((x, y), ((&rounding, &scale), &floor))) in exact.iter().zip(actual).zip(allowances).enumerate() {
            let error = y - x;
            self.error += error;
            self.rounding += rounding;
            self.scale += scale;
            self.floor += floor;
            let square = |x: f64| if targets.contains(&v) { 0.0 } else { x * x };
            self.error2 += square(error);
            self.rounding2 += square(rounding);
            self.scale2 += square(scale);
            self.floor2 += square(floor);
        }
    }
}

/// One token of each of those given, on the piece that its loss and its row of dlogits fit best, together.
fn judge_token(reference: &Reference, given: &[PerToken], case: &Case, limits: &Limits) -> Vec<OfToken> {
    let pieces = Piece::all(reference, case, limits);
    let rows = given.iter().map(|given| Some(GivenRow::of(case, given.dlogits.as_ref()?, reference, limits)));
    let rows = match rows.collect::<Option<Vec<_>>>() {
        Some(rows) => GivenRow::all_on(reference, case, &rows, &pieces),
        None => given.iter().map(|_| pieces.iter().map(|_| RowTallies::default()).collect()).collect(),
    };
    given.iter().zip(rows).map(|(given, rows)| best_piece(given, case, &pieces, rows, limits)).collect()
}

fn best_piece(given: &PerToken, case: &Case, pieces: &[Piece], rows: Vec<RowTallies>, limits: &Limits) -> OfToken {
    let on_pieces = pieces.iter().zip(rows).map(|(piece, row)| {
        let mut token_loss = Tally::default();
        if let Some(values) = given.token_loss {
            let (stored, kappa) = (Stored::scalar(values.dtype()), limits.kappa(Output::TokenLoss));
            let actual = values.at(case.b, case.t);
            compare(&mut token_loss, case, case.at(), piece.loss, actual, kappa, case.condition.token_loss, stored);
        }
        (token_loss.badness().max(row.badness()), piece.loss, token_loss, row)
    });
    let on_pieces: Vec<_> = on_pieces.collect();
    // Where the token fits none, its loss may be that of any.
    let any_fits = on_pieces.iter().any(|(badness, ..)| *badness <= 1.0);
    let fits = |badness: f64| badness <= 1.0 || !any_fits;
    let of_others = on_pieces.iter().filter(|piece| fits(piece.0)).map(|piece| (piece.1 - pieces[0].loss).abs());
    let kink = of_others.fold(0.0, f64::max);
    let best =
        on_pieces.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("the reference's own piece is always there");
    OfToken { token_loss: best.2, row: best.3, kink }
}

/// `|Δloss| ≤ ½ulp + κ·u·(Σ w·scale + Σ |∂loss/∂H|·C_H)`, plus what crossing a kink inside its band, or flushing, may change.
fn judge_loss(
    reference: &Reference,
    loss: &FloatArray<Ix0>,
    cases: &[Case],
    kinks: &[f64],
    limits: &Limits,
    tallies: &mut Tallies,
) {
    let mut bound = Bound { scale: 0.0, floor: FLUSHED };
    for (case, kink) in cases.iter().zip(kinks) {
        let weight = case.token.weight.max(case.token.kl_weight);
        let of_entropy = case.token.grad_entropy.abs();
        let Condition { token_loss, entropy, .. } = &case.condition;
        bound.scale += weight * token_loss.scale + of_entropy * entropy.scale;
        bound.floor += weight * (token_loss.floor + kink) + of_entropy * entropy.floor;
    }
    let (gate, stored, kappa) = plain(Output::Loss, Stored::scalar(loss.dtype()), limits);
    let actual = loss.value();
    let open = !actual.is_finite() && cases.iter().any(Case::open);
    shared(tallies, gate, stored, kappa, cases, (reference.loss(), actual, bound), open);
}

/// Compares what all tokens go into. Where it is NaN or ∞ and may not be, that is a matter of the edge that they are at.
fn shared(
    tallies: &mut Tallies,
    gate: Gate,
    stored: Stored,
    kappa: f64,
    cases: &[Case],
    (exact, actual, bound): (f64, f64, Bound),
    open: bool,
) {
    tallies.of(gate, stored, Some(kappa));
    let edge = if actual.is_finite() || open { None } else { shared_edge(cases) };
    let tally = tallies.of(gate.at(edge), stored, Some(kappa));
    if open {
        tally.report(Position::default());
    } else {
        tally.compare(Position::default(), exact, actual, kappa, stored.allowance(exact, bound), stored.given);
    }
}

pub(super) fn judge_metrics(reference: &Reference, actual: &Metrics, cases: &[Case], limits: &Limits) -> Vec<Verdict> {
    let expected = reference.metrics();
    let count = reference.count().max(1) as f64;
    let mean = |of: fn(&Condition) -> Bound| {
        let start = Bound { scale: 0.0, floor: FLUSHED };
        cases
            .iter()
            .map(|case| of(&case.condition))
            .fold(start, |sum, of| Bound { scale: sum.scale + of.scale / count, floor: sum.floor + of.floor / count })
    };
    let open = cases.iter().any(Case::open);
    let means = [
        (Output::EntropyMean, Some(expected.entropy_mean), Some(actual.entropy_mean), mean(|c| c.entropy)),
        (Output::KlMean, expected.kl_mean, actual.kl_mean, mean(|c| c.kl)),
        (Output::RatioMean, Some(expected.ratio_mean), Some(actual.ratio_mean), mean(|c| c.ratio)),
    ];
    let mut tallies = Tallies::new(limits.grade);
    let stored = Stored { given: Dtype::F64, promised: Dtype::F64 };
    for (output, expected, actual, bound) in means {
        let Some(expected) = expected else { continue };
        let actual = actual.unwrap_or(f64::NAN);
        let (gate, stored, kappa) = plain(output, stored, limits);
        // A ratio may overflow f32 on a token that the clip holds, and whose loss is finite; and so may their sum.
        let open = !actual.is_finite() && (open || expected * count > f64::from(f32::MAX) / 2.0);
        shared(&mut tallies, gate, stored, kappa, cases, (expected, actual, bound), open);
    }

    let ties = |tied: fn(&Case) -> bool| cases.iter().filter(|case| tied(case)).count() as f64 / count;
    let shares = [
        (Output::ClipLow, expected.clip_low, actual.clip_low, ties(|c| c.condition.tied.0)),
        (Output::ClipHigh, expected.clip_high, actual.clip_high, ties(|c| c.condition.tied.1)),
        (
            Output::ClipRegion,
            expected.clip_region,
            actual.clip_region,
            ties(|c| c.condition.tied.0 || c.condition.tied.1),
        ),
    ];
    for (output, expected, actual, tied) in shares {
        // A share is a quotient of two counts: one rounding in f32, and a token inside its tie band counts either way.
        let allowance = Allowance { rounding: half_ulp(expected, Dtype::F32), unit: U, scale: 1.0, floor: tied };
        let tally = tallies.of(Gate::of(output, Model::Count), Stored::scalar(Dtype::F32), None);
        tally.compare(Position::default(), expected, actual, 0.0, allowance, Dtype::F32);
    }
    tallies.verdicts()
}

impl Verdict {
    /// Where it failed, and what it is of depends on which of `open` tokens are kept: nothing is compared.
    fn leave_open(&mut self, open: usize) {
        let depends = !matches!(self.gate.output, Output::Logp | Output::Entropy | Output::EntropyMean)
            && self.gate.edge != Some(Edge::Masked);
        if depends && self.status == Status::Fail && self.tally.silent.is_none() {
            (self.status, self.tally, self.grade) = (Status::NotCompared, Tally::default(), None);
            self.tally.not_compared = 1;
            self.open_entropies = Some(open);
        }
    }

    /// The comparison that came closest to its limit, or went furthest beyond.
    pub fn worst(&self) -> Option<Comparison> {
        self.tally.worst
    }

    /// Whether the gate was passed, or had nothing to compare.
    pub fn passed(&self) -> bool {
        !self.status.failed()
    }

    /// The same where `edges` are waived: failed there it is [`Status::Waived`].
    #[must_use]
    pub fn waive(self, edges: &[Edge]) -> Self {
        let waived = self.status.failed() && self.gate.edge.is_some_and(|edge| edges.contains(&edge));
        Self { status: if waived { Status::Waived } else { self.status }, ..self }
    }

    /// Whether dlogits, or the gradient of a head, were held against a limit.
    pub fn compared_a_gradient(&self) -> bool {
        self.gate.output.is_gradient() && self.gate.edge != Some(Edge::Masked) && self.status != Status::NotCompared
    }
}
