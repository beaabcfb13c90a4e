//! Invariance: a kernel is asked once more, and each token must have the same numbers, whatever it is in a batch with.

use std::sync::Arc;

use assay_core::problem::{ProblemPart, Sequences};
use assay_core::spec::LossSpec;
use assay_core::text::{ForeignLines, ForeignText};
use assay_judge::gate::Output;
use assay_judge::generate::Regime;
use assay_judge::invariance::{BitDifferences, ExactChange, LargestDifference, PlacesOfToken, TokenAnswers};
use assay_judge::tolerance::Grade;
use assay_judge::trial::JudgedProblem;
use assay_schema::invariance::{InvarianceGrade, InvarianceRelation, RelationFinding};
use ndarray::Array2;

use crate::deck::{Deck, DeckShapes};
use crate::dependence::{AlteredContent, with_altered};
use crate::examine::Examiner;
use crate::kernel::{CallWay, CallWayKind, Fault};
use crate::subject::Subject;

/// The relations that a campaign asks, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedInvariance {
    /// The relations with the grade that each must reach.
    pub demands: Vec<InvarianceDemand>,
    /// Whether answers are not judged: invariance of bits needs no reference.
    pub alone: bool,
}

/// One relation, and the grade that it must reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvarianceDemand {
    /// The relation between the two calls.
    pub relation: InvarianceRelation,
    /// The grade that differences must reach.
    pub grade: InvarianceGrade,
}

impl AskedInvariance {
    /// Asks every relation that a correct kernel has, each by its usual grade.
    ///
    /// A kernel on logits computes each token by itself, so that its bits may depend on nothing else; what reorders a row's sum, or
    /// computes a row in another way, may move it within limits. A library's matrix product chooses its blocks by the number of rows:
    /// behind an LM head only a second call must have the same bits. Losses are not asked about packed sequences, which most do not
    /// take. A program that is compiled for each shape (`per_shape`) may add up a row in another order in each.
    pub fn usual(spec: &LossSpec, has_head: bool, per_shape: bool) -> Self {
        let relations = InvarianceRelation::ALL.into_iter();
        let asked = relations.filter(|relation| *relation != InvarianceRelation::Packing || spec.is_from_cotangents());
        let demand = |relation| InvarianceDemand { relation, grade: usual_grade(relation, has_head, per_shape) };
        Self { demands: asked.map(demand).collect(), alone: false }
    }

    /// Asks for equal bits in every relation that [`usual`](Self::usual) asks.
    #[must_use]
    pub fn in_bits(self) -> Self {
        let demands = self.demands.into_iter();
        let demands = demands.map(|demand| InvarianceDemand { grade: InvarianceGrade::Bits, ..demand }).collect();
        Self { demands, ..self }
    }

    /// Asks for equal bits, and judges no answer: without a reference there are no limits.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { alone: true, ..self.in_bits() }
    }

    /// Asks for differences within limits in every relation, where [`usual`](Self::usual) asks for bits in some.
    #[must_use]
    pub fn in_limits(self) -> Self {
        let demands = self.demands.into_iter();
        let demands = demands.map(|demand| InvarianceDemand { grade: InvarianceGrade::Limits, ..demand }).collect();
        Self { demands, ..self }
    }

    /// Asks the named relations alone, each by its usual grade.
    pub fn from_relations(relations: &[InvarianceRelation], has_head: bool, per_shape: bool) -> Self {
        let demand = |relation: &InvarianceRelation| InvarianceDemand {
            relation: *relation,
            grade: usual_grade(*relation, has_head, per_shape),
        };
        Self { demands: relations.iter().map(demand).collect(), alone: false }
    }

    /// Reads what an option asks for: `usual`, `bits` or `limits` of every relation, or the names of relations.
    ///
    /// # Errors
    /// The word that is neither, and what is expected.
    pub fn from_words(words: &[String], spec: &LossSpec, deck: &Deck) -> Result<Self, ForeignLines> {
        let (has_head, per_shape) = (deck.head.is_some(), deck.shapes == DeckShapes::Few);
        if let [word] = words {
            let usual = || Self::usual(spec, has_head, per_shape);
            match word.as_str() {
                "usual" => return Ok(usual()),
                "bits" => return Ok(usual().in_bits()),
                "limits" => return Ok(usual().in_limits()),
                _ => {}
            }
        }
        let relation = |word: &String| {
            word.parse().map_err(|_| {
                let names = InvarianceRelation::ALL.map(InvarianceRelation::name).join(", ");
                let given = ForeignText::from(word.as_str());
                ForeignLines::from(format!("got `{given}`, expected usual, bits, limits, or some of {names}"))
            })
        };
        let relations = words.iter().map(relation).collect::<Result<Vec<InvarianceRelation>, _>>()?;
        if relations.is_empty() {
            return Err("got no relation, expected one or more".to_string().into());
        }
        Ok(Self::from_relations(&relations, has_head, per_shape))
    }

    /// Starts the findings of a campaign, one for each relation.
    pub(crate) fn findings(&self) -> Vec<RelationFinding> {
        self.demands.iter().map(|demand| RelationFinding::new(demand.relation, demand.grade)).collect()
    }
}

