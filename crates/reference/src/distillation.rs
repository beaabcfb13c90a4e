//! The divergence of a student's distribution from a teacher's, and its gradient by the student's logits.
//!
//! Over bins `b`, which are the vocabulary entries unless the teacher has only `K` of them, with `P_b` the student's probabilities,
//! `Q_b` the teacher's, `M = βQ + (1−β)P`, and `δ_b = ln P_b − ln Q_b`:
//!
//! ```text
//! forward_kl       Σ Q (ln Q − ln P)                              ∂/∂z_j = p_j − q_j
//! reverse_kl       Σ P (ln P − ln Q)                              ∂/∂z_j = p_j (G_b − Σ P·G)    G = δ
//! jensen_shannon   β Σ Q (ln Q − ln M) + (1−β) Σ P (ln P − ln M)  ∂/∂z_j = p_j (G_b − Σ P·G)    G = (1−β)(ln P − ln M)
//! ```
//!
//! where `b` is the bin of entry `j`, and `z = logits / T`. Where student ≈ teacher these sums cancel: their terms are as large as `δ`
//! and the sum as `δ²`. As all probabilities sum up to 1, `Σ A (ln A − ln B) = Σ [B − A − A·(ln B − ln A)]`, of which no term is
//! negative:
//!
//! ```text
//! B − A − A·x = A·(e^x − 1 − x)     x = ln B − ln A
//! ```
//!
//! The sum is flat in an error that all `x` share, as `Σ A (e^x − 1) = 0`. What remains is each `x` itself: the logits are subtracted
//! before anything else is done to them.

use std::collections::HashMap;
use std::ops::Range;

use super::exponential::exponential;
use super::log_softmax::Softmax;
use super::sum::Sum;
use assay_core::problem::{Problem, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, TopKRest};
use ndarray::s;

/// The part of two distributions that a divergence compares at once: a vocabulary entry, or the entries that a teacher does not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DivergenceBin {
    /// The probability `P` that the student has here.
    pub student: f64,
    /// The probability `Q` that the teacher has here.
    pub teacher: f64,
    /// The student's log-probability `ln P`, nats.
    pub student_logp: f64,
    /// The teacher's log-probability `ln Q`, nats.
    pub teacher_logp: f64,
    /// The difference `δ = ln P − ln Q`; 0 if neither has a probability here.
    pub log_ratio: f64,
}

/// The divergence of one token's distribution from its teacher's.
#[derive(Clone, Debug)]
pub struct TokenDivergence {
    /// The divergence, nats, times [`factor`](Self::factor).
    pub value: f64,
    /// The factor of the divergence: `T²` or 1.
    pub factor: f64,
    /// The weight `β` of the teacher in the mixture: 0 is the forward KL, 1 the reverse one.
    pub teacher_weight: f64,
    /// The temperature `T` that the student's logits are divided by.
    pub temperature: f64,
    /// The softmax of the student over the entries that are compared: all, or those of the teacher if both are renormalised.
    pub student: Softmax,
    /// The softmax of the teacher over its entries.
    pub teacher: Softmax,
    /// The mean slope `Σ P·G` over the bins.
    mean_slope: f64,
    /// The difference that all entries' logits have in common, and then that of their exponents.
    constant: [f64; 2],
    /// The bins of a teacher's `K` entries; `None` if its logits are given.
    top: Option<TopBins>,
}

/// The bins of a teacher that has `K` entries.
#[derive(Clone, Debug)]
struct TopBins {
    rest: TopKRest,
    /// The bins of the entries in the teacher's order, and the tail last, if there is one.
    bins: Vec<DivergenceBin>,
    /// The bin of each of the teacher's entries.
    places: HashMap<usize, usize>,
    /// The softmax of the student over the entries of the tail; `None` if there is no tail, or the student has nothing in it.
    within_tail: Option<Softmax>,
}

