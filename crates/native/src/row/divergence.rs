//! Two rows of logits: the divergence of a student's distribution from a teacher's, and its gradient by the student's logits.
//!
//! With `m` and `n` the maxima of the rows `x` and `y`, each step is one walk over both rows, which are in the cache after the first:
//!
//! ```text
//! maxima   m, n
//! sums     a = (m − x)/T,  b = (n − y)/T,  S = Σ e^−a,  R = Σ e^−b
//! terms    P = e^−a/S,  Q = e^−b/R,  δ = b − a + ln R − ln S         the divergence, and Ḡ = Σ P·G
//! write    dx = w·(P − Q) of the forward KL, else w·P(G − Ḡ)
//! ```
//!
//! `Σ A (ln A − ln B)` cancels where student ≈ teacher, so its terms are `A·(e^d − 1 − d)` with `d = ln B − ln A`, of which none is
//! negative, and which is flat in the error of `ln R − ln S`. Where `d` is near 0 that is a polynomial in `d`; where it is not, it is
//! `(B − A) − A·d`. A mixture `M` has `d = ln(1 + (1−β)(e^δ − 1))` on the teacher's side, and `d = ln(1 + β(e^−δ − 1))` on the student's.
//!
//! A column without probability in either row has no part. One that the teacher lacks makes a reverse KL infinite, and one that the
//! student lacks a forward KL.

use super::NativeElement;
use assay_simd::exp::{Exp, SCALE, step};
use assay_simd::log::{Excess, Log};
use assay_simd::{Isa, LANES, Simd, SimdTask, Streaming, UNIT, prefetch, smallest};
use bytemuck::{cast_slice, cast_slice_mut};

/// Largest `|d|` at which a term is a polynomial in `d`.
const NEAR: f32 = 0.5;

/// Largest `|δ|` whose exponential is computed for a mixture, nats: beyond it the less likely side has no part, and the logarithm grows as
/// `|δ|` does.
const MOST_NATS: f32 = 40.0;

/// Bit 30 of an f32's bit pattern: set if the magnitude is at least 2 or the value is NaN.
const AT_LEAST_2: u32 = 1 << 30;

/// Number of nats that no difference of logarithms exceeds whose probabilities are not 0 in f32.
const FARTHEST: f32 = 1000.0;

/// Number of the values of [`PairScores`].
pub(crate) const PAIR_SCORES: usize = 6;

/// What all tokens of a batch have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairSettings {
    pub(crate) isa: Isa,
    /// Weight `β` of the teacher in the mixture: 0 is the forward KL, 1 the reverse one.
    pub(crate) teacher_weight: f64,
}

/// The softmaxes of a student and its teacher, and the divergence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairScores {
    /// Maxima `m` and `n`.
    maxima: [f64; 2],
    /// Logarithms of the sums `S` and `R`.
    log_sums: [f64; 2],
    /// The divergence, nats; NaN if a row has a NaN or a `+∞`, or no finite logit.
    pub(crate) divergence: f64,
    /// Mean slope `Ḡ = Σ P·G`.
    mean_slope: f64,
}

impl PairScores {
    /// Returns the scores as numbers, to be kept.
    pub(crate) fn numbers(self) -> [f64; PAIR_SCORES] {
        let Self { maxima: [m, n], log_sums: [s, r], divergence, mean_slope } = self;
        [m, n, s, r, divergence, mean_slope]
    }

    /// Returns the scores of a token of which nothing but the divergence is kept.
    pub(crate) fn of_divergence(divergence: f64) -> Self {
        Self { maxima: [0.0; 2], log_sums: [0.0; 2], divergence, mean_slope: 0.0 }
    }

    /// Returns the scores of the numbers that were kept.
    pub(crate) fn from_numbers([m, n, s, r, divergence, mean_slope]: [f64; PAIR_SCORES]) -> Self {
        Self { maxima: [m, n], log_sums: [s, r], divergence, mean_slope }
    }
}

