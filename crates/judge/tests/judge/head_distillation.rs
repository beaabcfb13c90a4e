//! Divergences of a student behind an LM head: right kernels pass at both grades, and wrong products do not.

use super::distillation::{Wrong, specs, textbook};
use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, FloatArray, HeadCandidate, HeadGradient, HeadLayout, HeadProblem, Teacher};
use assay_core::spec::{LossSpec, TopKRest};
use assay_judge::generate::{HeadRecipe, Recipe, Regime, TeacherRegime};
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_suites::mutants::{Bug, Specimen};
use ndarray::{Array2, Array3, s};

/// Regimes that a product has.
const REGIMES: [Regime; 7] = [
    Regime::Normal,
    Regime::Small,
    Regime::Peaked,
    Regime::Ties,
    Regime::Confident,
    Regime::FarColumn,
    Regime::ShiftedUp,
];

/// Makes the recipe of a problem, whose teacher is the `teacher`th regime, as `turn` goes through dtypes, layouts and shapes.
fn head_recipe(regime: Regime, teacher: usize, turn: usize) -> HeadRecipe {
    let seed = teacher + TeacherRegime::ALL.len() * turn;
    let recipe = Recipe {
        shape: [[2, 3, 33], [1, 4, 7], [2, 2, 130]][turn % 3],
        dtype: Dtype::KERNEL[turn % 3],
        regime,
        seed: seed as u64,
        old_logp_noise_scale: 0.3,
        masked_garbage: turn.is_multiple_of(2),
    };
    let layout = [HeadLayout::VocabByHidden, HeadLayout::HiddenByVocab][turn % 2];
    HeadRecipe {
        hidden: [8, 24, 33][(turn + teacher) % 3],
        layout,
        rounds_logits: (turn / 3).is_multiple_of(2),
        recipe,
    }
}

/// Multiplies in f32, rounds logits if the problem says so or `rounds`, and takes the textbook's divergence and exact products of its
/// dlogits.
fn textbook_head(
    spec: &LossSpec,
    known: &JudgedProblem<HeadProblem>,
    wrong: Option<Wrong>,
    rounds: bool,
) -> HeadCandidate {
    let (problem, reference) = (known.problem, &known.reference);
    let shape = reference.shape();
    let weights = reference.columns(0..shape.vocab).mapv(|w| w as f32);
    let mut logits = Array3::<f32>::zeros((shape.batch, shape.tokens, shape.vocab));
    let dtype = if problem.logits.rounds_logits || rounds { problem.dtype() } else { Dtype::F32 };
    for (b, t) in ndarray::indices((shape.batch, shape.tokens)) {
        let hidden: ndarray::Array1<f32> = problem.logits.hidden.row(b, t).iter().map(|x| *x as f32).collect();
        let row = weights.dot(&hidden).mapv(|x| dtype.round(f64::from(x)) as f32);
        logits.slice_mut(s![b, t, ..]).assign(&row);
    }
    let computed = textbook(spec, &problem.clone().with_logits(FloatArray::F32(logits)), wrong);
    let dlogits = computed.gradient.to_f64();
    let dlogits: Array2<f64> =
        dlogits.into_shape_with_order((shape.batch * shape.tokens, shape.vocab)).expect("as many tokens");
    let dhidden = reference.dhidden(|columns| dlogits.slice(s![.., columns]).to_owned());
    let dhidden = dhidden.into_shape_with_order((shape.batch, shape.tokens, shape.hidden)).expect("dense");
    let dlm_head = match problem.logits.layout {
        HeadLayout::VocabByHidden => reference.dlm_head(&dlogits),
        HeadLayout::HiddenByVocab => reference.dlm_head(&dlogits).reversed_axes().as_standard_layout().into_owned(),
    };
    let dlm_head = FloatArray::rounded_from(&dlm_head, problem.dtype());
    let dhidden = FloatArray::rounded_from(&dhidden, problem.dtype());
    computed.with_gradient(HeadGradient { dhidden, dlm_head, dlogits_dtype: Dtype::F32 })
}

