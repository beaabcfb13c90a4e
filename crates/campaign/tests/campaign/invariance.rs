//! Relations between calls: each is found by a kernel that the judge alone accepts, and none in kernels that compute tokens one by one.

use std::sync::Arc;

use assay_campaign::panel::{self, PanelDeck, Panelist};
use assay_campaign::worker::ShardCut;
use assay_campaign::{
    AskedInvariance, CallWay, CallWayKind, Campaign, Deck, DeckHead, DeckShapes, Fault, KernelUnderTest, LocalKernel,
    TextForm, text,
};
use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_core::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay_judge::gate::Output;
use assay_native::{Native, NativeHead};
use assay_schema::campaign::CampaignReport;
use assay_schema::invariance::{InvarianceGrade, InvarianceRelation, RelationFinding};
use ndarray::Ix3;

use crate::finds::{Does, campaign, right, run, trl};

/// A deck of logits in f32, whose numbers differ in their last bits where those in bf16 may not.
fn asking(spec: LossSpec, relations: &[InvarianceRelation], grade: Option<InvarianceGrade>, cases: u64) -> Campaign {
    let asked = AskedInvariance::from_relations(relations, false, false);
    let asked = match grade {
        Some(InvarianceGrade::Bits) => asked.in_bits(),
        Some(InvarianceGrade::Limits) => asked.in_limits(),
        None => asked,
    };
    let deck = Deck { cases, wide: 0, dtypes: vec![Dtype::F32], ..Deck::default() };
    Campaign { invariance: Some(asked), deck, ..campaign(spec, cases) }
}

/// A right kernel that moves the log-probabilities of tokens `at` by `steps` of their last bit.
fn nudged(
    steps: impl Fn(&Problem, (usize, usize)) -> i32,
) -> Does<impl FnMut(&LossSpec, &Arc<Problem>) -> Result<Candidate, Fault>> {
    Does(move |spec: &LossSpec, problem: &Arc<Problem>| {
        let mut candidate = right(spec, problem);
        let mut logp = candidate.logp.take().unwrap().to_f64();
        for (at, counts) in problem.mask.indexed_iter() {
            if *counts && logp[at] < 0.0 && logp[at].is_finite() {
                let bits = (logp[at] as f32).to_bits();
                logp[at] = f64::from(f32::from_bits(bits.wrapping_add_signed(steps(problem, at))));
            }
        }
        candidate.logp = Some(FloatArray::from(logp.mapv(|x| x as f32)));
        Ok(candidate)
    })
}

fn finding(found: &CampaignReport, relation: InvarianceRelation) -> &RelationFinding {
    found.invariance.iter().find(|finding| finding.relation == relation).expect("the relation was asked")
}

/// Asserts that the kernel fails by `relation`, asked in bits, and that the judge alone accepts it.
fn assert_found(relation: InvarianceRelation, kernel: &mut dyn KernelUnderTest) -> CampaignReport {
    let alone = run(&campaign(trl(), 40), kernel);
    assert!(alone.passed, "{}", text(&alone, &TextForm::default()));
    let found = run(&asking(trl(), &[relation], Some(InvarianceGrade::Bits), 40), kernel);
    let told = text(&found, &TextForm::default());
    assert!(!found.passed && finding(&found, relation).failed > 0, "{told}");
    assert_eq!(found.causes[0].gate, relation.cause(), "{told}");
    found
}

#[test]
fn invariance_of_the_native_kernel_holds_in_bits() {
    let deck = Deck { cases: 120, wide: 1, ..Deck::default() };
    let spec = trl();
    let asked = AskedInvariance::usual(&spec, false, false).in_bits();
    let campaign = Campaign { deck, invariance: Some(asked), ..campaign(spec, 120) };
    let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
    assert!(found.passed, "{}", text(&found, &TextForm::default()));
    for finding in &found.invariance {
        assert_eq!(finding.other_bits, 0, "{finding:?}");
        let is_asked = !matches!(
            finding.relation,
            InvarianceRelation::Chunk | InvarianceRelation::Packing | InvarianceRelation::Ranks
        );
        assert_eq!(finding.problems > 5, is_asked, "{finding:?}");
    }
}

