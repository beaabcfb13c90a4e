//! The panel: a campaign of several kernels that are not ours, on problems in every regime and dtype.
//!
//! What they need says whether the limits hold for anybody's kernel: honest ones never fail, wrong ones do.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use assay_core::problem::{Candidate, Dtype, Problem};
use assay_core::spec::{
    Cispo, Kl, KlEstimator, KlImportance, LossSpec, Objective, PpoClip, RatioLevel, Reduction, Rows, Sapo,
};
use assay_judge::generate::{Recipe, RecipeError, Regime};
use assay_judge::judge::Verdict;
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_schema::invariance::RelationFinding;

use crate::campaign::CampaignError;
use crate::examine::{Examiner, NoVerdicts};
use crate::invariance::{AskedInvariance, NotCompared, note_comparison};
use crate::kernel::{Fault, KernelUnderTest};

/// Few shapes, as frameworks compile a program for each: around tiles, primes, few tokens and many.
const SHAPES: [[usize; 3]; 5] = [[2, 8, 257], [1, 4, 4099], [4, 16, 32], [3, 4, 1031], [1, 8, 2048]];

/// One problem over Qwen's vocabulary of 151,936 entries.
const WIDE: [usize; 3] = [1, 3, 151_936];

/// The small shape of problems whose answers are recorded.
const SAMPLE: [usize; 3] = [1, 4, 131];

/// Relations are asked of one in so many narrow problems: no divisor of the number of shapes, losses or regimes.
const RELATED: u64 = 7;

/// Failures that are kept of each gate; all are counted.
const KEPT: u64 = 2;

/// The choice of the problems that a panel tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanelDeck {
    /// Problems with vocabularies of up to 4,099 entries.
    Narrow,
    /// Problems with a vocabulary of 151,936 entries.
    Wide,
    /// The problems that fixtures record: one for each regime, with a dtype and a loss that change from one to the
    /// next.
    Sample,
}

impl PanelDeck {
    /// Returns the command's option that selects this deck.
    fn option(self) -> &'static str {
        match self {
            PanelDeck::Narrow => "case",
            PanelDeck::Wide => "wide-case",
            PanelDeck::Sample => "sample",
        }
    }

    /// The number of problems that contain each regime once.
    pub const REGIMES: u64 = Regime::FINITE.len() as u64;

    /// The problem of this number, the same always: any 264 in a row have every regime with every dtype and every loss.
    pub fn case(self, index: u64) -> PanelCase {
        // Shape, loss, regime and dtype are counted off by the number, so that combinations are met in turns and not by
        // luck; only the numbers of the loss and the noise are drawn.
        let pick = |n: usize| (index % n as u64) as usize;
        let regimes = Regime::FINITE.len();
        let shape = match self {
            PanelDeck::Narrow => SHAPES[pick(SHAPES.len())],
            PanelDeck::Wide => WIDE,
            PanelDeck::Sample => SAMPLE,
        };
        // A stream for each deck keeps the draws of its cases independent of the other decks.
        let mut rng = ChaCha8Rng::seed_from_u64(index);
        rng.set_stream(self as u64);
        let spec = spec(pick(LOSSES), &mut rng);
        let recipe = Recipe {
            shape,
            // The dtype advances with the regime, and begins one further after each turn of the regimes, so that a
            // regime meets every dtype.
            dtype: Dtype::KERNEL[(pick(regimes) + pick(regimes * Dtype::KERNEL.len()) / regimes) % Dtype::KERNEL.len()],
            regime: Regime::FINITE[pick(regimes)],
            seed: index,
            old_logp_noise_scale: [0.0, 0.1, 0.3, 1.0][rng.random_range(0..4)],
            masked_garbage: false,
        };
        PanelCase { deck: self, index, spec, recipe }
    }
}

/// Losses that differ in more than numbers.
const LOSSES: usize = 8;

