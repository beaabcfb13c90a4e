//! [`TokenAnswers`]: the outputs of a kernel by token, and how far those of two calls are apart where they must be the same.

use ndarray::{Array2, Array3, ArrayView1, Axis, Ix2, Ix3, s};

use crate::gate::Output;
use crate::judge::{JudgeError, Verdict, judged_tokens};
use crate::judgeable::Judgeable;
use crate::metric::{Position, half_ulp, min_normal};
use crate::tolerance::{Grade, Limits};
use crate::trial::JudgedProblem;
use assay_core::problem::{Candidate, Dtype, FloatArray, Gradient};
use assay_schema::verdicts::Status;

/// The places `[b,t]` of one token in two problems.
pub type PlacesOfToken = [(usize, usize); 2];

/// The largest relative difference of two exact values that are the same.
const SAME: f64 = 1e-12;

/// The outputs of a kernel that have values for each token. Every value is held as f64, which all dtypes fit.
#[derive(Clone, Debug)]
pub struct TokenAnswers {
    outputs: Vec<AnsweredOutput>,
}

/// The values of one output, `[B,T,n]`, and their dtype.
#[derive(Clone, Debug)]
struct AnsweredOutput {
    output: Output,
    dtype: Dtype,
    values: Array3<f64>,
}

/// The tokens of two calls of which some output has other bits.
#[derive(Clone, Debug, Default)]
pub struct BitDifferences {
    /// The number of pairs of tokens that were compared.
    pub tokens: u64,
    /// The number of those pairs of which some output has other bits.
    pub other_bits: u64,
    /// The outputs that have other bits, in the order in which errors spread.
    pub outputs: Vec<Output>,
    /// The first value that has other bits, of the output that comes first.
    pub first: Option<ChangedValue>,
}

/// A value that has other bits in a second call.
#[derive(Clone, Copy, Debug)]
pub struct ChangedValue {
    /// The output that the value is of.
    pub output: Output,
    /// The place in the first problem.
    pub at: Position,
    /// The value in the first call.
    pub before: f64,
    /// The value in the second call.
    pub after: f64,
}

/// The difference of two calls that is largest by its limit.
#[derive(Clone, Copy, Debug)]
pub struct LargestDifference {
    /// The output that the difference is of.
    pub output: Output,
    /// The place in the first problem.
    pub at: Position,
    /// The difference / limit; infinite where one of the values is not finite.
    pub over_limit: f64,
}

/// The relation of an output's exact values in two problems.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExactChange {
    /// The values are the same.
    Same,
    /// All values are multiplied by this power of two, which changes no bits of a number but its exponent.
    PowerOfTwo(f64),
    /// The values change by design.
    Other,
}

impl TokenAnswers {
    /// Reads what a kernel returned.
    pub fn new<G: Gradient>(candidate: &Candidate<G>) -> Self {
        let column = |array: &FloatArray<Ix2>| array.to_f64().insert_axis(Axis(2));
        let mut outputs = Vec::new();
        let mut add = |output, dtype, values: Array3<f64>| outputs.push(AnsweredOutput { output, dtype, values });
        if let Some(logp) = &candidate.logp {
            let values = match &candidate.logp_of_others {
                Some(others) => logp.with_others(others).to_f64(),
                None => column(logp),
            };
            add(Output::Logp, logp.dtype(), values);
        }
        for (output, array) in [(Output::Entropy, &candidate.entropy), (Output::TokenLoss, &candidate.token_loss)] {
            if let Some(array) = array {
                add(output, array.dtype(), column(array));
            }
        }
        // Only the first gradient has values for each token; that of a head is a sum over them.
        let lent = candidate.gradient.lend();
        if let Some(gradient) = G::arrays(&lent).into_iter().next() {
            let output = if G::ARRAYS.len() == 1 { Output::Dlogits } else { Output::Dhidden };
            let dtype = gradient.dtype();
            let values = gradient.to_f64().into_dimensionality::<Ix3>().expect("the first gradient is [B,T,…]");
            add(output, dtype, values);
        }
        Self { outputs }
    }

    fn output(&self, output: Output) -> Option<&AnsweredOutput> {
        self.outputs.iter().find(|answered| answered.output == output)
    }