#[test]
fn invariance_with_an_lm_head_holds_by_its_usual_grades() {
    let spec = trl();
    let deck = Deck { cases: 60, wide: 0, head: Some(DeckHead::default()), ..Deck::default() };
    let asked = AskedInvariance::usual(&spec, true, false);
    let campaign = Campaign { deck, invariance: Some(asked), ..campaign(spec, 60) };
    let found =
        campaign.run(&mut LocalKernel::<HeadProblem>(&NativeHead::default()), &mut |_| ()).expect("a valid campaign");
    assert!(found.passed, "{}", text(&found, &TextForm::default()));
    assert!(finding(&found, InvarianceRelation::Batch).problems > 3);
}

#[test]
fn invariance_of_packed_sequences_holds_in_bits() {
    let spec = presets::spec(Preset::Trl, None, &PresetOptions::default(), &BatchInputs::default()).unwrap().spec;
    let deck = Deck { cases: 60, wide: 0, packed: true, ..Deck::default() };
    let asked = AskedInvariance::usual(&spec, false, false).in_bits();
    let campaign = Campaign { deck, invariance: Some(asked), ..campaign(spec, 60) };
    let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
    assert!(found.passed, "{}", text(&found, &TextForm::default()));
    assert!(finding(&found, InvarianceRelation::Order).problems > 3);
    assert_eq!(finding(&found, InvarianceRelation::Length).problems, 0);
}

#[test]
fn invariance_is_counted_in_a_panel() {
    let kernel = |from: usize| nudged(move |problem: &Problem, _| i32::from(problem.mask.len() > from));
    let mut kernels = [usize::MAX, 8].map(|from| Panelist::new("k", None, "k".into(), kernel(from)));
    panel::run(&mut kernels, (0..22).map(|index| PanelDeck::Narrow.case(index)), || ()).unwrap();
    let [right, split] = kernels.map(|kernel| kernel.found.invariance);
    let asked: Vec<&RelationFinding> = right.iter().filter(|finding| finding.problems > 0).collect();
    assert!(asked.len() >= 6 && asked.iter().all(|finding| finding.other_bits == 0), "{asked:?}");
    let batch = split.iter().find(|finding| finding.relation == InvarianceRelation::Batch).unwrap();
    assert!(batch.other_bits > 0 && batch.failed == 0, "{batch:?}");
    assert_eq!(batch.outputs, ["logp"]);
    assert!(batch.difference_over_limit.is_some_and(|over| over < 1.0), "{batch:?}");
}

#[test]
fn invariance_batch_finds_a_split_by_the_number_of_rows() {
    let found = assert_found(InvarianceRelation::Batch, &mut nudged(|problem, _| i32::from(problem.mask.len() > 8)));
    let cause = &found.causes[0];
    assert!(cause.sentence.starts_with("logp at ["), "{}", cause.sentence);
    // The batch becomes large with its second sequence, however long one is.
    let start =
        cause.diagnoses.iter().find(|told| told.starts_with("logp changes when the tokens of the batch go from"));
    let numbers: Vec<usize> = start.expect("it is told").split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(numbers[0] <= 8 && numbers[1] > 8, "{numbers:?}");
}

#[test]
fn invariance_order_finds_a_dependence_on_the_row() {
    assert_found(InvarianceRelation::Order, &mut nudged(|_, (b, _)| i32::from(b % 2 == 1)));
}

#[test]
fn invariance_neighbours_finds_a_maximum_of_the_batch() {
    // A running maximum that is carried over from another row may change one bit.
    let of_others = |problem: &Problem, (b, _): (usize, usize)| {
        let rows = (0..problem.mask.nrows()).filter(|other| *other != b);
        let sum: f64 = rows.map(|other| problem.logits.row(other, 0)[0]).filter(|x| x.is_finite()).sum();
        i32::from(sum > 0.0)
    };
    assert_found(InvarianceRelation::Neighbours, &mut nudged(of_others));
}

#[test]
fn invariance_length_finds_a_dependence_on_the_width() {
    assert_found(InvarianceRelation::Length, &mut nudged(|problem, _| (problem.mask.ncols() % 3) as i32));
}

#[test]
fn invariance_packing_finds_another_path_for_packed_rows() {
    let is_packed = |problem: &Problem, _: (usize, usize)| i32::from(problem.extra.sequences.packed().is_some());
    assert_found(InvarianceRelation::Packing, &mut nudged(is_packed));
}

#[test]
fn invariance_vocabulary_finds_a_tile_chosen_by_its_size() {
    let odd = |problem: &Problem, _: (usize, usize)| (problem.logits.shape()[2] % 2) as i32;
    assert_found(InvarianceRelation::Vocabulary, &mut nudged(odd));
}

