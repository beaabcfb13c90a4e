//! [`Campaign`]: the problems one by one, and what is made of those that fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ndarray::{Array, Dimension};

use assay_core::problem::{Advantages, Problem, ProblemError};
use assay_core::spec::LossSpec;
use assay_core::text::ShownPath;
use assay_fixture::ProblemFile;
use assay_judge::gate::Edge;
use assay_judge::generate::RecipeError;
use assay_judge::invariance::TokenAnswers;
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_reference::Reference;
use assay_schema::campaign as schema;
use assay_schema::invariance::{InvarianceRelation, RelationFinding};

use crate::campaign::{Campaign, CampaignError, CampaignProgress};
use crate::cause::{self, Failures};
use crate::deck::{DealtRecipe, Deck, DeckContent, FeatureCounts};
use crate::examine::{
    Examined, Examiner, FailedProblem, FailureGroup, FailureKind, SEEDS, elements, reseeded, same_bits,
};
use crate::invariance::{AskedInvariance, NotCompared, has_dead_entries, note_comparison};
use crate::kernel::{CallWayKind, Fault, KernelUnderTest};
use crate::repros::{CALLED_KEY, CAUSE_KEY, files};
use crate::subject::Subject;

/// Every so many problems are asked twice, and answered with other content in the same memory.
const TWICE: u64 = 8;

/// Vocabularies above this are split over programs, and asked twice.
const SPLIT: usize = 16_384;

/// Problems that the kernel passes and wrong kernels must pass too, to give a cause its name.
const PASSING: usize = 12;

/// Ends of a process in a row after which it is not started again.
const ENDS: u64 = 3;

/// First problems after which the campaign ends if the kernel has failed by one and the same fault on all of them.
const SAME_FAULTS: u64 = 10;

/// The golden ratio as a fraction of 2⁶⁴: its multiples, modulo 1, fill an interval evenly, and in step with no other cycle of a deck.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The largest vocabularies of the ranges for which the time is told.
const VOCABULARIES: [usize; 3] = [1024, 16_384, 65_536];

/// A tile of columns, for what is counted of targets at its edges.
const TILE: usize = 128;

impl Campaign {
    /// Gives the kernel the problems of the deck, which have an LM head if the kernel is one of `HeadProblem`s.
    ///
    /// # Errors
    /// [`CampaignError`] where it cannot be made. What a kernel does is a finding, never an error.
    pub fn run<P: Subject>(
        &self,
        kernel: &mut dyn KernelUnderTest<P>,
        progress: &mut dyn FnMut(CampaignProgress),
    ) -> Result<schema::CampaignReport, CampaignError> {
        // The other allowed names are those of causes, which are known only after the last problem: `finish` waives
        // them.
        self.check()?;
        let edges: Vec<Edge> = self.allow.iter().filter_map(|name| name.parse().ok()).collect();
        // The kernel is somebody else's: the limits are those of external kernels, not of a class of this project.
        let limits = Limits::external(self.grade);
        let bench =
            Examiner { invariance: self.invariance.as_ref(), ..Examiner::new(kernel, &self.spec, limits, &edges) };
        let mut round = Round {
            campaign: self,
            bench,
            started: Instant::now(),
            tried: 0,
            failed: 0,
            stopped: None,
            interrupted: false,
            ends: 0,
            same_fault: None,
            outputs: Vec::new(),
            buckets: BTreeMap::new(),
            passing: Vec::new(),
            skipped: BTreeMap::new(),
            turn: 0,
            coverage: schema::DeckCoverage::default(),
            features: FeatureCounts::new(&self.deck),
            trials: Vec::new(),
            costs: Vec::new(),
            findings: self.invariance.as_ref().map(AskedInvariance::findings).unwrap_or_default(),
        };
        // Problems that failed in an earlier campaign come first, then the deck by number.
        round.repros(progress)?;
        for index in 0..self.deck.cases {
            if round.is_over() {
                break;
            }
            let (begun, vocabulary) = (Instant::now(), self.deck.deal(index).recipe.shape[2]);
            round.deal(index)?;
            round.add_cost(vocabulary, begun.elapsed().as_secs_f64());
            let (tried, failed) = (round.tried, round.failed);
            progress(CampaignProgress { tried, cases: self.deck.cases, failed });
        }
        round.finish()
    }

