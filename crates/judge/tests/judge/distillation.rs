//! Divergences from a teacher before the judge: textbook kernels pass in every regime, and wrong ones do not.

use assay_core::problem::{Candidate, Dtype, FloatArray, Problem, Shape, Teacher, TeacherTopK};
use assay_core::spec::{Distillation, DistillationKind, LossSpec, TopKRest};
use assay_judge::generate::{Recipe, Regime, TeacherRegime};
use assay_judge::judge::Verdict;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use ndarray::{Array2, Array3, arr0};

/// A small change of the textbook kernel, by which it is wrong; but for the last, which is honest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Wrong {
    /// The last vocabulary entry is left out of every sum.
    ColumnDropped,
    /// Student and teacher are exchanged.
    Exchanged,
    /// The mixture has β and 1 − β the wrong way round.
    BetaOnTheOtherSide,
    /// The factor T² is forgotten.
    TemperatureNotSquared,
    /// The teacher's logits are not divided by the temperature.
    TeacherWithoutTemperature,
    /// The tail of K entries is left out.
    TailIgnored,
    /// The student's probabilities of K entries are not renormalised.
    StudentNotRenormalized,
    /// The gradient lacks the mean of its slopes.
    GradientNotCentred,
    /// The textbook's logarithm has 1e-8 added to its argument.
    EpsilonInLogarithm,
    /// The student's exponentials are added up in lanes, one after another, as `PyTorch` does.
    SumInLanes,
}

/// Adds up by halves, so that no sum is much larger than what is added to it.
fn sum(values: &[f32]) -> f32 {
    if values.len() <= 8 { values.iter().sum() } else { values.chunks(values.len().div_ceil(2)).map(sum).sum() }
}

fn log_sum_exp(z: &[f32]) -> f32 {
    let most = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    most + sum(&z.iter().map(|z| (z - most).exp()).collect::<Vec<_>>()).ln()
}

/// The largest of `z`, and the logarithm of the sum of exponentials below it, added in 8 lanes.
fn log_sum_in_lanes(z: &[f32]) -> [f32; 2] {
    let most = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    [most, sum_in_lanes(z.iter().map(|z| (z - most).exp())).ln()]
}

fn sum_in_lanes(terms: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0; 8];
    for (j, term) in terms.enumerate() {
        lanes[j % lanes.len()] += term;
    }
    sum(&lanes)
}

fn log_softmax(z: &[f32]) -> Vec<f32> {
    let lse = log_sum_exp(z);
    z.iter().map(|z| z - lse).collect()
}

/// `e^l·x`, which is 0 where the probability is.
fn weighted(l: f32, x: f32) -> f32 {
    if l == f32::NEG_INFINITY { 0.0 } else { l.exp() * x }
}

/// The divergence of `K` or `V` bins with the log-probabilities `lp` and `lq`, and its derivatives by `lp`, as automatic differentiation
/// of `F.kl_div` and TRL's mixture has them.
fn divergence(beta: f32, lp: &[f32], lq: &[f32]) -> (f32, Vec<f32>) {
    let pairs = || lp.iter().copied().zip(lq.iter().copied());
    if beta == 0.0 {
        let terms: Vec<f32> = pairs().map(|(p, q)| weighted(q, q - p)).collect();
        return (sum(&terms), lq.iter().map(|q| -q.exp()).collect());
    }
    if beta == 1.0 {
        let terms: Vec<f32> = pairs().map(|(p, q)| weighted(p, p - q)).collect();
        return (sum(&terms), pairs().map(|(p, q)| weighted(p, p - q) + p.exp()).collect());
    }
    let (of_student, of_teacher) = ((-beta).ln_1p(), beta.ln());
    let mixed: Vec<f32> = pairs().map(|(p, q)| log_sum_exp(&[p + of_student, q + of_teacher])).collect();
    let term = |((p, q), m): ((f32, f32), &f32)| beta * weighted(q, q - m) + (1.0 - beta) * weighted(p, p - m);
    let slope = |((p, q), m): ((f32, f32), &f32)| {
        let direct = (1.0 - beta) * (weighted(p, p - m) + p.exp());
        let by_mixture = -beta * q.exp() - (1.0 - beta) * p.exp();
        direct + if p == f32::NEG_INFINITY { 0.0 } else { by_mixture * (p + of_student - m).exp() }
    };
    (sum(&pairs().zip(&mixed).map(term).collect::<Vec<_>>()), pairs().zip(&mixed).map(slope).collect())
}

