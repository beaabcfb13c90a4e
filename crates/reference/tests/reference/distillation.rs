//! The divergence from a teacher against 640-bit arithmetic, results by hand, and identities.

use std::collections::BTreeMap;
use std::f64::consts::LN_2;

use crate::common::real::Real;
use approx::assert_relative_eq;
use assay_core::problem::{
    Advantages, CuSeqlens, Extra, FloatArray, Problem, ProblemPart, Sequences, Teacher, TeacherTopK,
};
use assay_core::spec::{
    Distillation, DistillationKind, Kl, KlEstimator, LossSpec, LossTerms, Objective, OldLogp, Reduction, Temperature,
    TokenWeights, TopKRest,
};
use assay_fixture::{ProblemFile, write_problem};
use assay_reference::evaluate;
use ndarray::{Array2, Array3, arr1, arr2};

const KINDS: [(DistillationKind, Option<f64>); 7] = [
    (DistillationKind::ForwardKl, None),
    (DistillationKind::ReverseKl, None),
    (DistillationKind::JensenShannon, None),
    (DistillationKind::JensenShannon, Some(0.1)),
    (DistillationKind::JensenShannon, Some(0.97)),
    (DistillationKind::JensenShannon, Some(0.0)),
    (DistillationKind::JensenShannon, Some(1.0)),
];

const RESTS: [Option<TopKRest>; 4] =
    [None, Some(TopKRest::Tail), Some(TopKRest::Renormalized), Some(TopKRest::Ignored)];

/// Vocabulary entries of the drawn problems, and those of a teacher that has not all.
const V: usize = 9;
const K: usize = 4;

/// Numbers between −1 and 1 that look drawn: Weyl's sequence, folded.
fn drawn(seed: u32, i: usize) -> f64 {
    let x = (f64::from(seed) * 0.754_877_666 + (i as f64 + 1.0) * 0.569_840_291 + 0.137).fract();
    (2.0 * x - 1.0) * (1.0 - 0.3 * (x * 7.0).fract())
}

/// One token of a student and a teacher, as f32 hold their logits.
#[derive(Clone, Debug)]
struct Pair {
    student: Vec<f64>,
    teacher: Vec<f64>,
}

impl Pair {
    fn new(student: impl Fn(usize) -> f64, teacher: impl Fn(usize, f64) -> f64) -> Self {
        let of_f32 = |x: f64| f64::from(x as f32);
        let student: Vec<f64> = (0..V).map(|j| of_f32(student(j))).collect();
        let teacher = student.iter().enumerate().map(|(j, x)| of_f32(teacher(j, *x))).collect();
        Self { student, teacher }
    }

    /// Pairs as different as they come, each with its name.
    fn all() -> Vec<(&'static str, Self)> {
        let ulp = |x: f64, up: bool| {
            let x = x as f32;
            f64::from(if up { x.next_up() } else { x.next_down() })
        };
        vec![
            ("independent", Self::new(|j| 2.0 * drawn(1, j), |j, _| 2.0 * drawn(2, j))),
            ("near", Self::new(|j| 3.0 * drawn(3, j), |j, x| x + 1e-3 * drawn(4, j))),
            ("one ulp", Self::new(|j| 3.0 * drawn(5, j), move |j, x| ulp(x, j % 3 == 0))),
            (
                "one entry of one ulp",
                Self::new(|j| 3.0 * drawn(6, j), move |j, x| if j == 4 { ulp(x, true) } else { x }),
            ),
            ("near and shifted", Self::new(|j| 3.0 * drawn(7, j), |j, x| x + 17.0 + 1e-2 * drawn(8, j))),
            ("sharper", Self::new(|j| 2.0 * drawn(9, j), |_, x| 3.0 * x)),
            ("flatter", Self::new(|j| 6.0 * drawn(10, j), |_, x| 0.25 * x)),
            ("far apart", Self::new(|j| 30.0 * drawn(11, j), |j, _| 30.0 * drawn(12, j))),
            // All that is outside the teacher's entries is less likely than the least number of an f64.
            (
                "far tail",
                Self::new(
                    |j| if j < 2 { 1.5e3 } else { 0.0 } + 2.0 * drawn(17, j),
                    |j, _| if j < 2 { 3.0 } else { 0.0 } + drawn(18, j),
                ),
            ),
            ("at 10⁴", Self::new(|j| 1e4 + 2.0 * drawn(13, j), |j, x| x + 0.1 * drawn(14, j))),
            ("at −120", Self::new(|j| 2.0 * drawn(15, j) - 120.0, |j, x| x + 240.0 + drawn(16, j))),
        ]
    }