/// Returns the grade at which a relation is asked where the caller names none.
fn usual_grade(relation: InvarianceRelation, has_head: bool, per_shape: bool) -> InvarianceGrade {
    use InvarianceRelation::{Alignment, Batch, Chunk, Length, Neighbours, Order, Packing, Ranks, Repeat, Vocabulary};
    match relation {
        Repeat => InvarianceGrade::Bits,
        Order | Neighbours if !has_head => InvarianceGrade::Bits,
        Batch | Length | Packing if !has_head && !per_shape => InvarianceGrade::Bits,
        Order | Neighbours | Batch | Length | Packing | Vocabulary | Alignment | Chunk | Ranks => {
            InvarianceGrade::Limits
        }
    }
}

/// A second call whose tokens must have the numbers of the first.
pub(crate) struct RelatedCall<P> {
    pub(crate) problem: Arc<P>,
    /// The places of each compared token in the first problem and in this one.
    pub(crate) places: Vec<PlacesOfToken>,
    /// The way of calling; `None` is the plain one.
    pub(crate) way: Option<usize>,
    /// The change in words, as they follow "when".
    pub(crate) change: String,
}

/// The comparison of two calls.
pub(crate) struct ComparedCalls<P> {
    pub(crate) call: RelatedCall<P>,
    pub(crate) differences: BitDifferences,
    /// The outputs that change by design and were not compared.
    pub(crate) by_design: Vec<Output>,
    pub(crate) largest: Option<LargestDifference>,
    pub(crate) fails: bool,
}

/// The reason why there is nothing to compare.
pub(crate) enum NotCompared {
    /// The relation does not apply to the problem or the kernel.
    NotAsked(String),
    /// The kernel showed no answer to the second call.
    NoAnswer(Fault),
}

/// Masked tokens that are added at one end, by turns.
const ADDED_TOKENS: [usize; 3] = [1, 3, 9];

/// Vocabulary entries that are added, by turns: one, and beyond a tile.
const ADDED_ENTRIES: [usize; 3] = [1, 31, 129];

/// The turns after which a relation has been asked in each of its forms.
pub(crate) const TURNS: u64 = 6;

