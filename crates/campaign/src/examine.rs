//! Calls a kernel with one problem, and classifies the failure that its answer shows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use assay_core::problem::{Candidate, Gradient, Shape};
use assay_core::spec::LossSpec;
use assay_judge::gate::{Edge, Gate, Model, Output};
use assay_judge::invariance::{Invariance, TokenAnswers};
use assay_judge::judge::{JudgeError, Verdict};
use assay_judge::metric::Comparison;
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_schema::invariance::InvarianceRelation;
use assay_schema::verdicts::Status;

use crate::deck::DealtRecipe;
use crate::invariance::AskedInvariance;
use crate::kernel::{Fault, KernelUnderTest};
use crate::subject::Subject;

/// The appearance of a failure: failures of one kind may have one cause.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FailureKind {
    /// The most telling of the gates that failed, and how.
    Gate(u8, Gate, FailedStatus),
    /// An output that cannot be judged.
    Shape(String),
    /// The kernel returned no candidate: the fault's name and its text.
    Fault(&'static str, String),
    /// A second call had other bits.
    OtherBits,
    /// The answer to other content in the same memory is wrong, and right in memory of its own.
    Stale,
    /// The answer is wrong where masked tokens hold garbage, and right where they do not.
    MaskedGarbage,
    /// A token has other numbers in another call.
    Dependent(InvarianceRelation),
}

/// A status that fails, in an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FailedStatus {
    Beyond,
    Nonfinite,
}

impl FailureKind {
    pub(crate) fn from_verdict(verdict: &Verdict) -> Option<Self> {
        let failed = match verdict.status {
            Status::Fail => FailedStatus::Beyond,
            Status::Nonfinite => FailedStatus::Nonfinite,
            _ => return None,
        };
        Some(Self::Gate(rank(verdict.gate), verdict.gate, failed))
    }

    /// Whether the gate is of the loss or a metric, which are sums over tokens.
    pub(crate) fn is_of_a_sum(&self) -> bool {
        matches!(self, FailureKind::Gate(rank, ..) if *rank >= FIRST_SUM)
    }

    /// Returns the name of a cause of this kind.
    pub(crate) fn name(&self) -> String {
        match self {
            FailureKind::Gate(_, gate, FailedStatus::Beyond) => gate.to_string(),
            FailureKind::Gate(_, gate, FailedStatus::Nonfinite) => format!("{gate} not finite"),
            FailureKind::Shape(output) => format!("{output}, its shape"),
            FailureKind::Fault(name, _) => (*name).into(),
            FailureKind::OtherBits => "not-reproducible".into(),
            FailureKind::Stale => "stale-memory".into(),
            FailureKind::MaskedGarbage => "masked-garbage".into(),
            FailureKind::Dependent(relation) => relation.cause().into(),
        }
    }
}

/// The rank from which on gates are of the loss and of metrics.
const FIRST_SUM: u8 = 15;

/// Returns a gate's place in the order in which errors spread: log-probabilities before losses, losses before
/// gradients; single values before norms and sums.
fn rank(gate: Gate) -> u8 {
    // Three ranks for each output leave room for its single values, norms and sums.
    let output = match gate.output {
        Output::Logp => 0,
        Output::Entropy => 1,
        Output::TokenLoss => 2,
        Output::Dlogits | Output::Dhidden => 3,
        Output::DlmHead => 4,
        Output::Loss => 5,
        _ => 6,
    };
    3 * output
        + match gate.model {
            Model::Elementwise | Model::Count => 0,
            Model::RowL2 => 1,
            Model::RowSum => 2,
        }
}

/// The outcome of one problem.
pub(crate) struct Examined {
    /// The kinds of failure, empty if the problem passed.
    pub(crate) kinds: Vec<FailureKind>,
    /// The comparison with the largest error / limit of each gate that failed; none for a gate with values that are not finite.
    pub(crate) errors: Vec<(FailureKind, Comparison)>,
    /// The fault that the kernel reported in place of a candidate.
    pub(crate) fault: Option<Fault>,
    pub(crate) outputs: Vec<&'static str>,
    /// The answer itself, where it is kept.
    pub(crate) answers: Option<TokenAnswers>,
}