    /// The teacher's likeliest entries, in the order of a rotated vocabulary, with rounded log-probabilities.
    fn likeliest(&self, temperature: f64) -> (Vec<usize>, Vec<f64>) {
        let mut order: Vec<usize> = (0..V).collect();
        order.sort_by(|&i, &j| self.teacher[j].total_cmp(&self.teacher[i]));
        order.truncate(K);
        order.rotate_left(1);
        let most = self.teacher.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = self.teacher.iter().map(|y| ((y - most) / temperature).exp()).sum();
        let logp = |&j: &usize| f64::from(((self.teacher[j] - most) / temperature - sum.ln()) as f32);
        (order.clone(), order.iter().map(logp).collect())
    }

    fn problem(&self, rest: Option<TopKRest>, temperature: f64) -> Problem {
        let row = |x: &[f64]| FloatArray::F64(Array3::from_shape_vec((1, 1, x.len()), x.to_vec()).unwrap());
        let teacher = if rest.is_none() {
            Teacher::Logits(row(&self.teacher))
        } else {
            let (ids, logp) = self.likeliest(temperature);
            let ids = Array3::from_shape_vec((1, 1, K), ids.iter().map(|id| *id as i64).collect()).unwrap();
            Teacher::TopK(TeacherTopK { logp: row(&logp), ids })
        };
        around(row(&self.student), teacher)
    }
}

fn around(logits: FloatArray<ndarray::Ix3>, teacher: Teacher) -> Problem {
    let [batch, tokens, _] = logits.shape() else { unreachable!("rank 3") };
    let (batch, tokens) = (*batch, *tokens);
    Problem {
        logits,
        ids: Array2::zeros((batch, tokens)),
        mask: Array2::from_elem((batch, tokens), true),
        advantages: Advantages::Sequence(ndarray::Array1::zeros(batch)),
        old_logp: None,
        ref_logp: None,
        extra: Extra { teacher: Some(teacher), ..Extra::default() },
    }
}

fn spec((kind, beta): (DistillationKind, Option<f64>), rest: Option<TopKRest>, temperature: f64) -> LossSpec {
    let distillation = Distillation { kind, beta, top_k: rest.map(|_| K), rest, temperature_squared: false };
    LossSpec { temperature: temperature.into(), ..LossSpec::distillation(distillation) }
}

/// The divergence as its definition has it, of exponents `z` in 640 bits.
struct ExactDivergence {
    kind: DistillationKind,
    beta: Option<f64>,
    rest: Option<TopKRest>,
    teacher: Vec<Real>,
    ids: Vec<usize>,
}

impl ExactDivergence {
    fn new(
        (kind, beta): (DistillationKind, Option<f64>),
        rest: Option<TopKRest>,
        pair: &Pair,
        temperature: f64,
    ) -> Self {
        let t = || Real::from(temperature);
        let exponents = || pair.teacher.iter().map(|y| Real::from(*y) / t()).collect::<Vec<_>>();
        let (ids, teacher) = if rest.is_none() {
            ((0..V).collect(), softmax(&exponents()))
        } else {
            let (ids, logp) = pair.likeliest(temperature);
            (ids, logp.iter().map(|logp| Real::from(*logp).exp()).collect())
        };
        Self { kind, beta, rest, teacher, ids }
    }

    /// The pairs `P, Q` that are compared.
    fn bins(&self, z: &[Real]) -> (Vec<Real>, Vec<Real>) {
        let p = softmax(z);
        let mut student: Vec<Real> = self.ids.iter().map(|&id| p[id].clone()).collect();
        let mut teacher = self.teacher.clone();
        let total = |of: &[Real]| of.iter().cloned().sum::<Real>();
        match self.rest {
            Some(TopKRest::Tail) => {
                // The student's is far below 2^−640 in one pair: a sum holds it, 1 − Σ P does not.
                let outside = p.iter().enumerate().filter(|(j, _)| !self.ids.contains(j));
                student.push(outside.map(|(_, p)| p.clone()).sum());
                teacher.push(Real::from(1.0) - total(&teacher));
            }
            Some(TopKRest::Renormalized) => {
                for of in [&mut student, &mut teacher] {
                    let sum = total(of);
                    for x in of.iter_mut() {
                        *x = x.clone() / sum.clone();
                    }
                }
            }
            Some(TopKRest::Ignored) | None => {}
        }
        (student, teacher)
    }

