//! Which patterns of errors all problems of a cause agree on: a pattern of one problem may be chance.

use std::collections::BTreeSet;
use std::sync::Arc;

use assay_core::problem::{Dtype, Shape};
use assay_judge::diagnosis::{Diagnosis, OtherRows};
use assay_judge::gate::{Edge, Output};
use assay_judge::judge::Verdict;
use assay_judge::trial::JudgedProblem;
use assay_schema::number::six;
use assay_schema::verdicts::Status;

use crate::cause::words;
use crate::examine::Examiner;
use crate::subject::Subject;

/// Problems of which the factors are shown, where each batch has its own.
const EXAMPLES: usize = 3;

/// The number of vocabulary entries from which on a row of dlogits tells wrong probabilities from a wrong factor.
const TELLS_SOFTMAX: usize = 64;

/// The logits of all problems together that are looked at for patterns.
const ELEMENTS: usize = 1 << 20;

/// The patterns of errors that one problem shows.
pub(crate) struct ProblemPatterns {
    /// The problem's shape and dtype.
    words: String,
    shape: Shape,
    dtype: Dtype,
    /// The numbers of tokens that count, and of those that have a gradient.
    counting: usize,
    with_gradient: usize,
    /// Whether log-probabilities or entropies are beyond their limits.
    softmax_failed: bool,
    /// Whether token losses are, and log-probabilities are not.
    loss_failed: bool,
    /// Whether the gradient is, by finite numbers.
    gradient_failed: bool,
    patterns: Vec<Diagnosis>,
}

/// The patterns that the problems of a cause agree on.
#[derive(Default)]
pub(crate) struct AgreedPatterns {
    pub(crate) patterns: Vec<Diagnosis>,
    /// The factors of the gradient of several batches, where each batch has its own.
    factors: Vec<(String, f64)>,
}

impl AgreedPatterns {
    /// Writes each pattern in words, of a kernel that is called plainly or in a way of its own.
    pub(crate) fn texts(&self, is_plain: bool) -> Vec<String> {
        let mut all: Vec<String> = self.patterns.iter().map(ToString::to_string).collect();
        if !self.factors.is_empty() {
            let examples = self.factors.iter().take(EXAMPLES);
            let listed: Vec<String> = examples.map(|(words, factor)| format!("{} in {words}", six(*factor))).collect();
            let text = "dlogits are right up to a factor that each batch has of its own";
            let hint = if is_plain { "a count of tokens, or a mean" } else { "that of what it is called with" };
            all.push(format!("{text}: {}: {hint}", listed.join(", ")));
        }
        all
    }

    /// Whether the errors are roundings of a sum, by which a kernel is like a mutant by chance alone.
    pub(crate) fn are_roundings(&self) -> bool {
        self.patterns.iter().any(|pattern| matches!(pattern, Diagnosis::NaiveSum(_)))
    }

    /// Whether two causes show one mistake.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let shared = self.patterns.iter().any(|pattern| other.patterns.iter().any(|theirs| pattern.is_like(theirs)));
        shared || (!self.factors.is_empty() && !other.factors.is_empty())
    }
}