impl PairSettings {
    /// Scores the rows of a student and its teacher, whose gaps `rate` multiplies.
    pub(crate) fn score<E: NativeElement>(self, student: &[E], teacher: &[E], rate: f64) -> PairScores {
        let rows = PairRows { student, teacher };
        let Maxima { maxima: [m, n], is_valid } = self.isa.run(MaximaTask(rows));
        let maxima = [f64::from(m), f64::from(n)];
        if !is_valid || !m.is_finite() || !n.is_finite() {
            return PairScores { maxima, log_sums: [f64::NAN; 2], divergence: f64::NAN, mean_slope: f64::NAN };
        }
        let log_sums = self.isa.run(SumsTask { rows, maxima: [m, n], rate }).map(f64::ln);
        let pair = PairExponent { maxima: [m, n], log_sums, rate };
        let (divergence, mean_slope) = match self.teacher_weight {
            0.0 => (self.isa.run(TermsTask { rows, pair, terms: ForwardTerms })[0], -1.0),
            1.0 => {
                let [divergence, _] = self.isa.run(TermsTask { rows, pair, terms: ReverseTerms });
                (divergence, divergence)
            }
            beta => {
                let [divergence, student_ratio] = self.isa.run(TermsTask { rows, pair, terms: MixtureTerms(beta) });
                (divergence, -(1.0 - beta) * student_ratio)
            }
        };
        PairScores { maxima, log_sums, divergence, mean_slope }
    }

    /// Writes `weight` times the gradient of the divergence by the student's exponents to `dlogits`, or over the student if that is
    /// `None`. An infinite reverse KL has no gradient: every number is NaN.
    pub(crate) fn write<E: NativeElement>(
        self,
        student: Option<&[E]>,
        dlogits: &mut [E],
        teacher: &[E],
        scores: &PairScores,
        rate: f64,
        weight: f64,
    ) {
        let PairScores { maxima, log_sums, divergence, mean_slope } = *scores;
        // A weight of 0 leaves the token out, so that nothing multiplies it into a NaN.
        if weight == 0.0 {
            dlogits.fill(E::from_f32(0.0));
            return;
        }
        if divergence.is_nan() || !mean_slope.is_finite() || !weight.is_finite() {
            dlogits.fill(E::from_f32(f32::NAN));
            return;
        }
        let pair = PairExponent { maxima: maxima.map(|max| max as f32), log_sums, rate };
        let place = Place { student, dlogits, teacher };
        match self.teacher_weight {
            0.0 => self.isa.run(WriteTask { place, pair, terms: ForwardTerms, weight, mean_slope }),
            1.0 => self.isa.run(WriteTask { place, pair, terms: ReverseTerms, weight, mean_slope }),
            beta => self.isa.run(WriteTask { place, pair, terms: MixtureTerms(beta), weight, mean_slope }),
        }
    }
}

/// The rows of a student and its teacher, of the same length.
#[derive(Clone, Copy)]
struct PairRows<'r, E> {
    student: &'r [E],
    teacher: &'r [E],
}

impl<'r, E: NativeElement> PairRows<'r, E> {
    /// Returns the whole units of both rows.
    #[inline(always)]
    fn units(self) -> impl Iterator<Item = (&'r [E; UNIT], &'r [E; UNIT])> {
        self.student.as_chunks().0.iter().zip(self.teacher.as_chunks().0)
    }

    /// Returns what is beyond the whole units, with −∞ where the row has ended; `None` if nothing is.
    #[inline(always)]
    fn tail(self) -> Option<([E; UNIT], [E; UNIT])> {
        let (student, teacher) = (self.student.as_chunks::<UNIT>().1, self.teacher.as_chunks::<UNIT>().1);
        (!student.is_empty()).then(|| (padded(student), padded(teacher)))
    }
}

/// Returns the end of a row, and −∞ after it.
fn padded<E: NativeElement>(tail: &[E]) -> [E; UNIT] {
    let mut unit = [E::MINUS_INFINITY; UNIT];
    unit[..tail.len()].copy_from_slice(tail);
    unit
}

/// The largest logits of both rows.
struct Maxima {
    maxima: [f32; 2],
    /// Whether neither row has a NaN or a `+∞`.
    is_valid: bool,
}

/// The walk that finds the maxima.
struct MaximaTask<'r, E>(PairRows<'r, E>);

impl<E: NativeElement> SimdTask for MaximaTask<'_, E> {
    type Output = Maxima;

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> Maxima {
        let mut running = RunningMaxima {
            largest: [simd.splat(f32::NEG_INFINITY); 2],
            zeros: simd.splat(0.0),
            least: simd.splat(f32::MIN),
        };
        for (x, y) in self.0.units() {
            prefetch(x);
            prefetch(y);
            running.add(simd, x, y);
        }
        if let Some((x, y)) = self.0.tail() {
            running.add(simd, &x, &y);
        }
        let (mut lanes, mut maxima) = ([0.0; LANES], [f32::NEG_INFINITY; 2]);
        for (largest, max) in running.largest.into_iter().zip(&mut maxima) {
            simd.store(largest, &mut lanes);
            *max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        }
        simd.store(running.zeros, &mut lanes);
        Maxima { maxima, is_valid: lanes.into_iter().all(|x| x == 0.0) }
    }
}