/// One problem on which the kernel failed.
pub(crate) struct FailedProblem<P> {
    pub(crate) label: String,
    pub(crate) problem: Arc<P>,
    pub(crate) fault: Option<Fault>,
    /// The comparison with the largest error / limit of each gate that failed; none for a gate with values that are not finite.
    pub(crate) errors: Vec<(FailureKind, Comparison)>,
    /// The place of the problem among all that were tried; `None` if an earlier campaign kept it.
    pub(crate) tried: Option<usize>,
}

/// The failures of one kind.
pub(crate) struct FailureGroup<P> {
    pub(crate) cases: u64,
    pub(crate) first: String,
    /// The places of the problems among all that were tried.
    pub(crate) tried: Vec<usize>,
    /// The comparison with the largest error / limit of all, and the problem that has it.
    pub(crate) worst: Option<(Comparison, String)>,
    /// The smallest of the problems that failed so.
    pub(crate) kept: Vec<FailedProblem<P>>,
    /// The largest of the others that are asked for again in no time: patterns show where there are many values.
    pub(crate) larger: Vec<FailedProblem<P>>,
}

impl<P> FailureGroup<P> {
    /// A group without a problem yet, whose first will be `first`.
    pub(crate) fn new(first: String) -> Self {
        Self { cases: 0, first, tried: Vec::new(), worst: None, kept: Vec::new(), larger: Vec::new() }
    }
}

impl<P: Subject> FailureGroup<P> {
    /// Keeps a problem if it is one of the smallest, or of the largest that are not too large.
    pub(crate) fn keep(&mut self, failing: FailedProblem<P>) {
        self.kept.push(failing);
        self.kept.sort_by_key(|failing| elements(&*failing.problem));
        self.larger.extend(self.kept.drain(self.kept.len().min(KEPT)..));
        self.larger.retain(|failing| elements(&*failing.problem) <= LARGE);
        self.larger.sort_by_key(|failing| std::cmp::Reverse(elements(&*failing.problem)));
        self.larger.truncate(LARGER);
    }

    /// Adds the failures of another group.
    pub(crate) fn add(&mut self, other: Self) {
        self.cases += other.cases;
        self.tried.extend(other.tried);
        let size = |(worst, _): &(Comparison, String)| worst.error_over_limit();
        if other.worst.as_ref().map(size) > self.worst.as_ref().map(size) {
            self.worst = other.worst;
        }
        other.kept.into_iter().chain(other.larger).for_each(|failing| self.keep(failing));
    }

    /// Takes one failure away, whose problem is no longer among those kept, and returns it as a group.
    pub(crate) fn split_off(&mut self, failing: FailedProblem<P>) -> Self {
        self.cases -= 1;
        self.tried.retain(|place| Some(*place) != failing.tried);
        self.worst.take_if(|(_, label)| *label == failing.label);
        let mut alone = Self::new(failing.label.clone());
        alone.cases = 1;
        alone.tried.extend(failing.tried);
        alone.keep(failing);
        alone
    }

    /// Returns the problems in which patterns are looked for, the largest first.
    pub(crate) fn in_descending_size(&self) -> impl Iterator<Item = &Arc<P>> {
        self.larger.iter().chain(self.kept.iter().rev()).map(|failing| &failing.problem)
    }
}

/// Problems of one kind of failure that are kept, the small ones.
const KEPT: usize = 6;

/// Larger problems that are kept beside them, and the largest number of their logits.
const LARGER: usize = 3;
const LARGE: usize = 1 << 16;