/// Returns `e^x − 1 − x ≥ 0`, to a few roundings.
fn excess(x: f64) -> f64 {
    if x.abs() >= 0.5 {
        return x.exp_m1() - x;
    }
    // x²/2·(1 + x/3·(1 + x/4·(…))): the terms left out are less than 1e-18 of the first.
    x * x / 2.0 * (3..=18).rev().fold(1.0, |sum, n| 1.0 + x / f64::from(n) * sum)
}

/// Returns `B − A − A·x ≥ 0` for `x = ln B − ln A`: `A`'s term of `KL(A‖B)`.
fn kl_term(a: f64, b: f64, x: f64) -> f64 {
    match () {
        () if a == 0.0 => b,
        () if x.abs() <= 1.0 => a * excess(x),
        () => (b - a) - a * x,
    }
}

/// Returns `factor · x`, and 0 if the factor is 0, whatever `x` is.
fn times(factor: f64, x: f64) -> f64 {
    if factor == 0.0 { 0.0 } else { factor * x }
}

impl DivergenceBin {
    /// Returns `ln M − ln Q` and `ln M − ln P` for the mixture `M = βQ + (1−β)P`.
    pub fn mixture_log_ratios(&self, beta: f64) -> [f64; 2] {
        let delta = self.log_ratio;
        // M/Q = 1 + (1−β)(e^δ − 1) and M/P = 1 + β(e^−δ − 1); the larger exponential is left out, as it may overflow.
        if delta <= 1.0 {
            let of_teacher = ((1.0 - beta) * delta.exp_m1()).ln_1p();
            let of_student = if delta >= -1.0 { (beta * (-delta).exp_m1()).ln_1p() } else { of_teacher - delta };
            [of_teacher, of_student]
        } else {
            let of_student = (beta * (-delta).exp_m1()).ln_1p();
            [of_student + delta, of_student]
        }
    }

    /// Returns the probability `M = βQ + (1−β)P` of the mixture.
    pub fn mixture(&self, beta: f64) -> f64 {
        beta * self.teacher + (1.0 - beta) * self.student
    }

    /// Returns the bin's term of the divergence, in the form that is never negative.
    fn term(&self, beta: f64) -> f64 {
        let &Self { student: p, teacher: q, log_ratio: delta, .. } = self;
        if p == 0.0 && q == 0.0 {
            return 0.0;
        }
        match beta {
            0.0 => kl_term(q, p, delta),
            1.0 => kl_term(p, q, -delta),
            _ => {
                let (m, [of_teacher, of_student]) = (self.mixture(beta), self.mixture_log_ratios(beta));
                beta * kl_term(q, m, of_teacher) + (1.0 - beta) * kl_term(p, m, of_student)
            }
        }
    }

    /// Returns the bin's term as the formula has it, for probabilities that do not sum up to 1.
    fn plain_term(&self, beta: f64) -> f64 {
        let &Self { student: p, teacher: q, log_ratio: delta, .. } = self;
        match beta {
            0.0 => times(q, -delta),
            1.0 => times(p, delta),
            _ => {
                let [of_teacher, of_student] = self.mixture_log_ratios(beta);
                times(beta * q, -of_teacher) + times((1.0 - beta) * p, -of_student)
            }
        }
    }

    /// Returns the slope `G` of the divergence by `P`, up to a constant that all bins share; not of the forward KL.
    pub fn slope(&self, beta: f64) -> f64 {
        if beta == 1.0 { self.log_ratio } else { -(1.0 - beta) * self.mixture_log_ratios(beta)[1] }
    }

    /// Returns `P − Q`, without cancellation where both are near.
    fn difference(&self) -> f64 {
        if self.log_ratio.abs() <= 1.0 { self.teacher * self.log_ratio.exp_m1() } else { self.student - self.teacher }
    }
}

