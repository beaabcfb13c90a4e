//! Kept sets before the judge: wrong answers that differ in what a softmax runs over must be rejected, right ones never.

use assay_core::implementation::Implementation as _;
use assay_core::problem::{Candidate, Dtype, FloatArray, NO_ENTRY, Problem};
use assay_core::spec::{KeptSupport, Kl, KlEstimator, LossSpec, SoftmaxRange, Support};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_native::Native;
use ndarray::{Array2, Array3};

const SHAPE: [usize; 3] = [3, 5, 333];

const SET: SoftmaxRange = SoftmaxRange::Set;
const VOCABULARY: SoftmaxRange = SoftmaxRange::Vocabulary;

fn spec(entropy: SoftmaxRange, kl: SoftmaxRange) -> LossSpec {
    let support = Support { kept: Some(KeptSupport { entropy, kl }), ..Support::default() };
    let kl = Some(Kl::plain(0.5, KlEstimator::K3));
    LossSpec { support, kl, entropy_coef: 0.2, temperature: 0.8.into(), ..LossSpec::default() }
}

/// Problems of every dtype whose sets have entries left empty.
fn problems(spec: &LossSpec) -> Vec<Problem> {
    let regimes = [Regime::Normal, Regime::Peaked, Regime::Sampled, Regime::Ties];
    let all = regimes.into_iter().flat_map(|regime| Dtype::KERNEL.map(|dtype| (regime, dtype)));
    let recipe = |(regime, dtype)| Recipe {
        shape: SHAPE,
        dtype,
        regime,
        seed: 3,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    all.map(|drawn| recipe(drawn).problem(spec).unwrap()).collect()
}

fn native(spec: &LossSpec, problem: &Problem) -> Candidate {
    Native::default().run(spec, problem.clone(), 1).unwrap()
}

fn without_sets(spec: &LossSpec) -> LossSpec {
    LossSpec { support: Support { kept: None, ..spec.support.clone() }, ..spec.clone() }
}

fn fails(spec: &LossSpec, problem: &Problem, candidate: Candidate) -> Vec<String> {
    let known = JudgedProblem::new(spec, problem).unwrap();
    let judged = known.judge(candidate, &Limits::for_class("native").unwrap()).unwrap();
    known.failures(&judged, "native", "this test")
}

/// Asserts that the answer of `wrong` fails on each problem, at a gate whose name has `gate` in it.
#[track_caller]
fn expect_rejected(spec: &LossSpec, gate: &str, wrong: impl Fn(&LossSpec, &Problem, &JudgedProblem) -> Candidate) {
    for problem in problems(spec) {
        let candidate = wrong(spec, &problem, &JudgedProblem::new(spec, &problem).unwrap());
        let failures = fails(spec, &problem, candidate);
        let dtype = problem.logits.dtype();
        assert!(failures.iter().any(|failure| failure.contains(gate)), "{dtype} {gate}: {failures:?}");
    }
}

/// Returns a problem with each id of its sets replaced.
fn with_sets(problem: &Problem, of: impl Fn(i32) -> i32) -> Problem {
    let mut other = problem.clone();
    other.extra.kept_ids = other.extra.kept_ids.map(|kept| kept.mapv(of));
    other
}

fn ranges() -> impl Iterator<Item = LossSpec> {
    [SET, VOCABULARY].into_iter().flat_map(|entropy| [SET, VOCABULARY].map(|kl| spec(entropy, kl)))
}

#[test]
fn kept_right_answers_pass() {
    for spec in ranges() {
        for problem in problems(&spec) {
            assert_eq!(fails(&spec, &problem, native(&spec, &problem)), Vec::<String>::new());
            // The reference's own answer, rounded.
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let mut rounded = Candidate::from(known.reference.outcome());
            rounded.gradient = FloatArray::rounded_from(&rounded.gradient.to_f64(), problem.logits.dtype());
            assert_eq!(fails(&spec, &problem, rounded), Vec::<String>::new());
        }
    }
}

/// Logits of −∞ outside the sets are the same softmax: kernels that know no sets are judged right on them.
#[test]
fn kept_answer_by_masked_logits_passes() {
    let spec = spec(SET, SET);
    for problem in problems(&spec) {
        let logits = problem.logits.to_f64();
        let masked = Array3::from_shape_fn(logits.dim(), |(b, t, j)| {
            let entries = problem.mask[[b, t]].then(|| problem.tokens().kept_entries(&spec, (b, t)).unwrap());
            let inside = entries.is_none_or(|entries| entries.contains(&j));
            if inside { logits[[b, t, j]] } else { f64::NEG_INFINITY }
        });
        let masked = problem.with_logits(FloatArray::rounded_from(&masked, problem.logits.dtype()));
        assert_eq!(fails(&spec, &problem, native(&without_sets(&spec), &masked)), Vec::<String>::new());
    }
}

#[test]
fn kept_set_that_is_ignored_is_rejected() {
    for spec in ranges() {
        for gate in ["logp", "dlogits", "loss"] {
            expect_rejected(&spec, gate, |spec, problem, _| native(&without_sets(spec), problem));
        }
    }
}

#[test]
fn kept_entropy_over_the_other_range_is_rejected() {
    for (right, wrong) in [(SET, VOCABULARY), (VOCABULARY, SET)] {
        for gate in ["entropy", "dlogits", "loss"] {
            expect_rejected(&spec(right, SET), gate, |_, problem, _| native(&spec(wrong, SET), problem));
        }
    }
}

#[test]
fn kept_kl_over_the_other_range_is_rejected() {
    for (right, wrong) in [(SET, VOCABULARY), (VOCABULARY, SET)] {
        for gate in ["token_loss", "dlogits", "loss"] {
            expect_rejected(&spec(SET, right), gate, |_, problem, _| native(&spec(SET, wrong), problem));
        }
    }
}

/// The value of the penalty is right and its gradient is sent through the softmax over the set.
#[test]
fn kept_kl_gradient_through_the_set_is_rejected() {
    expect_rejected(&spec(SET, VOCABULARY), "dlogits", |spec, problem, known| {
        let mut same_difference = problem.clone();
        let reference = problem.ref_logp.as_ref().unwrap();
        same_difference.ref_logp = Some(Array2::from_shape_fn(reference.dim(), |(b, t)| {
            let inputs = known.reference.token(b, t).map(|token| token.inputs);
            reference[[b, t]] + inputs.map_or(0.0, |inputs| inputs.logp - inputs.kl_logp)
        }));
        let gradient = native(&self::spec(SET, SET), &same_difference).gradient;
        Candidate { gradient, ..native(spec, problem) }
    });
}

/// An exponential of the sampled id that the sum of its set lacks.
#[test]
fn kept_set_without_the_sampled_id_in_its_sum_is_rejected() {
    expect_rejected(&spec(SET, SET), "logp", |spec, problem, known| {
        let mut candidate = native(spec, problem);
        let logp = candidate.logp.as_ref().unwrap().to_f64();
        let lacking = Array2::from_shape_fn(logp.dim(), |(b, t)| {
            let others = known.reference.token(b, t).map_or(1.0, |token| token.probability_of_others);
            logp[[b, t]] - if others > 0.0 { others.ln() } else { 0.0 }
        });
        candidate.logp = Some(FloatArray::rounded_from(&lacking, Dtype::F32));
        candidate
    });
}

#[test]
fn kept_empty_place_read_as_the_last_entry_is_rejected() {
    let last = i32::try_from(SHAPE[2] - 1).unwrap();
    for spec in ranges() {
        // One place of each set is the last entry; a set that has it already differs in nothing.
        let wrong = |spec: &LossSpec, problem: &Problem, _: &JudgedProblem| {
            let mut other = problem.clone();
            let kept = other.extra.kept_ids.as_mut().unwrap();
            for mut set in kept.rows_mut() {
                let has = set.iter().any(|id| *id == last);
                if let (false, Some(empty)) = (has, set.iter_mut().find(|id| **id == NO_ENTRY)) {
                    *empty = last;
                }
            }
            native(spec, &other)
        };
        for problem in problems(&spec) {
            // A last entry as likely as any: where it is far below the others it has no part in a sum.
            let mut logits = problem.logits.to_f64();
            for mut row in logits.rows_mut() {
                let most = row.iter().copied().fold(f64::MIN, f64::max);
                row[SHAPE[2] - 1] = most;
            }
            let raised = problem.with_logits(FloatArray::rounded_from(&logits, problem.logits.dtype()));
            let known = JudgedProblem::new(&spec, &raised).unwrap();
            assert!(!fails(&spec, &raised, wrong(&spec, &raised, &known)).is_empty());
        }
    }
}

#[test]
fn kept_set_cut_to_its_first_places_is_rejected() {
    for spec in ranges() {
        let mut keeps = spec.clone();
        keeps.support.keep_sampled = true;
        expect_rejected(&spec, "logp", |_, problem, _| {
            let mut other = with_sets(problem, |id| id);
            let kept = other.extra.kept_ids.as_mut().unwrap();
            let half = kept.dim().2 / 2;
            kept.indexed_iter_mut().filter(|((.., k), _)| *k >= half).for_each(|(_, id)| *id = NO_ENTRY);
            native(&keeps, &other)
        });
    }
}

/// The exponential of a column outside, which the softmax of the forward pass left out, has a gradient.
#[test]
fn kept_gradient_outside_the_set_is_rejected() {
    for spec in ranges() {
        expect_rejected(&spec, "dlogits", |spec, problem, known| {
            let mut candidate = native(spec, problem);
            let mut dlogits = candidate.gradient.to_f64();
            for ((b, t, j), dx) in dlogits.indexed_iter_mut() {
                let Some(token) = known.reference.token(b, t) else { continue };
                let grad = known.reference.grad_logp(token, &token.branch, token.coupling);
                if !problem.tokens().kept_entries(spec, (b, t)).unwrap().contains(&j) {
                    let softmax = token.logp_softmax;
                    let z = problem.logits.row(b, t)[j] / softmax.divisor;
                    *dx -= grad * softmax.stats.probability(z) / token.temperature();
                }
            }
            candidate.gradient = FloatArray::rounded_from(&dlogits, problem.logits.dtype());
            candidate
        });
    }
}
