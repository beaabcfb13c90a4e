//! The bounds of a divergence from a teacher, and of its gradient, derived in `docs/tolerances.md`.
//!
//! Over the bins of [`TokenDivergence`], with `δ = ln P − ln Q`, gaps `a` and `b` of student and teacher, and `R = 1 + a + ā` for what a
//! softmax by gaps is off by, `C = R + |ln P|` for what a log-probability is off by, both in units of `u`:
//!
//! | output | [`Grade::Exact`] | [`Grade::Standard`], in addition |
//! |---|---|---|
//! | `KL(A‖B)`, `x = ln B − ln A` | `Σ A(e^x − 1 − x)·R_A + A·abs(e^x − 1)·E` | `Σ A(C_A(1 + abs x) + C_B + abs x)` |
//! | forward dlogits | `p·R_P + q·R_Q` | `p(C_P + 1 + mean C_Q) + q·C_Q` |
//! | other dlogits | `p(abs(G − Ḡ)·R_P + A + Ā + abs Ḡ)` | `p(A′ + Ā′ + abs Ḡ·C_P)` |
//!
//! `E = R_A + R_B + |x|` is how far `x` may be off. At [`Grade::Exact`] a sum that is flat in an error of all `x` has it squared, in the
//! floor: `(κuE)²/2`.
//!
//! A student's logits that are a product with a head have errors `ε` of their own, which move `ln P` by `g = (ε + Σ pε)/T`. It is another
//! `R_P` and another part of `E`, in the floors of both grades: a softmax of other logits is a softmax, whose probabilities sum up to 1.

use super::U;
use super::condition::{Bands, ErrorBound, FLUSHED, LogitErrors, lane_sum_error_of, sum_error_at_any_scale};
use super::tolerance::Grade;
use assay_core::spec::TopKRest;
use assay_reference::{DivergenceBin, Reference, Softmax, Token, TokenColumns, TokenDivergence};

/// The errors of one bin's probabilities and log-probabilities, in units of `u`.
#[derive(Clone, Copy, Debug, Default)]
struct BinErrors {
    /// The relative errors `R` of the probabilities of student and teacher, by gaps.
    by_gap: [f64; 2],
    /// The errors `C` of their log-probabilities.
    of_logp: [f64; 2],
    /// The movement of the student's log-probability by an error that the log-probabilities of all entries share: 1, and of a tail as much
    /// more as the entries have more probability.
    lever: f64,
    /// The movement `g` of the student's log-probability by the errors of its logits, nats; of a tail by those of a sum of its own too.
    of_logits: f64,
}

/// The bounds of a divergence and of its gradient that do not depend on the vocabulary entry.
#[derive(Clone, Debug)]
pub(crate) struct DivergenceCondition {
    /// The bound of the divergence, with its factor and without weights.
    pub(crate) value: ErrorBound,
    /// Whether a tail is less than what rounding may make of it: nothing is compared then, and `ln 0` is an honest step.
    pub(crate) loses_tail: bool,
    /// The bound of each slope `G`, one per bin of a teacher with `K` entries; empty for a teacher's logits.
    of_bins: Vec<ErrorBound>,
    /// The bound of the mean slope `Σ P·G`.
    mean: ErrorBound,
    /// The slope of the divergence by a tail's probability, and its error, at grade `standard`: `ln(1 − Σ P)` brings it to every entry,
    /// and it cancels against the mean.
    through_tail: (f64, ErrorBound),
    /// The errors of the two sums of exponentials and of offsets, which all log-probabilities share.
    shared: [f64; 2],
    /// The errors of the student's logits, in nats of the exponent.
    logits: ExponentErrors,
    /// The movement of the last bin's log-probability, which is that of the tail if there is one.
    of_tail: f64,
    /// The movement of the mean slope by the errors of the student's logits.
    mean_of_logits: f64,
    /// Whether the divergence is a sum over some entries, whose probabilities do not sum up to 1.
    of_some: bool,
    grade: Grade,
}