impl TokenDivergence {
    /// Evaluates the divergence of token `[b,t]`, whose student has the softmax `student` of its logits over `temperature`.
    pub(super) fn new(
        distillation: &Distillation,
        problem: &Problem,
        (b, t): (usize, usize),
        temperature: f64,
        student: Softmax,
    ) -> Self {
        let teacher = problem.extra.teacher.as_ref().expect("checked: the spec reads it");
        let logits = problem.logits.row(b, t);
        let given = teacher.floats().row(b, t);
        let mut all = Self {
            value: 0.0,
            factor: if distillation.temperature_squared { temperature * temperature } else { 1.0 },
            teacher_weight: distillation.teacher_weight(),
            temperature,
            student,
            teacher: student,
            mean_slope: 0.0,
            constant: [0.0; 2],
            top: None,
        };
        let bins = match teacher {
            Teacher::Logits(_) => {
                all.teacher = Softmax::new(&given.iter().map(|y| y / temperature).collect::<Vec<_>>());
                all.constant = all.common_difference(&logits, &given);
                all.bins_of(&logits, &given)
            }
            Teacher::TopK(top) => {
                let rest = distillation.rest.expect("checked: the spec has it");
                let ids: Vec<usize> = ids_of(top, (b, t));
                let z: Vec<f64> = logits.iter().map(|x| x / temperature).collect();
                let top = all.top_bins(rest, &z, &ids, &given);
                let bins = top.bins.clone();
                all.top = Some(top);
                bins
            }
        };
        let beta = all.teacher_weight;
        // The form that is never negative is of probabilities that sum up to 1. Rounded log-probabilities may leave no tail.
        let sums_to_1 = all.top.as_ref().is_none_or(|top| match top.rest {
            TopKRest::Renormalized => true,
            TopKRest::Tail => bins.last().is_some_and(|tail| tail.teacher > 0.0),
            TopKRest::Ignored => false,
        });
        let terms = bins.iter().map(|bin| if sums_to_1 { bin.term(beta) } else { bin.plain_term(beta) });
        all.value = all.factor * terms.collect::<Sum>().value();
        // The sum of the teacher's probabilities multiplies p_j in a forward KL; it is 1 unless some entries are ignored.
        all.mean_slope = match beta {
            0.0 => -bins.iter().map(|bin| bin.teacher).collect::<Sum>().value(),
            _ => bins.iter().map(|bin| times(bin.student, all.slope(bin))).collect::<Sum>().value(),
        };
        all
    }

    /// Returns the slope of a bin; a sum over some entries has a constant in it that does not cancel.
    fn slope(&self, bin: &DivergenceBin) -> f64 {
        let is_ignored = self.top.as_ref().is_some_and(|top| top.rest == TopKRest::Ignored);
        let constant = if is_ignored && self.teacher_weight == 1.0 { 1.0 } else { 0.0 };
        bin.slope(self.teacher_weight) + constant
    }

    /// Returns the constants `c` and `c′` with `δ = ((x − y) − c)/T − c′`, of the logits `x` and `y`: `c/T + c′ = lse(x/T) − lse(y/T)`.
    ///
    /// If all differences are near their mean `c`, `c′ = ln(1 + Σ q (e^((x − y − c)/T) − 1))`, which is as exact as they are. The
    /// difference of the two logarithms is as exact as these.
    fn common_difference(&self, logits: &[f64], given: &[f64]) -> [f64; 2] {
        let temperature = self.temperature;
        let largest = |of: &[f64]| of.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let far = [largest(logits) - largest(given), self.student.log_sum - self.teacher.log_sum];
        let with_mass = || logits.iter().zip(given).filter(|(_, y)| **y != f64::NEG_INFINITY);
        let q = |y: f64| self.teacher.probability(y / temperature);
        let mean = with_mass().map(|(x, &y)| times(q(y), x - y)).collect::<Sum>().value();
        // An entry without probability in one of the two has an infinite difference; in both of them, a NaN.
        let is_near = |(x, y): (&f64, &f64)| {
            let difference = x - y;
            difference.is_nan() || ((difference - mean) / temperature).abs() <= 1.0
        };
        if !mean.is_finite() || !logits.iter().zip(given).all(is_near) {
            return far;
        }
        let moved = with_mass().map(|(x, &y)| q(y) * ((x - y - mean) / temperature).exp_m1()).collect::<Sum>().value();
        [mean, moved.ln_1p()]
    }