/// The maxima so far.
struct RunningMaxima<S: Simd> {
    largest: [S::Lanes; 2],
    /// Sum of `0·x` over all logits but −∞: 0, or NaN if one was a NaN or `+∞`.
    zeros: S::Lanes,
    least: S::Lanes,
}

impl<S: Simd> RunningMaxima<S> {
    #[inline(always)]
    fn add<E: NativeElement>(&mut self, simd: S, x: &[E; UNIT], y: &[E; UNIT]) {
        let zero = simd.splat(0.0);
        let rows = [E::load(simd, x), E::load(simd, y)];
        for (row, [low, high]) in rows.into_iter().enumerate() {
            self.largest[row] = simd.max(high, simd.max(low, self.largest[row]));
            // The second operand is selected where either is NaN.
            self.zeros = simd.mul_add(simd.max(self.least, low), zero, self.zeros);
            self.zeros = simd.mul_add(simd.max(self.least, high), zero, self.zeros);
        }
    }
}

/// The walk that sums the exponentials of both rows.
struct SumsTask<'r, E> {
    rows: PairRows<'r, E>,
    maxima: [f32; 2],
    /// Factor `1/T`.
    rate: f64,
}

impl<E: NativeElement> SimdTask for SumsTask<'_, E> {
    type Output = [f64; 2];

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> [f64; 2] {
        let pair = PairExponent { maxima: self.maxima, log_sums: [0.0; 2], rate: self.rate };
        let lanes = PairLanes::new(simd, pair, 1.0);
        let mut sums = [simd.sums(); 2];
        for (x, y) in self.rows.units() {
            sums = lanes.added(simd, sums, x, y);
        }
        if let Some((x, y)) = self.rows.tail() {
            sums = lanes.added(simd, sums, &x, &y);
        }
        sums.map(|sums| simd.total(sums))
    }
}

/// The exponents of two softmaxes.
#[derive(Clone, Copy)]
struct PairExponent {
    maxima: [f32; 2],
    log_sums: [f64; 2],
    /// Factor `1/T`.
    rate: f64,
}

/// What the probabilities of both rows are computed with.
#[derive(Clone, Copy)]
struct PairLanes<S: Simd> {
    exp: Exp<S>,
    maxima: [S::Lanes; 2],
    /// Factors `2^−64/S` and `2^−64/R` of exponentials, and the smallest ones that are not flushed to 0.
    shares: [S::Lanes; 2],
    smallest: [S::Lanes; 2],
    /// One step of the gaps, in nats.
    step: S::Lanes,
    /// Difference `ln R − ln S`.
    constant: S::Lanes,
}

/// A unit's probabilities, and the difference of their logarithms.
struct UnitPair<S: Simd> {
    student: [S::Lanes; 2],
    teacher: [S::Lanes; 2],
    /// Difference `δ = ln P − ln Q`; NaN where both rows are −∞.
    log_ratio: [S::Lanes; 2],
}

impl<S: Simd> PairLanes<S> {
    /// Prepares probabilities that are multiplied by at most `largest`: smaller ones than stay normal numbers then are 0.
    #[inline(always)]
    fn new(
        simd: S,
        PairExponent { maxima: [m, n], log_sums: [of_student, of_teacher], rate }: PairExponent,
        largest: f64,
    ) -> Self {
        let (student, teacher) = ((-of_student).exp(), (-of_teacher).exp());
        Self {
            exp: Exp::new(simd, rate),
            maxima: [simd.splat(m), simd.splat(n)],
            shares: [simd.splat((student / SCALE) as f32), simd.splat((teacher / SCALE) as f32)],
            smallest: [
                simd.splat(smallest(student * largest.abs().min(1.0))),
                simd.splat(smallest(teacher * largest.abs().min(1.0))),
            ],
            step: simd.splat((step(rate) * rate) as f32),
            constant: simd.splat((of_teacher - of_student) as f32),
        }
    }