fn failures_of_textbook(spec: &LossSpec, recipe: &HeadRecipe, wrong: Option<Wrong>, rounds: bool) -> Vec<String> {
    let problem = recipe.problem(spec).unwrap();
    let known = JudgedProblem::new(spec, &problem).unwrap();
    let judged = known.judge(textbook_head(spec, &known, wrong, rounds), &Limits::external(Grade::Standard)).unwrap();
    let teacher = recipe.recipe.teacher_regime();
    known.failures(&judged, "textbook", &format!("{recipe:?} {teacher:?} {:?}", spec.objective))
}

/// Runs `each` on every spec, regime of the student and regime of the teacher.
fn on_all(mut each: impl FnMut(&LossSpec, &HeadRecipe)) -> usize {
    let mut cases = 0;
    for (place, spec) in specs().enumerate() {
        for (turn, regime) in REGIMES.into_iter().enumerate() {
            for teacher in 0..TeacherRegime::ALL.len() {
                each(&spec, &head_recipe(regime, teacher, place + turn + teacher));
                cases += 1;
            }
        }
    }
    cases
}

#[test]
fn head_distillation_of_the_textbook_passes_standard() {
    let cases = on_all(|spec, recipe| {
        let failures = failures_of_textbook(spec, recipe, None, false);
        assert!(failures.is_empty(), "{}", failures[0]);
    });
    assert_eq!(cases, 16 * REGIMES.len() * TeacherRegime::ALL.len());
}

#[test]
fn head_distillation_of_the_specimen_passes_exact() {
    let limits = Limits::for_class("native-lm-head").unwrap().at(Grade::Exact);
    on_all(|spec, recipe| {
        let problem = recipe.problem(spec).unwrap();
        let known = JudgedProblem::new(spec, &problem).unwrap();
        for devices in [1, 4] {
            let judged =
                known.judge(Specimen::default().run(spec, problem.clone(), devices).unwrap(), &limits).unwrap();
            let failures = known.failures(
                &judged,
                "specimen",
                &format!("{recipe:?} {:?} {:?} {devices}", recipe.recipe.teacher_regime(), spec.objective),
            );
            assert!(failures.is_empty(), "{}", failures[0]);
        }
    });
}

/// A teacher's logits are two numbers of the dtype, so that their product is exact; or one, if logits are rounded.
#[test]
fn head_distillation_teacher_is_an_exact_product() {
    let scales = [(Dtype::F64, 1.0), (Dtype::F32, 1.0), (Dtype::Bf16, 1.0 / 256.0), (Dtype::F16, 1.0 / 2048.0)];
    for (turn, (dtype, scale)) in scales.into_iter().enumerate() {
        for teacher in 0..TeacherRegime::ALL.len() {
            let (spec, recipe) = (specs().next().unwrap(), head_recipe(Regime::Normal, teacher, turn));
            let drawn = Recipe { masked_garbage: false, dtype, ..recipe.recipe };
            let recipe = HeadRecipe { rounds_logits: false, recipe: drawn, ..recipe };
            let problem = recipe.problem(&spec).unwrap();
            let Some(Teacher::Logits(logits)) = &problem.extra.teacher else { unreachable!("a teacher's logits") };
            for x in logits.to_f64() {
                let high = dtype.round(x);
                assert!(x.is_finite() && high + dtype.round((x - high) / scale) * scale == x, "{dtype}: {x}");
            }
            let rounded = HeadRecipe { rounds_logits: true, ..recipe }.problem(&spec).unwrap();
            let rounded = rounded.extra.teacher.unwrap().floats().to_f64();
            assert!(rounded.iter().all(|x| dtype.round(*x) == *x));
        }
    }
}

