//! [`judge`]: a candidate's outputs against the reference, one [`Verdict`] a gate.

use ndarray::{Ix0, Ix2};
use rayon::prelude::*;

use super::U;
use super::condition::{Bands, Condition, FLUSHED, LogitErrors};
use super::metric::{Allowance, Comparison, Position, Tally, half_ulp, min_normal};
use super::tolerance::{Gate, Model, Output, ToleranceError, Tolerances};
use assay_core::problem::{Candidate, Dtype, FloatArray, Metrics, Shape};
use assay_reference::{Reference, Token};
pub use assay_schema::verdicts::Status;

/// What one gate found.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// What was judged and how.
    pub gate: Gate,
    /// Dtype of the output.
    pub dtype: Dtype,
    /// The decision.
    pub status: Status,
    /// `κ` of the limit; `None` where no tolerance applies.
    pub kappa: Option<f64>,
    /// The comparisons behind it.
    pub tally: Tally,
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
    /// An output has a dtype without a tolerance.
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
    /// Where logits are rounded: the condition were none of them near a tie, and what a unit of the difference comes to.
    pub(super) untied: Option<(Condition, f64)>,
}

impl Case<'_> {
    /// One of the token's scales, and what ties of rounded logits add to its limit, whatever `κ`.
    pub(super) fn scale(&self, of: impl Fn(&Condition) -> f64) -> (f64, f64) {
        let scale = of(&self.condition);
        match &self.untied {
            None => (scale, 0.0),
            Some((untied, unit)) => (of(untied), unit * (scale - of(untied)).max(0.0)),
        }
    }

    pub(super) fn at(&self) -> Position {
        Position::token(self.b, self.t)
    }
}

/// Judges `candidate` against `reference`, by the limits of `class`. Outputs that the candidate lacks get no verdict.
///
/// Masked tokens must have dlogits of exactly 0; their other outputs are not looked at. A token whose reference is not
/// finite must be reported as such; a token that overflows f32 may be.
///
/// # Errors
/// [`JudgeError`] where an output has the wrong shape, or a dtype that `tolerances` has no limit for.
pub fn judge(
    reference: &Reference,
    candidate: &Candidate,
    class: &str,
    tolerances: &Tolerances,
) -> Result<Vec<Verdict>, JudgeError> {
    check_shapes(reference.shape(), candidate)?;
    let limits = Limits { tolerances, class };
    let cases = cases(reference, limits.bands()?, &|_, _| Vec::new(), None);
    let per_token = PerToken {
        loss: &candidate.loss,
        logp: candidate.logp.as_ref(),
        entropy: candidate.entropy.as_ref(),
        token_loss: candidate.token_loss.as_ref(),
    };
    let mut verdicts = judge_per_token(reference, &per_token, &cases, &limits)?;
    verdicts.extend(judge_dlogits(reference, &candidate.gradient, &cases, &limits)?);
    if let Some(metrics) = &candidate.metrics {
        verdicts.extend(judge_metrics(reference, metrics, &cases, &limits)?);
    }
    Ok(verdicts)
}

/// The unmasked tokens of a reference, in order, whose logits have `errors` of their own. Where those are of ties, a unit of
/// which comes to `tie`, no `κ` multiplies what follows from them.
pub(super) fn cases<'r>(
    reference: &'r Reference,
    bands: Bands,
    errors: LogitErrors,
    tie: Option<f64>,
) -> Vec<Case<'r>> {
    let mut conditions = Condition::all(reference, bands, errors);
    let (batch, tokens) = conditions.dim();
    let mut untied = tie.map(|_| Condition::all(reference, bands, &|_, _| Vec::new()));
    let case = |(b, t): (usize, usize)| {
        let (token, condition) = (reference.token(b, t)?, conditions[[b, t]].take()?);
        let untied = untied.as_mut().and_then(|untied| untied[[b, t]].take()).zip(tie);
        Some(Case { b, t, token, condition, finite: reference.finite(token), untied })
    };
    ndarray::indices((batch, tokens)).into_iter().filter_map(case).collect()
}

/// What is judged whatever the logits are made of.
pub(super) struct PerToken<'c> {
    pub(super) loss: &'c FloatArray<Ix0>,
    pub(super) logp: Option<&'c FloatArray<Ix2>>,
    pub(super) entropy: Option<&'c FloatArray<Ix2>>,
    pub(super) token_loss: Option<&'c FloatArray<Ix2>>,
}