/// One of TRL's losses, with numbers as they are set in practice and around.
fn spec(loss: usize, rng: &mut ChaCha8Rng) -> LossSpec {
    let clip = |rng: &mut ChaCha8Rng| {
        let (epsilon_low, epsilon_high) = (rng.random_range(0.05..0.4), rng.random_range(0.05..0.5));
        Objective::PpoClip(PpoClip { epsilon_low, epsilon_high, ..PpoClip::default() })
    };
    let cispo = |rng: &mut ChaCha8Rng| Objective::Cispo(Cispo { lower: None, upper: rng.random_range(1.0..5.0) });
    let sapo = |rng: &mut ChaCha8Rng| {
        Objective::Sapo(Sapo { tau_positive: rng.random_range(0.5..1.5), tau_negative: rng.random_range(0.5..1.5) })
    };
    // Vary what changes the structure of a kernel first, and then draw its numbers.
    let row_means = Reduction::SequenceMean { rows: Rows::All };
    let (objective, level, kl, reduction) = match loss {
        0 => (clip(rng), RatioLevel::Token, None, Reduction::TokenMean),
        1 => (clip(rng), RatioLevel::Token, Some(KlImportance::One), Reduction::TokenMean),
        2 => (clip(rng), RatioLevel::Token, Some(KlImportance::Ratio), row_means),
        3 => (clip(rng), RatioLevel::Sequence, None, row_means),
        4 => (cispo(rng), RatioLevel::Token, None, Reduction::TokenMean),
        5 => (cispo(rng), RatioLevel::Token, Some(KlImportance::Ratio), Reduction::TokenMean),
        6 => (sapo(rng), RatioLevel::Token, None, row_means),
        _ => (sapo(rng), RatioLevel::Sequence, Some(KlImportance::One), Reduction::TokenMean),
    };
    let mut spec = LossSpec { objective, reduction, ..LossSpec::default() };
    spec.ratio.level = level;
    spec.kl = kl
        .map(|importance| Kl { importance, ..Kl::plain([0.001, 0.04, 0.1][rng.random_range(0..3)], KlEstimator::K3) });
    // Half of the losses have the neutral setting, under which a kernel may take a shorter path.
    spec.temperature = if rng.random_bool(0.5) { 1.0 } else { rng.random_range(0.5..1.5) }.into();
    spec.entropy_coef = if rng.random_bool(0.5) { 0.0 } else { rng.random_range(0.001..0.1) };
    spec
}

/// One problem that every kernel is given.
#[derive(Clone, Debug)]
pub struct PanelCase {
    deck: PanelDeck,
    index: u64,
    /// The loss that every kernel is asked for.
    pub spec: LossSpec,
    /// The recipe of the batch.
    pub recipe: Recipe,
}

impl PanelCase {
    /// The options that choose it again.
    fn options(&self) -> String {
        format!("--{} {}", self.deck.option(), self.index)
    }
}

/// The counts of one dtype, regime and gate.
#[derive(Clone, Debug, Serialize)]
pub struct PanelCell {
    /// The dtype of the logits.
    pub dtype: Dtype,
    /// The way in which the logits were drawn.
    pub regime: Regime,
    /// The name of the output and the comparison.
    pub gate: String,
    /// The number of candidates that were judged.
    pub judged: u64,
    /// Candidates that failed this gate.
    pub failed: u64,
    /// Candidates that reach grade `standard` and not `exact`.
    pub standard: u64,
    /// Candidates with a NaN or ∞ where the exact value is finite, or the reverse.
    pub nonfinite: u64,
    /// The largest κ that any candidate needs.
    pub kappa: f64,
    /// The largest error over its limit, of finite values.
    pub share: f64,
}

/// One candidate that failed a gate.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The gate, or that there was no answer.
    pub gate: String,
    /// The command that shows the failure again.
    pub replay: String,
    /// The loss that the kernel was asked for.
    pub spec: LossSpec,
    /// The recipe of the batch.
    pub recipe: Recipe,
    /// The verdict's explanation as text.
    pub words: String,
}

/// The outcome that a panel's configuration expects of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpectedOutcome {
    /// The kernel passes every problem.
    Right,
    /// The kernel fails at least one problem.
    Wrong,
    /// A failure where the vocabulary is large.
    WrongIfWide,
}

/// The outcome of one kernel of the panel.
#[derive(Clone, Debug, Serialize)]
pub struct KernelOutcome {
    /// The kernel's name in the panel.
    pub kernel: String,
    /// The kernel's description of itself, such as a framework's version.
    pub about: Option<String>,
    /// Candidates that the kernel returned.
    pub judged: u64,
    /// The number of problems that the kernel does not compute, by its own reason.
    pub unsupported: BTreeMap<String, u64>,
    /// Candidates that failed a gate, or cannot be judged.
    pub failed: u64,
    /// Problems without an answer: the kernel failed, broke the protocol or took too long.
    pub unanswered: u64,
    /// Seconds from question to answer, all together.
    pub answer_s: f64,
    /// The counts by dtype, regime and gate.
    pub cells: Vec<PanelCell>,
    /// The first of each gate.
    pub failures: Vec<Failure>,
    /// The findings of each relation that was asked.
    pub invariance: Vec<RelationFinding>,
}

