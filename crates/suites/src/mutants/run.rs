//! Mutants before the judge: the same cases and gates as a real implementation.

use rayon::prelude::*;

use super::case::MutantCase;
use super::{Mutant, MutantKind, QWEN_VOCABULARY, Specimen, property};
use assay_mutants::DEVICE_COUNTS;

use crate::{measured_cases, measured_heads};
use assay_core::implementation::Implementation;
use assay_core::problem::{Candidate, Dtype, HeadProblem, Problem};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};
use assay_judge::invariance::Invariance;
use assay_judge::judgeable::Judgeable;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_judge::variants;

/// Random specs and problems that are drawn, the first of those that limits are measured on. Those that the specimen
/// supports are run.
const DRAWN: usize = 400;

/// The number of random cases of heads.
const DRAWN_HEADS: usize = 320;

/// Classes whose properties are property cases of every implementation too: what random specs seldom have, or never alone.
const SELDOM_DRAWN: [MutantKind; 20] = [
    MutantKind::Sizes,
    MutantKind::Overflow,
    MutantKind::Logits,
    MutantKind::Support,
    MutantKind::Topr,
    MutantKind::Aspo,
    MutantKind::CrossEntropy,
    MutantKind::LogClip,
    MutantKind::KlWeight,
    MutantKind::KlClamp,
    MutantKind::OffPolicy,
    MutantKind::Sampler,
    MutantKind::Rollout,
    MutantKind::Rejection,
    MutantKind::TokenWeights,
    MutantKind::TopEntropy,
    MutantKind::Several,
    MutantKind::Distillation,
    MutantKind::SequenceRatio,
    MutantKind::Packing,
];

fn is_supported(spec: &LossSpec, dtype: Dtype) -> bool {
    Specimen::expect_computed(spec, dtype, 1).is_ok()
}

/// The property cases of every implementation, as far as the specimen supports them, from a fixed seed: random specs and
/// regimes, every named choice of a spec, the vocabulary of Qwen, and the properties of what is seldom drawn.
pub fn property_cases() -> Vec<MutantCase> {
    let drawn: Vec<(usize, (LossSpec, Recipe))> = measured_cases().take(DRAWN).enumerate().collect();
    // The order of the cases is kept through the parallel steps, since a mutant is reported with its number of cases.
    let random = drawn
        .into_par_iter()
        .filter(|(_, (spec, recipe))| is_supported(spec, recipe.dtype))
        .map(|(i, (spec, recipe))| MutantCase::generated(&format!("random {i}"), spec, &recipe));
    let named: Vec<(usize, variants::Variant)> = variants::variants().into_iter().enumerate().collect();
    let named = named.into_par_iter().filter(|(_, variant)| is_supported(&variant.spec, Dtype::F32)).flat_map_iter(
        |(i, variant)| {
            (0..Regime::FINITE.len()).map(move |step| {
                let family = format!("{} {}", variant.field, variant.choice);
                MutantCase::generated(&family, variant.spec.clone(), &variants::recipe(i, step))
            })
        },
    );
    let seldom_drawn = SELDOM_DRAWN.into_iter().flat_map(property::property);
    random.chain(named).chain(wide_cases()).chain(seldom_drawn.collect::<Vec<_>>()).collect()
}

/// Returns random cases of heads in all regimes, from a fixed seed.
pub fn head_cases() -> Vec<MutantCase<HeadProblem>> {
    let drawn: Vec<(usize, (LossSpec, HeadRecipe))> = measured_heads().take(DRAWN_HEADS).enumerate().collect();
    drawn
        .into_par_iter()
        .filter(|(_, (spec, head))| is_supported(spec, head.recipe.dtype))
        .map(|(i, (spec, head))| MutantCase::with_head(&format!("random {i}"), spec, &head))
        .collect()
}

/// Qwen's vocabulary, in every dtype.
fn wide_cases() -> Vec<MutantCase> {
    let specs = [LossSpec { entropy_coef: 0.01, temperature: 0.7.into(), ..LossSpec::default() }, LossSpec::default()];
    let mut cases = Vec::new();
    for dtype in Dtype::KERNEL {
        for (regime, seed) in [(Regime::Small, 1), (Regime::Peaked, 2), (Regime::Confident, 3)] {
            let shape = [1, 3, QWEN_VOCABULARY];
            let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
            cases.extend(specs.iter().map(|spec| MutantCase::generated("qwen vocabulary", spec.clone(), &recipe)));
        }
    }
    cases
}

