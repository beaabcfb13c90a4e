//! Packed problems: what is dealt, what is found on them, and what that is made into.

use std::sync::Arc;

use assay_campaign::{Campaign, Deck, DeckHead, DeckShapes, Fault, LocalKernel};
use assay_core::implementation::Implementation;
use assay_core::problem::{Advantages, Candidate, CuSeqlens, HeadProblem, Problem, Sequences};
use assay_core::spec::{AdvantageLevel, LossSpec, Ratio, RatioLevel, Reduction, Rows};
use assay_native::{Native, NativeHead};
use assay_schema::campaign::FailureCause;
use ndarray::s;

use crate::finds::{Does, campaign, right, run, trl};

fn packed(spec: LossSpec, cases: u64) -> Campaign {
    let padded = campaign(spec, cases);
    Campaign { deck: Deck { packed: true, ..padded.deck.clone() }, ..padded }
}

/// A ratio a sequence.
fn gspo() -> LossSpec {
    LossSpec { ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() }, ..trl() }
}

fn ends(problem: &Problem) -> Vec<usize> {
    let Sequences::Packed(cu_seqlens) = &problem.extra.sequences else { panic!("packed problems are dealt") };
    cu_seqlens.values().to_vec()
}

/// The problem with other sequences in the same places, and the advantages of the first of them.
fn with_ends(problem: &Problem, ends: &[usize]) -> Problem {
    let mut other = problem.clone();
    let ends: Vec<i64> = ends.iter().map(|&end| end as i64).collect();
    other.extra.sequences = Sequences::Packed(CuSeqlens::new(&ends).unwrap());
    let Advantages::Sequence(advantages) = &mut other.advantages else { panic!("one a sequence") };
    *advantages = advantages.slice(s![..ends.len() - 1]).to_owned();
    other
}

#[test]
fn packed_sequences_of_all_lengths_lie_anywhere_in_a_row() {
    let Campaign { deck, spec, .. } = packed(trl(), 64);
    let (mut empty, mut behind, mut across) = ([0; 3], 0, 0);
    for recipe in deck.recipes() {
        let problem: Problem = deck.draw(&recipe, &spec).unwrap();
        let [batch, tokens, _] = recipe.recipe.shape;
        assert_eq!((problem.mask.dim(), problem.extra.sequences.packed()), ((1, batch * tokens), Some(batch)));
        let ends = ends(&problem);
        for (i, pair) in ends.windows(2).enumerate() {
            let at = if i == 0 {
                0
            } else if i + 1 == batch {
                2
            } else {
                1
            };
            empty[at] += usize::from(pair[0] == pair[1]);
            across += usize::from(pair[0] / 128 != pair[1] / 128 && pair[1] % 128 > 0);
        }
        behind += usize::from(ends[batch] < batch * tokens);
    }
    assert!(empty.iter().all(|count| *count > 2) && behind > 10 && across > 2, "{empty:?} {behind} {across}");
}