impl KernelOutcome {
    /// Whether that is as expected, of problems of a large vocabulary too if `has_wide`. A kernel that does not answer shows nothing.
    pub fn is_as(&self, expected: Option<ExpectedOutcome>, has_wide: bool) -> bool {
        let failed = self.failed > 0;
        self.judged > 0
            && self.unanswered == 0
            && match expected {
                None => true,
                Some(ExpectedOutcome::Right) => !failed,
                Some(ExpectedOutcome::Wrong) => failed,
                Some(ExpectedOutcome::WrongIfWide) => failed || !has_wide,
            }
    }

    /// The largest κ that a gate needed; `None` where it was never judged.
    pub fn kappa(&self, gate: &str) -> Option<f64> {
        let cells = self.cells.iter().filter(|cell| cell.gate == gate);
        cells.map(|cell| if cell.nonfinite > 0 { f64::INFINITY } else { cell.kappa }).reduce(f64::max)
    }

    fn add(&mut self, case: &PanelCase, verdict: &Verdict) {
        let (Recipe { dtype, regime, .. }, gate) = (&case.recipe, verdict.gate.to_string());
        let same = |cell: &PanelCell| (cell.dtype, cell.regime, &cell.gate) == (*dtype, *regime, &gate);
        // Find the cell of this dtype, regime and gate, or begin it.
        let at = self.cells.iter().position(same).unwrap_or_else(|| {
            let (judged, failed, standard, nonfinite, kappa, share) = (0, 0, 0, 0, 0.0, 0.0);
            self.cells.push(PanelCell {
                dtype: *dtype,
                regime: *regime,
                gate,
                judged,
                failed,
                standard,
                nonfinite,
                kappa,
                share,
            });
            self.cells.len() - 1
        });
        let cell = &mut self.cells[at];
        cell.judged += 1;
        cell.failed += u64::from(verdict.status.failed());
        cell.standard += u64::from(verdict.grade == Some(Grade::Standard));
        cell.nonfinite += u64::from(verdict.tally.nonfinite.or(verdict.tally.silent).is_some());
        cell.kappa = cell.kappa.max(verdict.tally.kappa_seen);
        cell.share = cell.share.max(verdict.tally.worst.map_or(0.0, |worst| worst.error_over_limit()));
    }

    fn fail(&mut self, case: &PanelCase, gate: &str, replay: String, words: String) {
        if self.failures.iter().filter(|failure| failure.gate == gate).count() as u64 >= KEPT {
            return;
        }
        let (spec, recipe) = (case.spec.clone(), case.recipe.clone());
        self.failures.push(Failure { gate: gate.into(), replay, spec, recipe, words });
    }
}

/// A kernel of the panel, and its outcome so far.
pub struct Panelist<K> {
    kernel: K,
    command: String,
    /// The outcome on the problems that were given so far.
    pub found: KernelOutcome,
}

impl<K: KernelUnderTest> Panelist<K> {
    /// Returns a kernel that no problem was given to. `about` describes it; `command` runs it again, but for the options that
    /// choose a problem.
    pub fn new(name: &str, about: Option<String>, command: String, kernel: K) -> Self {
        let found = KernelOutcome {
            kernel: name.into(),
            about,
            judged: 0,
            unsupported: BTreeMap::new(),
            failed: 0,
            unanswered: 0,
            answer_s: 0.0,
            cells: Vec::new(),
            failures: Vec::new(),
            invariance: Vec::new(),
        };
        Self { kernel, command, found }
    }

    /// Asks the kernel for a candidate, and judges nothing.
    ///
    /// # Errors
    /// [`Fault`] if it does not compute the problem or fails.
    pub fn answer(&mut self, case: &PanelCase, problem: &Arc<Problem>) -> Result<Candidate, Fault> {
        examiner(&mut self.kernel, case).candidate(problem)
    }