/// The errors of a student's logits that are a product, as movements of its log-probabilities.
#[derive(Clone, Debug)]
struct ExponentErrors {
    /// The errors `ε` of the logits; empty if logits are given.
    of_logits: LogitErrors,
    /// The factor `1/T` of the logits.
    rate: f64,
    /// The movement of the logarithm of the sum of exponentials, `Σ pε/T`.
    of_sum: f64,
    /// The movement of each bin's log-probability; empty if logits are given.
    of_bins: Vec<f64>,
}

impl ExponentErrors {
    fn new(
        reference: &Reference,
        token: &Token,
        divergence: &TokenDivergence,
        bins: &[DivergenceBin],
        errors: &LogitErrors,
    ) -> Self {
        let mut all =
            Self { of_logits: errors.clone(), rate: 1.0 / divergence.temperature, of_sum: 0.0, of_bins: Vec::new() };
        if errors.is_empty() {
            return all;
        }
        let (b, t) = token.at;
        let row = reference.row(b, t, token);
        // The mean error of each bin's entries, of which a tail has many.
        let mut sums = vec![[0.0; 2]; bins.len()];
        let mut of_whole = 0.0;
        for (j, p) in row.logp().probabilities.iter().enumerate() {
            let error = errors.at(j) * all.rate;
            of_whole += p * error;
            if let Some(k) = divergence.bin_of(j) {
                let is_alone = divergence.rest() != Some(TopKRest::Tail) || k + 1 < bins.len();
                let weight = if is_alone { 1.0 } else { *p };
                sums[k][0] += weight * error;
                sums[k][1] += weight;
            }
        }
        let of_bins: Vec<f64> = sums.into_iter().map(|[sum, weight]| times(sum, 1.0 / weight)).collect();
        all.of_sum = match divergence.rest() {
            Some(TopKRest::Renormalized) => bins.iter().zip(&of_bins).map(|(bin, error)| bin.student * error).sum(),
            _ => of_whole,
        };
        all.of_bins = of_bins.into_iter().map(|error| error + all.of_sum).collect();
        all
    }

    /// Returns the movement of the log-probability of vocabulary entry `j`.
    fn at(&self, j: usize) -> f64 {
        self.of_logits.at(j) * self.rate + self.of_sum
    }
}

/// The share of a probability that its error may be before a logarithm of it says nothing.
const LOST: f64 = 0.1;