    fn check(&self) -> Result<(), CampaignError> {
        self.spec.check().map_err(|reason| RecipeError::Problem(reason.into()))?;
        if self.deck.packed {
            self.spec.expect_no_width().map_err(|field| RecipeError::Problem(ProblemError::NoWidth { field }))?;
        }
        self.deck.check()?;
        // A misspelt waiver would silently waive nothing.
        let known = cause::names_that_can_be_allowed();
        match self.allow.iter().find(|name| !known.contains(&name.as_str())) {
            Some(given) => Err(CampaignError::Allow { given: given.clone().into(), expected: known.join(", ").into() }),
            None => Ok(()),
        }
    }
}

/// The origin of a problem.
#[derive(Clone, Copy)]
enum Origin<'d> {
    /// The deck deals it; the flag says whether it is asked twice.
    Dealt(&'d DealtRecipe, bool),
    /// An earlier campaign kept it as it failed.
    Kept,
    /// An earlier campaign kept it as it failed with garbage under the mask, and passed without.
    KeptForGarbage,
}

impl<'d> Origin<'d> {
    /// Returns the recipe of a problem of the deck, and whether it is asked twice.
    fn dealt(self) -> Option<(&'d DealtRecipe, bool)> {
        match self {
            Origin::Dealt(dealt, twice) => Some((dealt, twice)),
            Origin::Kept | Origin::KeptForGarbage => None,
        }
    }
}

/// The findings of a second call: the kinds of failure, and the other problem if it is that which fails.
type SecondFailure<P> = (Vec<FailureKind>, Option<FailedProblem<P>>);

/// A campaign while it runs.
struct Round<'r, P: Subject> {
    campaign: &'r Campaign,
    bench: Examiner<'r, P>,
    started: Instant,
    tried: u64,
    failed: u64,
    stopped: Option<String>,
    /// Whether the user stopped it, so that it has not passed.
    interrupted: bool,
    /// Answers in a row for which the kernel's process ended, or was killed.
    ends: u64,
    /// The fault of every problem that was tried so far, and their number; `None` once another problem had none or another.
    same_fault: Option<(String, u64)>,
    outputs: Vec<&'static str>,
    /// The failures by the way of calling in which they showed, and by kind.
    buckets: BTreeMap<(Option<usize>, FailureKind), FailureGroup<P>>,
    passing: Vec<Arc<P>>,
    skipped: BTreeMap<String, u64>,
    /// The number of problems for which a way of calling was chosen.
    turn: u64,
    coverage: schema::DeckCoverage,
    features: FeatureCounts,
    /// Every problem of the deck that was tried, and whether the kernel failed on it.
    trials: Vec<(DealtRecipe, bool)>,
    /// The time by ranges of vocabularies, in the order in which they were met.
    costs: Vec<schema::VocabularyCost>,
    /// The findings about each relation that is asked, in the order of the demands.
    findings: Vec<RelationFinding>,
}