#[test]
fn invariance_alignment_finds_a_path_for_aligned_rows() {
    let misaligned = |problem: &Problem, _: (usize, usize)| match &problem.logits {
        FloatArray::F32(logits) => i32::from(logits.as_ptr().addr() % 16 != 0),
        _ => 0,
    };
    assert_found(InvarianceRelation::Alignment, &mut nudged(misaligned));
}

#[test]
fn invariance_repeat_finds_what_a_call_leaves_behind() {
    // The kernel depends on the content of the call before, and gives the same bits if it is asked twice in a row.
    let mut before = 0_u64;
    let mut kernel = Does(move |spec: &LossSpec, problem: &Arc<Problem>| {
        let first = problem.logits.row(0, 0)[0].to_bits();
        let is_other = before != 0 && before != first;
        before = first;
        let mut answer = None;
        let mut inner = nudged(|_, _| i32::from(is_other));
        inner.answer(spec, problem, &mut |candidate| answer = Some(Candidate::from_lent(candidate)))?;
        Ok(answer.expect("it has answered"))
    });
    let campaign = Campaign { repeats: false, ..asking(trl(), &[InvarianceRelation::Repeat], None, 60) };
    let found = run(&campaign, &mut kernel);
    assert_eq!(found.causes[0].gate, "repeat-invariance", "{}", text(&found, &TextForm::default()));
}

/// A right kernel, and a variant of it whose log-probabilities are moved.
struct WithVariant {
    ways: Vec<CallWay>,
    is_called: bool,
    /// The error of the variant, in units of `u(1 + 2|logp|)`.
    error: f64,
}

impl KernelUnderTest for WithVariant {
    fn ways(&self) -> &[CallWay] {
        &self.ways
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.is_called = way.is_some();
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<'_, Ix3>>),
    ) -> Result<(), Fault> {
        let mut candidate = right(spec, problem);
        if self.is_called {
            let logp = candidate.logp.take().unwrap().to_f64();
            let moved = logp.mapv(|x| (x - self.error * f64::from(f32::EPSILON) / 2.0 * (1.0 + 2.0 * x.abs())) as f32);
            candidate.logp = Some(FloatArray::from(moved));
        }
        read(&candidate.lend());
        Ok(())
    }
}

/// A kernel with one variant, whose log-probabilities are off by `error` units of `u(1 + 2|logp|)`.
fn with_variant(error: f64) -> WithVariant {
    let words = "as variant 1, chunked".to_string();
    WithVariant {
        ways: vec![CallWay { words, equal_cotangents: false, kind: CallWayKind::Variant }],
        is_called: false,
        error,
    }
}

#[test]
fn invariance_chunk_allows_another_order_and_no_coarser_sum() {
    // Two orders of a sum in f32 are a few units apart, which is within limits; 9 units the judge alone accepts.
    let chunk = [InvarianceRelation::Chunk];
    let close = run(&asking(trl(), &chunk, None, 60), &mut with_variant(1.5));
    assert!(close.passed, "{}", text(&close, &TextForm::default()));
    let differences = finding(&close, InvarianceRelation::Chunk);
    assert!(differences.other_bits > 20 && differences.difference_over_limit.unwrap() < 1.0, "{differences:?}");
    let coarse = run(&asking(trl(), &chunk, None, 60), &mut with_variant(9.0));
    assert_eq!(coarse.causes[0].gate, "chunk-invariance", "{}", text(&coarse, &TextForm::default()));
    let judged = Does(|spec: &LossSpec, problem: &Arc<Problem>| {
        let mut answer = None;
        let mut variant = WithVariant { is_called: true, ..with_variant(9.0) };
        variant.answer(spec, problem, &mut |candidate| answer = Some(Candidate::from_lent(candidate)))?;
        Ok(answer.expect("it has answered"))
    });
    let alone = run(&campaign(trl(), 60), &mut { judged });
    assert!(alone.passed, "{}", text(&alone, &TextForm::default()));
}

#[test]
fn invariance_of_every_preset_is_asked_where_it_is_exact() {
    // Outputs that change by design, as under a mean over the batch, are left out; log-probabilities and entropies never are.
    for preset in Preset::ALL {
        let spec = presets::spec(preset, None, &PresetOptions::default(), &BatchInputs::default()).unwrap().spec;
        let asked = AskedInvariance::usual(&spec, false, false).in_bits();
        let campaign = Campaign { invariance: Some(asked), ..campaign(spec, 30) };
        let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
        assert!(found.passed, "{preset:?}: {}", text(&found, &TextForm::default()));
        let by_design = found.invariance.iter().flat_map(|finding| &finding.by_design);
        assert!(by_design.clone().all(|output| output != Output::Logp.name() && output != Output::Entropy.name()));
    }
}