    fn value(&self, z: &[Real]) -> Real {
        let (p, q) = self.bins(z);
        let kl = |a: &[Real], b: &[Real]| -> Real { a.iter().zip(b).map(|(a, b)| a.clone() * (a.ln() - b.ln())).sum() };
        let beta = self.beta.unwrap_or(0.5);
        match self.kind {
            DistillationKind::ForwardKl => kl(&q, &p),
            DistillationKind::ReverseKl => kl(&p, &q),
            DistillationKind::JensenShannon if beta == 0.0 => kl(&q, &p),
            DistillationKind::JensenShannon if beta == 1.0 => kl(&p, &q),
            DistillationKind::JensenShannon => {
                let (of_teacher, of_student) = (Real::from(beta), Real::from(1.0) - Real::from(beta));
                let mixed = |(p, q): (&Real, &Real)| of_teacher.clone() * q.clone() + of_student.clone() * p.clone();
                let m: Vec<Real> = p.iter().zip(&q).map(mixed).collect();
                of_teacher * kl(&q, &m) + of_student * kl(&p, &m)
            }
        }
    }

    /// The derivatives by the logits, as central differences.
    fn gradient(&self, z: &[Real], temperature: f64) -> Vec<f64> {
        let step = Real::power_of_two(-150);
        let moved = |j: usize, by: &Real| {
            let mut z = z.to_vec();
            z[j] = z[j].clone() + by.clone();
            self.value(&z)
        };
        let slope = |j| (moved(j, &step) - moved(j, &-step.clone())) / (Real::from(2.0) * step.clone());
        (0..z.len()).map(|j| (slope(j) / Real::from(temperature)).to_f64()).collect()
    }
}

fn softmax(z: &[Real]) -> Vec<Real> {
    let e: Vec<Real> = z.iter().map(Real::exp).collect();
    let sum: Real = e.iter().cloned().sum();
    e.into_iter().map(|e| e / sum.clone()).collect()
}

/// How far a value may be off, of itself, and a slope, of the row's largest; an exponent x/T is rounded besides.
const NEAR_1: f64 = 1e-13;

#[test]
fn distillation_agrees_with_640_bits() {
    let mut tried = 0;
    for (name, pair) in Pair::all() {
        for (turn, kind) in KINDS[..5].iter().copied().enumerate() {
            for rest in RESTS {
                let temperature = [1.0, 0.7][(turn + tried / 20) % 2];
                {
                    let (spec, problem) = (spec(kind, rest, temperature), pair.problem(rest, temperature));
                    let reference = evaluate(&spec, &problem).unwrap();
                    let exact = ExactDivergence::new(kind, rest, &pair, temperature);
                    let z: Vec<Real> = pair.student.iter().map(|x| Real::from(*x) / Real::from(temperature)).collect();
                    let value = exact.value(&z).to_f64();
                    let largest_exponent =
                        pair.student.iter().chain(&pair.teacher).fold(0.0, |most: f64, x| most.max(x.abs()));
                    let near = NEAR_1 + f64::EPSILON * largest_exponent / temperature;
                    let label = format!("{name}, T = {temperature}, {kind:?}, {rest:?}");
                    // The student's exponents x/T are rounded before a teacher's entries are subtracted: each δ is right to 1e-16 of
                    // 1, in which the divergence is flat. A sum over some entries is not flat in it.
                    let of_exponents = 4e-15 * (1.0 + largest_exponent);
                    let [of_value, of_slopes] = match rest {
                        None => [0.0, 0.0],
                        Some(TopKRest::Tail | TopKRest::Renormalized) => [of_exponents * value.sqrt(), of_exponents],
                        Some(TopKRest::Ignored) => [of_exponents, of_exponents],
                    };
                    let error = (reference.loss() - value).abs();
                    assert!(
                        error <= near * value.abs() + of_value,
                        "{label}: {} for {value}, off by {error:e}",
                        reference.loss()
                    );
                    let gradient = exact.gradient(&z, temperature);
                    let largest = gradient.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                    // A slope is p_j times a difference, of which each side may be far larger.
                    let token = reference.token(0, 0).unwrap();
                    let divergence = reference.divergence(token).unwrap();
                    let bins = divergence.bins(&problem, (0, 0));
                    let sides = bins.iter().map(|bin| bin.student * bin.slope(divergence.teacher_weight).abs());
                    let of_sides = 4e-16 * sides.fold(0.0, f64::max);
                    for (j, (got, expected)) in reference.dlogits_row(0, 0).iter().zip(&gradient).enumerate() {
                        let error = (got - expected).abs();
                        let most = near * largest + of_slopes + of_sides;
                        assert!(error <= most, "{label}, {j}: {got} for {expected}, off by {error:e} of {largest:e}");
                    }
                    tried += 1;
                }
            }
        }
    }
    assert_eq!(tried, 11 * 5 * 4);
}

