//! What a campaign finds, and what it calls it.

use std::sync::Arc;

use assay_campaign::{CallWay, CallWayKind, Campaign, Deck, DeckHead, DeckShapes, Fault, KernelUnderTest, LocalKernel};
use assay_core::problem::{Candidate, Dtype, FloatArray, FloatView, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_core::spec::presets::{self, BatchInputs, Preset, PresetOptions};
use assay_native::{Native, NativeHead};
use assay_schema::campaign::{CampaignReport, FailureCause};
use assay_suites::mutants::{BANK, Mutant, MutantKind, Specimen};
use ndarray::Ix3;

/// TRL's default.
pub(crate) fn trl() -> LossSpec {
    presets::spec(Preset::Trl, None, &PresetOptions::default(), &BatchInputs::default()).unwrap().spec
}

pub(crate) fn campaign(spec: LossSpec, cases: u64) -> Campaign {
    let deck = Deck { cases, wide: 0, ..Deck::default() };
    Campaign { deck, power: false, ..Campaign::new("kernel", spec) }
}

pub(crate) fn run(campaign: &Campaign, kernel: &mut dyn KernelUnderTest) -> CampaignReport {
    campaign.run(kernel, &mut |_| ()).unwrap()
}

fn named(name: &str) -> &'static Mutant {
    BANK.iter().find(|mutant| mutant.name == name).unwrap_or_else(|| panic!("no mutant {name}"))
}

fn causes_of(name: &str, spec: LossSpec) -> Vec<FailureCause> {
    let specimen = Specimen::with(named(name).bug);
    run(&campaign(spec, 40), &mut LocalKernel::<Problem>(&specimen)).causes
}

/// A kernel that does as a function says.
pub(crate) struct Does<F>(pub(crate) F);

impl<F: FnMut(&LossSpec, &Arc<Problem>) -> Result<Candidate, Fault>> KernelUnderTest for Does<F> {
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<'_, Ix3>>),
    ) -> Result<(), Fault> {
        read(&(self.0)(spec, problem)?.lend());
        Ok(())
    }
}

pub(crate) fn right(spec: &LossSpec, problem: &Problem) -> Candidate {
    use assay_core::implementation::Implementation;
    Native::default().run(spec, problem.clone(), 1).unwrap()
}

#[test]
fn campaign_passes_a_right_kernel_and_scores_wrong_ones() {
    let campaign = Campaign { power: true, ..campaign(trl(), 300) };
    let found = run(&campaign, &mut LocalKernel::<Problem>(&Native::default()));
    assert!(found.passed, "{}", assay_campaign::text(&found, &assay_campaign::TextForm::default()));
    assert_eq!((found.tried, found.failed, found.causes.len()), (300, 0, 0));
    assert_eq!(found.outputs, ["logp", "entropy", "token_loss"]);
    let power = found.power.unwrap();
    let accepted: Vec<&str> = power.accepted.iter().map(|name| name.mutant.as_str()).collect();
    // A logarithm of p + 1e-9 is as good while V is small; grade `standard` admits a collapsed target; NaN under the mask is only noted
    // unless it is asked for.
    let expected = ["target-collapses", "entropy-of-shifted-log", "mask-multiplied"];
    assert_eq!((accepted, power.exercised - power.rejected), (expected.to_vec(), expected.len()));
    assert!(power.exercised > 70, "{power:?}");
    let options: Vec<(&str, &[String])> =
        power.options.iter().map(|found| (found.option.as_str(), found.mutants.as_slice())).collect();
    assert_eq!(options[0], ("grade=exact", &["target-collapses".to_string()][..]), "{options:?}");
    let coverage = found.coverage;
    assert!(coverage.clipped.iter().chain(&coverage.first_and_last_tile).all(|count| *count > 50), "{coverage:?}");
}

