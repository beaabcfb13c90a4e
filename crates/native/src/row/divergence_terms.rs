//! The terms of a divergence of two rows, and their slopes, a unit at a time.
//!
//! `Σ A (ln A − ln B)` cancels where student ≈ teacher, so its terms are `A·(e^d − 1 − d)` with `d = ln B − ln A`, of which none is
//! negative, and which is flat in the error of `ln R − ln S`. Where `d` is near 0 that is a polynomial in `d`; where it is not, it is
//! `(B − A) − A·d`. A mixture `M` has `d = ln(1 + (1−β)(e^δ − 1))` on the teacher's side, and `d = ln(1 + β(e^−δ − 1))` on the student's.
//!
//! A column without probability in either row has no part. One that the teacher lacks makes a reverse KL infinite, and one that the
//! student lacks a forward KL.

use super::divergence::UnitPair;
use assay_simd::Simd;
use assay_simd::exp::{Exp, SCALE, step};
use assay_simd::log::{Excess, Logarithm};

/// Largest `|d|` at which a term is a polynomial in `d`.
const NEAR: f32 = 0.5;

/// Largest `|δ|` whose exponential is computed for a mixture, nats: beyond it the less likely side has no part, and the logarithm grows as
/// `|δ|` does.
const MOST_NATS: f32 = 40.0;

/// Bit 30 of an f32's bit pattern: set if the magnitude is at least 2 or the value is NaN.
const AT_LEAST_2: u32 = 1 << 30;

/// Number of nats that no difference of logarithms exceeds whose probabilities are not 0 in f32.
const FARTHEST: f32 = 1000.0;

/// The terms of one kind of divergence.
pub(super) trait Terms: Copy {
    /// The vectors that a row's terms are computed with.
    type Lanes<S: Simd>: TermLanes<S>;

    fn lanes<S: Simd>(self, simd: S) -> Self::Lanes<S>;
}

/// The terms of one kind of divergence, on one vector unit.
pub(super) trait TermLanes<S: Simd>: Copy {
    /// Returns the terms of a unit, added up by halves, and the products `P·(ln M − ln P)` of a mixture.
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2];

    /// Returns a unit's dlogits, of factors that are the weight and the weight times the mean slope.
    fn dlogits(&self, simd: S, pair: &UnitPair<S>, factors: [S::Lanes; 2]) -> [S::Lanes; 2];
}

/// The terms of the forward KL, `KL(Q‖P)`.
#[derive(Clone, Copy)]
pub(super) struct ForwardTerms;

/// The terms of the reverse KL, `KL(P‖Q)`.
#[derive(Clone, Copy)]
pub(super) struct ReverseTerms;

/// The terms of the generalised Jensen–Shannon divergence with the weight `β` of the teacher.
#[derive(Clone, Copy)]
pub(super) struct MixtureTerms(pub(super) f64);

impl Terms for ForwardTerms {
    type Lanes<S: Simd> = ForwardLanes<S>;

    #[inline(always)]
    fn lanes<S: Simd>(self, simd: S) -> ForwardLanes<S> {
        ForwardLanes(KlTerm::new(simd))
    }
}

impl Terms for ReverseTerms {
    type Lanes<S: Simd> = ReverseLanes<S>;

    #[inline(always)]
    fn lanes<S: Simd>(self, simd: S) -> ReverseLanes<S> {
        ReverseLanes(KlTerm::new(simd))
    }
}

impl Terms for MixtureTerms {
    type Lanes<S: Simd> = MixtureLanes<S>;

    #[inline(always)]
    fn lanes<S: Simd>(self, simd: S) -> MixtureLanes<S> {
        MixtureLanes::new(simd, self.0)
    }
}

#[derive(Clone, Copy)]
pub(super) struct ForwardLanes<S: Simd>(KlTerm<S>);

