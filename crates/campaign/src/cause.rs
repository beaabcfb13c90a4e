//! Turns failures into causes: each is shrunk, named after mutants, merged with its like, and compared with other
//! losses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use assay_core::problem::Candidate;
use assay_judge::gate::{Edge, Model};
use assay_judge::invariance::ChangedValue;
use assay_judge::metric::Comparison;
use assay_judge::report;
use assay_judge::trial::JudgedProblem;
use assay_schema::campaign as schema;
use assay_schema::invariance::InvarianceRelation;
use assay_schema::number::{distinct, quotient};
use assay_schema::picture::ErrorPicture;
#[cfg(feature = "mutants")]
use assay_suites::mutants::BANK;

use crate::campaign::{Campaign, CampaignError};
use crate::common::CommonProperty;
use crate::deck::{DealtRecipe, DeckShapes};
use crate::dependence::dependences;
use crate::examine::{Examiner, FailedProblem, FailedStatus, FailureGroup, FailureKind, SEEDS, reseeded};
use crate::invariance::{ComparedCalls, start_of_dependence};
use crate::kernel::Fault;
use crate::memory::{LEAK, MEMORY};
use crate::neighbours::{ComputedLoss, computed, neighbours, short_name};
use crate::patterns::{AgreedPatterns, agreed, patterns_of};
use crate::repeat::split_off_unrepeated;
use crate::repros::keep;
use crate::shrink::{ShrinkEffort, shrink};
use crate::subject::{Subject, telling};

/// Problems that are made to tell losses apart whose numbers a kernel has.
const TELLING: u64 = 12;

/// The failures of a campaign by way of calling and kind, and problems that passed.
pub(crate) struct Failures<'f, P> {
    pub(crate) buckets: BTreeMap<(Option<usize>, FailureKind), FailureGroup<P>>,
    pub(crate) passing: &'f [Arc<P>],
    pub(crate) trials: &'f [(DealtRecipe, bool)],
}

/// The names by which a failure can be allowed.
pub(crate) fn names_that_can_be_allowed() -> Vec<&'static str> {
    let mut all: Vec<&str> = Edge::ALL.into_iter().map(Edge::name).collect();
    all.extend(["not-reproducible", "stale-memory", "masked-garbage", MEMORY, LEAK]);
    all.extend(InvarianceRelation::ALL.into_iter().map(InvarianceRelation::cause));
    #[cfg(feature = "mutants")]
    all.extend(BANK.iter().map(|mutant| mutant.name));
    all
}

/// Whether `name` is one of a cause's.
pub(crate) fn is_called(cause: &schema::FailureCause, name: &str) -> bool {
    cause.gate == name || cause.like.iter().any(|like| like.mutant == name)
}

/// A cause, and what it was made of.
struct CauseDraft<P> {
    kind: FailureKind,
    /// The way of calling in which the kernel fails; `None` if it is the plain one.
    way: Option<usize>,
    bucket: FailureGroup<P>,
    problem: Arc<P>,
    patterns: AgreedPatterns,
    cause: schema::FailureCause,
}