#[test]
fn lm_head_right_kernel_passes_a_campaign() {
    let deck = Deck { cases: 40, wide: 0, head: Some(DeckHead::default()), ..Deck::default() };
    let kernel = &mut LocalKernel::<HeadProblem>(&NativeHead::default());
    let campaign = Campaign { power: false, deck, ..Campaign::new("native-lm-head", trl()) };
    let found = campaign.run(kernel, &mut |_| ()).unwrap();
    assert!(
        found.passed && found.tried == 40,
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
}

/// Under TRL's default with a KL penalty and a bonus: each mutant's own name is among those of its one cause, and its problem is
/// small.
#[test]
fn campaign_finds_shrinks_and_names_a_wrong_kernel() {
    let mut spec = trl();
    (spec.entropy_coef, spec.temperature) = (0.05, 0.7.into());
    for name in [
        "non-target-dlogits-dropped",
        "one-hot-forgotten",
        "sum-in-bf16",
        "temperature-twice-in-gradient",
        "clip-on-the-wrong-side",
    ] {
        let causes = causes_of(name, spec.clone());
        let names = |cause: &FailureCause| cause.like.iter().map(|name| name.mutant.clone()).collect::<Vec<_>>();
        assert!(causes.iter().any(|cause| names(cause).contains(&name.to_string())), "{name}: {causes:#?}");
    }
}

/// Every eighth of the mutants; all of them where `ASSAY_PRODUCTION` is set.
#[test]
fn mutants_rejected_are_named_by_themselves_or_by_none() {
    let (mut wrongly, mut unnamed) = (Vec::new(), Vec::new());
    let (mut rejected, mut of_one_cause) = (0, 0);
    let step = if std::env::var_os("ASSAY_PRODUCTION").is_some() { 1 } else { 14 };
    let elsewhere = |class: MutantKind| class.is_of_heads() || class == MutantKind::Devices;
    let of_this_loss = BANK.iter().filter(|mutant| !elsewhere(mutant.kind) && mutant.kind.is_reached(&trl(), false));
    for mutant in of_this_loss.step_by(step) {
        let causes = causes_of(mutant.name, trl());
        if causes.is_empty() {
            continue;
        }
        rejected += 1;
        of_one_cause += usize::from(causes.len() == 1);
        let named: Vec<&FailureCause> = causes.iter().filter(|cause| !cause.like.is_empty()).collect();
        let own = |cause: &&FailureCause| cause.like.iter().any(|name| name.mutant == mutant.name);
        if !named.iter().any(own) {
            let computes: Vec<String> = causes.iter().flat_map(|cause| cause.computes.concat()).collect();
            unnamed.push((mutant.name, computes.join(", ")));
        }
        // Some are one kernel under this loss; many are not.
        assert!(named.iter().all(|cause| cause.like.len() <= 3), "{}: {named:#?}", mutant.name);
        if named.iter().any(|cause| !own(cause)) {
            wrongly.push((mutant.name, named.iter().map(|cause| cause.like.clone()).collect::<Vec<_>>()));
        }
    }
    assert!(wrongly.is_empty(), "{wrongly:#?}");
    // One computes another loss, whose name says more; bits of a second call are no kernel's values on a problem.
    let without = [("clip-ignored", "no clip"), ("sum-in-any-order", "")];
    let known = |(name, computes): &(&str, String)| without.contains(&(*name, computes.as_str()));
    assert!(unnamed.iter().all(known), "{unnamed:?}");
    assert!(rejected >= 5 && of_one_cause + 2 >= rejected, "{of_one_cause} of {rejected}");
}

#[test]
fn campaign_finds_answers_kept_by_address() {
    let mut last: Option<(*const Problem, Candidate)> = None;
    let mut kernel = Does(|spec: &LossSpec, problem: &Arc<Problem>| {
        let FloatArray::F32(logits) = &problem.logits else { return Ok(right(spec, problem)) };
        let address = logits.as_ptr().cast();
        match &last {
            Some((known, candidate)) if *known == address && candidate.gradient.shape() == logits.shape() => {
                Ok(candidate.clone())
            }
            _ => {
                let candidate = right(spec, problem);
                last = Some((address, candidate.clone()));
                Ok(candidate)
            }
        }
    });
    let mut campaign = campaign(trl(), 24);
    (campaign.deck.dtypes, campaign.deck.shapes) = (vec![Dtype::F32], DeckShapes::Given(vec![[2, 4, 33]]));
    let found = run(&campaign, &mut kernel);
    assert!(!found.passed && found.causes.iter().any(|cause| cause.gate == "stale-memory"), "{:#?}", found.causes);
}

#[test]
fn campaign_finds_a_count_kept_by_the_mask() {
    let mut last: Option<(*const bool, usize)> = None;
    let mut kernel = Does(|spec: &LossSpec, problem: &Arc<Problem>| {
        let (address, counts) = (problem.mask.as_ptr(), problem.mask.iter().filter(|counts| **counts).count());
        let kept = last.filter(|(known, _)| *known == address).map_or(counts, |(_, kept)| kept);
        last = Some((address, kept));
        let mut candidate = right(spec, problem);
        let loss = candidate.loss.as_ref().expect("native returns it").value() * counts as f64 / kept as f64;
        candidate.loss = Some(ndarray::arr0(loss as f32).into());
        Ok(candidate)
    });
    let mut campaign = campaign(trl(), 24);
    (campaign.deck.dtypes, campaign.deck.shapes) = (vec![Dtype::F32], DeckShapes::Given(vec![[2, 40, 33]]));
    let found = run(&campaign, &mut kernel);
    assert!(found.causes.iter().any(|cause| cause.gate == "stale-memory"), "{:#?}", found.causes);
}

/// A kernel with two ways of calling: it is wrong in the first, and refuses the second.
#[derive(Default)]
struct CalledInWays {
    way: Option<usize>,
    ways: Vec<CallWay>,
    calls: [u32; 3],
}

impl KernelUnderTest for CalledInWays {
    fn ways(&self) -> &[CallWay] {
        &self.ways
    }

    fn call_by(&mut self, way: Option<usize>) {
        self.way = way;
    }

    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<Problem>,
        read: &mut dyn FnMut(&Candidate<FloatView<'_, Ix3>>),
    ) -> Result<(), Fault> {
        self.calls[self.way.map_or(0, |way| way + 1)] += 1;
        let mut candidate = right(spec, problem);
        match self.way {
            Some(0) => {
                candidate.gradient =
                    FloatArray::rounded_from(&(candidate.gradient.to_f64() * 2.0), candidate.gradient.dtype());
            }
            Some(_) => {
                assert!(problem.mask.iter().all(|counts| *counts), "it is for problems in which every token counts");
                return Err(Fault::Unsupported("called with a view".into()));
            }
            None => {}
        }
        read(&candidate.lend());
        Ok(())
    }
}

#[test]
fn cause_is_the_way_of_calling_that_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let way =
        |words: &str, equal_cotangents| CallWay { words: words.into(), equal_cotangents, kind: CallWayKind::Caller };
    let mut kernel =
        CalledInWays { ways: vec![way("with a slice", false), way("with a view", true)], ..CalledInWays::default() };
    let mut campaign = campaign(trl(), 60);
    campaign.repros = Some(folder.path().into());
    let found = run(&campaign, &mut kernel);
    assert!(found.tried == 60 && kernel.calls.iter().all(|calls| *calls > 5), "{:?}", kernel.calls);
    let [cause] = found.causes.as_slice() else { panic!("{:#?}", found.causes) };
    assert!(cause.first.ends_with(", called with a slice") && cause.problem.ends_with(", called with a slice"));
    // It is shrunk in its way, and no wrong kernel is like it: a plain call is right.
    assert!(cause.problem.starts_with("1x1x") && cause.like.is_empty() && cause.computes.is_empty(), "{cause:#?}");
    assert!(found.skipped.iter().any(|skipped| skipped.why == "called with a view" && skipped.cases > 5));
    // What is kept fails again in its way alone.
    campaign.deck.cases = 1;
    let again = run(&campaign, &mut kernel);
    assert!(again.causes[0].first.contains(".safetensors, called with a slice"), "{again:#?}");
}