/// The divergence of one token, and its gradient by the student's logits.
fn token(
    spec: &LossSpec,
    x: &[f32],
    teacher: &Teacher,
    at: (usize, usize),
    t: f32,
    wrong: Option<Wrong>,
) -> (f32, Vec<f32>) {
    let distillation = spec.as_distillation().unwrap();
    let mut beta = distillation.teacher_weight() as f32;
    if wrong == Some(Wrong::BetaOnTheOtherSide) {
        beta = 1.0 - beta;
    }
    let given: Vec<f32> = teacher.floats().row(at.0, at.1).into_iter().map(|y| y as f32).collect();
    let mut lp = log_softmax(&x.iter().map(|x| x / t).collect::<Vec<_>>());
    if wrong == Some(Wrong::EpsilonInLogarithm) {
        for l in &mut lp {
            *l = (l.exp() + 1e-8).ln();
        }
    }
    if wrong == Some(Wrong::SumInLanes) {
        let z: Vec<f32> = x.iter().map(|x| x / t).collect();
        let [most, log_sum] = log_sum_in_lanes(&z);
        lp = z.iter().map(|z| z - most - log_sum).collect();
    }
    // The log-probabilities that are compared, and the vocabulary entries that they are of.
    let (value, by_logp): (f32, Vec<f32>) = match teacher {
        Teacher::Logits(_) => {
            let of_teacher = if wrong == Some(Wrong::TeacherWithoutTemperature) { 1.0 } else { t };
            let lq = log_softmax(&given.iter().map(|y| y / of_teacher).collect::<Vec<_>>());
            let end = if wrong == Some(Wrong::ColumnDropped) { lp.len() - 1 } else { lp.len() };
            let (value, mut slopes) = if wrong == Some(Wrong::Exchanged) {
                divergence(1.0 - beta, &lp[..end], &lq[..end])
            } else {
                divergence(beta, &lp[..end], &lq[..end])
            };
            slopes.resize(lp.len(), 0.0);
            (value, slopes)
        }
        Teacher::TopK(top) => {
            let ids: Vec<usize> =
                (0..given.len()).map(|k| usize::try_from(top.ids[[at.0, at.1, k]]).unwrap()).collect();
            let entries: Vec<f32> = ids.iter().map(|&id| lp[id]).collect();
            let rest = match (distillation.rest.unwrap(), wrong) {
                (_, Some(Wrong::TailIgnored)) => TopKRest::Ignored,
                (rest, _) => rest,
            };
            let mut by_logp = vec![0.0; lp.len()];
            let (value, slopes) = if (rest, wrong) == (TopKRest::Tail, Some(Wrong::SumInLanes)) {
                // The tail is a sum of the other entries, in lanes too.
                let mut others = lp.clone();
                for &id in &ids {
                    others[id] = f32::NEG_INFINITY;
                }
                let (of_student, of_teacher) =
                    (log_sum_in_lanes(&others).into_iter().sum::<f32>(), (-log_sum_exp(&given).exp_m1()).ln());
                let (value, mut slopes) =
                    divergence(beta, &[&entries[..], &[of_student]].concat(), &[&given[..], &[of_teacher]].concat());
                let of_tail = slopes.pop().unwrap();
                by_logp.iter_mut().zip(&others).for_each(|(g, l)| *g = of_tail * (l - of_student).exp());
                (value, slopes)
            } else {
                top_divergence(rest, beta, &entries, &given, wrong)
            };
            ids.iter().zip(slopes).for_each(|(&id, slope)| by_logp[id] = slope);
            (value, by_logp)
        }
    };
    // The backward pass of log_softmax.
    let mean = match wrong {
        Some(Wrong::GradientNotCentred) => 0.0,
        Some(Wrong::SumInLanes) => sum_in_lanes(by_logp.iter().copied()),
        _ => sum(&by_logp),
    };
    let squared = distillation.temperature_squared && wrong != Some(Wrong::TemperatureNotSquared);
    let factor = if squared { t * t } else { 1.0 };
    let slope = |(l, g): (&f32, f32)| factor * (g - l.exp() * mean) / t;
    (factor * value, lp.iter().zip(by_logp).map(slope).collect())
}