impl<S: Simd> TermLanes<S> for ForwardLanes<S> {
    #[inline(always)]
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2] {
        let [low, high] = self.0.terms(simd, pair.teacher, pair.student, pair.log_ratio);
        [simd.add(low, high), simd.splat(0.0)]
    }

    #[inline(always)]
    fn dlogits(&self, simd: S, pair: &UnitPair<S>, [weight, minus_weight]: [S::Lanes; 2]) -> [S::Lanes; 2] {
        // The mean slope of a forward KL is −1.
        let ([p_low, p_high], [q_low, q_high]) = (pair.student, pair.teacher);
        [
            simd.mul_add(p_low, weight, simd.mul(q_low, minus_weight)),
            simd.mul_add(p_high, weight, simd.mul(q_high, minus_weight)),
        ]
    }
}

#[derive(Clone, Copy)]
pub(super) struct ReverseLanes<S: Simd>(KlTerm<S>);

impl<S: Simd> TermLanes<S> for ReverseLanes<S> {
    #[inline(always)]
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2] {
        let [low, high] = self.0.terms(simd, pair.student, pair.teacher, minus(simd, pair.log_ratio));
        [simd.add(low, high), simd.splat(0.0)]
    }

    #[inline(always)]
    fn dlogits(&self, simd: S, pair: &UnitPair<S>, [weight, mean]: [S::Lanes; 2]) -> [S::Lanes; 2] {
        let ([p_low, p_high], [low, high]) = (pair.student, pair.log_ratio);
        [
            without_nan(simd, simd.mul(p_low, simd.mul_sub(low, weight, mean))),
            without_nan(simd, simd.mul(p_high, simd.mul_sub(high, weight, mean))),
        ]
    }
}

/// Puts 0 in the place of each NaN: of a product of a probability 0 and an infinite logarithm.
#[inline(always)]
fn without_nan<S: Simd>(simd: S, x: S::Lanes) -> S::Lanes {
    let zero = simd.splat(0.0);
    simd.add(simd.max(x, zero), simd.min(x, zero))
}

/// Changes the sign of both vectors.
#[inline(always)]
fn minus<S: Simd>(simd: S, [low, high]: [S::Lanes; 2]) -> [S::Lanes; 2] {
    let zero = simd.splat(0.0);
    [simd.sub(zero, low), simd.sub(zero, high)]
}

/// Returns the sizes of both vectors times `factor`, and whether one is at least 2.
#[inline(always)]
fn sizes<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], factor: f32) -> ([S::Lanes; 2], bool) {
    let (zero, factor) = (simd.splat(0.0), simd.splat(factor));
    let low = simd.mul(simd.max(low, simd.sub(zero, low)), factor);
    let high = simd.mul(simd.max(high, simd.sub(zero, high)), factor);
    ([low, high], simd.any_set(simd.either(low, high, high), AT_LEAST_2))
}

/// Selects `far` where `size` is at least 2, else `near`, which must be finite. A NaN for a size is near.
#[inline(always)]
fn selected<S: Simd>(simd: S, size: S::Lanes, near: S::Lanes, far: S::Lanes) -> S::Lanes {
    let is_far = simd.min(simd.at_least(size, simd.splat(2.0)), simd.splat(1.0));
    simd.mul_add(simd.sub(far, near), is_far, near)
}

/// Holds both vectors to `±most`; a NaN becomes `most`.
#[inline(always)]
fn held<S: Simd>(simd: S, [low, high]: [S::Lanes; 2], most: f32) -> [S::Lanes; 2] {
    let (least, most) = (simd.splat(-most), simd.splat(most));
    [simd.max(simd.min(low, most), least), simd.max(simd.min(high, most), least)]
}

/// The term `A·(e^d − 1 − d) = B − A − A·d` of `KL(A‖B)`, with `d = ln B − ln A`.
#[derive(Clone, Copy)]
struct KlTerm<S: Simd>(Excess<S>);

impl<S: Simd> KlTerm<S> {
    #[inline(always)]
    fn new(simd: S) -> Self {
        Self(Excess::new(simd))
    }