impl<P: Subject> Round<'_, P> {
    fn is_over(&mut self) -> bool {
        if self.campaign.stop.load(Ordering::Relaxed) {
            self.interrupt();
        }
        if self.campaign.time.is_some_and(|time| self.started.elapsed() > time) {
            self.stopped.get_or_insert("its time was up".into());
        }
        self.stopped.is_some()
    }

    fn skip(&mut self, why: String) {
        *self.skipped.entry(why).or_default() += 1;
    }

    /// Tries the problems that failed in earlier campaigns.
    fn repros(&mut self, progress: &mut dyn FnMut(CampaignProgress)) -> Result<(), CampaignError> {
        let Some(folder) = &self.campaign.repros else { return Ok(()) };
        for path in files(folder)? {
            if self.is_over() {
                break;
            }
            let file = ProblemFile::open(&path)?;
            // A folder may hold problems of other losses, whose limits would not apply.
            let of_this_spec = file.spec().is_ok_and(|spec| spec.as_ref() == Some(&self.campaign.spec));
            let old_logp = file.old_logp_names().first().copied();
            let problem = if of_this_spec { P::read(&file, old_logp)? } else { None };
            let as_dealt =
                |problem: &P| problem.batch().extra.sequences.packed().is_some() == self.campaign.deck.packed;
            if let Some(problem) = problem.filter(as_dealt) {
                // A problem that failed once is tried whatever its content is, and called in the way in which it failed.
                let called = file.metadata().get(CALLED_KEY);
                let way = self.bench.kernel.ways().iter().position(|way| Some(&way.words) == called);
                let garbage = file.metadata().get(CAUSE_KEY) == Some(&FailureKind::MaskedGarbage.name());
                let origin = if garbage { Origin::KeptForGarbage } else { Origin::Kept };
                let _ = self.examine(ShownPath(&path).to_string(), problem, origin, way);
                let (tried, failed) = (self.tried, self.failed);
                progress(CampaignProgress { tried, cases: self.campaign.deck.cases, failed });
            }
        }
        Ok(())
    }

    /// Adds the time of a problem over `vocabulary` entries to that of its range.
    fn add_cost(&mut self, vocabulary: usize, seconds: f64) {
        let range = |vocabulary| VOCABULARIES.iter().position(|largest| vocabulary <= *largest);
        let of_same_range = self.costs.iter_mut().find(|cost| range(cost.vocabulary) == range(vocabulary));
        match of_same_range {
            Some(cost) => {
                cost.vocabulary = cost.vocabulary.max(vocabulary);
                cost.problems += 1;
                cost.seconds += seconds;
            }
            None => self.costs.push(schema::VocabularyCost { vocabulary, problems: 1, seconds }),
        }
    }

    /// Tries problem `index` of the deck, with the first of several seeds under which a token has a gradient.
    fn deal(&mut self, index: u64) -> Result<(), CampaignError> {
        for step in 0..SEEDS {
            let mut dealt = reseeded(self.campaign.deck.deal(index), step);
            // Some mistakes of wide problems, such as a workspace that is not cleared, show in the second call only.
            let wide = dealt.recipe.shape[2] > SPLIT;
            let twice = self.campaign.repeats && (wide || index.is_multiple_of(TWICE));
            let way = if twice { None } else { self.way(&mut dealt) };
            let mut problem: P = self.campaign.deck.draw(&dealt, &self.campaign.spec)?;
            if way.is_some_and(|way| self.bench.kernel.ways()[way].equal_cotangents) {
                problem = problem.map_tokens(equalize_cotangents);
            }
            if self.examine(dealt.label(), problem, Origin::Dealt(&dealt, twice), way) {
                return Ok(());
            }
        }
        self.skip("no token of the problem has a gradient under this loss".into());
        Ok(())
    }

    /// Chooses the way of calling for the next problem: the plain one for a quarter of them, and for the rest the others by turns. The
    /// recipe is changed where the way is for problems of another content.
    fn way(&mut self, dealt: &mut DealtRecipe) -> Option<usize> {
        // Garbage under the mask is a question of its own, which a failure in one of the ways would hide.
        if dealt.content == DeckContent::MaskedGarbage {
            return None;
        }
        let place = self.turn.wrapping_mul(GOLDEN) >> 32;
        self.turn += 1;
        // The upper three quarters of the interval are cut into as many parts as there are ways.
        let ways = self.bench.kernel.ways();
        // Forms of the kernel are the last ways, and are no ways of calling.
        let count = ways.iter().filter(|way| way.kind == CallWayKind::Caller).count();
        let way = (place.checked_sub(1 << 30)? * count as u64 / (3 << 30)) as usize;
        if ways[..count].get(way)?.equal_cotangents {
            if dealt.packed || matches!(dealt.content, DeckContent::EndsCount | DeckContent::NoTokenCounts) {
                return None;
            }
            dealt.content = DeckContent::EveryTokenCounts;
        }
        Some(way)
    }

    /// Judges the kernel on one problem, called in the `way` that is given. If it fails so, it is called plainly too: a failure that then
    /// remains is no matter of the way.
    fn judged(&mut self, problem: &Arc<P>, known: &JudgedProblem<P>, way: Option<usize>) -> Examined {
        self.bench.call_by(way);
        let examined = self.bench.judged(problem, known);
        if way.is_none() || matches!(examined.fault, Some(Fault::Interrupted)) {
            return examined;
        }
        if let Some(Fault::Unsupported(what)) = &examined.fault {
            self.skip(what.to_string());
        } else if self.waived(examined.kinds.clone()).is_empty() {
            return examined;
        }
        self.bench.call_by(None);
        let plain = self.bench.judged(problem, known);
        if !self.waived(plain.kinds.clone()).is_empty() || matches!(examined.fault, Some(Fault::Unsupported(_))) {
            return plain;
        }
        self.bench.call_by(way);
        examined
    }

    /// Judges the kernel on one problem. A problem of the deck may be asked twice, and then other content in the same memory.
    ///
    /// Returns false if there was nothing to see: a problem without a gradient is not tried, unless that is what it was dealt for.
    fn examine(&mut self, label: String, problem: P, origin: Origin, way: Option<usize>) -> bool {
        let dealt = origin.dealt();
        let problem = Arc::new(problem);
        let spec = self.bench.spec;
        // Evaluate the reference, and look at what the problem covers before the kernel is asked.
        let known = match JudgedProblem::new(spec, &*problem) {
            Ok(known) => known,
            Err(why) => {
                self.skip(why.to_string());
                return true;
            }
        };
        let mut coverage = self.coverage.clone();
        cover(&mut coverage, P::on_logits(&known.reference));
        let without_gradient = coverage.with_gradient == self.coverage.with_gradient;
        if without_gradient && !dealt.is_some_and(|(dealt, _)| dealt.content.may_lack_a_gradient()) {
            return false;
        }
        let Examined { kinds, errors, mut fault, outputs, answers } = self.judged(&problem, &known, way);
        // An unsupported problem is skipped with the kernel's own words. An interruption ends the campaign and its
        // remaining problems.
        match &fault {
            Some(Fault::Unsupported(what)) => {
                self.skip(what.to_string());
                return true;
            }
            Some(Fault::Interrupted) => {
                self.interrupt();
                return true;
            }
            _ => {}
        }
        // A process that ends again and again costs a start for each problem, and teaches nothing new.
        self.ends = if matches!(fault, Some(Fault::Crashed { .. } | Fault::TimedOut(_))) { self.ends + 1 } else { 0 };
        if self.ends == ENDS {
            self.stopped = Some(format!("the kernel's process ended {ENDS} times in a row"));
        }
        // A fault of the interface, such as a missing output, would only be repeated.
        let said = fault.as_ref().filter(|_| self.bench.way.is_none()).map(ToString::to_string);
        self.same_fault = match (said, self.same_fault.take()) {
            (Some(said), None) if self.tried == 0 => Some((said, 1)),
            (Some(said), Some((same, count))) if said == same => Some((same, count + 1)),
            _ => None,
        };
        if self.same_fault.as_ref().is_some_and(|(_, count)| *count == SAME_FAULTS) {
            self.stopped = Some(format!("the first {SAME_FAULTS} problems all failed by the same fault"));
        }
        self.tried += 1;
        self.coverage = coverage;
        for output in outputs {
            if !self.outputs.contains(&output) {
                self.outputs.push(output);
            }
        }
        drop(known);
        if let Some((dealt, _)) = dealt {
            self.features.add(dealt);
            self.trials.push((as_drawn(dealt, &*problem), false));
        }
        let mut shown = FailedProblem { label, problem, fault: fault.take(), errors, tried: None };
        let mut kinds = self.waived(kinds);
        match dealt {
            // A problem that was kept for garbage under its mask shows that fault again, and no other.
            None if matches!(origin, Origin::KeptForGarbage) && !kinds.is_empty() => {
                kinds = vec![FailureKind::MaskedGarbage];
            }
            // Garbage under the mask is a cause of its own where the same problem passes without it.
            Some((dealt, _))
                if !kinds.is_empty() && dealt.content == DeckContent::MaskedGarbage && self.bench.way.is_none() =>
            {
                if let Some(without) = self.without_garbage(dealt) {
                    (kinds, shown) = without.unwrap_or((vec![FailureKind::MaskedGarbage], shown));
                }
            }
            // A right answer is asked for again, as some kernels depend on state or on addresses.
            Some((dealt, true)) if kinds.is_empty() => match self.once_more(&shown.problem, dealt) {
                Ok(None) | Err(Fault::Unsupported(_)) => {}
                Ok(Some((found, other))) => {
                    kinds = found;
                    shown = other.unwrap_or(shown);
                }
                Err(Fault::Interrupted) => self.interrupt(),
                Err(ended) => {
                    kinds = vec![FailureKind::Fault(ended.name(), String::new())];
                    shown.fault = Some(ended);
                }
            },
            _ => {}
        }
        // A right answer must be the same in another call too.
        if kinds.is_empty() && dealt.is_some() && self.stopped.is_none() {
            let before = answers.filter(|_| self.bench.way.is_none());
            if let Some((kind, fault)) = self.ask_relation(&shown.problem, before.as_ref()) {
                kinds = vec![kind];
                shown.fault = fault;
            }
        }
        // A failing problem counts for its most telling kind; a small passing one is kept, to test mutants on.
        match kinds.into_iter().next() {
            Some(kind) => self.note(kind, shown, dealt.is_some()),
            None if self.passing.len() < PASSING && elements(&*shown.problem) < 1 << 16 => {
                self.passing.push(shown.problem);
            }
            None => {}
        }
        true
    }

    /// Asks the next relation that applies to a problem, and returns the kind of failure.
    fn ask_relation(
        &mut self,
        problem: &Arc<P>,
        before: Option<&TokenAnswers>,
    ) -> Option<(FailureKind, Option<Fault>)> {
        let asked = self.campaign.invariance.as_ref()?;
        self.bench.call_by(None);
        // The relation that was asked of fewest problems is next; one that does not apply to this problem is passed over.
        let mut places: Vec<usize> = (0..asked.demands.len()).collect();
        places.sort_by_key(|place| self.findings[*place].problems);
        for place in places {
            let (demand, finding) = (asked.demands[place], &mut self.findings[place]);
            // Each relation has forms, such as one sequence alone and all of them twice, which take turns.
            let form = finding.problems;
            let compared = if demand.relation == InvarianceRelation::Vocabulary
                && !has_dead_entries(&self.campaign.deck.regimes)
            {
                Err(NotCompared::NotAsked("the regime `holes` is not dealt".into()))
            } else {
                self.bench.compare_calls(demand, (problem, form), before, asked.alone)
            };
            let not_asked = match compared {
                Ok(compared) if compared.differences.tokens == 0 => continue,
                Ok(compared) => {
                    let failed = compared.fails;
                    note_comparison(finding, compared);
                    return failed.then_some((FailureKind::Dependent(demand.relation), None));
                }
                Err(NotCompared::NotAsked(why)) => why,
                Err(NotCompared::NoAnswer(Fault::Unsupported(what))) => format!("the kernel refuses it: {what}"),
                Err(NotCompared::NoAnswer(Fault::Interrupted)) => {
                    self.interrupt();
                    return None;
                }
                Err(NotCompared::NoAnswer(ended)) => {
                    let field =
                        if let Fault::Output { field, .. } = &ended { field.to_string() } else { String::new() };
                    return Some((FailureKind::Fault(ended.name(), field), Some(ended)));
                }
            };
            if finding.problems == 0 {
                finding.not_asked.get_or_insert(not_asked);
            }
        }
        None
    }

    fn interrupt(&mut self) {
        self.stopped = Some("it was interrupted".into());
        self.interrupted = true;
    }

    /// Judges the problem of `dealt` with ordinary numbers under the mask. Returns `None` if that cannot be judged, `Some(None)` if
    /// the kernel passes, and else the kinds of failure and the problem.
    #[expect(clippy::option_option, reason = "not judged, passed, and failed are three things")]
    fn without_garbage(&mut self, dealt: &DealtRecipe) -> Option<Option<(Vec<FailureKind>, FailedProblem<P>)>> {
        let dealt = dealt.without_garbage();
        let problem: Arc<P> = Arc::new(self.campaign.deck.draw(&dealt, self.bench.spec).ok()?);
        let known = JudgedProblem::new(self.bench.spec, &*problem).ok()?;
        let Examined { kinds, errors, fault, .. } = self.bench.judged(&problem, &known);
        drop(known);
        if matches!(fault, Some(Fault::Unsupported(_) | Fault::Interrupted)) {
            return None;
        }
        let kinds = self.waived(kinds);
        let failed = || FailedProblem { label: dealt.label(), problem, fault, errors, tried: None };
        Some((!kinds.is_empty()).then(|| (kinds, failed())))
    }

    /// Asks for `problem` a second time, and then for other content in the same memory. Returns the kinds of failure, and the other
    /// problem if it is that which fails.
    fn once_more(&mut self, problem: &Arc<P>, dealt: &DealtRecipe) -> Result<Option<SecondFailure<P>>, Fault> {
        // Two calls with one problem must return the same bits.
        let [first, second] = [self.bench.candidate(problem)?, self.bench.candidate(problem)?];
        if !same_bits(&first, &second) {
            return Ok(Some((vec![FailureKind::OtherBits], None)));
        }
        // Draw other content of equal extents, and let the kernel see the first problem in the memory that is then
        // refilled.
        let mut dealt = dealt.without_garbage();
        dealt.recipe.seed ^= 1 << 63;
        let Ok(other) = self.campaign.deck.draw::<P>(&dealt, self.bench.spec) else { return Ok(None) };
        let alone = Arc::new(other.clone());
        let before = Arc::new((**problem).clone());
        self.bench.candidate(&before)?;
        // Only memory that the kernel has released may be written over.
        let Ok(memory) = Arc::try_unwrap(before) else { return Ok(None) };
        let refilled = Arc::new(memory.refilled(other));
        let Ok(known) = JudgedProblem::new(self.bench.spec, &*refilled) else { return Ok(None) };
        // A process that ends is a fault of its own, and may not end again.
        let Examined { kinds, fault, .. } = self.bench.judged(&refilled, &known);
        fault.map_or(Ok(()), Err)?;
        if self.waived(kinds).is_empty() {
            return Ok(None);
        }
        // Wrong in reused memory and right in fresh memory means that the kernel caches by address. Wrong in both is a failure of the
        // other content, which is the problem that a cause then shows.
        let Examined { kinds, errors, fault, .. } = self.bench.judged(&alone, &known);
        drop(known);
        let kinds = self.waived(kinds);
        if kinds.is_empty() {
            return Ok(Some((vec![FailureKind::Stale], None)));
        }
        Ok(Some((kinds, Some(FailedProblem { label: dealt.label(), problem: alone, fault, errors, tried: None }))))
    }

    /// Removes the failures at edges that the campaign allows.
    fn waived(&self, mut kinds: Vec<FailureKind>) -> Vec<FailureKind> {
        kinds.retain(|kind| match kind {
            FailureKind::Gate(_, gate, _) => gate.edge.is_none_or(|edge| !self.bench.allowed.contains(&edge)),
            _ => true,
        });
        kinds
    }

    /// Notes a failure; `dealt` says that the last of the tried problems is the one.
    fn note(&mut self, kind: FailureKind, mut failing: FailedProblem<P>, dealt: bool) {
        self.failed += 1;
        let first = || FailureGroup::new(failing.label.clone());
        let group = self.buckets.entry((self.bench.way, kind.clone())).or_insert_with(first);
        group.cases += 1;
        if let Some((recipe, failed)) = self.trials.last_mut().filter(|_| dealt) {
            // The problem that fails may have other content of the same recipe.
            *recipe = as_drawn(recipe, &*failing.problem);
            *failed = true;
            failing.tried = Some(self.trials.len() - 1);
            group.tried.extend(failing.tried);
        }
        if let Some((_, error)) = failing.errors.iter().find(|(of, _)| *of == kind)
            && group.worst.as_ref().is_none_or(|(worst, _)| error.error_over_limit() > worst.error_over_limit())
        {
            // The label of a kept problem is its file.
            let label = if dealt { failing.label.clone() } else { cause::words(&*failing.problem) };
            group.worst = Some((*error, label));
        }
        group.keep(failing);
    }

    fn finish(mut self) -> Result<schema::CampaignReport, CampaignError> {
        let campaign = self.campaign;
        // Explain the failures first, as that needs further calls of the kernel, and then split off the allowed
        // causes.
        let found =
            Failures { buckets: std::mem::take(&mut self.buckets), passing: &self.passing, trials: &self.trials };
        let causes = cause::causes(campaign, found, &mut self.bench)?;
        let may_fail = |cause: &schema::FailureCause| {
            let unasked = campaign.deck.masked_garbage.is_none() && cause.gate == FailureKind::MaskedGarbage.name();
            unasked || campaign.allow.iter().any(|name| cause::is_called(cause, name))
        };
        let (allowed, causes): (Vec<_>, Vec<_>) = causes.into_iter().partition(may_fail);
        let power = self.power()?;
        self.costs.sort_by_key(|cost| cost.vocabulary);
        self.coverage.features = self.features.table();
        Ok(schema::CampaignReport {
            passed: self.tried > 0 && causes.is_empty() && self.coverage.with_gradient > 0 && !self.interrupted,
            kernel: campaign.kernel.clone(),
            spec: campaign.spec.describe(),
            grade: campaign.grade,
            seed: self.campaign.deck.seed,
            packed: self.campaign.deck.packed,
            from_cotangents: campaign.spec.is_from_cotangents(),
            cases: self.campaign.deck.cases,
            tried: self.tried,
            failed: self.failed,
            calls: self.bench.calls,
            seconds: self.started.elapsed().as_secs_f64(),
            stopped: self.stopped,
            outputs: self.outputs.into_iter().map(Into::into).collect(),
            causes,
            allowed,
            skipped: self.skipped.into_iter().map(|(why, cases)| schema::SkippedProblems { cases, why }).collect(),
            coverage: self.coverage,
            costs: self.costs,
            power,
            invariance: self.findings,
            memory: Vec::new(),
        })
    }

    #[cfg(feature = "mutants")]
    fn power(&self) -> Result<Option<schema::MutationScore>, CampaignError> {
        if !self.campaign.power || self.stopped.is_some() || self.tried == 0 {
            return Ok(None);
        }
        crate::power::power::<P>(self.campaign, &self.outputs, self.bench.kernel.cut())
    }

    #[cfg(not(feature = "mutants"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with mutants")]
    fn power(&self) -> Result<Option<schema::MutationScore>, CampaignError> {
        Ok(None)
    }
}