/// Cases with all that mutants have in common: the reference, and what the correct kernel returns.
///
/// ```
/// use assay_judge::tolerance::Grade;
/// use assay_suites::mutants::{BANK, MutantOutcome, MutantSuite, property};
///
/// let mutant = &BANK[0];
/// let cases = property(mutant.kind);
/// let suite = MutantSuite::new(&cases[..1], Grade::Standard).expect("no false alarm");
/// let [outcome] = &suite.run(&[mutant])[..] else { panic!("one a mutant") };
/// assert!(matches!(outcome, MutantOutcome::Killed(_) | MutantOutcome::Accepted | MutantOutcome::NotExercised));
/// ```
pub struct MutantSuite<'c, P: Judgeable = Problem> {
    cases: Vec<PreparedCase<'c, P>>,
    devices: &'static [usize],
    limits: Limits<'static>,
    at_once: usize,
}

struct PreparedCase<'c, P: Judgeable> {
    case: &'c MutantCase<P>,
    known: JudgedProblem<'c, P>,
    /// The correct kernel's candidates, by number of devices.
    correct: Vec<(usize, Candidate<P::Gradient>)>,
}

/// The verdict that rejected a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// The gate: an output and how it is compared, or what else was broken.
    pub gate: String,
    /// The label of the case.
    pub case: String,
    /// Devices that it ran on.
    pub devices: usize,
    /// Cases that it had seen by then.
    pub cases: usize,
}

/// The fate of one mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MutantOutcome {
    /// A gate rejected the mutant.
    Killed(Kill),
    /// No gate distinguishes the mutant from the correct kernel, although its numbers differ.
    Accepted,
    /// No case reached the bug: it had the bits of the correct kernel in all of them.
    NotExercised,
}

impl MutantOutcome {
    /// Returns the verdict that rejected the mutant.
    pub fn kill(self) -> Option<Kill> {
        if let MutantOutcome::Killed(kill) = self { Some(kill) } else { None }
    }
}

impl<'c, P: Judgeable> MutantSuite<'c, P>
where
    Specimen: Implementation<P>,
{
    /// Evaluates the cases that the specimen supports. Kernels are held to the limits of those that are not ours, at `grade`.
    ///
    /// # Errors
    /// What rejected the correct kernel: a false alarm.
    pub fn new(cases: &'c [MutantCase<P>], grade: Grade) -> Result<Self, Kill> {
        Self::on(&DEVICE_COUNTS, cases, AT_ONCE, grade)
    }

    /// Returns the fates on these numbers of devices alone, with so many mutants at once.
    pub(super) fn on(
        devices: &'static [usize],
        cases: &'c [MutantCase<P>],
        at_once: usize,
        grade: Grade,
    ) -> Result<Self, Kill> {
        let limits = Limits::external(grade).alone();
        let supported = cases.par_iter().filter(|case| is_supported(&case.spec, case.problem.dtype()));
        let prepared = supported.map(|case| {
            let known = JudgedProblem::new(&case.spec, &case.problem).expect("a valid problem");
            // The correct kernel is judged first: a case that rejected it would kill every mutant for nothing.
            let mut prepared = PreparedCase { case, known, correct: Vec::new() };
            for (i, &on) in devices.iter().enumerate() {
                let judged = prepared.judged_on(&[&Specimen::default()], on, i == 0, &limits).remove(0);
                let of_gate = |gate| Kill { gate, case: case.label.clone(), devices: on, cases: 0 };
                prepared.correct.push((on, judged.map_err(of_gate)?.candidate));
            }
            Ok(prepared)
        });
        Ok(Self { cases: prepared.collect::<Result<_, Kill>>()?, devices, limits, at_once })
    }

    /// Returns the number of prepared cases.
    pub fn len(&self) -> usize {
        self.cases.len()
    }

    /// Whether there is no case.
    pub fn is_empty(&self) -> bool {
        self.cases.is_empty()
    }

    /// Runs mutants through the cases, each up to the first that rejects it.
    pub fn run(&self, mutants: &[&Mutant]) -> Vec<MutantOutcome> {
        let specimens: Vec<Specimen> = mutants.iter().map(|mutant| Specimen::with(mutant.bug)).collect();
        let mut fates = vec![MutantOutcome::NotExercised; mutants.len()];
        for (prepared, cases) in self.cases.iter().zip(1..) {
            // A mutant of what the spec does not have has the bits of the correct kernel.
            let is_left = |((_, fate), mutant): &((_, &mut MutantOutcome), &&Mutant)| {
                !matches!(fate, MutantOutcome::Killed(_))
                    && mutant.kind.is_reached(&prepared.case.spec, prepared.case.is_packed())
            };
            let kernels = specimens.iter().zip(&mut fates).zip(mutants);
            let mut left: Vec<(&Specimen, &mut MutantOutcome)> =
                kernels.filter(is_left).map(|(kernel, _)| kernel).collect();
            for left in left.chunks_mut(self.at_once) {
                let kernels: Vec<&Specimen> = left.iter().map(|(kernel, _)| *kernel).collect();
                let judged = prepared.judged(&kernels, self.devices, &self.limits);
                for ((_, fate), judged) in left.iter_mut().zip(judged) {
                    match judged {
                        Err((gate, devices)) => {
                            let case = prepared.case.label.clone();
                            **fate = MutantOutcome::Killed(Kill { gate, case, devices, cases });
                        }
                        Ok(true) => {}
                        Ok(false) => **fate = MutantOutcome::Accepted,
                    }
                }
            }
        }
        fates
    }
}