/// The causes of what was found, the one with most cases first.
pub(crate) fn causes<P: Subject>(
    campaign: &Campaign,
    mut found: Failures<P>,
    bench: &mut Examiner<P>,
) -> Result<Vec<schema::FailureCause>, CampaignError> {
    // A failure that does not show again is of memory or state. Each other kind becomes a draft, and drafts that share the name of a mutant
    // are one cause: the same mistake fails several gates.
    split_off_unrepeated(&mut found.buckets, bench);
    let mut drafts: Vec<CauseDraft<P>> = Vec::new();
    for ((way, kind), bucket) in std::mem::take(&mut found.buckets) {
        bench.call_by(way);
        let draft = draft(campaign, kind, bucket, &found, bench);
        // A kernel that fails in one way of calling only has that way for its cause, whichever gates fail.
        let are_one = |other: &CauseDraft<P>| way.is_some() || are_one(other, &draft);
        match drafts.iter_mut().find(|other| other.way == way && are_one(other)) {
            Some(other) => merge(other, draft),
            None => drafts.push(draft),
        }
    }
    bench.call_by(None);
    for draft in &mut drafts {
        // Ask which other loss the kernel computes. Only a failed gate has numbers that could be another loss's.
        if matches!(draft.kind, FailureKind::Gate(..)) && draft.way.is_none() {
            let problems = draft.bucket.kept.iter().map(|failing| Arc::clone(&failing.problem)).collect();
            (draft.cause.computes, draft.cause.computes_one_of) = computes(campaign, bench, problems);
        }
    }
    // Who computes another loss does so by every gate: of the losses that either may be, it is one that both are.
    let mut merged: Vec<CauseDraft<P>> = Vec::new();
    for draft in drafts {
        let in_both = |other: &CauseDraft<P>| -> Vec<Vec<String>> {
            other.cause.computes.iter().filter(|names| draft.cause.computes.contains(names)).cloned().collect()
        };
        match merged.iter_mut().find(|other| !in_both(other).is_empty()) {
            Some(other) => {
                other.cause.computes = in_both(other);
                other.cause.computes_one_of = other.cause.computes.len() > 1;
                merge(other, draft);
            }
            None => merged.push(draft),
        }
    }
    let mut drafts = join_by_property(join_edges(merged, found.trials), found.trials);
    // Write the shrunk problem of each cause, so that the next campaign tries it first.
    for draft in &mut drafts {
        if let Some(folder) = &campaign.repros {
            let called = draft.way.map(|way| bench.kernel.ways()[way].words.as_str());
            let path = keep(folder, &draft.cause.gate, called, &campaign.spec, &*draft.problem)?;
            draft.cause.repro = Some(path.to_string_lossy().into_owned());
        }
    }
    // Report the cause with the most failing problems first.
    let told = |CauseDraft { kind, mut cause, .. }: CauseDraft<P>| {
        cause.sentence = sentence(&kind, &cause);
        cause
    };
    let mut causes: Vec<schema::FailureCause> = drafts.into_iter().map(told).collect();
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.cases));
    Ok(causes)
}

/// Returns the most telling explanation of a cause: the loss that the kernel computes instead, else the pattern of its errors, else the
/// mutant that fails alike, else the gate that fails.
fn sentence(kind: &FailureKind, cause: &schema::FailureCause) -> String {
    let schema::FailureCause { gate, fault, computes, computes_one_of, diagnoses, like, .. } = cause;
    if let Some(fault) = fault {
        let line = fault.lines().next().unwrap_or(gate);
        // The command of a process is known, and may be long.
        return match line.strip_prefix('`').and_then(|rest| rest.split_once("`: ")) {
            Some((_, ended)) if ended.starts_with("ended") => format!("the kernel's process {ended}"),
            Some((_, said)) if matches!(kind, FailureKind::Fault(..)) => format!("the kernel's process: {said}"),
            _ => line.to_string(),
        };
    }
    if let ([names], false) | ([names, ..], true) = (computes.as_slice(), *computes_one_of) {
        return format!("these are the numbers of another loss: {}", short_name(names));
    }
    if let Some(diagnosis) = diagnoses.first() {
        return diagnosis.clone();
    }
    if let Some(schema::MutantName { does, .. }) = like.first() {
        return does.clone();
    }
    match kind {
        FailureKind::Gate(_, _, FailedStatus::Nonfinite) => {
            format!("{gate}: a value is NaN or ∞ and should be a number")
        }
        _ => format!("{gate} differs from the exact values by more than rounding explains"),
    }
}

/// Joins what fails at an edge with what fails in the same way elsewhere: one bug is one cause. Where both have names, and none in
/// common, or the edge alone has one, or the others have a property in common that those at the edge lack, they are two.
fn join_edges<P>(drafts: Vec<CauseDraft<P>>, trials: &[(DealtRecipe, bool)]) -> Vec<CauseDraft<P>> {
    let passing: Vec<&DealtRecipe> = trials.iter().filter(|(_, failed)| !failed).map(|(dealt, _)| dealt).collect();
    let has_property = |tried: &mut dyn Iterator<Item = &usize>| {
        let failing: Vec<&DealtRecipe> = tried.map(|&place| &trials[place].0).collect();
        CommonProperty::find(&failing, &passing).is_some()
    };
    let mut joined: Vec<CauseDraft<P>> = Vec::new();
    let mut of_edges = Vec::new();
    for draft in drafts {
        match draft.kind {
            FailureKind::Gate(_, gate, _) if gate.edge.is_some_and(|edge| edge != Edge::Masked) => of_edges.push(draft),
            _ => joined.push(draft),
        }
    }
    for draft in of_edges {
        let FailureKind::Gate(_, gate, status) = draft.kind else { continue };
        let is_explained_alike = |other: &CauseDraft<P>| {
            let names = |draft: &CauseDraft<P>| !draft.cause.like.is_empty() || !draft.cause.computes.is_empty();
            !names(&draft) || are_one(other, &draft)
        };
        let is_same = |other: &&mut CauseDraft<P>| {
            let FailureKind::Gate(_, theirs, their_status) = other.kind else { return false };
            let same_output = theirs.output == gate.output && theirs.edge != Some(Edge::Masked);
            let (own, theirs) = (&draft.bucket.tried, &other.bucket.tried);
            let loses_property = || has_property(&mut theirs.iter()) && !has_property(&mut theirs.iter().chain(own));
            same_output
                && their_status == status
                && other.way == draft.way
                && is_explained_alike(other)
                && !loses_property()
        };
        match joined.iter_mut().find(is_same) {
            Some(other) => join(other, draft),
            None => joined.push(draft),
        }
    }
    joined
}