/// Asserts that a wrong kernel of the textbook fails most of the problems of the first spec that tell.
#[track_caller]
fn expect_rejected(wrong: Option<Wrong>, rounds: bool, teachers: &[TeacherRegime]) {
    let mut tried = 0;
    for spec in specs().filter(|spec| spec.as_distillation().unwrap().top_k.is_none()).take(2) {
        for (turn, regime) in [Regime::Normal, Regime::Peaked].into_iter().cycle().take(8).enumerate() {
            for teacher in (0..TeacherRegime::ALL.len()).filter(|at| teachers.contains(&TeacherRegime::ALL[*at])) {
                let recipe = HeadRecipe { rounds_logits: false, ..head_recipe(regime, teacher, turn) };
                // Rounding to f32 is none.
                if rounds && recipe.recipe.dtype == Dtype::F32 {
                    continue;
                }
                let failures = failures_of_textbook(&spec, &recipe, wrong, rounds);
                assert!(!failures.is_empty(), "{wrong:?}, {recipe:?}, {:?}", spec.objective);
                tried += 1;
            }
        }
    }
    assert!(tried >= 10, "{tried}");
}

const APART: [TeacherRegime; 2] = [TeacherRegime::Independent, TeacherRegime::FarApart];

#[test]
fn head_distillation_with_rounded_logits_is_rejected() {
    expect_rejected(None, true, &[TeacherRegime::Independent, TeacherRegime::Near]);
}

#[test]
fn head_distillation_without_the_mean_slope_is_rejected() {
    expect_rejected(Some(Wrong::GradientNotCentred), false, &APART);
}

#[test]
fn head_distillation_of_exchanged_distributions_is_rejected() {
    expect_rejected(Some(Wrong::Exchanged), false, &APART);
}

/// The bugs of the head's products show in a divergence as in any loss.
#[test]
fn head_distillation_with_wrong_products_is_rejected() {
    let wrong = [
        Bug::DhiddenLacksTail,
        Bug::DlmHeadOverwritten,
        Bug::LastChunkDropped,
        Bug::LogitsRounded,
        Bug::DepthTailDropped,
        Bug::ProductsInTf32,
        Bug::DhiddenSummedInHiddenDtype,
    ];
    for bug in wrong {
        let (mut failed, mut tried) = (0, 0);
        // Rounding the logits of entries that are divided by their sum may stay within the textbook's own errors.
        let rest = |spec: &LossSpec| spec.as_distillation().unwrap().rest;
        for (turn, spec) in specs().filter(|spec| rest(spec) != Some(TopKRest::Renormalized)).enumerate() {
            // Several chunks, and a last tile of columns that is not full.
            let recipe = head_recipe(Regime::Normal, 0, turn);
            // Numbers of 16 bits are TF32's already.
            let dtype = if bug == Bug::ProductsInTf32 { Dtype::F32 } else { Dtype::Bf16 };
            let recipe = Recipe { shape: [3, 6, 300], masked_garbage: false, dtype, ..recipe.recipe };
            let recipe = HeadRecipe { hidden: 33, rounds_logits: false, layout: HeadLayout::VocabByHidden, recipe };
            let problem = recipe.unmasked_problem(&spec).unwrap();
            let known = JudgedProblem::new(&spec, &problem).unwrap();
            let run = Specimen::with(bug).run(&spec, problem.clone(), 1).unwrap();
            let judged = known.judge(run, &Limits::external(Grade::Standard)).unwrap();
            failed += usize::from(!known.failures(&judged, "specimen", "").is_empty());
            tried += 1;
        }
        // Rounding to 10 bits, or to 8, may stay within the textbook's errors of a mixture of two flat rows.
        let is_rounding = matches!(bug, Bug::ProductsInTf32 | Bug::DhiddenSummedInHiddenDtype);
        assert!(failed == tried || is_rounding && failed + 2 >= tried, "{bug:?}: {failed} of {tried}");
    }
}