/// Mutants that are judged at once: the gradients that they return on one number of devices are held.
pub(super) const AT_ONCE: usize = 8;

/// The reason for a rejection, and the number of devices.
type KernelRejection = (String, usize);

/// The candidate of a kernel that nothing rejects on some number of devices.
struct AcceptedKernel<G> {
    candidate: Candidate<G>,
    /// Whether that is not what the correct one returns there.
    is_new: bool,
}

impl<P: Judgeable> PreparedCase<'_, P>
where
    Specimen: Implementation<P>,
{
    /// Whether each of `kernels` returns the bits of the correct one on each number of devices, or the gate that rejects it and the
    /// first number that it does on.
    fn judged(&self, kernels: &[&Specimen], devices: &[usize], limits: &Limits) -> Vec<Result<bool, KernelRejection>> {
        let mut all: Vec<Result<bool, KernelRejection>> = kernels.iter().map(|_| Ok(true)).collect();
        for (i, &devices) in devices.iter().enumerate() {
            let left: Vec<_> = all.iter_mut().zip(kernels).filter(|(judged, _)| judged.is_ok()).collect();
            let kernels: Vec<&Specimen> = left.iter().map(|(_, kernel)| **kernel).collect();
            for ((judged, _), on_devices) in left.into_iter().zip(self.judged_on(&kernels, devices, i == 0, limits)) {
                match on_devices {
                    Ok(AcceptedKernel { is_new, .. }) => *judged = judged.clone().map(|so_far| so_far && !is_new),
                    Err(gate) => *judged = Err((gate, devices)),
                }
            }
        }
        all
    }

    /// Judges a kernel on one number of devices, with a second run for its bits on the first of them.
    fn judged_on(
        &self,
        kernels: &[&Specimen],
        devices: usize,
        runs_again: bool,
        limits: &Limits,
    ) -> Vec<Result<AcceptedKernel<P::Gradient>, String>> {
        let MutantCase { spec, problem, .. } = self.case;
        // The judge has seen the bits of the correct kernel.
        let correct = self.correct.iter().find(|(of, _)| *of == devices).map(|(_, correct)| correct);
        let run = |kernel: &Specimen| kernel.run(spec, problem.clone(), devices).map_err(|error| error.to_string());
        let is_new = |candidate: &Candidate<P::Gradient>| {
            correct.is_none_or(|correct| !Invariance::between(correct, candidate).other.is_empty())
        };
        let first = |kernel: &&Specimen| run(kernel).map(|candidate| (is_new(&candidate), candidate));
        let runs: Vec<Result<(bool, _), String>> = kernels.par_iter().map(first).collect();
        let new = runs.iter().flatten().filter(|(is_new, _)| *is_new).map(|(_, candidate)| candidate.lend());
        let verdicts =
            self.known.verdicts_of_all(&new.collect::<Vec<_>>(), limits).expect("as many values as asked for");
        let mut verdicts = verdicts.into_iter();
        let mut judged = Vec::new();
        for run in runs {
            judged.push(run.and_then(|(is_new, candidate)| {
                let of_new = if is_new { verdicts.next().expect("of each that is new") } else { Vec::new() };
                match of_new.iter().find(|verdict| !verdict.passed()) {
                    Some(failed) => Err(format!("{} {}", failed.gate, failed.dtype)),
                    None => Ok(AcceptedKernel { candidate, is_new }),
                }
            }));
        }
        // Sums in any order give other bits in a second run, which no verdict on a single run can show.
        let again = |(kernel, judged): (&&Specimen, Result<AcceptedKernel<P::Gradient>, String>)| {
            let accepted = judged?;
            if !runs_again {
                return Ok(accepted);
            }
            let other = Invariance::between(&accepted.candidate, &run(kernel)?).other;
            if other.is_empty() { Ok(accepted) } else { Err(format!("bits of a second run: {}", other.join(", "))) }
        };
        kernels.par_iter().zip(judged).map(again).collect()
    }
}