/// `p = (1/4, 3/4)` and `q = (1/2, 1/2)`.
#[test]
fn distillation_of_two_entries_is_by_hand() {
    let pair = |spec: &LossSpec| {
        let row = |x: [f64; 2]| FloatArray::F64(Array3::from_shape_vec((1, 1, 2), x.to_vec()).unwrap());
        let problem = around(row([0.0, 3_f64.ln()]), Teacher::Logits(row([5.0, 5.0])));
        let reference = evaluate(spec, &problem).unwrap();
        (reference.loss(), reference.dlogits_row(0, 0))
    };
    let near = |got: f64, expected: f64| assert_relative_eq!(got, expected, max_relative = 1e-15);
    let (value, gradient) = pair(&LossSpec::distillation(Distillation::default()));
    near(value, 0.5 * (4.0_f64 / 3.0).ln());
    near(gradient[0], -0.25);
    near(gradient[1], 0.25);
    let (value, gradient) = pair(&LossSpec::distillation(Distillation::reverse_kl()));
    near(value, 0.75 * 3_f64.ln() - LN_2);
    // p_0·p_1·(ln(p_0/q_0) − ln(p_1/q_1)) = 3/16·(−ln 3).
    near(gradient[0], -3.0 / 16.0 * 3_f64.ln());
    near(gradient[1], 3.0 / 16.0 * 3_f64.ln());
    // m = (3/8, 5/8).
    let (value, gradient) = pair(&LossSpec::distillation(Distillation::jensen_shannon(0.5)));
    let (of_teacher, of_student) =
        (0.5 * (16.0_f64 / 15.0).ln(), 0.25 * (2.0_f64 / 3.0).ln() + 0.75 * (6.0_f64 / 5.0).ln());
    near(value, 0.5 * (of_teacher + of_student));
    near(gradient[0], 0.5 * 3.0 / 16.0 * ((2.0_f64 / 3.0).ln() - (6.0_f64 / 5.0).ln()));
    near(gradient[1], -gradient[0]);
}

#[test]
fn distillation_by_a_tail_of_two_entries_is_that_of_their_sum() {
    // The student has (1/2, 1/4, 1/8, 1/8), the teacher 1/4 and 1/4 of entries 1 and 0, and 1/2 elsewhere.
    let logits = FloatArray::F64(
        Array3::from_shape_vec((1, 1, 4), vec![0.5_f64.ln(), 0.25_f64.ln(), 0.125_f64.ln(), 0.125_f64.ln()]).unwrap(),
    );
    let logp = FloatArray::F64(Array3::from_elem((1, 1, 2), 0.25_f64.ln()));
    let ids = Array3::from_shape_vec((1, 1, 2), vec![1, 0]).unwrap();
    let problem = around(logits, Teacher::TopK(TeacherTopK { logp, ids }));
    let of = |rest| {
        evaluate(&spec(KINDS[0], Some(rest), 1.0), &problem).map(|of| (of.loss(), of.dlogits_row(0, 0))).unwrap()
    };
    let (value, gradient) = of(TopKRest::Tail);
    // ¼ ln(¼ / ½) + ¼ ln(¼ / ¼) + ½ ln(½ / ¼)
    assert_relative_eq!(value, 0.25 * LN_2, max_relative = 1e-14);
    for (got, expected) in gradient.iter().zip([0.25, 0.0, -0.125, -0.125]) {
        assert_relative_eq!(*got, expected, epsilon = 1e-15);
    }
    // ½ ln(½ / ⅔) + ½ ln(½ / ⅓)
    let (value, gradient) = of(TopKRest::Renormalized);
    assert_relative_eq!(value, 0.5 * (9.0_f64 / 8.0).ln(), max_relative = 1e-14);
    for (got, expected) in gradient.iter().zip([1.0 / 6.0, -1.0 / 6.0, 0.0, 0.0]) {
        assert_relative_eq!(*got, expected, epsilon = 1e-15);
    }
    // ¼ ln(¼ / ½), with the other term 0
    let (value, gradient) = of(TopKRest::Ignored);
    assert_relative_eq!(value, -0.25 * LN_2, max_relative = 1e-14);
    for (got, expected) in gradient.iter().zip([0.0, -0.125, 0.0625, 0.0625]) {
        assert_relative_eq!(*got, expected, epsilon = 1e-15);
    }
}

