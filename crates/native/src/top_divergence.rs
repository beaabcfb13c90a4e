//! The divergence of a student from a teacher's `K` likeliest entries, and its gradient: numbers that are few, in f64.
//!
//! ```text
//! bins     P = e^(x/T)/S and Q of each entry; the rest is one more bin, or none, or P and Q are divided by their sums
//! terms    Q ln(Q/P), P ln(P/Q), or βQ ln(Q/M) + (1−β)P ln(P/M)
//! slopes   G = −Q/P of the forward KL, ln P − ln Q of the reverse one, (1−β)(ln P − ln M) of a mixture        Ḡ = Σ P·G
//! dlogits  P(G − Ḡ) of each entry; elsewhere the same of all other entries at once, and of each its share of their probability
//! ```

use assay_core::spec::TopKRest;

/// A teacher's entries of one token, and the student's logits there.
pub(crate) struct TopEntries {
    /// The teacher's log-probabilities of its entries.
    pub(crate) logp: Vec<f64>,
    /// The student's logits of the same entries.
    pub(crate) logits: Vec<f64>,
    /// Factor `1/T` of the logits.
    pub(crate) rate: f64,
}

/// The entries that a teacher does not have.
#[derive(Clone, Copy)]
pub(crate) struct OtherEntries {
    /// Maximum of the student's logits.
    pub(crate) max: f64,
    /// Sum of the exponentials of the gaps below it; 0 if no others are read.
    pub(crate) sum: f64,
}

/// The divergence of one token, and its derivatives by the student's exponents.
pub(crate) struct TopDivergence {
    pub(crate) value: f64,
    /// The derivative of each of the teacher's entries.
    pub(crate) of_entries: Vec<f64>,
    /// The derivative of all other vocabulary entries together: each has its share of their probability.
    pub(crate) of_others: f64,
}

/// The probabilities of student and teacher in one bin, and their logarithms.
#[derive(Clone, Copy)]
struct Bin {
    student: f64,
    teacher: f64,
    student_logp: f64,
    teacher_logp: f64,
}

/// Returns `factor · x`, and 0 if the factor is 0, whatever `x` is.
fn times(factor: f64, x: f64) -> f64 {
    if factor == 0.0 { 0.0 } else { factor * x }
}

/// Returns the logarithm of a sum of exponentials, `ln Σ e^x`.
fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY { max } else { max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln() }
}

impl Bin {
    fn new(student_logp: f64, teacher_logp: f64) -> Self {
        Self { student: student_logp.exp(), teacher: teacher_logp.exp(), student_logp, teacher_logp }
    }

    /// Returns the bin of the rest of both.
    fn rest(student_logp: f64, teacher: f64) -> Self {
        Self { student: student_logp.exp(), teacher, student_logp, teacher_logp: teacher.ln() }
    }

    fn log_ratio(self) -> f64 {
        self.student_logp - self.teacher_logp
    }

    fn mixture_logp(self, beta: f64) -> f64 {
        (beta * self.teacher + (1.0 - beta) * self.student).ln()
    }

    fn term(self, beta: f64) -> f64 {
        match beta {
            0.0 => times(self.teacher, -self.log_ratio()),
            1.0 => times(self.student, self.log_ratio()),
            _ => {
                let of_teacher = || self.teacher_logp - self.mixture_logp(beta);
                let of_student = || self.student_logp - self.mixture_logp(beta);
                times(beta * self.teacher, of_teacher()) + times((1.0 - beta) * self.student, of_student())
            }
        }
    }

    /// Returns the slope `G` of the divergence by `P`.
    fn slope(self, beta: f64) -> f64 {
        match beta {
            0.0 => -(-self.log_ratio()).exp(),
            1.0 => self.log_ratio(),
            _ => (1.0 - beta) * (self.student_logp - self.mixture_logp(beta)),
        }
    }

    /// Returns `P·G`, which is finite where `P` is 0.
    fn sloped(self, beta: f64) -> f64 {
        match beta {
            0.0 => -self.teacher,
            _ => times(self.student, self.slope(beta)),
        }
    }
}

impl TopEntries {
    /// Evaluates the divergence, with the weight `beta` of the teacher in the mixture.
    pub(crate) fn divergence(&self, rest: TopKRest, beta: f64, others: OtherEntries) -> TopDivergence {
        // The sum over all entries: those of the teacher one by one, and that of the others.
        let largest = self.logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let max = if others.sum > 0.0 { largest.max(others.max) } else { largest };
        let exponents: Vec<f64> = self.logits.iter().map(|x| (x - max) * self.rate).collect();
        // The others' largest exponent; their probability may be less than an f64 holds, its logarithm is not.
        let of_others = if others.sum == 0.0 { f64::NEG_INFINITY } else { (others.max - max) * self.rate };
        let outside = times(others.sum, of_others.exp());
        let log_sum = (exponents.iter().map(|x| x.exp()).sum::<f64>() + outside).ln();
        let of_teacher = if rest == TopKRest::Renormalized { log_sum_exp(&self.logp) } else { 0.0 };
        let bin = |(x, logp): (&f64, &f64)| Bin::new(x - log_sum, logp - of_teacher);
        let bins: Vec<Bin> = exponents.iter().zip(&self.logp).map(bin).collect();
        // 1 − Σ Q = −(e^lse − 1); rounded log-probabilities may add up to a little more than 1.
        let tail = (rest == TopKRest::Tail)
            .then(|| Bin::rest(others.sum.ln() + of_others - log_sum, (-log_sum_exp(&self.logp).exp_m1()).max(0.0)));
        let all = || bins.iter().copied().chain(tail);
        // A sum over some entries has a constant in its slope that does not cancel.
        let constant = if rest == TopKRest::Ignored && beta == 1.0 { 1.0 } else { 0.0 };
        let sloped = |bin: Bin| bin.sloped(beta) + constant * bin.student;
        let mean: f64 = all().map(sloped).sum();
        TopDivergence {
            value: all().map(|bin| bin.term(beta)).sum(),
            of_entries: bins.iter().map(|bin| sloped(*bin) - bin.student * mean).collect(),
            of_others: match (rest, tail) {
                (TopKRest::Renormalized, _) => 0.0,
                (_, Some(tail)) => tail.sloped(beta) - tail.student * mean,
                (_, None) => -outside * (-log_sum).exp() * mean,
            },
        }
    }
}