pub(super) fn judge_per_token(
    reference: &Reference,
    given: &PerToken,
    cases: &[Case],
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    let mut verdicts = vec![judge_loss(reference, given.loss, cases, limits)?];
    let per_token: [(Output, Option<&FloatArray<Ix2>>, Judged); 3] = [
        (Output::Logp, given.logp, |_, case| {
            let (scale, floor) = case.scale(|condition| condition.logp);
            vec![(case.token.inputs.logp, scale, floor)]
        }),
        (Output::Entropy, given.entropy, |_, case| {
            let (scale, floor) = case.scale(|condition| condition.entropy);
            vec![(case.token.entropy, scale, floor)]
        }),
        (Output::TokenLoss, given.token_loss, token_losses),
    ];
    for (output, values, expected) in per_token {
        if let Some(values) = values {
            verdicts.push(judge_tokens(reference, output, values, expected, cases, limits)?);
        }
    }
    Ok(verdicts)
}

/// The values that are right for a token, each with its scale and floor: one for every branch it may be on.
type Judged = fn(&Reference, &Case) -> Vec<(f64, f64, f64)>;

pub(super) struct Limits<'t> {
    pub(super) tolerances: &'t Tolerances,
    pub(super) class: &'t str,
}

impl Limits<'_> {
    pub(super) fn bands(&self) -> Result<Bands, ToleranceError> {
        Ok(Bands {
            logp: self.kappa(Output::Logp, Model::Elementwise, Dtype::F32)?,
            entropy: self.kappa(Output::Entropy, Model::Elementwise, Dtype::F32)?,
        })
    }

    pub(super) fn kappa(&self, output: Output, model: Model, dtype: Dtype) -> Result<f64, ToleranceError> {
        self.tolerances.kappa(Gate { output, model }, dtype, self.class)
    }
}

fn check_shapes(shape: Shape, candidate: &Candidate) -> Result<(), JudgeError> {
    let Shape { batch, tokens, vocab } = shape;
    let dlogits = Some(("dlogits", candidate.gradient.shape(), vec![batch, tokens, vocab]));
    let per_token = [("logp", &candidate.logp), ("entropy", &candidate.entropy), ("token_loss", &candidate.token_loss)];
    let per_token = per_token.iter().filter_map(|(name, a)| Some((*name, a.as_ref()?.shape(), vec![batch, tokens])));
    for (output, given, expected) in dlogits.into_iter().chain(per_token) {
        if given != expected {
            return Err(JudgeError::Shape { output, given: given.to_vec(), expected });
        }
    }
    Ok(())
}

pub(super) fn verdict(output: Output, model: Model, dtype: Dtype, kappa: Option<f64>, tally: Tally) -> Verdict {
    let status = match () {
        () if tally.nonfinite.is_some() => Status::Nonfinite,
        () if !tally.passes() => Status::Fail,
        () => Status::Pass,
    };
    Verdict { gate: Gate { output, model }, dtype, status, kappa, tally }
}

/// `½ulp` of the output, and `u·scale` with the scale no smaller than the output's smallest normal number.
pub(super) fn allowance(expected: f64, scale: f64, floor: f64, dtype: Dtype) -> Allowance {
    Allowance { rounding: half_ulp(expected, dtype), unit: U, scale: scale.max(min_normal(dtype)), floor }
}

fn token_losses(reference: &Reference, case: &Case) -> Vec<(f64, f64, f64)> {
    let value = |branch| reference.token_loss(&case.token.inputs, branch);
    let (scale, of_ties) = case.scale(|condition| condition.token_loss);
    let floor = case.condition.token_loss_floor + of_ties;
    case.condition.alternatives.iter().map(|on| (value(&on.branch), scale, floor)).collect()
}

fn judge_tokens(
    reference: &Reference,
    output: Output,
    values: &FloatArray<Ix2>,
    expected: Judged,
    cases: &[Case],
    limits: &Limits,
) -> Result<Verdict, JudgeError> {
    let dtype = values.dtype();
    let kappa = limits.kappa(output, Model::Elementwise, dtype)?;
    let mut tally = Tally::default();
    for case in cases {
        let actual = values.at(case.b, case.t);
        let candidates = expected(reference, case).into_iter().map(|(expected, scale, floor)| {
            let mut tally = Tally::default();
            if case.condition.overflows && !actual.is_finite() {
                tally.report(case.at());
            } else {
                tally.compare(case.at(), expected, actual, kappa, allowance(expected, scale, floor, dtype), dtype);
            }
            tally
        });
        tally.absorb(best(candidates));
    }
    Ok(verdict(output, Model::Elementwise, dtype, Some(kappa), tally))
}

/// The branch that fits best. Inside a tie band any of them is right.
fn best(tallies: impl Iterator<Item = Tally>) -> Tally {
    tallies.min_by(|a, b| a.badness().total_cmp(&b.badness())).expect("the reference's own branch is always there")
}

