//! [`TeacherRegime`]: the ways in which a teacher's logits differ from the student's.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use super::{Recipe, f32_value};
use assay_core::problem::{Dtype, FloatArray, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, DistillationKind, TopKRest};
use ndarray::{Array3, Ix3};

/// A way of drawing a teacher's logits around a student's, each of which shows a kind of bug that the others hide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TeacherRegime {
    /// Another draw of normal logits with the student's largest in common: two models that agree on the likeliest entry at most.
    Independent,
    /// The student's logits and normal differences of 1e-3: a trained student, whose divergence is a difference that cancels.
    Near,
    /// The student's logits, a third of which differ by one unit in the last place.
    OneUlp,
    /// The student's logits, twice as far from their largest.
    Sharper,
    /// The student's logits, half as far from their largest.
    Flatter,
    /// Normal differences, and a quarter of the entries without probability. Of a reverse KL, which is infinite there, only those that the
    /// student lacks too.
    Holes,
    /// Another entry is the likeliest by 20 to 40 nats.
    FarApart,
}

impl TeacherRegime {
    /// All regimes, in the order of their declaration.
    pub const ALL: [Self; 7] =
        [Self::Independent, Self::Near, Self::OneUlp, Self::Sharper, Self::Flatter, Self::Holes, Self::FarApart];
}

/// The least probability of a drawn teacher's tail: of less, nothing is left of 1 less a sum in f32.
const LEAST_TAIL: f64 = 1e-2;

/// The stream of the draws of a teacher.
const STREAM: u64 = 4;

impl Recipe {
    /// Returns the way in which the teacher of this recipe's problem is drawn.
    pub fn teacher_regime(&self) -> TeacherRegime {
        TeacherRegime::ALL[(self.seed % TeacherRegime::ALL.len() as u64) as usize]
    }

    /// Draws the teacher of a problem, whose student has `logits` over a temperature of `temperature(b, t)`.
    pub(super) fn draw_teacher(
        &self,
        distillation: &Distillation,
        logits: &FloatArray<Ix3>,
        temperature: impl Fn(usize, usize) -> f64,
    ) -> Teacher {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(STREAM);
        let [batch, tokens, vocab] = self.shape;
        // Logits of another dtype than the recipe's are a product with a head, and so are the teacher's.
        let dtype = if logits.dtype() == self.dtype { self.dtype } else { Dtype::F32 };
        let mut teacher = FloatArray::zeros((batch, tokens, vocab), dtype);
        for (b, t) in ndarray::indices((batch, tokens)) {
            let mut row = logits.row(b, t);
            self.draw_teacher_row(distillation, &mut rng, &mut row);
            teacher.set_row(b, t, &row);
        }
        match distillation.top_k.zip(distillation.rest) {
            None => Teacher::Logits(teacher),
            Some(top) => Teacher::TopK(self.likeliest(top, &mut rng, (logits, &teacher), temperature)),
        }
    }