impl Deck {
    /// Returns problem `index` as a campaign deals it, with its recipe: the first of several seeds under which a token has a gradient.
    ///
    /// # Errors
    /// [`RecipeError`] naming the field that is out of range.
    pub fn problem<P: Subject>(&self, index: u64, spec: &LossSpec) -> Result<Option<(DealtRecipe, P)>, RecipeError> {
        for step in 0..SEEDS {
            let dealt = reseeded(self.deal(index), step);
            let problem = self.draw::<P>(&dealt, spec)?;
            let mut coverage = schema::DeckCoverage::default();
            cover(&mut coverage, P::on_logits(&problem.evaluate(spec).map_err(RecipeError::Problem)?));
            if coverage.with_gradient > 0 || dealt.content.may_lack_a_gradient() {
                return Ok(Some((dealt, problem)));
            }
        }
        Ok(None)
    }
}

/// Returns the recipe with the content that its problem has: advantages that were drawn may all be 0.
fn as_drawn<P: Subject>(dealt: &DealtRecipe, problem: &P) -> DealtRecipe {
    let tokens = problem.batch();
    let are_zero = match &tokens.advantages {
        Advantages::Sequence(advantages) => advantages.iter().all(|advantage| *advantage == 0.0),
        Advantages::Token(all) | Advantages::Dlogp(all) => {
            all.iter().zip(&tokens.mask).all(|(x, counts)| !counts || *x == 0.0)
        }
    };
    let counts = tokens.mask.iter().any(|counts| *counts);
    let content = if are_zero && counts { DeckContent::ZeroAdvantages } else { dealt.content };
    DealtRecipe { content, ..dealt.clone() }
}