impl<P: Subject> RelatedCall<P> {
    /// Makes the second call of `relation` for `problem`, in one of its forms by `turn`.
    ///
    /// # Errors
    /// The reason why the relation does not apply.
    pub(crate) fn new(
        relation: InvarianceRelation,
        problem: &Arc<P>,
        spec: &LossSpec,
        ways: &[CallWay],
        turn: u64,
    ) -> Result<Self, String> {
        let batch = problem.batch();
        let is_packed = batch.extra.sequences.packed().is_some();
        let in_turn = |lengths: &[usize; 3]| lengths[(turn % 3) as usize];
        let plain = |problem: Arc<P>, places, change: &str| Self { problem, places, way: None, change: change.into() };
        let counting = || batch.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
        let same_places = || counting().map(|at| [at, at]).collect::<Vec<_>>();
        match relation {
            InvarianceRelation::Repeat => Ok(plain(Arc::clone(problem), same_places(), relation.words())),
            InvarianceRelation::Order => {
                let count = sequences_of(&**problem).len();
                if count < 2 {
                    return Err("no problem has two sequences".into());
                }
                Ok(rearranged(&**problem, (0..count).rev().collect(), relation.words()))
            }
            InvarianceRelation::Batch => {
                let sequences = sequences_of(&**problem);
                let (count, half) = (sequences.len(), sequences.len() / 2);
                let filled: Vec<usize> = (0..count).filter(|s| !sequences[*s].is_empty()).collect();
                let one = *filled.get((turn / 3) as usize % filled.len().max(1)).ok_or("no problem has a token")?;
                let (chosen, change) = match turn % 3 {
                    0 if count > 1 => (vec![one], "its sequence is alone in the batch"),
                    1 if count > 1 && one < half => ((0..half).collect(), "the batch is its first half alone"),
                    1 if count > 1 => ((half..count).collect(), "the batch is its second half alone"),
                    _ => ((0..count).chain(0..count).collect(), "the batch has every sequence twice"),
                };
                Ok(rearranged(&**problem, chosen, change))
            }
            InvarianceRelation::Neighbours => {
                let altered = AlteredContent::OtherSequences.tokens(batch);
                if !altered.iter().any(|altered| *altered) {
                    return Err("no problem has two sequences".into());
                }
                let places = counting().filter(|at| !altered[*at]).map(|at| [at, at]).collect();
                Ok(plain(Arc::new(with_altered(&**problem, &altered)), places, relation.words()))
            }
            InvarianceRelation::Length => {
                if is_packed {
                    return Err("packed sequences are not padded".into());
                }
                let (before, after) = match turn % 2 {
                    0 => (0, in_turn(&ADDED_TOKENS)),
                    _ => (in_turn(&ADDED_TOKENS), in_turn(&ADDED_TOKENS)),
                };
                let change = format!("{before} masked tokens are added before, and {after} after");
                Ok(Self { change, ..lengthened(&**problem, before, after) })
            }
            InvarianceRelation::Packing => {
                if is_packed {
                    return Err("the problems are packed".into());
                }
                let (packed, places) = problem.pack();
                let places = places.into_iter().enumerate().map(|(t, at)| [at, (0, t)]);
                let places = places.filter(|[at, _]| batch.mask[*at]).collect();
                Ok(plain(Arc::new(packed), places, relation.words()))
            }
            InvarianceRelation::Vocabulary => {
                let longer = problem.with_dead_entries(spec, in_turn(&ADDED_ENTRIES));
                let longer = longer.ok_or("the loss changes entries of −∞, or logits are a product")?;
                let change = format!("{} entries of −∞ are added to the vocabulary", in_turn(&ADDED_ENTRIES));
                Ok(plain(Arc::new(longer), same_places(), &change))
            }
            InvarianceRelation::Alignment => {
                // Every other time the plain call reads memory that is off by one element.
                let ways = ways_of(ways, CallWayKind::Caller);
                match turn {
                    turn if turn % 2 == 1 && !ways.is_empty() => {
                        Ok(called(problem, ways[(turn / 2) as usize % ways.len()], same_places()))
                    }
                    _ => {
                        let moved = batch.with_logits(problem.with_rows(problem.rows().misaligned())).into();
                        Ok(plain(
                            Arc::new(moved),
                            same_places(),
                            "the logits, or hidden states, begin one element later in memory",
                        ))
                    }
                }
            }
            InvarianceRelation::Chunk => {
                let variants = ways_of(ways, CallWayKind::Variant);
                if variants.is_empty() {
                    return Err("no variants of the kernel are given".into());
                }
                Ok(called(problem, variants[turn as usize % variants.len()], same_places()))
            }
            InvarianceRelation::Ranks => {
                let one_rank = ways_of(ways, CallWayKind::OneRank).into_iter().next();
                Ok(called(problem, one_rank.ok_or("the kernel has no processes that could be one")?, same_places()))
            }
        }
    }
}

/// Lists the ways of one kind, for problems of any content.
fn ways_of(ways: &[CallWay], kind: CallWayKind) -> Vec<(usize, &CallWay)> {
    ways.iter().enumerate().filter(|(_, way)| way.kind == kind && !way.equal_cotangents).collect()
}

/// Calls the kernel with the same problem in another way.
fn called<P>(
    problem: &Arc<P>,
    (way, CallWay { words, .. }): (usize, &CallWay),
    places: Vec<PlacesOfToken>,
) -> RelatedCall<P> {
    RelatedCall { problem: Arc::clone(problem), places, way: Some(way), change: format!("it is called {words}") }
}

/// Lists the places of each sequence's tokens that count.
fn sequences_of<P: Subject>(problem: &P) -> Vec<Vec<(usize, usize)>> {
    let (mask, sequences) = (&problem.batch().mask, &problem.batch().extra.sequences);
    let count = sequences.count(mask.nrows());
    let all = sequences.places(mask.dim()).into_iter().filter(|sequence| sequence.index < count);
    all.map(|sequence| sequence.places().filter(|at| mask[*at]).collect()).collect()
}