#[test]
fn distillation_identities_hold() {
    for (name, pair) in Pair::all() {
        let swapped = Pair { student: pair.teacher.clone(), teacher: pair.student.clone() };
        let value = |kind, pair: &Pair| evaluate(&spec(kind, None, 1.0), &pair.problem(None, 1.0)).unwrap().loss();
        let js = |beta| (DistillationKind::JensenShannon, Some(beta));
        let [forward, reverse] = [KINDS[0], KINDS[1]].map(|kind| value(kind, &pair));
        assert!(forward > 0.0 && reverse > 0.0, "{name}: {forward} {reverse}");
        // Exchanging the two distributions exchanges the two KLs, and β and 1 − β.
        assert_relative_eq!(value(KINDS[1], &swapped), forward, max_relative = 1e-13);
        assert_relative_eq!(value(js(0.25), &swapped), value(js(0.75), &pair), max_relative = 1e-13);
        assert_relative_eq!(value(js(0.5), &swapped), value(js(0.5), &pair), max_relative = 1e-13);
        assert!(value(js(0.5), &pair) <= LN_2 * (1.0 + 1e-15), "{name}");
        // The ends are the two KLs, which are the limits of the quotients by β and 1 − β.
        assert_eq!([value(js(0.0), &pair), value(js(1.0), &pair)], [forward, reverse]);
        let small = 2_f64.powi(-40);
        if !name.starts_with("far") {
            assert_relative_eq!(value(js(small), &pair) / small, forward, max_relative = 1e-7);
            assert_relative_eq!(value(js(1.0 - small), &pair) / small, reverse, max_relative = 1e-3);
        }
        for kind in KINDS {
            for rest in RESTS {
                let problem = pair.problem(rest, 1.0);
                let spec = spec(kind, rest, 1.0);
                let gradient = evaluate(&spec, &problem).unwrap().dlogits_row(0, 0);
                let size: f64 = gradient.iter().map(|x| x.abs()).sum();
                let sum: f64 = gradient.iter().sum();
                assert!(
                    sum.abs() <= 1e-13 * size + if rest.is_none() { 0.0 } else { 1e-15 },
                    "{name}, {kind:?}, {rest:?}: {sum:e} of {size:e}"
                );
            }
        }
    }
}

#[test]
fn distillation_of_a_teacher_that_is_the_student_is_0() {
    let pair = Pair::new(|j| 3.0 * drawn(1, j), |_, x| x);
    for kind in KINDS {
        let reference = pair.problem(None, 0.7);
        let spec = spec(kind, None, 0.7);
        let reference = evaluate(&spec, &reference).unwrap();
        assert_eq!(reference.loss(), 0.0);
        assert!(reference.dlogits_row(0, 0).iter().all(|x| *x == 0.0));
    }
}