    /// Returns the bins of some vocabulary entries, of which student and teacher have these logits.
    fn bins_of(&self, logits: &[f64], given: &[f64]) -> Vec<DivergenceBin> {
        let bin = |(&x, &y): (&f64, &f64)| {
            let (of_student, of_teacher) = (x / self.temperature, y / self.temperature);
            DivergenceBin {
                student: self.student.probability(of_student),
                teacher: self.teacher.probability(of_teacher),
                student_logp: self.student.log_probability(of_student),
                teacher_logp: self.teacher.log_probability(of_teacher),
                log_ratio: match (x == f64::NEG_INFINITY, y == f64::NEG_INFINITY) {
                    (true, true) => 0.0,
                    _ => ((x - y) - self.constant[0]) / self.temperature - self.constant[1],
                },
            }
        };
        logits.iter().zip(given).map(bin).collect()
    }

    /// Returns the bins of a teacher's entries `ids`, and sets the softmaxes that they are of.
    fn top_bins(&mut self, rest: TopKRest, z: &[f64], ids: &[usize], given: &[f64]) -> TopBins {
        self.teacher = Softmax::new(given);
        let places: HashMap<usize, usize> = ids.iter().enumerate().map(|(k, &id)| (id, k)).collect();
        let of_entries: Vec<f64> = ids.iter().map(|&id| z[id]).collect();
        if rest == TopKRest::Renormalized {
            // As if the entries were the whole vocabulary, with the teacher's log-probabilities for its logits.
            self.student = Softmax::new(&of_entries);
            let mut whole = Self { temperature: 1.0, ..self.clone() };
            whole.constant = whole.common_difference(&of_entries, given);
            let bins = whole.bins_of(&of_entries, given);
            return TopBins { rest, bins, places, within_tail: None };
        }
        let bin = |(&z, &logp): (&f64, &f64)| {
            let student_logp = self.student.log_probability(z);
            DivergenceBin {
                student: self.student.probability(z),
                teacher: exponential(logp),
                student_logp,
                teacher_logp: logp,
                log_ratio: if z == f64::NEG_INFINITY && logp == f64::NEG_INFINITY { 0.0 } else { student_logp - logp },
            }
        };
        let mut bins: Vec<DivergenceBin> = of_entries.iter().zip(given).map(bin).collect();
        let mut within_tail = None;
        if rest == TopKRest::Tail {
            let others = z.iter().enumerate().filter(|(j, _)| !places.contains_key(j));
            let others: Vec<f64> = others.map(|(_, &z)| z).collect();
            within_tail = others.iter().any(|z| *z > f64::NEG_INFINITY).then(|| Softmax::new(&others));
            // ln Σ e^z − lse, from the exponents: the probabilities themselves may all be less than an f64 holds.
            let tail = |within: Softmax| {
                let (largest, largest_logp) =
                    (self.student.probability(within.max), self.student.log_probability(within.max));
                (within.sum * largest, within.log_sum + largest_logp)
            };
            let (student, student_logp) = within_tail.map_or((0.0, f64::NEG_INFINITY), tail);
            // 1 − Σ Q = −(e^lse − 1); rounded log-probabilities may sum up to a little more than 1.
            let teacher = (-(self.teacher.max + self.teacher.log_sum).exp_m1()).max(0.0);
            let teacher_logp = teacher.ln();
            let neither = student_logp == f64::NEG_INFINITY && teacher == 0.0;
            let log_ratio = if neither { 0.0 } else { student_logp - teacher_logp };
            bins.push(DivergenceBin { student, teacher, student_logp, teacher_logp, log_ratio });
        }
        TopBins { rest, bins, places, within_tail }
    }

    /// Returns all bins of the token at `[b,t]`.
    pub fn bins(&self, problem: &Problem, (b, t): (usize, usize)) -> Vec<DivergenceBin> {
        match &self.top {
            Some(top) => top.bins.clone(),
            None => self.bins_in(problem, (b, t), 0..problem.shape().vocab),
        }
    }