impl DivergenceCondition {
    /// Evaluates the condition of a token; `None` if the spec is no divergence.
    pub(crate) fn new(reference: &Reference, token: &Token, errors: &LogitErrors, bands: Bands) -> Option<Self> {
        let divergence = reference.divergence(token)?;
        let bins = divergence.bins(reference.problem(), token.at);
        let beta = divergence.teacher_weight;
        let logits = ExponentErrors::new(reference, token, divergence, &bins, errors);
        let mut errors = bin_errors(divergence, &token.logp_softmax.stats, &bins);
        for (errors, moved) in errors.iter_mut().zip(&logits.of_bins) {
            errors.of_logits = *moved;
        }
        // Errors that all log-probabilities of a softmax share: an offset, and sums in lanes. A teacher's own log-probabilities have none.
        let has_own = matches!(divergence.rest(), Some(TopKRest::Tail | TopKRest::Ignored));
        let shared = [(false, &divergence.student), (has_own, &divergence.teacher)].map(|(given, softmax)| {
            if given || !softmax.max.is_finite() { 0.0 } else { bands.offset * U * softmax.max.abs() }
        });
        let in_lanes = |row: &dyn Fn() -> Vec<f64>| {
            if !bands.lanes {
                return 0.0;
            }
            let row = row();
            // A row that underflows has no sum.
            let has_sum = row.iter().all(|p| p.is_finite()) && row.iter().any(|p| *p > 0.0);
            if has_sum { lane_sum_error_of(&row) } else { 0.0 }
        };
        // A student's log-probabilities of a teacher's entries are of a sum over the whole vocabulary; renormalised, they forget it.
        let whole = || -> Vec<f64> {
            let (b, t) = token.at;
            let probability = |x: &f64| token.logp_softmax.stats.probability(x / divergence.temperature);
            reference.problem().logits.row(b, t).iter().map(probability).collect()
        };
        let of_bins = |probability: fn(&DivergenceBin) -> f64| bins.iter().map(probability).collect();
        let lanes = [
            if has_own { in_lanes(&whole) } else { in_lanes(&|| of_bins(|bin| bin.student)) },
            if has_own { 0.0 } else { in_lanes(&|| of_bins(|bin| bin.teacher)) },
        ];
        let shared = [shared[0] + lanes[0], shared[1] + lanes[1]];

        // A tail may be a sum of its own, of the other entries.
        if divergence.rest() == Some(TopKRest::Tail)
            && let Some(tail) = errors.last_mut()
        {
            let others = || {
                let all = whole().into_iter().enumerate();
                all.filter(|(j, _)| divergence.bin_of(*j) == Some(bins.len() - 1)).map(|(_, p)| p).collect()
            };
            tail.of_logits += in_lanes(&others);
        }

        let loses_tail = divergence.rest() == Some(TopKRest::Tail) && {
            let (tail, errors) = (bins.last(), errors.last().copied().unwrap_or_default());
            let lost = |p: f64, error: f64| p == 0.0 || bands.logp * U * error > LOST;
            let offset = shared[0] * errors.lever > LOST;
            offset
                || tail
                    .is_some_and(|tail| lost(tail.student, errors.of_logp[0]) || lost(tail.teacher, errors.of_logp[1]))
        };
        let mut all = Self {
            value: ErrorBound::default(),
            loses_tail,
            of_bins: Vec::new(),
            mean: ErrorBound::default(),
            through_tail: (0.0, ErrorBound::default()),
            shared,
            logits,
            of_tail: errors.last().map_or(0.0, |errors| errors.of_logits),
            mean_of_logits: 0.0,
            of_some: divergence.rest() == Some(TopKRest::Ignored),
            grade: bands.grade,
        };
        let kappa = bands.logp * U;
        // A KL that is infinite is judged by that alone.
        let mixes = beta > 0.0 && beta < 1.0;
        for (bin, errors) in bins.iter().zip(&errors).filter(|(bin, _)| mixes || bin.log_ratio.is_finite()) {
            let value = all.value_of(bin, *errors, beta, kappa);
            all.value = ErrorBound { scale: all.value.scale + value.scale, floor: all.value.floor + value.floor };
            let slope = all.slope_of(bin, *errors, beta);
            // The forward KL's mean is the teacher's sum of probabilities.
            let weight = if beta == 0.0 { bin.teacher } else { bin.student };
            let mean = times_finite(slope, weight);
            all.mean = ErrorBound { scale: all.mean.scale + mean.scale, floor: all.mean.floor + mean.floor };
            // A mean is flat in what all slopes have in common.
            let apart = if beta == 0.0 { 0.0 } else { finite(bin.slope(beta) - divergence.mean_slope()) };
            all.mean_of_logits += times(bin.student, apart * errors.of_logits);
        }
        all.mean.floor += all.mean_of_logits;
        if bands.lanes && divergence.rest() == Some(TopKRest::Tail) && !loses_tail {
            all.mean.floor += tail_cotangent_error(divergence, &bins, &whole());
        }
        // Every probability may be flushed, and is multiplied by a logarithm.
        let log_ratios = bins.iter().map(|bin| if bin.log_ratio.is_finite() { bin.log_ratio.abs() } else { 0.0 });
        let flushed = (bins.len() as f64 + log_ratios.sum::<f64>() + 1.0) * FLUSHED;
        let factor = divergence.factor;
        all.value = ErrorBound {
            scale: factor * (all.value.scale + divergence.value.abs() / factor),
            floor: factor * (all.value.floor + flushed),
        };
        if divergence.rest().is_some() {
            all.of_bins = bins.iter().zip(&errors).map(|(bin, errors)| all.slope_of(bin, *errors, beta)).collect();
        }
        if let (Some(TopKRest::Tail), Grade::Standard) = (divergence.rest(), bands.grade) {
            all.through_tail = through_tail(&bins, &errors, beta, shared[0]);
        }
        if loses_tail {
            all.value.floor = f64::INFINITY;
        }
        Some(all)
    }

    fn is_standard(&self) -> bool {
        self.grade == Grade::Standard
    }