#[test]
fn packed_right_kernels_pass_with_and_without_a_head() {
    let campaign = Campaign { power: true, ..packed(gspo(), 60) };
    let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
    assert!(
        found.passed && found.packed && found.tried == 60,
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
    assert!(found.coverage.empty_rows > 20, "{:?}", found.coverage);
    let power = found.power.unwrap();
    assert!(power.accepted.iter().all(|name| !name.does.contains("sequence")), "{power:?}");
    let deck = Deck { cases: 24, head: Some(DeckHead::default()), ..campaign.deck.clone() };
    let campaign = Campaign { power: false, deck, ..campaign };
    let found = campaign.run(&mut LocalKernel::<HeadProblem>(&NativeHead::default()), &mut |_| ()).unwrap();
    assert!(
        found.passed && found.tried == 24,
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
}

/// The one cause of a kernel that does as a function says.
fn cause_of(spec: LossSpec, kernel: impl FnMut(&LossSpec, &Arc<Problem>) -> Result<Candidate, Fault>) -> FailureCause {
    let found = run(&packed(spec, 32), &mut Does(kernel));
    let [cause] = found.causes.as_slice() else {
        panic!("{}", assay_campaign::text(&found, &assay_campaign::TextForm::default()))
    };
    cause.clone()
}

/// It has the name, and its problem two sequences of a token or two.
#[track_caller]
fn assert_called(cause: &FailureCause, name: &str) {
    assert!(cause.like.iter().any(|like| like.mutant == name), "{cause:#?}");
    let small = ["1x1x", "1x2x"].iter().any(|extents| cause.problem.starts_with(extents));
    assert!(small && cause.problem.ends_with(", 2 packed"), "{cause:#?}");
}

/// What a kernel comes to that takes the pack for a row: each token's advantage, and one mean and one ratio of all.
fn of_one_row(spec: &LossSpec, problem: &Problem) -> Candidate {
    let ends = ends(problem);
    let mut row = with_ends(problem, &[0, ends[ends.len() - 1]]);
    row.advantages = Advantages::Token(problem.tokens().advantages_of_tokens());
    right(&LossSpec { advantages: AdvantageLevel::Token, ..spec.clone() }, &row)
}

#[test]
fn packed_ignored_boundaries_are_found_shrunk_and_named() {
    let cause = cause_of(gspo(), |spec, problem| Ok(of_one_row(spec, problem)));
    assert_called(&cause, "pack-taken-for-row");
}

#[test]
fn packed_ratios_leaked_over_boundaries_are_found_and_named() {
    let cause = cause_of(gspo(), |spec, problem| {
        let (ends, last) = (ends(problem), *ends(problem).last().expect("not empty"));
        let late: Vec<usize> = ends.iter().map(|&end| if end == 0 { 0 } else { (end + 1).min(last) }).collect();
        Ok(right(spec, &with_ends(problem, &late)))
    });
    assert_called(&cause, "boundaries-late");
}

#[test]
fn packed_counted_empty_sequences_are_found_and_named() {
    let cause = cause_of(trl(), |spec, problem| {
        let tokens =
            |sequence: &assay_core::problem::Sequence| sequence.places().filter(|at| problem.mask[*at]).count();
        let counted: usize = problem.sequences().iter().map(|sequence| tokens(sequence).max(1)).sum();
        let spec = LossSpec { reduction: Reduction::Normalizer(counted as f64), ..spec.clone() };
        Ok(right(&spec, problem))
    });
    assert_called(&cause, "empty-sequence-counts-a-token");
}

#[test]
fn packed_failed_problem_is_tried_first_by_packed_campaigns() {
    let folder = tempfile::tempdir().unwrap();
    let campaign = Campaign { repros: Some(folder.path().into()), ..packed(gspo(), 8) };
    let ignores = |spec: &LossSpec, problem: &Arc<Problem>| Ok(of_one_row(spec, problem));
    let found = run(&campaign, &mut Does(ignores));
    assert!(found.causes[0].repro.as_ref().is_some_and(|path| path.ends_with("-packed.safetensors")), "{found:#?}");
    let again =
        run(&Campaign { deck: Deck { cases: 1, ..campaign.deck.clone() }, ..campaign.clone() }, &mut Does(ignores));
    assert!(again.tried > 1 && again.causes[0].first.ends_with(".safetensors"), "{again:#?}");
    let deck = Deck { cases: 1, packed: false, ..campaign.deck.clone() };
    let of_rows = run(&Campaign { deck, ..campaign }, &mut LocalKernel::<Problem>(&Native::default()));
    assert!(of_rows.passed && of_rows.tried == 1, "{of_rows:#?}");
}

/// A kernel that takes no packed sequences.
struct OfRows(Native);
impl Implementation for OfRows {
    fn id(&self) -> &str {
        self.0.id()
    }
    fn summary(&self) -> &str {
        self.0.summary()
    }
    fn class(&self) -> &str {
        self.0.class()
    }
    fn available(&self) -> Result<(), assay_core::implementation::Unavailable> {
        Ok(())
    }
    fn supports(
        &self,
        _: &LossSpec,
        _: assay_core::problem::Shape,
        _: assay_core::problem::Dtype,
        _: usize,
    ) -> Result<(), assay_core::implementation::Unsupported> {
        Ok(())
    }
    fn run(&self, _: &LossSpec, _: Problem, _: usize) -> Result<Candidate, assay_core::implementation::RunError> {
        panic!("it takes no packed sequences")
    }
}

#[test]
fn packed_padded_width_mean_and_row_kernels_are_refused() {
    let spec = LossSpec { reduction: Reduction::FixedLength { rows: Rows::All, length: None }, ..trl() };
    let refused =
        packed(spec, 4).run(&mut LocalKernel::<Problem>(&Native::default()), &mut |_| ()).unwrap_err().to_string();
    assert!(refused.starts_with("`reduction.fixed_length.length`: not given, expected a number"), "{refused}");
    let mut campaign = packed(trl(), 4);
    campaign.deck.shapes = DeckShapes::Given(vec![[2, 3, 5]]);
    let found = run(&campaign, &mut LocalKernel::<Problem>(&OfRows(Native::default())));
    assert!(!found.passed && found.tried == 0 && found.skipped[0].why.contains("sequences packed"), "{found:#?}");
}
