//! Asks a kernel again after content was altered that a token's answer does not depend on: other tokens, or what masked tokens hold.

use std::sync::Arc;

use assay_core::problem::{Advantages, Candidate, Dtype, FloatArray, Gradient, Problem, Shape};
use assay_judge::metric::half_ulp;
use assay_judge::trial::JudgedProblem;
use assay_schema::number::six;
use ndarray::{Array2, Axis};

use crate::examine::{Examiner, elements};
use crate::subject::Subject;

/// The most logits of a problem that a kernel is asked for again and again.
const ELEMENTS: usize = 1 << 18;

/// The largest change of an exact value that counts as none, as a share of it.
const EXACT: f64 = 1e-9;

/// The change of a kernel's value, as a share of it, and in half ulps, from which on no other order of its sums explains it.
const CHANGED: f64 = 1e-3;
const HALF_ULPS: f64 = 16.0;

/// The content that is altered between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AlteredContent {
    MaskedTokens,
    OtherSequences,
    OtherTokens,
}

impl AlteredContent {
    const ALL: [Self; 3] = [Self::MaskedTokens, Self::OtherSequences, Self::OtherTokens];

    fn words(self) -> &'static str {
        match self {
            Self::MaskedTokens => "what masked tokens hold changes",
            Self::OtherSequences => "other sequences change",
            Self::OtherTokens => "other tokens of its sequence change",
        }
    }

    /// Marks the tokens `[B,T]` whose content is altered: of those that count every other one, or those of every other sequence, so that
    /// each that stays has altered ones on both sides.
    pub(crate) fn tokens<L>(self, problem: &Problem<L>) -> Array2<bool> {
        let mut altered = Array2::from_elem(problem.mask.dim(), false);
        let mut filled = 0;
        for sequence in problem.extra.sequences.places(problem.mask.dim()) {
            let (counting, masked): (Vec<_>, Vec<_>) = sequence.places().partition(|at| problem.mask[*at]);
            match self {
                Self::MaskedTokens => masked.into_iter().for_each(|at| altered[at] = true),
                Self::OtherSequences if filled % 2 == 1 => counting.iter().for_each(|at| altered[*at] = true),
                Self::OtherSequences => {}
                Self::OtherTokens => counting.iter().skip(1).step_by(2).for_each(|at| altered[*at] = true),
            }
            filled += usize::from(!counting.is_empty());
        }
        altered
    }
}

/// Returns a sentence for each kind of content that changes a token's answer though the exact answer does not depend on it.
pub(crate) fn dependences<P: Subject>(bench: &mut Examiner<P>, problems: &[Arc<P>]) -> Vec<String> {
    // A large problem takes too long to be asked for several times.
    let small: Vec<&Arc<P>> = problems.iter().filter(|problem| elements(&***problem) <= ELEMENTS).collect();
    let of_kind = |altered: AlteredContent| {
        // The smallest problem that has such content next to a token that counts, and the largest.
        let mut fit = small.iter().filter(|problem| {
            let (tokens, mask) = (altered.tokens(problem.batch()), &problem.batch().mask);
            let stays = |(at, counts): ((usize, usize), &bool)| *counts && !tokens[at];
            tokens.iter().any(|altered| *altered) && mask.indexed_iter().any(stays)
        });
        let ends: Vec<&Arc<P>> = fit.next().into_iter().chain(fit.next_back()).copied().collect();
        ends.into_iter().find_map(|problem| dependence(bench, problem, altered))
    };
    AlteredContent::ALL.into_iter().filter_map(of_kind).collect()
}

/// Returns what changes in the kernel's answer to `problem` if content is altered; `None` if nothing does that should stay.
fn dependence<P: Subject>(bench: &mut Examiner<P>, problem: &Arc<P>, altered: AlteredContent) -> Option<String> {
    let tokens = altered.tokens(problem.batch());
    let other = Arc::new(with_altered(&**problem, &tokens));
    let [exact, exact_of_other] = [problem, &other]
        .map(|problem| JudgedProblem::new(bench.spec, &**problem).map(|known| P::outcome(&known.reference)));
    let (exact, exact_of_other) = (exact.ok()?, exact_of_other.ok()?);
    let [given, given_of_other, again] = [problem, &other, problem].map(|problem| bench.candidate(problem).ok());
    let (given, given_of_other, again) = (given?, given_of_other?, again?);
    // Look at the tokens that count and stay, output by output in the order in which errors spread.
    let mask = &problem.batch().mask;
    let stays: Vec<(usize, usize)> =
        mask.indexed_iter().filter(|(at, counts)| **counts && !tokens[*at]).map(|(at, _)| at).collect();
    let width = mask.ncols();
    let mut outputs = TokenOutput::all::<P::Gradient>().into_iter();
    outputs.find_map(|output| {
        let read = |candidate: &Candidate<P::Gradient>| output.values(candidate, mask.len());
        let (exact, exact_of_other) = (read(&exact)?, read(&exact_of_other)?);
        let (given, given_of_other, again) = (read(&given)?, read(&given_of_other)?, read(&again)?);
        let dtype = if output.is_gradient() { problem.dtype() } else { Dtype::F32 };
        stays.iter().find_map(|&(b, t)| {
            let of_token = |values: &[Vec<f64>]| values[b * width + t].clone();
            let is_exactly_changed = change(&of_token(&exact), &of_token(&exact_of_other)) > EXACT;
            let noise = CHANGED.max(HALF_ULPS * half_ulp(1.0, dtype));
            let is_changed = |other: &[Vec<f64>]| change(&of_token(&given), &of_token(other)) > noise;
            // A kernel whose second answer differs from its first has another mistake.
            (!is_exactly_changed && is_changed(&given_of_other) && !is_changed(&again)).then(|| {
                let values = match (of_token(&given).as_slice(), of_token(&given_of_other).as_slice()) {
                    ([before], [after]) => format!("changes from {} to {}", six(*before), six(*after)),
                    _ => "change".into(),
                };
                format!("{} of token [{b},{t}] {values} when only {}", output.name, altered.words())
            })
        })
    })
}