    #[inline(always)]
    fn terms(&self, simd: S, a: [S::Lanes; 2], b: [S::Lanes; 2], d: [S::Lanes; 2]) -> [S::Lanes; 2] {
        let (sizes, any_far) = sizes(simd, d, 2.0 / NEAR);
        if !any_far {
            let [low, high] = self.0.apply(simd, d);
            return [simd.mul(a[0], low), simd.mul(a[1], high)];
        }
        let near = self.0.apply(simd, held(simd, d, NEAR));
        let mut terms = a;
        for i in 0..2 {
            // A = 0 leaves B, whatever the logarithm is.
            let far = simd.sub(simd.sub(b[i], a[i]), without_nan(simd, simd.mul(a[i], d[i])));
            terms[i] = selected(simd, sizes[i], simd.mul(a[i], near[i]), far);
        }
        terms
    }
}

/// The terms of the mixture `M = βQ + (1−β)P`, on one vector unit.
#[derive(Clone, Copy)]
pub(super) struct MixtureLanes<S: Simd> {
    /// Weights `1 − β` and `β` of student and teacher.
    weights: [S::Lanes; 2],
    /// Exponentials of numbers below 0, and their steps in a nat.
    exp: Exp<S>,
    steps_a_nat: S::Lanes,
    excess: Excess<S>,
    log: Logarithm<S>,
}

impl<S: Simd> MixtureLanes<S> {
    #[inline(always)]
    fn new(simd: S, beta: f64) -> Self {
        Self {
            weights: [simd.splat((1.0 - beta) as f32), simd.splat(beta as f32)],
            exp: Exp::new(simd, 1.0),
            steps_a_nat: simd.splat((1.0 / step(1.0)) as f32),
            excess: Excess::new(simd),
            log: Logarithm::new(simd),
        }
    }

    /// Returns `e^δ − 1` and `e^−δ − 1`.
    #[inline(always)]
    fn growths(&self, simd: S, log_ratio: [S::Lanes; 2], sizes: [S::Lanes; 2], any_far: bool) -> [[S::Lanes; 2]; 2] {
        let one = simd.splat(1.0);
        let above = if any_far { held(simd, log_ratio, NEAR) } else { log_ratio };
        let ([low, high], [minus_low, minus_high]) = (above, minus(simd, above));
        let d = [low, high, minus_low, minus_high];
        let excess = self.excess.apply(simd, d);
        let mut growths = [
            [simd.add(d[0], excess[0]), simd.add(d[1], excess[1])],
            [simd.add(d[2], excess[2]), simd.add(d[3], excess[3])],
        ];
        if any_far {
            // e^−|δ| and its reciprocal: the growth of the side that is less likely, and that of the other.
            let most = simd.splat(MOST_NATS * 2.0 / NEAR);
            let to_steps = simd.mul(self.steps_a_nat, simd.splat(NEAR / 2.0));
            let gaps = [simd.mul(simd.min(sizes[0], most), to_steps), simd.mul(simd.min(sizes[1], most), to_steps)];
            let exps = self.exp.scaled(simd, gaps);
            for i in 0..2 {
                let lower = simd.mul(exps[i], simd.splat((1.0 / SCALE) as f32));
                let (fall, rise) = (simd.sub(lower, one), simd.sub(simd.div(one, lower), one));
                // 1 where δ is at least that of the polynomials, 0 where it is at most the opposite.
                let is_above = simd.mul(simd.at_least(d[i], simd.splat(NEAR)), simd.splat(1.0 / NEAR));
                let apart = simd.sub(rise, fall);
                let of_teacher = simd.mul_add(apart, is_above, fall);
                let of_student = simd.mul_add(apart, simd.sub(one, is_above), fall);
                growths[0][i] = selected(simd, sizes[i], growths[0][i], of_teacher);
                growths[1][i] = selected(simd, sizes[i], growths[1][i], of_student);
            }
        }
        growths
    }