#[test]
fn invariance_alone_judges_nothing() {
    // Half of every log-probability: wrong, and the same in every batch.
    let mut kernel = Does(|spec: &LossSpec, problem: &Arc<Problem>| {
        let mut candidate = right(spec, problem);
        candidate.logp = candidate.logp.map(|logp| FloatArray::from(logp.to_f64().mapv(|x| (x / 2.0) as f32)));
        Ok(candidate)
    });
    let spec = LossSpec::from_cotangents(true);
    let asked = AskedInvariance::from_relations(&InvarianceRelation::ALL, false, true).alone();
    let relations = Campaign { invariance: Some(asked), ..campaign(spec.clone(), 30) };
    let found = run(&relations, &mut kernel);
    assert!(found.passed, "{}", text(&found, &TextForm::default()));
    assert!(!run(&campaign(spec, 30), &mut kernel).passed);
}

#[test]
fn invariance_words_are_checked() {
    let words = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        AskedInvariance::from_words(&words, &trl(), &Deck::default()).map_err(|why| why.to_string())
    };
    assert_eq!(words(&["batch", "order"]).unwrap().demands.len(), 2);
    let few = Deck { shapes: DeckShapes::Few, ..Deck::default() };
    let compiled = AskedInvariance::from_words(&["usual".to_string()], &trl(), &few).unwrap();
    let in_bits = compiled.demands.iter().filter(|demand| demand.grade == InvarianceGrade::Bits);
    assert!(in_bits.map(|demand| demand.relation.name()).eq(["repeat", "order", "neighbours"]));
    assert!(words(&["bits"]).unwrap().demands.iter().all(|demand| demand.grade == InvarianceGrade::Bits));
    assert!(
        words(&["bathc"]).unwrap_err().starts_with("got `bathc`, expected usual, bits, limits, or some of repeat,")
    );
    assert!(words(&[]).unwrap_err().contains("one or more"));
}

/// The native kernel, as if ranks shared the axis.
struct OnRanks(ShardCut);

impl KernelUnderTest for OnRanks {
    fn cut(&self) -> Option<ShardCut> {
        Some(self.0)
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<Ix3>>),
    ) -> Result<(), Fault> {
        LocalKernel::<Problem>(&Native::default()).answer(spec, problem, read)
    }
}

#[test]
fn ranks_have_mutants_of_their_own() {
    let score = |kernel: &mut dyn KernelUnderTest| {
        let deck = Deck { cases: 24, wide: 0, ..Deck::default() };
        let found = run(&Campaign { power: true, deck, ..campaign(trl(), 24) }, kernel);
        found.power.expect("it was counted")
    };
    let alone = score(&mut LocalKernel::<Problem>(&Native::default()));
    // A maximum, a sum, a sampled logit that no all-reduce joins; and of cut sequences a normaliser, a loss, an advantage too.
    for (cut, count) in [(ShardCut::Vocabulary, 10), (ShardCut::Batch, 14)] {
        let ranked = score(&mut OnRanks(cut));
        let added = [ranked.exercised - alone.exercised, ranked.rejected - alone.rejected];
        assert_eq!(added, [count, count], "{cut:?}: {:?}", ranked.accepted);
    }
}

#[test]
fn invariance_mutants_are_rejected_where_they_are_asked() {
    let score = |asked: Option<AskedInvariance>| {
        let deck = Deck { cases: 40, wide: 0, dtypes: vec![Dtype::F32], ..Deck::default() };
        let campaign =
            Campaign { invariance: asked, power: true, deck, ..campaign(LossSpec::from_cotangents(true), 40) };
        let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
        assert!(found.passed, "{}", text(&found, &TextForm::default()));
        found.power.expect("it was counted")
    };
    let spec = LossSpec::from_cotangents(true);
    let [without, with] = [None, Some(AskedInvariance::usual(&spec, false, false))].map(score);
    assert_eq!((with.exercised - without.exercised, with.rejected - without.rejected), (8, 8), "{with:?}");
    let one = score(Some(AskedInvariance::from_relations(&[InvarianceRelation::Order], false, false)));
    assert_eq!((one.exercised - without.exercised, one.rejected - without.rejected), (1, 1), "{one:?}");
}