    /// Pairs the outputs that both calls have.
    fn pairs<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a AnsweredOutput, &'a AnsweredOutput)> {
        self.outputs.iter().filter_map(|before| Some((before, other.output(before.output)?)))
    }

    /// Compares the bits of two calls at `places`; NaN equals NaN. `changes` says how exact values change; outputs that change by design,
    /// or that it does not list, are left out. Vocabulary entries that only the second problem has must have a gradient of 0.
    pub fn bit_differences(
        &self,
        other: &Self,
        places: &[PlacesOfToken],
        changes: &[(Output, ExactChange)],
    ) -> BitDifferences {
        let mut differ = vec![false; places.len()];
        let mut found = BitDifferences { tokens: places.len() as u64, ..BitDifferences::default() };
        for (before, after) in self.pairs(other) {
            let change = changes.iter().find(|(output, _)| *output == before.output).map(|(_, change)| *change);
            let factor = match change {
                Some(ExactChange::Same) => 1.0,
                Some(ExactChange::PowerOfTwo(factor)) => factor,
                Some(ExactChange::Other) | None => continue,
            };
            for (differs, [at, at_other]) in differ.iter_mut().zip(places) {
                let (row, row_of_other) = (before.row(*at), after.row(*at_other));
                let Some((place, values)) = changed(row, row_of_other, factor, before.dtype) else { continue };
                *differs = true;
                if !found.outputs.contains(&before.output) {
                    found.outputs.push(before.output);
                }
                let at = position(before.output, *at, place, row.len());
                let [before, after] = [(before.output, values[0]), (before.output, values[1])];
                found.first.get_or_insert(ChangedValue { output: before.0, at, before: before.1, after: after.1 });
            }
        }
        found.other_bits = differ.iter().filter(|differs| **differs).count() as u64;
        found
    }

    /// Returns how each output's exact values change from one problem to the other; `self` and `other` are those of the reference.
    pub fn exact_changes(&self, other: &Self, places: &[PlacesOfToken]) -> Vec<(Output, ExactChange)> {
        let change = |(before, after): (&AnsweredOutput, &AnsweredOutput)| {
            let mut factor: Option<f64> = None;
            for [at, at_other] in places {
                for (x, y) in before.row(*at).iter().zip(after.row(*at_other)) {
                    let equal = x == y || (x.is_nan() && y.is_nan());
                    if *x == 0.0 || !x.is_finite() || !y.is_finite() {
                        if !equal {
                            return ExactChange::Other;
                        }
                        continue;
                    }
                    let here = y / x;
                    let common = *factor.get_or_insert(here);
                    if (here - common).abs() > SAME * common.abs() {
                        return ExactChange::Other;
                    }
                }
            }
            let power = factor.map_or(1.0, |factor| factor.abs().log2().round().exp2());
            match factor {
                Some(factor) if (factor - power).abs() > SAME * power => ExactChange::Other,
                Some(_) if power != 1.0 => ExactChange::PowerOfTwo(power),
                _ => ExactChange::Same,
            }
        };
        self.pairs(other).map(|pair| (pair.0.output, change(pair))).collect()
    }

    /// Assumes that no output's exact values change.
    pub fn unchanged(&self) -> Vec<(Output, ExactChange)> {
        self.outputs.iter().map(|answered| (answered.output, ExactChange::Same)).collect()
    }

    /// Returns the difference between two calls that is largest by its limit; `None` if nothing has a limit, as a gradient behind a
    /// product with an LM head.
    ///
    /// Half the difference, less what rounding to the output's dtype may make of it, is added to the exact values and judged by
    /// [`Limits::for_differences`]. Tokens that rounding may put on another branch of the loss are compared up to their entropies.
    ///
    /// # Errors
    /// [`JudgeError`] if an output has the wrong shape.
    pub fn difference_over_limit<P: Judgeable>(
        &self,
        other: &Self,
        (places, changes): (&[PlacesOfToken], &[(Output, ExactChange)]),
        known: &JudgedProblem<P>,
        grade: Grade,
    ) -> Result<Option<LargestDifference>, JudgeError> {
        let limits = Limits::for_differences(grade);
        let reference = P::on_logits(&known.reference);
        let has_head = P::Gradient::ARRAYS.len() > 1;
        let exact = P::outcome(&known.reference);
        let of_exact = Self::new(&exact);
        // A token near a kink of the loss may be on either branch in either call.
        let mut is_tied = Array2::from_elem(known.problem.batch().mask.dim(), false);
        if !has_head {
            for token in judged_tokens(reference, &limits, &[]) {
                is_tied[[token.b, token.t]] = token.condition.alternatives.len() > 1;
            }
        }
        let halves = |output: Output| -> Option<Array3<f64>> {
            let mut values = of_exact.output(output)?.values.clone();
            let (Some(before), Some(after)) = (self.output(output), other.output(output)) else { return Some(values) };
            let factor = match changes.iter().find(|(of, _)| *of == output)?.1 {
                ExactChange::Same => 1.0,
                ExactChange::PowerOfTwo(factor) => factor,
                ExactChange::Other => return Some(values),
            };
            let of_branch = matches!(output, Output::TokenLoss | Output::Dlogits);
            for [at, at_other] in places.iter().filter(|[at, _]| !(of_branch && is_tied[*at])) {
                let exact = of_exact.output(output)?.row(*at);
                let mut row = values.slice_mut(s![at.0, at.1, ..]);
                for (v, (x, y)) in before.row(*at).iter().zip(after.row(*at_other)).enumerate() {
                    let half = half_difference(*x, y / factor, before.dtype);
                    // Two copies of a token are one token: the one that is farther away counts.
                    if half.is_nan() || half.abs() > (row[v] - exact[v]).abs() {
                        row[v] = exact[v] + half;
                    }
                }
            }
            Some(values)
        };
        let column = |values: Array3<f64>| values.index_axis_move(Axis(2), 0);
        let rounded = |values: &Array2<f64>| FloatArray::rounded_from(values, Dtype::F64);
        let (logp, logp_of_others) = match halves(Output::Logp) {
            Some(values) => FloatArray::rounded_from(&values, Dtype::F64).first_and_others(),
            None => return Ok(None),
        };
        let forward = Candidate {
            loss: exact.loss.clone(),
            logp: Some(logp),
            logp_of_others,
            entropy: halves(Output::Entropy).map(|values| rounded(&column(values))),
            token_loss: halves(Output::TokenLoss).filter(|_| !has_head).map(|values| rounded(&column(values))),
            gradient: (),
            metrics: None,
        };
        let verdicts = match halves(Output::Dlogits) {
            Some(values) if !has_head => {
                let gradient = FloatArray::rounded_from(&values, Dtype::F64).into_dyn();
                let candidate = forward.with_gradient(P::Gradient::from_arrays(vec![gradient], None));
                known.verdicts(&candidate.lend(), &limits)?
            }
            _ => known.verdicts_of_forward(&forward, &limits)?,
        };
        let largest = |verdict: &Verdict| {
            let over_limit = match verdict.status {
                Status::Nonfinite => f64::INFINITY,
                _ => verdict.worst()?.error_over_limit(),
            };
            let at = verdict.worst().map(|worst| worst.at).unwrap_or_default();
            Some(LargestDifference { output: verdict.gate.output, at, over_limit })
        };
        Ok(verdicts.iter().filter_map(largest).max_by(|a, b| a.over_limit.total_cmp(&b.over_limit)))
    }
}