/// Takes the sequences of `chosen`, of which each may be there several times.
fn rearranged<P: Subject>(problem: &P, chosen: Vec<usize>, change: &str) -> RelatedCall<P> {
    let before = sequences_of(problem);
    let part = ProblemPart { batch: chosen.clone(), ..problem.whole() };
    let other = problem.part(&part);
    let after = sequences_of(&other);
    let of_sequence = |(new, old): (usize, usize)| {
        before[old].iter().copied().zip(after[new].iter().copied()).map(|(at, at_other)| [at, at_other])
    };
    let places = chosen.into_iter().enumerate().flat_map(of_sequence).collect();
    RelatedCall { problem: Arc::new(other), places, way: None, change: change.into() }
}

/// Adds masked tokens to each row: copies of its first and of its last.
fn lengthened<P: Subject>(problem: &P, before: usize, after: usize) -> RelatedCall<P> {
    let mask = &problem.batch().mask;
    let tokens = mask.ncols();
    let mut part = problem.whole();
    part.tokens = vec![0; before].into_iter().chain(0..tokens).chain(vec![tokens - 1; after]).collect();
    let other = problem.part(&part).map_tokens(|added| {
        for ((_, t), counts) in added.mask.indexed_iter_mut() {
            *counts &= (before..before + tokens).contains(&t);
        }
    });
    let counting = mask.indexed_iter().filter(|(_, counts)| **counts);
    let places = counting.map(|((b, t), _)| [(b, t), (b, t + before)]).collect();
    RelatedCall { problem: Arc::new(other), places, way: None, change: String::new() }
}

impl<P: Subject> Examiner<'_, P> {
    /// Asks a relation of `problem`, in one of its forms by `turn`: the kernel is called again, and what it answers is compared with
    /// `before`, or with a call of its own.
    pub(crate) fn compare_calls(
        &mut self,
        demand: InvarianceDemand,
        (problem, turn): (&Arc<P>, u64),
        before: Option<&TokenAnswers>,
        alone: bool,
    ) -> Result<ComparedCalls<P>, NotCompared> {
        let call = RelatedCall::new(demand.relation, problem, self.spec, self.kernel.ways(), turn);
        let call = call.map_err(NotCompared::NotAsked)?;
        let answers = |bench: &mut Self, problem: &Arc<P>| {
            bench.candidate(problem).map(|candidate| TokenAnswers::new(&candidate)).map_err(NotCompared::NoAnswer)
        };
        let own;
        let before = if let Some(before) = before {
            before
        } else {
            own = answers(self, problem)?;
            &own
        };
        if demand.relation == InvarianceRelation::Repeat {
            // Other content is computed in between, in the same shape: what is kept of it must not show.
            let all = Array2::from_elem(problem.batch().mask.dim(), true);
            answers(self, &Arc::new(with_altered(&**problem, &all)))?;
        }
        let plain = self.way;
        self.call_by(call.way.or(plain));
        let after = answers(self, &call.problem);
        self.call_by(plain);
        let after = after?;
        // Nothing is evaluated for answers that are the same.
        let mut changes = before.unchanged();
        let mut differences = before.bit_differences(&after, &call.places, &changes);
        let mut largest = None;
        if differences.other_bits > 0 && !alone {
            let known =
                JudgedProblem::new(self.spec, &**problem).map_err(|why| NotCompared::NotAsked(why.to_string()))?;
            let exact = TokenAnswers::new(&P::outcome(&known.reference));
            changes = exact_changes(self.spec, &exact, &call, before);
            differences = before.bit_differences(&after, &call.places, &changes);
            if differences.other_bits > 0 {
                let grade = if self.limits.grade == Grade::Exact { Grade::Exact } else { Grade::Standard };
                largest = before.difference_over_limit(&after, (&call.places, &changes), &known, grade).ok().flatten();
            }
        }
        let fails = match demand.grade {
            InvarianceGrade::Bits => differences.other_bits > 0,
            InvarianceGrade::Limits => largest.is_some_and(|largest| largest.over_limit > 1.0),
        };
        let by_design = changes.iter().filter(|(_, change)| *change == ExactChange::Other).map(|(output, _)| *output);
        Ok(ComparedCalls { call, differences, by_design: by_design.collect(), largest, fails })
    }

    /// Returns the first comparison of `problem`, over all forms of the relation, that fails.
    pub(crate) fn failing_comparison(
        &mut self,
        demand: InvarianceDemand,
        problem: &Arc<P>,
        alone: bool,
    ) -> Option<ComparedCalls<P>> {
        (0..TURNS).find_map(|turn| {
            self.compare_calls(demand, (problem, turn), None, alone).ok().filter(|compared| compared.fails)
        })
    }
}