    #[inline(always)]
    fn unit<E: NativeElement>(&self, simd: S, x: &[E; UNIT], y: &[E; UNIT]) -> UnitPair<S> {
        let ([x_low, x_high], [y_low, y_high]) = (E::load(simd, x), E::load(simd, y));
        let [m, n] = self.maxima;
        let a = [self.exp.distance(simd, m, x_low), self.exp.distance(simd, m, x_high)];
        let b = [self.exp.distance(simd, n, y_low), self.exp.distance(simd, n, y_high)];
        let mut gaps = [a[0], a[1], b[0], b[1]];
        for gap in &mut gaps {
            *gap = self.exp.at_most_far(simd, *gap);
        }
        let [x_low, x_high, y_low, y_high] = self.exp.scaled(simd, gaps);
        let [student, teacher] = self.shares;
        let [of_student, of_teacher] = self.smallest;
        UnitPair {
            student: [
                simd.mul(simd.at_least(x_low, of_student), student),
                simd.mul(simd.at_least(x_high, of_student), student),
            ],
            teacher: [
                simd.mul(simd.at_least(y_low, of_teacher), teacher),
                simd.mul(simd.at_least(y_high, of_teacher), teacher),
            ],
            log_ratio: [
                simd.mul_add(simd.sub(b[0], a[0]), self.step, self.constant),
                simd.mul_add(simd.sub(b[1], a[1]), self.step, self.constant),
            ],
        }
    }

    /// Adds the probabilities of a unit to sums.
    #[inline(always)]
    fn added<E: NativeElement>(
        &self,
        simd: S,
        [student, teacher]: [S::Sums; 2],
        x: &[E; UNIT],
        y: &[E; UNIT],
    ) -> [S::Sums; 2] {
        let pair = self.unit(simd, x, y);
        let [p_low, p_high] = pair.student;
        let [q_low, q_high] = pair.teacher;
        [simd.accumulate(student, simd.add(p_low, p_high)), simd.accumulate(teacher, simd.add(q_low, q_high))]
    }
}

/// The terms of one kind of divergence.
trait Terms: Copy {
    /// What is prepared for a row.
    type Lanes<S: Simd>: TermLanes<S>;

    fn lanes<S: Simd>(self, simd: S) -> Self::Lanes<S>;
}

/// The terms of one kind of divergence, on one vector unit.
trait TermLanes<S: Simd>: Copy {
    /// Returns the terms of a unit, added up by halves, and the products `P·(ln M − ln P)` of a mixture.
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2];

    /// Returns a unit's dlogits, of factors that are the weight and the weight times the mean slope.
    fn dlogits(&self, simd: S, pair: &UnitPair<S>, factors: [S::Lanes; 2]) -> [S::Lanes; 2];
}

/// The walk that sums the terms of a divergence.
struct TermsTask<'r, E, T> {
    rows: PairRows<'r, E>,
    pair: PairExponent,
    terms: T,
}

impl<E: NativeElement, T: Terms> SimdTask for TermsTask<'_, E, T> {
    type Output = [f64; 2];

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) -> [f64; 2] {
        let (lanes, terms) = (PairLanes::new(simd, self.pair, 1.0), self.terms.lanes(simd));
        let mut sums = [simd.sums(); 2];
        for (x, y) in self.rows.units() {
            let [value, slope] = terms.terms(simd, &lanes.unit(simd, x, y));
            sums = [simd.accumulate(sums[0], value), simd.accumulate(sums[1], slope)];
        }
        if let Some((x, y)) = self.rows.tail() {
            let [value, slope] = terms.terms(simd, &lanes.unit(simd, &x, &y));
            sums = [simd.accumulate(sums[0], value), simd.accumulate(sums[1], slope)];
        }
        sums.map(|sums| simd.total(sums))
    }
}

/// A teacher's row, and the student's with the place of its dlogits.
struct Place<'r, E> {
    /// Logits of the student; `None` if dlogits overwrite them.
    student: Option<&'r [E]>,
    dlogits: &'r mut [E],
    teacher: &'r [E],
}

/// The walk that writes dlogits.
struct WriteTask<'r, E, T> {
    place: Place<'r, E>,
    pair: PairExponent,
    terms: T,
    weight: f64,
    mean_slope: f64,
}

impl<E: NativeElement, T: Terms> SimdTask for WriteTask<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn on<S: Simd>(self, simd: S) {
        let Self { place: Place { student, dlogits, teacher }, pair, terms, weight, mean_slope } = self;
        let (lanes, terms) = (PairLanes::new(simd, pair, weight), terms.lanes(simd));
        let factors = [simd.splat(weight as f32), simd.splat((weight * mean_slope) as f32)];
        let streaming = Streaming::begin();
        let (units, tail) = teacher.as_chunks::<UNIT>();
        let mut made = [E::MINUS_INFINITY; UNIT];
        for (i, y) in units.iter().enumerate() {
            let to: &mut [E; UNIT] = (&mut dlogits[i * UNIT..][..UNIT]).try_into().expect("a whole unit");
            match student {
                // Dlogits in a separate array are streamed past the caches.
                Some(student) => {
                    let x: &[E; UNIT] = student[i * UNIT..][..UNIT].try_into().expect("a whole unit");
                    E::store(simd, terms.dlogits(simd, &lanes.unit(simd, x, y), factors), &mut made);
                    streaming.copy(cast_slice(&made), cast_slice_mut(to));
                }
                None => E::store(simd, terms.dlogits(simd, &lanes.unit(simd, to, y), factors), to),
            }
        }
        if !tail.is_empty() {
            let to = &mut dlogits[units.len() * UNIT..];
            let x = padded(student.map_or(&*to, |student| &student[units.len() * UNIT..]));
            E::store(simd, terms.dlogits(simd, &lanes.unit(simd, &x, &padded(tail)), factors), &mut made);
            to.copy_from_slice(&made[..to.len()]);
        }
    }
}