/// Gives all tokens the cotangents of the first.
fn equalize_cotangents(tokens: &mut Problem<()>) {
    fn fill<D: Dimension>(array: &mut Array<f64, D>) {
        let first = array.first().copied().unwrap_or_default();
        array.fill(first);
    }
    if let Advantages::Dlogp(dlogp) = &mut tokens.advantages {
        fill(dlogp);
    }
    tokens.extra.others.iter_mut().for_each(|others| fill(&mut others.dlogp));
    tokens.extra.dentropy.iter_mut().for_each(fill);
}

/// Adds what a problem has in it.
fn cover(coverage: &mut schema::DeckCoverage, reference: &Reference) {
    let shape = reference.shape();
    for sequence in reference.problem().sequences() {
        // A row is empty until it has an unmasked token.
        let mut empty = true;
        // Count what kernels branch on: the clip, the sign of the advantage, and targets in the tiles at either end.
        for (b, t) in sequence.places() {
            let Some(token) = reference.token(b, t) else { continue };
            empty = false;
            coverage.tokens += 1;
            coverage.clipped[0] += u64::from(token.clipped_low);
            coverage.clipped[1] += u64::from(token.clipped_high);
            coverage.advantages[0] += u64::from(token.inputs.advantage > 0.0);
            coverage.advantages[1] += u64::from(token.inputs.advantage < 0.0);
            if reference.has_gradient(token) {
                coverage.with_gradient += 1;
                let last = (shape.vocab - 1) / TILE;
                coverage.first_and_last_tile[0] += u64::from(token.id / TILE == 0);
                coverage.first_and_last_tile[1] += u64::from(token.id / TILE == last);
            }
        }
        coverage.empty_rows += u64::from(empty);
    }
}