    /// Bounds a bin's term of the divergence.
    fn value_of(&self, bin: &DivergenceBin, errors: BinErrors, beta: f64, kappa: f64) -> ErrorBound {
        let [of_student, of_teacher] = [self.shared[0] * errors.lever, self.shared[1]];
        let BinErrors { by_gap: [student, teacher], of_logp: [student_logp, teacher_logp], of_logits: moved, .. } =
            errors;
        let between = student + teacher + finite(bin.log_ratio);
        match beta {
            0.0 => {
                let side = KlSide {
                    a: bin.teacher,
                    x: bin.log_ratio,
                    by_gap: teacher,
                    of_logp: [teacher_logp, student_logp],
                    of_logits: [0.0, moved],
                };
                self.kl_bound(side, between, kappa, [of_teacher, of_student])
            }
            1.0 => {
                let side = KlSide {
                    a: bin.student,
                    x: -bin.log_ratio,
                    by_gap: student,
                    of_logp: [student_logp, teacher_logp],
                    of_logits: [moved, moved],
                };
                self.kl_bound(side, between, kappa, [of_student, of_teacher])
            }
            _ => {
                let mixed = Mixture::new(bin, errors, beta);
                let [teacher_ratio, student_ratio] = mixed.log_ratios;
                let [of_p, of_q] = mixed.shares;
                let of_mixture = of_p * of_student + of_q * of_teacher;
                let first = KlSide {
                    a: beta * bin.teacher,
                    x: teacher_ratio,
                    by_gap: teacher,
                    of_logp: [teacher_logp, mixed.logp],
                    of_logits: [0.0, of_p * moved],
                };
                let second = KlSide {
                    a: (1.0 - beta) * bin.student,
                    x: student_ratio,
                    by_gap: student,
                    of_logp: [student_logp, mixed.logp],
                    of_logits: [moved, of_q * moved],
                };
                // A mixture moves by its share of what the logarithms move by.
                let first =
                    self.kl_bound(first, of_p * between + finite(teacher_ratio), kappa, [of_teacher, of_mixture]);
                let second =
                    self.kl_bound(second, of_q * between + finite(student_ratio), kappa, [of_student, of_mixture]);
                ErrorBound { scale: first.scale + second.scale, floor: first.floor + second.floor }
            }
        }
    }

    /// Bounds `A`'s term of `KL(A‖B)`, whose `x = ln B − ln A` is off by `between`.
    fn kl_bound(
        &self,
        KlSide { a, x, by_gap, of_logp: [own, other], of_logits: [a_moved, x_moved] }: KlSide,
        between: f64,
        kappa: f64,
        [of_own, of_other]: [f64; 2],
    ) -> ErrorBound {
        if a == 0.0 || !x.is_finite() {
            return ErrorBound::default();
        }
        // e^x − 1 and e^x − 1 − x; an x that overflows is one of a probability that underflows.
        let excess = x.min(700.0).exp_m1();
        let by_x = a * excess.abs();
        let size = if x.abs() < 1e-4 { a * x * x / 2.0 } else { a * (excess - x).abs() };
        let squared = kappa * between + x_moved;
        let mut bound = ErrorBound {
            scale: size * by_gap + by_x * between,
            floor: a * squared * squared / 2.0 + by_x * (of_own + of_other + x_moved) + size * a_moved,
        };
        // Over some entries the sum is the formula's own, which is not flat in an error of x.
        if self.of_some {
            bound.scale += a * (by_gap * x.abs() + between);
            bound.floor += a * (of_own * (1.0 + x.abs()) + of_other + a_moved * x.abs() + x_moved);
        }
        if self.is_standard() {
            bound.scale += a * (own * (1.0 + x.abs()) + other + x.abs());
            bound.floor += a * (of_own * (1.0 + x.abs()) + of_other);
        }
        bound
    }