    /// Turns the logits of a student into those of its teacher.
    fn draw_teacher_row(&self, distillation: &Distillation, rng: &mut ChaCha8Rng, row: &mut [f64]) {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut normal = |scale: f64| scale * rng.sample::<f64, _>(StandardNormal);
        let is_reverse = distillation.kind == DistillationKind::ReverseKl || distillation.teacher_weight() == 1.0;
        match self.teacher_regime() {
            TeacherRegime::Independent => row.iter_mut().for_each(|x| {
                *x = if *x == f64::NEG_INFINITY { *x } else { most - normal(2.0).abs() };
            }),
            TeacherRegime::Near => row.iter_mut().for_each(|x| *x += normal(1e-3)),
            TeacherRegime::OneUlp => row.iter_mut().for_each(|x| {
                let step = ulp(*x, self.dtype);
                *x += match normal(1.0) {
                    x if x > 0.97 => step,
                    x if x < -0.97 => -step,
                    _ => 0.0,
                };
            }),
            TeacherRegime::Sharper => row.iter_mut().for_each(|x| *x = most - 2.0 * (most - *x)),
            TeacherRegime::Flatter => row.iter_mut().for_each(|x| *x = most - 0.5 * (most - *x)),
            TeacherRegime::Holes => {
                for x in row.iter_mut() {
                    *x += normal(1.0);
                }
                let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let kept = row.iter().position(|x| *x == most);
                for (v, x) in row.iter_mut().enumerate() {
                    if rng.random_bool(0.25) && Some(v) != kept && !is_reverse {
                        *x = f64::NEG_INFINITY;
                    }
                }
            }
            TeacherRegime::FarApart => {
                // The far entry is one that both have a probability of.
                let places: Vec<usize> = (0..row.len()).filter(|&v| row[v] != f64::NEG_INFINITY).collect();
                let far = places[rng.random_range(0..places.len())];
                row[far] = most + rng.random_range(20.0..40.0);
            }
        }
    }

    /// Takes a teacher's likeliest entries, with the probability of the others at least [`LEAST_TAIL`] where there is a tail.
    fn likeliest(
        &self,
        (most, rest): (usize, TopKRest),
        rng: &mut ChaCha8Rng,
        (student, teacher): (&FloatArray<Ix3>, &FloatArray<Ix3>),
        temperature: impl Fn(usize, usize) -> f64,
    ) -> TeacherTopK {
        let [batch, tokens, vocab] = self.shape;
        // A tail needs an entry outside that the student has a probability of.
        let possible = |(b, t)| student.row(b, t).iter().filter(|x| **x != f64::NEG_INFINITY).count();
        let room = match rest {
            TopKRest::Tail => {
                let fewest = ndarray::indices((batch, tokens)).into_iter().map(possible).min();
                fewest.unwrap_or(vocab).saturating_sub(1).max(1)
            }
            TopKRest::Renormalized | TopKRest::Ignored => vocab,
        };
        let width = most.min(room).min(vocab);
        let (mut ids, mut logp) = (Array3::zeros((batch, tokens, width)), Array3::zeros((batch, tokens, width)));
        for (b, t) in ndarray::indices((batch, tokens)) {
            let row = teacher.row(b, t);
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|&v, &w| row[w].total_cmp(&row[v]).then(v.cmp(&w)));
            let most = row[order[0]];
            let e = |v: usize| ((row[v] - most) / temperature(b, t)).exp();
            let sum: f64 = (0..vocab).map(e).sum();
            let inside: f64 = order.iter().take(width).map(|&v| e(v)).sum();
            // A teacher that has all of its mass in its entries is given less of it, as one with a larger vocabulary would have.
            let short = rest == TopKRest::Tail && possible((b, t)) > width && 1.0 - inside / sum < LEAST_TAIL;
            let total = if short { inside / (1.0 - LEAST_TAIL * rng.random_range(1.0..30.0)) } else { sum };
            // In any order.
            order.truncate(width);
            order.rotate_left(rng.random_range(0..width));
            for (k, &v) in order.iter().enumerate() {
                ids[[b, t, k]] = i64::try_from(v).expect("at most 2³¹");
                logp[[b, t, k]] = f32_value((row[v] - most) / temperature(b, t) - total.ln());
            }
        }
        // Log-probabilities are served in f32, whatever the dtype of the student's logits is.
        TeacherTopK { logp: FloatArray::rounded_from(&logp, Dtype::F32), ids }
    }
}

/// Returns the distance to the next number of a dtype.
fn ulp(x: f64, dtype: Dtype) -> f64 {
    let bits = match dtype {
        Dtype::F64 | Dtype::F32 => 23,
        Dtype::Bf16 => 7,
        Dtype::F16 => 10,
    };
    if x == 0.0 || !x.is_finite() { 0.0 } else { (x.abs().log2().floor() - f64::from(bits)).exp2() }
}
