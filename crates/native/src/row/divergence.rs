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
//! The terms and their slopes are those of [`super::divergence_terms`].

use super::NativeElement;
use super::divergence_terms::{ForwardTerms, MixtureTerms, ReverseTerms, TermLanes, Terms};
use assay_simd::exp::{Exp, SCALE, step};
use assay_simd::{Isa, LANES, Simd, SimdTask, Streaming, UNIT, prefetch, smallest};
use bytemuck::{cast_slice, cast_slice_mut};

/// Number of the values of [`PairScores`].
pub(crate) const PAIR_SCORES: usize = 6;

/// The settings that all tokens of a batch share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairSettings {
    pub(crate) isa: Isa,
    /// Weight `β` of the teacher in the mixture: 0 is the forward KL, 1 the reverse one.
    pub(crate) teacher_weight: f64,
}

/// The softmaxes of a student and its teacher, and the divergence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairScores {
    /// Maxima `m` and `n` of the two rows.
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
    pub(crate) fn with_divergence(divergence: f64) -> Self {
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

/// The maxima of the columns so far.
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
    /// Factor `1/T` of the logits.
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
    /// Factor `1/T` of the logits.
    rate: f64,
}

/// The vectors that the probabilities of both rows are computed with.
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
pub(super) struct UnitPair<S: Simd> {
    pub(super) student: [S::Lanes; 2],
    pub(super) teacher: [S::Lanes; 2],
    /// Difference `δ = ln P − ln Q`; NaN where both rows are −∞.
    pub(super) log_ratio: [S::Lanes; 2],
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
                    streaming.copy(simd, cast_slice(&made), cast_slice_mut(to));
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
