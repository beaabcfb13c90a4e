//! Parts of a problem.

use ndarray::{Array2, Array3, arr1, arr2};

use assay_core::implementation::Workload as _;
use assay_core::problem::{Advantages, CuSeqlens, Extra, HeadLayout, Problem, ProblemPart, Projection, Sequences};
use assay_core::spec::LossSpec;

fn problem() -> Problem {
    Problem {
        logits: Array3::from_shape_fn((2, 3, 4), |(b, t, v)| (100 * b + 10 * t + v) as f32).into(),
        ids: arr2(&[[0, 1, 2], [3, 0, 1]]),
        mask: arr2(&[[true, true, true], [true, false, true]]),
        advantages: Advantages::Sequence(arr1(&[1.0, 2.0])),
        old_logp: Some(arr2(&[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])),
        ref_logp: None,
        extra: Extra { rollout_weights: Some(arr2(&[[7.0], [8.0]])), ..Extra::default() },
    }
}

#[test]
fn shrink_part_has_its_columns_and_drops_lost_targets() {
    let part = ProblemPart { batch: vec![1], tokens: vec![0, 2], columns: vec![1, 2] };
    let selected = problem().select(&part);
    assert!(selected.logits.is_standard_layout() && selected.check(&LossSpec::default()).is_ok());
    assert_eq!(selected.logits.row(0, 1), [121.0, 122.0]);
    assert_eq!((selected.ids, selected.mask), (arr2(&[[-1, 0]]), arr2(&[[false, true]])));
    assert_eq!(selected.advantages, Advantages::Sequence(arr1(&[2.0])));
    assert_eq!(selected.old_logp, Some(arr2(&[[3.0, 5.0]])));
    assert_eq!(selected.extra.rollout_weights, Some(arr2(&[[8.0]])));
}

/// Sequences of 2, 0 and 3 tokens, and one token behind them.
#[test]
fn packed_part_of_a_shrunk_problem_stays_packed() {
    let mut packed = problem().laid_out(CuSeqlens::from_lengths([2, 3]));
    packed.extra.sequences = Sequences::Packed(CuSeqlens::from_lengths([2, 0, 3]));
    packed.advantages = Advantages::Sequence(arr1(&[1.0, 2.0, 3.0]));
    packed.extra.rollout_weights = Some(arr2(&[[7.0], [8.0], [9.0]]));
    let part = ProblemPart { batch: vec![1, 2], tokens: vec![0, 1, 3, 4, 5], columns: vec![0, 1, 2, 3] };
    let selected = packed.select(&part);
    assert_eq!(selected.extra.sequences, Sequences::Packed(CuSeqlens::from_lengths([0, 2])));
    assert_eq!(selected.advantages, Advantages::Sequence(arr1(&[2.0, 3.0])));
    assert_eq!(selected.extra.rollout_weights, Some(arr2(&[[8.0], [9.0]])));
    assert_eq!(selected.old_logp, Some(arr2(&[[3.0, 4.0, 5.0]])));
    assert_eq!(selected.logits.row(0, 0), [100.0, 101.0, 102.0, 103.0]);
    assert_eq!(
        (selected.mask.clone(), selected.check(&LossSpec::default()).is_ok()),
        (arr2(&[[true, false, false]]), true)
    );
    let whole = packed.select(&ProblemPart::whole([3, 6, 4]));
    assert_eq!((whole.extra, whole.advantages, whole.mask), (packed.extra, packed.advantages, packed.mask));
}

#[test]
fn lm_head_shrinks_columns_and_units_in_either_layout() {
    for layout in [HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden] {
        let [rows, columns] = layout.extents(3, 4);
        let lm_head = Array2::from_shape_fn((rows, columns), |(i, j)| match layout {
            HeadLayout::HiddenByVocab => (10 * i + j) as f32,
            HeadLayout::VocabByHidden => (10 * j + i) as f32,
        });
        let hidden = Array3::from_shape_fn((2, 3, 3), |(.., h)| h as f32).into();
        let projection = Projection { hidden, lm_head: lm_head.into(), layout, rounds_logits: false };
        let part = ProblemPart { columns: vec![3, 0], ..ProblemPart::whole([2, 3, 4]) };
        let selected = problem().with_logits(projection).select(&part, &[2]);
        assert_eq!(layout.part(&selected.logits.lm_head.view(), 0..2, 0..1), arr2(&[[23.0], [20.0]]));
        assert_eq!(selected.logits.hidden.row(1, 2), [2.0]);
        assert_eq!(selected.shape().to_string(), "2x3x1x2");
    }
}