/// Joins drafts with a larger one whose property all of their problems have, or whose sums they are of: the same mistake fails several
/// gates, and at several edges.
fn join_by_property<P>(mut drafts: Vec<CauseDraft<P>>, trials: &[(DealtRecipe, bool)]) -> Vec<CauseDraft<P>> {
    let passing: Vec<&DealtRecipe> = trials.iter().filter(|(_, failed)| !failed).map(|(dealt, _)| dealt).collect();
    drafts.sort_by_key(|draft| std::cmp::Reverse(draft.cause.cases));
    let mut joined: Vec<(Option<CommonProperty>, CauseDraft<P>)> = Vec::new();
    for draft in drafts {
        let failing: Vec<&DealtRecipe> = draft.bucket.tried.iter().map(|&place| &trials[place].0).collect();
        let explains = |(property, other): &&mut (Option<CommonProperty>, CauseDraft<P>)| {
            let both = [&draft, other].iter().all(|draft| matches!(draft.kind, FailureKind::Gate(..)));
            let same_property = !failing.is_empty()
                && property.as_ref().is_some_and(|property| property.holds_for(failing.iter().copied()));
            // The loss and the metrics are sums over what other gates judge, and fail alone where no token's own output shows it.
            let sum_of_it = draft.kind.is_of_a_sum() && 4 * draft.cause.cases <= other.cause.cases;
            both && draft.way == other.way && (same_property || sum_of_it)
        };
        // Gates that fail for no known reason, here the one and there the other, may have a property in common only together.
        let failing_of_other = |other: &CauseDraft<P>| -> Vec<&DealtRecipe> {
            other.bucket.tried.iter().map(|&place| &trials[place].0).collect()
        };
        let is_unexplained = |draft: &CauseDraft<P>| {
            let schema::FailureCause { like, computes, diagnoses, .. } = &draft.cause;
            like.is_empty()
                && computes.is_empty()
                && diagnoses.is_empty()
                && matches!(draft.kind, FailureKind::Gate(..))
        };
        let together = |other: &CauseDraft<P>| {
            let both: Vec<&DealtRecipe> = failing.iter().copied().chain(failing_of_other(other)).collect();
            let are_unexplained =
                draft.way.is_none() && other.way.is_none() && [&draft, other].into_iter().all(is_unexplained);
            if are_unexplained { CommonProperty::find(&both, &passing) } else { None }
        };
        if let Some((_, other)) = joined.iter_mut().find(explains) {
            join(other, draft);
        } else if let Some((place, property)) = joined
            .iter()
            .enumerate()
            .filter(|(_, (property, _))| property.is_none())
            .find_map(|(place, (_, other))| Some((place, together(other)?)))
        {
            let (own, other) = &mut joined[place];
            *own = Some(property);
            join(other, draft);
        } else {
            // A failure of one way of calling is no property of the problems.
            let property = if draft.way.is_none() { CommonProperty::find(&failing, &passing) } else { None };
            joined.push((property, draft));
        }
    }
    let told = |(property, mut draft): (Option<CommonProperty>, CauseDraft<P>)| {
        draft.cause.in_common = property.map(|CommonProperty { words, passing: with, .. }| match with {
            0 => format!("{words}, in every problem that failed and in none that passed"),
            _ => format!("{words}, in every problem that failed and in {with} of the {} that passed", passing.len()),
        });
        draft
    };
    joined.into_iter().map(told).collect()
}

/// Whether two failures have one cause: a wrong kernel's name, or a pattern of errors, in common.
fn are_one<P>(a: &CauseDraft<P>, b: &CauseDraft<P>) -> bool {
    let named = a.cause.like.iter().any(|name| b.cause.like.contains(name));
    named || a.patterns.is_like(&b.patterns)
}