/// Returns the patterns of each problem that is looked at, in the order given; problems beyond [`ELEMENTS`] are left out.
pub(crate) fn patterns_of<'p, P: Subject + 'p>(
    bench: &mut Examiner<P>,
    problems: impl Iterator<Item = &'p Arc<P>>,
) -> Vec<ProblemPatterns> {
    let (mut all, mut looked_at) = (Vec::new(), 0);
    for problem in problems {
        let shape: Shape = problem.shape().into();
        let Shape { batch, tokens, vocab } = shape;
        if looked_at > 0 && looked_at + batch * tokens * vocab > ELEMENTS {
            continue;
        }
        looked_at += batch * tokens * vocab;
        let Ok(candidate) = bench.candidate(problem) else { continue };
        let Ok(known) = JudgedProblem::new(bench.spec, &**problem) else { continue };
        let Ok(verdicts) = known.verdicts(&candidate.lend(), &bench.limits) else { continue };
        let of = |verdict: &Verdict, outputs: &[Output]| {
            outputs.contains(&verdict.gate.output) && verdict.gate.edge != Some(Edge::Masked)
        };
        let has_failed =
            |outputs: &[Output]| verdicts.iter().any(|verdict| of(verdict, outputs) && verdict.status == Status::Fail);
        let softmax = [Output::Logp, Output::Entropy];
        let gradient = [Output::Dlogits, Output::Dhidden];
        let reference = P::on_logits(&known.reference);
        let places = ndarray::indices((batch, tokens)).into_iter();
        let has_gradient =
            |(b, t): &(usize, usize)| reference.token(*b, *t).is_some_and(|token| reference.has_gradient(token));
        all.push(ProblemPatterns {
            words: words(&**problem),
            shape,
            dtype: problem.dtype(),
            counting: reference.count(),
            with_gradient: places.filter(has_gradient).count(),
            loss_failed: has_failed(&[Output::TokenLoss]) && !has_failed(&softmax),
            softmax_failed: has_failed(&softmax),
            gradient_failed: has_failed(&gradient),
            patterns: problem.diagnose(&known.reference, &candidate.lend(), &verdicts),
        });
    }
    all
}

impl ProblemPatterns {
    /// Whether the problem would show `pattern` if that were the kernel's mistake: it fails where the pattern is, and is large enough.
    fn could_show(&self, pattern: &Diagnosis) -> bool {
        let vocab = self.shape.vocab;
        match pattern {
            Diagnosis::NotUpcast(dtype) => self.softmax_failed && self.dtype == *dtype,
            Diagnosis::StoredWider(Output::Logp, dtype) => {
                self.softmax_failed && self.dtype == *dtype && vocab >= TELLS_SOFTMAX
            }
            Diagnosis::NaiveSum(_) => (self.softmax_failed || self.gradient_failed) && vocab >= 1 << 10,
            Diagnosis::EntropyDifference { .. } | Diagnosis::NarrowSum(_) => self.softmax_failed,
            Diagnosis::SumOfColumns { .. } => self.softmax_failed && self.counting >= 2 && vocab >= 4,
            Diagnosis::OtherRows(rows) => {
                let Shape { batch, tokens, .. } = self.shape;
                let has_others = match rows {
                    OtherRows::Transposed => batch > 1 && tokens > 1,
                    OtherRows::NextToken | OtherRows::TokenBefore => tokens > 1,
                    OtherRows::NextSequence | OtherRows::SequenceBefore => batch > 1,
                };
                // A batch of few tokens may have none whose other token counts too.
                self.softmax_failed && has_others && self.counting >= 4
            }
            Diagnosis::HeldRatio { .. } => self.loss_failed,
            Diagnosis::OnlyTheTarget => self.gradient_failed && vocab >= 4,
            // A vocabulary that the place fills has no right entry.
            Diagnosis::Columns { first, last, vocab: of, .. } => {
                let right_from = if last + 1 == *of { *first } else { last + 1 };
                self.gradient_failed && vocab >= 4 && vocab > right_from
            }
            Diagnosis::ConstantFactor { .. } => self.gradient_failed && self.with_gradient * vocab >= 8,
            // A batch whose only token has a gradient has one factor.
            Diagnosis::FactorPerToken { .. } | Diagnosis::FactorPerSequence { .. } => {
                self.gradient_failed && self.with_gradient >= 2 && vocab >= 4
            }
            Diagnosis::Tokens { first, .. } => self.gradient_failed && self.shape.tokens > *first,
            Diagnosis::Truncated(dtype) | Diagnosis::RoundedTwice(dtype) => {
                self.gradient_failed && self.dtype == *dtype && vocab * self.with_gradient >= 64
            }
            Diagnosis::StoredWider(..) => self.gradient_failed && vocab * self.with_gradient >= 16,
        }
    }

    fn shows(&self, pattern: &Diagnosis) -> bool {
        self.patterns.iter().any(|own| own.is_like(pattern))
    }