/// The forward KL, `KL(Q‖P)`.
#[derive(Clone, Copy)]
struct ForwardTerms;

/// The reverse KL, `KL(P‖Q)`.
#[derive(Clone, Copy)]
struct ReverseTerms;

/// The generalised Jensen–Shannon divergence with the weight `β` of the teacher.
#[derive(Clone, Copy)]
struct MixtureTerms(f64);

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
struct ForwardLanes<S: Simd>(KlTerm<S>);

impl<S: Simd> TermLanes<S> for ForwardLanes<S> {
    #[inline(always)]
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2] {
        let [low, high] = self.0.of(simd, pair.teacher, pair.student, pair.log_ratio);
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
struct ReverseLanes<S: Simd>(KlTerm<S>);

impl<S: Simd> TermLanes<S> for ReverseLanes<S> {
    #[inline(always)]
    fn terms(&self, simd: S, pair: &UnitPair<S>) -> [S::Lanes; 2] {
        let [low, high] = self.0.of(simd, pair.student, pair.teacher, minus(simd, pair.log_ratio));
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
    fn of(&self, simd: S, a: [S::Lanes; 2], b: [S::Lanes; 2], d: [S::Lanes; 2]) -> [S::Lanes; 2] {
        let (sizes, any_far) = sizes(simd, d, 2.0 / NEAR);
        if !any_far {
            let [low, high] = self.0.of(simd, d);
            return [simd.mul(a[0], low), simd.mul(a[1], high)];
        }
        let near = self.0.of(simd, held(simd, d, NEAR));
        let mut terms = a;
        for i in 0..2 {
            // A = 0 leaves B, whatever the logarithm is.
            let far = simd.sub(simd.sub(b[i], a[i]), without_nan(simd, simd.mul(a[i], d[i])));
            terms[i] = selected(simd, sizes[i], simd.mul(a[i], near[i]), far);
        }
        terms
    }
}

/// The mixture `M = βQ + (1−β)P`.
#[derive(Clone, Copy)]
struct MixtureLanes<S: Simd> {
    /// Weights `1 − β` and `β` of student and teacher.
    weights: [S::Lanes; 2],
    /// Exponentials of numbers below 0, and their steps in a nat.
    exp: Exp<S>,
    steps_a_nat: S::Lanes,
    excess: Excess<S>,
    log: Log<S>,
}

impl<S: Simd> MixtureLanes<S> {
    #[inline(always)]
    fn new(simd: S, beta: f64) -> Self {
        Self {
            weights: [simd.splat((1.0 - beta) as f32), simd.splat(beta as f32)],
            exp: Exp::new(simd, 1.0),
            steps_a_nat: simd.splat((1.0 / step(1.0)) as f32),
            excess: Excess::new(simd),
            log: Log::new(simd),
        }
    }

    /// Returns `e^δ − 1` and `e^−δ − 1`.
    #[inline(always)]
    fn growths(&self, simd: S, log_ratio: [S::Lanes; 2], sizes: [S::Lanes; 2], any_far: bool) -> [[S::Lanes; 2]; 2] {
        let one = simd.splat(1.0);
        let above = if any_far { held(simd, log_ratio, NEAR) } else { log_ratio };
        let ([low, high], [minus_low, minus_high]) = (above, minus(simd, above));
        let d = [low, high, minus_low, minus_high];
        let excess = self.excess.of(simd, d);
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
        let mut logs = self.log.of_rounded(simd, x, [simd.mul(growth[0], weight), simd.mul(growth[1], weight)]);
        for (log, d) in logs.iter_mut().zip(d) {
            // Where a probability is 0, `d` may be infinite or NaN.
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
        let [q_low, q_high, p_low, p_high] = self.excess.of(simd, [near[0][0], near[0][1], near[1][0], near[1][1]]);
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
