//! Maps of errors: the largest error / limit of a map is that of its verdict, at its place, and the picture shows what was broken.

use assay_core::problem::{Candidate, Dtype, FloatArray, HeadLayout};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::report::picture;
use assay_judge::tolerance::{Grade, Limits};
use assay_schema::picture::{ErrorPicture, PictureAxis};
use ndarray::s;

fn limits() -> Limits<'static> {
    Limits::external(Grade::Standard).with_error_maps()
}

fn recipe(shape: [usize; 3]) -> Recipe {
    Recipe {
        shape,
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 5,
        old_logp_noise_scale: 0.05,
        masked_garbage: false,
    }
}

/// The largest error / limit of all cells of a verdict's first map.
fn largest(verdict: &Verdict) -> f64 {
    let map = picture(std::slice::from_ref(verdict), verdict.gate, "").expect("a value is beyond its limit");
    map.filled().into_iter().flatten().fold(0.0, f64::max)
}

fn failed(verdicts: &[Verdict]) -> impl Iterator<Item = &Verdict> {
    verdicts.iter().filter(|verdict| verdict.status.failed() && !verdict.tally.maps.is_empty())
}

fn first_picture(verdicts: &[Verdict]) -> ErrorPicture {
    let verdict = failed(verdicts).next().expect("a gate with an axis fails");
    picture(verdicts, verdict.gate, "the problem").expect("a value is beyond its limit")
}

#[test]
fn error_map_of_dlogits_shows_the_broken_entries() {
    let spec = LossSpec::default();
    // 601 entries share 201 cells of 3 entries each.
    let problem = recipe([2, 3, 601]).unmasked_problem(&spec).unwrap();
    let reference = problem.evaluate(&spec).unwrap();
    let exact: Candidate = reference.outcome().into();
    let judged = |break_it: &dyn Fn(&mut ndarray::Array3<f64>)| {
        let mut values = exact.gradient.to_f64();
        break_it(&mut values);
        let candidate = Candidate { gradient: FloatArray::rounded_from(&values, Dtype::F32), ..exact.clone() };
        problem.judge(&reference, &candidate.lend(), &limits()).unwrap()
    };
    let verdicts = judged(&|dlogits| dlogits.slice_mut(s![.., .., 300..450]).fill(0.0));
    let shown = first_picture(&verdicts);
    assert_eq!((shown.axis, shown.extent, shown.places), (PictureAxis::VocabularyEntry, 601, 3));
    assert_eq!(shown.beyond(), [[300, 449]]);
    for verdict in failed(&verdicts) {
        assert_eq!(largest(verdict), verdict.tally.badness(), "{}", verdict.gate);
    }
    // If every entry of one token is wrong, the picture is along the tokens.
    let verdicts = judged(&|dlogits| dlogits.slice_mut(s![1, 1, ..]).fill(0.0));
    let shown = first_picture(&verdicts);
    assert_eq!((shown.axis, shown.extent, shown.beyond()), (PictureAxis::Token, 6, vec![[4, 4]]));
    // A value that is NaN is beyond every limit.
    let verdicts = judged(&|dlogits| dlogits[[0, 2, 600]] = f64::NAN);
    let shown = first_picture(&verdicts);
    assert_eq!((shown.beyond(), shown.nonfinite.len()), (vec![[600, 600]], 1));
    assert!(shown.lines(60).iter().any(|line| line.ends_with('!')), "{:#?}", shown.lines(60));
    // Verdicts by other limits have no maps.
    let plain = problem.judge(&reference, &exact.lend(), &Limits::external(Grade::Standard)).unwrap();
    assert!(plain.iter().all(|verdict| verdict.tally.maps.is_empty()));
}

#[test]
fn error_map_of_an_lm_head_shows_the_broken_units() {
    let spec = LossSpec::default();
    let recipe =
        HeadRecipe { recipe: recipe([2, 3, 130]), hidden: 48, layout: HeadLayout::VocabByHidden, rounds_logits: false };
    let problem = recipe.problem(&spec).unwrap();
    let reference = problem.evaluate(&spec).unwrap();
    let mut candidate: Candidate<_> = assay_core::problem::HeadProblem::outcome(&reference);
    let mut dlm_head = candidate.gradient.dlm_head.to_f64();
    dlm_head.slice_mut(s![.., 32..]).fill(0.0);
    candidate.gradient.dlm_head = FloatArray::rounded_from(&dlm_head, Dtype::F32);
    let verdicts = problem.judge(&reference, &candidate.lend(), &limits()).unwrap();
    let shown = first_picture(&verdicts);
    assert_eq!((shown.axis, shown.extent, shown.beyond()), (PictureAxis::HiddenUnit, 48, vec![[32, 47]]));
    for verdict in failed(&verdicts) {
        assert_eq!(largest(verdict), verdict.tally.badness(), "{}", verdict.gate);
    }
}