    fn meet(&mut self, case: &PanelCase, problem: &Arc<Problem>, known: &JudgedProblem) {
        let replay = format!("{} {}", self.command, case.options());
        let mut examiner = examiner(&mut self.kernel, case);
        let verdicts = examiner.verdicts(problem, known, |_| ());
        let found = &mut self.found;
        found.answer_s += examiner.answering.as_secs_f64();
        match verdicts {
            Err(NoVerdicts::NoAnswer(Fault::Unsupported(what))) => {
                *found.unsupported.entry(what.to_string()).or_default() += 1;
            }
            Err(NoVerdicts::NoAnswer(fault)) => {
                found.unanswered += 1;
                found.fail(case, "no answer", replay, fault.to_string());
            }
            Err(NoVerdicts::NotJudged(error)) => {
                found.judged += 1;
                found.failed += 1;
                found.fail(case, "not judged", replay, error.to_string());
            }
            Ok(verdicts) => {
                // Count every verdict in its cell, and keep the words of the first failures of each gate.
                found.judged += 1;
                found.failed += u64::from(verdicts.iter().any(|verdict| !verdict.passed()));
                for verdict in &verdicts {
                    found.add(case, verdict);
                    if !verdict.passed() {
                        let words = known.explain(verdict, &found.kernel, &replay).to_string();
                        found.fail(case, &verdict.gate.to_string(), replay.clone(), words);
                    }
                }
            }
        }
    }
}

impl<K: KernelUnderTest> Panelist<K> {
    /// Asks whether each token has the same numbers in another call, by every relation that the loss and the problem have.
    fn ask_relations(&mut self, case: &PanelCase, problem: &Arc<Problem>) {
        let mut examiner = examiner(&mut self.kernel, case);
        let all = &mut self.found.invariance;
        // The findings count other bits and the largest difference, whatever is asked; a difference beyond its limit fails.
        for demand in AskedInvariance::usual(&case.spec, false, true).in_limits().demands {
            let place = all.iter().position(|known| known.relation == demand.relation).unwrap_or_else(|| {
                all.push(RelationFinding::new(demand.relation, demand.grade));
                all.len() - 1
            });
            let finding = &mut all[place];
            match examiner.compare_calls(demand, (problem, finding.problems), None, false) {
                Ok(compared) if compared.differences.tokens > 0 => note_comparison(finding, compared),
                Err(NotCompared::NotAsked(why)) if finding.problems == 0 => {
                    finding.not_asked.get_or_insert(why);
                }
                // A kernel without an answer is counted where it is judged.
                _ => {}
            }
        }
    }
}

/// Examines `kernel` as every kernel that is not ours is, at grade `standard` and without a waiver.
fn examiner<'k>(kernel: &'k mut dyn KernelUnderTest, case: &'k PanelCase) -> Examiner<'k, Problem> {
    Examiner::new(kernel, &case.spec, Limits::external(Grade::Standard), &[])
}

/// Gives every kernel every case.
///
/// # Errors
/// [`CampaignError::Recipe`] if a case is invalid. A kernel that fails is a finding.
pub fn run<K: KernelUnderTest + Send>(
    kernels: &mut [Panelist<K>],
    cases: impl Iterator<Item = PanelCase>,
    mut done: impl FnMut(),
) -> Result<(), CampaignError> {
    for case in cases {
        let problem = case.recipe.problem(&case.spec)?;
        if case.deck == PanelDeck::Narrow && case.index % RELATED == 0 {
            let problem = Arc::new(problem.clone());
            kernels.par_iter_mut().for_each(|kernel| kernel.ask_relations(&case, &problem));
        }
        meet(kernels, &case, problem)?;
        done();
    }
    Ok(())
}

/// Gives every kernel one `problem`, that of `case`. The reference is evaluated once for all of them, and they answer in
/// parallel, each in its process.
///
/// # Errors
/// [`CampaignError::Recipe`] if the problem does not fit the loss.
pub fn meet<K: KernelUnderTest + Send>(
    kernels: &mut [Panelist<K>],
    case: &PanelCase,
    problem: Problem,
) -> Result<(), CampaignError> {
    let problem = Arc::new(problem);
    let known = JudgedProblem::new(&case.spec, &*problem).map_err(RecipeError::Problem)?;
    kernels.par_iter_mut().for_each(|kernel| kernel.meet(case, &problem, &known));
    Ok(())
}