#[test]
fn distillation_columns_of_minus_infinity_have_no_part() {
    const HOLE: f64 = f64::NEG_INFINITY;
    let of = |kind, student: [f64; 3], teacher: [f64; 3]| {
        let row = |x: [f64; 3]| FloatArray::F64(Array3::from_shape_vec((1, 1, 3), x.to_vec()).unwrap());
        let problem = around(row(student), Teacher::Logits(row(teacher)));
        let spec = spec(kind, None, 1.0);
        let reference = evaluate(&spec, &problem).unwrap();
        (reference.loss(), reference.dlogits_row(0, 0), reference.first_nonfinite())
    };
    let [third, half] = [1.0 / 3.0, 0.5];
    // The teacher lacks an entry: 0·ln 0 is 0, and the student is pushed away from it.
    let (value, gradient, _) = of(KINDS[0], [0.0; 3], [0.0, 0.0, HOLE]);
    assert_relative_eq!(value, 1.5_f64.ln(), max_relative = 1e-15);
    for (got, expected) in gradient.iter().zip([third - half, third - half, third]) {
        assert_relative_eq!(*got, expected, max_relative = 1e-15);
    }
    let (value, _, nonfinite) = of(KINDS[1], [0.0; 3], [0.0, 0.0, HOLE]);
    assert_eq!((value, nonfinite), (f64::INFINITY, Some((0, 0))));
    // ½·(½ ln(½ / 5/12)·2) + ½·(⅓ ln(⅓ / 5/12)·2 + ⅓ ln 2)
    let (value, gradient, _) = of(KINDS[2], [0.0; 3], [0.0, 0.0, HOLE]);
    let expected = 0.5 * 1.2_f64.ln() + (0.8_f64.ln() + 0.5 * LN_2) * third;
    assert_relative_eq!(value, expected, max_relative = 1e-14);
    assert!(gradient.iter().all(|x| x.is_finite()));
    // The student lacks an entry that the teacher has, and the other way round.
    assert_eq!(of(KINDS[0], [0.0, 0.0, HOLE], [0.0; 3]).0, f64::INFINITY);
    assert_relative_eq!(of(KINDS[1], [0.0, 0.0, HOLE], [0.0; 3]).0, 1.5_f64.ln(), max_relative = 1e-15);
    // An entry that both lack is as if there were none.
    for kind in KINDS {
        let (value, gradient, _) = of(kind, [0.3, 1.0, HOLE], [0.1, 0.4, HOLE]);
        let row = |x: [f64; 2]| FloatArray::F64(Array3::from_shape_vec((1, 1, 2), x.to_vec()).unwrap());
        let problem = around(row([0.3, 1.0]), Teacher::Logits(row([0.1, 0.4])));
        let spec = spec(kind, None, 1.0);
        let two = evaluate(&spec, &problem).unwrap();
        assert_relative_eq!(value, two.loss(), max_relative = 1e-14);
        assert_eq!(gradient[2], 0.0);
        assert_relative_eq!(gradient[0], two.dlogits_row(0, 0)[0], max_relative = 1e-14);
    }
}

#[test]
fn distillation_temperature_weights_and_reduction_multiply() {
    let pair = &Pair::all()[0].1;
    let one = pair.problem(None, 2.0);
    let of = |spec: &LossSpec, problem: &Problem| {
        let reference = evaluate(spec, problem).unwrap();
        (reference.loss(), reference.dlogits_row(0, 0))
    };
    let plain = LossSpec { temperature: 2.0.into(), ..LossSpec::distillation(Distillation::default()) };
    let (value, gradient) = of(&plain, &one);
    let distillation = Distillation { temperature_squared: true, ..Distillation::default() };
    let squared = LossSpec { temperature: 2.0.into(), ..LossSpec::distillation(distillation) };
    let (of_squared, gradient_of_squared) = of(&squared, &one);
    assert_eq!(of_squared, 4.0 * value);
    assert!(gradient_of_squared.iter().zip(&gradient).all(|(x, y)| *x == 4.0 * y));
    // T of the token, a weight of it, a normaliser and a scale.
    let mut weighted = one.clone();
    weighted.extra.temperature = Some(arr2(&[[2.0]]));
    weighted.extra.token_weights = Some(arr2(&[[0.5]]));
    let spec = LossSpec {
        temperature: Temperature::Given,
        token_weights: Some(TokenWeights { applies_to: LossTerms::Policy }),
        reduction: Reduction::Normalizer(8.0),
        scale: 3.0,
        ..plain.clone()
    };
    let (of_weighted, gradient_of_weighted) = of(&spec, &weighted);
    let factor = 0.5 * 3.0 / 8.0;
    assert_relative_eq!(of_weighted, factor * value, max_relative = 1e-15);
    for (x, y) in gradient_of_weighted.iter().zip(&gradient) {
        assert_relative_eq!(*x, factor * y, max_relative = 1e-15);
    }
}