    /// Returns the factor of the gradient, where two tokens at least have it.
    fn factor(&self) -> Option<f64> {
        self.patterns.iter().find_map(|pattern| match pattern {
            Diagnosis::ConstantFactor { dlogits, .. } if self.with_gradient >= 2 => Some(*dlogits),
            _ => None,
        })
    }
}

/// Whether the probabilities are wrong where log-probabilities are of a narrow dtype, as wide problems show.
fn is_softmax(all: &[ProblemPatterns], dtype: Dtype) -> bool {
    let wide = || all.iter().filter(|problem| problem.shape.vocab >= TELLS_SOFTMAX);
    let wrong = wide().filter(|problem| problem.shows(&Diagnosis::NotUpcast(dtype))).count();
    let right = wide().filter(|problem| problem.shows(&Diagnosis::StoredWider(Output::Logp, dtype))).count();
    wrong > right || right == 0
}

/// Returns the patterns that twice as many problems show as contradict; `dtypes` are those of all problems that failed.
pub(crate) fn agreed(all: &[ProblemPatterns], dtypes: &BTreeSet<Dtype>) -> AgreedPatterns {
    let mut found = AgreedPatterns::default();
    for pattern in all.iter().flat_map(|problem| &problem.patterns) {
        if found.patterns.iter().any(|known| known.is_like(pattern)) {
            continue;
        }
        let showing: Vec<&ProblemPatterns> = all.iter().filter(|problem| problem.shows(pattern)).collect();
        let contradicts = |problem: &&ProblemPatterns| {
            // Small errors of a narrow softmax are hidden behind the rounding of its logp.
            let is_hidden = match pattern {
                Diagnosis::NotUpcast(dtype) => problem.shows(&Diagnosis::StoredWider(Output::Logp, *dtype)),
                _ => false,
            };
            problem.could_show(pattern) && !problem.shows(pattern) && !is_hidden
        };
        let against = all.iter().filter(contradicts).count();
        let is_agreed = match pattern {
            // A narrow dtype's roundings are no mistake of problems in f32.
            Diagnosis::Truncated(_) | Diagnosis::RoundedTwice(_) => !dtypes.contains(&Dtype::F32),
            Diagnosis::NotUpcast(dtype) => !dtypes.contains(&Dtype::F32) && is_softmax(all, *dtype),
            // A single token has a factor whatever is wrong with its loss.
            Diagnosis::ConstantFactor { .. } => {
                showing.len() > 1 || showing.iter().any(|problem| problem.with_gradient >= 2)
            }
            // A gradient over two vocabulary entries is some factor times the exact one, whatever is wrong.
            Diagnosis::FactorPerToken { .. } | Diagnosis::FactorPerSequence { .. } => {
                showing.iter().any(|problem| problem.could_show(pattern))
            }
            // A single wrong token loss tells some bound.
            Diagnosis::HeldRatio { .. } => showing.len() > 1,
            _ => true,
        };
        if is_agreed && showing.len() >= 2 * against {
            found.patterns.push(*pattern);
        }
    }
    // A softmax in a narrow dtype has logp of that dtype too.
    if found.patterns.iter().any(|pattern| matches!(pattern, Diagnosis::NotUpcast(_))) {
        found.patterns.retain(|pattern| !matches!(pattern, Diagnosis::StoredWider(Output::Logp, _)));
    }
    // Factors that differ from batch to batch are a pattern too, if most batches of several tokens have one.
    if !found.patterns.iter().any(|pattern| matches!(pattern, Diagnosis::ConstantFactor { .. })) {
        let several = all.iter().filter(|problem| problem.gradient_failed && problem.with_gradient >= 2);
        let factors: Vec<Option<(String, f64)>> =
            several.map(|problem| Some((problem.words.clone(), problem.factor()?))).collect();
        let with: Vec<(String, f64)> = factors.iter().flatten().cloned().collect();
        if with.len() >= 2 && with.len() >= 2 * (factors.len() - with.len()) {
            found.factors = with;
        }
    }
    found
}