    /// Bounds a bin's slope `G`; of the forward KL it is the relative error of the teacher's probability.
    fn slope_of(&self, bin: &DivergenceBin, errors: BinErrors, beta: f64) -> ErrorBound {
        let [of_student, of_teacher] = [self.shared[0] * errors.lever, self.shared[1]];
        let BinErrors { by_gap: [student, teacher], of_logp: [student_logp, teacher_logp], .. } = errors;
        let (size, moved) = (finite(bin.log_ratio), errors.of_logits);
        let between = student + teacher + size;
        match (beta, self.grade) {
            (0.0, Grade::Exact) => ErrorBound { scale: teacher, floor: of_teacher },
            (0.0, Grade::Standard) => ErrorBound { scale: teacher_logp, floor: of_teacher },
            (1.0, Grade::Exact) => ErrorBound { scale: between, floor: of_student + of_teacher + moved },
            (1.0, Grade::Standard) => ErrorBound {
                scale: student_logp * (2.0 + size) + teacher_logp + size,
                floor: of_student * (2.0 + size) + of_teacher + moved,
            },
            _ => {
                let mixed = Mixture::new(bin, errors, beta);
                let ([of_p, of_q], size) = (mixed.shares, finite(mixed.log_ratios[1]));
                let of_mixture = of_p * of_student + of_q * of_teacher;
                let bound = match self.grade {
                    Grade::Exact => {
                        ErrorBound { scale: of_q * between + size, floor: of_q * (of_student + of_teacher) }
                    }
                    Grade::Standard => ErrorBound {
                        scale: student_logp * (3.0 + size) + 2.0 * mixed.logp + size,
                        floor: of_student * (3.0 + size) + 2.0 * of_mixture,
                    },
                };
                bound.plus_floor(of_q * moved).times(1.0 - beta)
            }
        }
    }

    /// Bounds the dlogits of a block of vocabulary entries, whose divergence is multiplied by `weight`.
    pub(crate) fn columns(
        &self,
        reference: &Reference,
        token: &Token,
        columns: &TokenColumns,
        weight: f64,
    ) -> Vec<ErrorBound> {
        let Some(divergence) = reference.divergence(token) else { return Vec::new() };
        let (p, z) = (&columns.logp().probabilities, &columns.logp().z);
        let range = columns.first()..columns.first() + p.len();
        let factor = weight.abs() * divergence.factor / divergence.temperature;
        let flush = flushed(divergence, weight);
        let whole = &token.logp_softmax.stats;
        // Each column is a bin, evaluated here, if the teacher is given by its logits; the bins of K entries are known.
        let own: Vec<DivergenceBin> = match divergence.rest() {
            None => divergence.bins_in(reference.problem(), token.at, range.clone()),
            Some(_) => divergence.bins(reference.problem(), token.at),
        };
        let of_own = if divergence.rest().is_none() { bin_errors(divergence, whole, &own) } else { Vec::new() };
        let bound = |v: usize| {
            let column = StudentColumn {
                p: p[v],
                error: SoftmaxError::new(whole, z[v]),
                moved: self.logits.at(range.start + v),
            };
            let bin = match divergence.rest() {
                None => {
                    let errors = BinErrors { of_logits: column.moved, ..of_own[v] };
                    Some((&own[v], self.slope_of(&own[v], errors, divergence.teacher_weight), true))
                }
                Some(_) => divergence.bin_of(range.start + v).map(|k| {
                    (&own[k], self.of_bins[k], !(divergence.rest() == Some(TopKRest::Tail) && k + 1 == own.len()))
                }),
            };
            let bound = self.column(divergence, column, bin);
            let slopes = bin.map_or(0.0, |(bin, ..)| finite(bin.slope(divergence.teacher_weight)));
            ErrorBound {
                scale: bound.scale * factor,
                // Nothing is known of a tail that is lost.
                floor: if self.loses_tail {
                    f64::INFINITY
                } else {
                    bound.floor * factor + flush * (2.0 + slopes + finite(divergence.mean_slope()))
                },
            }
        };
        (0..p.len()).map(bound).collect()
    }