/// An output with values for each token.
struct TokenOutput {
    name: &'static str,
    /// The place among logp, entropy, token losses and the gradient.
    place: usize,
}

impl TokenOutput {
    fn all<G: Gradient>() -> [Self; 4] {
        let names = ["logp", "entropy", "the loss", G::ARRAYS[0]];
        [0, 1, 2, 3].map(|place| Self { name: names[place], place })
    }

    fn is_gradient(&self) -> bool {
        self.place == 3
    }

    /// Returns the values of each of `tokens` tokens; `None` where the candidate has not the output.
    fn values<G: Gradient>(&self, candidate: &Candidate<G>, tokens: usize) -> Option<Vec<Vec<f64>>> {
        let array = [&candidate.logp, &candidate.entropy, &candidate.token_loss];
        let values: Vec<f64> = if let Some(array) = array.get(self.place) {
            array.as_ref()?.to_f64().into_iter().collect()
        } else {
            let lent = candidate.gradient.lend();
            G::arrays(&lent).first()?.to_f64().into_iter().collect()
        };
        (tokens > 0 && !values.is_empty() && values.len().is_multiple_of(tokens))
            .then(|| values.chunks(values.len() / tokens).map(<[f64]>::to_vec).collect())
    }
}

/// Returns the largest change of a value as a share of the largest value; infinite where one is finite and its other is not.
fn change(before: &[f64], after: &[f64]) -> f64 {
    if before.iter().zip(after).any(|(x, y)| x.is_finite() != y.is_finite()) {
        return f64::INFINITY;
    }
    let finite = || before.iter().zip(after).filter(|(x, _)| x.is_finite());
    let largest = finite().map(|(x, y)| x.abs().max(y.abs())).fold(0.0, f64::max);
    let changed = finite().map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    if changed == 0.0 { 0.0 } else { changed / largest }
}

/// Alters logits or hidden states, log-probabilities and advantages of some tokens. Ids and the mask stay.
pub(crate) fn with_altered<P: Subject>(problem: &P, altered: &Array2<bool>) -> P {
    let mut rows = problem.rows().to_f64();
    for (b, t) in altered.indexed_iter().filter(|(_, altered)| **altered).map(|(at, _)| at) {
        let mut row = rows.index_axis_mut(Axis(0), b);
        row.index_axis_mut(Axis(0), t).mapv_inplace(|x| if x.is_finite() { 1.0 - x / 2.0 } else { x });
    }
    let rows = FloatArray::rounded_from(&rows, problem.dtype());
    let Shape { batch, .. } = problem.shape().into();
    let mut tokens = problem.batch().with_logits(());
    let sequences = tokens.extra.sequences.clone();
    let alter = |array: &mut Array2<f64>, by: &dyn Fn(f64) -> f64| {
        array.indexed_iter_mut().filter(|(at, _)| altered[*at]).for_each(|(_, x)| *x = by(*x));
    };
    // A deck's values are those of f32, and stay so: a kernel may be handed f64 where one of them is not, and rounds otherwise there.
    let (raised, mirrored) = (|x: f64| f64::from((x + 0.25) as f32), |x: f64| f64::from((0.5 - x) as f32));
    for array in [&mut tokens.old_logp, &mut tokens.ref_logp].into_iter().flatten() {
        alter(array, &raised);
    }
    match &mut tokens.advantages {
        Advantages::Token(array) | Advantages::Dlogp(array) => alter(array, &mirrored),
        // The advantage of a sequence is altered where all of its tokens that count are.
        Advantages::Sequence(array) => {
            for sequence in sequences.places(altered.dim()) {
                let mut places = sequence.places().filter(|at| tokens.mask[*at]).peekable();
                if sequence.index < sequences.count(batch) && places.peek().is_some() && places.all(|at| altered[at]) {
                    array[sequence.index] = mirrored(array[sequence.index]);
                }
            }
        }
    }
    tokens.with_logits(problem.with_rows(rows)).into()
}