/// A kernel under examination: what all of a campaign's steps ask it by.
pub(crate) struct Examiner<'b, P: Subject> {
    pub(crate) kernel: &'b mut dyn KernelUnderTest<P>,
    pub(crate) spec: &'b LossSpec,
    pub(crate) limits: Limits<'static>,
    /// Edges at which it may fail.
    pub(crate) allowed: &'b [Edge],
    /// The relations that are asked; `None` asks none.
    pub(crate) invariance: Option<&'b AskedInvariance>,
    pub(crate) calls: u64,
    /// The time from questions to answers, all together, without what is done with the answers.
    pub(crate) answering: Duration,
    /// The way in which the kernel is called; `None` for the plain one.
    pub(crate) way: Option<usize>,
}

/// The reason why there are no verdicts on a problem.
#[derive(Debug)]
pub(crate) enum NoVerdicts {
    /// The kernel showed no candidate.
    NoAnswer(Fault),
    /// The kernel showed a candidate that cannot be judged.
    NotJudged(JudgeError),
}

impl<'b, P: Subject> Examiner<'b, P> {
    /// Examines `kernel`, of which nothing was asked yet.
    pub(crate) fn new(
        kernel: &'b mut dyn KernelUnderTest<P>,
        spec: &'b LossSpec,
        limits: Limits<'static>,
        allowed: &'b [Edge],
    ) -> Self {
        Self { kernel, spec, limits, allowed, invariance: None, calls: 0, answering: Duration::ZERO, way: None }
    }

    /// Calls the kernel in another way from here on.
    pub(crate) fn call_by(&mut self, way: Option<usize>) {
        self.way = way;
        self.kernel.call_by(way);
    }

    /// Returns `called with …`, or `None` if the kernel is called plainly.
    pub(crate) fn called(&self) -> Option<String> {
        Some(format!("called {}", self.kernel.ways()[self.way?].words))
    }

    /// Lets it compute `problem`, and shows the candidate to `read`.
    pub(crate) fn call(
        &mut self,
        problem: &Arc<P>,
        read: &mut dyn FnMut(&Candidate<P::View<'_>>),
    ) -> Result<(), Fault> {
        self.calls += 1;
        let (asked, mut answered) = (Instant::now(), None);
        let outcome = self.kernel.answer(self.spec, problem, &mut |candidate| {
            answered.get_or_insert_with(|| asked.elapsed());
            read(candidate);
        });
        self.answering += answered.unwrap_or_else(|| asked.elapsed());
        outcome
    }

    /// Returns the kernel's candidate as arrays that outlive the call.
    pub(crate) fn candidate(&mut self, problem: &Arc<P>) -> Result<Candidate<P::Gradient>, Fault> {
        let mut candidate = None;
        self.call(problem, &mut |given| candidate = Some(Candidate::from_lent(given)))?;
        candidate.ok_or_else(|| Fault::Raised("it showed no outputs".into()))
    }

    /// Lets it compute `problem`, shows the candidate to `look`, and judges it by what is `known`.
    pub(crate) fn verdicts(
        &mut self,
        problem: &Arc<P>,
        known: &JudgedProblem<P>,
        mut look: impl FnMut(&Candidate<P::View<'_>>),
    ) -> Result<Vec<Verdict>, NoVerdicts> {
        let (limits, mut verdicts) = (self.limits, None);
        let mut read = |candidate: &Candidate<P::View<'_>>| {
            look(candidate);
            verdicts = Some(known.verdicts(candidate, &limits));
        };
        self.call(problem, &mut read).map_err(NoVerdicts::NoAnswer)?;
        let none = || Err(NoVerdicts::NoAnswer(Fault::Raised("it showed no outputs".into())));
        verdicts.map_or_else(none, |verdicts| verdicts.map_err(NoVerdicts::NotJudged))
    }

    /// Judges what it returns for what is `known`, and sorts its failures by kind.
    pub(crate) fn judged(&mut self, problem: &Arc<P>, known: &JudgedProblem<P>) -> Examined {
        let (mut outputs, mut answers) = (Vec::new(), None);
        let is_kept = self.invariance.is_some();
        let mut look = |candidate: &Candidate<P::View<'_>>| {
            if is_kept {
                answers = Some(TokenAnswers::new(&Candidate::<P::Gradient>::from_lent(candidate)));
            }
            // Note the optional outputs: mutants are later judged by these outputs only.
            let Candidate { logp, entropy, token_loss, .. } = candidate;
            let there =
                [("logp", logp.is_some()), ("entropy", entropy.is_some()), ("token_loss", token_loss.is_some())];
            outputs.extend(there.into_iter().filter_map(|(name, there)| there.then_some(name)));
        };
        let verdicts = if self.invariance.is_some_and(|asked| asked.alone) {
            self.call(problem, &mut look).map(|()| Vec::new()).map_err(NoVerdicts::NoAnswer)
        } else {
            self.verdicts(problem, known, look)
        };
        let (mut fault, mut errors) = (None, Vec::new());
        let mut kinds: Vec<FailureKind> = match verdicts {
            Ok(verdicts) => {
                let beyond = verdicts.iter().filter(|verdict| verdict.status == Status::Fail);
                let worst = beyond.filter_map(|verdict| Some((FailureKind::from_verdict(verdict)?, verdict.worst()?)));
                errors.extend(worst.filter(|(_, worst)| worst.error_over_limit().is_finite()));
                verdicts.iter().filter_map(FailureKind::from_verdict).collect()
            }
            Err(NoVerdicts::NotJudged(JudgeError::Shape { output, .. })) => vec![FailureKind::Shape(output.into())],
            Err(NoVerdicts::NotJudged(JudgeError::Tolerance(_))) => unreachable!("the class is built in"),
            // An output that the judge misses is a fault of the kernel, which hides every other failure.
            Err(NoVerdicts::NotJudged(JudgeError::Missing { output, because })) => {
                let expected = format!("it: {because}");
                fault =
                    Some(Fault::Output { field: output.into(), given: "nothing".into(), expected: expected.into() });
                Vec::new()
            }
            Err(NoVerdicts::NoAnswer(why)) => {
                fault = Some(why);
                Vec::new()
            }
        };
        if let Some(fault) = &fault {
            let field = if let Fault::Output { field, .. } = fault { field.to_string() } else { String::new() };
            kinds = vec![FailureKind::Fault(fault.name(), field)];
        }
        kinds.sort();
        Examined { kinds, errors, fault, outputs, answers }
    }