/// The divergence of `K` entries, with what is done about the others, and its derivatives by their log-probabilities.
fn top_divergence(rest: TopKRest, beta: f32, lp: &[f32], lq: &[f32], wrong: Option<Wrong>) -> (f32, Vec<f32>) {
    match rest {
        TopKRest::Ignored => divergence(beta, lp, lq),
        TopKRest::Renormalized => {
            let again = |l: &[f32]| l.iter().map(|x| x - log_sum_exp(l)).collect::<Vec<f32>>();
            let student = if wrong == Some(Wrong::StudentNotRenormalized) { lp.to_vec() } else { again(lp) };
            let (value, slopes) = divergence(beta, &student, &again(lq));
            if wrong == Some(Wrong::StudentNotRenormalized) {
                return (value, slopes);
            }
            let total = sum(&slopes);
            (value, slopes.iter().zip(&student).map(|(g, l)| g - l.exp() * total).collect())
        }
        TopKRest::Tail => {
            // As in TRL, without its bound of the sum.
            let with_tail = |l: &[f32]| [l, &[(-log_sum_exp(l).exp_m1()).ln()]].concat();
            let student = with_tail(lp);
            let (value, mut slopes) = divergence(beta, &student, &with_tail(lq));
            let of_tail = slopes.pop().unwrap();
            let lse = log_sum_exp(lp);
            let by_lse = of_tail * lse.exp() / lse.exp_m1();
            (value, slopes.iter().zip(lp).map(|(g, l)| g + by_lse * (l - lse).exp()).collect())
        }
    }
}

/// The mean over tokens, in f32.
pub(crate) fn textbook(spec: &LossSpec, problem: &Problem, wrong: Option<Wrong>) -> Candidate {
    let Shape { batch, tokens, vocab } = problem.shape();
    let count = problem.mask.iter().filter(|counts| **counts).count() as f32;
    let mut token_loss = Array2::<f32>::zeros((batch, tokens));
    let mut dlogits = Array3::<f64>::zeros((batch, tokens, vocab));
    let mut loss = 0.0_f32;
    for (at, _) in problem.mask.indexed_iter().filter(|(_, counts)| **counts) {
        let x: Vec<f32> = problem.logits.row(at.0, at.1).into_iter().map(|x| x as f32).collect();
        let t = problem.tokens().temperature(spec, at) as f32;
        let (value, slopes) = token(spec, &x, problem.extra.teacher.as_ref().unwrap(), at, t, wrong);
        token_loss[at] = value;
        loss += value / count;
        slopes.into_iter().enumerate().for_each(|(j, slope)| dlogits[[at.0, at.1, j]] = f64::from(slope / count));
    }
    Candidate {
        loss: Some(arr0(loss).into()),
        logp: None,
        logp_of_others: None,
        entropy: None,
        token_loss: Some(token_loss.into()),
        gradient: FloatArray::rounded_from(&dlogits, problem.logits.dtype()),
        metrics: None,
    }
}

fn judged(spec: &LossSpec, recipe: &Recipe, wrong: Option<Wrong>) -> (Vec<Verdict>, Vec<String>) {
    let problem = recipe.problem(spec).unwrap();
    let known = JudgedProblem::new(spec, &problem).unwrap();
    let judged = known.judge(textbook(spec, &problem, wrong), &Limits::external(Grade::Standard)).unwrap();
    let teacher = recipe.teacher_regime();
    let failures = known.failures(&judged, "textbook", &format!("{recipe:?} {teacher:?} {:?}", spec.objective));
    (judged.verdicts, failures)
}

const KINDS: [(DistillationKind, Option<f64>); 4] = [
    (DistillationKind::ForwardKl, None),
    (DistillationKind::ReverseKl, None),
    (DistillationKind::JensenShannon, Some(0.5)),
    (DistillationKind::JensenShannon, Some(0.1)),
];

/// The teacher's entries, fewer where the vocabulary is small.
const K: usize = 8;

const RESTS: [Option<TopKRest>; 4] =
    [None, Some(TopKRest::Tail), Some(TopKRest::Renormalized), Some(TopKRest::Ignored)];

pub(crate) fn specs() -> impl Iterator<Item = LossSpec> {
    let all = KINDS.into_iter().flat_map(|kind| RESTS.map(|rest| (kind, rest)));
    all.zip([1.0, 0.7, 2.0].into_iter().cycle()).map(|(((kind, beta), rest), temperature)| {
        let squared = temperature == 2.0;
        let distillation = Distillation { kind, beta, top_k: rest.map(|_| K), rest, temperature_squared: squared };
        LossSpec { temperature: temperature.into(), ..LossSpec::distillation(distillation) }
    })
}