/// Adds a draft that fails on the same problems, and keeps the names of the larger one: another mistake may fail there too.
fn join<P>(into: &mut CauseDraft<P>, other: CauseDraft<P>) {
    let like = into.cause.like.clone();
    merge(into, other);
    into.cause.like = like;
}

/// Adds `other` to `into`, which keeps its more telling gate; of two lists of names those in both remain, or those of more problems.
fn merge<P>(into: &mut CauseDraft<P>, other: CauseDraft<P>) {
    let is_larger = other.cause.cases > into.cause.cases;
    into.cause.cases += other.cause.cases;
    // A gate whose failures no mutant explains takes no name away.
    let is_in_both = |name: &&schema::MutantName| other.cause.like.contains(name);
    let both: Vec<schema::MutantName> = into.cause.like.iter().filter(is_in_both).cloned().collect();
    if !both.is_empty() {
        into.cause.like = both;
    } else if into.cause.like.is_empty() || (is_larger && !other.cause.like.is_empty()) {
        into.cause.like = other.cause.like;
    }
    into.bucket.kept.extend(other.bucket.kept);
    into.bucket.tried.extend(other.bucket.tried);
    into.cause.worst = into.cause.worst.take().or(other.cause.worst);
}

fn draft<P: Subject>(
    campaign: &Campaign,
    kind: FailureKind,
    bucket: FailureGroup<P>,
    found: &Failures<P>,
    bench: &mut Examiner<P>,
) -> CauseDraft<P> {
    let passing = found.passing;
    // Failures are sorted by size, so that shrinking starts from the smallest problem.
    let FailedProblem { problem, fault, .. } = &bucket.kept[0];
    let mut problem = Arc::clone(problem);
    // A process that is started again each time takes seconds; what a second call differs in, or memory, is no property of one.
    let shrinks = matches!(kind, FailureKind::Gate(..) | FailureKind::Shape(_) | FailureKind::Dependent(_))
        || matches!(kind, FailureKind::Fault("raised" | "output", _));
    if campaign.shrink && shrinks {
        let effort =
            if campaign.deck.shapes == DeckShapes::Few { ShrinkEffort::FEW_SHAPES } else { ShrinkEffort::WHOLE };
        problem = shrink(problem, effort, &mut |smaller| bench.fails(smaller, &kind));
    }
    let called = bench.called();
    let with_way = |text: String| [text].into_iter().chain(called.clone()).collect::<Vec<_>>().join(", ");
    let mut cause = schema::FailureCause {
        gate: kind.name(),
        cases: bucket.cases,
        first: with_way(bucket.first.clone()),
        problem: with_way(words(&*problem)),
        worst: bucket.worst.as_ref().map(|(worst, problem)| worst_problem(&kind, worst, problem)),
        fault: fault.as_ref().map(ToString::to_string),
        signal: fault.as_ref().and_then(Fault::signal),
        ..schema::FailureCause::default()
    };
    if shrinks {
        cause.values = problem.values_in_words(&campaign.spec);
    }
    let mut patterns = AgreedPatterns::default();
    // Explain the failure by what is known of its kind: a failed gate by its verdict, its diagnoses and the mutants
    // that fail alike, any other kind by a sentence.
    match &kind {
        FailureKind::Gate(..) => {
            if let Ok(candidate) = bench.candidate(&problem) {
                explain(campaign, bench, &kind, &problem, &candidate, &mut cause);
                // A shrunk problem has too few values for a pattern, and one problem's may be chance: those that failed must agree.
                let dtypes = bucket.tried.iter().map(|&place| found.trials[place].0.recipe.dtype).collect();
                patterns = agreed(&patterns_of(bench, bucket.in_descending_size()), &dtypes);
                cause.diagnoses = patterns.texts(bench.way.is_none());
                // The picture that tells most is the one of which the smallest part is beyond the limit; of equals, of the largest problem.
                let kept = bucket.kept.iter().rev().map(|failing| &failing.problem);
                let pictures = kept.filter_map(|problem| picture(campaign, bench, &kind, problem));
                cause.picture = pictures.min_by(|a, b| a.share_beyond().total_cmp(&b.share_beyond()));
                if bench.way.is_none() {
                    let kept: Vec<Arc<P>> = bucket.kept.iter().map(|failing| Arc::clone(&failing.problem)).collect();
                    cause.diagnoses.extend(dependences(bench, &kept));
                }
                #[cfg(feature = "mutants")]
                if !patterns.are_roundings() {
                    cause.like = named(campaign, bench, &kind, (&problem, candidate), &bucket, passing);
                }
            }
        }
        FailureKind::Shape(output) => {
            cause.fault = Some(format!("output `{output}` has not the shape that the problem has"));
        }
        FailureKind::OtherBits => cause.fault = Some("a second call with the same problem returned other bits".into()),
        FailureKind::Stale => {
            cause.fault = Some(
                "the answer is wrong where a problem lies in memory that held another one before, and right in memory of \
                 its own: something is kept by address"
                    .into(),
            );
        }
        FailureKind::MaskedGarbage => {
            cause.fault = Some(
                "NaN in the inputs of masked tokens reaches the outputs; with ordinary numbers under the mask the same problem passes"
                    .into(),
            );
            #[cfg(feature = "mutants")]
            if let Ok(candidate) = bench.candidate(&problem) {
                cause.like = named(campaign, bench, &kind, (&problem, candidate), &bucket, passing);
            }
        }
        FailureKind::Dependent(relation) => {
            cause.fault = Some(dependence_in_words(campaign, bench, *relation, &problem));
            if *relation == InvarianceRelation::Batch {
                cause.diagnoses.extend(start_of_dependence(bench, &*problem));
            }
        }
        FailureKind::Fault(..) => {}
    }
    #[cfg(not(feature = "mutants"))]
    let _ = passing;
    CauseDraft { kind, way: bench.way, bucket, problem, patterns, cause }
}