/// Adds the comparison of two calls to the findings about a relation.
pub(crate) fn note_comparison<P>(finding: &mut RelationFinding, compared: ComparedCalls<P>) {
    let ComparedCalls { differences, by_design, largest, fails, .. } = compared;
    let add = |all: &mut Vec<String>, outputs: Vec<Output>| {
        let new: Vec<String> = outputs.into_iter().map(|output| output.name().into()).collect();
        all.extend(new.into_iter().filter(|name| !all.contains(name)).collect::<Vec<_>>());
    };
    finding.not_asked = None;
    finding.problems += 1;
    finding.failed += u64::from(fails);
    finding.tokens += differences.tokens;
    finding.other_bits += differences.other_bits;
    add(&mut finding.outputs, differences.outputs);
    add(&mut finding.by_design, by_design);
    if let Some(largest) = largest {
        let most = finding.difference_over_limit.unwrap_or(0.0);
        finding.difference_over_limit = Some(most.max(largest.over_limit));
    }
}

/// Returns how the exact outputs of a problem change in a related call. Log-probabilities and entropies never do.
fn exact_changes<P: Subject>(
    spec: &LossSpec,
    exact: &TokenAnswers,
    call: &RelatedCall<P>,
    before: &TokenAnswers,
) -> Vec<(Output, ExactChange)> {
    match JudgedProblem::new(spec, &*call.problem) {
        Ok(other) => exact.exact_changes(&TokenAnswers::new(&P::outcome(&other.reference)), &call.places),
        // A loss that the related problem cannot have, such as a mean over a width.
        Err(_) => before
            .unchanged()
            .into_iter()
            .map(|(output, same)| match output {
                Output::Logp | Output::Entropy => (output, same),
                _ => (output, ExactChange::Other),
            })
            .collect(),
    }
}

/// The most sequences of a batch in which the start of a dependence is looked for.
const MOST_SEQUENCES: usize = 256;

/// Returns from how many tokens in the batch on the first sequence of `problem` has other bits than alone: `from 9 tokens on`.
pub(crate) fn start_of_dependence<P: Subject>(bench: &mut Examiner<P>, problem: &P) -> Option<String> {
    let first = sequences_of(problem).iter().position(|sequence| !sequence.is_empty())?;
    if problem.batch().extra.sequences != Sequences::Rows {
        return None;
    }
    let of_copies = |bench: &mut Examiner<P>, count: usize| {
        let call = rearranged(problem, vec![first; count], "");
        let candidate = bench.candidate(&call.problem).ok()?;
        Some((TokenAnswers::new(&candidate), call.problem))
    };
    let (alone, one) = of_copies(bench, 1)?;
    let places: Vec<PlacesOfToken> = sequences_of(&*one).into_iter().next()?.into_iter().map(|at| [at, at]).collect();
    let only_logp: Vec<(Output, ExactChange)> = alone.unchanged();
    let only_logp: Vec<_> =
        only_logp.into_iter().filter(|(output, _)| matches!(output, Output::Logp | Output::Entropy)).collect();
    let mut differs = |count: usize| {
        let (other, _) = of_copies(bench, count)?;
        Some(alone.bit_differences(&other, &places, &only_logp).other_bits > 0)
    };
    // Double the batch until its bits differ, then halve the interval.
    let mut high = 2;
    while !differs(high)? {
        high *= 2;
        if high > MOST_SEQUENCES {
            return None;
        }
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low.midpoint(high);
        if differs(middle)? { high = middle } else { low = middle }
    }
    let tokens = one.batch().mask.ncols();
    Some(format!("logp changes when the tokens of the batch go from {} to {}", low * tokens, high * tokens))
}

/// Whether a deck of `regimes` has vocabulary entries of probability 0, which kernels need not take otherwise.
pub(crate) fn has_dead_entries(regimes: &[Regime]) -> bool {
    regimes.contains(&Regime::Holes)
}