impl AnsweredOutput {
    fn row(&self, (b, t): (usize, usize)) -> ArrayView1<'_, f64> {
        self.values.slice(s![b, t, ..])
    }
}

/// Returns the first place at which two rows have other bits, with both values; entries that only the second row has must be 0.
fn changed(before: ArrayView1<f64>, after: ArrayView1<f64>, factor: f64, dtype: Dtype) -> Option<(usize, [f64; 2])> {
    let is_same = |x: f64, y: f64| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
    // A number below the normal range has fewer bits, and other ones once it is multiplied.
    let has_no_bits = |x: f64, y: f64| factor != 1.0 && (x.abs().min(y.abs()) < min_normal(dtype) * factor.max(1.0));
    let pairs = before.iter().zip(&after).map(|(x, y)| (*x, *y / factor));
    let common = pairs.enumerate().find(|(_, (x, y))| !is_same(*x, *y) && !has_no_bits(*x, *y));
    let added = || after.iter().enumerate().skip(before.len()).find(|(_, y)| **y != 0.0);
    common.map(|(place, (x, y))| (place, [x, y])).or_else(|| added().map(|(place, y)| (place, [0.0, *y])))
}

/// Returns half of `after − before`, less what rounding both to `dtype` may make of it.
fn half_difference(before: f64, after: f64, dtype: Dtype) -> f64 {
    if before == after || (before.is_nan() && after.is_nan()) {
        return 0.0;
    }
    let difference = after - before;
    if !difference.is_finite() {
        return f64::NAN;
    }
    let ulp = 2.0 * half_ulp(before.abs().max(after.abs()), dtype);
    ((difference.abs() - ulp).max(0.0) / 2.0).copysign(difference)
}

/// Returns the place of a value, the `i`th of `count` of a token.
fn position(output: Output, (b, t): (usize, usize), i: usize, count: usize) -> Position {
    match output {
        Output::Dlogits => Position::column(b, t, i),
        Output::Dhidden => Position { h: Some(i), ..Position::token(b, t) },
        _ if count > 1 => Position { k: Some(i), ..Position::token(b, t) },
        _ => Position::token(b, t),
    }
}