/// Describes how the numbers of a token change in a related call.
fn dependence_in_words<P: Subject>(
    campaign: &Campaign,
    bench: &mut Examiner<P>,
    relation: InvarianceRelation,
    problem: &Arc<P>,
) -> String {
    let asked = campaign.invariance.as_ref().expect("a relation was asked");
    let demand = asked.demands.iter().find(|demand| demand.relation == relation).expect("it is one of those asked");
    let Some(ComparedCalls { call, differences, largest, .. }) =
        bench.failing_comparison(*demand, problem, asked.alone)
    else {
        return format!("a token's numbers change when {}, though not in every call", relation.words());
    };
    let mut text = match &differences.first {
        Some(ChangedValue { output, at, before, after }) => {
            let [before, after] = distinct(*before, *after);
            format!("{} at {at} changes from {before} to {after} when {}", output.name(), call.change)
        }
        None => format!("a token's numbers change when {}", call.change),
    };
    let _ = write!(text, ": {} of {} tokens have other bits", differences.other_bits, differences.tokens);
    if let Some(largest) = largest {
        let over = quotient(largest.over_limit);
        let _ = write!(text, ", and the largest difference, of {}, is {over} times its limit", largest.output.name());
    }
    text
}

/// Returns the mutants that fail as the kernel does on the problems of a cause.
#[cfg(feature = "mutants")]
fn named<P: Subject>(
    campaign: &Campaign,
    bench: &mut Examiner<P>,
    kind: &FailureKind,
    smallest: (&Arc<P>, Candidate<P::Gradient>),
    bucket: &FailureGroup<P>,
    passing: &[Arc<P>],
) -> Vec<schema::MutantName> {
    // A wrong kernel is wrong however it is called: none is like one that is right when it is called plainly.
    if bench.way.is_some() {
        return Vec::new();
    }
    let cases: Vec<Arc<P>> = bucket.kept.iter().map(|failing| Arc::clone(&failing.problem)).collect();
    let mutants = crate::naming::nameable::<P>(bench.spec, campaign.deck.packed);
    crate::naming::names(bench, mutants, kind, smallest, &cases, passing)
}

/// `1x1x2 bf16`, and how many packed sequences.
pub(crate) fn words<P: Subject>(problem: &P) -> String {
    let packed = problem.batch().extra.sequences.packed().map(|count| format!(", {count} packed"));
    format!("{} {}{}", problem.shape(), problem.dtype(), packed.unwrap_or_default())
}

/// The worst comparison of a cause, and the problem that it is of.
fn worst_problem(kind: &FailureKind, worst: &Comparison, problem: &str) -> schema::WorstProblem {
    // The exact value of a norm or a sum of a difference is 0, and says nothing.
    let of_one_element = matches!(kind, FailureKind::Gate(_, gate, _) if gate.model == Model::Elementwise);
    schema::WorstProblem {
        problem: problem.into(),
        error_over_limit: worst.error_over_limit(),
        at: worst.at.to_string(),
        expected: of_one_element.then_some(worst.expected),
        actual: Some(worst.actual),
    }
}