/// Three tokens of two sequences, packed, with a masked token of nothing but NaN: the loss is the mean of the tokens by themselves.
#[test]
fn distillation_of_a_batch_is_the_mean_of_its_tokens() {
    for rest in RESTS {
        let pairs = Pair::all();
        let singles: Vec<Problem> = pairs[..3].iter().map(|(_, pair)| pair.problem(rest, 1.0)).collect();
        let spec = spec(KINDS[2], rest, 1.0);
        let mean = singles.iter().map(|one| evaluate(&spec, one).unwrap().loss()).sum::<f64>() / 3.0;
        let mut logits = FloatArray::zeros((1, 4, V), assay_core::problem::Dtype::F64);
        let width = singles[0].extra.teacher.as_ref().unwrap().floats().shape()[2];
        let mut floats = FloatArray::zeros((1, 4, width), assay_core::problem::Dtype::F64);
        let mut ids = Array3::from_elem((1, 4, width), -100_i64);
        for (t, one) in [0, 1, 3].into_iter().zip(&singles) {
            let teacher = one.extra.teacher.as_ref().unwrap();
            logits.set_row(0, t, &one.logits.row(0, 0));
            floats.set_row(0, t, &teacher.floats().row(0, 0));
            if let Teacher::TopK(top) = teacher {
                (0..width).for_each(|k| ids[[0, t, k]] = top.ids[[0, 0, k]]);
            }
        }
        logits.fill_row(0, 2, f64::NAN);
        floats.fill_row(0, 2, f64::NAN);
        let teacher = match rest {
            None => Teacher::Logits(floats),
            Some(_) => Teacher::TopK(TeacherTopK { logp: floats, ids }),
        };
        let mut batch = around(logits, teacher);
        batch.mask = arr2(&[[true, true, false, true]]);
        batch.extra.sequences = Sequences::Packed(CuSeqlens::new(&[0, 2, 4]).unwrap());
        batch.advantages = Advantages::Sequence(arr1(&[0.0, 0.0]));
        let whole = evaluate(&spec, &batch).unwrap();
        assert_relative_eq!(whole.loss(), mean, max_relative = 1e-15);
        assert!(whole.dlogits_row(0, 2).iter().all(|x| *x == 0.0));
        // Parts of the batch: its second sequence, and a vocabulary without an entry that the teacher has.
        let part = |columns: Vec<usize>| ProblemPart { batch: vec![1], tokens: (0..4).collect(), columns };
        let second = batch.select(&part((0..V).collect()));
        assert_relative_eq!(
            evaluate(&spec, &second).unwrap().loss(),
            evaluate(&spec, &singles[2]).unwrap().loss(),
            max_relative = 1e-15
        );
        if let Some(Teacher::TopK(top)) = &singles[2].extra.teacher {
            let lost = usize::try_from(top.ids[[0, 0, 0]]).unwrap();
            let cut = batch.select(&part((0..V).filter(|j| *j != lost).collect()));
            assert!(cut.mask.iter().all(|counts| !counts) && cut.check(&spec).is_ok());
        }
    }
}

#[test]
fn distillation_bad_input_is_named() {
    let pair = &Pair::all()[0].1;
    let refusal = |rest, change: &dyn Fn(&mut LossSpec, &mut Problem)| {
        let (mut spec, mut problem) = (spec(KINDS[0], rest, 1.0), pair.problem(rest, 1.0));
        change(&mut spec, &mut problem);
        evaluate(&spec, &problem).map(|_| ()).unwrap_err().to_string()
    };
    let tail = Some(TopKRest::Tail);
    let with_top = |change: fn(&mut TeacherTopK)| {
        move |_: &mut LossSpec, problem: &mut Problem| match &mut problem.extra.teacher {
            Some(Teacher::TopK(top)) => change(top),
            _ => unreachable!("a teacher of likeliest entries"),
        }
    };
    let first = |problem: &Problem| match &problem.extra.teacher {
        Some(Teacher::TopK(top)) => (top.ids[[0, 0, 0]], top.ids[[0, 0, 1]]),
        _ => unreachable!("a teacher of likeliest entries"),
    };
    let (id, _) = first(&pair.problem(tail, 1.0));
    assert_eq!(
        refusal(None, &|_, problem| problem.extra.teacher = None),
        "`teacher_logits`: not given, expected shape [1, 1, 9] because the spec has an `objective.distillation` without `top_k`"
    );
    assert_eq!(
        refusal(tail, &|_, problem| problem.extra.teacher = None),
        "`teacher_logp`: not given, expected [1, 1, K] because the spec has `objective.distillation.top_k`"
    );
    assert_eq!(
        refusal(None, &|_, problem| {
            problem.extra.teacher = Some(Teacher::Logits(FloatArray::F64(Array3::zeros((1, 1, 8)))));
        }),
        "`teacher_logits`: got shape [1, 1, 8], expected [1, 1, 9], that of the student's logits"
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.ids[[0, 0, 1]] = top.ids[[0, 0, 0]])),
        format!("`teacher_ids[0,0,1]`: got {id}, expected an id that is not at `teacher_ids[0,0,0]` too")
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.ids[[0, 0, 2]] = 9)),
        "`teacher_ids[0,0,2]`: got 9, expected 0 ≤ id < V = 9 on an unmasked token"
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.ids[[0, 0, 0]] = -1)),
        "`teacher_ids[0,0,0]`: got -1, expected 0 ≤ id < V = 9 on an unmasked token"
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.logp.fill_row(0, 0, 0.5))),
        "`teacher_logp[0,0,0]`: got 0.5, expected a log-probability ≤ 0 on an unmasked token"
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.ids = Array3::zeros((1, 1, 5)))),
        "`teacher_ids`: got shape [1, 1, 5], expected [1, 1, K] with 1 ≤ K ≤ 4"
    );
    assert_eq!(
        refusal(tail, &with_top(|top| top.ids = Array3::zeros((1, 1, 3)))),
        "`teacher_logp`: got shape [1, 1, 4], expected [1, 1, 3], that of `teacher_ids`"
    );
    let filled = |x: f64| {
        move |_: &mut LossSpec, problem: &mut Problem| {
            problem.extra.teacher.as_mut().unwrap().floats_mut().fill_row(0, 0, x);
        }
    };
    assert_eq!(
        refusal(None, &filled(f64::NAN)),
        "`teacher_logits[0,0,0]`: got NaN, expected a finite number or −∞ on an unmasked token"
    );
    assert_eq!(
        refusal(None, &filled(f64::NEG_INFINITY)),
        "`teacher_logits[0,0,:]`: got −∞ everywhere, expected a finite number on an unmasked token"
    );
}