    /// Returns `ln(1 + weight·(e^d − 1))`, of which `growth` is `e^d − 1` and `other` is `1 − weight`.
    #[inline(always)]
    fn log_of(
        &self,
        simd: S,
        d: [S::Lanes; 2],
        growth: [S::Lanes; 2],
        [weight, other]: [S::Lanes; 2],
    ) -> [S::Lanes; 2] {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let x = [
            simd.mul_add(simd.add(growth[0], one), weight, other),
            simd.mul_add(simd.add(growth[1], one), weight, other),
        ];
        let mut logs = self.log.log_of_sum(simd, x, [simd.mul(growth[0], weight), simd.mul(growth[1], weight)]);
        for (log, d) in logs.iter_mut().zip(d) {
            // An infinite or NaN `d` occurs only where a probability is 0.
            let beyond = simd.max(simd.sub(d, simd.splat(MOST_NATS)), zero);
            *log = simd.add(*log, simd.min(beyond, simd.splat(FARTHEST)));
        }
        logs
    }

    /// Returns `βQ·q + (1−β)P·p` of a unit.
    #[inline(always)]
    fn weighed(&self, simd: S, pair: &UnitPair<S>, [q, p]: [[S::Lanes; 2]; 2]) -> [S::Lanes; 2] {
        let [of_student, of_teacher] = self.weights;
        let mut sums = p;
        for i in 0..2 {
            let (student, teacher) = (simd.mul(pair.student[i], of_student), simd.mul(pair.teacher[i], of_teacher));
            sums[i] = simd.mul_add(student, p[i], simd.mul(teacher, q[i]));
        }
        sums
    }
}

impl<S: Simd> TermLanes<S> for MixtureLanes<S> {
    #[inline(always)]
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2] {
        let (sizes, any_far) = sizes(simd, pair.log_ratio, 2.0 / NEAR);
        let [of_student, of_teacher] = self.weights;
        // M/Q = 1 + (1−β)(e^δ − 1), and M/P = 1 + β(e^−δ − 1).
        let [of_q, of_p] = self.growths(simd, pair.log_ratio, sizes, any_far);
        let q = self.log_of(simd, pair.log_ratio, of_q, [of_student, of_teacher]);
        let p = self.log_of(simd, minus(simd, pair.log_ratio), of_p, [of_teacher, of_student]);
        let near = if any_far { [held(simd, q, NEAR), held(simd, p, NEAR)] } else { [q, p] };
        let [q_low, q_high, p_low, p_high] = self.excess.apply(simd, [near[0][0], near[0][1], near[1][0], near[1][1]]);
        let mut terms = self.weighed(simd, pair, [[q_low, q_high], [p_low, p_high]]);
        if any_far {
            // The parts B − A of both sides cancel: β(M − Q) + (1−β)(M − P) = 0.
            let (sums, zero) = (self.weighed(simd, pair, [q, p]), simd.splat(0.0));
            for i in 0..2 {
                terms[i] = selected(simd, sizes[i], terms[i], simd.sub(zero, sums[i]));
            }
        }
        let slope = simd.mul_add(pair.student[0], p[0], simd.mul(pair.student[1], p[1]));
        [simd.add(terms[0], terms[1]), slope]
    }

    #[inline(always)]
    fn dlogits(&self, simd: S, pair: &UnitPair<S>, [weight, mean]: [S::Lanes; 2]) -> [S::Lanes; 2] {
        let (sizes, any_far) = sizes(simd, pair.log_ratio, 2.0 / NEAR);
        let [of_student, of_teacher] = self.weights;
        let [_, of_p] = self.growths(simd, pair.log_ratio, sizes, any_far);
        let [low, high] = self.log_of(simd, minus(simd, pair.log_ratio), of_p, [of_teacher, of_student]);
        // G = −(1−β)(ln M − ln P).
        let ([p_low, p_high], zero) = (pair.student, simd.splat(0.0));
        let slope = simd.sub(zero, simd.mul(of_student, weight));
        let mean = simd.sub(zero, mean);
        [simd.mul(p_low, simd.mul_add(low, slope, mean)), simd.mul(p_high, simd.mul_add(high, slope, mean))]
    }
}