/// Draws where the kernel is wrong on a problem on which it fails.
fn picture<P: Subject>(
    campaign: &Campaign,
    bench: &mut Examiner<P>,
    kind: &FailureKind,
    problem: &Arc<P>,
) -> Option<ErrorPicture> {
    let FailureKind::Gate(_, gate, _) = kind else { return None };
    let candidate = bench.candidate(problem).ok()?;
    let known = JudgedProblem::new(&campaign.spec, &**problem).ok()?;
    let verdicts = known.verdicts(&candidate.lend(), &bench.limits.with_error_maps()).ok()?;
    report::picture(&verdicts, *gate, &words(&**problem))
}

/// The verdict on the smallest problem, and what is likely behind it.
fn explain<P: Subject>(
    campaign: &Campaign,
    bench: &Examiner<P>,
    kind: &FailureKind,
    problem: &Arc<P>,
    candidate: &Candidate<P::Gradient>,
    cause: &mut schema::FailureCause,
) {
    // Judge the shrunk problem again, as its verdict and its diagnoses are what a reader sees.
    let Ok(known) = JudgedProblem::new(&campaign.spec, &**problem) else { return };
    let Ok(verdicts) = known.verdicts(&candidate.lend(), &bench.limits) else { return };
    let FailureKind::Gate(_, gate, _) = kind else { return };
    if let Some(verdict) = verdicts.iter().find(|verdict| verdict.gate == *gate) {
        cause.verdict = Some(known.explain(verdict, &campaign.kernel, ""));
    }
}

/// Losses whose numbers the kernel has on all of a cause's problems; where there are several, problems are made that tell
/// them apart, and whether they did not.
fn computes<P: Subject>(
    campaign: &Campaign,
    bench: &mut Examiner<P>,
    mut problems: Vec<Arc<P>>,
) -> (Vec<Vec<String>>, bool) {
    // Start from the losses one option away, and drop those that contradict the kernel on any problem.
    let project = campaign.project.as_ref().map(|(preset, options)| (*preset, options.as_slice()));
    let mut left = neighbours(&campaign.spec, project);
    let (mut numbers, mut asked) = (0..TELLING, false);
    loop {
        // Ask the kernel for its numbers on the new problems.
        let answers: Vec<(Arc<P>, Candidate<P::Gradient>)> = problems
            .drain(..)
            .filter_map(|problem| {
                let candidate = bench.candidate(&problem).ok()?;
                Some((problem, candidate))
            })
            .collect();
        // Whoever answers by files has no more than those.
        if answers.is_empty() {
            break;
        }
        // A ratio that overflows f32 under the wrong loss leaves 0·∞, which is no number of any.
        let is_finite =
            |candidate: &Candidate<P::Gradient>| candidate.loss.as_ref().is_none_or(|loss| loss.value().is_finite());
        let all = answers.iter().map(|(problem, candidate)| (&**problem, candidate));
        let mut answers: Vec<(&P, &Candidate<P::Gradient>)> = all.collect();
        if answers.iter().any(|(_, candidate)| is_finite(candidate)) {
            answers.retain(|(_, candidate)| is_finite(candidate));
        }
        // A kernel that has the numbers of the loss that was asked for has those of every loss that is the same there.
        if !asked {
            let own = ComputedLoss { names: Vec::new(), spec: campaign.spec.clone() };
            if !computed(vec![own], &answers, &bench.limits).is_empty() {
                left.clear();
            }
        }
        asked = true;
        left = computed(left, &answers, &bench.limits);
        // One loss that has the numbers of a problem with ratios on both sides of a clip too is the one.
        if left.is_empty() || (left.len() == 1 && numbers.start > 0) {
            break;
        }
        // Draw another problem on which losses differ.
        let Some(index) = numbers.next() else { break };
        problems.extend(first_drawn(campaign, telling(index)).map(Arc::new));
    }
    // Without a single answer nothing was compared, and every neighbour would remain.
    if !asked {
        left.clear();
    }
    let several = left.len() > 1;
    (left.into_iter().map(|ComputedLoss { names, .. }| names).collect(), several)
}

/// The first problem of `recipe` that can be made, of the seeds that are tried.
fn first_drawn<P: Subject>(campaign: &Campaign, recipe: DealtRecipe) -> Option<P> {
    (0..SEEDS).find_map(|step| campaign.deck.draw(&reseeded(recipe.clone(), step), &campaign.spec).ok())
}