fn recipe(shape: [usize; 3], dtype: Dtype, regime: Regime, seed: u64) -> Recipe {
    Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

#[test]
fn distillation_textbook_passes_standard_in_every_regime() {
    let mut cases = 0;
    for spec in specs() {
        for (place, regime) in (0..).zip(Regime::ALL) {
            for (turn, dtype) in (0..).zip(Dtype::KERNEL) {
                // Every regime of the student meets every one of the teacher.
                for teacher in 0..TeacherRegime::ALL.len() as u64 {
                    let shape = [[2, 2, 7], [2, 2, 33], [1, 2, 257]][(turn + place + teacher as usize) % 3];
                    let recipe = recipe(shape, dtype, regime, teacher + 7 * (place as u64 + 13 * turn as u64));
                    let (_, failures) = judged(&spec, &recipe, None);
                    assert!(failures.is_empty(), "{}", failures[0]);
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 16 * 13 * 3 * 7);
}

#[test]
fn distillation_textbook_passes_at_the_vocabulary_of_qwen() {
    for (spec, seed) in specs().filter(|spec| spec.as_distillation().unwrap().top_k.is_none()).zip(0..) {
        for (place, regime) in (0_u64..).zip([Regime::Normal, Regime::Sampled, Regime::Ties]) {
            let recipe = recipe([1, 2, 151_936], Dtype::F32, regime, seed + 2 * place);
            let (_, failures) = judged(&spec, &recipe, None);
            assert!(failures.is_empty(), "{}", failures[0]);
        }
    }
}

/// The sum is over the whole vocabulary, however few entries a teacher has.
#[test]
fn distillation_of_entries_by_a_sum_in_lanes_passes() {
    for (spec, seed) in specs().filter(|spec| spec.as_distillation().unwrap().top_k.is_some()).zip(0..) {
        for (place, regime) in (0_u64..).zip([Regime::Normal, Regime::Ties]) {
            let recipe = recipe([1, 2, 131_072], Dtype::F32, regime, seed + 2 * place);
            let (_, failures) = judged(&spec, &recipe, Some(Wrong::SumInLanes));
            assert!(failures.is_empty(), "{}", failures[0]);
        }
    }
}

/// The backward pass sums all cotangents too, of which the teacher's entries are the largest: what a lane adds after one of them is rounded
/// at its size, and alike where all other entries are.
#[test]
fn distillation_of_a_tail_with_cotangents_in_lanes_passes() {
    for spec in specs().filter(|spec| spec.as_distillation().unwrap().rest == Some(TopKRest::Tail)) {
        let recipe = recipe([1, 1, 262_144], Dtype::F32, Regime::Small, 0);
        let mut problem = recipe.unmasked_problem(&spec).unwrap();
        problem.logits = FloatArray::zeros((1, 1, 262_144), Dtype::F32);
        let logp = FloatArray::F32(Array3::from_elem((1, 1, K), 0.1_f32.ln()));
        let ids = Array3::from_shape_fn((1, 1, K), |(_, _, k)| k as i64);
        problem.extra.teacher = Some(Teacher::TopK(TeacherTopK { logp, ids }));
        let known = JudgedProblem::new(&spec, &problem).unwrap();
        let in_lanes = textbook(&spec, &problem, Some(Wrong::SumInLanes));
        let judged = known.judge(in_lanes, &Limits::external(Grade::Standard)).unwrap();
        let failures = known.failures(&judged, "textbook", &format!("{:?}", spec.objective));
        assert!(failures.is_empty(), "{}", failures[0]);
    }
}

/// The reference's own numbers, rounded once, are right at grade `exact`.
#[test]
fn distillation_reference_passes_exact() {
    for spec in specs() {
        for (seed, regime) in (0..).zip(Regime::ALL) {
            let problem = recipe([2, 3, 33], Dtype::KERNEL[seed as usize % 3], regime, seed).problem(&spec).unwrap();
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let mut outcome = Candidate::from(known.reference.outcome());
            outcome.gradient = FloatArray::rounded_from(&outcome.gradient.to_f64(), problem.logits.dtype());
            let (loss, token_loss) = (outcome.loss.take().unwrap(), outcome.token_loss.take().unwrap());
            outcome.loss = Some(FloatArray::rounded_from(&loss.to_f64(), Dtype::F32));
            outcome.token_loss = Some(FloatArray::rounded_from(&token_loss.to_f64(), Dtype::F32));
            (outcome.logp, outcome.entropy, outcome.metrics) = (None, None, None);
            let judged = known.judge(outcome, &Limits::for_class("native").unwrap().at(Grade::Exact)).unwrap();
            let failures = known.failures(&judged, "reference", &format!("{regime:?}, seed {seed}"));
            assert!(failures.is_empty(), "{}", failures[0]);
        }
    }
}

/// Asserts that a wrong kernel fails each spec that it is about, in most of the problems where student and teacher differ.
#[track_caller]
fn expect_rejected(wrong: Wrong, applies: impl Fn(&Distillation) -> bool) {
    let mut tried = 0;
    for spec in specs().filter(|spec| applies(spec.as_distillation().unwrap())) {
        for dtype in Dtype::KERNEL {
            for (seed, regime) in (0..14).zip([Regime::Normal, Regime::Small, Regime::Peaked].into_iter().cycle()) {
                let recipe = recipe([2, 3, 97], dtype, regime, seed);
                // Exchanging two distributions that are near each other changes the loss in its third order alone.
                let tells = match (recipe.teacher_regime(), wrong) {
                    (TeacherRegime::Independent | TeacherRegime::Holes | TeacherRegime::FarApart, _) => true,
                    (TeacherRegime::Sharper, _) => regime != Regime::Small,
                    _ => false,
                };
                if !tells {
                    continue;
                }
                let (_, failures) = judged(&spec, &recipe, Some(wrong));
                assert!(
                    !failures.is_empty(),
                    "{wrong:?} passes: {recipe:?}, {:?}, {:?}",
                    recipe.teacher_regime(),
                    spec.objective
                );
                tried += 1;
            }
        }
    }
    assert!(tried > 20, "{wrong:?}: {tried}");
}

fn of_logits(distillation: &Distillation) -> bool {
    distillation.top_k.is_none()
}

#[test]
fn distillation_dropped_column_is_rejected() {
    // In f32 and at normal logits every entry counts. Of a peaked row, or of a teacher far apart, the last may have no weight.
    for spec in specs().filter(|spec| of_logits(spec.as_distillation().unwrap())) {
        for seed in 0..5 {
            for regime in [Regime::Normal, Regime::Small, Regime::Ties] {
                let recipe = recipe([2, 3, 97], Dtype::F32, regime, seed);
                // A mixture of two equal probabilities is flat in them.
                let equal = matches!(recipe.teacher_regime(), TeacherRegime::Near | TeacherRegime::OneUlp);
                if equal && spec.as_distillation().unwrap().kind == DistillationKind::JensenShannon {
                    continue;
                }
                let (_, failures) = judged(&spec, &recipe, Some(Wrong::ColumnDropped));
                assert!(!failures.is_empty(), "{recipe:?}, {:?}, {:?}", recipe.teacher_regime(), spec.objective);
            }
        }
    }
}

#[test]
fn distillation_exchanged_distributions_are_rejected() {
    expect_rejected(Wrong::Exchanged, |of| of_logits(of) && of.teacher_weight() != 0.5);
}

#[test]
fn distillation_beta_on_the_other_side_is_rejected() {
    // The likeliest entries of two flat rows, renormalised, are near to uniform in both.
    let applies = |of: &Distillation| of.teacher_weight() == 0.1 && of.rest != Some(TopKRest::Renormalized);
    expect_rejected(Wrong::BetaOnTheOtherSide, applies);
}

#[test]
fn distillation_forgotten_square_is_rejected() {
    expect_rejected(Wrong::TemperatureNotSquared, |of| of.temperature_squared);
}

#[test]
fn distillation_teacher_without_temperature_is_rejected() {
    let warm = |spec: &LossSpec| spec.temperature.number() != Some(1.0) && of_logits(spec.as_distillation().unwrap());
    let mut tried = 0;
    for spec in specs().filter(warm) {
        for seed in [0, 3, 5, 6] {
            let recipe = recipe([2, 3, 97], Dtype::F32, Regime::Normal, seed);
            let (_, failures) = judged(&spec, &recipe, Some(Wrong::TeacherWithoutTemperature));
            assert!(!failures.is_empty(), "{recipe:?}, {:?}", spec.objective);
            tried += 1;
        }
    }
    assert!(tried >= 8, "{tried}");
}

#[test]
fn distillation_ignored_tail_is_rejected() {
    expect_rejected(Wrong::TailIgnored, |of| of.rest == Some(TopKRest::Tail));
}

#[test]
fn distillation_student_that_is_not_renormalized_is_rejected() {
    expect_rejected(Wrong::StudentNotRenormalized, |of| of.rest == Some(TopKRest::Renormalized));
}

#[test]
fn distillation_gradient_without_its_mean_is_rejected() {
    expect_rejected(Wrong::GradientNotCentred, of_logits);
}

/// An ε in the student's logarithm shows where the student has less than it.
#[test]
fn distillation_epsilon_in_the_logarithm_is_rejected() {
    let spec = LossSpec::distillation(Distillation::default());
    for seed in [0, 6] {
        let recipe = recipe([2, 3, 97], Dtype::F32, Regime::Peaked, seed);
        let (_, failures) = judged(&spec, &recipe, Some(Wrong::EpsilonInLogarithm));
        assert!(!failures.is_empty(), "{:?}", recipe.teacher_regime());
    }
}