#[test]
fn campaign_finds_other_bits_in_a_second_call_or_allows_them() {
    let make = || {
        let mut turn = 0;
        Does(move |spec: &LossSpec, problem: &Arc<Problem>| {
            let mut candidate = right(spec, problem);
            turn += 1;
            let loss = candidate.loss.as_ref().expect("native returns it").value() as f32;
            candidate.loss = Some(ndarray::arr0(if turn % 2 == 0 { loss.next_up() } else { loss }).into());
            Ok(candidate)
        })
    };
    let mut campaign = campaign(trl(), 16);
    let found = run(&campaign, &mut make());
    assert_eq!(found.causes.iter().map(|cause| cause.gate.as_str()).collect::<Vec<_>>(), ["not-reproducible"]);
    campaign.allow = vec!["not-reproducible".into()];
    let found = run(&campaign, &mut make());
    assert!(found.passed && found.allowed.len() == 1);
}

#[test]
fn cause_of_a_fault_is_shown_and_unsupported_is_no_cause() {
    let raised = |_: &LossSpec, problem: &Arc<Problem>| match problem.logits.dtype() {
        Dtype::Bf16 => Err(Fault::Unsupported("bf16".into())),
        _ if problem.shape().vocab > 40 => Err(Fault::Raised("index 40 is out of bounds".into())),
        _ => Ok(right(&trl(), problem)),
    };
    let found = run(&campaign(trl(), 60), &mut Does(raised));
    let [cause] = found.causes.as_slice() else { panic!("{:#?}", found.causes) };
    assert_eq!((cause.gate.as_str(), cause.problem.as_str()), ("raised", "1x1x41 f32"));
    assert!(cause.fault.as_ref().is_some_and(|fault| fault.contains("out of bounds")));
    assert!(found.skipped.iter().any(|skipped| skipped.why == "bf16" && skipped.cases > 20));
}

