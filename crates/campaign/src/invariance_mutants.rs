//! Mutants of invariance: the correct kernel, whose log-probabilities depend on something that they must not depend on.
//!
//! The judge accepts each of them: it moves values by less than their limits. Only a second call shows it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use assay_core::problem::{Candidate, FloatArray, Shape};
use assay_core::spec::LossSpec;
use assay_judge::tolerance::Limits;
use assay_schema::campaign as schema;
use assay_schema::invariance::{InvarianceGrade, InvarianceRelation};
use assay_suites::mutants::Specimen;

use crate::campaign::Campaign;
use crate::deck::DealtRecipe;
use crate::examine::{Examiner, elements};
use crate::invariance::InvarianceDemand;
use crate::kernel::{Fault, KernelUnderTest};
use crate::subject::Subject;

/// A mistake that one relation shows.
struct InvarianceMutant {
    relation: InvarianceRelation,
    name: &'static str,
    does: &'static str,
    /// Whether logp of a token is moved.
    moves: fn(&AskedCall, (usize, usize)) -> bool,
}

/// The properties of a call on which mutants depend.
struct AskedCall {
    /// The extents `[B,T,V]` of the problem.
    shape: [usize; 3],
    is_packed: bool,
    is_misaligned: bool,
    /// Whether the call before had other content.
    follows_another: bool,
    /// A number of each row's content.
    rows: Vec<u64>,
}

/// Every mutant; the relation between variants has none, as variants are the caller's.
const INVARIANCE_MUTANTS: [InvarianceMutant; 8] = [
    InvarianceMutant {
        relation: InvarianceRelation::Repeat,
        name: "scratch-read-before-it-is-written",
        does: "logp depends on the content of the call before",
        moves: |call, _| call.follows_another,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Order,
        name: "order-of-sums-by-the-row",
        does: "rows with an odd number are summed in another order",
        moves: |_, (b, _)| b % 2 == 1,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Neighbours,
        name: "maximum-of-another-row",
        does: "exponentials are relative to a maximum that other rows raise",
        moves: |call, (b, _)| {
            let others = call.rows.iter().enumerate().filter(|(row, _)| *row != b);
            others.fold(0, |sum, (_, row)| sum ^ row) % 2 == 1
        },
    },
    InvarianceMutant {
        relation: InvarianceRelation::Batch,
        name: "split-by-the-number-of-rows",
        does: "sums are split in two where the batch has more than eight tokens",
        moves: |call, _| call.shape[0] * call.shape[1] > 8,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Length,
        name: "path-of-padded-rows",
        does: "rows are summed in another order where their width is no multiple of 4",
        moves: |call, _| !call.is_packed && call.shape[1] % 4 != 0,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Packing,
        name: "path-of-packed-rows",
        does: "packed rows are summed in another order",
        moves: |call, _| call.is_packed,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Vocabulary,
        name: "tile-by-the-vocabulary",
        does: "vocabularies of an odd size are summed by smaller tiles, coarsely",
        moves: |call, _| call.shape[2] % 2 == 1,
    },
    InvarianceMutant {
        relation: InvarianceRelation::Alignment,
        name: "path-of-misaligned-rows",
        does: "rows that begin at an odd address are summed coarsely",
        moves: |call, _| call.is_misaligned,
    },
];

/// Units of `u(1 + 2|logp|)` by which logp is moved where differences are asked for within limits: the judge accepts 19.
const UNITS: f64 = 9.0;

/// Problems that mutants are asked about, and the most logits of one.
const CASES: usize = 16;
const ELEMENTS: usize = 1 << 13;

/// The correct kernel with one mistake, as a kernel under test.
struct InvarianceSpecimen<'m> {
    mutant: &'m InvarianceMutant,
    /// Whether logp is moved by one bit, or beyond what another order of a sum explains.
    grade: InvarianceGrade,
    correct: Specimen,
    /// A number of the content of the call before.
    before: Option<u64>,
}