/// `|Δloss| ≤ ½ulp + κ·u·(Σ w·scale + |coef|·mean C_H)`, plus what crossing a kink inside its band, or flushing, may change.
fn judge_loss(
    reference: &Reference,
    loss: &FloatArray<Ix0>,
    cases: &[Case],
    limits: &Limits,
) -> Result<Verdict, JudgeError> {
    let dtype = loss.dtype();
    let kappa = limits.kappa(Output::Loss, Model::Elementwise, dtype)?;
    let coef = reference.spec().entropy_coef.abs();
    let mut scale = 0.0;
    let mut floor = FLUSHED;
    for case in cases {
        let weight = case.token.weight.max(case.token.kl_weight);
        let (token_loss, of_ties) = case.scale(|condition| condition.token_loss);
        let (entropy, of_entropy_ties) = case.scale(|condition| condition.entropy);
        scale += weight * token_loss + coef * case.token.entropy_weight * entropy;
        floor += weight * of_ties + coef * case.token.entropy_weight * of_entropy_ties;
        let losses = token_losses(reference, case);
        let kink = losses.iter().map(|(loss, ..)| (loss - losses[0].0).abs()).fold(0.0, f64::max);
        floor += weight * (kink + case.condition.token_loss_floor);
    }
    let (expected, actual) = (reference.loss(), loss.value());
    let mut tally = Tally::default();
    if !actual.is_finite() && cases.iter().any(|case| case.condition.overflows || !case.finite) {
        tally.report(Position::default());
    } else {
        tally.compare(Position::default(), expected, actual, kappa, allowance(expected, scale, floor, dtype), dtype);
    }
    Ok(verdict(Output::Loss, Model::Elementwise, dtype, Some(kappa), tally))
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

struct RowKappas {
    elements: f64,
    l2: f64,
    sum: f64,
}

fn judge_dlogits(
    reference: &Reference,
    dlogits: &FloatArray<ndarray::Ix3>,
    cases: &[Case],
    limits: &Limits,
) -> Result<[Verdict; 3], JudgeError> {
    let dtype = dlogits.dtype();
    let kappas = RowKappas {
        elements: limits.kappa(Output::Dlogits, Model::Elementwise, dtype)?,
        l2: limits.kappa(Output::Dlogits, Model::RowL2, dtype)?,
        sum: limits.kappa(Output::Dlogits, Model::RowSum, dtype)?,
    };
    let Shape { batch, tokens, .. } = reference.shape();
    let case_of = |b, t| cases.binary_search_by_key(&(b, t), |case| (case.b, case.t)).ok().map(|i| &cases[i]);
    let rows: Vec<RowTallies> = (0..batch * tokens)
        .into_par_iter()
        .map(|i| {
            let (b, t) = (i / tokens, i % tokens);
            let actual = dlogits.row(b, t);
            match case_of(b, t) {
                Some(case) => judge_row(reference, case, &actual, &kappas, dtype),
                None => masked_row(b, t, &actual),
            }
        })
        .collect();
    let mut all = RowTallies::default();
    for row in rows {
        all.elements.absorb(row.elements);
        all.l2.absorb(row.l2);
        all.sum.absorb(row.sum);
    }
    let verdict = |model, kappa, tally| verdict(Output::Dlogits, model, dtype, Some(kappa), tally);
    Ok([
        verdict(Model::Elementwise, kappas.elements, all.elements),
        verdict(Model::RowL2, kappas.l2, all.l2),
        verdict(Model::RowSum, kappas.sum, all.sum),
    ])
}

/// A masked row is exactly 0.
fn masked_row(b: usize, t: usize, actual: &[f64]) -> RowTallies {
    let mut row = RowTallies::default();
    if let Some((v, &x)) = actual.iter().enumerate().find(|(_, x)| **x != 0.0) {
        row.elements.compare(Position::column(b, t, v), 0.0, x, 0.0, Allowance::default(), Dtype::F64);
    }
    row
}

fn judge_row(reference: &Reference, case: &Case, actual: &[f64], kappas: &RowKappas, dtype: Dtype) -> RowTallies {
    let any_nonfinite = actual.iter().any(|x| !x.is_finite());
    if any_nonfinite && (case.condition.overflows || !case.finite) {
        let mut row = RowTallies::default();
        row.elements.report(case.at());
        return row;
    }
    let scaled = reference.scaled_row(case.b, case.t, case.token);
    let rows = case.condition.alternatives.iter().map(|on| {
        let grad_logp = reference.grad_logp(case.token, &on.branch, on.coupling);
        let expected = reference.dlogits_row_with(case.b, case.t, grad_logp);
        let scales = case.condition.dlogits(reference, case.token, &scaled, on);
        judge_row_on(case, &expected, &scales, actual, kappas, dtype)
    });
    rows.min_by(|a, b| a.badness().total_cmp(&b.badness())).expect("the reference's own branch is always there")
}

fn judge_row_on(
    case: &Case,
    expected: &[f64],
    scales: &[(f64, f64)],
    actual: &[f64],
    kappas: &RowKappas,
    dtype: Dtype,
) -> RowTallies {
    let mut row = RowTallies::default();
    // Squares of everything but the target, and plain sums of everything.
    let (mut error2, mut rounding2, mut scale2, mut floor2) = (0.0, 0.0, 0.0, 0.0);
    let (mut sum, mut rounding, mut scale, mut floor) = (0.0, 0.0, 0.0, 0.0);
    for (v, ((&x, &(s, f)), &y)) in expected.iter().zip(scales).zip(actual).enumerate() {
        let allowed = allowance(x, s, f, dtype);
        row.elements.compare(Position::column(case.b, case.t, v), x, y, kappas.elements, allowed, dtype);
        if v != case.token.id {
            error2 += (y - x) * (y - x);
            rounding2 += allowed.rounding * allowed.rounding;
            scale2 += allowed.scale * allowed.scale;
            floor2 += f * f;
        }
        sum += y - x;
        rounding += allowed.rounding;
        scale += allowed.scale;
        floor += f;
    }
    if row.elements.nonfinite.is_none() && row.elements.silent.is_none() && sum.is_finite() {
        let sums = |rounding, scale, floor| Allowance { rounding, unit: U, scale, floor };
        let l2 = sums(f64::sqrt(rounding2), f64::sqrt(scale2), f64::sqrt(floor2));
        row.l2.compare(case.at(), 0.0, f64::sqrt(error2), kappas.l2, l2, Dtype::F64);
        row.sum.compare(case.at(), 0.0, sum, kappas.sum, sums(rounding, scale, floor), Dtype::F64);
    }
    row
}

pub(super) fn judge_metrics(
    reference: &Reference,
    actual: &Metrics,
    cases: &[Case],
    limits: &Limits,
) -> Result<Vec<Verdict>, JudgeError> {
    let expected = reference.metrics();
    let count = reference.count().max(1) as f64;
    let mean = |of: fn(&Condition) -> f64| {
        let scales = cases.iter().map(|case| case.scale(of));
        scales.fold([0.0, FLUSHED], |[scale, floor], (s, f)| [scale + s / count, floor + f / count])
    };
    let kl = mean(|c| c.kl);
    let flushed_of_kl: f64 = cases.iter().map(|case| case.condition.kl_floor / count).sum();
    let open = cases.iter().any(|case| case.condition.overflows || !case.finite);
    let means = [
        (Output::EntropyMean, Some(expected.entropy_mean), Some(actual.entropy_mean), mean(|c| c.entropy)),
        (Output::KlMean, expected.kl_mean, actual.kl_mean, [kl[0], kl[1] + flushed_of_kl]),
        (Output::RatioMean, Some(expected.ratio_mean), Some(actual.ratio_mean), mean(|c| c.ratio)),
    ];
    let mut verdicts = Vec::new();
    for (output, expected, actual, [scale, floor]) in means {
        let Some(expected) = expected else { continue };
        let kappa = limits.kappa(output, Model::Elementwise, Dtype::F64)?;
        let actual = actual.unwrap_or(f64::NAN);
        let mut tally = Tally::default();
        // A ratio may overflow f32 on a token that the clip holds, and whose loss is finite; and so may their sum.
        if !actual.is_finite() && (open || expected * count > f64::from(f32::MAX) / 2.0) {
            tally.report(Position::default());
        } else {
            let allowance = allowance(expected, scale, floor, Dtype::F64);
            tally.compare(Position::default(), expected, actual, kappa, allowance, Dtype::F64);
        }
        verdicts.push(verdict(output, Model::Elementwise, Dtype::F64, Some(kappa), tally));
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
        let mut tally = Tally::default();
        tally.compare(Position::default(), expected, actual, 0.0, allowance, Dtype::F32);
        verdicts.push(verdict(output, Model::Count, Dtype::F32, None, tally));
    }
    Ok(verdicts)
}

impl Verdict {
    /// The comparison that came closest to its limit, or went furthest beyond.
    pub fn worst(&self) -> Option<Comparison> {
        self.tally.worst
    }

    /// Whether the gate was passed.
    pub fn passed(&self) -> bool {
        self.status == Status::Pass
    }
}