#[test]
fn worker_ending_three_times_in_a_row_is_not_restarted() {
    let mut calls = 0;
    let mut kernel = Does(|spec: &LossSpec, problem: &Arc<Problem>| {
        calls += 1;
        // The third call of a problem is for other content in memory that held it.
        if calls == 4 || calls > 20 {
            Err(Fault::Crashed { reason: "signal: 11 (SIGSEGV)".into(), signal: Some(11) })
        } else {
            Ok(right(spec, problem))
        }
    });
    let found = run(&campaign(trl(), 40), &mut kernel);
    assert!(!found.passed && found.stopped.is_some_and(|why| why.contains("3 times in a row")));
    // One among others does not stop it, and one while memory is tried is no stale memory.
    assert_eq!(found.failed, 4);
    assert_eq!(found.causes.iter().map(|cause| cause.gate.as_str()).collect::<Vec<_>>(), ["crashed"]);
}

#[test]
fn campaign_empty_never_passes_and_bad_options_are_refused() {
    let nothing = |_: &LossSpec, _: &Arc<Problem>| Err(Fault::Unsupported("anything".into()));
    assert!(!run(&campaign(trl(), 8), &mut Does(nothing)).passed);
    let refused = |change: &dyn Fn(&mut Campaign)| {
        let mut campaign = campaign(trl(), 8);
        change(&mut campaign);
        campaign.run(&mut LocalKernel::<Problem>(&Native::default()), &mut |_| ()).unwrap_err().to_string()
    };
    assert!(refused(&|campaign| campaign.deck.cases = 0).starts_with("cases: got 0"));
    assert!(refused(&|campaign| campaign.deck.dtypes.clear()).starts_with("dtypes: got none"));
    assert!(refused(&|campaign| campaign.allow = vec!["rounding".into()]).starts_with("allow: got `rounding`"));
    assert!(refused(&|campaign| campaign.deck.shapes = DeckShapes::Given(vec![[1, 0, 4]])).starts_with("`shape`"));
}

#[test]
fn replay_problem_that_failed_is_kept_and_tried_first() {
    let folder = tempfile::tempdir().unwrap();
    let mut campaign = campaign(trl(), 40);
    campaign.repros = Some(folder.path().into());
    let specimen = Specimen::with(named("non-target-dlogits-dropped").bug);
    let found = run(&campaign, &mut LocalKernel::<Problem>(&specimen));
    assert!(found.causes[0].repro.as_ref().is_some_and(|path| std::path::Path::new(path).exists()));
    campaign.deck.cases = 1;
    let again = run(&campaign, &mut LocalKernel::<Problem>(&specimen));
    assert!(again.tried > 1 && again.causes[0].first.ends_with(".safetensors"), "{again:#?}");
    assert!(run(&campaign, &mut LocalKernel::<Problem>(&Native::default())).passed);
}