    /// Bounds the derivative by the exponent of one vocabulary entry; `bin` has its bin, the bound of that bin's slope, and whether the
    /// entry is all of it.
    fn column(
        &self,
        divergence: &TokenDivergence,
        StudentColumn { p, error: SoftmaxError { by_gap, of_logp }, moved }: StudentColumn,
        bin: Option<(&DivergenceBin, ErrorBound, bool)>,
    ) -> ErrorBound {
        let (beta, mean, [of_student, _]) = (divergence.teacher_weight, divergence.mean_slope(), self.shared);
        let relative = if self.is_standard() { of_logp } else { by_gap };
        // Entries outside have no part in a renormalised student; the textbook's sum of all slopes is 0 for them up to rounding.
        let p = match (divergence.rest(), bin) {
            (Some(TopKRest::Renormalized), Some((bin, ..))) => bin.student,
            (Some(TopKRest::Renormalized), None) if !self.is_standard() => 0.0,
            _ => p,
        };
        let (of_tail, tail) = self.through_tail;
        let at_mean = ErrorBound {
            scale: p * (finite(mean) * relative + self.mean.scale + 2.0 * (of_tail * relative + tail.scale)),
            floor: p * (finite(mean) * of_student + self.mean.floor + 2.0 * (of_tail * of_student + tail.floor)),
        };
        // An entry outside of those that are compared has p times the mean alone.
        let Some((bin, slope, is_all)) = bin else { return at_mean.plus_floor(p * finite(mean) * moved) };
        if beta == 0.0 {
            // p − q, or in the tail p − q·p/P.
            let share = if is_all { bin.teacher } else { times(p, (-bin.log_ratio).exp()) };
            // The textbook multiplies p by the sum of the teacher's probabilities, which is 1; of some entries it is not.
            let adds_up = self.is_standard() || divergence.rest() == Some(TopKRest::Ignored);
            let again = if is_all { 0.0 } else { relative + finite(bin.log_ratio) };
            // The share q·p/P moves with p and with P.
            let of_logits = p * moved + if is_all { 0.0 } else { share * (moved + self.of_tail) };
            return ErrorBound {
                scale: p * relative + share * (slope.scale + again) + if adds_up { p + at_mean.scale } else { 0.0 },
                floor: p * of_student + share * slope.floor + at_mean.floor + of_logits,
            };
        }
        let apart = finite(bin.slope(beta) - mean);
        ErrorBound {
            scale: p * (apart * relative + slope.scale + finite(mean)) + at_mean.scale,
            floor: p * (apart * (of_student + moved) + slope.floor) + at_mean.floor,
        }
    }

    /// Returns the factor of `p` in the errors that all dlogits of a token share, in proportion to their probabilities: those of the mean
    /// slope, or of the forward KL those of both sums of exponentials; and the relative error that all dlogits share.
    ///
    /// An error of the student's sum multiplies each `p(G − Ḡ)`, and with it every sum of them. One of the teacher's sum multiplies each
    /// `q = p − (p − q)`.
    pub(crate) fn shared_by_columns(&self, divergence: &TokenDivergence, weight: f64) -> (ErrorBound, ErrorBound) {
        let factor = weight.abs() * divergence.factor / divergence.temperature;
        let of_sum = |softmax: &Softmax, floor: f64| ErrorBound { scale: 1.0 + finite(softmax.mean_gap), floor };
        let student = of_sum(&divergence.student, self.shared[0] + self.logits.of_sum);
        if divergence.teacher_weight == 0.0 {
            let teacher = of_sum(&divergence.teacher, self.shared[1]);
            return (student.plus(teacher).plus(self.mean).times(factor), teacher);
        }
        (self.mean.times(factor), student)
    }
}

/// The student's part of a dlogit.
#[derive(Clone, Copy)]
struct StudentColumn {
    /// The probability over the vocabulary.
    p: f64,
    /// The errors of that probability and of its logarithm.
    error: SoftmaxError,
    /// The movement of its log-probability by the errors of the logits.
    moved: f64,
}