    /// Whether `problem` still fails as `kind` says.
    pub(crate) fn fails(&mut self, problem: &Arc<P>, kind: &FailureKind) -> bool {
        let Ok(known) = JudgedProblem::new(self.spec, &**problem) else { return false };
        match kind {
            FailureKind::OtherBits => {
                // Two fresh calls must differ again.
                let both = (self.candidate(problem), self.candidate(problem));
                matches!(both, (Ok(a), Ok(b)) if !same_bits(&a, &b))
            }
            // It is a matter of what was there before.
            FailureKind::Stale | FailureKind::MaskedGarbage => false,
            FailureKind::Dependent(relation) => {
                let Some(asked) = self.invariance else { return false };
                let demand = asked.demands.iter().find(|demand| demand.relation == *relation);
                demand.is_some_and(|demand| self.failing_comparison(*demand, problem, asked.alone).is_some())
            }
            _ => self.judged(problem, &known).kinds.contains(kind),
        }
    }
}

pub(crate) fn same_bits<G: Gradient>(a: &Candidate<G>, b: &Candidate<G>) -> bool {
    Invariance::between(a, b).other.is_empty()
}

/// Returns the number of logits `B·T·V`.
pub(crate) fn elements<P: Subject>(problem: &P) -> usize {
    let Shape { batch, tokens, vocab } = problem.shape().into();
    batch * tokens * vocab
}

/// Seeds that are tried for a problem with a gradient.
pub(crate) const SEEDS: u64 = 8;

/// The recipe with another seed, after `step` that were of no use.
pub(crate) fn reseeded(mut dealt: DealtRecipe, step: u64) -> DealtRecipe {
    let seed = &mut dealt.recipe.seed;
    *seed = seed.wrapping_add(step << 48);
    dealt
}
