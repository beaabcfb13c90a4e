//! The specimen's divergence from a teacher: two softmaxes side by side, and their gradient over the student's logits.
//!
//! Each simulated device has the whole vocabulary. Exponents and exponentials are f32, sums are f64. Terms are `A(e^x − 1 − x)`,
//! which do not cancel where student ≈ teacher.

use std::collections::HashMap;

use ndarray::{Array2, arr0};

use crate::bank::Bug;
use crate::launch::SpecimenLaunch;
use crate::loss::SequenceWeights;
use crate::top_entropy::HighEntropy;
use assay_core::problem::{Candidate, FloatArray, Teacher};
use assay_core::spec::{Distillation, TopKRest};
use ndarray::Ix3;

/// The divergences of a batch: its loss, that of each token `[B,T]`, and dlogits.
pub(crate) struct DistilledTokens {
    pub(crate) loss: f64,
    pub(crate) token_loss: Array2<f32>,
    /// Dlogits `[V]` of each token that counts.
    pub(crate) dlogits: HashMap<(usize, usize), Vec<f64>>,
}

/// A softmax in f32, with its sum in f64.
struct TwinSoftmax {
    gaps: Vec<f32>,
    exponentials: Vec<f32>,
    sum: f64,
}

impl TwinSoftmax {
    fn new(x: &[f32], rate: f32) -> Self {
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let gaps: Vec<f32> = x.iter().map(|x| (x - most) * rate).collect();
        let exponentials: Vec<f32> = gaps.iter().map(|gap| gap.exp()).collect();
        let sum = exponentials.iter().copied().map(f64::from).sum();
        Self { gaps, exponentials, sum }
    }

    fn probability(&self, j: usize) -> f64 {
        f64::from(self.exponentials[j]) / self.sum
    }

    fn logp(&self, j: usize) -> f64 {
        f64::from(self.gaps[j]) - self.sum.ln()
    }
}

/// The probabilities `P` and `Q` of a bin, and `δ = ln P − ln Q`.
#[derive(Clone, Copy)]
struct TwinBin {
    p: f64,
    q: f64,
    delta: f64,
}

impl TwinBin {
    /// Returns `ln M − ln Q` and `ln M − ln P` of the mixture.
    fn to_mixture(self, beta: f64) -> [f64; 2] {
        if self.delta < 0.0 {
            let of_teacher = ((1.0 - beta) * self.delta.exp_m1()).ln_1p();
            [
                of_teacher,
                if self.delta > -1.0 { (beta * (-self.delta).exp_m1()).ln_1p() } else { of_teacher - self.delta },
            ]
        } else {
            let of_student = (beta * (-self.delta).exp_m1()).ln_1p();
            [
                if self.delta < 1.0 { ((1.0 - beta) * self.delta.exp_m1()).ln_1p() } else { of_student + self.delta },
                of_student,
            ]
        }
    }

    fn exchanged(self) -> Self {
        Self { p: self.q, q: self.p, delta: -self.delta }
    }

    /// Returns the term of the divergence: one that is never negative, or as the formula has it.
    fn term(self, beta: f64, plain: bool) -> f64 {
        let of_kl = |a: f64, b: f64, x: f64| match () {
            () if a == 0.0 => {
                if plain {
                    0.0
                } else {
                    b
                }
            }
            () if plain => -a * x,
            () if x.abs() < 1.0 => a * excess(x),
            () => b - a - a * x,
        };
        match beta {
            0.0 => of_kl(self.q, self.p, self.delta),
            1.0 => of_kl(self.p, self.q, -self.delta),
            _ => {
                let m = beta * self.q + (1.0 - beta) * self.p;
                let [of_teacher, of_student] = self.to_mixture(beta);
                beta * of_kl(self.q, m, of_teacher) + (1.0 - beta) * of_kl(self.p, m, of_student)
            }
        }
    }

    /// Returns the slope by `P`.
    fn slope(self, beta: f64, plain: bool) -> f64 {
        match beta {
            0.0 => {
                if self.q == 0.0 {
                    0.0
                } else {
                    -(-self.delta).exp()
                }
            }
            1.0 => self.delta + f64::from(u8::from(plain)),
            _ => -(1.0 - beta) * self.to_mixture(beta)[1],
        }
    }
}

/// Returns `e^x − 1 − x`.
fn excess(x: f64) -> f64 {
    if x.abs() > 0.1 {
        x.exp_m1() - x
    } else {
        x * x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x / 720.0))))
    }
}