/// Bounds the error of the sum of all cotangents of log-probabilities with a tail, by which automatic differentiation multiplies every
/// probability `p`, `[V]`. The teacher's entries have `P·G` each, and every other entry a share of the tail's. A lane rounds what it
/// adds after one of the teacher's entries at the size of that entry, which may be thousands of times larger.
fn tail_cotangent_error(divergence: &TokenDivergence, bins: &[DivergenceBin], p: &[f64]) -> f64 {
    let beta = divergence.teacher_weight;
    let of_bin = |bin: &DivergenceBin| match beta {
        0.0 => bin.teacher,
        _ => times(bin.student, finite(bin.slope(beta)) + 1.0),
    };
    let (last, of_bins) = (bins.len() - 1, bins.iter().map(of_bin).collect::<Vec<f64>>());
    let of_entry = |(j, p): (usize, &f64)| match divergence.bin_of(j) {
        Some(k) if k < last => of_bins[k],
        _ => of_bins[last] * times(*p, 1.0 / bins[last].student),
    };
    let row: Vec<f64> = p.iter().enumerate().map(of_entry).collect();
    let size: f64 = of_bins.iter().sum();
    size * sum_error_at_any_scale(|factor| row.iter().map(move |term| (factor * term) as f32))
}

/// Returns the factor of a token's divergence in the loss.
pub(crate) fn weight_of(token: &Token) -> f64 {
    token.weight * token.inputs.policy_weight
}

/// Returns the part of a dlogit that may be flushed, of terms of the size 1.
pub(crate) fn flushed(divergence: &TokenDivergence, weight: f64) -> f64 {
    let factor = weight.abs() * divergence.factor / divergence.temperature;
    FLUSHED * (2.0 + factor + 1.0 / divergence.temperature)
}

/// One side of a divergence of two distributions.
struct KlSide {
    /// The probability `A` of the side that the divergence is weighted by.
    a: f64,
    /// The difference `x = ln B − ln A`.
    x: f64,
    /// The error `R` of `A`.
    by_gap: f64,
    /// The errors `C` of `ln A` and `ln B`.
    of_logp: [f64; 2],
    /// The movements of `ln A` and of `x` by the errors of the student's logits.
    of_logits: [f64; 2],
}

/// A bin's mixture `M = βQ + (1−β)P`.
struct Mixture {
    /// The differences `ln M − ln Q` and `ln M − ln P`.
    log_ratios: [f64; 2],
    /// The shares `(1−β)P/M` and `βQ/M`.
    shares: [f64; 2],
    /// The error of `ln M`, by a sum of exponentials of log-probabilities.
    logp: f64,
}

impl Mixture {
    fn new(bin: &DivergenceBin, errors: BinErrors, beta: f64) -> Self {
        let mixture = bin.mixture(beta);
        let share = |part: f64| if mixture > 0.0 { part / mixture } else { 0.0 };
        let shares = [share((1.0 - beta) * bin.student), share(beta * bin.teacher)];
        let log_weights = [(1.0 - beta).ln().abs(), beta.ln().abs()];
        let own =
            shares.iter().zip(errors.of_logp).zip(log_weights).map(|((share, error), log)| times(*share, error + log));
        let logp = 1.0 + if mixture > 0.0 { mixture.ln().abs() } else { 0.0 } + own.sum::<f64>();
        Self { log_ratios: bin.mixture_log_ratios(beta), shares, logp }
    }
}

/// The error of one entry's probability and log-probability, in units of `u`.
#[derive(Clone, Copy)]
struct SoftmaxError {
    by_gap: f64,
    of_logp: f64,
}

impl SoftmaxError {
    fn new(softmax: &Softmax, z: f64) -> Self {
        if z == f64::NEG_INFINITY {
            return Self { by_gap: 0.0, of_logp: 0.0 };
        }
        let by_gap = 1.0 + (softmax.max - z) + softmax.mean_gap;
        Self { by_gap, of_logp: by_gap + softmax.log_probability(z).abs() }
    }

    /// The error of an entry of which the log-probability is known.
    fn from_logp(softmax: &Softmax, logp: f64) -> Self {
        Self::new(softmax, logp + softmax.log_sum + softmax.max)
    }
}