    /// Returns the bins of a range of vocabulary entries of the token at `[b,t]`, whose teacher's logits are given.
    pub fn bins_in(&self, problem: &Problem, (b, t): (usize, usize), columns: Range<usize>) -> Vec<DivergenceBin> {
        let teacher = problem.extra.teacher.as_ref().expect("checked: the spec reads it").floats();
        self.bins_of(&problem.logits.row_part(b, t, columns.clone()), &teacher.row_part(b, t, columns))
    }

    /// Returns the place outside the teacher's entries; `None` if the teacher's logits are given.
    pub fn rest(&self) -> Option<TopKRest> {
        self.top.as_ref().map(|top| top.rest)
    }

    /// Returns the bin of vocabulary entry `j`, in the order of [`bins`](Self::bins); `None` if it has none.
    pub fn bin_of(&self, j: usize) -> Option<usize> {
        match &self.top {
            None => Some(j),
            Some(top) => top.places.get(&j).copied().or((top.rest == TopKRest::Tail).then(|| top.bins.len() - 1)),
        }
    }

    /// Returns the mean slope `Σ P·G` of the bins; of the forward KL the teacher's sum of probabilities, with the opposite sign.
    pub fn mean_slope(&self) -> f64 {
        self.mean_slope
    }

    /// Returns the derivatives of [`value`](Self::value) by the logits of the vocabulary entries from `first` on, of the token at `[b,t]`,
    /// whose student has the probabilities `p`.
    pub(super) fn gradient(&self, problem: &Problem, (b, t): (usize, usize), first: usize, p: &[f64]) -> Vec<f64> {
        let beta = self.teacher_weight;
        let by_exponent: Vec<f64> = match &self.top {
            None => {
                let bins = self.bins_in(problem, (b, t), first..first + p.len());
                let slope = |bin: &DivergenceBin| match beta {
                    0.0 => bin.difference(),
                    _ => times(bin.student, self.slope(bin) - self.mean_slope),
                };
                bins.iter().map(slope).collect()
            }
            Some(top) => {
                let logits = problem.logits.row_part(b, t, first..first + p.len());
                let entries = logits.iter().zip(p).enumerate();
                entries.map(|(v, (x, &p))| self.by_exponent_of_top(top, first + v, x / self.temperature, p)).collect()
            }
        };
        by_exponent.into_iter().map(|slope| self.factor * slope / self.temperature).collect()
    }

    /// Returns the derivative by the exponent `z` of entry `j`, which has the probability `p` over the vocabulary.
    fn by_exponent_of_top(&self, top: &TopBins, j: usize, z: f64, p: f64) -> f64 {
        let (own, is_forward) = (top.places.get(&j).map(|&k| &top.bins[k]), self.teacher_weight == 0.0);
        match (top.rest, own) {
            // The sum of the teacher's probabilities multiplies all of the student's.
            (TopKRest::Ignored, own) if is_forward => times(p, -self.mean_slope) - own.map_or(0.0, |bin| bin.teacher),
            (_, Some(bin)) if is_forward => bin.difference(),
            (_, Some(bin)) => times(bin.student, self.slope(bin) - self.mean_slope),
            (TopKRest::Renormalized, None) => 0.0,
            (TopKRest::Ignored, None) => times(p, -self.mean_slope),
            (TopKRest::Tail, None) => {
                let tail = top.bins.last().expect("a tail has a bin");
                // An entry of the tail has its share of P − Q, which is something where p itself underflows.
                let share = top.within_tail.map_or(0.0, |within| within.probability(z));
                if is_forward { times(share, tail.difference()) } else { times(p, self.slope(tail) - self.mean_slope) }
            }
        }
    }
}

/// Returns the ids of the teacher's entries of the token at `[b,t]`.
fn ids_of(top: &TeacherTopK, (b, t): (usize, usize)) -> Vec<usize> {
    let ids = top.ids.slice(s![b, t, ..]);
    ids.iter().map(|id| usize::try_from(*id).expect("checked: 0 ≤ id < V")).collect()
}