impl SpecimenLaunch<'_> {
    /// Evaluates the divergence of every token, and its gradient.
    pub(crate) fn distil(&self, distillation: &Distillation, logits: &FloatArray<Ix3>) -> Candidate {
        let shape = (self.shape.batch, self.shape.tokens, self.shape.vocab);
        let distilled = self.distil_rows(distillation, |(b, t)| logits.row(b, t));
        let mut gradient = FloatArray::zeros(shape, logits.dtype());
        for ((b, t), row) in &distilled.dlogits {
            gradient.set_row(*b, *t, row);
        }
        Candidate {
            loss: Some(arr0(distilled.loss as f32).into()),
            logp: None,
            logp_of_others: None,
            entropy: None,
            token_loss: Some(distilled.token_loss.into()),
            gradient,
            metrics: None,
        }
    }

    /// Evaluates the divergence of every token, whose logits are `row`, and its gradient.
    pub(crate) fn distil_rows(
        &self,
        distillation: &Distillation,
        row: impl Fn((usize, usize)) -> Vec<f64>,
    ) -> DistilledTokens {
        let shape = (self.shape.batch, self.shape.tokens);
        let high = HighEntropy::new(self, &Array2::from_elem(shape, None));
        let sequences = self.sequences();
        let weights = SequenceWeights::new(self, &sequences, &high, 0);
        let mut all = DistilledTokens { loss: 0.0, token_loss: Array2::zeros(shape), dlogits: HashMap::new() };
        for sequence in &sequences {
            for at in sequence.places().filter(|&(b, t)| self.counts(b, t)) {
                let weight = weights.rows[sequence.index];
                let [factor, _] = self.corrections.factors[at];
                let (value, slopes) = self.distil_token(distillation, row(at), at);
                all.token_loss[at] = (factor.value * value) as f32;
                all.loss += weight * factor.value * value;
                all.dlogits.insert(at, slopes.into_iter().map(|slope| weight * factor.gradient * slope).collect());
            }
        }
        all
    }

    /// Returns the divergence of one token and its derivatives by the student's logits.
    fn distil_token(&self, distillation: &Distillation, logits: Vec<f64>, at: (usize, usize)) -> (f64, Vec<f64>) {
        let narrow = |row: Vec<f64>| -> Vec<f32> { row.into_iter().map(|x| x as f32).collect() };
        let temperature = self.tokens.temperature(self.spec, at);
        let rate = (1.0 / temperature) as f32;
        let teacher = self.tokens.extra.teacher.as_ref().expect("checked: the spec reads it");
        let of_teacher =
            if self.has(Bug::DistillationTeacherOfNextToken) { (at.0, (at.1 + 1) % self.shape.tokens) } else { at };
        let mut beta = distillation.teacher_weight();
        if self.has(Bug::DistillationBetaExchanged) {
            beta = 1.0 - beta;
        }
        let mut x = narrow(logits);
        let y = narrow(teacher.floats().row(of_teacher.0, of_teacher.1));
        let has_logits = matches!(teacher, Teacher::Logits(_));
        if self.has(Bug::DistillationColumnDropped) && has_logits && x.len() > 1 {
            x.pop();
        }
        let student = TwinSoftmax::new(&x, rate);
        let (bins, places, plain) = match teacher {
            Teacher::Logits(_) => {
                let tempered = if self.has(Bug::DistillationTeacherUntempered) { 1.0 } else { rate };
                let y = &y[..x.len()];
                (self.bins_of_logits(&student, &TwinSoftmax::new(y, tempered), (&x, y), beta, rate), None, false)
            }
            Teacher::TopK(top) => {
                let rest = distillation.rest.expect("checked: there is one");
                let rest = if self.has(Bug::DistillationTailIgnored) { TopKRest::Ignored } else { rest };
                let ids: Vec<usize> = (0..y.len())
                    .map(|k| usize::try_from(top.ids[[of_teacher.0, of_teacher.1, k]].max(0)).expect("not negative"))
                    .collect();
                let bins = self.bins_of_top(rest, &student, &ids, &y);
                let places: HashMap<usize, usize> = ids.iter().enumerate().map(|(k, &id)| (id, k)).collect();
                // A student that is not renormalised has its sum over some entries alone, and every entry has a part in that.
                let is_of_some = rest == TopKRest::Renormalized && self.has(Bug::DistillationStudentNotRenormalized);
                let rest = if is_of_some { TopKRest::Ignored } else { rest };
                (bins, Some((rest, places)), rest == TopKRest::Ignored)
            }
        };
        let exchanged = self.has(Bug::DistillationExchanged);
        let bins: Vec<TwinBin> = if exchanged { bins.into_iter().map(TwinBin::exchanged).collect() } else { bins };
        let mut value: f64 = bins.iter().map(|bin| bin.term(beta, plain)).sum();
        if self.has(Bug::DistillationTeacherEntropyForgotten) {
            value -= bins.iter().filter(|bin| bin.q > 0.0).map(|bin| bin.q * bin.q.ln()).sum::<f64>();
        }
        if self.has(Bug::DistillationHoleTimesZero) {
            // 0·ln 0 of an entry that the teacher lacks.
            value += bins.iter().map(|bin| bin.q * bin.q.ln()).sum::<f64>() * 0.0;
        }
        let weighted = |bin: &TwinBin| if bin.p == 0.0 { 0.0 } else { bin.p * bin.slope(beta, plain) };
        let mean: f64 =
            if beta == 0.0 { -bins.iter().map(|bin| bin.q).sum::<f64>() } else { bins.iter().map(weighted).sum() };
        let mean = if self.has(Bug::DistillationNotCentred) { 0.0 } else { mean };
        let slope = |j: usize| {
            if j >= x.len() {
                return 0.0;
            }
            let (bin, is_all) = match &places {
                None => (Some(bins[j]), true),
                Some((rest, places)) => match (places.get(&j), rest) {
                    (Some(&k), _) => (Some(bins[k]), true),
                    (None, TopKRest::Tail) => (bins.last().copied(), false),
                    (None, TopKRest::Renormalized) => return 0.0,
                    (None, TopKRest::Ignored) => (None, false),
                },
            };
            let Some(bin) = bin else { return -mean * student.probability(j) };
            let p = if is_all { bin.p } else { student.probability(j) };
            match beta {
                0.0 if is_all => -p * mean - bin.q,
                _ if p == 0.0 => 0.0,
                _ => p * (bin.slope(beta, plain) - mean),
            }
        };
        let squared = distillation.temperature_squared && !self.has(Bug::DistillationSquareForgotten);
        let factor = if squared { temperature * temperature } else { 1.0 };
        let in_gradient = if self.has(Bug::DistillationSquareNotInGradient) { 1.0 } else { factor };
        (factor * value, (0..self.shape.vocab).map(|j| in_gradient * slope(j) / temperature).collect())
    }

    /// Pairs the probabilities of all vocabulary entries.
    fn bins_of_logits(
        &self,
        student: &TwinSoftmax,
        teacher: &TwinSoftmax,
        (x, y): (&[f32], &[f32]),
        beta: f64,
        rate: f32,
    ) -> Vec<TwinBin> {
        // The mutant mixes logits, not probabilities: its mixture is another teacher.
        let mixed: Option<Vec<f32>> = self
            .has(Bug::DistillationMixtureOfLogits)
            .then(|| x.iter().zip(y).map(|(x, y)| beta as f32 * y + (1.0 - beta as f32) * x).collect());
        let mixed = mixed.map(|mixed| TwinSoftmax::new(&mixed, rate));
        let teacher = mixed.as_ref().unwrap_or(teacher);
        let shift = student.sum.ln() - teacher.sum.ln();
        let bin = |j: usize| {
            let (p, q) = (student.probability(j), teacher.probability(j));
            let both_lack = student.gaps[j] == f32::NEG_INFINITY && teacher.gaps[j] == f32::NEG_INFINITY;
            let delta = f64::from(student.gaps[j] - teacher.gaps[j]) - shift;
            TwinBin { p, q, delta: if both_lack { 0.0 } else { delta } }
        };
        (0..x.len()).map(bin).collect()
    }

    /// Pairs the probabilities of a teacher's entries, and of the tail if there is one.
    fn bins_of_top(&self, rest: TopKRest, student: &TwinSoftmax, ids: &[usize], logp: &[f32]) -> Vec<TwinBin> {
        let given: f64 = logp.iter().map(|logp| f64::from(*logp).exp()).sum();
        let of_teacher = if rest == TopKRest::Renormalized { given } else { 1.0 };
        // Exponents renormalise entries whose probabilities all underflow.
        let gaps: Vec<f32> = ids.iter().map(|&id| student.gaps[id]).collect();
        let is_renormalized = rest == TopKRest::Renormalized && !self.has(Bug::DistillationStudentNotRenormalized);
        let among_entries = is_renormalized.then(|| TwinSoftmax::new(&gaps, 1.0));
        let bin = |(k, (&id, &logp)): (usize, (&usize, &f32))| {
            let (softmax, at) = among_entries.as_ref().map_or((student, id), |among| (among, k));
            let q = f64::from(logp).exp() / of_teacher;
            let both_lack = student.gaps[id] == f32::NEG_INFINITY && logp == f32::NEG_INFINITY;
            let delta = softmax.logp(at) - (f64::from(logp) - of_teacher.ln());
            TwinBin { p: softmax.probability(at), q, delta: if both_lack { 0.0 } else { delta } }
        };
        let mut bins: Vec<TwinBin> = ids.iter().zip(logp).enumerate().map(bin).collect();
        if rest == TopKRest::Tail {
            let others = || (0..student.gaps.len()).filter(|j| !ids.contains(j));
            let (p, q) = (others().map(|j| student.probability(j)).sum::<f64>(), (1.0 - given).max(0.0));
            // Exponents give the logarithm of a tail whose probabilities underflow.
            let most = others().map(|j| student.gaps[j]).fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = others().map(|j| f64::from((student.gaps[j] - most).exp())).sum();
            let logp = if most == f32::NEG_INFINITY { p.ln() } else { f64::from(most) + (sum / student.sum).ln() };
            bins.push(TwinBin { p, q, delta: if logp == f64::NEG_INFINITY && q == 0.0 { 0.0 } else { logp - q.ln() } });
        }
        bins
    }
}