/// Settings that a divergence does not have.
#[test]
fn distillation_settings_without_meaning_are_refused() {
    let problem = Pair::all()[0].1.problem(None, 1.0);
    let named = |expected: &str, change: &dyn Fn(&mut LossSpec)| {
        let mut spec = spec(KINDS[0], None, 1.0);
        change(&mut spec);
        let refused = evaluate(&spec, &problem).map(|_| ()).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("spec field `{expected}")), "{refused}");
    };
    let beta = |beta| {
        move |spec: &mut LossSpec| {
            let objective = Distillation { beta: Some(beta), ..Distillation::jensen_shannon(0.5) };
            spec.objective = Objective::Distillation(objective);
        }
    };
    for outside in [-0.1, 1.1, f64::NAN] {
        named("objective.distillation.beta`: got ", &beta(outside));
    }
    named("objective.distillation.beta`: got 0.5, expected none", &|spec| {
        spec.objective = Objective::Distillation(Distillation { beta: Some(0.5), ..Distillation::default() });
    });
    let top = |top_k, rest| {
        move |spec: &mut LossSpec| {
            spec.objective = Objective::Distillation(Distillation { top_k, rest, ..Distillation::default() });
        }
    };
    named("objective.distillation.top_k`: got 0", &top(Some(0), Some(TopKRest::Tail)));
    named("objective.distillation.rest`: got none, expected tail", &top(Some(3), None));
    named("objective.distillation.rest`: got ignored, expected none", &top(None, Some(TopKRest::Ignored)));
    named("old_logp`: got given, expected current", &|spec| spec.old_logp = OldLogp::Given);
    named("kl`: got a penalty", &|spec| spec.kl = Some(Kl::plain(0.1, KlEstimator::K3)));
    named("entropy_coef`: got 0.1", &|spec| spec.entropy_coef = 0.1);
    named("rollout`: got rollout weights", &|spec| {
        spec.rollout = serde_json::from_str(r#"{"source": "logp"}"#).unwrap();
    });
    named("logits`: got a transform", &|spec| spec.logits.softcap = Some(30.0));
    named("support`: got a part", &|spec| spec.support.vocab = Some(8));
    named("ratio`: got another", &|spec| spec.ratio.clamp = Some(1.0));
}

#[test]
fn distillation_problem_reads_back_from_a_file() {
    let folder = std::env::temp_dir().join(format!("assay-distillation-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (place, rest) in RESTS.into_iter().enumerate() {
        let path = folder.join(format!("{place}.safetensors"));
        let problem = Pair::all()[0].1.problem(rest, 1.0);
        write_problem(&path, &problem, &BTreeMap::new()).unwrap();
        let read = ProblemFile::open(&path).unwrap().problem("logits", None).unwrap();
        assert_eq!(read.extra, problem.extra);
        let spec = spec(KINDS[0], rest, 1.0);
        assert_eq!(evaluate(&spec, &read).unwrap().loss(), evaluate(&spec, &problem).unwrap().loss());
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