impl<P: Subject> KernelUnderTest<P> for InvarianceSpecimen<'_> {
    fn answer(
        &mut self,
        spec: &LossSpec,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        let run = P::mutant(&self.correct).run(spec, (**problem).clone(), 1);
        let mut candidate = run.map_err(|error| Fault::Unsupported(error.to_string().into()))?;
        let content = problem.fingerprint();
        let Shape { batch, tokens, vocab } = problem.shape().into();
        let call = AskedCall {
            shape: [batch, tokens, vocab],
            is_packed: problem.batch().extra.sequences.packed().is_some(),
            is_misaligned: problem.rows().is_misaligned(),
            follows_another: self.before.replace(content).is_some_and(|before| before != content),
            rows: rows_in_numbers(&**problem),
        };
        if let Some(logp) = candidate.logp.take() {
            let mut values = logp.to_f64();
            for (at, logp) in values.indexed_iter_mut() {
                if problem.batch().mask[at] && logp.is_finite() && (self.mutant.moves)(&call, at) {
                    *logp = match self.grade {
                        InvarianceGrade::Bits => f64::from((*logp as f32).next_down()),
                        InvarianceGrade::Limits => {
                            *logp - UNITS * f64::from(f32::EPSILON) / 2.0 * (1.0 + 2.0 * logp.abs())
                        }
                    };
                }
            }
            candidate.logp = Some(FloatArray::rounded_from(&values, logp.dtype()));
        }
        read(&candidate.lend());
        Ok(())
    }
}

/// Returns a number for the content of each row of a batch.
fn rows_in_numbers<P: Subject>(problem: &P) -> Vec<u64> {
    let (rows, mask) = (problem.rows(), &problem.batch().mask);
    let number = |b: usize| {
        let mut hasher = DefaultHasher::new();
        for t in (0..mask.ncols()).filter(|t| mask[[b, *t]]) {
            rows.row(b, t).iter().for_each(|x| x.to_bits().hash(&mut hasher));
        }
        hasher.finish()
    };
    (0..mask.nrows()).map(number).collect()
}

/// Runs the mutants of the relations that a campaign asks on its first small problems, and adds them to its mutation score.
pub(crate) fn add_to_score<P: Subject>(
    campaign: &Campaign,
    outputs: &[&'static str],
    recipes: impl Iterator<Item = DealtRecipe>,
    score: &mut schema::MutationScore,
) {
    let Some(asked) = campaign.invariance.as_ref().filter(|_| outputs.contains(&"logp")) else { return };
    let problems = recipes.filter_map(|dealt| campaign.deck.draw::<P>(&dealt, &campaign.spec).ok());
    let problems: Vec<Arc<P>> =
        problems.filter(|problem| elements(problem) < ELEMENTS).take(CASES).map(Arc::new).collect();
    for mutant in &INVARIANCE_MUTANTS {
        let Some(demand) = asked.demands.iter().find(|demand| demand.relation == mutant.relation) else { continue };
        match is_rejected(campaign, mutant, *demand, &problems) {
            None => continue,
            Some(true) => score.rejected += 1,
            Some(false) => {
                score.accepted.push(schema::MutantName { mutant: mutant.name.into(), does: mutant.does.into() });
            }
        }
        score.exercised += 1;
    }
}

/// Whether a relation shows its mutant on one of some problems; `None` if it applies to none of them.
fn is_rejected<P: Subject>(
    campaign: &Campaign,
    mutant: &InvarianceMutant,
    demand: InvarianceDemand,
    problems: &[Arc<P>],
) -> Option<bool> {
    let mut specimen = InvarianceSpecimen { mutant, grade: demand.grade, correct: Specimen::default(), before: None };
    let mut bench = Examiner::new(&mut specimen, &campaign.spec, Limits::external(campaign.grade), &[]);
    let mut applies = false;
    for (turn, problem) in problems.iter().enumerate() {
        if let Ok(compared) = bench.compare_calls(demand, (problem, turn as u64), None, false) {
            applies |= compared.differences.tokens > 0;
            if compared.fails {
                return Some(true);
            }
        }
    }
    applies.then_some(false)
}