/// Returns the errors of each bin.
fn bin_errors(divergence: &TokenDivergence, whole: &Softmax, bins: &[DivergenceBin]) -> Vec<BinErrors> {
    let rest = divergence.rest();
    // Log-probabilities over the vocabulary that are normalised once more are rounded at their own size, and have the errors of both sums.
    let again = match rest {
        Some(TopKRest::Renormalized) => {
            let outside = whole.max - divergence.student.max;
            let of_both = outside + (whole.log_sum - divergence.student.log_sum).abs();
            [of_both + whole.mean_gap + 1.0, finite(divergence.teacher.max + divergence.teacher.log_sum)]
        }
        _ => [0.0; 2],
    };
    // A given log-probability has no error but that of its exponential.
    let given = |bin: &DivergenceBin| {
        let size = if bin.teacher_logp.is_finite() { bin.teacher_logp.abs() } else { 0.0 };
        SoftmaxError { by_gap: 1.0 + size, of_logp: 1.0 + size }
    };
    let entry = |bin: &DivergenceBin| {
        let student = SoftmaxError::from_logp(&divergence.student, bin.student_logp);
        let teacher = match rest {
            None | Some(TopKRest::Renormalized) => SoftmaxError::from_logp(&divergence.teacher, bin.teacher_logp),
            Some(TopKRest::Tail | TopKRest::Ignored) => given(bin),
        };
        BinErrors {
            by_gap: [student.by_gap, teacher.by_gap],
            of_logp: [student.of_logp + again[0], teacher.of_logp + again[1]],
            lever: 1.0,
            of_logits: 0.0,
        }
    };
    let mut errors: Vec<BinErrors> = bins.iter().map(entry).collect();
    if let (Some(TopKRest::Tail), Some((tail, entries))) = (rest, bins.split_last()) {
        // The tail is 1 less a sum of probabilities, each with its error; or, of the student at grade `exact`, a sum of others.
        let sum = |of: fn(&DivergenceBin) -> f64, error: &dyn Fn(&BinErrors) -> f64| -> f64 {
            entries.iter().zip(&errors).map(|(bin, errors)| times(of(bin), error(errors))).sum()
        };
        let of_student = |bin: &DivergenceBin| bin.student;
        let of_teacher = |bin: &DivergenceBin| bin.teacher;
        let gaps_of_entries = sum(of_student, &|errors| errors.by_gap[0] - 1.0 - divergence.student.mean_gap);
        let over = |p: f64, error: f64| if p > 0.0 { error / p } else { 0.0 };
        let outside = (divergence.student.mean_gap - gaps_of_entries).max(0.0);
        let by_gap = 1.0 + divergence.student.mean_gap + over(tail.student, outside);
        let lost = [
            over(tail.student, 1.0 + sum(of_student, &|errors| errors.of_logp[0])),
            over(tail.teacher, 1.0 + sum(of_teacher, &|errors| errors.of_logp[1])),
        ];
        let logp = [tail.student_logp, tail.teacher_logp].map(finite);
        let last = errors.len() - 1;
        errors[last] = BinErrors {
            by_gap: [by_gap, 1.0 + lost[1]],
            of_logp: [1.0 + logp[0] + by_gap.max(lost[0]), 1.0 + logp[1] + lost[1]],
            lever: over(tail.student, 1.0 - tail.student).max(1.0),
            of_logits: 0.0,
        };
    }
    errors
}

/// Returns the derivative of a divergence by the probability of its tail, and how far it may be off.
fn through_tail(bins: &[DivergenceBin], errors: &[BinErrors], beta: f64, shared: f64) -> (f64, ErrorBound) {
    let (Some(tail), Some(errors)) = (bins.last(), errors.last()) else { return (0.0, ErrorBound::default()) };
    if tail.student == 0.0 {
        return (0.0, ErrorBound::default());
    }
    let slope = match beta {
        0.0 => tail.teacher / tail.student,
        1.0 => finite(tail.log_ratio) + 1.0,
        _ => (1.0 - beta) * (finite(tail.mixture_log_ratios(beta)[1]) + 2.0),
    };
    let scale = slope * (errors.of_logp.iter().sum::<f64>() + finite(tail.log_ratio) + 1.0);
    (slope, ErrorBound { scale, floor: slope * shared * errors.lever })
}

/// Returns the size of `x`, and 0 of a number that is not finite.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x.abs() } else { 0.0 }
}

/// Returns `factor · x`, and 0 if the factor is 0.
fn times(factor: f64, x: f64) -> f64 {
    if factor == 0.0 { 0.0 } else { factor * x }
}

fn times_finite(bound: ErrorBound, factor: f64) -> ErrorBound {
    if factor == 0.0 { ErrorBound::default() } else { bound.times(factor) }
}
